//! The API server's stand-in answers a corpus of requests as real servers did.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails the test")]

use std::path::PathBuf;

use testkit::corpus::{Setting, agree, comparable};

fn answers() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fixtures/corpus")
}

async fn holds(name: &str) {
    let setting = Setting::named(name).unwrap();
    let recorded = comparable(setting.recorded(&answers()).unwrap()).unwrap();
    assert!(recorded.len() > 450, "{} cases", recorded.len());
    let found = comparable(setting.ask_stand_in().await.unwrap()).unwrap();
    if let Err(differences) = agree("recorded", &recorded, "stand-in", &found) {
        panic!("{differences:#}");
    }
}

#[tokio::test]
async fn the_stand_in_answers_as_1_34_3_does() {
    holds("1.34.3").await;
}

#[tokio::test]
async fn the_stand_in_answers_as_1_34_3_with_gates_does() {
    holds("1.34.3-gated").await;
}

#[tokio::test]
async fn the_stand_in_answers_as_1_36_3_does() {
    holds("1.36.3").await;
}

#[tokio::test]
async fn the_stand_in_answers_as_1_37_2_does() {
    holds("1.37.2").await;
}

#[tokio::test]
async fn an_answer_that_is_not_the_recorded_one_is_found() {
    let one = Setting::named("1.34.3").unwrap().recorded(&answers()).unwrap();
    let other = Setting::named("1.36.3").unwrap().recorded(&answers()).unwrap();
    let text = agree("one", &one, "other", &other).unwrap_err().to_string();
    assert!(text.contains("counters: both in one slice") && text.contains("gates: everything at once"), "{text}");
    agree("one", &one, "the same", &one).unwrap();
}
