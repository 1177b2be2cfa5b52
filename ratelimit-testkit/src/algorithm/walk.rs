//! [`Walk`]: a sequence of steps of one algorithm, starting from a new key.

use std::cell::RefCell;
use std::fmt::{self, Write as _};

use proptest::prelude::*;
use proptest::sample::Index;
use ratelimit_core::{Algorithm, Decision, Step, Timestamp, Write};

use crate::algorithm::Instance;
use crate::seeds::BEGINNINGS_US;
use crate::trace::text::{Unreadable, lines};

/// An operation on a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Acquire,
    Refund,
    Force,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquire",
            Self::Refund => "refund",
            Self::Force => "force",
        })
    }
}

/// One step of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) at: Timestamp,
    pub(crate) act: Act,
    pub(crate) cost: u64,
}

/// How far the time moves before a step.
#[derive(Clone, Copy, Debug)]
enum Advance {
    Us(u64),
    /// The time of this many units, plus or minus some microseconds.
    Units(u64, i64),
    /// Thousandths of the recovery time.
    Part(u64),
    /// The recovery time from empty to full, plus or minus some microseconds.
    Full(i64),
    /// The wait that the last decision reported, plus or minus some microseconds.
    Retry(i64),
    /// The time to full recovery that the last decision reported, plus or minus some microseconds.
    Reset(i64),
    /// Until the state expires, plus or minus some microseconds.
    Expiry(i64),
    Days(u64),
}

#[derive(Clone, Copy, Debug)]
enum Cost {
    Units(u64),
    /// Hundredths of the capacity.
    Part(u64),
    /// The remaining units, less this many.
    Left(u64),
    /// One more than the remaining units.
    OneMoreThanLeft,
    Capacity,
    OneMore,
    Max,
    Zero,
}

#[derive(Clone, Debug)]
pub(crate) struct Draft {
    back: bool,
    advance: Advance,
    act: Act,
    cost: Cost,
}

/// The steps that a walk follows: drawn on the scale of the algorithm, or given.
#[derive(Clone, Debug)]
pub(crate) enum Path {
    Drafted { limit: Index, other: Index, begin_us: u64, drafts: Vec<Draft> },
    Given { limit: usize, other: usize, asked: Vec<Asked> },
}

/// Paths of up to 30 steps. Some begin shortly before the last representable moment.
pub(crate) fn paths() -> impl Strategy<Value = Path> {
    let advance = prop_oneof![
        5 => Just(Advance::Us(0)),
        2 => (1_u64..=3).prop_map(Advance::Us),
        4 => (1_u64..=3, -1_i64..=1).prop_map(|(n, off)| Advance::Units(n, off)),
        2 => (0_u64..=1000).prop_map(Advance::Part),
        1 => (-1_i64..=1).prop_map(Advance::Full),
        2 => (-1_i64..=1).prop_map(Advance::Retry),
        1 => (-1_i64..=1).prop_map(Advance::Reset),
        1 => (-1_i64..=1).prop_map(Advance::Expiry),
        1 => (1_u64..=9).prop_map(Advance::Days),
    ];
    let cost = prop_oneof![
        6 => (1_u64..=3).prop_map(Cost::Units),
        3 => (1_u64..=100).prop_map(Cost::Part),
        3 => (0_u64..=1).prop_map(Cost::Left),
        2 => Just(Cost::OneMoreThanLeft),
        2 => Just(Cost::Capacity),
        1 => Just(Cost::OneMore),
        1 => Just(Cost::Max),
        1 => Just(Cost::Zero),
    ];
    let act = prop_oneof![12 => Just(Act::Acquire), 2 => Just(Act::Refund), 1 => Just(Act::Force)];
    let draft = (prop::bool::weighted(0.1), advance, act, cost)
        .prop_map(|(back, advance, act, cost)| Draft { back, advance, act, cost });
    let mut beginnings = BEGINNINGS_US.to_vec();
    beginnings.push(Timestamp::MAX.as_us() - 1_000_000_000);
    (
        any::<Index>(),
        any::<Index>(),
        prop::sample::select(beginnings),
        prop::collection::vec(draft, 1..=30),
    )
        .prop_map(|(limit, other, begin_us, drafts)| Path::Drafted {
            limit,
            other,
            begin_us,
            drafts,
        })
}

/// The time scale of an algorithm, measured from its own decisions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) capacity: u64,
    pub(crate) unit_us: u64,
    pub(crate) full_us: u64,
}

impl Scale {
    fn of<A: Algorithm>(algorithm: &A, begin: Timestamp) -> Self {
        let capacity = algorithm.capacity();
        let left = algorithm.step(None, begin, 0).decision.remaining;
        let reset_us = |cost| algorithm.step(None, begin, cost).decision.reset_after_us;
        // An algorithm that reports no times or never recovers gets a default scale.
        let sensible = |us: u64| if (1..1 << 46).contains(&us) { us } else { 1_000_000 };
        Self { capacity, unit_us: sensible(reset_us(1)), full_us: sensible(reset_us(left)) }
    }
}

/// An algorithm on a path: the state that it has reached, and the steps still to take.
pub(crate) struct Walk<'a, A: Algorithm> {
    pub(crate) limit: &'a Instance<A>,
    /// Another limit of the same algorithm, if there is one.
    pub(crate) other: &'a Instance<A>,
    pub(crate) scale: Scale,
    pub(crate) state: Option<A::State>,
    /// The latest time of any step.
    pub(crate) latest: Timestamp,
    /// When the state expires.
    pub(crate) expires: Option<Timestamp>,
    now: Timestamp,
    last: Option<Decision>,
    path: Path,
    place: usize,
    log: &'a RefCell<String>,
}

impl<'a, A: Algorithm> Walk<'a, A> {
    /// Creates a walk on this path that logs each of its steps.
    pub(crate) fn new(limits: &'a [Instance<A>], path: Path, log: &'a RefCell<String>) -> Self {
        let (limit, other, begin) = match &path {
            Path::Drafted { limit, other, begin_us, .. } => {
                (limit.index(limits.len()), other.index(limits.len()), *begin_us)
            }
            Path::Given { limit, other, asked } => {
                (*limit, *other, asked.first().map_or(0, |asked| asked.at.as_us()))
            }
        };
        let (limit, other) = (&limits[limit], &limits[other]);
        log.replace(format!("limit {}\nother {}\n", limit.text, other.text));
        let now = Timestamp::saturating_from_us(begin);
        let scale = Scale::of(&limit.algorithm, now);
        let (state, latest, expires) = (None, Timestamp::ZERO, None);
        Self { limit, other, scale, state, latest, expires, now, last: None, path, place: 0, log }
    }

    /// The algorithm.
    pub(crate) const fn algorithm(&self) -> &'a A {
        &self.limit.algorithm
    }

    /// The next step. An operation that the algorithm does not support becomes an acquire.
    pub(crate) fn next(&mut self) -> Option<Asked> {
        let asked = match &self.path {
            Path::Given { asked, .. } => *asked.get(self.place)?,
            Path::Drafted { drafts, .. } => self.resolve(&drafts.get(self.place)?.clone()),
        };
        self.place += 1;
        (self.now, self.latest) = (asked.at, self.latest.max(asked.at));
        // Writing to a string cannot fail.
        let Asked { at, act, cost } = asked;
        let _ = writeln!(self.log.borrow_mut(), "at {} {act} {cost}", at.as_us());
        Some(asked)
    }

    fn resolve(&self, draft: &Draft) -> Asked {
        let Scale { capacity, unit_us, full_us } = self.scale;
        let until_us = |us: Option<u64>, off: i64| us.unwrap_or(unit_us).saturating_add_signed(off);
        let by_us = match draft.advance {
            Advance::Us(us) => us,
            Advance::Units(n, off) => (n * unit_us).saturating_add_signed(off),
            Advance::Part(thousandths) => full_us / 1000 * thousandths,
            Advance::Full(off) => full_us.saturating_add_signed(off),
            Advance::Retry(off) => until_us(self.last.and_then(|last| last.retry_after_us), off),
            Advance::Reset(off) => until_us(self.last.map(|last| last.reset_after_us), off),
            Advance::Expiry(off) => {
                until_us(self.expires.map(|expires| expires.saturating_us_since(self.now)), off)
            }
            Advance::Days(days) => days * 86_400_000_000,
        };
        let at_us = self.now.as_us();
        let at_us =
            if draft.back { at_us.saturating_sub(by_us) } else { at_us.saturating_add(by_us) };
        // Stay short of the last moment, after which time cannot advance.
        let last_us = (Timestamp::MAX.as_us() - 10).max(self.now.as_us());
        let at = Timestamp::saturating_from_us(at_us.min(last_us));
        let left = || self.algorithm().step(self.state.as_ref(), at, 0).decision.remaining;
        let cost = match draft.cost {
            Cost::Units(n) => n,
            Cost::Part(hundredths) => (capacity / 100 * hundredths).clamp(1, capacity.max(1)),
            Cost::Left(less) => left().saturating_sub(less),
            Cost::OneMoreThanLeft => left().saturating_add(1),
            Cost::Capacity => capacity,
            Cost::OneMore => capacity.saturating_add(1),
            Cost::Max => u64::MAX,
            Cost::Zero => 0,
        };
        let asked = Asked { at, act: draft.act, cost };
        let able = draft.act == Act::Acquire || self.stepped(&asked).is_some();
        if able { asked } else { Asked { act: Act::Acquire, ..asked } }
    }

    /// The step that the algorithm takes from the current state; `None` for an unsupported operation.
    fn stepped(&self, Asked { at, act, cost }: &Asked) -> Option<Step<A::State>> {
        let (algorithm, state) = (self.algorithm(), self.state.as_ref());
        match act {
            Act::Acquire => Some(algorithm.step(state, *at, *cost)),
            Act::Refund => algorithm.refund(state, *at, *cost),
            Act::Force => algorithm.force(state, *at, *cost),
        }
    }

    /// The step that the algorithm takes for a supported operation.
    pub(crate) fn step(&self, asked: &Asked) -> Step<A::State> {
        let stepped = self.stepped(asked);
        stepped.unwrap_or_else(|| self.algorithm().step(self.state.as_ref(), asked.at, asked.cost))
    }

    /// The decision on the current state.
    pub(crate) fn decision(&self, at: Timestamp, cost: u64) -> Decision {
        self.algorithm().step(self.state.as_ref(), at, cost).decision
    }

    /// Moves on to the state that this step leaves.
    pub(crate) fn take(&mut self, step: Step<A::State>) {
        self.last = Some(step.decision);
        match step.write {
            Write::Keep => {}
            Write::Put { state, expires } => {
                (self.state, self.expires) = (Some(state), Some(expires));
            }
            Write::Remove => (self.state, self.expires) = (None, None),
        }
    }

    /// Takes the next step, if there is one.
    pub(crate) fn go(&mut self) -> Option<Asked> {
        let asked = self.next()?;
        let step = self.step(&asked);
        self.take(step);
        Some(asked)
    }

    /// The costs at which two states are most likely to decide differently.
    pub(crate) fn costs(&self) -> [u64; 6] {
        let capacity = self.scale.capacity;
        [0, 1, 2, capacity.div_ceil(2), capacity, capacity.saturating_add(1)]
    }

    /// Compares two states from a moment on: says at which time and cost they first decide differently.
    pub(crate) fn alike(
        &self,
        one: Option<&A::State>,
        other: Option<&A::State>,
        from: Timestamp,
    ) -> Result<(), String> {
        let Scale { unit_us, full_us, .. } = self.scale;
        for us in [0, 1, unit_us, full_us / 2, full_us.saturating_sub(1), full_us, full_us * 2] {
            let at = from.saturating_add_us(us);
            for cost in self.costs() {
                let one = self.algorithm().step(one, at, cost).decision;
                let other = self.algorithm().step(other, at, cost).decision;
                if one != other {
                    return Err(format!("{cost} at {} is {one:?} and {other:?}", at.as_us()));
                }
            }
        }
        Ok(())
    }
}

/// Parses the log of a walk.
pub(crate) fn read<A>(text: &str, limits: &[Instance<A>]) -> Result<Path, Unreadable> {
    let (mut limit, mut other, mut asked) = (0, 0, Vec::new());
    for line in lines(text) {
        let wrong = |message: &str| Unreadable::new(line, message);
        let named = |name: &str| {
            let place = limits.iter().position(|limit| limit.text == name.trim());
            place.ok_or_else(|| wrong("it names no limit of the harness"))
        };
        if let Some(name) = line.strip_prefix("limit ") {
            (limit, other) = (named(name)?, other);
        } else if let Some(name) = line.strip_prefix("other ") {
            other = named(name)?;
        } else {
            let mut words = line.split_whitespace();
            let step = (words.next(), words.next(), words.next(), words.next(), words.next());
            let (Some("at"), Some(us), Some(act), Some(cost), None) = step else {
                return Err(wrong("write `at MICROSECONDS acquire|refund|force COST`"));
            };
            let acts = [Act::Acquire, Act::Refund, Act::Force];
            let act = acts.into_iter().find(|known| known.to_string() == act);
            let at = us.parse().ok().and_then(Timestamp::from_us);
            let (Some(at), Some(act), Some(cost)) = (at, act, cost.parse().ok()) else {
                return Err(wrong("a time, an operation or a cost that is none"));
            };
            asked.push(Asked { at, act, cost });
        }
    }
    Ok(Path::Given { limit, other, asked })
}
