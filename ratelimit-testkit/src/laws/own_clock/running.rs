//! Law 14 by a clock that runs: whole traces, and many tasks.

use std::cmp::Reverse;
use std::collections::HashSet;

use ratelimit_core::{
    Decision, Limit, Now, Op, Policy, ReservationId, StoreError, Timestamp, Verdict,
};

use crate::capability::Capability;
use crate::harness::Harness;
use crate::law::Violation;
use crate::laws::own_clock::{ADJUSTED, BEGIN_US, COARSE_US, MONTH_US, Time};
use crate::laws::{Kept, Said, Subject, checks};
use crate::pure::{PureStore, Refused};
use crate::seeds::{AlgorithmKind, Scale};
use crate::trace::{Ask, Request, Trace};

/// Law 14, where the store's clock runs by itself: at its own time the store decides a whole trace as the pure step
/// does.
///
/// The limits of the trace are slow. Within the time that a test takes nothing comes back and no window ends, so that
/// `allowed` and `remaining` are those of the pure step at one moment, and the waits are shorter than its waits by no
/// more than the time that has gone by. A trace that takes longer than that is followed as far as this holds.
/// What depends on every single microsecond is left out.
///
/// The times of the trace are only the order of its requests. Where the clock can be set, it goes on by them.
///
/// # Errors
/// How the law is broken.
pub async fn decides_by_a_clock_that_runs<H: Harness>(
    subject: &Subject<'_, H>,
    trace: &Trace,
) -> Kept {
    let time = Time::of(subject.harness.clock(subject.store));
    let mut before = trace.requests.first().map_or(Timestamp::ZERO, |request| request.at);
    if time.is_exact() {
        // As far in its windows as the trace is.
        time.wait(before.as_us() % MONTH_US);
    }
    let run = Running::begin(subject, &trace.limits, time).await?;
    let pure = PureStore::new();
    let last = at_last(subject, trace);
    let mut reserved = Reserved::default();
    for request in trace.requests.iter().chain(&last) {
        if reserved.leaves_it_to_the_moment(trace, request) {
            continue;
        }
        if run.time.is_exact() {
            run.time.wait(request.at.saturating_us_since(before));
            before = request.at;
        }
        let got = subject.answer_at(&trace.limits, request, Now::Store).await?;
        let passed = run.passed();
        if !run.is_steady(&passed) {
            break;
        }
        let due = run.due(request, &pure)?;
        subject.reservations(agrees(&got, &due, &passed), || {
            format!(
                "{request:?}, at the store's own time, got {got:?}; the pure step says {due:?}, less at most {} µs of \
                 waiting",
                passed.most_us
            )
        })?;
    }
    Ok(())
}

/// What was reserved in a trace, and can be settled with the same outcome however little time went by since.
#[derive(Default)]
struct Reserved<'t> {
    known: HashSet<(usize, &'t str, ReservationId)>,
    settles_alike: HashSet<(usize, &'t str, ReservationId)>,
}

impl<'t> Reserved<'t> {
    /// Notes a request. Whether it is one to which it may matter that two requests were decided at one time or a
    /// microsecond apart:
    ///
    /// - A bucket that was charged since a reservation gives back only what cannot have flowed back in the meantime,
    ///   which is next to a unit less after the first microsecond.
    /// - A lease that has been taken away is not given back; one of the same time in its place is.
    fn leaves_it_to_the_moment(&mut self, trace: &Trace, request: &'t Request) -> bool {
        let mut matters = false;
        for ask in &request.asks {
            let (limit, key) = (ask.limit, &*ask.key);
            let kind = AlgorithmKind::of(trace.policy(ask));
            let same = |known: &(usize, &str, ReservationId)| known.0 == limit && known.1 == key;
            match (request.op, request.id) {
                _ if !kind.is_bucket() && kind != AlgorithmKind::Concurrency => {}
                (Op::Peek, _) => {}
                (Op::Settle | Op::Renew, id) => {
                    let id = id.map(|id| (limit, key, id));
                    matters |= id.is_some_and(|id| {
                        self.known.contains(&id) && !self.settles_alike.contains(&id)
                    });
                }
                (Op::Acquire, Some(id)) => {
                    if self.known.insert((limit, key, id)) {
                        self.settles_alike.retain(|known| !(kind.is_bucket() && same(known)));
                        self.settles_alike.insert((limit, key, id));
                    }
                }
                (Op::Acquire, None) => {
                    self.settles_alike.retain(|known| !(kind.is_bucket() && same(known)));
                }
                (Op::Refund | Op::Force | Op::Reset, _) => {
                    self.settles_alike.retain(|known| !same(known));
                }
            }
        }
        matters
    }
}

/// Looks at everything that the trace has asked about, in one batch if the store knows such.
fn at_last<H: Harness>(subject: &Subject<'_, H>, trace: &Trace) -> Vec<Request> {
    let look = |asks| Request { at: trace.latest(), op: Op::Peek, asks, id: None };
    let everybody = trace.everybody();
    match subject.able().lacks([Capability::Batches, Capability::SeveralKeys]) {
        _ if everybody.is_empty() => Vec::new(),
        None => vec![look(everybody)],
        Some(_) => everybody.into_iter().map(|ask| look(vec![ask])).collect(),
    }
}

/// The time that has gone by for the store since the first request, as far as that can be told.
pub(crate) struct Passed {
    most_us: u64,
    /// By how much two readings of the store's clock may contradict the test's.
    coarse_us: u64,
}

/// A store whose clock runs while it is asked about slow limits.
pub(crate) struct Running<'a, H: Harness> {
    subject: &'a Subject<'a, H>,
    limits: &'a [Limit<Policy>],
    time: Time,
    began_us: u64,
    /// A time at which the windows of all limits are as far gone as they were for the store when it was asked first.
    at: Timestamp,
}

/// The key that is charged first, to see how far the store's windows are gone.
const FIRST: &str = "the first";

impl<'a, H: Harness> Running<'a, H> {
    /// Asks each of the limits once, and takes from the first answer how far the store's windows are gone: the
    /// `reset_after` of a window that is aligned to the clock tells. What time it is for the store need not be known.
    pub(crate) async fn begin(
        subject: &'a Subject<'a, H>,
        limits: &'a [Limit<Policy>],
        time: Time,
    ) -> Result<Self, Violation> {
        // The longest window first, of which the others are parts: it tells how far they are gone, too.
        let mut windows: Vec<(u64, usize)> = limits.iter().enumerate().map(longest_first).collect();
        windows.sort_unstable_by_key(|(window_us, place)| (Reverse(*window_us), *place));
        let aligned = windows.iter().map(|(us, _)| *us).filter(|us| *us > 0).collect::<Vec<_>>();
        let unfit = |pair: &&[u64]| !pair[0].is_multiple_of(pair[1]);
        if let Some(&[longer, shorter]) = aligned.windows(2).find(unfit) {
            return subject.broken(format!(
                "this case needs a clock that can be set: where it runs, the windows that are aligned to it have to \
                 divide each other, and {shorter} µs does not divide {longer} µs"
            ));
        }
        let epoch_us = aligned.first().map_or(BEGIN_US, |longest| BEGIN_US - BEGIN_US % longest);
        let at = Timestamp::saturating_from_us(epoch_us);
        let began_us = time.now_us();
        let mut run = Self { subject, limits, time, began_us, at };
        let ask = |(_, limit)| Ask { limit, key: FIRST.to_owned(), cost: 1 };
        let asks: Vec<_> = windows.into_iter().map(ask).collect();
        let together = if subject.able().can(Capability::Batches) { asks.len() } else { 1 };
        for (n, asks) in asks.chunks(together.max(1)).enumerate() {
            let request = Request { at, op: Op::Acquire, asks: asks.to_vec(), id: None };
            let got = subject.answer_at(limits, &request, Now::Store).await?;
            let passed = run.passed();
            if let (0, Ok(got), Ok(due)) = (n, &got, run.due(&request, &PureStore::new())?) {
                let resets_us = [due, got.clone()].map(|all| all.decisions()[0].reset_after_us);
                run.at = at.saturating_add_us(resets_us[0].saturating_sub(resets_us[1]));
            }
            let due = run.due(&request, &PureStore::new())?;
            subject.reservations(agrees(&got, &due, &passed), || {
                format!(
                    "the first {request:?}, at the store's own time, got {got:?}; at no time does the pure step say \
                     so, the nearest is {due:?}"
                )
            })?;
        }
        Ok(run)
    }

    /// How much time has gone by.
    pub(crate) fn passed(&self) -> Passed {
        let us = self.time.now_us().saturating_sub(self.began_us);
        let coarse_us = if self.time.is_exact() { 0 } else { COARSE_US + us / ADJUSTED };
        Passed { most_us: us.saturating_add(coarse_us), coarse_us }
    }

    /// Whether nothing has come back to any limit in this time, and no window has begun or ended.
    pub(crate) fn is_steady(&self, passed: &Passed) -> bool {
        self.limits.iter().all(|limit| {
            let (policy, scale) = (limit.algorithm(), Scale::of(limit.algorithm()));
            let (gone_us, left_us) = match window_us(policy) {
                Some(window_us) => {
                    let gone_us = self.at.as_us() % window_us;
                    (gone_us, window_us - gone_us)
                }
                None if AlgorithmKind::of(policy).is_bucket() => (u64::MAX, scale.unit_us),
                None => (u64::MAX, scale.full_us),
            };
            passed.coarse_us <= gone_us && passed.most_us < left_us.min(scale.held_us)
        })
    }

    /// What the pure step says to a request at the moment that stands for all of the run.
    fn due(&self, request: &Request, pure: &PureStore) -> Result<Said, Violation> {
        let checks = checks(self.limits, &request.asks);
        let metadata = self.subject.metadata(request);
        match request.batch(&checks, &metadata) {
            Ok(batch) => Ok(pure.decide(&batch.now(Now::At(self.at))).map_err(|refusal| {
                let refused = Refused(refusal);
                (refused.kind(), refused.to_string())
            })),
            Err(error) => self.subject.broken(error.to_string()),
        }
    }
}

/// How long the windows of a limit are, if they are aligned to the clock, and which limit it is.
fn longest_first((place, limit): (usize, &Limit<Policy>)) -> (u64, usize) {
    (window_us(limit.algorithm()).unwrap_or(0), place)
}

/// How long a window is that is aligned to the clock, or a part of it that leaves the window as a whole.
fn window_us(policy: &Policy) -> Option<u64> {
    match policy.by_admissions() {
        Policy::FixedWindow(window) => Some(window.window_us()),
        Policy::SlidingCounter(counter) => Some(counter.window_us()),
        Policy::BucketedWindow(window) => Some(window.bucket_us()),
        _ => None,
    }
}

/// Whether two answers are the same but for waits that have become shorter in this time.
fn agrees(got: &Said, due: &Said, passed: &Passed) -> bool {
    let all = |verdict: &Verdict| -> Vec<Decision> {
        verdict.decisions().iter().chain([verdict.summary()]).copied().collect()
    };
    match (got, due) {
        (Ok(got), Ok(due)) => {
            let (got, due) = (all(got), all(due));
            got.len() == due.len()
                && got.iter().zip(&due).all(|(got, due)| decisions_agree(got, due, passed))
        }
        (got, due) => got == due,
    }
}

fn decisions_agree(got: &Decision, due: &Decision, passed: &Passed) -> bool {
    let timeless = |decision: &Decision| Decision {
        retry_after_us: decision.retry_after_us.map(|_| 0),
        reset_after_us: 0,
        ..*decision
    };
    // Nothing to wait for remains nothing, and a wait does not end within a run.
    let near = |got_us: u64, due_us: u64| match due_us {
        0 => got_us == 0,
        _ => {
            got_us > 0
                && got_us <= due_us.saturating_add(passed.coarse_us)
                && got_us.saturating_add(passed.most_us) >= due_us
        }
    };
    timeless(got) == timeless(due)
        && near(got.reset_after_us, due.reset_after_us)
        && near(got.retry_after_us.unwrap_or(0), due.retry_after_us.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use proptest::test_runner::{Config, TestCaseError, TestRunner};

    use super::*;
    use crate::capability::Able;
    use crate::law::Law;
    use crate::trace::Scope;
    use crate::trace::made::Makes;
    use crate::wrong::WrongHarness;

    /// However fast the store's clock goes on, and wherever in a window it begins, a sound store keeps within the bounds.
    #[test]
    fn the_bounds_hold_at_any_pace() {
        let scopes = AlgorithmKind::ALL.map(Scope::One).into_iter();
        let scopes = scopes.chain(AlgorithmKind::ATTEMPTS.map(Scope::Attempts));
        for scope in scopes.chain([Scope::Mixed, Scope::MixedAttempts]) {
            let able = Able::of::<Policy, WrongHarness>();
            let config = Config { failure_persistence: None, ..Config::default() };
            let outcome = TestRunner::new(config).run(&Makes { scope, able }.slow(100), |trace| {
                let harness = WrongHarness(None);
                let store = harness.store();
                let subject = Subject { law: Law::OwnClock, harness: &harness, store: &store };
                let kept = harness.block_on(decides_by_a_clock_that_runs(&subject, &trace));
                kept.map_err(|violation| TestCaseError::fail(violation.to_string()))
            });
            assert!(outcome.is_ok(), "{scope:?}: {outcome:?}");
        }
    }
}
