//! The binary `npu-dra`: the daemon, and the worker process that it starts for the vendor library.

use std::process::ExitCode;

use npu_dra::{daemon, device::dcmi::worker};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == worker::SUBCOMMAND) {
        return worker::main(arguments);
    }
    daemon::main(std::env::args_os())
}
