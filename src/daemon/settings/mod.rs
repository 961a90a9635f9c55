//! Settings in three stages: fragments (what each file says), inputs (one value a key, with where it came from),
//! settings (checked, what the program uses).
//!
//! A flag beats an environment variable, which beats a file; a later file beats an earlier one.

mod faults;
mod fragment;
mod inputs;
mod keys;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

pub use self::{
    inputs::{Input, Inputs, Origin},
    keys::{KEYS, Key, Kind, Value},
};
use crate::{
    device::Choice,
    domain::{
        health::{InvalidEntry, Policy, Table},
        model::{Model, Wish},
        names::{DriverName, InstanceId, NodeName, PoolName, SOCKET_PATH_MAX, is_dns_label},
        vnpu,
    },
};

/// Why the settings cannot be used. All are the operator's to mend: a restart does not help.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A file cannot be read.
    #[error("{}: cannot be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file is not TOML.
    #[error("{}:{line}: not valid TOML: {why}", path.display())]
    Syntax {
        /// File.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The parser's words.
        why: String,
    },
    /// A file has a key that is not in the table.
    #[error("{}:{line}: unknown key {key:?}; known keys are {}", path.display(), known_keys())]
    UnknownKey {
        /// File.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The key, with the names of its tables.
        key: String,
    },
    /// A file has one key in two spellings.
    #[error("{}:{line}: the key {key:?} is set twice in this file", path.display())]
    TwiceInFile {
        /// File.
        path: PathBuf,
        /// Line of the second, from 1.
        line: usize,
        /// The key.
        key: &'static str,
    },
    /// A value is not one of those allowed.
    #[error("{from}: {key} = {value} is not valid; allowed is {allowed}")]
    Value {
        /// File and line, variable, flag or default.
        from: String,
        /// The key.
        key: &'static str,
        /// The value as written.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// No node name was given and the host's own cannot stand for it.
    #[error("the host name {host:?} cannot be a node name ({why}); give --node-name")]
    HostName {
        /// The host's name.
        host: String,
        /// The rule that it breaks, or why it is not known.
        why: String,
    },
    /// The path of a socket is longer than the kernel takes.
    #[error(
        "{}: the path of the {what} has {} bytes, {SOCKET_PATH_MAX} are allowed; set {key} to a shorter path",
        path.display(), path.as_os_str().len()
    )]
    SocketPath {
        /// Which socket.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// What to set.
        key: &'static str,
    },
    /// The administrator's table of faults has a mistake.
    #[error("{}:{line}: {why}", path.display())]
    FaultTable {
        /// File.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        why: InvalidEntry,
    },
    /// Slicing was asked for where it cannot be.
    #[error(
        "{from}: enable-hard-vnpu = true is not valid in a container: slicing needs a host process; run npu-dra as a \
         systemd service on this node, or leave the switch out"
    )]
    SlicingInContainer {
        /// Where the switch was set.
        from: String,
    },
}

fn known_keys() -> String {
    KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(", ")
}

/// What was given from outside.
pub struct Given<'a> {
    /// File named by `--config`.
    pub config: Option<&'a Path>,
    /// Value of a key's flag.
    pub flag: &'a dyn Fn(&Key) -> Option<String>,
    /// Value of an environment variable.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// The host's name.
    pub host_name: &'a str,
}

impl std::fmt::Debug for Given<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Given")
            .field("config", &self.config)
            .field("host_name", &self.host_name)
            .finish_non_exhaustive()
    }
}

/// How to write logs where there is no journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// All settings, checked.
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of the operator's, independent of the others")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name of the node.
    pub node: NodeName,
    /// Our pool on it.
    pub pool: PoolName,
    /// Name of the driver.
    pub driver: DriverName,
    /// Instance id in a rolling update.
    pub instance: Option<InstanceId>,
    /// Directory of CDI files.
    pub cdi_root: PathBuf,
    /// Directory of kubelet's registration sockets.
    pub registrar_dir: PathBuf,
    /// Directory of kubelet's plugins.
    pub plugins_dir: PathBuf,
    /// Kubeconfig file.
    pub kubeconfig: Option<PathBuf>,
    /// Whether and how cards are cut.
    pub slicing: Wish,
    /// How long after boot the vendor's replay of vNPUs may still be going on.
    pub replay_wait: Duration,
    /// Where health checks and metrics are served, if at all.
    pub healthcheck: Option<SocketAddr>,
    /// Directory of claim records.
    pub state_dir: PathBuf,
    /// Admin socket.
    pub admin_socket: PathBuf,
    /// Group whose members may look.
    pub admin_group: String,
    /// Where the host's file system is seen.
    pub host_root: PathBuf,
    /// How cards are found.
    pub backend: Choice,
    /// The vendor library; `None` means where the vendor puts it.
    pub dcmi_library: Option<PathBuf>,
    /// True if the vendor library's owner and mode are not looked at.
    pub trust_library: bool,
    /// How long cards may take to come up; `None` leaves it to the kind of card.
    pub device_wait: Option<Duration>,
    /// How long a prepare waits for another claim to release what this one was given.
    pub release_wait: Duration,
    /// Time between two looks at health.
    pub health_interval: Duration,
    /// How health is judged.
    pub health: Policy,
    /// True if containers get `ASCEND_VISIBLE_DEVICES=void`.
    pub visible_devices_void: bool,
    /// True if `hccl_rootinfo.json` is mounted.
    pub hccl_rootinfo: bool,
    /// True if the driver's `topo` is mounted.
    pub topo: bool,
    /// What to log, a filter.
    pub log_level: String,
    /// How to log without a journal.
    pub log_format: LogFormat,
}

/// What is taken over at SIGHUP.
pub const RELOADED: [&Key; 6] = [
    &keys::LOG_LEVEL,
    &keys::HEALTH_QUIET,
    &keys::HEALTH_LINK,
    &keys::HEALTH_FAULTS,
    &keys::SLICING_LAYOUT,
    &keys::SLICING_MODEL,
];

/// The keys whose values differ and are not taken over at SIGHUP.
#[must_use]
pub fn need_restart(running: &Inputs, read: &Inputs) -> Vec<&'static str> {
    let taken = |key: &Key| RELOADED.iter().any(|other| other.name == key.name);
    let differs = |key: &&'static Key| !taken(key) && running.get(key).value != read.get(key).value;
    KEYS.iter().filter(differs).map(|key| key.name).collect()
}

/// Reads and merges everything.
pub fn read(given: &Given<'_>) -> Result<Inputs, SettingsError> {
    Inputs::merge(fragment::read_all(given.config)?, given)
}

impl Settings {
    /// Checks the merged values.
    pub fn from_inputs(inputs: &Inputs, given: &Given<'_>) -> Result<Self, SettingsError> {
        let node = if let Some(name) = inputs.some_text(&keys::NODE_NAME) {
            NodeName::new(name).map_err(|error| inputs.refuse(&keys::NODE_NAME, error.rule))?
        } else {
            let host = given.host_name.trim().to_lowercase();
            NodeName::new(host.clone()).map_err(|error| SettingsError::HostName { host, why: error.rule.to_owned() })?
        };
        let pool = PoolName::of_node(&node)
            .map_err(|_| inputs.refuse(&keys::NODE_NAME, "a name that leaves room for \"/npu\" in 253 bytes"))?;
        let driver = DriverName::new(inputs.text(&keys::DRIVER_NAME))
            .map_err(|error| inputs.refuse(&keys::DRIVER_NAME, error.rule))?;
        let instance = match inputs.some_text(&keys::INSTANCE_ID) {
            Some(id) => Some(InstanceId::new(id).map_err(|error| inputs.refuse(&keys::INSTANCE_ID, error.rule))?),
            None => None,
        };
        let hard_vnpu = inputs.switch(&keys::ENABLE_HARD_VNPU);
        // A pod has the first, most other containers the second.
        let in_container = ["KUBERNETES_SERVICE_HOST", "container"].iter().any(|name| (given.variable)(name).is_some());
        if hard_vnpu && in_container {
            let from = inputs.get(&keys::ENABLE_HARD_VNPU).origin.to_string();
            return Err(SettingsError::SlicingInContainer { from });
        }
        let admin_socket =
            inputs.some_path(&keys::ADMIN_SOCKET).unwrap_or_else(|| inputs.path(&keys::RUNTIME_DIR).join("admin.sock"));
        if admin_socket.as_os_str().len() > SOCKET_PATH_MAX {
            return Err(SettingsError::SocketPath { what: "admin socket", path: admin_socket, key: "admin.socket" });
        }
        Ok(Self {
            node,
            pool,
            driver,
            instance,
            cdi_root: directory(inputs, &keys::CDI_ROOT)?,
            registrar_dir: directory(inputs, &keys::REGISTRAR_DIR)?,
            plugins_dir: directory(inputs, &keys::PLUGINS_DIR)?,
            kubeconfig: inputs.some_path(&keys::KUBECONFIG),
            slicing: Wish { enabled: hard_vnpu, model: model(inputs), layout: layout(inputs)? },
            replay_wait: inputs.span(&keys::SLICING_REPLAY_WAIT),
            healthcheck: healthcheck(inputs)?,
            state_dir: directory(inputs, &keys::STATE_DIR)?,
            admin_socket,
            admin_group: inputs.text(&keys::ADMIN_GROUP),
            host_root: directory(inputs, &keys::HOST_ROOT)?,
            backend: backend(inputs)?,
            dcmi_library: inputs.some_path(&keys::DCMI_LIBRARY),
            trust_library: inputs.switch(&keys::TRUST_LIBRARY),
            device_wait: inputs.is_set(&keys::DEVICE_WAIT).then(|| inputs.span(&keys::DEVICE_WAIT)),
            release_wait: inputs.span(&keys::RELEASE_WAIT),
            health_interval: inputs.span(&keys::HEALTH_INTERVAL),
            health: policy(inputs)?,
            visible_devices_void: inputs.switch(&keys::VISIBLE_DEVICES_VOID),
            hccl_rootinfo: inputs.switch(&keys::HCCL_ROOTINFO),
            topo: inputs.switch(&keys::TOPO),
            log_level: log_level(inputs)?,
            log_format: if inputs.text(&keys::LOG_FORMAT) == "json" { LogFormat::Json } else { LogFormat::Text },
        })
    }
}

/// What to log. The filter's own parser takes any word for a part of the program, and a filter of nothing else logs
/// nothing at all.
fn log_level(inputs: &Inputs) -> Result<String, SettingsError> {
    let text = inputs.text(&keys::LOG_LEVEL);
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok_and(|_| !word.is_empty());
    let is_target = |word: &str| {
        let module = word.split_once('[').map_or(word, |(module, _)| module);
        !word.is_empty() && module.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'))
    };
    let wrong = text.split(',').find(|directive| match directive.rsplit_once('=') {
        Some((target, level)) => !is_target(target) || !is_level(level),
        None => !is_level(directive),
    });
    let allowed = "error, warn, info, debug, trace, off, or a filter such as \"info,npu_dra::device=debug\"";
    match wrong {
        Some(wrong) if wrong != text => {
            let why = format!("{allowed}; {wrong:?} is neither a level nor module=level");
            Err(inputs.refuse(&keys::LOG_LEVEL, why))
        }
        None if EnvFilter::try_new(&text).is_ok() => Ok(text),
        _ => Err(inputs.refuse(&keys::LOG_LEVEL, allowed)),
    }
}

/// The name that the driver has by the settings files of this host and a variable; the usual one where they cannot be
/// read, since the daemon does not start by such files.
pub fn driver_name(variable: &dyn Fn(&str) -> Option<String>) -> String {
    let only_this = |name: &str| variable(name).filter(|_| name == keys::DRIVER_NAME.variable());
    let given = Given { config: None, flag: &|_| None, variable: &only_this, host_name: "" };
    let inputs = read(&given).unwrap_or_default();
    inputs.text(&keys::DRIVER_NAME)
}

/// How health is judged.
fn policy(inputs: &Inputs) -> Result<Policy, SettingsError> {
    let table = Table {
        overrides: faults::read(inputs.some_path(&keys::HEALTH_FAULTS).as_deref())?,
        link_taints: inputs.text(&keys::HEALTH_LINK) == "taint",
    };
    Ok(Policy { table, quiet: inputs.span(&keys::HEALTH_QUIET), ..Policy::default() })
}

/// The slicing model that was asked for, `None` for the best that can be had.
fn model(inputs: &Inputs) -> Option<Model> {
    let models = [Model::Consumable, Model::Partitionable, Model::Static, Model::Off];
    let wanted = inputs.text(&keys::SLICING_MODEL);
    models.into_iter().find(|model| model.as_str() == wanted)
}

/// Templates by card name.
fn layout(inputs: &Inputs) -> Result<BTreeMap<String, Vec<String>>, SettingsError> {
    let text = inputs.text(&keys::SLICING_LAYOUT);
    let mut layout = BTreeMap::new();
    for entry in text.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
        let parsed = entry.split_once('=').map(|(card, templates)| {
            let templates: Vec<_> = templates.split('+').map(|name| name.trim().to_owned()).collect();
            (card.trim().to_owned(), templates)
        });
        match parsed {
            Some((card, templates))
                if is_dns_label(&card) && templates.iter().all(|name| name.starts_with("vir") && name.len() < 32) =>
            {
                let known = vnpu::template_names();
                if let Some(name) = templates.iter().find(|name| !known.contains(&name.as_str())) {
                    let allowed = format!("one of {} in the place of {name}", known.join(", "));
                    return Err(inputs.refuse(&keys::SLICING_LAYOUT, allowed));
                }
                if layout.insert(card, templates).is_some() {
                    return Err(inputs.refuse(&keys::SLICING_LAYOUT, "each card once"));
                }
            }
            _ => {
                let form = "cards and their templates, such as \"npu-0=vir10_3c_16g+vir05_1c_8g; npu-1=vir10_3c_16g\"";
                return Err(inputs.refuse(&keys::SLICING_LAYOUT, form));
            }
        }
    }
    Ok(layout)
}

/// A path that must be there.
fn directory(inputs: &Inputs, key: &Key) -> Result<PathBuf, SettingsError> {
    inputs.some_path(key).ok_or_else(|| inputs.refuse(key, "a path that is not empty"))
}

fn healthcheck(inputs: &Inputs) -> Result<Option<SocketAddr>, SettingsError> {
    let address = match inputs.some_text(&keys::HEALTHCHECK_ADDRESS) {
        Some(text) => {
            text.parse().map_err(|_| inputs.refuse(&keys::HEALTHCHECK_ADDRESS, "an IP address such as 127.0.0.1"))?
        }
        None => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    match u16::try_from(inputs.number(&keys::HEALTHCHECK_PORT)) {
        Ok(0) => Err(inputs.refuse(&keys::HEALTHCHECK_PORT, "a port from 1 to 65535, or -1 for none")),
        Ok(port) => Ok(Some(SocketAddr::new(address, port))),
        Err(_) => Ok(None),
    }
}

/// The profile `gpu` has example devices only; the other backends read NPUs.
fn backend(inputs: &Inputs) -> Result<Choice, SettingsError> {
    let example = Choice::Example(u32::try_from(inputs.number(&keys::EXAMPLE_COUNT)).unwrap_or(0));
    let gpu = inputs.text(&keys::DEVICE_PROFILE) == "gpu";
    match (inputs.text(&keys::BACKEND).as_str(), gpu) {
        ("auto", true) | ("example", _) => Ok(example),
        ("auto", false) => Ok(Choice::Auto),
        (_, true) => Err(inputs.refuse(&keys::BACKEND, "auto or example with device-profile = \"gpu\"")),
        ("sysfs", false) => Ok(Choice::Sysfs),
        (_, false) => Ok(Choice::Dcmi),
    }
}

/// The effective settings as a file, each with where it came from.
#[must_use]
pub fn describe(inputs: &Inputs, settings: &Settings) -> String {
    let mut text = String::new();
    for key in KEYS {
        let Input { mut value, origin } = inputs.get(key);
        let mut note = origin.to_string();
        let stands_in = match key.name {
            "node-name" => Some(settings.node.to_string()),
            "admin.socket" => Some(settings.admin_socket.display().to_string()),
            "healthcheck-address" => settings.healthcheck.map(|address| address.ip().to_string()),
            _ => None,
        };
        let is_empty = matches!(&value, Value::Text(text) if text.is_empty());
        if is_empty && !key.derived.is_empty() {
            note = match origin {
                Origin::Default => format!("default: {}", key.derived),
                // What is set to nothing is as if it were not set.
                origin => format!("default: {} (empty: {origin})", key.derived),
            };
        }
        if let (true, Some(stands_in)) = (is_empty, stands_in) {
            value = Value::Text(stands_in);
        }
        let line = format!("{} = {value}", key.name);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line:<72} # {note}");
    }
    text
}
