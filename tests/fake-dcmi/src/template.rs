//! Template tables: which slices a chip offers. A template's memory is a fraction of the chip, whatever its name says.

use serde::{Deserialize, Serialize};

use crate::data::{Card, Chip, Family, Slicing};

/// One fixed slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template {
    /// Name as passed to the create call.
    pub name: &'static str,
    /// The slice is one `share`-th of the chip's memory.
    pub share: u64,
    /// AI cores.
    pub aicores: u32,
    /// AI CPUs.
    pub aicpus: u16,
    /// Media engines.
    pub media: Media,
}

/// Media engines, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Media {
    /// Image processing.
    pub vpc: u16,
    /// Video encoder.
    pub venc: u16,
    /// Video decoder.
    pub vdec: u16,
    /// JPEG decoder.
    pub jpegd: u16,
    /// JPEG encoder.
    pub jpege: u16,
}

impl Media {
    #[allow(clippy::similar_names, reason = "the engines are called so")]
    const fn new(vpc: u16, venc: u16, vdec: u16, jpegd: u16, jpege: u16) -> Self {
        Self { vpc, venc, vdec, jpegd, jpege }
    }

    /// Sum, engine by engine.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self::new(
            self.vpc + other.vpc,
            self.venc + other.venc,
            self.vdec + other.vdec,
            self.jpegd + other.jpegd,
            self.jpege + other.jpege,
        )
    }

    /// What is left after `other`; never below zero.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self::new(
            self.vpc.saturating_sub(other.vpc),
            self.venc.saturating_sub(other.venc),
            self.vdec.saturating_sub(other.vdec),
            self.jpegd.saturating_sub(other.jpegd),
            self.jpege.saturating_sub(other.jpege),
        )
    }

    /// Whether all of this is there in `total`.
    #[must_use]
    pub const fn within(self, total: Self) -> bool {
        self.vpc <= total.vpc
            && self.venc <= total.venc
            && self.vdec <= total.vdec
            && self.jpegd <= total.jpegd
            && self.jpege <= total.jpege
    }
}

/// The template sets that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateSet {
    /// 310P, any memory size.
    P310,
    /// 910B1, 910B2, A3 training: halves and quarters of 24 cores.
    B2,
    /// 910B3, 910B4-1 on newer drivers, A3 inference: halves and quarters of 20 cores, 64 GB names.
    B3,
    /// 910B4: halves and quarters of 20 cores, 32 GB names, media variants.
    B4,
}

const fn template(name: &'static str, share: u64, aicores: u32, aicpus: u16, media: Media) -> Template {
    Template { name, share, aicores, aicpus, media }
}

const P310: &[Template] = &[
    template("vir01", 8, 1, 1, Media::new(1, 0, 1, 2, 1)),
    template("vir02", 4, 2, 2, Media::new(3, 1, 3, 4, 2)),
    template("vir02_1c", 4, 2, 1, Media::new(3, 0, 3, 4, 2)),
    template("vir04", 2, 4, 4, Media::new(6, 2, 6, 8, 4)),
    template("vir04_3c", 2, 4, 3, Media::new(6, 1, 6, 8, 4)),
    template("vir04_3c_ndvpp", 2, 4, 3, Media::new(0, 0, 0, 0, 0)),
    template("vir04_4c_dvpp", 2, 4, 4, Media::new(12, 3, 12, 16, 8)),
];
const B2: &[Template] = &[
    template("vir06_1c_16g", 4, 6, 1, Media::new(2, 0, 0, 7, 1)),
    template("vir12_3c_32g", 2, 12, 3, Media::new(5, 0, 1, 14, 2)),
];
const B3: &[Template] = &[
    template("vir05_1c_16g", 4, 5, 1, Media::new(2, 0, 0, 6, 1)),
    template("vir10_3c_32g", 2, 10, 3, Media::new(4, 0, 1, 12, 2)),
];
const B4: &[Template] = &[
    template("vir05_1c_8g", 4, 5, 1, Media::new(2, 0, 0, 6, 1)),
    template("vir10_3c_16g", 2, 10, 3, Media::new(4, 0, 1, 12, 2)),
    template("vir10_4c_16g_m", 2, 10, 4, Media::new(9, 0, 2, 24, 4)),
    template("vir10_3c_16g_nm", 2, 10, 3, Media::new(0, 0, 0, 0, 0)),
];

impl TemplateSet {
    /// Its templates, small to large.
    #[must_use]
    pub const fn templates(self) -> &'static [Template] {
        match self {
            Self::P310 => P310,
            Self::B2 => B2,
            Self::B3 => B3,
            Self::B4 => B4,
        }
    }

    /// Media engines of a whole chip.
    #[must_use]
    pub const fn media(self) -> Media {
        match self {
            Self::P310 => Media::new(12, 3, 12, 16, 8),
            Self::B2 => Media::new(10, 0, 2, 28, 4),
            Self::B3 => Media::new(8, 0, 2, 24, 4),
            Self::B4 => Media::new(9, 0, 2, 24, 4),
        }
    }

    /// The template of this name.
    #[must_use]
    pub fn find(self, name: &str) -> Option<Template> {
        self.templates().iter().find(|template| template.name == name).copied()
    }

    /// The set that a card's driver offers; `Err` with the code of a chip that cannot be sliced or is not known.
    pub fn of(card: &Card, slicing: &Slicing) -> Result<Self, i32> {
        if let Some(set) = slicing.templates {
            return Ok(set);
        }
        match card.family {
            Family::Ascend310P => Ok(Self::P310),
            Family::Ascend910C => slicing.on_910c.ok_or(crate::code::NOT_SUPPORT),
            Family::Ascend910B => match card.board_id {
                0x13 | 0x31 | 0x3a | 0x43 | 0x51 | 0x30 | 0x39 | 0x50 => Ok(Self::B2),
                0x10 | 0x12 | 0x32 | 0x3b | 0x42 | 0x53 | 0x38 | 0x3e => Ok(Self::B3),
                0x11 | 0x28 | 0x29 | 0x33 | 0x34 | 0x37 | 0x3c | 0x3d | 0x40 | 0x41 | 0x52 | 0x54 => Ok(Self::B4),
                _ => Err(crate::code::INVALID_PARAMETER),
            },
        }
    }
}

/// Most vNPUs on one chip.
#[must_use]
pub const fn limit(family: Family) -> usize {
    match family {
        Family::Ascend310P => 7,
        Family::Ascend910B | Family::Ascend910C => 16,
    }
}

/// Range of the vNPU ids of a chip.
#[must_use]
pub const fn ids(phy: u32) -> std::ops::Range<u32> {
    phy * 16 + 100..phy * 16 + 116
}

/// Memory of a slice of this chip, in MB.
#[must_use]
pub const fn memory_mb(template: Template, chip: &Chip) -> u64 {
    chip.memory.mb() / template.share
}
