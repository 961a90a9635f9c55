//! A simulated node: the host's files, the world of its NPUs, kubelet's directories, and the daemon's command line.
//!
//! ```text
//! <dir>/host/      dev, sys, proc, etc, usr/local: what `--host-root` names
//! <dir>/world/     the NPUs, read by the fake libdcmi.so
//! <dir>/state/     claim records          <dir>/cdi/      CDI files
//! <dir>/kubelet/   plugins, plugins_registry
//! <dir>/run/       the admin socket       <dir>/logs/     one file a daemon
//! ```

use std::{
    fs::{self, File},
    os::unix::{fs::symlink, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use dcmi::world::{ChipState, Family, Profile, VARIABLE, World};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::{
    api::{ApiServer, DeviceResult, How, Release, Who},
    kubelet::{Kubelet, What, client},
};

/// The driver's name on a simulated node.
pub const DRIVER: &str = "npu.huawei.com";
/// The node's name.
pub const NODE: &str = "node1";
/// The node's pool.
pub const POOL: &str = "node1/npu";
/// Long enough for anything that is to happen; reached only by a failure.
pub const SOON: Duration = Duration::from_secs(20);

/// A simulated node. Its directory is removed with it, unless it was named.
#[derive(Debug)]
pub struct Node {
    dir: PathBuf,
    /// Removes the directory at the end, if nobody named it.
    temporary: Option<TempDir>,
    world: World,
    kubeconfig: Option<PathBuf>,
    daemons: AtomicU32,
}

impl Node {
    /// A node in a temporary directory.
    ///
    /// # Errors
    /// A file cannot be made.
    pub fn new(profile: Profile) -> anyhow::Result<Self> {
        let temporary = tempfile::Builder::new().prefix("npu-").tempdir().context("cannot make a directory")?;
        let mut node = Self::in_dir(temporary.path(), profile)?;
        node.temporary = Some(temporary);
        Ok(node)
    }

    /// A node in a directory of its own that stays. A second time in one directory the world, the state and everything
    /// else are as they were left.
    ///
    /// # Errors
    /// A file cannot be made.
    pub fn in_dir(dir: &Path, profile: Profile) -> anyhow::Result<Self> {
        for name in ["host/dev", "state", "cdi", "kubelet/plugins", "kubelet/plugins_registry", "run", "logs"] {
            make_dir(&dir.join(name))?;
        }
        let world = match World::open(dir.join("world")) {
            Ok(world) => world,
            Err(_) => World::create(dir.join("world"), profile).context("cannot make the world of NPUs")?,
        };
        let (dev, list) = (dir.join("host/dev"), dir.join("host/etc/vnpu.cfg"));
        world
            .edit(|data| (data.dev_dir, data.vnpu_cfg) = (dev, list))
            .context("cannot tell the world where the host's files are")?;
        let node = Self { dir: dir.to_owned(), temporary: None, world, kubeconfig: None, daemons: AtomicU32::new(0) };
        node.install()?;
        node.sync_host()?;
        if !node.host().join(BOOT_ID).exists() {
            node.set_boot_id("3f1c8a52-0000-4000-8000-000000000001")?;
        }
        Ok(node)
    }

    fn install(&self) -> anyhow::Result<()> {
        install_vendor(&self.host(), &self.world.data().context("cannot read the world")?.driver_version)?;
        write(&self.host().join("proc/uptime"), "86400.00 172800.00\n")
    }

    /// Makes device nodes and the PCI tree agree with the world: to be called after chips were dropped, moved or
    /// returned, as the kernel would do.
    ///
    /// # Errors
    /// A file cannot be made or removed.
    pub fn sync_host(&self) -> anyhow::Result<()> {
        let data = self.world.data().context("cannot read the world")?;
        let present: Vec<_> = data.chips().filter(|chip| chip.state != ChipState::Dropped).collect();
        // What stays is not touched: a daemon that looks meanwhile must not miss it.
        let dev = self.host().join("dev");
        for name in names(&dev)? {
            let number = name.strip_prefix("davinci").and_then(|number| number.parse().ok());
            if number.is_some_and(|number: u32| present.iter().all(|chip| chip.phy != number)) {
                fs::remove_file(dev.join(name))?;
            }
        }
        self.world.make_nodes().context("cannot make the device nodes")?;
        if data.cards.iter().any(|card| card.family == Family::Ascend310P) {
            let _ = symlink("/dev/null", dev.join("dvpp_cmdlist"));
        }
        let sys = self.host().join("sys");
        let bus = sys.join("bus/pci/devices");
        make_dir(&bus)?;
        for address in names(&bus)? {
            if present.iter().all(|chip| chip.bus != address) {
                let function = fs::canonicalize(bus.join(&address))?;
                fs::remove_file(bus.join(address))?;
                fs::remove_dir_all(function)?;
            }
        }
        for chip in present {
            let root = format!("pci{}", chip.bus.get(..6).unwrap_or("0000:0")).to_lowercase() + "0";
            let function = sys.join("devices").join(root).join(&chip.bus);
            let behind = data.chips().filter(|other| other.bus == chip.bus).count();
            let first = data.chips().filter(|other| other.bus == chip.bus).map(|other| other.phy).min();
            for (name, text) in [
                ("vendor", "0x19e5".to_owned()),
                ("device", format!("{:#06x}", chip.pci_device)),
                ("class", "0x120000".to_owned()),
                ("numa_node", chip.numa.to_string()),
                ("dev_id", first.unwrap_or(chip.phy).to_string()),
                ("davinci_dev_num", behind.to_string()),
            ] {
                let (file, text) = (function.join(name), format!("{text}\n"));
                if fs::read_to_string(&file).ok().as_ref() != Some(&text) {
                    write(&file, &text)?;
                }
            }
            let link = bus.join(&chip.bus);
            if link.symlink_metadata().is_err() {
                symlink(&function, &link).with_context(|| format!("cannot link {}", link.display()))?;
            }
        }
        Ok(())
    }

    /// Gives the host another boot id.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_boot_id(&self, id: &str) -> anyhow::Result<()> {
        write(&self.host().join(BOOT_ID), &format!("{id}\n"))
    }

    /// The machine restarts under another boot id; what is on disk stays. Stop the daemon before.
    ///
    /// # Errors
    /// The world or a file cannot be changed.
    pub fn reboot(&self, boot_id: &str) -> anyhow::Result<()> {
        self.world.reboot().context("cannot restart the world")?;
        self.sync_host()?;
        self.set_boot_id(boot_id)
    }

    /// The directory of the whole node.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The NPUs.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The host's root.
    #[must_use]
    pub fn host(&self) -> PathBuf {
        self.dir.join("host")
    }

    /// The state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// The directory of CDI files.
    #[must_use]
    pub fn cdi(&self) -> PathBuf {
        self.dir.join("cdi")
    }

    /// Kubelet's directory of registration sockets.
    #[must_use]
    pub fn registrar(&self) -> PathBuf {
        self.dir.join("kubelet/plugins_registry")
    }

    /// Kubelet's directory of plugins.
    #[must_use]
    pub fn plugins(&self) -> PathBuf {
        self.dir.join("kubelet/plugins")
    }

    /// The socket that npuctl talks to.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.dir.join("run/admin.sock")
    }

    /// Names of the files in the CDI directory, in order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn cdi_files(&self) -> anyhow::Result<Vec<String>> {
        names(&self.cdi())
    }

    /// Names of the records in the state directory, in order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn records(&self) -> anyhow::Result<Vec<String>> {
        let claims = self.state().join("claims");
        if claims.exists() { names(&claims) } else { Ok(Vec::new()) }
    }

    /// Lets daemons that are started from now on use this kubeconfig.
    pub fn use_kubeconfig(&mut self, path: impl Into<PathBuf>) {
        self.kubeconfig = Some(path.into());
    }

    /// Starts an API server that knows this node, and lets daemons use it with the node's own certificate.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn start_api(&mut self, release: Release) -> anyhow::Result<ApiServer> {
        let server = ApiServer::start(release).await?;
        server.add_node(NODE);
        let kubeconfig =
            server.kubeconfig(&self.dir.join("kubeconfig"), &Who::Node(NODE.to_owned()), How::Certificate)?;
        self.use_kubeconfig(kubeconfig.path);
        Ok(server)
    }

    /// Starts a kubelet that watches this node's directory.
    ///
    /// # Errors
    /// The directory cannot be watched.
    pub fn start_kubelet(&self) -> anyhow::Result<Kubelet> {
        Kubelet::start(&self.registrar())
    }

    /// The daemon's command line, with every setting that keeps it inside of this node. More flags can be added: a
    /// later one does not beat an earlier one, so settings that vary are left to [`Node::daemon_with`].
    #[must_use]
    pub fn daemon(&self, binary: impl AsRef<Path>) -> Command {
        self.daemon_with(binary, &[])
    }

    /// The same with some flags replaced or added (`--flag=value`; `--flag` alone takes one away).
    #[must_use]
    pub fn daemon_with(&self, binary: impl AsRef<Path>, changes: &[&str]) -> Command {
        let kubeconfig = self.kubeconfig.clone().unwrap_or_else(|| self.dir.join("no.kubeconfig"));
        // Nothing of the machine that runs this is read, whatever it has in /etc/npu-dra.
        let config = self.dir.join("npu-dra.toml");
        if !config.exists() {
            // A failure shows as the daemon's own error.
            let _ = fs::write(&config, "");
        }
        let path = |path: PathBuf| path.display().to_string();
        let flags = [
            ("--config", path(config)),
            ("--node-name", NODE.to_owned()),
            ("--driver-name", DRIVER.to_owned()),
            ("--cdi-root", path(self.cdi())),
            ("--kubelet-registrar-directory-path", path(self.registrar())),
            ("--kubelet-plugins-directory-path", path(self.plugins())),
            ("--kubeconfig", path(kubeconfig)),
            ("--state-dir", path(self.state())),
            ("--runtime-dir", path(self.dir.join("run"))),
            ("--host-root", path(self.host())),
            ("--backend", "dcmi".to_owned()),
            ("--dcmi-library", path(dcmi::library_path())),
            ("--trust-library", "true".to_owned()),
            ("--health-interval", "200ms".to_owned()),
            ("--log-level", "debug,h2=info,hyper=info,hyper_util=info,rustls=info,tower=info".to_owned()),
        ];
        let replaced: Vec<_> = changes.iter().map(|change| change.split('=').next().unwrap_or(change)).collect();
        let mut command = Command::new(binary.as_ref());
        command.env_clear().stdin(Stdio::null());
        for variable in ["PATH", "TMPDIR", "LD_LIBRARY_PATH"] {
            if let Some(value) = std::env::var_os(variable) {
                command.env(variable, value);
            }
        }
        command.env(VARIABLE, self.world.dir()).env("RUST_BACKTRACE", "1");
        command.args(flags.iter().filter(|(flag, _)| !replaced.contains(flag)).map(|(f, v)| format!("{f}={v}")));
        command.args(changes.iter().filter(|change| change.contains('=')));
        command
    }

    /// Starts a daemon; its output goes into a file of its own.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(&self, mut command: Command) -> anyhow::Result<Daemon> {
        let number = self.daemons.fetch_add(1, Ordering::Relaxed) + 1;
        let log = self.dir.join(format!("logs/daemon-{number}.log"));
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Daemon { child, log, ended: None })
    }

    /// Starts a daemon, and waits until this kubelet has taken it in (not an earlier one whose socket was left).
    ///
    /// # Errors
    /// It ended or did not register; the message holds its log.
    pub async fn start_registered(&self, command: Command, kubelet: &Kubelet) -> anyhow::Result<Daemon> {
        let times = || {
            let log = kubelet.log();
            log.iter().filter(|entry| matches!(&entry.what, What::Registered(driver) if driver == DRIVER)).count()
        };
        let before = times();
        let mut daemon = self.start(command)?;
        let mut ended = None;
        until(SOON, || {
            ended = daemon.exit_status().ok().flatten();
            ended.is_some() || times() > before
        })
        .await;
        if ended.is_none() && times() > before {
            return Ok(daemon);
        }
        let state = ended.map_or_else(|| "still runs".to_owned(), |status| status.to_string());
        bail!("the daemon did not register ({state})\n{}", daemon.log());
    }
}

/// Puts the vendor's software below a host's root, as far as a container gets it.
///
/// # Errors
/// A file cannot be written.
pub fn install_vendor(host: &Path, driver_version: &str) -> anyhow::Result<()> {
    let files = [
        ("etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/usr/local/Ascend\n".to_owned()),
        ("etc/hccn.conf", "address_0=192.168.100.101\nnetmask_0=255.255.255.0\n".to_owned()),
        ("usr/local/Ascend/driver/version.info", format!("Version={driver_version}\n")),
        ("usr/local/Ascend/driver/tools/hccn_tool", String::new()),
        ("usr/local/Ascend/driver/lib64/common/libc_sec.so", String::new()),
        ("usr/local/Ascend/driver/include/dsmi_common_interface.h", String::new()),
        ("usr/local/dcmi/dcmi_interface_api.h", String::new()),
        ("usr/local/bin/npu-smi", String::new()),
    ];
    files.iter().try_for_each(|(name, text)| write(&host.join(name), text))
}

/// Stores a claim that the scheduler gave these devices of ours, for a pod on this node; returns it as kubelet names it.
///
/// # Errors
/// The stored claim has no UID.
pub fn allocated_claim(server: &ApiServer, name: &str, devices: &[&str]) -> anyhow::Result<client::Claim> {
    let mut builder = server.claim_builder("default", name).request("npu", DRIVER, u32::try_from(devices.len())?);
    for device in devices {
        builder = builder.result(DeviceResult::new("npu", DRIVER, POOL, device));
    }
    let stored = builder.node(NODE).store();
    let uid = stored["metadata"]["uid"].as_str().context("the claim has no uid")?;
    Ok(client::claim("default", name, uid))
}

const BOOT_ID: &str = "proc/sys/kernel/random/boot_id";

/// A running daemon; killed when this is dropped. If the test is failing, its log is shown then.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Daemon {
    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// There is no such process any more.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid())?);
        signal::kill(pid, signal).with_context(|| format!("cannot send {signal} to the daemon"))
    }

    /// How it ended, if it did.
    ///
    /// # Errors
    /// The system does not say.
    pub fn exit_status(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// It did not in time; the message holds its log.
    pub async fn wait_end(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        let end = Instant::now() + deadline;
        loop {
            if let Some(status) = self.exit_status()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!("the daemon still runs after {deadline:?}\n{}", self.log());
            }
            tokio::time::sleep(STEP).await; // waits: for the process to end
        }
    }

    /// Asks it to end, and waits; gives its exit code and how long it took.
    ///
    /// # Errors
    /// It did not end in time, or by a signal.
    pub async fn stop(&mut self) -> anyhow::Result<(i32, Duration)> {
        let start = Instant::now();
        self.signal(Signal::SIGTERM)?;
        let status = self.wait_end(SOON).await?;
        let code = status.code().with_context(|| format!("ended by signal {:?}", status.signal()))?;
        Ok((code, start.elapsed()))
    }

    /// Kills it as a crash would.
    ///
    /// # Errors
    /// The system does not let us.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.ended = Some(self.child.wait()?);
        Ok(())
    }

    /// Waits until its log has this text.
    ///
    /// # Errors
    /// It did not come in time; the message holds the log.
    pub async fn wait_log(&self, text: &str, deadline: Duration) -> anyhow::Result<()> {
        let found = until(deadline, || self.log().contains(text)).await;
        if found { Ok(()) } else { bail!("the log has no {text:?} after {deadline:?}\n{}", self.log()) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // It may have ended by itself meanwhile.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
        }
    }
}

const STEP: Duration = Duration::from_millis(5);

/// Waits until a condition holds; false if it did not in time.
pub async fn until(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(STEP).await; // waits: for the caller's condition
    }
}

fn names(dir: &Path) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn make_dir(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        make_dir(dir)?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
