//! Other limiters of Rust that keep their states on Redis, each asked as its documentation says: what they send,
//! replayed as ours is, and decisions per second beside ours.
//!
//! limitador is not among them: see benches/Cargo.toml.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_redis::RedisStore;
use throttle_kit::RedisBackend;
use trypema::RateLimiterBuilder;
use trypema::redis::{RedisKey, RedisRateLimiterProvider};

use crate::keys::Key;
use crate::report::Report;

use super::bytes;
use super::cpu::{self, measure};
use super::lab::{Lab, Subject};
use super::plain::{Decides, Failed, NARROW, WIDE};
use super::throughput::{self, KEYS, Ours, Pace, TASKS, beside};

/// The length of windows: longer than any run.
const WINDOW_S: u64 = 24 * 3_600;
/// What windows admit where the decision is to be a denial.
const NARROW_WINDOW: u32 = 10;

/// A limiter, and how often it is asked before the decision.
struct Peer<L> {
    limiter: L,
    charges: u32,
}

impl<L: Decides> Subject for Peer<L> {
    async fn prepare(&self, caller: &Key) -> Result<(), Box<dyn Error>> {
        for _ in 0..self.charges {
            Subject::decide(self, caller).await?;
        }
        Ok(())
    }

    async fn decide(&self, caller: &Key) -> Result<bool, Box<dyn Error>> {
        self.limiter.decide(caller.as_str()).await.map_err(|error| error.to_string().into())
    }
}

/// trypema's sliding window of buckets.
struct Trypema {
    provider: Arc<RedisRateLimiterProvider>,
    rate: trypema::RateLimit,
}

impl Trypema {
    async fn new(url: &str, admits: bool) -> Result<Self, Box<dyn Error>> {
        let manager = redis::Client::open(url)?.get_connection_manager().await?;
        let window = trypema::WindowSize::seconds(WINDOW_S)?;
        let provider = RedisRateLimiterProvider::builder(manager).window_size(window).build()?;
        // Half a request more, so that a rate that is no exact float admits no fewer.
        let most = if admits { 1e9 } else { f64::from(NARROW_WINDOW) } + 0.5;
        let rate = most / Duration::from_secs(WINDOW_S).as_secs_f64();
        Ok(Self { provider, rate: trypema::RateLimit::per_second(rate)? })
    }
}

impl Decides for Trypema {
    async fn decide(&self, caller: &str) -> Result<bool, Failed> {
        let key = RedisKey::try_from(caller.to_owned())?;
        let decision = self.provider.absolute().inc(&key, &self.rate, 1).await?;
        Ok(matches!(decision, trypema::RateLimitDecision::Allowed))
    }
}

/// throttle-kit's GCRA, by the client's clock.
struct ThrottleKit(throttle_kit::RateLimiter<RedisBackend>);

impl ThrottleKit {
    async fn new(url: &str, admits: bool) -> Result<Self, Box<dyn Error>> {
        let numbers = if admits { WIDE } else { NARROW };
        let period = Duration::from_micros(numbers.interval_us);
        let quota = throttle_kit::Quota::from_parts(period, u32::try_from(numbers.burst)?);
        Ok(Self(throttle_kit::RateLimiter::new(quota, RedisBackend::connect(url).await?)))
    }
}

impl Decides for ThrottleKit {
    async fn decide(&self, caller: &str) -> Result<bool, Failed> {
        Ok(self.0.check(caller).await.allowed)
    }
}

/// Measures each of them.
pub(super) async fn run(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let url = lab.recorded_url();
    if cpu::is_told(lab) {
        println!("\n{}", cpu::Row::heading());
        for admits in [true, false] {
            let charges = if admits { 1 } else { NARROW_WINDOW };
            let trypema = Peer { limiter: Trypema::new(&url, admits).await?, charges };
            replayed(quick, lab, report, ("trypema", "sliding window"), admits, &trypema).await?;
            let charges = if admits { 1 } else { 2 };
            let throttle_kit = Peer { limiter: ThrottleKit::new(&url, admits).await?, charges };
            replayed(quick, lab, report, ("throttle-kit", "gcra"), admits, &throttle_kit).await?;
        }
    }
    println!("\n{}", bytes::heading());
    measured(quick, lab, report, "trypema", Trypema::new(&url, true).await?).await?;
    measured(quick, lab, report, "throttle-kit", ThrottleKit::new(&url, true).await?).await?;
    println!("\n{}", throughput::Row::heading());
    lab.flush()?;
    let url = lab.url();
    let ours = Arc::new(Ours::new(RedisStore::connect(&url).await?)?);
    in_turns(quick, report, "trypema", &ours, Trypema::new(&url, true).await?).await?;
    in_turns(quick, report, "throttle-kit", &ours, ThrottleKit::new(&url, true).await?).await
}

async fn replayed(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    (mode, decision): (&'static str, &'static str),
    admits: bool,
    peer: &impl Subject,
) -> Result<(), Box<dyn Error>> {
    lab.flush()?;
    let message = |error| format!("{mode}, {}: {error}", cpu::outcome(admits));
    let recorded = lab.record(peer, admits).await.map_err(message)?;
    let names = cpu::Names { part: "peers", mode, decision };
    let row = measure(quick, lab, names, admits, &recorded).map_err(message)?;
    println!("{row}");
    report.line(&row)
}

async fn measured<L: Decides>(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    name: &'static str,
    limiter: L,
) -> Result<(), Box<dyn Error>> {
    lab.flush()?;
    let recorded = lab.record(&Peer { limiter, charges: 0 }, true).await?;
    bytes::tell(quick, lab, report, (name, "first decision", 1), &recorded)
}

async fn in_turns<L: Decides>(
    quick: bool,
    report: &mut Report,
    peer: &'static str,
    ours: &Arc<Ours>,
    limiter: L,
) -> Result<(), Box<dyn Error>> {
    let limiter = Arc::new(limiter);
    for keys in KEYS {
        for tasks in TASKS {
            let names = throughput::Names { part: "peers", client: "redis", peer };
            beside(Pace::of(quick), names, (tasks, keys), ours, &limiter, report).await?;
        }
    }
    Ok(())
}
