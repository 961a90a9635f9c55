//! Data to stdout, words to stderr.

use std::{
    collections::BTreeSet,
    io::{self, IsTerminal as _, Write},
};

use jiff::Timestamp;
use serde::Serialize;

use crate::{
    args::{Form, Global, When},
    document::{Cuttable, Document, Single},
    failure::Failure,
    table::{self, Cell},
    view::Item,
};

/// Where and how things are printed.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) form: Form,
    pub(crate) headers: bool,
    pub(crate) colour: bool,
    words: Words,
}

/// How much is said on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Words {
    Errors,
    Notes,
    Details,
}

impl Output {
    pub(crate) fn new(global: &Global) -> Self {
        let colour = match global.color {
            When::Always => true,
            When::Never => false,
            When::Auto => {
                let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
                let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
                !is_set("NO_COLOR") && !is_dumb && io::stdout().is_terminal()
            }
        };
        let words = match (global.quiet, global.verbose) {
            (true, _) => Words::Errors,
            (_, true) => Words::Details,
            _ => Words::Notes,
        };
        Self { form: global.output, headers: !global.no_headers, colour, words }
    }

    /// Whether people read what is printed.
    pub(crate) fn is_for_people(&self) -> bool {
        matches!(self.form, Form::Table | Form::Wide)
    }

    /// Prints lines.
    pub(crate) fn lines(lines: &[impl AsRef<str>]) -> Result<(), Failure> {
        let mut text = String::new();
        for line in lines {
            text.push_str(line.as_ref());
            text.push('\n');
        }
        print(text.as_bytes())
    }

    /// Says something on stderr; nothing that a program needs.
    pub(crate) fn note(&self, text: &str) {
        if self.words != Words::Errors {
            say(text);
        }
    }

    /// Says on stderr what is done.
    pub(crate) fn detail(&self, text: impl FnOnce() -> String) {
        if self.words == Words::Details {
            say(&text());
        }
    }

    /// Marks what follows as read from disk: the header line of a table, else a note.
    pub(crate) fn offline(&self, text: &str) -> Result<(), Failure> {
        if self.is_for_people() && self.headers {
            return Self::lines(&[format!("offline: {text}")]);
        }
        say(&format!("offline: {text}"));
        Ok(())
    }

    /// Prints a list.
    pub(crate) fn list<T: Item>(&self, items: &[T], offline: bool, now: Timestamp) -> Result<(), Failure> {
        match self.form {
            Form::Table | Form::Wide => Self::lines(&self.table(items, now)),
            Form::Name => Self::lines(&items.iter().map(Item::id).collect::<Vec<_>>()),
            Form::Json | Form::Yaml => self.document(&Document::new(T::LIST, offline, items), T::LIST),
        }
    }

    /// The lines of a table.
    pub(crate) fn table<T: Item>(&self, items: &[T], now: Timestamp) -> Vec<String> {
        let rows: Vec<_> = items.iter().map(|item| item.row(now)).collect();
        table::lines(T::COLUMNS, &rows, self.form == Form::Wide, self.headers, self.colour)
    }

    /// Prints what can be cut: two tables, or the names of the templates.
    pub(crate) fn templates(&self, devices: &[Cuttable]) -> Result<(), Failure> {
        match self.form {
            Form::Table | Form::Wide => {
                let table = |columns, rows: &[_]| {
                    table::lines(columns, rows, self.form == Form::Wide, self.headers, self.colour)
                };
                let rows: Vec<_> = devices.iter().flat_map(Cuttable::rows).collect();
                let mut lines = if rows.is_empty() { Vec::new() } else { table(Cuttable::COLUMNS, &rows) };
                if !lines.is_empty() {
                    lines.push(String::new());
                }
                let rows: Vec<_> = devices.iter().flat_map(Cuttable::mix_rows).collect();
                lines.extend(table(Cuttable::MIXES, &rows));
                Self::lines(&lines)
            }
            Form::Name => {
                let names = devices.iter().flat_map(|device| &device.templates).map(|template| template.name.as_str());
                let names: BTreeSet<_> = names.collect();
                Self::lines(&names.into_iter().collect::<Vec<_>>())
            }
            Form::Json | Form::Yaml => self.document(&Document::new(Cuttable::LIST, false, devices), Cuttable::LIST),
        }
    }

    /// Prints one thing in full.
    pub(crate) fn one<T: Serialize>(
        &self,
        kind: &'static str,
        item: &T,
        offline: bool,
        id: Option<&str>,
        pairs: &[(&'static str, Cell)],
    ) -> Result<(), Failure> {
        match (self.form, id) {
            (Form::Table | Form::Wide, _) => Self::lines(&table::pairs(pairs, self.colour)),
            (Form::Name, Some(id)) => Self::lines(&[id]),
            (Form::Name, None) => {
                Err(Failure::Usage("there are no names to print".to_owned(), "Use -o table, json or yaml"))
            }
            (Form::Json | Form::Yaml, _) => {
                self.document(&Document::new(kind, offline, std::slice::from_ref(item)), kind)
            }
        }
    }

    /// Prints one thing that has changed.
    pub(crate) fn changed<T: Item>(&self, item: &T) -> Result<(), Failure> {
        let single = Single::new(T::KIND, item);
        match self.form {
            Form::Table | Form::Wide => Ok(()),
            Form::Name => Self::lines(&[item.id()]),
            Form::Json => Self::lines(&[json(&single, T::KIND, false)?]),
            Form::Yaml => print(format!("---\n{}", yaml(&single, T::KIND)?).as_bytes()),
        }
    }

    fn document<T: Serialize>(&self, document: &T, kind: &'static str) -> Result<(), Failure> {
        match self.form {
            Form::Yaml => print(yaml(document, kind)?.as_bytes()),
            _ => Self::lines(&[json(document, kind, true)?]),
        }
    }
}

/// Says something on stderr.
pub(crate) fn say(text: &str) {
    to_stderr(&format!("npuctl: {text}\n"));
}

/// Writes to stderr in one piece: others may write there at the same time. Nobody can be told if it is gone.
pub(crate) fn to_stderr(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Prints text as it is.
pub(crate) fn print(text: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text)
        .and_then(|()| stdout.flush())
        .map_err(|cause| Failure::Output { what: "the output".to_owned(), cause })
}

fn json<T: Serialize>(value: &T, kind: &'static str, pretty: bool) -> Result<String, Failure> {
    let text = if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    text.map_err(|error| Failure::Document(kind, error.to_string()))
}

fn yaml<T: Serialize>(value: &T, kind: &'static str) -> Result<String, Failure> {
    let mut text = serde_saphyr::to_string(value).map_err(|error| Failure::Document(kind, error.to_string()))?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}
