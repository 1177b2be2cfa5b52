//! The heap, in bytes per key, that limiters take on the way to so many keys, and the most that
//! they took until then: `cargo run --profile bench -p benches --example heap [KEYS]`.
//!
//! A program of its own, because what counts bytes is an allocator, and would slow down whatever
//! else is measured.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::Duration;

use allocation_counter::measure;
use governor::{DefaultKeyedRateLimiter, Quota};
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::{FixedWindow, Gcra, Limit, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;

/// The sizes that are reported, in hundredths of the full number.
const SIZES: [usize; 7] = [1, 3, 10, 20, 40, 70, 100];

/// Has the limiter made and asked about key after key; only what it keeps is counted, and not the
/// keys.
fn fill<L>(
    name: &str,
    key_count: usize,
    make: impl FnOnce() -> Result<L, Box<dyn Error>>,
    check: impl Fn(&L, &str) -> bool,
) -> Result<(), Box<dyn Error>> {
    let mut result = None;
    let mut counted = measure(|| result = Some(make()));
    let limiter = result.ok_or("nothing was made")??;
    let (mut from, mut all_admitted) = (0, true);
    for to in SIZES.map(|hundredths| key_count / 100 * hundredths) {
        let keys_so_far = f64::from(u32::try_from(to)?);
        let before = counted.bytes_current.unsigned_abs();
        let more = measure(|| {
            for number in from..to {
                all_admitted &= check(&limiter, &format!("caller-{number:013}"));
            }
        });
        let most = counted.bytes_max.max(before + more.bytes_max);
        counted += more;
        counted.bytes_max = most;
        let per_key = |bytes: u64| Duration::from_nanos(bytes).as_secs_f64() * 1e9 / keys_so_far;
        let (kept, most) = (per_key(counted.bytes_current.unsigned_abs()), per_key(most));
        println!("{name:<10} {to:>9} {kept:>8.1} {most:>8.1}");
        from = to;
    }
    if all_admitted { Ok(()) } else { Err("a new key was denied".into()) }
}

fn ours<A: InMemory>(name: &str, keys: usize, algorithm: A) -> Result<(), Box<dyn Error>> {
    let limits = Limits::new([Limit::new("bench", algorithm)?])?;
    let make = || {
        let store = MemoryStore::builder().capacity(keys).build();
        Ok(RateLimiter::new(limits, store))
    };
    fill(name, keys, make, |limiter, key| limiter.check_now(key).is_ok_and(|said| said.allowed()))
}

fn main() -> Result<(), Box<dyn Error>> {
    let keys = std::env::args().nth(1).map_or(Ok(10_000_000), |keys| keys.parse())?;
    let command = "cargo run --profile bench -p benches --example heap";
    println!("{command}, on {} {}", std::env::consts::ARCH, std::env::consts::OS);
    println!("{:<10} {:>9} {:>8} {:>8}", "", "keys", "bytes", "at most");
    // No key expires while others come, and no window ends.
    ours("gcra", keys, Gcra::new("1/h".parse()?, 2)?)?;
    ours("windows", keys, FixedWindow::new("2/365d".parse()?)?)?;
    let quota = Quota::with_period(Duration::from_secs(3_600)).ok_or("a period above zero")?;
    let quota = quota.allow_burst(NonZeroU32::MIN.saturating_add(1));
    let make = || Ok(DefaultKeyedRateLimiter::<String>::keyed(quota));
    fill("governor", keys, make, |limiter, key| limiter.check_key(&key.to_owned()).is_ok())
}
