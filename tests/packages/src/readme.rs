//! The README's commands, as they stand there.
//!
//! A block of commands follows a comment that says where it is tried:
//!
//! ```text
//! <!-- tried: deb -->          on machines with DEBs, in the directory of the packages under test
//! <!-- tried: rpm -->          on the machine with RPMs
//! <!-- tried: any -->          on all
//! <!-- tried: deb next -->     in the directory of the release after
//! <!-- not tried: REASON -->
//! ```
//!
//! All of one machine's blocks run in their order, by `sh -e`. A block of commands without such a comment is an error.

use anyhow::{bail, ensure};

use crate::stage::{Format, Stage, Which};

const README: &str = include_str!("../../../README.md");

/// A block of commands of the README.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    format: String,
    next: bool,
    script: String,
}

/// Programs that a block of commands for an installed node begins its lines with.
const PROGRAMS: [&str; 9] = ["apt", "apt-get", "dnf", "systemctl", "journalctl", "npuctl", "npu-dra", "rpm", "usermod"];

fn blocks(readme: &str) -> anyhow::Result<Vec<Block>> {
    let mut found = Vec::new();
    let mut mark: Option<String> = None;
    let mut open: Option<Vec<&str>> = None;
    for line in readme.lines() {
        match (&mut open, line.trim_start().starts_with("```")) {
            (Some(lines), false) => lines.push(line),
            (None, true) => open = Some(Vec::new()),
            (Some(lines), true) => {
                let commands = lines.iter().filter_map(|line| line.split_whitespace().next());
                let is_commands = commands.into_iter().any(|word| PROGRAMS.contains(&word));
                match mark.take().as_deref().map(|mark| mark.split_once(": ").unwrap_or((mark, ""))) {
                    Some(("tried", rest)) => {
                        let (format, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                        ensure!(["deb", "rpm", "any"].contains(&format), "no machine is called {format}");
                        found.push(Block { format: format.to_owned(), next: rest == "next", script: lines.join("\n") });
                    }
                    Some(("not tried", reason)) => ensure!(!reason.is_empty(), "a block is not tried for no reason"),
                    Some((other, _)) => bail!("a comment before a block says {other:?}"),
                    None => ensure!(!is_commands, "this block is not marked as tried:\n{}", lines.join("\n")),
                }
                open = None;
            }
            (None, false) if line.starts_with("<!-- ") => {
                let text = line.trim_start_matches("<!-- ").trim_end_matches(" -->");
                mark = (text.starts_with("tried") || text.starts_with("not tried")).then(|| text.to_owned());
            }
            (None, false) if !line.trim().is_empty() => mark = None,
            (None, false) => {}
        }
    }
    Ok(found)
}

pub(crate) fn installs(stage: &Stage) -> anyhow::Result<String> {
    let own = if stage.set.format == Format::Deb { "deb" } else { "rpm" };
    let blocks: Vec<_> =
        blocks(README)?.into_iter().filter(|block| [own, "any"].contains(&block.format.as_str())).collect();
    ensure!(!blocks.is_empty(), "the README has no command to try with {own}");
    if stage.installed()?.is_some() {
        stage.remove()?;
    }
    // The reader answers yes.
    stage.sh(match stage.set.format {
        Format::Deb => "echo 'APT::Get::Assume-Yes \"true\";' >/etc/apt/apt.conf.d/90reader",
        Format::Rpm => "grep -q assumeyes /etc/dnf/dnf.conf || echo assumeyes=1 >>/etc/dnf/dnf.conf",
    })?;
    let mut lines = 0;
    for block in &blocks {
        let which = if block.next { Which::Newer } else { stage.tested() };
        let dir = if which == Which::Newer { "newer" } else { "older" };
        let script = format!("cd /packages/{dir}\nexport DEBIAN_FRONTEND=noninteractive\n{}", block.script);
        let (code, out, error) = stage.try_sh(&format!("set -e\n{script}"))?;
        ensure!(code == 0, "the README's block ended with {code}:\n{}\n{out}{error}", block.script);
        lines += block.script.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')).count();
    }
    Ok(format!("{lines} lines of {} blocks", blocks.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_blocks_are_found_and_unmarked_commands_are_refused() {
        let text = "# x\n<!-- tried: deb -->\n```sh\napt install ./x\n```\n\n<!-- tried: any next -->\n\n```\nnpuctl status\n```\n\
                    ```\nmake demo\n```\n<!-- not tried: a list -->\n```\nnpuctl x\n```\n";
        let found = blocks(text).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], Block { format: "deb".into(), next: false, script: "apt install ./x".into() });
        assert!(found[1].next && found[1].format == "any");
        assert!(blocks("```\nnpuctl status\n```\n").unwrap_err().to_string().contains("not marked"));
        assert!(blocks("<!-- tried: any -->\ntext\n```\nnpuctl x\n```\n").is_err());
    }

    #[test]
    fn the_readme_marks_its_blocks() {
        blocks(README).unwrap();
    }
}
