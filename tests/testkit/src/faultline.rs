//! Cuts a process at its n-th durable step: builds and sets up `tests/crash/faultline.c`.

use std::{
    collections::hash_map::DefaultHasher,
    ffi::OsString,
    fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};

const SOURCE: &str = include_str!("../../crash/faultline.c");

/// What happens at the chosen call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL instead of the call.
    KillBefore,
    /// SIGKILL once the call has been made.
    KillAfter,
    /// The call is not made and fails with this `errno`.
    Fail(i32),
}

/// At which call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// At the n-th counted call, from 1.
    At(usize),
    /// At the n-th and every later one.
    From(usize),
}

/// A cut: where, and what then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Where.
    pub when: When,
    /// What then.
    pub action: Action,
}

/// One counted call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Its number, from 1, in its process.
    pub number: usize,
    /// `open`, `write`, `fsync`, `rename`, `unlink`, …
    pub name: String,
    /// Canonical path; of a rename the new one.
    pub path: PathBuf,
}

/// The preloaded library, and what it watches.
#[derive(Debug, Clone)]
pub struct Faultline {
    library: PathBuf,
    dirs: Vec<PathBuf>,
    log: Option<PathBuf>,
}

impl Faultline {
    /// Compiles the library into a directory (`CARGO_TARGET_TMPDIR` of a test), unless it is there, to watch files
    /// below `dirs`, which must exist.
    pub fn new<P: AsRef<Path>>(build_dir: &Path, dirs: impl IntoIterator<Item = P>) -> anyhow::Result<Self> {
        let library = compile(build_dir)?;
        let dirs = dirs.into_iter().map(|dir| {
            let dir = dir.as_ref();
            dir.canonicalize().with_context(|| format!("cannot watch {}", dir.display()))
        });
        Ok(Self { library, dirs: dirs.collect::<Result<_, _>>()?, log: None })
    }

    /// Writes every counted call into a file, to be read with [`Faultline::calls`]. The file must not lie below a
    /// watched directory.
    #[must_use]
    pub fn log(mut self, path: impl Into<PathBuf>) -> Self {
        self.log = Some(path.into());
        self
    }

    /// Sets a command up to be cut; without a cut its calls are only counted. Processes whose first argument is
    /// `dcmi-worker` are left alone.
    pub fn arm(&self, command: &mut Command, cut: Option<Cut>) {
        for (name, value) in self.environment(cut) {
            command.env(name, value);
        }
    }

    /// The variables that [`Faultline::arm`] sets, for other kinds of commands.
    pub fn environment(&self, cut: Option<Cut>) -> Vec<(&'static str, OsString)> {
        let mut dirs = OsString::new();
        for dir in &self.dirs {
            if !dirs.is_empty() {
                dirs.push(":");
            }
            dirs.push(dir);
        }
        let mut variables = vec![("LD_PRELOAD", self.library.clone().into()), ("FAULTLINE_DIRS", dirs)];
        if let Some(log) = &self.log {
            variables.push(("FAULTLINE_LOG", log.into()));
        }
        if let Some(cut) = cut {
            let (name, number) = match cut.when {
                When::At(number) => ("FAULTLINE_AT", number),
                When::From(number) => ("FAULTLINE_FROM", number),
            };
            let action = match cut.action {
                Action::KillBefore => "kill-before".to_owned(),
                Action::KillAfter => "kill-after".to_owned(),
                Action::Fail(errno) => format!("errno:{errno}"),
            };
            variables.push((name, number.to_string().into()));
            variables.push(("FAULTLINE_ACTION", action.into()));
        }
        variables
    }

    /// The calls that were logged since the last time.
    pub fn calls(&self) -> anyhow::Result<Vec<Call>> {
        let path = self.log.as_ref().context("no log was asked for")?;
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        fs::remove_file(path)?;
        text.lines().map(|line| parse(line).with_context(|| format!("log line {line:?}"))).collect()
    }
}

fn parse(line: &str) -> Option<Call> {
    let mut parts = line.splitn(3, ' ');
    let number = parts.next()?.parse().ok()?;
    Some(Call { number, name: parts.next()?.to_owned(), path: parts.next()?.into() })
}

/// The library's path; its name carries a hash of the source, so a changed one is compiled anew.
fn compile(dir: &Path) -> anyhow::Result<PathBuf> {
    let mut hash = DefaultHasher::new();
    SOURCE.hash(&mut hash);
    let library = dir.join(format!("libfaultline-{:016x}.so", hash.finish()));
    if library.exists() {
        return Ok(library);
    }
    fs::create_dir_all(dir)?;
    // Tests run side by side: each compiles for itself, and the last rename wins.
    let own = tempfile::Builder::new().prefix("faultline").tempdir_in(dir)?;
    let (source, built) = (own.path().join("faultline.c"), own.path().join("libfaultline.so"));
    fs::write(&source, SOURCE)?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&built, &source])
        .args(["-ldl", "-lpthread"])
        .output()
        .with_context(|| format!("cannot run the C compiler {}: install gcc or clang", compiler.display()))?;
    if !output.status.success() {
        bail!("{} failed: {}", compiler.display(), String::from_utf8_lossy(&output.stderr));
    }
    fs::rename(&built, &library)?;
    Ok(library)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// Next to this test's own program.
    fn build_dir() -> PathBuf {
        std::env::current_exe().unwrap().parent().unwrap().join("faultline")
    }

    /// Runs a shell in a watched directory; gives its status, what it wrote and its calls.
    fn run(script: &str, cut: Option<Cut>) -> (std::process::ExitStatus, String, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let watched = dir.path().join("in");
        fs::create_dir(&watched).unwrap();
        fs::create_dir(dir.path().join("in-between")).unwrap();
        let line = Faultline::new(&build_dir(), [&watched]).unwrap();
        let line = line.log(dir.path().join("log"));
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(&watched);
        line.arm(&mut command, cut);
        let output = command.output().unwrap();
        let calls = line.calls().unwrap();
        let root = watched.canonicalize().unwrap();
        let calls = calls
            .into_iter()
            .map(|call| format!("{} {} {}", call.number, call.name, call.path.strip_prefix(&root).unwrap().display()));
        let wrote = fs::read_to_string(watched.join("a")).unwrap_or_else(|_| "-".to_owned());
        (output.status, wrote, calls.collect())
    }

    #[test]
    fn calls_in_watched_directories_are_counted_and_no_others() {
        let (status, wrote, calls) = run("echo x > a; echo y > ../in-between/b; echo z > /dev/null; : > ./c", None);
        assert!(status.success());
        assert_eq!(wrote, "x\n");
        assert_eq!(calls, ["1 open a", "2 write a", "3 open c"]);
    }

    #[test]
    fn a_kill_comes_before_or_after_the_call() {
        let cut = |number, action| Some(Cut { when: When::At(number), action });
        let (status, wrote, calls) = run("echo x > a; echo y >> a", cut(2, Action::KillBefore));
        assert_eq!((status.signal(), wrote.as_str(), calls.len()), (Some(9), "", 2));
        let (status, wrote, calls) = run("echo x > a; echo y >> a", cut(2, Action::KillAfter));
        assert_eq!((status.signal(), wrote.as_str(), calls.len()), (Some(9), "x\n", 2));
    }

    #[test]
    fn an_error_comes_once_or_from_then_on() {
        let script = "echo x > a; echo y >> a; echo z >> a";
        let (_, wrote, calls) = run(script, Some(Cut { when: When::At(2), action: Action::Fail(28) }));
        assert_eq!((wrote.as_str(), calls.len()), ("y\nz\n", 6));
        let (_, wrote, _) = run(script, Some(Cut { when: When::From(4), action: Action::Fail(28) }));
        assert_eq!(wrote, "x\n");
    }

    #[test]
    fn a_worker_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let line = Faultline::new(&build_dir(), [dir.path()]).unwrap();
        let script = dir.path().join("dcmi-worker");
        fs::write(&script, "echo x > a\n").unwrap();
        let mut command = Command::new("sh");
        command.arg("dcmi-worker").current_dir(dir.path());
        line.arm(&mut command, Some(Cut { when: When::From(1), action: Action::KillBefore }));
        assert!(command.status().unwrap().success());
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "x\n");
    }
}
