//! What a C compiler makes of `tests/abi/dcmi.h`, our own header of the vendor's interface.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory with `dcmi.h` and the C programs.
#[must_use]
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../abi")
}

/// Compiles a C program of that directory to `target`.
///
/// # Panics
/// Without a C compiler, or if the program does not compile: the proof must not be skipped in silence.
pub fn compile(program: &str, target: &Path) {
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(target)
        .arg(directory().join(program))
        .arg("-ldl")
        .output()
        .unwrap_or_else(|error| {
            panic!("the layout proof needs a C compiler, {} cannot be started: {error}", compiler.display())
        });
    assert!(output.status.success(), "{program} does not compile:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Every size, alignment, offset and constant as C sees it, as `(name, value)`.
///
/// # Panics
/// Without a C compiler, or if the program does not compile, run or print what it should.
#[must_use]
pub fn c_layout() -> Vec<(String, i64)> {
    let dir = scratch();
    let program = dir.join("print");
    compile("print.c", &program);
    let output = Command::new(&program).output();
    let removed = std::fs::remove_dir_all(&dir);
    let output = output.unwrap_or_else(|error| panic!("the compiled print.c cannot be started: {error}"));
    assert!(output.status.success() && removed.is_ok(), "print.c failed: {output:?} {removed:?}");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| {
            line.split_once(' ')
                .and_then(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
                .unwrap_or_else(|| panic!("print.c printed a line that is no name and value: {line:?}"))
        })
        .collect()
}

/// A new directory below the system's temporary one.
fn scratch() -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("dcmi-abi-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap_or_else(|error| panic!("cannot make {}: {error}", dir.display()));
    dir
}
