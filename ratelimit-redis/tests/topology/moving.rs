//! Batches over two and three slots of a cluster whose slots move, under contention, by every
//! algorithm, with and without ids, with callers that give up at any moment. No limit admits more
//! than it may, and other callers only lose what was pending when a caller stopped.

use crate::common::prelude::*;

type Any = Arc<dyn DynStore<AnyAlgorithm>>;

const CAPACITY: u64 = 20;
/// Lets the nodes learn of one move before the next.
const BETWEEN_MOVES: Duration = Duration::from_millis(40);
const TASKS: u64 = 12;
const REQUESTS: u64 = 8;
/// Of three slots.
const KEYS: [&str; 3] = ["key-0", "key-1", "key-2"];

/// Another client was faster, or a slot moved faster than the store could follow.
fn is_uncharged(error: &impl StoreError) -> bool {
    matches!(error.kind(), ErrorKind::Contended | ErrorKind::Unavailable)
}

/// The same, or done in one slot only: a request under an id takes effect once, however often it is
/// repeated.
fn is_to_be_repeated(error: &impl StoreError) -> bool {
    is_uncharged(error) || error.to_string().contains("done in part")
}

/// The remaining cost of each key, once nothing changes any more: all requests of callers that gave
/// up have been executed.
async fn remaining_after_acquire(store: &Any, limit: &Limit<AnyAlgorithm>) -> Vec<u64> {
    let (mut before, mut same) = (Vec::new(), 0);
    while same < 10 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        match apply(store, &KEYS.map(|key| (limit, key, 0)), Op::Peek, None).await {
            Ok(shown) => {
                let now = shown.decisions().iter().map(|decision| decision.remaining).collect();
                same = if now == before { same + 1 } else { 0 };
                before = now;
            }
            Err(error) => assert!(is_uncharged(&error), "{error}"),
        }
    }
    before
}

/// Per key: how often it was admitted, and how many callers stopped while requesting it.
#[derive(Default)]
struct Seen {
    admitted: [AtomicU64; 3],
    stopped: [AtomicU64; 3],
}

/// An arbitrary moment.
fn moment(n: u64) -> Duration {
    Duration::from_micros(200 + 370 * (n % 23))
}

/// Requests two of the keys at a time, or all of them.
async fn ask(store: Any, limit: Limit<AnyAlgorithm>, task: u64, is_patient: bool, seen: Arc<Seen>) {
    for request in 0..REQUESTS {
        let some: Vec<_> = (0..3).filter(|n| (task + request) % 4 != *n as u64).collect();
        let checks: Vec<_> = some.iter().map(|place| (&limit, KEYS[*place], 1)).collect();
        let asking = apply(&store, &checks, Op::Acquire, None);
        let patience = if is_patient { 3 * PATIENCE } else { moment(task * REQUESTS + request) };
        let noted = match timeout(patience, asking).await {
            Ok(Ok(verdict)) if verdict.allowed() => &seen.admitted,
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => {
                assert!(is_uncharged(&error), "{}: {error}", limit.name());
                continue;
            }
            Err(_) => &seen.stopped,
        };
        for place in some {
            noted[place].fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn contest(store: &Any, limit: &Limit<AnyAlgorithm>, is_patient: bool) {
    let (seen, mut tasks) = (Arc::new(Seen::default()), JoinSet::new());
    for task in 0..TASKS {
        tasks.spawn(ask(Arc::clone(store), limit.clone(), task, is_patient, Arc::clone(&seen)));
    }
    tasks.join_all().await;
    for (place, left) in remaining_after_acquire(store, limit).await.into_iter().enumerate() {
        let count = |of: &[AtomicU64; 3]| of[place].load(Ordering::SeqCst);
        let (admitted, stopped) = (count(&seen.admitted), count(&seen.stopped));
        let charged = CAPACITY - left;
        assert!(
            (admitted..=admitted + stopped).contains(&charged),
            "{}: {admitted} admitted, {charged} charged, {stopped} stopped",
            limit.name()
        );
    }
}

/// Reserves all keys under ids, repeats requests without a reply, and cancels all reservations.
async fn reserve_and_cancel(
    store: Any,
    limit: Limit<AnyAlgorithm>,
    task: u64,
    reserved: Arc<AtomicU64>,
) {
    const COST: u64 = 3;
    let mut n = 0;
    for request in 0..REQUESTS {
        let id = u128::from(task * REQUESTS + request) + 1;
        let is_allowed = loop {
            n += 1;
            let checks = KEYS.map(|key| (&limit, key, COST));
            let asking = apply(&store, &checks, Op::Acquire, Some(id));
            // More patient each time.
            let patience = moment(task + 7 * n) * u32::try_from(n).expect("small");
            match timeout(patience, asking).await {
                Ok(Ok(verdict)) => break verdict.allowed(),
                Ok(Err(error)) => assert!(is_to_be_repeated(&error), "{error}"),
                Err(_) => {}
            }
        };
        if is_allowed {
            let now = reserved.fetch_add(COST, Ordering::SeqCst) + COST;
            assert!(now <= CAPACITY, "{}: {now} are reserved", limit.name());
            tokio::task::yield_now().await;
            reserved.fetch_sub(COST, Ordering::SeqCst);
        }
        cancel(&store, &limit, id).await;
    }
}

async fn cancel(store: &Any, limit: &Limit<AnyAlgorithm>, id: u128) {
    loop {
        match apply(store, &KEYS.map(|key| (limit, key, 0)), Op::Settle, Some(id)).await {
            Ok(_) => break,
            Err(error) if error.to_string().contains("has no reservation") => break,
            Err(error) => assert!(is_to_be_repeated(&error), "{error}"),
        }
    }
}

async fn reserved(store: &Any, limit: &Limit<AnyAlgorithm>) {
    let (reserved, mut tasks) = (Arc::new(AtomicU64::new(0)), JoinSet::new());
    for task in 0..TASKS {
        let reserved = Arc::clone(&reserved);
        tasks.spawn(reserve_and_cancel(Arc::clone(store), limit.clone(), task, reserved));
    }
    tasks.join_all().await;
    let _ = remaining_after_acquire(store, limit).await;
    // Reservations that were executed after their callers gave up, and cancelled here.
    for id in 1..=TASKS * REQUESTS {
        cancel(store, limit, id.into()).await;
    }
    // A bucket that was charged meanwhile keeps the part that may have refilled.
    let rounded = matches!(limit.algorithm(), AnyAlgorithm::Gcra(_));
    let due = CAPACITY - u64::from(rounded)..=CAPACITY;
    let left = remaining_after_acquire(store, limit).await;
    assert!(left.iter().all(|left| due.contains(left)), "{}: {left:?}", limit.name());
}

/// Runs work in the modes that reserve, on a cluster whose slots keep moving.
async fn on_the_move(client: Client, work: impl AsyncFn(usize, &Any)) {
    let cluster = Arc::new(RedisCluster::start().expect("a cluster"));
    let store: RedisStore = store(&cluster.url(), client).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let (over, moved) = (Arc::clone(&is_over), Arc::clone(&cluster));
    let moving = std::thread::spawn(move || {
        for key in KEYS.iter().cycle().take_while(|_| !over.load(Ordering::SeqCst)) {
            let slot = moved.slot_of(&format!("{{{key}}}"));
            let owner = moved.master_of(slot).expect("an owner");
            moved.migrate(slot, (owner + 1) % 3).expect("moved");
            std::thread::sleep(BETWEEN_MOVES);
        }
    });
    for (mode, (_, store)) in in_every_mode(&store)[..2].iter().enumerate() {
        work(mode, store).await;
    }
    is_over.store(true, Ordering::SeqCst);
    moving.join().expect("no panic");
}

/// A caller that finishes loses nothing, and one that stops at most its own request.
async fn no_charge_is_lost_and_none_is_given_back_twice(client: Client) {
    on_the_move(client, async |mode, store| {
        // Each algorithm with both in turn.
        for (n, limit) in every(CAPACITY).iter().enumerate() {
            contest(store, limit, n % 2 == mode).await;
        }
    })
    .await;
}

async fn a_reservation_is_made_once_and_returned_once(client: Client) {
    on_the_move(client, async |_, store| {
        for limit in every(CAPACITY) {
            if limit.algorithm().reservation_us().is_some() {
                reserved(store, &limit).await;
            }
        }
    })
    .await;
}

with_each_client!(
    no_charge_is_lost_and_none_is_given_back_twice,
    a_reservation_is_made_once_and_returned_once,
);
