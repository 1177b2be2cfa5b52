//! Late transactions: another client, or the end of a window, comes between the read of a request
//! and its charge.

use futures_util::future::join_all;
use tokio::sync::Semaphore;

use crate::common::prelude::*;

const WINDOW_US: u64 = 1_000_000;
const LIMIT: u64 = 20;

fn is_charge(words: &Words) -> bool {
    words.has_any(&["HINCRBY", "ZADD", "RPUSH"])
}

/// All limits that a transaction can decide: so many per second, or per hour.
fn all(length: &str) -> Vec<Limit<AnyAlgorithm>> {
    let of = |name: &str| limit(name, &format!("{name} {LIMIT}/{length} count attempts"));
    NATIVE.map(of).into()
}

async fn wait_until(us: u64) {
    tokio::time::sleep(Duration::from_micros(us.saturating_sub(now_us()))).await;
}

/// How many attempts are admitted that read a window with room for one, and whose charges come when
/// another client has begun the next window; `None` if they did not read in time.
async fn late_attempts(
    server: &RedisServer,
    limit: &Limit<AnyAlgorithm>,
    key: &str,
) -> Option<usize> {
    const CALLERS: usize = 4;
    let (gate, at_gate) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
    let needed = (Arc::clone(&gate), Arc::clone(&at_gate));
    let connection = meddling_connection(server).await.before_with(
        needed,
        |(gate, at_gate), words| async move {
            if is_charge(&words) {
                at_gate.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.expect("never closed").forget();
            }
            Fate::Sent
        },
    );
    let late = over(RedisStore::builder().multi().deadline(PATIENCE), connection);
    let quick = plain(server).await.in_mode::<Multi>();
    let begin_us = (now_us() / WINDOW_US + 1) * WINDOW_US;
    wait_until(begin_us).await;
    let nearly = [(limit, key, LIMIT - 1)];
    assert!(apply(&quick, &nearly, Op::Acquire, None).await.expect("decides").allowed());
    let ends_us = now_us() + WINDOW_US;
    wait_until(begin_us + WINDOW_US - 200_000).await;
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (late, limit, key) = (late.clone(), limit.clone(), key.to_owned());
        callers.spawn(async move { acquire(&late, &limit, &key).await });
    }
    until(async || {
        let waiting = at_gate.load(Ordering::SeqCst);
        (waiting == CALLERS).then_some(()).ok_or(format!("{waiting} have read"))
    })
    .await;
    let is_in_time = now_us() < begin_us + WINDOW_US;
    wait_until(ends_us).await;
    let _ = acquire(&quick, limit, key).await.expect("decides");
    gate.add_permits(CALLERS);
    // One that is more than a second late is in doubt, and not admitted.
    let answers = callers.join_all().await.into_iter().flatten();
    let admitted = answers.filter(Verdict::allowed).count();
    is_in_time.then_some(admitted)
}

#[tokio::test]
async fn charges_after_the_end_of_their_window_admit_no_more() {
    let server = server();
    let each = all("1s").into_iter().map(async |limit| {
        let admitted = until(async || {
            let key = prefix();
            late_attempts(&server, &limit, &key).await.ok_or("read too late")
        });
        assert!(admitted.await <= 1, "{}", limit.name());
    });
    join_all(each).await;
}

/// The entries that counted at the time of such a charge may be gone.
#[tokio::test]
async fn a_charge_more_than_a_second_late_is_in_doubt_and_counts_once() {
    let server = server();
    let each = all("1h").into_iter().map(async |limit| {
        let charges = Arc::new(AtomicUsize::new(0));
        let connection = meddling_connection(&server).await;
        let connection =
            connection.before_with(Arc::clone(&charges), |charges, words| async move {
                if is_charge(&words) && charges.fetch_add(1, Ordering::SeqCst) == 0 {
                    tokio::time::sleep(Duration::from_millis(1_300)).await;
                }
                Fate::Sent
            });
        let late = over(RedisStore::builder().multi().deadline(PATIENCE), connection);
        let error = acquire(&late, &limit, "a").await.expect_err("it is late");
        let is_late = matches!(error, RedisError::TimedOut { deadline, .. } if deadline < PATIENCE);
        assert!(is_late && charges.load(Ordering::SeqCst) == 1, "{}: {error}", limit.name());
        assert_eq!(peek(&late, &limit, "a").await, LIMIT - 1, "{}", limit.name());
    });
    join_all(each).await;
}

/// What another client does between the read of a request and its charge.
async fn decided_after<F: Future<Output = ()> + Send + 'static>(
    server: &RedisServer,
    limit: &Limit<AnyAlgorithm>,
    (cost, us): (u64, u64),
    between: impl Fn(RedisStore<Multi, MeddlingConnection>) -> F + Send + Sync + 'static,
) -> Verdict {
    let builder = || RedisStore::builder().multi().deadline(PATIENCE);
    let (sent, between) = (Arc::new(AtomicUsize::new(0)), Arc::new(between));
    let needed = (Arc::clone(&sent), between, over(builder(), meddling_connection(server).await));
    let connection = meddling_connection(server).await;
    let connection = connection.before_with(needed, |(sent, between, quick), words| async move {
        if is_charge(&words) && sent.fetch_add(1, Ordering::SeqCst) == 0 {
            between(quick).await;
        }
        Fate::Sent
    });
    let verdict = acquire_at(&over(builder(), connection), limit, cost, us).await;
    assert_eq!(sent.load(Ordering::SeqCst), 1, "charged once: {}", limit.name());
    verdict
}

/// Whatever its time: a later one counts as simultaneous.
#[tokio::test]
async fn a_charge_that_comes_between_counts_and_an_attempt_above_the_limit_is_denied() {
    let server = server();
    for limit in all("1s") {
        for (cost, us, later_us, left) in [
            (2, 10_000, 10_000, Some(LIMIT - 5)),
            (2, 10_000, WINDOW_US / 2, Some(LIMIT - 5)),
            (2, 10_000, WINDOW_US + 20_000, Some(LIMIT - 5)),
            (LIMIT - 3, 10_000, 10_000, Some(0)),
            (LIMIT - 2, 10_000, 10_000, None),
            (LIMIT - 2, 10_000, WINDOW_US + 20_000, None),
        ] {
            let other = limit.clone();
            let verdict = decided_after(&server, &limit, (cost, us), move |quick| {
                let other = other.clone();
                async move { assert!(acquire_at(&quick, &other, 3, later_us).await.allowed()) }
            });
            let verdict = verdict.await;
            let told = verdict.allowed().then(|| verdict.remaining());
            assert_eq!(told, left, "{}: {cost} at {us}, after {later_us}", limit.name());
            tell(&server, &["FLUSHALL"]);
        }
    }
}

/// It did not fit when it was read, and less of it is charged than it costs.
#[tokio::test]
async fn a_reset_between_admits_no_attempt_that_did_not_fit_and_forgives_nothing_later() {
    let server = server();
    let quiet = plain(&server).await.in_mode::<Multi>();
    for (limit, again) in all("1s").iter().flat_map(|limit| [(limit, 0), (limit, LIMIT)]) {
        assert!(acquire_at(&quiet, limit, LIMIT - 1, 10_000).await.allowed());
        let other = limit.clone();
        let verdict = decided_after(&server, limit, (2, 10_000), move |quick| {
            let other = other.clone();
            async move {
                let one = [(&other, "a", 1)];
                let _ = apply(&quick, &one, Op::Reset, None).await.expect("decides");
                assert!(acquire_at(&quick, &other, again, 10_000).await.allowed());
            }
        });
        assert!(!verdict.await.allowed(), "{}, then {again}", limit.name());
        let left = acquire_at(&quiet, limit, 0, 10_001).await.remaining();
        assert_eq!(left, (LIMIT - again).saturating_sub(1), "{}, then {again}", limit.name());
        tell(&server, &["FLUSHALL"]);
    }
}

#[tokio::test]
async fn denied_attempts_leave_no_more_than_the_limit_counts() {
    let server = server();
    let store = plain(&server).await.in_mode::<Multi>();
    for limit in all("1s") {
        for us in 0..3 * LIMIT {
            let allowed = acquire_at(&store, &limit, 1, us).await.allowed();
            assert_eq!(allowed, us < LIMIT, "{} at {us}", limit.name());
        }
        let key = store.key(&limit, "a").expect("native");
        let most = match limit.name() {
            "window-log" => number(&server, &["LLEN", &key]),
            "sliding-log" => number(&server, &["ZCARD", &key]),
            _ => number(&server, &["HLEN", &key]) * i64::try_from(LIMIT).expect("few"),
        };
        assert_eq!(most, i64::try_from(LIMIT).expect("few"), "{}", limit.name());
    }
}

/// Acquires this cost, at this offset from a time long ago.
async fn acquire_at(
    store: &RedisStore<Multi, impl Connection>,
    limit: &Limit<AnyAlgorithm>,
    cost: u64,
    us: u64,
) -> Verdict {
    let now = at(1_795_218_392 * WINDOW_US + us);
    apply_at(store, &[(limit, "a", cost)], Op::Acquire, None, now).await.expect("decides")
}
