//! What can go wrong between us and the API server.

use std::{error::Error, fmt::Write as _, time::Duration};

/// Why a request to the API server gave no answer that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    /// There is nothing to log in with.
    #[error("no usable credentials: {0}")]
    Credentials(String),
    /// The API server answered with an error.
    #[error("the API server answered {code}{}: {message}", if reason.is_empty() { String::new() } else { format!(" {reason}") })]
    Status {
        /// HTTP status.
        code: u16,
        /// Reason word of the answer, may be empty.
        reason: String,
        /// Its text.
        message: String,
        /// How long the server asks us to wait.
        retry_after: Option<Duration>,
    },
    /// The request did not get through, or the answer did not.
    #[error("the API server at {url} cannot be reached: {why}")]
    Network {
        /// Where the API server should be.
        url: String,
        /// What the network or TLS said.
        why: String,
    },
    /// Nothing came back in time.
    #[error("the API server at {url} did not answer within {} s", after.as_secs_f32())]
    Timeout {
        /// Where the API server should be.
        url: String,
        /// How long we waited.
        after: Duration,
    },
    /// The answer is not what it should be.
    #[error("the answer of the API server to {what} cannot be understood: {why}")]
    Answer {
        /// The request.
        what: String,
        /// What is wrong.
        why: String,
    },
}

impl ApiError {
    /// The HTTP status, if the API server gave one.
    pub(crate) fn code(&self) -> Option<u16> {
        match self {
            Self::Status { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// How long the server asks us to wait.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// True if the connection, not the request, is the trouble.
    pub(crate) fn is_connection(&self) -> bool {
        matches!(self, Self::Network { .. } | Self::Timeout { .. } | Self::Credentials(_))
    }

    /// Class of the error for metrics.
    pub(crate) fn class(&self) -> &'static str {
        match self {
            Self::Credentials(_) => "credentials",
            Self::Network { .. } => "network",
            Self::Timeout { .. } => "timeout",
            Self::Answer { .. } => "answer",
            Self::Status { code, .. } => match code {
                401 => "unauthorized",
                403 => "forbidden",
                404 => "not_found",
                409 => "conflict",
                410 => "gone",
                422 => "invalid",
                429 => "throttled",
                500.. => "server",
                _ => "other",
            },
        }
    }
}

/// An error and its causes in one line, each said once.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let line = cause.to_string();
        if !text.contains(&line) {
            let _ = write!(text, ": {line}");
        }
        next = cause.source();
    }
    text
}
