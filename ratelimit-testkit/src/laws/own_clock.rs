//! Law 14: at the store's own time.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ratelimit_core::{
    Algorithm, Decision, Limit, Now, Op, Policy, ReservationId, StoreError, Timestamp,
};

use crate::capability::Capability;
use crate::harness::{Harness, StoreClock};
use crate::law::Violation;
use crate::laws::{Kept, Said, Subject, checks};
use crate::pure::{PureStore, Refused};
use crate::seeds::{AlgorithmKind, limit, rate};
use crate::trace::{Ask, Request, Scope, Trace};

pub(crate) use running::Running;
pub use running::decides_by_a_clock_that_runs;

mod running;

/// Law 14 for a settable clock: at every time to which its clock is set, the store answers at its own time as
/// the pure step answers at that time, errors included. Charges at a given time count towards the same account.
///
/// # Errors
/// How the store breaks the law.
pub async fn decides_by_its_own_clock<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Kept {
    let StoreClock::Settable(set) = subject.harness.clock(subject.store) else { return Ok(()) };
    let pure = PureStore::new();
    let begin_us = trace.requests.first().map_or(0, |request| request.at.as_us());
    for (place, request) in trace.requests.iter().enumerate() {
        let request = Request { at: later_on(begin_us, request.at), ..request.clone() };
        set(request.at);
        let own = place % 4 != 3;
        let now = if own { Now::Store } else { Now::At(request.at) };
        let got = subject.answer_at(&trace.limits, &request, now).await?;
        let (checks, metadata) = (checks(&trace.limits, &request.asks), subject.metadata(&request));
        let batch = match request.batch(&checks, &metadata) {
            Ok(batch) => batch,
            Err(error) => return subject.broken(error.to_string()),
        };
        let due: Said = pure.decide(&batch).map_err(|refusal| {
            let refused = Refused(refusal);
            (refused.kind(), refused.to_string())
        });
        subject.ensure(got == due, || {
            let by =
                if own { "by the store's own clock, set to that time" } else { "at that time" };
            format!("{request:?}, {by}, got {got:?}; the pure step says {due:?}")
        })?;
    }
    Ok(())
}

/// The period after which the windows of all trace limits begin together again.
pub(crate) const MONTH_US: u64 = 2_592_000_000_000;
/// The time to which settable clocks are set first: later than the beginning of any store's clock, and long
/// before the last representable moment.
pub(crate) const BEGIN_US: u64 = 1_350 * MONTH_US;

/// The time of a trace, shifted to begin at `begin_us` so that no clock has to go back for it.
fn later_on(begin_us: u64, at: Timestamp) -> Timestamp {
    let begin_us = begin_us.min(MONTH_US * (begin_us / MONTH_US));
    at.saturating_add_us(BEGIN_US - begin_us)
}

/// The capacity of the limits that are tried on a running clock.
const CAPACITY: u64 = 3;
/// How often a long limit is asked: more often than any algorithm admits in two of its windows.
const ASKED: u64 = 2 * CAPACITY + 1;
/// Longer than any test runs.
const LONG_US: u64 = 3_600_000_000;
/// A period short enough that two of its windows end while the test waits.
const SHORT_US: u64 = 8_000;
pub(crate) const WAIT_US: u64 = 20_000;
/// The tolerated coarseness of a running clock.
const COARSE_US: u64 = 2_000;
/// A running clock may drift by one part in this many.
const ADJUSTED: u64 = 32;
/// How often the clock is sampled, before and after.
const LOOKS: usize = 3;

/// Law 14 at whatever speed a test runs: charges at the store's own time count, its clock keeps real time (or,
/// where it can be set, follows what it is set to), and used capacity returns in time.
///
/// Every bound holds however slow the store and the machine are. The function waits only if the clock cannot be
/// set: 20 ms.
///
/// # Errors
/// How the store breaks the law.
pub async fn its_own_clock_keeps_time<H: Harness>(subject: &Subject<'_, H>, scope: Scope) -> Kept {
    let kept = |name: &str, us| -> Vec<_> {
        let policies = scope.at_rate(rate(CAPACITY, us), CAPACITY).into_iter();
        let able = policies.filter(|policy| subject.able().can_keep(policy));
        able.enumerate().map(|(n, policy)| limit(&format!("{name}{n}"), policy)).collect()
    };
    let (long, short) = (kept("long", LONG_US), kept("short", SHORT_US));
    if subject.able().can(Capability::Batches) {
        return keeps_time(subject, &long, &short).await;
    }
    for (long, short) in long.iter().zip(&short) {
        keeps_time(subject, std::slice::from_ref(long), std::slice::from_ref(short)).await?;
    }
    Ok(())
}

async fn keeps_time<H: Harness>(
    subject: &Subject<'_, H>,
    long: &[Limit<Policy>],
    short: &[Limit<Policy>],
) -> Kept {
    let own = OwnTime { subject, time: Time::of(subject.harness.clock(subject.store)) };
    let mut admitted = 0;
    for _ in 0..ASKED {
        admitted += u64::from(own.ask(long, Op::Acquire, 1, None).await?.allowed);
    }
    subject.ensure(admitted < ASKED, || {
        format!(
            "at the store's own time, {admitted} of {ASKED} requests in a row were admitted by {}: what is charged \
             at the store's own time does not count",
            listed(long)
        )
    })?;
    own.ask(short, Op::Acquire, CAPACITY, None).await?;
    let mut looks = Vec::new();
    for _ in 0..LOOKS {
        looks.push(own.look(long).await?);
    }
    own.time.wait(WAIT_US);
    for _ in 0..LOOKS {
        looks.push(own.look(long).await?);
    }
    for (place, then) in looks.iter().enumerate() {
        for before in &looks[..place] {
            for (n, limit) in long.iter().enumerate() {
                own.compare(limit, before, then, n)?;
            }
        }
    }
    if let (Time::Real(_), Some(look)) = (&own.time, looks.last()) {
        let all_us = look.decisions.iter().map(|decision| decision.reset_after_us);
        let longest_us = all_us.max().unwrap_or(0);
        let vanishes = vanishes_within(subject.harness, subject.store, longest_us).await;
        subject.ensure(vanishes.is_none(), || {
            format!(
                "at the store's own time {} will be full in {longest_us} µs, and the store keeps nothing for \
                 {vanishes:?}: its states vanish too early",
                listed(long)
            )
        })?;
    }
    let again = own.ask(short, Op::Peek, CAPACITY, None).await?;
    subject.ensure(again.allowed, || {
        format!(
            "{CAPACITY} were used of {}, and {WAIT_US} µs later the store says at its own time: {again:?}",
            listed(short)
        )
    })?;
    own.settles(long).await
}

/// Long enough that the eighth part of it is no time for which a test stops.
const LONG_ENOUGH_US: u64 = 60_000_000;

/// On a clock that cannot be set: for how long a store was to keep something and does not, where a limit that was just
/// charged takes this time to recover; `None` if all is well, or if the harness does not report what is kept.
pub(crate) async fn vanishes_within<A: Algorithm, H: Harness<A>>(
    harness: &H,
    store: &H::Store,
    reset_us: u64,
) -> Option<Duration> {
    let within = Duration::from_micros(reset_us / 8 * 7);
    let kept = async |within| !harness.leaks(store, within).await.is_empty();
    let is_wrong = reset_us >= LONG_ENOUGH_US && kept(Duration::ZERO).await && !kept(within).await;
    is_wrong.then_some(within)
}

/// A store that is asked at its own time.
struct OwnTime<'a, H: Harness> {
    subject: &'a Subject<'a, H>,
    time: Time,
}

/// The remedy if only the test is at fault.
pub(crate) const HINT: &str = "; if a test has to set this clock, tell so in `Harness::clock`";

/// Says what is wrong with a clock, given the time to full recovery that it reported first and then, and the
/// least and the most time that passed in between; `None` if it is right.
pub(crate) fn how_wrong(
    (first_us, then_us): (u64, u64),
    (least_us, most_us): (u64, u64),
    is_exact: bool,
) -> Option<&'static str> {
    let coarse_us = |us: u64| if is_exact { 0 } else { COARSE_US + us / ADJUSTED };
    let gone_us = i128::from(first_us) - i128::from(then_us);
    // The limit is full again: a window may end at any moment, so at least this much time passed.
    let at_least = then_us == 0;
    let slow = !at_least && gone_us + i128::from(coarse_us(least_us)) < least_us.into();
    let fast = gone_us > i128::from(most_us + coarse_us(most_us));
    match (slow, fast) {
        (false, false) => None,
        (_, true) if at_least => Some("what was charged by it is gone"),
        _ if gone_us == 0 => Some("stands still"),
        (true, _) => Some("runs slow"),
        (_, true) => Some("runs fast"),
    }
}

/// The limits' answers, and the test's own time before and after.
struct Look {
    from_us: u64,
    to_us: u64,
    decisions: Vec<Decision>,
}

const ID: ReservationId = ReservationId::new(14);

impl<H: Harness> OwnTime<'_, H> {
    /// Performs an operation on one key of all these limits at the store's own time.
    async fn ask(
        &self,
        limits: &[Limit<Policy>],
        op: Op,
        cost: u64,
        id: Option<ReservationId>,
    ) -> Result<Decision, Violation> {
        let verdict =
            self.subject.ask_at(limits, &request(limits, op, cost, id), Now::Store).await?;
        Ok(*verdict.summary())
    }

    async fn look(&self, limits: &[Limit<Policy>]) -> Result<Look, Violation> {
        let request = request(limits, Op::Peek, 0, None);
        let from_us = self.time.now_us();
        let verdict = self.subject.ask_at(limits, &request, Now::Store).await?;
        let decisions = verdict.decisions().to_vec();
        Ok(Look { from_us, to_us: self.time.now_us(), decisions })
    }

    /// Checks that as much time passed for the store between two looks as for the test: the moment of full
    /// recovery must not move.
    fn compare(&self, limit: &Limit<Policy>, before: &Look, then: &Look, n: usize) -> Kept {
        let (least_us, most_us) =
            (then.from_us.saturating_sub(before.to_us), then.to_us - before.from_us);
        let resets_us = (before.decisions[n].reset_after_us, then.decisions[n].reset_after_us);
        let between_us = (least_us, most_us);
        let Some(how) = how_wrong(resets_us, between_us, self.time.is_exact()) else {
            return Ok(());
        };
        let mut message = format!(
            "the store's own clock: {how}. All of {} was to be back in {} µs and then, at least {least_us} µs and at \
             most {most_us} µs later, in {} µs",
            limit.algorithm(),
            resets_us.0,
            resets_us.1
        );
        if !self.time.is_exact() {
            message.push_str(HINT);
        }
        self.subject.broken(message)
    }

    /// Checks that a reservation made at the store's own time can be settled at it and is returned.
    async fn settles(&self, long: &[Limit<Policy>]) -> Kept {
        let reservations = long.iter().filter(|limit| {
            let policy = limit.algorithm();
            !policy.charges_denials()
                && AlgorithmKind::RESERVATIONS.contains(&AlgorithmKind::of(policy))
        });
        if !self.subject.able().can(Capability::Reservations) {
            return Ok(());
        }
        for reserving in reservations {
            let limits = [limit(&format!("{}-reserved", reserving.name()), *reserving.algorithm())];
            for (op, cost) in [(Op::Acquire, CAPACITY), (Op::Acquire, CAPACITY), (Op::Settle, 0)] {
                self.ask(&limits, op, cost, Some(ID)).await?;
            }
            let back = self.ask(&limits, Op::Peek, CAPACITY, None).await?;
            self.subject.ensure(back.allowed, || {
                format!(
                    "{CAPACITY} were reserved of {} and settled at 0, at the store's own time; then it says {back:?}",
                    listed(&limits)
                )
            })?;
        }
        Ok(())
    }
}

fn request(limits: &[Limit<Policy>], op: Op, cost: u64, id: Option<ReservationId>) -> Request {
    let ask = |limit| Ask { limit, key: "own clock".to_owned(), cost };
    Request { at: Timestamp::ZERO, op, asks: (0..limits.len()).map(ask).collect(), id }
}

fn listed(limits: &[Limit<Policy>]) -> String {
    limits.iter().map(|limit| limit.algorithm().to_string()).collect::<Vec<_>>().join(" and ")
}

/// The time that passes for the test.
pub(crate) enum Time {
    Real(Instant),
    Set { set: Arc<dyn Fn(Timestamp) + Send + Sync>, now_us: Cell<u64> },
}

impl Time {
    pub(crate) fn of(clock: StoreClock) -> Self {
        match clock {
            StoreClock::Real => Self::Real(Instant::now()),
            StoreClock::Settable(set) => {
                set(Timestamp::saturating_from_us(BEGIN_US));
                Self::Set { set, now_us: Cell::new(BEGIN_US) }
            }
        }
    }

    const fn is_exact(&self) -> bool {
        matches!(self, Self::Set { .. })
    }

    fn now_us(&self) -> u64 {
        match self {
            Self::Real(begun) => {
                u64::try_from(begun.elapsed().as_micros()).expect("no test takes ages")
            }
            Self::Set { now_us, .. } => now_us.get(),
        }
    }

    fn wait(&self, us: u64) {
        match self {
            Self::Real(_) => std::thread::sleep(Duration::from_micros(us)),
            Self::Set { set, now_us } => {
                now_us.set(now_us.get() + us);
                set(Timestamp::saturating_from_us(now_us.get()));
            }
        }
    }
}
