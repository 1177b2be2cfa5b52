//! The workspace beside its peers, in one run: on a shared machine only ratios inside one run mean
//! anything.
//!
//! `cargo run --profile bench -p benches -- memory [--quick] [--json FILE] [--only PART,…]`
//!
//! `scripts/callgrind`, which counts instructions instead of nanoseconds
//!
//! `cargo run --profile bench -p benches -- redis [--quick] [--json FILE] [--only PART,…] [--plots FOLDER]`, which starts servers
//! of its own
//!
//! `cargo run --profile bench -p benches -- http [--quick] [--json FILE]`
//!
//! `cargo run --profile bench -p benches -- outage [--quick] [--json FILE]`, which needs a redis-server on the path
//!
//! `cargo run --profile bench -p benches -- buckets [--quick]`, which needs a redis-server on the path

mod buckets;
mod clocks;
mod http;
mod instructions;
mod keys;
mod measure;
mod memory;
mod outage;
mod peers;
mod redis;
mod report;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Our stores beside their peers, measured in pairs in one run.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Decisions in memory, beside governor and others.
    Memory(memory::Options),
    /// Decisions on Redis, beside plain scripts, on a server of the benchmark's own.
    Redis(redis::Options),
    /// What a layer adds to an HTTP request, beside `tower_governor`.
    Http(http::Options),
    /// How late a service answers while its Redis hangs, beside the same service without a limiter.
    Outage(outage::Options),
    /// One kind of decision over and over, for callgrind to count: see scripts/callgrind.
    Instructions(instructions::Options),
    /// How a bucketed window may be kept on Redis, beside the pattern that it comes from.
    Buckets {
        /// Fewer rounds, and less steady.
        #[arg(long)]
        quick: bool,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Memory(options) => memory::run(&options),
        What::Redis(options) => redis::run(&options),
        What::Http(options) => http::run(&options),
        What::Outage(options) => outage::run(&options),
        What::Instructions(options) => instructions::run(&options),
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
