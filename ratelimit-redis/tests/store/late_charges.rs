//! Late transactions: the read lies before a window's end and the charge after it. Observed from
//! outside, no period has more admitted than the limit allows.
//!
//! No check depends on timing: the bounds hold whatever the times are, and a machine that is too
//! slow to hit the end of a window only shows less.

use futures_util::future::join_all;

use crate::common::prelude::*;

const WINDOW_US: u64 = 1_000_000;
const LIMIT: u64 = 20;
const CALLERS: usize = 64;

/// Waits until a time.
async fn wait_until(us: u64) {
    tokio::time::sleep(Duration::from_micros(us.saturating_sub(now_us()))).await;
}

/// When charges are sent: after a time, or each at a different time.
#[derive(Default)]
struct Late {
    until_us: AtomicU64,
    most_us: AtomicU64,
    charges: AtomicU64,
}

impl Late {
    /// The time until which the next charge is delayed. Each arrives after some that were made
    /// later.
    fn next_us(&self) -> u64 {
        let charge = self.charges.fetch_add(1, Ordering::SeqCst);
        let most_us = self.most_us.load(Ordering::SeqCst);
        let while_us = charge.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let mixed_us = now_us() + while_us % most_us.max(1);
        mixed_us.max(self.until_us.load(Ordering::SeqCst))
    }
}

fn is_charge(words: &Words) -> bool {
    words.has_any(&["HINCRBY", "ZADD", "RPUSH"])
}

/// An admission, between these times.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    cost: u64,
    asked_us: u64,
    told_us: u64,
}

/// All limits that a transaction can decide: so many per second, or per hour.
fn all(length: &str) -> Vec<Limit<AnyAlgorithm>> {
    let of = |name: &str| limit(name, &format!("{name} {LIMIT}/{length} count attempts"));
    NATIVE.map(of).into()
}

/// The most that may be admitted to requests that begin and end within a period. `fresh`: no window
/// had begun before it.
fn bound(algorithm: &AnyAlgorithm, from_us: u64, to_us: u64, fresh: bool) -> u64 {
    match algorithm {
        AnyAlgorithm::FixedWindow(_) => LIMIT * (to_us / WINDOW_US - from_us / WINDOW_US + 1),
        AnyAlgorithm::SlidingLog(_) => LIMIT * ((to_us - from_us) / WINDOW_US + 1),
        // A window of its own begins at most once per window length.
        _ => LIMIT * ((to_us - from_us) / WINDOW_US + 1 + u64::from(!fresh)),
    }
}

/// A limit of a test, and what it has admitted.
struct Scene {
    late: Arc<Late>,
    store: RedisStore<Multi, Meddled>,
    limit: Arc<Limit<AnyAlgorithm>>,
    admitted: Vec<Admitted>,
}

impl Scene {
    async fn new(server: &RedisServer, limit: Limit<AnyAlgorithm>) -> Self {
        let late = Arc::<Late>::default();
        let connection = meddled(server).await;
        let connection = connection.before_with(Arc::clone(&late), |late, words| async move {
            if is_charge(&words) {
                wait_until(late.next_us()).await;
            }
            Fate::Sent
        });
        let store = over(RedisStore::builder().multi().deadline(PATIENCE), connection);
        Self { late, store, limit: Arc::new(limit), admitted: Vec::new() }
    }

    /// Starts a request.
    fn caller(&self, cost: u64) -> JoinHandle<Option<Admitted>> {
        let (store, limit) = (self.store.clone(), Arc::clone(&self.limit));
        tokio::spawn(async move {
            let asked_us = now_us();
            let checks = [(&*limit, "a", cost)];
            let verdict = apply(&store, &checks, Op::Acquire, None).await;
            let admitted = Admitted { cost, asked_us, told_us: now_us() };
            match verdict {
                Ok(verdict) => verdict.allowed().then_some(admitted),
                // Its charge is late: it is not admitted.
                Err(RedisError::TimedOut { deadline, .. }) if deadline < PATIENCE => None,
                Err(error) => panic!("decides: {error:?}"),
            }
        })
    }

    /// Starts this many concurrent requests, whose charges are delayed until this time.
    async fn ask(&mut self, callers: usize, until_us: u64) {
        self.late.until_us.store(until_us, Ordering::SeqCst);
        let callers: Vec<_> = (0..callers).map(|_| self.caller(1)).collect();
        for caller in callers {
            self.admitted.extend(caller.await.expect("no panic"));
        }
    }

    /// Sends many requests, at costs that do not always fit, whose charges overtake each other.
    async fn mixes(&mut self) {
        self.late.most_us.store(WINDOW_US / 8, Ordering::SeqCst);
        let mut callers = Vec::new();
        for n in 0..400 {
            callers.push(self.caller(1 + n % 3));
            tokio::time::sleep(Duration::from_micros(WINDOW_US / 133)).await;
        }
        for caller in callers {
            self.admitted.extend(caller.await.expect("no panic"));
        }
    }

    /// Almost fills a window at its start. Requests just before its end are charged just after it.
    /// Then more requests follow: at once, or when the late charges would have expired if they
    /// counted before the end.
    async fn plays(&mut self) {
        let begin_us = (now_us() / WINDOW_US + 1) * WINDOW_US;
        wait_until(begin_us).await;
        let nearly = usize::try_from(LIMIT - 1).expect("few");
        self.ask(nearly, 0).await;
        let first_us = self.admitted.iter().map(|one| one.asked_us).min().expect("some were");
        let last_us = self.admitted.iter().map(|one| one.told_us).max().expect("some were");
        let (end_us, gone_us) = match self.limit.algorithm() {
            AnyAlgorithm::FixedWindow(_) => (begin_us + WINDOW_US, begin_us + WINDOW_US),
            _ => (first_us + WINDOW_US, last_us + WINDOW_US),
        };
        wait_until(end_us - 200_000).await;
        self.ask(CALLERS, gone_us + 20_000).await;
        // A denied attempt would hide what the later requests have to show.
        if !slides(self.limit.algorithm()) {
            self.ask(CALLERS, 0).await;
        }
        wait_until(end_us + WINDOW_US - 180_000).await;
        self.ask(CALLERS, 0).await;
    }

    /// Checks every period from the start of one request to the end of one.
    fn keeps_its_bound(&self) {
        let (algorithm, admitted) = (self.limit.algorithm(), &self.admitted);
        let first_us = admitted.iter().map(|one| one.asked_us).min().expect("some were");
        for from_us in admitted.iter().map(|one| one.asked_us) {
            for to_us in admitted.iter().map(|one| one.told_us).filter(|us| *us >= from_us) {
                let inside =
                    admitted.iter().filter(|one| one.asked_us >= from_us && one.told_us <= to_us);
                let count: u64 = inside.map(|one| one.cost).sum();
                let most = bound(algorithm, from_us, to_us, from_us == first_us);
                let us = to_us - from_us;
                assert!(
                    count <= most,
                    "{algorithm}: {count} within {us} µs, and at most {most} may be"
                );
            }
        }
    }
}

/// A scene per algorithm, all concurrent, each with its own keys.
async fn scenes(server: &RedisServer, length: &str) -> Vec<Scene> {
    join_all(all(length).into_iter().map(|limit| Scene::new(server, limit))).await
}

/// Neither do many charges that overtake each other.
#[tokio::test]
async fn a_charge_after_the_end_of_its_window_admits_no_more() {
    let server = server();
    let mut scenes = scenes(&server, "1s").await;
    join_all(scenes.iter_mut().map(Scene::plays)).await;
    scenes.iter().for_each(Scene::keeps_its_bound);
    join_all(scenes.iter_mut().map(Scene::mixes)).await;
    scenes.iter().for_each(Scene::keeps_its_bound);
}

/// Whether an attempt that does not fit displaces older ones: then a late charge stays.
fn slides(algorithm: &AnyAlgorithm) -> bool {
    matches!(algorithm, AnyAlgorithm::SlidingLog(_))
}

/// The entries that counted at the time of such a charge may be gone.
#[tokio::test]
async fn a_charge_more_than_a_second_late_is_in_doubt_and_counts_once() {
    let server = server();
    let mut scenes = scenes(&server, "1h").await;
    let until_us = now_us() + 1_300_000;
    join_all(scenes.iter_mut().map(|scene| scene.ask(1, until_us))).await;
    for Scene { limit, store, late, admitted } in &scenes {
        let (algorithm, charges) = (limit.algorithm(), late.charges.load(Ordering::SeqCst));
        assert_eq!((admitted.len(), charges), (0, 1), "{algorithm}");
        assert_eq!(peek(store, limit, "a").await, LIMIT - 1, "{algorithm}");
    }
}

/// What another client does between the read of a request and its charge.
async fn decided_after<F: Future<Output = ()> + Send + 'static>(
    server: &RedisServer,
    limit: &Limit<AnyAlgorithm>,
    (cost, us): (u64, u64),
    between: impl Fn(RedisStore<Multi, Meddled>) -> F + Send + Sync + 'static,
) -> Verdict {
    let builder = || RedisStore::builder().multi().deadline(PATIENCE);
    let (sent, between) = (Arc::new(AtomicUsize::new(0)), Arc::new(between));
    let needed = (Arc::clone(&sent), between, over(builder(), meddled(server).await));
    let connection = meddled(server).await;
    let connection = connection.before_with(needed, |(sent, between, quick), words| async move {
        if is_charge(&words) && sent.fetch_add(1, Ordering::SeqCst) == 0 {
            between(quick).await;
        }
        Fate::Sent
    });
    let verdict = acquire(&over(builder(), connection), limit, cost, us).await;
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
                async move { assert!(acquire(&quick, &other, 3, later_us).await.allowed()) }
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
        assert!(acquire(&quiet, limit, LIMIT - 1, 10_000).await.allowed());
        let other = limit.clone();
        let verdict = decided_after(&server, limit, (2, 10_000), move |quick| {
            let other = other.clone();
            async move {
                let one = [(&other, "a", 1)];
                let _ = apply(&quick, &one, Op::Reset, None).await.expect("decides");
                assert!(acquire(&quick, &other, again, 10_000).await.allowed());
            }
        });
        assert!(!verdict.await.allowed(), "{}, then {again}", limit.name());
        let left = acquire(&quiet, limit, 0, 10_001).await.remaining();
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
            let allowed = acquire(&store, &limit, 1, us).await.allowed();
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
async fn acquire(
    store: &RedisStore<Multi, impl Connection>,
    limit: &Limit<AnyAlgorithm>,
    cost: u64,
    us: u64,
) -> Verdict {
    let now = at(1_795_218_392 * WINDOW_US + us);
    apply_at(store, &[(limit, "a", cost)], Op::Acquire, None, now).await.expect("decides")
}
