//! [`Watchdog`]: ends the calls of one connection at their deadlines, and detects a silent
//! connection.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    limit_us: u64,
    began: Instant,
    /// When the first call began since the last reply, in microseconds after the connection.
    due_since_us: AtomicU64,
    is_silent: AtomicBool,
}

/// No call has begun since the last reply.
const NOTHING_DUE: u64 = u64::MAX;

impl Watchdog {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            // With a margin: a call begins slightly after its deadline is set.
            limit_us: micros(limit / 8 * 7),
            began: Instant::now(),
            due_since_us: AtomicU64::new(NOTHING_DUE),
            is_silent: AtomicBool::new(false),
        }
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
        let (now_us, order) = (self.now_us(), Ordering::AcqRel);
        // Fails if a reply has been due for longer.
        let _ = self.due_since_us.compare_exchange(NOTHING_DUE, now_us, order, Ordering::Acquire);
        let _ends = Watched(self);
        let answer = timeout_at(until, call).await.ok()?;
        if is_reply(&answer) {
            self.due_since_us.store(NOTHING_DUE, Ordering::Release);
        }
        Some(answer)
    }

    /// Whether no reply came for the whole time limit while replies were due.
    pub(crate) fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Acquire)
    }

    fn now_us(&self) -> u64 {
        micros(self.began.elapsed())
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(NOTHING_DUE - 1)
}

/// A call that is watched. When it ends, even by being dropped, it notes a silence.
struct Watched<'w>(&'w Watchdog);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        let since_us = self.0.due_since_us.load(Ordering::Acquire);
        if self.0.now_us().saturating_sub(since_us) >= self.0.limit_us {
            self.0.is_silent.store(true, Ordering::Release);
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
