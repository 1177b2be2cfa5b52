//! Decisions in memory: ours beside governor and others, in turns.
//!
//! What is measured:
//!
//! - `speed`: one decision on each of [`SCENARIOS`](scenario::SCENARIOS), allowed and denied, on one
//!   thread and on two, with the precise clock and a coarse one, one request a call and eight: every
//!   combination of these. Beside governor with its defaults, whatever ours has; where ours has the
//!   coarse clock, also beside governor with its own coarse clock (`governor-coarse`). governor has no call
//!   for several requests, and is asked one at a time.
//! - `peers`: the same scenarios and outcomes, precise and one at a time, beside limiters other than
//!   governor. `--quick` leaves out those with a million keys.
//! - `work`: the other algorithms beside limitador's fixed window, a lease and its release beside two charges of
//!   it (`limitador-twice`), because they are two decisions of ours; three limits on one key beside two
//!   checks of governor; batches.
//! - `growth`: the worst single call while ten million keys come that were never seen before, to a store with
//!   room for all of them and (`growth-10m-capped`) to one with room for a million; and the same for fixed
//!   windows (`growth-10m-windows`), whose states lie in shards.
//! - `bytes`: the heap that they take, and (`bytes-per-key-10m-windows`) that fixed windows do.
//! - `expiry`: what it costs that a million keys have expired.

mod growth;
mod heap;
mod others;
mod scenario;
mod speed;
mod work;

use std::error::Error;

use clap::{Args, ValueEnum};

use crate::report::Report;

/// How long to measure, what, and where to write what was measured.
#[derive(Args)]
pub(crate) struct Options {
    /// Fewer rounds, and fewer keys for growth, bytes and expiry: under a minute in all, and less steady.
    #[arg(long)]
    quick: bool,
    /// Also write one JSON line per measurement to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
    /// Only these parts; all of them unless told otherwise.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Speed,
    Peers,
    Work,
    Growth,
    Bytes,
    Expiry,
}

impl Options {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// Measures what is asked for, prints the tables, and writes the JSON lines.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut report = Report::new(options.json.as_deref())?;
    let quick = options.quick;
    println!(
        "Decisions in memory, medians over rounds in which all take turns. One thread: its CPU"
    );
    println!(
        "time; two: wall time over all decisions. A ratio is the peer's time over ours in the"
    );
    println!("same round: above 1 we are faster. Only ratios inside one run mean anything.");
    if quick {
        println!(
            "--quick: fewer rounds; growth and bytes with half a million keys instead of ten million,"
        );
        println!(
            "expiry with a quarter of a million instead of one, whatever the JSON lines are named."
        );
    }
    if options.wants(Part::Speed) {
        speed::run(quick, &mut report)?;
    }
    if options.wants(Part::Peers) {
        others::run(quick, &mut report)?;
    }
    if options.wants(Part::Work) {
        work::run(quick, &mut report)?;
    }
    if options.wants(Part::Growth) {
        growth::run(quick, &mut report)?;
    }
    if options.wants(Part::Bytes) {
        heap::run(quick, &mut report)?;
    }
    if options.wants(Part::Expiry) {
        growth::expiry(quick, &mut report)?;
    }
    Ok(())
}
