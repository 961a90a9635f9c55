//! What a case works with: a node with its control plane, the driver on it, and short ways to make claims and pods, to
//! wait for what becomes of them, and to see that nothing is left.

use std::{
    cell::{Cell, RefCell},
    fs,
    path::Path,
    process::Output,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use dcmi::world::{Vnpu, World};
use serde_json::{Value, json};

use crate::{
    api::{Api, path_of},
    driver::{self, Driver, SLICES},
    image,
    plane::{NODE, Plane, WORLD},
    programs::repository,
    setting::{Kubernetes, Setting},
};

/// Namespaces in which cases work; whatever stands there after a case is removed.
const NAMESPACES: [&str; 2] = ["default", "ascend-dra"];
/// The class that claims name.
pub(crate) const CLASS: &str = "npu.huawei.com";

/// The stage of the cases of one setting.
#[derive(Debug)]
pub(crate) struct Stage {
    plane: Plane,
    setting: Setting,
    driver: RefCell<Option<Driver>>,
    notes: RefCell<Vec<String>>,
    /// Where the journal stood when the case began.
    cursor: RefCell<String>,
    numbers: Cell<u32>,
}

/// What a program said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Said {
    /// Its exit code.
    pub(crate) code: i32,
    /// Standard output and standard error, trimmed.
    pub(crate) text: String,
}

impl Stage {
    /// Sets a node up for the cases: namespace, classes and policy as the documentation says. No driver runs yet.
    ///
    /// # Errors
    /// Something does not come up.
    pub(crate) fn set(plane: Plane, setting: &Setting) -> anyhow::Result<Self> {
        let stage = Self {
            plane,
            setting: *setting,
            driver: RefCell::new(None),
            notes: RefCell::default(),
            cursor: RefCell::default(),
            numbers: Cell::new(0),
        };
        stage.plane.run(&["systemd-sysusers"])?;
        stage.plane.run(&["systemd-tmpfiles", "--create"])?;
        stage.api().create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ascend-dra"}}))?;
        stage.install_manifests()?;
        Ok(stage)
    }

    /// Applies the shipped classes, and the policy where this release can have it.
    ///
    /// # Errors
    /// The server refuses them, or the policy does not act.
    pub(crate) fn install_manifests(&self) -> anyhow::Result<()> {
        let mut text = shipped("deviceclass.yaml")? + "\n---\n" + &shipped("deviceclass-templates.yaml")?;
        if let Some(policy) = self.kubernetes().policy {
            text += &("\n---\n".to_owned() + &shipped(policy)?);
        }
        self.plane.apply(&text)?;
        wait("a service account in ascend-dra", || {
            self.api().find("/api/v1/namespaces/ascend-dra/serviceaccounts/default")
        })?;
        if self.kubernetes().policy.is_some() {
            // It acts two or three seconds after it was created.
            let bare = claim_template("bare", &[request("npu").memory(10_000)]);
            let capacity = "/spec/spec/devices/requests/0/exactly/capacity/requests/memCapacity";
            wait("the policy to act", || {
                let stored = self.api().try_out(&bare)?;
                Ok((stored.pointer(capacity) == Some(&json!("10000Mi"))).then_some(()))
            })?;
        }
        Ok(())
    }

    /// The node and its control plane.
    pub(crate) fn plane(&self) -> &Plane {
        &self.plane
    }

    /// Gives the node up, for one that stays.
    pub(crate) fn into_plane(self) -> Plane {
        self.plane
    }

    /// The API server, as an administrator.
    pub(crate) fn api(&self) -> &Api {
        self.plane.api()
    }

    /// The setting.
    pub(crate) fn setting(&self) -> &Setting {
        &self.setting
    }

    /// The release and gates that run now.
    pub(crate) fn kubernetes(&self) -> Kubernetes {
        self.plane.kubernetes()
    }

    /// Something worth a reader's while, printed behind the case's name.
    pub(crate) fn note(&self, text: impl Into<String>) {
        self.notes.borrow_mut().push(text.into());
    }

    // --- the driver

    /// Makes the driver run with these cards and settings. Costs nothing if it already does; else the node must be
    /// empty, and everything of before is forgotten.
    ///
    /// # Errors
    /// Something is left on the node, or the driver does not come up.
    pub(crate) fn with(&self, driver: &Driver) -> anyhow::Result<()> {
        if self.driver.borrow().as_ref() == Some(driver)
            && self.plane.run(&["systemctl", "is-active", "npu-dra"]).is_ok()
        {
            return Ok(());
        }
        self.wait_empty()?;
        *self.driver.borrow_mut() = None;
        driver.start_afresh(&self.plane)?;
        *self.driver.borrow_mut() = Some(driver.clone());
        Ok(())
    }

    /// Lets the next case start with a fresh driver: for cases that change the world of cards.
    pub(crate) fn spoil(&self) {
        *self.driver.borrow_mut() = None;
    }

    /// Waits until the driver is registered and its pool is complete, for instance after it was restarted.
    ///
    /// # Errors
    /// It is not in time.
    pub(crate) fn wait_published(&self) -> anyhow::Result<()> {
        let driver = self.driver.borrow().clone().context("no driver was started: begin the case with Stage::with")?;
        driver.wait_published(&self.plane)
    }

    /// The driver's slices.
    pub(crate) fn slices(&self) -> anyhow::Result<Vec<Value>> {
        self.api().list(SLICES)
    }

    /// The devices of all slices of the driver, in published order.
    pub(crate) fn devices(&self) -> anyhow::Result<Vec<Value>> {
        let mut slices = self.slices()?;
        slices.sort_by_key(|slice| slice["metadata"]["name"].as_str().map(str::to_owned));
        Ok(slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten().cloned().collect())
    }

    /// The items that `npuctl WORDS -o json` shows.
    ///
    /// # Errors
    /// It fails.
    pub(crate) fn npuctl(&self, words: &[&str]) -> anyhow::Result<Vec<Value>> {
        driver::npuctl(&self.plane, words)
    }

    /// What `npuctl status` shows.
    ///
    /// # Errors
    /// The driver does not answer.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        driver::status(&self.plane)
    }

    /// Looks at or changes the world of cards, within the node. A case that leaves it changed calls [`Stage::spoil`].
    ///
    /// # Errors
    /// That of the call.
    pub(crate) fn world<T: Send>(&self, call: impl FnOnce(&World) -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        self.plane.inside(|| call(&World::open(WORLD).context("no driver was started")?))
    }

    /// The vNPUs that there are, by id.
    ///
    /// # Errors
    /// No driver was started.
    pub(crate) fn vnpus(&self) -> anyhow::Result<Vec<Vnpu>> {
        self.world(|world| Ok(world.vnpus()?))
    }

    /// The records of claims: file name and content, by name.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn records(&self) -> anyhow::Result<Vec<(String, Value)>> {
        json_files(&self.plane.file("/var/lib/npu-dra/claims"))
    }

    /// The CDI files: file name and content, by name.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn cdi(&self) -> anyhow::Result<Vec<(String, Value)>> {
        json_files(&self.plane.file("/etc/cdi"))
    }

    /// Waits until the node holds nothing of any claim: no record, no CDI file, no vNPU; and until the claims of templates
    /// whose pods are gone are gone as well, so that the scheduler has their devices again.
    ///
    /// # Errors
    /// Something is left.
    pub(crate) fn wait_empty(&self) -> anyhow::Result<()> {
        if self.driver.borrow().is_none() {
            return Ok(());
        }
        wait("the node to hold nothing of any claim", || {
            let names = |files: Vec<(String, Value)>| files.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
            let (records, cdi) = (names(self.records()?), names(self.cdi()?));
            let vnpus: Vec<_> = self.vnpus()?.iter().map(|vnpu| vnpu.id).collect();
            let empty = records.is_empty() && cdi.is_empty() && vnpus.is_empty();
            ensure!(empty, "records {records:?}, CDI files {cdi:?}, vNPUs {vnpus:?}");
            // Without a server nobody deletes claims.
            let orphans = self.orphans().unwrap_or_default();
            ensure!(orphans.is_empty(), "claims of pods that are gone: {}", orphans.join(", "));
            Ok(Some(()))
        })
    }

    /// The claims that have an owner which is gone: the controller manager deletes them.
    fn orphans(&self) -> anyhow::Result<Vec<String>> {
        let mut orphans = Vec::new();
        for namespace in NAMESPACES {
            let claims = self.api().list(&format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"))?;
            let pods = self.api().list(&format!("/api/v1/namespaces/{namespace}/pods"))?;
            let uids: Vec<_> = pods.iter().map(|pod| &pod["metadata"]["uid"]).collect();
            let gone = |claim: &&Value| {
                let owner = &claim["metadata"]["ownerReferences"][0]["uid"];
                !owner.is_null() && !uids.contains(&owner)
            };
            orphans.extend(claims.iter().filter(gone).map(|claim| name(claim).to_owned()));
        }
        Ok(orphans)
    }

    // --- objects

    /// Creates objects in this order.
    ///
    /// # Errors
    /// The server refuses one.
    pub(crate) fn create(&self, objects: &[&Value]) -> anyhow::Result<()> {
        objects.iter().try_for_each(|object| self.api().create(object).map(drop))
    }

    /// Deletes objects in this order, pods without grace, and waits until they are gone. What is not there is gone.
    ///
    /// # Errors
    /// One is still there in the end.
    pub(crate) fn delete(&self, objects: &[&Value]) -> anyhow::Result<()> {
        for object in objects {
            self.api().delete_gently(&path_of(object)?)?;
        }
        objects.iter().try_for_each(|object| self.wait_gone(object))
    }

    /// Waits until an object is gone.
    ///
    /// # Errors
    /// It is still there; the text has its state.
    pub(crate) fn wait_gone(&self, object: &Value) -> anyhow::Result<()> {
        let path = path_of(object)?;
        wait(&format!("{path} to be gone"), || match self.api().find(&path)? {
            None => Ok(Some(())),
            Some(left) => bail!("{}", left["status"]),
        })
    }

    /// Waits until kubelet has nothing of a deleted pod any more.
    ///
    /// # Errors
    /// It does not come to that.
    pub(crate) fn wait_forgotten(&self, pod: &Value) -> anyhow::Result<()> {
        let uid = pod["metadata"]["uid"].as_str().context("the pod has no UID")?;
        let files = self.plane.file(&format!("/var/lib/kubelet/pods/{uid}"));
        wait(&format!("kubelet to forget pod {}", name(pod)), || Ok((!files.try_exists()?).then_some(())))
    }

    /// An object as it is now.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn get(&self, object: &Value) -> anyhow::Result<Value> {
        self.api().get(&path_of(object)?)
    }

    /// Waits until a pod runs and all its containers are ready; the pod.
    ///
    /// # Errors
    /// It does not; the text has its state and events.
    pub(crate) fn wait_running(&self, pod: &Value) -> anyhow::Result<Value> {
        self.wait_started(pod, None)
    }

    /// The same for a pod whose containers have been restarted so often.
    ///
    /// # Errors
    /// As [`Stage::wait_running`].
    pub(crate) fn wait_restarted(&self, pod: &Value, restarts: u32) -> anyhow::Result<Value> {
        self.wait_started(pod, Some(restarts))
    }

    fn wait_started(&self, pod: &Value, restarts: Option<u32>) -> anyhow::Result<Value> {
        let outcome = wait(&format!("pod {} to run", name(pod)), || {
            let pod = self.get(pod)?;
            let ready = pod["status"]["containerStatuses"].as_array().is_some_and(|all| {
                all.iter().all(|one| one["ready"] == true && restarts.is_none_or(|times| one["restartCount"] == times))
            });
            if pod["status"]["phase"] == "Failed" {
                // It never will.
                return Ok(Some(Err(anyhow!("pod {} failed: {}", name(&pod), pod["status"]))));
            }
            ensure!(pod["status"]["phase"] == "Running" && ready, "{}", pod["status"]);
            Ok(Some(Ok(pod)))
        });
        outcome.and_then(|inner| inner).map_err(|error| anyhow!("{error:#}\n{}", self.events(pod)))
    }

    /// Waits until the scheduler says that it has no place for a pod; its message.
    ///
    /// # Errors
    /// It says no such thing; the text has the pod's state.
    pub(crate) fn wait_unschedulable(&self, pod: &Value) -> anyhow::Result<String> {
        wait(&format!("pod {} to find no place", name(pod)), || {
            let pod = self.get(pod)?;
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let refused = conditions.iter().find(|one| one["type"] == "PodScheduled" && one["status"] == "False");
            match refused.and_then(|one| one["message"].as_str()) {
                Some(message) => Ok(Some(message.to_owned())),
                None => bail!("{}", pod["status"]),
            }
        })
    }

    /// Waits until an event of a pod has this text; the event's message.
    ///
    /// # Errors
    /// None does; the text has the events.
    pub(crate) fn wait_event(&self, pod: &Value, text: &str) -> anyhow::Result<String> {
        let outcome = wait(&format!("an event of pod {} with {text:?}", name(pod)), || {
            let events = self.events(pod);
            Ok(events.lines().find(|line| line.contains(text)).map(str::to_owned))
        });
        outcome.map_err(|error| anyhow!("{error:#}\n{}", self.events(pod)))
    }

    /// The events of an object, one a line: reason and message.
    pub(crate) fn events(&self, object: &Value) -> String {
        let own =
            object["metadata"]["uid"].as_str().map_or_else(String::new, |uid| format!(",involvedObject.uid%3D{uid}"));
        let path = format!(
            "/api/v1/namespaces/{}/events?fieldSelector=involvedObject.name%3D{}{own}",
            namespace(object),
            name(object)
        );
        let events = self.api().list(&path).unwrap_or_default();
        let line = |event: &Value| {
            format!(
                "{} {}\n",
                event["reason"].as_str().unwrap_or_default(),
                event["message"].as_str().unwrap_or_default()
            )
        };
        events.iter().map(line).collect()
    }

    /// The claim that a pod has under this name, as it is now.
    ///
    /// # Errors
    /// It has none yet.
    pub(crate) fn claim_of(&self, pod: &Value, entry: &str) -> anyhow::Result<Value> {
        let pod = self.get(pod)?;
        let entries = pod["spec"]["resourceClaims"].as_array().cloned().unwrap_or_default();
        let named = entries.iter().find(|one| one["name"] == entry).context("the pod has no such entry")?;
        let made = pod["status"]["resourceClaimStatuses"].as_array().cloned().unwrap_or_default();
        let made = made.iter().find(|one| one["name"] == entry);
        let claim = named["resourceClaimName"].as_str().or_else(|| made?["resourceClaimName"].as_str());
        let claim = claim.with_context(|| format!("pod {} has no claim for {entry} yet", name(&pod)))?;
        self.api().get(&format!("/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{claim}", namespace(&pod)))
    }

    // --- containers

    /// Runs a program in a container of a pod, as the container's own user and in its control groups.
    ///
    /// # Errors
    /// The container does not run.
    pub(crate) fn exec(&self, pod: &Value, container: &str, words: &[&str]) -> anyhow::Result<Said> {
        self.exec_until(pod, container, words, "")
    }

    /// The same for a program whose output ends with this text, which is not part of what it said: on a busy machine the
    /// shim may write what it read some time after the program's end.
    fn exec_until(&self, pod: &Value, container: &str, words: &[&str], end: &str) -> anyhow::Result<Said> {
        let pod = self.get(pod)?;
        let states = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
        let state = states.iter().find(|one| one["name"] == container).context("the pod has no such container yet")?;
        let id = state["containerID"].as_str().and_then(|id| id.strip_prefix("containerd://"));
        let id = id.with_context(|| format!("container {container} does not run: {state}"))?;
        let number = self.numbers.replace(self.numbers.get() + 1);
        // Written by the shim itself: what ctr copies from it gets lost now and then if the program ends at once.
        let log = format!("/var/lib/cluster/exec-{number}");
        let mut command = self.plane.machine().command("ctr");
        command.args(["-n", "k8s.io", "tasks", "exec", "--exec-id", &format!("case-{number}")]);
        command.args(["--log-uri", &format!("file://{log}"), id]).args(words);
        let output = command.output().context("cannot run ctr")?;
        let read = || String::from_utf8_lossy(&fs::read(self.plane.file(&log)).unwrap_or_default()).into_owned();
        let written = wait_for(Duration::from_secs(5), "the end of the output", || {
            Ok(read().trim_end().strip_suffix(end).map(str::to_owned))
        });
        let written = written.unwrap_or_else(|_| read());
        let _ = fs::remove_file(self.plane.file(&log));
        Ok(said(&output, &written))
    }

    /// Runs a shell script in container `main` of a pod.
    ///
    /// # Errors
    /// The container does not run.
    pub(crate) fn shell(&self, pod: &Value, script: &str) -> anyhow::Result<Said> {
        const END: &str = "-- end";
        let script = format!("(\n{script}\n) 2>&1; code=$?; echo; echo '{END}'; exit $code");
        self.exec_until(pod, "main", &["sh", "-c", &script], END)
    }

    // --- around a case

    /// Begins a case.
    ///
    /// # Errors
    /// The node does not answer any more.
    pub(crate) fn begin(&self) -> anyhow::Result<()> {
        self.notes.borrow_mut().clear();
        *self.cursor.borrow_mut() = self.plane.cursor()?;
        Ok(())
    }

    /// Ends a case: what it noted. A case that went well must have left nothing; whatever is left is removed.
    ///
    /// # Errors
    /// That of the case, with the logs that tell why; or what the case left.
    pub(crate) fn end(&self, outcome: anyhow::Result<()>) -> anyhow::Result<String> {
        let outcome = outcome.map_err(|error| anyhow!("{error:#}\n{}", self.evidence()));
        if outcome.is_err() {
            // It may have stopped some of them.
            let units = ["kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet", "npu-dra"];
            let start: Vec<_> = ["systemctl", "start"].into_iter().chain(units).collect();
            let _ = self.plane.run(&start).and_then(|_| self.plane.wait_for_server());
        }
        let left = self.sweep();
        if outcome.is_err() || left.is_err() {
            self.spoil();
        }
        match (outcome, left) {
            (Err(error), _) | (Ok(()), Err(error)) => Err(error),
            (Ok(()), Ok(left)) if !left.is_empty() => bail!("the case left {}", left.join(", ")),
            (Ok(()), Ok(_)) => Ok(self.notes.borrow().join("; ")),
        }
    }

    /// Removes all pods, claims and templates of the cases' namespaces, and waits until the node is empty; what there
    /// was to remove.
    fn sweep(&self) -> anyhow::Result<Vec<String>> {
        let mut left = Vec::new();
        for (group, plural) in [
            ("api/v1", "pods"),
            ("apis/resource.k8s.io/v1", "resourceclaims"),
            ("apis/resource.k8s.io/v1", "resourceclaimtemplates"),
        ] {
            for namespace in NAMESPACES {
                let path = format!("/{group}/namespaces/{namespace}/{plural}");
                for object in self.api().list(&path)? {
                    // What is on its way out is not left, and a claim of a template goes some time after its pod.
                    let owned = object["metadata"]["ownerReferences"].is_array();
                    if !owned && object["metadata"]["deletionTimestamp"].is_null() {
                        left.push(format!("{plural} {namespace}/{}", name(&object)));
                    }
                    self.api().delete(&format!("{path}/{}", name(&object)))?;
                }
            }
        }
        let nodes = self.api().list("/api/v1/nodes")?;
        for other in nodes.iter().map(name).filter(|other| *other != NODE) {
            left.push(format!("node {other}"));
            self.api().delete(&format!("/api/v1/nodes/{other}"))?;
        }
        self.wait_empty()?;
        Ok(left)
    }

    /// What the logs say of a case that failed.
    fn evidence(&self) -> String {
        let cursor = self.cursor.borrow();
        let journal = |unit: &str, lines: usize, wanted: &dyn Fn(&str) -> bool| {
            let text = self.plane.journal(unit, &cursor).unwrap_or_else(|error| format!("{error:#}"));
            let mut last: Vec<String> = Vec::new();
            for line in text.lines().filter(|line| wanted(line)) {
                let line: String = line.chars().take(300).collect();
                // What is said again and again is shown once.
                if !last.contains(&line) {
                    last.push(line);
                }
            }
            last.split_off(last.len().saturating_sub(lines)).join("\n")
        };
        let words = ["laim", "CDI", "cdi", "lugin", "rror"];
        let others = self.plane.sh("systemctl --failed --no-legend --plain || true").unwrap_or_default();
        format!(
            "--- npu-dra\n{}\n--- kubelet\n{}\n--- failed units: {}",
            journal("npu-dra", 40, &|_| true),
            journal("kubelet", 15, &|line| words.iter().any(|word| line.contains(word))),
            if others.trim().is_empty() { "none" } else { others.trim() }
        )
    }
}

/// How long [`wait`] waits, in milliseconds.
static PATIENCE: AtomicU64 = AtomicU64::new(60_000);

/// Lets [`wait`] give up sooner, where what it waits for is not expected.
pub(crate) fn set_patience(time: Duration) {
    PATIENCE.store(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Asks `probe` again and again until it has an answer; every 20 ms, for a minute.
///
/// # Errors
/// It has none: the text has its last error.
pub(crate) fn wait<T>(what: &str, probe: impl FnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    wait_for(Duration::from_millis(PATIENCE.load(Ordering::Relaxed)), what, probe)
}

/// The same with a deadline of the case's own.
///
/// # Errors
/// It has none: the text has its last error.
pub(crate) fn wait_for<T>(
    time: Duration,
    what: &str,
    mut probe: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + time;
    loop {
        let last = match probe() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if Instant::now() > deadline {
            let text = format!("waited {time:.0?} for {what}");
            return Err(last.map_or_else(|| anyhow!("{text}"), |error| error.context(text.clone())));
        }
        thread::sleep(Duration::from_millis(20)); // waits: for the caller's condition
    }
}

fn said(ctr: &Output, written: &str) -> Said {
    let err = String::from_utf8_lossy(&ctr.stderr);
    // ctr adds warnings of its own, and what it could not do at all.
    let own = err.lines().filter(|line| !line.starts_with("time=\""));
    let text: Vec<_> = written.lines().chain(own).collect();
    Said { code: ctr.status.code().unwrap_or(-1), text: text.join("\n").trim().to_owned() }
}

fn json_files(dir: &Path) -> anyhow::Result<Vec<(String, Value)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry?.path();
        let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else { continue };
        match fs::read(&path) {
            Ok(bytes) => files.push((name, serde_json::from_slice(&bytes).unwrap_or(Value::Null))),
            // It went while we looked.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(files)
}

/// The text of a shipped manifest.
///
/// # Errors
/// There is none of this name.
pub(crate) fn shipped(name: &str) -> anyhow::Result<String> {
    let path = repository().join("packaging/manifests").join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// The name of an object.
pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// The namespace of an object.
pub(crate) fn namespace(object: &Value) -> &str {
    object["metadata"]["namespace"].as_str().unwrap_or("default")
}

/// A request of a claim.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    name: String,
    exactly: Value,
}

/// A request for one device of class `npu.huawei.com`.
pub(crate) fn request(name: &str) -> Request {
    Request { name: name.to_owned(), exactly: json!({"deviceClassName": CLASS}) }
}

impl Request {
    /// Of another class.
    pub(crate) fn class(mut self, class: &str) -> Self {
        self.exactly["deviceClassName"] = json!(class);
        self
    }

    /// For this much memory.
    pub(crate) fn memory(mut self, quantity: impl Into<Value>) -> Self {
        self.exactly["capacity"] = json!({"requests": {"memCapacity": quantity.into()}});
        self
    }

    /// For several devices.
    pub(crate) fn count(mut self, count: u32) -> Self {
        self.exactly["count"] = json!(count);
        self
    }

    /// For devices that this CEL expression selects.
    pub(crate) fn select(mut self, expression: &str) -> Self {
        self.exactly["selectors"] = json!([{"cel": {"expression": expression}}]);
        self
    }

    /// Anything else below `exactly`.
    pub(crate) fn set(mut self, key: &str, value: Value) -> Self {
        self.exactly[key] = value;
        self
    }

    fn into_value(self) -> Value {
        json!({"name": self.name, "exactly": self.exactly})
    }
}

fn devices(requests: &[Request]) -> Value {
    json!({"requests": requests.iter().cloned().map(Request::into_value).collect::<Vec<_>>()})
}

/// A claim in namespace `default`. More (constraints, `firstAvailable`) can be put into `["spec"]["devices"]`.
pub(crate) fn claim(name: &str, requests: &[Request]) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"}, "spec": {"devices": devices(requests)}})
}

/// A template in namespace `default`. More can be put into `["spec"]["spec"]["devices"]`.
pub(crate) fn claim_template(name: &str, requests: &[Request]) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"}, "spec": {"spec": {"devices": devices(requests)}}})
}

/// A pod in namespace `default` with one sleeping container `main` that has all `claims`: claims or templates, named in
/// the pod as they are.
pub(crate) fn pod(name: &str, claims: &[&Value]) -> Value {
    let entry = |claim: &&Value| {
        let own = self::name(claim);
        let key = if claim["kind"] == "ResourceClaim" { "resourceClaimName" } else { "resourceClaimTemplateName" };
        json!({"name": own, key: own})
    };
    let names: Vec<_> = claims.iter().map(|claim| json!({"name": self::name(claim)})).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "hostNetwork": true, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
            "enableServiceLinks": false, "restartPolicy": "Never",
            "resourceClaims": claims.iter().map(entry).collect::<Vec<_>>(),
            "containers": [container("main", json!({"resources": {"claims": names}}))],
        },
    })
}

/// A sleeping container, with more.
pub(crate) fn container(name: &str, more: Value) -> Value {
    let mut container = json!({"name": name, "image": image::CANN, "imagePullPolicy": "Never"});
    if let (Some(container), Value::Object(more)) = (container.as_object_mut(), more) {
        container.extend(more);
    }
    container
}
