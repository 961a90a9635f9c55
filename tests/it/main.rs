//! Integration tests: the layers, the backends, and the real daemon against stand-ins.

#![allow(clippy::unwrap_used, clippy::expect_used)] // what a test's own helper cannot do, fails the test

mod abi;
mod backends;
mod cluster;
mod daemon;
mod health;
mod hotplug;
mod http;
mod kubelet;
mod layers;
mod manifests;
mod models;
mod store_crash;
mod suspended;
