//! Decisions on Redis: what they cost the server, and how many there are of them, beside plain scripts.
//!
//! What is measured, on a server of the benchmark's own:
//!
//! - `cpu`: the server's time for a decision over that for an INCR, of every algorithm in every mode.
//! - `throughput`: decisions per second and how long one takes, beside each client's own plain loop over a script, and
//!   for one key beside the floor of merging.
//! - `growth`: the same over more and more tasks, and over one, two and three nodes of a cluster; `--plots FOLDER` draws it.
//! - `attack`: the calls that reach the server, and its time, while all ask for one key that is denied.
//! - `bytes`: the server's memory for a key.
//! - `peers`: the same beside other limiters on Redis, if the benchmark was built with them.

mod attack;
mod bytes;
mod cpu;
mod floor;
mod growth;
mod lab;
#[cfg(redis_peers)]
mod peers;
mod plain;
mod plot;
mod replay;
mod situation;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic)]
mod tests;
mod throughput;
mod wire;

use std::error::Error;

use clap::{Args, ValueEnum};

use crate::report::Report;

use lab::Lab;

/// How long to measure, what, and where to write what was measured.
#[derive(Args)]
pub(crate) struct Options {
    /// Fewer rounds, and for bytes fewer keys: a few minutes in all, and less steady.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON line per measurement to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
    /// Also draw the growth, as SVG files in this folder.
    #[arg(long, value_name = "FOLDER")]
    plots: Option<std::path::PathBuf>,
    /// The parts to run; all by default.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Cpu,
    Throughput,
    Growth,
    Attack,
    Bytes,
    Peers,
}

impl Options {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// Measures what is asked for, prints the tables, and writes the JSON lines.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut report = Report::new(options.json.as_deref())?;
    // One thread for all of the client, as one for all of the server.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(options, &mut report))
}

async fn measure(options: &Options, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let mut lab = Lab::new()?;
    let quick = options.quick;
    println!("Decisions on {}, in turns with what they are compared with.", lab.version()?);
    println!("Only ratios inside one run mean anything.");
    if options.wants(Part::Cpu) {
        cpu::run(quick, &mut lab, report).await?;
    }
    if options.wants(Part::Throughput) {
        throughput::run(quick, &mut lab, report).await?;
    }
    if options.wants(Part::Growth) {
        growth::run(quick, &mut lab, report, options.plots.as_deref()).await?;
    }
    if options.wants(Part::Attack) {
        attack::run(quick, &mut lab, report).await?;
    }
    if options.wants(Part::Bytes) {
        bytes::run(quick, &mut lab, report).await?;
    }
    if options.wants(Part::Peers) {
        #[cfg(redis_peers)]
        peers::run(quick, &mut lab, report).await?;
        #[cfg(not(redis_peers))]
        println!(
            "\nother limiters on Redis are left out: RUSTFLAGS=\"--cfg redis_peers\" builds them in (see \
             benches/Cargo.toml)"
        );
    }
    Ok(())
}
