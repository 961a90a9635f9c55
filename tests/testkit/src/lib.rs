//! Stand-ins for the two sides that a driver talks to, and a simulated node.

pub mod api;
pub mod faultline;
pub mod kubelet;
pub mod node;
