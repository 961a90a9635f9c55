//! Kubeconfig files and the credentials behind them, good and bad ones.

use std::{
    fs,
    os::unix::fs::{OpenOptionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{ApiServer, auth::Who};
use crate::pki::Valid;

/// What kind of credential a kubeconfig carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// A client certificate and key in one file behind a symlink, as kubelet keeps it.
    Certificate,
    /// A client certificate that has expired: 401.
    ExpiredCertificate,
    /// A client certificate of an authority that the server does not know: 401.
    StrangerCertificate,
    /// A token in the kubeconfig.
    Token,
    /// A token in a file beside it.
    TokenFile,
    /// A token that the server does not know: 401.
    WrongToken,
    /// A good certificate, but the wrong authority for the server's: TLS fails at the client.
    WrongCa,
    /// No credential at all.
    Anonymous,
}

/// A written kubeconfig.
#[derive(Debug, Clone)]
pub struct Kubeconfig {
    /// The kubeconfig file.
    pub path: PathBuf,
    /// The certificate's symlink, if it carries one.
    pub certificate: Option<PathBuf>,
    /// The token's file, if it carries one.
    pub token_file: Option<PathBuf>,
    who: Who,
    stem: String,
    der: Option<Vec<u8>>,
    token: Option<String>,
}

impl Kubeconfig {
    /// Whose credentials it carries.
    #[must_use]
    pub fn who(&self) -> &Who {
        &self.who
    }
}

fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path).with_context(|| format!("cannot write {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}

/// Puts a file in place of another in one step.
fn swap(path: &Path, text: &str) -> anyhow::Result<()> {
    let fresh = path.with_extension("new");
    write_private(&fresh, text)?;
    fs::rename(&fresh, path).with_context(|| format!("cannot replace {}", path.display()))
}

impl ApiServer {
    /// Writes a kubeconfig, and the files that it names, into `dir`.
    ///
    /// # Errors
    /// A file that cannot be written, a certificate that cannot be made.
    pub fn kubeconfig(&self, dir: &Path, who: &Who, how: How) -> anyhow::Result<Kubeconfig> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let number = self.next_number();
        let kind = match who {
            Who::Admin => "admin",
            Who::Node(_) => "node",
            Who::ServiceAccount { .. } => "account",
        };
        let stem = format!("{kind}-{number}");
        let ca = dir.join(format!("{stem}-ca.crt"));
        let authority = if how == How::WrongCa { &self.stranger } else { &self.authority };
        write_private(&ca, &authority.pem)?;
        let mut written = Kubeconfig {
            path: dir.join(format!("{stem}.kubeconfig")),
            certificate: None,
            token_file: None,
            who: who.clone(),
            stem: stem.clone(),
            der: None,
            token: None,
        };
        let credential = match how {
            How::Certificate | How::WrongCa | How::ExpiredCertificate | How::StrangerCertificate => {
                let link = dir.join(format!("{stem}-current.pem"));
                written.certificate = Some(link.clone());
                self.new_certificate(&mut written, how)?;
                let link = link.display();
                format!("client-certificate: \"{link}\"\n    client-key: \"{link}\"")
            }
            How::Token | How::WrongToken => {
                let token = self.new_token(&mut written, how == How::Token);
                format!("token: \"{token}\"")
            }
            How::TokenFile => {
                let file = dir.join(format!("{stem}.token"));
                let token = self.new_token(&mut written, true);
                swap(&file, &token)?;
                written.token_file = Some(file.clone());
                format!("tokenFile: \"{}\"", file.display())
            }
            How::Anonymous => String::new(),
        };
        let user = if credential.is_empty() { " {}".to_owned() } else { format!("\n    {credential}") };
        let text = format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: simulated\n  cluster:\n    server: {}\n    certificate-authority: \"{}\"\nusers:\n- name: {kind}\n  user:{user}\ncontexts:\n- name: {kind}\n  context:\n    cluster: simulated\n    user: {kind}\ncurrent-context: {kind}\n",
            self.url(),
            ca.display(),
        );
        swap(&written.path, &text)?;
        Ok(written)
    }

    /// A token of somebody, for a client without a kubeconfig.
    #[must_use]
    pub fn token(&self, who: &Who) -> String {
        let token = format!("token-{}-{}", self.next_number(), self.shared.update(|i| i.store.uid()));
        self.shared.update(|i| i.auth.add_token(token.clone(), who.clone(), true));
        token
    }

    fn new_token(&self, of: &mut Kubeconfig, known: bool) -> String {
        let token = format!("{}-{}", of.stem, self.shared.update(|i| i.store.uid()));
        if known {
            self.shared.update(|i| i.auth.add_token(token.clone(), of.who.clone(), true));
        }
        of.token = Some(token.clone());
        token
    }

    fn new_certificate(&self, of: &mut Kubeconfig, how: How) -> anyhow::Result<()> {
        let link = of.certificate.clone().context("this kubeconfig carries no certificate")?;
        let authority = if how == How::StrangerCertificate { &self.stranger } else { &self.authority };
        let valid = if how == How::ExpiredCertificate { Valid::Once } else { Valid::Now };
        let pair = authority.client(&of.who.user(), of.who.groups().first().map(String::as_str), valid)?;
        let file = link.with_file_name(format!("{}-{}.pem", of.stem, self.next_number()));
        write_private(&file, &format!("{}{}", pair.cert_pem, pair.key_pem))?;
        let fresh = link.with_extension("new");
        symlink(file.file_name().unwrap_or_default(), &fresh)
            .and_then(|()| fs::rename(&fresh, &link))
            .with_context(|| format!("cannot place {}", link.display()))?;
        let valid = !matches!(how, How::ExpiredCertificate | How::StrangerCertificate);
        self.shared.update(|i| i.auth.add_certificate(pair.der.clone(), of.who.clone(), valid));
        of.der = Some(pair.der);
        Ok(())
    }

    /// From now on the credential of this kubeconfig is answered with 401.
    pub fn expire(&self, kubeconfig: &Kubeconfig) {
        self.shared.update(|inner| {
            if let Some(der) = &kubeconfig.der {
                inner.auth.revoke_certificate(der);
            }
            if let Some(token) = &kubeconfig.token {
                inner.auth.revoke_token(token);
            }
        });
    }

    /// Writes a new good credential over the old one (certificate behind its symlink, token in its file or in the kubeconfig)
    /// and refuses the old one from now on.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn rotate(&self, kubeconfig: &mut Kubeconfig) -> anyhow::Result<()> {
        let old = kubeconfig.clone();
        if kubeconfig.certificate.is_some() {
            self.new_certificate(kubeconfig, How::Certificate)?;
        } else if let Some(file) = kubeconfig.token_file.clone() {
            let token = self.new_token(kubeconfig, true);
            swap(&file, &token)?;
        } else if let Some(before) = &old.token {
            let token = self.new_token(kubeconfig, true);
            let text = fs::read_to_string(&kubeconfig.path)?;
            swap(&kubeconfig.path, &text.replace(before.as_str(), &token))?;
        }
        self.expire(&old);
        Ok(())
    }

    /// Writes `ca.crt`, `token` and `namespace` into `dir`, as a pod finds them.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn service_account_files(&self, dir: &Path, who: &Who) -> anyhow::Result<()> {
        fs::create_dir_all(dir)?;
        let token = format!("pod-{}", self.shared.update(|i| i.store.uid()));
        self.shared.update(|i| i.auth.add_token(token.clone(), who.clone(), true));
        let namespace = match who {
            Who::ServiceAccount { namespace, .. } => namespace,
            Who::Admin | Who::Node(_) => "default",
        };
        write_private(&dir.join("ca.crt"), &self.authority.pem)?;
        write_private(&dir.join("token"), &token)?;
        write_private(&dir.join("namespace"), namespace)
    }
}
