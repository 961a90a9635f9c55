//! Second stage: one value for each key, the strongest, with where it came from.

use std::{collections::HashMap, fmt, path::PathBuf, time::Duration};

use super::{
    Given, SettingsError,
    fragment::Fragment,
    keys::{KEYS, Key, RUNTIME_DIR, STATE_DIR, Value},
};

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The default.
    Default,
    /// A file, with the line.
    File(PathBuf, usize),
    /// An environment variable.
    Variable(String),
    /// A flag.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Variable(name) => write!(f, "variable {name}"),
            Self::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// One value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// The value.
    pub value: Value,
    /// Where it came from.
    pub origin: Origin,
}

/// The strongest value of each key that is set anywhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inputs {
    set: HashMap<&'static str, Input>,
}

impl Inputs {
    /// Merges: flag over environment variable over file, and a later file over an earlier one.
    pub(super) fn merge(fragments: Vec<Fragment>, given: &Given<'_>) -> Result<Self, SettingsError> {
        let mut inputs = Self::default();
        for Fragment { path, values } in fragments {
            for (key, value, line) in values {
                inputs.set.insert(key.name, Input { value, origin: Origin::File(path.clone(), line) });
            }
        }
        for key in KEYS {
            let variable = key.variable();
            // Templates leave variables empty where nothing is to be said.
            if let Some(text) = (given.variable)(&variable).filter(|text| !text.is_empty()) {
                inputs.take(key, &text, Origin::Variable(variable))?;
            }
            if let Some(text) = (given.flag)(key) {
                inputs.take(key, &text, Origin::Flag(key.flag))?;
            }
        }
        for (key, variable) in [(&STATE_DIR, "STATE_DIRECTORY"), (&RUNTIME_DIR, "RUNTIME_DIRECTORY")] {
            // systemd separates several directories by colons; the first is ours.
            let directory = (given.variable)(variable).and_then(|text| text.split(':').next().map(str::to_owned));
            if let Some(text) = directory.filter(|text| !text.is_empty() && !inputs.set.contains_key(key.name)) {
                inputs.take(key, &text, Origin::Variable(variable.to_owned()))?;
            }
        }
        Ok(inputs)
    }

    fn take(&mut self, key: &'static Key, text: &str, origin: Origin) -> Result<(), SettingsError> {
        let value = key.kind.parse(text).map_err(|allowed| SettingsError::Value {
            from: origin.to_string(),
            key: key.name,
            value: format!("{text:?}"),
            allowed,
        })?;
        self.set.insert(key.name, Input { value, origin });
        Ok(())
    }

    /// A key's value, its default if it is not set.
    #[must_use]
    pub fn get(&self, key: &Key) -> Input {
        self.set.get(key.name).cloned().unwrap_or_else(|| Input {
            value: key.kind.parse(key.default).unwrap_or_else(|_| Value::Text(key.default.to_owned())),
            origin: Origin::Default,
        })
    }

    /// True if the key is set anywhere.
    pub(super) fn is_set(&self, key: &Key) -> bool {
        self.set.contains_key(key.name)
    }

    /// Text, path or choice.
    pub(super) fn text(&self, key: &Key) -> String {
        match self.get(key).value {
            Value::Text(text) => text,
            other => other.to_string(),
        }
    }

    /// Text that may be absent.
    pub(super) fn some_text(&self, key: &Key) -> Option<String> {
        Some(self.text(key)).filter(|text| !text.is_empty())
    }

    /// A path.
    pub(super) fn path(&self, key: &Key) -> PathBuf {
        self.text(key).into()
    }

    /// A path that may be absent.
    pub(super) fn some_path(&self, key: &Key) -> Option<PathBuf> {
        self.some_text(key).map(Into::into)
    }

    /// A switch.
    pub(super) fn switch(&self, key: &Key) -> bool {
        self.get(key).value == Value::Switch(true)
    }

    /// A number.
    pub(super) fn number(&self, key: &Key) -> i64 {
        match self.get(key).value {
            Value::Number(number) => number,
            _ => 0,
        }
    }

    /// A span of time.
    pub(super) fn span(&self, key: &Key) -> Duration {
        match self.get(key).value {
            Value::Span(span) => span,
            _ => Duration::ZERO,
        }
    }

    /// An error about a key's value, naming where it came from.
    pub(super) fn refuse(&self, key: &Key, allowed: impl fmt::Display) -> SettingsError {
        let Input { value, origin } = self.get(key);
        SettingsError::Value {
            from: origin.to_string(),
            key: key.name,
            value: value.to_string(),
            allowed: allowed.to_string(),
        }
    }
}
