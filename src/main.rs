//! The daemon's binary.

use std::process::ExitCode;

use npu_dra::device::dcmi::worker;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == worker::SUBCOMMAND) {
        return worker::main(arguments);
    }
    ExitCode::SUCCESS
}
