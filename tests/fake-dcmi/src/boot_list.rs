//! The vendor's `vnpu.cfg`: whether vNPUs come back after a boot, and which.

use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::code::{self, Answer};
use crate::data::{Data, Vnpu};
use crate::disk;
use crate::slicing::broken;
use crate::world::World;

const START: &str = "[vnpu-config start]";
const END: &str = "[vnpu-config end]";
const MODE: &str = "vnpu_config_recover:";

/// One vNPU to make again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) phy: u32,
    pub(crate) id: u32,
    pub(crate) template: String,
    pub(crate) vfg: Option<u32>,
    command: String,
}

/// The file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BootList {
    pub(crate) recover: bool,
    pub(crate) entries: Vec<Entry>,
}

impl BootList {
    fn path(world: &World, data: &Data) -> PathBuf {
        world.dir().join(&data.vnpu_cfg)
    }

    /// Reads the file; without one, recover mode is on and nothing is listed.
    pub(crate) fn load(world: &World, data: &Data) -> Answer<Self> {
        let path = Self::path(world, data);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Self { recover: true, entries: Vec::new() });
            }
            Ok(metadata) if metadata.is_file() => {}
            _ => return Err(code::FILE_OPERATE_FAIL),
        }
        fs::read_to_string(&path).map(|text| Self::parse(&text)).map_err(|_| code::FILE_OPERATE_FAIL)
    }

    fn parse(text: &str) -> Self {
        let recover = text.lines().next().is_none_or(|line| line.trim() != format!("{MODE}disable"));
        let block = text.lines().skip_while(|line| line.trim() != START).skip(1).take_while(|line| line.trim() != END);
        Self { recover, entries: block.filter_map(Entry::parse).collect() }
    }

    fn render(&self) -> String {
        let mut text = format!("{MODE}{}\n{START}\n", if self.recover { "enable" } else { "disable" });
        for entry in &self.entries {
            let _ = writeln!(text, "{}:{}:{}", entry.phy, entry.id, entry.command);
        }
        text + END + "\n"
    }

    /// Changes the file under its lock, if `change` asks to save.
    pub(crate) fn change(world: &World, data: &Data, change: impl FnOnce(&mut Self) -> bool) -> Answer {
        let lock = disk::lock_file(&world.path("vnpu_cfg.lock")).map_err(broken)?;
        let end = Instant::now() + Duration::from_millis(data.slicing.lock_wait_ms);
        while lock.try_lock().is_err() {
            if Instant::now() >= end {
                return Err(code::RESOURCE_OCCUPIED);
            }
            thread::sleep(Duration::from_millis(5)); // waits: for the lock, as the library does
        }
        let mut list = Self::load(world, data)?;
        if !change(&mut list) {
            return Ok(());
        }
        if let Some(code) = data.slicing.save_code {
            return Err(code);
        }
        list.save(&Self::path(world, data)).map_err(|_| code::FILE_OPERATE_FAIL)
    }

    fn save(&self, path: &std::path::Path) -> std::io::Result<()> {
        let temp = path.with_extension("cfg.new");
        let mut file = fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(&temp)?;
        file.write_all(self.render().as_bytes())?;
        fs::rename(temp, path)
    }

    /// Lists a vNPU.
    pub(crate) fn add(&mut self, vnpu: &Vnpu, card: i32, device: usize) {
        let mut command =
            format!("npu-smi set -t create-vnpu -i {card} -c {device} -f {} -v {}", vnpu.template, vnpu.id);
        let grouped = vnpu.template.starts_with("vir0") && !vnpu.template.ends_with('g');
        if grouped {
            let _ = write!(command, " -g {}", vnpu.vfg);
        }
        self.entries.retain(|entry| entry.id != vnpu.id);
        self.entries.push(Entry {
            phy: vnpu.phy,
            id: vnpu.id,
            template: vnpu.template.clone(),
            vfg: grouped.then_some(vnpu.vfg),
            command,
        });
    }

    /// Takes a vNPU off the list; says whether it was there.
    pub(crate) fn remove(&mut self, id: u32) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.id != id);
        self.entries.len() != before
    }
}

impl Entry {
    fn parse(line: &str) -> Option<Self> {
        let mut parts = line.trim().splitn(3, ':');
        let (phy, id, command) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?, parts.next()?);
        let after = |flag: &str| command.split(' ').skip_while(|word| *word != flag).nth(1);
        Some(Self {
            phy,
            id,
            template: after("-f")?.to_owned(),
            vfg: after("-g").and_then(|group| group.parse().ok()),
            command: command.to_owned(),
        })
    }
}
