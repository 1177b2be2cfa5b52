//! Unit tests of the lockout.

use alloc::format;
use core::time::Duration;

use super::*;
use crate::timestamp::MAX_INTEGER;

const SECOND_US: u64 = 1_000_000;
const MINUTE_US: u64 = 60 * SECOND_US;
const HOUR_US: u64 = 60 * MINUTE_US;

/// A time on the clock of a day, away from the epoch.
fn at(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(1_795_218_392_123_456 + us)
}

fn lockout(words: &str) -> Lockout {
    words.parse().expect(words)
}

/// A key of one limit.
struct Key(Lockout, Option<LockoutState>);

impl Key {
    fn of(words: &str) -> Self {
        Self(lockout(words), None)
    }

    fn take(&mut self, step: &Step<LockoutState>) -> Decision {
        self.1 = step.write.after(self.1.as_ref()).copied();
        step.decision
    }

    fn charge(&mut self, us: u64, cost: u64) -> Decision {
        self.take(&self.0.step(self.1.as_ref(), at(us), cost))
    }

    fn force(&mut self, us: u64, cost: u64) -> Decision {
        self.take(&self.0.force(self.1.as_ref(), at(us), cost).expect("forced"))
    }

    fn refund(&mut self, us: u64, cost: u64) -> Decision {
        self.take(&self.0.refund(self.1.as_ref(), at(us), cost).expect("refunded"))
    }

    fn left(&self, us: u64) -> u64 {
        self.0.step(self.1.as_ref(), at(us), 0).decision.remaining
    }

    /// How long a request at this time is blocked.
    fn wait_us(&self, us: u64) -> u64 {
        self.0.step(self.1.as_ref(), at(us), 1).decision.retry_after_us.expect("it fits at times")
    }
}

#[test]
fn the_charge_that_reaches_the_count_is_admitted_and_blocks() {
    let mut key = Key::of("3/5m block 15m");
    assert_eq!(key.charge(0, 1).remaining, 2);
    assert_eq!(key.charge(SECOND_US, 1).remaining, 1);
    let third = key.charge(2 * SECOND_US, 1);
    assert!(third.allowed && third.remaining == 0);
    assert_eq!(third.reset_after_us, 15 * MINUTE_US);
    // The block lasts from the charge, beyond the window.
    let end_us = 2 * SECOND_US + 15 * MINUTE_US;
    assert_eq!(key.wait_us(6 * MINUTE_US), end_us - 6 * MINUTE_US);
    assert!(!key.charge(end_us - 1, 1).allowed);
    assert_eq!(key.charge(end_us, 1).remaining, 2);
}

#[test]
fn a_denied_request_prolongs_no_block() {
    let mut key = Key::of("1/s block 1m");
    let _ = key.charge(0, 1);
    for us in (0..60).map(|second| second * SECOND_US) {
        let before = key.1;
        let denied = key.charge(us, 1);
        assert_eq!((denied.retry_after_us, key.1), (Some(MINUTE_US - us), before));
    }
}

#[test]
fn each_further_block_is_longer_up_to_the_longest_until_it_is_forgotten() {
    let mut key = Key::of("2/5m block 10m factor 3 longest 1h forget 1d");
    let mut us = 0;
    for minutes in [10, 30, 60, 60] {
        let _ = key.charge(us, 2);
        assert_eq!(key.wait_us(us), minutes * MINUTE_US);
        us += minutes * MINUTE_US;
    }
    // A charge a moment before the blocks are forgotten remembers them for another day.
    us += 24 * HOUR_US - 1;
    assert_eq!(key.charge(us, 1).reset_after_us, 24 * HOUR_US);
    let silent_us = us + 24 * HOUR_US;
    assert_eq!(
        key.0.step(key.1.as_ref(), at(silent_us), 2).decision.reset_after_us,
        10 * MINUTE_US + 24 * HOUR_US
    );
    let _ = key.charge(silent_us - 1, 2);
    assert_eq!(key.wait_us(silent_us - 1), HOUR_US);
}

#[test]
fn a_cost_that_does_not_fit_waits_for_the_window_and_blocks_nothing() {
    let mut key = Key::of("5/5m block 1h");
    let _ = key.charge(0, 4);
    let before = key.1;
    let denied = key.charge(MINUTE_US, 2);
    assert_eq!((denied.allowed, denied.retry_after_us), (false, Some(4 * MINUTE_US)));
    assert_eq!((key.1, key.charge(MINUTE_US, 6).retry_after_us), (before, None));
    assert_eq!(key.charge(5 * MINUTE_US, 2).remaining, 3);
}

#[test]
fn a_forced_charge_may_block_and_changes_no_block() {
    let mut key = Key::of("3/5m block 15m");
    let _ = key.charge(0, 1);
    assert_eq!(key.force(SECOND_US, 9).remaining, 0);
    assert_eq!(key.0.forgiven(None, at(0), 9), 6);
    let before = key.1;
    let _ = key.force(MINUTE_US, 1);
    assert_eq!(key.1, before);
    assert_eq!(key.wait_us(MINUTE_US), 15 * MINUTE_US + SECOND_US - MINUTE_US);
}

#[test]
fn a_refund_gives_back_in_the_window_and_ends_no_block() {
    let mut key = Key::of("3/5m block 15m factor 2");
    let _ = key.charge(0, 2);
    assert_eq!(key.refund(1, 1).remaining, 2);
    assert_eq!(key.refund(1, 1).remaining, 3);
    assert_eq!(key.1, None);
    let _ = key.charge(2, 3);
    let before = key.1;
    assert_eq!((key.refund(3, 3).remaining, key.1), (0, before));
    // The lockouts stay when the window is empty again.
    let _ = (key.charge(HOUR_US, 2), key.refund(HOUR_US, 2));
    assert_eq!(key.left(HOUR_US), 3);
    let _ = key.charge(HOUR_US, 3);
    assert_eq!(key.wait_us(HOUR_US), 30 * MINUTE_US);
}

/// Takes a charge of 1 at this time back, after what follows it.
fn undone(key: &mut Key, us: u64, then: impl FnOnce(&mut Key)) -> Option<Step<LockoutState>> {
    let _ = key.charge(us, 1);
    let charged = key.1.expect("charged");
    then(key);
    key.0.undo(key.1.as_ref(), at(us + 3), &Reservation::new(at(us), 1), &charged)
}

#[test]
fn a_charge_that_is_taken_back_leaves_no_block() {
    let words = "3/5m block 15m factor 2 longest 1d forget 7d";
    let mut key = Key::of(words);
    let _ = key.charge(0, 2);
    let before = key.1.expect("charged");
    let step = undone(&mut key, SECOND_US, |_| {}).expect("it is the last charge");
    assert_eq!(step.decision.remaining, 1);
    let after = *step.write.after(None).expect("the window goes on");
    assert_eq!(LockoutState { newest: before.newest, ..after }, before);

    // The one before the charge that blocked.
    let mut key = Key::of(words);
    let _ = key.charge(0, 1);
    let step = undone(&mut key, 1, |key| {
        let _ = key.charge(2, 1);
    })
    .expect("of the same window");
    assert_eq!((step.decision.remaining, step.decision.reset_after_us), (1, 5 * MINUTE_US - 4));

    // Of an earlier lockout the memory stays, of the first charge of a new key nothing.
    let mut key = Key::of(words);
    let _ = key.charge(0, 3);
    let step = undone(&mut key, HOUR_US, |_| {}).expect("of the same window");
    let state = step.write.after(None).expect("remembered");
    assert_eq!((state.count, state.lockouts, step.decision.remaining), (0, 1, 3));
    let step = undone(&mut Key::of(words), 0, |_| {}).expect("of the same window");
    assert_eq!(step.write, Write::Remove);

    // Another window has begun.
    let mut key = Key::of(words);
    let gone = undone(&mut key, 0, |key| key.1 = None);
    assert_eq!(gone, None);
    let of_another = undone(&mut key, HOUR_US, |key| {
        key.1 = None;
        let _ = key.charge(HOUR_US + 1, 3);
    });
    assert_eq!(of_another, None);
}

#[test]
fn a_change_blocks_no_longer_than_the_new_numbers_do() {
    let mut key = Key::of("2/5m block 1h factor 2 longest 1d forget 7d");
    let _ = (key.charge(0, 2), key.charge(HOUR_US, 2));
    let blocked_us = HOUR_US + 1;
    assert_eq!(key.wait_us(blocked_us), 2 * HOUR_US - 1);
    for (words, minutes) in [
        ("2/5m block 1h factor 2 longest 1d forget 7d", 120),
        // The second block, by the new numbers.
        ("2/5m block 10m factor 3 longest 1d forget 7d", 30),
        ("2/5m block 10m factor 100 longest 20m forget 7d", 20),
        ("2/5m block 10m", 10),
        // What has begun under a shorter one is not prolonged.
        ("9/5m block 5h factor 2 longest 1d forget 7d", 120),
    ] {
        let changed = Key(lockout(words), key.1);
        assert_eq!(changed.wait_us(blocked_us), minutes * MINUTE_US - 1, "{words}");
        assert_eq!(changed.left(HOUR_US + minutes * MINUTE_US), changed.0.capacity(), "{words}");
    }
    // Remembered no longer than by either.
    let changed = Key(lockout("2/5m block 1h factor 2 longest 1d forget 1h"), key.1);
    let reset_us = |us| changed.0.step(changed.1.as_ref(), at(us), 0).decision.reset_after_us;
    assert_eq!((reset_us(3 * HOUR_US), reset_us(4 * HOUR_US)), (HOUR_US, 0));
}

#[test]
fn a_forced_charge_leaves_the_block_of_another_limit() {
    let mut key = Key::of("2/5m block 1h factor 2");
    let _ = key.charge(0, 2);
    let mut other = Key(lockout("2/5m block 1m factor 2"), key.1);
    assert_eq!(other.force(2 * MINUTE_US, 1).remaining, 2);
    assert_eq!(other.1, key.1);
    // An acquire takes the state over.
    assert_eq!(other.charge(2 * MINUTE_US, 1).remaining, 1);
}

#[test]
fn time_going_back_ends_and_prolongs_nothing() {
    let mut key = Key::of("2/5m block 1h factor 2");
    let _ = key.charge(10 * MINUTE_US, 1);
    // The block begins at the latest time.
    assert_eq!(key.charge(0, 1).reset_after_us, 10 * MINUTE_US + HOUR_US + 7 * 24 * HOUR_US);
    assert_eq!(key.wait_us(0), 10 * MINUTE_US + HOUR_US);
    assert_eq!(key.wait_us(70 * MINUTE_US), 0);
}

#[test]
fn every_number_stays_below_two_to_the_53rd() {
    let half_us = MAX_INTEGER / 2;
    let words = [
        format!(
            "2/{MAX_INTEGER}us block 1us factor {MAX_INTEGER} longest {half_us}us forget {half_us}us"
        ),
        format!(
            "2/{MAX_INTEGER}us block {half_us}us factor 2 longest {half_us}us forget {half_us}us"
        ),
        format!("2/us block {MAX_INTEGER}us"),
    ];
    for words in words {
        let limit = lockout(&words);
        for now in [Timestamp::ZERO, Timestamp::MAX] {
            let mut state = limit.filled(now).write.after(None).copied();
            for _ in 0..3 {
                let LockoutState { until_us, ends_us, .. } = state.expect("blocked");
                assert!(until_us <= ends_us && ends_us < 1 << 53, "{words}: {state:?}");
                state = limit.step(None, now, 2).write.after(None).copied();
            }
        }
    }
}

#[test]
fn the_length_of_a_block_saturates_at_the_longest() {
    let day = lockout("5/15m block 15m factor 2 longest 1d forget 7d");
    let minutes = (1..=9).map(|nth| day.length_us(nth) / MINUTE_US);
    assert!(minutes.eq([15, 30, 60, 120, 240, 480, 960, 1440, 1440]));
    assert_eq!(day.length_us(u64::MAX), 24 * HOUR_US);
    let longest = lockout("1/s block 1us factor 2 longest 26000d forget 1d");
    assert_eq!(longest.length_us(MOST_LOCKOUTS), 26_000 * 24 * HOUR_US);
    assert_eq!(lockout("1/s block 7s").length_us(u64::MAX), 7 * SECOND_US);
}

#[test]
fn numbers_that_make_no_lockout_are_refused() {
    let rate = || "5/15m".parse::<Rate>().expect("a rate");
    let refused = [
        (Lockout::new(rate(), Duration::ZERO), "block is 0ns"),
        (Lockout::new(rate(), Duration::from_nanos(1_500)), "whole number of microseconds"),
        (Lockout::new(rate(), Duration::MAX), "below 2^52"),
        (Lockout::new(rate(), Duration::from_secs(1)).factor(0), "a factor of 0"),
        (Lockout::new(rate(), Duration::from_secs(1)).longest(Duration::MAX), "no meaning"),
        (Lockout::new(rate(), Duration::from_secs(1)).factor(1 << 52), "2^52"),
    ];
    for (builder, says) in refused {
        let error = builder.build().expect_err(says);
        assert!(alloc::string::ToString::to_string(&error).contains(says), "{error}");
    }
}

/// What the tests of `rate-limiter-flexible` (`RateLimiterMemory.test.js`) say of its
/// `blockDuration`, with one point per second and a block of two seconds. There, the request above
/// the points begins the block; here, the charge that reaches the count does.
#[test]
fn a_block_lasts_as_that_of_rate_limiter_flexible() {
    let mut key = Key::of("1/s block 2s");
    let _ = key.charge(0, 1);
    // "blocks key for block duration when consumed more than points"
    assert!(key.wait_us(0) > SECOND_US);
    // "do not block key second time until block expires no matter how many points consumed"
    assert!(!key.charge(1_001_000, 1).allowed && key.wait_us(1_001_000) < SECOND_US);
    // "block expires in blockDuration seconds"
    assert!(key.charge(2 * SECOND_US, 1).allowed);
}
