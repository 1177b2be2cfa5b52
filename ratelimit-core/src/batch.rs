//! [`Batch`]: several checks decided as one, all or nothing; and [`decide`], which every store calls.

use alloc::format;
use alloc::vec::Vec;
use core::fmt;

use crate::algorithm::{Algorithm, Step, Write};
use crate::decision::{Decision, Verdict};
use crate::error::ConfigError;
use crate::limit::Limit;
use crate::tick::Tick;

/// One limit asked about one key.
#[derive(Debug)]
pub struct Check<'a, A> {
    /// The limit.
    pub limit: &'a Limit<A>,
    /// Whom it is kept for.
    pub key: &'a str,
    /// What the request costs this limit.
    pub cost: u64,
}

impl<A> Clone for Check<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Check<'_, A> {}

/// What is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Op {
    /// Charge the cost if it fits every limit, and nothing otherwise.
    #[default]
    Acquire,
    /// Say what [`Op::Acquire`] would say, and charge nothing.
    Peek,
    /// Charge the cost whether it fits or not, down to nothing left.
    Force,
    /// Give the cost back, never above the capacity.
    Refund,
    /// Forget the key: full capacity.
    Reset,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquire",
            Self::Peek => "peek",
            Self::Force => "force",
            Self::Refund => "refund",
            Self::Reset => "reset",
        })
    }
}

/// Whose clock decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Now {
    /// The store's own: one clock for everybody who asks it. For production.
    #[default]
    Store,
    /// This time, for tests and for replay. The store still sweeps by its own clock, and keeps what
    /// was written this way for an hour longer than needed, so that a slow run loses nothing.
    At(Tick),
}

impl Now {
    /// How much longer than needed a store keeps what was written with [`Now::At`]: an hour.
    pub const PADDING_US: u64 = 3_600_000_000;
}

/// Several checks that are decided together: all are charged or none is.
///
/// ```
/// use ratelimit_core::{Batch, Check, Gcra, Limit};
/// let limit = Limit::new("burst", Gcra::new("10/s".parse()?, 20)?)?;
/// let check = Check { limit: &limit, key: "alice", cost: 1 };
/// assert_eq!(Batch::one(&check).checks().len(), 1);
/// assert!(Batch::new(&[check, check]).is_err()); // a key named twice
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Batch<'a, A> {
    checks: &'a [Check<'a, A>],
    op: Op,
    now: Now,
}

impl<A> Clone for Batch<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Batch<'_, A> {}

impl<'a, A: Algorithm> Batch<'a, A> {
    /// These checks, to be acquired at the store's time.
    ///
    /// # Errors
    /// The same limit and key named twice: the second would not see what the first charged.
    pub fn new(checks: &'a [Check<'a, A>]) -> Result<Self, ConfigError> {
        for (place, check) in checks.iter().enumerate() {
            let same = |other: &&Check<'_, A>| {
                other.key == check.key && other.limit.name() == check.limit.name()
            };
            if checks[..place].iter().any(|other| same(&other)) {
                return Err(ConfigError::new(format!(
                    "a batch names the key {:?} twice; name it once, with the cost of both",
                    check.key
                ))
                .in_limit(check.limit.name()));
            }
        }
        Ok(Self::distinct(checks))
    }

    /// A single check, to be acquired at the store's time.
    #[must_use]
    pub const fn one(check: &'a Check<'a, A>) -> Self {
        Self::distinct(core::slice::from_ref(check))
    }

    /// Checks whose limits are already known to have different names.
    pub(crate) const fn distinct(checks: &'a [Check<'a, A>]) -> Self {
        Self { checks, op: Op::Acquire, now: Now::Store }
    }

    /// The same checks for another operation.
    #[must_use]
    pub const fn op(mut self, op: Op) -> Self {
        self.op = op;
        self
    }

    /// The same checks at another time.
    #[must_use]
    pub const fn now(mut self, now: Now) -> Self {
        self.now = now;
        self
    }

    /// The checks.
    #[must_use]
    pub const fn checks(&self) -> &'a [Check<'a, A>] {
        self.checks
    }

    /// What is to be done.
    #[must_use]
    pub const fn operation(&self) -> Op {
        self.op
    }

    /// Whose clock decides.
    #[must_use]
    pub const fn time(&self) -> Now {
        self.now
    }
}

/// Where [`decide`] finds the states of a batch and leaves what becomes of them. Positions are those
/// of [`Batch::checks`].
pub trait States<S> {
    /// The state of the check at this position.
    fn get(&self, position: usize) -> Option<&S>;

    /// Does to the state of the check at this position what `write` says.
    fn put(&mut self, position: usize, write: Write<S>);
}

/// Decides a batch: steps every check, then writes all of them or none.
///
/// The one place that knows what all or nothing means; each store that steps in Rust calls it, with
/// the states held still (under its lock, or before a compare-and-set).
///
/// # Errors
/// The algorithm of one of the limits has no such operation. Then nothing was written.
pub fn decide<A: Algorithm>(
    batch: &Batch<'_, A>,
    now: Tick,
    states: &mut impl States<A::State>,
) -> Result<Verdict, ConfigError> {
    let op = batch.operation();
    let step = |position: usize, check: &Check<'_, A>, states: &dyn States<A::State>| {
        step_one(check, op, states.get(position), now)
    };
    if let [check] = batch.checks() {
        let Step { decision, write } = step(0, check, states)?;
        if op != Op::Peek {
            states.put(0, write);
        }
        return Ok(Verdict::one(decision));
    }

    let checks = || batch.checks().iter().enumerate();
    let steps: Vec<Step<A::State>> = checks()
        .map(|(position, check)| step(position, check, states))
        .collect::<Result<_, _>>()?;
    if steps.iter().any(|step| !step.decision.allowed) {
        // Nobody is charged, so those that would have admitted show what they have.
        let uncharged = |(position, check): (usize, &Check<'_, A>), step: Step<A::State>| {
            if !step.decision.allowed {
                return step.decision;
            }
            let peek = check.limit.algorithm().step(states.get(position), now, 0).decision;
            Decision { cost: check.cost, ..peek }
        };
        return Ok(Verdict::several(
            checks().zip(steps).map(|(check, step)| uncharged(check, step)).collect(),
        ));
    }
    let mut decisions = Vec::with_capacity(steps.len());
    for (position, step) in steps.into_iter().enumerate() {
        decisions.push(step.decision);
        if op != Op::Peek {
            states.put(position, step.write);
        }
    }
    Ok(Verdict::several(decisions))
}

fn step_one<A: Algorithm>(
    check: &Check<'_, A>,
    op: Op,
    state: Option<&A::State>,
    now: Tick,
) -> Result<Step<A::State>, ConfigError> {
    let algorithm = check.limit.algorithm();
    let step = match op {
        Op::Acquire | Op::Peek => Some(algorithm.step(state, now, check.cost)),
        Op::Refund => algorithm.refund(state, now, check.cost),
        Op::Force => algorithm.force(state, now, check.cost),
        Op::Reset => {
            let full = algorithm.step(None, now, 0).decision;
            Some(Step { decision: Decision { cost: check.cost, ..full }, write: Write::Remove })
        }
    };
    step.ok_or_else(|| {
        ConfigError::new(format!("its algorithm has no {op}")).in_limit(check.limit.name())
    })
}
