//! The engine on stand-ins that can be slow, fail or be absent: every order of calls ends as the last one says.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::DropGuard;

use super::*;
use crate::{
    device::{self, Fault, Status, memory::Call},
    domain::{
        claim::AllocatedDevice,
        health::{Condition, HealthReading, Level, Policy},
        inventory::tests::scan_of,
        names::{DriverName, NodeName, PoolName},
        notice::Severity,
        npu::Scan,
        plan::{FoundFile, Injection, Step},
        record::Phase,
    },
};

/// Hardware that says what it is told.
#[derive(Debug)]
struct Hardware {
    scan: Mutex<Result<Scan, Fault>>,
    health: Mutex<BTreeMap<u32, HealthReading>>,
    scans: AtomicUsize,
}

impl Backend for Hardware {
    fn name(&self) -> &'static str {
        "stand-in"
    }

    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>> {
        self.scans.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { self.scan.lock().unwrap().clone() })
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        Box::pin(async { Ok(self.health.lock().unwrap().clone()) })
    }

    fn status(&self) -> Status {
        let (source, detail) = (String::new(), "told so".to_owned());
        Status { backend: "stand-in", state: "starting", source, severity: Severity::Info, detail }
    }
}

/// A disk that can fail one step by its name, or all of them, and so many times to settle.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) records: Mutex<BTreeMap<ClaimUid, Record>>,
    pub(super) files: Mutex<BTreeMap<ClaimUid, Injection>>,
    /// What a power cut brings back: entries of either directory as they were before what is not settled.
    settled: Mutex<(Earlier<Record>, Earlier<Injection>)>,
    failing: Mutex<BTreeSet<&'static str>>,
    failing_settles: AtomicUsize,
    pub(super) node: Mutex<Option<NodeMemory>>,
}

/// What was there before, or that nothing was.
type Earlier<T> = BTreeMap<ClaimUid, Option<T>>;

impl Memory {
    fn is_empty(&self) -> bool {
        self.records.lock().unwrap().is_empty() && self.files.lock().unwrap().is_empty()
    }

    /// Makes one directory durable, as one that opens it does.
    pub(super) fn settle_directory(&self, of_records: bool) {
        let mut settled = self.settled.lock().unwrap();
        if of_records { settled.0.clear() } else { settled.1.clear() }
    }

    /// The power is cut: the directories of records and of CDI files lose what is not settled, or keep it by chance.
    pub(super) fn lose(&self, records: bool, files: bool) {
        fn restore<T>(now: &mut BTreeMap<ClaimUid, T>, earlier: Earlier<T>) {
            for (uid, entry) in earlier {
                match entry {
                    Some(entry) => drop(now.insert(uid, entry)),
                    None => drop(now.remove(&uid)),
                }
            }
        }
        let (of_records, of_files) = std::mem::take(&mut *self.settled.lock().unwrap());
        if records {
            restore(&mut self.records.lock().unwrap(), of_records);
        }
        if files {
            restore(&mut self.files.lock().unwrap(), of_files);
        }
    }
}

impl Disk for Memory {
    fn apply(&self, step: &Step) -> Result<(), String> {
        if self.failing.lock().unwrap().contains(step.name()) {
            return Err("no space left on device".to_owned());
        }
        let (mut records, mut files) = (self.records.lock().unwrap(), self.files.lock().unwrap());
        let uid = match step {
            Step::Write(record) => &record.claim.uid,
            Step::Inject(injection) => &injection.claim.uid,
            Step::Withdraw(uid) | Step::Forget(uid) => uid,
        };
        let mut settled = self.settled.lock().unwrap();
        if step.is_of_record() {
            settled.0.entry(uid.clone()).or_insert_with(|| records.get(uid).cloned());
        } else {
            settled.1.entry(uid.clone()).or_insert_with(|| files.get(uid).cloned());
        }
        match step {
            Step::Write(record) => drop(records.insert(uid.clone(), (**record).clone())),
            Step::Inject(injection) => drop(files.insert(uid.clone(), injection.clone())),
            Step::Withdraw(uid) => drop(files.remove(uid)),
            Step::Forget(uid) => drop(records.remove(uid)),
        }
        Ok(())
    }

    fn settle(&self, steps: &[Step]) -> Result<(), String> {
        let failing = |left: usize| left.checked_sub(1);
        if self.failing_settles.fetch_update(Ordering::SeqCst, Ordering::SeqCst, failing).is_ok() {
            return Err("input/output error".to_owned());
        }
        for step in steps {
            self.settle_directory(step.is_of_record());
        }
        Ok(())
    }

    fn has_file(&self, uid: &ClaimUid) -> Result<bool, String> {
        Ok(self.files.lock().unwrap().contains_key(uid))
    }

    fn files(&self) -> Result<Vec<FoundFile>, String> {
        let files = self.files.lock().unwrap();
        Ok(files.iter().map(|(uid, content)| FoundFile { uid: uid.clone(), content: Some(content.clone()) }).collect())
    }

    fn write_node(&self, memory: &NodeMemory) -> Result<(), String> {
        if self.failing.lock().unwrap().contains("node") {
            return Err("no space left on device".to_owned());
        }
        *self.node.lock().unwrap() = Some(memory.clone());
        Ok(())
    }
}

/// An API server whose answers wait for a permit; a claim's name is its device.
#[derive(Debug)]
struct Server {
    permits: Semaphore,
    asked: Notify,
    published: Mutex<Vec<Pool>>,
    events: Mutex<Vec<String>>,
    drops_taints: AtomicBool,
    kept: watch::Sender<Kept>,
}

impl Server {
    fn closed() -> Arc<Self> {
        let (permits, asked) = (Semaphore::new(0), Notify::new());
        Arc::new(Self {
            permits,
            asked,
            published: Mutex::default(),
            events: Mutex::default(),
            drops_taints: AtomicBool::default(),
            kept: watch::Sender::default(),
        })
    }

    fn open() -> Arc<Self> {
        let server = Self::closed();
        server.permits.add_permits(Semaphore::MAX_PERMITS / 2);
        server
    }
}

struct Handle(Arc<Server>);

impl Api for Handle {
    fn claim(&self, claim: ClaimRef) -> BoxFuture<'static, Result<AllocatedClaim, Refusal>> {
        let server = self.0.clone();
        Box::pin(async move {
            server.asked.notify_one();
            server.permits.acquire().await.unwrap().forget();
            assert_ne!(claim.name, "panic", "asked to panic");
            let result = AllocatedDevice {
                request: "npu".to_owned(),
                driver: "npu.huawei.com".to_owned(),
                pool: "master/npu".to_owned(),
                device: claim.name.clone(),
                admin_access: false,
                share_id: None,
                consumed_capacity: BTreeMap::new(),
                tolerations: Vec::new(),
            };
            Ok(AllocatedClaim { claim, results: vec![result], config: Vec::new(), asked_memory: BTreeMap::new() })
        })
    }

    fn publish(&self, pool: Pool) {
        self.0.published.lock().unwrap().push(pool);
    }

    fn keeps_taints(&self) -> bool {
        !self.0.drops_taints.load(Ordering::Relaxed)
    }

    fn kept(&self) -> BoxStream<'static, Kept> {
        // Silent until it is told what to say.
        Box::pin(futures::stream::unfold(self.0.kept.subscribe(), |mut kept| async move {
            kept.changed().await.ok()?;
            let now = *kept.borrow_and_update();
            Some((now, kept))
        }))
    }

    fn event(&self, notice: &Notice) {
        self.0.events.lock().unwrap().push(notice.message());
    }
}

/// An engine and all that it stands on.
struct Bench {
    engine: Engine,
    disk: Arc<Memory>,
    server: Arc<Server>,
    hardware: Arc<Hardware>,
    rival: Arc<AtomicBool>,
    shutdown: CancellationToken,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

fn loaded_bench(server: Arc<Server>, scan: Result<Scan, Fault>, loaded: Loaded, disk: Arc<Memory>) -> Bench {
    waiting_bench(server, scan, loaded, disk, Duration::ZERO)
}

fn waiting_bench(
    server: Arc<Server>,
    scan: Result<Scan, Fault>,
    loaded: Loaded,
    disk: Arc<Memory>,
    release_wait: Duration,
) -> Bench {
    let hardware = Arc::new(Hardware { scan: Mutex::new(scan), health: Mutex::default(), scans: AtomicUsize::new(0) });
    let pool = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
    let driver = DriverName::new("npu.huawei.com").unwrap();
    let node = Node { driver, pool, boot_id: "boot".to_owned() };
    let millisecond = Duration::from_millis(1);
    let timing = Timing {
        health_interval: millisecond,
        rescan: millisecond,
        first_scan_wait: Duration::from_secs(20),
        release_wait,
        busy_pause: millisecond,
        replay_wait: Duration::from_mins(2),
        replay_patience: Duration::from_secs(20),
    };
    let rival = Arc::new(AtomicBool::default());
    let other = rival.clone();
    let parts = Parts {
        node,
        backend: hardware.clone(),
        disk: disk.clone(),
        api: Arc::new(Handle(server.clone())),
        loaded,
        timing,
        policy: Policy { quiet: Duration::from_millis(50), ..Policy::default() },
        wish: Wish::default(),
        uptime: Box::new(|| Duration::from_hours(1)),
        rival: Box::new(move || other.load(Ordering::Relaxed).then(|| "a rival".to_owned())),
    };
    let engine = Engine::new(parts, &mut Registry::default());
    Bench { engine, disk, server, hardware, rival, shutdown: CancellationToken::new() }
}

fn bench(server: Arc<Server>) -> Bench {
    let bench = loaded_bench(server, Ok(scan_of(8)), Loaded::default(), Arc::default());
    bench.start();
    bench
}

impl Bench {
    fn start(&self) {
        let (engine, shutdown) = (self.engine.clone(), self.shutdown.clone());
        tokio::spawn(async move { engine.run(shutdown, || {}).await });
    }

    async fn recovered(&self) {
        self.until(|snapshot| snapshot.recovered).await;
    }

    async fn until(&self, condition: impl Fn(&Snapshot) -> bool) {
        let mut changes = self.engine.changes();
        let wait = async {
            while !condition(&self.engine.snapshot()) {
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the condition came to pass");
    }

    async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<PreparedDevice>, Refusal> {
        self.engine.prepare(self.engine.received(), claim.clone()).await
    }

    async fn unprepare(&self, claim: &ClaimRef) -> Result<(), Refusal> {
        self.engine.unprepare(self.engine.received(), claim.clone()).await
    }
}

/// Lets other tasks run until the condition holds.
async fn eventually(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the condition came to pass");
}

fn claim(n: usize, device: &str) -> ClaimRef {
    ClaimRef { namespace: "ml".to_owned(), name: device.to_owned(), uid: ClaimUid::new(format!("uid-{n}")).unwrap() }
}

#[tokio::test]
async fn a_claim_is_prepared_recorded_injected_and_released() {
    let bench = bench(Server::open());
    let answer = bench.prepare(&claim(1, "npu-2")).await.unwrap();
    assert_eq!(answer[0].device, "npu-2");
    assert_eq!(bench.disk.records.lock().unwrap().len(), 1);
    assert_eq!(bench.disk.files.lock().unwrap().len(), 1);
    assert_eq!(bench.prepare(&claim(1, "npu-2")).await.unwrap(), answer);
    bench.unprepare(&claim(1, "npu-2")).await.unwrap();
    bench.unprepare(&claim(1, "npu-2")).await.unwrap();
    assert!(bench.disk.is_empty());
}

#[tokio::test]
async fn equal_requests_join_one_task() {
    let bench = bench(Server::closed());
    let same = claim(1, "npu-0");
    let (first, second) = (bench.engine.prepare(bench.engine.received(), same.clone()), bench.prepare(&same));
    bench.server.permits.add_permits(1);
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first.unwrap(), second.unwrap());
    assert_eq!(bench.server.permits.available_permits(), 0, "the claim was read once");
}

#[tokio::test]
async fn different_claims_do_not_wait_for_each_other() {
    let bench = bench(Server::closed());
    let slow = bench.engine.prepare(bench.engine.received(), claim(1, "npu-0"));
    bench.server.asked.notified().await;
    bench.unprepare(&claim(2, "npu-1")).await.unwrap();
    bench.server.permits.add_permits(2);
    bench.prepare(&claim(3, "npu-3")).await.unwrap();
    slow.await.unwrap();
}

#[tokio::test]
async fn an_unprepare_overtakes_a_prepare_which_then_leaves_nothing() {
    let bench = bench(Server::closed());
    let prepare = bench.engine.prepare(bench.engine.received(), claim(1, "npu-0"));
    bench.server.asked.notified().await;
    bench.unprepare(&claim(1, "npu-0")).await.unwrap();
    assert!(matches!(prepare.await, Err(Refusal::Overtaken(_))));
    assert!(bench.disk.is_empty());
    assert_eq!(bench.engine.snapshot().claims.len(), 0);
}

#[tokio::test]
async fn a_prepare_received_before_the_unprepare_was_answered_brings_nothing_back() {
    let bench = bench(Server::open());
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    let early = bench.engine.received();
    bench.unprepare(&claim(1, "npu-0")).await.unwrap();
    let late = bench.engine.prepare(early, claim(1, "npu-0")).await;
    assert!(matches!(late, Err(Refusal::Overtaken(_))));
    assert!(bench.disk.is_empty());
    bench.prepare(&claim(1, "npu-0")).await.expect("one received later is new");
}

#[tokio::test]
async fn work_goes_on_when_the_call_is_dropped() {
    let bench = bench(Server::closed());
    drop(bench.engine.prepare(bench.engine.received(), claim(1, "npu-0")));
    bench.server.permits.add_permits(1);
    bench.until(|snapshot| snapshot.claims.len() == 1).await;
    assert!(bench.engine.drain(Duration::from_secs(20)).await);
    assert_eq!(bench.disk.files.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_failed_step_is_undone_and_the_card_is_free_again() {
    let bench = bench(Server::open());
    bench.disk.failing.lock().unwrap().insert("writing the CDI file");
    let text = bench.prepare(&claim(1, "npu-0")).await.unwrap_err().to_string();
    assert_eq!(text, "writing the CDI file for claim ml/npu-0 failed: no space left on device");
    assert!(bench.disk.is_empty());
    bench.disk.failing.lock().unwrap().clear();
    bench.prepare(&claim(2, "npu-0")).await.unwrap();
}

#[tokio::test]
async fn a_card_whose_undo_failed_stays_held_until_its_claim_is_unprepared() {
    let bench = bench(Server::open());
    bench.disk.failing.lock().unwrap().extend(["writing the CDI file", "removing the record"]);
    bench.prepare(&claim(1, "npu-0")).await.unwrap_err();
    bench.disk.failing.lock().unwrap().clear();
    assert!(matches!(bench.prepare(&claim(2, "npu-0")).await, Err(Refusal::Held { .. })));
    bench.unprepare(&claim(1, "npu-0")).await.unwrap();
    bench.prepare(&claim(2, "npu-0")).await.unwrap();
}

#[tokio::test]
async fn what_was_answered_outlives_a_power_cut() {
    let bench = bench(Server::open());
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.lose(true, true);
    assert_eq!((bench.disk.records.lock().unwrap().len(), bench.disk.files.lock().unwrap().len()), (1, 1));
    bench.unprepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.lose(true, true);
    assert!(bench.disk.is_empty());
}

#[tokio::test]
async fn a_prepare_that_cannot_be_made_durable_is_refused_and_leaves_nothing() {
    let bench = bench(Server::open());
    bench.disk.failing_settles.store(1, Ordering::SeqCst);
    let text = bench.prepare(&claim(1, "npu-0")).await.unwrap_err().to_string();
    assert_eq!(text, "making the files durable for claim ml/npu-0 failed: input/output error");
    assert!(bench.disk.is_empty());
    bench.disk.lose(true, true);
    assert!(bench.disk.is_empty(), "that it was undone is durable");
    bench.prepare(&claim(2, "npu-0")).await.unwrap();
}

#[tokio::test]
async fn a_replay_makes_durable_what_an_earlier_prepare_could_not() {
    let bench = bench(Server::open());
    bench.disk.failing_settles.store(2, Ordering::SeqCst);
    let text = bench.prepare(&claim(1, "npu-0")).await.unwrap_err().to_string();
    assert!(text.contains("and undoing it failed: making the files durable: input/output error"), "{text}");
    assert!(matches!(bench.prepare(&claim(2, "npu-0")).await, Err(Refusal::Held { .. })));
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.lose(true, true);
    assert_eq!((bench.disk.records.lock().unwrap().len(), bench.disk.files.lock().unwrap().len()), (1, 1));
}

#[tokio::test]
async fn an_unprepare_that_cannot_be_made_durable_keeps_the_card_until_it_is_repeated() {
    let bench = bench(Server::open());
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.failing_settles.store(1, Ordering::SeqCst);
    let text = bench.unprepare(&claim(1, "npu-0")).await.unwrap_err().to_string();
    assert_eq!(text, "making the files durable for claim ml/npu-0 failed: input/output error");
    assert!(matches!(bench.prepare(&claim(2, "npu-0")).await, Err(Refusal::Held { .. })), "the power may be cut yet");
    bench.unprepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.lose(true, true);
    assert!(bench.disk.is_empty());
    bench.prepare(&claim(2, "npu-0")).await.unwrap();
}

#[tokio::test]
async fn a_claim_that_is_wanted_again_after_its_unprepare_failed_gets_record_and_file_again() {
    let bench = bench(Server::open());
    let answer = bench.prepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.failing_settles.store(1, Ordering::SeqCst);
    bench.unprepare(&claim(1, "npu-0")).await.unwrap_err();
    assert_eq!(bench.prepare(&claim(1, "npu-0")).await.unwrap(), answer);
    bench.disk.lose(true, true);
    assert_eq!((bench.disk.records.lock().unwrap().len(), bench.disk.files.lock().unwrap().len()), (1, 1));
}

#[tokio::test]
async fn a_prepare_waits_for_the_claim_whose_card_it_was_given() {
    let (loaded, disk) = (Loaded::default(), Arc::new(Memory::default()));
    let bench = waiting_bench(Server::open(), Ok(scan_of(8)), loaded, disk, Duration::from_mins(2));
    bench.start();
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    let (first, second, third) = (claim(1, "npu-0"), claim(2, "npu-0"), claim(3, "npu-1"));
    let waiting = bench.prepare(&second);
    tokio::pin!(waiting);
    // The other card shows that the second had its try.
    tokio::select! {
        biased;
        early = &mut waiting => panic!("it did not wait: {early:?}"),
        beside = bench.prepare(&third) => drop(beside.unwrap()),
    }
    bench.unprepare(&first).await.unwrap();
    waiting.await.unwrap();
}

#[tokio::test]
async fn a_prepare_that_waits_for_a_card_is_cancelled_by_its_own_unprepare() {
    let (loaded, disk) = (Loaded::default(), Arc::new(Memory::default()));
    let bench = waiting_bench(Server::open(), Ok(scan_of(8)), loaded, disk, Duration::from_mins(2));
    bench.start();
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    let second = claim(2, "npu-0");
    let (waited, released) = tokio::join!(biased; bench.prepare(&second), bench.unprepare(&second));
    assert!(matches!(waited, Err(Refusal::Overtaken(_))), "{waited:?}");
    released.unwrap();
    assert_eq!(bench.disk.files.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_failed_unprepare_keeps_the_claim_and_can_be_repeated() {
    let bench = bench(Server::open());
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
    bench.disk.failing.lock().unwrap().insert("removing the record");
    bench.unprepare(&claim(1, "npu-0")).await.unwrap_err();
    assert!(matches!(bench.prepare(&claim(2, "npu-0")).await, Err(Refusal::Held { .. })));
    bench.disk.failing.lock().unwrap().clear();
    bench.unprepare(&claim(1, "npu-0")).await.unwrap();
    assert!(bench.disk.is_empty());
}

#[tokio::test]
async fn a_panic_in_one_claim_leaves_the_others_alone() {
    let bench = bench(Server::open());
    assert!(matches!(bench.prepare(&claim(1, "panic")).await, Err(Refusal::Internal(..))));
    bench.prepare(&claim(2, "npu-0")).await.unwrap();
    bench.unprepare(&claim(1, "panic")).await.unwrap();
}

#[tokio::test]
async fn a_prepare_waits_for_the_first_scan_and_an_unprepare_does_not() {
    let bench = loaded_bench(Server::open(), Ok(scan_of(8)), Loaded::default(), Arc::default());
    let prepare = bench.engine.prepare(bench.engine.received(), claim(1, "npu-0"));
    bench.unprepare(&claim(2, "npu-0")).await.unwrap();
    bench.start();
    prepare.await.unwrap();
}

#[tokio::test]
async fn a_failed_scan_publishes_nothing_and_is_tried_again() {
    let fault = Fault::NotReady { backend: "stand-in", why: "init answers -8005".to_owned() };
    let bench = loaded_bench(Server::open(), Err(fault), Loaded::default(), Arc::default());
    bench.start();
    eventually(|| bench.hardware.scans.load(Ordering::SeqCst) >= 3).await;
    assert!(bench.server.published.lock().unwrap().is_empty());
    assert_eq!(bench.server.events.lock().unwrap().len(), 1, "a fault that stays is said once");
    *bench.hardware.scan.lock().unwrap() = Ok(scan_of(2));
    bench.recovered().await;
    eventually(|| !bench.server.published.lock().unwrap().is_empty()).await;
    assert_eq!(bench.server.published.lock().unwrap()[0].slices[0].devices.len(), 2);
}

#[tokio::test]
async fn a_fault_taints_the_card_and_reaches_the_health_stream_of_its_claim() {
    let bench = bench(Server::open());
    bench.prepare(&claim(1, "npu-1")).await.unwrap();
    let mut stream = bench.engine.health();
    assert_eq!(stream.borrow_and_update()[0].device, "npu-1");
    bench.hardware.health.lock().unwrap().insert(1, HealthReading::of(Level::Critical));
    let sick = stream.wait_for(|list| list[0].condition == Condition::Tainted);
    tokio::time::timeout(Duration::from_secs(20), sick).await.unwrap().unwrap();
    eventually(|| {
        bench.server.published.lock().unwrap().iter().any(|pool| !pool.slices[0].devices[1].taints.is_empty())
    })
    .await;
    assert!(bench.prepare(&claim(2, "npu-2")).await.is_ok());
    bench.hardware.health.lock().unwrap().insert(2, HealthReading::of(Level::Major));
    bench
        .until(|snapshot| {
            snapshot.devices[2].health.as_ref().is_some_and(|health| health.reading.level == Level::Major)
        })
        .await;
    bench.prepare(&claim(2, "npu-2")).await.expect("a claim that has the card keeps it");
    bench.unprepare(&claim(2, "npu-2")).await.unwrap();
    assert!(matches!(bench.prepare(&claim(3, "npu-2")).await, Err(Refusal::Unhealthy { .. })));
}

#[tokio::test]
async fn cards_are_polled_while_another_is_on_its_way_up() {
    let bench = bench(Server::open());
    bench.recovered().await;
    *bench.hardware.health.lock().unwrap() = (0..8).map(|card| (card, HealthReading::default())).collect();
    let fault = Fault::NotReady { backend: "stand-in", why: "7 of 8 chips are up".to_owned() };
    *bench.hardware.scan.lock().unwrap() = Err(fault);
    bench.hardware.health.lock().unwrap().insert(4, HealthReading::of(Level::Gone));
    let scans = bench.hardware.scans.load(Ordering::SeqCst);
    // More turns than answers may be missed.
    eventually(|| bench.hardware.scans.load(Ordering::SeqCst) > scans + 5).await;
    bench.hardware.health.lock().unwrap().insert(2, HealthReading::of(Level::Critical));
    let condition = |snapshot: &Snapshot, card: usize| snapshot.devices[card].health.as_ref().map(|it| it.condition);
    bench.until(|snapshot| condition(snapshot, 2) == Some(Condition::Tainted)).await;
    let snapshot = bench.engine.snapshot();
    assert_eq!([0, 4].map(|card| condition(&snapshot, card)), [Some(Condition::Ok), Some(Condition::Lost)]);
}

#[tokio::test]
async fn a_lost_card_is_told_over_scans_and_restarts_until_it_is_back() {
    let without = |gone: &[u32]| {
        let chips = scan_of(3).chips.into_iter().filter(|chip| !gone.contains(&chip.physical_id)).collect();
        Ok(Scan { chips, ..scan_of(3) })
    };
    let lost = |snapshot: &Snapshot| -> Vec<(String, Condition)> {
        let told = |view: &DeviceView| (view.npu.name.to_string(), view.health.as_ref().unwrap().condition);
        snapshot.lost.iter().map(told).collect()
    };
    let offered = |bench: &Bench| -> Vec<(String, bool)> {
        let published = bench.server.published.lock().unwrap();
        let devices = published.last().map(|pool| &pool.slices[0].devices[..]).unwrap_or_default();
        devices.iter().map(|device| (device.name.clone(), device.taints.is_empty())).collect()
    };
    let row = |name: &str, open: bool| (name.to_owned(), open);
    let gone = |name: &str| (name.to_owned(), Condition::Lost);

    let first = loaded_bench(Server::open(), Ok(scan_of(3)), Loaded::default(), Arc::default());
    first.start();
    first.prepare(&claim(1, "npu-1")).await.unwrap();
    *first.hardware.scan.lock().unwrap() = without(&[1, 2]);
    first.hardware.health.lock().unwrap().extend([1, 2].map(|card| (card, HealthReading::of(Level::Gone))));
    first.until(|snapshot| lost(snapshot) == [gone("npu-1"), gone("npu-2")]).await;
    let held = |bench: &Bench| bench.engine.health().borrow().iter().map(|it| it.condition).collect::<Vec<_>>();
    assert_eq!(held(&first), [Condition::Lost]);
    // Only what a claim lives on is published on, so that the claim's pod can be evicted.
    eventually(|| offered(&first) == [row("npu-0", true), row("npu-1", false)]).await;
    eventually(|| first.disk.node.lock().unwrap().as_ref().is_some_and(|memory| memory.lost.npus.len() == 2)).await;

    let records = first.disk.records.lock().unwrap().values().cloned().collect();
    let memory = first.disk.node.lock().unwrap().clone().unwrap();
    let mut other_boot = memory.clone();
    other_boot.lost.boot_id = "earlier".to_owned();
    let loaded = Loaded { records, memory, ..Loaded::default() };
    let second = loaded_bench(Server::open(), without(&[1, 2]), loaded, first.disk.clone());
    assert_eq!(lost(&second.engine.snapshot()), [gone("npu-1"), gone("npu-2")], "known before any scan");
    second.start();
    second.recovered().await;
    assert_eq!((lost(&second.engine.snapshot()).len(), held(&second)), (2, vec![Condition::Lost]));
    eventually(|| offered(&second) == [row("npu-0", true), row("npu-1", false)]).await;
    *second.hardware.health.lock().unwrap() = (0..3).map(|card| (card, HealthReading::default())).collect();
    *second.hardware.scan.lock().unwrap() = Ok(scan_of(3));
    eventually(|| offered(&second) == [row("npu-0", true), row("npu-1", true), row("npu-2", true)]).await;
    assert_eq!(lost(&second.engine.snapshot()), []);
    eventually(|| second.disk.node.lock().unwrap().as_ref().is_some_and(|memory| memory.lost.is_empty())).await;

    let loaded = Loaded { memory: other_boot, ..Loaded::default() };
    let third = loaded_bench(Server::open(), without(&[1, 2]), loaded, Arc::default());
    assert_eq!(lost(&third.engine.snapshot()), [], "it was taken out");
}

#[tokio::test]
async fn where_the_server_drops_taints_a_sick_card_is_withdrawn_once_it_is_idle() {
    let server = Server::open();
    server.drops_taints.store(true, Ordering::Relaxed);
    let bench = bench(server);
    bench.prepare(&claim(1, "npu-1")).await.unwrap();
    let offers = |name: &str| {
        let published = bench.server.published.lock().unwrap();
        published.last().is_some_and(|pool| pool.slices[0].devices.iter().any(|device| device.name == name))
    };
    bench.hardware.health.lock().unwrap().extend([1, 2].map(|card| (card, HealthReading::of(Level::Critical))));
    eventually(|| !offers("npu-2")).await;
    assert!(offers("npu-1"), "a claim holds it");
    bench.unprepare(&claim(1, "npu-1")).await.unwrap();
    eventually(|| !offers("npu-1")).await;
    bench.server.drops_taints.store(false, Ordering::Relaxed);
    eventually(|| offers("npu-1") && offers("npu-2")).await;
}

#[tokio::test]
async fn the_nodes_memory_is_written_until_it_is_on_disk() {
    let disk = Arc::new(Memory::default());
    disk.failing.lock().unwrap().insert("node");
    let bench = loaded_bench(Server::open(), Ok(scan_of(2)), Loaded::default(), disk);
    bench.start();
    bench.recovered().await;
    assert!(bench.disk.node.lock().unwrap().is_none());
    bench.disk.failing.lock().unwrap().clear();
    eventually(|| bench.disk.node.lock().unwrap().as_ref().is_some_and(|memory| memory.cards.len() == 2)).await;
}

#[tokio::test]
async fn a_suspension_that_cannot_be_written_is_told_with_its_cause_and_changes_nothing() {
    let disk = Arc::new(Memory::default());
    let bench = loaded_bench(Server::open(), Ok(scan_of(2)), Loaded::default(), disk);
    bench.start();
    bench.recovered().await;
    bench.disk.failing.lock().unwrap().insert("node");
    let text = bench.engine.suspend("first".to_owned()).await.unwrap_err().to_string();
    assert!(text.contains("no space left on device"), "{text}");
    assert!(!bench.engine.core.state.is_suspended());
    bench.disk.failing.lock().unwrap().clear();
    bench.engine.suspend("first".to_owned()).await.unwrap();
    // A new reason that is not on disk does not open the cards either.
    bench.disk.failing.lock().unwrap().insert("node");
    bench.engine.suspend("second".to_owned()).await.unwrap_err();
    assert_eq!(bench.engine.core.state.suspension().unwrap().reason, "first");
    assert_eq!(bench.engine.core.state.offer().suspended.as_deref(), Some("suspended by an operator: first"));
    bench.disk.failing.lock().unwrap().clear();
}

#[tokio::test]
async fn recovery_makes_records_and_files_agree() {
    let first = bench(Server::open());
    for (n, device) in [(1, "npu-1"), (2, "npu-2"), (3, "npu-3")] {
        first.prepare(&claim(n, device)).await.unwrap();
    }
    let (mut records, disk) = (first.disk.records.lock().unwrap().clone(), first.disk.clone());
    let uid = |n| claim(n, "").uid;
    let memory = first.disk.node.lock().unwrap().clone().unwrap();
    // 1 lost its file, 2 its record, 3's record is damaged.
    disk.files.lock().unwrap().remove(&uid(1));
    disk.records.lock().unwrap().remove(&uid(2));
    let quarantined = Quarantined { uid: uid(3), why: "its checksum is wrong".to_owned(), path: String::new() };
    let loaded = Loaded {
        records: vec![records.remove(&uid(1)).unwrap()],
        quarantined: vec![quarantined],
        memory,
        problem: None,
    };
    let second = loaded_bench(Server::open(), Ok(scan_of(8)), loaded, disk);
    second.start();
    second.recovered().await;
    assert_eq!(second.disk.files.lock().unwrap().keys().cloned().collect::<Vec<_>>(), [uid(1), uid(3)]);
    assert!(
        matches!(second.prepare(&claim(4, "npu-3")).await, Err(Refusal::Held { .. })),
        "the rebuilt claim holds its card"
    );
    second.unprepare(&claim(3, "npu-3")).await.unwrap();
    second.unprepare(&claim(1, "npu-1")).await.unwrap();
    assert!(second.disk.is_empty());
}

#[tokio::test]
async fn a_recovery_that_a_full_disk_stopped_goes_on_when_there_is_space() {
    let first = bench(Server::open());
    for (n, device) in [(1, "npu-1"), (2, "npu-2")] {
        first.prepare(&claim(n, device)).await.unwrap();
    }
    let (mut records, disk) = (first.disk.records.lock().unwrap().clone(), first.disk.clone());
    let uid = |n| claim(n, "").uid;
    // 1 lost its file, 2's record is damaged.
    disk.files.lock().unwrap().remove(&uid(1));
    disk.records.lock().unwrap().remove(&uid(2));
    disk.failing.lock().unwrap().extend(["writing the record", "writing the CDI file"]);
    let quarantined = Quarantined { uid: uid(2), why: "its checksum is wrong".to_owned(), path: String::new() };
    let memory = disk.node.lock().unwrap().clone().unwrap();
    let loaded = Loaded {
        records: vec![records.remove(&uid(1)).unwrap()],
        quarantined: vec![quarantined],
        memory,
        problem: None,
    };
    let second = loaded_bench(Server::open(), Ok(scan_of(8)), loaded, disk);
    second.start();
    second.recovered().await;
    assert!(matches!(second.prepare(&claim(3, "npu-2")).await, Err(Refusal::Held { .. })));
    second.disk.failing.lock().unwrap().clear();
    eventually(|| second.disk.files.lock().unwrap().len() == 2 && second.disk.records.lock().unwrap().len() == 2).await;
    second.unprepare(&claim(1, "npu-1")).await.unwrap();
    second.unprepare(&claim(2, "npu-2")).await.unwrap();
    assert!(second.disk.is_empty());
}

#[tokio::test]
async fn a_damaged_claim_is_released_by_force_only() {
    let disk = Arc::new(Memory::default());
    let uid = claim(1, "").uid;
    let content = Injection { claim: claim(1, "npu-1"), devices: Vec::new() };
    disk.files.lock().unwrap().insert(uid.clone(), content);
    let quarantined = Quarantined { uid: uid.clone(), why: "it is empty".to_owned(), path: String::new() };
    let loaded = Loaded { quarantined: vec![quarantined], ..Loaded::default() };
    let bench = loaded_bench(Server::open(), Ok(scan_of(8)), loaded, disk);
    bench.start();
    bench.recovered().await;
    assert!(matches!(bench.unprepare(&claim(1, "npu-1")).await, Err(Refusal::Quarantined { .. })));
    assert!(matches!(bench.prepare(&claim(1, "npu-1")).await, Err(Refusal::Quarantined { .. })));
    bench.engine.release(uid).await.unwrap();
    assert!(bench.disk.is_empty());
    bench.prepare(&claim(1, "npu-1")).await.unwrap();
}

/// A running engine above hardware that can be cut, and what stops it; its turns are this long apart.
fn cutting(
    hardware: Arc<device::memory::Memory>,
    server: Arc<Server>,
    health_interval: Duration,
    wish: Wish,
) -> (Engine, DropGuard) {
    cutting_on(Arc::default(), hardware, server, health_interval, wish)
}

fn cutting_on(
    disk: Arc<Memory>,
    hardware: Arc<device::memory::Memory>,
    server: Arc<Server>,
    health_interval: Duration,
    wish: Wish,
) -> (Engine, DropGuard) {
    let pool = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
    let driver = DriverName::new("npu.huawei.com").unwrap();
    let parts = Parts {
        node: Node { driver, pool, boot_id: "boot".to_owned() },
        backend: hardware,
        disk,
        api: Arc::new(Handle(server)),
        loaded: Loaded::default(),
        timing: Timing { health_interval, ..Timing::default() },
        policy: Policy::default(),
        wish,
        uptime: Box::new(|| Duration::from_hours(1)),
        rival: Box::new(|| None),
    };
    let (engine, shutdown) = (Engine::new(parts, &mut Registry::default()), CancellationToken::new());
    let (running, stop) = (engine.clone(), shutdown.clone());
    tokio::spawn(async move { running.run(stop, || {}).await });
    (engine, shutdown.drop_guard())
}

#[tokio::test]
async fn an_operators_vnpu_closes_its_card_at_once_and_its_end_opens_it() {
    let hardware = Arc::new(device::memory::Memory::new(scan_of(4)));
    // No turn but the first: what is seen below comes of the call itself.
    let engine = |enabled| {
        cutting(hardware.clone(), Server::open(), Duration::from_hours(1), Wish { enabled, ..Wish::default() })
    };
    let recovered = async |engine: &Engine| {
        let mut recovered = engine.core.state.recovered();
        tokio::time::timeout(Duration::from_secs(20), recovered.wait_for(|is| *is)).await.unwrap().unwrap();
    };
    let create =
        async |engine: &Engine, device: &str| engine.operator_create(device.to_owned(), "vir05_1c_8g".to_owned()).await;
    let prepare = async |engine: &Engine, n, device| engine.prepare(engine.received(), claim(n, device)).await;

    let (off, _off) = engine(false);
    recovered(&off).await;
    let text = create(&off, "npu-0").await.unwrap_err().to_string();
    assert!(text.contains("hard slicing is not enabled"), "{text}");

    let (engine, _on) = engine(true);
    recovered(&engine).await;
    let made = create(&engine, "npu-0").await.unwrap();
    assert_eq!((made.id, engine.snapshot().closed["npu-0"].as_str()), (100, "it has vNPUs that are not ours: 100"));
    assert!(matches!(prepare(&engine, 1, "npu-0").await, Err(Refusal::Closed { .. })));
    prepare(&engine, 2, "npu-1").await.unwrap();
    assert!(matches!(create(&engine, "npu-1").await, Err(Refusal::Denied { .. })));
    assert!(!engine.snapshot().closed.contains_key("npu-1"), "a refusal changes nothing");
    engine.operator_destroy(100, false).await.unwrap();
    assert_eq!((hardware.vnpus().len(), engine.snapshot().closed.len()), (0, 0));
    prepare(&engine, 1, "npu-0").await.unwrap();

    // An error may come after success; what the card has then decides.
    let failing = |call| {
        let fault = Fault::Failed { backend: "memory", call: "any".to_owned(), why: "told so".to_owned() };
        hardware.plant(call, device::memory::Mishap::After(fault));
    };
    failing(Call::Create);
    assert!(matches!(create(&engine, "npu-2").await, Err(Refusal::OperatorFailed { .. })));
    assert!(engine.snapshot().closed["npu-2"].contains("132"));
    hardware.unplant();
    failing(Call::Destroy);
    engine.operator_destroy(132, false).await.expect("it is gone, so it was destroyed");
    assert!(engine.snapshot().closed.is_empty());
    hardware.unplant();
    create(&engine, "npu-3").await.unwrap();
    hardware.plant(Call::Destroy, device::memory::Mishap::Remade);
    let text = engine.operator_destroy(148, false).await.unwrap_err().to_string();
    assert!(text.contains("made it again as"), "{text}");
    assert!(engine.snapshot().closed.contains_key("npu-3"));
}

#[tokio::test]
async fn an_operators_vnpu_is_refused_while_the_backend_is_suspended_and_a_new_reason_is_taken() {
    let hardware = Arc::new(device::memory::Memory::new(scan_of(4)));
    let wish = Wish { enabled: true, ..Wish::default() };
    let (engine, _on) = cutting(hardware.clone(), Server::open(), Duration::from_hours(1), wish);
    let mut recovered = engine.core.state.recovered();
    tokio::time::timeout(Duration::from_secs(20), recovered.wait_for(|is| *is)).await.unwrap().unwrap();
    let create = async |device: &str| engine.operator_create(device.to_owned(), "vir05_1c_8g".to_owned()).await;
    create("npu-0").await.unwrap();
    let busy = Fault::Busy { backend: "memory", call: "any".to_owned(), why: "a lock".to_owned() };
    hardware.plant(Call::Create, device::memory::Mishap::Before(busy));
    assert!(matches!(create("npu-1").await, Err(Refusal::Denied { .. })), "a busy chip is a refusal, not a failure");
    hardware.unplant();

    engine.suspend("driver 26.0".to_owned()).await.unwrap();
    let since = engine.core.state.suspension().unwrap().since;
    for refusal in [create("npu-1").await.map(drop), engine.operator_destroy(100, true).await] {
        let Err(Refusal::Denied { why, .. }) = refusal else { panic!("{refusal:?}") };
        assert!(why.contains("suspended by an operator: driver 26.0; npuctl backend resume"), "{why}");
    }
    for reason in ["driver 26.1", "driver 26.1", ""] {
        engine.suspend(reason.to_owned()).await.unwrap();
        let suspension = engine.core.state.suspension().unwrap();
        assert_eq!((suspension.reason.as_str(), suspension.since), (reason, since));
        assert!(suspension.inventory.is_some(), "what was known then stays");
    }
    assert_eq!(engine.core.state.offer().suspended.as_deref(), Some("suspended by an operator"));
    engine.resume().await.unwrap();
    engine.operator_destroy(100, false).await.unwrap();
}

#[tokio::test]
async fn another_layout_is_taken_while_running_as_soon_as_no_claim_holds_its_cards() {
    let server = Server::open();
    let wish = |card: &str, enabled| Wish {
        enabled,
        model: Some(crate::domain::model::Model::Static),
        layout: BTreeMap::from([(card.to_owned(), vec!["vir10_3c_16g".to_owned()])]),
    };
    let hardware = Arc::new(device::memory::Memory::new(scan_of(4)));
    let (engine, _stopped) = cutting(hardware, server.clone(), Duration::from_millis(1), wish("npu-0", true));
    let published = |device: &str| {
        let pools = server.published.lock().unwrap();
        let last = pools.last();
        last.is_some_and(|pool| {
            pool.slices.iter().flat_map(|slice| &slice.devices).any(|published| published.name == device)
        })
    };
    eventually(|| published("npu-0-vir10-3c-16g-0") && published("npu-1")).await;
    engine.prepare(engine.received(), claim(1, "npu-1")).await.unwrap();
    // It is wanted that slicing be off as well, but that does not change while running.
    engine.reslice(wish("npu-1", false));
    eventually(|| engine.core.state.offer().why.contains("pending until claims on npu-1 are released")).await;
    assert!(published("npu-0-vir10-3c-16g-0") && published("npu-1"), "all stays as it was");
    engine.unprepare(engine.received(), claim(1, "npu-1")).await.unwrap();
    eventually(|| published("npu-0") && published("npu-1-vir10-3c-16g-0")).await;
    assert!(!published("npu-1") && engine.core.state.offer().why.is_empty());
}

#[tokio::test]
async fn a_part_that_is_prepared_before_the_servers_gates_are_known_waits_for_them() {
    let server = Server::open();
    let hardware = Arc::new(device::memory::Memory::new(scan_of(4)));
    let wish = Wish { enabled: true, ..Wish::default() };
    let (engine, _stopped) = cutting(hardware.clone(), server.clone(), Duration::from_hours(1), wish);
    let waiting = engine.prepare(engine.received(), claim(1, "npu-0-vir05-1c-8g-0"));
    let cancelled = engine.prepare(engine.received(), claim(2, "npu-2-vir05-1c-8g-0"));
    tokio::pin!(waiting, cancelled);
    // The whole card shows that the parts had their try.
    tokio::select! {
        biased;
        early = &mut waiting => panic!("it did not wait: {early:?}"),
        early = &mut cancelled => panic!("it did not wait: {early:?}"),
        beside = engine.prepare(engine.received(), claim(3, "npu-1")) => drop(beside.unwrap()),
    }
    assert_eq!(engine.snapshot().slicing, "the API server has not said yet what it keeps");
    engine.unprepare(engine.received(), claim(2, "npu-2-vir05-1c-8g-0")).await.unwrap();
    assert!(matches!(cancelled.await, Err(Refusal::Overtaken(_))));
    assert_eq!(hardware.vnpus().len(), 0);
    server.kept.send_replace(Kept { consumable: Some(false), partitionable: Some(true), is_1_34: false });
    waiting.await.unwrap();
    assert_eq!(hardware.vnpus().len(), 1);
}

#[tokio::test]
async fn a_release_of_a_part_whose_beginning_may_be_on_disk_is_ended_before_the_claim_begins_anew() {
    let (disk, server) = (Arc::new(Memory::default()), Server::open());
    let hardware = Arc::new(device::memory::Memory::new(scan_of(2)));
    let wish = Wish { enabled: true, ..Wish::default() };
    let (engine, _stopped) = cutting_on(disk.clone(), hardware.clone(), server.clone(), Duration::from_hours(1), wish);
    let mut recovered = engine.core.state.recovered();
    recovered.wait_for(|is| *is).await.unwrap();
    server.kept.send_replace(Kept { consumable: Some(false), partitionable: Some(true), is_1_34: false });
    let part = claim(1, "npu-0-vir05-1c-8g-0");
    engine.prepare(engine.received(), part.clone()).await.unwrap();
    disk.failing_settles.store(1, Ordering::SeqCst);
    engine.unprepare(engine.received(), part.clone()).await.unwrap_err();
    assert_eq!(hardware.vnpus().len(), 1, "nothing is destroyed before the disk knows of it");
    engine.prepare(engine.received(), part.clone()).await.unwrap();
    // A restart goes by what is on disk.
    assert_eq!(disk.records.lock().unwrap()[&part.uid].phase, Phase::Prepared);
    assert_eq!(hardware.vnpus().len(), 1);
}

#[tokio::test]
async fn a_stopping_engine_refuses_new_work_and_ends_what_runs() {
    let bench = bench(Server::closed());
    let running = bench.engine.prepare(bench.engine.received(), claim(1, "npu-0"));
    assert!(!bench.engine.drain(Duration::from_millis(1)).await);
    assert!(matches!(bench.prepare(&claim(2, "npu-1")).await, Err(Refusal::Stopping)));
    assert!(matches!(bench.unprepare(&claim(2, "npu-1")).await, Err(Refusal::Stopping)));
    bench.server.permits.add_permits(1);
    assert!(bench.engine.drain(Duration::from_secs(20)).await);
    running.await.unwrap();
}

/// A small generator, so that a failing round can be run again from its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_interleavings_end_as_their_last_calls_say() {
    // Claims 0 and 1 want one card, 2 and 3 another.
    let wanted = ["npu-0", "npu-0", "npu-1", "npu-1"];
    for seed in 1..=1_000 {
        let bench = bench(Server::open());
        bench.recovered().await;
        let mut tasks = Vec::new();
        for task in 0..8 {
            let engine = bench.engine.clone();
            let mut dice = Dice(seed * 8 + task + 1);
            tasks.push(tokio::spawn(async move {
                for _ in 0..4 {
                    let n = usize::try_from(dice.roll(4)).unwrap();
                    let (claim, received, dropped) = (claim(n, wanted[n]), engine.received(), dice.roll(4) == 0);
                    if dice.roll(2) == 0 {
                        let call = engine.prepare(received, claim);
                        if !dropped {
                            let _ = call.await;
                        }
                    } else {
                        let call = engine.unprepare(received, claim);
                        if !dropped {
                            call.await.unwrap();
                        }
                    }
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        let check = |when: &str| {
            let (records, files) = (bench.disk.records.lock().unwrap(), bench.disk.files.lock().unwrap());
            let claims: BTreeSet<_> =
                bench.engine.snapshot().claims.iter().map(|record| record.claim.uid.clone()).collect();
            assert_eq!(records.keys().cloned().collect::<BTreeSet<_>>(), claims, "seed {seed}, {when}");
            assert_eq!(files.keys().cloned().collect::<BTreeSet<_>>(), claims, "seed {seed}, {when}");
            let cards: BTreeSet<_> = records.values().map(super::super::domain::record::Record::device_names).collect();
            assert_eq!(cards.len(), records.len(), "seed {seed}, {when}: a card has two owners");
        };
        tokio::time::timeout(Duration::from_secs(20), bench.engine.core.claims.idle()).await.expect("jobs end");
        check("after the storm");
        for (n, device) in wanted.iter().enumerate() {
            bench.unprepare(&claim(n, device)).await.unwrap();
        }
        for n in [0, 2] {
            bench.prepare(&claim(n, wanted[n])).await.unwrap();
            check("after a last prepare");
            bench.unprepare(&claim(n, wanted[n])).await.unwrap();
        }
        assert!(bench.disk.is_empty(), "seed {seed}");
    }
}

#[tokio::test]
async fn another_driver_of_the_same_cards_closes_all_of_them() {
    let bench = loaded_bench(Server::open(), Ok(scan_of(2)), Loaded::default(), Arc::default());
    bench.rival.store(true, Ordering::Relaxed);
    bench.start();
    eventually(|| {
        let published = bench.server.published.lock().unwrap();
        published.last().is_some_and(|pool| pool.slices[0].devices.iter().all(|device| !device.taints.is_empty()))
    })
    .await;
    let text = bench.prepare(&claim(1, "npu-0")).await.unwrap_err().to_string();
    assert!(text.contains("takes no new claims") && text.contains("a rival"), "{text}");
    bench.rival.store(false, Ordering::Relaxed);
    bench.until(|snapshot| snapshot.closed.is_empty()).await;
    bench.prepare(&claim(1, "npu-0")).await.unwrap();
}
