//! `npu-dra`: a Kubernetes Dynamic Resource Allocation driver for Ascend NPUs, as a host service.
//!
//! Five layers, one direction: a module imports only from lower numbers, never sideways.
//!
//! | layer | module | owns |
//! |---|---|---|
//! | 0 | [`domain`] | every noun and every decision; no I/O, no async, no clock |
//! | ½ | [`disk`] | files that are replaced whole and durably; for `cdi` and `store` |
//! | 1 | `device`, `cdi`, `store`, `cluster` | hardware, CDI files, records on disk, the Kubernetes API |
//! | 2 | `engine` | claims and devices in motion |
//! | 3 | `kubelet`, `admin`, `http` | who may ask for what |
//! | 4 | `daemon` | configuration, sockets, systemd, wiring |
//!
//! The five trips that data takes through the house:
//!
//! 1. **Start**: configuration, lock, open records, serve the DRA socket, then the registration socket, ready.
//!    Beside it: scan, `plan::recover`, publish.
//! 2. **Prepare a whole NPU**: kubelet, engine, read claim, `plan::prepare`, record, CDI, answer.
//! 3. **Prepare a vNPU**: the same with an intent before, and a read-back after, the vendor's create.
//! 4. **Health**: event or poll, `health::step`, notice, then taint, stream, metric, journal, Event.
//! 5. **`npuctl devices`**: socket, peer credentials, snapshot, table.

pub mod admin;
pub mod cdi;
pub mod cluster;
pub mod daemon;
pub mod device;
pub mod disk;
pub mod domain;
pub mod engine;
pub mod http;
pub mod kubelet;
pub mod store;
