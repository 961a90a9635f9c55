//! Whole NPUs: registration and its endurance, what a container gets, and that nothing is left.

use super::Case;

pub(crate) const CASES: &[Case] = &[];
