//! The budgets, what was measured of them, and the verdict.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use tabled::{Table, Tabled, settings::Style};

const TEXT: &str = include_str!("budgets.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    budget: Vec<Budget>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Budget {
    name: String,
    what: String,
    unit: String,
    most: Option<Bound>,
    least: Option<Bound>,
    since: Option<String>,
    why: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Bound {
    Plain(f64),
    Relative {
        times: f64,
        of: String,
        #[serde(default)]
        plus: f64,
    },
}

#[derive(Debug)]
struct Figure {
    value: f64,
    note: String,
}

/// All budgets with what was measured so far.
#[derive(Debug)]
pub(crate) struct Budgets {
    rows: Vec<Budget>,
    figures: BTreeMap<String, Figure>,
}

/// How a run ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    over: usize,
    missing: usize,
}

impl Verdict {
    pub(crate) fn is_good(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_good() { f.write_str("ok") } else { write!(f, "{} over, {} missing", self.over, self.missing) }
    }
}

#[derive(Tabled)]
#[tabled(rename_all = "lowercase")]
struct Line {
    what: String,
    measured: String,
    budget: String,
    verdict: String,
    notes: String,
}

impl Budgets {
    pub(crate) fn read() -> anyhow::Result<Self> {
        let file: File = toml::from_str(TEXT).context("cannot read budgets.toml")?;
        let mut names = BTreeSet::new();
        for row in &file.budget {
            ensure!(names.insert(&row.name), "budgets.toml names {} twice", row.name);
            ensure!(row.most.is_some() != row.least.is_some(), "budget {} needs one of most and least", row.name);
            ensure!(row.since.is_some() == row.why.is_some(), "budget {} needs since and why, or none", row.name);
        }
        Ok(Self { rows: file.budget, figures: BTreeMap::new() })
    }

    /// Takes in a figure: a budget's own, or one that bounds refer to.
    pub(crate) fn measured(&mut self, name: &str, value: f64, note: impl Into<String>) {
        self.figures.insert(name.to_owned(), Figure { value, note: note.into() });
    }

    fn bound(&self, bound: &Bound) -> Option<f64> {
        match bound {
            Bound::Plain(value) => Some(*value),
            Bound::Relative { times, of, plus } => self.figures.get(of).map(|figure| times * figure.value + plus),
        }
    }

    /// The table, and what it says as a whole. A figure that nobody asked for is a mistake of the bench.
    pub(crate) fn judge(&self) -> anyhow::Result<(String, Verdict)> {
        let known: BTreeSet<&str> = self.rows.iter().flat_map(Budget::names).collect();
        if let Some(stray) = self.figures.keys().find(|name| !known.contains(name.as_str())) {
            anyhow::bail!("{stray} was measured and is not in budgets.toml");
        }
        let mut verdict = Verdict::default();
        let lines: Vec<Line> = self.rows.iter().map(|row| self.line(row, &mut verdict)).collect();
        let mut table = Table::new(lines);
        table.with(Style::psql());
        Ok((table.to_string(), verdict))
    }

    fn line(&self, row: &Budget, verdict: &mut Verdict) -> Line {
        let (sign, bound) = match (&row.most, &row.least) {
            (Some(most), _) => ("<=", Some(most)),
            (None, least) => (">=", least.as_ref()),
        };
        let limit = bound.and_then(|bound| self.bound(bound));
        let budget = match (bound, limit) {
            (Some(Bound::Relative { times, of, plus }), limit) => {
                let plus = if *plus == 0.0 { String::new() } else { format!(" + {plus}") };
                let limit = limit.map_or_else(|| "?".to_owned(), |limit| text(limit, &row.unit));
                format!("{sign} {limit} ({times} x {of}{plus})")
            }
            (_, limit) => format!("{sign} {}", text(limit.unwrap_or_default(), &row.unit)),
        };
        let figure = self.figures.get(&row.name);
        let (word, notes) = match (figure, limit, &row.since, &row.why) {
            (None, _, Some(since), Some(why)) => (format!("see {since}"), why.clone()),
            (Some(figure), Some(limit), ..) => {
                let good = if row.most.is_some() { figure.value <= limit } else { figure.value >= limit };
                verdict.over += usize::from(!good);
                ((if good { "ok" } else { "OVER" }).to_owned(), figure.note.clone())
            }
            _ => {
                verdict.missing += 1;
                ("MISSING".to_owned(), String::new())
            }
        };
        let measured = figure.map_or_else(|| "-".to_owned(), |figure| text(figure.value, &row.unit));
        Line { what: row.what.clone(), measured, budget, verdict: word, notes }
    }
}

impl Budget {
    /// Its own name and the names that its bound refers to.
    fn names(&self) -> impl Iterator<Item = &str> {
        let bound = self.most.as_ref().or(self.least.as_ref());
        let of = match bound {
            Some(Bound::Relative { of, .. }) => Some(of.as_str()),
            _ => None,
        };
        [self.name.as_str()].into_iter().chain(of)
    }
}

fn text(value: f64, unit: &str) -> String {
    if unit == "writes" { format!("{value:.0} {unit}") } else { format!("{value:.2} {unit}") }
}
