//! A partial reservation: as much as is left, down to a minimum, all limits or none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, LimitCosts, Limits, RateLimiter, ReservationId, Reserved, Store,
    StoreError as _, SyncStore as _, Verdict,
};
use ratelimit_memory::MemoryError;
use ratelimit_testkit::block_on;

use crate::common::{Limiter, Memory, limit, limiter, store};

const ID: ReservationId = ReservationId::new(0x2a);

fn remaining(limiter: &Limiter) -> Vec<u64> {
    let shown = limiter.request("a").cost(0).peek_now().expect("decides");
    limiter.named(&shown).map(|one| one.remaining).collect()
}

fn costs(of: [u64; 2]) -> LimitCosts {
    LimitCosts::from(of[0]).with("b", of[1])
}

#[test]
fn what_is_left_is_reserved_down_to_the_minimum() {
    for words in ["fixed-window 100/360d", "gcra 1/d burst 100", "concurrency 100/1h"] {
        for (left, estimate, least, due) in [
            (100, 100, 10, Some(100)),
            (36, 100, 10, Some(36)),
            (36, 36, 10, Some(36)),
            (36, 20, 10, Some(20)),
            (10, 100, 10, Some(10)),
            (9, 100, 10, None),
            (0, 100, 1, None),
            // A minimum of 0 counts as 1, and one above the estimate as the estimate.
            (1, 100, 0, Some(1)),
            (0, 100, 0, None),
            (36, 50, 99, None),
            (36, 36, 99, Some(36)),
            // More than can ever fit.
            (36, 4_000, 10, Some(36)),
            (36, u64::MAX, 10, Some(36)),
        ] {
            let case = format!("{words}: {left} left, {estimate} down to {least}");
            let (limiter, _) = limiter([limit("a", words)], |builder| builder);
            let used = ReservationId::new(1);
            if left < 100 {
                let used = limiter.request("a").id(used).cost(100 - left).check_now();
                assert!(used.expect("decides").allowed());
            }
            let request = limiter.request("a").id(ID).cost(estimate);
            let (verdict, reserved) = request.reserve_up_to_now(&least.into()).expect("decides");
            assert_eq!(verdict.allowed().then(|| reserved.uniform()), due.map(Some), "{case}");
            assert_eq!(remaining(&limiter), [left - due.unwrap_or_default()], "{case}");
            if due.is_some() {
                let settled = limiter.request("a").id(ID).cost(0).settle_now().expect("reserved");
                assert_eq!(settled.remaining(), left, "{case}");
            }
        }
    }
}

#[test]
fn limits_of_one_estimate_and_minimum_are_charged_the_same_and_all_others_their_own() {
    for (left, estimate, least, due) in [
        ([36, 80], [100, 100], [10, 10], Some([36, 36])),
        ([80, 36], [100, 100], [10, 10], Some([36, 36])),
        // Another minimum, so another thing is counted.
        ([36, 80], [100, 100], [10, 20], Some([36, 80])),
        ([36, 80], [50, 70], [10, 10], Some([36, 70])),
        ([36, 5], [100, 1], [10, 1], Some([36, 1])),
        ([36, 0], [100, 1], [10, 1], None),
        ([36, 9], [100, 100], [10, 20], None),
    ] {
        let words = ["gcra 1/d burst 100"; 2];
        let limits = [limit("a", words[0]), limit("b", words[1])];
        let (limiter, _) = limiter(limits, |builder| builder);
        let used = costs(left.map(|left| 100 - left));
        assert!(limiter.request("a").costs(&used).check_now().expect("decides").allowed());
        let (estimate, least) = (costs(estimate), costs(least));
        let request = limiter.request("a").id(ID).costs(&estimate);
        let (verdict, reserved) = request.reserve_up_to_now(&least).expect("decides");
        assert_eq!(verdict.allowed().then_some(reserved), due.map(costs), "{left:?}");
        let due = due.unwrap_or_default();
        assert_eq!(remaining(&limiter), [left[0] - due[0], left[1] - due[1]], "{left:?}");
    }
}

#[test]
fn a_denial_is_that_of_the_minimum_and_its_wait_is_exact() {
    let (limiter, clock) = limiter([limit("a", "gcra 1/s burst 100")], |builder| builder);
    assert!(limiter.check_n_now("a", 96).expect("decides").allowed());
    let ask = || {
        let request = limiter.request("a").id(ID).cost(100);
        request.reserve_up_to_now(&10.into()).expect("decides")
    };
    let (denied, least) = ask();
    assert_eq!((denied.allowed(), denied.remaining(), least.uniform()), (false, 4, Some(10)));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(6)));
    clock.advance(Duration::from_micros(5_999_999));
    assert!(!ask().0.allowed());
    clock.advance(Duration::from_micros(1));
    let (granted, reserved) = ask();
    assert_eq!((granted.allowed(), reserved.uniform()), (true, Some(10)));
}

#[test]
fn what_is_no_reservation_is_refused_and_charges_nothing() {
    let kind = |words: &str, id: Option<ReservationId>, least: LimitCosts| {
        let (limiter, _) = limiter([limit("a", words)], |builder| builder);
        let request = limiter.request("a").cost(5);
        let request = id.map_or(request, |id| request.id(id));
        let refused = request.reserve_up_to_now(&least).expect_err("refused");
        assert_eq!(remaining(&limiter), [9]);
        (refused.kind(), refused.to_string())
    };
    let (no_id, said) = kind("gcra 9/d", None, 1.into());
    assert!(no_id == ErrorKind::Invalid && said.contains("needs the id"), "{said}");
    let (unknown, said) = kind("gcra 9/d", Some(ID), LimitCosts::from(1).with("aa", 2));
    assert!(unknown == ErrorKind::Invalid && said.contains("\"aa\""), "{said}");
    for words in ["sliding-log 9/d", "fixed-window 9/d count attempts"] {
        assert_eq!(kind(words, Some(ID), 1.into()).0, ErrorKind::Unsupported, "{words}");
    }
    // What it has reserved is named.
    let (limiter, _) = limiter([limit("a", "gcra 1/d burst 9")], |builder| builder);
    let ask = || limiter.request("a").id(ID).cost(50).reserve_up_to_now(&1.into());
    assert_eq!(ask().expect("decides").1.uniform(), Some(9));
    assert!(ask().expect_err("the id is taken").to_string().contains("reserves a cost of 9"));
}

/// A store of which another caller uses a part before each of these many requests.
struct Busy {
    store: Memory,
    others: u64,
    asked: AtomicU64,
}

impl Store<AnyAlgorithm> for Busy {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, MemoryError> {
        if batch.operation() == Op::Acquire {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let taken = batch.checks().iter().map(|check| Check { cost: self.others, ..*check });
            let taken: Vec<_> = taken.collect();
            let taken = Batch::new(&taken).expect("distinct").op(Op::Force);
            let _ = self.store.apply_now(&taken)?;
        }
        self.store.apply(batch).await
    }
}

#[test]
fn others_that_charge_in_between_cost_at_most_four_attempts() {
    // The first finds 100 less what the others have taken, and so on.
    for (others, due, attempts) in
        [(0, Some(100), 1), (1, None, 4), (20, None, 4), (30, None, 4), (95, None, 2)]
    {
        let ((store, _), asked) = (store(|builder| builder), AtomicU64::new(0));
        let limits = Limits::new([limit("a", "gcra 1/d burst 100")]).expect("a limit");
        let limiter = RateLimiter::new(limits, Busy { store, others, asked });
        let request = limiter.request("a").id(ID).cost(100);
        let (verdict, reserved) = block_on(request.reserve_up_to(&10.into())).expect("decides");
        // The last attempt is for the minimum, and fits as long as that is left.
        let left = 100 - 4 * others.min(25);
        let last = (due.is_none() && attempts == 4 && left >= 10).then_some(10);
        let granted = verdict.allowed().then(|| reserved.uniform().expect("one cost"));
        assert_eq!(granted, due.or(last), "{others}");
        assert_eq!(limiter.store().asked.load(Ordering::Relaxed), attempts, "{others}");
    }
}

#[test]
fn threads_get_all_that_is_there_and_none_less_than_the_minimum() {
    for words in ["fixed-window 1000/360d", "gcra 1/d burst 1000"] {
        let (limiter, _) = limiter([limit("a", words)], |builder| builder);
        let (limiter, next) = (&limiter, &AtomicU64::new(1));
        let granted: Vec<u64> = std::thread::scope(|scope| {
            let work = move || {
                let mut granted = Vec::new();
                loop {
                    let id = ReservationId::new(next.fetch_add(1, Ordering::Relaxed).into());
                    let request = limiter.request("a").id(id).cost(73);
                    let (verdict, reserved) =
                        request.reserve_up_to_now(&10.into()).expect("decides");
                    if !verdict.allowed() {
                        return granted;
                    }
                    granted.push(reserved.uniform().expect("one cost"));
                }
            };
            let all: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            all.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(granted.iter().all(|cost| (10..=73).contains(cost)), "{granted:?}");
        let sum: u64 = granted.iter().sum();
        assert_eq!(remaining(limiter), [1_000 - sum], "{words}");
        assert!(sum > 990, "{words}: less than the minimum is left: {granted:?}");
    }
}

#[tokio::test]
async fn an_owned_reservation_says_what_it_has_charged_and_gives_the_rest_back() {
    let (limiter, _) = limiter([limit("a", "gcra 1/d burst 100")], |builder| builder);
    let limiter = Arc::new(limiter);
    assert!(limiter.check_n_now("a", 64).expect("decides").allowed());
    let Ok(Reserved::Granted(reservation)) = limiter.reserve_up_to("a", 100, 10).await else {
        panic!("36 are left")
    };
    assert_eq!((reservation.costs().uniform(), remaining(&limiter)), (Some(36), vec![0]));
    let Ok(Reserved::Denied(denied)) = limiter.reserve_up_to("a", 100, 10).await else {
        panic!("none is left")
    };
    assert_eq!(denied.summary().cost, 10);
    let _ = reservation.settle(6).await.expect("it is there");
    assert_eq!(remaining(&limiter), [30]);
    // Dropped, it is settled at what it has charged.
    drop(limiter.reserve_up_to("a", 100, 10).await.expect("decides"));
    assert_eq!(remaining(&limiter), [0]);
}

#[tokio::test]
async fn an_owned_reservation_reserves_what_is_left_of_its_callers_numbers() {
    let api = limit("a", "gcra 1/d burst 100");
    let api = api.accepts_up_to("gcra 1/d burst 500".parse().expect("a max")).expect("a max");
    let (limiter, _) = limiter([api], |builder| builder);
    let gold = Arc::new(limiter.limits().parse_numbers([("a", "1/d burst 400")]).expect("within"));
    let limiter = Arc::new(limiter);
    let reserve = |numbers| limiter.reserve_up_to_by(numbers, "a", 600, 10);
    let Ok(Reserved::Granted(reservation)) = reserve(Some(gold.clone())).await else {
        panic!("400 are left")
    };
    assert_eq!(reservation.costs().uniform(), Some(400));
    // Settled by the same numbers: 70 of the 400 are used.
    let settled = reservation.settle(70).await.expect("it is there");
    assert_eq!((settled.limit(), settled.remaining()), (400, 330));
    let Ok(Reserved::Granted(reservation)) = reserve(None).await else { panic!("30 are left") };
    assert_eq!(reservation.costs().uniform(), Some(30));
}

/// An exempt caller's limit shows what its state has left, and bounds nothing.
#[test]
fn a_limit_of_which_the_caller_is_exempt_bounds_nothing() {
    let limits = [limit("a", "fixed-window 100/360d"), limit("b", "fixed-window 60/360d")];
    let (limiter, _) = limiter(limits.map(ratelimit_core::Limit::overridable), |builder| builder);
    assert!(limiter.request("a").cost(60).check_now().expect("decides").allowed());
    let exempt = ratelimit_core::Record::exempt().forever();
    block_on(limiter.set_record("a", "b", exempt)).expect("sets");
    assert!(limiter.request("a").cost(30).check_now().expect("decides").allowed());
    for (estimate, due) in [([20, 20], [10, 10]), ([20, 21], [10, 21])] {
        let id = ReservationId::random();
        let (estimate, least) = (costs(estimate), costs([5, 5]));
        let request = limiter.request("a").id(id).costs(&estimate);
        let (verdict, reserved) = request.reserve_up_to_now(&least).expect("decides");
        assert!(verdict.allowed());
        assert_eq!(reserved, costs(due));
        let settled = limiter.request("a").id(id).cost(0).settle_now();
        assert!(settled.expect("settles").allowed());
    }
}
