//! `testkit corpus`: the stand-in and real API servers, held against recorded answers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use testkit::{
    corpus::{self, Answers, Server, Setting},
    plane::{self, Programs},
};

/// What to do with the corpus of requests.
#[derive(Debug, Subcommand)]
pub(crate) enum Corpus {
    /// Send it to a real server and write down the answers
    Record(Asked),
    /// Send it to a real server and hold the answers against the recorded ones
    Check(Asked),
    /// Send it to the stand-in and hold the answers against the recorded ones
    StandIn {
        /// 1.34.3, 1.34.3-gated, 1.36.3 or 1.37.2
        #[arg(long)]
        setting: String,
        #[command(flatten)]
        answers: Recorded,
    },
    /// Start a server alone and keep it up until Ctrl-C
    Serve {
        /// 1.34.3, 1.34.3-gated, 1.36.3 or 1.37.2
        #[arg(long)]
        setting: String,
        #[command(flatten)]
        programs: Where,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Asked {
    /// 1.34.3, 1.34.3-gated, 1.36.3 or 1.37.2
    #[arg(long)]
    setting: String,
    /// A server that runs already; without it etcd and kube-apiserver are started for this run alone
    #[arg(long, value_name = "URL", requires = "ca", requires = "token")]
    server: Option<String>,
    /// File with the certificate of the running server's authority
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Token of an administrator (group system:masters) of the running server
    #[arg(long)]
    token: Option<String>,
    #[command(flatten)]
    programs: Where,
    #[command(flatten)]
    answers: Recorded,
}

#[derive(Debug, Args)]
pub(crate) struct Recorded {
    /// Directory of the recorded answers
    #[arg(long, value_name = "DIR", default_value = "tests/fixtures/corpus")]
    answers: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Where {
    /// Directory with kubernetes-VERSION/kube-apiserver [default: ~/.cache/npu-dra/cluster]
    #[arg(long, value_name = "DIR")]
    kubernetes: Option<PathBuf>,
    /// The program etcd
    #[arg(long, value_name = "FILE", default_value = "/usr/bin/etcd")]
    etcd: PathBuf,
}

impl Where {
    fn programs(&self) -> Programs {
        let cache = || {
            let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
            let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from);
            cache.join("npu-dra/cluster")
        };
        Programs { kubernetes: self.kubernetes.clone().unwrap_or_else(cache), etcd: self.etcd.clone() }
    }
}

/// Does it.
pub(crate) async fn corpus(what: Corpus) -> anyhow::Result<()> {
    match what {
        Corpus::Record(asked) => {
            let setting = Setting::named(&asked.setting)?;
            let (version, answers) = ask(&setting, &asked).await?;
            setting.record(&asked.answers.answers, &version, answers)?;
            say(&format!("answers of {version} are in {}", setting.file(&asked.answers.answers).display()));
        }
        Corpus::Check(asked) => {
            let setting = Setting::named(&asked.setting)?;
            let recorded = setting.recorded(&asked.answers.answers)?;
            let (version, answers) = ask(&setting, &asked).await?;
            corpus::agree("recorded", &recorded, "server", &answers)?;
            say(&format!("corpus: {} cases, {version} answers as recorded", recorded.len()));
        }
        Corpus::StandIn { setting, answers } => {
            let setting = Setting::named(&setting)?;
            let recorded = corpus::comparable(setting.recorded(&answers.answers)?)?;
            let found = corpus::comparable(setting.ask_stand_in().await?)?;
            corpus::agree("recorded", &recorded, "stand-in", &found)?;
            say(&format!("corpus: {} cases, the stand-in answers as {} did", recorded.len(), setting.name));
        }
        Corpus::Serve { setting, programs } => {
            let plane = Setting::named(&setting)?.start(&programs.programs()).await?;
            let ca = plane.dir().join("ca.crt");
            fs::write(&ca, plane.ca())?;
            say(&format!("server: {}\nca:     {}\ntoken:  {}", plane.url(), ca.display(), plane::ADMIN));
            std::future::pending::<()>().await;
        }
    }
    Ok(())
}

async fn ask(setting: &Setting, asked: &Asked) -> anyhow::Result<(String, Answers)> {
    if let (Some(url), Some(ca), Some(token)) = (&asked.server, &asked.ca, &asked.token) {
        return ask_at(setting, url, &text(ca)?, token).await;
    }
    let plane = setting.start(&asked.programs.programs()).await?;
    ask_at(setting, plane.url(), plane.ca(), plane::ADMIN).await
}

async fn ask_at(setting: &Setting, url: &str, ca: &str, token: &str) -> anyhow::Result<(String, Answers)> {
    let mut server = Server::real(url, ca, token)?;
    let version = server.version().await?;
    let wanted = format!("v{}", setting.version);
    ensure!(version == wanted, "setting {} is of {wanted}, the server is {version}", setting.name);
    Ok((version, setting.ask(&mut server).await?))
}

fn text(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[allow(clippy::print_stdout, reason = "this program's output")]
fn say(text: &str) {
    println!("{text}");
}
