//! Law 14: at the store's own time.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, Limit, ReservationId, Timestamp};

use crate::capability::Capability;
use crate::harness::StoreClock;
use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::laws::agreement::agrees_on;
use crate::pure::PureStore;
use crate::trace::{Ask, Trace, TraceRequest};

pub(crate) use running::{RunningStore, decides_by_a_clock_that_runs};

mod running;

/// Law 14 for a settable clock: at every time to which its clock is set, the store answers at its
/// own time as the pure step answers at that time, errors included. Charges at a given time count
/// towards the same account.
pub(crate) async fn decides_by_its_own_clock<A: Algorithm>(
    subject: &Subject<'_, A>,
    trace: &Trace<A>,
) -> LawResult {
    let StoreClock::Settable(set) = subject.store.clock() else { return Ok(()) };
    // By its own clock a store sweeps up what has expired: peeks tell what is left, and not the
    // states.
    let subject = &Subject { difference: None, ..*subject };
    let pure = PureStore::new();
    let begin_us = trace.requests.first().map_or(0, |request| request.at.as_us());
    for (position, request) in trace.requests.iter().enumerate() {
        let request = TraceRequest { at: later_on(begin_us, request.at), ..request.clone() };
        set(request.at);
        let now = if position % 4 == 3 { Now::At(request.at) } else { Now::Store };
        agrees_on(subject, &pure, &trace.limits, &request, now).await?;
    }
    let at = later_on(begin_us, trace.latest());
    let able = subject.able;
    let can = |request: &TraceRequest| {
        let by_id = request.id.map(|_| Capability::Reservations);
        Capability::for_op(request.op).into_iter().chain(by_id).all(|needed| able.can(needed))
    };
    let changes = changes_of_a_full_limit(at, trace.limits[0].algorithm().capacity());
    for request in changes.into_iter().filter(can) {
        agrees_on(subject, &pure, &trace.limits, &request, Now::Store).await?;
    }
    for back_us in BACK_US {
        for at in [at, Timestamp::saturating_from_us(at.as_us() - back_us)] {
            set(at);
            let ask = Ask { limit: 0, key: format!("{back_us} µs back"), cost: 1 };
            let request = TraceRequest::one(at, Op::Acquire, ask);
            agrees_on(subject, &pure, &trace.limits, &request, Now::Store).await?;
        }
    }
    Ok(())
}

/// By how much a clock goes back at last, as one that is corrected. What was charged just before is
/// still there.
const BACK_US: [u64; 2] = [1, 86_400_000_000];

/// Whatever changes a limit that has just denied is seen by the next request, also where denials
/// are kept.
fn changes_of_a_full_limit(at: Timestamp, capacity: u64) -> Vec<TraceRequest> {
    let one = |op, cost| TraceRequest::one(at, op, Ask { limit: 0, key: "full".into(), cost });
    let by_id = |op, cost| TraceRequest { id: Some(ReservationId::new(7)), ..one(op, cost) };
    let begins = || [one(Op::Reset, 0), one(Op::Acquire, 1), one(Op::Acquire, capacity)];
    let mut requests = Vec::new();
    for change in [one(Op::Reset, 0), one(Op::Refund, 1), one(Op::Force, 1)] {
        requests.extend(begins());
        requests.extend([change, one(Op::Acquire, capacity)]);
    }
    requests.extend([one(Op::Reset, 0), by_id(Op::Acquire, 1)]);
    for change in [by_id(Op::Renew, 0), by_id(Op::Settle, 0)] {
        requests.extend([one(Op::Acquire, capacity), change, one(Op::Acquire, capacity)]);
    }
    requests
}

/// The period after which the windows of all trace limits begin together again.
pub(crate) const MONTH_US: u64 = 2_592_000_000_000;
/// The time to which settable clocks are set first: later than the beginning of any store's clock,
/// and long before the last representable moment.
pub(crate) const BEGIN_US: u64 = 1_350 * MONTH_US;

/// The latest time to which they are set.
const LATEST: Timestamp = Timestamp::saturating_from_us(Timestamp::MAX.as_us() - 10);

/// The time of a trace, shifted to begin at `begin_us` so that no clock has to go back for it.
fn later_on(begin_us: u64, at: Timestamp) -> Timestamp {
    let begin_us = begin_us.min(MONTH_US * (begin_us / MONTH_US));
    // By its own clock a store refuses the last moment, which a slow limit reaches.
    at.saturating_add_us(BEGIN_US.saturating_sub(begin_us)).min(LATEST)
}

/// Two windows of a limit that recovers within this time end while the test waits.
pub(crate) const SHORT_US: u64 = 8_000;
const WAIT_US: u64 = 20_000;
/// The tolerated coarseness of a running clock.
const COARSE_US: u64 = 2_000;
/// A running clock may drift by one part in this many.
const ADJUSTED: u64 = 32;
/// How often the clock is sampled, before and after.
const LOOKS: usize = 3;

/// Law 14 at whatever speed a test runs: charges at the store's own time count, and its clock keeps
/// real time (or, where it can be set, follows what it is set to). Of limits that are `short`,
/// everything is back after [`WAIT_US`]. All are asked in one batch.
///
/// Every bound holds however slow the store and the machine are. The function waits only if the
/// clock cannot be set: 20 ms.
pub(crate) async fn its_own_clock_keeps_time<A: Algorithm>(
    subject: &Subject<'_, A>,
    limits: &[Limit<A>],
    short: &[Limit<A>],
) -> LawResult {
    let time = Time::from_clock(subject.store.clock());
    let ask = |limits: &[Limit<A>], op, cost: fn(&A) -> u64| {
        let ask = |(limit, of): (usize, &Limit<A>)| Ask {
            limit,
            key: "own clock".to_owned(),
            cost: cost(of.algorithm()),
        };
        let asks = limits.iter().enumerate().map(ask).collect();
        TraceRequest { at: Timestamp::ZERO, op, asks, id: None }
    };
    if !short.is_empty() {
        let _ = subject.ask(short, &ask(short, Op::Acquire, A::capacity), Now::Store).await?;
    }
    let _ = subject.ask(limits, &ask(limits, Op::Acquire, |_| 1), Now::Store).await?;
    // The test's own time before and after a look, and when each limit is to be full again.
    let mut looks: Vec<(u64, u64, Vec<u64>)> = Vec::new();
    for look in 0..2 * LOOKS {
        if look == LOOKS {
            time.wait(WAIT_US);
        }
        let from_us = time.now_us();
        let got = subject.ask(limits, &ask(limits, Op::Peek, |_| 0), Now::Store).await?;
        let to_us = time.now_us();
        let resets_us: Vec<_> = got.decisions().iter().map(|got| got.reset_after_us).collect();
        for (from_before_us, to_before_us, before_us) in &looks {
            let between_us = (from_us.saturating_sub(*to_before_us), to_us - from_before_us);
            for (n, resets_us) in
                before_us.iter().copied().zip(resets_us.iter().copied()).enumerate()
            {
                let how = how_wrong(resets_us, between_us, time.is_exact());
                ensure(how.is_none(), || {
                    let hint = "; if a test has to set this clock, tell so in `Harness::clock`";
                    format!(
                        "the store's own clock: {}. All of l{n} was to be back in {} µs and then, at least {} µs \
                         and at most {} µs later, in {} µs{}",
                        how.unwrap_or_default(),
                        resets_us.0,
                        between_us.0,
                        between_us.1,
                        resets_us.1,
                        if time.is_exact() { "" } else { hint }
                    )
                })?;
            }
        }
        looks.push((from_us, to_us, resets_us));
    }
    if short.is_empty() {
        return Ok(());
    }
    let again = subject.ask(short, &ask(short, Op::Peek, A::capacity), Now::Store).await?;
    ensure(again.allowed(), || {
        format!(
            "all of {} limits was used, and {WAIT_US} µs later, at the store's own time, it says {again:?}",
            short.len()
        )
    })
}

/// Says what is wrong with a clock, given the time to full recovery that it reported first and
/// then, and the least and the most time that passed in between; `None` if it is right.
fn how_wrong(
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

/// The time that passes for the test.
pub(crate) enum Time {
    Real(Instant),
    Set { set: Arc<dyn Fn(Timestamp) + Send + Sync>, now_us: Cell<u64> },
}

impl Time {
    pub(crate) fn from_clock(clock: StoreClock) -> Self {
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
