//! Where the log goes: the journal if stderr is connected to it, else stderr.

use std::{env, fmt, io, io::IsTerminal, os::unix::fs::MetadataExt};

use tracing_subscriber::{
    EnvFilter, Registry, fmt::format::FmtSpan, layer::SubscriberExt, reload, util::SubscriberInitExt,
};

use super::settings::{LogFormat, Settings};

/// The running log's filter.
#[derive(Clone)]
pub(super) struct Log {
    filter: reload::Handle<EnvFilter, Registry>,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").finish_non_exhaustive()
    }
}

impl Log {
    /// Changes what is logged; a filter that is not valid changes nothing.
    pub(super) fn set_level(&self, level: &str) {
        if let Ok(filter) = EnvFilter::try_new(level) {
            // Fails only when the log is gone, and then there is nobody to tell.
            let _ = self.filter.reload(filter);
        }
    }
}

/// Starts the log. A second call in one process changes nothing.
pub(super) fn start(settings: &Settings) -> Log {
    let (filter, handle) = reload::Layer::new(EnvFilter::new(&settings.log_level));
    let registry = tracing_subscriber::registry().with(filter);
    let to_stderr = || {
        tracing_subscriber::fmt::layer()
            .with_writer(io::stderr)
            .with_ansi(io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none())
            .with_span_events(FmtSpan::NONE)
    };
    // A log that was started before, by a test, stays.
    let _ = match (stderr_is_journal().then(tracing_journald::layer), settings.log_format) {
        (Some(Ok(journal)), _) => registry.with(journal).try_init(),
        (_, LogFormat::Json) => registry.with(to_stderr().json()).try_init(),
        (_, LogFormat::Text) => registry.with(to_stderr()).try_init(),
    };
    Log { filter: handle }
}

/// True if `$JOURNAL_STREAM` names the device and inode of stderr.
fn stderr_is_journal() -> bool {
    let Ok(stream) = env::var("JOURNAL_STREAM") else { return false };
    let Ok(stderr) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stderr.dev(), stderr.ino())
}
