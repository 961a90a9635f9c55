//! vNPUs: which templates a chip has, what fits beside what, and which template a request gets.
//!
//! Template names, core counts and the sets by board id are those of the vendor's published driver sources. The
//! memory of a template is a **fraction of the chip's memory**: the figure in its name is nominal and on some boards
//! wrong by a factor of two.

use std::fmt;

use super::npu::{ChipReading, Family};

/// What a chip has, or a template takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Resources {
    /// Memory in bytes.
    pub memory: u64,
    /// AI cores.
    pub ai_cores: u32,
    /// AI CPUs.
    pub ai_cpus: u32,
    /// Media (DVPP) engines, counted as JPEG decoders (`JPEGD`).
    ///
    /// That is the engine of which there are most, and the one that every template of the vendor's tables takes in whole
    /// numbers and in exact proportion to its part of the chip: where the JPEG decoders suffice, so do VPC, VDEC and
    /// JPEGE.
    pub media: u32,
}

impl Resources {
    /// Media engines of a chip that does not tell how many are left.
    pub const MEDIA_UNTOLD: u32 = u32::MAX;

    /// What is left after `other` is taken, `None` if it does not fit.
    pub fn minus(self, other: Self) -> Option<Self> {
        Some(Self {
            memory: self.memory.checked_sub(other.memory)?,
            ai_cores: self.ai_cores.checked_sub(other.ai_cores)?,
            ai_cpus: self.ai_cpus.checked_sub(other.ai_cpus)?,
            media: self.media.checked_sub(other.media)?,
        })
    }
}

/// A size that a chip can be cut into.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Template {
    /// Name as the vendor library takes it.
    pub name: &'static str,
    /// What one vNPU of it takes.
    pub takes: Resources,
    /// True for the one that a request by memory gets among several of one size.
    pub plain: bool,
}

/// A vNPU as the vendor library shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VnpuReading {
    /// Id: N of `/dev/vdavinciN`.
    pub id: u32,
    /// Template name, cut by the library to 15 bytes.
    pub template: String,
    /// Memory in bytes.
    pub memory: u64,
    /// AI cores.
    pub ai_cores: u32,
}

impl VnpuReading {
    /// True if it is of this template: names are compared as far as the library tells them.
    pub fn is_of(&self, template: &str) -> bool {
        let told = template.get(..TEMPLATE_NAME_TOLD).unwrap_or(template);
        self.template == template || self.template == told
    }
}

/// What a chip says of its vNPUs, read anew before it is cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CardReading {
    /// Its vNPUs, whoever made them.
    pub vnpus: Vec<VnpuReading>,
    /// What is left of it; `None` if the library does not tell. Media engines may be [`Resources::MEDIA_UNTOLD`].
    pub free: Option<Resources>,
    /// Host pids of the processes on it; `None` if the list cannot be read.
    pub processes: Option<Vec<i32>>,
}

impl CardReading {
    /// The vNPU of an id.
    pub fn vnpu(&self, id: u32) -> Option<&VnpuReading> {
        self.vnpus.iter().find(|vnpu| vnpu.id == id)
    }

    /// All ids.
    pub fn ids(&self) -> Vec<u32> {
        self.vnpus.iter().map(|vnpu| vnpu.id).collect()
    }

    /// True if a vNPU of this id and template is there.
    pub fn has(&self, id: u32, template: &str) -> bool {
        self.vnpu(id).is_some_and(|vnpu| vnpu.is_of(template))
    }

    /// Why the chip must not be cut just now: its first cut disturbs what runs on it. A chip that is cut can be cut on.
    pub fn obstacle(&self) -> Option<String> {
        match &self.processes {
            _ if !self.vnpus.is_empty() => None,
            None => Some("the processes on it cannot be read".to_owned()),
            Some(pids) if pids.is_empty() => None,
            Some(pids) => Some(format!("processes run on it: {pids:?}")),
        }
    }
}

/// What is left of a chip: by our own sums, and by what the chip tells. Both bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    by_sums: Resources,
    by_chip: Option<Resources>,
    /// vNPUs that the chip can still have.
    slots: usize,
}

impl Room {
    /// The room after one more vNPU; `None` if it does not fit.
    #[must_use]
    pub fn after(self, template: &Template) -> Option<Self> {
        let takes = template.takes;
        // The chip keeps some memory for itself, so its own figure is taken with the tolerance of a vNPU's size.
        let lean = Resources { memory: takes.memory - takes.memory / 8, ..takes };
        Some(Self {
            by_sums: self.by_sums.minus(takes)?,
            by_chip: match self.by_chip {
                Some(left) => Some(left.minus(lean)?),
                None => None,
            },
            slots: self.slots.checked_sub(1)?,
        })
    }

    /// What is left, as the chip tells if it does.
    #[must_use]
    pub fn left(self) -> Resources {
        self.by_chip.unwrap_or(self.by_sums)
    }

    /// How many vNPUs of one template fit.
    #[must_use]
    pub fn fitting(self, template: &Template) -> usize {
        std::iter::successors(self.after(template), |room| room.after(template)).count()
    }

    /// Every mix of templates that fits and to which none can be added, most of the first template first.
    #[must_use]
    pub fn mixes(self, templates: &[Template]) -> Vec<Mix> {
        let mut found = Vec::new();
        // What is still to be tried: a mix, the room after it, and the first template that may be added to it.
        let mut open = vec![(Vec::<usize>::new(), self)];
        while let Some((counts, room)) = open.pop() {
            let Some(template) = templates.get(counts.len()) else {
                let is_full = templates.iter().all(|template| room.after(template).is_none());
                if is_full && counts.iter().any(|count| *count > 0) {
                    let parts = templates.iter().zip(counts).filter(|(_, count)| *count > 0);
                    found.push(Mix(parts.map(|(template, count)| (template.name, count)).collect()));
                }
                continue;
            };
            let rooms = std::iter::successors(Some(room), |room| room.after(template)).enumerate();
            open.extend(rooms.map(|(count, room)| ([&counts[..], &[count]].concat(), room)));
        }
        found
    }
}

/// vNPUs that fit on a chip together: templates, each with how many of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mix(pub Vec<(&'static str, usize)>);

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<_> = self.0.iter().map(|(name, count)| format!("{count} x {name}")).collect();
        f.write_str(&parts.join(" + "))
    }
}

/// Bytes of a template's name that a query tells.
const TEMPLATE_NAME_TOLD: usize = 15;

/// Why a chip is not cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSliceable {
    /// The family has no templates that we cut.
    #[error("{chip} is not cut: hard slicing is for 910B")]
    Family {
        /// Chip name.
        chip: String,
    },
    /// The board id is in no template set.
    #[error("board id {board:#x} of {chip} is in no known template set")]
    Board {
        /// Chip name.
        chip: String,
        /// Board id.
        board: u32,
    },
    /// A reading that slicing needs is missing.
    #[error("{what} of {chip} is unknown")]
    Unknown {
        /// Chip name.
        chip: String,
        /// What is missing.
        what: &'static str,
    },
}

/// Why an empty chip cannot be cut into templates that are named.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// The chip has no such template.
    #[error("asks for {template}, which the chip does not have; it has {known}")]
    Unknown {
        /// The first that it lacks.
        template: String,
        /// All that it has.
        known: String,
    },
    /// They do not fit beside each other.
    #[error("asks for {wanted}, which is more than the chip has")]
    TooMuch {
        /// All that were named.
        wanted: Mix,
    },
}

/// A row of a set: name, parts of the chip (`1/n`), AI cores, AI CPUs, JPEG decoders, plain.
type Row = (&'static str, u64, u32, u32, u32, bool);

/// One set of templates and the boards that have it.
struct Bin {
    boards: &'static [u32],
    ai_cores: u32,
    ai_cpus: u32,
    media: u32,
    rows: &'static [Row],
}

/// The sets of 910B, by board id. The media engines of a whole chip are those of its template `_m`, which has all of
/// them; of a set without it, those of two halves.
const BINS: [Bin; 3] = [
    // 910B1, 910B2
    Bin {
        boards: &[0x13, 0x31, 0x3a, 0x43, 0x51, 0x30, 0x39, 0x50],
        ai_cores: 24,
        ai_cpus: 6,
        media: 28,
        rows: &[("vir06_1c_16g", 4, 6, 1, 7, true), ("vir12_3c_32g", 2, 12, 3, 14, true)],
    },
    // 910B3, 910B4-1
    Bin {
        boards: &[0x10, 0x12, 0x32, 0x3b, 0x42, 0x53, 0x38, 0x3e],
        ai_cores: 20,
        ai_cpus: 7,
        media: 24,
        rows: &[("vir05_1c_16g", 4, 5, 1, 6, true), ("vir10_3c_32g", 2, 10, 3, 12, true)],
    },
    // 910B4, also three boards with 64 GB
    Bin {
        boards: &[0x11, 0x28, 0x29, 0x33, 0x34, 0x37, 0x3c, 0x3d, 0x40, 0x41, 0x52, 0x54],
        ai_cores: 20,
        ai_cpus: 7,
        media: 24,
        rows: &[
            ("vir05_1c_8g", 4, 5, 1, 6, true),
            ("vir10_3c_16g", 2, 10, 3, 12, true),
            ("vir10_4c_16g_m", 2, 10, 4, 24, false),
            ("vir10_3c_16g_nm", 2, 10, 3, 0, false),
        ],
    },
];

/// The names of all templates of all chips, sorted.
pub fn template_names() -> Vec<&'static str> {
    let mut names: Vec<_> = BINS.iter().flat_map(|bin| bin.rows).map(|row| row.0).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Most vNPUs on one chip, whatever their size.
pub const VNPUS_MAX: usize = 16;
/// First vNPU id of chip 0; chip n has the 16 ids from `100 + 16 n`.
const FIRST_ID: u32 = 100;

/// The ids that vNPUs of a chip can have.
pub fn ids(physical_id: u32) -> std::ops::Range<u32> {
    let first = physical_id.saturating_mul(16).saturating_add(FIRST_ID);
    first..first.saturating_add(16)
}

/// A chip that can be cut: its whole and its templates, small to large.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sliceable {
    /// What the whole chip has.
    pub whole: Resources,
    /// Its templates, by memory, then by name.
    pub templates: Vec<Template>,
}

impl Sliceable {
    /// What a chip can be cut into.
    pub fn of(chip: &ChipReading) -> Result<Self, NotSliceable> {
        let name = || if chip.chip_name.is_empty() { "the chip".to_owned() } else { chip.chip_name.clone() };
        if chip.family != Family::Ascend910B {
            return Err(NotSliceable::Family { chip: name() });
        }
        let board = chip.board_id.ok_or_else(|| NotSliceable::Unknown { chip: name(), what: "the board id" })?;
        let memory = chip.memory.ok_or_else(|| NotSliceable::Unknown { chip: name(), what: "the memory" })?;
        let bin = BINS.iter().find(|bin| bin.boards.contains(&board));
        let bin = bin.ok_or_else(|| NotSliceable::Board { chip: name(), board })?;
        let ai_cores = chip.ai_cores.unwrap_or(bin.ai_cores);
        let whole = Resources { memory, ai_cores, ai_cpus: bin.ai_cpus, media: bin.media };
        let mut templates: Vec<_> = bin
            .rows
            .iter()
            .map(|&(name, parts, ai_cores, ai_cpus, media, plain)| Template {
                name,
                takes: Resources { memory: memory / parts, ai_cores, ai_cpus, media },
                plain,
            })
            .collect();
        templates.sort_by_key(|template| (template.takes.memory, !template.plain, template.name));
        Ok(Self { whole, templates })
    }

    /// The names of all templates, for messages.
    pub fn names(&self) -> String {
        self.templates.iter().map(|template| template.name).collect::<Vec<_>>().join(", ")
    }

    /// The template of a name.
    pub fn template(&self, name: &str) -> Option<&Template> {
        self.templates.iter().find(|template| template.name == name)
    }

    /// What a request for `memory` bytes gets: the smallest plain template that holds it; `None` means the whole card.
    pub fn by_memory(&self, memory: u64) -> Option<&Template> {
        self.templates.iter().find(|template| template.plain && template.takes.memory >= memory)
    }

    /// Every multiset of `templates` that fits the chip's memory and count, as numbers per template.
    fn mixes(&self, templates: &[&Template]) -> Vec<Vec<usize>> {
        let mut done = Vec::new();
        let mut open = vec![(Vec::new(), self.whole.memory, VNPUS_MAX)];
        while let Some((mix, memory, count)) = open.pop() {
            let Some(template) = templates.get(mix.len()) else {
                done.push(mix);
                continue;
            };
            let most = memory.checked_div(template.takes.memory).unwrap_or(0);
            let most = usize::try_from(most).unwrap_or(usize::MAX).min(count);
            for number in 0..=most {
                let taken = template.takes.memory.saturating_mul(u64::try_from(number).unwrap_or(u64::MAX));
                open.push(([mix.clone(), vec![number]].concat(), memory.saturating_sub(taken), count - number));
            }
        }
        done
    }

    /// True if memory alone decides: no mix that fits the memory takes more AI cores, AI CPUs or media engines than there are.
    pub fn is_exact(&self, templates: &[&Template]) -> bool {
        self.mixes(templates).iter().all(|mix| {
            let mut left = Some(self.whole);
            for (number, template) in mix.iter().zip(templates) {
                for _ in 0..*number {
                    left = left.and_then(|left| left.minus(template.takes));
                }
            }
            left.is_some()
        })
    }

    /// The plain templates that memory alone makes exact: all of them, or without the smallest until it holds.
    pub fn exact(&self) -> Vec<&Template> {
        let mut templates: Vec<_> = self.templates.iter().filter(|template| template.plain).collect();
        while !templates.is_empty() && !self.is_exact(&templates) {
            templates.remove(0);
        }
        templates
    }

    /// Checks that the chip, while nothing is on it, can be cut into all of these at once.
    pub fn check(&self, names: &[String]) -> Result<(), Misfit> {
        if let Some(name) = names.iter().find(|name| self.template(name).is_none()) {
            return Err(Misfit::Unknown { template: name.clone(), known: self.names() });
        }
        let mut templates = names.iter().filter_map(|name| self.template(name));
        if templates.try_fold(self.empty(), Room::after).is_some() {
            return Ok(());
        }
        let count = |template: &Template| names.iter().filter(|name| *name == template.name).count();
        let counts = self.templates.iter().map(|template| (template.name, count(template)));
        Err(Misfit::TooMuch { wanted: Mix(counts.filter(|(_, count)| *count > 0).collect()) })
    }

    /// What is left of the chip beside the vNPUs that were read; `None` if they take more than it has.
    pub fn room(&self, reading: &CardReading) -> Option<Room> {
        let templates =
            reading.vnpus.iter().filter_map(|vnpu| self.templates.iter().find(|template| vnpu.is_of(template.name)));
        let by_sums = templates.map(|template| template.takes).try_fold(self.whole, Resources::minus)?;
        // Media engines that the chip does not tell are those of our sums.
        let by_chip = reading.free.map(|free| Resources { media: free.media.min(by_sums.media), ..free });
        Some(Room { by_sums, by_chip, slots: VNPUS_MAX.saturating_sub(reading.vnpus.len()) })
    }

    /// What an empty chip has.
    pub fn empty(&self) -> Room {
        Room { by_sums: self.whole, by_chip: None, slots: VNPUS_MAX }
    }
}

/// True if a vNPU's size as read back is that of its template: within an eighth of the expected memory.
pub fn is_size_of(read: u64, expected: u64) -> bool {
    read.abs_diff(expected) <= expected / 8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::{inventory::tests::chip, npu::MIB};

    const GIB: u64 = 1024 * MIB;

    fn sliceable(board: u32, gib: u64, cores: u32) -> Sliceable {
        let reading = ChipReading { board_id: Some(board), memory: Some(gib * GIB), ai_cores: Some(cores), ..chip(0) };
        Sliceable::of(&reading).unwrap()
    }

    fn name(of: Option<&Template>) -> &'static str {
        of.map_or("whole", |template| template.name)
    }

    #[test]
    fn the_rule_of_the_requirements_holds_on_a_32_gb_910b() {
        let chip = sliceable(0x28, 32, 20);
        for (memory, wanted) in [
            (MIB, "vir05_1c_8g"),
            (8 * GIB, "vir05_1c_8g"),
            (8 * GIB + 1, "vir10_3c_16g"),
            (10_000 * MIB, "vir10_3c_16g"),
            (16 * GIB, "vir10_3c_16g"),
            (16 * GIB + 1, "whole"),
            (32 * GIB, "whole"),
        ] {
            assert_eq!(name(chip.by_memory(memory)), wanted, "{memory}");
        }
    }

    #[test]
    fn memory_is_a_fraction_of_the_chip_and_not_the_figure_in_the_name() {
        let chip = sliceable(0x29, 64, 20);
        assert_eq!(chip.template("vir05_1c_8g").unwrap().takes.memory, 16 * GIB);
        assert_eq!(name(chip.by_memory(8 * GIB)), "vir05_1c_8g");
        assert_eq!(name(chip.by_memory(17 * GIB)), "vir10_3c_16g");
    }

    #[test]
    fn every_bin_has_its_own_names() {
        let names = |board, gib, cores| {
            sliceable(board, gib, cores).templates.iter().map(|template| template.name).collect::<Vec<_>>()
        };
        assert_eq!(names(0x31, 64, 24), ["vir06_1c_16g", "vir12_3c_32g"]);
        assert_eq!(names(0x30, 64, 24), ["vir06_1c_16g", "vir12_3c_32g"]);
        assert_eq!(names(0x32, 64, 20), ["vir05_1c_16g", "vir10_3c_32g"]);
        assert_eq!(names(0x3e, 64, 20), ["vir05_1c_16g", "vir10_3c_32g"]);
        assert_eq!(names(0x28, 32, 20), ["vir05_1c_8g", "vir10_3c_16g", "vir10_3c_16g_nm", "vir10_4c_16g_m"]);
    }

    #[test]
    fn what_a_chip_is_to_be_cut_into_fits_it_as_a_whole() {
        let chip = sliceable(0x28, 32, 20);
        let check = |names: &str| {
            let names: Vec<_> = names.split('+').map(str::to_owned).collect();
            chip.check(&names).map_err(|why| why.to_string()).err().unwrap_or_default()
        };
        let fits = ["vir10_3c_16g+vir05_1c_8g+vir05_1c_8g", "vir10_3c_16g+vir10_3c_16g", "vir05_1c_8g"];
        assert_eq!(fits.map(check), [""; 3]);
        assert_eq!(
            check("vir05_1c_8g+vir10_3c_16g+vir10_3c_16g"),
            "asks for 1 x vir05_1c_8g + 2 x vir10_3c_16g, which is more than the chip has"
        );
        assert!(check("vir10_4c_16g_m+vir10_4c_16g_m").contains("more than the chip has"), "8 of 7 AI CPUs");
        assert_eq!(
            check("vir10_3c_16g+vir12_3c_32g"),
            "asks for vir12_3c_32g, which the chip does not have; \
             it has vir05_1c_8g, vir10_3c_16g, vir10_3c_16g_nm, vir10_4c_16g_m"
        );
        assert!(template_names().contains(&"vir12_3c_32g") && !template_names().contains(&"vir99"));
    }

    #[test]
    fn chips_that_are_not_cut_say_why() {
        let other = ChipReading { family: Family::Ascend310P, chip_name: "310P3".to_owned(), ..chip(0) };
        assert_eq!(Sliceable::of(&other).unwrap_err().to_string(), "310P3 is not cut: hard slicing is for 910B");
        let board = ChipReading { board_id: Some(0x99), ..chip(0) };
        assert_eq!(
            Sliceable::of(&board).unwrap_err().to_string(),
            "board id 0x99 of 910B4 is in no known template set"
        );
        let unknown = ChipReading { memory: None, ..chip(0) };
        assert_eq!(Sliceable::of(&unknown).unwrap_err().to_string(), "the memory of 910B4 is unknown");
    }

    #[test]
    fn exactness_is_computed() {
        let names = |of: &[&Template]| of.iter().map(|template| template.name).collect::<Vec<_>>();
        let b4 = sliceable(0x28, 32, 20);
        assert_eq!(names(&b4.exact()), ["vir05_1c_8g", "vir10_3c_16g"]);
        let with_media: Vec<_> = b4.templates.iter().collect();
        assert!(!b4.is_exact(&with_media), "two vir10_4c_16g_m want 8 of 7 AI CPUs");
        let b2 = sliceable(0x31, 64, 24);
        assert_eq!(names(&b2.exact()), ["vir06_1c_16g", "vir12_3c_32g"]);
        // With the 8 GB template that some drivers have, eight of it fit the memory and not the 6 AI CPUs.
        let mut eighths = b2.clone();
        let small = Template {
            name: "vir03_1c_8g",
            takes: Resources { memory: 8 * GIB, ai_cores: 3, ai_cpus: 1, media: 3 },
            plain: true,
        };
        eighths.templates.insert(0, small);
        assert_eq!(names(&eighths.exact()), ["vir06_1c_16g", "vir12_3c_32g"]);
        assert_eq!(eighths.mixes(&eighths.templates.iter().collect::<Vec<_>>()).len(), 35);
    }

    fn reading(templates: &[&str], free: Option<Resources>) -> CardReading {
        let vnpus = (100..).zip(templates).map(|(id, template)| {
            let template = template.get(..TEMPLATE_NAME_TOLD).unwrap_or(template).to_owned();
            VnpuReading { id, template, memory: 0, ai_cores: 0 }
        });
        CardReading { vnpus: vnpus.collect(), free, processes: Some(Vec::new()) }
    }

    fn mixes(chip: &Sliceable, reading: &CardReading) -> Vec<String> {
        let plain: Vec<_> = chip.templates.iter().filter(|template| template.plain).cloned().collect();
        chip.room(reading).map(|room| room.mixes(&plain)).unwrap_or_default().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn mixes_are_all_that_fit_and_to_which_nothing_can_be_added() {
        let b4 = sliceable(0x28, 32, 20);
        assert_eq!(
            mixes(&b4, &reading(&[], None)),
            ["4 x vir05_1c_8g", "2 x vir05_1c_8g + 1 x vir10_3c_16g", "2 x vir10_3c_16g"]
        );
        assert_eq!(
            mixes(&b4, &reading(&["vir05_1c_8g"], None)),
            ["3 x vir05_1c_8g", "1 x vir05_1c_8g + 1 x vir10_3c_16g"]
        );
        assert!(mixes(&b4, &reading(&["vir10_3c_16g", "vir10_3c_16g"], None)).is_empty());
        assert!(mixes(&b4, &reading(&["vir10_3c_16g"; 3], None)).is_empty(), "more than the chip has");
    }

    #[test]
    fn all_media_engines_fit_only_beside_a_part_that_has_none() {
        let b4 = sliceable(0x28, 32, 20);
        let all: Vec<_> = b4.empty().mixes(&b4.templates).iter().map(ToString::to_string).collect();
        // From the vendor's table: of 32 GiB, 20 AI cores, 7 AI CPUs and 24 JPEG decoders a vir05_1c_8g takes 8, 5, 1, 6,
        // a vir10_3c_16g 16, 10, 3, 12, its `_nm` 16, 10, 3, 0 and a vir10_4c_16g_m 16, 10, 4, 24.
        assert_eq!(
            all,
            [
                "4 x vir05_1c_8g",                          // 32, 20, 4, 24
                "2 x vir05_1c_8g + 1 x vir10_3c_16g",       // 32, 20, 5, 24
                "2 x vir05_1c_8g + 1 x vir10_3c_16g_nm",    // 32, 20, 5, 12
                "2 x vir10_3c_16g",                         // 32, 20, 6, 24
                "1 x vir10_3c_16g + 1 x vir10_3c_16g_nm",   // 32, 20, 6, 12
                "2 x vir10_3c_16g_nm",                      // 32, 20, 6, 0
                "1 x vir10_3c_16g_nm + 1 x vir10_4c_16g_m", // 32, 20, 7, 24
            ]
        );
        let fitting = |beside: &str| {
            let room = b4.room(&reading(&[beside], None)).unwrap();
            b4.templates.iter().map(|template| room.fitting(template)).collect::<Vec<_>>()
        };
        assert_eq!(fitting("vir05_1c_8g"), [3, 1, 1, 0]);
        assert_eq!(fitting("vir10_4c_16g_m"), [0, 0, 1, 0]);
        assert_eq!(fitting("vir10_3c_16g_nm"), [2, 1, 1, 1]);
        assert!(b4.check(&["vir10_4c_16g_m", "vir05_1c_8g"].map(str::to_owned)).is_err());
        assert!(b4.check(&["vir10_4c_16g_m", "vir10_3c_16g_nm"].map(str::to_owned)).is_ok());
        // What the chip says binds too, if it says it.
        let free = |media| Some(Resources { memory: 32 * GIB, ai_cores: 20, ai_cpus: 7, media });
        assert_eq!(mixes(&b4, &reading(&[], free(12))), ["2 x vir05_1c_8g", "1 x vir10_3c_16g"]);
        let untold = b4.room(&reading(&["vir05_1c_8g"], free(Resources::MEDIA_UNTOLD))).unwrap();
        assert_eq!((untold.left().media, untold.fitting(b4.template("vir10_4c_16g_m").unwrap())), (18, 0));
    }

    #[test]
    fn where_jpeg_decoders_suffice_so_do_all_media_engines() {
        // VPC, VDEC and JPEGE of each template, and of the chip, from the vendor's tables.
        let (b2, b3): (&[_], &[_]) = (
            &[("vir06_1c_16g", [2, 0, 1]), ("vir12_3c_32g", [5, 1, 2])],
            &[("vir05_1c_16g", [2, 0, 1]), ("vir10_3c_32g", [4, 1, 2])],
        );
        let b4: &[_] = &[
            ("vir05_1c_8g", [2, 0, 1]),
            ("vir10_3c_16g", [4, 1, 2]),
            ("vir10_3c_16g_nm", [0, 0, 0]),
            ("vir10_4c_16g_m", [9, 2, 4]),
        ];
        for (board, gib, cores, engines, has) in
            [(0x31, 64, 24, b2, [10, 2, 4]), (0x32, 64, 20, b3, [8, 2, 4]), (0x28, 32, 20, b4, [9, 2, 4])]
        {
            let chip = sliceable(board, gib, cores);
            for mix in chip.empty().mixes(&chip.templates) {
                for (engine, has) in has.into_iter().enumerate() {
                    let of = |name| engines.iter().find(|(other, _)| *other == name).unwrap().1[engine];
                    let taken: usize = mix.0.iter().map(|(name, count)| count * of(*name)).sum();
                    assert!(taken <= has, "{mix}: {taken} of {has}");
                }
            }
        }
    }

    #[test]
    fn what_the_chip_says_is_free_binds_too() {
        let b4 = sliceable(0x28, 32, 20);
        let free = |gib, ai_cores| Some(Resources { memory: gib * GIB, ai_cores, ai_cpus: 7, media: 24 });
        // It keeps some memory for itself: 29 of 32 GiB are room for all.
        assert_eq!(mixes(&b4, &reading(&[], free(29, 20))).len(), 3);
        assert_eq!(mixes(&b4, &reading(&[], free(32, 14))), ["2 x vir05_1c_8g", "1 x vir10_3c_16g"]);
        assert!(mixes(&b4, &reading(&[], free(32, 4))).is_empty());
        let room = b4.room(&reading(&["vir05_1c_8g"], free(22, 15))).unwrap();
        assert_eq!(room.left(), Resources { media: 18, ..free(22, 15).unwrap() });
        let numbers: Vec<_> = b4.templates.iter().map(|template| room.fitting(template)).collect();
        assert_eq!(numbers, [3, 1, 1, 0]);
    }

    #[test]
    fn only_the_first_cut_minds_processes() {
        assert_eq!(reading(&[], None).obstacle(), None);
        let busy = |templates| CardReading { processes: Some(vec![4711]), ..reading(templates, None) };
        assert_eq!(busy(&[]).obstacle().unwrap(), "processes run on it: [4711]");
        assert_eq!(busy(&["vir05_1c_8g"]).obstacle(), None);
        let blind = CardReading { processes: None, ..reading(&[], None) };
        assert_eq!(blind.obstacle().unwrap(), "the processes on it cannot be read");
    }

    #[test]
    fn ids_of_a_chip_are_sixteen_from_a_hundred_on() {
        assert_eq!(ids(0), 100..116);
        assert_eq!(ids(3), 148..164);
        assert_eq!(ids(63).end, 1124);
    }

    #[test]
    fn a_size_within_an_eighth_is_the_templates_own() {
        assert!(is_size_of(7168 * MIB, 8 * GIB));
        assert!(is_size_of(9 * GIB, 8 * GIB));
        assert!(!is_size_of(16 * GIB, 8 * GIB));
        assert!(!is_size_of(7 * GIB - 1, 8 * GIB));
    }

    proptest! {
        #[test]
        fn every_mix_fits_and_is_full(
            board in prop::sample::select(&[0x28, 0x31, 0x32][..]),
            free in prop::option::of((0..=64u64, 0..=24u32, 0..=7u32, 0..=28u32)),
            made in 0..4usize,
        ) {
            let chip = sliceable(board, if board == 0x28 { 32 } else { 64 }, if board == 0x31 { 24 } else { 20 });
            let free =
                free.map(|(gib, ai_cores, ai_cpus, media)| Resources { memory: gib * GIB, ai_cores, ai_cpus, media });
            let Some(room) = chip.room(&reading(&vec![chip.templates[0].name; made], free)) else { return Ok(()) };
            let mixes = room.mixes(&chip.templates);
            for mix in &mixes {
                let parts = mix.0.iter().flat_map(|(name, count)| vec![chip.template(name).unwrap(); *count]);
                let rest = parts.into_iter().try_fold(room, Room::after);
                prop_assert!(rest.is_some(), "{mix} does not fit");
                prop_assert!(chip.templates.iter().all(|template| rest.unwrap().after(template).is_none()), "{mix}");
            }
            prop_assert_eq!(mixes.is_empty(), chip.templates.iter().all(|template| room.fitting(template) == 0));
        }

        #[test]
        fn what_memory_picks_always_holds_the_request(memory in 1..=32 * GIB, bin in 0..3usize) {
            let board = [0x28, 0x31, 0x32][bin];
            let gib = [32, 64, 64][bin];
            let chip = sliceable(board, gib, if bin == 1 { 24 } else { 20 });
            if let Some(template) = chip.by_memory(memory) {
                prop_assert!(template.takes.memory >= memory);
                let smaller = chip.templates.iter().filter(|other| other.plain && other.takes.memory < template.takes.memory);
                prop_assert!(smaller.into_iter().all(|other| other.takes.memory < memory));
            }
        }

        #[test]
        fn exact_sets_never_over_commit(picks in prop::collection::vec(0..2usize, 0..20), bin in 0..3usize) {
            let board = [0x28, 0x31, 0x32][bin];
            let chip = sliceable(board, [32, 64, 64][bin], if bin == 1 { 24 } else { 20 });
            let exact = chip.exact();
            let (mut memory, mut left) = (chip.whole.memory, Some(chip.whole));
            for pick in picks {
                let takes = exact[pick].takes;
                let Some(rest) = memory.checked_sub(takes.memory) else { continue };
                memory = rest;
                left = left.and_then(|left| left.minus(takes));
                prop_assert!(left.is_some(), "the scheduler would book it, and it does not fit");
            }
        }
    }
}
