//! A plain HTTP client: what is sent is what the corpus says, without a library's ideas of Kubernetes.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as Hyper, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use serde_json::Value;

/// Long enough for any answer, a watch of a few seconds included.
const PATIENCE: Duration = Duration::from_mins(1);

/// A client of one server.
#[derive(Clone)]
pub struct Client {
    url: String,
    hyper: Hyper<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("url", &self.url).finish_non_exhaustive()
    }
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Status code; 0 if the server hung up without an answer, as Go's does when a handler panics.
    pub code: u16,
    /// `Content-Type`, without parameters of text encoding.
    pub kind: String,
    /// The body.
    pub body: Bytes,
}

impl Reply {
    /// The body as JSON; `null` if it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

impl Client {
    /// A client that trusts the authorities in `ca`, PEM.
    ///
    /// # Errors
    /// No certificate can be read from it.
    pub fn new(url: &str, ca: &str) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca.as_bytes()) {
            roots.add(certificate.context("the authority's certificate cannot be read")?)?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().build();
        Ok(Self { url: url.to_owned(), hyper: Hyper::builder(TokioExecutor::new()).build(connector) })
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// No answer, or none in time.
    pub async fn send(&self, method: &Method, path: &str, headers: &HeaderMap, body: Vec<u8>) -> anyhow::Result<Reply> {
        let work = async {
            let response = match self.open(method, path, headers, body).await {
                Err(error) if is_hang_up(&error) => {
                    return Ok(Reply { code: 0, kind: String::new(), body: Bytes::new() });
                }
                outcome => outcome?,
            };
            let code = response.status().as_u16();
            let kind = response.headers().get(http::header::CONTENT_TYPE);
            let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
            let kind = kind.strip_suffix("; charset=utf-8").unwrap_or(kind).to_owned();
            let body = response.into_body().collect().await.context("the answer broke off")?.to_bytes();
            Ok(Reply { code, kind, body })
        };
        let outcome = tokio::time::timeout(PATIENCE, work).await;
        outcome
            .unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {PATIENCE:?}")))
            .with_context(|| format!("{method} {path}"))
    }

    async fn open(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        body: Vec<u8>,
    ) -> anyhow::Result<http::Response<hyper::body::Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(all) = request.headers_mut() {
            *all = headers.clone();
        }
        let request = request.body(Full::new(Bytes::from(body))).context("this is no request")?;
        self.hyper.request(request).await.context("the server cannot be reached")
    }
}

fn is_hang_up(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message)
            || cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::UnexpectedEof)
    })
}
