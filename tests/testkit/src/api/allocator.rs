//! A tiny allocation of devices to a claim, first fit in published order. No scheduler: it never goes back on a choice.
//!
//! It knows what a driver's models need: shared devices with request policies, counters, classes whose selectors are
//! comparisons joined by `&&`, `exactly` and `firstAvailable`, counts, `All`, and administrators' requests. Of Kubernetes
//! 1.34 it has the fault of the scheduler too (kubernetes/kubernetes issue 133705): a shared device is given only if the
//! device that stands in the slice at the *number of the request's device* has room as well.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value, json};

use super::{
    ApiServer, Inner,
    claims::{CLAIMS, node_selector},
    gates::Release,
    quantity::Quantity,
    store::meta,
    validate::{list, text},
};

impl ApiServer {
    /// Gives a stored claim free devices from the published slices of complete pools, all on one node, and says that a
    /// pod there uses it. A class that is stored selects; without one only devices of attribute `type` `npu` are given.
    /// Devices with a taint that keeps claims off are left out.
    ///
    /// # Errors
    /// No such claim, a request that it does not understand, too few free devices.
    pub fn allocate(&self, namespace: &str, name: &str) -> anyhow::Result<Value> {
        self.shared.update(|inner| {
            let stored = inner.store.get(CLAIMS, namespace, name).map(Arc::clone);
            let stored = stored.with_context(|| format!("there is no claim {namespace}/{name}"))?;
            ensure!(stored.pointer("/status/allocation").is_none(), "claim {namespace}/{name} is allocated already");
            let (node, allocation) =
                try_nodes(inner, &stored).with_context(|| format!("claim {namespace}/{name} is not allocated"))?;
            let mut claim = (*stored).clone();
            claim["status"]["allocation"] = allocation;
            inner.auth.bound.insert((node, namespace.to_owned(), name.to_owned()));
            Ok((*inner.store.put(CLAIMS, claim)).clone())
        })
    }
}

/// The first node on which the whole claim fits, and the allocation there; otherwise why it fits not on the last one.
fn try_nodes(inner: &Inner, claim: &Value) -> anyhow::Result<(String, Value)> {
    ensure!(list(&claim["spec"]["devices"], "constraints").is_empty(), "constraints are not understood here");
    let pools = pools(inner);
    let nodes: BTreeSet<&str> = pools.iter().map(|pool| pool.node.as_str()).collect();
    let mut why = None;
    for node in nodes {
        let here: Vec<&Pool> = pools.iter().filter(|pool| pool.node == node).collect();
        match Attempt::new(inner, &here).claim(claim) {
            Ok(allocation) => {
                let mut allocation = allocation;
                allocation["nodeSelector"] = node_selector(node);
                return Ok((node.to_owned(), allocation));
            }
            Err(error) => why = Some(error),
        }
    }
    Err(why.unwrap_or_else(|| anyhow::anyhow!("no pool is complete")))
}

/// Driver, pool and device.
type Key = [String; 3];
/// Quantities by name, in units of 10^-9.
type Amounts = BTreeMap<String, i128>;

/// A complete pool.
struct Pool {
    node: String,
    driver: String,
    name: String,
    /// Its newest slices, in the order of their names.
    slices: Vec<Arc<Value>>,
}

/// One published device, and the slice in which it stands.
#[derive(Clone, Copy)]
struct Offered<'a> {
    pool: &'a Pool,
    slice: &'a Value,
    device: &'a Value,
}

impl Offered<'_> {
    fn key(&self) -> Key {
        [self.pool.driver.clone(), self.pool.name.clone(), text(self.device, "name").unwrap_or_default().to_owned()]
    }

    fn is_shared(&self) -> bool {
        self.device.get("allowMultipleAllocations") == Some(&json!(true))
    }
}

/// What is taken of a device.
#[derive(Clone, Default)]
struct Use {
    exclusively: bool,
    shares: Amounts,
}

/// One try to serve a claim on one node.
struct Attempt<'a> {
    inner: &'a Inner,
    pools: &'a [&'a Pool],
    used: HashMap<Key, Use>,
    results: Vec<Value>,
}

impl<'a> Attempt<'a> {
    fn new(inner: &'a Inner, pools: &'a [&'a Pool]) -> Self {
        let mut used: HashMap<Key, Use> = HashMap::new();
        for claim in inner.store.list(CLAIMS, None) {
            let results = claim.pointer("/status/allocation/devices/results").and_then(Value::as_array);
            for result in results.into_iter().flatten().filter(|result| !is_admin(result)) {
                let key = ["driver", "pool", "device"].map(|name| text(result, name).unwrap_or_default().to_owned());
                let taken = used.entry(key).or_default();
                match result.get("shareID") {
                    None => taken.exclusively = true,
                    Some(_) => add(&mut taken.shares, &amounts(result.get("consumedCapacity"))),
                }
            }
        }
        Self { inner, pools, used, results: Vec::new() }
    }

    fn claim(mut self, claim: &Value) -> anyhow::Result<Value> {
        let devices = &claim["spec"]["devices"];
        let mut config = Vec::new();
        for request in list(devices, "requests") {
            let name = text(request, "name").unwrap_or_default();
            let class = match request.get("exactly") {
                Some(exact) => {
                    self.request(name, exact).with_context(|| format!("request {name}"))?;
                    text(exact, "deviceClassName")
                }
                None => self.first_available(name, list(request, "firstAvailable"))?,
            };
            let class = class.and_then(|class| self.inner.store.get("deviceclasses", "", class));
            for entry in class.map(|class| list(&class["spec"], "config")).unwrap_or_default() {
                config.push(json!({"source": "FromClass", "requests": [name], "opaque": entry["opaque"]}));
            }
        }
        for entry in list(devices, "config") {
            let mut entry = entry.clone();
            entry["source"] = json!("FromClaim");
            config.push(entry);
        }
        let mut allocated = json!({"results": self.results});
        if !config.is_empty() {
            allocated["config"] = Value::Array(config);
        }
        Ok(json!({"devices": allocated}))
    }

    /// Serves the first alternative that can be; gives its class.
    fn first_available<'r>(&mut self, name: &str, alternatives: &'r [Value]) -> anyhow::Result<Option<&'r str>> {
        let mut why = Vec::new();
        for alternative in alternatives {
            let full = format!("{name}/{}", text(alternative, "name").unwrap_or_default());
            let (used, results) = (self.used.clone(), self.results.len());
            match self.request(&full, alternative) {
                Ok(()) => return Ok(text(alternative, "deviceClassName")),
                Err(error) => why.push(format!("request {full}: {error:#}")),
            }
            self.used = used;
            self.results.truncate(results);
        }
        bail!("{}", why.join("; "))
    }

    fn request(&mut self, name: &str, request: &Value) -> anyhow::Result<()> {
        let matching = self.matching(request)?;
        let admin = is_admin(request);
        if text(request, "allocationMode") == Some("All") {
            ensure!(!matching.is_empty(), "no device matches");
            for offered in matching {
                let taken = self.fits(offered, request, 0)?;
                let taken = taken.with_context(|| format!("device {} is not free", offered.key()[2]))?;
                self.take(name, offered, &taken, admin);
            }
            return Ok(());
        }
        let count = request.get("count").and_then(Value::as_u64).unwrap_or(1);
        let mut chosen = BTreeSet::new();
        for number in 0..count {
            // From 1.35 on the devices of a request are spread over different ones first.
            let spread = self.inner.rules.since(Release::V1_35);
            let (fresh, again): (Vec<Offered>, Vec<Offered>) =
                matching.iter().copied().partition(|offered| !spread || !chosen.contains(&offered.key()));
            let mut found = None;
            for offered in fresh.into_iter().chain(again) {
                if let Some(taken) = self.fits(offered, request, usize::try_from(number)?)? {
                    found = Some((offered, taken));
                    break;
                }
            }
            let (offered, taken) =
                found.with_context(|| format!("no free device, or none with room ({} match)", matching.len()))?;
            chosen.insert(offered.key());
            self.take(name, offered, &taken, admin);
        }
        Ok(())
    }

    /// The devices that class and selectors choose, without those that a taint keeps off.
    fn matching(&self, request: &Value) -> anyhow::Result<Vec<Offered<'a>>> {
        let class = text(request, "deviceClassName").unwrap_or_default();
        let mut selectors = list(request, "selectors").to_vec();
        match self.inner.store.get("deviceclasses", "", class) {
            Some(class) => selectors.extend(list(&class["spec"], "selectors").to_vec()),
            None => selectors.push(json!({"cel": {"expression": "device.attributes[device.driver].type == \"npu\""}})),
        }
        let mut found = Vec::new();
        for pool in self.pools {
            for slice in &pool.slices {
                for device in list(&slice["spec"], "devices") {
                    let keeps_off = |taint: &Value| matches!(text(taint, "effect"), Some("NoSchedule" | "NoExecute"));
                    let tainted = list(device, "taints").iter().any(keeps_off);
                    let offered = Offered { pool, slice, device };
                    let mut selected = !tainted || is_admin(request);
                    for selector in &selectors {
                        let expression = selector.pointer("/cel/expression").and_then(Value::as_str);
                        selected = selected && select(expression.unwrap_or_default(), &pool.driver, device)?;
                    }
                    if selected {
                        found.push(offered);
                    }
                }
            }
        }
        Ok(found)
    }

    /// What the device would give to the request, `None` if it has no room. `number` counts the request's devices.
    fn fits(&self, offered: Offered<'_>, request: &Value, number: usize) -> anyhow::Result<Option<Amounts>> {
        let Some(taken) = self.room(offered, request) else { return Ok(None) };
        if !is_admin(request) && !self.counters_suffice(offered) {
            return Ok(None);
        }
        if offered.is_shared() && !self.inner.rules.since(Release::V1_35) {
            let beside = list(&offered.slice["spec"], "devices").get(number);
            let beside = beside.with_context(|| {
                let slice = meta(offered.slice, "name");
                format!("kube-scheduler 1.34 panics: index {number} is out of range in slice {slice}")
            })?;
            if self.room(Offered { device: beside, ..offered }, request).is_none() {
                return Ok(None);
            }
        }
        Ok(Some(taken))
    }

    /// What a device's capacities would give.
    fn room(&self, offered: Offered<'_>, request: &Value) -> Option<Amounts> {
        let none = Map::new();
        let has = offered.device.get("capacity").and_then(Value::as_object).unwrap_or(&none);
        let wants = amounts(request.pointer("/capacity/requests"));
        if wants.keys().any(|name| !has.contains_key(name)) {
            return None;
        }
        let used = self.used.get(&offered.key());
        if !offered.is_shared() {
            let free = used.is_none() || is_admin(request);
            let enough = wants.iter().all(|(name, wanted)| value_of(&has[name], "value").is_some_and(|v| v >= *wanted));
            return (free && enough).then(Amounts::new);
        }
        if used.is_some_and(|used| used.exclusively) {
            return None;
        }
        let mut taken = Amounts::new();
        for (name, capacity) in has {
            let whole = value_of(capacity, "value")?;
            let rounded = round(capacity, whole, wants.get(name).copied())?;
            let already = used.and_then(|used| used.shares.get(name)).copied().unwrap_or(0);
            if already + rounded > whole {
                return None;
            }
            taken.insert(name.clone(), rounded);
        }
        Some(taken)
    }

    /// Whether the pool's counters have what the device takes. A shared device pays once, with its first share.
    fn counters_suffice(&self, offered: Offered<'_>) -> bool {
        if offered.is_shared() && self.used.contains_key(&offered.key()) {
            return true;
        }
        let mut left: BTreeMap<(String, String), i128> = BTreeMap::new();
        for slice in &offered.pool.slices {
            for set in list(&slice["spec"], "sharedCounters") {
                let name = text(set, "name").unwrap_or_default();
                for (counter, amount) in amounts_of_values(set.get("counters")) {
                    *left.entry((name.to_owned(), counter)).or_default() += amount;
                }
            }
            for device in list(&slice["spec"], "devices") {
                let other = Offered { device, slice, pool: offered.pool };
                if self.used.contains_key(&other.key()) {
                    pay(&mut left, device);
                }
            }
        }
        pay(&mut left, offered.device);
        left.values().all(|amount| *amount >= 0)
    }

    fn take(&mut self, request: &str, offered: Offered<'_>, taken: &Amounts, admin: bool) {
        let [driver, pool, device] = offered.key();
        let mut result = json!({"request": request, "driver": driver, "pool": pool, "device": device});
        if offered.is_shared() {
            result["shareID"] = json!(share_id());
            for (name, amount) in taken {
                let policy = &offered.device["capacity"][name];
                result["consumedCapacity"][name] = json!(print(*amount, policy));
            }
        }
        if admin {
            result["adminAccess"] = json!(true);
        } else {
            let used = self.used.entry(offered.key()).or_default();
            used.exclusively |= !offered.is_shared();
            add(&mut used.shares, taken);
        }
        self.results.push(result);
    }
}

/// What a capacity gives for a request, `None` if it cannot: the next valid value, or the next step of a range. Without
/// a request it gives the default, and without a policy all of it.
fn round(capacity: &Value, whole: i128, wanted: Option<i128>) -> Option<i128> {
    let Some(policy) = capacity.get("requestPolicy") else { return Some(wanted.unwrap_or(whole)) };
    let Some(wanted) = wanted else { return Some(value_of(policy, "default").unwrap_or(whole)) };
    if let Some(range) = policy.get("validRange") {
        let least = value_of(range, "min").unwrap_or(0);
        let rounded = match value_of(range, "step").filter(|step| *step > 0) {
            Some(step) if wanted > least => least + (wanted - least + step - 1) / step * step,
            _ => wanted.max(least),
        };
        return value_of(range, "max").is_none_or(|most| rounded <= most).then_some(rounded);
    }
    let valid =
        list(policy, "validValues").iter().filter_map(|value| Some(Quantity::parse(value.as_str()?).ok()?.nano()));
    let valid: Vec<i128> = valid.collect();
    if valid.is_empty() { Some(wanted) } else { valid.into_iter().filter(|value| *value >= wanted).min() }
}

/// Takes from the counters what a device consumes; a counter that is not published has nothing.
fn pay(left: &mut BTreeMap<(String, String), i128>, device: &Value) {
    for consumed in list(device, "consumesCounters") {
        for (counter, amount) in amounts_of_values(consumed.get("counters")) {
            let set = text(consumed, "counterSet").unwrap_or_default().to_owned();
            *left.entry((set, counter)).or_default() -= amount;
        }
    }
}

/// Decides an expression of the form `A == B && …`, where A is `device.driver` or an attribute of the driver's domain.
/// As in CEL, an attribute that the device lacks is an error unless an earlier part was false.
fn select(expression: &str, driver: &str, device: &Value) -> anyhow::Result<bool> {
    for part in expression.split("&&").map(str::trim) {
        let (left, right) = part.split_once("==").with_context(|| format!("{part:?} is not understood here"))?;
        let (left, right) = (left.trim(), right.trim());
        let wanted: Value = serde_json::from_str(right).with_context(|| format!("{right:?} is not understood here"))?;
        if left == "device.driver" {
            if wanted != json!(driver) {
                return Ok(false);
            }
            continue;
        }
        let attribute = left
            .strip_prefix(&format!("device.attributes[\"{driver}\"]."))
            .or_else(|| left.strip_prefix("device.attributes[device.driver]."));
        let attribute = attribute.with_context(|| format!("{left:?} is not understood here"))?;
        let attributes = &device["attributes"];
        let found = attributes.get(attribute).or_else(|| attributes.get(format!("{driver}/{attribute}")));
        let found = found.with_context(|| {
            format!(
                "device {} has no attribute {attribute}: the expression fails",
                text(device, "name").unwrap_or_default()
            )
        })?;
        if found.as_object().and_then(|found| found.values().next()) != Some(&wanted) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The complete pools: all slices of the newest generation are there.
fn pools(inner: &Inner) -> Vec<Pool> {
    let mut found: BTreeMap<(String, String), Vec<Arc<Value>>> = BTreeMap::new();
    let at = |slice: &Value, path: &str| slice.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
    for slice in inner.store.list("resourceslices", None) {
        found.entry((at(slice, "/spec/driver"), at(slice, "/spec/pool/name"))).or_default().push(Arc::clone(slice));
    }
    let number = |slice: &Value, name: &str| slice["spec"]["pool"].get(name).and_then(Value::as_u64).unwrap_or(0);
    let mut pools = Vec::new();
    for ((driver, name), mut slices) in found {
        let newest = slices.iter().map(|slice| number(slice, "generation")).max().unwrap_or(0);
        slices.retain(|slice| number(slice, "generation") == newest);
        let Some(first) = slices.first() else { continue };
        if usize::try_from(number(first, "resourceSliceCount")).is_ok_and(|count| count == slices.len()) {
            pools.push(Pool { node: at(first, "/spec/nodeName"), driver, name, slices });
        }
    }
    pools
}

fn is_admin(holder: &Value) -> bool {
    holder.get("adminAccess") == Some(&json!(true))
}

fn value_of(holder: &Value, name: &str) -> Option<i128> {
    Some(Quantity::parse(text(holder, name)?).ok()?.nano())
}

fn amounts(quantities: Option<&Value>) -> Amounts {
    let entries = quantities.and_then(Value::as_object).into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), Quantity::parse(value.as_str()?).ok()?.nano()))).collect()
}

fn amounts_of_values(counters: Option<&Value>) -> Amounts {
    let entries = counters.and_then(Value::as_object).into_iter().flatten();
    entries.filter_map(|(name, counter)| Some((name.clone(), value_of(counter, "value")?))).collect()
}

fn add(to: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *to.entry(name.clone()).or_default() += amount;
    }
}

/// The amount as a quantity, in the notation of the capacity that it was taken from.
fn print(nano: i128, capacity: &Value) -> String {
    const NANO: i128 = 1_000_000_000;
    let binary = text(capacity, "value").is_some_and(|value| value.ends_with('i'));
    let number = nano / NANO;
    if binary && nano % NANO == 0 && number % 1024 == 0 {
        let kibi = Quantity::parse(&format!("{}Ki", number / 1024));
        return kibi.map_or_else(|_| number.to_string(), |quantity| quantity.canonical());
    }
    let exact = if nano % NANO == 0 { number.to_string() } else { format!("{nano}n") };
    Quantity::parse(&exact).map_or(exact, |quantity| quantity.canonical())
}

/// A new share's id, a UUID.
fn share_id() -> String {
    super::store::random_uid(0)
}
