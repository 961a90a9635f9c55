//! Example GPUs with nothing behind them, for clusters that only try Dynamic Resource Allocation out.

use std::collections::BTreeMap;

use futures::{FutureExt as _, future::BoxFuture};

use super::{Backend, Fault, Status};
use crate::domain::{
    health::HealthReading,
    notice::Severity,
    npu::{ChipReading, Family, MIB, PciAddress, Scan},
};

const NAME: &str = "example";

/// Memory of an example GPU in bytes.
pub const MEMORY: u64 = 80 * 1024 * MIB;

/// The backend.
#[derive(Debug)]
pub struct Example {
    count: u32,
}

impl Example {
    /// This many GPUs.
    #[must_use]
    pub fn new(count: u32) -> Self {
        Self { count }
    }

    fn chip(number: u32) -> Option<ChipReading> {
        let bus_id = PciAddress {
            domain: u16::try_from(number >> 8).ok()?,
            bus: u8::try_from(number & 0xff).ok()?,
            device: 0,
            function: 0,
        };
        Some(ChipReading {
            physical_id: number,
            logic_id: None,
            card_id: None,
            device_id: 0,
            bus_id,
            vdie: None,
            chip_name: "example-gpu".to_owned(),
            family: Family::Example,
            board_id: None,
            memory: Some(MEMORY),
            ai_cores: None,
            numa_node: None,
            pcie_root: None,
            health: HealthReading::default(),
        })
    }
}

impl Backend for Example {
    fn name(&self) -> &'static str {
        NAME
    }

    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>> {
        let chips = (0..self.count).filter_map(Self::chip).collect();
        async move { Ok(Scan { chips, dies_bound: true, ..Scan::default() }) }.boxed()
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        async move { Ok((0..self.count).map(|id| (id, HealthReading::default())).collect()) }.boxed()
    }

    fn status(&self) -> Status {
        Status {
            backend: NAME,
            state: "ready",
            source: String::new(),
            severity: Severity::Info,
            detail: format!("{} example gpus with no hardware behind them", self.count),
        }
    }
}
