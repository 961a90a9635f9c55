//! A machine with a real systemd as process 1 of its own namespaces.
//!
//! ```text
//! this program ──pipe──▶ guard.sh (session of its own) ──▶ unshare ──▶ inside.sh, which becomes systemd
//! ```
//!
//! The guard alone cleans up, always in the same way: when the pipe ends, be it by [`Drop`], a panic, Ctrl-C or
//! SIGKILL, it ends the machine and removes its control groups and its directory below the cache.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::cgroups::Layout;

/// How long a boot may take; reached only by a failure.
const BOOT: Duration = Duration::from_secs(90);

/// Units that make no sense in a machine without hardware, or would touch what is the host's.
const MASKED: [&str; 11] = [
    "console-getty.service",
    "dev-hugepages.mount",
    "getty@.service",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-modules-load.service",
    "systemd-networkd.service",
    "systemd-sysctl.service",
    "systemd-udevd.service",
];

/// The guards of all machines that are up: what a signal handler must wait for.
static GUARDS: Mutex<Vec<Guard>> = Mutex::new(Vec::new());

/// What a machine is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its host name; also the beginning of its directory's name. Letters, digits and `-`.
    pub name: String,
    /// The tar of its root, from [`Root::ready`](crate::Root::ready).
    pub tar: PathBuf,
    /// The address of `eth0`, without a prefix length (it is 24): private to this machine, so two machines may have
    /// the same.
    pub address: String,
    /// Character devices beside the usual ones, made before systemd starts.
    pub nodes: Vec<DeviceNode>,
    /// Files and directories of the host that the machine sees: source, target. Read-only.
    pub binds: Vec<(PathBuf, String)>,
    /// A script for the machine's own shell, run as root in its namespaces, with its own `/`, before systemd starts.
    pub before: String,
}

impl Options {
    /// A plain machine, with the address 10.99.0.1.
    #[must_use]
    pub fn new(name: &str, tar: &Path) -> Self {
        Self {
            name: name.to_owned(),
            tar: tar.to_owned(),
            address: "10.99.0.1".to_owned(),
            nodes: Vec::new(),
            binds: Vec::new(),
            before: String::new(),
        }
    }
}

/// A character device in a machine's `/dev`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Its path below `/dev`.
    pub path: String,
    /// Its numbers. Those of a driver that the kernel has need not do anything: tun (10, 200) and fuse (10, 229) are
    /// harmless and told apart by the device control group, which 1:3, 1:5 and 1:7 are not.
    pub numbers: (u32, u32),
    /// Its permissions, for instance `0o660`.
    pub mode: u32,
    /// The number of its group.
    pub gid: u32,
}

/// A machine that is up. Dropped, it is gone: processes, mounts, control groups, network and files.
#[derive(Debug)]
pub struct Machine {
    name: String,
    dir: PathBuf,
    leader: u32,
    guard: u32,
}

/// The process that cleans up after one machine.
#[derive(Debug)]
struct Guard {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Lets go of the pipe and waits until all is clean.
    fn end(&mut self) {
        self.pipe = None;
        let _ = self.child.wait();
    }
}

impl Machine {
    /// Unpacks the root, lets `prepare` put files into it (its argument is the root's path on the host), and boots it.
    ///
    /// `/run`, `/tmp` and `/dev` are made at boot and empty: use [`Options::before`], [`Options::nodes`] or
    /// [`Machine::inside`] for what belongs there.
    ///
    /// # Errors
    /// It does not come up: the text has what its console said and which units failed.
    pub fn boot(options: &Options, prepare: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<Self> {
        watch_signals();
        let machines = crate::cache_dir()?.join("machines");
        fs::create_dir_all(&machines).with_context(|| format!("cannot make {}", machines.display()))?;
        sweep(&machines);
        let dir = Self::make_dir(&machines, &options.name)?;
        let layout = Layout::of_host()?;
        let written = write_dir(&dir, options, &layout);
        let groups = match written.and_then(|()| layout.make(&unique_name(&dir))) {
            Ok(groups) => groups,
            Err(error) => {
                let _ = fs::remove_dir_all(&dir);
                return Err(error);
            }
        };
        let list: Vec<_> = groups.iter().map(|group| group.display().to_string()).collect();
        fs::write(dir.join("groups"), list.join("\n") + "\n")?;
        let mut machine = Self { name: options.name.clone(), leader: 0, guard: start_guard(&dir, &options.tar)?, dir };
        machine.wait_for_root()?;
        prepare(&machine.root()).with_context(|| format!("the files of {} cannot be prepared", options.name))?;
        machine.word("start")?;
        machine.wait_for_boot()?;
        Ok(machine)
    }

    fn make_dir(machines: &Path, name: &str) -> anyhow::Result<PathBuf> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        ensure!(
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'),
            "{name:?} is no name of a machine: use letters, digits and -"
        );
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = machines.join(format!("{name}.{}.{number}", std::process::id()));
        fs::create_dir_all(dir.join("root")).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    fn wait_for_root(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + BOOT;
        while !self.dir.join("unpacked").exists() {
            if self.dir.join("ended").exists() || Instant::now() > deadline {
                return Err(self.late("its root could not be unpacked"));
            }
            thread::sleep(Duration::from_millis(20)); // waits: for the guard to unpack the root
        }
        let root = self.root();
        // systemd makes an id of its own; a console that nobody reads needs no login; modules are the host's.
        fs::write(root.join("etc/machine-id"), "")?;
        fs::write(root.join("etc/hostname"), format!("{}\n", self.name))?;
        fs::write(root.join("etc/hosts"), format!("127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {}\n", self.name))?;
        fs::write(root.join("etc/resolv.conf"), "")?;
        for unit in MASKED {
            let link = root.join("etc/systemd/system").join(unit);
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink("/dev/null", link)?;
        }
        // The kernel's log is the host's.
        let journal = root.join("etc/systemd/journald.conf.d");
        fs::create_dir_all(&journal)?;
        fs::write(journal.join("lab.conf"), "[Journal]\nReadKMsg=no\nStorage=volatile\n")?;
        Ok(())
    }

    fn wait_for_boot(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + BOOT;
        let leader = loop {
            if let Ok(text) = fs::read_to_string(self.dir.join("leader")) {
                break text.trim().parse().context("the leader's pid cannot be read")?;
            }
            if self.dir.join("ended").exists() || Instant::now() > deadline {
                return Err(self.late("the namespaces could not be set up"));
            }
            thread::sleep(Duration::from_millis(10)); // waits: for the leader's pid
        };
        self.leader = leader;
        loop {
            let output = self.command("systemctl").arg("is-system-running").output()?;
            let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            match state.as_str() {
                "running" => return Ok(()),
                "degraded" => {
                    let failed =
                        self.sh("systemctl --failed --no-legend --plain; journalctl -b -p warning --no-pager")?;
                    bail!("{}: units failed at boot:\n{failed}", self.name);
                }
                _ if self.dir.join("ended").exists() => return Err(self.late("its systemd ended")),
                _ if Instant::now() > deadline => return Err(self.late(&format!("it is still {state:?}"))),
                _ => thread::sleep(Duration::from_millis(50)), // waits: for the end of the boot
            }
        }
    }

    fn late(&self, what: &str) -> anyhow::Error {
        anyhow::anyhow!("{}: {what}; its console said:\n{}", self.name, self.console())
    }

    /// What systemd and the scripts before it printed.
    #[must_use]
    pub fn console(&self) -> String {
        fs::read(self.dir.join("console")).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
    }

    /// Its host name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of its root on the host's disk. `/run`, `/tmp`, `/dev` and binds do not show there: see
    /// [`Machine::inside`].
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// The host's path for an absolute path of the machine, as the machine sees it (mounts included). A symbolic link
    /// in it is followed by the kernel from the machine's root only if the last part is no link: read files with it,
    /// no more.
    #[must_use]
    pub fn inside(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.leader))
    }

    /// The pid of its systemd on the host.
    #[must_use]
    pub fn leader(&self) -> u32 {
        self.leader
    }

    /// A command that runs in all its namespaces, as root, with a clean environment and nothing on its standard input.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.leader));
        command.args(["--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--root", "--wd", "--"]);
        command.arg(program).env_clear().envs([
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", "/root"),
            ("LANG", "C.UTF-8"),
            ("SYSTEMD_PAGER", ""),
        ]);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a program and returns its standard output.
    ///
    /// # Errors
    /// It cannot be run or fails: the text has its standard error.
    pub fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        let (program, arguments) = words.split_first().context("no program")?;
        checked(self.command(program).args(arguments)).with_context(|| format!("{} in {}", words.join(" "), self.name))
    }

    /// Runs a script by the machine's `/bin/sh -eu` and returns its standard output.
    ///
    /// # Errors
    /// It fails: the text has its standard error.
    pub fn sh(&self, script: &str) -> anyhow::Result<String> {
        self.run(&["/bin/sh", "-euc", script])
    }

    /// Runs a script by the machine's `/bin/sh` and returns all that came of it.
    ///
    /// # Errors
    /// It cannot be run at all.
    pub fn try_sh(&self, script: &str) -> anyhow::Result<Output> {
        self.command("/bin/sh").args(["-uc", script]).output().context("cannot run nsenter")
    }

    /// Makes a character device in its `/dev` now.
    ///
    /// # Errors
    /// It exists, or `mknod` fails.
    pub fn make_node(&self, node: &DeviceNode) -> anyhow::Result<()> {
        let DeviceNode { path, numbers: (major, minor), mode, gid } = node;
        self.sh(&format!(
            "mkdir -p \"$(dirname '/dev/{path}')\"\nmknod -m {mode:o} '/dev/{path}' c {major} {minor}\nchgrp {gid} '/dev/{path}'"
        ))?;
        Ok(())
    }

    /// Copies a file of the host into the machine, with these permissions; its directory is made.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub fn install(&self, from: &Path, to: &str, mode: u32) -> anyhow::Result<()> {
        let mut file = fs::File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
        let script = format!(
            "mkdir -p \"$(dirname '{to}')\"\ncat >'{to}.part'\nchmod {mode:o} '{to}.part'\nmv '{to}.part' '{to}'"
        );
        let mut child = self.command("/bin/sh").args(["-euc", &script]).stdin(Stdio::piped()).spawn()?;
        let mut pipe = child.stdin.take().context("no pipe")?;
        let copied = std::io::copy(&mut file, &mut pipe);
        drop(pipe);
        let status = child.wait()?;
        copied.with_context(|| format!("cannot copy {}", from.display()))?;
        ensure!(status.success(), "cannot write {to} in {}", self.name);
        Ok(())
    }

    /// Writes a file in the machine.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, to: &str, text: &str) -> anyhow::Result<()> {
        let script = format!("mkdir -p \"$(dirname '{to}')\"\ncat >'{to}'");
        let mut child = self.command("/bin/sh").args(["-euc", &script]).stdin(Stdio::piped()).spawn()?;
        let mut pipe = child.stdin.take().context("no pipe")?;
        let written = pipe.write_all(text.as_bytes());
        drop(pipe);
        ensure!(child.wait()?.success() && written.is_ok(), "cannot write {to} in {}", self.name);
        Ok(())
    }

    /// Asks `probe` again and again until it has an answer.
    ///
    /// # Errors
    /// It has none in this time: the text names `what`, and the probe's last error.
    pub fn wait<T>(
        &self,
        what: &str,
        time: Duration,
        mut probe: impl FnMut(&Self) -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + time;
        loop {
            let last = match probe(self) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => None,
                Err(error) => Some(error),
            };
            if Instant::now() > deadline {
                let text = format!("{}: waited {time:.0?} for {what}", self.name);
                return Err(last.map_or_else(|| anyhow::anyhow!("{text}"), |error| error.context(text.clone())));
            }
            thread::sleep(Duration::from_millis(50)); // waits: for the caller's condition
        }
    }

    /// Leaves the machine up when this program ends, and says how to enter and how to stop it.
    ///
    /// # Errors
    /// The guard is gone.
    pub fn keep(self) -> anyhow::Result<String> {
        self.word("keep")?;
        let leader = self.leader;
        let mut text = String::new();
        let _ = writeln!(text, "{} stays up. Enter it, or stop it (its guard then removes everything):", self.name);
        let _ = writeln!(text, "  nsenter -t {leader} -m -p -u -i -n -C -r -w -- /bin/bash -l");
        let _ = write!(text, "  kill -9 {leader}");
        let mut guards = GUARDS.lock().unwrap_or_else(PoisonError::into_inner);
        guards.retain(|guard| guard.child.id() != self.guard);
        drop(guards);
        std::mem::forget(self);
        Ok(text)
    }

    fn word(&self, word: &str) -> anyhow::Result<()> {
        let mut guards = GUARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let guard = guards.iter_mut().find(|guard| guard.child.id() == self.guard).context("its guard is gone")?;
        let pipe = guard.pipe.as_mut().context("its guard is told to end")?;
        pipe.write_all(format!("{word}\n").as_bytes()).context("its guard does not listen")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let mut guards = GUARDS.lock().unwrap_or_else(PoisonError::into_inner);
        let guard = guards.iter().position(|guard| guard.child.id() == self.guard).map(|at| guards.swap_remove(at));
        drop(guards);
        if let Some(mut guard) = guard {
            guard.end();
        }
    }
}

/// The name of a machine's control groups: that of its directory, told apart from anybody else's.
fn unique_name(dir: &Path) -> String {
    format!("npu-dra-{}", dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default())
}

/// Writes what the two scripts read.
fn write_dir(dir: &Path, options: &Options, layout: &Layout) -> anyhow::Result<()> {
    let unified = if layout.is_unified() { "yes" } else { "no" };
    let (name, address) = (&options.name, &options.address);
    ensure!(address.parse::<std::net::Ipv4Addr>().is_ok(), "{address:?} is no IPv4 address");
    let mut hierarchies = String::new();
    for hierarchy in &layout.hierarchies {
        let controllers = &hierarchy.controllers;
        let line = match (controllers.as_str(), controllers.strip_prefix("name=")) {
            ("", _) => "v2 unified".to_owned(),
            (_, Some(name)) => format!("{controllers} {name}"),
            _ => format!("{controllers} {controllers}"),
        };
        hierarchies += &(line + "\n");
    }
    let mut nodes = String::new();
    for DeviceNode { path, numbers: (major, minor), mode, gid } in &options.nodes {
        let _ = writeln!(nodes, "{path} {major} {minor} {mode:o} {gid}");
    }
    let mut binds = String::new();
    for (source, target) in &options.binds {
        ensure!(target.starts_with('/'), "the target {target} of a bind is not absolute");
        let _ = writeln!(binds, "ro {} {target}", source.display());
    }
    for (file, text) in [
        ("guard.sh", include_str!("guard.sh")),
        ("inside.sh", include_str!("inside.sh")),
        ("settings", &format!("hostname={name}\naddress={address}\nunified={unified}\n")),
        ("hierarchies", &hierarchies),
        ("nodes", &nodes),
        ("binds", &binds),
        ("before", &options.before),
    ] {
        fs::write(dir.join(file), text).with_context(|| format!("cannot write {file}"))?;
    }
    Ok(())
}

/// Starts a machine's guard in a session of its own, where neither Ctrl-C nor a hang-up reaches it.
fn start_guard(dir: &Path, tar: &Path) -> anyhow::Result<u32> {
    let mut command = Command::new("setsid");
    command.arg("/bin/sh").arg(dir.join("guard.sh")).arg(dir).arg(tar).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().context("cannot start a machine's guard")?;
    let pipe = child.stdin.take();
    let pid = child.id();
    GUARDS.lock().unwrap_or_else(PoisonError::into_inner).push(Guard { child, pipe });
    Ok(pid)
}

/// Removes what a guard left that was killed itself, or that a power cut took.
fn sweep(machines: &Path) {
    for entry in fs::read_dir(machines).into_iter().flatten().flatten() {
        let dir = entry.path();
        // While its program runs, a guard may be about to take its lock.
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.split('.').nth(1).is_some_and(|pid| Path::new("/proc").join(pid).exists()) {
            continue;
        }
        let Ok(file) = fs::File::open(dir.join("lock")) else { continue };
        let Ok(_held) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
        for group in fs::read_to_string(dir.join("groups")).unwrap_or_default().lines() {
            let _ = Command::new("find").args([group, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]).output();
        }
        let _ = fs::remove_dir_all(&dir);
    }
}

/// Ctrl-C, SIGTERM and SIGHUP end every machine first, then the program, with the exit code that shells expect.
fn watch_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                end_program(&format!("ended by signal {signal}"), 128 + signal);
            }
        });
    });
}

/// Ends every machine, then the program, with this exit code.
pub(crate) fn end_program(why: &str, code: i32) -> ! {
    let mut guards = GUARDS.lock().unwrap_or_else(PoisonError::into_inner);
    eprintln!("\n{why}; stopping {} machine(s)", guards.len());
    // All pipes first: the guards then clean up side by side.
    guards.iter_mut().for_each(|guard| guard.pipe = None);
    guards.iter_mut().for_each(Guard::end);
    std::process::exit(code)
}

/// Standard output of a command that must succeed.
fn checked(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().context("cannot be run")?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let tail: Vec<_> = stdout.lines().rev().take(20).collect();
    let tail: Vec<_> = tail.into_iter().rev().collect();
    bail!("failed ({}): {}\n{}", output.status, stderr.trim(), tail.join("\n"))
}
