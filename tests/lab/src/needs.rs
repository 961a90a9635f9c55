//! What must be there before a tier can run at all.

use std::{fmt, path::Path};

/// A program, and the package that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Its name, looked up in `PATH` and the system's directories.
    pub program: &'static str,
    /// Debian's package.
    pub package: &'static str,
}

/// The programs that every machine needs.
const ALWAYS: [Need; 8] = [
    Need { program: "mmdebstrap", package: "mmdebstrap" },
    Need { program: "unshare", package: "util-linux" },
    Need { program: "nsenter", package: "util-linux" },
    Need { program: "setsid", package: "util-linux" },
    Need { program: "flock", package: "util-linux" },
    Need { program: "mount", package: "mount" },
    Need { program: "ip", package: "iproute2" },
    Need { program: "tar", package: "tar" },
];

/// Why a tier cannot run here: it ends with exit code 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    not_root: bool,
    programs: Vec<Need>,
    other: Vec<String>,
}

impl std::error::Error for Missing {}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.not_root {
            parts
                .push("it needs root, because it makes namespaces, mounts and device nodes: run it as root".to_owned());
        }
        if !self.programs.is_empty() {
            let programs: Vec<_> = self.programs.iter().map(|need| need.program).collect();
            let mut packages: Vec<_> = self.programs.iter().map(|need| need.package).collect();
            packages.dedup();
            let (programs, packages) = (programs.join(", "), packages.join(" "));
            parts.push(format!("missing programs: {programs}; install them with: apt-get install {packages}"));
        }
        parts.extend(self.other.iter().cloned());
        f.write_str(&parts.join("\n"))
    }
}

/// Checks that this is root and that the programs of a machine and `more` are there.
///
/// # Errors
/// [`Missing`] with everything that is not.
pub fn require(more: &[Need]) -> Result<(), Missing> {
    let programs: Vec<_> = ALWAYS.iter().chain(more).copied().filter(|need| !is_there(need.program)).collect();
    let other = crate::cgroups::missing().into_iter().collect::<Vec<_>>();
    let missing = Missing { not_root: !nix::unistd::geteuid().is_root(), programs, other };
    if missing.not_root || !missing.programs.is_empty() || !missing.other.is_empty() {
        return Err(missing);
    }
    Ok(())
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(Into::into);
    std::env::split_paths(&path).chain(system).any(|dir: std::path::PathBuf| Path::new(&dir).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let need = Need { program: "no-such-program-of-npu-dra", package: "its-package" };
        let text = require(&[need]).unwrap_err().to_string();
        assert!(text.contains("no-such-program-of-npu-dra") && text.contains("its-package"), "{text}");
    }
}
