//! How each kind of thing looks in a table.

use jiff::Timestamp;
use serde::Serialize;

use crate::{
    document::{
        Attention, CardHealth, Claim, ClaimCounts, Cuttable, Device, Health, MixPart, Slice, Status, Template,
        Versions, Vnpu,
    },
    human::{age, size},
    table::{Cell, Column, Tone, number, text, wide},
};

/// A kind of thing that is listed.
pub(crate) trait Item: Serialize + Clone {
    /// Kind of a document that holds one.
    const KIND: &'static str;
    /// Kind of a document that holds several.
    const LIST: &'static str;
    /// The columns of its table.
    const COLUMNS: &'static [Column];
    /// Its row.
    fn row(&self, now: Timestamp) -> Vec<Cell>;
    /// What other commands call it by.
    fn id(&self) -> &str;
}

impl Item for Device {
    const KIND: &'static str = "Device";
    const LIST: &'static str = "DeviceList";
    const COLUMNS: &'static [Column] = &[
        text("NAME"),
        text("MODEL"),
        text("PCI"),
        number("CORES"),
        number("MEMORY"),
        text("HEALTH"),
        text("STATE"),
        text("CLAIM"),
        wide(text("LEVEL")),
        wide(text("PHYSICAL")),
        wide(number("NUMA")),
        wide(text("GROUP")),
        wide(number("TEMP")),
        wide(number("POWER")),
        wide(text("CODES")),
        wide(text("UUID")),
        wide(text("REASON")),
    ];

    fn row(&self, _now: Timestamp) -> Vec<Cell> {
        vec![
            Cell::some(&self.name),
            Cell::known(self.model.as_ref()),
            Cell::known(self.bus_id.as_ref()),
            Cell::known(self.ai_cores),
            Cell::known(self.memory_bytes.map(size)),
            health_word(self.health.as_ref()),
            state(&self.state),
            Cell::some(self.holders()),
            Cell::known(self.health.as_ref().map(|health| health.level.as_str()).filter(|level| *level != "unknown")),
            Cell::known(Some(numbers(&self.physical_ids))),
            Cell::known(self.numa_node),
            Cell::known(self.topology_group.as_ref()),
            Cell::known(self.health.as_ref().and_then(|health| health.temperature_celsius).map(|t| format!("{t} C"))),
            Cell::known(
                self.health.as_ref().and_then(|health| health.power_watts).map(|power| format!("{power:.1} W")),
            ),
            Cell::some(self.health.as_ref().map(|health| health.codes.join(" ")).unwrap_or_default()),
            Cell::known(self.uuid.as_ref()),
            Cell::some(self.reason.as_deref().unwrap_or_default()),
        ]
    }

    fn id(&self) -> &str {
        &self.name
    }
}

impl Item for CardHealth {
    const KIND: &'static str = "DeviceHealth";
    const LIST: &'static str = "DeviceHealthList";
    const COLUMNS: &'static [Column] = &[
        text("NAME"),
        text("HEALTH"),
        text("LEVEL"),
        number("FOR"),
        number("TEMP"),
        number("POWER"),
        number("ECC"),
        text("LINK"),
        text("REASON"),
        wide(text("CODES")),
        wide(text("QUIET")),
    ];

    fn row(&self, now: Timestamp) -> Vec<Cell> {
        let health = self.health.as_ref();
        let known = |level: &&str| *level != "unknown";
        // What it corrected, and what it could not.
        let ecc = health.and_then(|health| health.ecc.as_ref());
        vec![
            Cell::some(&self.name),
            health_word(health),
            Cell::known(health.map(|health| health.level.as_str()).filter(known)),
            Cell::known(health.and_then(|health| health.since).map(|since| age(since, now))),
            Cell::known(health.and_then(|health| health.temperature_celsius).map(|t| format!("{t} C"))),
            Cell::known(health.and_then(|health| health.power_watts).map(|power| format!("{power:.1} W"))),
            Cell::known(ecc.map(|ecc| format!("{}/{}", ecc.corrected, ecc.uncorrected))),
            Cell::known(health.and_then(|health| health.link.as_ref())),
            Cell::some(health.and_then(|health| health.reason.as_deref()).unwrap_or_default()),
            Cell::some(health.map(|health| health.codes.join(" ")).unwrap_or_default()),
            Cell::some(health.and_then(|health| health.quiet_until).map(|until| age(now, until)).unwrap_or_default()),
        ]
    }

    fn id(&self) -> &str {
        &self.name
    }
}

impl Device {
    fn holders(&self) -> String {
        let holders = self.claims.iter().map(|claim| claim.path().unwrap_or_else(|| "?".to_owned()));
        holders.collect::<Vec<_>>().join(",")
    }

    /// Everything, line by line.
    pub(crate) fn pairs(&self, now: Timestamp) -> Vec<(&'static str, Cell)> {
        let health = self.health.as_ref();
        let health_text = health.map(|health| {
            let since = health.since.map(|since| format!(" for {}", age(since, now))).unwrap_or_default();
            let reason = health.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            format!("{}{since}{reason}", health.condition)
        });
        let codes = health.map(|health| health.codes.join(" ")).unwrap_or_default();
        let quiet =
            health.and_then(|health| health.quiet_until).map(|until| format!("takes claims in {}", age(now, until)));
        let ecc = health.and_then(|health| health.ecc.as_ref()).map(|ecc| {
            format!("{} corrected, {} not, {} pages isolated", ecc.corrected, ecc.uncorrected, ecc.isolated_pages)
        });
        let taints = self.taints.iter().map(|taint| format!("{}={}:{}", taint.key, taint.value, taint.effect));
        let claims = self
            .claims
            .iter()
            .map(|claim| format!("{} ({})", claim.path().unwrap_or_else(|| "?".to_owned()), claim.uid));
        let nodes = self.physical_ids.iter().map(|id| format!("/dev/davinci{id}"));
        let mut pairs = vec![
            ("name", Cell::some(&self.name)),
            ("model", Cell::known(self.model.as_ref())),
            ("uuid", Cell::known(self.uuid.as_ref())),
            ("pci", Cell::known(self.bus_id.as_ref())),
            ("pcie root", Cell::known(self.pcie_root.as_ref())),
            ("numa node", Cell::known(self.numa_node)),
            ("group", Cell::known(self.topology_group.as_ref())),
            ("nodes", Cell::known(Some(nodes.collect::<Vec<_>>().join(", ")))),
            ("cores", Cell::known(self.ai_cores)),
            ("memory", Cell::known(self.memory_bytes.map(size))),
            ("driver", Cell::known(self.driver_version.as_ref())),
            ("health", Cell::known(health_text).tone(health_tone(health))),
            ("level", Cell::known(health.map(|health| health.level.as_str()))),
            ("codes", Cell::some(codes)),
            ("ecc", Cell::known(ecc)),
            ("link", Cell::known(health.and_then(|health| health.link.as_ref()))),
            (
                "temperature",
                Cell::known(health.and_then(|health| health.temperature_celsius).map(|t| format!("{t} C"))),
            ),
            ("power", Cell::known(health.and_then(|health| health.power_watts).map(|power| format!("{power:.1} W")))),
            ("state", state(&self.state)),
        ];
        pairs.extend(quiet.map(|quiet| ("quiet", Cell::some(quiet))));
        pairs.extend(self.hold.iter().map(|hold| {
            let since = hold.since.map(|since| format!(" for {}", age(since, now))).unwrap_or_default();
            let reason = hold.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            ("operator", Cell::some(format!("{}{since}{reason}", hold.kind)).tone(Tone::Warn))
        }));
        pairs.extend(self.reason.iter().map(|reason| ("reason", Cell::some(reason))));
        pairs.extend(several("taint", taints.map(Cell::some)));
        pairs.extend(several("claim", claims.map(Cell::some)));
        pairs
    }
}

/// One line for each value, the name at the first; one line that says `-` for none.
fn several(name: &'static str, values: impl Iterator<Item = Cell>) -> Vec<(&'static str, Cell)> {
    let mut lines: Vec<_> = values.map(|value| ("", value)).collect();
    match lines.first_mut() {
        Some(first) => first.0 = name,
        None => lines.push((name, Cell::some(""))),
    }
    lines
}

fn numbers(numbers: &[u32]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn health_word(health: Option<&Health>) -> Cell {
    Cell::known(health.map(|health| health.condition.as_str()).filter(|word| *word != "unknown"))
        .tone(health_tone(health))
}

fn health_tone(health: Option<&Health>) -> Tone {
    match health.map(|health| health.condition.as_str()) {
        None | Some("unknown") => Tone::Plain,
        Some("ok") => Tone::Good,
        Some("warn") => Tone::Warn,
        Some(_) => Tone::Bad,
    }
}

fn state(state: &str) -> Cell {
    let tone = match state {
        "gone" | "quarantined" | "lost" => Tone::Bad,
        "tainted" | "closed" | "foreign" | "cordoned" | "drained" | "draining" => Tone::Warn,
        _ => Tone::Plain,
    };
    Cell::known(Some(state).filter(|state| *state != "unknown")).tone(tone)
}

impl Item for Claim {
    const KIND: &'static str = "Claim";
    const LIST: &'static str = "ClaimList";
    const COLUMNS: &'static [Column] = &[
        text("CLAIM"),
        text("STATE"),
        text("DEVICES"),
        text("AGE"),
        text("UID"),
        wide(text("REQUESTS")),
        wide(text("BOOT")),
        wide(text("CDI")),
    ];

    fn row(&self, now: Timestamp) -> Vec<Cell> {
        let holdings = self.devices.as_deref();
        let all = |field: fn(&super::document::Holding) -> String| {
            Cell::known(
                holdings.map(|all| all.iter().map(field).filter(|t| !t.is_empty()).collect::<Vec<_>>().join(",")),
            )
        };
        vec![
            Cell::known(self.path()),
            state(&self.state),
            all(|holding| format!("{}{}", holding.device, if holding.admin_access { "(admin)" } else { "" })),
            Cell::known(self.prepared_at.map(|at| age(at, now))),
            Cell::some(&self.uid),
            all(|holding| holding.requests.join(",")),
            Cell::known(self.this_boot.map(|this| if this { "this" } else { "earlier" })),
            all(|holding| holding.cdi_device.clone()),
        ]
    }

    fn id(&self) -> &str {
        &self.uid
    }
}

impl Claim {
    /// The record, line by line.
    pub(crate) fn pairs(&self, now: Timestamp) -> Vec<(&'static str, Cell)> {
        let prepared = self.prepared_at.map(|at| format!("{} ago ({at})", age(at, now)));
        let boot = self.boot_id.as_ref().map(|id| match self.this_boot {
            Some(true) => format!("{id} (this one)"),
            Some(false) => format!("{id} (an earlier one)"),
            None => id.clone(),
        });
        let mut pairs = vec![
            ("uid", Cell::some(&self.uid)),
            ("namespace", Cell::known(self.namespace.as_ref())),
            ("name", Cell::known(self.name.as_ref())),
            ("state", state(&self.state)),
            ("prepared", Cell::known(prepared)),
            ("boot", Cell::known(boot)),
        ];
        if let Some(reason) = &self.reason {
            pairs.push(("reason", Cell::some(reason)));
        }
        if let Some(file) = &self.damaged_file {
            pairs.push(("file", Cell::some(file)));
        }
        let Some(holdings) = &self.devices else {
            pairs.push(("devices", Cell::known(None::<&str>)));
            return pairs;
        };
        if holdings.is_empty() {
            pairs.push(("devices", Cell::some("")));
        }
        for holding in holdings {
            let admin = if holding.admin_access { ", admin access: looks and owns nothing" } else { "" };
            pairs.push(("device", Cell::some(format!("{} of pool {}{admin}", holding.device, holding.pool))));
            pairs.push(("  uuid", Cell::some(&holding.uuid)));
            pairs.push(("  requests", Cell::known(Some(holding.requests.join(", ")))));
            if let Some(share) = &holding.share_id {
                pairs.push(("  share", Cell::some(share)));
            }
            pairs.push(("  physical", Cell::some(numbers(&holding.physical_ids))));
            if let Some(part) = &holding.vnpu {
                let made = if part.made { "" } else { ", not made yet" };
                let text = format!(
                    "{}, {}, {} cores, {}{made}",
                    part.id,
                    part.template,
                    part.ai_cores,
                    size(part.memory_bytes)
                );
                pairs.push(("  vnpu", Cell::some(text)));
            }
            pairs.push(("  cdi", Cell::some(&holding.cdi_device)));
        }
        pairs
    }
}

impl Item for Vnpu {
    const KIND: &'static str = "Vnpu";
    const LIST: &'static str = "VnpuList";
    const COLUMNS: &'static [Column] = &[
        text("NAME"),
        text("DEVICE"),
        text("TEMPLATE"),
        number("CORES"),
        number("MEMORY"),
        text("STATE"),
        text("CLAIM"),
        text("AGE"),
        wide(text("CDI")),
    ];

    fn row(&self, now: Timestamp) -> Vec<Cell> {
        vec![
            Cell::some(&self.name),
            Cell::known(self.part.card.as_ref()),
            Cell::some(&self.part.template),
            Cell::known(Some(self.part.ai_cores)),
            Cell::known(Some(size(self.part.memory_bytes))),
            state(&self.state),
            self.claim.as_ref().map_or_else(|| Cell::some(""), |claim| Cell::known(claim.path())),
            match self.claim {
                Some(_) => Cell::known(self.prepared_at.map(|at| age(at, now))),
                None => Cell::some(""),
            },
            Cell::some(self.cdi_device.as_deref().unwrap_or_default()),
        ]
    }

    fn id(&self) -> &str {
        &self.name
    }
}

impl Cuttable {
    /// Kind of a document that holds several.
    pub(crate) const LIST: &'static str = "TemplatesList";
    /// The columns of the first table: one row for each template of each NPU.
    pub(crate) const COLUMNS: &'static [Column] = &[
        text("DEVICE"),
        text("TEMPLATE"),
        number("CORES"),
        number("CPUS"),
        number("MEMORY"),
        number("FITS"),
        wide(text("MODEL")),
    ];
    /// The columns of the second table: what still fits together.
    pub(crate) const MIXES: &'static [Column] = &[text("DEVICE"), text("STILL FITS")];

    /// The rows of the first table.
    pub(crate) fn rows(&self) -> Vec<Vec<Cell>> {
        let row = |template: &Template| {
            vec![
                Cell::some(&self.device),
                Cell::some(&template.name),
                Cell::known(Some(template.ai_cores)),
                Cell::known(Some(template.ai_cpus)),
                Cell::known(Some(size(template.memory_bytes))),
                Cell::known(template.fits),
                Cell::known(self.model.as_ref()),
            ]
        };
        self.templates.iter().map(row).collect()
    }

    /// The rows of the second table.
    pub(crate) fn mix_rows(&self) -> Vec<Vec<Cell>> {
        let part = |part: &MixPart| format!("{} x {}", part.count, part.template);
        let mix = |mix: &Vec<MixPart>| Cell::some(mix.iter().map(part).collect::<Vec<_>>().join(" + "));
        let mut rows: Vec<_> = self.mixes.iter().map(|parts| vec![Cell::some(&self.device), mix(parts)]).collect();
        let is_known = self.templates.iter().all(|template| template.fits.is_some());
        let word = if is_known { "nothing" } else { "?" };
        match &self.reason {
            Some(reason) if rows.is_empty() => {
                rows.push(vec![Cell::some(&self.device), Cell::some(format!("{word}: {reason}"))]);
            }
            Some(reason) => rows.push(vec![Cell::some(&self.device), Cell::some(reason).tone(Tone::Warn)]),
            None if rows.is_empty() => rows.push(vec![Cell::some(&self.device), Cell::some(word)]),
            None => {}
        }
        rows
    }
}

impl Item for Slice {
    const KIND: &'static str = "Slice";
    const LIST: &'static str = "SliceList";
    const COLUMNS: &'static [Column] = &[
        text("NAME"),
        number("INDEX"),
        number("DEVICES"),
        number("GENERATION"),
        text("STATE"),
        text("WRITTEN"),
        wide(text("POOL")),
        wide(text("ERROR")),
    ];

    fn row(&self, now: Timestamp) -> Vec<Cell> {
        vec![
            Cell::known(self.name.as_ref()),
            Cell::known(Some(self.index)),
            Cell::known(Some(self.devices)),
            Cell::known(self.generation),
            Cell::known(Some(&self.state)).tone(if self.state == "failed" { Tone::Bad } else { Tone::Plain }),
            Cell::some(self.written_at.map(|at| format!("{} ago", age(at, now))).unwrap_or_default()),
            Cell::some(&self.pool),
            Cell::some(self.error.as_deref().unwrap_or_default()),
        ]
    }

    fn id(&self) -> &str {
        self.name.as_deref().unwrap_or("?")
    }
}

impl Status {
    /// Kind of its document.
    pub(crate) const KIND: &'static str = "Status";

    /// Everything, line by line.
    pub(crate) fn pairs(&self, now: Timestamp) -> Vec<(&'static str, Cell)> {
        let mut pairs = vec![
            ("daemon", self.daemon_line(now)),
            ("backend", self.backend_line()),
            ("kubelet", self.kubelet_line(now)),
            ("cluster", self.cluster_line(now)),
            ("claims", self.claims_line()),
        ];
        if let Some(slicing) = &self.slicing {
            let reason =
                slicing.reason.as_deref().map(|reason| reason.strip_prefix("slicing is off: ").unwrap_or(reason));
            let parts = slicing.model.as_deref().into_iter().chain(reason);
            pairs.push(("slicing", Cell::some(parts.collect::<Vec<_>>().join(": "))));
        }
        let point = |point: &Attention| {
            let since = point.since.map(|since| format!(", for {}", age(since, now))).unwrap_or_default();
            Cell::some(format!("{}: {}{since}", point.subject, point.text)).tone(Tone::Warn)
        };
        pairs.extend(several("attention", self.attention.iter().map(point)));
        pairs
    }

    fn claims_line(&self) -> Cell {
        let ClaimCounts { preparing, prepared, releasing, quarantined } = self.claims;
        // What passes is told only while it is there.
        let passing = [(preparing, "preparing"), (releasing, "releasing")];
        let passing = passing.iter().filter(|(count, _)| *count > 0);
        let all = [(prepared, "prepared")].into_iter().chain(passing.copied()).chain([(quarantined, "quarantined")]);
        Cell::some(all.map(|(count, word)| format!("{count} {word}")).collect::<Vec<_>>().join(", "))
    }

    fn daemon_line(&self, now: Timestamp) -> Cell {
        let Some(daemon) = &self.daemon else { return Cell::some("does not answer").tone(Tone::Bad) };
        let up = daemon.started_at.map(|at| format!(", up {}", age(at, now))).unwrap_or_default();
        let word = if daemon.recovered { "running" } else { "starting" };
        Cell::some(format!("{word}, {}, pid {}{up}", daemon.version, daemon.pid))
    }

    fn backend_line(&self) -> Cell {
        let Some(backend) = &self.backend else { return Cell::known(None::<&str>) };
        let mut line = backend.name.clone();
        for (before, part, after) in [(" ", &backend.driver_version, ""), (" (", &backend.source, ")")] {
            if let Some(part) = part {
                line = format!("{line}{before}{part}{after}");
            }
        }
        if backend.state == "ready" {
            return Cell::some(line);
        }
        let detail = backend.detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default();
        Cell::some(format!("{line}, {}{detail}", backend.state)).tone(Tone::Warn)
    }

    fn kubelet_line(&self, now: Timestamp) -> Cell {
        let Some(kubelet) = &self.kubelet else { return Cell::known(None::<&str>) };
        let since = kubelet.since.map(|since| format!(" {} ago", age(since, now))).unwrap_or_default();
        if let Some(refused) = &kubelet.refused {
            return Cell::some(format!("refused{since}: {refused}")).tone(Tone::Bad);
        }
        if !kubelet.registered {
            return Cell::some("not registered yet").tone(Tone::Warn);
        }
        let dra: Vec<_> = kubelet.versions.iter().filter_map(|version| version.strip_suffix(".DRAPlugin")).collect();
        let dra = if dra.is_empty() { String::new() } else { format!(", dra {}", dra.join(" and ")) };
        let last = kubelet.last_call.map(|at| format!(", last call {} ago", age(at, now))).unwrap_or_default();
        Cell::some(format!("registered{since}{dra}{last}"))
    }

    fn cluster_line(&self, now: Timestamp) -> Cell {
        let Some(cluster) = &self.cluster else { return Cell::known(None::<&str>) };
        let Some(state) = &cluster.state else { return Cell::known(None::<&str>) };
        let mut parts = vec![state.clone()];
        parts.extend(cluster.node.iter().map(|node| format!("node {node}")));
        parts.extend(cluster.server_version.iter().map(|version| format!("server {version}")));
        parts.extend(cluster.generation.iter().map(|generation| format!("pool generation {generation}")));
        parts.extend(cluster.written_at.iter().map(|at| format!("last write {} ago", age(*at, now))));
        let tone = if state == "ok" { Tone::Plain } else { Tone::Warn };
        Cell::some(parts.join(", ")).tone(tone)
    }
}

impl Versions {
    /// Kind of its document.
    pub(crate) const KIND: &'static str = "Version";

    /// Both, line by line.
    pub(crate) fn pairs(&self) -> Vec<(&'static str, Cell)> {
        vec![
            ("npuctl", Cell::some(&self.npuctl)),
            ("npu-dra", Cell::some(self.npu_dra.as_deref().unwrap_or("does not answer"))),
        ]
    }
}
