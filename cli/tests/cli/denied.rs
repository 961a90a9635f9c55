//! Who is not permitted what, seen from `npuctl`. As root, npuctl is run as another user; as a normal user, the
//! service is told that somebody else owns it.

use std::{os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use npu_dra::admin::{Permissions, Readers};

use crate::fixture::{self, Daemon, is_root};

/// A user and a group without any right.
const NOBODY: u32 = 65534;
/// The number of a group that some tests make the readers.
const READERS: u32 = 54321;

/// `npuctl` as a user without rights, with its supplementary group; the user of the test if that cannot be.
struct Stranger {
    _dir: Option<tempfile::TempDir>,
    program: PathBuf,
}

impl Stranger {
    fn new() -> Self {
        if !is_root() {
            return Self { _dir: None, program: env!("CARGO_BIN_EXE_npuctl").into() };
        }
        // The build directory may be closed to others.
        let dir = fixture::open_dir();
        let program = dir.path().join("npuctl");
        // Copied by a process of its own: were the copy open for writing in this one, a child that another test starts
        // at that moment would hold it open, and it could not be run.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_npuctl")).arg(&program).status().unwrap();
        assert!(copied.success());
        Self { _dir: Some(dir), program }
    }

    fn npuctl(&self, daemon: &Daemon, gid: u32, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).env_clear().env("NPUCTL_SOCKET", daemon.socket());
        if is_root() {
            command.uid(NOBODY).gid(gid);
        }
        command
    }
}

fn uid() -> u32 {
    if is_root() { NOBODY } else { nix::unistd::geteuid().as_raw() }
}

fn with_readers(gid: u32) -> Daemon {
    let readers = Some(Readers { name: "npu-dra".to_owned(), gid });
    Daemon::start_with(Permissions { owner: 0, readers }, 0o666)
}

#[test]
fn a_socket_that_keeps_us_out_is_exit_5_and_names_the_group_that_it_lets_in() {
    let daemon = Daemon::start_with(Permissions { owner: 0, readers: None }, 0);
    for args in [&["devices"][..], &["claims", "list", "--watch"], &["version", "-o", "json"]] {
        let (code, _, words) = fixture::run(&mut Stranger::new().npuctl(&daemon, NOBODY, args));
        let what =
            format!("npuctl: not permitted to reach npu-dra at {}: permission denied\n", daemon.socket().display());
        assert_eq!((code, words.starts_with(&what)), (5, true), "{args:?}: {words}");
        if is_root() {
            assert!(words.ends_with("\n  Run the same command as root\n"), "root's group lets nobody in: {words}");
            std::os::unix::fs::chown(daemon.socket(), None, Some(READERS)).unwrap();
            let (_, _, words) = fixture::run(&mut Stranger::new().npuctl(&daemon, NOBODY, args));
            assert!(words.contains(&format!("\n  Only root and members of group {READERS} may. Join it")), "{words}");
            std::os::unix::fs::chown(daemon.socket(), None, Some(0)).unwrap();
        }
    }
}

#[test]
fn where_no_group_may_look_nobody_is_told_to_join_one() {
    let daemon = Daemon::start_with(Permissions { owner: 0, readers: None }, 0o666);
    let (code, _, words) = fixture::run(&mut Stranger::new().npuctl(&daemon, NOBODY, &["devices"]));
    assert_eq!(code, 5, "{words}");
    assert!(
        words.ends_with("this node has no group whose members may look\n  Run the same command as root\n"),
        "{words}"
    );
}

#[test]
fn somebody_who_connects_and_is_no_member_is_exit_5() {
    let daemon = with_readers(READERS);
    for args in [
        &["devices"][..],
        &["device", "npu-0"],
        &["status"],
        &["slices"],
        &["vnpu", "list"],
        &["vnpu", "templates"],
        &["devices", "-w"],
    ] {
        let (code, data, words) = fixture::run(&mut Stranger::new().npuctl(&daemon, NOBODY, args));
        assert_eq!((code, data.as_str()), (5, ""), "{args:?}");
        let why = format!("user {} is neither root nor a member of group npu-dra\n", uid());
        assert!(words.contains(&why), "{words}");
        assert!(words.contains("\n  Only root and members of group npu-dra may."), "{words}");
    }
}

#[test]
fn a_member_may_look_and_change_nothing() {
    let gid = if is_root() { READERS } else { nix::unistd::getegid().as_raw() };
    let daemon = with_readers(gid);
    let stranger = Stranger::new();
    let (code, data, words) = fixture::run(&mut stranger.npuctl(&daemon, gid, &["devices", "-o", "name"]));
    assert_eq!((code, words.as_str()), (0, ""));
    assert_eq!(data, "npu-0\nnpu-1\nnpu-2\nnpu-3\nnpu-7\n");
    let (code, ..) = fixture::run(&mut stranger.npuctl(&daemon, gid, &["vnpu", "templates"]));
    assert_eq!(code, 0);
    let why =
        format!("user {} is not root, and only root may change anything\n  Run the same command as root\n", uid());
    for change in [
        &["claims", "release", fixture::TRAIN, "--force"][..],
        &["vnpu", "create", "--device", "npu-1", "--template", "vir05_1c_16g"],
        &["vnpu", "destroy", "117", "--force"],
        &["vnpu", "destroy", "vnpu-1-117"],
    ] {
        let (code, data, words) = fixture::run(&mut stranger.npuctl(&daemon, gid, change));
        assert_eq!((code, data.as_str()), (5, ""), "{change:?}");
        assert!(words.ends_with(&why), "{words}");
    }
    let (_, data, _) = fixture::run(&mut stranger.npuctl(&daemon, gid, &["vnpu", "list", "-o", "name"]));
    assert_eq!(data, "", "nothing was made");
}
