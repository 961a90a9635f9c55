//! Random histories of the real daemon: prepares, unprepares, kills in the middle of either, boots, lost cards, vNPUs that
//! others make and destroy. The oracle looks after each event; a failure names its seed.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use dcmi::world::{Profile, Vnpu};
use testkit::{
    api::{ApiServer, DeviceResult, Release},
    kubelet::{Kubelet, What, client},
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON, until},
};

use crate::oracle::{Claim, Known, Scene, Want};

/// Cards that claims go to.
const CARDS: u64 = 2;
/// Claims that come and go.
const CLAIMS: usize = 4;
/// Events of a history.
const EVENTS: usize = 10;
const PATIENCE: Duration = Duration::from_secs(20);

/// A bin: its world, and its templates with the memory that is booked for them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bin {
    pub(crate) profile: Profile,
    templates: [(&'static str, &'static str); 2],
}

/// The bins of 910B.
pub(crate) const BINS: [Bin; 3] = [
    Bin { profile: Profile::Ascend910B4, templates: [("vir05_1c_8g", "8Gi"), ("vir10_3c_16g", "16Gi")] },
    Bin { profile: Profile::Ascend910B3, templates: [("vir05_1c_16g", "16Gi"), ("vir10_3c_32g", "32Gi")] },
    Bin { profile: Profile::Ascend910B2, templates: [("vir06_1c_16g", "16Gi"), ("vir12_3c_32g", "32Gi")] },
];

/// A small generator, so that a failing history can be run again from its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % sides
    }
}

struct History<'a> {
    bin: Bin,
    binary: &'a Path,
    dice: Dice,
    node: Node,
    api: ApiServer,
    kubelet: Kubelet,
    daemon: Daemon,
    /// As kubelet names them, and as the oracle sees them.
    claims: Vec<(client::Claim, Claim)>,
    /// vNPUs of others.
    kept: Vec<Vnpu>,
    /// vNPUs of claims are gone that the claims have not been told of: an id of theirs may come back as another's.
    doubtful: bool,
    numbers: u32,
    log: Vec<String>,
}

/// Plays the history of a seed.
pub(crate) async fn play(bin: Bin, seed: u64, binary: PathBuf) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("npu-history-").tempdir()?;
    let mut node = Node::in_dir(dir.path(), bin.profile)?;
    let api = node.start_api(Release::V1_36).await?;
    let kubelet = node.start_kubelet()?;
    let daemon = node.start(command(&node, &binary))?;
    let dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (claims, kept, log) = (Vec::new(), Vec::new(), Vec::new());
    let binary = binary.as_path();
    let mut history =
        History { bin, binary, dice, node, api, kubelet, daemon, claims, kept, doubtful: false, numbers: 0, log };
    let told = history.tell().await;
    let daemon_log = history.daemon.log();
    let lines: Vec<_> = daemon_log.lines().collect();
    let end = lines[lines.len().saturating_sub(25)..].join("\n    ");
    told.map_err(|error| {
        let events = history.log.join("\n  ");
        error.context(format!("{:?}, seed {seed}\n  {events}\n    {end}\n", bin.profile))
    })
}

fn command(node: &Node, binary: &Path) -> std::process::Command {
    node.daemon_with(binary, &["--enable-hard-vnpu=true", "--health-interval=50ms", "--claims-release-wait=0s"])
}

impl History<'_> {
    async fn tell(&mut self) -> anyhow::Result<()> {
        self.up().await?;
        for number in 0..CLAIMS {
            self.new_claim(number)?;
        }
        for _ in 0..EVENTS {
            self.event().await?;
            self.settle().await?;
        }
        for number in 0..CLAIMS {
            self.unprepare(number, true).await?;
        }
        self.settle().await.context("at the end")?;
        let left = Scene::look(self.node.world(), &self.node.cdi())?;
        ensure!(left.vnpus().len() == self.kept.len(), "vNPUs are left: {:?}", left.vnpus());
        ensure!(self.node.records()?.is_empty(), "records are left: {:?}", self.node.records()?);
        let overlaps = self.node.world().overlaps()?;
        ensure!(overlaps.is_empty(), "calls of the library met: {overlaps:?}");
        Ok(())
    }

    async fn event(&mut self) -> anyhow::Result<()> {
        let number = usize::try_from(self.dice.roll(u64::try_from(CLAIMS)?))?;
        let kind = self.dice.roll(16);
        self.log.push(format!("{kind}: claim {number}"));
        match kind {
            0..=5 => self.prepare(number).await,
            6..=8 => self.unprepare(number, false).await,
            9 => {
                self.daemon.kill()?;
                self.start().await
            }
            10 | 11 => self.kill_in(number).await,
            12 => self.boot().await,
            13 => {
                let phy = u32::try_from(self.dice.roll(CARDS))?;
                self.node.world().drop_chip(phy)?;
                let _refused = self.prepare(number).await;
                self.node.world().return_chip(phy)?;
                self.daemon.kill()?;
                self.start().await
            }
            14 if !self.doubtful => {
                let phy = u32::try_from(self.dice.roll(CARDS))?;
                // Somebody who cuts a card that a claim has whole harms it, and nobody here can help that.
                let whole = |claim: &Claim| claim.known != Known::Gone && claim.wants == [Want::Whole(phy)];
                if self.claims.iter().any(|(_, claim)| whole(claim)) {
                    return Ok(());
                }
                if let Ok(id) = self.node.world().add_vnpu(phy, self.bin.templates[0].0) {
                    self.kept.extend(self.node.world().vnpus()?.into_iter().find(|vnpu| vnpu.id == id));
                    // A whole card is prepared without a vendor call: it goes by the last poll.
                    ensure!(until(PATIENCE, || self.is_tainted(phy)).await, "vNPU {id} of others is not seen");
                }
                Ok(())
            }
            14 => Ok(()),
            _ => self.take_away(),
        }
    }

    /// True if the card is published as one that takes no new claims.
    fn is_tainted(&self, phy: u32) -> bool {
        let name = format!("npu-{phy}");
        let slices = self.api.slices(DRIVER, NODE);
        let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten();
        devices.filter(|device| device["name"] == *name).any(|device| device["taints"].is_array())
    }

    /// Somebody destroys a vNPU: their own, or one of a claim.
    fn take_away(&mut self) -> anyhow::Result<()> {
        if let Some(theirs) = self.kept.pop() {
            self.node.world().remove_vnpu(theirs.id)?;
            return Ok(());
        }
        let Some(ours) = self.node.world().vnpus()?.first().cloned() else { return Ok(()) };
        self.node.world().remove_vnpu(ours.id)?;
        self.doubtful = true;
        let parts =
            |claim: &Claim| claim.wants.iter().any(|want| matches!(want, Want::Part(phy, _) if *phy == ours.phy));
        for (_, claim) in self.claims.iter_mut().filter(|(_, claim)| claim.known != Known::Gone && parts(claim)) {
            claim.known = Known::Unsure;
        }
        Ok(())
    }

    async fn boot(&mut self) -> anyhow::Result<()> {
        self.daemon.kill()?;
        self.numbers += 1;
        self.node.reboot(&format!("3f1c8a52-0000-4000-8000-{:012}", self.numbers))?;
        if self.dice.roll(2) == 0 {
            self.node.world().replay()?;
        }
        let there = self.node.world().vnpus()?;
        self.kept.retain(|vnpu| there.contains(vnpu));
        self.doubtful = true;
        for (_, claim) in self.claims.iter_mut().filter(|(_, claim)| claim.known != Known::Gone) {
            if claim.wants.iter().any(|want| matches!(want, Want::Part(..))) {
                claim.known = Known::Unsure;
            }
        }
        self.start().await
    }

    /// Kills the daemon while it is at work for a claim.
    async fn kill_in(&mut self, number: usize) -> anyhow::Result<()> {
        let client = self.kubelet.client(DRIVER)?;
        let (claim, known) = &mut self.claims[number];
        let prepare = self.dice.roll(2) == 0;
        let held = matches!(known.known, Known::Prepared(_));
        if !(prepare && held) {
            known.known = Known::Unsure;
        }
        let claim = claim.clone();
        let call = tokio::spawn(async move {
            // Nobody waits for the answer: the daemon dies.
            if prepare { client.prepare_one(&claim).await.map(drop) } else { client.unprepare_one(&claim).await }
        });
        tokio::time::sleep(Duration::from_micros(self.dice.roll(6000))).await; // waits: a random moment of the call
        self.daemon.kill()?;
        let _ended = call.await?;
        self.start().await
    }

    async fn start(&mut self) -> anyhow::Result<()> {
        self.daemon = self.node.start(command(&self.node, self.binary))?;
        self.up().await
    }

    /// Waits until kubelet has this daemon, and the daemon has its slicing model.
    async fn up(&mut self) -> anyhow::Result<()> {
        let registered =
            |kubelet: &Kubelet| kubelet.log().iter().filter(|entry| matches!(&entry.what, What::Registered(_))).count();
        let before = registered(&self.kubelet);
        let up = until(PATIENCE, || self.daemon.log().contains("slicing model is consumable")).await;
        ensure!(up, "it does not cut\n{}", self.daemon.log());
        until(Duration::from_millis(500), || registered(&self.kubelet) > before).await;
        self.kubelet.wait_registered(DRIVER, SOON).await.map(drop)
    }

    /// A claim for a card or a part of one, as the scheduler leaves it.
    fn new_claim(&mut self, number: usize) -> anyhow::Result<()> {
        self.numbers += 1;
        let phy = u32::try_from(self.dice.roll(CARDS))?;
        let name = format!("claim-{}", self.numbers);
        let device = DeviceResult::new("npu", DRIVER, POOL, &format!("npu-{phy}"));
        let share = format!("00000000-0000-4000-8000-{:012}", self.numbers);
        let (want, result) = match self.dice.roll(5) {
            0 => (Want::Whole(phy), device),
            size => {
                let (template, memory) = self.bin.templates[usize::from(size > 2)];
                (Want::Part(phy, template), device.share(&share).consumes("memCapacity", memory))
            }
        };
        let stored =
            self.api.claim_builder("default", &name).request("npu", DRIVER, 1).result(result).node(NODE).store();
        let uid = stored["metadata"]["uid"].as_str().context("the claim has no uid")?;
        let claim = Claim { uid: uid.to_owned(), wants: vec![want], known: Known::Gone };
        let entry = (client::claim("default", &name, uid), claim);
        match self.claims.get_mut(number) {
            Some(old) => *old = entry,
            None => self.claims.push(entry),
        }
        Ok(())
    }

    async fn prepare(&mut self, number: usize) -> anyhow::Result<()> {
        if self.claims[number].1.known == Known::Gone {
            self.new_claim(number)?;
        }
        let client = self.kubelet.client(DRIVER)?;
        let (claim, known) = &mut self.claims[number];
        let answer = client.prepare_one(claim).await;
        self.log.push(format!("  prepare {:?}: {:?}", known.wants, answer.as_ref().map(drop)));
        match (answer, &known.known) {
            (Ok(devices), Known::Prepared(before)) => {
                ensure!(devices == *before, "another answer the second time: {devices:?}, not {before:?}");
            }
            (Ok(devices), _) => known.known = Known::Prepared(devices),
            // What a claim has it keeps.
            (Err(_), Known::Prepared(_)) => {}
            (Err(_), _) => known.known = Known::Unsure,
        }
        Ok(())
    }

    /// Releases a claim; at the end as kubelet does, again and again.
    async fn unprepare(&mut self, number: usize, end: bool) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let client = self.kubelet.client(DRIVER)?;
            let (claim, known) = &mut self.claims[number];
            if matches!(known.known, Known::Prepared(_)) {
                known.known = Known::Unsure;
            }
            match client.unprepare_one(claim).await {
                Ok(()) => {
                    known.known = Known::Gone;
                    return Ok(());
                }
                Err(error) if !end => {
                    self.log.push(format!("  unprepare: {error}"));
                    return Ok(());
                }
                Err(error) if tokio::time::Instant::now() > deadline => {
                    bail!("{} is not released: {error}", claim.name)
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await, // waits: for what it is busy with
            }
        }
    }

    /// Waits until there is nothing to complain of.
    async fn settle(&self) -> anyhow::Result<()> {
        let claims: Vec<_> = self.claims.iter().map(|(_, claim)| claim.clone()).collect();
        let complaints = || -> anyhow::Result<Vec<String>> {
            Ok(Scene::look(self.node.world(), &self.node.cdi())?.complaints(&claims, &self.kept))
        };
        until(PATIENCE, || complaints().is_ok_and(|complaints| complaints.is_empty())).await;
        let complaints = complaints()?;
        ensure!(complaints.is_empty(), "{}", complaints.join("; "));
        Ok(())
    }
}
