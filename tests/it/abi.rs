//! The driver's declarations of the vendor's C, compared with what a C compiler makes of our header.

use std::collections::BTreeMap;

use npu_dra::device::dcmi::ffi;

#[test]
fn every_size_offset_and_constant_is_what_c_makes_of_it() {
    let ours: BTreeMap<String, i64> = ffi::layout()
        .into_iter()
        .map(|(name, value)| (name, i64::try_from(value).unwrap()))
        .chain(ffi::constants())
        .chain([("sizeof.enum".to_owned(), i64::try_from(size_of::<core::ffi::c_uint>()).unwrap())])
        .collect();
    let c: BTreeMap<String, i64> = dcmi::abi::c_layout().into_iter().collect();
    assert!(c.len() > 300, "the C program printed only {} lines", c.len());
    for (name, value) in &c {
        assert_eq!(ours.get(name), Some(value), "{name} in the driver");
    }
    for name in ours.keys() {
        assert!(c.contains_key(name), "{name} is declared by the driver and not in the C header");
    }
}
