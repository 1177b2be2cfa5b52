//! A store with a given clock, which needs nothing of the system. It runs on
//! `wasm32-unknown-unknown`, where the standard library has no time and no threads; `scripts/test
//! wasm` builds and runs it there.
//!
//! ```console
//! $ cargo run -p ratelimit-memory --example given_clock
//! ```

use std::error::Error;
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, Clock, Gcra, Limit, Limits, ManualClock, RateLimiter, SlidingLog, SyncStore,
    Timestamp, Verdict,
};
use ratelimit_memory::MemoryStore;

/// Checks that every key is admitted what its limit says, in buckets and in shards, and again an
/// hour later.
fn admits_what_it_says(policy: AnyAlgorithm) -> Result<(), Box<dyn Error>> {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_795_218_392_123_456));
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = RateLimiter::new(Limits::new([Limit::new("l", policy)?])?, store);
    for hour in 0..3 {
        for n in 0..5_000 {
            let admitted = (0..3).map(|_| limiter.check_now(&n.to_string()));
            let admitted = admitted.collect::<Result<Vec<_>, _>>()?;
            if admitted.iter().map(Verdict::allowed).ne([true, true, false]) {
                return Err(format!("hour {hour}, key {n}: {admitted:?}").into());
            }
        }
        clock.advance(Duration::from_secs(3_600));
    }
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    admits_what_it_says(Gcra::new("2/h".parse()?, 2)?.into())?;
    admits_what_it_says(SlidingLog::new("2/h".parse()?)?.into())?;
    // Several keys together, of limits in buckets and in shards.
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().capacity(64).clock(clock.clone()).build::<AnyAlgorithm>();
    let one = Limit::new("one", Gcra::new("1/s".parse()?, 3)?.into())?;
    let other = Limit::new("other", SlidingLog::new("2/s".parse()?)?.into())?;
    let checks = [&one, &other].map(|limit| Check { limit, key: "a", cost: 1 });
    let batch = Batch::new(&checks)?;
    let allowed = [Op::Acquire, Op::Acquire, Op::Peek, Op::Acquire]
        .map(|op| store.apply_now(&batch.op(op)).is_ok_and(|verdict| verdict.allowed()));
    if allowed == [true, true, false, false] && clock.now() == Timestamp::ZERO {
        Ok(())
    } else {
        Err(format!("{allowed:?}").into())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    run()
}

#[test]
fn it_runs() -> Result<(), Box<dyn Error>> {
    main()
}
