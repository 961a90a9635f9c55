//! First stage: what each file says, every value with its line.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    SettingsError,
    keys::{self, Key, Kind, Value},
};

/// Where files are looked for, the strongest first, if no `--config` is given.
const DIRECTORIES: [&str; 3] = ["/etc/npu-dra", "/run/npu-dra", "/usr/lib/npu-dra"];
const FILE: &str = "npu-dra.toml";

/// What one file says.
#[derive(Debug)]
pub(super) struct Fragment {
    /// The file.
    pub(super) path: PathBuf,
    /// Values, in the order of the file's keys.
    pub(super) values: Vec<(&'static Key, Value, usize)>,
}

/// Reads all files, the weakest first: the main file, then its drop-ins by name.
///
/// A named file must exist; where none is named, none need exist. Of drop-ins with one name in several directories
/// the strongest directory's counts alone.
pub(super) fn read_all(named: Option<&Path>) -> Result<Vec<Fragment>, SettingsError> {
    let mains: Vec<PathBuf> = match named {
        Some(path) => vec![path.to_owned()],
        None => DIRECTORIES.iter().map(|directory| Path::new(directory).join(FILE)).collect(),
    };
    let mut fragments = Vec::new();
    for main in &mains {
        match std::fs::read_to_string(main) {
            Ok(text) => {
                fragments.push(parse(main, &text)?);
                break;
            }
            Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(SettingsError::Read { path: main.clone(), source }),
        }
    }
    let mut drop_ins: BTreeMap<std::ffi::OsString, PathBuf> = BTreeMap::new();
    for main in mains.iter().rev() {
        for path in drop_ins_of(main)? {
            if let Some(name) = path.file_name() {
                drop_ins.insert(name.to_owned(), path);
            }
        }
    }
    for path in drop_ins.into_values() {
        let text =
            std::fs::read_to_string(&path).map_err(|source| SettingsError::Read { path: path.clone(), source })?;
        fragments.push(parse(&path, &text)?);
    }
    Ok(fragments)
}

/// The files `<main>.d/*.conf` and `*.toml`; none if there is no such directory.
fn drop_ins_of(main: &Path) -> Result<Vec<PathBuf>, SettingsError> {
    let mut directory = main.as_os_str().to_owned();
    directory.push(".d");
    let directory = PathBuf::from(directory);
    let failed = |source| SettingsError::Read { path: directory.clone(), source };
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(failed(source)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|extension| extension == "conf" || extension == "toml") {
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Reads one file's text.
pub(super) fn parse(path: &Path, text: &str) -> Result<Fragment, SettingsError> {
    let file = File { path, text };
    let table = DeTable::parse(text).map_err(|error| SettingsError::Syntax {
        path: path.to_owned(),
        line: error.span().map_or(1, |span| file.line(&span)),
        why: error.message().trim_end().replace('\n', "; "),
    })?;
    let mut values = Vec::new();
    walk(&file, "", table.get_ref(), &mut values)?;
    Ok(Fragment { path: path.to_owned(), values })
}

/// A file that is being read.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
}

impl File<'_> {
    /// The line that a place is in, from 1.
    fn line(&self, span: &Range<usize>) -> usize {
        self.text.get(..span.start).unwrap_or(self.text).matches('\n').count() + 1
    }
}

/// A value as it is written in the text of its file, as much as a line of an error can hold.
pub(super) fn written(text: &str, value: &Spanned<DeValue<'_>>) -> String {
    const LONGEST: usize = 60;
    if value.get_ref().is_table() {
        return "a table".to_owned();
    }
    let line = text.get(value.span()).unwrap_or_default().lines().next().unwrap_or_default();
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

/// Takes in a table; the names of tables, each with a dot behind it, are put before the names in them.
fn walk(
    file: &File<'_>,
    prefix: &str,
    table: &DeTable<'_>,
    values: &mut Vec<(&'static Key, Value, usize)>,
) -> Result<(), SettingsError> {
    for (name, value) in table {
        let (path, at) = (file.path, file.line(&name.span()));
        let dotted = format!("{prefix}{}", name.get_ref());
        let Some(key) = keys::by_flag(&dotted.replace('.', "-")) else {
            if let DeValue::Table(inner) = value.get_ref() {
                walk(file, &format!("{dotted}."), inner, values)?;
                continue;
            }
            return Err(SettingsError::UnknownKey { path: path.to_owned(), line: at, key: dotted });
        };
        if values.iter().any(|(other, ..)| other.name == key.name) {
            return Err(SettingsError::TwiceInFile { path: path.to_owned(), line: at, key: key.name });
        }
        let value = read(key.kind, value, file).map_err(|(value, allowed)| SettingsError::Value {
            from: format!("{}:{at}", path.display()),
            key: key.name,
            value,
            allowed,
        })?;
        values.push((key, value, at));
    }
    Ok(())
}

/// Reads one value; its TOML type must be the kind's own. An error gives the value and what is allowed.
fn read(kind: Kind, value: &Spanned<DeValue<'_>>, file: &File<'_>) -> Result<Value, (String, String)> {
    let refused = |value: String, allowed| Err((value, allowed));
    match (kind, value.get_ref()) {
        (Kind::Switch, DeValue::Boolean(on)) => Ok(Value::Switch(*on)),
        (Kind::Number(..), DeValue::Integer(number)) => {
            let text = match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => number.to_string(),
                Err(_) => number.as_str().to_owned(),
            };
            kind.parse(&text).or_else(|allowed| refused(text, allowed))
        }
        (Kind::Text | Kind::Path | Kind::Span(..) | Kind::Choice(_), DeValue::String(text)) => {
            kind.parse(text).or_else(|allowed| refused(format!("{text:?}"), allowed))
        }
        _ => refused(written(file.text, value), kind.allowed()),
    }
}
