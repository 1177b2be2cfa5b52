//! Decisions on Redis: what they cost the server, and how many there are of them, beside plain
//! scripts.
//!
//! What is measured, on servers of the benchmark's own:
//!
//! - `cpu`: the server's time for a decision over that for an INCR, and its memory, of every
//!   algorithm in every mode.
//! - `buckets`: the same for ways to keep a bucketed window, beside the pattern that it comes from.
//! - `throughput`: decisions per second and how long one takes, beside each client's own plain loop
//!   over a script, and for one key beside the floor of merging.
//! - `numbers`: the same for ten thousand customers with numbers of their own, beside one limit for
//!   all of them (`one limit`), and beside a limiter for each (`limiter each`).
//! - `way`: requests that share calls beside requests that are sent alone, over ways of several
//!   lengths.
//! - `nodes`: the same over one, two and three nodes of a cluster.
//! - `attack`: the calls that reach the server, and its time, while all ask for one key that is
//!   denied.

mod attack;
mod buckets;
mod cpu;
mod floor;
mod lab;
mod nodes;
mod numbers;
mod plain;
mod recorder;
mod relay;
mod replay;
mod situation;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic)]
mod tests;
mod throughput;
mod way;

use clap::ValueEnum;

use crate::measure::Fallible;
use crate::report::Options;

use lab::Lab;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RedisPart {
    Cpu,
    Buckets,
    Throughput,
    Numbers,
    Way,
    Nodes,
    Attack,
}

/// Measures what is asked for, prints the tables, and writes the JSON lines.
pub(crate) fn run(options: &Options<RedisPart>) -> Fallible {
    // One thread for all of the client, as one for all of the server.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut lab = Lab::new(&options.effort)?;
        println!("Decisions on {}, in turns with what they are compared with.", lab.version()?);
        println!("Only ratios inside one run mean anything.");
        for part in RedisPart::value_variants() {
            if !options.has(part) {
                continue;
            }
            match part {
                RedisPart::Cpu => cpu::run(&mut lab).await?,
                RedisPart::Buckets => buckets::run(&mut lab).await?,
                RedisPart::Throughput => throughput::run(&mut lab).await?,
                RedisPart::Numbers => numbers::run(&mut lab).await?,
                RedisPart::Way => way::run(&mut lab).await?,
                RedisPart::Nodes => nodes::run(&mut lab).await?,
                RedisPart::Attack => attack::run(&mut lab).await?,
            }
        }
        Ok(())
    })
}
