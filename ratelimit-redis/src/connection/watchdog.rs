//! [`Watchdog`]: ends the calls of one connection at their deadlines, and detects a silent connection.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
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
    inner: Arc<SharedWatchdog>,
}

struct SharedWatchdog {
    /// How long a connection that owes replies may give none.
    limit: Duration,
    calls: Mutex<Calls>,
    /// Notified when a call ends earlier than the timer.
    earlier: Notify,
    is_silent: AtomicBool,
}

#[derive(Default)]
struct Calls {
    /// The deadline of each, and what to wake then.
    pending: Slab<(Instant, Waker)>,
    /// When the first call began since the last reply.
    due_since: Option<Instant>,
    /// When the timer fires, while there is a task.
    timer: Option<Instant>,
    task: Option<(Id, AbortHandle)>,
}

impl Watchdog {
    pub(crate) fn new(limit: Duration) -> Self {
        let (earlier, is_silent) = (Notify::new(), AtomicBool::new(false));
        Self {
            inner: Arc::new(SharedWatchdog { limit, calls: Mutex::default(), earlier, is_silent }),
        }
    }

    /// The result of a call until then; `None` if there is none. `is_reply` says whether a result shows that the
    /// connection lives. The future is pinned in place: a client's future may have thousands of bytes, and each
    /// move copies them.
    pub(crate) async fn within<T>(
        &self,
        until: Instant,
        mut call: Pin<&mut impl Future<Output = T>>,
        is_reply: impl Fn(&T) -> bool,
    ) -> Option<T> {
        let mut watched = Watched { inner: &self.inner, until, by: By::Nothing, ended: None };
        poll_fn(|context| match call.as_mut().poll(context) {
            Poll::Ready(answer) => {
                watched.ended = Some(is_reply(&answer));
                Poll::Ready(Some(answer))
            }
            Poll::Pending if watched.is_over(context) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
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

/// A call, watched from its first wait.
struct Watched<'w> {
    inner: &'w Arc<SharedWatchdog>,
    until: Instant,
    by: By,
    /// Whether it ended with a reply; `None` until it ends by itself.
    ended: Option<bool>,
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
        let now = Instant::now();
        if matches!(self.by, By::Nothing) {
            self.by = self.inner.register(now, self.until, context.waker());
        } else if let By::Task(place) = self.by
            && let Some((_, waker)) = self.inner.calls().pending.get_mut(place)
        {
            waker.clone_from(context.waker());
        }
        match &mut self.by {
            By::Timer(timer) => timer.as_mut().poll(context).is_ready(),
            _ => now >= self.until,
        }
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if matches!(self.by, By::Nothing) {
            return;
        }
        let mut calls = self.inner.calls();
        if let By::Task(place) = self.by {
            calls.pending.try_remove(place);
        }
        match (self.ended, calls.due_since) {
            (Some(true), _) => calls.due_since = None,
            // With a margin: a call begins slightly after its deadline is set.
            (None, Some(since)) if since.elapsed() >= self.inner.limit * 7 / 8 => {
                self.inner.is_silent.store(true, Ordering::Release);
            }
            _ => {}
        }
    }
}

impl SharedWatchdog {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a call, and starts the task if there is none.
    fn register(self: &Arc<Self>, now: Instant, until: Instant, waker: &Waker) -> By {
        let here = Handle::current();
        let mut calls = self.calls();
        calls.due_since.get_or_insert(now);
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
        By::Task(calls.pending.insert((until, waker.clone())))
    }

    /// Wakes the calls whose deadline is over. Returns the next deadline; `None` if no call is pending.
    fn wake(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut calls = self.calls();
        let is_over = |(until, _): &&(Instant, Waker)| *until <= now;
        let pending = || calls.pending.iter().map(|(_, call)| call);
        let over: Vec<_> = pending().filter(is_over).map(|(_, waker)| waker.clone()).collect();
        let next = pending().filter(|call| !is_over(call)).map(|(until, _)| *until).min();
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
async fn watch(inner: Arc<SharedWatchdog>) {
    while let Some(next) = inner.wake() {
        // Both outcomes are a reason to look again.
        let _ = timeout_at(next, inner.earlier.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;

    use tokio::time::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    async fn nothing(watchdog: &Watchdog, within: Duration) {
        let call = pin!(pending::<()>());
        let nothing = watchdog.within(Instant::now() + within, call, |()| true).await;
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
        assert_eq!(watchdog.inner.calls().pending.len(), deadlines.len());
        for call in calls {
            call.await.expect("in time");
        }
        assert!(watchdog.inner.calls().pending.is_empty());
        // The task has ended, and a new one starts.
        nothing(&watchdog, LIMIT).await;
        assert_eq!(begun.elapsed(), Duration::from_millis(900) + LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_whole_limit_without_replies_is_silence() {
        let watchdog = Watchdog::new(LIMIT);
        let replies_after = async |wait| {
            watchdog.within(Instant::now() + wait * 2, pin!(sleep(wait)), |()| true).await
        };
        nothing(&watchdog, LIMIT / 2).await;
        assert!(!watchdog.is_silent(), "half of the limit");
        replies_after(LIMIT / 4).await.expect("a reply");
        nothing(&watchdog, LIMIT * 2 / 3).await;
        assert!(!watchdog.is_silent(), "another call was answered in between");
        let both = futures_util::join!(nothing(&watchdog, LIMIT * 2), replies_after(LIMIT / 10));
        both.1.expect("a reply");
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
            let asked = watchdog.within(Instant::now() + LIMIT * 3_600, call, |()| true);
            timeout_at(Instant::now() + short, asked).await.expect_err("it is dropped");
        });
        second.block_on(nothing(&watchdog, short));
        drop(first);
        second.block_on(nothing(&watchdog, short));
        assert!(!watchdog.is_silent());
    }
}
