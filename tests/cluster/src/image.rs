//! The container images: busybox and its applets in one layer, and names and settings that the cases want.

use std::{
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Archive, Builder, EntryType, Header};

/// The image that pods run. Like the vendor's images it sets `LD_LIBRARY_PATH`, and claims card 0 by a variable.
pub(crate) const CANN: &str = "docker.io/npu-dra-test/cann:1";
/// The image of a pod's sandbox.
pub(crate) const PAUSE: &str = "docker.io/npu-dra-test/pause:1";
/// The image that the shipped samples name: here it is the same busybox.
const SAMPLE: &str = "docker.io/library/ubuntu:24.04";
/// What the image sets as `LD_LIBRARY_PATH`.
pub(crate) const LIBRARY_PATH: &str = "/usr/local/Ascend/ascend-toolkit/latest/lib64:/opt/own/lib";

/// Raised when images of an older making will not do.
const MAKING: &str = "1";

/// An OCI archive with all images, made from the busybox in a machine's root tar.
///
/// # Errors
/// The root tar has no busybox, or a file cannot be written.
pub(crate) fn ready(root_tar: &Path) -> anyhow::Result<PathBuf> {
    let key = root_tar.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let path = lab::cache_dir()?.join("cluster").join(format!("images-{MAKING}-{key}.tar"));
    if path.is_file() {
        return Ok(path);
    }
    let part = path.with_extension(format!("part{}", std::process::id()));
    let busybox = busybox(root_tar)?;
    fs::write(&part, &busybox)?;
    let applets = applets(&part)?;
    write(&part, &layer(&busybox, &applets)?)?;
    fs::rename(&part, &path).with_context(|| format!("cannot rename {}", part.display()))?;
    Ok(path)
}

fn busybox(root_tar: &Path) -> anyhow::Result<Vec<u8>> {
    let file = File::open(root_tar).with_context(|| format!("cannot open {}", root_tar.display()))?;
    for entry in Archive::new(file).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        if path.ends_with("bin/busybox") && entry.header().entry_type() == EntryType::Regular {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            return Ok(bytes);
        }
    }
    anyhow::bail!("{} has no busybox", root_tar.display())
}

/// The names that a busybox has. It is linked statically, so that this machine can run it.
fn applets(busybox: &Path) -> anyhow::Result<Vec<String>> {
    use std::os::unix::{fs::PermissionsExt as _, process::CommandExt as _};
    fs::set_permissions(busybox, fs::Permissions::from_mode(0o755))?;
    let output = Command::new(busybox).arg0("busybox").arg("--list").output().context("cannot run busybox")?;
    ensure!(output.status.success(), "busybox --list failed ({})", output.status);
    let names = String::from_utf8_lossy(&output.stdout);
    Ok(names.lines().filter(|name| *name != "busybox").map(str::to_owned).collect())
}

fn header(kind: EntryType, size: usize, mode: u32) -> anyhow::Result<Header> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(u64::try_from(size)?);
    header.set_mode(mode);
    header.set_mtime(0);
    Ok(header)
}

fn add(tar: &mut Builder<Vec<u8>>, name: &str, bytes: &[u8], mode: u32) -> anyhow::Result<()> {
    tar.append_data(&mut header(EntryType::Regular, bytes.len(), mode)?, name, bytes)?;
    Ok(())
}

fn layer(busybox: &[u8], applets: &[String]) -> anyhow::Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for (name, mode) in [
        ("bin", 0o755),
        ("etc", 0o755),
        ("dev", 0o755),
        ("proc", 0o755),
        ("sys", 0o755),
        ("usr", 0o755),
        ("usr/bin", 0o755),
        ("usr/local", 0o755),
        ("var", 0o755),
        ("run", 0o755),
        ("root", 0o700),
        ("tmp", 0o1777),
    ] {
        tar.append_data(&mut header(EntryType::Directory, 0, mode)?, name, &[][..])?;
    }
    add(&mut tar, "bin/busybox", busybox, 0o755)?;
    for applet in applets {
        tar.append_link(&mut header(EntryType::Symlink, 0, 0o777)?, format!("bin/{applet}"), "busybox")?;
    }
    add(&mut tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", 0o644)?;
    add(&mut tar, "etc/group", b"root:x:0:\n", 0o644)?;
    Ok(tar.into_inner()?)
}

fn write(path: &Path, layer: &[u8]) -> anyhow::Result<()> {
    let mut blobs: Vec<(String, Vec<u8>)> = Vec::new();
    let mut blob = |bytes: Vec<u8>| {
        let digest = format!("{:x}", Sha256::digest(&bytes));
        let (named, size) = (format!("sha256:{digest}"), bytes.len());
        if !blobs.iter().any(|(name, _)| *name == digest) {
            blobs.push((digest, bytes));
        }
        (named, size)
    };
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let platform = json!({"architecture": architecture, "os": "linux"});
    let (layer_digest, layer_size) = blob(layer.to_vec());
    let mut manifests: Vec<Value> = Vec::new();
    for name in [CANN, SAMPLE, PAUSE] {
        let mut env = vec!["PATH=/bin:/usr/bin".to_owned()];
        if name != PAUSE {
            env.push(format!("LD_LIBRARY_PATH={LIBRARY_PATH}"));
            env.push("ASCEND_VISIBLE_DEVICES=0".to_owned());
        }
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {"Env": env, "Cmd": ["sleep", "2147483647"]},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "history": [{"created_by": "cluster-test"}],
        });
        let (config_digest, config_size) = blob(serde_json::to_vec(&config)?);
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config_size},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer_digest, "size": layer_size}],
        });
        let (digest, size) = blob(serde_json::to_vec(&manifest)?);
        manifests.push(json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": size, "platform": platform,
            "annotations": {"io.containerd.image.name": name},
        }));
    }
    let index =
        json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests});
    let mut tar = Builder::new(Vec::new());
    add(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    add(&mut tar, "index.json", &serde_json::to_vec(&index)?, 0o644)?;
    for (digest, bytes) in &blobs {
        add(&mut tar, &format!("blobs/sha256/{digest}"), bytes, 0o644)?;
    }
    fs::write(path, tar.into_inner()?).with_context(|| format!("cannot write {}", path.display()))
}
