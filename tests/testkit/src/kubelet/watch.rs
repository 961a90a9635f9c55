//! Watching a directory for names that come and go.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::sync::mpsc;

/// How often the thread looks whether anybody still wants to know, in milliseconds.
const LOOK_UP: u8 = 250;

/// An inotify watch of one directory, not of what lies below it. A thread of its own waits for the events and ends
/// soon after the watch is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    changes: mpsc::UnboundedReceiver<HashSet<OsString>>,
}

impl Watch {
    pub(super) fn new(dir: &Path) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let wanted = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO;
        inotify.add_watch(dir, wanted)?;
        let (sender, changes) = mpsc::unbounded_channel();
        std::thread::Builder::new().name("kubelet-watch".into()).spawn(move || follow(&inotify, &sender))?;
        Ok(Self { changes })
    }

    /// Waits for something to happen and returns the names that went away, even if they are back by now.
    pub(super) async fn changed(&mut self) -> Option<HashSet<OsString>> {
        self.changes.recv().await
    }
}

fn follow(inotify: &Inotify, sender: &mpsc::UnboundedSender<HashSet<OsString>>) {
    while !sender.is_closed() {
        let mut wanted = [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wanted, PollTimeout::from(LOOK_UP)) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        match inotify.read_events() {
            Ok(events) => {
                let gone = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
                let names = events.into_iter().filter(|event| event.mask.intersects(gone));
                if sender.send(names.filter_map(|event| event.name).collect()).is_err() {
                    return;
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}
