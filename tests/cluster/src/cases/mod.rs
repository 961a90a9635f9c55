//! The cases, one file a subject.

mod answers;
mod booking;
mod figures;
mod first;
mod health;
mod lifecycle;
mod models;
mod scheduler;
mod select;
mod soak;
mod views;
mod whole;

use crate::stage::Stage;

/// A case: its name in the catalogue, and what it does.
pub(crate) type Case = (&'static str, fn(&Stage) -> anyhow::Result<()>);

/// All cases, in the order in which they run.
pub(crate) fn all() -> impl Iterator<Item = Case> {
    [
        first::CASES,
        answers::CASES,
        whole::CASES,
        models::CASES,
        scheduler::CASES,
        select::CASES,
        lifecycle::CASES,
        health::CASES,
        views::CASES,
        figures::CASES,
        soak::CASES,
    ]
    .into_iter()
    .flatten()
    .copied()
}
