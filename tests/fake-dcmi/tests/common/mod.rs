//! One world per test, called in this process.
#![allow(unsafe_code, dead_code, reason = "the functions under test are C functions; not every test uses all")]

use core::ffi::c_int;
use core::mem::MaybeUninit;

use dcmi::code;
use dcmi::raw::Plain;
use dcmi::world::{Profile, World};

/// Calls an exported function.
macro_rules! c {
    ($module:ident::$function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: every pointer is null or leads to a live local of the right size.
        unsafe { dcmi::calls::$module::$function($($argument),*) }
    }};
}

pub(crate) struct Node {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) world: World,
}

impl Node {
    pub(crate) fn new(profile: Profile) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = World::create(dir.path(), profile).unwrap();
        Self { dir, world }
    }

    pub(crate) fn run<R>(&self, body: impl FnOnce() -> R) -> R {
        dcmi::testing::with_world(self.dir.path(), body)
    }

    /// Runs with an init before.
    pub(crate) fn up<R>(&self, body: impl FnOnce() -> R) -> R {
        self.run(|| {
            assert_eq!(c!(inventory::dcmi_init()), code::OK);
            body()
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        dcmi::testing::restart(self.dir.path());
    }
}

/// Calls something with one result: the code, and the result or zeros.
pub(crate) fn get<T: Plain>(call: impl FnOnce(Option<&mut MaybeUninit<T>>) -> c_int) -> (c_int, T) {
    let mut place = MaybeUninit::new(T::zeroed());
    let code = call(Some(&mut place));
    // SAFETY: it was zeroed, and any bytes are a value.
    (code, unsafe { place.assume_init() })
}

/// Text up to the first NUL.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.iter().copied().take_while(|byte| *byte != 0).collect()).unwrap()
}
