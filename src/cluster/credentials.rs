//! Where the credentials come from, what files they are made of, and when those change.
//!
//! Everything is read here, at once, into memory: the kubeconfig, and the certificate, key, authority and token files
//! that it names. A change of any of them (also of what a symbolic link points to) shows in the [`Fingerprint`].

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use kube::config::{AuthInfo, Config, Kubeconfig};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};

use super::error::chain;

/// A pod's own service account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InCluster {
    /// Host of the API server.
    pub host: String,
    /// Its port.
    pub port: String,
    /// Directory with `token` and `ca.crt`.
    pub dir: PathBuf,
}

impl InCluster {
    /// What Kubernetes tells a pod through its environment; `None` outside of a pod.
    #[must_use]
    pub fn from_environment() -> Option<Self> {
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok().filter(|host| !host.is_empty())?;
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok().filter(|port| !port.is_empty())?;
        Some(Self { host, port, dir: PathBuf::from("/var/run/secrets/kubernetes.io/serviceaccount") })
    }
}

/// The one source that is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A kubeconfig file.
    Kubeconfig(PathBuf),
    /// A pod's service account.
    InCluster(InCluster),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kubeconfig(path) => write!(f, "kubeconfig {}", path.display()),
            Self::InCluster(pod) => write!(f, "service account in {}", pod.dir.display()),
        }
    }
}

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialsError {
    /// A file cannot be read.
    #[error("{what} {} cannot be read: {source}", path.display())]
    Read {
        /// What the file is for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file holds nothing that can be used.
    #[error("{what} {} is not valid: {why}", path.display())]
    Content {
        /// What the file is for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// What an attempt to load credentials found.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// Every file that has a say, readable or not.
    pub(crate) files: Vec<PathBuf>,
    /// The configuration of a client.
    pub(crate) config: Result<Config, CredentialsError>,
    /// When the client certificate ends, and where it stands.
    pub(crate) certificate: Option<(Timestamp, PathBuf)>,
    /// Where the certificate authority stands, for texts.
    pub(crate) authority: String,
}

/// Identity and age of each file; equal fingerprints mean that nothing changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Fingerprint(Vec<(PathBuf, Option<[i64; 6]>)>);

impl Fingerprint {
    /// Of these files as they are now; links are followed.
    pub(crate) fn of(files: &[PathBuf]) -> Self {
        let look = |path: &PathBuf| {
            let seen = fs::metadata(path).ok().map(|m| {
                let int = |value: u64| i64::from_ne_bytes(value.to_ne_bytes());
                [int(m.dev()), int(m.ino()), int(m.size()), m.mtime(), m.mtime_nsec(), m.ctime_nsec() ^ m.ctime()]
            });
            (path.clone(), seen)
        };
        Self(files.iter().map(look).collect())
    }

    /// True if both are about the same files.
    pub(crate) fn same_files(&self, other: &Self) -> bool {
        self.0.iter().map(|(path, _)| path).eq(other.0.iter().map(|(path, _)| path))
    }

    /// The same files as they are now.
    pub(crate) fn again(&self) -> Self {
        let files: Vec<PathBuf> = self.0.iter().map(|(path, _)| path.clone()).collect();
        Self::of(&files)
    }
}

impl Source {
    /// The first that applies: an explicit kubeconfig, a pod's account, the fallback.
    pub(crate) fn choose(explicit: Option<&Path>, pod: Option<&InCluster>, fallback: &Path) -> Self {
        match (explicit, pod) {
            (Some(path), _) => Self::Kubeconfig(path.to_owned()),
            (None, Some(pod)) => Self::InCluster(pod.clone()),
            (None, None) => Self::Kubeconfig(fallback.to_owned()),
        }
    }

    /// Reads everything. Blocks on the disk.
    pub(crate) fn load(&self) -> Attempt {
        let mut attempt = Attempt {
            files: Vec::new(),
            config: Err(CredentialsError::Content { what: "credentials", path: PathBuf::new(), why: String::new() }),
            certificate: None,
            authority: String::new(),
        };
        let config = match self {
            Self::Kubeconfig(path) => kubeconfig(path, &mut attempt),
            Self::InCluster(pod) => in_cluster(pod, &mut attempt),
        };
        attempt.config = config.map(|mut config| {
            // Retries, time limits and proxies are decided by whoever asks.
            config.default_retry = false;
            config
        });
        attempt
    }
}

fn kubeconfig(path: &Path, attempt: &mut Attempt) -> Result<Config, CredentialsError> {
    const WHAT: &str = "kubeconfig";
    let invalid = |why: String| CredentialsError::Content { what: WHAT, path: path.to_owned(), why };
    attempt.files.push(path.to_owned());
    // The library's own error for an unreadable file quotes the path a second time.
    fs::File::open(path).map_err(|source| CredentialsError::Read { what: WHAT, path: path.to_owned(), source })?;
    let mut content = Kubeconfig::read_from(path).map_err(|error| invalid(one_line(&chain(&error))))?;

    let current = content.current_context.clone().ok_or_else(|| invalid("it has no current-context".to_owned()))?;
    let (cluster, user) = content
        .contexts
        .iter()
        .find(|named| named.name == current)
        .and_then(|named| named.context.as_ref())
        .map(|context| (context.cluster.clone(), context.user.clone().unwrap_or_default()))
        .ok_or_else(|| invalid(format!("it has no context {current:?}")))?;

    if let Some(cluster) = content.clusters.iter().find(|named| named.name == cluster).and_then(|c| c.cluster.as_ref())
    {
        if cluster.proxy_url.as_deref().is_some_and(|url| !url.is_empty()) {
            return Err(invalid("it sets proxy-url, which is not supported".to_owned()));
        }
        attempt.authority = format!("its own text ({})", path.display());
        if let (Some(file), None) = (&cluster.certificate_authority, &cluster.certificate_authority_data) {
            let file = PathBuf::from(file);
            attempt.files.push(file.clone());
            let pem = read("certificate authority", &file)?;
            certificates("certificate authority", &file, &pem)?;
            attempt.authority = file.display().to_string();
        } else if cluster.certificate_authority_data.is_none() {
            "the system's authorities".clone_into(&mut attempt.authority);
        }
    }

    if let Some(auth) =
        content.auth_infos.iter_mut().find(|named| named.name == user).and_then(|named| named.auth_info.as_mut())
    {
        user_files(path, auth, attempt)?;
    }

    Config::try_from(content).map_err(|error| invalid(one_line(&chain(&error))))
}

/// Notes and reads the files of a kubeconfig's user.
fn user_files(path: &Path, auth: &mut AuthInfo, attempt: &mut Attempt) -> Result<(), CredentialsError> {
    if let (Some(file), None) = (&auth.client_key, &auth.client_key_data) {
        let file = PathBuf::from(file);
        attempt.files.push(file.clone());
        read("client key", &file)?;
    }
    match (&auth.client_certificate, &auth.client_certificate_data) {
        (_, Some(data)) => {
            // The text is base64 of PEM; wrapped as PEM itself, the one parser at hand decodes it.
            let wrapped = format!("-----BEGIN CERTIFICATE-----\n{data}\n-----END CERTIFICATE-----\n");
            let ends = CertificateDer::from_pem_slice(wrapped.as_bytes())
                .ok()
                .and_then(|inner| CertificateDer::from_pem_slice(&inner).ok())
                .and_then(|leaf| not_after(&leaf));
            attempt.certificate = ends.map(|at| (at, path.to_owned()));
        }
        (Some(file), None) => {
            let file = PathBuf::from(file);
            attempt.files.push(file.clone());
            let pem = read("client certificate", &file)?;
            let chain = certificates("client certificate", &file, &pem)?;
            attempt.certificate = chain.first().and_then(|leaf| not_after(leaf)).map(|at| (at, file));
        }
        (None, None) => {}
    }
    if let Some(file) = auth.token_file.clone() {
        let file = PathBuf::from(file);
        attempt.files.push(file.clone());
        auth.token = Some(token(&file)?.into());
        auth.token_file = None;
    }
    Ok(())
}

fn in_cluster(pod: &InCluster, attempt: &mut Attempt) -> Result<Config, CredentialsError> {
    let authority = pod.dir.join("ca.crt");
    let token_file = pod.dir.join("token");
    attempt.authority = authority.display().to_string();
    attempt.files = vec![authority.clone(), token_file.clone()];
    let host = if pod.host.contains(':') { format!("[{}]", pod.host) } else { pod.host.clone() };
    let url = format!("https://{host}:{}", pod.port).parse().map_err(|error| CredentialsError::Content {
        what: "address of the API server in the environment, with service account",
        path: pod.dir.clone(),
        why: format!("{error}"),
    })?;
    let pem = read("certificate authority", &authority)?;
    let roots = certificates("certificate authority", &authority, &pem)?;
    let mut config = Config::new(url);
    config.root_cert = Some(roots.into_iter().map(|der| der.to_vec()).collect());
    config.auth_info = AuthInfo { token: Some(token(&token_file)?.into()), ..AuthInfo::default() };
    Ok(config)
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, CredentialsError> {
    fs::read(path).map_err(|source| CredentialsError::Read { what, path: path.to_owned(), source })
}

/// A token file's content without the newline that editors and shells put there: it would make an invalid header.
fn token(path: &Path) -> Result<String, CredentialsError> {
    const WHAT: &str = "token file";
    let invalid = |why: &str| CredentialsError::Content { what: WHAT, path: path.to_owned(), why: why.to_owned() };
    let text = String::from_utf8(read(WHAT, path)?).map_err(|_| invalid("it is not text"))?;
    let text = text.trim();
    match text {
        "" => Err(invalid("it is empty")),
        _ if text.chars().any(|c| c.is_whitespace() || c.is_control()) => Err(invalid("there is a space in the token")),
        _ => Ok(text.to_owned()),
    }
}

fn certificates(what: &'static str, path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let invalid = |why: String| CredentialsError::Content { what, path: path.to_owned(), why };
    let list = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| invalid(format!("{error}")))?;
    if list.is_empty() { Err(invalid("it holds no certificate".to_owned())) } else { Ok(list) }
}

/// Parser errors draw the text over several lines; a status has one.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}

/// End of a certificate's validity.
///
/// Walks the few DER elements before it: certificate, to-be-signed part, version, serial number, signature algorithm,
/// issuer, validity.
fn not_after(certificate: &[u8]) -> Option<Timestamp> {
    let (_, certificate, _) = element(certificate)?;
    let (_, mut rest, _) = element(certificate)?;
    if rest.first() == Some(&0xa0) {
        rest = element(rest)?.2;
    }
    for _ in 0..3 {
        rest = element(rest)?.2;
    }
    let (_, validity, _) = element(rest)?;
    let (_, _, rest) = element(validity)?;
    let (tag, text, _) = element(rest)?;
    let text = std::str::from_utf8(text).ok()?;
    let full = match tag {
        // UTCTime has two digits of the year; 50 and above mean the last century.
        0x17 if text.get(..2)? < "50" => format!("20{text}"),
        0x17 => format!("19{text}"),
        0x18 => text.to_owned(),
        _ => return None,
    };
    let part = |from: usize, to: usize| full.get(from..to);
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let (hour, minute, second) = (part(8, 10)?, part(10, 12)?, part(12, 14)?);
    format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z").parse().ok()
}

/// Tag and content of the first DER element, and what follows it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = der.split_first()?;
    let (first, mut rest) = rest.split_first()?;
    let mut length = usize::from(*first);
    if length >= 0x80 {
        let (bytes, after) = rest.split_at_checked(length - 0x80)?;
        if bytes.len() > 4 {
            return None;
        }
        length = bytes.iter().fold(0, |sum, byte| (sum << 8) | usize::from(*byte));
        rest = after;
    }
    let (content, after) = rest.split_at_checked(length)?;
    Some((*tag, content, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_loses_its_newline_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        for (content, want) in [("abc\n", Ok("abc")), ("abc\r\n", Ok("abc")), ("abc", Ok("abc"))] {
            fs::write(&file, content).unwrap();
            assert_eq!(token(&file).map_err(|e| e.to_string()), want.map(str::to_owned));
        }
        for content in ["", "\n", "a b", "a\nb"] {
            fs::write(&file, content).unwrap();
            let text = token(&file).unwrap_err().to_string();
            assert!(text.contains("token file") && text.contains("is not valid"), "{text}");
        }
    }

    #[test]
    fn a_fingerprint_sees_a_link_that_points_elsewhere_and_a_file_that_appears() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two, link) = (dir.path().join("one"), dir.path().join("two"), dir.path().join("link"));
        fs::write(&one, "x").unwrap();
        fs::write(&two, "x").unwrap();
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let files = vec![link.clone(), dir.path().join("absent")];
        let before = Fingerprint::of(&files);
        assert_eq!(before, before.again());
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&two, &link).unwrap();
        let linked = before.again();
        assert_ne!(before, linked);
        fs::write(dir.path().join("absent"), "").unwrap();
        assert_ne!(linked, linked.again());
    }

    #[test]
    fn the_explicit_kubeconfig_beats_the_pod_and_the_pod_beats_the_fallback() {
        let pod = InCluster { host: "10.0.0.1".into(), port: "443".into(), dir: "/x".into() };
        let choose = |explicit, pod| Source::choose(explicit, pod, Path::new("/kubelet.conf")).to_string();
        assert_eq!(choose(Some(Path::new("/k")), Some(&pod)), "kubeconfig /k");
        assert_eq!(choose(None, Some(&pod)), "service account in /x");
        assert_eq!(choose(None, None), "kubeconfig /kubelet.conf");
    }

    #[test]
    fn every_bad_kubeconfig_is_named_with_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        let text = || Source::Kubeconfig(path.clone()).load().config.unwrap_err().to_string();
        assert!(text().contains("cannot be read: No such file"), "{}", text());
        for (content, want) in [
            ("{", "is not valid"),
            ("apiVersion: v1\nkind: Config\n", "no current-context"),
            ("apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: []\n", "no context \"a\""),
        ] {
            fs::write(&path, content).unwrap();
            let text = text();
            assert!(text.contains(want) && text.contains(&path.display().to_string()), "{text}");
            assert_eq!(text.lines().count(), 1);
        }
    }

    #[test]
    fn garbage_has_no_end_of_validity() {
        for bytes in [&b""[..], b"\x30", b"\x30\x84\xff\xff\xff\xff", b"\x30\x03\x30\x01\xa0"] {
            assert_eq!(not_after(bytes), None);
        }
    }
}
