//! The workspace beside its peers, in one run: on a shared machine only ratios inside one run mean
//! anything.
//!
//! `cargo run --release -p benches -- memory [--quick] [--json FILE]`
//!
//! `cargo run --release -p benches -- buckets [--quick]`, which needs a redis-server on the path

mod buckets;
mod keys;
mod measure;
mod memory;
mod peers;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Our stores beside their peers, measured in pairs in one run.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// One decision in memory, beside governor and beside ten lines of plain Rust.
    Memory(Options),
    /// How a bucketed window may be kept on Redis, beside the pattern that it comes from.
    Buckets {
        /// Fewer rounds, and less steady.
        #[arg(long)]
        quick: bool,
    },
}

/// How long to measure, and where to write what was measured.
#[derive(Args)]
struct Options {
    /// Fewer rounds: under a minute in all, and less steady.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON line per measurement to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Memory(options) => memory::run(&options),
        What::Buckets { quick } => buckets::run(quick),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("benches: {error}");
            ExitCode::FAILURE
        }
    }
}
