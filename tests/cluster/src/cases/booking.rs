//! Nodes that only the scheduler knows: each has a copy of the slices that the driver published for the real node, with
//! the cards that the case wants. No kubelet takes pods there, so what the scheduler books is seen in claims within
//! milliseconds, and many nodes can be tried at a time.

use std::{cell::RefCell, collections::BTreeMap};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::{
    api::path_of,
    plane::NODE,
    stage::{self, Request, Stage, name, wait},
};

/// Nodes of one case, and the claims on them. Dropped, nodes and slices are gone.
#[derive(Debug)]
pub(crate) struct Booking<'a> {
    stage: &'a Stage,
    /// The slices of the real node.
    published: Vec<Value>,
    /// The scheduler's process: a scheduler that fell over has another, or none.
    scheduler: u32,
    /// Nodes and slices to be removed.
    made: RefCell<Vec<Value>>,
    asked: RefCell<Vec<Asked>>,
    /// Names of the claims that must still have nothing in the end.
    waiting: RefCell<Vec<String>>,
}

/// A claim with a pod that waits for it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    claim: Value,
    pod: Value,
}

/// One device of an allocation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    /// The request, with the alternative that was taken.
    pub(crate) request: String,
    /// The device's pool.
    pub(crate) pool: String,
    /// The device.
    pub(crate) device: String,
    /// `memCapacity` that it was booked with; empty for a device that is not shared.
    pub(crate) memory: String,
    /// Whether it is only looked at.
    pub(crate) admin: bool,
}

impl Share {
    /// The shares of an allocated claim, in the order of its results; none if it is not allocated.
    pub(crate) fn of(claim: &Value) -> Option<Vec<Self>> {
        let results = claim["status"]["allocation"]["devices"]["results"].as_array()?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let share = |result: &Value| Self {
            request: text(&result["request"]),
            pool: text(&result["pool"]),
            device: text(&result["device"]),
            memory: text(&result["consumedCapacity"]["memCapacity"]),
            admin: result["adminAccess"] == true,
        };
        Some(results.iter().map(share).collect())
    }
}

/// Devices and memory of shares, sorted: what they are when it does not matter which is whose.
pub(crate) fn booked(shares: &[Share]) -> Vec<(&str, &str)> {
    let mut all: Vec<_> = shares.iter().map(|share| (share.device.as_str(), share.memory.as_str())).collect();
    all.sort_unstable();
    all
}

impl<'a> Booking<'a> {
    /// Begins with what the driver has published.
    ///
    /// # Errors
    /// The API server or the scheduler does not answer.
    pub(crate) fn begin(stage: &'a Stage) -> anyhow::Result<Self> {
        let published = stage.slices()?.into_iter().filter(|slice| slice["spec"]["nodeName"] == NODE).collect();
        let scheduler = stage.plane().main_pid("kube-scheduler")?;
        Ok(Self {
            stage,
            published,
            scheduler,
            made: RefCell::default(),
            asked: RefCell::default(),
            waiting: RefCell::default(),
        })
    }

    /// A node with these cards of the real one, published as the driver publishes them.
    ///
    /// # Errors
    /// The server refuses a slice, or there is no such card.
    pub(crate) fn node(&self, node: &str, cards: &[&str]) -> anyhow::Result<()> {
        self.node_with(node, |device| {
            let parent = device["attributes"]["parent"]["string"].as_str().filter(|parent| !parent.is_empty());
            let card = parent.or(device["name"].as_str()).unwrap_or_default();
            device["attributes"]["type"]["string"] == "placeholder" || cards.contains(&card)
        })
    }

    /// A node with the devices for which `keep` says so.
    ///
    /// # Errors
    /// The server refuses a slice.
    pub(crate) fn node_with(&self, node: &str, keep: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        self.made.borrow_mut().push(json!({"kind": "Node", "metadata": {"name": node}}));
        self.stage.plane().add_node(node)?;
        for (number, slice) in self.published.iter().enumerate() {
            let mut spec = slice["spec"].clone();
            spec["nodeName"] = json!(node);
            spec["pool"]["name"] = json!(format!("{node}/npu"));
            if let Some(devices) = spec["devices"].as_array_mut() {
                devices.retain(&keep);
            }
            self.publish(&format!("{node}-{number}"), spec)?;
        }
        Ok(())
    }

    /// Publishes a slice of anybody's.
    ///
    /// # Errors
    /// The server refuses it.
    pub(crate) fn publish(&self, name: &str, spec: Value) -> anyhow::Result<()> {
        let mut slice =
            json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}});
        slice["spec"] = spec;
        self.stage.api().create(&slice)?;
        self.made.borrow_mut().push(slice);
        Ok(())
    }

    /// Creates any other object, which goes with the booking.
    ///
    /// # Errors
    /// The server refuses it.
    pub(crate) fn create(&self, object: &Value) -> anyhow::Result<()> {
        self.stage.api().create(object)?;
        self.made.borrow_mut().push(object.clone());
        Ok(())
    }

    /// A claim of these requests with a pod that may only go to this node.
    ///
    /// # Errors
    /// The server refuses one of them.
    pub(crate) fn ask(&self, node: &str, name: &str, requests: &[Request]) -> anyhow::Result<Asked> {
        self.ask_with(&[node], stage::claim(&format!("{node}-{name}"), requests))
    }

    /// Any claim with a pod that may only go to these nodes.
    ///
    /// # Errors
    /// The server refuses one of them.
    pub(crate) fn ask_with(&self, nodes: &[&str], claim: Value) -> anyhow::Result<Asked> {
        let mut pod = stage::pod(name(&claim), &[&claim]);
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        pod["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": nodes.iter().map(|node| {
                json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]})
            }).collect::<Vec<_>>(),
        }}});
        self.stage.create(&[&claim, &pod])?;
        let asked = Asked { claim, pod };
        self.asked.borrow_mut().push(asked.clone());
        Ok(asked)
    }

    /// Waits until a claim is allocated; its shares.
    ///
    /// # Errors
    /// It is not; the text has what the scheduler says.
    pub(crate) fn got(&self, asked: &Asked) -> anyhow::Result<Vec<Share>> {
        self.forget(asked);
        let outcome = wait(&format!("claim {} to be allocated", name(&asked.claim)), || {
            self.alive()?;
            let pod = self.stage.get(&asked.pod)?;
            let claim = self.stage.get(&asked.claim)?;
            match Share::of(&claim) {
                // The scheduler is done with it only then.
                Some(shares) if pod["spec"]["nodeName"].is_string() => Ok(Some(shares)),
                _ => bail!("{}", pod["status"]["conditions"]),
            }
        });
        outcome.map_err(|error| anyhow::anyhow!("{error:#}\n{}", self.stage.events(&asked.pod)))
    }

    /// The same for a claim of one device.
    ///
    /// # Errors
    /// It is not allocated, or has more devices than one.
    pub(crate) fn got_one(&self, asked: &Asked) -> anyhow::Result<Share> {
        let mut shares = self.got(asked)?;
        ensure!(shares.len() == 1, "claim {} has {shares:?}", name(&asked.claim));
        shares.pop().context("no share")
    }

    /// Waits until the scheduler has no place for a claim, because nothing can be allocated; its message. It must still
    /// have nothing when the booking ends, unless it is asked for again.
    ///
    /// # Errors
    /// It got something, or is refused for another reason.
    pub(crate) fn refused(&self, asked: &Asked) -> anyhow::Result<String> {
        let said = self.stage.wait_unschedulable(&asked.pod)?;
        self.alive()?;
        let claim = self.stage.get(&asked.claim)?;
        ensure!(Share::of(&claim).is_none(), "{} got {}", name(&asked.claim), claim["status"]["allocation"]);
        ensure!(said.contains("cannot allocate all claims"), "claim {}: {said}", name(&asked.claim));
        self.forget(asked);
        self.waiting.borrow_mut().push(name(&asked.claim).to_owned());
        Ok(said)
    }

    /// Waits until the scheduler has given up on a claim for an error; its message.
    ///
    /// # Errors
    /// It has not.
    pub(crate) fn stopped(&self, asked: &Asked) -> anyhow::Result<String> {
        self.alive()?;
        wait(&format!("claim {} to be in error", name(&asked.claim)), || {
            let pod = self.stage.get(&asked.pod)?;
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let stopped = conditions.iter().find(|one| one["reason"] == "SchedulerError");
            match stopped.and_then(|one| one["message"].as_str()) {
                Some(message) => Ok(Some(message.to_owned())),
                None => bail!("{}", pod["status"]),
            }
        })
    }

    fn forget(&self, asked: &Asked) {
        self.waiting.borrow_mut().retain(|waiting| waiting != name(&asked.claim));
    }

    /// A pod and its claim go.
    ///
    /// # Errors
    /// They do not.
    pub(crate) fn leave(&self, asked: &Asked) -> anyhow::Result<()> {
        self.forget(asked);
        self.asked.borrow_mut().retain(|other| other.claim != asked.claim);
        self.stage.delete(&[&asked.pod, &asked.claim])
    }

    /// The scheduler must be the one of the beginning: one that panicked is gone.
    fn alive(&self) -> anyhow::Result<()> {
        let now = self.stage.plane().main_pid("kube-scheduler")?;
        if now != self.scheduler {
            bail!(
                "kube-scheduler exited (its process was {}, is {now}):\n{}",
                self.scheduler,
                self.stage.plane().tail("kube-scheduler", 30)
            );
        }
        Ok(())
    }

    /// No device is booked beyond what it has, and no placeholder at all, over all claims of all nodes.
    fn sound(&self) -> anyhow::Result<()> {
        let claims = self.stage.api().list("/apis/resource.k8s.io/v1/resourceclaims")?;
        for claim in &claims {
            let shares = Share::of(claim).unwrap_or_default();
            let waits = self.waiting.borrow().iter().any(|waiting| waiting == name(claim));
            ensure!(shares.is_empty() || !waits, "{} was refused and got {shares:?} later", name(claim));
            let placeholder = shares.iter().find(|share| !share.admin && share.device.starts_with("placeholder"));
            ensure!(placeholder.is_none(), "{} got {placeholder:?}", name(claim));
        }
        let over = overbooked(&self.stage.slices()?, &claims)?;
        ensure!(over.is_empty(), "booked beyond what they have: {over:?}");
        Ok(())
    }

    /// Ends the booking: all of it is sound, the scheduler is the one of the beginning, and everything goes.
    ///
    /// # Errors
    /// One of these is not so.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        self.sound()?;
        self.alive()?;
        let asked = self.asked.take();
        let pods = asked.iter().map(|asked| &asked.pod);
        self.stage.delete(&pods.chain(asked.iter().map(|asked| &asked.claim)).collect::<Vec<_>>())
    }
}

impl Drop for Booking<'_> {
    fn drop(&mut self) {
        for object in self.made.take() {
            if let Ok(path) = path_of(&object) {
                let _ = self.stage.api().delete(&path);
            }
        }
    }
}

/// The devices, with their pools, of which claims take more than there is.
///
/// # Errors
/// A capacity is no quantity.
pub(crate) fn overbooked(slices: &[Value], claims: &[Value]) -> anyhow::Result<Vec<(String, String)>> {
    let mut room: BTreeMap<(String, String), (bool, u64)> = BTreeMap::new();
    for slice in slices {
        let pool = slice["spec"]["pool"]["name"].as_str().unwrap_or_default().to_owned();
        for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
            let memory = bytes(device["capacity"]["memCapacity"]["value"].as_str().unwrap_or("0"))?;
            let key = (pool.clone(), device["name"].as_str().unwrap_or_default().to_owned());
            room.insert(key, (device["allowMultipleAllocations"] == true, memory));
        }
    }
    let mut over = Vec::new();
    for share in claims.iter().filter_map(Share::of).flatten().filter(|share| !share.admin) {
        let key = (share.pool, share.device);
        let Some((divisible, left)) = room.get_mut(&key) else { continue };
        let takes = if *divisible { bytes(&share.memory)? } else { (*left).max(1) };
        match left.checked_sub(takes) {
            Some(after) => *left = after,
            None => over.push(key),
        }
    }
    Ok(over)
}

/// Bytes of a quantity in whole Ki, Mi, Gi, Ti or Pi, or without unit.
pub(crate) fn bytes(quantity: &str) -> anyhow::Result<u64> {
    let digits = quantity.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let power = match &quantity[digits.len()..] {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        "Ti" => 40,
        "Pi" => 50,
        other => bail!("{quantity:?} has the unit {other:?}"),
    };
    let number: u64 = digits.parse().with_context(|| format!("{quantity:?} is no quantity"))?;
    number.checked_mul(1 << power).with_context(|| format!("{quantity:?} is too much"))
}
