//! Decisions in memory: ours beside governor and limitador, in turns.
//!
//! What is measured:
//!
//! - `speed`: one decision on each of [`SCENARIOS`](scenario::SCENARIOS), allowed and denied, on
//!   one thread and on two, with the precise clock and a coarse one, one request a call and eight:
//!   every combination of these. Beside governor with its defaults, whatever ours has; where ours
//!   has the coarse clock, also beside governor with its own coarse clock (`governor-coarse`).
//!   governor has no call for several requests, and is asked one at a time.
//! - `work`: the other algorithms beside limitador's fixed window, a lease and its release beside
//!   two charges of it (`limitador-twice`), because they are two decisions of ours; three limits on
//!   one key beside two checks of governor; batches.
//! - `numbers`: ten thousand customers with numbers of their own, beside one limit for all of them
//!   (`one-limit`), and beside a limiter for each (`limiter-each`). All look the customer up.
//! - `records`: ten thousand callers of a limit that looks for records, while there are none
//!   (`records-none`), while another caller has one (`records-others`), and while each has one of
//!   its own (`records-each`), beside the same limit that looks for none, alone and behind a
//!   look-up of each caller in a map of the program's (`looked-up`).
//! - `growth`: the worst single call while ten million keys come that were never seen before, to a
//!   store with room for all of them and (`growth-10m-capped`) to one with room for a million; and
//!   the same for fixed windows (`growth-10m-windows`), whose states lie in shards.
//! - `expiry`: what it costs that a million keys have expired.
//!
//! `examples/heap.rs` counts the heap that keys take.

mod growth;
mod numbers;
mod records;
mod scenario;
mod speed;
mod work;

use clap::ValueEnum;

use crate::measure::Fallible;
use crate::report::{BenchReport, Options};

/// The clocks of our store, as JSON and tables name them.
const PRECISE: &str = "precise";
const COARSE: &str = "coarse";

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryPart {
    Speed,
    Work,
    Numbers,
    Records,
    Growth,
    Expiry,
}

/// Measures what is asked for, prints the tables, and writes the JSON lines.
pub(crate) fn run(options: &Options<MemoryPart>) -> Fallible {
    let (quick, mut report) = (options.effort.quick, BenchReport::new(&options.effort)?);
    println!(
        "Decisions in memory, medians over rounds in which all take turns. One thread: its CPU\n\
         time; two: wall time over all decisions. A ratio is the peer's time over ours in the\n\
         same round: above 1 we are faster. Only ratios inside one run mean anything."
    );
    if quick {
        println!(
            "--quick: fewer rounds; growth with half a million keys instead of ten million, expiry\n\
             with a quarter of a million instead of one, whatever the rows are named."
        );
    }
    let parts: [(_, fn(_, &mut _) -> _); 6] = [
        (MemoryPart::Speed, speed::run),
        (MemoryPart::Work, work::run),
        (MemoryPart::Numbers, numbers::run),
        (MemoryPart::Records, records::run),
        (MemoryPart::Growth, growth::run),
        (MemoryPart::Expiry, growth::expiry),
    ];
    for (part, run) in parts {
        if options.has(&part) {
            run(quick, &mut report)?;
        }
    }
    Ok(())
}
