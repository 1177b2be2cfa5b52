//! `ratelimit`: try rate limits on yesterday's traffic, and look into the ones in use.
//!
//! | read | for |
//! |---|---|
//! | `args` | what can be said on the command line |
//! | `commands/` | what each command does |
//! | `input`, `input/` | from a file to requests |
//! | `replay` | deciding them, one after another |
//! | `decision_line` | the bytes of a decision |
//! | `bench`, `bench/` | asking a store as fast as it answers |
//! | `tally`, `timeline` | what is counted on the way |
//! | `summary`, `report` | telling it |

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

mod args;
mod bench;
mod caller;
mod commands;
mod decision_line;
mod failure;
mod files;
mod input;
mod interrupt;
mod policy;
mod progress;
mod replay;
mod report;
mod store;
mod summary;
mod tally;
mod text;
mod timeline;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    match commands::run(&cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if !matches!(failure, failure::Failure::BrokenPipe) {
                // Where standard error is closed there is nobody to tell.
                let _ = writeln!(io::stderr(), "error: {failure}");
            }
            ExitCode::from(failure.exit_code())
        }
    }
}
