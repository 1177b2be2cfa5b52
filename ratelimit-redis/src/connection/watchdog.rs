//! [`Watchdog`]: ends the calls of one connection at their deadlines, and detects a silent connection.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use slab::Slab;
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

/// Watches the pending calls of a connection with one task and one timer, instead of a timer per call.
///
/// A call without a reply does not prove that the connection is dead: it may have come late, or ask for
/// something slow. The proof is that *no* reply came for the connection's whole time limit while replies
/// were due. Dropped calls count like timeouts, since their callers may never wait until the deadline.
pub(crate) struct Watchdog {
    inner: Arc<Inner>,
}

struct Inner {
    /// How long a connection that owes replies may give none.
    limit: Duration,
    calls: Mutex<Calls>,
    /// Notified when a call ends earlier than the timer.
    earlier: Notify,
    /// How many replies came.
    answers: AtomicU64,
    silence: Mutex<Option<Silence>>,
    is_silent: AtomicBool,
}

#[derive(Default)]
struct Calls {
    in_flight: Slab<InFlight>,
    /// When the timer fires, while there is a task.
    timer: Option<Instant>,
    task: Option<(Id, AbortHandle)>,
}

struct InFlight {
    until: Instant,
    /// `None` once the deadline has woken the call.
    waker: Option<Waker>,
}

/// The start of a period without replies, and the number of replies before it.
#[derive(Clone, Copy)]
struct Silence {
    since: Instant,
    answers: u64,
}

impl Watchdog {
    pub(crate) fn new(limit: Duration) -> Self {
        let inner = Inner {
            limit,
            calls: Mutex::default(),
            earlier: Notify::new(),
            answers: AtomicU64::new(0),
            silence: Mutex::new(None),
            is_silent: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The result of a call until then; `None` if there is none. The future is pinned in place: a
    /// client's future may have thousands of bytes, and each move copies them.
    pub(crate) async fn within<T>(
        &self,
        until: Instant,
        mut call: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let mut watched = Watched { inner: &self.inner, until, by: By::Nothing, due: None };
        poll_fn(|context| match call.as_mut().poll(context) {
            Poll::Ready(answer) => {
                watched.has_ended();
                Poll::Ready(Some(answer))
            }
            Poll::Pending if watched.is_over(context) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Notes a reply.
    pub(crate) fn answered(&self) {
        self.inner.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether no reply came for the whole time limit while replies were due.
    pub(crate) fn is_silent(&self) -> bool {
        self.inner.is_silent.load(Ordering::Acquire)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some((_, task)) = &self.inner.calls().task {
            task.abort();
        }
    }
}

/// A call, watched from its first wait. Dropped without a reply, it counts as unanswered.
struct Watched<'w> {
    inner: &'w Arc<Inner>,
    until: Instant,
    by: By,
    /// While a reply is due: since when, and the number of replies by then.
    due: Option<Silence>,
}

/// How a call is ended at its deadline.
enum By {
    Nothing,
    /// By the connection's task, at this index among the pending calls.
    Task(usize),
    /// By its own timer: the task belongs to another runtime, which may be blocked.
    Timer(Pin<Box<Sleep>>),
}

impl Watched<'_> {
    /// Whether the deadline is over. If not, the call is woken when it is.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        if self.due.is_none() {
            let (now, answers) = (Instant::now(), self.inner.answers.load(Ordering::Relaxed));
            self.due = Some(Silence { since: now, answers });
            self.by = self.inner.register(self.until, context.waker());
            if let By::Task(_) = self.by {
                return now >= self.until;
            }
        }
        match &mut self.by {
            By::Nothing => true,
            By::Timer(timer) => timer.as_mut().poll(context).is_ready(),
            By::Task(_) if Instant::now() >= self.until => true,
            By::Task(place) => {
                if let Some(call) = self.inner.calls().in_flight.get_mut(*place) {
                    match &mut call.waker {
                        Some(waker) => waker.clone_from(context.waker()),
                        None => call.waker = Some(context.waker().clone()),
                    }
                }
                false
            }
        }
    }

    /// Notes a reply, or an error that says more than that there was none.
    fn has_ended(&mut self) {
        self.due = None;
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if let By::Task(place) = self.by {
            self.inner.calls().in_flight.try_remove(place);
        }
        if let Some(due) = self.due {
            self.inner.unanswered(due);
        }
    }
}

impl Inner {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a call, and starts the task if there is none.
    fn register(self: &Arc<Self>, until: Instant, waker: &Waker) -> By {
        let here = Handle::current();
        let mut calls = self.calls();
        match &calls.task {
            Some((runtime, task)) if !task.is_finished() => {
                if *runtime != here.id() {
                    return By::Timer(Box::pin(sleep_until(until)));
                }
                if calls.timer.is_some_and(|timer| until < timer) {
                    self.earlier.notify_one();
                }
            }
            _ => {
                let task = here.spawn(watch(Arc::clone(self)));
                (calls.task, calls.timer) = (Some((here.id(), task.abort_handle())), None);
            }
        }
        By::Task(calls.in_flight.insert(InFlight { until, waker: Some(waker.clone()) }))
    }

    /// Notes a call that ended without a reply although one was due.
    fn unanswered(&self, due: Silence) {
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        if self.answers.load(Ordering::Relaxed) != due.answers {
            // Other calls were answered since, so the connection lives.
            return;
        }
        let since = match *silence {
            Some(known) if known.answers == due.answers => known.since.min(due.since),
            _ => due.since,
        };
        *silence = Some(Silence { since, ..due });
        // With a margin: a call begins slightly after its deadline is set.
        if since.elapsed() >= self.limit.saturating_sub(self.limit / 8) {
            self.is_silent.store(true, Ordering::Release);
        }
    }

    /// Wakes the calls whose deadline is over. Returns the next deadline; `None` if no call is pending.
    fn wake(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut over = Vec::new();
        let mut next: Option<Instant> = None;
        let mut calls = self.calls();
        for (_, call) in &mut calls.in_flight {
            if call.until <= now {
                over.extend(call.waker.take());
            } else {
                next = Some(next.map_or(call.until, |next| next.min(call.until)));
            }
        }
        calls.timer = next;
        if next.is_none() {
            calls.task = None;
        }
        drop(calls);
        over.into_iter().for_each(Waker::wake);
        next
    }
}

/// Watches as long as a call is pending.
async fn watch(inner: Arc<Inner>) {
    while let Some(next) = inner.wake() {
        // Both outcomes are a reason to look again.
        let _ = timeout_at(next, inner.earlier.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;

    use tokio::time::advance;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    async fn nothing(watchdog: &Watchdog, within: Duration) {
        let nothing = watchdog.within(Instant::now() + within, pin!(pending::<()>())).await;
        assert_eq!(nothing, None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_task_ends_every_call_at_its_own_deadline() {
        let watchdog = Arc::new(Watchdog::new(LIMIT));
        let begun = Instant::now();
        // Later calls with earlier deadlines are included.
        let deadlines = [700, 300, 900, 300, 100];
        let calls = deadlines.map(|ms| {
            let watchdog = Arc::clone(&watchdog);
            tokio::spawn(async move {
                let within = Duration::from_millis(ms);
                nothing(&watchdog, within).await;
                assert_eq!(begun.elapsed(), within);
            })
        });
        tokio::task::yield_now().await;
        assert_eq!(watchdog.inner.calls().in_flight.len(), deadlines.len());
        for call in calls {
            call.await.expect("in time");
        }
        assert!(watchdog.inner.calls().in_flight.is_empty());
        // The task has ended, and a new one starts.
        nothing(&watchdog, LIMIT).await;
        assert_eq!(begun.elapsed(), Duration::from_millis(900) + LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_whole_limit_without_replies_is_silence() {
        let watchdog = Watchdog::new(LIMIT);
        nothing(&watchdog, LIMIT / 2).await;
        assert!(!watchdog.is_silent(), "half of the limit");
        watchdog.answered();
        nothing(&watchdog, LIMIT * 2 / 3).await;
        assert!(!watchdog.is_silent(), "another call was answered in between");
        let answered = async {
            advance(LIMIT).await;
            watchdog.answered();
            pending::<()>().await;
        };
        watchdog.within(Instant::now() + LIMIT * 2, pin!(answered)).await;
        assert!(!watchdog.is_silent(), "another call was answered meanwhile");
        nothing(&watchdog, LIMIT).await;
        assert!(watchdog.is_silent());
    }

    #[test]
    fn a_deadline_holds_while_the_tasks_runtime_is_blocked() {
        let runtime = || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
        };
        let (first, second) = (runtime(), runtime());
        let watchdog = Watchdog::new(LIMIT);
        let short = Duration::from_millis(5);
        first.block_on(async {
            let call = pin!(pending::<()>());
            let asked = watchdog.within(Instant::now() + LIMIT * 3_600, call);
            timeout_at(Instant::now() + short, asked).await.expect_err("it is dropped");
        });
        second.block_on(nothing(&watchdog, short));
        drop(first);
        second.block_on(nothing(&watchdog, short));
        assert!(!watchdog.is_silent());
    }
}
