//! `--watch` prints what there is, then only what changes.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use npu_dra::domain::health::{HealthReading, Level};

use crate::fixture::{Daemon, TRAIN, ago, health};

const BOUND: Duration = Duration::from_secs(20);

/// An `npuctl` that watches; killed if a test fails.
pub(crate) struct Watching {
    child: Child,
    lines: Receiver<String>,
}

impl Watching {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, lines }
    }

    /// The next line.
    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(BOUND).expect("a line")
    }

    /// The next lines.
    pub(crate) fn take(&self, count: usize) -> Vec<String> {
        (0..count).map(|_| self.line()).collect()
    }

    fn interrupt(&self) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), Signal::SIGINT).unwrap();
    }

    /// Waits for the end; gives exit status and stderr. Nothing more may have been printed.
    pub(crate) fn end(mut self, bound: Duration) -> (i32, String) {
        let late = Instant::now() + bound;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < late, "it does not end");
            std::thread::sleep(Duration::from_millis(5)); // waits: for the end of the child
        };
        let mut words = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        assert_eq!(self.lines.iter().collect::<Vec<_>>(), [""; 0], "more lines than expected");
        (status.code().expect("it ends by itself"), words)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_watch_of_devices_prints_only_rows_that_change() {
    let daemon = Daemon::start();
    let watching = Watching::start(&mut daemon.npuctl(&["devices", "--watch"]));
    let first = watching.take(6);
    assert!(first[0].starts_with("NAME    MODEL   PCI "), "{first:?}");

    // A change that this table does not show prints nothing; only the next one does.
    daemon.world.change(|world| {
        let reading = HealthReading { temperature: Some(99), ..HealthReading::of(Level::Ok) };
        world.devices[1].health = Some(health(reading, ago(1)));
    });
    daemon.world.change(|world| world.devices[0].owners.clear());
    assert_eq!(watching.line(), "npu-0   910B3   0000:c1:00.0      20   64 GiB   ok        free      -");
    daemon.world.change(|world| drop(world.devices.remove(1)));
    assert_eq!(watching.line(), "npu-1   910B3   0000:c2:00.0      20   64 GiB   ?         gone      -");
    watching.interrupt();
    assert_eq!(watching.end(BOUND), (0, String::new()));
}

#[test]
fn a_watch_in_json_prints_one_object_a_line() {
    let daemon = Daemon::start();
    let watching = Watching::start(&mut daemon.npuctl(&["claims", "list", "-w", "-o", "json"]));
    for line in watching.take(4) {
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&value["apiVersion"], &value["kind"]), (&"npuctl/v1".into(), &"Claim".into()));
    }
    daemon.world.change(|world| drop(world.claims.remove(0)));
    let value: serde_json::Value = serde_json::from_str(&watching.line()).unwrap();
    assert_eq!((&value["uid"], &value["state"]), (&TRAIN.into(), &"released".into()));
    watching.interrupt();
    assert_eq!(watching.end(BOUND), (0, String::new()));
}

#[test]
fn a_watch_keeps_to_names_and_health() {
    let daemon = Daemon::start();
    let named = Watching::start(&mut daemon.npuctl(&["devices", "npu-1", "-w", "-o", "name"]));
    let ill = Watching::start(&mut daemon.npuctl(&["devices", "--health", "critical,major", "-w", "--no-headers"]));
    assert_eq!(named.line(), "npu-1");
    assert!(ill.line().starts_with("npu-2   310P3"));
    daemon.world.change(|world| {
        for device in &mut world.devices {
            device.health = Some(health(HealthReading::of(Level::Major), ago(0)));
        }
    });
    assert_eq!(named.line(), "npu-1");
    // The row of npu-2 shows no other level than before.
    assert_eq!(ill.take(3).iter().map(|line| &line[..5]).collect::<Vec<_>>(), ["npu-0", "npu-1", "npu-3"]);
    for watching in [named, ill] {
        watching.interrupt();
        assert_eq!(watching.end(BOUND), (0, String::new()));
    }
}

#[test]
fn a_watch_of_a_card_that_is_not_there_ends_with_exit_3() {
    let daemon = Daemon::start();
    for args in [
        &["devices", "-w", "npu-1", "npu-99"][..],
        &["health", "npu-99", "-w"],
        &["health", "-w", "-o", "json", "npu-99"],
    ] {
        let (code, words) = Watching::start(&mut daemon.npuctl(args)).end(BOUND);
        let expected = "npuctl: no NPU named npu-99 on this node\n  See all with: npuctl devices\n";
        assert_eq!((code, words.as_str()), (3, expected), "{args:?}");
    }
}

#[test]
fn a_watch_whose_reader_has_gone_ends_well() {
    let daemon = Daemon::start();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = daemon.npuctl(&["devices", "-w"]).stdout(writer).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(reader).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("NAME"));
    drop(lines);
    let late = Instant::now() + BOUND;
    let status = loop {
        daemon.world.change(|world| {
            let device = &mut world.devices[0];
            device.owners = if device.owners.is_empty() { vec![world.claims[0].clone()] } else { Vec::new() };
        });
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > late {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20)); // waits: for the end of the child
    };
    assert_eq!(status.code(), Some(0));
}
