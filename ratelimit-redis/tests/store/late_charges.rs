//! Late transactions: the read lies before a window's end and the charge after it. Observed from
//! outside, no period has more admitted than the limit allows.
//!
//! No check depends on timing: the bounds hold whatever the times are, and a machine that is too slow to
//! hit the end of a window only shows less.

use futures_util::future::join_all;
use ratelimit_core::algorithm::BucketWindow;

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
    /// The time until which the next charge is delayed. Each arrives after some that were made later.
    fn next_us(&self) -> u64 {
        let charge = self.charges.fetch_add(1, Ordering::SeqCst);
        let most_us = self.most_us.load(Ordering::SeqCst);
        let while_us = charge.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let mixed_us = now_us() + while_us % most_us.max(1);
        mixed_us.max(self.until_us.load(Ordering::SeqCst))
    }
}

fn is_charge(words: &Words) -> bool {
    words.has_any(&["HINCRBY", "ZADD", "RPUSH", "RPUSHX"])
}

/// An admission, between these times.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    cost: u64,
    asked_us: u64,
    told_us: u64,
}

/// All limits that a transaction can decide: so many per second, or per hour.
fn all(length: &str, bucket: &str) -> Vec<Limit<Policy>> {
    let of = |name: &str| {
        let buckets = format!("bucket {bucket} rates ");
        let buckets = if name == "bucketed-window" { &*buckets } else { "" };
        limit(name, &format!("{name} {buckets}20/{length} count attempts"))
    };
    NATIVE.map(of).into()
}

/// The most that may be admitted to requests that begin and end within a period. `fresh`: no window had
/// begun before it.
fn bound(policy: &Policy, from_us: u64, to_us: u64, fresh: bool) -> u64 {
    let touched = |length_us: u64| to_us / length_us - from_us / length_us + 1;
    match policy {
        Policy::FixedWindowAttempts(_) => LIMIT * touched(WINDOW_US),
        Policy::BucketedWindowAttempts(attempts) => {
            let (bucket_us, windows) =
                (attempts.algorithm().bucket_us(), attempts.algorithm().windows());
            let most = |window: &BucketWindow| {
                window.limit * touched(bucket_us).div_ceil(window.span_us / bucket_us)
            };
            windows.iter().map(most).min().expect("a window")
        }
        Policy::SlidingLogAttempts(_) => LIMIT * ((to_us - from_us) / WINDOW_US + 1),
        // A window of its own begins at most once per window length.
        _ => LIMIT * ((to_us - from_us) / WINDOW_US + 1 + u64::from(!fresh)),
    }
}

/// A limit of a test, and what it has admitted.
struct Scene {
    late: Arc<Late>,
    store: RedisStore<Multi, Meddled>,
    limit: Arc<Limit<Policy>>,
    admitted: Vec<Admitted>,
}

impl Scene {
    async fn new(server: &RedisServer, limit: Limit<Policy>) -> Self {
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
                // On a slow machine its charges are late as often as they are tried: it is not admitted.
                Err(RedisError::InPart(why)) if why.kind() == ErrorKind::Contended => None,
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

    /// Almost fills a window at its start. Requests just before its end are charged just after it. Then
    /// more requests follow: at once, or when the late charges would have expired if they counted before
    /// the end.
    async fn plays(&mut self) {
        let begin_us = (now_us() / WINDOW_US + 1) * WINDOW_US;
        wait_until(begin_us).await;
        let nearly = usize::try_from(LIMIT - 1).expect("few");
        self.ask(nearly, 0).await;
        let first_us = self.admitted.iter().map(|one| one.asked_us).min().expect("some were");
        let last_us = self.admitted.iter().map(|one| one.told_us).max().expect("some were");
        let (end_us, gone_us) = match self.limit.algorithm() {
            Policy::FixedWindowAttempts(_) | Policy::BucketedWindowAttempts(_) => {
                (begin_us + WINDOW_US, begin_us + WINDOW_US)
            }
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
        let (policy, admitted) = (self.limit.algorithm(), &self.admitted);
        let first_us = admitted.iter().map(|one| one.asked_us).min().expect("some were");
        for from_us in admitted.iter().map(|one| one.asked_us) {
            for to_us in admitted.iter().map(|one| one.told_us).filter(|us| *us >= from_us) {
                let inside =
                    admitted.iter().filter(|one| one.asked_us >= from_us && one.told_us <= to_us);
                let count: u64 = inside.map(|one| one.cost).sum();
                let most = bound(policy, from_us, to_us, from_us == first_us);
                let us = to_us - from_us;
                assert!(
                    count <= most,
                    "{policy}: {count} within {us} µs, and at most {most} may be"
                );
            }
        }
    }
}

/// A scene per algorithm, all concurrent, each with its own keys.
async fn scenes(server: &RedisServer, length: &str, bucket: &str) -> Vec<Scene> {
    join_all(all(length, bucket).into_iter().map(|limit| Scene::new(server, limit))).await
}

/// Neither do many charges that overtake each other.
#[tokio::test]
async fn a_charge_after_the_end_of_its_window_admits_no_more() {
    let server = server();
    let mut scenes = scenes(&server, "1s", "200ms").await;
    join_all(scenes.iter_mut().map(Scene::plays)).await;
    scenes.iter().for_each(Scene::keeps_its_bound);
    join_all(scenes.iter_mut().map(Scene::mixes)).await;
    scenes.iter().for_each(Scene::keeps_its_bound);
}

/// Whether an attempt that does not fit displaces older ones: then a late charge stays.
fn slides(policy: &Policy) -> bool {
    matches!(policy, Policy::BucketedWindowAttempts(_) | Policy::SlidingLogAttempts(_))
}

/// The entries that counted at the time of such a charge may be gone.
#[tokio::test]
async fn a_charge_more_than_a_second_late_is_made_again() {
    let server = server();
    let mut scenes = scenes(&server, "1h", "12m").await;
    let until_us = now_us() + 1_300_000;
    join_all(scenes.iter_mut().map(|scene| scene.ask(1, until_us))).await;
    for Scene { limit, store, late, admitted } in &scenes {
        let (policy, charges) = (limit.algorithm(), late.charges.load(Ordering::SeqCst));
        assert_eq!((admitted.len(), charges), (1, 2), "{policy}");
        let used = if slides(policy) { 2 } else { 1 };
        assert_eq!(peek(store, limit, "a").await, policy.capacity() - used, "{policy}");
    }
}

/// Later requests that were faster do not make it start again, and it does not count among them.
#[tokio::test]
async fn an_overtaken_charge_is_decided_as_of_its_own_time() {
    let server = server();
    for limit in all("1s", "200ms") {
        let policy = limit.algorithm();
        let later_us = if slides(policy) { WINDOW_US / 2 } else { WINDOW_US + 20_000 };
        let charges = Arc::new(AtomicU64::new(0));
        let quicker = meddled(&server).await;
        let needed = (Arc::clone(&charges), quicker, limit.clone());
        let connection = meddled(&server).await;
        let connection =
            connection.before_with(needed, move |(counted, quicker, limit), words| async move {
                if is_charge(&words) && counted.fetch_add(1, Ordering::SeqCst) == 0 {
                    assert!(acquire(quicker, &limit, 3, later_us).await.allowed());
                }
                Fate::Sent
            });
        let verdict = acquire(connection, &limit, 2, 10_000).await;
        assert!(verdict.allowed(), "{policy}: {verdict:?}");
        assert_eq!(charges.load(Ordering::SeqCst), 1, "{policy}");
        // A sliding window contains both charges; otherwise each has its own window.
        let together = if slides(policy) { 5 } else { 2 };
        assert_eq!(verdict.remaining(), policy.capacity() - together, "{policy}");
        tell(&server, &["FLUSHALL"]);
    }
}

/// Acquires this cost, at this offset from a time long ago.
async fn acquire(
    connection: impl Connection,
    limit: &Limit<Policy>,
    cost: u64,
    us: u64,
) -> Verdict {
    let builder = RedisStore::builder().multi().deadline(PATIENCE);
    let store = builder.over(connection).expect("a prefix");
    let now = at(1_795_218_392 * WINDOW_US + us);
    apply_at(&store, &[(limit, "a", cost)], Op::Acquire, None, now).await.expect("decides")
}

/// Another client charges before the charge, and resets the key before the correction of what both have displaced.
#[tokio::test]
async fn a_correction_of_a_key_that_is_gone_leaves_no_key_for_ever() {
    const DAY_US: u64 = 86_400_000_000;
    let server = server();
    let limit = limit("l", "bucketed-window bucket 1d rates 3/10d count attempts");
    let others = plain(&server).await.in_mode::<Multi>();
    let full = [(&limit, "a", 3)];
    let before = at(now_us() - 2 * DAY_US);
    assert!(apply_at(&others, &full, Op::Acquire, None, before).await.expect("decided").allowed());
    let sent = Arc::new(AtomicUsize::new(0));
    let needed = (others, limit.clone(), sent.clone());
    let connection = meddled(&server).await;
    let connection = connection.before_with(needed, |(others, limit, sent), words| async move {
        if is_charge(&words) {
            let op = [Op::Acquire, Op::Reset][sent.fetch_add(1, Ordering::SeqCst)];
            let _ = apply(&others, &[(&limit, "a", 1)], op, None).await.expect("decided");
        }
        Fate::Sent
    });
    let store = over(RedisStore::builder().multi().deadline(PATIENCE), connection);
    let one = apply(&store, &[(&limit, "a", 1)], Op::Acquire, None).await;
    assert!(!one.expect("decided").allowed());
    assert_eq!(sent.load(Ordering::SeqCst), 2, "a charge and a correction");
    assert_eq!(outliving(&server, "rl", 1_000), [""; 0]);
}
