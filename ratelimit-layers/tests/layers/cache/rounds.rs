//! As many requests go to the store at once as the state admits. The others wait for their answers,
//! for no longer than they may.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{AnyAlgorithm, ErrorKind, Limit, ManualClock, Source, Store, Verdict};
use ratelimit_layers::{DenialCache, DenialCacheBuilder};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, timeout};

use crate::cache::lasting;
use crate::common::{
    BEGIN, Fake, FakeError, Mode, ask, limit, paused_runtime, poll, run_until_idle,
};

const TASKS: u64 = 50;
const MAX_WAIT: Duration = Duration::from_millis(50);
/// The time that a test takes which hangs. It is tokio's, which stands still while tasks run.
const FOR_EVER: Duration = Duration::from_secs(3_600);

type Task = JoinHandle<Result<Verdict, FakeError>>;

/// A cache around a store with a gate, and a limit of one per second.
struct Lab {
    clock: ManualClock,
    store: Arc<DenialCache<Fake, AnyAlgorithm, ManualClock>>,
    limit: Limit<AnyAlgorithm>,
}

impl Lab {
    fn new() -> Self {
        Self::with(|settings| settings)
    }

    fn with(
        settings: impl FnOnce(DenialCacheBuilder<ManualClock>) -> DenialCacheBuilder<ManualClock>,
    ) -> Self {
        let clock = ManualClock::new(BEGIN);
        let store = settings(lasting(&clock)).build(Fake::new(&clock)).into();
        Self { clock, store, limit: limit("l", "gcra 1/s burst 8") }
    }

    fn fake(&self) -> &Fake {
        self.store.store()
    }

    async fn decide(&self, key: &str, cost: u64) -> Verdict {
        ask(&*self.store, &self.limit, key, cost).await
    }

    fn spawn(&self, key: &'static str, cost: u64) -> Task {
        let (store, limit) = (Arc::clone(&self.store), self.limit.clone());
        tokio::spawn(
            async move { store.apply(&Batch::one(&Check { limit: &limit, key, cost })).await },
        )
    }

    fn spawn_all(&self, key: &'static str) -> Vec<Task> {
        (0..TASKS).map(|_| self.spawn(key, 1)).collect()
    }

    /// Spends all of a key, and has a request denied.
    async fn exhaust(&self, key: &str) {
        assert!(self.decide(key, 8).await.allowed());
        assert_eq!(self.decide(key, 1).await.source(), Source::Store);
        self.fake().calls();
    }

    /// Another process spends so much.
    async fn spend(&self, key: &str, cost: u64) {
        assert!(ask(&self.fake().memory, &self.limit, key, cost).await.allowed());
    }

    /// The end of a wait for so many, from when on the gate is closed.
    fn refill(&self, count: u64) {
        self.fake().open(false);
        self.clock.advance(Duration::from_secs(count));
    }

    /// Of many requests at once, how many begin a call at once, how many are admitted, and how many
    /// calls begin later.
    async fn burst(&self, key: &'static str) -> (u64, u64, u64) {
        self.fake().open(false);
        let tasks = self.spawn_all(key);
        run_until_idle().await;
        let begun = self.fake().calls();
        self.fake().open(true);
        (begun, count_admitted(tasks).await, self.fake().calls())
    }

    fn is_quiet(&self) -> bool {
        format!("{:?}", self.store).contains("open_rounds: 0,")
    }
}

/// How many of these requests are admitted, none of which fails or hangs.
async fn count_admitted(tasks: Vec<Task>) -> u64 {
    let mut admitted = 0;
    for task in tasks {
        let ended = timeout(FOR_EVER, task).await.expect("none hangs");
        admitted += u64::from(ended.expect("no panic").expect("decides").allowed());
    }
    admitted
}

#[tokio::test(start_paused = true)]
async fn as_many_requests_go_to_the_store_as_may_pass() {
    let lab = Lab::new();
    lab.exhaust("mallory").await;
    for count in [1, 3, 1, 8] {
        lab.refill(count);
        let before = lab.store.counts().answered;
        assert_eq!(lab.burst("mallory").await, (count, count, 0));
        assert_eq!(lab.store.counts().answered - before, TASKS - count);
    }
    // Of a key that is not kept, few go, and their answers decide the others.
    assert_eq!(lab.burst("new").await, (4, 8, 4));
    lab.spend("other", 8).await;
    assert_eq!(lab.burst("other").await, (4, 0, 0));
    // Where the store says nothing of a limit, no later request waits, until it says something
    // again.
    lab.fake().set(Mode::Silent);
    assert_eq!(lab.burst("alice").await, (4, 8, TASKS - 4));
    assert_eq!(lab.burst("bob").await, (TASKS, 8, 0));
    lab.fake().set(Mode::Answers);
    let _ = lab.decide("carol", 1).await;
    lab.fake().calls();
    assert_eq!(lab.burst("dave").await, (4, 8, 4));
}

#[tokio::test(start_paused = true)]
async fn others_go_on_however_the_first_ends() {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Ending {
        IsDropped,
        Fails,
        Panics,
        /// Its future is kept and polled no more.
        IsKept,
    }
    for ending in [Ending::IsDropped, Ending::Fails, Ending::Panics, Ending::IsKept] {
        let lab = Lab::new();
        lab.exhaust("mallory").await;
        lab.refill(1);
        let mut kept = pin!(lab.decide("mallory", 1));
        let first = if ending == Ending::IsKept {
            assert!(poll(kept.as_mut()).is_pending());
            None
        } else {
            Some(lab.spawn("mallory", 1))
        };
        run_until_idle().await;
        let others = lab.spawn_all("mallory");
        run_until_idle().await;
        assert_eq!(lab.fake().calls(), 1, "{ending:?}");
        match ending {
            Ending::IsDropped => first.iter().for_each(JoinHandle::abort),
            Ending::Fails => lab.fake().once(Mode::Fails(ErrorKind::Unavailable)),
            Ending::Panics => lab.fake().once(Mode::Panics),
            Ending::IsKept => {}
        }
        run_until_idle().await;
        lab.fake().open(true);
        if let Some(first) = first {
            let ended = match timeout(FOR_EVER, first).await.expect("it was not to hang") {
                Ok(said) => said.is_err().then_some(Ending::Fails),
                Err(error) if error.is_panic() => Some(Ending::Panics),
                Err(_) => Some(Ending::IsDropped),
            };
            assert_eq!(ended, Some(ending));
        }
        // Tokio's clock may be up to a millisecond late.
        let (begin, millisecond) = (Instant::now(), Duration::from_millis(1));
        assert_eq!(count_admitted(others).await, 1, "{ending:?}");
        assert!(begin.elapsed() <= MAX_WAIT + millisecond, "{ending:?}: {:?}", begin.elapsed());
        // Nor does a later request wait for the first one.
        lab.refill(1);
        lab.fake().open(true);
        let begin = Instant::now();
        assert!(lab.decide("mallory", 1).await.allowed(), "{ending:?}");
        assert!(begin.elapsed() <= millisecond, "{ending:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_the_store_hangs_as_many_go_as_may_pass_and_the_others_are_answered() {
    let lab = Lab::new();
    lab.exhaust("mallory").await;
    lab.refill(2);
    let mut tasks = lab.spawn_all("mallory");
    tokio::time::sleep(MAX_WAIT + Duration::from_millis(1)).await;
    // Those that have no answer for too long do not count any more.
    assert_eq!(lab.fake().calls(), 4);
    tasks.retain(|task| !task.is_finished());
    assert_eq!((tasks.len(), lab.store.counts().answered), (4, TASKS - 4));
}

#[tokio::test(start_paused = true)]
async fn requests_of_different_costs_take_turns_and_hold_up_no_other_key() {
    let lab = Lab::new();
    lab.exhaust("mallory").await;
    lab.exhaust("bob").await;
    lab.refill(3);
    let mut tasks = Vec::new();
    // From the first request that waits on, all of its key do. Of carol no denial is known.
    for (key, cost, begun) in
        [("mallory", 2, 1), ("mallory", 3, 0), ("mallory", 1, 0), ("bob", 1, 1), ("carol", 8, 1)]
    {
        tasks.push(lab.spawn(key, cost));
        run_until_idle().await;
        assert_eq!(lab.fake().calls(), begun, "{key} {cost}");
    }
    lab.fake().open(true);
    for (task, due) in tasks.into_iter().zip([true, false, true, true, true]) {
        let verdict = task.await.expect("no panic").expect("decides");
        assert_eq!((verdict.allowed(), verdict.source() == Source::Store), (due, due));
    }
}

#[tokio::test(start_paused = true)]
async fn when_an_answer_is_too_old_one_request_asks_again() {
    let lab = Lab::with(|settings| settings.max_age(Duration::from_millis(500)));
    lab.exhaust("mallory").await;
    lab.clock.advance(Duration::from_millis(501));
    assert_eq!(lab.burst("mallory").await, (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn batches_of_the_same_checks_wait_for_each_other() {
    let lab = Lab::new();
    let other = limit("other", "fixed-window 1000/d");
    let checks = [&lab.limit, &other].map(|limit| Check { limit, key: "mallory", cost: 1 });
    let batch = Batch::new(&checks).expect("distinct");
    lab.exhaust("mallory").await;
    assert!(!lab.store.apply(&batch).await.expect("decides").allowed());
    lab.fake().calls();
    lab.refill(2);
    let mut all = [(); 5].map(|()| Box::pin(lab.store.apply(&batch)));
    assert!(all.iter_mut().all(|each| poll(each.as_mut()).is_pending()));
    assert_eq!(lab.fake().calls(), 2);
    lab.fake().open(true);
    for (position, each) in all.into_iter().enumerate() {
        let due = if position < 2 { Source::Store } else { Source::Cache };
        assert_eq!(each.await.expect("decides").source(), due);
    }
}

/// On no runtime there is no clock to wait by.
#[test]
fn on_no_runtime_none_waits_nor_where_waiting_is_off() {
    let runtime = paused_runtime();
    for max_wait in [MAX_WAIT, Duration::ZERO] {
        let _entered = max_wait.is_zero().then(|| runtime.enter());
        let lab = Lab::with(|settings| settings.max_wait(max_wait));
        ratelimit_testkit::block_on(lab.exhaust("mallory"));
        lab.refill(1);
        let mut all = [(); 5].map(|()| Box::pin(lab.decide("mallory", 1)));
        assert!(all.iter_mut().all(|each| poll(each.as_mut()).is_pending()));
        assert_eq!(lab.fake().calls(), 5);
        lab.fake().open(true);
        for (position, mut each) in all.into_iter().enumerate() {
            let Poll::Ready(verdict) = poll(each.as_mut()) else { panic!("open") };
            assert_eq!(verdict.allowed(), position == 0);
        }
    }
}

/// Requests of random costs, of which some are dropped at any time and others fail.
#[tokio::test(start_paused = true)]
async fn whatever_happens_none_hangs_and_no_round_stays_open() {
    let rounds = if cfg!(debug_assertions) { 200 } else { 5_000 };
    let (mut waited, mut ended) = (0, 0);
    for seed in 0..rounds {
        let mut random = fastrand::Rng::with_seed(seed);
        let lab = Lab::new();
        lab.exhaust("mallory").await;
        lab.exhaust("bob").await;
        let mut tasks = Vec::new();
        for _ in 0..60 {
            match random.u8(..100) {
                0..8 => lab.clock.advance(Duration::from_secs(random.u64(1..4))),
                8..16 => lab.fake().open(random.bool()),
                16..20 => lab.fake().once(Mode::Fails(ErrorKind::Config)),
                20..30 => run_until_idle().await,
                30..40 if !tasks.is_empty() => {
                    let task: Task = tasks.swap_remove(random.usize(..tasks.len()));
                    task.abort();
                }
                _ => {
                    let key = if random.bool() { "mallory" } else { "bob" };
                    tasks.push(lab.spawn(key, random.u64(1..4)));
                }
            }
        }
        lab.refill(1);
        let last = [(); 4].map(|()| lab.spawn("mallory", 1));
        run_until_idle().await;
        waited += u64::from(last.iter().all(|task| !task.is_finished()));
        tasks.extend(last);
        lab.fake().open(true);
        for task in tasks {
            let task = timeout(FOR_EVER, task).await.expect("none hangs");
            ended += u64::from(task.expect("no panic").is_ok());
        }
        assert!(lab.is_quiet(), "{seed}: {:?}", lab.store);
    }
    assert!(waited > rounds / 2 && ended > 10 * rounds, "{waited} waited, {ended} ended");
}

/// Each second admits one request, whichever thread is first; if it is dropped, it may be the one
/// that was charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_several_threads_one_is_admitted_per_second_and_no_round_stays_open() {
    let lab = Lab::new();
    lab.exhaust("mallory").await;
    for second in 0..200 {
        lab.clock.advance(Duration::from_secs(1));
        let mut tasks = lab.spawn_all("mallory");
        let drops = second % 2 == 0;
        if drops {
            tasks.swap_remove(second % tasks.len()).abort();
        }
        let admitted = count_admitted(tasks).await;
        assert!(admitted == 1 || (admitted == 0 && drops), "{second}: {admitted}");
    }
    // A task that was dropped may still be ending.
    let ended = async {
        while !lab.is_quiet() {
            yield_now().await;
        }
    };
    timeout(FOR_EVER, ended).await.expect("no round stays open");
}
