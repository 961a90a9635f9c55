//! What packages hold: manual pages and completions.

use crate::fixture::{npuctl, run};

const COMMANDS: [&str; 8] = ["devices", "device", "vnpu", "claims", "slices", "status", "version", "completion"];

#[test]
fn manual_pages_are_written_one_a_command() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("man1");
    let args = ["generate", "man", target.to_str().unwrap()];
    assert_eq!(run(&mut npuctl(dir.path(), &args)), (0, String::new(), String::new()));
    let page = |name: &str| std::fs::read_to_string(target.join(format!("{name}.1"))).unwrap();
    let main = page("npuctl");
    let title = |name: &str, section: &str| {
        format!("\n.TH {name} {section} \"\" \"npuctl {}\" npu-dra\n", env!("CARGO_PKG_VERSION"))
    };
    for name in ["npuctl", "npuctl-cordon", "npuctl-claims-list"] {
        let page = page(name);
        let head: Vec<_> = page.lines().filter(|line| line.starts_with(".TH")).collect();
        assert!(page.contains(&title(name, "1")), "{name}: {head:?}");
    }
    for part in ["EXIT STATUS", "NPUCTL_SOCKET", "\\-\\-no\\-headers", "/run/npu\\-dra/admin.sock", "SEE ALSO"] {
        assert!(main.contains(part), "{part} is not in {main}");
    }
    for command in COMMANDS {
        assert!(main.contains(&format!("npuctl\\-{command}(1)")), "{command} is not in {main}");
        assert!(page(&format!("npuctl-{command}")).contains(".SH SYNOPSIS"), "{command}");
    }
    let claims = ["list", "show", "release"].map(|name| format!("npuctl-claims-{name}"));
    let vnpu = ["list", "templates", "create", "destroy"].map(|name| format!("npuctl-vnpu-{name}"));
    for nested in claims.iter().chain(&vnpu) {
        assert!(page(nested).contains(".SH SYNOPSIS"), "{nested}");
    }
    assert!(!main.contains("generate"), "hidden commands have no page");
    assert!(!target.join("npuctl-generate.1").exists());
}

#[test]
fn a_place_that_cannot_be_written_is_exit_1() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let (code, _, words) = run(&mut npuctl(dir.path(), &["generate", "man", file.join("man1").to_str().unwrap()]));
    assert_eq!(code, 1);
    assert!(words.starts_with("npuctl: cannot write manual pages to "), "{words}");
}

#[test]
fn completions_know_every_command() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script, words) = run(&mut npuctl(dir.path(), &["completion", shell]));
        assert_eq!((code, words.as_str()), (0, ""), "{shell}");
        for command in COMMANDS {
            assert!(script.contains(command), "{shell} does not know {command}");
        }
        assert!(script.contains("no-headers"), "{shell} knows no option");
    }
}
