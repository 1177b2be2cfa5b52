//! Repeats one kind of decision, so that callgrind can count its instructions: a count does not depend on the load of
//! the machine. `scripts/callgrind` runs it and prints the instructions per decision.

use std::error::Error;
use std::hint::black_box;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use clap::{Args, ValueEnum};
use governor::clock::FakeRelativeClock;
use http::StatusCode;
use ratelimit_core::{
    Clock, Concurrency, FixedWindow, InMemory, Leased, Limit, Limits, ManualClock, Rate,
    RateLimiter, Timestamp, Verdict,
};
use ratelimit_memory::MemoryStore;

use crate::clocks::precise;
use crate::http::{Requests, Sender};
use crate::keys::Key;
use crate::peers::{Allowance, BATCH, Governor, Ours, Subject, gcra};

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
    /// Ours, allowed, each time a new key.
    New,
    /// Ours, a peek.
    Peek,
    /// Three of our limits on one key.
    Limits,
    /// Three of our limits, each time on a new key.
    NewLimits,
    /// Our fixed window, whose states lie in shards.
    Window,
    /// Our fixed window, each time a new key.
    NewWindow,
    /// A lease of ours and its release, which are two decisions.
    Lease,
    /// No decision: a request through a service without a layer.
    Http,
    /// A request that our layer admits, with header fields; the store's clock is the precise one, as in the next six.
    HttpLayer,
    /// The same without fields.
    HttpPlain,
    /// The same with fields, and awaited.
    HttpAwaited,
    /// A request that our layer denies, with fields.
    HttpDenied,
    /// A request of an IPv6 client that our layer admits, without fields.
    HttpPlainV6,
    /// A request that `tower_governor` admits, with fields.
    HttpGovernor,
    /// The same without fields.
    HttpGovernorPlain,
}

impl Kind {
    /// The keys to decide on, none of which is key 0 if they are to be new.
    fn keys(self, count: usize) -> Vec<Key> {
        match self {
            Self::New | Self::NewLimits | Self::NewWindow => (1..=count).map(Key::new).collect(),
            _ => vec![Key::new(0); count],
        }
    }

    /// The requests of the rows whose names begin with `http`.
    fn requests(self) -> Result<Option<Requests>, Box<dyn Error>> {
        Ok(Some(match self {
            Self::Http => Requests::bare(),
            Self::HttpLayer => Requests::ours(true, true, true)?,
            Self::HttpPlain | Self::HttpPlainV6 => Requests::ours(true, false, true)?,
            Self::HttpAwaited => Requests::ours(true, true, false)?,
            Self::HttpDenied => Requests::ours(false, true, true)?,
            Self::HttpGovernor => Requests::governor(true)?,
            Self::HttpGovernorPlain => Requests::governor(false)?,
            _ => return Ok(None),
        }))
    }
}

/// Decides by a function.
struct Call<F>(F);

impl<F: Fn(&str) -> bool + Sync> Subject for Call<F> {
    fn check(&self, key: &Key) -> bool {
        (self.0)(key.as_str())
    }

    fn charge(&self, key: &Key, _: NonZeroU32) -> bool {
        self.check(key)
    }
}

type Limiter<A> = RateLimiter<MemoryStore<A, ManualClock>, A>;

/// Ours with limits of any kind, all of which apply to every key, and with room for new keys.
fn limiter<A: InMemory>(
    algorithms: impl IntoIterator<Item = A>,
    clock: ManualClock,
) -> Result<Limiter<A>, Box<dyn Error>> {
    let names = ["first", "second", "third"];
    let limits = names.iter().zip(algorithms).map(|(name, algorithm)| Limit::new(name, algorithm));
    let limits = Limits::new(limits.collect::<Result<Vec<_>, _>>()?)?;
    let store = MemoryStore::builder().capacity(100_000).clock(clock);
    Ok(RateLimiter::new(limits, store.build()))
}

fn charge<A: InMemory>(limiter: &Limiter<A>, key: &str) -> bool {
    black_box(&limiter.check_now(key)).as_ref().is_ok_and(Verdict::allowed)
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
const HOUR_US: u64 = 3_600_000_000;
/// More than a window ever admits here.
const MOST: u64 = 4_000_000_000;
const FEW: Allowance = Allowance { period: Duration::from_secs(10_000), burst: NonZeroU32::MIN };

fn ours<C: Clock>(allowance: Allowance, clock: C) -> Result<Ours<C>, Box<dyn Error>> {
    Ours::new(allowance, clock, 1_000)
}

/// Decides this often.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let still = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let Options { kind, decisions } = *options;
    if let Some(requests) = kind.requests()? {
        let peer: SocketAddr = match kind {
            Kind::HttpPlainV6 => "[2001:db8:85a3:12::7]:4711".parse()?,
            _ => "198.51.100.77:4711".parse()?,
        };
        return requests.repeat(peer, decisions, counted_decisions_of_requests);
    }
    match kind {
        Kind::Loop => decide(kind, &Nothing, decisions),
        Kind::Allowed | Kind::Batch => decide(kind, &ours(MANY, still)?, decisions),
        Kind::Denied => decide(kind, &ours(FEW, still)?, decisions),
        Kind::Precise => decide(kind, &ours(MANY, precise())?, decisions),
        Kind::Governor => {
            let governor = Governor::with_clock(MANY, FakeRelativeClock::default())?;
            decide(kind, &governor, decisions)
        }
        Kind::New | Kind::Peek => {
            let limiter = limiter([gcra(MANY)?], still)?;
            let _ = limiter.check_now(Key::new(0).as_str())?;
            if kind == Kind::New {
                return decide(kind, &Call(|key: &str| charge(&limiter, key)), decisions);
            }
            let peek = |key: &str| {
                black_box(&limiter.peek_now(key, 1)).as_ref().is_ok_and(Verdict::allowed)
            };
            decide(kind, &Call(peek), decisions)
        }
        Kind::Limits | Kind::NewLimits => {
            let limiter = limiter([gcra(MANY)?, gcra(MANY)?, gcra(MANY)?], still)?;
            decide(kind, &Call(|key: &str| charge(&limiter, key)), decisions)
        }
        Kind::Window | Kind::NewWindow => {
            let limiter = limiter([FixedWindow::new(Rate::per_us(MOST, HOUR_US)?)?], still)?;
            decide(kind, &Call(|key: &str| charge(&limiter, key)), decisions)
        }
        Kind::Lease => {
            let limiter = limiter([Concurrency::new(Rate::per_us(100, HOUR_US)?)?], still)?;
            let lease = |key: &str| {
                let leased = black_box(limiter.lease_now(key));
                leased.is_ok_and(|leased| matches!(leased, Leased::Granted(_)))
            };
            decide(kind, &Call(lease), decisions)
        }
        // Their requests have returned above.
        Kind::Http
        | Kind::HttpLayer
        | Kind::HttpPlain
        | Kind::HttpAwaited
        | Kind::HttpDenied
        | Kind::HttpPlainV6
        | Kind::HttpGovernor
        | Kind::HttpGovernorPlain => Ok(()),
    }
}

fn decide(kind: Kind, subject: &impl Subject, decisions: usize) -> Result<(), Box<dyn Error>> {
    let keys = kind.keys(decisions);
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

/// As [`counted_decisions`], by requests of one peer: the number that were answered with this status.
#[inline(never)]
fn counted_decisions_of_requests(
    send: &mut Sender,
    peer: SocketAddr,
    status: StatusCode,
    count: usize,
) -> usize {
    (0..count).filter(|_| send(peer) == Some(status)).count()
}
