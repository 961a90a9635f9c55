//! `cluster-test --prove`: cases against a driver that was broken on purpose. Each must fail; one that passes proves
//! nothing. The product has no hooks for this: it is broken from outside, by its unit's settings, by scripts around it,
//! or by a preloaded library that lies to it (`lie.c`).

use std::{
    fs,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};

use crate::{
    cases,
    plane::{Parts, Plane, write},
    programs::Own,
    setting::SETTINGS,
    stage::{Stage, set_patience},
};

/// A way to break the driver, and the case that must notice.
struct Proof {
    case: &'static str,
    /// How the driver is broken, in words.
    broken: &'static str,
    /// Lines of a drop-in of its unit, below `[Service]`.
    unit: &'static str,
}

const DROP_IN: &str = "etc/systemd/system/npu-dra.service.d/prove.conf";
/// The release that the proofs run on unless `VERSION` names another.
const SETTING: &str = "1.37.2";
/// How long a case may wait for what a broken driver does not do.
const PATIENCE: Duration = Duration::from_secs(20);

const PROOFS: [Proof; 12] = [
    Proof {
        case: "whole-npu",
        broken: "writes its CDI files where no runtime looks",
        unit: "ExecStart=\nExecStart=/usr/sbin/npu-dra --cdi-root=/var/lib/cdi-elsewhere\n",
    },
    Proof {
        case: "sample",
        broken: "offers whole cards only, so that a claim for a part gets one",
        unit: "ExecStart=\nExecStart=/usr/sbin/npu-dra --slicing-model=off\n",
    },
    Proof {
        case: "environment-and-mounts",
        broken: "sets LD_LIBRARY_PATH in its CDI files",
        unit: "Environment=LD_PRELOAD=/opt/lie.so LIE=library-path\n",
    },
    Proof {
        case: "only-its-devices",
        broken: "gives out another card's device nodes",
        unit: "ExecStartPost=+/bin/sh -c 'cd /dev && for a in 0 2 4 6; do b=$$((a + 1)); mv davinci$$a x && \
               mv davinci$$b davinci$$a && mv x davinci$$b; done'\n",
    },
    Proof {
        case: "nothing-left",
        broken: "never removes a CDI file",
        unit: "Environment=LD_PRELOAD=/opt/lie.so LIE=keep\n",
    },
    Proof {
        case: "driver-restart",
        broken: "withdraws its slices when it stops",
        unit: "ExecStopPost=+/opt/KUBERNETES/kubectl --kubeconfig=/etc/kubernetes/admin.conf delete resourceslices --all\n",
    },
    Proof { case: "driver-killed", broken: "stays down after a crash", unit: "Restart=no\n" },
    Proof {
        case: "driver-down",
        broken: "starts with a clean slate",
        unit: "ExecStartPre=+/bin/sh -c 'rm -rf /var/lib/npu-dra/claims /etc/cdi/*'\n",
    },
    Proof {
        case: "server-down",
        broken: "does not start without an API server",
        unit: "ExecStartPre=+/opt/KUBERNETES/kubectl --kubeconfig=/etc/kubernetes/admin.conf get nodes\nRestart=no\n",
    },
    Proof {
        case: "boot",
        broken: "believes that it is always the same boot",
        unit: "ExecStartPre=+/bin/sh -c 'cd /var/lib && { test -e first-boot || cp npus-boot-id first-boot; } && \
               cat first-boot >npus-boot-id'\n",
    },
    Proof {
        case: "health-fault",
        broken: "thinks nothing of memory that ECC cannot correct",
        unit: "ExecStartPre=+/bin/sh -c 'printf \"80E01801 = \\\\047ignore\\\\047\" >/etc/npu-dra/faults.toml'\n",
    },
    Proof {
        case: "health-drain",
        broken: "forgets its drains when it starts",
        unit: "ExecStartPre=+/bin/sh -c 'rm -f /var/lib/npu-dra/node.json'\n",
    },
];

/// Runs all proofs, and says which driver was not noticed to be broken.
pub(crate) fn run(own: &Own, wanted: &[String], names: &[String]) -> anyhow::Result<ExitCode> {
    let name = wanted.first().map_or(SETTING, String::as_str);
    let setting = SETTINGS.iter().find(|setting| setting.name == name).context("no such setting")?;
    let plane = Plane::up(setting, &Parts::ready(setting, own)?)?;
    compile(&plane)?;
    let stage = Stage::set(plane, setting)?;
    set_patience(PATIENCE);
    let chosen = |proof: &&Proof| names.is_empty() || names.iter().any(|part| proof.case.contains(part.as_str()));
    let (mut noticed, mut all) = (0, 0);
    println!("{:24} {:62} noticed by", "case", "against a driver that");
    for proof in PROOFS.iter().filter(chosen) {
        all += 1;
        let started = Instant::now();
        let outcome = prove(&stage, proof)?;
        let took = started.elapsed().as_secs_f64();
        match &outcome {
            Some(why) => {
                noticed += 1;
                let line: String = why.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(110).collect();
                println!("{:24} {:62} {line} ({took:.0} s)", proof.case, proof.broken);
            }
            None => println!("{:24} {:62} NOTHING: THE CASE PASSED ({took:.0} s)", proof.case, proof.broken),
        }
    }
    println!("cluster-test --prove: {noticed} of {all} broken drivers were noticed");
    Ok(if noticed == all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a case says about a broken driver; nothing if it passes.
fn prove(stage: &Stage, proof: &Proof) -> anyhow::Result<Option<String>> {
    let (_, case) = cases::all().find(|(name, _)| *name == proof.case).context("no such case")?;
    let plane = stage.plane();
    let unit = proof.unit.replace("KUBERNETES", plane.kubernetes().module.name);
    write(&plane.file(DROP_IN), format!("[Service]\n{unit}").as_bytes())?;
    plane.run(&["systemctl", "daemon-reload"])?;
    stage.spoil();
    stage.begin()?;
    let outcome = lab::cases::caught(|| case(stage));

    // The driver is mended, so that kubelet can let go of what the case made.
    fs::remove_file(plane.file(DROP_IN))?;
    plane.run(&["systemctl", "daemon-reload"])?;
    plane.sh("systemctl start kube-apiserver kubelet; systemctl reset-failed npu-dra 2>/dev/null || true\n\
         systemctl restart npu-dra; rm -f /var/lib/first-boot")?;
    plane.wait_for_server()?;
    let Err(error) = outcome else {
        // What it left is not the question.
        let _ = stage.end(Ok(()));
        stage.spoil();
        return Ok(None);
    };
    let text = format!("{error:#}");
    let _ = stage.end(Err(anyhow!("noticed")));
    stage.spoil();
    Ok(Some(text))
}

/// Puts the library that lies into the node.
fn compile(plane: &Plane) -> anyhow::Result<()> {
    let source = plane.file("/opt/lie.c");
    write(&source, include_bytes!("lie.c"))?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&plane.file("/opt/lie.so"), &source])
        .arg("-ldl")
        .output()
        .context("cannot run the C compiler: install gcc or clang")?;
    ensure!(output.status.success(), "lie.c: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
