//! Runs clients, faults and the checkers of histories for so many minutes, in bounded memory, and
//! tells the counts of decisions and violations:
//!
//! ```console
//! $ cargo run --release -p ratelimit-simulation --example soak MINUTES [PART…]
//! ```
//!
//! | part | |
//! |---|---|
//! | `memory` | threads on the memory store: some order explains every answer |
//! | `redis` | tasks on a server of this machine: the same |
//! | `faults` | the same while replies are lost, connections cut, scripts flushed, and the server hangs |
//!
//! A violation prints what it takes to run it again, and the exit code is 1.

#![allow(clippy::expect_used, clippy::panic, reason = "a program for tests")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use ratelimit_core::{ManualClock, Timestamp};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::RedisStore;
use ratelimit_servers::{FaultProxy, RedisServer};
use ratelimit_simulation::{FaultyRounds, RoundsOutcome};
use ratelimit_testkit::{ConcurrentRun, limit_in_words};
use tokio::task::JoinSet;

const PARTS: [&str; 3] = ["memory", "redis", "faults"];
/// How many histories grow at the same time on a server.
const AT_ONCE: usize = 48;
/// How many rounds of each until the server forgets all keys.
const ROUNDS: usize = 200;

#[derive(Default)]
struct Counts {
    decisions: usize,
    histories: usize,
    undecided: usize,
    violations: usize,
}

impl Counts {
    fn violation(&mut self, part: &str, broken: &str) {
        self.violations += 1;
        println!("{part}: a violation: {broken}");
    }

    fn tell(&self, part: &str, took: Duration) {
        let Self { decisions, histories, undecided, violations } = self;
        println!(
            "{part}: {decisions} decisions in {histories} histories, {violations} violations, {undecided} histories not decided \
             within the steps, {:.1} minutes",
            took.as_secs_f64() / 60.0
        );
    }
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let minutes: Option<f64> = words.next().and_then(|minutes| minutes.parse().ok());
    let mut parts: Vec<String> = words.collect();
    let is_known = |part: &String| PARTS.contains(&part.as_str());
    let Some(minutes) = minutes.filter(|minutes| *minutes > 0.0 && parts.iter().all(is_known))
    else {
        println!("soak MINUTES [PART…], of {}", PARTS.join(", "));
        return ExitCode::from(2);
    };
    if parts.is_empty() {
        parts = PARTS.map(str::to_owned).to_vec();
    }
    #[allow(clippy::cast_precision_loss, reason = "three parts")]
    let each = Duration::from_secs_f64(minutes * 60.0 / parts.len() as f64);
    let mut violations = 0;
    for part in &parts {
        let begin = Instant::now();
        let counts = match part.as_str() {
            "memory" => memory(begin + each),
            part => on_a_server(begin + each, part == "faults"),
        };
        counts.tell(part, begin.elapsed());
        violations += counts.violations;
    }
    if violations > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// A seed that no other run had.
fn new_seed() -> u64 {
    let since = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    u64::try_from(since.as_nanos() % u128::from(u64::MAX)).expect("smaller")
}

/// Limits of all algorithms, alone and together. Some states expire all the time.
const LIMITS: [&[&str]; 9] = [
    &["gcra 10/s burst 5"],
    &["gcra 10/s burst 5", "gcra 1000/s burst 3", "gcra 3/s burst 2", "gcra 1/30d burst 4"],
    &["gcra 1000000/s burst 3", "token-bucket 3/us burst 40"],
    &["fixed-window 4/s", "first-request-window 5/s"],
    &["sliding-counter 6/s", "gcra 5/s burst 5 debt 9"],
    &["sliding-log 5/s", "window-log 6/s"],
    &["bucketed-window bucket 100ms rates 3/300ms, 6/s"],
    &["concurrency 3/2s", "token-bucket 7/s burst 3"],
    &["fixed-window 5/s count attempts", "sliding-log 4/s count attempts"],
];

fn memory(until: Instant) -> Counts {
    let (mut counts, mut seed) = (Counts::default(), new_seed());
    while Instant::now() < until {
        for texts in LIMITS {
            let named = |(n, text): (usize, &&str)| limit_in_words(&format!("l{n}"), text);
            let limits: Vec<_> = texts.iter().enumerate().map(named).collect();
            let clock = ManualClock::new(Timestamp::saturating_from_us(1_795_218_392_123_456));
            let store =
                MemoryStore::builder().capacity(1 << 14).shards(4).clock(clock.clone()).build();
            seed = seed.wrapping_add(1);
            let step = Duration::from_micros([4, 200_000][usize::from(seed % 2 == 0)]);
            let run = ConcurrentRun {
                seed,
                step,
                threads: 2,
                requests: 16,
                rounds: 500,
                ..ConcurrentRun::new(&limits)
            };
            match run.run(&store, &clock) {
                Ok(linearized) => {
                    counts.decisions += linearized.requests;
                    counts.undecided += linearized.undecided;
                }
                Err(unexplained) => {
                    counts.violation("memory", &format!("seed {seed}, {texts:?}: {unexplained}"));
                }
            }
            counts.histories += run.rounds;
        }
    }
    counts
}

fn on_a_server(until: Instant, is_faulty: bool) -> Counts {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = Arc::new(RedisServer::start().expect("a server"));
    let mut counts = Counts::default();
    let is_over = Arc::new(AtomicBool::new(false));
    let troubled = is_faulty.then(|| {
        let (server, is_over) = (server.clone(), is_over.clone());
        std::thread::spawn(move || trouble(&server, &is_over))
    });
    while Instant::now() < until {
        for outcome in runtime.block_on(histories(&server, is_faulty)) {
            match outcome {
                Ok(outcome) => {
                    counts.decisions += outcome.decisions;
                    counts.histories += outcome.rounds;
                    counts.undecided += outcome.undecided;
                }
                Err(broken) => {
                    counts.violation(if is_faulty { "faults" } else { "redis" }, &broken);
                }
            }
        }
        server.command(&["FLUSHALL"]).expect("it is up");
    }
    is_over.store(true, Ordering::SeqCst);
    if let Some(troubled) = troubled {
        troubled.join().expect("no panic");
    }
    counts
}

/// Many histories at once, by clients that have connections of their own if those fail.
async fn histories(server: &RedisServer, is_faulty: bool) -> Vec<Result<RoundsOutcome, String>> {
    let mut tasks = JoinSet::new();
    let first = usize::try_from(new_seed() % (1 << 40)).expect("small");
    let deadline = Duration::from_secs(if is_faulty { 1 } else { 10 });
    let shared = RedisStore::builder().deadline(deadline).connect(&server.url()).await;
    for client in 0..AT_ONCE {
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let store = if is_faulty {
            RedisStore::builder().deadline(deadline).connect_lazy(&proxy.url())
        } else {
            shared.clone()
        };
        let rounds = FaultyRounds::disturbed(store.expect("a store"), proxy, is_faulty);
        let own = (first..).skip(client).step_by(AT_ONCE);
        tasks.spawn(async move {
            rounds.run(own.take(if is_faulty { ROUNDS / 20 } else { ROUNDS })).await
        });
    }
    tasks.join_all().await
}

/// What befalls the server itself, until it is over.
fn trouble(server: &RedisServer, is_over: &AtomicBool) {
    let mut random = fastrand::Rng::new();
    while !is_over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(random.u64(..500)));
        match random.u8(..4) {
            0 => drop(server.command(&["SCRIPT", "FLUSH"])),
            1 => drop(server.command(&["CLIENT", "KILL", "TYPE", "normal"])),
            2 => {
                server.pause().expect("it runs");
                std::thread::sleep(Duration::from_millis(random.u64(..300)));
                server.resume().expect("it runs");
            }
            _ => {}
        }
    }
}
