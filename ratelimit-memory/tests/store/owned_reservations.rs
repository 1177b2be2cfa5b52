//! A reservation that owns what it needs settles or releases itself, wherever it is dropped.
//!
//! Time is paused: a store that answers after a minute takes none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Batch, Concurrency, Gcra, InMemory, Limit, Limits, ManualClock, Op, OwnedReservation, Policy,
    RateLimiter, Refusal, Reserved, Store, StoreError, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use tokio::runtime::Builder;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

const ANSWER: Duration = Duration::from_secs(60);

/// A store in memory that decides at once and answers a minute later, or loses answers.
struct Slow {
    store: MemoryStore<Policy, ManualClock>,
    /// How many of the next answers are lost, of what is not only looked at.
    lost: AtomicU64,
}

#[derive(Debug, thiserror::Error)]
enum SlowError {
    #[error("the answer was lost")]
    Lost,
    #[error(transparent)]
    Store(#[from] MemoryError),
}

impl From<Refusal> for SlowError {
    fn from(refusal: Refusal) -> Self {
        Self::Store(refusal.into())
    }
}

impl StoreError for SlowError {
    fn kind(&self) -> ratelimit_core::ErrorKind {
        match self {
            Self::Lost => ratelimit_core::ErrorKind::Indeterminate,
            Self::Store(error) => error.kind(),
        }
    }
}

impl Store<Policy> for Slow {
    type Error = SlowError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, SlowError> {
        let verdict = self.store.apply(batch).await?;
        if batch.operation() == Op::Peek {
            return Ok(verdict);
        }
        sleep(ANSWER).await;
        let lose = |left: u64| left.checked_sub(1);
        if self.lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose).is_ok() {
            return Err(SlowError::Lost);
        }
        Ok(verdict)
    }
}

type Limiter = Arc<RateLimiter<Slow>>;

fn limiter(policy: impl Into<Policy>) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limits = Limits::builder().limit("l", policy.into()).build().expect("limits");
    (Arc::new(RateLimiter::new(limits, Slow { store, lost: AtomicU64::new(0) })), clock)
}

/// A hundred, and next to nothing flows back.
fn bucket() -> Gcra {
    Gcra::per_day(1).burst(100).build().expect("a limit")
}

fn leases() -> Concurrency {
    Concurrency::at_once(100, Duration::from_secs(3_600)).build().expect("a limit")
}

async fn left(limiter: &Limiter) -> u64 {
    limiter.peek("alice", 0).await.expect("decides").remaining()
}

type Owned = OwnedReservation<Slow, Policy, &'static str>;

async fn reserve(limiter: &Limiter, estimate: u64) -> Owned {
    match limiter.reserve_owned("alice", estimate).await.expect("decides") {
        Reserved::Granted(reservation) => reservation,
        Reserved::Denied(verdict) => panic!("denied: {verdict:?}"),
    }
}

/// Until all that was spawned has run as far as it can.
async fn settled() {
    sleep(10 * ANSWER).await;
    yield_now().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_committed_is_charged_and_what_is_cancelled_is_given_back() {
    let (limiter, _) = limiter(bucket());
    let reservation = reserve(&limiter, 40).await;
    assert_eq!((left(&limiter).await, reservation.verdict().remaining()), (60, 60));
    assert_eq!(reservation.commit(15).await.expect("settles").remaining(), 85);
    assert_eq!(reserve(&limiter, 40).await.cancel().await.expect("settles").remaining(), 85);
    settled().await;
    assert_eq!(left(&limiter).await, 85);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_reservation_is_settled_at_its_estimate_or_at_the_cost_that_was_set() {
    let (limiter, _) = limiter(bucket());
    drop(reserve(&limiter, 40).await);
    settled().await;
    assert_eq!(left(&limiter).await, 60);

    let mut sending = reserve(&limiter, 40).await;
    for sent in 1..=7 {
        sending.set_cost(sent);
    }
    assert_eq!((sending.cost(), left(&limiter).await), (7, 20));
    let id = sending.id();
    drop(sending);
    settled().await;
    assert_eq!(left(&limiter).await, 53);
    // It has been settled, and not only left to expire.
    let other = limiter.commit("alice", id, 8).await.expect_err("settled at 7");
    assert!(other.to_string().contains("settled at 7"), "{other}");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_lease_is_released() {
    let (limiter, _) = limiter(leases());
    let lease = reserve(&limiter, 3).await;
    assert_eq!(left(&limiter).await, 97);
    drop(lease);
    settled().await;
    assert_eq!(left(&limiter).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_no_reservation_and_leaves_nothing_behind() {
    let (limiter, _) = limiter(bucket());
    let answer = limiter.reserve_owned("alice", 101).await.expect("decides");
    assert!(matches!(answer, Reserved::Denied(verdict) if verdict.retry_after().is_none()));
    settled().await;
    assert_eq!(left(&limiter).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_reservation_moves_into_a_task_and_a_task_that_panics_settles_it() {
    let (limiter, _) = limiter(leases());
    let lease = reserve(&limiter, 1).await;
    let task = tokio::spawn(async move {
        let _lease = lease;
        std::panic::resume_unwind(Box::new("the task ends"));
    });
    assert!(task.await.is_err());
    settled().await;
    assert_eq!(left(&limiter).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_before_the_answer_leaves_no_charge() {
    let (limiter, _) = limiter(bucket());
    let waited = timeout(ANSWER / 2, limiter.reserve_owned("alice", 40)).await;
    assert!(waited.is_err() && left(&limiter).await == 60, "charged, and not answered yet");
    settled().await;
    assert_eq!(left(&limiter).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_leaves_no_charge() {
    let (limiter, _) = limiter(bucket());
    limiter.store().lost.store(1, Ordering::SeqCst);
    limiter.reserve_owned("alice", 40).await.expect_err("lost");
    settled().await;
    assert_eq!(left(&limiter).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_is_dropped_or_unanswered_is_sent_again_and_done_once() {
    let (limiter, _) = limiter(bucket());
    let reservation = reserve(&limiter, 40).await;
    assert!(timeout(ANSWER / 2, reservation.commit(10)).await.is_err());
    settled().await;
    assert_eq!(left(&limiter).await, 90);

    let reservation = reserve(&limiter, 40).await;
    limiter.store().lost.store(1, Ordering::SeqCst);
    reservation.commit(10).await.expect_err("lost");
    settled().await;
    assert_eq!(left(&limiter).await, 80);
}

/// Several limits, of which one has no room for a reservation: none is recorded.
#[tokio::test]
async fn without_room_for_a_reservation_the_estimate_stands_and_the_commit_says_so() {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let limits =
        [Limit::new("l", bucket()).expect("a name"), Limit::new("m", bucket()).expect("a name")];
    let store = MemoryStore::builder().reservations(3).clock(clock).build::<Gcra>();
    let limiter = Arc::new(RateLimiter::new(Limits::new(limits).expect("limits"), store));
    let reserve = async || match limiter.reserve_owned("alice", 10).await.expect("decides") {
        Reserved::Granted(reservation) => reservation,
        Reserved::Denied(verdict) => panic!("denied: {verdict:?}"),
    };
    let recorded = reserve().await;
    assert!(!recorded.verdict().is_unrecorded());
    let dropped = reserve().await;
    let reservation = reserve().await;
    assert_eq!((limiter.store().reservations(), limiter.store().unrecorded()), (2, 2));
    let answer = reservation.commit(1).await.expect("no error");
    assert!(answer.is_unrecorded() && answer.allowed());
    drop(dropped);
    yield_now().await;
    assert_eq!(limiter.peek_now("alice", 0).expect("decides").remaining(), 70);
    let answer = recorded.commit(1).await.expect("settles");
    assert_eq!((answer.is_unrecorded(), answer.remaining()), (false, 79));
}

#[tokio::test(start_paused = true)]
async fn a_lease_lives_on_while_it_is_renewed_and_expires_otherwise() {
    let (limiter, clock) = limiter(leases());
    let lease = reserve(&limiter, 1).await;
    for _ in 0..3 {
        clock.advance(Duration::from_secs(3_000));
        assert!(lease.renew().await.expect("renews").allowed());
    }
    assert_eq!(left(&limiter).await, 99);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(left(&limiter).await, 100);
    let late = lease.renew().await.expect_err("its time is over");
    assert_eq!(late.kind(), ratelimit_core::ErrorKind::Invalid);
}

#[test]
fn dropped_outside_of_a_runtime_it_is_settled_on_the_one_that_made_it() {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let (limiter, _) = limiter(leases());
    let lease = runtime.block_on(reserve(&limiter, 1));
    drop(lease);
    runtime.block_on(settled());
    assert_eq!(runtime.block_on(left(&limiter)), 100);
}

#[test]
fn dropped_after_its_runtime_has_ended_it_expires() {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let (limiter, clock) = limiter(leases());
    let lease = runtime.block_on(reserve(&limiter, 1));
    drop(runtime);
    drop(lease);
    let other = Builder::new_current_thread().enable_time().start_paused(true).build();
    let other = other.expect("a runtime");
    other.block_on(settled());
    assert_eq!(other.block_on(left(&limiter)), 99);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(other.block_on(left(&limiter)), 100);
}

#[test]
fn made_and_dropped_without_a_runtime_it_expires() {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let limit = Limit::new("l", leases()).expect("a limit");
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = Arc::new(RateLimiter::new(Limits::new([limit]).expect("limits"), store));
    let mut future = std::pin::pin!(limiter.reserve_owned("alice", 1));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(answer) = future.as_mut().poll(&mut context) else {
        panic!("a store in memory need not wait")
    };
    drop(answer.expect("decides"));
    let left = || limiter.peek_now("alice", 0).expect("decides").remaining();
    assert_eq!(left(), 99);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(left(), 100);
}

fn movable<T: Send + Sync + 'static>() {}

fn movable_for_any<A: InMemory + 'static>() {
    movable::<OwnedReservation<MemoryStore<A>, A, [(&'static str, String); 2]>>();
}

#[test]
fn a_reservation_is_usable_in_the_body_of_a_response_on_any_thread() {
    movable::<Owned>();
    movable::<OwnedReservation<MemoryStore, Policy, String>>();
    movable_for_any::<Gcra>();
}
