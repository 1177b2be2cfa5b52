//! Whole requests in every mode, with every option of a store, and what then lies on the server;
//! requests of two limiters in one call.

use std::collections::BTreeSet;
use std::future::Future;

use futures_util::future::join_all;
use ratelimit_core::{RateLimiter, Record};
use ratelimit_redis::Tag;
use ratelimit_testkit::{AskedRequest, Calendar, RequestHarness, TestCaller, try_requests};

use crate::common::prelude::*;

/// Everything on a server as text: the time to live of each key, its name, and all that is in it.
const EVERYTHING: &str = "local all = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
    local kind, held = redis.call('TYPE', key).ok, {} \
    if kind == 'hash' then held = redis.call('HGETALL', key) \
    elseif kind == 'list' then held = redis.call('LRANGE', key, 0, -1) \
    elseif kind == 'zset' then held = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') \
    elseif kind == 'set' then held = redis.call('SMEMBERS', key) \
    else held = {redis.call('GET', key)} end \
    all[#all + 1] = {redis.call('PTTL', key), key, table.concat(held, ' ')} end return all";

/// The options by which stores lay their keys out, in turn.
const LAYOUTS: usize = 6;

/// Stores in a mode on one server, one after the other.
struct InMode<'s, M> {
    server: &'s RedisServer,
    connection: RedisConnection,
    runtime: Runtime,
    builder: fn() -> Builder<M>,
    opened: AtomicUsize,
}

impl<'s, M: Mode> InMode<'s, M> {
    fn new(server: &'s RedisServer, builder: fn() -> Builder<M>) -> Self {
        let runtime = driven_runtime();
        let connection = runtime.block_on(RedisConnection::open(&server.url(), PATIENCE));
        let connection = connection.expect("it is up");
        Self { server, connection, runtime, builder, opened: AtomicUsize::new(0) }
    }

    fn open(&self) -> (RedisStore<M>, String, usize) {
        let nth = self.opened.fetch_add(1, Ordering::SeqCst);
        let prefix = format!("p{nth}");
        let tag = match nth % 3 {
            0 => Tag::Identifier,
            1 => Tag::UpTo('-'),
            _ => Tag::Fixed("all".into()),
        };
        let builder = (self.builder)().prefix(&prefix).tag(tag).deadline(PATIENCE);
        let hides = nth % LAYOUTS > 2;
        let builder = if hides { builder.hide_identifiers("pepper") } else { builder };
        tell(self.server, &["FLUSHALL"]);
        (builder.over(self.connection.clone()).expect("options"), prefix, nth)
    }
}

/// A store, its prefix, and how many were opened before it.
type Opened<M> = (RedisStore<M>, String, usize);

/// What everything on the server of this store breaks.
fn look_at(
    server: &RedisServer,
    (prefix, nth): (&str, usize),
    texts: &BTreeSet<&str>,
) -> Result<(), String> {
    let all = tell(server, &["EVAL", EVERYTHING, "0"]);
    let tag_of = |key: &str| key.split(['{', '}']).nth(1).map(str::to_owned);
    let mut tag = None;
    for row in all.as_array() {
        let [ttl_ms, key, held] = row.as_array() else { return Err(format!("{row}")) };
        let ttl_ms = ttl_ms.as_integer().unwrap_or(-1);
        let (key, held) = (key.to_string(), held.to_string());
        // A record may stand for ever.
        let wrong = if ttl_ms < 0 && !key.contains("#records") {
            Some("never expires")
        } else if !key.contains(&format!("{prefix}:")) {
            Some("has another prefix")
        } else if nth % 3 == 2 && *tag.get_or_insert_with(|| tag_of(&key)) != tag_of(&key) {
            Some("has another tag")
        } else if nth % LAYOUTS > 2
            && texts.iter().any(|text| key.contains(text) || held.contains(text))
        {
            Some("shows an identifier")
        } else {
            None
        };
        if let Some(wrong) = wrong {
            return Err(format!("{key} {wrong}: {ttl_ms} ms, {held}"));
        }
    }
    Ok(())
}

macro_rules! harness {
    ($mode:ident, $cases:literal $(, $($more:tt)*)?) => {
        impl RequestHarness for InMode<'_, $mode> {
            type Store = Kept<$mode>;

            const CASES: u32 = $cases;

            $($($more)*)?

            fn store(&self) -> Kept<$mode> {
                Kept(self.open())
            }

            async fn ask(
                &self,
                limiter: &RateLimiter<Arc<Kept<$mode>>>,
                asked: &AskedRequest,
            ) -> Result<Verdict, RedisError> {
                asked.to(limiter).at(asked.at).apply(asked.op).await
            }

            async fn look(&self, store: &Kept<$mode>, identifiers: &BTreeSet<&str>) -> Result<(), String> {
                let (_, prefix, nth) = &store.0;
                // Of an identifier that was joined to others each part is one.
                let parts = identifiers.iter().flat_map(|text| text.split(['|', '\\']));
                let parts = parts.filter(|part| part.contains("sekret")).collect();
                look_at(self.server, (prefix, *nth), &parts)
            }

            fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
                self.runtime.block_on(future)
            }
        }
    };
}

/// A store that knows its options.
struct Kept<M: Mode>(Opened<M>);

impl<M: Mode> Store<AnyAlgorithm> for Kept<M> {
    type Error = RedisError;

    fn apply(
        &self,
        batch: &Batch<'_, AnyAlgorithm>,
    ) -> impl Future<Output = Result<Verdict, RedisError>> + Send {
        self.0.0.apply(batch)
    }
}

harness! { Lua, 96,
    const RECORDS: bool = true;

    async fn replace_record(
        &self,
        limiter: &RateLimiter<Arc<Kept<Lua>>>,
        caller: &TestCaller,
        limit: &str,
        record: Option<Record<AnyAlgorithm>>,
    ) -> Result<(), RedisError> {
        let limiter = RateLimiter::new(limiter.limits().clone(), &limiter.store().0.0);
        match record {
            Some(record) => limiter.replace_record(caller, limit, record).await.map(drop),
            None => limiter.clear_record(caller, limit).await.map(drop),
        }
    }
}
harness! { Cas, 64 }
harness! { Multi, 48,
    const CHANGES: bool = false;

    fn can_keep(limit: &Limit<AnyAlgorithm>) -> bool {
        limit.counts_attempts()
    }

    fn can_do(op: Op) -> bool {
        matches!(op, Op::Acquire | Op::Peek | Op::Reset)
    }
}

#[test]
fn requests_are_decided_by_name_and_leave_what_the_options_say() {
    let server = server();
    try_requests(&InMode::<Lua>::new(&server, RedisStore::builder))
        .unwrap_or_else(|failure| panic!("{failure}"));
    let cas = || RedisStore::builder().cas();
    try_requests(&InMode::<Cas>::new(&server, cas)).unwrap_or_else(|failure| panic!("{failure}"));
    let multi = || RedisStore::builder().multi();
    try_requests(&InMode::<Multi>::new(&server, multi))
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Two limits of one name, and the number of each.
type Twice = [(Limit<AnyAlgorithm>, u64); 2];

fn twice(name: &str, policy: impl Fn(u64) -> String) -> Twice {
    [3, 8].map(|count| (limit(name, &policy(count)), count))
}

#[tokio::test]
async fn requests_of_one_call_are_decided_each_by_its_own_numbers() {
    let server = server();
    let store = plain(&server).await;
    let days = Calendar::now();
    let windows = twice("window", |count| format!("fixed-window {}", days.rate(count)));
    // Nothing flows back in a year.
    let buckets = twice("bucket", |count| format!("gcra 1/3650d burst {count}"));
    let logs = twice("log", |count| format!("sliding-log {count}/3650d"));
    // One limit after the other, then two at once.
    let ways: [&[&Twice]; 5] =
        [&[&windows], &[&buckets], &[&logs], &[&windows, &buckets], &[&buckets, &logs]];
    for (nth, limits) in ways.into_iter().enumerate() {
        // The server loads the scripts with the first requests, which it gets once more: by then
        // others have come.
        let before = format!("before{nth}");
        for which in [0, 1] {
            let checks: Vec<_> =
                limits.iter().map(|of| (&of[which].0, before.as_str(), 1)).collect();
            let _ = apply_admitted(&store, &checks, Op::Acquire, None).await;
        }
        let (key, mut used, mut due) = (format!("k{nth}"), 0, Vec::new());
        let asked = (0..24_usize).map(|n| (usize::from(n % 5 < 2), 1 + n as u64 % 2));
        let asked: Vec<_> = asked.collect();
        for (which, cost) in &asked {
            let most = limits[0][*which].1;
            let allowed = used + cost <= most;
            used += if allowed { *cost } else { 0 };
            due.push((allowed, most, most.saturating_sub(used)));
        }
        let checks = asked.iter().map(|(which, cost)| {
            limits.iter().map(|of| (&of[*which].0, key.as_str(), *cost)).collect::<Vec<_>>()
        });
        let checks: Vec<_> = checks.collect();
        let said =
            join_all(checks.iter().map(|checks| apply(&store, checks, Op::Acquire, None))).await;
        for (n, (said, due)) in said.into_iter().zip(due).enumerate() {
            let said = said.expect("decided");
            for one in said.decisions() {
                assert_eq!((one.allowed, one.limit, one.remaining), due, "{nth}, {n}: {said:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_transaction_gives_each_key_a_life_once_the_one_before_has_ended() {
    let server = server();
    let store = plain(&server).await.in_mode::<Multi>();
    let live =
        NATIVE.map(|name| (limit(name, &format!("{name} 3/50ms count attempts")), &store, &server));
    let lives = live.iter().map(|(limit, store, server)| async move {
        for life in 0..3 {
            // By the server's clock the limit recovers while no request charges it.
            until(async || match peek(*store, limit, limit.name()).await {
                3 => Ok(()),
                left => Err(format!("{left} are left of {}", limit.name())),
            })
            .await;
            let asked = [(limit, limit.name(), 2)];
            let said = apply(*store, &asked, Op::Acquire, None).await.expect("decided");
            assert_eq!(
                (said.allowed(), said.remaining()),
                (true, 1),
                "{} in life {life}",
                limit.name()
            );
            for key in keys(server).iter().filter(|key| key.contains(limit.name())) {
                assert_ne!(number(server, &["PTTL", key]), -1, "{key} in life {life}");
            }
        }
    });
    join_all(lives).await;
}

/// The clock goes back after a refund of the newest entry.
#[tokio::test]
async fn after_a_refund_a_log_counts_no_entry_that_had_ended() {
    let server = server();
    let (store, log) = (plain(&server).await, limit("log", "sliding-log 5/s"));
    let one = [(&log, "a", 1)];
    let at_ms = |ms: u64| at(1_795_218_392_000_000 + ms * 1_000);
    for (ms, op) in [(0, Op::Acquire), (500, Op::Acquire), (600, Op::Acquire), (1_200, Op::Refund)]
    {
        let _ = apply_at(&store, &one, op, None, at_ms(ms)).await.expect("decides");
    }
    let verdict = apply_at(&store, &one, Op::Peek, None, at_ms(600)).await.expect("reads");
    assert_eq!(verdict.remaining(), 3);
}
