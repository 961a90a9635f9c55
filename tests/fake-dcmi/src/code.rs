//! Return codes of the vendor library. Every call answers 0 or one of these.

/// The call worked.
pub const OK: i32 = 0;
/// Bad argument, short buffer, unknown template; also what does not fit or is in use.
pub const INVALID_PARAMETER: i32 = -8001;
/// The user or the environment is not allowed.
pub const OPER_NOT_PERMITTED: i32 = -8002;
/// Allocation or copy failed.
pub const MEM_OPERATE_FAIL: i32 = -8003;
/// A safe string function failed.
pub const SECURE_FUN_FAIL: i32 = -8004;
/// Anything that has no code of its own.
pub const INNER_ERR: i32 = -8005;
/// Time ran out.
pub const TIME_OUT: i32 = -8006;
/// The device id is not valid.
pub const INVALID_DEVICE_ID: i32 = -8007;
/// The device is gone.
pub const DEVICE_NOT_EXIST: i32 = -8008;
/// An ioctl failed.
pub const IOCTL_FAIL: i32 = -8009;
/// Sending over the channel between host and device failed.
pub const SEND_MSG_FAIL: i32 = -8010;
/// Receiving over the channel between host and device failed.
pub const RECV_MSG_FAIL: i32 = -8011;
/// The device is not ready.
pub const NOT_READY: i32 = -8012;
/// Named for containers, met when a chip is busy.
pub const NOT_SUPPORT_IN_CONTAINER: i32 = -8013;
/// A file could not be read or written.
pub const FILE_OPERATE_FAIL: i32 = -8014;
/// The reset failed.
pub const RESET_FAIL: i32 = -8015;
/// The operation was aborted.
pub const ABORT_OPERATE: i32 = -8016;
/// An upgrade is running.
pub const IS_UPGRADING: i32 = -8017;
/// The resource is held by somebody else.
pub const RESOURCE_OCCUPIED: i32 = -8020;
/// The partition is not right.
pub const PARTITION_NOT_RIGHT: i32 = -8022;
/// The configuration entry does not exist.
pub const CONFIG_INFO_NOT_EXIST: i32 = -8023;
/// Not for this chip, driver or environment.
pub const NOT_SUPPORT: i32 = -8255;

/// The code that a call ends with, or what it produced.
pub(crate) type Answer<T = ()> = Result<T, i32>;
