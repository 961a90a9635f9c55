//! The layers hold: every path to `crate::`, `super::` and `npu_dra::` in `src` points downwards.
//!
//! Reads tokens, not lines, so that grouped imports, inline paths, macro bodies and nested modules count too.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Rank of each top-level module: one may name only itself and lower ranks, never its equals.
const RANKS: [(&str, u8); 12] = [
    ("domain", 0),
    ("disk", 1),
    ("device", 2),
    ("cdi", 2),
    ("store", 2),
    ("cluster", 2),
    ("engine", 3),
    ("kubelet", 4),
    ("admin", 4),
    ("http", 4),
    ("daemon", 5),
    ("main", 6),
];

/// What `domain` may use of other crates.
const DOMAIN_CRATES: [&str; 5] = ["std", "core", "serde", "thiserror", "jiff"];
/// Modules and types of `std` that do I/O or tell the time.
const DOMAIN_FORBIDDEN: [&str; 8] = ["fs", "net", "process", "env", "thread", "io", "Instant", "SystemTime"];
/// Macros that write.
const DOMAIN_MACROS: [&str; 5] = ["print", "println", "eprint", "eprintln", "dbg"];

fn rank(module: &str) -> Option<u8> {
    RANKS.iter().find(|(name, _)| *name == module).map(|(_, rank)| *rank)
}

/// One file under the test's eye.
struct Reader<'a> {
    crates: &'a BTreeSet<String>,
    breaches: Vec<String>,
    file: String,
}

/// Where in the module tree the tokens stand.
#[derive(Clone)]
struct Place {
    path: Vec<String>,
    test: bool,
}

impl Place {
    fn top(&self) -> &str {
        self.path.first().map_or("lib", String::as_str)
    }
}

/// Reads one file's text as module `path` and tells its breaches.
fn breaches(file: &str, path: &[&str], text: &str, crates: &BTreeSet<String>) -> Vec<String> {
    let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{file} is not Rust: {error}"));
    let mut reader = Reader { crates, breaches: Vec::new(), file: file.to_owned() };
    reader.read(tokens, &Place { path: path.iter().map(ToString::to_string).collect(), test: false });
    reader.breaches
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

fn ident(token: Option<&TokenTree>) -> Option<String> {
    match token {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

fn is_path_sign(tokens: &[TokenTree], at: usize) -> bool {
    is_punct(tokens.get(at), ':') && is_punct(tokens.get(at + 1), ':')
}

/// Expands what follows a path's beginning into full paths, groups included.
fn expand(tokens: &[TokenTree], mut at: usize, mut prefix: Vec<String>, out: &mut Vec<Vec<String>>) {
    while is_path_sign(tokens, at) {
        at += 2;
        match tokens.get(at) {
            Some(TokenTree::Ident(ident)) => {
                prefix.push(ident.to_string());
                at += 1;
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<_> = group.stream().into_iter().collect();
                for part in inner.split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',')) {
                    if let Some(first) = ident(part.first()) {
                        let mut longer = prefix.clone();
                        longer.push(first);
                        expand(part, 1, longer, out);
                    } else if is_punct(part.first(), '*') {
                        out.push([prefix.clone(), vec!["*".to_owned()]].concat());
                    }
                }
                return;
            }
            _ => break,
        }
    }
    out.push(prefix);
}

impl Reader<'_> {
    fn breach(&mut self, place: &Place, what: &str) {
        self.breaches.push(format!("{} ({}): {what}", self.file, place.path.join("::")));
    }

    fn read(&mut self, tokens: TokenStream, place: &Place) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut exported = false;
        let mut use_of_domain = false;
        for at in 0..tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => {
                    let mut inner = place.clone();
                    // `mod name { … }` is one level deeper.
                    if group.delimiter() == Delimiter::Brace
                        && at >= 2
                        && ident(tokens.get(at - 2)).as_deref() == Some("mod")
                        && let Some(name) = ident(tokens.get(at - 1))
                    {
                        inner.test |= Self::is_test_module(&tokens, at);
                        inner.path.push(name);
                    }
                    self.read(group.stream(), &inner);
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => (exported, use_of_domain) = (false, false),
                TokenTree::Ident(word) => {
                    let word = word.to_string();
                    if word == "pub" {
                        exported = true;
                    } else if matches!(
                        word.as_str(),
                        "fn" | "struct" | "enum" | "mod" | "const" | "static" | "type" | "trait" | "impl"
                    ) {
                        exported = false;
                    } else if word == "use" {
                        use_of_domain = true;
                    }
                    let continues = at >= 2 && is_path_sign(&tokens, at - 2);
                    if !continues {
                        self.path(&tokens, at, &word, place, exported && use_of_domain);
                    }
                    if place.top() == "domain" {
                        self.domain_word(&tokens, at, &word, place);
                    }
                }
                _ => {}
            }
        }
    }

    fn is_test_module(tokens: &[TokenTree], at: usize) -> bool {
        // #[cfg(test)] [pub(..)] mod name {
        tokens[..at].iter().rev().take(6).any(|token| {
            matches!(token, TokenTree::Group(group) if group.stream().to_string().replace(' ', "") == "cfg(test)")
        })
    }

    /// Checks a path that begins at `at`.
    fn path(&mut self, tokens: &[TokenTree], at: usize, first: &str, place: &Place, reexport: bool) {
        if first == "crate" && !is_path_sign(tokens, at + 1) {
            // `pub(crate)` stands alone in its group; anything else gives the crate another name.
            if tokens.len() > 1 {
                self.breach(place, "the crate itself is named or renamed");
            }
            return;
        }
        if !is_path_sign(tokens, at + 1) {
            return;
        }
        let mut paths = Vec::new();
        expand(tokens, at + 1, vec![first.to_owned()], &mut paths);
        for path in paths {
            if let Some(target) = self.target(&path, place) {
                self.check(place, &path, &target, reexport);
            }
            if place.top() == "domain" && !place.test {
                self.domain_path(place, &path);
            }
        }
    }

    /// The top-level module that a path of ours leads to.
    fn target(&mut self, path: &[String], place: &Place) -> Option<String> {
        match path[0].as_str() {
            "crate" | "npu_dra" => path.get(1).cloned().or_else(|| {
                self.breach(place, "the crate itself is named or renamed");
                None
            }),
            "super" | "self" => {
                let mut here = place.path.clone();
                let mut rest = path.iter().peekable();
                while let Some(step) = rest.peek() {
                    match step.as_str() {
                        "self" => {}
                        "super" => {
                            here.pop();
                        }
                        _ => break,
                    }
                    rest.next();
                }
                here.extend(rest.cloned());
                here.first().cloned()
            }
            _ => None,
        }
    }

    fn check(&mut self, place: &Place, path: &[String], target: &str, reexport: bool) {
        let top = place.top().to_owned();
        let shown = path.join("::");
        if target == top || top == "lib" {
            return;
        }
        let (Some(from), Some(to)) = (rank(&top), rank(target)) else {
            self.breach(place, &format!("{shown} names a module without a layer"));
            return;
        };
        if to > from {
            self.breach(place, &format!("{shown} points upwards"));
        } else if to == from {
            self.breach(place, &format!("{shown} points sideways"));
        } else if reexport {
            self.breach(place, &format!("{shown} is re-exported across layers"));
        }
    }

    /// `domain` and other crates.
    fn domain_path(&mut self, place: &Place, path: &[String]) {
        let root = path[0].as_str();
        if self.crates.contains(root) && !DOMAIN_CRATES.contains(&root) {
            self.breach(place, &format!("domain names the crate {root}"));
        }
        if matches!(root, "std" | "core") {
            for part in path.iter().filter(|part| DOMAIN_FORBIDDEN.contains(&part.as_str())) {
                self.breach(place, &format!("domain names std's {part}"));
            }
        }
    }

    /// `domain` and words that need no path.
    fn domain_word(&mut self, tokens: &[TokenTree], at: usize, word: &str, place: &Place) {
        let after_path = at >= 2 && is_path_sign(tokens, at - 2);
        if matches!(word, "async" | "await") {
            self.breach(place, &format!("domain is {word}"));
        }
        if word == "now" && after_path {
            self.breach(place, "domain reads a clock");
        }
        if matches!(word, "Instant" | "SystemTime") && !place.test {
            self.breach(place, &format!("domain names std's {word}"));
        }
        if DOMAIN_MACROS.contains(&word) && is_punct(tokens.get(at + 1), '!') {
            self.breach(place, &format!("domain writes with {word}!"));
        }
    }
}

/// Crates that the daemon depends on, as Rust spells them.
fn crates() -> BTreeSet<String> {
    let manifest = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let names = |section: &str| {
        manifest[section].as_table().unwrap().keys().map(|name| name.replace('-', "_")).collect::<Vec<_>>()
    };
    names("dependencies").into_iter().chain(["std".to_owned(), "core".to_owned()]).collect()
}

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            out.push(path);
        }
    }
}

#[test]
fn every_path_points_downwards() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut files, crates) = (Vec::new(), crates());
    sources(&root, &mut files);
    assert!(files.len() > 15, "only {} files were found", files.len());
    let mut all = Vec::new();
    for file in files {
        let name = file.strip_prefix(&root).unwrap().with_extension("");
        let mut path: Vec<_> = name.iter().map(|part| part.to_str().unwrap()).collect();
        if path.last() == Some(&"mod") {
            path.pop();
        }
        if path == ["lib"] {
            path.clear();
        }
        if let Some(top) = path.first() {
            assert!(rank(top).is_some(), "module {top} has no layer");
        }
        all.extend(breaches(&name.display().to_string(), &path, &fs::read_to_string(&file).unwrap(), &crates));
    }
    assert!(all.is_empty(), "the layers do not hold:\n  {}", all.join("\n  "));
}

#[test]
fn every_kind_of_breach_is_caught() {
    let crates = crates();
    let planted: BTreeMap<&str, (&[&str], &str, &str)> = BTreeMap::from([
        ("inline path", (&["domain", "plan"][..], "fn f() { crate::engine::go() }", "points upwards")),
        ("import", (&["store"][..], "use crate::engine::Engine;", "points upwards")),
        ("grouped import", (&["cdi"][..], "use crate::{domain::npu::Npu, kubelet::{self, Server}};", "points upwards")),
        (
            "nested group",
            (&["device", "dcmi"][..], "use crate::{domain::{npu, plan}, store::{Store as S}};", "points sideways"),
        ),
        ("super::super", (&["cdi", "file"][..], "use super::super::store::Store;", "points sideways")),
        (
            "super in a nested module",
            (&["admin"][..], "mod inner { use super::super::http::Server; }", "points sideways"),
        ),
        ("self::super", (&["engine"][..], "use self::super::daemon::run;", "points upwards")),
        (
            "own crate's name",
            (&["engine", "state"][..], "fn f() -> npu_dra::http::Server { todo() }", "points upwards"),
        ),
        ("macro body", (&["store"][..], "fn f() { println!(\"{}\", crate::cluster::name()) }", "points sideways")),
        ("re-export", (&["engine"][..], "pub use crate::device::Backend;", "re-exported")),
        ("re-export within the crate", (&["kubelet"][..], "pub(crate) use crate::{domain::npu::Npu};", "re-exported")),
        ("the crate renamed", (&["domain"][..], "use crate as c;", "renamed")),
        ("the crate renamed in a group", (&["domain"][..], "use {crate as c};", "renamed")),
        ("std::fs in domain", (&["domain", "npu"][..], "use std::{fmt, fs::File};", "std's fs")),
        ("std::env inline in domain", (&["domain", "npu"][..], "fn f() { std::env::var(\"X\"); }", "std's env")),
        ("std::thread in domain", (&["domain"][..], "fn f() { std::thread::sleep(d) }", "std's thread")),
        ("clock in domain", (&["domain", "health"][..], "fn f() -> Timestamp { Timestamp::now() }", "reads a clock")),
        ("Instant in domain", (&["domain"][..], "use std::time::{Duration, Instant};", "Instant")),
        ("SystemTime in domain", (&["domain"][..], "fn f(t: SystemTime) {}", "SystemTime")),
        ("other crate in domain", (&["domain"][..], "use serde_json::Value;", "crate serde_json")),
        ("async in domain", (&["domain"][..], "async fn f() {}", "is async")),
        ("output in domain", (&["domain"][..], "fn f() { eprintln!(\"x\") }", "eprintln")),
        ("module without layer", (&["engine"][..], "use crate::util::x;", "without a layer")),
    ]);
    for (kind, (path, text, wanted)) in planted {
        let found = breaches(kind, path, text, &crates);
        assert!(found.iter().any(|breach| breach.contains(wanted)), "{kind} was not caught: {found:?}");
    }
}

#[test]
fn honest_code_is_not_accused() {
    let crates = crates();
    for (path, text) in [
        (
            &["engine", "state"][..],
            "use std::fs; use super::Loaded; use crate::{device::Status, domain::npu::Npu}; pub(crate) struct S;",
        ),
        (
            &["domain", "plan"][..],
            "use std::time::Duration; use super::npu::{self, Npu}; fn f(now: Timestamp) { g(now) }",
        ),
        (&["domain"][..], "#[cfg(test)] mod tests { use super::*; use proptest::prelude::*; }"),
        (
            &["engine"][..],
            "pub use self::{claims::Received, state::Snapshot}; fn f() { let x = crate::domain::npu::f(); }",
        ),
        (&["main"][..], "fn main() { npu_dra::daemon::main() }"),
        (&["store"][..], "/// See [`crate::engine`].\nfn f() { let s = \"crate::engine::x\"; }"),
    ] {
        assert_eq!(breaches("honest", path, text, &crates), Vec::<String>::new(), "{text}");
    }
}
