//! The child that loads the vendor library: a blocking loop, one call at a time, no runtime.
//!
//! It dies with the daemon (parent-death signal, then a check that the parent is still there), makes no call without
//! the lock, and keeps its standard streams out of the library's reach: its socket comes in as standard input, the pipe
//! for events as standard output; both are moved away, and `/dev/null` takes their places. Events are written by a
//! thread of the library's, also while a call is in progress; a pipe that is full loses them, and says how many.
//! Signals that stop the daemon do not cut a vendor call in two: the worker
//! ends when its socket closes.

#![allow(unsafe_code)]

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
        unix::{fs::OpenOptionsExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{self, FcntlArg, Flock, FlockArg, OFlag},
    sys::{
        prctl,
        signal::{SigHandler, Signal, signal},
    },
    unistd,
};
use serde::Serialize;

use super::{
    library::Library,
    wire::{self, Hello, OpenError, Outcome, Request},
};

/// Name of the hidden subcommand.
pub const SUBCOMMAND: &str = "dcmi-worker";

/// How long a worker waits for its predecessor's lock: that one may be dying.
pub const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Exit codes: the worker was called by hand, or wrongly.
const USAGE: u8 = 2;
/// The daemon was gone before the worker had begun.
const ORPHAN: u8 = 3;

struct Arguments {
    parent: i32,
    lock: PathBuf,
    library: PathBuf,
    trust: bool,
}

impl Arguments {
    /// `PARENT LOCK LIBRARY trust|check`.
    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let parent = arguments.next()?.to_str()?.parse().ok()?;
        let (lock, library) = (arguments.next()?.into(), arguments.next()?.into());
        let trust = match arguments.next()?.to_str()? {
            "trust" => true,
            "check" => false,
            _ => return None,
        };
        arguments.next().is_none().then_some(Self { parent, lock, library, trust })
    }
}

/// Runs the worker to its end; `arguments` are those after the subcommand.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(arguments) = Arguments::parse(arguments) else {
        eprintln!("npu-dra: {SUBCOMMAND} is started by the daemon only");
        return ExitCode::from(USAGE);
    };
    let _ = prctl::set_pdeathsig(Signal::SIGKILL);
    if unistd::getppid().as_raw() != arguments.parent {
        return ExitCode::from(ORPHAN);
    }
    let _ = prctl::set_name(c"dcmi-worker");
    take_signals();
    let channels = match take_channels() {
        Ok(channels) => channels,
        Err(error) => {
            eprintln!("npu-dra: {SUBCOMMAND}: its standard streams are not the daemon's: {error}");
            return ExitCode::from(USAGE);
        }
    };
    // A socket that breaks means that the daemon is gone or does not want us any more.
    let _ = serve(&channels, &arguments);
    ExitCode::SUCCESS
}

/// The ways to the daemon.
struct Channels {
    /// Requests and answers.
    calls: UnixStream,
    /// Events; it never blocks.
    events: File,
}

/// The library runs shells and needs SIGCHLD as it is by default, whatever the daemon was started with.
fn take_signals() {
    // SAFETY: the default action; no handler of ours runs.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    for stop in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // SAFETY: ignoring; no handler of ours runs.
        let _ = unsafe { signal(stop, SigHandler::SigIgn) };
    }
}

/// Moves the channels from the standard streams to descriptors that no child of the library inherits.
fn take_channels() -> io::Result<Channels> {
    let calls: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    let events: OwnedFd = io::stdout().as_fd().try_clone_to_owned()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    unistd::dup2_stdin(&null)?;
    unistd::dup2_stdout(&null)?;
    drop(null);
    let calls = UnixStream::from(calls);
    calls.peer_addr()?;
    let flags = OFlag::from_bits_truncate(fcntl::fcntl(&events, FcntlArg::F_GETFL)?);
    fcntl::fcntl(&events, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    close_others(&[calls.as_raw_fd(), events.as_raw_fd()])?;
    Ok(Channels { calls, events: File::from(events) })
}

/// Closes what the daemon was started with and handed on unawares: a worker that hangs in the kernel must not keep
/// the daemon's sockets alive.
fn close_others(kept: &[RawFd]) -> io::Result<()> {
    let names: Vec<_> = fs::read_dir("/proc/self/fd")?.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
    for fd in names.iter().filter_map(|name| name.to_str()?.parse::<RawFd>().ok()) {
        if fd > 2 && !kept.contains(&fd) {
            // The listing's own descriptor is closed already.
            let _ = unistd::close(fd);
        }
    }
    Ok(())
}

fn serve(channels: &Channels, arguments: &Arguments) -> io::Result<()> {
    let stream = &channels.calls;
    let opened = lock(&arguments.lock)
        .and_then(|lock| Library::open(&arguments.library, arguments.trust).map(|library| (lock, library)));
    let (_lock, mut library) = match opened {
        Ok(opened) => opened,
        Err(error) => return wire::send(stream, &Hello::Err(error)),
    };
    wire::send(stream, &Hello::Ok(()))?;
    loop {
        let request: Request = wire::receive(stream)?;
        answer(channels, &mut library, request)?;
    }
}

/// The right to make vendor calls; without it none is made. Held until the process ends, however it ends.
fn lock(path: &Path) -> Result<Flock<File>, OpenError> {
    let failed = |error: &dyn std::fmt::Display| OpenError::Lock(format!("{}: {error}", path.display()));
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|error| failed(&error))?;
    let end = Instant::now() + LOCK_WAIT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut lock) => {
                // For people only; the lock holds without it.
                let _ = lock.set_len(0).and_then(|()| write!(&mut *lock, "{}", std::process::id()));
                return Ok(lock);
            }
            Err((mut held, Errno::EWOULDBLOCK)) if Instant::now() >= end => {
                let mut holder = String::new();
                let _ = held.rewind().and_then(|()| held.take(32).read_to_string(&mut holder));
                return Err(OpenError::Locked { holder: holder.trim().to_owned() });
            }
            Err((held, Errno::EWOULDBLOCK | Errno::EINTR)) => file = held,
            Err((_, errno)) => return Err(failed(&errno)),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn answer(channels: &Channels, library: &mut Library, request: Request) -> io::Result<()> {
    fn reply<T: Serialize>(stream: &UnixStream, outcome: &Outcome<T>) -> io::Result<()> {
        wire::send(stream, outcome)
    }
    let stream = &channels.calls;
    match request {
        Request::Init => reply(stream, &library.init()),
        Request::DriverVersion => reply(stream, &library.driver_version()),
        Request::Cards => reply(stream, &library.cards()),
        Request::Chips(card) => reply(stream, &library.chips(card)),
        Request::FailedChips(card) => reply(stream, &library.failed_chips(card)),
        Request::Unit(at) => reply(stream, &library.unit(at)),
        Request::LogicId(at) => reply(stream, &library.logic_id(at)),
        Request::PhysicalId(logic_id) => reply(stream, &library.physical_id(logic_id)),
        Request::ChipInfo(at) => reply(stream, &library.chip_info(at)),
        Request::Board(at) => reply(stream, &library.board(at)),
        Request::Die(at) => reply(stream, &library.die(at)),
        Request::Pcie(at) => reply(stream, &library.pcie(at)),
        Request::Hbm(at) => reply(stream, &library.hbm(at)),
        Request::Memory(at) => reply(stream, &library.memory(at)),
        Request::BootStatus(at) => reply(stream, &library.boot_status(at)),
        Request::Product(at) => reply(stream, &library.product(at)),
        Request::Health(at) => reply(stream, &library.health(at)),
        Request::ErrorCodes(at) => reply(stream, &library.error_codes(at)),
        Request::Temperature(at) => reply(stream, &library.temperature(at)),
        Request::Power(at) => reply(stream, &library.power(at)),
        Request::CardPower(card) => reply(stream, &library.card_power(card)),
        Request::Ecc(at, memory) => reply(stream, &library.ecc(at, memory)),
        Request::Network(at) => reply(stream, &library.network(at)),
        Request::Subscribe => reply(stream, &library.subscribe(&channels.events)),
        Request::Topology(a, b) => reply(stream, &library.topology(a, b)),
        Request::DiePolicy => reply(stream, &library.die_policy()),
        Request::SlicingGaps => reply(stream, &Outcome::Ok(library.slicing_gaps())),
        Request::Vnpus(at) => reply(stream, &library.vnpus(at)),
        Request::Vnpu(at, id) => reply(stream, &library.vnpu(at, id)),
        Request::FreeResources(at) => reply(stream, &library.free_resources(at)),
        Request::Processes(at) => reply(stream, &library.processes(at)),
        Request::CreateVnpu(at, template, id) => reply(stream, &library.create_vnpu(at, &template, id)),
        Request::DestroyVnpu(at, id) => reply(stream, &library.destroy_vnpu(at, id)),
        Request::VnpuMode => reply(stream, &library.vnpu_mode()),
        Request::Replay => reply(stream, &library.replay()),
        Request::SetReplay(on) => reply(stream, &library.set_replay(on)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_all_or_nothing() {
        let parse = |text: &str| Arguments::parse(text.split(' ').map(OsString::from));
        let good = parse("12 /run/lock /lib/libdcmi.so trust").unwrap();
        assert_eq!((good.parent, good.trust), (12, true));
        assert!(!parse("12 /run/lock /lib/libdcmi.so check").unwrap().trust);
        for bad in ["", "x /a /b trust", "12 /a /b", "12 /a /b maybe", "12 /a /b trust more"] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_held_lock_names_its_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dcmi.lock");
        let first = lock(&path).unwrap();
        let Err(OpenError::Locked { holder }) = lock(&path) else { panic!("two holders") };
        assert_eq!(holder, std::process::id().to_string());
        drop(first);
        assert!(lock(&path).is_ok());
    }
}
