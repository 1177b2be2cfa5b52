//! The pages for those who move from another limiter: the decisions in their tables, by that
//! limiter's rule and by the policy of the page, on a given clock.
//!
//! The rules were compared with nginx 1.22, redis-cell 0.5 and the scripts of @upstash/ratelimit
//! 2.0.8 on a server.

use std::net::IpAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::{Request, StatusCode};
use ratelimit_core::{
    AnyAlgorithm, ConfigError, Decision, Gcra, Limits, ManualClock, RateLimiter, Store, SyncStore,
    TokioClock, Verdict,
};
use ratelimit_layers::DenialCache;
use ratelimit_memory::MemoryStore;
use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisServer;
use ratelimit_tower::{ClientAddress, RateLimitLayer, Waiter, matched_route};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::ServiceExt;

use crate::scripts::Ours;
use crate::{Error, chapter, policies};

/// The rows of a page's table of decisions: a time in milliseconds, and the cells after it.
fn rows(page: &str) -> Vec<(u64, Vec<String>)> {
    let text = chapter(page);
    let (_, table) = text.split_once("\n| time |").expect("a table of decisions");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let rows = rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
        let time = cells.next().expect("a time");
        let seconds = time.trim_end_matches(" s").parse().expect("a time in seconds");
        let ms = Duration::from_secs_f64(seconds).as_millis();
        (ms.try_into().expect("a short time"), cells.collect())
    });
    rows.collect()
}

/// Lets each limiter of a page's table decide its requests.
fn compare(page: &str, theirs: &mut [&mut dyn FnMut(u64) -> bool], ours: &Ours) {
    let rows = rows(page);
    assert!(rows.len() >= 3, "{page}");
    for (time_ms, cells) in rows {
        let told: Vec<usize> = cells.iter().map(|cell| cell.parse().expect("a number")).collect();
        let [requests, admitted @ .., by_ours] = &told[..] else { panic!("{page}: {cells:?}") };
        let by_theirs =
            theirs.iter_mut().map(|admits| (0..*requests).filter(|_| admits(time_ms)).count());
        assert_eq!(by_theirs.collect::<Vec<_>>(), admitted, "{page}, theirs at {time_ms} ms");
        assert_eq!(
            ours.count_admitted(time_ms, *requests),
            *by_ours,
            "{page}, ours at {time_ms} ms"
        );
    }
}

/// The limits of a page, by a bare key and without conditions.
fn of_page(page: &str) -> Result<Ours, Error> {
    let limits = policies::limits_of_chapter(page);
    let mut bare = Limits::<AnyAlgorithm>::builder();
    for limit in &limits {
        bare = bare.limit(limit.name(), *limit.algorithm());
    }
    Ok(Ours::new(bare.build()?))
}

#[test]
fn express_rate_limit_has_a_window_from_the_first_request() -> Result<(), Error> {
    let page = "moving/express-rate-limit.md";
    let (mut hits, mut reset_ms) = (0, 0);
    let mut theirs = |now_ms| {
        if reset_ms <= now_ms {
            (hits, reset_ms) = (0, now_ms + 900_000);
        }
        hits += 1;
        hits <= 100
    };
    compare(page, &mut [&mut theirs], &of_page(page)?);
    Ok(())
}

fn express(
    limits: Limits<AnyAlgorithm>,
    store: MemoryStore<AnyAlgorithm, ManualClock>,
) -> Result<Router, ConfigError> {
    let limiter = RateLimiter::new(limits, store).allow_unlimited(); // no limit applies to /health
    let layer = RateLimitLayer::new(limiter)
        .by("ip", ClientAddress::peer().ipv6_prefix(56)?)
        .by("path", matched_route());
    let app = Router::new().route("/health", get(|| async {})).route("/", get(|| async {}));
    Ok(app.layer(layer.checked()?))
}

#[tokio::test]
async fn a_path_that_express_would_skip_is_not_limited() -> Result<(), Error> {
    let limits = policies::limits_of_chapter("moving/express-rate-limit.md");
    let app = express(limits, MemoryStore::builder().clock(ManualClock::default()).build())?;
    let status = async |path: &str, nth: u8| {
        let mut request = Request::get(path).body(Body::empty())?;
        // One customer, by its /56.
        let peer: IpAddr = format!("2001:db8::{nth:x}:0:0:0:1").parse()?;
        request.extensions_mut().insert(ConnectInfo(std::net::SocketAddr::from((peer, 80))));
        Ok::<_, Error>(app.clone().oneshot(request).await?.status())
    };
    for nth in 0..100 {
        assert_eq!(status("/", nth).await?, StatusCode::OK);
    }
    assert_eq!(status("/", 100).await?, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(status("/health", 100).await?, StatusCode::OK);
    Ok(())
}

/// A bandwidth of bucket4j that refills greedily: its tokens, in parts of which one comes back per
/// millisecond and token of the refill.
struct Bandwidth {
    capacity: u64,
    refill: u64,
    period_ms: u64,
    parts: u64,
    at_ms: u64,
}

impl Bandwidth {
    const fn new(capacity: u64, refill: u64, period_ms: u64) -> Self {
        Self { capacity, refill, period_ms, parts: capacity * period_ms, at_ms: 0 }
    }

    fn refill(&mut self, now_ms: u64) {
        let full = self.capacity * self.period_ms;
        self.parts = full.min(self.parts + self.refill * (now_ms - self.at_ms));
        self.at_ms = now_ms;
    }
}

#[test]
fn bucket4j_has_all_bandwidths_or_none() -> Result<(), Error> {
    let page = "moving/bucket4j.md";
    let mut bucket = [Bandwidth::new(20, 10, 60_000), Bandwidth::new(50, 50, 3_600_000)];
    let mut theirs = |now_ms| {
        for bandwidth in &mut bucket {
            bandwidth.refill(now_ms);
        }
        let fits = bucket.iter().all(|bandwidth| bandwidth.parts >= bandwidth.period_ms);
        if fits {
            for bandwidth in &mut bucket {
                bandwidth.parts -= bandwidth.period_ms;
            }
        }
        fits
    };
    compare(page, &mut [&mut theirs], &of_page(page)?);
    Ok(())
}

fn probe<S: SyncStore<AnyAlgorithm>>(
    limiter: &RateLimiter<S>,
) -> Result<(bool, u64, Option<Duration>), S::Error> {
    let verdict = limiter.check_now("alice")?;
    let (consumed, remaining) = (verdict.allowed(), verdict.remaining());
    let wait = verdict.retry_after(); // until as many tokens are there
    Ok((consumed, remaining, wait))
}

#[test]
fn a_verdict_has_what_a_probe_of_bucket4j_has() -> Result<(), Error> {
    let ours = Ours::from_chapter("moving/bucket4j.md");
    for remaining in (0..20).rev() {
        assert_eq!(probe(&ours.at(0).limiter)?, (true, remaining, Some(Duration::ZERO)));
    }
    assert_eq!(probe(&ours.at(0).limiter)?, (false, 0, Some(Duration::from_secs(6))));
    Ok(())
}

/// The zone of nginx for one key: excess and rate in thousandths of a request.
struct Zone {
    rate: u64,
    burst: u64,
    excess_and_last_ms: Option<(u64, u64)>,
}

impl Zone {
    fn admits(&mut self, now_ms: u64) -> bool {
        let excess = self.excess_and_last_ms.map_or(0, |(excess, last_ms)| {
            (excess + 1_000).saturating_sub(self.rate * (now_ms - last_ms) / 1_000)
        });
        let admits = excess <= 1_000 * self.burst;
        if admits {
            self.excess_and_last_ms = Some((excess, now_ms));
        }
        admits
    }
}

#[test]
fn nginx_admits_one_more_than_its_burst() -> Result<(), Error> {
    let page = "moving/nginx.md";
    let mut zone = Zone { rate: 1_000, burst: 5, excess_and_last_ms: None };
    compare(page, &mut [&mut |now_ms| zone.admits(now_ms)], &of_page(page)?);
    // `1r/m` is 16 thousandths per second.
    let mut zone = Zone { rate: 1_000 / 60, burst: 0, excess_and_last_ms: None };
    let admitted = [0, 60_000, 62_499, 62_500].map(|now_ms| zone.admits(now_ms));
    assert_eq!(admitted, [true, false, false, true]);
    let ours = Ours::words("gcra 1/m burst 1");
    assert_eq!([0, 59_999, 60_000].map(|now_ms| ours.count_admitted(now_ms, 1)), [1, 0, 1]);
    Ok(())
}

type Waits = Waiter<MemoryStore<AnyAlgorithm, TokioClock>>;

async fn held_back(waiter: &Waits, ip: &IpAddr, max_wait: Duration) -> Option<Decision> {
    let admission = waiter.until_allowed(ip, max_wait).await; // an error: 429
    admission.ok()
}

#[tokio::test(start_paused = true)]
async fn a_waiter_holds_requests_back_as_nginx_does() -> Result<(), Error> {
    for (burst, max_wait_s, sent_at_s) in [(1, 5, [0, 1, 2, 3, 4, 5]), (3, 3, [0, 0, 0, 1, 2, 3])] {
        let limits =
            Limits::<AnyAlgorithm>::builder().limit("one", Gcra::per_second(1).burst(burst));
        let store = MemoryStore::builder().clock(TokioClock::default()).build();
        let waiter = Waiter::new(RateLimiter::new(limits.build()?, store));
        let (begin, ip) = (Instant::now(), IpAddr::from([192, 0, 2, 7]));
        let mut requests = JoinSet::new();
        for _ in 0..8 {
            let waiter = waiter.clone();
            requests.spawn(async move {
                let sent = held_back(&waiter, &ip, Duration::from_secs(max_wait_s)).await;
                sent.map(|_| begin.elapsed().as_secs())
            });
        }
        let mut sent: Vec<_> = requests.join_all().await.into_iter().flatten().collect();
        sent.sort_unstable();
        assert_eq!(sent, sent_at_s, "burst {burst}");
    }
    Ok(())
}

/// The sliding window of @upstash/ratelimit: the counts of its windows of 10 s, and until when its
/// cache denies, if it has one.
#[derive(Default)]
struct Upstash {
    counts: Vec<u64>,
    has_cache: bool,
    denies_until_ms: Option<u64>,
}

impl Upstash {
    fn admits(&mut self, now_ms: u64) -> bool {
        if self.denies_until_ms.is_some_and(|until_ms| now_ms <= until_ms) {
            return false;
        }
        let window = usize::try_from(now_ms / 10_000).expect("a small number");
        self.counts.resize(self.counts.len().max(window + 1), 0);
        let previous = window.checked_sub(1).map_or(0, |previous| self.counts[previous]);
        let overlaps = previous * (10_000 - now_ms % 10_000) / 10_000;
        let admits = overlaps + self.counts[window] < 10;
        if admits {
            self.counts[window] += 1;
        } else if self.has_cache {
            self.denies_until_ms = Some((now_ms / 10_000 + 1) * 10_000);
        }
        admits
    }
}

#[test]
fn the_cache_of_upstash_denies_until_the_window_ends() -> Result<(), Error> {
    let page = "moving/upstash.md";
    let mut plain = Upstash::default();
    let mut cached = Upstash { has_cache: true, ..Upstash::default() };
    compare(
        page,
        &mut [&mut |now_ms| plain.admits(now_ms), &mut |now_ms| cached.admits(now_ms)],
        &of_page(page)?,
    );
    Ok(())
}

#[test]
fn a_denial_charges_nothing_and_tokens_come_back_one_by_one() -> Result<(), Error> {
    let window = Ours::from_chapter("moving/upstash.md");
    for (cost, is_allowed) in [(9, true), (5, false), (1, true)] {
        assert_eq!(window.at(0).limiter.check_n_now("alice", cost)?.allowed(), is_allowed);
    }
    let bucket = Ours::words("token-bucket 5/10s burst 5");
    assert_eq!([0, 2_000].map(|now_ms| bucket.count_admitted(now_ms, 9)), [5, 1]);
    Ok(())
}

async fn upstash(limits: Limits<AnyAlgorithm>, url: &str) -> Result<Verdict, Error> {
    let store = DenialCache::new(RedisStore::builder().prefix("shop").connect(url).await?);
    let limiter = RateLimiter::new(limits, store);
    let verdict = limiter.check("alice").await?;
    Ok(verdict)
}

#[tokio::test]
async fn the_limiter_that_replaces_upstash_decides() -> Result<(), Error> {
    let server = RedisServer::start()?;
    let limits = policies::limits_of_chapter("moving/upstash.md");
    assert_eq!(upstash(limits, &server.url()).await?.remaining(), 9);
    Ok(())
}

/// The five numbers with which `CL.THROTTLE` would answer.
fn five(verdict: &Verdict) -> String {
    let seconds = |time: Duration| time.as_secs() + u64::from(time.subsec_nanos() > 0);
    let wait = verdict.retry_after().filter(|_| !verdict.allowed());
    let wait = wait.map_or("-1".to_owned(), |wait| seconds(wait).to_string());
    let reset = seconds(verdict.reset_after());
    let limited = u8::from(!verdict.allowed());
    format!("`{limited} {} {} {wait} {reset}`", verdict.limit(), verdict.remaining())
}

async fn throttle<S: Store<AnyAlgorithm>>(limiter: &RateLimiter<S>) -> Result<Verdict, S::Error> {
    let verdict = limiter.request("user123").cost(1).check().await?;
    Ok(verdict)
}

#[tokio::test]
async fn a_verdict_has_the_numbers_of_cl_throttle() -> Result<(), Error> {
    let ours = Ours::from_chapter("moving/redis-cell.md");
    for (time_ms, cells) in rows("moving/redis-cell.md") {
        let [requests, quantity, answer] = &cells[..] else { panic!("{cells:?}") };
        let limiter = &ours.at(time_ms).limiter;
        let mut last = None;
        for _ in 0..requests.parse::<u32>()? {
            last = Some(match quantity.parse()? {
                0 => limiter.request("user123").cost(0).peek_now()?,
                1 => throttle(limiter).await?,
                quantity => limiter.check_n_now("user123", quantity)?,
            });
        }
        assert_eq!(last.as_ref().map(five).as_ref(), Some(answer), "at {time_ms} ms");
    }
    Ok(())
}
