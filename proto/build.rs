//! Compiles the .proto files beside it to Rust, without protoc.

use std::path::PathBuf;

/// What is compiled: the file, and the folder below `OUT_DIR` that its code goes to.
///
/// Each file has a folder of its own because the code's file name is the proto package, and kubelet's health services
/// are in packages that are called just `v1` and `v1alpha1`.
const SOURCES: &[(&str, &str)] = &[
    ("registration.proto", "registration"),
    ("dra_v1.proto", "dra_v1"),
    ("dra_v1beta1.proto", "dra_v1beta1"),
    ("health_v1.proto", "health_v1"),
    ("health_v1alpha1.proto", "health_v1alpha1"),
    ("grpc_health.proto", "grpc_health"),
    ("admin_v1.proto", "admin_v1"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    for (file, folder) in SOURCES {
        println!("cargo:rerun-if-changed={file}");
        let folder = out.join(folder);
        std::fs::create_dir_all(&folder)?;
        let descriptors = protox::compile([file], ["."])?;
        tonic_prost_build::configure()
            .out_dir(&folder)
            .build_server(true)
            .build_client(true)
            .compile_fds(descriptors)?;
    }
    Ok(())
}
