//! Plays a scene on a simulated node, cuts it off somewhere, starts the daemon again and lets kubelet go on.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use dcmi::world::{self, Fault, Profile, Vnpu};
use testkit::{
    api::{ApiServer, DeviceResult, How, Release, Who},
    faultline::{Action, Call, Cut, Faultline, When},
    kubelet::{Kubelet, What, client},
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON, until},
};

use crate::oracle::{Claim, Known, Scene, Want};

const PROFILE: Profile = Profile::Ascend910B4;
const ENOSPC: i32 = 28;
const EIO: i32 = 5;
/// Ends within this although the daemon is busy recovering; reached only by a failure.
const PATIENCE: Duration = Duration::from_secs(10);

/// A claim of a scene.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) wants: Vec<Want>,
}

/// What is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// Kubelet prepares the subject.
    Prepare,
    /// Kubelet releases the subject.
    Unprepare,
    /// The daemon starts.
    Start,
}

/// A scene: the subject, the claims beside it, what happened before, and what is cut off.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// The first is the subject, the others are prepared before and must not notice anything.
    pub(crate) claims: Vec<Part>,
    /// The subject is prepared before, too.
    pub(crate) prepared: bool,
    /// Chips that hold a vNPU of nobody of ours.
    pub(crate) foreign: Vec<(u32, &'static str)>,
    /// What happens to the node while the daemon is down.
    pub(crate) between: fn(&Node, &str) -> anyhow::Result<()>,
    /// What happens to it right before the act.
    pub(crate) meanwhile: fn(&Node, &str) -> anyhow::Result<()>,
    /// vNPUs are gone after that: claims that hold some are as good as unsure until they are prepared again.
    pub(crate) boots: bool,
    pub(crate) act: Act,
    /// Cuts are made from the daemon's first step on, not only in the act.
    pub(crate) from_start: bool,
    /// Fewest counted calls.
    pub(crate) least: usize,
}

impl Scenario {
    /// A scene of an act alone.
    pub(crate) fn new(name: &'static str, act: Act, wants: Vec<Want>, least: usize) -> Self {
        Self {
            name,
            claims: vec![Part { name: "subject", wants }],
            prepared: act != Act::Prepare,
            foreign: Vec::new(),
            between: |_, _| Ok(()),
            meanwhile: |_, _| Ok(()),
            boots: false,
            act,
            from_start: act == Act::Start,
            least,
        }
    }

    /// Another claim is there before.
    pub(crate) fn beside(mut self, name: &'static str, wants: Vec<Want>) -> Self {
        self.claims.push(Part { name, wants });
        self
    }

    fn cuts_cards(&self) -> bool {
        self.claims.iter().flat_map(|claim| &claim.wants).any(|want| matches!(want, Want::Part(..)))
    }

    fn flags(&self) -> Vec<&'static str> {
        // Polls would make vendor calls at times that nobody can foresee.
        let mut flags = vec!["--health-interval=600s"];
        if self.cuts_cards() {
            flags.push("--enable-hard-vnpu=true");
        }
        flags
    }
}

/// How kubelet goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It prepares the subject again, then releases it.
    Again,
    /// It releases the subject.
    Release,
}

/// Where a scene is cut off.
#[derive(Debug, Clone)]
enum Blow {
    /// At a durable step.
    Step(Cut),
    /// In a vendor call.
    Vendor(Fault),
}

impl Blow {
    fn kills_daemon(&self) -> bool {
        match self {
            Self::Step(cut) => !matches!(cut.action, Action::Fail(_)),
            Self::Vendor(fault) => fault.action == world::Action::KillParent,
        }
    }

    /// A disk that stays full, until the daemon starts again.
    fn lasts(&self) -> bool {
        matches!(self, Self::Step(Cut { when: When::From(_), .. }))
    }
}

#[derive(Debug, Clone)]
struct Case {
    blow: Blow,
    end: End,
}

/// The node of a scene before its act, and what the API server knows.
struct Ground {
    scenario: Scenario,
    binary: PathBuf,
    dir: tempfile::TempDir,
    kubeconfig: PathBuf,
    /// The subject, the claims beside it, and last one that asks for the same as the subject.
    claims: Vec<client::Claim>,
    /// A claim that the scheduler has not seen yet.
    empty: client::Claim,
    /// What is known of them before the act.
    known: Vec<Known>,
    /// What the subject is answered.
    answer: Vec<client::Device>,
    /// vNPUs of others.
    kept: Vec<Vnpu>,
    _api: ApiServer,
}

/// What a scene is made of when nothing cuts it off.
struct Course {
    /// Durable steps before the act.
    before: usize,
    /// All durable steps.
    steps: usize,
    /// Vendor calls of the act, by function.
    vendor: BTreeMap<String, u64>,
}

/// What came out of a scenario.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) steps: usize,
    pub(crate) vendor: u64,
    /// Cases that were played.
    pub(crate) cases: usize,
    /// Cases that there are, counted from the steps and calls.
    pub(crate) expected: usize,
    pub(crate) failures: Vec<String>,
}

/// A node with a kubelet, in a directory of its own.
struct Stage<'a> {
    ground: &'a Ground,
    node: Node,
    kubelet: Kubelet,
    claims: Vec<Claim>,
}

/// Runs every `stride`-th case of a scenario.
pub(crate) async fn run(scenario: Scenario, binary: PathBuf, stride: usize) -> anyhow::Result<Report> {
    let mut ground = Ground::new(scenario, binary).await.context("before the act")?;
    let course = ground.course().await.context("a run without a cut")?;
    let cases = cases(&course);
    let (steps, vendor) = (course.steps - course.before, course.vendor.values().sum());
    let mut report = Report { steps, vendor, cases: 0, expected: course.cases(), failures: Vec::new() };
    for (number, case) in cases.iter().enumerate().step_by(stride) {
        report.cases += 1;
        let dir = ground.dir.path().join(format!("c{number}"));
        if let Err(error) = ground.play(&dir, case).await {
            let failure = format!("{}: {case:?}: {error:#}\n{}", ground.scenario.name, logs(&dir));
            eprintln!("{failure}");
            report.failures.push(failure);
            if report.failures.len() >= 5 {
                report.failures.push("… and no more were tried".to_owned());
                break;
            }
        }
        fs::remove_dir_all(&dir)?;
    }
    Ok(report)
}

/// All ways to cut a scene off.
fn cases(course: &Course) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut both = |blow: &Blow| cases.extend([End::Again, End::Release].map(|end| Case { blow: blow.clone(), end }));
    for number in course.before + 1..=course.steps {
        let step = |when, action| Blow::Step(Cut { when, action });
        both(&step(When::At(number), Action::KillBefore));
        both(&step(When::At(number), Action::KillAfter));
        both(&step(When::At(number), Action::Fail(ENOSPC)));
        both(&step(When::At(number), Action::Fail(EIO)));
        both(&step(When::From(number), Action::Fail(ENOSPC)));
    }
    for (function, count) in &course.vendor {
        let changes = changes(function);
        for skip in 0..*count {
            let fault = |action| Fault::new(function, action).skip(skip).times(1);
            for action in [world::Action::KillSelf, world::Action::KillParent] {
                both(&Blow::Vendor(fault(action)));
                both(&Blow::Vendor(fault(action).after()));
                if changes {
                    both(&Blow::Vendor(fault(action).during()));
                }
            }
            if changes {
                both(&Blow::Vendor(fault(world::Action::Crash).during()));
            }
        }
    }
    cases
}

/// True for the two calls that have a middle.
fn changes(function: &str) -> bool {
    function.contains("create_vdevice") || function.contains("destroy_vdevice")
}

impl Course {
    /// How many cases [`cases`] must make: ten for a step, eight for a query, fourteen for a create or destroy.
    fn cases(&self) -> usize {
        let calls = self.vendor.iter().map(|(function, count)| count * if changes(function) { 14 } else { 8 });
        (self.steps - self.before) * 10 + usize::try_from(calls.sum::<u64>()).unwrap_or(usize::MAX)
    }
}

impl Ground {
    async fn new(scenario: Scenario, binary: PathBuf) -> anyhow::Result<Self> {
        // In memory where there is such a place: a killed process, unlike a machine, loses nothing that was not synced.
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let dir = tempfile::Builder::new().prefix("npu-crash-").tempdir_in(place)?;
        let api = ApiServer::start(Release::V1_36).await?;
        api.add_node(NODE);
        let who = Who::Node(NODE.to_owned());
        let kubeconfig = api.kubeconfig(&dir.path().join("kubeconfig"), &who, How::Certificate)?.path;
        let mut parts = scenario.claims.clone();
        parts.push(Part { name: "next", wants: scenario.claims[0].wants.clone() });
        let claims = parts.iter().map(|part| store(&api, part)).collect::<anyhow::Result<Vec<_>>>()?;
        let empty = store(&api, &Part { name: "empty", wants: Vec::new() })?;
        let known = vec![Known::Gone; claims.len()];
        let mut ground = Self {
            scenario,
            binary,
            dir,
            kubeconfig,
            claims,
            empty,
            known,
            answer: Vec::new(),
            kept: Vec::new(),
            _api: api,
        };
        let base = ground.dir.path().join("base");
        let mut stage = Stage::open(&ground, &base)?;
        let first = usize::from(!ground.scenario.prepared);
        let last = ground.scenario.claims.len();
        let mut daemon = None;
        if first < last {
            daemon = Some(stage.start_clean().await?);
        }
        // The claims beside come first, so that what they hold can be told from what the subject holds.
        let mut kept = stage.node.world().vnpus()?;
        for index in (first.max(1)..last).chain(first..1) {
            if index == 0 {
                kept = stage.node.world().vnpus()?;
            }
            let devices = stage.prepare(index).await?;
            stage.claims[index].known = Known::Prepared(devices);
            if index > 0 {
                kept = stage.node.world().vnpus()?;
            }
        }
        let known: Vec<_> = stage.claims.iter().map(|claim| claim.known.clone()).collect();
        if let Some(mut daemon) = daemon {
            daemon.kill()?;
        }
        // Once the daemon has switched the vendor's replay off, others make some, too.
        for (phy, template) in &ground.scenario.foreign {
            let id = stage.node.world().add_vnpu(*phy, template)?;
            kept.extend(stage.node.world().vnpus()?.into_iter().filter(|vnpu| vnpu.id == id));
        }
        drop(stage);
        if let Known::Prepared(devices) = &known[0] {
            ground.answer.clone_from(devices);
        }
        (ground.known, ground.kept) = (known, kept);
        if ground.scenario.boots {
            // Only the vNPUs of others that this boot brings back, which is none.
            ground.kept.clear();
            for (known, part) in ground.known.iter_mut().zip(&ground.scenario.claims) {
                if *known != Known::Gone && part.wants.iter().any(|want| matches!(want, Want::Part(..))) {
                    *known = Known::Unsure;
                }
            }
        }
        Ok(ground)
    }

    /// The scene without a cut: how many steps and calls it has, and what the subject is answered.
    async fn course(&mut self) -> anyhow::Result<Course> {
        let dir = self.dir.path().join("course");
        let mut stage = Stage::open(self, &dir)?;
        let line = stage.faultline()?;
        let mut daemon = stage.start(&line, None).await?.map_err(|log| anyhow::anyhow!("it did not start\n{log}"))?;
        ensure!(stage.wait_recovered(&mut daemon).await?, "it ended\n{}", daemon.log());
        stage.quiet().await?;
        let before = line.calls()?.len();
        stage.node.world().clear_calls()?;
        stage.act().await.map_err(|error| anyhow::anyhow!("{error}\n{}", daemon.log()))?;
        let answered = line.calls()?;
        let lost = volatile(&answered);
        let is_answer = self.scenario.act != Act::Start;
        ensure!(!is_answer || lost.is_empty(), "kubelet was answered, and a power cut could undo {lost:?}");
        stage.settle().await?;
        let steps = before + answered.len() + line.calls()?.len();
        let mut vendor = BTreeMap::new();
        for call in stage.node.world().calls()?.list {
            *vendor.entry(call.function).or_default() += 1;
        }
        let complaints = stage.complaints()?;
        ensure!(complaints.is_empty(), "{complaints:?}");
        if !self.scenario.cuts_cards() || self.scenario.act == Act::Start {
            vendor.clear();
        }
        let answer = match (&stage.claims[0].known, self.scenario.act) {
            (Known::Prepared(devices), Act::Prepare) => Some(devices.clone()),
            _ => None,
        };
        drop(stage);
        fs::remove_dir_all(&dir)?;
        self.answer = answer.unwrap_or_else(|| self.answer.clone());
        ensure!(!self.answer.is_empty(), "the subject is never answered");
        let counted = if self.scenario.from_start { steps } else { steps - before };
        ensure!(counted >= self.scenario.least, "only {counted} steps are counted");
        Ok(Course { before: if self.scenario.from_start { 0 } else { before }, steps, vendor })
    }

    /// Plays a case from beginning to end.
    async fn play(&self, dir: &Path, case: &Case) -> anyhow::Result<()> {
        let mut stage = Stage::open(self, dir)?;
        let line = stage.faultline()?;
        let cut = match &case.blow {
            Blow::Step(cut) => Some(*cut),
            Blow::Vendor(_) => None,
        };
        let mut daemon = match stage.start(&line, cut).await? {
            Ok(mut daemon) => {
                let alive = stage.wait_recovered(&mut daemon).await?;
                let mut planted = None;
                if let Blow::Vendor(fault) = &case.blow {
                    stage.quiet().await?;
                    planted = Some((stage.node.world().faults().plant(fault.clone())?, fault.skip));
                }
                if alive {
                    // What comes of it is in what kubelet knows.
                    let _answer = stage.act().await;
                }
                if let Some((id, skip)) = planted {
                    let hits = stage.node.world().faults().hits(&id);
                    ensure!(hits > skip, "the call was not reached");
                }
                if case.blow.kills_daemon() {
                    let status = daemon.wait_end(SOON).await?;
                    ensure!(status.code().is_none(), "it ended by itself: {status}");
                }
                if case.blow.lasts() {
                    daemon.kill()?;
                }
                daemon.exit_status()?.is_none().then_some(daemon)
            }
            // Cut off at its start.
            Err(_log) => None,
        };
        if matches!(case.blow, Blow::Step(_)) {
            ensure!(!line.calls()?.is_empty(), "no step was counted");
        }
        ensure!(!(case.blow.kills_daemon() && daemon.is_some()), "the daemon was not killed");
        stage.node.world().faults().clear()?;
        if daemon.is_none() {
            daemon = Some(stage.start_clean().await?);
        }
        stage.settle().await.context("after the cut")?;
        if case.end == End::Again {
            let devices = stage.prepare(0).await?;
            let same =
                if self.scenario.boots { names(&devices) == names(&self.answer) } else { devices == self.answer };
            ensure!(same, "another answer than without a cut: {devices:?}, not {:?}", self.answer);
            stage.claims[0].known = Known::Prepared(devices);
            stage.check().context("after it was prepared again")?;
        }
        stage.unprepare(0, case.blow.kills_daemon()).await?;
        stage.check().context("after it was released")?;
        // Nothing holds its devices.
        let next = stage.claims.len() - 1;
        let devices = stage.prepare(next).await.context("the next claim")?;
        stage.claims[next].known = Known::Prepared(devices);
        stage.check().context("with the next claim")?;
        for index in 1..stage.claims.len() {
            stage.unprepare(index, true).await?;
        }
        let scene = stage.scene()?;
        let foreign = if self.scenario.boots { 0 } else { self.scenario.foreign.len() };
        ensure!(scene.vnpus().len() == foreign, "vNPUs are left: {:?}", scene.vnpus());
        ensure!(stage.node.cdi_files()?.is_empty(), "CDI files are left: {:?}", stage.node.cdi_files()?);
        let overlaps = stage.node.world().overlaps()?;
        ensure!(overlaps.is_empty(), "calls of the library met: {overlaps:?}");
        drop(daemon);
        Ok(())
    }
}

impl<'a> Stage<'a> {
    /// The node as it was before the act, copied into a directory of its own.
    fn open(ground: &'a Ground, dir: &Path) -> anyhow::Result<Self> {
        let base = ground.dir.path().join("base");
        for name in ["world", "state", "cdi", "host/dev", "host/etc"] {
            if base != dir && base.join(name).exists() {
                copy(&base.join(name), &dir.join(name))?;
            }
        }
        let mut node = Node::in_dir(dir, PROFILE)?;
        node.use_kubeconfig(&ground.kubeconfig);
        if base != dir {
            (ground.scenario.between)(&node, &ground.claims[0].uid)?;
        }
        let kubelet = node.start_kubelet()?;
        let mut parts: Vec<_> = ground.scenario.claims.iter().map(|part| part.wants.clone()).collect();
        parts.push(ground.scenario.claims[0].wants.clone());
        let claims = ground.claims.iter().zip(parts).zip(&ground.known);
        let claims = claims
            .map(|((claim, wants), known)| Claim { uid: claim.uid.clone(), wants, known: known.clone() })
            .collect();
        Ok(Self { ground, node, kubelet, claims })
    }

    fn faultline(&self) -> anyhow::Result<Faultline> {
        let line = Faultline::new(Path::new(env!("CARGO_TARGET_TMPDIR")), [self.node.state(), self.node.cdi()])?;
        Ok(line.log(self.node.dir().join("steps.log")))
    }

    /// Starts a daemon and waits until kubelet knows it; if it ended before, its log.
    async fn start(&mut self, line: &Faultline, cut: Option<Cut>) -> anyhow::Result<Result<Daemon, String>> {
        let mut command = self.node.daemon_with(&self.ground.binary, &self.ground.scenario.flags());
        line.arm(&mut command, cut);
        self.run(command).await
    }

    async fn start_clean(&mut self) -> anyhow::Result<Daemon> {
        let command = self.node.daemon_with(&self.ground.binary, &self.ground.scenario.flags());
        match self.run(command).await? {
            Ok(mut daemon) => {
                ensure!(self.wait_recovered(&mut daemon).await?, "it ended\n{}", daemon.log());
                Ok(daemon)
            }
            Err(log) => bail!("it does not start again\n{log}"),
        }
    }

    async fn run(&mut self, command: std::process::Command) -> anyhow::Result<Result<Daemon, String>> {
        let mut daemon = self.node.start(command)?;
        let before = self.registrations();
        for _ in 0..3 {
            let mut ended = false;
            until(PATIENCE, || {
                ended = daemon.exit_status().is_ok_and(|status| status.is_some());
                ended || self.registrations() > before
            })
            .await;
            if ended {
                return Ok(Err(daemon.log()));
            }
            if self.registrations() > before {
                return Ok(Ok(daemon));
            }
            // On a machine that is all too busy it gave up; a real one tries again.
            self.kubelet.restart()?;
        }
        bail!("it did not register\n{}", daemon.log())
    }

    fn registrations(&self) -> usize {
        self.kubelet.log().iter().filter(|entry| matches!(&entry.what, What::Registered(_))).count()
    }

    /// Waits until this daemon answers and has recovered; false if it ended before. A prepare waits for the recovery,
    /// whatever becomes of it: here of a claim that has no device.
    async fn wait_recovered(&self, daemon: &mut Daemon) -> anyhow::Result<bool> {
        let end = tokio::time::Instant::now() + SOON;
        loop {
            if daemon.exit_status()?.is_some() {
                return Ok(false);
            }
            // The socket may still be that of a daemon before it.
            let answer = match self.client() {
                Ok(client) => client.prepare_one(&self.ground.empty).await.map(drop),
                Err(error) => Err(error.to_string()),
            };
            match answer {
                Ok(()) => bail!("a claim without a device was prepared"),
                Err(error) if error.contains("not allocated") => break,
                Err(error) => {
                    ensure!(tokio::time::Instant::now() < end, "it does not recover: {error}\n{}", daemon.log());
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await; // waits: for the daemon's answer
        }
        if self.ground.scenario.cuts_cards() {
            until(SOON, || daemon.log().contains(MODEL) || !matches!(daemon.exit_status(), Ok(None))).await;
            ensure!(daemon.exit_status()?.is_some() || daemon.log().contains(MODEL), "no cuts\n{}", daemon.log());
        }
        Ok(daemon.exit_status()?.is_none())
    }

    /// Waits until no call of the library has come for a while: what a start calls must not be taken for the act's.
    async fn quiet(&self) -> anyhow::Result<()> {
        let (mut calls, mut same) = (0, 0);
        let count = || self.node.world().calls().map_or(0, |calls| calls.len());
        let quiet = until(SOON, || {
            let now = count();
            same = if now == calls { same + 1 } else { 0 };
            calls = now;
            same > 12
        });
        ensure!(quiet.await, "the library is called without end");
        Ok(())
    }

    fn client(&self) -> anyhow::Result<client::DraClient> {
        self.kubelet.client(DRIVER)
    }

    /// The act, and what kubelet knows by it.
    async fn act(&mut self) -> Result<(), String> {
        let client = self.client().map_err(|error| error.to_string())?;
        let claim = &self.ground.claims[0];
        (self.ground.scenario.meanwhile)(&self.node, &claim.uid).map_err(|error| error.to_string())?;
        let subject = &mut self.claims[0];
        match self.ground.scenario.act {
            Act::Start => {}
            Act::Prepare => {
                // A claim that kubelet holds for prepared stays so when a replay fails, unless somebody took its file.
                if subject.known == Known::Gone || !self.node.cdi_files().is_ok_and(|files| is_among(&files, claim)) {
                    subject.known = Known::Unsure;
                }
                subject.known = Known::Prepared(client.prepare_one(claim).await?);
            }
            Act::Unprepare => {
                subject.known = Known::Unsure;
                client.unprepare_one(claim).await?;
                subject.known = Known::Gone;
            }
        }
        Ok(())
    }

    /// Prepares as kubelet does: again and again.
    async fn prepare(&self, index: usize) -> anyhow::Result<Vec<client::Device>> {
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            match self.client()?.prepare_one(&self.ground.claims[index]).await {
                Ok(devices) => return Ok(devices),
                Err(error) if tokio::time::Instant::now() > end => {
                    bail!("{} cannot be prepared: {error}", self.ground.claims[index].name)
                }
                // What was cut off is being undone.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await, // waits: for that
            }
        }
    }

    /// Releases, at once or, where the disk failed before, as kubelet does: again and again.
    async fn unprepare(&mut self, index: usize, at_once: bool) -> anyhow::Result<()> {
        let end = tokio::time::Instant::now() + PATIENCE;
        let claim = &self.ground.claims[index];
        while let Err(error) = self.client()?.unprepare_one(claim).await {
            ensure!(!at_once && tokio::time::Instant::now() < end, "{} cannot be released: {error}", claim.name);
            tokio::time::sleep(Duration::from_millis(20)).await; // waits: for the recovery's end
        }
        self.claims[index].known = Known::Gone;
        Ok(())
    }

    fn scene(&self) -> anyhow::Result<Scene> {
        Scene::look(self.node.world(), &self.node.cdi())
    }

    fn complaints(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.scene()?.complaints(&self.claims, &self.ground.kept))
    }

    fn check(&self) -> anyhow::Result<()> {
        let complaints = self.complaints()?;
        ensure!(complaints.is_empty(), "{}", complaints.join("; "));
        Ok(())
    }

    /// Waits until there is nothing to complain of.
    async fn settle(&self) -> anyhow::Result<()> {
        until(PATIENCE, || self.complaints().is_ok_and(|complaints| complaints.is_empty())).await;
        self.check()
    }
}

/// Records and CDI files that came or went, and whose directory was not made durable after that.
fn volatile(calls: &[Call]) -> Vec<&Call> {
    let is_change = |call: &Call| {
        matches!(call.name.as_str(), "rename" | "unlink") && call.path.extension().is_some_and(|name| name == "json")
    };
    let is_durable = |(index, call): (usize, &Call)| {
        let dir = call.path.parent();
        // A damaged record is looked for where most often there is none.
        dir.is_some_and(|dir| dir.ends_with("quarantine"))
            || calls[index..].iter().any(|later| later.name == "fsync" && dir == Some(later.path.as_path()))
    };
    calls
        .iter()
        .enumerate()
        .filter(|(_, call)| is_change(call))
        .filter(|entry| !is_durable(*entry))
        .map(|(_, call)| call)
        .collect()
}

/// Which devices: after a boot their vNPUs may have other ids.
fn names(devices: &[client::Device]) -> Vec<(&[String], &str, Option<&String>)> {
    devices
        .iter()
        .map(|device| (&device.request_names[..], &device.device_name[..], device.share_id.as_ref()))
        .collect()
}

fn is_among(files: &[String], claim: &client::Claim) -> bool {
    files.iter().any(|name| name.contains(&claim.uid))
}

/// What the daemon logs once it knows its slicing model.
const MODEL: &str = "slicing model is consumable";

/// Stores a claim as the scheduler leaves it.
fn store(api: &ApiServer, part: &Part) -> anyhow::Result<client::Claim> {
    let count = u32::try_from(part.wants.len().max(1))?;
    let mut builder = api.claim_builder("default", part.name).request("npu", DRIVER, count);
    for (index, want) in part.wants.iter().enumerate() {
        let result = DeviceResult::new("npu", DRIVER, POOL, &format!("npu-{}", want.phy()));
        builder = builder.result(match want {
            Want::Whole(_) => result,
            Want::Look(_) => result.admin_access(),
            Want::Part(_, template) => {
                let memory = if template.ends_with("_8g") { "8Gi" } else { "16Gi" };
                let name: u32 = part.name.bytes().map(u32::from).sum();
                let share = format!("00000000-0000-4000-8000-{:012}", name * 100 + u32::try_from(index)?);
                result.share(&share).consumes("memCapacity", memory)
            }
        });
    }
    let stored = builder.node(NODE).store();
    let uid = stored["metadata"]["uid"].as_str().context("the claim has no uid")?;
    Ok(client::claim("default", part.name, uid))
}

/// Copies a directory; links stay links.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, kind) = entry.and_then(|entry| entry.file_type().map(|kind| (entry, kind)))?;
        let (old, new) = (entry.path(), to.join(entry.file_name()));
        if kind.is_dir() {
            copy(&old, &new)?;
        } else if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(&old)?, &new)?;
        } else {
            fs::copy(&old, &new)?;
        }
    }
    Ok(())
}

/// The ends of the logs of a node's daemons.
fn logs(dir: &Path) -> String {
    let mut text = Vec::new();
    for number in 1.. {
        let Ok(log) = fs::read_to_string(dir.join(format!("logs/daemon-{number}.log"))) else { break };
        let lines: Vec<_> = log.lines().collect();
        text.push(format!("  daemon {number}:"));
        text.extend(lines.iter().skip(lines.len().saturating_sub(25)).map(|line| format!("    {line}")));
    }
    text.join("\n")
}
