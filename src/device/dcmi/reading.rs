//! What is asked of the library, and what its answers mean.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use tracing::debug;

use super::{
    BACKEND, ffi,
    session::Session,
    wire::{self, At, Board, ChipInfo, Codes, Pcie, Request, Trade, Trouble},
};
use crate::{
    device::{Fault, pci, presence},
    domain::{
        health::{self, EccCounts, HealthReading, Level},
        npu::{ChipReading, Family, Link, MIB, MissingChip, PciAddress, Scan, Vdie},
    },
};

/// Where a chip sits in the library's numbering of this start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) at: At,
    family: Family,
}

/// A scan and the library's numbers of its chips.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) scan: Scan,
    pub(super) seats: BTreeMap<u32, Seat>,
}

/// Why a chip is not in the scan.
enum Lack {
    /// It is not there (any more, or yet): the others still count.
    Chip(String),
    /// The whole reading cannot be trusted.
    Scan(Fault),
}

impl From<Fault> for Lack {
    fn from(fault: Fault) -> Self {
        Self::Scan(fault)
    }
}

pub(super) fn failed(request: Request, trouble: Trouble) -> Fault {
    Fault::Failed { backend: BACKEND, call: request.to_string(), why: trouble.to_string() }
}

/// A value that a chip must tell.
fn need<T: DeserializeOwned>(session: &mut Session, request: Request) -> Result<T, Lack> {
    session.call::<T>(request)?.map_err(|trouble| match trouble {
        Trouble::Code(code) if ffi::GONE.contains(&code) => Lack::Chip(format!("{request} answered {trouble}")),
        _ => Lack::Scan(failed(request, trouble)),
    })
}

/// A value that not every chip or driver has.
fn want<T: DeserializeOwned>(session: &mut Session, request: Request) -> Result<Option<T>, Lack> {
    match session.call::<T>(request)? {
        Ok(value) => Ok(Some(value)),
        Err(Trouble::Missing | Trouble::Code(ffi::ERR_NOT_SUPPORT)) => Ok(None),
        Err(Trouble::Code(code)) if ffi::GONE.contains(&code) => {
            Err(Lack::Chip(format!("{request} answered {}", Trouble::Code(code))))
        }
        Err(trouble) => Err(Lack::Scan(failed(request, trouble))),
    }
}

/// A value that is good to have.
fn like<T: DeserializeOwned>(session: &mut Session, request: Request) -> Result<Option<T>, Fault> {
    Ok(session.call::<T>(request)?.ok())
}

/// The same of a value that not every chip or driver has: what said that it has none is not asked again.
fn like_if_any<T: DeserializeOwned>(session: &mut Session, request: Request) -> Result<Option<T>, Fault> {
    if session.lacks.contains(&request) {
        return Ok(None);
    }
    let outcome = session.call::<T>(request)?;
    if let Err(Trouble::Missing | Trouble::Code(ffi::ERR_NOT_SUPPORT)) = outcome {
        session.lacks.insert(request);
    }
    Ok(outcome.ok())
}

/// Reads all chips. `known` are the links of the scan before, for those that cannot be read now.
pub(super) fn read(session: &mut Session, known: &[Link]) -> Result<Reading, Fault> {
    let driver_version = like::<String>(session, Request::DriverVersion)?.unwrap_or_default();
    let cards: Vec<i32> = session.call(Request::Cards)?.map_err(|trouble| failed(Request::Cards, trouble))?;
    let mut scan = Scan { driver_version, dies_bound: true, ..Scan::default() };
    let mut seats = BTreeMap::new();
    for (place, card) in cards.into_iter().enumerate() {
        if card < 0 {
            let what = format!("card {place} of the library's list");
            scan.missing.push(MissingChip { what, why: "it did not come up when the library started".to_owned() });
            continue;
        }
        for chip in read_card(session, card, &mut scan.missing)? {
            let seat = Seat { at: At { card, device: chip.device_id }, family: chip.family };
            if seats.insert(chip.physical_id, seat).is_some() {
                return Err(Fault::Failed {
                    backend: BACKEND,
                    call: format!("reading card {card}"),
                    why: format!("physical id {} is that of two chips", chip.physical_id),
                });
            }
            scan.chips.push(chip);
        }
    }
    scan.links = links(session, &seats, known)?;
    if seats.values().any(|seat| seat.family == Family::Ascend910C) {
        // Unreadable means bound: half a pair in a container fails, a pair never does.
        let policy = like::<u32>(session, Request::DiePolicy)?;
        scan.dies_bound = policy != Some(ffi::DIE_POLICY_INDEPENDENT);
    }
    Ok(Reading { scan, seats })
}

/// The NPU chips of one card.
fn read_card(session: &mut Session, card: i32, missing: &mut Vec<MissingChip>) -> Result<Vec<ChipReading>, Fault> {
    let mut lack = |what: String, why: String| missing.push(MissingChip { what, why });
    let count: i32 = match need(session, Request::Chips(card)) {
        Ok(count) => count,
        Err(Lack::Chip(why)) => {
            lack(format!("card {card}"), why);
            return Ok(Vec::new());
        }
        Err(Lack::Scan(fault)) => return Err(fault),
    };
    let mut chips = Vec::new();
    for device in 0..count {
        let at = At { card, device };
        if let Some(why) = session.shunned(at) {
            lack(format!("chip {device} of card {card}"), why);
            continue;
        }
        match read_chip(session, at) {
            Ok(chip) => {
                session.cleared(at, Trade::Scan);
                chips.extend(chip);
            }
            Err(Lack::Chip(why)) => lack(format!("chip {device} of card {card}"), why),
            Err(Lack::Scan(fault)) => return Err(fault),
        }
    }
    let failures = like::<i32>(session, Request::FailedChips(card))?.unwrap_or(0);
    for _ in 0..failures.clamp(0, ffi::MAX_DEVICES_PER_CARD.into()) {
        lack(format!("a chip of card {card}"), "it failed to come up".to_owned());
    }
    Ok(chips)
}

/// One chip; `None` for a unit that is no NPU.
fn read_chip(session: &mut Session, at: At) -> Result<Option<ChipReading>, Lack> {
    if want::<u32>(session, Request::Unit(at))?.is_some_and(|unit| unit != ffi::UNIT_NPU) {
        return Ok(None);
    }
    if let Some(status) = want::<u32>(session, Request::BootStatus(at))?
        && status != ffi::BOOT_SYSTEM_START_FINISH
    {
        return Err(Lack::Chip(format!("it is still starting (boot status {status})")));
    }
    let request = Request::LogicId(at);
    let logic_id: i32 = need(session, request)?;
    let logic_id = u32::try_from(logic_id).map_err(|_| failed(request, Trouble::Nonsense(logic_id.into())))?;
    let physical_id: u32 = need(session, Request::PhysicalId(logic_id))?;
    let info: ChipInfo = need(session, Request::ChipInfo(at))?;
    let board_id = want::<Board>(session, Request::Board(at))?.map(|board| board.board_id);
    let bus_id = bus_id(session, at)?;
    let vdie = vdie(session, at)?;
    let family = match Family::of(&info.chip_name, board_id) {
        Family::Other => Family::of(&info.npu_name, board_id),
        family => family,
    };
    let memory = memory(session, at, family)?;
    let product = like::<String>(session, Request::Product(at))?.unwrap_or_default();
    let seat = Seat { at, family };
    let health = if presence::lacks_node(&session.settings.host_root, physical_id) {
        session.warn_once(&format!("chip {physical_id} is there, and /dev/davinci{physical_id} is not"));
        HealthReading::of(Level::Gone)
    } else {
        health(session, physical_id, seat)?
    };
    debug!(physical_id, %bus_id, chip = info.chip_name, npu = info.npu_name, product, "a chip was read");
    let host_root = &session.settings.host_root;
    Ok(Some(ChipReading {
        physical_id,
        logic_id: Some(logic_id),
        card_id: Some(at.card),
        device_id: at.device,
        bus_id,
        vdie,
        chip_name: info.chip_name,
        family,
        board_id,
        memory: memory.filter(|mib| *mib > 0).map(|mib| mib * MIB),
        ai_cores: Some(info.ai_cores).filter(|cores| *cores > 0),
        numa_node: pci::numa_node(host_root, bus_id),
        pcie_root: pci::pcie_root(host_root, bus_id),
        health,
    }))
}

fn bus_id(session: &mut Session, at: At) -> Result<PciAddress, Lack> {
    let request = Request::Pcie(at);
    let pcie: Pcie = need(session, request)?;
    let address = || {
        let address = PciAddress {
            domain: u16::try_from(pcie.domain).ok()?,
            bus: u8::try_from(pcie.bus).ok()?,
            device: u8::try_from(pcie.device).ok()?,
            function: u8::try_from(pcie.function).ok()?,
        };
        (address.device < 32 && address.function < 8).then_some(address)
    };
    Ok(address().ok_or_else(|| failed(request, Trouble::Nonsense(pcie.bus.into())))?)
}

/// Identity of a die. Only a driver or chip that has none gives `None`: were any other error taken for that, a card
/// would change its name for the length of a hiccup.
fn vdie(session: &mut Session, at: At) -> Result<Option<Vdie>, Fault> {
    let request = Request::Die(at);
    match session.call::<[u32; 5]>(request)? {
        Ok(words) => Ok(Vdie::from_words(words)),
        Err(Trouble::Missing | Trouble::Code(ffi::ERR_NOT_SUPPORT)) => Ok(None),
        Err(trouble) => Err(failed(request, trouble)),
    }
}

/// Memory in MiB: 910B and 910C have HBM, 310P has DDR.
fn memory(session: &mut Session, at: At, family: Family) -> Result<Option<u64>, Lack> {
    match family {
        Family::Ascend910B | Family::Ascend910C => want(session, Request::Hbm(at)),
        Family::Ascend310P => want(session, Request::Memory(at)),
        Family::Other | Family::Example => match want(session, Request::Hbm(at))? {
            Some(mib) if mib > 0 => Ok(Some(mib)),
            _ => want(session, Request::Memory(at)),
        },
    }
}

/// Direct links between chips that can have any.
fn links(session: &mut Session, seats: &BTreeMap<u32, Seat>, known: &[Link]) -> Result<Vec<Link>, Fault> {
    let linkable: Vec<(u32, At)> = seats
        .iter()
        .filter(|(_, seat)| matches!(seat.family, Family::Ascend910B | Family::Ascend910C))
        .map(|(id, seat)| (*id, seat.at))
        .collect();
    let mut links = Vec::new();
    for (index, (a, first)) in linkable.iter().enumerate() {
        for (b, second) in &linkable[index + 1..] {
            let link = Link { a: *a, b: *b };
            let request = Request::Topology(*first, *second);
            match session.call::<i32>(request)? {
                Ok(kind) if ffi::LINKS.contains(&kind) => links.push(link),
                Ok(_) | Err(Trouble::Code(ffi::ERR_NOT_SUPPORT)) => {}
                Err(Trouble::Missing) => return Ok(links),
                Err(trouble) => {
                    // Groups must not change with a hiccup.
                    session.warn_once(&format!("{request} answered {trouble}; what was known of it stays"));
                    links.extend(known.contains(&link).then_some(link));
                }
            }
        }
    }
    Ok(links)
}

/// Health of one chip. Only the worker's end is an error: what a chip does not tell is unknown.
pub(super) fn health(session: &mut Session, physical_id: u32, seat: Seat) -> Result<HealthReading, Fault> {
    let request = Request::Health(seat.at);
    let level = match session.call::<u32>(request)? {
        Ok(ffi::HEALTH_OK) => Level::Ok,
        Ok(ffi::HEALTH_MINOR) => Level::Minor,
        Ok(ffi::HEALTH_MAJOR) => Level::Major,
        Ok(ffi::HEALTH_CRITICAL) => Level::Critical,
        Ok(ffi::HEALTH_UNKNOWN) => Level::Unknown,
        Ok(ffi::HEALTH_GONE) => Level::Gone,
        Ok(value) => {
            session.warn_once(&format!("{request} gave {value}, which has no meaning; health is unknown"));
            Level::Unknown
        }
        Err(Trouble::Code(code)) if ffi::GONE.contains(&code) => Level::Gone,
        Err(trouble) => {
            session.warn_once(&format!("{request} answered {trouble}; health is unknown"));
            Level::Unknown
        }
    };
    if level == Level::Gone {
        return Ok(HealthReading::of(Level::Gone));
    }
    let (codes, partial) = match session.call::<Codes>(Request::ErrorCodes(seat.at))? {
        Ok(Codes { list: mut codes, complete }) => {
            codes.sort_unstable();
            codes.dedup();
            session.codes.insert(physical_id, codes.clone());
            (codes, !complete)
        }
        // Every failure of this call looks the same: what was last known is better than a fault that comes and goes.
        Err(_) => (session.codes.get(&physical_id).cloned().unwrap_or_default(), true),
    };
    let temperature = like_if_any(session, Request::Temperature(seat.at))?;
    let power = match like_if_any(session, Request::Power(seat.at))? {
        // A 310P tells the power of its card.
        None if seat.family == Family::Ascend310P => like_if_any(session, Request::CardPower(seat.at.card))?,
        power => power,
    };
    let ecc = ecc(session, seat)?;
    Ok(HealthReading { level, codes, partial, temperature, power, ecc, link: None })
}

/// What ECC has counted of a chip's main memory; `None` if nothing is counted.
fn ecc(session: &mut Session, seat: Seat) -> Result<Option<EccCounts>, Fault> {
    let memory = if seat.family == Family::Ascend310P { ffi::MEMORY_DDR } else { ffi::MEMORY_HBM };
    let counts = like_if_any::<wire::Ecc>(session, Request::Ecc(seat.at, memory))?.filter(|ecc| ecc.enabled);
    Ok(counts.map(|ecc| EccCounts {
        corrected: ecc.single.into(),
        uncorrected: ecc.double.into(),
        isolated_pages: ecc.isolated.into(),
    }))
}

/// A chip's network link; `None` if it has none, or if it is only just coming up.
///
/// The call is known to block, and each time that it does costs a start of the library. So it is made last, and not
/// again for long after it did.
pub(super) fn link(session: &mut Session, seat: Seat) -> Result<Option<health::Link>, Fault> {
    if session.spare(seat.at, Trade::Network).is_err() {
        return Ok(None);
    }
    let result = like_if_any::<u32>(session, Request::Network(seat.at))?;
    session.cleared(seat.at, Trade::Network);
    Ok(match result {
        Some(ffi::NETWORK_OK) => Some(health::Link::Up),
        Some(1..=5 | 7) => Some(health::Link::Down),
        _ => None,
    })
}
