//! A cluster's certificates, as kubeadm would make them: an authority, the API server's, users'.

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// A certificate with its key.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The certificate, as PEM.
    pub cert_pem: String,
    /// Its key, as PEM.
    pub key_pem: String,
    pub(crate) der: Vec<u8>,
    pub(crate) key_der: Vec<u8>,
}

/// The years in which a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Valid {
    /// These and many to come.
    Now,
    /// Past ones.
    Once,
}

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate, as PEM.
    pub pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// A new one with this name.
    ///
    /// # Errors
    /// No key can be made.
    pub fn new(common: &str) -> anyhow::Result<Self> {
        let key = KeyPair::generate().context("cannot make a key")?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = name(common, None);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2120, 1, 1));
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// An API server's certificate for these names and addresses.
    ///
    /// # Errors
    /// One of them is neither.
    pub fn server(&self, names: &[&str], valid: Valid) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
        params.distinguished_name = name("kube-apiserver", None);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(params, valid)
    }

    /// A client's certificate: user and group.
    ///
    /// # Errors
    /// No key can be made.
    pub fn client(&self, user: &str, group: Option<&str>, valid: Valid) -> anyhow::Result<Pair> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = name(user, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params, valid)
    }

    fn sign(&self, mut params: CertificateParams, valid: Valid) -> anyhow::Result<Pair> {
        let end = if valid == Valid::Now { 2120 } else { 2021 };
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(end, 1, 1));
        let key = KeyPair::generate().context("cannot make a key")?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Pair {
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
            der: cert.der().to_vec(),
            key_der: key.serialize_der(),
        })
    }
}

/// The key by which service account tokens are signed: private and public, as PEM.
///
/// # Errors
/// No key can be made.
pub fn signing_key() -> anyhow::Result<(String, String)> {
    let key = KeyPair::generate().context("cannot make a key")?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

fn name(common: &str, organization: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name
}
