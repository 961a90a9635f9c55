//! The first things that anybody tries.

use anyhow::{Context as _, ensure};
use serde_json::json;

use super::Case;
use crate::{
    api::path_of,
    driver::Driver,
    stage::{Stage, claim_template, pod, request, shipped},
};

pub(crate) const CASES: &[Case] = &[("registration", registration), ("whole-npu", whole_npu), ("sample", sample)];

/// The requirements' claim template, to the letter.
const SAMPLE: &str = "\
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: npu-claim-template, namespace: ascend-dra}
spec:
  spec:
    devices:
      requests:
        - name: npu
          exactly:
            deviceClassName: npu.huawei.com
            capacity: {requests: {memCapacity: 10000}}
";

/// Kubelet has the driver, and the scheduler has its cards.
fn registration(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let status = stage.status()?;
    ensure!(status["kubelet"]["registered"] == true, "{status}");
    let devices = stage.devices()?;
    let card = devices.iter().find(|device| device["name"] == "npu-0").context("there is no npu-0")?;
    let attributes = &card["attributes"];
    ensure!(attributes["chipName"]["string"] == "910B4", "{card}");
    let is_number = |name: &str| attributes[name]["int"].is_i64();
    ensure!(is_number("numaNode") && attributes["physicalId"]["int"] == 0, "{card}");
    ensure!(attributes["topologyGroup"]["string"].as_str().is_some_and(|group| group.starts_with("ring-")), "{card}");
    ensure!(card["capacity"]["memCapacity"]["value"] == "32Gi", "{card}");
    let metrics = stage.api().get("/api/v1/nodes/node1/proxy/metrics")?;
    ensure!(metrics.as_str().is_some_and(|text| text.contains("dra_")), "kubelet has no metrics of DRA");
    stage.note(format!("{} devices", devices.len()));
    Ok(())
}

/// A pod with a whole NPU sees its device nodes.
fn whole_npu(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("whole", &[request("npu")]);
    let pod = pod("whole-npu", &[&template]);
    stage.create(&[&template, &pod])?;
    stage.wait_running(&pod)?;
    let claim = stage.claim_of(&pod, "whole")?;
    let device = claim["status"]["allocation"]["devices"]["results"][0]["device"].as_str().context("no device")?;
    let number = device.strip_prefix("npu-").context("an odd name")?;
    let nodes = stage.shell(&pod, "cd /dev && ls -d davinci* devmm_svm hisi_hdc vdavinci* 2>/dev/null")?.text;
    let wanted = format!("davinci{number}\ndavinci_manager\ndevmm_svm\nhisi_hdc");
    ensure!(nodes == wanted, "the container has {nodes:?}");
    stage.delete(&[&pod, &template])?;
    stage.wait_empty()
}

/// The claim that the requirements show gets what they say, with the shipped sample's pod.
fn sample(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    stage.plane().apply(SAMPLE)?;
    // It has the same template once more, and a pod that uses it: nothing in it is made for this test.
    stage.plane().apply(&shipped("sample-memory.yaml")?)?;
    let named = |kind: &str, version: &str, name: &str| json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "ascend-dra"}});
    let template = named("ResourceClaimTemplate", "resource.k8s.io/v1", "npu-claim-template");
    let pod = named("Pod", "v1", "npu-slice");
    stage.wait_running(&pod)?;
    let claim = stage.claim_of(&pod, "npu")?;
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    ensure!(result["consumedCapacity"]["memCapacity"] == "16Gi", "{result}");
    let vnpus = stage.vnpus()?;
    let made: Vec<_> = vnpus.iter().map(|vnpu| (vnpu.id, vnpu.template.as_str())).collect();
    ensure!(matches!(made[..], [(_, "vir10_3c_16g")]), "there are vNPUs {made:?}");
    let nodes = stage.shell(&pod, "cd /dev && ls -d davinci[0-9]*")?.text;
    ensure!(nodes == format!("davinci{}", made[0].0), "the container has {nodes:?}");
    // Its first process ends for nothing but SIGKILL, and it has half a minute to do so.
    stage.api().delete(&path_of(&pod)?)?;
    stage.delete(&[&pod, &template])?;
    stage.wait_empty()
}
