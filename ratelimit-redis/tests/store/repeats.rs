//! Law 13 where a request breaks off: one of its commands is lost, or its reply, or the same
//! request is sent meanwhile. Sent once more it has been done once, in one slot and across slots;
//! and an error that says that nothing was charged is right. Whole repetitions are tested by the
//! laws.

use futures_util::future::BoxFuture;
use ratelimit_core::Algorithm as _;
use ratelimit_testkit::PureStore;

use crate::common::prelude::*;

/// A request: its operation, its cost, and under which id.
type Asked = (Op, u64, Option<u128>);

const ID: Option<u128> = Some(7);
/// A state of a few numbers, one of several windows, a log, and leases.
const NAMES: [&str; 4] = ["gcra", "sliding-counter", "sliding-log", "concurrency"];

/// A request, and what was done before it. Without an id it is not repeated.
const STORIES: [(&[Asked], Asked); 12] = [
    (&[(Op::Acquire, 3, None)], (Op::Acquire, 2, None)),
    (&[(Op::Acquire, 3, None)], (Op::Force, 2, None)),
    (&[(Op::Acquire, 5, None)], (Op::Refund, 2, None)),
    (&[(Op::Acquire, 5, None)], (Op::Reset, 1, None)),
    (&[(Op::Acquire, 3, None)], (Op::Acquire, 2, ID)),
    (&[(Op::Acquire, 3, None)], (Op::Force, 2, ID)),
    (&[(Op::Acquire, 5, None)], (Op::Refund, 2, ID)),
    (&[(Op::Acquire, 5, None)], (Op::Reset, 1, ID)),
    (&[(Op::Acquire, 3, None)], (Op::Adopt, 4, ID)),
    (&[(Op::Acquire, 3, None), (Op::Acquire, 4, ID)], (Op::Settle, 1, ID)),
    (&[(Op::Acquire, 3, None), (Op::Acquire, 2, ID)], (Op::Settle, 4, ID)),
    (&[(Op::Acquire, 3, None), (Op::Acquire, 2, ID)], (Op::Extend, 4, ID)),
];

/// After how many commands one breaks, and what runs before it goes.
type Plan = (usize, Fate, BoxFuture<'static, ()>);

async fn apply_all<S: Store<AnyAlgorithm>>(
    store: &S,
    limit: &Limit<AnyAlgorithm>,
    keys: &[String; 2],
    (op, cost, id): Asked,
) -> Result<Verdict, S::Error> {
    let checks = [(limit, &*keys[0], cost), (limit, &*keys[1], cost)];
    apply(store, &checks, op, id).await
}

#[tokio::test]
async fn a_request_that_breaks_off_anywhere_and_is_repeated_counts_once() {
    let (server, plan) = (server(), Arc::new(Mutex::new(None::<Plan>)));
    let limits: Vec<_> = every(9).into_iter().filter(|l| NAMES.contains(&l.name())).collect();
    let (mut cases, mut broken) = (0, 0);
    for is_cluster in [false, true] {
        let connection = || async {
            let connection = meddling_connection(&server).await;
            if is_cluster { connection.clustered() } else { connection }
        };
        let breaking = connection().await;
        let breaking = breaking.before_with(Arc::clone(&plan), |planned, _| async move {
            let due = planned.lock().expect("no panic").take_if(|(left, ..)| {
                let is_due = *left == 0;
                *left = left.saturating_sub(1);
                is_due
            });
            let Some((_, fate, before)) = due else { return Fate::Sent };
            before.await;
            fate
        });
        // All keys of one server lie in one slot.
        let quiet = in_every_mode(&over(RedisStore::builder(), connection().await));
        let breaking = in_every_mode(&over(RedisStore::builder().deadline(PATIENCE), breaking));
        for ((mode, quiet), (_, breaking)) in quiet.iter().zip(&breaking).take(2) {
            for (limit, (before, asked)) in
                limits.iter().flat_map(|l| STORIES.iter().map(move |s| (l, s)))
            {
                let all = || before.iter().chain([asked]);
                let reserves = all().any(|(op, _, id)| *op == Op::Acquire && id.is_some());
                let algorithm = limit.algorithm();
                if reserves && algorithm.reservation_us().is_none()
                    || asked.0 == Op::Extend && algorithm.has_leases()
                {
                    continue;
                }
                let (pure, keys) = (PureStore::new(), ["a", "b"].map(str::to_owned));
                let mut had = 0;
                for asked in all() {
                    had = peek(&pure, limit, "a").await;
                    let _ = apply_all(&pure, limit, &keys, *asked).await.expect("decides");
                }
                let due = peek(&pure, limit, "a").await;
                // Or the same request is sent meanwhile, and answered before this command goes.
                let fates = [Fate::NeverSent, Fate::AnswerLost, Fate::Sent];
                let fates = if asked.2.is_some() { &fates[..] } else { &fates[..2] };
                for fate in fates.iter().copied() {
                    for nth in 0..64 {
                        cases += 1;
                        let keys = ["a", "b"].map(|key| format!("{key}{cases}"));
                        for asked in *before {
                            let _ = apply_all(quiet, limit, &keys, *asked).await.expect("decides");
                        }
                        let (aside, same, asked) =
                            (Arc::clone(quiet), (limit.clone(), keys.clone()), *asked);
                        let again: BoxFuture<'static, ()> = Box::pin(async move {
                            if fate == Fate::Sent {
                                let _ = apply_all(&aside, &same.0, &same.1, asked).await;
                            }
                        });
                        *plan.lock().expect("no panic") = Some((nth, fate, again));
                        let shown = format!(
                            "{mode}, {is_cluster}: {fate:?} at {nth}, {} {asked:?}",
                            limit.name()
                        );
                        let first = apply_all(breaking, limit, &keys, asked).await;
                        if plan.lock().expect("no panic").take().is_some() {
                            let _ = first.expect("nothing broke");
                            break;
                        }
                        broken += 1;
                        let left = async || {
                            [peek(quiet, limit, &keys[0]).await, peek(quiet, limit, &keys[1]).await]
                        };
                        if matches!(&first, Err(error) if error.kind() == ErrorKind::Unavailable) {
                            assert_eq!(
                                left().await,
                                [had; 2],
                                "{shown}: it says nothing was charged"
                            );
                        }
                        if asked.2.is_none() {
                            continue;
                        }
                        if let Err(error) = apply_all(quiet, limit, &keys, asked).await {
                            panic!("{shown}: {error}, after {first:?}");
                        }
                        assert_eq!(left().await, [due; 2], "{shown}, after {first:?}");
                    }
                }
            }
        }
    }
    assert!(broken > 250, "{broken} of {cases}");
}

/// Another caller may have the place of the lease that ended.
#[tokio::test]
async fn a_renewal_is_refused_if_one_of_its_leases_has_ended() {
    let server = server();
    let store = plain(&server).await;
    let (short, long) = (limit("short", "concurrency 3/1s"), limit("long", "concurrency 3/1h"));
    let both = [(&short, "a", 1), (&long, "a", 1)];
    let begins_us = 1_795_218_392_000_000;
    let _ = apply_at(&store, &both, Op::Acquire, Some(7), at(begins_us)).await.expect("decides");
    let kept = tell(&server, &["GET", &store.reservation_key(&long, "a", ReservationId::new(7))]);
    let renewed = apply_at(&store, &both, Op::Renew, Some(7), at(begins_us + 2_000_000)).await;
    fails(renewed, ErrorKind::Ended, "limit \"short\": ");
    let left = tell(&server, &["GET", &store.reservation_key(&long, "a", ReservationId::new(7))]);
    assert_eq!(left, kept);
}
