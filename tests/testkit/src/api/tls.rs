//! Certificates: two authorities (the right one and a stranger), server and client certificates, and the TLS set-up.
//!
//! As in a real API server a client certificate is asked for but judged only after the handshake: a bad one is a 401.

use std::sync::Arc;

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use rustls::{
    DigitallySignedStruct, DistinguishedName as Subject, Error, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime},
    server::{
        NoServerSessionStorage,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

/// A certificate with its key.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) der: Vec<u8>,
    pub(crate) cert_pem: String,
    pub(crate) key_pem: String,
    key_der: Vec<u8>,
}

/// A certificate authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    pub(crate) fn new(name: &str) -> anyhow::Result<Self> {
        let key = KeyPair::generate().context("cannot make a key")?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// A server certificate for 127.0.0.1 and localhost.
    pub(crate) fn server(&self, expired: bool) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params, expired)
    }

    /// A client certificate: user and groups.
    pub(crate) fn client(&self, user: &str, groups: &[String], expired: bool) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = groups.first() {
            params.distinguished_name.push(DnType::OrganizationName, group.as_str());
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params, expired)
    }

    fn sign(&self, mut params: CertificateParams, expired: bool) -> anyhow::Result<Pair> {
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = if expired { date_time_ymd(2021, 1, 1) } else { date_time_ymd(2120, 1, 1) };
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Pair {
            der: cert.der().to_vec(),
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
            key_der: key.serialize_der(),
        })
    }
}

/// The TLS settings of a server with this certificate.
pub(crate) fn server_config(pair: &Pair) -> anyhow::Result<Arc<ServerConfig>> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(AnyClient(Arc::clone(&provider)));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            vec![CertificateDer::from(pair.der.clone())],
            PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.key_der.clone())),
        )?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Takes any client certificate whose key the client holds; who it is, is decided later.
#[derive(Debug)]
struct AnyClient(Arc<CryptoProvider>);

impl ClientCertVerifier for AnyClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[Subject] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
