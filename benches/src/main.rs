//! The workspace beside its peers, in one run: on a shared machine only ratios inside one run mean
//! anything.
//!
//! `cargo run --profile bench -p benches -- memory [--quick] [--json FILE] [--only PART,…]`, and
//! `redis`, which starts servers of its own, `http`, `outage` and `tool` likewise.
//!
//! `cargo bench -p benches` counts instructions instead of nanoseconds: see `instructions.rs`.

mod dashboard;
mod http;
mod keys;
mod measure;
mod memory;
mod outage;
mod peers;
mod redis;
mod report;
mod requests;
mod tool;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use report::{Effort, Options};

/// Our stores beside their peers, measured in pairs in one run.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Decisions in memory, beside governor and limitador.
    Memory(Options<memory::MemoryPart>),
    /// Decisions on Redis, beside plain scripts, on servers of the benchmark's own.
    Redis(Options<redis::RedisPart>),
    /// What a layer adds to an HTTP request, beside `tower_governor`.
    Http(Effort),
    /// What a service answers while its Redis hangs, and how late, beside the same service without
    /// a limiter.
    Outage(Options<outage::OutagePart>),
    /// What the dashboard shows of a service while Redis hangs, by a Prometheus of its own.
    Dashboard(Effort),
    /// What the tool takes to replay a log of three million lines, and to suggest limits for it.
    Tool(Effort),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Memory(options) => memory::run(&options),
        What::Redis(options) => redis::run(&options),
        What::Http(effort) => http::run(&effort),
        What::Outage(options) => outage::run(&options),
        What::Dashboard(effort) => dashboard::run(&effort),
        What::Tool(effort) => tool::run(&effort),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("benches: {error}");
            ExitCode::FAILURE
        }
    }
}
