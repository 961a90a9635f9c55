//! The manual pages, made from the command line.

use std::{io, path::Path};

use clap::{Command, CommandFactory as _};
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::args::{Cli, EXIT_CODES, SOCKET, STATE_DIR};

/// Writes `npuctl.1` and a page for each command into a directory, which is made if it is missing.
pub(crate) fn write_pages(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    write_page(&command, true, directory)
}

fn write_page(command: &Command, is_main: bool, directory: &Path) -> io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_page(sub, false, directory)?;
    }
    let man = Man::new(command.clone()).manual("npu-dra");
    let title = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut page = Vec::new();
    // A title without a date must say so, or what follows is taken for one.
    let source = concat!("npuctl ", env!("CARGO_PKG_VERSION"));
    let mut head = Roff::new();
    head.control("TH", [title.as_str(), "1", "\"\"", source, "npu-dra"]);
    head.to_writer(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    if is_main {
        main_sections().to_writer(&mut page)?;
    } else {
        let mut text = Roff::new();
        text.control("SH", ["SEE ALSO"]).text([roman("npuctl(1), which also lists the exit status, and npu-dra(8)")]);
        text.to_writer(&mut page)?;
    }
    std::fs::write(directory.join(man.get_filename()), page)
}

fn main_sections() -> Roff {
    let mut text = Roff::new();
    let entry = |text: &mut Roff, term: &str, what: &str| {
        text.control("TP", []).text([bold(term)]).text([roman(what)]);
    };
    text.control("SH", ["OUTPUT"]);
    text.text([roman(
        "Data goes to the standard output, words to the standard error. In a table - stands for none and ? for unknown; \
         sizes are in binary units, and exact in JSON and YAML, which are one document: apiVersion npuctl/v1, a kind, and \
         items. Keys and columns are only ever added, columns at the right. With --watch, which devices, health and claims list have, rows that change are printed, \
         in JSON one object a line, until Ctrl-C.",
    )]);
    text.control("PP", [])
        .text([roman("While npu-dra is down, root is shown its records, marked offline, with exit status 4.")]);
    text.control("SH", ["EXIT STATUS"]);
    for line in EXIT_CODES.lines().skip(1) {
        let (code, what) = line.trim_start().split_once("  ").unwrap_or((line, ""));
        entry(&mut text, code, what);
    }
    text.control("SH", ["ENVIRONMENT"]);
    entry(&mut text, "NPUCTL_SOCKET", "Admin socket of npu-dra, where --socket does not say.");
    entry(&mut text, "NPUCTL_STATE_DIR", "State directory of npu-dra, where --state-dir does not say.");
    entry(&mut text, "NO_COLOR", "If it is set and not empty, nothing is coloured unless --color says so.");
    text.control("SH", ["FILES"]);
    entry(&mut text, SOCKET, "Admin socket. Root and members of group npu-dra may look, root alone may change things.");
    entry(&mut text, STATE_DIR, "State directory with the records of claims.");
    text.control("SH", ["EXAMPLES"]);
    entry(&mut text, "npuctl devices --health tainted,fatal,lost", "NPUs that no claim should get.");
    entry(&mut text, "npuctl health || mail -s NPU ops", "Tell somebody when an NPU is not ok.");
    entry(&mut text, "npuctl drain npu-3 --reason 'fan'", "Evict the pods that have an NPU, and keep new ones away.");
    entry(&mut text, "npuctl claims list --watch", "Claims, as they come and go.");
    entry(&mut text, "npuctl vnpu templates --device npu-0", "What can still be cut from an NPU, in all mixes.");
    entry(&mut text, "npuctl devices -o json | jq '.items[].memoryBytes'", "Memory of each NPU in bytes.");
    text.control("SH", ["SEE ALSO"]);
    text.text([roman("npu-dra(8), npu-dra.toml(5)")]);
    text
}
