//! The daemon from start to stop.
//!
//! ```text
//! start:  settings ─> lock ─> records ─> engine ─> sockets bound ─> DRA served ─> registration ─> READY
//!                                          └─ beside it: scan, recover, publish, watch health
//! stop:   registration goes ─> running calls end, bounded ─> DRA socket goes ─> admin socket and the rest
//! ```
//!
//! Neither the API server nor the vendor library is on the way to READY.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::{fs::FileTypeExt as _, net::UnixListener},
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use prometheus_client::registry::Registry;
use sd_notify::NotifyState;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{
    adapters::{Files, View},
    settings::Settings,
    systemd::{self, Watchdog},
};
use crate::{
    admin::{self, Admin},
    cdi::{self, Cdi},
    cluster::{self, Cluster},
    device,
    domain::plan::Node,
    engine::{self, Engine, Parts, Timing},
    http, kubelet,
    store::{self, Store},
};

/// How long a new instance waits for the old one to let go of the state directory.
const HANDOVER: Duration = Duration::from_secs(25);
/// How long calls that run at the stop may take.
const GRACE: Duration = Duration::from_secs(1);
/// How long everything else may take to stop after that.
const REST: Duration = Duration::from_millis(700);
/// Shortest time between two scans after one that failed: the backend itself spares a library that does not come up.
const RESCAN: Duration = Duration::from_secs(2);
/// Mode of the admin socket: who may do what is decided by the caller's credentials as well.
const ADMIN_MODE: u32 = 0o660;
/// The kubeconfig of the node's own kubelet.
const KUBELET_CONF: &str = "/etc/kubernetes/kubelet.conf";

/// Why the daemon could not start, or did not go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// Another instance owns the state directory, or it cannot be opened.
    #[error(transparent)]
    Open(#[from] store::OpenError),
    /// The records cannot be loaded.
    #[error(transparent)]
    Load(#[from] store::LoadError),
    /// The CDI directory cannot be used.
    #[error(transparent)]
    Cdi(#[from] cdi::CdiError),
    /// There is no backend as configured.
    #[error(transparent)]
    Device(#[from] device::OpenError),
    /// Kubelet's sockets cannot be made.
    #[error(transparent)]
    Kubelet(#[from] kubelet::SocketError),
    /// A server of kubelet's sockets ended.
    #[error(transparent)]
    KubeletEnded(#[from] kubelet::ServeError),
    /// The admin socket cannot be made.
    #[error(transparent)]
    Admin(#[from] admin::SocketError),
    /// The admin service ended.
    #[error(transparent)]
    AdminEnded(#[from] admin::ServeError),
    /// The health port cannot be opened.
    #[error(transparent)]
    Http(#[from] http::ListenError),
    /// The boot cannot be told from others.
    #[error("cannot read {}: is --host-root right?", path.display())]
    BootId {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The system refused something that always works.
    #[error("cannot {what}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A part ended although nobody stopped it.
    #[error("the {0} ended by itself")]
    Ended(&'static str),
}

impl Failure {
    /// The exit code; 2 and 4 mean that starting again does not help.
    pub(super) fn exit_code(&self) -> u8 {
        use kubelet::SocketError::{Relative, TooLong, Unspeakable};
        match self {
            Self::Kubelet(TooLong { .. } | Relative { .. } | Unspeakable { .. })
            | Self::Cdi(cdi::CdiError::Vendor(_)) => super::EXIT_SETTINGS,
            Self::Open(store::OpenError::Locked { .. }) => 3,
            Self::Load(store::LoadError::Newer { .. }) => 4,
            _ => 1,
        }
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> Failure {
    move |source| Failure::System { what, source }
}

/// What is on disk, opened and owned.
struct Opened {
    files: Files,
    loaded: engine::Loaded,
    boot_id: String,
    adopted: Option<UnixListener>,
}

/// Runs until a signal, or until something fails. `reload` reads the settings again.
pub(super) fn run(settings: Settings, reload: impl Fn() -> Option<Settings>) -> Result<(), Failure> {
    let started_at = Timestamp::now();
    let adopted = systemd::admin_socket().map_err(system("take the admin socket from systemd"))?;
    check_paths(&settings)?;
    let opened = open(&settings, adopted)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .thread_keep_alive(Duration::from_secs(2))
        .enable_all()
        .build()
        .map_err(system("start the runtime"))?;
    let result = runtime.block_on(serve(settings, opened, started_at, reload));
    // Steps that hang in the file system are left to their records.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// Refuses paths that no socket can have, before anything is touched.
pub(super) fn check_paths(settings: &Settings) -> Result<(), Failure> {
    let instance = settings.instance.as_ref();
    kubelet::Sockets::new(&settings.driver, instance, &settings.registrar_dir, &settings.plugins_dir)?;
    Ok(())
}

/// Takes the state directory and reads all of it.
fn open(settings: &Settings, adopted: Option<UnixListener>) -> Result<Opened, Failure> {
    let wait = settings.instance.as_ref().map(|_| HANDOVER);
    if wait.is_some() {
        systemd::extend_start(HANDOVER + Duration::from_secs(10));
    }
    let store = Store::open(&settings.state_dir, wait)?;
    let loaded = store.load()?;
    if let Some(problem) = &loaded.node_problem {
        warn!(problem, "the node's memory was damaged: drains, cordons and a suspension are forgotten");
    }
    for path in &loaded.strangers {
        warn!(path = %path.display(), "a file that is no record is left alone");
    }
    let mut optional_binds = Vec::new();
    optional_binds.extend(settings.hccl_rootinfo.then_some(cdi::OptionalBind::RootInfo));
    optional_binds.extend(settings.topo.then_some(cdi::OptionalBind::Topo));
    let cdi = Cdi::open(cdi::Settings {
        root: settings.cdi_root.clone(),
        driver: settings.driver.clone(),
        host_root: settings.host_root.clone(),
        example: matches!(settings.backend, device::Choice::Example(_)),
        hide_from_ascend_runtime: settings.visible_devices_void,
        optional_binds,
    })?;
    let path = settings.host_root.join("proc/sys/kernel/random/boot_id");
    let boot_id = std::fs::read_to_string(&path).map_err(|source| Failure::BootId { path, source })?;
    let loaded = engine::Loaded {
        records: loaded.records,
        quarantined: loaded.quarantined,
        memory: loaded.node,
        problem: loaded.node_problem,
    };
    Ok(Opened { files: Files { store, cdi }, loaded, boot_id: boot_id.trim().to_owned(), adopted })
}

/// What runs from the start to the stop.
struct Core {
    settings: Settings,
    node: Node,
    engine: Engine,
    cluster: Cluster,
    files: Arc<Files>,
}

/// The sockets, listening; nobody is served yet.
struct Bound {
    kubelet: kubelet::Bound,
    admin: admin::Socket,
    readers: Option<admin::Readers>,
    http: Option<http::Bound>,
}

/// What runs beside the service for kubelet.
struct Tasks {
    engine: JoinHandle<()>,
    cluster: JoinHandle<()>,
    admin: JoinHandle<Result<(), admin::ServeError>>,
    http: JoinHandle<()>,
    followers: JoinSet<()>,
}

async fn serve(
    settings: Settings,
    mut opened: Opened,
    started_at: Timestamp,
    reload: impl Fn() -> Option<Settings>,
) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    let mut registry = Registry::with_prefix("npu_dra");
    let adopted = opened.adopted.take();
    let core = Core::build(settings, opened, &mut registry)?;
    // Everything is bound before kubelet sees the first socket.
    let bound = Bound::bind(&core, adopted, &mut registry).await?;
    let (stop_kubelet, stop) = (CancellationToken::new(), CancellationToken::new());
    let serving = bound.kubelet.serve(Arc::new(core.engine.clone()), stop_kubelet.clone())?;
    let status = serving.status();

    let permissions = admin::Permissions { owner: nix::unistd::geteuid().as_raw(), readers: bound.readers };
    let identity = admin::Identity::of_this_process(started_at);
    let admin = Admin::new(Arc::new(core.view(status.clone())), permissions, identity, &mut registry);
    let mut tasks = Tasks {
        engine: core.start_engine(stop.clone()),
        cluster: tokio::spawn(run_cluster(core.cluster.clone(), stop.clone())),
        admin: tokio::spawn(admin.serve(bound.admin, stop.clone())),
        http: tokio::spawn(serve_http(bound.http, Arc::new(registry), stop.clone())),
        followers: JoinSet::new(),
    };
    systemd::tell(&[NotifyState::Ready, NotifyState::Status("serving kubelet")]);
    tasks.followers.spawn(follow_registration(status, core.cluster.clone()));
    tasks.followers.spawn(tell_status(core.engine.clone()));
    let files = core.files.clone();
    tasks.followers.spawn_blocking(move || warn_of_conflicts(&files.cdi));

    let mut kubelet = Box::pin(serving.stopped());
    let ended = signals.until_end(&core, reload, &mut tasks, kubelet.as_mut()).await;
    systemd::tell(&[NotifyState::Stopping]);
    tasks.followers.abort_all();
    stop_kubelet.cancel();
    let result = match ended {
        End::Asked => {
            let (stopped, idle) = tokio::join!(kubelet, core.engine.drain(GRACE));
            if !idle {
                warn!("claims are still being worked on; their records hold them");
            }
            stopped.map_err(Failure::from)
        }
        // The others' sockets go as well, so that nobody waits for answers that will not come.
        End::Failed(Failure::KubeletEnded(error)) => Err(error.into()),
        End::Failed(failure) => {
            let _ = kubelet.await;
            Err(failure)
        }
    };
    stop.cancel();
    if tokio::time::timeout(REST, tasks.ended()).await.is_err() {
        warn!("not everything ended in time");
    }
    match &result {
        Ok(()) => info!("stopped"),
        Err(failure) => error!(%failure, "ending"),
    }
    result
}

impl Core {
    fn build(settings: Settings, opened: Opened, registry: &mut Registry) -> Result<Self, Failure> {
        let node = Node { driver: settings.driver.clone(), pool: settings.pool.clone(), boot_id: opened.boot_id };
        let backend = device::open(&device::Settings {
            library: settings.dcmi_library.clone(),
            trust_library: settings.trust_library,
            wait: settings.device_wait,
            ..device::Settings::new(settings.backend, &settings.host_root, &settings.state_dir)
        })?;
        info!(
            version = env!("CARGO_PKG_VERSION"), node = %settings.node, driver = %settings.driver,
            backend = backend.name(), records = opened.loaded.records.len(), state = %settings.state_dir.display(),
            "starting"
        );
        let cluster = cluster::Settings {
            driver: settings.driver.clone(),
            node: settings.node.clone(),
            kubeconfig: settings.kubeconfig.clone(),
            in_cluster: cluster::InCluster::from_environment(),
            fallback_kubeconfig: PathBuf::from(KUBELET_CONF),
            timing: cluster::Timing::default(),
        };
        let cluster = Cluster::new(&cluster, registry);
        let files = Arc::new(opened.files);
        let parts = Parts {
            node: node.clone(),
            backend,
            disk: files.clone(),
            api: Arc::new(cluster.clone()),
            loaded: opened.loaded,
            timing: Timing {
                health_interval: settings.health_interval,
                rescan: RESCAN,
                release_wait: settings.release_wait,
                replay_wait: settings.replay_wait,
                ..Timing::default()
            },
            policy: settings.health.clone(),
            wish: settings.slicing.clone(),
            rival: Box::new(rival(&settings, cluster.clone())),
            uptime: Box::new(uptime(settings.host_root.clone())),
        };
        Ok(Self { engine: Engine::new(parts, registry), settings, node, cluster, files })
    }

    /// Scan, recovery, health; each full turn is a sign of life.
    fn start_engine(&self, stop: CancellationToken) -> JoinHandle<()> {
        let (engine, watchdog) = (self.engine.clone(), Watchdog::new(self.settings.health_interval));
        tokio::spawn(async move { engine.run(stop, move || watchdog.feed()).await })
    }

    fn view(&self, kubelet: kubelet::Status) -> View {
        View {
            engine: self.engine.clone(),
            kubelet,
            cluster: self.cluster.clone(),
            node: self.node.clone(),
            node_name: self.settings.node.to_string(),
        }
    }
}

impl Bound {
    async fn bind(core: &Core, adopted: Option<UnixListener>, registry: &mut Registry) -> Result<Self, Failure> {
        let settings = &core.settings;
        let (registrar, plugins) = (settings.registrar_dir.clone(), settings.plugins_dir.clone());
        let kubelet = kubelet::Settings {
            instance: settings.instance.clone(),
            grace: GRACE,
            ..kubelet::Settings::new(settings.driver.clone(), registrar, plugins)
        };
        let kubelet = kubelet::bind(kubelet, registry)?;
        let readers = admin::Readers::of_group(&settings.admin_group).unwrap_or_else(|error| {
            warn!(%error, group = settings.admin_group, "the group cannot be looked up; only root may look");
            None
        });
        let admin = match adopted {
            Some(listener) => admin::Socket::adopt(listener).map_err(system("use the admin socket of systemd"))?,
            None => admin::Socket::bind(&settings.admin_socket, ADMIN_MODE, readers.as_ref())?,
        };
        let http = match settings.healthcheck {
            Some(address) => Some(bind_http(address, kubelet.sockets()).await?),
            None => None,
        };
        Ok(Self { kubelet, admin, readers, http })
    }
}

/// Why the daemon ends.
enum End {
    /// A signal asked for it.
    Asked,
    /// A part ended although nobody stopped it.
    Failed(Failure),
}

/// The signals that the daemon hears.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        let take = |kind| signal(kind).map_err(system("listen for signals"));
        Ok(Self {
            terminate: take(SignalKind::terminate())?,
            interrupt: take(SignalKind::interrupt())?,
            hangup: take(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal to stop, or for any part to end; reloads meanwhile.
    async fn until_end(
        &mut self,
        core: &Core,
        reload: impl Fn() -> Option<Settings>,
        tasks: &mut Tasks,
        mut kubelet: Pin<&mut impl Future<Output = Result<(), kubelet::ServeError>>>,
    ) -> End {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => break,
                _ = self.interrupt.recv() => break,
                _ = self.hangup.recv() => {
                    if let Ok(stamp) = NotifyState::monotonic_usec_now() {
                        systemd::tell(&[NotifyState::Reloading, stamp]);
                    }
                    if let Some(settings) = reload() {
                        core.engine.set_policy(settings.health);
                        core.engine.reslice(settings.slicing);
                    }
                    systemd::tell(&[NotifyState::Ready]);
                }
                ended = &mut kubelet => {
                    return End::Failed(ended.err().map_or(Failure::Ended("service for kubelet"), Failure::from));
                }
                ended = &mut tasks.admin => return End::Failed(match ended {
                    Ok(Err(error)) => error.into(),
                    _ => Failure::Ended("admin service"),
                }),
                _ = &mut tasks.http => return End::Failed(Failure::Ended("health port")),
                _ = &mut tasks.engine => return End::Failed(Failure::Ended("engine")),
            }
        }
        info!("stopping");
        End::Asked
    }
}

impl Tasks {
    /// Waits until all have ended.
    async fn ended(self) {
        let all = [self.engine, self.cluster, self.http];
        let admin = self.admin.is_finished();
        for task in all.into_iter().filter(|task| !task.is_finished()) {
            let _ = task.await;
        }
        if !admin {
            let _ = self.admin.await;
        }
    }
}

async fn run_cluster(cluster: Cluster, stop: CancellationToken) {
    cluster.run(stop).await;
}

/// Serves the health port; without one only waits for the stop.
async fn serve_http(port: Option<http::Bound>, registry: Arc<Registry>, stop: CancellationToken) {
    match port {
        Some(port) => port.serve(registry, stop).await,
        None => stop.cancelled().await,
    }
}

/// Tells of another driver of the same cards: a device plugin's socket beside kubelet's, or resources that the node offers.
fn rival(settings: &Settings, cluster: Cluster) -> impl Fn() -> Option<String> + Send + Sync + use<> {
    // Example devices are nobody's.
    let example = matches!(settings.backend, device::Choice::Example(_));
    let directory = settings.plugins_dir.parent().map(|kubelet| kubelet.join("device-plugins")).unwrap_or_default();
    move || {
        if example {
            return None;
        }
        if let Some(resource) = cluster.status().other_devices.first() {
            return Some(format!("another device plugin offers {resource} on this node"));
        }
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let mut sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
        let found = sockets.find_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let lower = name.to_ascii_lowercase();
            ["ascend", "davinci", "huawei"].iter().any(|mark| lower.contains(mark)).then_some(name)
        })?;
        Some(format!("another device plugin has the socket {}", directory.join(found).display()))
    }
}

/// Tells the time since boot; an unreadable file counts as just booted, which only makes slicing wait.
fn uptime(host_root: PathBuf) -> impl Fn() -> Duration + Send + Sync {
    move || {
        let text = std::fs::read_to_string(host_root.join("proc/uptime")).unwrap_or_default();
        let seconds = text.split_whitespace().next().and_then(|first| first.parse().ok());
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default()
    }
}

/// Opens the health port; where IPv6 is switched off, all addresses are those of IPv4.
async fn bind_http(address: SocketAddr, sockets: &kubelet::Sockets) -> Result<http::Bound, http::ListenError> {
    let settings = http::Settings {
        address,
        endpoint: sockets.endpoint().to_owned(),
        registration: sockets.registration().to_owned(),
        timeout: Duration::from_millis(900),
    };
    match http::bind(settings.clone()).await {
        Err(error) if address.is_ipv6() && address.ip().is_unspecified() && !is_in_use(&error.source) => {
            let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), address.port());
            http::bind(http::Settings { address, ..settings }).await
        }
        result => result,
    }
}

fn is_in_use(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied)
}

/// A kubelet that takes us in may just have deleted our slices, while nobody watched.
async fn follow_registration(status: kubelet::Status, cluster: Cluster) {
    let mut registration = status.registration();
    let mut times = 0;
    while registration.changed().await.is_ok() {
        let now = registration.borrow_and_update().clone();
        if now.times > times {
            times = now.times;
            cluster.republish();
        }
    }
}

/// Keeps the service manager's status line in step; at most once a second.
async fn tell_status(engine: Engine) {
    let mut changes = engine.changes();
    let mut told = String::new();
    loop {
        changes.borrow_and_update();
        let snapshot = engine.snapshot();
        let line = format!(
            "{} {}: {} devices, {} claims",
            snapshot.backend.backend,
            snapshot.backend.state,
            snapshot.devices.len(),
            snapshot.claims.len()
        );
        if line != told {
            systemd::tell(&[NotifyState::Status(&line)]);
            told = line;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// A device that two CDI files define is given to nobody.
fn warn_of_conflicts(cdi: &Cdi) {
    match cdi.conflicts() {
        Ok(conflicts) => {
            for conflict in conflicts {
                let devices = conflict.devices.join(", ");
                let path = conflict.path.display();
                warn!(%path, devices, "a CDI file of another has devices of our kind; it is left alone, remove it");
            }
        }
        Err(error) => warn!(%error, "the CDI directory cannot be searched for files of others"),
    }
}
