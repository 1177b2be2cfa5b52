//! As many requests go to the store at once as the state admits. The others wait for their answers, for no longer than they may.

use std::mem::ManuallyDrop;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Limit, ManualClock, Policy, PolicyState, SnapshotStore, Source, Store, Verdict,
    WithSnapshot,
};
use ratelimit_layers::{DenialCache, DenialCacheBuilder};
use ratelimit_memory::MemoryError;
use tokio::sync::watch;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, timeout};

use crate::dropped::poll;
use crate::noted::{BEGIN, Noted};
use crate::{lasting, limit};

const TASKS: u64 = 50;
const MAX_WAIT: Duration = Duration::from_millis(50);
/// The time that a test takes which hangs. It is tokio's, which stands still while tasks run.
const FOR_EVER: Duration = Duration::from_secs(3_600);

/// What becomes of the next call of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fate {
    #[default]
    Answered,
    Fails,
    Panics,
}

/// A store whose calls begin at once, and end when its gate is open.
#[derive(Debug)]
struct Gated {
    noted: Noted,
    is_open: watch::Sender<bool>,
    begun: AtomicU64,
    next: Mutex<Fate>,
}

impl Gated {
    fn open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
    }

    /// How many calls began since the last look.
    fn begun(&self) -> u64 {
        self.begun.swap(0, Ordering::SeqCst)
    }
}

impl Store<Policy> for Gated {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        self.noted.apply(batch).await
    }
}

impl SnapshotStore<Policy> for Gated {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, Policy>,
    ) -> Result<WithSnapshot<PolicyState>, MemoryError> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let _ = self.is_open.subscribe().wait_for(|is_open| *is_open).await;
        let fate = std::mem::take(&mut *self.next.lock().expect("no panic"));
        match fate {
            Fate::Answered => self.noted.apply_with_snapshot(batch).await,
            Fate::Fails => Err(MemoryError::Full { capacity: 0 }),
            Fate::Panics => panic!("as it was told"),
        }
    }
}

type Gate = Arc<Gated>;
type Cached = DenialCache<Gate, Policy, ManualClock>;

/// A store under test around a gated one, with a limit of one per second.
struct Lab<S> {
    clock: ManualClock,
    gate: Gate,
    store: Arc<S>,
    limit: Limit<Policy>,
}

impl<S: Store<Policy, Error = MemoryError> + 'static> Lab<S> {
    fn new(
        settings: impl FnOnce(DenialCacheBuilder<ManualClock>) -> DenialCacheBuilder<ManualClock>,
        around: impl FnOnce(Cached) -> S,
    ) -> Self {
        let clock = ManualClock::new(BEGIN);
        let gate = Arc::new(Gated {
            noted: Noted::new(&clock),
            is_open: watch::Sender::new(true),
            begun: AtomicU64::new(0),
            next: Mutex::default(),
        });
        let store = Arc::new(around(settings(lasting(&clock)).build(Arc::clone(&gate))));
        Self { clock, gate, store, limit: limit("l", "gcra 1/s burst 8") }
    }

    async fn decide(&self, key: &str, cost: u64) -> Verdict {
        let check = Check { limit: &self.limit, key, cost };
        self.store.apply(&Batch::one(&check)).await.expect("decides")
    }

    fn spawn(&self, key: &'static str, cost: u64) -> JoinHandle<Result<Verdict, MemoryError>> {
        let (store, limit) = (Arc::clone(&self.store), self.limit.clone());
        tokio::spawn(async move {
            let check = Check { limit: &limit, key, cost };
            store.apply(&Batch::one(&check)).await
        })
    }

    /// Spends all of a key, and has a request denied.
    async fn exhaust(&self, key: &str) {
        assert!(self.decide(key, 8).await.allowed());
        assert_eq!(self.decide(key, 1).await.source(), Source::Store);
        self.gate.begun();
    }

    /// The end of a wait for so many.
    fn refill(&self, count: u64) {
        self.gate.open(false);
        self.clock.advance(Duration::from_secs(count));
    }
}

/// Until no task can go on.
async fn settled() {
    for _ in 0..4 * TASKS {
        yield_now().await;
    }
}

fn only<S>(found: S, due: S, what: &str) -> Result<(), String>
where
    S: Copy + PartialEq + std::fmt::Debug,
{
    if found == due { Ok(()) } else { Err(format!("{what}: {found:?}, not {due:?}")) }
}

/// Of many requests at once, those go to the store that the state admits, and no others.
async fn as_many_go_as_may_pass<S>(lab: Lab<S>) -> Result<(), String>
where
    S: Store<Policy, Error = MemoryError> + 'static,
{
    lab.exhaust("mallory").await;
    for count in [1, 3, 1, 8] {
        lab.refill(count);
        let tasks: Vec<_> = (0..TASKS).map(|_| lab.spawn("mallory", 1)).collect();
        settled().await;
        only(lab.gate.begun(), count, "calls at once")?;
        lab.gate.open(true);
        let mut admitted = 0;
        for task in tasks {
            let verdict = task.await.expect("no panic").expect("decides");
            admitted += u64::from(verdict.allowed());
            let due = if verdict.allowed() { Source::Store } else { Source::Cache };
            only(verdict.source(), due, "source")?;
        }
        only((admitted, lab.gate.begun()), (count, 0), "admitted, and later calls")?;
    }
    Ok(())
}

/// How the request ends that the others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    IsDropped,
    Fails,
    Panics,
    /// Its future is kept and polled no more.
    IsKept,
}

/// However the request ends that goes first, the others go on.
async fn others_go_on<S>(lab: Lab<S>, ending: Ending) -> Result<(), String>
where
    S: Store<Policy, Error = MemoryError> + 'static,
{
    lab.exhaust("mallory").await;
    lab.refill(1);
    let check = Check { limit: &lab.limit, key: "mallory", cost: 1 };
    let batch = Batch::one(&check);
    let mut kept = pin!(lab.store.apply(&batch));
    let first = match ending {
        Ending::IsKept => {
            assert!(poll(kept.as_mut()).is_pending());
            None
        }
        _ => Some(lab.spawn("mallory", 1)),
    };
    settled().await;
    let others: Vec<_> = (0..TASKS).map(|_| lab.spawn("mallory", 1)).collect();
    settled().await;
    only(lab.gate.begun(), 1, "calls at once")?;
    *lab.gate.next.lock().expect("no panic") = match ending {
        Ending::IsDropped | Ending::IsKept => Fate::Answered,
        Ending::Fails => Fate::Fails,
        Ending::Panics => Fate::Panics,
    };
    if ending == Ending::IsDropped {
        first.as_ref().expect("a task").abort();
        settled().await;
    }
    lab.gate.open(true);
    if let Some(first) = first {
        let ended = timeout(FOR_EVER, first).await.expect("it was not to hang");
        let due = match ended {
            Ok(Ok(_)) => None,
            Ok(Err(_)) => Some(Ending::Fails),
            Err(error) if error.is_panic() => Some(Ending::Panics),
            Err(_) => Some(Ending::IsDropped),
        };
        only(due, Some(ending), "the first")?;
    }
    let (begin, mut admitted) = (Instant::now(), 0);
    for task in others {
        let Ok(ended) = timeout(FOR_EVER, task).await else {
            return Err("another hangs".to_owned());
        };
        admitted += u64::from(ended.expect("no panic").expect("decides").allowed());
    }
    only(admitted, 1, "admitted")?;
    // Tokio's clock may be up to a millisecond late.
    let millisecond = Duration::from_millis(1);
    only(begin.elapsed() > MAX_WAIT + millisecond, false, "it takes long")?;
    // Nor does a later request wait for the first one.
    lab.refill(1);
    lab.gate.open(true);
    let begin = Instant::now();
    only(lab.decide("mallory", 1).await.allowed(), true, "later")?;
    only(begin.elapsed() > millisecond, false, "later, it takes long")
}

#[tokio::test(start_paused = true)]
async fn as_many_requests_go_to_the_store_as_may_pass() {
    as_many_go_as_may_pass(Lab::new(|settings| settings, |cached| cached)).await.expect("holds");
}

macro_rules! go_on {
    ($($name:ident, $ending:ident;)+) => { $(
        #[tokio::test(start_paused = true)]
        async fn $name() {
            let lab = Lab::new(|settings| settings, |cached| cached);
            others_go_on(lab, Ending::$ending).await.expect("holds");
        }
    )+ };
}

go_on! {
    others_go_on_if_the_first_is_dropped, IsDropped;
    others_go_on_if_the_first_fails, Fails;
    others_go_on_if_the_first_panics, Panics;
    others_go_on_if_the_first_is_no_longer_polled, IsKept;
}

/// Lets one request after the other into the cache.
struct OneByOne(Cached, tokio::sync::Mutex<()>);

impl Store<Policy> for OneByOne {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let _turn = self.1.lock().await;
        self.0.apply(batch).await
    }
}

/// Never ends a request whose caller goes away, so that its round stays open.
struct NeverFrees(Arc<Cached>);

impl Store<Policy> for NeverFrees {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        type Call = Pin<Box<dyn Future<Output = Result<Verdict, MemoryError>> + Send>>;
        let check = batch.checks()[0];
        let (cached, limit) = (Arc::clone(&self.0), check.limit.clone());
        let (key, cost) = (check.key.to_owned(), check.cost);
        let call: Call = Box::pin(async move {
            let check = Check { limit: &limit, key: &key, cost };
            cached.apply(&Batch::one(&check)).await
        });
        ManuallyDrop::new(call).as_mut().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_waits_for_none_or_for_ever_or_one_by_one_or_never_frees_is_caught() {
    let patient = |settings: DenialCacheBuilder<_>| settings.max_wait(Duration::MAX);
    let hurried = Lab::new(|settings| settings.max_wait(Duration::ZERO), |cached| cached);
    let caught = as_many_go_as_may_pass(hurried).await.expect_err("is caught");
    assert_eq!(caught, "calls at once: 50, not 1");

    let one_by_one = Lab::new(patient, |cached| OneByOne(cached, tokio::sync::Mutex::default()));
    let caught = as_many_go_as_may_pass(one_by_one).await.expect_err("is caught");
    assert_eq!(caught, "calls at once: 1, not 3");

    let caught = others_go_on(Lab::new(patient, |cached| cached), Ending::IsKept).await;
    assert_eq!(caught.expect_err("is caught"), "another hangs");

    let right = Lab::new(patient, |cached| cached);
    others_go_on(right, Ending::IsDropped).await.expect("holds");
    let never_frees = Lab::new(patient, |cached| NeverFrees(Arc::new(cached)));
    let caught = others_go_on(never_frees, Ending::IsDropped).await;
    assert_eq!(caught.expect_err("is caught"), "another hangs");
}

/// How many calls of a burst begin at once, and how many admitted requests and later calls come of it.
async fn burst<S>(lab: &Lab<S>, key: &'static str) -> (u64, u64, u64)
where
    S: Store<Policy, Error = MemoryError> + 'static,
{
    lab.gate.open(false);
    let tasks: Vec<_> = (0..TASKS).map(|_| lab.spawn(key, 1)).collect();
    settled().await;
    let begun = lab.gate.begun();
    lab.gate.open(true);
    let mut admitted = 0;
    for task in tasks {
        admitted += u64::from(task.await.expect("no panic").expect("decides").allowed());
    }
    (begun, admitted, lab.gate.begun())
}

#[tokio::test(start_paused = true)]
async fn of_many_requests_for_a_key_that_is_not_kept_few_go_and_their_answers_decide_the_others() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    assert_eq!(burst(&lab, "new").await, (4, 8, 4));
    // Another process has spent all.
    let check = Check { limit: &lab.limit, key: "mallory", cost: 8 };
    assert!(lab.gate.noted.apply(&Batch::one(&check)).await.expect("decides").allowed());
    assert_eq!(burst(&lab, "mallory").await, (4, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn where_the_store_says_nothing_of_a_limit_no_later_request_waits() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    lab.gate.noted.is_silent(true);
    assert_eq!(burst(&lab, "alice").await, (4, 8, TASKS - 4));
    assert_eq!(burst(&lab, "bob").await, (TASKS, 8, 0));
    // Until it says something again.
    lab.gate.noted.is_silent(false);
    let _ = lab.decide("carol", 1).await;
    assert_eq!(lab.gate.begun(), 1);
    assert_eq!(burst(&lab, "dave").await, (4, 8, 4));
}

#[tokio::test(start_paused = true)]
async fn where_the_store_hangs_as_many_go_as_may_pass_and_the_others_are_answered() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    lab.exhaust("mallory").await;
    lab.refill(2);
    let mut tasks: Vec<_> = (0..TASKS).map(|_| lab.spawn("mallory", 1)).collect();
    tokio::time::sleep(MAX_WAIT + Duration::from_millis(1)).await;
    // Those that have no answer for too long do not count any more.
    assert_eq!(lab.gate.begun(), 4);
    tasks.retain(|task| !task.is_finished());
    assert_eq!(tasks.len(), 4);
    assert_eq!(lab.store.counts().answered, TASKS - 4);
}

#[tokio::test(start_paused = true)]
async fn other_keys_are_not_held_up() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    lab.exhaust("mallory").await;
    lab.exhaust("bob").await;
    lab.refill(1);
    let tasks =
        ["mallory", "mallory", "bob", "carol", "carol", "carol"].map(|key| lab.spawn(key, 1));
    settled().await;
    // Of carol no denial is known.
    assert_eq!(lab.gate.begun(), 5);
    lab.gate.open(true);
    for (task, allowed) in tasks.into_iter().zip([true, false, true, true, true, true]) {
        assert_eq!(task.await.expect("no panic").expect("decides").allowed(), allowed);
    }
}

#[tokio::test(start_paused = true)]
async fn when_an_answer_is_too_old_one_request_asks_again() {
    let lab = Lab::new(|settings| settings.max_age(Duration::from_millis(500)), |cached| cached);
    lab.exhaust("mallory").await;
    lab.gate.open(false);
    lab.clock.advance(Duration::from_millis(501));
    let tasks: Vec<_> = (0..TASKS).map(|_| lab.spawn("mallory", 1)).collect();
    settled().await;
    assert_eq!(lab.gate.begun(), 1);
    lab.gate.open(true);
    let mut from_store = 0;
    for task in tasks {
        let verdict = task.await.expect("no panic").expect("decides");
        assert!(!verdict.allowed());
        from_store += u64::from(verdict.source() == Source::Store);
    }
    assert_eq!((from_store, lab.gate.begun()), (1, 0));
}

/// From the first request that waits on, all do: the round ends, and so does each wait.
#[tokio::test(start_paused = true)]
async fn requests_of_different_costs_take_turns() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    lab.exhaust("mallory").await;
    lab.refill(3);
    let mut tasks = Vec::new();
    for (cost, begun) in [(2, 1), (3, 0), (1, 0)] {
        tasks.push(lab.spawn("mallory", cost));
        settled().await;
        assert_eq!(lab.gate.begun(), begun, "{cost}");
    }
    lab.gate.open(true);
    for (task, due) in tasks.into_iter().zip([true, false, true]) {
        let verdict = task.await.expect("no panic").expect("decides");
        assert_eq!((verdict.allowed(), verdict.source() == Source::Store), (due, due));
    }
}

/// How long the slowest of many requests takes, of which some come in each millisecond, while the store takes two.
async fn slowest(lab: Lab<Cached>, per_ms: u64) -> Duration {
    let lab = Arc::new(lab);
    lab.gate.open(false);
    let mut tasks = tokio::task::JoinSet::new();
    for millisecond in 0..400 {
        lab.clock.advance(Duration::from_millis(1));
        for _ in 0..per_ms {
            let lab = Arc::clone(&lab);
            tasks.spawn(async move {
                let begin = Instant::now();
                let _ = lab.decide("mallory", 1).await;
                begin.elapsed()
            });
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        if millisecond % 2 == 1 {
            lab.gate.open(true);
            settled().await;
            lab.gate.open(false);
        }
    }
    lab.gate.open(true);
    tasks.join_all().await.into_iter().max().expect("some")
}

/// No wait ends with a denial there, so a request that waited as often as it could would wait for all of its time.
#[tokio::test(start_paused = true)]
async fn where_a_limit_refills_faster_than_the_store_answers_a_request_waits_twice() {
    let mut lab = Lab::new(|settings| settings, |cached| cached);
    lab.limit = limit("l", "gcra 1000/s burst 8");
    lab.exhaust("mallory").await;
    let slowest = slowest(lab, 10).await;
    assert!(slowest <= Duration::from_millis(10), "{slowest:?}");
}

#[tokio::test(start_paused = true)]
async fn where_the_store_says_nothing_a_request_waits_twice() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    lab.exhaust("mallory").await;
    // Another process spends what came, and from here on the store does not say what it saw.
    lab.clock.advance(Duration::from_secs(1));
    let check = Check { limit: &lab.limit, key: "mallory", cost: 1 };
    assert!(lab.gate.noted.apply(&Batch::one(&check)).await.expect("decides").allowed());
    lab.gate.noted.is_silent(true);
    let slowest = slowest(lab, 10).await;
    assert!(slowest <= Duration::from_millis(10), "{slowest:?}");
}

#[tokio::test(start_paused = true)]
async fn batches_of_the_same_checks_wait_for_each_other() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    let other = limit("other", "fixed-window 1000/d");
    let checks = [&lab.limit, &other].map(|limit| Check { limit, key: "mallory", cost: 1 });
    let batch = Batch::new(&checks).expect("distinct");
    lab.exhaust("mallory").await;
    assert!(!lab.store.apply(&batch).await.expect("decides").allowed());
    lab.gate.begun();
    lab.refill(2);
    let mut all = [(); 5].map(|()| Box::pin(lab.store.apply(&batch)));
    assert!(all.iter_mut().all(|each| poll(each.as_mut()).is_pending()));
    assert_eq!(lab.gate.begun(), 2);
    lab.gate.open(true);
    let mut sources = Vec::new();
    for each in all {
        sources.push(each.await.expect("decides").source());
    }
    assert_eq!(sources[..2], [Source::Store; 2]);
    assert_eq!(sources[2..], [Source::Cache; 3]);
}

/// There is no clock to wait by.
#[test]
fn on_no_runtime_none_waits() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    ratelimit_testkit::block_on(lab.exhaust("mallory"));
    lab.refill(1);
    let check = Check { limit: &lab.limit, key: "mallory", cost: 1 };
    let batch = Batch::one(&check);
    let mut all = [(); 5].map(|()| Box::pin(lab.store.apply(&batch)));
    assert!(all.iter_mut().all(|each| poll(each.as_mut()).is_pending()));
    assert_eq!(lab.gate.begun(), 5);
    lab.gate.open(true);
    for (place, mut each) in all.into_iter().enumerate() {
        let Poll::Ready(verdict) = poll(each.as_mut()) else { panic!("open") };
        assert_eq!(verdict.expect("decides").allowed(), place == 0);
    }
}

/// Requests of random costs, of which some are dropped at any time and others fail.
#[tokio::test(start_paused = true)]
async fn whatever_happens_none_hangs_and_no_round_stays_open() {
    let rounds = if cfg!(debug_assertions) { 200 } else { 5_000 };
    let (mut waited, mut ended) = (0, 0);
    for seed in 0..rounds {
        let mut random = fastrand::Rng::with_seed(seed);
        let lab = Lab::new(|settings| settings, |cached| cached);
        lab.exhaust("mallory").await;
        lab.exhaust("bob").await;
        let mut tasks = Vec::new();
        for _ in 0..60 {
            match random.u8(..100) {
                0..8 => lab.clock.advance(Duration::from_secs(random.u64(1..4))),
                8..16 => lab.gate.open(random.bool()),
                16..20 => *lab.gate.next.lock().expect("no panic") = Fate::Fails,
                20..30 => settled().await,
                30..40 if !tasks.is_empty() => {
                    let task: JoinHandle<_> = tasks.swap_remove(random.usize(..tasks.len()));
                    task.abort();
                }
                _ => {
                    let key = if random.bool() { "mallory" } else { "bob" };
                    tasks.push(lab.spawn(key, random.u64(1..4)));
                }
            }
        }
        lab.gate.open(false);
        lab.clock.advance(Duration::from_secs(1));
        let last = [(); 4].map(|()| lab.spawn("mallory", 1));
        settled().await;
        waited += u64::from(last.iter().all(|task| !task.is_finished()));
        tasks.extend(last);
        lab.gate.open(true);
        for task in tasks {
            let task = timeout(FOR_EVER, task).await.expect("none hangs");
            ended += u64::from(task.expect("no panic").is_ok());
        }
        let open = format!("{:?}", lab.store);
        assert!(open.contains("Rounds { open: 0, .. }"), "{seed}: {open}");
    }
    assert!(waited > rounds / 2 && ended > 10 * rounds, "{waited} waited, {ended} ended");
}

/// Each second admits one request, whichever thread is first; if it is dropped, it may be the one that was charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_several_threads_one_is_admitted_per_second_and_no_round_stays_open() {
    let lab = Lab::new(|settings| settings, |cached| cached);
    lab.exhaust("mallory").await;
    for second in 0..200 {
        lab.clock.advance(Duration::from_secs(1));
        let mut tasks: Vec<_> = (0..TASKS).map(|_| lab.spawn("mallory", 1)).collect();
        let drops = second % 2 == 0;
        if drops {
            tasks.swap_remove(second % tasks.len()).abort();
        }
        let mut admitted = 0;
        for task in tasks {
            admitted += u64::from(task.await.expect("no panic").expect("decides").allowed());
        }
        assert!(admitted == 1 || (admitted == 0 && drops), "{second}: {admitted}");
    }
    // A task that was dropped may still be ending.
    let ended = async {
        while !format!("{:?}", lab.store).contains("Rounds { open: 0, .. }") {
            yield_now().await;
        }
    };
    timeout(FOR_EVER, ended).await.expect("no round stays open");
}
