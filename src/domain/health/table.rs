//! What is done about a fault: by its code, as the administrator or the vendor's table says, else by its level.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::Level;

/// The code that stands for a card which has dropped off its bus; also made up here where a card does not answer any more.
pub const CARD_LOST: u32 = 0x40F8_4E00;
/// The code that stands for a network link that is down.
pub const LINK_DOWN: u32 = 0x8107_8603;

/// What is done about a fault, from nothing to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Nothing; the code is shown.
    Ignore,
    /// It is said; the card stays usable.
    Warn,
    /// No new claim gets the card (`NoSchedule`).
    Taint,
    /// Pods that do not tolerate it are evicted too (`NoExecute`). Never by itself: only an administrator's table says so.
    Evict,
}

impl Action {
    /// All actions.
    pub const ALL: [Self; 4] = [Self::Ignore, Self::Warn, Self::Taint, Self::Evict];

    /// The word in an administrator's table.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ignore => "ignore",
            Self::Warn => "warn",
            Self::Taint => "taint",
            Self::Evict => "evict",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a text is no entry of an administrator's table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEntry {
    /// Not a code.
    #[error("{0:?} is no fault code; a code is eight hex digits, such as 80E01801")]
    Code(String),
    /// Not an action.
    #[error("{0:?} is no action; use ignore, warn, taint or evict")]
    Action(String),
    /// A code that stands in the table twice.
    #[error("code {0:08X} is there twice")]
    Twice(u32),
}

impl FromStr for Action {
    type Err = InvalidEntry;

    fn from_str(text: &str) -> Result<Self, InvalidEntry> {
        let all = Self::ALL.into_iter();
        all.into_iter().find(|action| action.as_str() == text).ok_or_else(|| InvalidEntry::Action(text.to_owned()))
    }
}

/// Reads a fault code: eight hex digits, with or without `0x`.
pub fn parse_code(text: &str) -> Result<u32, InvalidEntry> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let fits = digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let code = u32::from_str_radix(digits, 16);
    code.ok().filter(|_| fits).ok_or_else(|| InvalidEntry::Code(text.to_owned()))
}

/// Codes whose meaning is known, in ascending order.
const KNOWN: [(u32, &str, Action); 7] = [
    (CARD_LOST, "card dropped", Action::Taint),
    (0x80C9_8009, "AI core bus error", Action::Taint),
    (0x80CB_8009, "vector core bus error", Action::Taint),
    (0x80E0_1801, "HBM multi-bit ECC", Action::Taint),
    (0x80E1_8005, "HBM fault", Action::Taint),
    (LINK_DOWN, "network link down", Action::Ignore),
    (0x8C2F_A009, "reset finished", Action::Ignore),
];

/// What a code means, if that is known.
#[must_use]
pub fn meaning(code: u32) -> Option<&'static str> {
    KNOWN.iter().find(|(known, ..)| *known == code).map(|(_, meaning, _)| *meaning)
}

/// A code and what it means.
#[must_use]
pub fn named(code: u32) -> String {
    meaning(code).map_or_else(|| format!("{code:08X}"), |meaning| format!("{code:08X} {meaning}"))
}

/// Decides about faults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// What the administrator says, by code.
    pub overrides: BTreeMap<u32, Action>,
    /// True if a link that is down taints its card. Inference hosts without cables are down for ever.
    pub link_taints: bool,
}

impl Table {
    /// What is done about a code of this level.
    #[must_use]
    pub fn action(&self, code: u32, level: Level) -> Action {
        self.fixed(code).unwrap_or(match level {
            Level::Ok => Action::Ignore,
            Level::Minor => Action::Warn,
            // How bad a code is that nobody knows and nothing explains cannot be told: no new work until it is gone.
            Level::Unknown | Level::Major | Level::Critical | Level::Gone => Action::Taint,
        })
    }

    /// What is done about a code whatever its level, if that is settled.
    #[must_use]
    pub fn fixed(&self, code: u32) -> Option<Action> {
        if let Some(action) = self.overrides.get(&code) {
            return Some(*action);
        }
        if code == LINK_DOWN && self.link_taints {
            return Some(Action::Taint);
        }
        KNOWN.iter().find(|(known, ..)| *known == code).map(|(.., action)| *action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_evicts_unless_the_administrator_says_so() {
        let table = Table { overrides: BTreeMap::new(), link_taints: true };
        for level in [Level::Ok, Level::Unknown, Level::Minor, Level::Major, Level::Critical, Level::Gone] {
            for code in KNOWN.iter().map(|(code, ..)| *code).chain([0, 7, u32::MAX]) {
                assert!(table.action(code, level) < Action::Evict, "{code:08X} {level}");
            }
        }
        let table = Table { overrides: BTreeMap::from([(0x80E0_1801, Action::Evict)]), link_taints: false };
        assert_eq!(table.action(0x80E0_1801, Level::Ok), Action::Evict);
    }

    #[test]
    fn an_unknown_code_is_judged_by_its_level_and_tainted_if_that_is_unknown_too() {
        let table = Table::default();
        let by_level = [Level::Ok, Level::Minor, Level::Major, Level::Critical, Level::Unknown];
        let wanted = [Action::Ignore, Action::Warn, Action::Taint, Action::Taint, Action::Taint];
        assert_eq!(by_level.map(|level| table.action(0xDEAD_BEEF, level)), wanted);
    }

    #[test]
    fn a_link_that_is_down_taints_only_if_it_is_told_to() {
        let link = |table: &Table| table.action(LINK_DOWN, Level::Critical);
        assert_eq!(link(&Table::default()), Action::Ignore);
        assert_eq!(link(&Table { link_taints: true, ..Table::default() }), Action::Taint);
        let overrides = BTreeMap::from([(LINK_DOWN, Action::Warn)]);
        assert_eq!(
            link(&Table { overrides, link_taints: true }),
            Action::Warn,
            "the administrator's table is above all"
        );
    }

    #[test]
    fn codes_are_eight_hex_digits() {
        for good in ["80E01801", "80e01801", "0x80E01801"] {
            assert_eq!(parse_code(good), Ok(0x80E0_1801));
        }
        for bad in ["", "0x", "80E0180", "080E01801", "80E0180G", "+0E01801", " 80E01801", "0X80E01801", "200001002"] {
            assert!(parse_code(bad).is_err(), "{bad:?}");
        }
        assert_eq!("evict".parse(), Ok(Action::Evict));
        assert!("Evict".parse::<Action>().is_err());
    }
}
