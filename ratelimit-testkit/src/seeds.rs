//! The seed table: the limits on which the laws are tried.
//!
//! Small capacities make denials frequent. The rates are those at which limiters are known to go
//! wrong: thirds, sevenths, several per microsecond, months, and refill ticks coarser than a
//! microsecond.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, AnyAlgorithm, BucketedWindow, Concurrency, ConfigError, FirstRequestWindow,
    FixedWindow, Gcra, Lockout, Rate, SlidingCounter, SlidingLog, WindowLog,
};

use crate::capability::Able;
use crate::trace::made::{Instance, Pool};

/// The list of algorithms. Gives a macro, after what it is given besides, each one's name in tests
/// and its type.
#[doc(hidden)]
#[macro_export]
macro_rules! __each_algorithm {
    ([$($callback:tt)+] $($given:tt)*) => {
        $($callback)+! {
            $($given)*
            gcra: Gcra,
            fixed_window: FixedWindow,
            first_request_window: FirstRequestWindow,
            window_log: WindowLog,
            bucketed_window: BucketedWindow,
            sliding_counter: SlidingCounter,
            sliding_log: SlidingLog,
            concurrency: Concurrency,
            lockout: Lockout
        }
    };
}

/// Writes [`AlgorithmKind`].
macro_rules! kinds {
    ($($test:ident: $kind:ident),+) => {
        /// An algorithm by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum AlgorithmKind {
            $(
                #[doc = concat!("[`", stringify!($kind), "`]")]
                $kind,
            )+
        }

        impl AlgorithmKind {
            /// All algorithms.
            pub const ALL: [Self; [$(stringify!($kind)),+].len()] = [$(Self::$kind),+];

            /// The kind of an algorithm.
            #[must_use]
            pub const fn from_algorithm(algorithm: &AnyAlgorithm) -> Self {
                match algorithm { $( AnyAlgorithm::$kind(_) => Self::$kind, )+ }
            }
        }
    };
}

__each_algorithm!([kinds]);

/// Rates and bursts of the buckets.
const BUCKETS: &[(&str, u64)] = &[
    ("1/s", 1),
    ("1/s", 5),
    ("3/s", 1),
    ("3/s", 4),
    ("7/5m", 7),
    ("10/s", 20),
    ("600/s", 3),
    ("1000/250ms", 10),
    ("2/3us", 3),
    ("10000000/s", 10),
    // Exact in microseconds, in milliseconds, and in seconds only.
    ("1000003/30d", 3),
    ("1000003/30d", 1_000_003),
    ("1000000007/30d", 1_000_000_007),
    // Denies everything.
    ("0/s", 0),
];

/// Rates of the windows.
const WINDOWS: &[&str] = &[
    "1/s",
    "3/s",
    "2/3us",
    "7/5m",
    "4/250ms",
    "1000/250ms",
    "10000000/s",
    "5/30d",
    "1000003/30d",
    "0/s",
];

/// Windows of calendars: months of different lengths, the last day of each, clocks that change at
/// midnight or by half an hour, and debts. Two of each kind, for limits that change.
pub(crate) const CALENDARS: &[&str] = &[
    "fixed-window 5/month",
    "fixed-window 9/month debt 4",
    "fixed-window 3/month zone Europe/Berlin anchor 31 debt 3",
    "fixed-window 7/month zone Europe/Berlin anchor 31",
    "fixed-window 3/day zone America/Havana",
    "fixed-window 2/day zone America/Havana debt 2",
    "fixed-window 3/day zone Australia/Lord_Howe anchor 2 debt 1",
    "fixed-window 1/day zone Australia/Lord_Howe anchor 2",
    "fixed-window 1000003/week zone Asia/Kathmandu anchor sunday",
    "fixed-window 5/year zone America/New_York",
];

/// Rates and bursts of buckets that do not refill a unit during a test.
const SLOW_BUCKETS: &[(&str, u64)] = &[("1/h", 1), ("3/h", 5), ("2/h", 3), ("7/30d", 7)];

/// Rates of windows longer than any test; each length, and that of their parts, divides the next
/// longer one.
const SLOW_WINDOWS: &[&str] = &["1/h", "3/h", "5/h", "7/30d"];

/// The times at which traces begin, in microseconds: the epoch and the present, on a window's
/// boundary and off it.
pub(crate) const BEGINNINGS_US: &[u64] =
    &[0, 1_795_218_392_123_456, 1_795_218_390_000_000, 1_795_218_389_999_999, 1, 86_400_000_000];

/// Limits that may owe, coarse refill ticks and the ends of the range among them.
const OWING: [&str; 7] = [
    "gcra 10/s burst 20 debt 30",
    "gcra 1000003/30d burst 1000 debt 999003",
    "gcra 7/5m burst 7 debt 3",
    "token-bucket 3/s burst 3 debt 100",
    "fixed-window 10/s debt 25",
    "fixed-window 4503599627370000/s debt 495",
    "fixed-window 3/7us debt 1",
];
const TINY_OWING: [&str; 4] = [
    "gcra 2/3us burst 1 debt 2",
    "token-bucket 3/2us burst 2 debt 1",
    "fixed-window 1/2us debt 2",
    "fixed-window 2/3us debt 3",
];

/// Lockouts whose blocks are equal, that grow fast, and shorter ones than the window.
const LOCKOUTS: [&str; 6] = [
    "lockout 3/s block 100ms",
    "lockout 3/s block 7s",
    "lockout 5/15m block 15m factor 2 longest 1d forget 7d",
    "lockout 3/15m block 1m factor 10 longest 1h forget 20m",
    "lockout 1/15m block 3m factor 3 longest 5m forget 1m",
    "lockout 9/250ms block 1us factor 4503599627370495 longest 1s forget 3us",
];
const TINY_LOCKOUTS: [&str; 3] = [
    "lockout 1/2us block 1us factor 2 longest 3us forget 2us",
    "lockout 2/2us block 3us",
    "lockout 2/3us block 1us factor 3 longest 2us forget 1us",
];

impl AlgorithmKind {
    /// The algorithms that can count attempts.
    pub const ATTEMPTS: [Self; 7] = {
        // All but the leases and the lockout, which stand last.
        let [attempts @ .., Self::Concurrency, Self::Lockout] = Self::ALL else { unreachable!() };
        attempts
    };

    /// The algorithms that support increment-first charging: an attempt is charged before the
    /// stored state is read, as in a transaction that cannot branch.
    pub const INCREMENT_FIRST: [Self; 4] =
        [Self::FixedWindow, Self::FirstRequestWindow, Self::WindowLog, Self::SlidingLog];

    /// The algorithms whose charges can be reserved and settled later.
    pub const RESERVATIONS: [Self; 3] = [Self::Gcra, Self::FixedWindow, Self::Concurrency];

    /// An algorithm of this kind at this rate; one without a burst ignores it. A bucketed window
    /// has a second, longer window. A lockout blocks for a window at first, and for five at most.
    ///
    /// # Panics
    /// If the numbers do not form a valid limit.
    #[must_use]
    pub fn algorithm(self, rate: Rate, burst: u64) -> AnyAlgorithm {
        match self {
            Self::Gcra => Gcra::new(rate, burst).map(AnyAlgorithm::from),
            Self::FixedWindow => FixedWindow::new(rate).map(AnyAlgorithm::from),
            Self::FirstRequestWindow => FirstRequestWindow::new(rate).map(AnyAlgorithm::from),
            Self::BucketedWindow => bucketed(rate).map(AnyAlgorithm::from),
            Self::SlidingCounter => SlidingCounter::new(rate).map(AnyAlgorithm::from),
            Self::WindowLog => WindowLog::new(rate).map(AnyAlgorithm::from),
            Self::SlidingLog => SlidingLog::new(rate).map(AnyAlgorithm::from),
            Self::Concurrency => Concurrency::new(rate).map(AnyAlgorithm::from),
            Self::Lockout => {
                let window = Duration::from_micros(rate.period_us());
                let lockout = Lockout::new(rate, window).factor(2).longest(window * 5);
                lockout.forget(window * 3).build().map(AnyAlgorithm::from)
            }
        }
        .expect("the seed table holds only limits that can be built")
    }

    /// The algorithm's name in a policy document.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.algorithm(rate(1, 1_000_000), 1).name()
    }

    /// Whether the algorithm refills continuously and has a burst.
    #[must_use]
    pub const fn is_bucket(self) -> bool {
        matches!(self, Self::Gcra)
    }

    /// The algorithm's seed limits.
    #[must_use]
    pub fn seeds(self) -> Vec<AnyAlgorithm> {
        let mut seeds = self.of_rates(BUCKETS, WINDOWS);
        for words in [&OWING[..], CALENDARS, &LOCKOUTS] {
            seeds.extend(self.in_words(words));
        }
        seeds
    }

    /// Those of these limits that are of this algorithm.
    fn in_words(self, words: &[&str]) -> impl Iterator<Item = AnyAlgorithm> {
        let algorithms = words.iter().map(|words| words.parse().expect("only limits stand there"));
        algorithms.filter(move |algorithm| Self::from_algorithm(algorithm) == self)
    }

    /// Limits of these rates and bursts, or of these rates if the algorithm has no burst.
    fn of_rates(self, buckets: &[(&str, u64)], windows: &[&str]) -> Vec<AnyAlgorithm> {
        if self.is_bucket() {
            return buckets
                .iter()
                .map(|(rate, burst)| self.algorithm(parse_rate(rate), *burst))
                .collect();
        }
        let bounded = matches!(self, Self::WindowLog | Self::Concurrency);
        let rates = windows.iter().map(|rate| parse_rate(rate));
        let rates = rates.filter(|rate| !bounded || rate.count() <= 10_000);
        rates.map(|rate| self.algorithm(rate, 0)).collect()
    }

    /// Limits that do not refill during a test, whenever it begins, unless a window ends.
    pub(crate) fn slow(self) -> Vec<AnyAlgorithm> {
        self.of_rates(SLOW_BUCKETS, SLOW_WINDOWS)
    }

    /// The smallest limits, whose traces can be enumerated: capacities of 0 to 3 and times of a few
    /// microseconds.
    pub(crate) fn tiny(self) -> Vec<AnyAlgorithm> {
        let plain = (0..=3).flat_map(|capacity| {
            if self.is_bucket() {
                // One rate is below a unit per microsecond and one above; neither is whole.
                let rates = [(2, 3), (3, 2)].map(|(count, us)| (count.min(3 * capacity), us));
                rates.map(|(count, us)| self.algorithm(rate(count, us), capacity))
            } else {
                [2, 3].map(|us| self.algorithm(rate(capacity, us), 0))
            }
        });
        plain.chain(self.in_words(&TINY_OWING)).chain(self.in_words(&TINY_LOCKOUTS)).collect()
    }
}

impl fmt::Display for AlgorithmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A window of several buckets, and one three times as long with twice the limit over the same
/// buckets.
fn bucketed(rate: Rate) -> Result<BucketedWindow, ConfigError> {
    let (count, us) = (rate.count(), rate.period_us());
    let buckets = [5, 4, 3, 2].into_iter().find(|n| us.is_multiple_of(*n)).unwrap_or(1);
    BucketedWindow::new(us / buckets, &[rate, Rate::per_us(2 * count, 3 * us)?])
}

fn parse_rate(rate: &str) -> Rate {
    rate.parse().expect("the seed table holds only rates")
}

pub(crate) fn rate(count: u64, period_us: u64) -> Rate {
    Rate::per_us(count, period_us).expect("a count and a period of at least 1")
}

/// The limits on which a law is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Limits of one algorithm; every third batch asks for several keys of one limit.
    One(AlgorithmKind),
    /// Limits of one algorithm that count attempts.
    Attempts(AlgorithmKind),
    /// Batches over several limits of any algorithms, and several keys.
    Mixed,
    /// Batches over several limits, most of which can be reserved.
    Reservations,
}

impl Scope {
    /// The scopes of one algorithm: limits that count what they admit, and those that count
    /// attempts, if it can.
    #[must_use]
    pub fn for_kind(kind: AlgorithmKind) -> Vec<Self> {
        let attempts = AlgorithmKind::ATTEMPTS.contains(&kind).then_some(Self::Attempts(kind));
        [Self::One(kind)].into_iter().chain(attempts).collect()
    }

    /// All scopes of one algorithm each.
    #[must_use]
    pub fn singles() -> Vec<Self> {
        let attempts = AlgorithmKind::ATTEMPTS.map(Self::Attempts);
        AlgorithmKind::ALL.map(Self::One).into_iter().chain(attempts).collect()
    }

    /// All scopes.
    #[must_use]
    pub fn all() -> Vec<Self> {
        Self::singles().into_iter().chain([Self::Mixed, Self::Reservations]).collect()
    }

    pub(crate) fn is_single(self) -> bool {
        matches!(self, Self::One(_) | Self::Attempts(_))
    }

    /// The limits that `make` builds for the scope's algorithms, without those that the store
    /// cannot keep.
    fn instances_from(
        self,
        able: Able,
        make: impl Fn(AlgorithmKind) -> Vec<AnyAlgorithm>,
    ) -> Vec<Instance<AnyAlgorithm>> {
        let single = |scope: &Self| match *scope {
            Self::One(kind) => make(kind).into_iter().map(Instance::from).collect(),
            Self::Attempts(kind) => {
                let plain = make(kind).into_iter().filter(|algorithm| algorithm.debt() == 0);
                plain.map(|algorithm| Instance::from(algorithm).count_attempts()).collect()
            }
            // Of all others a few, which refuse a reservation.
            Self::Mixed | Self::Reservations => Vec::new(),
        };
        let mut instances: Vec<_> = match self {
            Self::One(_) | Self::Attempts(_) => single(&self),
            Self::Mixed => Self::singles().iter().flat_map(single).collect(),
            Self::Reservations => {
                let of = |kind: &AlgorithmKind| single(&Self::One(*kind));
                let others = Self::singles().into_iter().filter_map(|scope| single(&scope).pop());
                AlgorithmKind::RESERVATIONS.iter().flat_map(of).chain(others).collect()
            }
        };
        instances.retain(|instance| able.can_keep(instance));
        instances
    }

    fn pool_of(
        self,
        able: Able,
        make: fn(AlgorithmKind) -> Vec<AnyAlgorithm>,
    ) -> Pool<AnyAlgorithm> {
        let some = match self {
            Self::One(_) | Self::Attempts(_) => [1, 1],
            Self::Mixed => [2, 4],
            Self::Reservations => [1, 3],
        };
        let reserves = self == Self::Reservations;
        let make = move || self.instances_from(able, make);
        Pool {
            make: Rc::new(make),
            unkind_us: Rc::default(),
            some,
            changed: false,
            reserves,
            alone: false,
            able,
        }
    }

    /// The limits on which the laws are tried.
    pub(crate) fn pool(self, able: Able) -> Pool<AnyAlgorithm> {
        self.pool_of(able, AlgorithmKind::seeds)
    }

    /// Limits that do not refill during a test.
    pub(crate) fn slow(self, able: Able) -> Pool<AnyAlgorithm> {
        self.pool_of(able, AlgorithmKind::slow)
    }

    /// The smallest limits, whose traces can be enumerated.
    pub(crate) fn tiny(self, able: Able) -> Vec<Instance<AnyAlgorithm>> {
        self.instances_from(able, AlgorithmKind::tiny)
    }

    /// A limit by a calendar, if the scope has fixed windows.
    pub(crate) fn by_calendar(self) -> Option<Instance<AnyAlgorithm>> {
        self.instances_from(Able::ALL, |kind| kind.in_words(&CALENDARS[..1]).collect()).pop()
    }

    /// The limits with this rate.
    pub(crate) fn at_rate(self, rate: Rate, burst: u64) -> Vec<Instance<AnyAlgorithm>> {
        self.instances_from(Able::ALL, |kind| vec![kind.algorithm(rate, burst)])
    }
}

/// The longest time from the deepest debt, or from empty, until everything fits.
pub(crate) fn full_us(algorithm: &AnyAlgorithm) -> u64 {
    match algorithm {
        AnyAlgorithm::Gcra(_) => {
            let refill = refill(algorithm);
            refill.ticks_for(refill.most_units()) * refill.tick_us
        }
        AnyAlgorithm::FixedWindow(fixed) => {
            (fixed.capacity() + fixed.debt()).div_ceil(fixed.capacity().max(1)) * fixed.window_us()
        }
        AnyAlgorithm::FirstRequestWindow(first) => first.window_us(),
        AnyAlgorithm::BucketedWindow(bucketed) => {
            bucketed.windows().iter().map(|window| window.span_us).max().unwrap_or_default()
        }
        // A charge at the beginning of a window fades until the end of the next one.
        AnyAlgorithm::SlidingCounter(counter) => 2 * counter.window_us(),
        AnyAlgorithm::WindowLog(log) => log.window_us(),
        AnyAlgorithm::SlidingLog(log) => log.window_us(),
        AnyAlgorithm::Concurrency(leases) => leases.lease_us(),
        AnyAlgorithm::Lockout(lockout) => {
            (lockout.longest_us() + lockout.forget_us()).max(lockout.window_us())
        }
    }
}

/// The length of a clock-aligned window, or the part of it in which nothing leaves the window;
/// `None` if its windows are not aligned to the clock, or are those of a calendar.
pub(crate) fn aligned_us(algorithm: &AnyAlgorithm) -> Option<u64> {
    match algorithm {
        AnyAlgorithm::FixedWindow(window) => {
            window.calendar().is_none().then(|| window.window_us())
        }
        AnyAlgorithm::SlidingCounter(counter) => Some(counter.window_us()),
        AnyAlgorithm::BucketedWindow(window) => Some(window.bucket_us()),
        AnyAlgorithm::Gcra(_)
        | AnyAlgorithm::FirstRequestWindow(_)
        | AnyAlgorithm::WindowLog(_)
        | AnyAlgorithm::SlidingLog(_)
        | AnyAlgorithm::Concurrency(_)
        | AnyAlgorithm::Lockout(_) => None,
    }
}

/// The rate of a bucket, in whole numbers.
pub(crate) fn refill(algorithm: &AnyAlgorithm) -> &ratelimit_core::algorithm::Refill {
    match algorithm {
        AnyAlgorithm::Gcra(gcra) => gcra.refill(),
        other => panic!("{other} does not refill"),
    }
}
