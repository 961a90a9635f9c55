//! Help for tests: a world for one thread, and a library with fewer symbols.

use std::fs;
use std::path::Path;

/// Runs `body` with this world for library calls of this thread, made in this process through the Rust library.
pub fn with_world<R>(dir: &Path, body: impl FnOnce() -> R) -> R {
    crate::session::with_world(dir, body)
}

/// Forgets what this process knows of a world (init, subscription), as if the process had been started anew.
pub fn restart(dir: &Path) {
    crate::session::forget(dir);
}

/// Why a library cannot be copied without some symbols.
#[derive(Debug, thiserror::Error)]
pub enum StripError {
    /// A file operation failed.
    #[error("cannot copy the library to {path}: {source}")]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not a 64-bit little-endian ELF library.
    #[error("the library is not a 64-bit little-endian ELF file with dynamic symbols")]
    Format,
    /// The library does not export the symbol.
    #[error("the library has no symbol {0}")]
    NoSymbol(String),
}

/// Copies a library and renames some of its exported symbols, so that looking them up fails as it does with an older
/// driver.
pub fn strip_symbols(source: &Path, target: &Path, names: &[&str]) -> Result<(), StripError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| StripError::Io { path, source }
    };
    let mut image = fs::read(source).map_err(io(source))?;
    for name in names {
        let place = symbol_name(&image, name)?.ok_or_else(|| StripError::NoSymbol((*name).to_owned()))?;
        let last = place + name.len() - 1;
        *image.get_mut(last).ok_or(StripError::Format)? = b'~';
    }
    fs::write(target, image).map_err(io(target))
}

fn number(image: &[u8], at: usize, bytes: usize) -> Option<usize> {
    let slice = image.get(at..at.checked_add(bytes)?)?;
    let value = slice.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
    usize::try_from(value).ok()
}

/// Where the name of an exported symbol stands in the file.
fn symbol_name(image: &[u8], name: &str) -> Result<Option<usize>, StripError> {
    const DYNSYM: usize = 11;
    if image.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        return Err(StripError::Format);
    }
    let field = |at, bytes| number(image, at, bytes).ok_or(StripError::Format);
    let (table, entry, count) = (field(0x28, 8)?, field(0x3a, 2)?, field(0x3c, 2)?);
    let header = |index: usize| table + index * entry;
    let symbols =
        (0..count).map(header).find(|at| number(image, at + 4, 4) == Some(DYNSYM)).ok_or(StripError::Format)?;
    let (start, size, strings) = (field(symbols + 0x18, 8)?, field(symbols + 0x20, 8)?, field(symbols + 0x28, 4)?);
    let text = field(header(strings) + 0x18, 8)?;
    for symbol in (start..start + size).step_by(24) {
        let at = text + field(symbol, 4)?;
        let found = image.get(at..at + name.len() + 1).ok_or(StripError::Format).ok();
        if found.is_some_and(|found| &found[..name.len()] == name.as_bytes() && found[name.len()] == 0) {
            return Ok(Some(at));
        }
    }
    Ok(None)
}
