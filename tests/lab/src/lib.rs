//! What the tiers that need root share: machines with a real systemd, and the account of their cases.
//!
//! * [`Root`]: the file system of a Debian machine as a tar in the user's cache directory.
//! * [`Machine`]: that root booted by systemd as process 1 of its own namespaces; nothing of the host changes, and
//!   nothing of the machine is left, however the program ends.
//! * [`cases`]: a catalogue says which cases there are; a listed case that did not run has failed.

#[allow(clippy::print_stdout, reason = "the account is what such a tier is run for")]
pub mod cases;
mod cgroups;
mod machine;
mod needs;
mod root;

use std::path::PathBuf;

use anyhow::Context as _;

pub use machine::{DeviceNode, Machine, Options};
pub use needs::{Missing, Need, require};
pub use root::Root;

/// Where everything of these tiers is kept: `$XDG_CACHE_HOME/npu-dra`, else `~/.cache/npu-dra`. It is made if absent.
///
/// # Errors
/// Neither variable is set, or the directory cannot be made.
pub fn cache_dir() -> anyhow::Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = variable("XDG_CACHE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME names a directory; set one of them")?;
    let dir = base.join("npu-dra");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}
