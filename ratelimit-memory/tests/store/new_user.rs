//! A service as a new user would write it: what the shortest code says, compiles and does.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use ratelimit_core::{
    FixedWindow, Gcra, IdentifierValue, Limit, Limits, LimitsBuilder, ManualClock, Policy, Rate,
    RateLimiter, SlidingLog, SyncStore, Timestamp, TokenBucket,
};
use ratelimit_memory::MemoryStore;

type Tried = Result<(), Box<dyn Error>>;

#[test]
fn limits_of_different_kinds_mix_without_a_type_or_a_conversion() -> Tried {
    let limits = Limits::builder()
        .limit("burst", Gcra::per_second(10).burst(2))
        .by(["ip"])
        .limit("daily", FixedWindow::per_day(5))
        .by(["user"])
        .limit("hourly", "sliding-counter 100/h")
        .by(["ip", "user"])
        .limit("log", SlidingLog::new(Rate::new(50, Duration::from_secs(90))?)?)
        .by(["user"])
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    let ip: IpAddr = "192.0.2.7".parse()?;
    let verdict = limiter.check_now(&(("ip", ip), ("user", "alice")))?;
    let decisions = limiter.named(&verdict);
    let seen: Vec<_> = decisions.clone().map(|d| (d.name(), d.limit, d.remaining)).collect();
    assert_eq!(seen, [("burst", 2, 1), ("daily", 5, 4), ("hourly", 100, 99), ("log", 50, 49)]);
    let windows: Vec<_> = decisions.map(|d| d.window().map(|w| w.as_millis())).collect();
    assert_eq!(windows, [Some(200), Some(86_400_000), Some(3_600_000), Some(90_000)]);
    Ok(())
}

#[test]
fn a_verdict_names_only_the_limits_that_applied() -> Tried {
    let limits = Limits::builder()
        .limit("per-ip", "gcra 1/h burst 9")
        .by(["ip"])
        .limit("per-user", "gcra 1/h burst 8")
        .by(["user"])
        .limit("per-path", "gcra 1/h burst 7")
        .by(["path"])
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let names = |caller: &[(&str, &str)]| {
        let verdict = limiter.check_now(caller).expect("decides");
        limiter.named(&verdict).map(|d| format!("{} {}", d.name(), d.limit)).collect::<Vec<_>>()
    };
    assert_eq!(names(&[("user", "u")]), ["per-user 8"]);
    assert_eq!(names(&[("user", "u"), ("path", "p")]), ["per-user 8", "per-path 7"]);
    assert_eq!(names(&[("path", "p"), ("ip", "i")]), ["per-ip 9", "per-path 7"]);

    // The same of identifiers that have to be written as text first, and of what is awaited.
    let ip = IpAddr::from(Ipv6Addr::LOCALHOST);
    let verdict = limiter.check_now(&(("ip", ip), ("path", "p")))?;
    let decisions = limiter.named(&verdict);
    assert_eq!(
        decisions.by_name("per-path").map(|d| (d.limit, d.configured().name())),
        Some((7, "per-path"))
    );
    assert!(decisions.by_name("per-user").is_none());
    Ok(())
}

#[test]
fn a_verdict_names_its_limits_in_a_policy_of_very_many() -> Tried {
    let limits = (0..100).map(|n| {
        let gcra = Gcra::per_hour(1).burst(n + 1).build()?;
        Limit::new(&format!("limit-{n}"), gcra)?.by([format!("id-{n}")])
    });
    let limits = Limits::new(limits.collect::<Result<Vec<_>, _>>()?)?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let verdict = limiter.check_now(&[("id-70", "x"), ("id-99", "y")])?;
    let seen: Vec<_> = limiter.named(&verdict).map(|d| (d.name().to_string(), d.limit)).collect();
    assert_eq!(seen, [("limit-70".to_string(), 71), ("limit-99".into(), 100)]);
    Ok(())
}

/// Charges each caller once of a limit of 100 by `ip`, and says how much is left after each.
fn left_after_each(callers: &[&dyn ratelimit_core::Identifiers]) -> Vec<u64> {
    let limits = Limits::builder().limit("ip", "gcra 1/h burst 100").by(["ip"]).build();
    let limiter = RateLimiter::new(limits.expect("limits"), MemoryStore::new());
    let check = |caller: &&dyn ratelimit_core::Identifiers| {
        limiter.check_now(*caller).expect("decides").remaining()
    };
    callers.iter().map(check).collect()
}

#[test]
fn one_address_is_one_key_however_it_is_written_down() {
    let (ip, text) = (IpAddr::from([192, 0, 2, 7]), "192.0.2.7".to_string());
    let mapped = std::net::Ipv4Addr::new(192, 0, 2, 7).to_ipv6_mapped();
    let left = left_after_each(&[
        &[("ip", ip)],
        &[("ip", mapped)],
        &[("ip", &text)],
        &[("ip".to_string(), Cow::from(&*text))],
        &[("ip", &ip as &dyn IdentifierValue), ("user", &text)],
        &(("ip", ip), ("user", "alice")),
        &vec![("ip", text.clone())],
        &HashMap::from([("ip", text.as_str())]),
        &HashMap::from([("ip".to_string(), ip)]),
        &BTreeMap::from([("ip", text.clone())]),
    ]);
    assert_eq!(left, (90..100).rev().collect::<Vec<_>>());
}

#[test]
fn an_address_is_a_bare_key_alone_and_among_several_callers() -> Tried {
    let limits = Limits::new([Limit::new("l", Gcra::per_hour(1).burst(9).build()?)?])?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let (a, b) = (IpAddr::from([192, 0, 2, 7]), IpAddr::from([192, 0, 2, 8]));
    let mut left = Vec::new();
    limiter.check_each_now(&[&a, &b, &a], |place, decided| {
        left.push((place, decided.map(|v| v.remaining())));
    });
    assert_eq!(left, [(0, Ok(8)), (1, Ok(8)), (2, Ok(7))]);
    assert_eq!(limiter.check_now("192.0.2.7")?.remaining(), 6);
    Ok(())
}

#[test]
fn a_required_limit_is_met_by_an_address() -> Tried {
    let limits = Limits::builder()
        .limit("ip", "gcra 1/h burst 9")
        .by(["ip"])
        .required()
        .limit("user", "gcra 1/h burst 8")
        .by(["user"])
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let ip = IpAddr::from([192, 0, 2, 7]);
    assert_eq!(limiter.check_now(&[("ip", ip)])?.remaining(), 8);
    let error = limiter.check_now(&[("user", "alice")]).expect_err("no address").to_string();
    assert!(error.contains("\"ip\""), "{error}");
    Ok(())
}

#[test]
fn a_store_that_is_built_needs_no_type() -> Tried {
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().capacity(100).clock(clock).build();
    let limits = Limits::new([Limit::new("l", TokenBucket::per_minute(5).build()?)?])?;
    let limiter = RateLimiter::new(limits, store);
    // The first thing that is asked of the store is no decision: the limits alone say of what it is.
    assert!(limiter.store().is_empty());

    let limits = Limits::builder().limit("l", "gcra 1/s").build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::builder().build());
    assert_eq!(limiter.store().len(), 0);
    assert!(limiter.check_now("alice")?.allowed());
    Ok(())
}

fn capacity_of(limiter: &RateLimiter<impl SyncStore<Gcra>, Gcra>, name: &str) -> Option<u64> {
    let verdict = limiter.check_now("alice").ok()?;
    Some(limiter.named(&verdict).by_name(name)?.limit)
}

#[test]
fn one_kind_of_algorithm_is_built_from_text_and_by_numbers() -> Tried {
    let limits = LimitsBuilder::<Gcra>::new()
        .limit("a", "10/s burst 20")
        .limit("b", Gcra::per_hour(7))
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    assert_eq!((capacity_of(&limiter, "a"), capacity_of(&limiter, "b")), (Some(20), Some(7)));
    assert_eq!("gcra 10/s burst 20".parse::<Policy>()?.rate(), Some(Rate::per_second(10)?));
    Ok(())
}
