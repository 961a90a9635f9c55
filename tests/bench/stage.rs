//! The stage of a row: a simulated node, an API server, a kubelet, and the release daemon with a user's settings.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use dcmi::world::Profile;
use futures::future::try_join_all;
use serde_json::{Value, json};
use testkit::{
    api::{ApiServer, DeviceResult, Release},
    kubelet::{Claim, DraClient, Kubelet, claim},
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON},
};

use crate::{floor::WRITERS, samples::Samples};

/// Namespace of all claims.
const NAMESPACE: &str = "bench";
/// Claims that are filled in at a time, each in a call of its own.
const FILLERS: u32 = WRITERS;

/// The daemon under test.
pub(crate) fn daemon_binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_npu-dra"))
}

/// All that a row needs. The daemon ends with it, and the directory goes with the run's.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) daemon: Option<Daemon>,
    pub(crate) node: Node,
    pub(crate) api: ApiServer,
    pub(crate) kubelet: Kubelet,
    binary: PathBuf,
    library: PathBuf,
    cards: u32,
    numbers: AtomicU32,
    flags: Vec<String>,
}

impl Stage {
    /// A node with this many cards. No daemon runs yet.
    pub(crate) async fn set(dir: &Path, cards: u32) -> anyhow::Result<Self> {
        let mut node = Node::in_dir(dir, Profile::Many(cards))?;
        // A release with taints on, so that a fault shows as one.
        let api = node.start_api(Release::V1_36).await?;
        let kubelet = node.start_kubelet()?;
        let (binary, library) = (daemon_binary().to_owned(), dcmi::library_path());
        Ok(Self {
            daemon: None,
            node,
            api,
            kubelet,
            binary,
            library,
            cards,
            numbers: AtomicU32::new(0),
            flags: Vec::new(),
        })
    }

    /// The same with a daemon that is registered and has published all cards.
    pub(crate) async fn run(dir: &Path, cards: u32) -> anyhow::Result<Self> {
        let mut stage = Self::set(dir, cards).await?;
        stage.start().await?;
        Ok(stage)
    }

    /// The same with cards that are cut.
    pub(crate) async fn cutting(dir: &Path, cards: u32) -> anyhow::Result<Self> {
        let mut stage = Self::set(dir, cards).await?;
        stage.flags.push("--enable-hard-vnpu=true".to_owned());
        stage.start().await?;
        Ok(stage)
    }

    /// The same with a fault over as soon as a card may be quiet.
    pub(crate) async fn failing(dir: &Path, cards: u32) -> anyhow::Result<Self> {
        let mut stage = Self::set(dir, cards).await?;
        stage.flags.push("--health-quiet=1s".to_owned());
        stage.start().await?;
        Ok(stage)
    }

    /// Lets daemons run from copies of the binary and the library, so that their pages are shared with no other daemon
    /// of the bench and count in full.
    pub(crate) fn copy_binaries(&mut self) -> anyhow::Result<()> {
        for (file, name) in [(&mut self.binary, "npu-dra"), (&mut self.library, "libdcmi.so")] {
            let copy = self.node.dir().join(name);
            std::fs::copy(&*file, &copy).with_context(|| format!("cannot copy {}", file.display()))?;
            *file = copy;
        }
        Ok(())
    }

    /// Starts a daemon and does not wait for it. Health interval and log level are those that users get.
    pub(crate) fn spawn(&mut self) -> anyhow::Result<()> {
        let library = format!("--dcmi-library={}", self.library.display());
        let mut changes = vec!["--health-interval", "--log-level", &library];
        changes.extend(self.flags.iter().map(String::as_str));
        self.daemon = Some(self.node.start(self.node.daemon_with(&self.binary, &changes))?);
        Ok(())
    }

    /// Starts a daemon, and waits until it is registered and has published all cards.
    pub(crate) async fn start(&mut self) -> anyhow::Result<()> {
        self.spawn()?;
        self.explain(self.kubelet.wait_registered(DRIVER, SOON).await)?;
        self.wait_published(SOON).await
    }

    /// Waits until all cards are published.
    pub(crate) async fn wait_published(&self, deadline: Duration) -> anyhow::Result<()> {
        let wanted = usize::try_from(self.cards)?;
        let found = self.api.wait_until(|state| published(&state.slices(DRIVER, NODE)) == wanted, deadline).await;
        self.explain(found)
    }

    /// Adds the end of the daemon's log to an error.
    fn explain<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        result.with_context(|| {
            let log = self.daemon.as_ref().map(Daemon::log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(12)..].join("\n")
        })
    }

    pub(crate) fn daemon(&mut self) -> anyhow::Result<&mut Daemon> {
        self.daemon.as_mut().context("no daemon runs")
    }

    pub(crate) fn client(&self) -> anyhow::Result<DraClient> {
        self.kubelet.client(DRIVER)
    }

    /// The DRA socket.
    pub(crate) fn endpoint(&self) -> anyhow::Result<PathBuf> {
        Ok(self.kubelet.plugin(DRIVER).context("the daemon is not registered")?.endpoint)
    }

    /// Name of the card of a number, which goes round.
    pub(crate) fn card(&self, number: u32) -> String {
        format!("npu-{}", number % self.cards)
    }

    /// A new claim with a whole card.
    pub(crate) fn claim(&self, card: &str) -> anyhow::Result<Claim> {
        self.store(json!({}), DeviceResult::new("npu", DRIVER, POOL, card))
    }

    /// A new claim with a share of 8 GiB of a card.
    pub(crate) fn part(&self, card: &str) -> anyhow::Result<Claim> {
        let result = DeviceResult::new("npu", DRIVER, POOL, card).share("share").consumes("memCapacity", "8Gi");
        self.store(json!({"capacity": {"requests": {"memCapacity": "8Gi"}}}), result)
    }

    /// A new claim that may look at a card and owns nothing.
    pub(crate) fn look(&self, card: &str) -> anyhow::Result<Claim> {
        self.store(json!({"adminAccess": true}), DeviceResult::new("npu", DRIVER, POOL, card).admin_access())
    }

    fn store(&self, extra: Value, result: DeviceResult) -> anyhow::Result<Claim> {
        let mut exactly = json!({"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 1});
        if let (Some(exactly), Value::Object(extra)) = (exactly.as_object_mut(), extra) {
            exactly.extend(extra);
        }
        let name = format!("claim-{}", self.numbers.fetch_add(1, Ordering::Relaxed));
        let builder = self.api.claim_builder(NAMESPACE, &name);
        let builder = builder.raw_request(json!({"name": "npu", "exactly": exactly})).result(result);
        let stored = builder.node(NODE).store();
        let uid = stored["metadata"]["uid"].as_str().context("a stored claim has no uid")?;
        Ok(claim(NAMESPACE, &name, uid))
    }

    /// Prepares this many admin claims and leaves them; gives them.
    pub(crate) async fn fill(&self, count: u32) -> anyhow::Result<Vec<Claim>> {
        let client = self.client()?;
        let mut all = Vec::new();
        let mut left = count;
        while left > 0 {
            let now = left.min(FILLERS);
            let claims = (0..now).map(|number| self.look(&self.card(number))).collect::<anyhow::Result<Vec<_>>>()?;
            try_join_all(claims.iter().map(|claim| prepared(&client, claim))).await?;
            self.api.forget_requests();
            all.extend(claims);
            left -= now;
        }
        Ok(all)
    }

    /// Prepares a claim for a card; gives the time of the call less the time that the API server took to answer. The
    /// way to the API server and back, TLS included, is the daemon's own. The claim is released again.
    pub(crate) async fn own_time(&self, client: &DraClient, card: &str) -> anyhow::Result<Duration> {
        self.own_time_of(client, self.claim(card)?).await
    }

    /// The same for a part of a card, less the time of the library's calls for it too.
    pub(crate) async fn own_time_of_part(&self, client: &DraClient, card: &str) -> anyhow::Result<Duration> {
        self.node.world().clear_calls()?;
        let own = self.own_time_of(client, self.part(card)?).await?;
        // The first create and the read-backs before it; what follows belongs to the release.
        let calls = self.node.world().calls()?;
        let destroyed = calls.list.iter().position(|call| call.function == "dcmi_set_destroy_vdevice");
        let ours = calls.list.iter().take(destroyed.unwrap_or(calls.list.len()));
        let cutting = ["dcmi_create_vdevice", "dcmi_get_device_info", "dcmi_get_device_resource_info"];
        let spent = ours.filter(|call| cutting.contains(&call.function.as_str()));
        let spent: u64 = spent.filter_map(|call| Some(call.end_us?.saturating_sub(call.start_us))).sum();
        Ok(own.saturating_sub(Duration::from_micros(spent)))
    }

    async fn own_time_of(&self, client: &DraClient, claim: Claim) -> anyhow::Result<Duration> {
        let start = Instant::now();
        prepared(client, &claim).await?;
        let call = start.elapsed();
        let waited = self.api.with_state(|state| {
            let requests = state.requests().iter().filter(|request| request.at >= start && request.name == claim.name);
            requests.filter_map(|request| Some(request.answered?.duration_since(request.at))).sum::<Duration>()
        });
        ensure!(!waited.is_zero(), "claim {} was prepared without being read", claim.name);
        self.release(client, &[claim]).await?;
        self.api.forget_requests();
        Ok(call.saturating_sub(waited))
    }

    /// The same for as many cards as wanted, one after the other.
    pub(crate) async fn own_times(&self, client: &DraClient, count: u32) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        for number in 0..count {
            samples.push(self.own_time(client, &self.card(number)).await?);
        }
        Ok(samples)
    }

    /// Releases claims and deletes them.
    pub(crate) async fn release(&self, client: &DraClient, claims: &[Claim]) -> anyhow::Result<()> {
        for (uid, answer) in client.unprepare(claims).await? {
            answer.map_err(|error| anyhow!("unprepare of claim {uid}: {error}"))?;
        }
        for claim in claims {
            self.api.delete_claim(&claim.namespace, &claim.name);
        }
        Ok(())
    }

    /// Prepares a claim for each card, in one call each: at once, or one after the other. Gives the time for all; they
    /// are released again.
    pub(crate) async fn prepare_all(&self, client: &DraClient, at_once: bool) -> anyhow::Result<Duration> {
        let cards = (0..self.cards).map(|number| self.card(number));
        let claims = cards.map(|card| self.claim(&card)).collect::<anyhow::Result<Vec<_>>>()?;
        let start = Instant::now();
        if at_once {
            try_join_all(claims.iter().map(|claim| prepared(client, claim))).await?;
        } else {
            for claim in &claims {
                prepared(client, claim).await?;
            }
        }
        let time = start.elapsed();
        self.release(client, &claims).await?;
        self.api.forget_requests();
        Ok(time)
    }
}

/// Prepares a claim; no device in the answer is an error too.
pub(crate) async fn prepared(client: &DraClient, claim: &Claim) -> anyhow::Result<()> {
    let devices = client.prepare_one(claim).await.map_err(|error| anyhow!("prepare of {}: {error}", claim.name))?;
    ensure!(!devices.is_empty(), "prepare of {} gave no device", claim.name);
    Ok(())
}

/// Devices in slices of which none is missing.
pub(crate) fn published(slices: &[&Value]) -> usize {
    let count = |slice: &Value| slice["spec"]["devices"].as_array().map_or(0, Vec::len);
    let complete = slices.iter().all(|slice| {
        let wanted = slice["spec"]["pool"]["resourceSliceCount"].as_u64();
        wanted == u64::try_from(slices.len()).ok()
    });
    if complete { slices.iter().map(|slice| count(slice)).sum() } else { 0 }
}
