//! The gRPC messages and services that npu-dra speaks: kubelet's, gRPC's health check, and its own.
//!
//! The code is made from the .proto files of this package at build time. Package names, message names and field
//! numbers of kubelet's services are its contract and never change here.

/// Makes the module of one compiled file. The code is generated, so the lints for written code are off in it.
macro_rules! generated {
    ($(#[$doc:meta])* $module:ident, $path:literal) => {
        $(#[$doc])*
        #[allow(
            missing_docs,
            missing_debug_implementations,
            unreachable_pub,
            clippy::all,
            clippy::pedantic,
            clippy::unwrap_used,
            clippy::expect_used
        )]
        pub mod $module {
            include!(concat!(env!("OUT_DIR"), "/", $path));
        }
    };
}

generated! {
    /// How kubelet finds and takes in a plugin.
    registration, "registration/pluginregistration.rs"
}
generated! {
    /// Prepare and unprepare of claims, version v1.
    dra_v1, "dra_v1/k8s.io.kubelet.pkg.apis.dra.v1.rs"
}
generated! {
    /// Prepare and unprepare of claims, version v1beta1: as v1 without shares.
    dra_v1beta1, "dra_v1beta1/k8s.io.kubelet.pkg.apis.dra.v1beta1.rs"
}
generated! {
    /// Health of devices for kubelet, version v1.
    health_v1, "health_v1/v1.rs"
}
generated! {
    /// Health of devices for kubelet, version v1alpha1: the same messages in another package.
    health_v1alpha1, "health_v1alpha1/v1alpha1.rs"
}
generated! {
    /// gRPC's own health check.
    grpc_health, "grpc_health/grpc.health.v1.rs"
}
generated! {
    /// What `npuctl` asks the daemon.
    admin, "admin_v1/npu.admin.v1.rs"
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::{admin, dra_v1, dra_v1beta1, grpc_health, health_v1, health_v1alpha1, registration};

    /// The name that a method path begins with is the contract; a wrong package makes every call UNIMPLEMENTED.
    #[test]
    fn the_services_have_the_names_that_kubelet_calls() {
        assert_eq!(registration::registration_server::SERVICE_NAME, "pluginregistration.Registration");
        assert_eq!(dra_v1::dra_plugin_server::SERVICE_NAME, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin");
        assert_eq!(dra_v1beta1::dra_plugin_server::SERVICE_NAME, "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin");
        assert_eq!(health_v1::dra_resource_health_server::SERVICE_NAME, "v1.DRAResourceHealth");
        assert_eq!(health_v1alpha1::dra_resource_health_server::SERVICE_NAME, "v1alpha1.DRAResourceHealth");
        assert_eq!(admin::admin_server::SERVICE_NAME, "npu.admin.v1.Admin");
        assert_eq!(grpc_health::health_server::SERVICE_NAME, "grpc.health.v1.Health");
    }

    #[test]
    fn a_device_is_written_with_the_field_numbers_of_the_contract() {
        let device = dra_v1::Device {
            request_names: vec!["r".into()],
            pool_name: "p".into(),
            device_name: "d".into(),
            cdi_device_ids: vec!["c".into()],
            share_id: Some("s".into()),
        };
        let bytes = device.encode_to_vec();
        assert_eq!(bytes, b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x01c\x2a\x01s");
        let without_share = dra_v1::Device { share_id: None, ..device.clone() };
        assert_eq!(without_share.encode_to_vec(), b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x01c");
        let older = dra_v1beta1::Device::decode(bytes.as_slice()).unwrap();
        assert_eq!(older.encode_to_vec(), without_share.encode_to_vec());
    }

    #[test]
    fn a_claim_and_an_answer_are_written_with_the_field_numbers_of_the_contract() {
        let claim = dra_v1::Claim { namespace: "n".into(), uid: "u".into(), name: "m".into() };
        assert_eq!(claim.encode_to_vec(), b"\x0a\x01n\x12\x01u\x1a\x01m");
        let failed = dra_v1::NodePrepareResourceResponse { devices: vec![], error: "e".into() };
        assert_eq!(failed.encode_to_vec(), b"\x12\x01e");
        let failed = dra_v1::NodeUnprepareResourceResponse { error: "e".into() };
        assert_eq!(failed.encode_to_vec(), b"\x0a\x01e");
    }

    #[test]
    fn registration_is_written_with_the_field_numbers_of_the_contract() {
        let info = registration::PluginInfo {
            r#type: "t".into(),
            name: "n".into(),
            endpoint: "e".into(),
            supported_versions: vec!["v".into(), "w".into()],
        };
        assert_eq!(info.encode_to_vec(), b"\x0a\x01t\x12\x01n\x1a\x01e\x22\x01v\x22\x01w");
        let status = registration::RegistrationStatus { plugin_registered: true, error: "e".into() };
        assert_eq!(status.encode_to_vec(), b"\x08\x01\x12\x01e");
    }

    #[test]
    fn health_is_written_with_the_field_numbers_of_the_contract() {
        let health = health_v1::DeviceHealth {
            device: Some(health_v1::DeviceIdentifier { pool_name: "p".into(), device_name: "d".into() }),
            health: health_v1::HealthStatus::Unhealthy.into(),
            last_updated_time: 5,
            health_check_timeout_seconds: 30,
            message: "m".into(),
        };
        let bytes = health.encode_to_vec();
        assert_eq!(bytes, b"\x0a\x06\x0a\x01p\x12\x01d\x10\x02\x18\x05\x20\x1e\x2a\x01m");
        assert_eq!(health_v1alpha1::DeviceHealth::decode(bytes.as_slice()).unwrap().encode_to_vec(), bytes);
    }
}
