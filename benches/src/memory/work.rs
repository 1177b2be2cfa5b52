//! What is not one GCRA decision: the other algorithms beside limitador's fixed window, several
//! limits of one key beside two checks of governor, several keys in one batch beside as many
//! checks.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::Duration;

use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{
    BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, Leased, Limit, Lockout,
    Rate, RateLimiter, SlidingCounter, SlidingLog, Stack, SyncStore, TokenBucket, Verdict,
    WindowLog,
};
use ratelimit_memory::MemoryStore;

use crate::keys::CallerKey;
use crate::measure::Fallible;
use crate::peers::{Allowance, BATCH, ByFunction, Governor, Limitador, MeasuredLimiter, limits};
use crate::report::BenchReport;

use super::PRECISE;
use super::scenario::{
    ALLOWED, DENIED, LimiterTurn, ScenarioEffort, ScenarioOutcome, THOUSAND, non_zero, take_turns,
};

/// What a key of a denied measurement has used up, one at a time: the length of a full log.
const FULL: u32 = 100;
const HOUR_US: u64 = 3_600_000_000;
/// The window of an allowed measurement of what keeps every request: a log of hundreds of entries
/// in a round, which expire from it by and by.
const SHORT_US: u64 = 50_000;
/// The most that a log with metadata and a concurrency limit can have.
const MOST_LOGGED: u64 = 10_000;
/// Whose decision comes in two: a lease, and its release.
const LEASES: &str = "concurrency";

/// Ours with limits of any kind, all of which apply to every key.
fn limiter<A: InMemory>(
    algorithms: impl IntoIterator<Item = A>,
) -> Fallible<RateLimiter<MemoryStore<A>, A>> {
    Ok(RateLimiter::new(limits(algorithms)?, MemoryStore::new()))
}

fn all<A: InMemory + 'static>(
    algorithms: impl IntoIterator<Item = A>,
) -> Fallible<Box<dyn MeasuredLimiter>> {
    let limiter = limiter(algorithms)?;
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        let said = limiter.check_now(key.as_str());
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    })))
}

fn one<A: InMemory + 'static>(algorithm: A) -> Fallible<Box<dyn MeasuredLimiter>> {
    all([algorithm])
}

/// A concurrency limit as it is used: a lease that is taken and given back.
fn leases(limit: Rate) -> Fallible<Box<dyn MeasuredLimiter>> {
    let limiter = limiter([Concurrency::new(limit)?])?;
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        let leased = black_box(limiter.request(key.as_str()).lease_now());
        leased.is_ok_and(|leased| matches!(leased, Leased::Granted(_)))
    })))
}

/// One limit on several keys, all of them charged or none.
struct AllOrNothing {
    limit: Limit<Gcra>,
    store: MemoryStore<Gcra>,
}

impl MeasuredLimiter for AllOrNothing {
    fn check(&self, key: &CallerKey) -> bool {
        let check = Check { limit: &self.limit, key: key.as_str(), cost: 1 };
        let said = self.store.apply_now(&Batch::one(&check));
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    }

    fn check_all(&self, keys: &[CallerKey]) -> usize {
        let Ok(keys) = <&[CallerKey; BATCH]>::try_from(keys) else { return 0 };
        let checks =
            keys.each_ref().map(|key| Check { limit: &self.limit, key: key.as_str(), cost: 1 });
        // The same key twice is refused: those few are asked one by one.
        let Ok(batch) = Batch::new(&checks) else {
            return keys.iter().filter(|key| self.check(key)).count();
        };
        let said = self.store.apply_now(&batch);
        if black_box(&said).as_ref().is_ok_and(Verdict::allowed) { BATCH } else { 0 }
    }
}

type NamedSubject = (&'static str, Box<dyn MeasuredLimiter>);

/// Every algorithm, to admit all or to admit no more than [`FULL`].
fn algorithms(allowed: bool) -> Fallible<Vec<NamedSubject>> {
    let rate = |most: u64, period_us: u64| {
        if allowed { Rate::per_us(most, period_us) } else { Rate::per_us(FULL.into(), HOUR_US) }
    };
    let many = 4_000_000_000;
    let (slow, burst) = if allowed {
        (Rate::per_us(1, 1_000_000)?, many)
    } else {
        (Rate::per_us(1, HOUR_US)?, FULL.into())
    };
    let lease = Rate::per_us(if allowed { MOST_LOGGED } else { FULL.into() }, HOUR_US)?;
    let window = rate(many, HOUR_US)?;
    let yearly = FixedWindow::per_year(if allowed { many } else { FULL.into() });
    let yearly = yearly.zone("Europe/Berlin").build()?;
    Ok(vec![
        ("gcra", one(Gcra::new(slow, burst)?)?),
        ("token-bucket", one(TokenBucket::new(slow, burst)?)?),
        ("fixed-window", one(FixedWindow::new(window)?)?),
        ("fixed-window by a calendar", one(yearly)?),
        ("first-request-window", one(FirstRequestWindow::new(window)?)?),
        ("sliding-counter", one(SlidingCounter::new(window)?)?),
        ("bucketed-window", one(BucketedWindow::new(1_000_000, &[rate(many, 60_000_000)?])?)?),
        ("sliding-log", one(SlidingLog::new(rate(many, SHORT_US)?)?)?),
        ("lockout", one(Lockout::new(window, Duration::from_secs(3_600)).build()?)?),
        ("window-log", one(WindowLog::new(rate(MOST_LOGGED, SHORT_US)?)?)?),
        (LEASES, leases(lease)?),
    ])
}

/// Three GCRA limits of one key, stacked and in one batch; one limit on eight keys at once.
fn several(allowance: Allowance) -> Fallible<Vec<(NamedSubject, usize)>> {
    let period_us = u64::try_from(allowance.period.as_micros())?;
    let three = || -> Fallible<[Gcra; 3]> {
        let burst = allowance.burst.get().into();
        let gcra = |times: u64| Gcra::new(Rate::per_us(times, period_us)?, burst);
        Ok([gcra(1)?, gcra(2)?, gcra(4)?])
    };
    let [first, ..] = three()?;
    let keys = AllOrNothing { limit: Limit::new("keys", first)?, store: MemoryStore::new() };
    Ok(vec![
        (("stack-of-3-limits", one(Stack::new(three()?)?)?), 1),
        (("batch-of-3-limits", all(three()?)?), 1),
        (("batch-of-8-keys", Box::new(keys)), BATCH),
    ])
}

/// Measures allowed and denied decisions on a thousand keys, on one thread.
pub(super) fn run(quick: bool, report: &mut BenchReport) -> Fallible {
    println!("\n1,000 keys; a full log has {FULL} entries");
    let effort = if quick {
        ScenarioEffort { rounds: 5, decisions: 1 << 12 }
    } else {
        ScenarioEffort { rounds: 31, decisions: 1 << 14 }
    };
    let full = non_zero(FULL);
    let hours = Allowance { period: Duration::from_secs(3_600), burst: full };
    let denied = ScenarioOutcome { allowance: hours, first_cost: full, ..DENIED };
    let allowed = ScenarioOutcome { first_cost: NonZeroU32::MIN, ..ALLOWED };
    for outcome in [allowed, denied] {
        let mut subjects: Vec<(NamedSubject, usize)> =
            algorithms(outcome.allowed)?.into_iter().map(|named| (named, 1)).collect();
        let beside_limitador = subjects.len();
        subjects.extend(several(outcome.allowance)?);
        let limitador = || Limitador::new(outcome.allowance, THOUSAND.key_count);
        let governor = || Governor::new(outcome.allowance);
        let (counter, single) = (limitador()?, governor()?);
        // limitador has no leases. Ours makes two decisions per admitted request, a grant and a
        // release, so this charges a counter twice. A denied request is not released: one decision.
        let leased = limitador()?;
        let leased = ByFunction(|key: &CallerKey| {
            leased.check(key) & (!outcome.allowed || leased.check(key))
        });
        // Two limits with governor: two limiters, of which both are asked, whatever the first says.
        let [first, second] = [governor()?, governor()?];
        let twice = ByFunction(|key: &CallerKey| first.check(key) & second.check(key));
        let peers: [&dyn MeasuredLimiter; 4] = [&counter, &twice, &single, &leased];
        for subject in peers.into_iter().chain(subjects.iter().map(|((_, subject), _)| &**subject))
        {
            outcome.charge(subject, THOUSAND.key_count)?;
        }
        let ours = subjects
            .iter()
            .map(|((_, subject), batch)| LimiterTurn { subject: &**subject, batch: *batch });
        let turns: Vec<_> = peers.into_iter().map(LimiterTurn::single).chain(ours).collect();
        let mut measured = take_turns(&THOUSAND, &outcome, 1, effort, &turns)?;
        for (at, ((name, _), batch)) in subjects.iter().enumerate() {
            let peer = match *batch {
                _ if *name == LEASES && outcome.allowed => ("limitador-twice", 3),
                _ if at < beside_limitador => ("limitador", 0),
                1 => ("governor-twice", 1),
                _ => ("governor", 2),
            };
            measured.named(name).tell(report, (PRECISE, *batch, at + peers.len()), peer)?;
        }
    }
    Ok(())
}
