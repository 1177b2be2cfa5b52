//! The decisions that are measured: limits, earlier charges, and the outcome that follows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ratelimit_core::store::RecordStore;
use ratelimit_core::{
    AnyAlgorithm, BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, Limit,
    Limits, Lockout, Rate, RateLimiter, Record, ReservationId, SlidingCounter, SlidingLog, Store,
    Timestamp, TokenBucket, WindowLog,
};

use crate::keys::CallerKey;
use crate::measure::Fallible;
use crate::peers;

/// The length of a bucket, and of a window. Those that are aligned to the clock end in 2027 and
/// 2052, so none ends during a run.
const BUCKET: Duration = Duration::from_secs(1_000 * 24 * 3_600);
const WINDOW: Duration = Duration::from_secs(10_000 * 24 * 3_600);

/// Limits, and the earlier charges of one caller.
pub(super) struct Situation {
    pub(super) name: &'static str,
    pub(super) admits: bool,
    pub(super) limits: Limits<AnyAlgorithm>,
    /// The earlier charges, and their ages.
    charges: Vec<(u64, Duration)>,
    /// The cost of the decision.
    cost: u64,
    /// How many costs decisions take in turn, from `cost` on.
    costs: u64,
    /// Whether each request carries an id, and is settled at once.
    by_id: bool,
    is_settled: bool,
}

/// The algorithms of the single limits.
pub(super) const ALGORITHMS: [&str; 11] = [
    "gcra",
    "token-bucket",
    "fixed-window",
    "fixed-window by a calendar",
    "first-request-window",
    "sliding-counter",
    "bucketed-window",
    "sliding-log",
    "window-log",
    "concurrency",
    "lockout",
];

/// An algorithm, and the earlier charges.
type ChargedAlgorithm = (AnyAlgorithm, Vec<(u64, Duration)>);

/// A limit with earlier charges, which admits the next request or denies it. It refills within
/// hours, and its windows are long, so that one state serves a whole run. A bucketed window has
/// fifteen buckets, a log ten entries, and ten leases are alive.
fn charged_algorithm(algorithm: &str, admits: bool) -> Fallible<ChargedAlgorithm> {
    let rate = |rate: &str| rate.parse::<Rate>();
    let window = || rate(if admits { "1000000000/10000d" } else { "10/10000d" });
    let now = |cost| vec![(cost, Duration::ZERO)];
    let ten = || vec![(1, Duration::ZERO); 10];
    let (refill, burst) = if admits { ("100/s", 1_000_000_000) } else { ("1/d", 2) };
    let bucket_cost = if admits { 1_000_000 } else { 2 };
    let window_cost = if admits { 1 } else { 10 };
    Ok(match algorithm {
        "gcra" => (Gcra::new(rate(refill)?, burst)?.into(), now(bucket_cost)),
        "token-bucket" => (TokenBucket::new(rate(refill)?, burst)?.into(), now(bucket_cost)),
        "fixed-window" => (FixedWindow::new(window()?)?.into(), now(window_cost)),
        "fixed-window by a calendar" => {
            let count = if admits { 1_000_000_000 } else { 10 };
            let yearly = FixedWindow::per_year(count).zone("Europe/Berlin").build()?;
            (yearly.into(), now(window_cost))
        }
        "first-request-window" => (FirstRequestWindow::new(window()?)?.into(), now(window_cost)),
        "sliding-counter" => (
            SlidingCounter::new(window()?)?.into(),
            vec![(1, WINDOW), (window_cost, Duration::ZERO)],
        ),
        "bucketed-window" => {
            let rates = if admits { "9000000/15000d" } else { "15/15000d" };
            let rates = [rate("1000000/1000d")?, rate(rates)?];
            let bucket_us = u64::try_from(BUCKET.as_micros())?;
            let ages = (0..15).rev().map(|buckets| (1, BUCKET * buckets));
            (BucketedWindow::new(bucket_us, &rates)?.into(), ages.collect())
        }
        "sliding-log" => (SlidingLog::new(window()?)?.into(), ten()),
        "window-log" => {
            (WindowLog::new(rate(if admits { "1000/10000d" } else { "10/10000d" })?)?.into(), ten())
        }
        "concurrency" => {
            (Concurrency::new(rate(if admits { "20/1h" } else { "10/1h" })?)?.into(), ten())
        }
        "lockout" => {
            let lockout = Lockout::new(window()?, WINDOW).factor(2).longest(WINDOW * 2);
            (lockout.build()?.into(), now(window_cost))
        }
        other => return Err(format!("no algorithm is called {other}").into()),
    })
}

impl Situation {
    fn new<const N: usize>(
        name: &'static str,
        admits: bool,
        limits: [AnyAlgorithm; N],
        charges: Vec<(u64, Duration)>,
    ) -> Fallible<Self> {
        let limits = peers::limits(limits)?;
        Ok(Self {
            name,
            admits,
            limits,
            charges,
            cost: 1,
            costs: 1,
            by_id: false,
            is_settled: false,
        })
    }

    /// One limit by this algorithm.
    pub(super) fn one(algorithm: &'static str, admits: bool) -> Fallible<Self> {
        let (limit, charges) = charged_algorithm(algorithm, admits)?;
        Self::new(algorithm, admits, [limit], charges)
    }

    /// The same, counting attempts; `None` if the algorithm cannot.
    pub(super) fn by_attempts(algorithm: &'static str, admits: bool) -> Fallible<Option<Self>> {
        let one = Self::one(algorithm, admits)?;
        let limits = one.limits.iter().cloned().map(Limit::count_attempts);
        let limits = limits.collect::<Result<Vec<_>, _>>().ok().map(Limits::new).transpose()?;
        Ok(limits.map(|limits| Self { limits, ..one }))
    }

    /// The same limit, which looks for a record of its caller.
    pub(super) fn overridable(self, name: &'static str) -> Fallible<Self> {
        let limits = self.limits.iter().cloned().map(Limit::overridable);
        Ok(Self { name, limits: Limits::new(limits)?, ..self })
    }

    /// Three limits of one caller, of which the last one denies if one does.
    pub(super) fn three(
        name: &'static str,
        [first, second, third]: [&str; 3],
        admits: bool,
    ) -> Fallible<Self> {
        // The charges of the last limit, so that it is full where it must deny.
        let (third, charges) = charged_algorithm(third, admits)?;
        let limits = [charged_algorithm(first, true)?.0, charged_algorithm(second, true)?.0, third];
        Self::new(name, admits, limits, charges)
    }

    /// A bucketed window of so many buckets, all of them charged, and of so many days each.
    pub(super) fn buckets(count: u32, days: u32) -> Fallible<Self> {
        let bucket = Duration::from_secs(24 * 3_600) * days;
        let rates = [(1_000_000, 1), (9_000_000, count)];
        let rates = rates.map(|(most, buckets)| Rate::new(most, bucket * buckets));
        let rates = rates.into_iter().collect::<Result<Vec<_>, _>>()?;
        let algorithm = BucketedWindow::new(u64::try_from(bucket.as_micros())?, &rates)?.into();
        let charges = (0..count).rev().map(|age| (1234, bucket * age));
        Self::new("packed into one field", true, [algorithm], charges.collect())
    }

    /// A lease under an id, beside ten of them.
    pub(super) fn lease_by_id() -> Fallible<Self> {
        let situation = Self::one("concurrency", true)?;
        Ok(Self { name: "lease by id", by_id: true, ..situation })
    }

    /// So many limits of one caller. With an id, each decision reserves and settles.
    pub(super) fn reserved(name: &'static str, limits: usize, by_id: bool) -> Fallible<Self> {
        let algorithms = ["gcra", "fixed-window", "gcra", "gcra", "fixed-window"];
        let charged = algorithms[..limits].iter().map(|name| charged_algorithm(name, true));
        let limits = charged.map(|charged| Ok(charged?.0)).collect::<Fallible<Vec<_>>>()?;
        let limits = peers::limits(limits)?;
        // Refilled within hours.
        let before = vec![(1_000_000, Duration::ZERO)];
        let (admits, cost, costs) = (true, 1, 1);
        Ok(Self { name, admits, limits, charges: before, cost, costs, by_id, is_settled: by_id })
    }

    /// Decisions at so many costs in turn.
    pub(super) fn with_costs(self, costs: u64) -> Self {
        Self { costs, ..self }
    }

    /// The same in a store.
    pub(super) fn in_store<S: Store<AnyAlgorithm>>(self, store: S) -> InStore<S> {
        let limiter = RateLimiter::new(self.limits.clone(), store);
        InStore { limiter, situation: self, asked: AtomicU64::new(0) }
    }
}

/// A situation in a store of ours.
pub(super) struct InStore<S> {
    limiter: RateLimiter<S>,
    situation: Situation,
    /// How many decisions were asked for.
    asked: AtomicU64,
}

impl<S: RecordStore<AnyAlgorithm>> InStore<S> {
    /// Gives the caller twice the numbers of a `gcra` that admits.
    pub(super) async fn raise(&self, caller: &CallerKey) -> Fallible {
        let [limit] = self.situation.limits.as_slice() else { return Err("several limits".into()) };
        let double: AnyAlgorithm = Gcra::new("200/s".parse()?, 2_000_000_000)?.into();
        let record = Record::numbers(double).forever();
        Ok(self.limiter.set_record(caller.as_str(), limit.name(), record).await.map(drop)?)
    }
}

impl<S: Store<AnyAlgorithm>> InStore<S> {
    async fn ask(
        &self,
        caller: &CallerKey,
        cost: u64,
        (age, id): (Duration, Option<ReservationId>),
    ) -> Fallible<bool> {
        let mut request = self.limiter.request(caller.as_str()).cost(cost);
        if let Some(id) = id {
            request = request.id(id);
        }
        // At the store's own time, unless the charge lies in the past.
        if !age.is_zero() {
            let at = SystemTime::now().duration_since(UNIX_EPOCH)?.saturating_sub(age);
            let at = Timestamp::from_us(u64::try_from(at.as_micros())?);
            request = request.at(at.ok_or("a time before all time")?);
        }
        let allowed = request.check().await?.allowed();
        if let (true, Some(id)) = (self.situation.is_settled, id) {
            let _ = self.limiter.request(caller.as_str()).cost(cost).id(id).settle().await?;
        }
        Ok(allowed)
    }

    /// Makes the earlier charges of the caller.
    pub(super) async fn prepare(&self, caller: &CallerKey) -> Fallible {
        for (cost, age) in &self.situation.charges {
            if !self.ask(caller, *cost, (*age, None)).await? {
                return Err("a charge before the decision was denied".into());
            }
        }
        Ok(())
    }

    /// Decides, and returns whether the request is admitted.
    pub(super) async fn decide(&self, caller: &CallerKey) -> Fallible<bool> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let cost = self.situation.cost + asked % self.situation.costs;
        let id = self.situation.by_id.then(ReservationId::random);
        self.ask(caller, cost, (Duration::ZERO, id)).await
    }
}
