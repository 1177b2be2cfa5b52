//! [`Attempts`]: work that one task does for all callers (*singleflight*), again until it succeeds.
//!
//! Callers never do it themselves: they wait for the task as long as they like, and giving up does
//! not affect it. It ends when an attempt has succeeded, or has failed quickly and no caller waits,
//! or when its owner is dropped. A task is replaced if the store has left its [`Home`], or if it
//! has panicked.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, select};
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::peer::Peer;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::runtime::{Home, StoreRuntime};

/// The pause after the first failed attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// How often something is tried, and how long callers wait.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// No attempt begins so soon after one that succeeded.
    pub(super) rest: Duration,
    /// Each pause after a failure is twice as long as the one before, up to this.
    pub(super) longest_pause: Duration,
    /// An attempt that fails faster than this will do so again, so callers wait for the next, which
    /// may succeed.
    pub(super) quick: Duration,
}

pub(super) struct Attempts {
    /// The servers that are tried, for messages.
    pub(super) peer: Peer,
    /// What has not come when a caller's time is over.
    awaited: &'static str,
    runtime: Arc<StoreRuntime>,
    attempt: Arc<Attempt>,
    pace: Pace,
    state: Arc<watch::Sender<State>>,
    task: Mutex<Option<(Arc<Home>, AbortOnDropHandle<()>)>>,
}

type Attempt = dyn Fn(Arc<Home>) -> BoxFuture<'static, Result<()>> + Send + Sync;

struct State {
    /// Whether attempts are due or running.
    is_running: bool,
    /// How many attempts have ended.
    ended: u64,
    /// How many have failed since one succeeded that was of use.
    failures: u32,
    /// Why the last attempt failed, and whether it did so quickly.
    failure: Option<(RedisError, bool)>,
    /// When the last attempt began, and when the next is due.
    begun: Instant,
    due: Instant,
}

impl State {
    /// Returns whether it failed quickly.
    fn fails(&mut self, error: RedisError, pace: Pace) -> bool {
        let now = Instant::now();
        let is_quick = now - self.begun < pace.quick;
        // Whatever it was, the request itself was not sent.
        self.failure = Some((error.of_a_lookup(), is_quick));
        self.due = now + jittered(pause_after(self.failures, pace.longest_pause));
        self.failures = self.failures.saturating_add(1);
        is_quick
    }

    fn ends(&mut self, result: Result<()>, pace: Pace, is_waited_for: bool) {
        self.ended += 1;
        self.is_running = match result {
            Ok(()) => {
                (self.failure, self.due) = (None, Instant::now() + pace.rest);
                false
            }
            Err(error) => !self.fails(error, pace) || is_waited_for,
        };
    }
}

impl Attempts {
    pub(super) fn new<F>(
        (peer, awaited): (Peer, &'static str),
        runtime: &Arc<StoreRuntime>,
        pace: Pace,
        attempt: impl Fn(Arc<Home>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let now = Instant::now();
        let (is_running, failure) = (false, None);
        let state = State { is_running, ended: 0, failures: 0, failure, begun: now, due: now };
        Self {
            peer,
            awaited,
            runtime: Arc::clone(runtime),
            attempt: Arc::new(move |home| attempt(home).boxed()),
            pace,
            state: Arc::new(watch::Sender::new(state)),
            task: Mutex::default(),
        }
    }

    /// How many attempts have ended, whatever the result.
    pub(super) fn ended(&self) -> u64 {
        self.state.borrow().ended
    }

    /// Where the store lives.
    pub(super) fn home(&self) -> Result<&Arc<Home>> {
        self.runtime.home().map_err(|reason| self.peer.unreachable(reason))
    }

    /// Notes that what the last attempt came to was of no use.
    pub(super) fn failed(&self, error: &RedisError) {
        self.state.send_modify(|state| {
            state.begun = Instant::now();
            state.fails(error.clone(), self.pace);
        });
    }

    /// Starts a task, unless one runs or has just succeeded. Returns where it runs.
    pub(super) fn begin(&self) -> Result<&Arc<Home>> {
        let home = self.home()?;
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        let runs = |(at, task): &(Arc<Home>, AbortOnDropHandle<()>)| {
            Arc::ptr_eq(at, home) && !task.is_finished()
        };
        let runs = task.as_ref().is_some_and(runs);
        let mut starts = false;
        self.state.send_if_modified(|state| {
            let rests = state.failure.is_none() && Instant::now() < state.due;
            starts = if state.is_running { !runs } else { !rests };
            if starts && !state.is_running && state.failure.is_none() {
                state.failures = 0;
            }
            state.is_running |= starts;
            false
        });
        if starts {
            let (attempt, on) = (Arc::clone(&self.attempt), Arc::clone(home));
            let run = run(Arc::clone(&self.state), move || attempt(Arc::clone(&on)), self.pace);
            *task = Some((Arc::clone(home), AbortOnDropHandle::new(home.spawn(run))));
        }
        Ok(home)
    }

    /// Waits for the end of an attempt, and returns its result. If the last one failed, returns its
    /// error at once, unless it failed quickly and the next is due or running.
    pub(super) async fn next(&self, deadline: Deadline) -> Result<()> {
        let mut states = self.state.subscribe();
        let seen = states.borrow().ended;
        loop {
            if let State { ended, failure, .. } = &*states.borrow_and_update()
                && *ended != seen
            {
                return failure.as_ref().map_or(Ok(()), |(error, _)| Err(error.clone()));
            }
            let home = self.begin()?;
            let now = Instant::now();
            let (error, until) = match &*states.borrow() {
                State { failure: Some((error, is_quick)), begun, due, .. } => {
                    let waits = *is_quick && now >= *due;
                    let until = if waits { (*begun).max(*due) + self.pace.quick } else { now };
                    (Some(error.clone()), until.min(deadline.at()))
                }
                // It rests.
                State { is_running: false, .. } => return Ok(()),
                _ => (None, deadline.at()),
            };
            if until <= now {
                // A caller that repeats its request in a loop must not starve the task.
                yield_now().await;
            } else {
                let (changes, ends) = (pin!(states.changed()), pin!(home.ended()));
                if timeout_at(until, select(changes, ends)).await.is_ok() {
                    continue;
                }
            }
            return Err(error.unwrap_or_else(|| self.too_late(deadline.given(), home.remedy())));
        }
    }

    fn too_late(&self, given: Duration, remedy: &str) -> RedisError {
        self.peer.unreachable(format!("{} within {given:?}{remedy}", self.awaited))
    }
}

/// Tries until it succeeds, or no caller waits.
async fn run(
    state: Arc<watch::Sender<State>>,
    attempt: impl Fn() -> BoxFuture<'static, Result<()>>,
    pace: Pace,
) {
    let mut is_running = true;
    while is_running {
        let due = state.borrow().due;
        sleep_until(due).await;
        state.send_modify(|state| state.begun = Instant::now());
        let result = attempt().await;
        let is_waited_for = state.receiver_count() > 0;
        state.send_modify(|state| {
            state.ends(result, pace, is_waited_for);
            is_running = state.is_running;
        });
    }
}

fn pause_after(failures: u32, longest: Duration) -> Duration {
    let doubled = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
    FIRST_PAUSE.saturating_mul(doubled).min(longest)
}

/// A random part between half and all of the pause, so the clients of a recovering server do not
/// all come at once.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const PACE: Pace = Pace {
        rest: Duration::from_millis(50),
        longest_pause: Duration::from_secs(1),
        quick: Duration::from_millis(250),
    };

    /// Attempts of which each does this, by its number.
    fn attempts<F>(attempt: impl Fn(u64) -> F + Send + Sync + 'static) -> (Attempts, Arc<AtomicU64>)
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let (runtime, begun) = (Arc::default(), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&begun);
        let attempt = move |_| attempt(count.fetch_add(1, Ordering::Relaxed));
        (Attempts::new((Peer::new("h:1"), "nothing"), &runtime, PACE, attempt), begun)
    }

    fn patience() -> Deadline {
        Deadline::within(Duration::from_secs(5))
    }

    #[test]
    fn pauses_grow_from_ten_milliseconds_to_a_second() {
        let longest = PACE.longest_pause;
        let pauses: Vec<_> = (0..10).map(|n| pause_after(n, longest).as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000]);
        assert_eq!(pause_after(u32::MAX, longest), longest);
        for _ in 0..100 {
            assert!((longest / 2..=longest).contains(&jittered(longest)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_leaves_its_work_to_another() {
        let (attempts, begun) = attempts(async |n| {
            assert!(n > 0, "as a client might");
            Ok(())
        });
        attempts.next(patience()).await.expect("the second one");
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_gives_up_does_not_affect_the_task() {
        let (attempts, begun) = attempts(async |_| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(())
        });
        for _ in 0..10 {
            let short = Deadline::within(Duration::from_millis(20));
            attempts.next(short).await.expect_err("it takes longer");
        }
        assert_eq!(attempts.ended(), 0);
        attempts.next(patience()).await.expect("done");
        assert_eq!(attempts.ended(), 1);
        // So soon after a success, none begins.
        attempts.next(patience()).await.expect("done");
        assert_eq!(begun.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_returned_to_all_until_the_next_attempt_is_due() {
        let (attempts, begun) = attempts(async |n| match n {
            0 => Err(RedisError::Lost { address: "h:1".into(), reason: "away".into() }),
            _ => Ok(()),
        });
        for _ in 0..5 {
            let error = attempts.next(patience()).await.expect_err("it failed");
            assert!(matches!(error, RedisError::Unreachable { .. }), "nothing was sent: {error}");
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        tokio::time::sleep(FIRST_PAUSE).await;
        attempts.next(patience()).await.expect("the next one");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_failure_is_not_waited_for_again() {
        let (attempts, _) = attempts(async |_| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Err(RedisError::Config("no".into()))
        });
        attempts.next(patience()).await.expect_err("it failed");
        let begun = Instant::now();
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            attempts.next(patience()).await.expect_err("it failed");
        }
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
    }
}
