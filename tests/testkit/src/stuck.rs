//! A process that SIGKILL does not make reapable, as one that waits in the kernel for a device that does not answer.
//!
//! Such a wait (state D) cannot be made without hardware. What its parent sees of it can: a process that another one
//! traces stays unreaped until the tracer has waited for it.

use std::{
    sync::mpsc::{Sender, channel},
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use nix::{
    sys::{
        ptrace::{self, Options},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// A process that its parent cannot reap until this is dropped.
#[derive(Debug)]
pub struct Stuck {
    let_go: Option<Sender<()>>,
    /// Only the thread that traces a process can wait for it.
    thread: Option<JoinHandle<()>>,
}

impl Stuck {
    /// Holds this process. It runs on as if nothing had happened, until somebody ends it.
    ///
    /// # Errors
    /// There is no such process, or the system does not let us trace it.
    pub fn hold(pid: u32) -> anyhow::Result<Self> {
        let pid = Pid::from_raw(i32::try_from(pid)?);
        let (seized, answer) = channel();
        let (let_go, wait) = channel::<()>();
        let thread = thread::spawn(move || {
            let outcome = ptrace::seize(pid, Options::empty());
            let held = outcome.is_ok();
            let _ = seized.send(outcome);
            if held {
                // Ends also when the sender is dropped.
                let _ = wait.recv();
                release(pid);
            }
        });
        answer.recv().context("the thread ended")?.with_context(|| format!("cannot trace process {pid}"))?;
        Ok(Self { let_go: Some(let_go), thread: Some(thread) })
    }
}

/// Reaps the process as its tracer, so that its parent can; one that lives goes on untraced.
fn release(pid: Pid) {
    match waitpid(pid, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
        Ok(WaitStatus::StillAlive) => {
            // A process that runs cannot be let go of: it is stopped for that, and goes on.
            let _ = ptrace::interrupt(pid);
            let _ = waitpid(pid, Some(WaitPidFlag::__WALL));
            let _ = ptrace::detach(pid, None);
        }
        Ok(WaitStatus::Stopped(_, signal)) => {
            let _ = ptrace::detach(pid, signal);
        }
        _ => {}
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        self.let_go = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{BufRead as _, BufReader},
        process::{Child, Command, Stdio},
        time::{Duration, Instant},
    };

    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };

    use super::Stuck;

    /// A shell that waits for its child and says when it is reaped. A tracer's own children are another matter.
    struct Parent {
        shell: Child,
        lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
        child: u32,
    }

    impl Parent {
        fn start() -> Self {
            let mut shell = Command::new("sh");
            shell.args(["-c", "sleep 60 & echo $!; wait $!; echo reaped"]).stdin(Stdio::null()).stdout(Stdio::piped());
            let mut shell = shell.spawn().unwrap();
            let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
            let child = lines.next().unwrap().unwrap().parse().unwrap();
            Self { shell, lines, child }
        }

        fn kill_child(&self) {
            kill(Pid::from_raw(self.child.try_into().unwrap()), Signal::SIGKILL).unwrap();
        }

        fn state(&self) -> Option<char> {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.child)).ok()?;
            stat.rsplit(") ").next()?.chars().next()
        }
    }

    impl Drop for Parent {
        fn drop(&mut self) {
            let _ = kill(Pid::from_raw(self.child.try_into().unwrap()), Signal::SIGKILL);
            let _ = self.shell.kill();
            let _ = self.shell.wait();
        }
    }

    #[test]
    fn a_held_process_is_killed_and_cannot_be_reaped_until_it_is_let_go_of() {
        let mut parent = Parent::start();
        let stuck = Stuck::hold(parent.child).unwrap();
        parent.kill_child();
        let end = Instant::now() + Duration::from_secs(20);
        while parent.state() != Some('Z') {
            assert!(Instant::now() < end, "{:?}", parent.state());
            std::thread::sleep(Duration::from_millis(1)); // waits: for the signal to end the process
        }
        for _ in 0..100 {
            std::thread::yield_now();
            assert_eq!(parent.state(), Some('Z'), "its parent waits for it and does not get it");
        }
        drop(stuck);
        assert_eq!(parent.lines.next().unwrap().unwrap(), "reaped");
    }

    #[test]
    fn a_process_that_nobody_ended_goes_on_when_it_is_let_go_of() {
        let mut parent = Parent::start();
        drop(Stuck::hold(parent.child).unwrap());
        assert!(matches!(parent.state(), Some('S' | 'R')), "{:?}", parent.state());
        parent.kill_child();
        assert_eq!(parent.lines.next().unwrap().unwrap(), "reaped");
    }
}
