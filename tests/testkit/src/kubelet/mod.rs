//! A kubelet, as a DRA driver sees one.
//!
//! It watches a registration directory, and takes in every socket that it finds there the way a real kubelet does:
//! first the raw HTTP/2 bytes with the encoded path as authority ([`raw`]), then `GetInfo`, its own checks, and
//! `NotifyRegistrationStatus`. Once a driver is registered, [`Kubelet::client`] makes kubelet's calls.
//!
//! ```text
//!              ┌ new name ──> raw bytes ─> GetInfo ─> checks ─> connect ─> Notify(true) ─> registered
//! directory ───┤                  └──────────┴─────────┴─────────┴─> Notify(false), again after a back-off
//!              └ name gone, or made anew ─> deregistered
//! ```

pub mod client;
pub mod raw;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, anyhow, bail, ensure};
use npu_proto::registration::registration_client::RegistrationClient;
use npu_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use tokio::sync::watch as value;
use tokio::task::JoinHandle;

pub use client::{
    CALL_TIMEOUT, CallError, Claim, Device, DeviceHealth, DraClient, DraVersion, HealthStatus, HealthStream,
    HealthVersion, PrepareAnswer, UnprepareAnswer, claim,
};

const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
const INFO_TIMEOUT: Duration = Duration::from_secs(1);
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// What kind of kubelet this is.
#[derive(Debug, Clone)]
pub struct Options {
    /// The prepare services that it knows.
    pub dra: Vec<DraVersion>,
    /// The wait after a first failed registration; it doubles each time.
    pub first_back_off: Duration,
    /// The longest wait between two tries.
    pub longest_back_off: Duration,
}

impl Default for Options {
    /// A kubelet of 1.34 or later.
    fn default() -> Self {
        Self {
            dra: vec![DraVersion::V1, DraVersion::V1Beta1],
            first_back_off: Duration::from_millis(500),
            longest_back_off: Duration::from_mins(2),
        }
    }
}

/// A registered driver.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The driver's name.
    pub driver: String,
    /// The registration socket it came by.
    pub socket: PathBuf,
    /// Its DRA socket.
    pub endpoint: PathBuf,
    /// All that it says it serves, in its order.
    pub supported_versions: Vec<String>,
    /// Kubelet's side of the DRA socket, speaking the version that kubelet chose.
    pub client: DraClient,
    /// When its socket was seen.
    pub found: Instant,
    /// When `NotifyRegistrationStatus` was sent.
    pub notified: Instant,
    /// When `NotifyRegistrationStatus` was answered.
    pub registered: Instant,
    /// The same by the wall clock.
    pub registered_at: SystemTime,
}

/// Something that happened at a socket.
#[derive(Debug, Clone)]
pub struct Entry {
    /// When, for measuring.
    pub at: Instant,
    /// The registration socket.
    pub socket: PathBuf,
    /// What.
    pub what: What,
}

/// The kinds of [`Entry`].
#[derive(Debug, Clone)]
pub enum What {
    /// A socket appeared.
    Found,
    /// It answered the raw bytes.
    Raw(raw::Answer),
    /// It answered `GetInfo`.
    Info(PluginInfo),
    /// It is registered as this driver.
    Registered(String),
    /// It was not taken in, and why.
    Refused(String),
    /// Its driver was removed.
    Deregistered(String),
    /// The socket went away.
    Gone,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.socket.display(), self.what)
    }
}

#[derive(Debug, Default)]
struct State {
    plugins: Vec<Plugin>,
    log: Vec<Entry>,
}

impl State {
    fn note(&mut self, socket: &Path, what: What) {
        self.log.push(Entry { at: Instant::now(), socket: socket.into(), what });
    }

    fn deregister(&mut self, socket: &Path) {
        let gone: Vec<String> =
            self.plugins.extract_if(.., |plugin| plugin.socket == socket).map(|plugin| plugin.driver).collect();
        for driver in gone {
            self.note(socket, What::Deregistered(driver));
        }
    }
}

/// The kubelet stand-in; see the module. Dropping it is as if kubelet was killed.
#[derive(Debug)]
pub struct Kubelet {
    dir: PathBuf,
    options: Options,
    state: Arc<value::Sender<State>>,
    task: Task,
}

impl Kubelet {
    /// Starts a kubelet of 1.34 or later that watches `registrar_dir`, which must exist.
    ///
    /// # Errors
    /// The directory cannot be watched.
    pub fn start(registrar_dir: &Path) -> anyhow::Result<Self> {
        Self::start_with(registrar_dir, Options::default())
    }

    /// Starts another kind of kubelet.
    ///
    /// # Errors
    /// The directory cannot be watched.
    pub fn start_with(registrar_dir: &Path, options: Options) -> anyhow::Result<Self> {
        let state = Arc::new(value::Sender::new(State::default()));
        let task = run(registrar_dir, &options, &state)?;
        Ok(Self { dir: registrar_dir.into(), options, state, task })
    }

    /// Restarts: forgets every driver and connection, then finds the sockets again.
    ///
    /// # Errors
    /// The directory cannot be watched.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.stop();
        self.task = run(&self.dir, &self.options, &self.state)?;
        Ok(())
    }

    /// Stops, as when kubelet is down for a while; [`Self::restart`] starts it again.
    pub fn stop(&mut self) {
        self.task = Task(None);
        self.state.send_modify(|state| state.plugins.clear());
    }

    /// The driver's instances, in the order of their registration.
    #[must_use]
    pub fn instances(&self, driver: &str) -> Vec<Plugin> {
        self.state.borrow().plugins.iter().filter(|plugin| plugin.driver == driver).cloned().collect()
    }

    /// The instance that kubelet would call: the one that registered last.
    #[must_use]
    pub fn plugin(&self, driver: &str) -> Option<Plugin> {
        self.instances(driver).pop()
    }

    /// Kubelet's calls to a driver.
    ///
    /// # Errors
    /// It is not registered; kubelet fails the pod then.
    pub fn client(&self, driver: &str) -> anyhow::Result<DraClient> {
        let plugin = self.plugin(driver);
        plugin.map(|plugin| plugin.client).ok_or_else(|| anyhow!("driver {driver} is not registered"))
    }

    /// All that happened so far, restarts included.
    #[must_use]
    pub fn log(&self) -> Vec<Entry> {
        self.state.borrow().log.clone()
    }

    /// Waits until the driver is registered.
    ///
    /// # Errors
    /// It is not within `deadline`; the error tells what happened instead.
    pub async fn wait_registered(&self, driver: &str, deadline: Duration) -> anyhow::Result<Plugin> {
        self.wait(deadline, &format!("driver {driver} registered"), |state| {
            state.plugins.iter().any(|plugin| plugin.driver == driver)
        })
        .await?;
        self.plugin(driver).ok_or_else(|| anyhow!("driver {driver} registered and went away at once"))
    }

    /// Waits until the driver has this many instances.
    ///
    /// # Errors
    /// It has not within `deadline`.
    pub async fn wait_instances(&self, driver: &str, count: usize, deadline: Duration) -> anyhow::Result<()> {
        self.wait(deadline, &format!("driver {driver} has {count} instances"), |state| {
            state.plugins.iter().filter(|plugin| plugin.driver == driver).count() == count
        })
        .await
    }

    /// Waits until no instance of the driver is registered.
    ///
    /// # Errors
    /// One still is at the `deadline`.
    pub async fn wait_deregistered(&self, driver: &str, deadline: Duration) -> anyhow::Result<()> {
        self.wait_instances(driver, 0, deadline).await
    }

    /// Waits for something in the log.
    ///
    /// # Errors
    /// It is not there within `deadline`.
    pub async fn wait_entry(&self, deadline: Duration, wanted: impl Fn(&Entry) -> bool) -> anyhow::Result<Entry> {
        self.wait(deadline, "the entry", |state| state.log.iter().any(&wanted)).await?;
        self.log().into_iter().find(wanted).context("the log was emptied")
    }

    async fn wait(&self, deadline: Duration, what: &str, wanted: impl Fn(&State) -> bool) -> anyhow::Result<()> {
        let mut state = self.state.subscribe();
        let outcome = tokio::time::timeout(deadline, state.wait_for(|state| wanted(state))).await;
        if outcome.is_err() {
            let log: Vec<String> = self.log().iter().map(ToString::to_string).collect();
            bail!("not within {deadline:?}: {what}; kubelet saw in {}: {log:#?}", self.dir.display());
        }
        Ok(())
    }
}

/// A task that ends with its owner.
#[derive(Debug)]
struct Task(Option<JoinHandle<()>>);

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

fn run(dir: &Path, options: &Options, state: &Arc<value::Sender<State>>) -> anyhow::Result<Task> {
    let mut watch = watch::Watch::new(dir).with_context(|| format!("cannot watch {}", dir.display()))?;
    let (dir, options, state) = (dir.to_owned(), options.clone(), Arc::clone(state));
    Ok(Task(Some(tokio::spawn(async move {
        let mut known: HashMap<PathBuf, (u64, Task)> = HashMap::new();
        let mut removed = HashSet::new();
        loop {
            look(&dir, &options, &state, &mut known, &removed);
            // Without the watch the directory is still read again now and then, as kubelet's own loop does.
            let pause = Duration::from_secs(1);
            removed = match tokio::time::timeout(pause, watch.changed()).await {
                Ok(Some(names)) => names,
                Err(_) => HashSet::new(),
                Ok(None) => {
                    tokio::time::sleep(pause).await; // waits: the watch is lost, only reading again is left
                    HashSet::new()
                }
            };
        }
    }))))
}

/// Compares the directory with what is known of it. A name that was removed and made again is another plugin.
fn look(
    dir: &Path,
    options: &Options,
    state: &Arc<value::Sender<State>>,
    known: &mut HashMap<PathBuf, (u64, Task)>,
    removed: &HashSet<OsString>,
) {
    let present: HashMap<PathBuf, u64> = sockets(dir).into_iter().collect();
    known.retain(|path, (inode, _)| {
        let same = present.get(path) == Some(inode) && path.file_name().is_none_or(|name| !removed.contains(name));
        if !same {
            state.send_modify(|state| {
                state.deregister(path);
                state.note(path, What::Gone);
            });
        }
        same
    });
    for (path, inode) in present {
        if known.contains_key(&path) {
            continue;
        }
        state.send_modify(|state| state.note(&path, What::Found));
        let found = Instant::now();
        let task = tokio::spawn(take_in(path.clone(), found, options.clone(), Arc::clone(state)));
        known.insert(path, (inode, Task(Some(task))));
    }
}

/// The sockets of a directory and their inode numbers; names that begin with a dot are not looked at.
fn sockets(dir: &Path) -> Vec<(PathBuf, u64)> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            metadata.file_type().is_socket().then(|| (entry.path(), metadata.ino()))
        })
        .collect()
}

/// Registers the plugin behind a socket, again and again until it works.
async fn take_in(socket: PathBuf, found: Instant, options: Options, state: Arc<value::Sender<State>>) {
    let mut back_off = options.first_back_off;
    while let Err(error) = register(&socket, found, &options, &state).await {
        state.send_modify(|state| state.note(&socket, What::Refused(format!("{error:#}"))));
        tokio::time::sleep(back_off).await; // waits: kubelet's own back-off between two tries
        back_off = (back_off * 2).min(options.longest_back_off);
    }
}

async fn register(
    socket: &Path,
    found: Instant,
    options: &Options,
    state: &Arc<value::Sender<State>>,
) -> anyhow::Result<()> {
    let answer = raw::get_info(socket, DIAL_TIMEOUT).await.context("the socket does not answer")?;
    state.send_modify(|state| state.note(socket, What::Raw(answer.clone())));
    match &answer {
        raw::Answer::Response { status: 200, info: Some(_) } => {}
        other => bail!("the socket answers kubelet's first bytes with {other:?}"),
    }

    let channel = client::channel(socket, DIAL_TIMEOUT).await.context("failed to dial")?;
    let mut client = RegistrationClient::new(channel);
    let mut request = tonic::Request::new(InfoRequest {});
    request.set_timeout(INFO_TIMEOUT);
    let info = client.get_info(request).await.context("failed to get the plugin's info")?.into_inner();
    state.send_modify(|state| state.note(socket, What::Info(info.clone())));

    let added = add(socket, found, options, state, &info).await;
    let error = added.as_ref().err().map(|error| format!("{error:#}"));
    let mut request =
        tonic::Request::new(RegistrationStatus { plugin_registered: added.is_ok(), error: error.unwrap_or_default() });
    request.set_timeout(NOTIFY_TIMEOUT);
    let notified = Instant::now();
    let told = client.notify_registration_status(request).await;
    let mut plugin = added?;
    told.context("the plugin does not accept that it is registered")?;
    plugin.notified = notified;
    plugin.registered = Instant::now();
    plugin.registered_at = SystemTime::now();
    let mut taken = false;
    state.send_modify(|state| {
        taken = state.plugins.iter().any(|other| other.endpoint == plugin.endpoint && other.driver == plugin.driver);
        if !taken {
            state.note(socket, What::Registered(plugin.driver.clone()));
            state.plugins.push(plugin);
        }
    });
    ensure!(!taken, "two sockets registered one endpoint at a time");
    Ok(())
}

/// Kubelet's checks of what a plugin says of itself, and its connection to the endpoint.
async fn add(
    socket: &Path,
    found: Instant,
    options: &Options,
    state: &Arc<value::Sender<State>>,
    info: &PluginInfo,
) -> anyhow::Result<Plugin> {
    ensure!(info.r#type == "DRAPlugin", "no handler for plugins of type {:?}", info.r#type);
    ensure!(!info.name.is_empty(), "the plugin has no name");
    let version = info.supported_versions.iter().find_map(|word| {
        // The plugin's order counts, not kubelet's.
        options.dra.iter().copied().find(|known| known.as_str() == word)
    });
    let Some(version) = version else {
        bail!("none of the services {:?} of the plugin is known to this kubelet", info.supported_versions);
    };
    let endpoint = if info.endpoint.is_empty() { socket.to_owned() } else { PathBuf::from(&info.endpoint) };
    ensure!(endpoint.is_absolute(), "endpoint {} is not absolute", endpoint.display());
    let taken = state.borrow().plugins.iter().any(|plugin| plugin.driver == info.name && plugin.endpoint == endpoint);
    ensure!(!taken, "endpoint {} already registered for driver {}", endpoint.display(), info.name);
    let client = DraClient::connect(&endpoint, version).await.context("failed to connect to the endpoint")?;
    let now = Instant::now();
    Ok(Plugin {
        driver: info.name.clone(),
        socket: socket.into(),
        endpoint,
        supported_versions: info.supported_versions.clone(),
        client,
        found,
        notified: now,
        registered: now,
        registered_at: SystemTime::now(),
    })
}
