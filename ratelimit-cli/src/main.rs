//! `ratelimit`: tries rate limits on recorded traffic and inspects the state of those in use.
//!
//! | read | for |
//! |---|---|
//! | `args`, `help/` | the command-line arguments, and what `--help` says below them |
//! | `commands/` | the commands |
//! | `inputs`, `files` | the files that it reads and writes |
//! | `interrupt` | Ctrl-C |
//! | `store`, `store/` | memory, or a server if the tool is built with a client for it |
//!
//! All else is in `ratelimit-replay`: it reads logs, decides their requests and presents the
//! numbers.

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]
// What serves only stores on servers.
#![cfg_attr(not(feature = "_servers"), allow(dead_code, unused_variables, clippy::unused_async))]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use ratelimit_replay::failure::Failure;

mod args;
mod commands;
mod files;
mod inputs;
mod interrupt;
mod store;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    match commands::run(&cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if !matches!(failure, Failure::BrokenPipe | Failure::Interrupted) {
                // With standard error closed, the message has nowhere to go.
                let _ = writeln!(io::stderr(), "error: {failure}");
            }
            ExitCode::from(exit_code(&failure))
        }
    }
}

const fn exit_code(failure: &Failure) -> u8 {
    match failure {
        Failure::Input(_) => 2,
        Failure::Store(_) => 3,
        Failure::BrokenPipe => 0,
        Failure::Interrupted => interrupt::EXIT_CODE,
    }
}
