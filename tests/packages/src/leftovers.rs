//! The machines' own promise: nothing is left, however the program that made one ends.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::{fs::MetadataExt as _, process::ExitStatusExt as _},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use lab::{Machine, Options, Root, cases::Account};

/// Boots a machine in this process, says where it is, and ends as `how` says.
pub(crate) fn hold(how: &str) -> anyhow::Result<ExitCode> {
    let tar = Root::debian("trixie", &[]).ready()?;
    let machine = Machine::boot(&Options::new("held", &tar), |_| Ok(()))?;
    // A process of the host in the machine, too, as a case's command is.
    let mut inside = machine.command("sleep").arg("1000").spawn()?;
    writeln!(std::io::stdout(), "{}", machine.root().parent().context("no directory")?.display())?;
    match how {
        "wait" => {
            inside.wait()?;
        }
        "panic" => panic!("as asked"),
        _ => bail!("no way to hold is called {how}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// A program that holds a machine, and the machine's directory.
fn held(how: &str) -> anyhow::Result<(Child, String)> {
    let own = std::env::current_exe()?;
    let mut command = Command::new(own);
    command.args(["--hold", how]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no pipe")?).read_line(&mut line)?;
    let dir = line.trim().to_owned();
    ensure!(dir.starts_with('/'), "no machine was made: {line:?}");
    Ok((child, dir))
}

/// Waits until nothing of a machine is left.
fn gone(dir: &str, within: Duration) -> anyhow::Result<Duration> {
    let started = Instant::now();
    loop {
        let left = left_of(dir)?;
        if left.is_empty() {
            return Ok(started.elapsed());
        }
        ensure!(started.elapsed() < within, "left after {within:?}:\n{}", left.join("\n"));
        thread::sleep(Duration::from_millis(50)); // waits: for the guard
    }
}

fn left_of(dir: &str) -> anyhow::Result<Vec<String>> {
    let mut left = Vec::new();
    if Path::new(dir).exists() {
        left.push(format!("the directory {dir}"));
    }
    let name = Path::new(dir).file_name().context("no name")?.to_string_lossy().into_owned();
    for entry in fs::read_dir("/proc")?.flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let groups = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        if command.contains(&name) || groups.contains(&name) {
            left.push(format!("the process {} {command}", entry.file_name().to_string_lossy()));
        }
    }
    let groups = Command::new("find").args(["/sys/fs/cgroup", "-type", "d", "-name", &format!("*{name}*")]).output()?;
    left.extend(String::from_utf8_lossy(&groups.stdout).lines().map(|group| format!("the control group {group}")));
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    left.extend(mounts.lines().filter(|line| line.contains(&name)).map(|line| format!("the mount {line}")));
    Ok(left)
}

fn signal(child: &Child, name: &str) -> anyhow::Result<()> {
    let status = Command::new("kill").args(["-s", name, &child.id().to_string()]).status()?;
    ensure!(status.success(), "cannot send {name}");
    Ok(())
}

fn killed() -> anyhow::Result<String> {
    let (mut child, dir) = held("wait")?;
    signal(&child, "KILL")?;
    ensure!(child.wait()?.signal() == Some(9), "it was not killed");
    let took = gone(&dir, Duration::from_secs(30))?;
    Ok(format!("clean {:.1} s later", took.as_secs_f64()))
}

fn interrupted() -> anyhow::Result<String> {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let (mut child, dir) = held("wait")?;
        signal(&child, name)?;
        let status = child.wait()?;
        ensure!(status.code() == Some(code), "after SIG{name} it ended with {status}");
        // What was killed may still wait for the host's init to take note of it.
        gone(&dir, Duration::from_secs(2)).with_context(|| format!("after SIG{name}"))?;
    }
    Ok(String::new())
}

fn panicked() -> anyhow::Result<String> {
    let (mut child, dir) = held("panic")?;
    let status = child.wait()?;
    ensure!(status.code() == Some(101), "it ended with {status}");
    // The command that ran inside ends with the machine; all else is gone before the program is.
    gone(&dir, Duration::from_secs(2))?;
    Ok(String::new())
}

/// What could change on a host, without what always does.
fn host() -> anyhow::Result<Vec<String>> {
    let mut facts = Vec::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    facts.extend(mounts.lines().map(|line| format!("mount {line}")));
    for entry in fs::read_dir("/dev")?.flatten() {
        let about = fs::symlink_metadata(entry.path())?;
        let (mode, uid, gid) = (about.mode(), about.uid(), about.gid());
        facts.push(format!("node {} {mode:o} {uid} {gid}", entry.path().display()));
    }
    for entry in fs::read_dir("/sys/class/net")?.flatten() {
        facts.push(format!("link {}", entry.file_name().to_string_lossy()));
    }
    for dir in ["vm", "kernel", "kernel/keys", "net/ipv4", "net/ipv4/conf/all", "net/core", "user"] {
        for entry in fs::read_dir(Path::new("/proc/sys").join(dir)).into_iter().flatten().flatten() {
            // The kernel's own counters, and what changes with each look.
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().is_file() && !["ns_last_pid", "pty", "random"].contains(&name.as_str()) {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                facts.push(format!("sysctl {dir}/{name} {}", text.trim()));
            }
        }
    }
    let hostname = fs::read_to_string("/proc/sys/kernel/hostname")?;
    facts.push(format!("name {hostname}"));
    Ok(facts)
}

fn unchanged() -> anyhow::Result<String> {
    let before = host()?;
    let (mut child, dir) = held("wait")?;
    let during = host()?;
    signal(&child, "TERM")?;
    child.wait()?;
    gone(&dir, Duration::from_secs(5))?;
    for (when, now) in [("while it ran", during), ("after it", host()?)] {
        for fact in &now {
            ensure!(before.contains(fact), "{when} the host has: {fact}");
        }
        for fact in &before {
            ensure!(now.contains(fact), "{when} the host has no longer: {fact}");
        }
    }
    Ok(format!("{} facts", before.len()))
}

pub(crate) fn run(account: &Account) {
    let set = "lab";
    account.run(set, "killed-runner-leaves-nothing", killed);
    account.run(set, "interrupted-runner-leaves-nothing", interrupted);
    account.run(set, "panicking-runner-leaves-nothing", panicked);
    account.run(set, "host-is-unchanged", unchanged);
}
