//! `ratelimit`: tries rate limits on recorded traffic and inspects the state of those in use.
//!
//! | read | for |
//! |---|---|
//! | `args`, `help/` | the command-line arguments, and what `--help` says below them |
//! | `commands/` | the commands |
//! | `input`, `input/` | turning a file into requests |
//! | `replay`, `replay/` | deciding them, one after another |
//! | `decision_line` | the bytes of a decision |
//! | `tally`, `timeline`, `nearness`, `frequent`, `compare` | the counts of a replay |
//! | `store`, `store/` | memory, or a server if the tool is built with a client for it |
//! | `records` | records of callers, in words, as JSON and from a file |
//! | `suggest` | finding limits that deny few callers |
//! | `summary`, `table`, `report`, `report/` | presenting them |

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]
// What serves only stores on servers.
#![cfg_attr(not(feature = "_servers"), allow(dead_code, unused_variables, clippy::unused_async))]

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use crate::failure::Failure;

mod args;
mod caller;
mod commands;
mod compare;
mod decision_line;
mod failure;
mod files;
mod frequent;
mod input;
mod interrupt;
mod nearness;
mod policy;
mod records;
mod replay;
mod report;
mod store;
mod suggest;
mod summary;
mod table;
mod tally;
mod text;
mod timeline;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    match commands::run(&cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if !matches!(failure, Failure::BrokenPipe | Failure::Interrupted) {
                // With standard error closed, the message has nowhere to go.
                let _ = writeln!(io::stderr(), "error: {failure}");
            }
            ExitCode::from(failure.exit_code())
        }
    }
}
