//! The state of one claim: all that undo and replay need, and the ledger of who holds what.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    claim::{ClaimRef, ClaimUid},
    npu::StableId,
};

/// How far a claim has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// vNPUs are about to be made: some of those that it names may exist. Nothing was answered yet.
    Intent,
    /// Its devices are its own, its CDI file is written or is about to be.
    Prepared,
    /// Its vNPUs are about to be destroyed: some of those that it names may be gone.
    Releasing,
}

impl Phase {
    /// The phase as users see it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Intent => "preparing",
            Self::Prepared => "prepared",
            Self::Releasing => "releasing",
        }
    }
}

/// The record of one claim, kept in `claims/<uid>.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Which claim.
    pub claim: ClaimRef,
    /// Boot in which it was prepared (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// How far it has come.
    pub phase: Phase,
    /// When it was prepared.
    pub prepared_at: Timestamp,
    /// What it holds, one entry a device or share.
    pub devices: Vec<Holding>,
}

/// One device that a claim holds, or looks at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Holding {
    /// Main request names; empty in a record that was rebuilt from its CDI file.
    pub requests: Vec<String>,
    /// Pool.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Identity of its card.
    pub stable_id: StableId,
    /// Physical ids of the dies, as injected.
    pub physical_ids: Vec<u32>,
    /// True if the claim only looks (adminAccess): it owns nothing.
    pub admin_access: bool,
    /// Share of a shared device.
    pub share_id: Option<String>,
    /// Name of its device in the CDI file.
    pub cdi_device: String,
    /// The vNPU that it is, if it is a part of a card.
    pub cut: Option<Cut>,
}

/// A vNPU of ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cut {
    /// Template.
    pub template: String,
    /// Memory in bytes: the template's, and once it is made as it was read back.
    pub memory: u64,
    /// AI cores.
    pub ai_cores: u32,
    /// Its id, chosen by us.
    pub id: u32,
    /// True once it was made and read back.
    pub made: bool,
    /// Ids on the chip before it was made: a library that ignores the wanted id is found out by them.
    pub before: Vec<u32>,
}

impl Record {
    /// The devices, for messages.
    #[must_use]
    pub fn device_names(&self) -> String {
        names(self.devices.iter().map(|holding| holding.device.as_str()))
    }
}

/// Joins device names for a message.
pub(super) fn names<'a>(devices: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<_> = devices.collect();
    if all.is_empty() { "nothing".to_owned() } else { all.join(", ") }
}

/// A claim whose record file is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// UID, from the file's name.
    pub uid: ClaimUid,
    /// What is wrong with the file.
    pub why: String,
    /// Where the file was moved.
    pub path: String,
}

/// All claims that the node holds, and who owns which card. Look-ups do not slow down with the number of claims.
#[derive(Debug, Default, Clone)]
pub struct Ledger {
    records: BTreeMap<ClaimUid, Record>,
    quarantined: BTreeMap<ClaimUid, Quarantined>,
    owners: HashMap<StableId, Vec<ClaimUid>>,
}

impl Ledger {
    /// Enters or replaces a record.
    pub fn insert(&mut self, record: Record) {
        self.remove(&record.claim.uid);
        for holding in record.devices.iter().filter(|holding| !holding.admin_access) {
            let owners = self.owners.entry(holding.stable_id.clone()).or_default();
            if !owners.contains(&record.claim.uid) {
                owners.push(record.claim.uid.clone());
            }
        }
        self.quarantined.remove(&record.claim.uid);
        self.records.insert(record.claim.uid.clone(), record);
    }

    /// Takes a record out.
    pub fn remove(&mut self, uid: &ClaimUid) -> Option<Record> {
        let record = self.records.remove(uid)?;
        for holding in &record.devices {
            if let Some(owners) = self.owners.get_mut(&holding.stable_id) {
                owners.retain(|owner| owner != uid);
                if owners.is_empty() {
                    self.owners.remove(&holding.stable_id);
                }
            }
        }
        Some(record)
    }

    /// The record of a claim.
    #[must_use]
    pub fn get(&self, uid: &ClaimUid) -> Option<&Record> {
        self.records.get(uid)
    }

    /// All records, by UID.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }

    /// Number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if there is no record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The records of the claims that own (a part of) a card.
    pub fn owners(&self, card: &StableId) -> impl Iterator<Item = &Record> {
        self.owners.get(card).into_iter().flatten().filter_map(|uid| self.records.get(uid))
    }

    /// Ids of the vNPUs that records name on a card.
    pub fn cut_ids(&self, card: &StableId) -> BTreeSet<u32> {
        let holdings =
            self.owners(card).flat_map(|record| &record.devices).filter(|holding| holding.stable_id == *card);
        holdings.filter_map(|holding| holding.cut.as_ref()).map(|cut| cut.id).collect()
    }

    /// Holds a claim whose record is damaged.
    pub fn quarantine(&mut self, quarantined: Quarantined) {
        self.quarantined.insert(quarantined.uid.clone(), quarantined);
    }

    /// Lets go of a claim whose record is damaged.
    pub fn unquarantine(&mut self, uid: &ClaimUid) -> Option<Quarantined> {
        self.quarantined.remove(uid)
    }

    /// A claim whose record is damaged.
    #[must_use]
    pub fn quarantined(&self, uid: &ClaimUid) -> Option<&Quarantined> {
        self.quarantined.get(uid)
    }

    /// All claims whose records are damaged.
    pub fn all_quarantined(&self) -> impl Iterator<Item = &Quarantined> {
        self.quarantined.values()
    }
}
