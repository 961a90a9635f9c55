//! `npuctl`: shows and controls what the daemon `npu-dra` does on this node.
//!
//! It talks to the daemon over its admin socket. While the daemon is down, root is shown the records on disk, marked
//! `offline`.

mod args;
mod client;
mod document;
mod failure;
mod human;
mod manual;
mod offline;
mod output;
mod table;
mod view;
mod watch;

use std::{io, process::ExitCode, time::Instant};

use clap::{CommandFactory as _, Parser as _};
use jiff::Timestamp;
use npu_dra::{
    admin::view::vnpu_name,
    domain::{claim::ClaimUid, node::HoldKind, plan::chip_of},
};

use crate::{
    args::{Backend, Claims, Cli, Command, Generate, Global, Hold, Vnpu},
    client::{Client, SEE_VNPUS},
    document::{CardHealth, Claim, Cuttable, Device, Slice, Status, Versions, time},
    failure::Failure,
    offline::Offline,
    output::Output,
    view::Item,
};

/// Exit status of an answer that was read from disk.
const OFFLINE: u8 = 4;
/// Exit status of `health` if a card is not ok.
const UNWELL: u8 = 8;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            output::to_stderr(&error.render().to_string());
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1));
        }
        // Help and version go to stdout.
        Err(error) => error.exit(),
    };
    match run(&cli) {
        Ok(code) => ExitCode::from(code),
        // Nobody reads any more: there is nothing left to do.
        Err(Failure::Output { cause, .. }) if cause.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            let advice = human::lines(&failure.advice());
            output::say(&format!("{}\n{advice}", human::plain(&failure.to_string())));
            ExitCode::from(failure.code())
        }
    }
}

/// Does what was asked; gives the exit status.
fn run(cli: &Cli) -> Result<u8, Failure> {
    let output = Output::new(&cli.global);
    match &cli.command {
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "npuctl", &mut script);
            output::print(&script).map(|()| 0)
        }
        Command::Generate { command: Generate::Man { dir } } => manual::write_pages(dir)
            .map(|()| 0)
            .map_err(|cause| Failure::Output { what: format!("manual pages to {}", dir.display()), cause }),
        _ => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|cause| Failure::Output { what: "to the event queue".to_owned(), cause })?;
            runtime.block_on(ask(cli, &output))
        }
    }
}

/// Where answers come from.
enum Source {
    Daemon(Client),
    Records(Offline),
}

impl Source {
    /// The daemon, or for root the records if it is down.
    async fn open(global: &Global, output: &Output) -> Result<Self, Failure> {
        match Client::connect(&global.socket, global.timeout()).await {
            Ok(client) => Ok(Self::Daemon(client)),
            Err(Failure::Unreachable { socket, cause, .. }) if is_down(&cause) && nix::unistd::geteuid().is_root() => {
                match Offline::read(&global.state_dir) {
                    Ok(offline) => {
                        output.offline(&format!(
                            "npu-dra does not answer at {}; this is from its records in {}",
                            socket.display(),
                            global.state_dir.display()
                        ))?;
                        Ok(Self::Records(offline))
                    }
                    Err(why) => {
                        // Where there is no state directory nothing was ever recorded: nothing to tell.
                        let records = global.state_dir.exists().then_some(why);
                        Err(Failure::Unreachable { socket, cause, records })
                    }
                }
            }
            Err(failure) => Err(failure),
        }
    }

    fn is_offline(&self) -> bool {
        matches!(self, Self::Records(_))
    }

    fn code(&self) -> u8 {
        if self.is_offline() { OFFLINE } else { 0 }
    }

    fn no_device(&self, global: &Global, name: &str) -> Failure {
        let (name, socket) = (name.to_owned(), global.socket.clone());
        if self.is_offline() { Failure::NotRecorded { what: "NPU", name, socket } } else { Failure::NoDevice(name) }
    }

    fn no_claim(&self, global: &Global, uid: &str) -> Failure {
        let (name, socket) = (uid.to_owned(), global.socket.clone());
        if self.is_offline() { Failure::NotRecorded { what: "claim", name, socket } } else { Failure::NoClaim(name) }
    }

    async fn devices(&self) -> Result<(Vec<Device>, Timestamp), Failure> {
        match self {
            Self::Daemon(client) => {
                let answer = client.devices().await?;
                Ok((answer.devices.into_iter().map(Into::into).collect(), at(answer.taken_at_ms)))
            }
            Self::Records(offline) => Ok((offline.devices(), Timestamp::now())),
        }
    }

    async fn claims(&self) -> Result<(Vec<Claim>, Timestamp), Failure> {
        match self {
            Self::Daemon(client) => {
                let answer = client.claims().await?;
                Ok((answer.claims.into_iter().map(Into::into).collect(), at(answer.taken_at_ms)))
            }
            Self::Records(offline) => Ok((offline.claims(), Timestamp::now())),
        }
    }

    async fn vnpus(&self) -> Result<(Vec<document::Vnpu>, Timestamp), Failure> {
        match self {
            Self::Daemon(client) => {
                let answer = client.vnpus().await?;
                Ok((answer.vnpus.into_iter().map(Into::into).collect(), at(answer.taken_at_ms)))
            }
            Self::Records(offline) => Ok((document::Vnpu::of_claims(&offline.claims()), Timestamp::now())),
        }
    }

    async fn status(&self) -> Result<(Status, Timestamp), Failure> {
        match self {
            Self::Daemon(client) => {
                let answer = client.status().await?;
                let now = at(answer.taken_at_ms);
                Ok((answer.into(), now))
            }
            Self::Records(offline) => Ok((offline.status(), Timestamp::now())),
        }
    }
}

/// True if nobody listens at the socket, so that the records on disk are nobody's work in progress.
fn is_down(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn at(millis: i64) -> Timestamp {
    time(millis).unwrap_or_else(Timestamp::now)
}

/// Everything that needs the daemon.
async fn ask(cli: &Cli, output: &Output) -> Result<u8, Failure> {
    let (start, global) = (Instant::now(), &cli.global);
    let result = match &cli.command {
        Command::Devices { names, watch, health } => {
            let wanted = |device: &Device| {
                (names.is_empty() || names.contains(&device.name))
                    && (health.is_empty() || health.iter().any(|state| state.is_of(device.health.as_ref())))
            };
            if *watch {
                let client = Client::connect(&global.socket, global.timeout()).await?;
                watch::watch(&client, output, names, wanted).await.map(|()| 0)
            } else {
                devices(global, output, names, wanted).await
            }
        }
        Command::Device { name } => {
            let source = Source::open(global, output).await?;
            let (devices, now) = source.devices().await?;
            let device = devices.iter().find(|device| device.name == *name);
            let device = device.ok_or_else(|| source.no_device(global, name))?;
            output.one(Device::KIND, device, source.is_offline(), Some(name), &device.pairs(now))?;
            Ok(source.code())
        }
        Command::Health { names, watch } => health(global, output, names, *watch).await,
        Command::Drain { hold } => set_hold(global, output, hold, HoldKind::Drain).await,
        Command::Cordon { hold } => set_hold(global, output, hold, HoldKind::Cordon).await,
        Command::Vnpu { command } => vnpu(global, output, command).await,
        Command::Claims { command } => claims(global, output, command).await,
        Command::Backend { command } => backend(global, output, command).await,
        Command::Slices => slices(global, output).await,
        Command::Status => {
            let source = Source::open(global, output).await?;
            let (status, now) = source.status().await?;
            output.one(Status::KIND, &status, source.is_offline(), None, &status.pairs(now))?;
            Ok(source.code())
        }
        Command::Version => version(global, output).await,
        // Both were done before: they need no daemon.
        Command::Completion { .. } | Command::Generate { .. } => Ok(0),
    };
    output.detail(|| format!("done in {:.1?}, with socket {}", start.elapsed(), global.socket.display()));
    result
}

async fn devices(
    global: &Global,
    output: &Output,
    names: &[String],
    wanted: impl Fn(&Device) -> bool,
) -> Result<u8, Failure> {
    let source = Source::open(global, output).await?;
    let (devices, now) = source.devices().await?;
    let absent = names.iter().find(|name| !devices.iter().any(|device| device.name == **name)).cloned();
    if devices.is_empty() {
        output.note("no NPU is known; why: npuctl status");
    }
    let shown: Vec<_> = devices.into_iter().filter(wanted).collect();
    output.list(&shown, source.is_offline(), now)?;
    match absent {
        Some(name) => Err(source.no_device(global, &name)),
        None => Ok(source.code()),
    }
}

/// How well the cards are; the exit status tells whether all are ok.
async fn health(global: &Global, output: &Output, names: &[String], watch: bool) -> Result<u8, Failure> {
    let wanted = |card: &CardHealth| names.is_empty() || names.contains(&card.name);
    if watch {
        let client = Client::connect(&global.socket, global.timeout()).await?;
        return watch::watch(&client, output, names, wanted).await.map(|()| 0);
    }
    let source = Source::open(global, output).await?;
    let (devices, now) = source.devices().await?;
    let absent = names.iter().find(|name| !devices.iter().any(|device| device.name == **name)).cloned();
    let cards: Vec<_> = devices.into_iter().map(CardHealth::from).filter(wanted).collect();
    output.list(&cards, source.is_offline(), now)?;
    match absent {
        Some(name) => Err(source.no_device(global, &name)),
        None if source.is_offline() => Ok(source.code()),
        None if cards.is_empty() => {
            output.note("no NPU is known; why: npuctl status");
            Ok(UNWELL)
        }
        None => Ok(if cards.iter().all(CardHealth::is_ok) { 0 } else { UNWELL }),
    }
}

/// Keeps claims from a card, or lets them have it again.
async fn set_hold(global: &Global, output: &Output, hold: &Hold, kind: HoldKind) -> Result<u8, Failure> {
    let client = Client::connect(&global.socket, global.timeout()).await?;
    let device = human::plain(&hold.device);
    if hold.undo {
        client.hold(&hold.device, "", "").await?;
        output.note(&format!("{device} takes claims, as far as an operator is concerned"));
        return Ok(0);
    }
    let answer = client.hold(&hold.device, kind.as_str(), &hold.reason).await?;
    let claims: Vec<_> = answer.claims.iter().map(|claim| format!("{}/{}", claim.namespace, claim.name)).collect();
    let rest = match (claims.is_empty(), kind) {
        (true, _) => "no claim lives on it".to_owned(),
        (false, HoldKind::Drain) => format!("pods of {} are evicted unless they tolerate it", claims.join(", ")),
        (false, HoldKind::Cordon) => format!("{} stay on it", claims.join(", ")),
    };
    output.note(&format!("{device} is {}; {}", kind.as_str(), human::plain(&rest)));
    Ok(0)
}

async fn vnpu(global: &Global, output: &Output, command: &Vnpu) -> Result<u8, Failure> {
    match command {
        Vnpu::List { device } => vnpus(global, output, device.as_deref()).await,
        Vnpu::Templates { device } => {
            // What a card has left is not in the records, so there is nothing to show while the daemon is down.
            let client = Client::connect(&global.socket, global.timeout()).await?;
            let mut devices: Vec<Cuttable> = client.templates().await?.devices.into_iter().map(Into::into).collect();
            if let Some(name) = device {
                devices.retain(|templates| templates.device == *name);
                if devices.is_empty() {
                    return Err(Failure::NoDevice(name.clone()));
                }
            }
            output.templates(&devices).map(|()| 0)
        }
        Vnpu::Create { device, template } => {
            let client = Client::connect(&global.socket, global.long_timeout()).await?;
            let answer = client.create_vnpu(device, template).await?;
            let made: Vec<document::Vnpu> = answer.vnpu.into_iter().map(Into::into).collect();
            output.list(&made, false, at(answer.taken_at_ms))?;
            output.note(&format!("{device} takes no new claims while a vNPU of an operator is on it"));
            Ok(0)
        }
        Vnpu::Destroy { vnpu, force } => {
            let client = Client::connect(&global.socket, global.long_timeout()).await?;
            let id = vnpu.id;
            if let Some(chip) = vnpu.chip.filter(|chip| *chip != chip_of(id)) {
                return Err(Failure::NotFound(format!("there is no {}", vnpu_name(chip, id)), SEE_VNPUS));
            }
            let answer = client.destroy_vnpu(id, *force).await?;
            let rest = match (answer.device.as_str(), answer.closed.as_str()) {
                ("", _) => String::new(),
                (device, "") => format!("; {device} takes claims"),
                (device, why) => format!("; {device} takes no new claims: {}", human::plain(why)),
            };
            output.note(&format!("{} is destroyed{rest}", vnpu_name(chip_of(id), id)));
            Ok(0)
        }
    }
}

async fn vnpus(global: &Global, output: &Output, device: Option<&str>) -> Result<u8, Failure> {
    let source = Source::open(global, output).await?;
    if let Some(name) = device {
        let (devices, _) = source.devices().await?;
        if !devices.iter().any(|device| device.name == name) {
            return Err(source.no_device(global, name));
        }
    }
    let (vnpus, now) = source.vnpus().await?;
    let shown: Vec<_> =
        vnpus.into_iter().filter(|vnpu| device.is_none() || vnpu.part.card.as_deref() == device).collect();
    output.list(&shown, source.is_offline(), now)?;
    if shown.is_empty() {
        let slicing = source.status().await?.0.slicing;
        match slicing.filter(|slicing| slicing.model.as_deref().is_none_or(|model| model == "off")) {
            Some(slicing) => {
                let why = slicing.reason.as_deref().unwrap_or("slicing is off");
                output.note(&format!("npu-dra cuts no vNPU on this node: {}", human::plain(why)));
            }
            None if source.is_offline() => output.note("no claim holds a vNPU"),
            None => output.note("there is no vNPU"),
        }
    }
    Ok(source.code())
}

async fn claims(global: &Global, output: &Output, command: &Claims) -> Result<u8, Failure> {
    match command {
        Claims::List { watch: true } => {
            let client = Client::connect(&global.socket, global.timeout()).await?;
            watch::watch(&client, output, &[], |_: &Claim| true).await.map(|()| 0)
        }
        Claims::List { watch: false } => {
            let source = Source::open(global, output).await?;
            let (claims, now) = source.claims().await?;
            output.list(&claims, source.is_offline(), now)?;
            Ok(source.code())
        }
        Claims::Show { uid } => {
            let source = Source::open(global, output).await?;
            let (claims, now) = source.claims().await?;
            let claim = claims.iter().find(|claim| claim.uid == *uid);
            let claim = claim.ok_or_else(|| source.no_claim(global, uid))?;
            output.one(Claim::KIND, claim, source.is_offline(), Some(uid), &claim.pairs(now))?;
            Ok(source.code())
        }
        Claims::Release { uid, force } => {
            let uid = ClaimUid::new(uid.as_str())
                .map_err(|error| Failure::Usage(error.to_string(), "Take it from the list: npuctl claims list"))?;
            if !force {
                return Err(Failure::Usage(
                    format!("claim {uid} is not released without --force"),
                    "Kubelet releases claims by itself. Force it only when the pod is gone and the claim is still held",
                ));
            }
            let client = Client::connect(&global.socket, global.timeout()).await?;
            let released: Option<Claim> = client.release(uid.as_str()).await?.claim.map(Into::into);
            let path = released.as_ref().and_then(Claim::path).unwrap_or_else(|| "?".to_owned());
            output.note(&format!("claim {} (UID {uid}) is released", human::plain(&path)));
            Ok(0)
        }
    }
}

async fn backend(global: &Global, output: &Output, command: &Backend) -> Result<u8, Failure> {
    let client = Client::connect(&global.socket, global.long_timeout()).await?;
    match command {
        Backend::Suspend { reason } => {
            client.suspend(reason).await?;
            output.note("npu-dra has let go of the driver; NPUs take no new claims until: npuctl backend resume");
        }
        Backend::Resume => {
            client.resume().await?;
            output.note("npu-dra reads all NPUs anew; how it goes: npuctl status");
        }
    }
    Ok(0)
}

async fn slices(global: &Global, output: &Output) -> Result<u8, Failure> {
    // What is published is not in the records, so there is nothing to show while the daemon is down.
    let client = Client::connect(&global.socket, global.timeout()).await?;
    let answer = client.slices().await?;
    let slices: Vec<_> = answer.slices.into_iter().map(|slice| Slice::new(&answer.pool, slice)).collect();
    output.list(&slices, false, at(answer.taken_at_ms))?;
    if !answer.error.is_empty() {
        output.note(&format!("the last error of publishing: {}", human::plain(&answer.error)));
    }
    Ok(0)
}

/// Both versions; ours is told whatever happens.
async fn version(global: &Global, output: &Output) -> Result<u8, Failure> {
    let answer = async { Client::connect(&global.socket, global.timeout()).await?.version().await };
    let (npu_dra, failure) = match answer.await {
        Ok(answer) => (Some(answer.version), None),
        Err(failure) => (None, Some(failure)),
    };
    let versions = Versions { npuctl: env!("CARGO_PKG_VERSION").to_owned(), npu_dra };
    output.one(Versions::KIND, &versions, false, None, &versions.pairs())?;
    failure.map_or(Ok(0), Err)
}
