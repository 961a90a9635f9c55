//! The prepare service: one implementation behind both versions.
//!
//! Every claim of a call is worked on in a task of its own, so that one claim never waits for another, a panic ends as
//! that claim's error, and the work goes on when kubelet drops the call.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use npu_proto::{dra_v1, dra_v1beta1};
use tokio::task::{JoinError, JoinHandle};
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use super::Claims;
use super::metrics::{Method, Metrics, Outcome};
use crate::domain::claim::{ClaimRef, ClaimUid, PreparedDevice};
use crate::domain::refusal::Refusal;

/// A claim as kubelet sent it, not yet checked.
#[derive(Debug, Clone)]
struct Asked {
    namespace: String,
    name: String,
    uid: String,
}

/// Serves `DRAPlugin`, v1 and v1beta1.
pub(super) struct Dra<C> {
    pub(super) claims: Arc<C>,
    pub(super) metrics: Metrics,
}

impl<C> Clone for Dra<C> {
    fn clone(&self) -> Self {
        Self { claims: Arc::clone(&self.claims), metrics: self.metrics.clone() }
    }
}

impl<C: Claims> Dra<C> {
    async fn prepare(&self, asked: Vec<Asked>) -> HashMap<String, Result<Vec<PreparedDevice>, String>> {
        // Taken before anything else: a later Unprepare must be seen as later.
        let received = self.claims.received();
        let claims = Arc::clone(&self.claims);
        self.each(Method::prepare, asked, move |claim| {
            let (claims, received) = (Arc::clone(&claims), received.clone());
            async move { claims.prepare(received, claim).await }
        })
        .await
    }

    async fn unprepare(&self, asked: Vec<Asked>) -> HashMap<String, Result<(), String>> {
        let received = self.claims.received();
        let claims = Arc::clone(&self.claims);
        self.each(Method::unprepare, asked, move |claim| {
            let (claims, received) = (Arc::clone(&claims), received.clone());
            async move { claims.unprepare(received, claim).await }
        })
        .await
    }

    /// Starts the work for every claim, then waits for all of it: one entry for each UID, whatever happens.
    async fn each<T, F>(
        &self,
        method: Method,
        asked: Vec<Asked>,
        work: impl Fn(ClaimRef) -> F,
    ) -> HashMap<String, Result<T, String>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Refusal>> + Send + 'static,
    {
        let start = Instant::now();
        if asked.is_empty() {
            self.metrics.answered(method, Outcome::empty, start.elapsed());
            return HashMap::new();
        }
        self.metrics.called();
        let mut running: HashMap<String, (ClaimRef, JoinHandle<Result<T, String>>)> = HashMap::new();
        let mut answers: HashMap<String, Result<T, String>> = HashMap::with_capacity(asked.len());
        for claim in asked {
            if running.contains_key(&claim.uid) || answers.contains_key(&claim.uid) {
                continue;
            }
            let span = tracing::info_span!(
                "claim",
                call = verb(method),
                claim.uid = %claim.uid,
                claim = %format_args!("{}/{}", claim.namespace, claim.name)
            );
            let uid = claim.uid.clone();
            match checked(claim) {
                Ok(claim) => {
                    let task = logged(method, work(claim.clone())).instrument(span);
                    running.insert(uid, (claim, tokio::spawn(task)));
                }
                Err(error) => {
                    span.in_scope(|| tracing::warn!(error = %error, "refused the claim"));
                    answers.insert(uid, Err(error));
                }
            }
        }
        for (uid, (claim, task)) in running {
            let answer = task.await.unwrap_or_else(|error| Err(self.lost(method, claim, error)));
            answers.insert(uid, answer);
        }
        for answer in answers.values() {
            self.metrics.claim(method, if answer.is_ok() { Outcome::ok } else { Outcome::refused });
        }
        let all = answers.values().all(Result::is_ok);
        self.metrics.answered(method, if all { Outcome::ok } else { Outcome::refused }, start.elapsed());
        answers
    }

    /// The words for a claim whose task did not come to an end of its own.
    fn lost(&self, method: Method, claim: ClaimRef, error: JoinError) -> String {
        let Ok(panic) = error.try_into_panic() else {
            return words(&Refusal::Stopping);
        };
        self.metrics.panicked();
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let what = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        tracing::error!(claim.uid = %claim.uid, claim = %claim, call = verb(method), panic = what, "a panic ended the work for a claim");
        words(&Refusal::Internal(claim, what.to_owned()))
    }
}

/// The work of one claim, with how long it took; what came of it is said by the engine.
async fn logged<T>(method: Method, work: impl Future<Output = Result<T, Refusal>>) -> Result<T, String> {
    let start = Instant::now();
    match work.await {
        Ok(done) => {
            tracing::debug!(took = ?start.elapsed(), "{}", past(method));
            Ok(done)
        }
        Err(refusal) => {
            let kind = refusal.kind().as_str();
            tracing::debug!(took = ?start.elapsed(), kind, error = %refusal, "refused the claim");
            Err(words(&refusal))
        }
    }
}

/// The refusal's text; an error must never be empty, which would mean success.
fn words(refusal: &Refusal) -> String {
    let text = refusal.to_string();
    if text.is_empty() { format!("refused ({})", refusal.kind().as_str()) } else { text }
}

fn verb(method: Method) -> &'static str {
    if method == Method::prepare { "prepare" } else { "unprepare" }
}

fn past(method: Method) -> &'static str {
    if method == Method::prepare { "prepared the claim" } else { "unprepared the claim" }
}

/// Nothing that kubelet sends goes on unchecked: the UID becomes a file name.
fn checked(asked: Asked) -> Result<ClaimRef, String> {
    let Asked { namespace, name, uid } = asked;
    if namespace.is_empty() || name.is_empty() {
        return Err(format!("claim with UID {uid:?} has no namespace or no name: kubelet's call is incomplete"));
    }
    let uid = ClaimUid::new(uid).map_err(|error| error.to_string())?;
    Ok(ClaimRef { namespace, name, uid })
}

#[tonic::async_trait]
impl<C: Claims> dra_v1::dra_plugin_server::DraPlugin for Dra<C> {
    async fn node_prepare_resources(
        &self,
        request: Request<dra_v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra_v1::NodePrepareResourcesResponse>, Status> {
        let asked = request.into_inner().claims.into_iter().map(Asked::from).collect();
        let answers = self.prepare(asked).await.into_iter();
        let claims = answers.map(|(uid, answer)| {
            let (devices, error) = parts(answer, dra_v1::Device::from);
            (uid, dra_v1::NodePrepareResourceResponse { devices, error })
        });
        Ok(Response::new(dra_v1::NodePrepareResourcesResponse { claims: claims.collect() }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<dra_v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra_v1::NodeUnprepareResourcesResponse>, Status> {
        let asked = request.into_inner().claims.into_iter().map(Asked::from).collect();
        let answers = self.unprepare(asked).await.into_iter();
        let claims = answers.map(|(uid, answer)| {
            let error = answer.err().unwrap_or_default();
            (uid, dra_v1::NodeUnprepareResourceResponse { error })
        });
        Ok(Response::new(dra_v1::NodeUnprepareResourcesResponse { claims: claims.collect() }))
    }
}

#[tonic::async_trait]
impl<C: Claims> dra_v1beta1::dra_plugin_server::DraPlugin for Dra<C> {
    async fn node_prepare_resources(
        &self,
        request: Request<dra_v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra_v1beta1::NodePrepareResourcesResponse>, Status> {
        let asked = request.into_inner().claims.into_iter().map(Asked::from).collect();
        let answers = self.prepare(asked).await.into_iter();
        let claims = answers.map(|(uid, answer)| {
            let (devices, error) = parts(answer, dra_v1beta1::Device::from);
            (uid, dra_v1beta1::NodePrepareResourceResponse { devices, error })
        });
        Ok(Response::new(dra_v1beta1::NodePrepareResourcesResponse { claims: claims.collect() }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<dra_v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra_v1beta1::NodeUnprepareResourcesResponse>, Status> {
        let asked = request.into_inner().claims.into_iter().map(Asked::from).collect();
        let answers = self.unprepare(asked).await.into_iter();
        let claims = answers.map(|(uid, answer)| {
            let error = answer.err().unwrap_or_default();
            (uid, dra_v1beta1::NodeUnprepareResourceResponse { error })
        });
        Ok(Response::new(dra_v1beta1::NodeUnprepareResourcesResponse { claims: claims.collect() }))
    }
}

/// An answer as the two fields of a response.
fn parts<D>(answer: Result<Vec<PreparedDevice>, String>, device: impl Fn(PreparedDevice) -> D) -> (Vec<D>, String) {
    match answer {
        Ok(devices) => (devices.into_iter().map(device).collect(), String::new()),
        Err(error) => (Vec::new(), error),
    }
}

impl From<dra_v1::Claim> for Asked {
    fn from(claim: dra_v1::Claim) -> Self {
        Self { namespace: claim.namespace, name: claim.name, uid: claim.uid }
    }
}

impl From<dra_v1beta1::Claim> for Asked {
    fn from(claim: dra_v1beta1::Claim) -> Self {
        Self { namespace: claim.namespace, name: claim.name, uid: claim.uid }
    }
}

impl From<PreparedDevice> for dra_v1::Device {
    fn from(device: PreparedDevice) -> Self {
        Self {
            request_names: device.request_names,
            pool_name: device.pool,
            device_name: device.device,
            cdi_device_ids: device.cdi_device_ids,
            share_id: device.share_id,
        }
    }
}

impl From<PreparedDevice> for dra_v1beta1::Device {
    /// v1beta1 knows no shares.
    fn from(device: PreparedDevice) -> Self {
        Self {
            request_names: device.request_names,
            pool_name: device.pool,
            device_name: device.device,
            cdi_device_ids: device.cdi_device_ids,
        }
    }
}
