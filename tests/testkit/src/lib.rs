//! Stand-ins for the two sides that a driver talks to, and a simulated node.

pub mod api;
pub mod corpus;
pub mod faultline;
pub mod kubelet;
pub mod load;
pub mod node;
pub mod pki;
pub mod plane;
pub mod stuck;
