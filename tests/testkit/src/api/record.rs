//! The requests that came in.

use std::time::Instant;

/// One request, as it arrived.
#[derive(Debug, Clone)]
pub struct Request {
    /// When it arrived.
    pub at: Instant,
    /// When it arrived, by the wall clock.
    pub wall: jiff::Timestamp,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`; the method in lower case for what is no
    /// resource.
    pub verb: String,
    /// Path without query.
    pub path: String,
    /// Query text, percent-encoded as sent; may be empty.
    pub query: String,
    /// `resourceslices`, `resourceclaims/status` …; empty for what is no resource.
    pub resource: String,
    /// Namespace in the path, or empty.
    pub namespace: String,
    /// Object name in the path, or empty.
    pub name: String,
    /// Who asked; empty if the credentials were refused.
    pub user: String,
    /// `User-Agent` header.
    pub user_agent: String,
    /// `Content-Type` header.
    pub content_type: String,
    /// Bytes of the body.
    pub body_size: usize,
    /// Sent with `dryRun=All`.
    pub dry_run: bool,
    /// Status of the answer, once there is one.
    pub status: Option<u16>,
    /// When the answer was ready to be sent, for measuring; of a watch, when it was accepted.
    pub answered: Option<Instant>,
}

impl Request {
    /// True for a request that was to change something (not a dry run).
    #[must_use]
    pub fn is_write(&self) -> bool {
        !self.dry_run && matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }
}
