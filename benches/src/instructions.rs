//! Instructions per decision, counted under valgrind by gungraun: unlike nanoseconds they do not
//! depend on the load of the machine, so that a regression shows anywhere. `cargo bench -p benches`
//! runs it and prints each row beside the run before; `-- 'http*'` names some rows.
//!
//! Each row repeats one decision ten thousand times, the loop included: without its last four
//! digits, a count is the instructions per decision. All but `precise` and `http` read a clock that
//! stands still and costs next to nothing, because the cost of an operating system's clock depends
//! on the machine, and differs under valgrind.

#![allow(clippy::expect_used, missing_docs)]
#![allow(dead_code, unused_imports, reason = "its modules are those of `main.rs`")]

mod keys;
mod measure;
mod peers;
mod requests;

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::Duration;

use futures_util::FutureExt as _;
use governor::clock::FakeRelativeClock;
use gungraun::prelude::*;
use gungraun::{Callgrind, CallgrindMetrics, EventKind};
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::{
    AnyAlgorithm, Concurrency, FixedWindow, Gcra, Leased, Limit, Limits, ManualClock, Rate,
    RateLimiter, Record, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryStore, PreciseClock};

use keys::CallerKey;
use peers::{Allowance, BATCH, ByFunction, Governor, MeasuredLimiter, Ours, limits};
use requests::{OUTCOMES, RequestSender, bare};

const DECISIONS: usize = 10_000;

const MANY: Allowance = Allowance { period: Duration::from_secs(1), burst: NonZeroU32::MAX };
const FEW: Allowance = Allowance { period: Duration::from_secs(10_000), burst: NonZeroU32::MIN };
const HOUR_US: u64 = 3_600_000_000;

/// The decisions; how many of them admitted.
type DecisionRun = Box<dyn FnMut() -> usize>;

/// The keys of the decisions: one known key.
fn known_keys() -> Vec<CallerKey> {
    vec![CallerKey::new(0); DECISIONS]
}

/// The keys of the decisions: new ones.
fn new() -> Vec<CallerKey> {
    (1..=DECISIONS).map(CallerKey::new).collect()
}

/// Decides by a limiter that knows the key 0. So many go in one call.
fn decide(
    subject: impl MeasuredLimiter + 'static,
    batch: usize,
    keys: Vec<CallerKey>,
) -> DecisionRun {
    assert!(subject.check(&CallerKey::new(0)), "the first charge is admitted");
    Box::new(move || match batch {
        1 => keys.iter().filter(|key| subject.check(key)).count(),
        _ => keys.chunks(batch).map(|keys| subject.check_all(keys)).sum(),
    })
}

fn still() -> ManualClock {
    ManualClock::new(Timestamp::saturating_from_us(1_000_000))
}

fn ours(allowance: Allowance) -> Ours<ManualClock> {
    Ours::new(allowance, still(), 1_000).expect("a limit")
}

fn precise() -> DecisionRun {
    let ours = Ours::new(MANY, PreciseClock::new(), 1_000).expect("a limit");
    decide(ours, 1, known_keys())
}

fn governor() -> DecisionRun {
    let governor = Governor::with_clock(MANY, FakeRelativeClock::default()).expect("a limit");
    decide(governor, 1, known_keys())
}

type Limiter<A> = RateLimiter<MemoryStore<A, ManualClock>, A>;

/// Ours with limits of any kind, all of which apply to every key, and with room for new keys.
fn limiter<A: InMemory>(algorithms: impl IntoIterator<Item = A>) -> Limiter<A> {
    limiter_by(limits(algorithms).expect("limits"))
}

fn limiter_by<A: InMemory>(limits: Limits<A>) -> Limiter<A> {
    RateLimiter::new(limits, MemoryStore::builder().capacity(100_000).clock(still()).build())
}

fn charge<A: InMemory + 'static>(
    algorithms: impl IntoIterator<Item = A>,
    keys: Vec<CallerKey>,
) -> DecisionRun {
    let limiter = limiter(algorithms);
    let charge = move |key: &CallerKey| {
        black_box(&limiter.check_now(key.as_str())).as_ref().is_ok_and(Verdict::allowed)
    };
    decide(ByFunction(charge), 1, keys)
}

fn gcra() -> Gcra {
    Gcra::new(Rate::per_us(1, 1_000_000).expect("a rate"), u32::MAX.into()).expect("a limit")
}

fn window() -> FixedWindow {
    FixedWindow::new(Rate::per_us(4_000_000_000, HOUR_US).expect("a rate")).expect("a limit")
}

/// States in a bucket of the table and in a shard.
fn mixed() -> DecisionRun {
    let limits =
        ["gcra 1000000/s burst 4000000", "fixed-window 4000000000/h", "sliding-counter 1000000/h"];
    charge(limits.map(|words| words.parse::<AnyAlgorithm>().expect("an algorithm")), known_keys())
}

fn peek() -> DecisionRun {
    let limiter = limiter([gcra()]);
    let _admitted = limiter.check_now(CallerKey::new(0).as_str()).expect("decides");
    let peek = move |key: &CallerKey| {
        black_box(&limiter.request(key.as_str()).peek_now()).as_ref().is_ok_and(Verdict::allowed)
    };
    decide(ByFunction(peek), 1, known_keys())
}

/// By the numbers of the request, which are the limit's own.
fn numbers() -> DecisionRun {
    let limit = Limit::new("limit", gcra()).and_then(|limit| limit.accepts_up_to(gcra()));
    let limiter = limiter_by(limit.and_then(|limit| Limits::new([limit])).expect("limits"));
    let numbers = limiter.limits().numbers([("limit", gcra())]).expect("numbers");
    let charge = move |key: &CallerKey| {
        let said = limiter.request(key.as_str()).numbers(black_box(&numbers)).check_now();
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    };
    decide(ByFunction(charge), 1, known_keys())
}

/// A limit that looks for records. This caller has one.
fn overridable(recorded: usize) -> DecisionRun {
    let limit = Limit::new("limit", gcra());
    let limiter =
        limiter_by(limit.and_then(|limit| Limits::new([limit.overridable()])).expect("limits"));
    let (caller, record) = (CallerKey::new(recorded), Record::numbers(gcra()).forever());
    let set = limiter.set_record(caller.as_str(), "limit", record).now_or_never();
    let _before = set.expect("without waiting").expect("a record");
    let charge = move |key: &CallerKey| {
        black_box(&limiter.check_now(key.as_str())).as_ref().is_ok_and(Verdict::allowed)
    };
    decide(ByFunction(charge), 1, known_keys())
}

fn lease() -> DecisionRun {
    let rate = Rate::per_us(100, HOUR_US).expect("a rate");
    let limiter = limiter([Concurrency::new(rate).expect("a limit")]);
    let lease = move |key: &CallerKey| {
        let leased = black_box(limiter.request(key.as_str()).lease_now());
        leased.is_ok_and(|leased| matches!(leased, Leased::Granted(_)))
    };
    decide(ByFunction(lease), 1, known_keys())
}

/// Requests of one peer, after one that makes its state.
fn requests(mut send: RequestSender, peer: &str, allowed: bool) -> DecisionRun {
    let (peer, status) =
        (peer.parse().expect("an address"), OUTCOMES[usize::from(!allowed)].status);
    let _admitted = send(peer);
    Box::new(move || (0..DECISIONS).filter(|_| send(peer) == Some(status)).count())
}

fn layer(allowed: bool, fields: bool, immediate: bool) -> RequestSender {
    requests::ours(&OUTCOMES[usize::from(!allowed)], fields, immediate).expect("a layer")
}

fn tower_governor(fields: bool) -> RequestSender {
    requests::governor(&OUTCOMES[0], fields).expect("a layer")
}

const V4: &str = "198.51.100.77:4711";
const V6: &str = "[2001:db8:85a3:12::7]:4711";

#[library_benchmark]
#[bench::allowed(decide(ours(MANY), 1, known_keys()))]
#[bench::batch(decide(ours(MANY), BATCH, known_keys()))]
#[bench::precise(precise())]
#[bench::governor(governor())]
#[bench::peek(peek())]
#[bench::new(charge([gcra()], new()))]
#[bench::limits(charge([gcra(); 3], known_keys()))]
#[bench::mixed(mixed())]
#[bench::new_limits(charge([gcra(); 3], new()))]
#[bench::window(charge([window()], known_keys()))]
#[bench::new_window(charge([window()], new()))]
#[bench::numbers(numbers())]
#[bench::overridable(overridable(1))]
#[bench::record(overridable(0))]
#[bench::lease(lease())]
fn memory(mut run: DecisionRun) -> DecisionRun {
    assert_eq!(run(), DECISIONS);
    run
}

#[library_benchmark]
#[bench::denied(decide(ours(FEW), 1, known_keys()))]
fn denied(mut run: DecisionRun) -> DecisionRun {
    assert_eq!(run(), 0);
    run
}

#[library_benchmark]
#[bench::bare(requests(bare(), V4, true))]
#[bench::layer(requests(layer(true, true, true), V4, true))]
#[bench::plain(requests(layer(true, false, true), V4, true))]
#[bench::plain_v6(requests(layer(true, false, true), V6, true))]
#[bench::awaited(requests(layer(true, true, false), V4, true))]
#[bench::denied(requests(layer(false, true, true), V4, false))]
#[bench::governor(requests(tower_governor(true), V4, true))]
#[bench::governor_plain(requests(tower_governor(false), V4, true))]
fn http(mut run: DecisionRun) -> DecisionRun {
    assert_eq!(run(), DECISIONS);
    run
}

library_benchmark_group!(name = instructions, benchmarks = [memory, denied, http]);
main!(
    config = LibraryBenchmarkConfig::default().tool(
        Callgrind::with_args(["--cache-sim=no"])
            .format([CallgrindMetrics::SingleEvent(EventKind::Ir)])
    ),
    library_benchmark_groups = instructions
);
