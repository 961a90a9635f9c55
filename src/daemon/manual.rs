//! What packages ship beside the binary, written from the table of settings: example file and man pages.

use std::{fmt::Write as _, io, path::Path};

use clap_mangen::{
    Man,
    roff::{Roff, bold, italic, roman},
};

use super::{
    cli,
    settings::{KEYS, Key, Kind, Value},
};

/// The example file: every key with its default, commented out.
pub(super) fn example() -> String {
    let mut text = String::from(
        "# npu-dra: settings of the daemon. Every key stands here with its default; npu-dra.toml(5) says the same.\n\
         #\n\
         # Drop-ins in /etc/npu-dra/npu-dra.toml.d/*.toml (or *.conf) are read after this file, in the order of their\n\
         # names. An environment variable beats all files, a flag beats the variable:\n\
         # `device.wait` is the variable DEVICE_WAIT and the flag --device-wait.\n\
         # `npu-dra check-config` prints what is in effect, and where each value came from.\n",
    );
    for key in KEYS {
        text.push('\n');
        for line in wrap(&about(key), 117) {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# {line}");
        }
        for line in wrap(&notes(key), 117) {
            let _ = writeln!(text, "# {line}");
        }
        let _ = writeln!(text, "#{} = {}", key.name, default_value(key));
    }
    text
}

/// What a key does, in sentences.
fn about(key: &Key) -> String {
    format!("{}. {}", key.help, key.more).trim_end().to_owned()
}

/// What may stand there, and what stands in for nothing.
fn notes(key: &Key) -> String {
    let mut text = match key.kind {
        Kind::Text | Kind::Path => String::new(),
        kind => format!("Allowed: {}. ", kind.allowed()),
    };
    if !key.derived.is_empty() {
        let _ = write!(text, "If not set: {}.", key.derived);
    }
    text
}

fn default_value(key: &Key) -> String {
    key.kind.parse(key.default).unwrap_or_else(|_| Value::Text(String::new())).to_string()
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Writes `npu-dra.8` and `npu-dra.toml.5` into a directory, which is made if it is missing.
pub(super) fn write_pages(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("npu-dra.8"), daemon_page()?)?;
    std::fs::write(directory.join("npu-dra.toml.5"), file_page()?)
}

fn daemon_page() -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let man = Man::new(cli::command()).section("8").manual("npu-dra");
    title("npu-dra", "8").to_writer(&mut page)?;
    man.render_name_section(&mut page)?;
    let mut text = Roff::new();
    text.control("SH", ["SYNOPSIS"]);
    text.text([bold("npu-dra"), roman(" ["), italic("OPTIONS"), roman("]")]);
    text.control("PP", []);
    text.text([bold("npu-dra check-config"), roman(" ["), italic("OPTIONS"), roman("]")]);
    text.control("SH", ["DESCRIPTION"]);
    paragraph(
        &mut text,
        "npu-dra finds the Ascend NPUs of a node, publishes them as ResourceSlices, prepares and \
        releases ResourceClaims for kubelet, injects the devices into containers through CDI, and watches their health. \
        It runs as root on each node, as the systemd service npu-dra.service or in a DaemonSet. npuctl(1) talks to it.",
    );
    paragraph(
        &mut text,
        "Claims that are prepared survive a crash, a restart and an upgrade of the daemon: their records \
        are below the state directory.",
    );
    text.to_writer(&mut page)?;
    man.render_options_section(&mut page)?;
    let mut text = Roff::new();
    text.control("SH", ["COMMANDS"]);
    entry(
        &mut text,
        "check-config",
        "Prints the effective settings as a settings file, each with where it came from. \
        Exits with 2 if the daemon would refuse them.",
    );
    text.control("SH", ["SIGNALS"]);
    entry(
        &mut text,
        "SIGTERM, SIGINT",
        "End within two seconds: kubelet's registration socket goes first; claims that \
        are being prepared are left to their records.",
    );
    entry(
        &mut text,
        "SIGHUP",
        "Read log.level, slicing.model, slicing.layout, health.quiet, health.link and health.faults again. Others that have changed are named in the log; they need a restart.",
    );
    text.control("SH", ["EXIT STATUS"]);
    entry(&mut text, "0", "Ended on request.");
    entry(&mut text, "1", "Failed; starting again may help.");
    entry(&mut text, "2", "The command line or the settings are wrong. Starting again does not help.");
    entry(&mut text, "3", "Another instance holds the state directory.");
    entry(&mut text, "4", "The state directory is of a newer version of npu-dra. Starting again does not help.");
    text.control("SH", ["FILES"]);
    entry(&mut text, "/etc/npu-dra/npu-dra.toml, /etc/npu-dra/npu-dra.toml.d/", "Settings, npu-dra.toml(5).");
    entry(&mut text, "/var/lib/npu-dra/", "Records of prepared claims, and names of the node's cards.");
    entry(&mut text, "/run/npu-dra/admin.sock", "The socket that npuctl talks to.");
    text.control("SH", ["SEE ALSO"]);
    paragraph(&mut text, "npuctl(1), npu-dra.toml(5)");
    text.to_writer(&mut page)?;
    Ok(page)
}

/// The head of a page. Where it has no date it must say so, or what follows is taken for one.
fn title(name: &str, section: &str) -> Roff {
    let mut text = Roff::new();
    text.control("TH", [name, section, "\"\"", concat!("npu-dra ", env!("CARGO_PKG_VERSION")), "npu-dra"]);
    text
}

fn file_page() -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let mut text = title("npu-dra.toml", "5");
    text.control("SH", ["NAME"]);
    text.text([roman("npu-dra.toml - settings of the npu-dra daemon")]);
    text.control("SH", ["DESCRIPTION"]);
    paragraph(
        &mut text,
        "The file /etc/npu-dra/npu-dra.toml and its drop-ins, *.toml and *.conf in \
        /etc/npu-dra/npu-dra.toml.d, are TOML. All may be absent. Drop-ins are read in the order of their names, a later \
        value beats an earlier one. /run/npu-dra and /usr/lib/npu-dra are looked at in the same way; of files with one \
        name that of /etc counts, then that of /run. With --config PATH only PATH and PATH.d are read.",
    );
    paragraph(
        &mut text,
        "Each setting is also an environment variable and a flag of npu-dra(8): device.wait is \
        DEVICE_WAIT and --device-wait. A flag beats a variable, which beats a file. In a file, a dot, a table and a dash \
        are the same: device.wait, wait in the table [device], and device-wait. An unknown key or a value that is not \
        allowed stops the start, with file and line.",
    );
    text.control("SH", ["SETTINGS"]);
    for key in KEYS {
        text.control("TP", []);
        text.text([bold(key.name), roman(" = "), italic(default_value(key))]);
        text.text([roman(about(key))]);
        let notes = notes(key);
        if !notes.is_empty() {
            text.control("RS", []);
            text.text([roman(notes)]);
            text.control("RE", []);
        }
    }
    text.control("SH", ["SEE ALSO"]);
    paragraph(&mut text, "npu-dra(8), npuctl(1)");
    text.to_writer(&mut page)?;
    Ok(page)
}

fn paragraph(roff: &mut Roff, text: &str) {
    roff.control("PP", []);
    roff.text([roman(text)]);
}

fn entry(roff: &mut Roff, term: &str, text: &str) {
    roff.control("TP", []);
    roff.text([bold(term)]);
    roff.text([roman(text)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_file_is_the_one_that_is_shipped() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("etc/npu-dra/npu-dra.toml");
        let shipped = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(shipped, example(), "write it anew: npu-dra generate config > etc/npu-dra/npu-dra.toml");
    }

    #[test]
    fn every_key_is_in_the_example_and_in_the_manual() {
        let (example, page) = (example(), String::from_utf8(file_page().unwrap()).unwrap());
        for key in KEYS {
            assert!(example.contains(&format!("\n#{} = {}\n", key.name, default_value(key))), "{}", key.name);
            assert!(page.contains(&key.name.replace('-', "\\-")), "{}", key.name);
        }
    }

    #[test]
    fn a_page_without_a_date_has_its_version_where_versions_stand() {
        for (page, name) in [(daemon_page(), "npu-dra 8"), (file_page(), "npu-dra.toml 5")] {
            let page = String::from_utf8(page.unwrap()).unwrap();
            let head = format!("\n.TH {name} \"\" \"npu-dra {}\" npu-dra\n", env!("CARGO_PKG_VERSION"));
            assert!(page.contains(&head), "{}", &page[..200]);
        }
    }

    #[test]
    fn the_daemons_page_has_every_flag() {
        let page = String::from_utf8(daemon_page().unwrap()).unwrap();
        for key in KEYS {
            assert!(page.contains(&format!("\\-\\-{}", key.flag.replace('-', "\\-"))), "{}", key.flag);
        }
    }
}
