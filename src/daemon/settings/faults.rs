//! The administrator's table of faults: a file of codes and what is done about each.

use std::{collections::BTreeMap, io, path::Path};

use toml::de::{DeTable, DeValue};

use super::{SettingsError, fragment::written};
use crate::domain::health::{Action, InvalidEntry, parse_code};

/// Where it is looked for if no file is named.
pub(super) const FILE: &str = "/etc/npu-dra/faults.toml";

/// Reads a table. One that was named must exist.
pub(super) fn read(named: Option<&Path>) -> Result<BTreeMap<u32, Action>, SettingsError> {
    let path = named.unwrap_or(Path::new(FILE));
    match std::fs::read_to_string(path) {
        Ok(text) => parse(path, &text),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(source) => Err(SettingsError::Read { path: path.to_owned(), source }),
    }
}

/// Reads a table's text: lines such as `80E01801 = "evict"`.
fn parse(path: &Path, text: &str) -> Result<BTreeMap<u32, Action>, SettingsError> {
    let line = |at: usize| text.get(..at).unwrap_or(text).matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| SettingsError::Syntax {
        path: path.to_owned(),
        line: error.span().map_or(1, |span| line(span.start)),
        why: error.message().trim_end().replace('\n', "; "),
    })?;
    let mut actions = BTreeMap::new();
    // In the order of the file, so that the second of two is the one that is told.
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in entries {
        let at = line(name.span().start);
        let refuse = |why| SettingsError::FaultTable { path: path.to_owned(), line: at, why };
        let code = parse_code(name.get_ref()).map_err(refuse)?;
        let action = match value.get_ref() {
            DeValue::String(word) => word.parse().map_err(refuse)?,
            _ => return Err(refuse(InvalidEntry::Action(written(text, value)))),
        };
        if actions.insert(code, action).is_some() {
            return Err(refuse(InvalidEntry::Twice(code)));
        }
    }
    Ok(actions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(Path::new("faults.toml"), text).unwrap_err().to_string()
    }

    #[test]
    fn a_table_names_codes_with_and_without_prefix() {
        let text = "# ours\n80E01801 = \"evict\"\n0x81078603 = 'warn'\n\"8c2fa009\" = \"ignore\"\n";
        let table = parse(Path::new("faults.toml"), text).unwrap();
        let wanted = [(0x80E0_1801, Action::Evict), (0x8107_8603, Action::Warn), (0x8C2F_A009, Action::Ignore)];
        assert_eq!(table, BTreeMap::from(wanted));
        assert!(parse(Path::new("faults.toml"), "").unwrap().is_empty());
    }

    #[test]
    fn a_mistake_is_told_with_its_line() {
        let cases = [
            ("80E01801 = \"taint\"\n80E0180 = \"taint\"\n", "faults.toml:2: \"80E0180\" is no fault code"),
            (
                "\n\n80E01801 = \"evicted\"\n",
                "faults.toml:3: \"evicted\" is no action; use ignore, warn, taint or evict",
            ),
            ("80E01801 = 3\n", "faults.toml:1: \"3\" is no action"),
            ("80E01801 = \"taint\"\n0x80e01801 = \"warn\"\n", "faults.toml:2: code 80E01801 is there twice"),
            ("80E01801 = \"taint\"\n80E01801 = \"warn\"\n", "faults.toml:2: not valid TOML"),
            ("[80E01801]\naction = \"taint\"\n", "faults.toml:1: \"a table\" is no action"),
            ("80E01801 = taint\n", "faults.toml:1: not valid TOML"),
        ];
        for (text, wanted) in cases {
            assert!(error(text).contains(wanted), "{text}: {}", error(text));
        }
    }

    #[test]
    fn a_named_table_must_exist() {
        assert!(
            read(Some(Path::new("/nowhere/faults.toml"))).unwrap_err().to_string().contains("/nowhere/faults.toml")
        );
    }
}
