//! Planted faults: `faults.json`, read again at each call so that a test can change it under a running daemon.
//!
//! ```json
//! {"rules": [
//!   {"function": "dcmi_get_device_health", "card": 3, "action": {"return": -8012}},
//!   {"function": "dcmi_init", "times": 1, "action": "hang"},
//!   {"function": "dcmi_create_vdevice", "skip": 2, "when": "after", "action": "kill_parent"},
//!   {"function": "*", "action": {"delay_ms": 5}}
//! ]}
//! ```

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The content of `faults.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultFile {
    /// Each call obeys every rule that matches it, in this order; the first one with an end in it decides.
    pub rules: Vec<Fault>,
}

/// One planted fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// C name of the function, or `*` for every call.
    pub function: String,
    /// Only calls for this card id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<i32>,
    /// Only calls for this device id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<i32>,
    /// This many matching calls pass unharmed first.
    #[serde(default)]
    pub skip: u64,
    /// Then this many are hit; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// When it strikes.
    #[serde(default)]
    pub when: When,
    /// What happens.
    pub action: Action,
    /// Names the rule's counter in `hits/`, so that a count survives the process; empty: made from the rule itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
}

/// Whether a fault strikes before, in the middle of or after the call's effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// The effect does not happen, unless the action says that the call goes on.
    #[default]
    Before,
    /// Create and destroy only: the vNPU is made or gone, `vnpu.cfg` does not know it yet. A code ends the call there.
    During,
    /// The effect happens, the caller learns something else or nothing.
    After,
}

/// What a fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The call ends with this code (0: a success that wrote nothing, if before the effect).
    Return(i32),
    /// The call takes this many milliseconds longer and goes on.
    DelayMs(u64),
    /// The call never ends.
    Hang,
    /// SIGSEGV.
    Crash,
    /// SIGKILL to the calling process.
    KillSelf,
    /// SIGKILL to the parent of the calling process; the call then waits for its own death, at most ten seconds.
    KillParent,
    /// The chip that the call is about falls off the bus; the call goes on.
    Drop,
    /// The call works, but every byte that it writes is 0xA5.
    Garbage,
}

impl Fault {
    /// A fault at every call of `function`, before its effect.
    #[must_use]
    pub fn new(function: &str, action: Action) -> Self {
        Self {
            function: function.to_owned(),
            card: None,
            device: None,
            skip: 0,
            times: None,
            when: When::Before,
            action,
            id: String::new(),
        }
    }

    /// The next `times` inits end with -8005.
    #[must_use]
    pub fn init_fails(times: u64) -> Self {
        Self::new("dcmi_init", Action::Return(crate::code::INNER_ERR)).times(times)
    }

    /// The next init never ends.
    #[must_use]
    pub fn init_hangs() -> Self {
        Self::new("dcmi_init", Action::Hang).times(1)
    }

    /// Only for this card id.
    #[must_use]
    pub const fn card(mut self, card: i32) -> Self {
        self.card = Some(card);
        self
    }

    /// Only for this device id.
    #[must_use]
    pub const fn device(mut self, device: i32) -> Self {
        self.device = Some(device);
        self
    }

    /// Lets this many matching calls pass first.
    #[must_use]
    pub const fn skip(mut self, calls: u64) -> Self {
        self.skip = calls;
        self
    }

    /// Hits only this many calls.
    #[must_use]
    pub const fn times(mut self, calls: u64) -> Self {
        self.times = Some(calls);
        self
    }

    /// Strikes after the effect.
    #[must_use]
    pub const fn after(mut self) -> Self {
        self.when = When::After;
        self
    }

    /// Strikes in the middle of a create or destroy.
    #[must_use]
    pub const fn during(mut self) -> Self {
        self.when = When::During;
        self
    }

    /// Whether the rule is about this call at all, counted or not.
    pub(crate) fn matches(&self, function: &str, target: Option<(i32, i32)>) -> bool {
        (self.function == "*" || self.function == function)
            && self.card.is_none_or(|card| target.is_some_and(|(c, _)| c == card))
            && self.device.is_none_or(|device| target.is_some_and(|(_, d)| d == device))
    }

    /// Whether the rule strikes at its `hit`-th matching call (from 1).
    pub(crate) fn strikes(&self, hit: u64) -> bool {
        hit > self.skip && self.times.is_none_or(|times| hit <= self.skip.saturating_add(times))
    }

    /// Name of the rule's counter file.
    pub(crate) fn counter(&self) -> String {
        if !self.id.is_empty() {
            return self.id.replace('/', "_");
        }
        let mut hasher = DefaultHasher::new();
        format!("{self:?}").hash(&mut hasher);
        format!("rule-{:016x}", hasher.finish())
    }
}

/// How long a call that killed its parent waits for its own end.
pub(crate) const LAST_WAIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::{Action, Fault, FaultFile, When};

    #[test]
    fn a_file_written_by_hand_is_understood() {
        let text = include_str!("fault.rs");
        let json: String = text.lines().skip(3).take(6).map(|line| line.trim_start_matches("//!")).collect();
        let file: FaultFile = serde_json::from_str(&json).unwrap();
        assert_eq!(file.rules.len(), 4);
        assert_eq!(file.rules[0], Fault::new("dcmi_get_device_health", Action::Return(-8012)).card(3));
        assert_eq!((file.rules[2].skip, file.rules[2].when), (2, When::After));
        assert!(serde_json::from_str::<FaultFile>(r#"{"rules": [{"function": "*", "actoin": "hang"}]}"#).is_err());
    }

    #[test]
    fn a_rule_strikes_after_those_it_skips_and_as_often_as_it_says() {
        let rule = Fault::new("*", Action::Hang).skip(1).times(2);
        assert_eq!([1, 2, 3, 4].map(|hit| rule.strikes(hit)), [false, true, true, false]);
        assert!(Fault::new("*", Action::Hang).strikes(u64::MAX));
        assert!(rule.matches("dcmi_init", None) && !rule.clone().card(1).matches("dcmi_init", None));
    }
}
