//! [`Watchdog`]: ends the calls of one connection at their deadlines, and detects a silent
//! connection.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

/// Watches the pending calls of a connection.
///
/// A call without a reply does not prove that the connection is dead: it may have come late, or ask
/// for something slow. The proof is that *no* reply came for the connection's whole time limit
/// while replies were due. Dropped calls count like timeouts, since their callers may never wait
/// until the deadline.
pub(crate) struct Watchdog {
    /// How long a connection that owes replies may give none.
    limit: Duration,
    /// When the first call began since the last reply.
    due_since: Mutex<Option<Instant>>,
    is_silent: AtomicBool,
}

impl Watchdog {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, due_since: Mutex::default(), is_silent: AtomicBool::new(false) }
    }

    /// The result of a call until then; `None` if there is none. `is_reply` says whether a result
    /// shows that the connection lives. The future is pinned in place: a client's future may have
    /// thousands of bytes, and each move copies them.
    pub(crate) async fn within<T>(
        &self,
        until: Instant,
        call: Pin<&mut impl Future<Output = T>>,
        is_reply: impl Fn(&T) -> bool,
    ) -> Option<T> {
        self.due_since().get_or_insert_with(Instant::now);
        let mut watched = Watched { watchdog: self, ended: None };
        let answer = timeout_at(until, call).await.ok()?;
        watched.ended = Some(is_reply(&answer));
        Some(answer)
    }

    /// Whether no reply came for the whole time limit while replies were due.
    pub(crate) fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Acquire)
    }

    fn due_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.due_since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that is watched.
struct Watched<'w> {
    watchdog: &'w Watchdog,
    /// Whether it ended with a reply; `None` until it ends by itself.
    ended: Option<bool>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        let mut due_since = self.watchdog.due_since();
        match (self.ended, *due_since) {
            (Some(true), _) => *due_since = None,
            // With a margin: a call begins slightly after its deadline is set.
            (None, Some(since)) if since.elapsed() >= self.watchdog.limit * 7 / 8 => {
                self.watchdog.is_silent.store(true, Ordering::Release);
            }
            _ => {}
        }
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
}
