//! The policies that chapters show: each document reads, and says what the Rust beside it says.

use ratelimit_core::store::{LogStore, RecordStore};
use ratelimit_core::{
    AnyAlgorithm, FirstRequestWindow, FixedWindow, Gcra, Limits, RateLimiter, Record, SlidingLog,
    Store, Timestamp, TokenBucket, Verdict, WindowLog,
};
use ratelimit_memory::MemoryStore;

use crate::{Error, blocks, chapter};

fn incr_expire() -> Result<Limits<AnyAlgorithm>, Error> {
    let limits = Limits::builder().limit("login", FirstRequestWindow::per_minute(10)).build()?;
    Ok(limits)
}

async fn list<S: LogStore<AnyAlgorithm>>(
    store: S,
) -> Result<(Verdict, Limits<AnyAlgorithm>), Error> {
    let limits = Limits::builder().limit("downloads", WindowLog::per_minute(10)).build()?;
    let limiter = RateLimiter::new(limits, store);

    let verdict = limiter.request("alice").metadata(b"192.0.2.7").check().await?;
    for (limit, entries) in limiter.logged("alice").await? {
        println!("{limit}: {} requests", entries.len());
    }
    Ok((verdict, limiter.limits().clone()))
}

fn sorted_set() -> Result<Limits<AnyAlgorithm>, Error> {
    let limits = Limits::builder().limit("api", SlidingLog::per_minute(10)).build()?;
    Ok(limits)
}

fn per_second_keys() -> Result<Limits<AnyAlgorithm>, Error> {
    let windows = "bucketed-window bucket 1s rates 1000/1s, 5000/10s, 7000/15s";
    let limits = Limits::<AnyAlgorithm>::builder().limit("api", windows).build()?;
    Ok(limits)
}

fn several_limits() -> Result<Limits<AnyAlgorithm>, Error> {
    let limits = Limits::builder()
        .limit("daily", FirstRequestWindow::per_day(100))
        .limit("burst", FirstRequestWindow::per_second(2))
        .build()?;
    Ok(limits)
}

async fn token_bucket<S: Store<AnyAlgorithm>>(
    store: S,
) -> Result<(Verdict, Limits<AnyAlgorithm>), Error> {
    let limits = Limits::builder().limit("api", TokenBucket::per_minute(15).burst(5)).build()?;
    let limiter = RateLimiter::new(limits, store);

    let verdict = limiter.request("alice").cost(100).force().await?; // charges what is left, and says so
    Ok((verdict, limiter.limits().clone()))
}

fn conditions() -> Result<Limits<AnyAlgorithm>, Error> {
    let limits = Limits::builder()
        .limit("login", FixedWindow::per_minute(5))
        .by(["ip"])
        .when("method", "POST")
        .when("path", ["/login", "/signup/*"])
        .limit("others", Gcra::per_second(10))
        .by(["ip"])
        .when_not("path", ["/login", "/signup/*", "/health"])
        .build()?;
    Ok(limits)
}

#[test]
fn the_conditions_of_the_chapter_on_policies_are_those_of_its_document() -> Result<(), Error> {
    let documents = blocks(&chapter("policies.md"), "toml");
    let document = documents.iter().find(|document| document.contains("\"/signup/*\""));
    assert_eq!(
        toml::from_str::<Limits<AnyAlgorithm>>(document.expect("it is there"))?,
        conditions()?
    );
    Ok(())
}

fn numbers() -> Result<(), Error> {
    let limits = Limits::builder()
        .limit("api", Gcra::per_second(10).burst(20)) // of customers without numbers of their own
        .accepts_up_to(Gcra::per_second(1_000).burst(2_000)) // in a document, max
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    // Once per plan or customer, such as when your database tells it:
    let gold = limiter.limits().parse_numbers([("api", "100/s burst 200")])?;

    let verdict = limiter.request("alice").numbers(&gold).check_now()?;
    assert_eq!((verdict.limit(), verdict.remaining()), (200, 199));
    Ok(())
}

#[test]
fn a_customer_has_its_numbers() -> Result<(), Error> {
    numbers()
}

fn billed() -> Result<Limits<AnyAlgorithm>, Error> {
    let billed = FixedWindow::per_month(1_000).zone("Europe/Berlin").anchor(15).debt(100);
    let limits = Limits::builder().limit("plan", billed).by(["customer"]).build()?;
    Ok(limits)
}

fn by_billing_day() -> Result<Limits<AnyAlgorithm>, Error> {
    let mut limits = Limits::builder();
    for day in 1..=31 {
        let billed = FixedWindow::per_month(1_000).zone("Europe/Berlin").anchor(day);
        limits = limits.limit(&format!("plan-{day}"), billed).by(["customer"]);
        limits = limits.when("billing-day", day.to_string());
    }
    Ok(limits.build()?)
}

#[test]
fn each_customer_has_a_billing_day_of_its_own() -> Result<(), Error> {
    // The 20th of May 2026, 12:00 in UTC.
    let noon = Timestamp::from_us(1_779_278_400_000_000).expect("a time");
    let limiter = RateLimiter::new(by_billing_day()?, MemoryStore::new());
    for (customer, day, days) in [("alice", "15", 26), ("bob", "31", 11), ("carol", "20", 31)] {
        let caller = [("customer", customer), ("billing-day", day)];
        let verdict = limiter.request(&caller).at(noon).check_now()?;
        // In Berlin it is 14:00.
        let hours = verdict.reset_after().as_secs() / 3_600;
        let names: Vec<_> = limiter.named(&verdict).map(|one| one.name().to_owned()).collect();
        assert_eq!(names, [format!("plan-{day}")]);
        assert_eq!((hours + 14, verdict.remaining()), (24 * days, 999), "{customer}");
    }
    // Without its billing day, a customer is refused, not unlimited.
    assert!(limiter.check_now(&[("customer", "alice")]).is_err());
    // Numbers have the anchor of their limit.
    let max = FixedWindow::per_month(9_000).anchor(15);
    let plan = FixedWindow::per_month(1_000).anchor(15);
    let plan: Limits<AnyAlgorithm> =
        Limits::builder().limit("plan", plan).accepts_up_to(max).build()?;
    assert!(plan.numbers([("plan", FixedWindow::per_month(5_000).anchor(15))]).is_ok());
    let refused = plan.numbers([("plan", FixedWindow::per_month(5_000).anchor(20))]);
    assert!(refused.is_err_and(|error| error.to_string().contains("another algorithm or window")));
    Ok(())
}

#[test]
fn the_calendar_of_the_document_is_that_of_the_rust_beside_it() -> Result<(), Error> {
    let text = chapter("customers.md");
    let mut documents = blocks(&text, "toml").into_iter();
    let document = documents.find(|text| text.contains("/month")).expect("a document");
    assert_eq!(toml::from_str::<Limits<AnyAlgorithm>>(&document)?, billed()?);
    Ok(())
}

/// Records of single callers, in the chapter on policies.
async fn records<S: RecordStore<AnyAlgorithm, Error: std::error::Error>>(
    store: S,
    tomorrow: Timestamp,
) -> Result<Option<Record<AnyAlgorithm>>, Error> {
    let limits =
        Limits::builder().limit("api", Gcra::per_second(10).burst(20)).overridable().build()?;
    let limiter = RateLimiter::new(limits, store);

    let double: AnyAlgorithm = "gcra 20/s burst 40".parse()?;
    limiter.set_record("alice", "api", Record::numbers(double).until(tomorrow)).await?;
    assert_eq!(limiter.check("alice").await?.limit(), 40);

    limiter.replace_record("alice", "api", Record::blocked().forever()).await?;
    assert!(!limiter.check("alice").await?.allowed());

    limiter.replace_record("alice", "api", Record::exempt().until(tomorrow)).await?;
    let before = limiter.clear_record("alice", "api").await?;
    Ok(before)
}

#[tokio::test]
async fn records_do_what_the_chapter_says() -> Result<(), Error> {
    let cleared = records(MemoryStore::new(), Timestamp::MAX).await?;
    assert!(cleared.is_some_and(|record| record.is_exempt()));
    Ok(())
}

/// The limits of a chapter, as its document has them.
pub(crate) fn limits_of_chapter(path: &str) -> Limits<AnyAlgorithm> {
    let documents = blocks(&chapter(path), "toml");
    let policy = documents.iter().find(|document| document.contains("[[limit]]"));
    toml::from_str(policy.expect("a policy")).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[tokio::test]
async fn each_document_says_what_the_rust_beside_it_says() -> Result<(), Error> {
    let (logged, in_list) = list(MemoryStore::new()).await?;
    assert_eq!(logged.remaining(), 9);
    let (forced, in_bucket) = token_bucket(MemoryStore::new()).await?;
    assert_eq!(forced.remaining(), 0);
    for (path, limits) in [
        ("scripts/incr-expire.md", incr_expire()?),
        ("scripts/list.md", in_list),
        ("scripts/per-second-keys.md", per_second_keys()?),
        ("scripts/several-limits.md", several_limits()?),
        ("scripts/sorted-set.md", sorted_set()?),
        ("scripts/token-bucket.md", in_bucket),
    ] {
        assert_eq!(limits_of_chapter(path), limits, "{path}");
    }
    // Without Rust beside it.
    assert!(
        ["policies.md", "outages.md"].iter().all(|path| limits_of_chapter(path).iter().len() > 0)
    );
    Ok(())
}
