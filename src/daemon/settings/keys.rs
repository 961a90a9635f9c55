//! The one table of settings: flags, environment variables, file keys, defaults, help and manual all come from it.
//!
//! A key such as `device.wait` is the flag `--device-wait`, the variable `DEVICE_WAIT`, and in a file `device.wait`,
//! `wait` in a table `[device]`, or `device-wait`: they are one name.

use std::{fmt, time::Duration};

use jiff::SignedDuration;

/// What a value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A path; a relative one is taken from the working directory.
    Path,
    /// `true` or `false`.
    Switch,
    /// A whole number between two bounds, both allowed.
    Number(i64, i64),
    /// A span of time between two bounds, both allowed.
    Span(Duration, Duration),
    /// One of a few words.
    Choice(&'static [&'static str]),
}

/// A value of the right kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Text, path or choice; empty means "not set".
    Text(String),
    /// Switch.
    Switch(bool),
    /// Number.
    Number(i64),
    /// Span of time.
    Span(Duration),
}

impl fmt::Display for Value {
    /// As it stands in a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "{}", toml::Value::String(text.clone())),
            Self::Switch(on) => write!(f, "{on}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Span(span) => write!(f, "\"{}\"", span_text(*span)),
        }
    }
}

/// A span as it stands in a file: whole seconds, or milliseconds.
fn span_text(span: Duration) -> String {
    if span.subsec_nanos() == 0 { format!("{}s", span.as_secs()) } else { format!("{}ms", span.as_millis()) }
}

impl Kind {
    /// Reads a value from a flag, a variable, or a string in a file; an error says what is allowed.
    pub fn parse(self, text: &str) -> Result<Value, String> {
        match self {
            Self::Text => Ok(Value::Text(text.to_owned())),
            Self::Path if text.is_empty() => Ok(Value::Text(String::new())),
            Self::Path => match std::path::absolute(text) {
                Ok(path) => Ok(Value::Text(path.to_string_lossy().into_owned())),
                Err(error) => Err(format!("{}: {error}", self.allowed())),
            },
            Self::Switch => match text.to_ascii_lowercase().as_str() {
                "true" | "1" => Ok(Value::Switch(true)),
                "false" | "0" => Ok(Value::Switch(false)),
                _ => Err(self.allowed()),
            },
            Self::Number(low, high) => {
                let number = text.parse().ok().filter(|number| (low..=high).contains(number));
                number.map(Value::Number).ok_or_else(|| self.allowed())
            }
            Self::Span(low, high) => {
                let span = text.parse::<SignedDuration>().ok().and_then(|span| Duration::try_from(span).ok());
                span.filter(|span| (low..=high).contains(span)).map(Value::Span).ok_or_else(|| self.allowed())
            }
            Self::Choice(words) => {
                let word = words.iter().find(|word| **word == text);
                word.map(|word| Value::Text((*word).to_owned())).ok_or_else(|| self.allowed())
            }
        }
    }

    /// What is allowed, for error messages and the manual.
    #[must_use]
    pub fn allowed(self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Path => "a path".to_owned(),
            Self::Switch => "true or false".to_owned(),
            Self::Number(low, high) => format!("a whole number from {low} to {high}"),
            Self::Span(low, high) => {
                format!("a span of time such as \"5s\" or \"2m\", from {} to {}", span_text(low), span_text(high))
            }
            Self::Choice(words) => words.join(", "),
        }
    }

    /// Name of a value in help texts.
    #[must_use]
    pub fn placeholder(self) -> &'static str {
        match self {
            Self::Text => "NAME",
            Self::Path => "PATH",
            Self::Switch => "BOOL",
            Self::Number(..) => "N",
            Self::Span(..) => "TIME",
            Self::Choice(_) => "WORD",
        }
    }
}

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name in a file.
    pub name: &'static str,
    /// Name of the flag, without dashes in front: the name with dashes for dots.
    pub flag: &'static str,
    /// What its value may be.
    pub kind: Kind,
    /// Default, as text; empty means "not set".
    pub default: &'static str,
    /// Where the value comes from if it is not set; empty if nothing stands in.
    pub derived: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// What else is to know; empty if nothing.
    pub more: &'static str,
}

impl Key {
    /// Name of the environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        self.flag.replace('-', "_").to_ascii_uppercase()
    }
}

/// Keeps the table's entries short: name, kind, default, help, then what is needed only now and then.
const fn key(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Key {
    Key { name, flag: name, kind, default, derived: "", help, more: "" }
}

impl Key {
    const fn derived(mut self, derived: &'static str) -> Self {
        self.derived = derived;
        self
    }

    const fn flag(mut self, flag: &'static str) -> Self {
        self.flag = flag;
        self
    }

    const fn more(mut self, more: &'static str) -> Self {
        self.more = more;
        self
    }
}

/// Seconds, for bounds.
const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

pub(super) const NODE_NAME: Key = key("node-name", Kind::Text, "", "Name of this node in the cluster")
    .derived("the host name in lower case, as kubelet does");
pub(super) const DRIVER_NAME: Key = key("driver-name", Kind::Text, "npu.huawei.com", "Name of the DRA driver").more(
    "DeviceClasses select by it, and claims that are prepared name it: changing it on a node with prepared claims \
         leaves them behind.",
);
pub(super) const DEVICE_PROFILE: Key =
    key("device-profile", Kind::Choice(&["npu", "gpu"]), "npu", "What to offer: the node's NPUs, or example GPUs")
        .more("Example GPUs have no hardware behind them; they are for clusters that only try DRA out.");
pub(super) const CDI_ROOT: Key =
    key("cdi-root", Kind::Path, "/etc/cdi", "Directory of CDI files, one that the container runtime reads");
pub(super) const REGISTRAR_DIR: Key = key(
    "kubelet-registrar-directory-path",
    Kind::Path,
    "/var/lib/kubelet/plugins_registry",
    "Directory that kubelet watches for registration sockets",
);
pub(super) const PLUGINS_DIR: Key = key(
    "kubelet-plugins-directory-path",
    Kind::Path,
    "/var/lib/kubelet/plugins",
    "Directory of kubelet's plugins; the DRA socket goes into one of the driver's name below it",
);
pub(super) const KUBECONFIG: Key = key("kubeconfig", Kind::Path, "", "Kubeconfig file for the API server")
    .derived("the pod's service account, else /etc/kubernetes/kubelet.conf");
pub(super) const ENABLE_HARD_VNPU: Key = key(
    "enable-hard-vnpu",
    Kind::Switch,
    "false",
    "Cut 910B cards into vNPUs by fixed template",
)
.more(
    "A claim then asks for memory, and gets the smallest template that holds it. Slicing needs a host process, so in \
         a container the switch is an error.",
);
pub(super) const SLICING_MODEL: Key = key(
    "slicing.model",
    Kind::Choice(&["auto", "consumable", "partitionable", "static", "off"]),
    "auto",
    "How cards that can be cut are offered to the scheduler",
)
.more(
    "auto takes the first of consumable, partitionable, static (if a layout is given) and off that the API server \
     keeps. It changes only while no claim holds a part of a card. Read again at SIGHUP.",
)
.flag("slicing-model");
pub(super) const SLICING_LAYOUT: Key =
    key("slicing.layout", Kind::Text, "", "For the static model: what each card is cut into")
        .more(
            "For example \"npu-0=vir10_3c_16g+vir05_1c_8g; npu-1=vir10_3c_16g\". Cards that are not named \
             are offered whole; one that cannot be cut as named takes no new claims, and npuctl status says why. Read \
             again at SIGHUP; a card is laid out anew once no claim holds any of it.",
        )
        .flag("slicing-layout");
pub(super) const SLICING_REPLAY_WAIT: Key = key(
    "slicing.replay-wait",
    Kind::Span(Duration::ZERO, seconds(3600)),
    "120s",
    "How long after boot the vendor's own replay of vNPUs may still be going on",
)
.more("Nothing is cut before that, unless the replay is off or has visibly ended.")
.flag("slicing-replay-wait");
pub(super) const HEALTHCHECK_PORT: Key = key(
    "healthcheck-port",
    Kind::Number(-1, 65535),
    "-1",
    "TCP port of health checks and metrics; -1 means none",
)
.more("It serves gRPC health checks, /healthz, /readyz and /metrics. Port 0 is no port to listen on and is refused.");
pub(super) const HEALTHCHECK_ADDRESS: Key =
    key("healthcheck-address", Kind::Text, "", "Address that health checks and metrics are served on")
        .derived("all addresses: kubelet's probes come from the node's own address");
pub(super) const INSTANCE_ID: Key =
    key("instance-id", Kind::Text, "", "Tells two instances apart that overlap in a rolling update").more(
        "Give the pod's UID in a DaemonSet with maxSurge. The new instance waits up to 25 seconds for the old one to \
         let go of the state directory.",
    );
pub(super) const STATE_DIR: Key =
    key("state-dir", Kind::Path, "/var/lib/npu-dra", "Directory of claim records; must survive a reboot")
        .derived("$STATE_DIRECTORY, where systemd sets it");
pub(super) const RUNTIME_DIR: Key = key("runtime-dir", Kind::Path, "/run/npu-dra", "Directory of the admin socket")
    .derived("$RUNTIME_DIRECTORY, where systemd sets it");
pub(super) const ADMIN_SOCKET: Key = key("admin.socket", Kind::Path, "", "Socket that npuctl talks to")
    .derived("admin.sock in the runtime directory")
    .flag("admin-socket");
pub(super) const HOST_ROOT: Key = key("host-root", Kind::Path, "/", "Where the host's file system is seen").more(
    "In a DaemonSet, the place where the host's root is mounted. /dev, /sys, /proc/sys and /etc/ascend_install.info \
         are read below it; paths in CDI files are the host's own.",
);
pub(super) const BACKEND: Key = key(
    "backend",
    Kind::Choice(&["auto", "dcmi", "sysfs", "example"]),
    "auto",
    "How to find the cards: the vendor library, sysfs, or made-up ones",
)
.more("auto takes sysfs only where no library file exists, and example for the profile gpu.");
pub(super) const DCMI_LIBRARY: Key = key("dcmi.library", Kind::Path, "", "The vendor library, libdcmi.so")
    .derived("the places where the vendor installs it")
    .flag("dcmi-library");
pub(super) const TRUST_LIBRARY: Key =
    key("trust-library", Kind::Switch, "false", "Load the vendor library even if others than root could change it")
        .more("For tests. The library runs as root.");
pub(super) const DEVICE_WAIT: Key = key(
    "device.wait",
    Kind::Span(Duration::ZERO, seconds(3600)),
    "150s",
    "How long cards may take to come up after boot before their absence is an error",
)
.derived("360s on a node with 910C")
.more("Published slices are kept meanwhile, and cards that come later are still taken.")
.flag("device-wait");
pub(super) const RELEASE_WAIT: Key = key(
    "claims.release-wait",
    Kind::Span(Duration::ZERO, seconds(30)),
    "5s",
    "How long a claim waits for another that still holds what it was given",
)
.more(
    "A pod that is deleted without a grace period gives its devices away before kubelet has released them. A claim that \
     is refused is tried again by kubelet only after a minute or more.",
)
.flag("claims-release-wait");
pub(super) const HEALTH_INTERVAL: Key = key(
    "health.interval",
    Kind::Span(Duration::from_millis(50), seconds(600)),
    "5s",
    "Time between two looks at the health of all cards",
)
.flag("health-interval");
pub(super) const HEALTH_QUIET: Key = key(
    "health.quiet",
    Kind::Span(seconds(1), seconds(86400)),
    "60s",
    "How long a card must be quiet before a fault of it is over",
)
.more(
    "A card that flaps stays tainted until it has been quiet for so long, also over restarts. Read again at SIGHUP \
     (systemctl reload npu-dra).",
)
.flag("health-quiet");
pub(super) const HEALTH_LINK: Key = key(
    "health.link",
    Kind::Choice(&["ignore", "taint"]),
    "ignore",
    "What a network link that is down does to its card",
)
.more(
    "ignore shows it only: hosts without cables are down for ever. The code 81078603 is judged alike. Read again at \
     SIGHUP (systemctl reload npu-dra).",
)
.flag("health-link");
pub(super) const HEALTH_FAULTS: Key = key(
    "health.faults",
    Kind::Path,
    "",
    "File that says what is done about which fault, above the built-in table",
)
.derived("/etc/npu-dra/faults.toml, where it exists")
.more(
    "Lines such as 80E01801 = \"evict\": a code of eight hex digits, and ignore, warn, taint (no new claims) or evict \
     (NoExecute: pods that do not tolerate it are evicted). Nothing is evicted for unless a line says so. Read again \
     at SIGHUP (systemctl reload npu-dra); a file with a mistake changes nothing then.",
)
.flag("health-faults");
pub(super) const EXAMPLE_COUNT: Key =
    key("example.count", Kind::Number(0, 1024), "8", "How many devices the backend example offers")
        .flag("example-count");
pub(super) const VISIBLE_DEVICES_VOID: Key = key(
    "cdi.visible-devices-void",
    Kind::Switch,
    "true",
    "Set ASCEND_VISIBLE_DEVICES=void in containers that get a card",
)
.more(
    "Images carry values such as 0 or all; on a node whose default runtime is ascend those would add cards that the \
     claim did not get.",
)
.flag("cdi-visible-devices-void");
pub(super) const HCCL_ROOTINFO: Key = key(
    "cdi.hccl-rootinfo",
    Kind::Switch,
    "false",
    "Mount the host's /etc/hccl_rootinfo.json into containers that get a card, where it exists",
)
.flag("cdi-hccl-rootinfo");
pub(super) const TOPO: Key = key(
    "cdi.topo",
    Kind::Switch,
    "false",
    "Mount the driver's topo directory into containers that get a card, where it exists",
)
.flag("cdi-topo");
pub(super) const ADMIN_GROUP: Key = key(
    "admin.group",
    Kind::Text,
    "npu-dra",
    "Group whose members may look with npuctl; only root may change anything",
)
.flag("admin-group")
.more("Without such a group on the node only root may look.");
pub(super) const LOG_LEVEL: Key = key(
    "log.level",
    Kind::Text,
    "info",
    "What to log: error, warn, info, debug, trace, off, or a filter by module",
)
.more("A filter is a list such as \"info,npu_dra::device=debug\". Read again at SIGHUP (systemctl reload npu-dra).")
.flag("log-level");
pub(super) const LOG_FORMAT: Key =
    key("log.format", Kind::Choice(&["text", "json"]), "text", "How to log where the journal is not there")
        .flag("log-format");

/// All settings, in the order of help and manual.
pub const KEYS: &[Key] = &[
    NODE_NAME,
    DRIVER_NAME,
    DEVICE_PROFILE,
    CDI_ROOT,
    REGISTRAR_DIR,
    PLUGINS_DIR,
    KUBECONFIG,
    ENABLE_HARD_VNPU,
    SLICING_MODEL,
    SLICING_LAYOUT,
    SLICING_REPLAY_WAIT,
    HEALTHCHECK_PORT,
    HEALTHCHECK_ADDRESS,
    INSTANCE_ID,
    STATE_DIR,
    RUNTIME_DIR,
    ADMIN_SOCKET,
    ADMIN_GROUP,
    HOST_ROOT,
    BACKEND,
    DCMI_LIBRARY,
    TRUST_LIBRARY,
    DEVICE_WAIT,
    RELEASE_WAIT,
    HEALTH_INTERVAL,
    HEALTH_QUIET,
    HEALTH_LINK,
    HEALTH_FAULTS,
    EXAMPLE_COUNT,
    VISIBLE_DEVICES_VOID,
    HCCL_ROOTINFO,
    TOPO,
    LOG_LEVEL,
    LOG_FORMAT,
];

/// The setting of a flag's name.
pub(super) fn by_flag(flag: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.flag == flag)
}
