//! Figures beside those of Kubernetes' own reference driver, on the same node in the same run. They are printed; only
//! that they are there is asserted.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    sync::mpsc::Receiver,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use testkit::load;

use super::Case;
use crate::{
    driver::{DRIVER, Driver, is_complete, pss_of},
    plane::Plane,
    stage::{Stage, claim, claim_template, name, pod, request, wait, wait_for},
};

pub(crate) const CASES: &[Case] = &[("figures", figures)];

/// The reference driver, its class and its unit.
const REFERENCE: &str = "test-driver.cdi.k8s.io";
const CLASS: &str = "reference";
/// Both drivers have the same credentials: the node's own would not let them read claims that no pod uses.
const KUBECONFIG: &str = "/etc/kubernetes/admin.conf";
/// Pods of which kubelet's mean is taken, and how many there is room for at a time.
const PODS: usize = 20;
const ROOM: usize = 8;
/// Claims that are prepared in parallel.
const PARALLEL: usize = 64;
/// How often each is.
const ROUNDS: usize = 3;
/// How often a driver is started.
const STARTS: usize = 5;

/// One of the drivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Ours,
    /// As its authors ship it.
    Shipped,
    /// The same without its limit of requests to the API server.
    Unlimited,
}

impl Who {
    fn driver(self) -> &'static str {
        if self == Self::Ours { DRIVER } else { REFERENCE }
    }

    fn unit(self) -> &'static str {
        if self == Self::Ours { "npu-dra.service" } else { "reference.service" }
    }

    fn registration(self) -> String {
        let name = if self == Self::Ours { format!("{DRIVER}@reg.sock") } else { format!("{REFERENCE}-reg.sock") };
        format!("/var/lib/kubelet/plugins_registry/{name}")
    }

    fn endpoint(self, plane: &Plane) -> PathBuf {
        let name = if self == Self::Ours { "dra@npu.sock" } else { "dra.sock" };
        plane.machine().inside(&format!("/var/lib/kubelet/plugins/{}/{name}", self.driver()))
    }

    fn slices(self) -> String {
        format!("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver%3D{}", self.driver())
    }

    fn start(self, stage: &Stage, devices: usize) -> anyhow::Result<()> {
        let plane = stage.plane();
        if self == Self::Ours {
            return plane.run(&["systemctl", "start", self.unit()]).map(drop);
        }
        let module = plane.kubernetes().module.name;
        let limit = if self == Self::Unlimited { "--kube-api-qps=2000 --kube-api-burst=2000" } else { "" };
        plane
            .sh(&format!(
                "systemctl reset-failed {unit} 2>/dev/null || true\n\
                 mkdir -p /var/lib/kubelet/plugins/{REFERENCE}\n\
                 systemd-run --quiet --collect --unit={unit} --property=Type=exec /opt/{module}/test-driver \
                 --kubeconfig={KUBECONFIG} {limit} kubelet-plugin --node-name=node1 --num-devices={devices} --cdi-dir=/etc/cdi",
                unit = self.unit()
            ))
            .map(drop)
    }

    /// Stops it and removes what it published.
    fn stop(self, stage: &Stage) -> anyhow::Result<()> {
        stage.plane().sh(&format!("systemctl stop {} 2>/dev/null || true", self.unit()))?;
        stage.api().delete(&self.slices())?;
        wait("the slices to be gone", || Ok(stage.api().list(&self.slices())?.is_empty().then_some(())))
    }

    /// Waits until its pool is complete and kubelet can call it.
    fn wait_ready(self, stage: &Stage, devices: usize) -> anyhow::Result<()> {
        wait("the driver's slices", || {
            let slices = stage.api().list(&self.slices())?;
            let found: usize = slices.iter().filter_map(|one| one["spec"]["devices"].as_array()).map(Vec::len).sum();
            ensure!(is_complete(&slices) && found == devices, "{found} devices");
            Ok(Some(()))
        })
    }
}

/// The figures of one driver, by their names, in the order of the table.
#[derive(Debug, Default)]
struct Figures(BTreeMap<usize, f64>);

/// The table's lines: what, unit, decimals.
const ROWS: [(&str, &str, usize); 12] = [
    ("exec → registration socket, median", "ms", 1),
    ("exec → slice visible, median", "ms", 1),
    ("slices back after kubelet's wipe", "ms", 1),
    ("kubelet's prepare, mean over 20 pods", "ms", 2),
    ("kubelet's unprepare, mean over 20 pods", "ms", 2),
    ("memory after 20 pods, Σ Pss", "MiB", 1),
    ("prepare, 1 at a time: p50", "ms", 2),
    ("prepare, 1 at a time: p99", "ms", 2),
    ("pairs, 1 at a time", "/s", 0),
    ("prepare, 64 at a time: p50", "ms", 2),
    ("prepare, 64 at a time: p99", "ms", 2),
    ("pairs, 64 at a time", "/s", 0),
];

impl Figures {
    fn set(&mut self, row: usize, value: f64) {
        self.0.insert(row, value);
    }
}

fn figures(stage: &Stage) -> anyhow::Result<()> {
    let class = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": CLASS},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == {REFERENCE:?}")}}]},
    });
    stage.api().create(&class)?;
    let outcome = measure(stage);
    // The reference driver goes whatever happened.
    Who::Shipped.stop(stage)?;
    stage.delete(&[&class])?;
    stage.note(outcome?);
    Ok(())
}

fn measure(stage: &Stage) -> anyhow::Result<String> {
    let all = [Who::Ours, Who::Shipped, Who::Unlimited];
    let mut found = [Figures::default(), Figures::default(), Figures::default()];
    let driver = |cards: u32| {
        let driver = Driver::whole().on(dcmi::world::Profile::Many(cards)).with("log.level", "\"info\"");
        driver.with("kubeconfig", &format!("{KUBECONFIG:?}")).with("health.interval", "\"5s\"")
    };

    stage.with(&driver(8))?;
    for (who, figures) in all.into_iter().zip(&mut found) {
        starts(stage, who, figures)?;
        pods(stage, who, figures)?;
        figures.set(5, f64::from(u32::try_from(pss_of(stage.plane(), stage.plane().main_pid(who.unit())?)?)?) / 1024.0);
        if who == Who::Shipped {
            who.stop(stage)?;
        }
    }
    // The limit changes nothing about the few requests of a restart.
    let [ours, shipped, unlimited] = &mut found;
    kubelet_restart(stage, &mut [(Who::Ours, ours), (Who::Unlimited, unlimited)])?;
    if let Some(value) = unlimited.0.get(&2) {
        shipped.set(2, *value);
    }
    Who::Unlimited.stop(stage)?;

    stage.with(&driver(64))?;
    for (who, figures) in all.into_iter().zip(&mut found) {
        if who != Who::Ours {
            who.start(stage, PARALLEL)?;
        }
        who.wait_ready(stage, PARALLEL)?;
        calls(stage, who, figures)?;
        if who != Who::Ours {
            who.stop(stage)?;
        }
    }
    let mut floor = floor(&stage.plane().file("/var/lib/cluster"))?;
    let [median, slowest] = [50, 99].map(|percent| percentile(&mut floor, percent));
    Ok(format!(
        "{}\n        Ours writes two files durably for a prepare, the reference driver none: here one durable replace takes \
         {median:.2} ms (p50), {slowest:.2} ms (p99)",
        table(&found)?
    ))
}

/// What the node's disk needs for one durable replace of a file of 800 bytes, in milliseconds, many times.
fn floor(dir: &Path) -> anyhow::Result<Vec<f64>> {
    let (part, path) = (dir.join("floor.part"), dir.join("floor"));
    let mut times = Vec::new();
    for _ in 0..200 {
        let begun = Instant::now();
        let mut file = File::create(&part)?;
        file.write_all(&[b'x'; 800])?;
        file.sync_all()?;
        fs::rename(&part, &path)?;
        File::open(dir)?.sync_all()?;
        times.push(milliseconds(begun.elapsed()));
    }
    fs::remove_file(&path)?;
    Ok(times)
}

/// Starts a driver several times; it runs afterwards.
fn starts(stage: &Stage, who: Who, figures: &mut Figures) -> anyhow::Result<()> {
    let (mut sockets, mut slices) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        who.stop(stage)?;
        let path = stage.plane().file(&who.registration());
        let _ = fs::remove_file(&path);
        let events = stage.api().watch(&who.slices())?;
        let (socket, visible) = std::thread::scope(|scope| {
            let socket = scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_secs(30);
                while !path.exists() {
                    ensure!(Instant::now() < deadline, "there is no {}", path.display());
                    std::thread::sleep(Duration::from_micros(500)); // waits: for the registration socket
                }
                Ok(Instant::now())
            });
            let started = who.start(stage, ROOM);
            let visible = started.and_then(|()| {
                wait("the first slice", || {
                    let events: Vec<_> = events.try_iter().collect();
                    Ok(events.into_iter().find(|(_, event)| event["type"] == "ADDED").map(|(at, _)| at))
                })
            });
            let socket = socket.join().unwrap_or_else(|_| Err(anyhow!("the look-out panicked")));
            anyhow::Ok((socket?, visible?))
        })?;
        let exec = exec_time(stage, who)?;
        sockets.push(milliseconds(socket.saturating_duration_since(exec)));
        slices.push(milliseconds(visible.saturating_duration_since(exec)));
        who.wait_ready(stage, ROOM)?;
    }
    figures.set(0, percentile(&mut sockets, 50));
    figures.set(1, percentile(&mut slices, 50));
    Ok(())
}

/// When the unit's program was executed.
fn exec_time(stage: &Stage, who: Who) -> anyhow::Result<Instant> {
    let show = |property: &str| {
        let text =
            stage.plane().run(&["systemctl", "show", "--value", &format!("--property={property}"), who.unit()])?;
        anyhow::Ok(text.trim().parse::<u64>().unwrap_or(0))
    };
    // The first is nearer, and newer.
    let stamp = match show("ExecMainHandoverTimestampMonotonic")? {
        0 => show("ExecMainStartTimestampMonotonic")?,
        stamp => stamp,
    };
    ensure!(stamp > 0, "systemd does not say when {} was started", who.unit());
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    let ago = now.saturating_sub(Duration::from_micros(stamp));
    Instant::now().checked_sub(ago).context("the clock is younger than the driver")
}

/// Kubelet's own mean over pods that come and go.
fn pods(stage: &Stage, who: Who, figures: &mut Figures) -> anyhow::Result<()> {
    let one = request("npu");
    let template = claim_template("figure", &[if who == Who::Ours { one } else { one.class(CLASS) }]);
    stage.create(&[&template])?;
    let before = (operations(stage, who, "NodePrepareResources")?, operations(stage, who, "NodeUnprepareResources")?);
    let pods: Vec<Value> = (0..PODS).map(|number| pod(&format!("figure-{number}"), &[&template])).collect();
    for batch in pods.chunks(ROOM) {
        let batch: Vec<&Value> = batch.iter().collect();
        stage.create(&batch)?;
        for pod in &batch {
            stage.wait_running(pod)?;
        }
        stage.delete(&batch)?;
        stage.wait_empty()?;
    }
    let mean = |method: &str, before: (f64, f64)| {
        let after = operations(stage, who, method)?;
        let count = after.1 - before.1;
        ensure!(count >= 20.0, "kubelet counts {count} {method} of {}", who.driver());
        Ok((after.0 - before.0) / count * 1000.0)
    };
    figures.set(3, mean("NodePrepareResources", before.0)?);
    figures.set(4, mean("NodeUnprepareResources", before.1)?);
    stage.delete(&[&template])
}

/// Kubelet's sum of seconds and number of calls of a driver's method.
fn operations(stage: &Stage, who: Who, method: &str) -> anyhow::Result<(f64, f64)> {
    let text = stage.api().get("/api/v1/nodes/node1/proxy/metrics")?;
    let text = text.as_str().context("kubelet's metrics are no text")?;
    let total = |suffix: &str| {
        let head = format!("dra_grpc_operations_duration_seconds_{suffix}{{");
        let of_driver = format!("driver_name=\"{}\"", who.driver());
        let lines = text.lines().filter(|line| line.contains(&head) && line.contains(&of_driver));
        let lines =
            lines.filter(|line| line.contains(&format!("/{method}\"")) || line.contains(&format!("\"{method}\"")));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    Ok((total("sum"), total("count")))
}

/// Both drivers through one restart of kubelet.
fn kubelet_restart(stage: &Stage, drivers: &mut [(Who, &mut Figures)]) -> anyhow::Result<()> {
    let mut watched = Vec::new();
    for (who, _) in drivers.iter() {
        watched.push((stage.api().list(&who.slices())?, stage.api().watch(&who.slices())?));
    }
    stage.plane().run(&["systemctl", "restart", "kubelet"])?;
    for ((slices, events), (_, figures)) in watched.into_iter().zip(drivers.iter_mut()) {
        figures.set(2, milliseconds(back_after_wipe(&slices, &events)?));
    }
    for (who, _) in drivers.iter() {
        wait("kubelet to find the driver again", || {
            let log = stage.plane().tail("kubelet", 500);
            let lines = log.lines().rev().take_while(|line| !line.contains("Plugin Watcher Start"));
            let found = lines.filter(|line| line.contains(who.driver()) && line.contains("connected=true")).count();
            Ok((found > 0).then_some(()))
        })?;
    }
    Ok(())
}

/// From kubelet's removal of slices to the moment when all are there again.
fn back_after_wipe(slices: &[Value], events: &Receiver<(Instant, Value)>) -> anyhow::Result<Duration> {
    let mut held: BTreeMap<String, Value> = slices.iter().map(|one| (name(one).to_owned(), one.clone())).collect();
    let mut wiped: Option<Instant> = None;
    wait_for(Duration::from_mins(1), "the slices to go and come back", || {
        while let Ok((at, event)) = events.try_recv() {
            let slice = &event["object"];
            if event["type"] == "DELETED" {
                held.remove(name(slice));
                wiped = Some(at);
            } else {
                held.insert(name(slice).to_owned(), slice.clone());
            }
            let whole = held.len() == slices.len() && is_complete(&held.values().cloned().collect::<Vec<_>>());
            if let Some(wiped) = wiped
                && whole
            {
                return Ok(Some(at.saturating_duration_since(wiped)));
            }
        }
        Ok(None)
    })
}

/// Prepare and unprepare as kubelet calls them, by a client that does nothing else.
fn calls(stage: &Stage, who: Who, figures: &mut Figures) -> anyhow::Result<()> {
    let slices = stage.api().list(&who.slices())?;
    let pool = slices.first().context("no slices")?["spec"]["pool"]["name"].clone();
    let devices = slices.iter().filter_map(|one| one["spec"]["devices"].as_array()).flatten();
    let mut objects = Vec::new();
    let mut claims = Vec::new();
    for (number, device) in devices.enumerate() {
        let one = request("npu");
        let object = claim(&format!("load-{number}"), &[if who == Who::Ours { one } else { one.class(CLASS) }]);
        let stored = stage.api().create(&object)?;
        let result = json!({"request": "npu", "driver": who.driver(), "pool": pool, "device": device["name"]});
        let path = format!("{}/status", crate::api::path_of(&object)?);
        stage.api().merge(&path, &json!({"status": {"allocation": {"devices": {"results": [result]}}}}))?;
        let uid = stored["metadata"]["uid"].as_str().context("a claim without uid")?;
        claims.push(testkit::kubelet::claim("default", name(&object), uid));
        objects.push(object);
    }
    ensure!(claims.len() == PARALLEL, "{} devices", claims.len());
    let endpoint = who.endpoint(stage.plane());
    let [single, many] = stage.api().wait(async move { load::measure(&endpoint, &claims, ROUNDS).await })??;
    for (row, run) in [(6, single), (9, many)] {
        figures.set(row, run.prepare.p50_ms);
        figures.set(row + 1, run.prepare.p99_ms);
        figures.set(row + 2, run.pairs_per_second);
    }
    stage.delete(&objects.iter().collect::<Vec<_>>())?;
    stage.wait_empty()
}

/// The table, for print: sanity is that nothing is missing or zero.
fn table(found: &[Figures; 3]) -> anyhow::Result<String> {
    let mut text = String::new();
    let _ = write!(
        text,
        "\n        {:40} {:>9} {:>11} {:>7} {:>11} {:>7}",
        "", "ours", "reference", "ratio", "no limit", "ratio"
    );
    for (row, (what, unit, decimals)) in ROWS.iter().enumerate() {
        let figure = |who: &Figures| {
            let value = who.0.get(&row).copied().filter(|value| value.is_finite() && *value > 0.0);
            value.with_context(|| format!("{what}: not measured: {found:?}"))
        };
        let [ours, shipped, unlimited] = [figure(&found[0])?, figure(&found[1])?, figure(&found[2])?];
        let label = format!("{what} ({unit})");
        let _ = write!(
            text,
            "\n        {label:40} {ours:>9.decimals$} {shipped:>11.decimals$} {:>7.2} {unlimited:>11.decimals$} {:>7.2}",
            ours / shipped,
            ours / unlimited
        );
    }
    Ok(text)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get((values.len() * percent / 100).min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}
