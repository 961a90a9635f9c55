//! Random histories of a node that is cut: whatever happens in whatever order, nothing is leaked, nothing of others is
//! touched, nothing is over-committed.
//!
//! Prepares, unprepares, kills at any effect, reboots, power cuts, lost cards, foreign changes, failing vendor calls.
//! What a history must keep is judged by [`Judge`], which knows only the hardware, the CDI files and the answers.
//! Planted faults prove that it sees what it is there for.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::{tests::Memory as Paper, *};
use crate::{
    device::{
        Fault, Status, VendorMode,
        memory::{Call, Memory as Hardware, Mishap},
    },
    domain::{
        claim::AllocatedDevice,
        health::{HealthReading, Policy},
        inventory::tests::scan_of,
        model::Model,
        names::{DriverName, NodeName, PoolName},
        npu::Scan,
        plan::{FoundFile, Step},
        quantity::Quantity,
        record::Phase,
        vnpu::CardReading,
    },
};

const GIB: u64 = 1 << 30;
const CARDS: u32 = 2;
const CLAIMS: u64 = 6;

/// A planted fault: one of the driver's rules broken at a seam.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// No intent reaches the disk.
    IntentSkipped,
    /// Every new vNPU is shown as it was ordered, whatever it is.
    ReadBackSkipped,
    /// Another vNPU of the chip is destroyed in the place of the one that was meant.
    WrongIdDestroyed,
    /// A restart forgets the records.
    RecordsForgotten,
    /// A prepare that kubelet gave up long ago counts as a new one.
    LatePrepare,
    /// Kubelet is answered although nothing was made durable.
    NeverSettled,
}

/// The process and its mortality: after a number of effects nothing that it does has any.
#[derive(Debug)]
struct Life {
    effects_left: AtomicU64,
    dead: AtomicBool,
}

impl Life {
    fn immortal() -> Arc<Self> {
        Arc::new(Self { effects_left: AtomicU64::new(u64::MAX), dead: AtomicBool::new(false) })
    }

    /// True if the next effect still happens.
    fn lives(&self) -> bool {
        let left = self.effects_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if left.is_err() {
            self.dead.store(true, Ordering::SeqCst);
        }
        left.is_ok()
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }
}

/// The disk, as far as a mortal process reaches it.
struct Desk {
    paper: Arc<Paper>,
    life: Arc<Life>,
    broken: Broken,
}

impl Disk for Desk {
    fn apply(&self, step: &Step) -> Result<(), String> {
        if !self.life.lives() {
            return Err("killed".to_owned());
        }
        match step {
            Step::Write(record) if self.broken == Broken::IntentSkipped && record.phase == Phase::Intent => Ok(()),
            step => self.paper.apply(step),
        }
    }

    fn settle(&self, steps: &[Step]) -> Result<(), String> {
        match self.broken {
            _ if !self.life.lives() => Err("killed".to_owned()),
            Broken::NeverSettled => Ok(()),
            _ => self.paper.settle(steps),
        }
    }

    fn has_file(&self, uid: &ClaimUid) -> Result<bool, String> {
        self.paper.has_file(uid)
    }

    fn files(&self) -> Result<Vec<FoundFile>, String> {
        self.paper.files()
    }

    fn write_node(&self, memory: &NodeMemory) -> Result<(), String> {
        self.paper.write_node(memory)
    }
}

/// The hardware, as far as a mortal process reaches it.
#[derive(Debug)]
struct Hand {
    hardware: Arc<Hardware>,
    life: Arc<Life>,
    broken: Broken,
    ordered: Mutex<BTreeMap<u32, String>>,
}

fn killed() -> Fault {
    Fault::Failed { backend: "hand", call: "any".to_owned(), why: "killed".to_owned() }
}

impl Backend for Hand {
    fn name(&self) -> &'static str {
        "hand"
    }

    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>> {
        self.hardware.scan()
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        self.hardware.health()
    }

    fn status(&self) -> Status {
        self.hardware.status()
    }

    fn card(&self, physical_id: u32) -> BoxFuture<'_, Result<CardReading, Fault>> {
        if self.life.is_dead() {
            return Box::pin(async { Err(killed()) });
        }
        Box::pin(async move {
            let mut reading = self.hardware.card(physical_id).await?;
            if self.broken == Broken::ReadBackSkipped {
                for vnpu in &mut reading.vnpus {
                    if let Some(template) = self.ordered.lock().unwrap().get(&vnpu.id) {
                        let large = template.contains("16g") || template.contains("32g");
                        vnpu.memory = if large { 16 * GIB } else { 8 * GIB };
                        vnpu.template.clone_from(template);
                    }
                }
                reading.free = None;
            }
            Ok(reading)
        })
    }

    fn create(&self, physical_id: u32, template: &str, id: u32) -> BoxFuture<'_, Result<u32, Fault>> {
        let template = template.to_owned();
        Box::pin(async move {
            if !self.life.lives() {
                return Err(killed());
            }
            let id = self.hardware.create(physical_id, &template, id).await?;
            self.ordered.lock().unwrap().insert(id, template);
            // A process that dies here made the vNPU and never heard of it.
            if self.life.lives() { Ok(id) } else { Err(killed()) }
        })
    }

    fn destroy(&self, physical_id: u32, id: u32) -> BoxFuture<'_, Result<(), Fault>> {
        Box::pin(async move {
            if !self.life.lives() {
                return Err(killed());
            }
            let others: Vec<_> = self.hardware.card(physical_id).await?.ids();
            let other = others.into_iter().find(|other| *other != id);
            let id = if self.broken == Broken::WrongIdDestroyed { other.unwrap_or(id) } else { id };
            self.hardware.destroy(physical_id, id).await
        })
    }

    fn vendor(&self) -> BoxFuture<'_, Result<VendorMode, Fault>> {
        self.hardware.vendor()
    }

    fn set_replay(&self, on: bool) -> BoxFuture<'_, Result<(), Fault>> {
        self.hardware.set_replay(on)
    }
}

/// The API server: what the scheduler booked for each claim.
#[derive(Default)]
struct Bookings(Mutex<BTreeMap<ClaimUid, (String, u64)>>);

struct Window(Arc<Bookings>);

impl Api for Window {
    fn claim(&self, claim: ClaimRef) -> BoxFuture<'static, Result<AllocatedClaim, Refusal>> {
        let booking = self.0.0.lock().unwrap().get(&claim.uid).cloned();
        Box::pin(async move {
            let (device, memory) = booking.ok_or_else(|| Refusal::ClaimMissing(claim.clone()))?;
            let result = AllocatedDevice {
                request: "npu".to_owned(),
                driver: "npu.huawei.com".to_owned(),
                pool: "master/npu".to_owned(),
                device,
                admin_access: false,
                share_id: Some("share".to_owned()),
                consumed_capacity: BTreeMap::from([("memCapacity".to_owned(), Quantity::bytes(memory))]),
                tolerations: Vec::new(),
            };
            Ok(AllocatedClaim { claim, results: vec![result], config: Vec::new(), asked_memory: BTreeMap::new() })
        })
    }

    fn publish(&self, _: Pool) {}

    fn event(&self, _: &Notice) {}

    fn kept(&self) -> BoxStream<'static, Kept> {
        let kept = Kept { consumable: Some(true), partitionable: Some(true), is_1_34: false };
        Box::pin(futures::stream::StreamExt::chain(futures::stream::iter([kept]), futures::stream::pending()))
    }
}

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

/// What a history must keep. Knows the hardware, the CDI files and the answers, and nothing of the driver's records.
#[derive(Default)]
struct Judge {
    /// vNPUs of others, which must stay.
    foreign: BTreeSet<u32>,
    /// vNPUs that may be taken for ours or not.
    either: BTreeSet<u32>,
    /// Claims that were answered as prepared, with their answers.
    prepared: BTreeMap<ClaimUid, Vec<PreparedDevice>>,
    /// Claims that were answered as released, and have not been asked for since.
    released: BTreeSet<ClaimUid>,
    /// vNPUs of ours that somebody else destroyed.
    lost: BTreeSet<ClaimUid>,
    /// vNPUs of claims whose release has begun and was not answered: their CDI files may be gone already.
    half: BTreeMap<ClaimUid, BTreeSet<u32>>,
}

impl Judge {
    /// True if a vNPU is none that the driver answers for.
    fn knows(&self, id: u32) -> bool {
        self.foreign.contains(&id) || self.either.contains(&id)
    }
}

/// One node through its life.
struct Story {
    dice: Dice,
    broken: Broken,
    scan: Scan,
    hardware: Arc<Hardware>,
    paper: Arc<Paper>,
    bookings: Arc<Bookings>,
    boot: u64,
    life: Arc<Life>,
    engine: Engine,
    shutdown: CancellationToken,
    judge: Judge,
    log: Vec<String>,
}

/// The bins: board, GiB, AI cores, AI CPUs.
const BINS: [(u32, u64, u32, u32); 3] = [(0x28, 32, 20, 7), (0x31, 64, 24, 6), (0x32, 64, 20, 7)];

impl Story {
    fn begin(seed: u64, bin: usize, broken: Broken) -> Self {
        let (board, gib, cores, _) = BINS[bin];
        let mut scan = scan_of(CARDS);
        for chip in &mut scan.chips {
            (chip.board_id, chip.memory, chip.ai_cores) = (Some(board), Some(gib * GIB), Some(cores));
        }
        let hardware = Arc::new(Hardware::new(scan.clone()));
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (ignores, tells) = (dice.roll(4) == 0, dice.roll(4) != 0);
        let lies = broken == Broken::ReadBackSkipped || dice.roll(16) == 0;
        hardware.cut(|cutting| {
            cutting.ignores_ids = ignores;
            cutting.tells_free = tells;
            cutting.real_memory = lies.then_some(3 * GIB);
        });
        let (paper, bookings, life) = (Arc::new(Paper::default()), Arc::new(Bookings::default()), Life::immortal());
        let (engine, shutdown) = Self::start(&hardware, &paper, &bookings, &life, 0, broken);
        Self {
            dice,
            broken,
            scan,
            hardware,
            paper,
            bookings,
            boot: 0,
            life,
            engine,
            shutdown,
            judge: Judge::default(),
            log: Vec::new(),
        }
    }

    fn start(
        hardware: &Arc<Hardware>,
        paper: &Arc<Paper>,
        bookings: &Arc<Bookings>,
        life: &Arc<Life>,
        boot: u64,
        broken: Broken,
    ) -> (Engine, CancellationToken) {
        // As the store does when it loads.
        paper.settle_directory(true);
        let records = paper.records.lock().unwrap().values().cloned().collect();
        let records = if broken == Broken::RecordsForgotten { Vec::new() } else { records };
        let memory = paper.node.lock().unwrap().clone().unwrap_or_default();
        let driver = DriverName::new("npu.huawei.com").unwrap();
        let pool = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
        let tick = Duration::from_micros(200);
        let hand = Hand { hardware: hardware.clone(), life: life.clone(), broken, ordered: Mutex::default() };
        let parts = Parts {
            node: Node { driver, pool, boot_id: format!("boot-{boot}") },
            backend: Arc::new(hand),
            disk: Arc::new(Desk { paper: paper.clone(), life: life.clone(), broken }),
            api: Arc::new(Window(bookings.clone())),
            loaded: Loaded { records, quarantined: Vec::new(), memory, problem: None },
            timing: Timing {
                health_interval: Duration::from_millis(1),
                rescan: tick,
                first_scan_wait: Duration::from_secs(20),
                release_wait: Duration::ZERO,
                busy_pause: tick,
                replay_wait: Duration::from_mins(2),
                replay_patience: Duration::from_secs(20),
            },
            policy: Policy::default(),
            wish: Wish { enabled: true, ..Wish::default() },
            uptime: Box::new(|| Duration::from_hours(1)),
            rival: Box::new(|| None),
        };
        let (engine, shutdown) = (Engine::new(parts, &mut Registry::default()), CancellationToken::new());
        let (running, stop) = (engine.clone(), shutdown.clone());
        tokio::spawn(async move { running.run(stop, || {}).await });
        (engine, shutdown)
    }

    async fn settled(&self) {
        let mut changes = self.engine.changes();
        let wait = async {
            // Off is possible too: somebody else's vNPUs with the vendor's replay on.
            while !self.engine.snapshot().recovered || self.engine.snapshot().model != Model::Consumable {
                if self.life.is_dead() {
                    return;
                }
                changes.changed().await.unwrap();
            }
            self.engine.core.claims.idle().await;
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the engine comes to rest");
    }

    /// The process ends without a word.
    async fn end_process(&mut self) {
        self.life.effects_left.store(0, Ordering::SeqCst);
        self.life.dead.store(true, Ordering::SeqCst);
        let _ = tokio::time::timeout(Duration::from_secs(20), self.engine.core.claims.idle()).await;
        self.shutdown.cancel();
    }

    /// The process ends without a word, and a new one starts.
    async fn restart(&mut self) {
        self.end_process().await;
        self.life = Life::immortal();
        (self.engine, self.shutdown) =
            Self::start(&self.hardware, &self.paper, &self.bookings, &self.life, self.boot, self.broken);
        self.settled().await;
    }

    fn claim(n: u64) -> ClaimRef {
        ClaimRef { namespace: "ml".to_owned(), name: format!("c{n}"), uid: ClaimUid::new(format!("uid-{n}")).unwrap() }
    }

    async fn prepare(&mut self, claim: &ClaimRef) -> Result<(), String> {
        let memory = self.scan.chips[0].memory.unwrap();
        if !self.paper.records.lock().unwrap().contains_key(&claim.uid) {
            let device = format!("npu-{}", self.dice.roll(u64::from(CARDS)));
            let part = memory >> self.dice.roll(3);
            self.bookings.0.lock().unwrap().insert(claim.uid.clone(), (device, part));
            self.judge.prepared.remove(&claim.uid);
        }
        self.judge.released.remove(&claim.uid);
        let answer = self.engine.prepare(self.engine.received(), claim.clone()).await;
        self.log.push(format!(
            "  prepare {}: {:?}",
            claim.uid,
            answer.as_ref().map(|_| ()).map_err(ToString::to_string)
        ));
        if self.life.is_dead() {
            return Ok(());
        }
        if let Ok(answer) = answer {
            if let Some(before) = self.judge.prepared.insert(claim.uid.clone(), answer.clone())
                && before != answer
                && self.boot == 0
            {
                return Err(format!("{claim} was prepared again and answered {answer:?}, before {before:?}"));
            }
            self.judge.lost.remove(&claim.uid);
        }
        Ok(())
    }

    async fn unprepare(&mut self, claim: &ClaimRef) -> Result<(), String> {
        let stale = self.engine.received();
        // Once it has begun, and as long as it has not succeeded, the claim may be either way.
        self.judge.prepared.remove(&claim.uid);
        let ids = self.ids_of(&claim.uid);
        self.judge.half.entry(claim.uid.clone()).or_default().extend(ids);
        let answer = self.engine.unprepare(self.engine.received(), claim.clone()).await;
        self.log.push(format!("  unprepare {}: {:?}", claim.uid, answer.as_ref().map_err(ToString::to_string)));
        if self.life.is_dead() {
            return Ok(());
        }
        if answer.is_ok() {
            self.judge.lost.remove(&claim.uid);
            self.judge.half.remove(&claim.uid);
            self.judge.released.insert(claim.uid.clone());
            // A prepare that was received before brings nothing back.
            let late = if self.broken == Broken::LatePrepare { self.engine.received() } else { stale };
            let late = self.engine.prepare(late, claim.clone()).await;
            if late.is_ok() || self.paper.has_file(&claim.uid)? {
                return Err(format!("a late prepare of {claim} brought it back"));
            }
        }
        Ok(())
    }

    /// One thing that happens.
    async fn turn(&mut self) -> Result<(), String> {
        let claim = Self::claim(self.dice.roll(CLAIMS));
        let before = self.dice.0;
        let kind = self.dice.roll(22);
        self.dice.0 = before;
        let effects = self.life.effects_left.load(Ordering::SeqCst);
        self.log.push(format!("{kind} {claim}{}", if effects == u64::MAX { "" } else { " (dying)" }));
        let fault = Fault::Failed { backend: "memory", call: "it".to_owned(), why: "told so".to_owned() };
        match self.dice.roll(22) {
            0..=7 => self.prepare(&claim).await?,
            8..=11 => self.unprepare(&claim).await?,
            12 | 13 => {
                self.die_at_work(&claim).await?;
                self.restart().await;
            }
            14 => self.reboot().await,
            15 => {
                let chip = u32::try_from(self.dice.roll(u64::from(CARDS))).unwrap();
                let template = if self.scan.chips[0].ai_cores == Some(24) { "vir06_1c_16g" } else { "vir05_1c_8g" };
                let template = if self.scan.chips[0].board_id == Some(0x32) { "vir05_1c_16g" } else { template };
                if let Ok(id) = self.hardware.add_vnpu(chip, template) {
                    // One under the very id of a claim's cannot be told from the vendor's own replay of it.
                    let either = self.named().contains(&id) || self.half_released().contains(&id);
                    if either {
                        self.judge.either.insert(id)
                    } else {
                        self.judge.foreign.insert(id)
                    };
                }
            }
            16 => {
                if let Some(id) = self.judge.foreign.pop_first() {
                    self.hardware.remove_vnpu(id);
                }
            }
            17 => {
                let named = self.named();
                if let Some(id) = named.iter().nth(usize::try_from(self.dice.roll(4)).unwrap()) {
                    self.hardware.remove_vnpu(*id);
                    self.judge.lost.extend(self.owner(*id));
                }
            }
            18 => {
                let call = [Call::Card, Call::Create, Call::Destroy][usize::try_from(self.dice.roll(3)).unwrap()];
                let mishap = match (self.dice.roll(3), call) {
                    (0, Call::Destroy) => Mishap::Remade,
                    (1, _) => Mishap::After(fault),
                    _ => Mishap::Before(fault),
                };
                self.hardware.plant(call, mishap);
                if self.dice.roll(2) == 0 {
                    self.prepare(&claim).await?;
                } else {
                    self.unprepare(&claim).await?;
                }
                self.hardware.unplant();
            }
            20 | 21 => {
                self.die_at_work(&claim).await?;
                self.cut_power().await?;
            }
            _ => {
                let gone = u32::try_from(self.dice.roll(u64::from(CARDS))).unwrap();
                self.hardware.drop_chip(gone);
                self.judge.released.remove(&claim.uid);
                let _ = self.engine.prepare(self.engine.received(), claim.clone()).await;
                self.hardware.set_scan(self.scan.clone());
                self.restart().await;
                // Whatever was answered while the card was away, the record says it.
                self.judge.prepared.retain(|uid, _| self.paper.records.lock().unwrap().contains_key(uid));
            }
        }
        Ok(())
    }

    /// Prepares or unprepares; the process dies after a few effects.
    async fn die_at_work(&mut self, claim: &ClaimRef) -> Result<(), String> {
        self.life.effects_left.store(self.dice.roll(6), Ordering::SeqCst);
        if self.dice.roll(2) == 0 { self.prepare(claim).await } else { self.unprepare(claim).await }
    }

    async fn reboot(&mut self) {
        self.boot += 1;
        let kept: BTreeSet<_> = self.hardware.vnpus().into_keys().collect();
        self.hardware.reboot();
        let back: BTreeSet<_> = self.hardware.replay().into_iter().collect();
        for id in kept.difference(&back) {
            self.judge.foreign.remove(id);
        }
        self.judge.prepared.clear();
        self.restart().await;
        // What the replay brings back for a claim that is gone by now is nobody's; for one that was cut off it is gone.
        let (named, there) = (self.named(), self.hardware.vnpus());
        self.judge.foreign.extend(back.into_iter().filter(|id| !named.contains(id) && there.contains_key(id)));
    }

    /// A reboot at which either directory may lose what was not settled. What kubelet was told stays.
    async fn cut_power(&mut self) -> Result<(), String> {
        self.end_process().await;
        let (records, files) = (self.dice.roll(2) == 0, self.dice.roll(2) == 0);
        self.log.push(format!("  power cut, unsettled records lost: {records}, files lost: {files}"));
        self.paper.lose(records, files);
        let prepared: Vec<_> = self.judge.prepared.keys().cloned().collect();
        self.reboot().await;
        for uid in prepared {
            if !self.paper.has_file(&uid)? {
                return Err(format!("{uid} was answered as prepared, and a power cut took its CDI file"));
            }
        }
        for uid in &self.judge.released {
            let held = |record: &Record| record.phase != Phase::Releasing;
            if self.paper.has_file(uid)? || self.paper.records.lock().unwrap().get(uid).is_some_and(held) {
                return Err(format!("{uid} was answered as released, and a power cut brought it back"));
            }
        }
        Ok(())
    }

    /// vNPUs that CDI files name.
    fn named(&self) -> BTreeSet<u32> {
        self.paper
            .files
            .lock()
            .unwrap()
            .values()
            .flat_map(|file| &file.devices)
            .filter_map(|device| device.vnpu)
            .collect()
    }

    /// vNPUs that the CDI file of a claim names.
    fn ids_of(&self, uid: &ClaimUid) -> BTreeSet<u32> {
        let files = self.paper.files.lock().unwrap();
        files.get(uid).into_iter().flat_map(|file| &file.devices).filter_map(|device| device.vnpu).collect()
    }

    /// vNPUs of claims whose release is still to be ended.
    fn half_released(&self) -> BTreeSet<u32> {
        let records = self.paper.records.lock().unwrap();
        let half = self.judge.half.iter().filter(|(uid, _)| records.contains_key(*uid));
        half.flat_map(|(_, ids)| ids).copied().collect()
    }

    fn owner(&self, id: u32) -> Option<ClaimUid> {
        let files = self.paper.files.lock().unwrap();
        let has = |file: &&crate::domain::plan::Injection| file.devices.iter().any(|device| device.vnpu == Some(id));
        files.values().find(has).map(|file| file.claim.uid.clone())
    }

    /// What must hold whenever the node is at rest.
    fn check(&self) -> Result<(), String> {
        let vnpus = self.hardware.vnpus();
        for id in &self.judge.foreign {
            if !vnpus.contains_key(id) {
                return Err(format!("vNPU {id}, which is not ours, was destroyed"));
            }
        }
        let files = self.paper.files.lock().unwrap();
        let mut seen = BTreeMap::new();
        for (uid, file) in files.iter() {
            for device in &file.devices {
                let chips: Vec<_> = device.physical_ids.iter().map(|chip| format!("chip {chip}")).collect();
                let vnpu = device.vnpu.map(|id| format!("vNPU {id}"));
                for what in chips.into_iter().chain(vnpu) {
                    if let Some(other) = seen.insert(what.clone(), uid.clone()) {
                        return Err(format!("{what} is in the files of {uid} and {other}"));
                    }
                }
                for chip in &device.physical_ids {
                    let cut = vnpus.iter().find(|(id, vnpu)| vnpu.physical_id == *chip && !self.judge.knows(**id));
                    if let Some((id, _)) = cut {
                        return Err(format!("chip {chip} is held whole by {uid} and carries vNPU {id}"));
                    }
                }
            }
        }
        for uid in self.judge.prepared.keys() {
            let Some(file) = files.get(uid) else { return Err(format!("{uid} is prepared and has no CDI file")) };
            let booked = self.bookings.0.lock().unwrap()[uid].1;
            for id in file.devices.iter().filter_map(|device| device.vnpu) {
                match vnpus.get(&id) {
                    _ if self.judge.lost.contains(uid) => {}
                    None => return Err(format!("vNPU {id} of {uid} is gone, and nobody took it")),
                    Some(vnpu) if vnpu.takes.memory.abs_diff(booked) > booked / 8 => {
                        return Err(format!("vNPU {id} of {uid} has {} of {booked} bytes", vnpu.takes.memory));
                    }
                    Some(_) => {}
                }
            }
        }
        for chip in &self.scan.chips {
            let on = |take: &dyn Fn(&crate::domain::vnpu::Resources) -> u64| -> u64 {
                vnpus.values().filter(|vnpu| vnpu.physical_id == chip.physical_id).map(|vnpu| take(&vnpu.takes)).sum()
            };
            let cpus = BINS.iter().find(|bin| Some(bin.0) == chip.board_id).map_or(0, |bin| u64::from(bin.3));
            let cores = u64::from(chip.ai_cores.unwrap_or(0));
            if on(&|takes| u64::from(takes.ai_cores)) > cores || on(&|takes| u64::from(takes.ai_cpus)) > cpus {
                return Err(format!("chip {} is over-committed", chip.physical_id));
            }
        }
        Ok(())
    }

    /// Ends the story: all claims are released, and only what is not ours may be left.
    async fn end(&mut self) -> Result<(), String> {
        self.hardware.unplant();
        self.hardware.set_scan(self.scan.clone());
        self.restart().await;
        self.judge.prepared.clear();
        for n in 0..CLAIMS {
            let claim = Self::claim(n);
            let mut last = String::new();
            for _ in 0..3 {
                match self.engine.unprepare(self.engine.received(), claim.clone()).await {
                    Ok(()) => last.clear(),
                    Err(refusal) => last = refusal.to_string(),
                }
            }
            if !last.is_empty() && !last.contains("cannot be told") {
                return Err(format!("{claim} cannot be released: {last}"));
            }
        }
        let left: Vec<_> = self.hardware.vnpus().into_keys().filter(|id| !self.judge.knows(*id)).collect();
        let disputed = !self.paper.records.lock().unwrap().is_empty();
        if !left.is_empty() && !disputed {
            return Err(format!("leaked vNPUs: {left:?}"));
        }
        if !disputed && !self.paper.files.lock().unwrap().is_empty() {
            return Err("CDI files are left".to_owned());
        }
        self.check()
    }
}

/// Tells one story; an error says what was not kept.
async fn tell(seed: u64, bin: usize, broken: Broken) -> Result<(), String> {
    let mut story = Story::begin(seed, bin, broken);
    story.settled().await;
    let mut told = Ok(());
    for _ in 0..12 {
        told = story.turn().await;
        let shown: Vec<_> = story
            .paper
            .records
            .lock()
            .unwrap()
            .values()
            .map(|r| {
                format!(
                    "{} {:?} {} {:?}",
                    r.claim.uid,
                    r.phase,
                    r.device_names(),
                    r.devices[0].cut.as_ref().map(|c| c.id)
                )
            })
            .collect();
        let files: Vec<_> = story.paper.files.lock().unwrap().keys().cloned().collect();
        story.log.push(format!(
            "    disk {shown:?} files {files:?} hw {:?}",
            story.hardware.vnpus().keys().collect::<Vec<_>>()
        ));
        if told.is_ok() {
            told = story.check();
        }
        if told.is_err() {
            break;
        }
    }
    if told.is_ok() {
        told = story.end().await;
    }
    story.shutdown.cancel();
    told.map_err(|what| format!("{what}\n{}", story.log.join("\n")))
}

#[tokio::test]
async fn what_is_shown_of_a_card_follows_a_cut_and_a_release_at_once() {
    let story = Story::begin(1, 0, Broken::Nothing);
    story.hardware.cut(|cutting| (cutting.ignores_ids, cutting.real_memory) = (false, None));
    story.settled().await;
    let shown = |story: &Story| -> Vec<u32> {
        let devices = story.engine.snapshot().devices;
        devices.iter().filter_map(|device| device.reading.as_ref()).flat_map(CardReading::ids).collect()
    };
    story.bookings.0.lock().unwrap().insert(Story::claim(0).uid, ("npu-0".to_owned(), 8 * GIB));
    story.engine.prepare(story.engine.received(), Story::claim(0)).await.unwrap();
    assert_eq!(shown(&story), [100]);
    story.engine.unprepare(story.engine.received(), Story::claim(0)).await.unwrap();
    assert_eq!(shown(&story), Vec::<u32>::new());
    story.shutdown.cancel();
}

/// How many histories a bin is put through; `HISTORIES` in the environment asks for another number.
fn number() -> u64 {
    std::env::var("HISTORIES").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

async fn tell_all(bin: usize) {
    for seed in 1..=number() {
        if let Err(what) = tell(seed, bin, Broken::Nothing).await {
            panic!("bin {bin}, seed {seed}: {what}");
        }
    }
}

#[tokio::test]
async fn ten_thousand_histories_of_a_910b4_keep_every_promise() {
    tell_all(0).await;
}

#[tokio::test]
async fn ten_thousand_histories_of_a_910b2_keep_every_promise() {
    tell_all(1).await;
}

#[tokio::test]
async fn ten_thousand_histories_of_a_910b3_keep_every_promise() {
    tell_all(2).await;
}

#[tokio::test]
async fn every_planted_fault_is_caught() {
    for broken in [
        Broken::IntentSkipped,
        Broken::ReadBackSkipped,
        Broken::WrongIdDestroyed,
        Broken::RecordsForgotten,
        Broken::LatePrepare,
        Broken::NeverSettled,
    ] {
        let mut caught = None;
        for seed in 1..=400 {
            if let Err(what) = tell(seed, 0, broken).await {
                caught = Some(what);
                break;
            }
        }
        assert!(caught.is_some(), "{broken:?} was not caught");
    }
}
