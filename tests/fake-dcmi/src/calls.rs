//! The exported C functions. Their results go through [`Out`](crate::session::Out): a null pointer is `None`.

/// Declares exported functions: the arguments in C order, the chip that the call is about, the body.
macro_rules! exports {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) about $target:expr => |$call:ident| $body:expr;)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// Every pointer must be null or lead to as much writable memory as the C interface asks for.
        #[unsafe(no_mangle)]
        #[allow(clippy::similar_names)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> ::core::ffi::c_int {
            $crate::session::call(stringify!($name), $target, |$call| $body)
        }
    )*};
}

pub mod control;
pub mod describe;
pub mod fault;
pub mod inventory;
pub mod vnpu;
