//! The real `npuctl` against the real admin service, in this process, over a real socket.

// Everything here is a test, also the functions that are not marked as one.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod denied;
mod fixture;
mod generated;
mod transcripts;
mod unreachable;
mod watch;
