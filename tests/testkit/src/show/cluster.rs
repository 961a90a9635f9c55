//! `testkit cluster`: what surrounds a node whose daemon is not ours to start.
//!
//! The daemon finds everything where it looks without any setting: the library's world apart (`FAKE_DCMI_WORLD`), which
//! the hardware would be. `testkit prepare` and the other commands act on the directory as on a sandbox.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use dcmi::world::{NodeKind, Profile, World};
use testkit::{
    api::{ApiServer, How, Release, Who},
    kubelet::Kubelet,
    node::{NODE, install_vendor},
};
use tokio::net::UnixListener;

use super::{add_manifests, sandbox, say};

/// Serves until it is ended. A second time in one directory the NPUs are as they were left; the API server begins anew.
pub(crate) async fn run(dir: &Path, host: &Path) -> anyhow::Result<()> {
    let make = |path: &Path| fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()));
    make(&dir.join("run"))?;
    let kubelet_dir = host.join("var/lib/kubelet");
    for path in [kubelet_dir.join("plugins_registry"), host.join("etc/kubernetes"), host.join("dev")] {
        make(&path)?;
    }
    if !dir.join("kubelet").exists() {
        symlink(&kubelet_dir, dir.join("kubelet")).context("cannot link kubelet's directory")?;
    }
    make_world(dir, host)?;

    let api = ApiServer::start(Release::V1_36).await?;
    api.add_node(NODE);
    api.set_memory_policy(true);
    add_manifests(&api)?;
    let credentials = api.kubeconfig(&dir.join("kubeconfig"), &Who::Node(NODE.to_owned()), How::Certificate)?;
    fs::copy(&credentials.path, host.join("etc/kubernetes/kubelet.conf")).context("cannot write kubelet.conf")?;
    let _kubelet = Kubelet::start(&kubelet_dir.join("plugins_registry"))?;

    let socket = dir.join(sandbox::SOCKET);
    let _ = fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).context("cannot listen for orders")?;
    say(format!("node {NODE}: API server 1.36 at {}, orders at {}", api.url(), socket.display()));
    loop {
        let (stream, _) = listener.accept().await.context("the socket for orders failed")?;
        // A command that goes away, or sends what is no order, harms nobody.
        let _ = sandbox::serve(&api, stream).await;
    }
}

/// The NPUs, their device nodes and the vendor's files.
fn make_world(dir: &Path, host: &Path) -> anyhow::Result<()> {
    let path = dir.join("world");
    let world = match World::open(&path) {
        Ok(world) => world,
        Err(_) => World::create(&path, Profile::Ascend910B4).context("cannot make the world of NPUs")?,
    };
    world
        .edit(|data| {
            data.dev_dir = host.join("dev");
            data.vnpu_cfg = host.join("etc/vnpu.cfg");
            // The daemon's worker makes a vNPU's node here, where on hardware the kernel does: it may not mknod.
            data.node = NodeKind::Symlink(PathBuf::from("/dev/null"));
        })
        .context("cannot tell the world where the host's files are")?;
    world.make_nodes().context("cannot make the device nodes")?;
    install_vendor(host, &world.data().context("cannot read the world")?.driver_version)
}
