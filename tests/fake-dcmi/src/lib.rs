//! A stand-in for the vendor's `libdcmi.so`, for tests and for people without hardware.
//!
//! Loaded as a C library it simulates the NPUs of the node that the variable `FAKE_DCMI_WORLD` names: a directory
//! ([`world`]) which outlives every process, as hardware does. As a Rust library it makes such worlds and changes them
//! while a daemon uses them, plants faults, and tells which calls were made.
//!
//! It was written from a description of the vendor's interface and shares no declaration with the driver: a mistake in
//! one is not repeated in the other. [`layout`] and [`abi::c_layout`] compare both with what a C compiler makes of
//! `tests/abi/dcmi.h`.
#![allow(unsafe_code, reason = "a C library takes raw pointers from its callers")]

use std::path::{Path, PathBuf};

pub mod abi;
mod boot_list;
pub mod calls;
pub mod code;
mod data;
mod disk;
mod events;
mod fault;
mod profile;
pub mod raw;
mod session;
mod slicing;
pub mod template;
pub mod testing;
pub mod world;

pub use events::Callback;
pub use profile::NEWER_SYMBOLS;
pub use raw::layout;
pub use session::Out;

/// The built `libdcmi.so`.
///
/// Cargo builds it for every test of a package that depends on this one, into the `deps` directory beside the test's
/// own executable (`target/<profile>/deps`), and for a build of this package also into `target/<profile>`. Both are
/// searched, starting from the running executable, which may be a test, a benchmark or a program of the workspace.
///
/// # Panics
/// If there is none: the message names the places and the command that builds it.
#[must_use]
pub fn library_path() -> PathBuf {
    let executable = std::env::current_exe().unwrap_or_default();
    let mut tried = Vec::new();
    for dir in executable.ancestors().skip(1).take(3) {
        for place in [dir.join("deps"), dir.to_owned()] {
            let path = place.join("libdcmi.so");
            if path.is_file() {
                return path;
            }
            tried.push(place);
        }
    }
    let tried: Vec<String> = tried.iter().map(|place| Path::display(place).to_string()).collect();
    panic!("no libdcmi.so in {}; build it with: cargo build -p fake-dcmi", tried.join(", "))
}
