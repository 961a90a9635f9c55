//! Every noun and every decision of the driver. Pure: no I/O, no async, no clock (time is an argument).

pub mod claim;
pub mod config;
pub mod health;
pub mod inventory;
pub mod model;
pub mod names;
pub mod node;
pub mod notice;
pub mod npu;
pub mod plan;
pub mod quantity;
pub mod record;
pub mod refusal;
pub mod slice;
pub mod vnpu;
