//! The cases of a tier: what its catalogue lists, what ran, what came of it.
//!
//! A catalogue is a TOML file:
//!
//! ```toml
//! sets = ["trixie", "bookworm"]
//!
//! [[case]]
//! name = "install"
//! proves = "the package installs and starts nothing"
//! sets = ["trixie"]        # all of them if left out
//! alone = true             # what it measures is disturbed by cases of other sets; false if left out
//! ```
//!
//! A listed case that did not run has failed; a case that ran but is not listed is an error.

use std::{
    cell::{Cell, RefCell},
    fmt,
    panic::{self, AssertUnwindSafe, PanicHookInfo, catch_unwind},
    process::ExitCode,
    sync::{Mutex, MutexGuard, Once, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use serde::Deserialize;

/// The exit code of a tier that cannot run here.
pub const CANNOT_RUN: u8 = 2;

/// How long a case may take: one that still runs will not end, and the whole tier would hang with it.
const CASE_TIME: Duration = Duration::from_mins(10);

/// The cases that a tier has.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    sets: Vec<String>,
    #[serde(rename = "case", default)]
    cases: Vec<Entry>,
}

/// One case of a catalogue.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    proves: String,
    sets: Option<Vec<String>>,
    #[serde(default)]
    alone: bool,
}

impl Catalogue {
    /// Reads a catalogue's text.
    ///
    /// # Errors
    /// It is no catalogue, names a case twice, or a set that it does not list.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let catalogue: Self = toml::from_str(text).context("the catalogue of cases cannot be read")?;
        for (number, entry) in catalogue.cases.iter().enumerate() {
            if entry.name.is_empty() || entry.proves.is_empty() {
                bail!("case {number} of the catalogue lacks its name or what it proves");
            }
            if catalogue.cases.iter().take(number).any(|other| other.name == entry.name) {
                bail!("the catalogue lists the case {} twice", entry.name);
            }
            if let Some(set) = entry.sets.iter().flatten().find(|set| !catalogue.sets.contains(set)) {
                bail!("case {} is listed for {set}, which is no set of the catalogue", entry.name);
            }
        }
        Ok(catalogue)
    }

    /// The sets, in the catalogue's order.
    #[must_use]
    pub fn sets(&self) -> &[String] {
        &self.sets
    }

    /// Every case of every set, in the catalogue's order.
    fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.sets.iter().flat_map(|set| {
            let in_set = move |entry: &&Entry| entry.sets.as_ref().is_none_or(|sets| sets.contains(set));
            self.cases.iter().filter(in_set).map(move |entry| (set.as_str(), entry.name.as_str()))
        })
    }
}

/// Which cases are wanted.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Only these sets; all if empty.
    pub sets: Vec<String>,
    /// Only cases with one of these texts in their name; all if empty.
    pub names: Vec<String>,
}

impl Choice {
    fn has(&self, set: &str, name: &str) -> bool {
        self.has_set(set) && (self.names.is_empty() || self.names.iter().any(|part| name.contains(part.as_str())))
    }

    fn has_set(&self, set: &str) -> bool {
        self.sets.is_empty() || self.sets.iter().any(|wanted| wanted == set)
    }
}

thread_local! {
    /// Whether this thread is within [`caught`].
    static CATCHING: Cell<bool> = const { Cell::new(false) };
    /// What the last panic within said, and where.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls a function; its panic is an error with message and place, and prints nothing.
///
/// # Errors
/// That of the function, or its panic.
pub fn caught<T>(call: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            if CATCHING.get() {
                let place = info.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
                PANIC.set(format!("panicked at {place}: {}", info.payload_as_str().unwrap_or("no message")));
            } else {
                others(info);
            }
        }));
    });
    let outside = CATCHING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    CATCHING.set(outside);
    outcome.unwrap_or_else(|_| Err(anyhow!(PANIC.take())))
}

/// What a case has to say when it went well: nothing, or a figure.
pub trait Said {
    /// The text behind the case's name.
    fn said(self) -> String;
}

impl Said for () {
    fn said(self) -> String {
        String::new()
    }
}

impl Said for String {
    fn said(self) -> String {
        self
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Passed,
    Failed(String),
}

/// What ran and what came of it; [`Account::finish`] closes it. Several threads may run cases, each those of one set.
#[derive(Debug)]
pub struct Account {
    tier: String,
    catalogue: Catalogue,
    choice: Choice,
    book: Mutex<Book>,
    overdue: Overdue,
}

/// What becomes of a case that does not end.
#[derive(Debug)]
struct Overdue {
    after: Duration,
    /// Ends the tier: a case cannot be ended from outside.
    then: fn(&str),
}

#[derive(Debug, Default)]
struct Book {
    ended: Vec<(String, String, End)>,
    blocked: Vec<(String, String)>,
}

impl Book {
    fn has(&self, set: &str, name: &str) -> bool {
        self.ended.iter().any(|(of, other, _)| of == set && other == name)
    }
}

impl Account {
    /// Opens the account of a tier; `tier` is what the last line begins with.
    ///
    /// # Errors
    /// The choice names a set that the catalogue lacks, or no case at all.
    pub fn open(tier: &str, catalogue: Catalogue, choice: Choice) -> anyhow::Result<Self> {
        if let Some(set) = choice.sets.iter().find(|set| !catalogue.sets.contains(set)) {
            bail!("there is no set {set}; there are {}", catalogue.sets.join(", "));
        }
        if !catalogue.all().any(|(set, name)| choice.has(set, name)) {
            bail!("no case has {} in its name", choice.names.join(" or "));
        }
        let overdue = Overdue { after: CASE_TIME, then: |why| crate::machine::end_program(why, 1) };
        Ok(Self { tier: tier.to_owned(), catalogue, choice, book: Mutex::default(), overdue })
    }

    /// Whether any case of this set is wanted, so that its machine is worth the boot.
    #[must_use]
    pub fn wants_set(&self, set: &str) -> bool {
        self.catalogue.all().any(|(of, name)| of == set && self.choice.has(of, name))
    }

    /// Whether the catalogue lists this case for this set.
    #[must_use]
    pub fn lists(&self, set: &str, name: &str) -> bool {
        self.catalogue.all().any(|listed| listed == (set, name))
    }

    /// Whether this case is wanted.
    #[must_use]
    pub fn wants(&self, set: &str, name: &str) -> bool {
        self.choice.has(set, name)
    }

    /// Whether the catalogue says that nothing else should run beside this case.
    #[must_use]
    pub fn alone(&self, name: &str) -> bool {
        self.catalogue.cases.iter().any(|entry| entry.name == name && entry.alone)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a case, and ends the tier if it takes too long.
    fn in_time<T>(&self, set: &str, name: &str, case: impl FnOnce() -> T) -> T {
        let Overdue { after, then } = self.overdue;
        let (ended, watch) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                if watch.recv_timeout(after) == Err(mpsc::RecvTimeoutError::Timeout) {
                    println!("FAILED  {}", line(set, name, after, "it does not end"));
                    self.reasons().iter().for_each(|line| println!("{line}"));
                    then(&format!("failed: {set}/{name}: did not end within {} s", after.as_secs()));
                }
            });
            let outcome = case();
            drop(ended);
            outcome
        })
    }

    /// Runs a case if it is wanted, prints what came of it, and returns whether it passed. A panic is a failure, and one
    /// that does not end within ten minutes ends the tier.
    pub fn run<T: Said>(&self, set: &str, name: &str, case: impl FnOnce() -> anyhow::Result<T>) -> bool {
        if !self.choice.has(set, name) {
            return false;
        }
        let started = Instant::now();
        let outcome = self.in_time(set, name, || caught(case));
        let took = started.elapsed();
        // Held while it prints, so that lines of different sets do not mix.
        let mut book = self.book();
        let end = match outcome {
            _ if !self.lists(set, name) => End::Failed(format!("ran, but the catalogue does not list it for {set}")),
            _ if book.has(set, name) => End::Failed("ran a second time".to_owned()),
            Ok(said) => {
                println!("ok      {}", line(set, name, took, &said.said()));
                End::Passed
            }
            Err(error) => End::Failed(format!("{error:#}")),
        };
        if let End::Failed(why) = &end {
            println!("FAILED  {}", line(set, name, took, ""));
            for text in why.lines() {
                println!("        {text}");
            }
        }
        let passed = end == End::Passed;
        book.ended.push((set.to_owned(), name.to_owned(), end));
        passed
    }

    /// Says why the rest of a set cannot run, for instance that its machine does not boot. Its cases count as not run.
    pub fn blocked(&self, set: &str, why: &anyhow::Error) {
        let mut book = self.book();
        println!("BLOCKED {set}");
        let why = format!("{why:#}");
        for text in why.lines() {
            println!("        {text}");
        }
        book.blocked.push((set.to_owned(), why));
    }

    /// Prints once more, in short, what failed and why, then the totals, and returns the exit code: 1 if a case failed or
    /// a listed and wanted one did not run.
    #[must_use]
    pub fn finish(self) -> ExitCode {
        let totals = self.totals();
        let book = self.book();
        for (set, name) in self.catalogue.all() {
            if self.choice.has(set, name) && !book.has(set, name) {
                println!("NOT RUN {set}/{name}");
            }
        }
        drop(book);
        for line in self.reasons() {
            println!("{line}");
        }
        println!("{}: {totals}", self.tier);
        if totals.failed == 0 && totals.not_run == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// A line for each set that was blocked and each case that failed.
    fn reasons(&self) -> Vec<String> {
        let book = self.book();
        let blocked = book.blocked.iter().map(|(set, why)| format!("blocked: {set}: {}", short(why)));
        let failed = book.ended.iter().filter_map(|(set, name, end)| match end {
            End::Failed(why) => Some(format!("failed: {set}/{name}: {}", short(why))),
            End::Passed => None,
        });
        blocked.chain(failed).collect()
    }

    fn totals(&self) -> Totals {
        let book = self.book();
        let passed = book.ended.iter().filter(|(_, _, end)| *end == End::Passed).count();
        let wanted = self.catalogue.all().filter(|(set, name)| self.choice.has(set, name));
        let not_run = wanted.filter(|(set, name)| !book.has(set, name)).count();
        Totals { passed, failed: book.ended.len() - passed, not_run }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Totals {
    passed: usize,
    failed: usize,
    not_run: usize,
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} not run", self.passed, self.failed, self.not_run)
    }
}

/// The beginning of a reason, on one line and without the logs that follow it below a line of `---`.
fn short(why: &str) -> String {
    const LENGTH: usize = 300;
    let lines: Vec<_> = why.lines().take_while(|line| !line.starts_with("---")).map(str::trim).collect();
    let text = lines.join(" ");
    match text.char_indices().nth(LENGTH - 1) {
        Some((end, _)) if text.chars().nth(LENGTH).is_some() => format!("{}…", &text[..end]),
        _ => text,
    }
}

fn line(set: &str, name: &str, took: Duration, said: &str) -> String {
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    format!("{set}/{name} ({:.1} s){said}", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        sets = ["one", "two"]
        [[case]]
        name = "starts"
        proves = "it starts"
        [[case]]
        name = "stops"
        proves = "it stops"
        sets = ["two"]
    "#;

    fn account(choice: Choice) -> Account {
        Account::open("tier", Catalogue::parse(TEXT).unwrap(), choice).unwrap()
    }

    fn totals(account: &Account) -> (usize, usize, usize) {
        let totals = account.totals();
        (totals.passed, totals.failed, totals.not_run)
    }

    #[test]
    fn a_listed_case_that_did_not_run_is_counted() {
        let account = account(Choice::default());
        assert_eq!(totals(&account), (0, 0, 3));
        assert!(account.run("one", "starts", || Ok(())));
        assert!(account.run("two", "starts", || Ok("0.4 s".to_owned())));
        assert_eq!(totals(&account), (2, 0, 1));
        assert_eq!(format!("{}", account.totals()), "2 passed, 0 failed, 1 not run");
    }

    #[test]
    fn a_case_that_is_not_listed_or_runs_twice_fails() {
        let account = account(Choice::default());
        assert!(!account.run("one", "stops", || Ok(())));
        assert!(!account.run("one", "sings", || Ok(())));
        account.run("one", "starts", || Ok(()));
        assert!(!account.run("one", "starts", || Ok(())));
        assert_eq!(totals(&account), (1, 3, 2));
    }

    #[test]
    fn an_error_and_a_panic_are_failures_and_the_next_case_still_runs() {
        let account = account(Choice::default());
        assert!(!account.run::<()>("one", "starts", || bail!("no")));
        assert!(!account.run::<()>("two", "starts", || panic!("no {}", 1)));
        assert!(account.run("two", "stops", || Ok(())));
        assert_eq!(totals(&account), (1, 2, 0));
    }

    #[test]
    fn the_end_tells_briefly_why_a_case_failed_and_where_it_panicked() {
        let account = account(Choice::default());
        account.run::<()>("one", "starts", || bail!("no\n  device\n--- journal\nmany lines"));
        account.run::<()>("two", "starts", || panic!("no {}", 1));
        account.run::<()>("two", "stops", || bail!("{}", "é".repeat(1000)));
        account.blocked("two", &anyhow!("no machine"));
        let reasons = account.reasons();
        assert_eq!(reasons[0], "blocked: two: no machine");
        assert_eq!(reasons[1], "failed: one/starts: no device");
        assert!(reasons[2].starts_with("failed: two/starts: panicked at tests/lab/src/cases.rs:"), "{}", reasons[2]);
        assert!(reasons[2].ends_with(": no 1"), "{}", reasons[2]);
        assert_eq!(reasons[3].chars().filter(|char| *char == 'é').count(), 299);
        assert!(reasons[3].ends_with("é…"));
    }

    #[test]
    fn a_case_that_does_not_end_ends_the_tier_and_is_named() {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let mut account = account(Choice::default());
        account.overdue =
            Overdue { after: Duration::from_millis(1), then: |why| SAID.lock().unwrap().push(why.into()) };
        let given_up = || SAID.lock().unwrap().first().cloned();
        account.run("one", "starts", || {
            while given_up().is_none() {
                thread::yield_now();
            }
            Ok(())
        });
        assert_eq!(given_up().unwrap(), "failed: one/starts: did not end within 0 s");
    }

    #[test]
    fn a_choice_leaves_the_others_out_of_the_count() {
        let names = vec!["stop".to_owned()];
        let account = account(Choice { sets: Vec::new(), names });
        assert!(!account.wants_set("one") && account.wants_set("two"));
        assert!(!account.run("one", "starts", || Ok(())));
        assert!(account.run("two", "stops", || Ok(())));
        assert_eq!(totals(&account), (1, 0, 0));
    }

    #[test]
    fn a_choice_of_nothing_is_an_error() {
        let open = |sets: &[&str], names: &[&str]| {
            let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
            let choice = Choice { sets: texts(sets), names: texts(names) };
            Account::open("tier", Catalogue::parse(TEXT).unwrap(), choice)
                .map(|_| ())
                .map_err(|error| error.to_string())
        };
        assert!(open(&["three"], &[]).unwrap_err().contains("no set three"));
        assert!(open(&[], &["sings"]).unwrap_err().contains("sings"));
        assert!(open(&["one"], &["stops"]).is_err());
    }

    #[test]
    fn a_catalogue_with_a_mistake_is_refused() {
        let twice = TEXT.replace("stops", "starts");
        assert!(Catalogue::parse(&twice).unwrap_err().to_string().contains("twice"));
        let elsewhere = TEXT.replace("sets = [\"two\"]", "sets = [\"three\"]");
        assert!(Catalogue::parse(&elsewhere).unwrap_err().to_string().contains("three"));
        assert!(Catalogue::parse("sets = []\nname = 1").is_err());
    }
}
