//! A node with its control plane: etcd, containerd, the API server, scheduler, controller-manager and kubelet, as units
//! of one machine.

use std::{
    fmt::Write as _,
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use lab::{Machine, Options, Root, cases::caught};
use nix::sched::{CloneFlags, setns, unshare};
use serde_json::{Value, json};
use testkit::pki::{Authority, Pair, Valid, signing_key};

use crate::{
    api::{self, Api},
    driver, image,
    programs::{Module, Own},
    setting::{Kubernetes, Setting},
};

/// The node's name, also its host name.
pub(crate) const NODE: &str = "node1";
/// Long enough for anything that is to happen; reached only by a failure.
pub(crate) const SOON: Duration = Duration::from_mins(1);

/// Debian's packages in the node beside those that every machine has.
const PACKAGES: [&str; 8] = [
    "busybox-static",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "etcd-server",
    "iptables",
    "kmod",
    "runc",
];

/// Where the cluster's own files lie in the node.
const DIR: &str = "/var/lib/cluster";
/// Kubernetes' four programs, in the order in which they start.
const UNITS: [&str; 4] = ["kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet"];

/// Where the simulated vendor library keeps its world, in the node.
pub(crate) const WORLD: &str = "/var/lib/npus";
/// What the node shows as `/sys/bus/pci`.
pub(crate) const PCI: &str = "/var/lib/npus-pci";
/// What the node shows as its boot id.
pub(crate) const BOOT_ID: &str = "/var/lib/npus-boot-id";

/// What must be built and made before a node can boot.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    tar: PathBuf,
    images: PathBuf,
    own: Own,
    modules: Vec<(&'static str, PathBuf)>,
}

impl Parts {
    /// Makes what the cache lacks, for one setting.
    pub(crate) fn ready(setting: &Setting, own: &Own) -> anyhow::Result<Self> {
        let tar = Root::debian("trixie", &PACKAGES).ready()?;
        let wanted = [Some(setting.kubernetes.module), setting.next.map(|next| next.module), setting.containerd];
        let ready = |module: Module| anyhow::Ok((module.name, module.ready()?));
        let modules = wanted.into_iter().flatten().map(ready).collect::<anyhow::Result<_>>()?;
        Ok(Self { images: image::ready(&tar)?, tar, own: own.clone(), modules })
    }
}

/// A node that is up. Dropped, all of it is gone.
#[derive(Debug)]
pub(crate) struct Plane {
    api: Api,
    machine: Machine,
    kubernetes: Mutex<Kubernetes>,
}

impl Plane {
    /// Boots a node and starts its control plane; returns when the node is ready.
    ///
    /// # Errors
    /// Something does not come up; the text has its log.
    pub(crate) fn up(setting: &Setting, parts: &Parts) -> anyhow::Result<Self> {
        let mut options = Options::new(NODE, &parts.tar);
        for (name, dir) in &parts.modules {
            if name.starts_with("containerd") {
                for program in ["containerd", "containerd-shim-runc-v2", "ctr"] {
                    options.binds.push((dir.join(program), format!("/usr/bin/{program}")));
                }
            } else {
                options.binds.push((dir.clone(), format!("/opt/{name}")));
            }
        }
        // The simulated cards stand on a bus of their own, and the boot id can be changed.
        options.before = format!(
            "mount --bind {PCI} /sys/bus/pci\n\
             cat /proc/sys/kernel/random/boot_id >{BOOT_ID}\n\
             mount --bind {BOOT_ID} /proc/sys/kernel/random/boot_id\n"
        );
        let machine = Machine::boot(&options, |root| {
            prepare(root, setting.containerd.is_some())?;
            write_units(root, &setting.kubernetes)?;
            driver::install_unit(root)?;
            install(&parts.images, &root.join("opt/images.tar"), 0o644)?;
            install(&parts.own.path("npu-dra"), &root.join("usr/sbin/npu-dra"), 0o755)?;
            install(&parts.own.path("npuctl"), &root.join("usr/bin/npuctl"), 0o755)?;
            install(&parts.own.path("testkit"), &root.join("opt/testkit"), 0o755)?;
            install(&parts.own.path("libdcmi.so"), &root.join("usr/local/dcmi/libdcmi.so"), 0o644)
        })?;
        let kubeconfig = serde_json::from_value(api::kubeconfig(&machine.root(), "admin"))?;
        let api = Api::new(machine.leader(), kubeconfig)?;
        let plane = Self { api, machine, kubernetes: Mutex::new(setting.kubernetes) };
        plane.sh("ctr -n k8s.io images import /opt/images.tar & systemctl start kube-apiserver; wait")?;
        plane.start_all()?;
        Ok(plane)
    }

    fn start_all(&self) -> anyhow::Result<()> {
        self.wait_for_server()?;
        self.run(&["systemctl", "start", "kube-scheduler", "kube-controller-manager", "kubelet"])?;
        let ready = |node: &Value| {
            node["status"]["conditions"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
        };
        let outcome = self.machine.wait("the node to be ready, and a service account", SOON, |_| {
            let node = self.api.find(&format!("/api/v1/nodes/{NODE}"))?;
            let account = self.api.find("/api/v1/namespaces/default/serviceaccounts/default")?;
            Ok((node.as_ref().is_some_and(ready) && account.is_some()).then_some(()))
        });
        outcome.map_err(|error| {
            let tails: Vec<_> = UNITS.iter().map(|unit| format!("\n--- {unit}\n{}", self.tail(unit, 12))).collect();
            anyhow!("{error:#}{}", tails.concat())
        })
    }

    /// Waits until the API server says that it is ready.
    pub(crate) fn wait_for_server(&self) -> anyhow::Result<()> {
        self.machine
            .wait("the API server", SOON, |_| {
                let answer = self.api.raw(http::Method::GET, "/readyz", "application/json", Vec::new())?;
                if answer.code == 200 { Ok(Some(())) } else { bail!("{}", answer.body) }
            })
            .map_err(|error| anyhow!("{error:#}\n{}", self.tail("kube-apiserver", 20)))
    }

    /// Stops the control plane and kubelet, and starts those of another release on the same etcd. Pods run on.
    ///
    /// # Errors
    /// The new ones do not come up.
    pub(crate) fn switch(&self, to: &Kubernetes) -> anyhow::Result<()> {
        let stop: Vec<_> = ["systemctl", "stop"].into_iter().chain(UNITS.into_iter().rev()).collect();
        self.run(&stop)?;
        write_units(&self.machine.root(), to)?;
        *self.kubernetes.lock().unwrap_or_else(PoisonError::into_inner) = *to;
        self.sh("systemctl daemon-reload; systemctl start kube-apiserver")?;
        self.start_all()
    }

    /// The release that runs now.
    pub(crate) fn kubernetes(&self) -> Kubernetes {
        *self.kubernetes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The API server, as an administrator.
    pub(crate) fn api(&self) -> &Api {
        &self.api
    }

    /// The machine.
    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Ends this handle but leaves the node up; returns how to enter and how to stop it.
    pub(crate) fn keep(self) -> anyhow::Result<String> {
        let kubernetes = self.kubernetes();
        let mut text = self.machine.keep()?;
        let name = kubernetes.module.name;
        let _ = write!(
            text,
            "\nInside: export KUBECONFIG=/etc/kubernetes/admin.conf PATH=$PATH:/opt/{name}; kubectl get pods -A; npuctl status"
        );
        Ok(text)
    }

    /// Runs a program in the node; its standard output.
    pub(crate) fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        self.machine.run(words)
    }

    /// Runs a script in the node; its standard output.
    pub(crate) fn sh(&self, script: &str) -> anyhow::Result<String> {
        self.machine.sh(script)
    }

    /// `kubectl` as an administrator; its standard output. It costs about 0.1 s: ask [`Plane::api`] where output as
    /// people see it does not matter.
    pub(crate) fn kubectl(&self, words: &[&str]) -> anyhow::Result<String> {
        let program = format!("/opt/{}/kubectl", self.kubernetes().module.name);
        let all: Vec<_> = [program.as_str(), "--kubeconfig=/etc/kubernetes/admin.conf"]
            .into_iter()
            .chain(words.iter().copied())
            .collect();
        self.run(&all)
    }

    /// `kubectl apply` of a manifest's text.
    pub(crate) fn apply(&self, manifest: &str) -> anyhow::Result<String> {
        let path = format!("{DIR}/manifest.yaml");
        fs::write(self.file(&path), manifest)?;
        self.kubectl(&["apply", "-f", &path])
    }

    /// The host's path of a file on the node's disk (not below `/run`, `/tmp`, `/dev`, `/proc`, `/sys`).
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.machine.root().join(path.trim_start_matches('/'))
    }

    /// Calls a function with the node's file system as its own, mounts included.
    ///
    /// # Errors
    /// That of the function.
    pub(crate) fn inside<T: Send>(&self, call: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        let path = format!("/proc/{}/ns/mnt", self.machine.leader());
        let namespace = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        thread::scope(|scope| {
            let thread = scope.spawn(move || {
                // A thread with a file system of its own may enter; it ends with the call.
                unshare(CloneFlags::CLONE_FS).context("cannot have a file system of its own")?;
                setns(&namespace, CloneFlags::CLONE_NEWNS).context("cannot enter the node's file system")?;
                caught(call)
            });
            thread.join().unwrap_or_else(|_| Err(anyhow!("the thread in the node's file system panicked")))
        })
    }

    /// The last lines of a unit's journal.
    pub(crate) fn tail(&self, unit: &str, lines: u32) -> String {
        let words =
            ["journalctl", "--no-pager", "--output=cat", &format!("--lines={lines}"), &format!("--unit={unit}")];
        self.run(&words).unwrap_or_else(|error| format!("{error:#}"))
    }

    /// A unit's journal since a cursor of [`Plane::cursor`].
    pub(crate) fn journal(&self, unit: &str, cursor: &str) -> anyhow::Result<String> {
        self.run(&[
            "journalctl",
            "--no-pager",
            "--output=cat",
            &format!("--unit={unit}"),
            &format!("--after-cursor={cursor}"),
        ])
    }

    /// Where the journal ends now.
    pub(crate) fn cursor(&self) -> anyhow::Result<String> {
        let text = self.run(&["journalctl", "--no-pager", "--lines=0", "--show-cursor"])?;
        let cursor = text.lines().find_map(|line| line.strip_prefix("-- cursor: "));
        cursor.map(str::to_owned).context("journalctl names no cursor")
    }

    /// How often a unit was started, and whether it runs: `NRestarts` and `ActiveState` would not tell of `systemctl
    /// restart`, so its first process is asked for.
    pub(crate) fn main_pid(&self, unit: &str) -> anyhow::Result<u32> {
        let text = self.run(&["systemctl", "show", "--property=MainPID", "--value", unit])?;
        text.trim().parse().with_context(|| format!("{unit} has no main process: {text:?}"))
    }

    /// A node object without a kubelet, for what only the scheduler does. Pods that are to go there must tolerate
    /// `node.kubernetes.io/not-ready`.
    pub(crate) fn add_node(&self, name: &str) -> anyhow::Result<()> {
        self.api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))?;
        let room = json!({"cpu": "64", "memory": "64Gi", "pods": "100"});
        self.api.merge(
            &format!("/api/v1/nodes/{name}/status"),
            &json!({"status": {"capacity": room, "allocatable": room}}),
        )?;
        Ok(())
    }
}

fn install(from: &Path, to: &Path, mode: u32) -> anyhow::Result<()> {
    write(to, b"")?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
}

/// Writes a file and makes its directory.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// The files of a node that are the same in every release.
fn prepare(root: &Path, own_containerd: bool) -> anyhow::Result<()> {
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    for dir in
        [DIR, "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/etc/kubernetes/manifests", "/etc/cdi"]
    {
        fs::create_dir_all(at(dir))?;
    }
    fs::create_dir_all(at(PCI).join("devices"))?;
    write(&at(BOOT_ID), b"")?;

    let authority = Authority::new("kubernetes")?;
    write(&at("/etc/kubernetes/pki/ca.crt"), authority.pem.as_bytes())?;
    let pair = |path: &str, pair: &Pair| {
        write(&at(&format!("/etc/kubernetes/pki/{path}.crt")), pair.cert_pem.as_bytes())?;
        write(&at(&format!("/etc/kubernetes/pki/{path}.key")), pair.key_pem.as_bytes())
    };
    pair(
        "apiserver",
        &authority.server(&["127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc"], Valid::Now)?,
    )?;
    for (user, common, group) in [
        ("admin", "kubernetes-admin", Some("system:masters")),
        ("scheduler", "system:kube-scheduler", None),
        ("controller-manager", "system:kube-controller-manager", None),
    ] {
        pair(user, &authority.client(common, group, Valid::Now)?)?;
        write(
            &at(&format!("/etc/kubernetes/{user}.conf")),
            &serde_json::to_vec_pretty(&api::kubeconfig(Path::new("/"), user))?,
        )?;
    }
    // The node's credentials lie where kubelet keeps them, and the driver finds them there by itself.
    let node = authority.client(&format!("system:node:{NODE}"), Some("system:nodes"), Valid::Now)?;
    write(&at("/var/lib/kubelet/pki/kubelet-client-current.pem"), (node.cert_pem + &node.key_pem).as_bytes())?;
    write(&at("/etc/kubernetes/kubelet.conf"), &serde_json::to_vec_pretty(&api::kubeconfig(Path::new("/"), "node"))?)?;
    let (private, public) = signing_key()?;
    write(&at("/etc/kubernetes/pki/sa.key"), private.as_bytes())?;
    write(&at("/etc/kubernetes/pki/sa.pub"), public.as_bytes())?;

    write(&at("/var/lib/kubelet/config.yaml"), &serde_json::to_vec_pretty(&kubelet_settings())?)?;
    write(&at("/etc/containerd/config.toml"), containerd_settings(own_containerd).as_bytes())?;
    let network = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": false, "ipam": {
        "type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]});
    write(&at("/etc/cni/net.d/10-pods.conflist"), network.to_string().as_bytes())?;
    // Nobody needs this etcd after a power cut.
    write(&at("/etc/default/etcd"), b"ETCD_UNSAFE_NO_FSYNC=true\nETCD_LOG_LEVEL=warn\n")?;
    write(&at("/etc/systemd/journald.conf.d/cluster.conf"), b"[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n")?;
    vendor_files(root)
}

/// The vendor's software, as far as a container gets it.
fn vendor_files(root: &Path) -> anyhow::Result<()> {
    for (path, text) in [
        ("etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/usr/local/Ascend\n"),
        ("etc/hccn.conf", "address_0=192.168.100.101\nnetmask_0=255.255.255.0\n"),
        ("usr/local/Ascend/driver/version.info", "Version=25.2.0\n"),
        ("usr/local/Ascend/driver/tools/hccn_tool", "#!/bin/sh\n"),
        ("usr/local/Ascend/driver/lib64/common/libc_sec.so", ""),
        ("usr/local/Ascend/driver/include/dsmi_common_interface.h", ""),
        ("usr/local/dcmi/dcmi_interface_api.h", ""),
        ("usr/local/bin/npu-smi", "#!/bin/sh\n"),
    ] {
        write(&root.join(path), text.as_bytes())?;
    }
    Ok(())
}

fn kubelet_settings() -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs", "cgroupsPerQOS": false, "enforceNodeAllocatable": [], "failCgroupV1": false,
        "failSwapOn": false, "oomScoreAdj": 0, "makeIPTablesUtilChains": false, "podPidsLimit": -1,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "staticPodPath": "/etc/kubernetes/manifests", "resolvConf": "", "clusterDomain": "cluster.local",
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100, "serializeImagePulls": false,
        // A pod that could not be prepared is tried again after this: now and then kubelet reads a claim before the
        // API server's authorizer has heard that the pod is here.
        "syncFrequency": "5s",
        "logging": {"verbosity": 2},
    })
}

/// What is not containerd's default: our images, Debian's directories, and what such a machine cannot do.
fn containerd_settings(own: bool) -> String {
    let pause = image::PAUSE;
    let cni = "bin_dir = \"/usr/lib/cni\"\nconf_dir = \"/etc/cni/net.d\"";
    if own {
        let plugin = "io.containerd.cri.v1";
        let cni = cni.replace("bin_dir = \"/usr/lib/cni\"", "bin_dirs = [\"/usr/lib/cni\"]");
        format!(
            "version = 3\n[plugins.'{plugin}.images'.pinned_images]\nsandbox = \"{pause}\"\n\
             [plugins.'{plugin}.runtime']\ndisable_apparmor = true\nrestrict_oom_score_adj = true\n\
             [plugins.'{plugin}.runtime'.cni]\n{cni}\n"
        )
    } else {
        let plugin = "io.containerd.grpc.v1.cri";
        format!(
            "version = 2\n[plugins.'{plugin}']\nsandbox_image = \"{pause}\"\ndisable_apparmor = true\n\
             restrict_oom_score_adj = true\nenable_cdi = true\n[plugins.'{plugin}'.cni]\n{cni}\n"
        )
    }
}

/// The units of a release.
fn write_units(root: &Path, kubernetes: &Kubernetes) -> anyhow::Result<()> {
    let gates =
        |more: &str| match [kubernetes.gates, more].iter().filter(|text| !text.is_empty()).copied().collect::<Vec<_>>()
        {
            list if list.is_empty() => Vec::new(),
            list => vec![format!("--feature-gates={}", list.join(","))],
        };
    let pki = |name: &str| format!("/etc/kubernetes/pki/{name}");
    let mut server = gates(kubernetes.server_gates);
    if !kubernetes.serves.is_empty() {
        server.push(format!("--runtime-config={}", kubernetes.serves));
    }
    server.extend([
        "--etcd-servers=http://127.0.0.1:2379".to_owned(),
        "--bind-address=127.0.0.1".to_owned(),
        "--secure-port=6443".to_owned(),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--client-ca-file={}", pki("ca.crt")),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", pki("sa.pub")),
        format!("--service-account-signing-key-file={}", pki("sa.key")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
    ]);
    let mut scheduler = gates("");
    scheduler.extend(
        ["--kubeconfig=/etc/kubernetes/scheduler.conf", "--leader-elect=false", "--bind-address=127.0.0.1"]
            .map(str::to_owned),
    );
    let mut manager = gates("");
    manager.extend([
        "--kubeconfig=/etc/kubernetes/controller-manager.conf".to_owned(),
        "--leader-elect=false".to_owned(),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--service-account-private-key-file={}", pki("sa.key")),
        format!("--root-ca-file={}", pki("ca.crt")),
        "--use-service-account-credentials=true".to_owned(),
    ]);
    let mut kubelet = gates("");
    kubelet.extend(
        ["--config=/var/lib/kubelet/config.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf", "--node-ip=10.99.0.1"]
            .map(str::to_owned),
    );
    for (name, flags) in UNITS.into_iter().zip([server, scheduler, manager, kubelet]) {
        let flags = flags.join(" \\\n  ");
        let text = format!(
            "[Unit]\nDescription={name} {}\n[Service]\nWorkingDirectory={DIR}\nTimeoutStopSec=3\n\
             ExecStart=/opt/{}/{name} \\\n  {flags}\n",
            kubernetes.module.name, kubernetes.module.name
        );
        write(&root.join(format!("etc/systemd/system/{name}.service")), text.as_bytes())?;
    }
    Ok(())
}
