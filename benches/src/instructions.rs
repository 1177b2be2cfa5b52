//! Repeats one kind of decision, so that callgrind can count its instructions: a count does not depend on the load of
//! the machine. `scripts/callgrind` runs it and prints the instructions per decision.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::Duration;

use clap::{Args, ValueEnum};
use governor::clock::FakeRelativeClock;
use ratelimit_core::{Clock, ManualClock, Timestamp};

use crate::clocks::precise;
use crate::keys::Key;
use crate::peers::{Allowance, BATCH, Governor, Ours, Subject};

/// The decision, and how often to repeat it.
#[derive(Args)]
pub(crate) struct Options {
    /// The decision to repeat.
    #[arg(value_enum)]
    kind: Kind,
    /// The number of decisions: a multiple of 8.
    #[arg(long, default_value_t = 8_000)]
    decisions: usize,
}

/// A decision on one known key. All but one read a clock that stands still and costs next to nothing: the cost
/// of an operating system's clock depends on the machine, and differs under valgrind.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// None: the loop alone.
    Loop,
    /// Ours, allowed.
    Allowed,
    /// Ours, denied.
    Denied,
    /// Ours, allowed, eight at a time.
    Batch,
    /// Ours, allowed, with the precise clock.
    Precise,
    /// governor, allowed.
    Governor,
}

/// Answers without deciding.
struct Nothing;

impl Subject for Nothing {
    fn check(&self, key: &Key) -> bool {
        !key.as_str().is_empty()
    }

    fn charge(&self, _: &Key, _: NonZeroU32) -> bool {
        true
    }
}

const MANY: Allowance = Allowance { period: Duration::from_secs(1), burst: NonZeroU32::MAX };
const FEW: Allowance = Allowance { period: Duration::from_secs(10_000), burst: NonZeroU32::MIN };

fn ours<C: Clock>(allowance: Allowance, clock: C) -> Result<Ours<C>, Box<dyn Error>> {
    Ours::new(allowance, clock, 1_000)
}

/// Decides this often.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let still = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let Options { kind, decisions } = *options;
    match kind {
        Kind::Loop => decide(kind, &Nothing, decisions),
        Kind::Allowed | Kind::Batch => decide(kind, &ours(MANY, still)?, decisions),
        Kind::Denied => decide(kind, &ours(FEW, still)?, decisions),
        Kind::Precise => decide(kind, &ours(MANY, precise())?, decisions),
        Kind::Governor => {
            let governor = Governor::with_clock(MANY, FakeRelativeClock::default())?;
            decide(kind, &governor, decisions)
        }
    }
}

fn decide(kind: Kind, subject: &impl Subject, decisions: usize) -> Result<(), Box<dyn Error>> {
    let keys = vec![Key::new(0); decisions];
    let expected = if kind == Kind::Denied { 0 } else { decisions };
    // Charged first, so that the key is known.
    subject.charge(&Key::new(0), NonZeroU32::MIN);
    let allowed = counted_decisions(subject, &keys, if kind == Kind::Batch { BATCH } else { 1 });
    if allowed == expected {
        Ok(())
    } else {
        Err(format!("{allowed} of {decisions} decisions allowed, not {expected}").into())
    }
}

/// The function that callgrind counts. `scripts/callgrind` finds it by name.
#[inline(never)]
fn counted_decisions(subject: &impl Subject, keys: &[Key], batch: usize) -> usize {
    if batch == 1 {
        keys.iter().filter(|key| subject.check(key)).count()
    } else {
        keys.chunks(batch).map(|keys| subject.check_all(keys)).sum()
    }
}
