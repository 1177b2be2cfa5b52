//! The heap, in bytes, that a limiter uses for this many keys: `heap (ours|windows|governor) KEYS`.
//!
//! A program of its own, because what counts bytes is an allocator, and would slow down whatever else is
//! measured. `cargo run --profile bench -p benches -- memory` builds and asks it.
//!
//! It writes a line per size on the way: keys, bytes in use, the most bytes in use so far.

use std::error::Error;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::Duration;

use allocation_counter::measure;
use governor::{DefaultKeyedRateLimiter, Quota};
use ratelimit_core::{FixedWindow, Gcra, InMemory, Limit, Limits, Rate, RateLimiter};
use ratelimit_memory::MemoryStore;

/// The sizes that are reported, in hundredths of the full number.
const SIZES: [usize; 7] = [1, 3, 10, 20, 40, 70, 100];
/// One token an hour: no key expires while others come.
const PERIOD: Duration = Duration::from_secs(3_600);
/// No window ends while keys come.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3_600);

/// Has the limiter made and asked about key after key; only what it keeps is counted, and not the keys.
fn fill<L>(
    key_count: usize,
    make: impl FnOnce() -> Result<L, Box<dyn Error>>,
    check: impl Fn(&L, &str) -> bool,
) -> Result<(), Box<dyn Error>> {
    let mut result = None;
    let mut counted = measure(|| result = Some(make()));
    let limiter = result.ok_or("nothing was made")??;
    let (mut from, mut all_admitted) = (0, true);
    for to in SIZES.map(|hundredths| key_count / 100 * hundredths) {
        let before = counted.bytes_current.unsigned_abs();
        let more = measure(|| {
            for number in from..to {
                all_admitted &= check(&limiter, &format!("caller-{number:013}"));
            }
        });
        let most = counted.bytes_max.max(before + more.bytes_max);
        counted += more;
        counted.bytes_max = most;
        println!("{to} {} {most}", counted.bytes_current);
        from = to;
    }
    if all_admitted { Ok(()) } else { Err("a new key was denied".into()) }
}

fn ours<A: InMemory>(key_count: usize, algorithm: A) -> Result<(), Box<dyn Error>> {
    let limits = Limits::new([Limit::new("bench", algorithm)?])?;
    let make = || {
        let store = MemoryStore::builder().capacity(key_count).build();
        Ok(RateLimiter::new(limits, store))
    };
    fill(key_count, make, |limiter, key| {
        limiter.check_now(key).is_ok_and(|verdict| verdict.allowed())
    })
}

fn governor(key_count: usize) -> Result<(), Box<dyn Error>> {
    let quota = Quota::with_period(PERIOD).ok_or("a period above zero")?;
    let quota = quota.allow_burst(NonZeroU32::MIN.saturating_add(1));
    let make = || Ok(DefaultKeyedRateLimiter::<String>::keyed(quota));
    fill(key_count, make, |limiter, key| limiter.check_key(&key.to_owned()).is_ok())
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let rate = |most: u64, period: Duration| {
        Ok::<_, Box<dyn Error>>(Rate::per_us(most, u64::try_from(period.as_micros())?)?)
    };
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["ours", keys] => ours(keys.parse()?, Gcra::new(rate(1, PERIOD)?, 2)?),
        ["windows", keys] => ours(keys.parse()?, FixedWindow::new(rate(2, YEAR)?)?),
        ["governor", keys] => governor(keys.parse()?),
        _ => Err("write: heap ours KEYS, or: heap windows KEYS, or: heap governor KEYS".into()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("heap: {error}");
            ExitCode::FAILURE
        }
    }
}
