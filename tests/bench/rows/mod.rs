//! The rows of the design's section 4, by what they look at.

pub(crate) mod claims;
pub(crate) mod cut;
pub(crate) mod faults;
pub(crate) mod polling;
pub(crate) mod quiet;
pub(crate) mod start;
