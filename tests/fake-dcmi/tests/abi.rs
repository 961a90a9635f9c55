//! The layouts of the simulated library against a C compiler, and its calls made by a C program.
#![allow(missing_docs, clippy::print_stderr)]

use std::collections::BTreeMap;

#[test]
fn every_size_offset_and_constant_is_what_c_makes_of_the_header() {
    let c: BTreeMap<String, i64> = dcmi::abi::c_layout().into_iter().collect();
    let ours: BTreeMap<String, i64> = dcmi::layout().into_iter().collect();
    assert!(c.len() > 300, "print.c printed only {} lines", c.len());
    let differences: Vec<String> = c
        .keys()
        .chain(ours.keys())
        .filter(|name| c.get(*name) != ours.get(*name))
        .map(|name| format!("{name}: C {:?}, Rust {:?}", c.get(name), ours.get(name)))
        .collect();
    assert!(differences.is_empty(), "{differences:#?}");
}
