//! What the machine itself needs for one durable replace of a file. It shares nothing with the product.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

use crate::samples::Samples;

/// Bytes of one file.
const SIZE: usize = 800;
/// Writers at a time.
pub(crate) const WRITERS: u32 = 64;

/// Type of the file system of a directory, as `/proc/self/mountinfo` names it.
///
/// # Errors
/// It keeps nothing: a tmpfs or ramfs.
pub(crate) fn file_system(dir: &Path) -> anyhow::Result<String> {
    let dir = dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    // The last of the longest is what is seen: later mounts cover earlier ones.
    let covering = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        dir.starts_with(point).then(|| (point.len(), kind.split(' ').next().unwrap_or_default().to_owned()))
    });
    let kind = covering.max_by_key(|(length, _)| *length).map_or_else(|| "unknown".to_owned(), |(_, kind)| kind);
    let memory = statfs(&dir).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC);
    if memory || kind == "tmpfs" || kind == "ramfs" {
        bail!("{} is a {kind}, where nothing is durable: let BENCH_DIR name a directory on a disk", dir.display());
    }
    Ok(kind)
}

/// One durable replace: temporary file, fsync, rename, fsync of the directory.
fn replace(dir: &Path, name: &str) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.tmp"));
    let mut file = File::create(&temporary)?;
    file.write_all(&[b'x'; SIZE])?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(name))?;
    File::open(dir)?.sync_all()
}

/// Times of `count` replaces, one after the other, of ever new files.
pub(crate) fn one_writer(dir: &Path, count: u32) -> io::Result<Samples> {
    fs::create_dir_all(dir)?;
    let mut samples = Samples::default();
    for index in 0..count {
        let start = Instant::now();
        replace(dir, &format!("one-{index}"))?;
        samples.push(start.elapsed());
    }
    clear(dir)?;
    Ok(samples)
}

/// How long [`WRITERS`] writers need for `each` replaces of each.
pub(crate) fn many_writers(dir: &Path, each: u32) -> io::Result<Duration> {
    fs::create_dir_all(dir)?;
    let start = Instant::now();
    thread::scope(|scope| {
        let writer = |number: u32| move || (0..each).try_for_each(|i| replace(dir, &format!("many-{number}-{i}")));
        let writers: Vec<_> = (0..WRITERS).map(|number| scope.spawn(writer(number))).collect();
        writers.into_iter().try_for_each(|writer| writer.join().map_err(|_| io::Error::other("a writer panicked"))?)
    })?;
    let time = start.elapsed();
    clear(dir)?;
    Ok(time)
}

/// Removes what was written, as claims go again.
fn clear(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        fs::remove_file(entry?.path())?;
    }
    Ok(())
}
