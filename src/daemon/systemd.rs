//! The service manager: what it hands down, and what it is told. Without one, all of this does nothing.

use std::{io, os::unix::net::UnixListener, time::Duration};

use sd_notify::NotifyState;

/// Name of the admin socket's descriptor (`FileDescriptorName=` in `npu-dra.socket`).
const ADMIN: &str = "admin";

/// The admin socket, if the service manager made one. To be called once, before anything else opens descriptors.
pub(super) fn admin_socket() -> io::Result<Option<UnixListener>> {
    let Some((descriptor, _)) = sd_notify::listen_fds_with_names()?.find(|(_, name)| name == ADMIN) else {
        return Ok(None);
    };
    #[allow(unsafe_code, reason = "a descriptor from the service manager is a plain number")]
    // SAFETY: `$LISTEN_PID` is this process, so the descriptor was opened for it, and nothing else here takes it.
    let listener = unsafe { <UnixListener as std::os::fd::FromRawFd>::from_raw_fd(descriptor) };
    // A descriptor that is no unix socket is found out here and not at the first accept.
    listener.local_addr()?;
    Ok(Some(listener))
}

/// Tells the service manager; it may not be there, and then nobody wants to know.
pub(super) fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager was not told");
    }
}

/// Makes room for a start that may take so long.
pub(super) fn extend_start(by: Duration) {
    tell(&[NotifyState::ExtendTimeoutUsec(microseconds(by))]);
}

/// The watchdog, which wants a sign of life from time to time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watchdog {
    enabled: bool,
}

impl Watchdog {
    /// The watchdog of the unit, given time for three signs of life that come at this interval.
    pub(super) fn new(interval: Duration) -> Self {
        let limit = sd_notify::watchdog_enabled();
        if limit.is_some_and(|limit| limit < interval * 3) {
            tell(&[NotifyState::WatchdogUsec(microseconds(interval * 3))]);
        }
        Self { enabled: limit.is_some() }
    }

    /// A sign of life.
    pub(super) fn feed(self) {
        if self.enabled {
            tell(&[NotifyState::Watchdog]);
        }
    }
}

fn microseconds(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
