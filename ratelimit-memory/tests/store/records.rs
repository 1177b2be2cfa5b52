//! Records of callers in memory: seen by every path from the moment that they are set, and bounded.

use std::sync::atomic::{AtomicU64, Ordering};

use ratelimit_core::store::{Batch, Check, RecordStore};
use ratelimit_core::{
    AnyAlgorithm, Limits, RateLimiter, Record, Refusal, SyncStore, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

use crate::common::{BEGIN, limit, limiter, store};

fn blocked() -> Record<AnyAlgorithm> {
    Record::blocked().forever()
}

/// Gives a caller a record and clears it again and again, while others decide. A decision that
/// begins after a change and ends before the next one sees that change.
fn sees_each_change(
    words: &[&str],
    record: &Record<AnyAlgorithm>,
    is_by_record: impl Fn(&Verdict) -> bool + Sync,
) {
    const CHANGES: u64 = 25;
    let named = words.iter().enumerate();
    let limits: Vec<_> =
        named.map(|(n, words)| limit(&format!("l{n}"), words).overridable()).collect();
    let store: MemoryStore = MemoryStore::builder().shards(2).build();
    // Odd while a record changes.
    let phase = AtomicU64::new(0);
    let (seen_record, seen_none) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let check = |limit| Check { limit, key: "alice", cost: 1 };
                let checks: Vec<_> = limits.iter().map(check).collect();
                let batch = Batch::new(&checks).expect("distinct");
                while phase.load(Ordering::SeqCst) <= 4 * CHANGES {
                    let before = phase.load(Ordering::SeqCst);
                    let by_record = is_by_record(&store.apply_now(&batch).expect("decides"));
                    let after = phase.load(Ordering::SeqCst);
                    if before == after && before.is_multiple_of(2) {
                        let has_record = before % 4 == 2;
                        assert_eq!(by_record, has_record, "{words:?}, phase {before}");
                        let seen = if has_record { &seen_record } else { &seen_none };
                        seen.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let last = limits.last().expect("some");
        for change in 0..2 * CHANGES {
            let [old, new] = [None, Some(record.clone())];
            let (old, new) = if change % 2 == 0 { (old, new) } else { (new, old) };
            phase.fetch_add(1, Ordering::SeqCst);
            let changed = store.exchange_record(last, "alice", old.as_ref(), new.as_ref());
            assert_eq!(block_on(changed), Ok(true));
            phase.fetch_add(1, Ordering::SeqCst);
            // Until a decision lies between this change and the next. None may come if a thread
            // has panicked.
            let seen = if new.is_some() { &seen_record } else { &seen_none };
            let before = seen.load(Ordering::Relaxed);
            let mut turns = 0..1_000_000;
            while seen.load(Ordering::Relaxed) == before && turns.next().is_some() {
                std::thread::yield_now();
            }
        }
        phase.fetch_add(1, Ordering::SeqCst);
    });
    assert!(seen_record.into_inner() >= CHANGES && seen_none.into_inner() >= CHANGES);
}

#[test]
fn every_path_sees_a_record_from_the_moment_that_it_is_set() {
    let blocks = |words: &[&str]| sees_each_change(words, &blocked(), |said| !said.allowed());
    blocks(&["gcra 1000000000/s burst 1000000000"]);
    blocks(&["fixed-window 1000000000/d"]);
    blocks(&["gcra 1000000000/s burst 1000000000"; 2]);
    blocks(&["gcra 1000000000/s burst 1000000000", "sliding-counter 1000000000/m"]);
    for (words, numbers) in [
        ("gcra 1000000000/s burst 1000000000", "gcra 1000000000/s burst 999999999"),
        ("fixed-window 1000000000/d", "fixed-window 999999999/d"),
    ] {
        let record = Record::numbers(numbers.parse().expect("numbers")).forever();
        sees_each_change(&[words], &record, |said| said.limit() == 999_999_999);
    }
}

#[test]
fn no_record_is_evicted_and_ended_ones_make_room() {
    let api = limit("api", "gcra 10/s").overridable();
    let (store, clock) = store::<AnyAlgorithm>(|builder| builder.records(2));
    let set = |key: &str, record: Record<AnyAlgorithm>| {
        block_on(store.exchange_record(&api, key, None, Some(&record)))
    };
    let end = BEGIN.saturating_add_us(1_000_000);
    assert_eq!(set("alice", Record::blocked().until(end)), Ok(true));
    assert_eq!(set("bob", blocked()), Ok(true));
    assert_eq!(set("carol", blocked()), Err(MemoryError::Records { most: 2 }));
    // Of what would do nothing the remedy is another one.
    let refused = set("carol", Record::exempt().until(BEGIN)).expect_err("it has ended");
    assert!(refused.to_string().contains("give a later end in microseconds"), "{refused}");
    assert_eq!(store.record_count(), 2);
    clock.set(end);
    assert_eq!(set("carol", blocked()), Ok(true));
    assert_eq!(store.record_count(), 2);
    assert_eq!(block_on(store.record(&api, "alice")), Ok(None));
    assert_eq!(block_on(store.record(&api, "bob")), Ok(Some(blocked())));
}

#[test]
fn callers_that_share_a_state_in_a_full_store_stay_blocked() {
    let api = limit("api", "gcra 1/h burst 4").overridable();
    let (limiter, _) = limiter([api.clone()], |builder| builder.capacity(1));
    let _ = limiter.check_now("first").expect("decides");
    block_on(limiter.set_record("bob", "api", blocked())).expect("set");
    let both = ["alice", "bob"].map(|key| Check { limit: &api, key, cost: 1 });
    let verdict = limiter.store().apply_now(&Batch::new(&both).expect("distinct"));
    assert!(!verdict.expect("decides").allowed());
    assert!(limiter.check_now("alice").expect("decides").allowed());
    assert!(!limiter.check_now("bob").expect("decides").allowed());
}

#[test]
fn a_record_that_lowers_takes_nothing_away_unless_it_replaces() {
    let limits = Limits::builder()
        .limit("api", "gcra 10/s burst 20")
        .overridable()
        .limit("fixed", "fixed-window 5/m")
        .build();
    let limiter = RateLimiter::new(limits.expect("limits"), MemoryStore::new());
    let numbers =
        |words: &str| Record::numbers(words.parse::<AnyAlgorithm>().expect(words)).forever();
    let set = |record| block_on(limiter.set_record("alice", "api", record));
    assert_eq!(set(numbers("gcra 5/s burst 20")), Ok(None));
    // Nothing was raised yet.
    assert!(set(blocked()).is_ok() && set(numbers("gcra 20/s burst 40")).is_ok());
    for lower in [numbers("gcra 15/s burst 40"), numbers("gcra 20/s burst 39"), blocked()] {
        let Err(MemoryError::Refused(Refusal::Record { limit, why })) = set(lower.clone()) else {
            panic!("{lower:?}");
        };
        assert!(limit == "api" && why.contains("replace_record()"), "{why}");
    }
    assert!(set(numbers("gcra 21/s burst 40")).is_ok());
    assert!(set(Record::exempt().forever()).is_ok());
    // As generous, but not for as long.
    let end = Timestamp::saturating_from_us(4_000_000_000_000_000);
    assert!(set(Record::exempt().until(end)).is_err());
    let replaced = block_on(limiter.replace_record("alice", "api", blocked()));
    assert_eq!(replaced, Ok(Some(Record::exempt().forever())));
    let told = block_on(limiter.records("alice"));
    assert_eq!(told, Ok(vec![("api", blocked())]));
    let seen = numbers("gcra 21/s burst 40");
    let late = limiter.set_record_if_unchanged("alice", "api", Some(&seen), numbers("gcra 1/s"));
    assert_eq!(block_on(late), Ok(false));
    assert_eq!(block_on(limiter.clear_record("alice", "api")), Ok(Some(blocked())));
    assert_eq!(block_on(limiter.records("alice")), Ok(Vec::new()));
}

#[test]
fn a_record_that_does_not_fit_its_limit_is_refused_by_name() {
    let limits = Limits::builder()
        .limit("api", "gcra 10/s")
        .overridable()
        .limit("fixed", "fixed-window 5/m")
        .limit("tries", "gcra 5/m")
        .count_attempts()
        .overridable()
        .build();
    let limiter = RateLimiter::new(limits.expect("limits"), MemoryStore::new());
    let numbers = |words: &str| Record::numbers(words.parse().expect(words)).forever();
    for (name, record, due) in [
        ("api", numbers("fixed-window 9/s"), "another algorithm or window"),
        ("tries", numbers("gcra 9/s debt 3"), "counts attempts"),
        ("fixed", blocked(), "overridable()"),
        ("apy", blocked(), "did you mean \"api\"?"),
    ] {
        let refused = block_on(limiter.set_record("alice", name, record)).expect_err(due);
        let said = refused.to_string();
        assert!(said.contains(name) && said.contains(due), "{said:?} lacks {due:?}");
    }
    // By the time that decides, a record past its end is as none.
    let end = Timestamp::saturating_from_us(5);
    let ended = Record::<AnyAlgorithm>::blocked().until(end);
    assert!(!ended.stands_at(end) && ended.stands_at(Timestamp::saturating_from_us(4)));
}

#[test]
fn numbers_that_the_limit_cannot_decide_by_count_as_none() {
    let (store, _) = store::<AnyAlgorithm>(|builder| builder);
    let api = limit("api", "gcra 10/s burst 20").overridable();
    let attempts = api.clone().count_attempts().expect("counts attempts");
    let set = |key: &str, numbers: &str| {
        let record = Record::numbers(numbers.parse().expect(numbers)).forever();
        let set = store.exchange_record(&api, key, None, Some(&record));
        assert_eq!(block_on(set), Ok(true));
    };
    // The store sets what it is given; a limiter refuses the first, and the second for `attempts`.
    set("alice", "fixed-window 9/s");
    set("bob", "gcra 10/s burst 40 debt 3");
    set("carol", "gcra 10/s burst 40");
    for (limit, key, due) in [
        (&api, "alice", 20),
        (&attempts, "alice", 20),
        (&api, "bob", 40),
        (&attempts, "bob", 20),
        (&api, "carol", 40),
        (&attempts, "carol", 40),
    ] {
        for _ in 0..2 {
            let check = Check { limit, key, cost: 1 };
            assert_eq!(
                store.apply_now(&Batch::one(&check)).expect("decides").limit(),
                due,
                "{key}"
            );
        }
    }
    // They have raised nothing that a record could lower.
    let limits = Limits::new([attempts.clone()]).expect("a limit");
    let limiter = RateLimiter::new(limits, store);
    let lower = Record::numbers("gcra 5/s".parse().expect("numbers")).forever();
    let set = block_on(limiter.set_record("bob", "api", lower.clone()));
    assert!(set.is_ok_and(|before| before.is_some()));
    assert!(block_on(limiter.set_record("carol", "api", lower)).is_err());
    let store = limiter.store();
    // At the numbers of a record, a denied attempt is charged as well.
    let all = Check { limit: &attempts, key: "carol", cost: 50 };
    assert!(!store.apply_now(&Batch::one(&all)).expect("decides").allowed());
    let one = Check { cost: 1, ..all };
    assert!(!store.apply_now(&Batch::one(&one)).expect("decides").allowed());
}
