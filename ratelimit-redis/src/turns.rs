//! [`Turns`]: one writer per key and process at a time.

use std::sync::Arc;

use dashmap::DashMap;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};
use tokio::time::timeout_at;

use crate::deadline::Deadline;

/// A fair queue per key among the callers of this process. If all of them compare and set at once,
/// all but one fail; one after the other, they fail only because of other processes.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    by_key: DashMap<Arc<str>, Arc<Turn<()>>>,
}

impl Turns {
    /// Waits for the caller's turn at all of these keys, first come, first served, for a quarter of
    /// the time at most. By then the caller whose turn it is may be a future that is kept and no
    /// longer polled: this caller goes without a turn, and later ones form another queue.
    pub(crate) async fn take(&self, mut keys: Vec<Arc<str>>, deadline: Deadline) -> Vec<Taken<'_>> {
        // One global order, so no two callers wait for each other.
        keys.sort_unstable();
        keys.dedup();
        let mut taken = Vec::with_capacity(keys.len());
        for key in keys {
            // Declared first, and so dropped last if the caller gives up.
            let mut next = Taken { turns: self, key, guard: None, has_waited: false };
            let turn = Arc::clone(&self.by_key.entry(Arc::clone(&next.key)).or_default());
            if let Ok(guard) = Arc::clone(&turn).try_lock_owned() {
                next.guard = Some(guard);
            } else {
                next.has_waited = true;
                let waiting = Arc::clone(&turn).lock_owned();
                if let Ok(guard) = timeout_at(deadline.quarter_time(), waiting).await {
                    next.guard = Some(guard);
                } else {
                    // Lets no further caller queue here.
                    self.by_key.remove_if(&next.key, |_, known| Arc::ptr_eq(known, &turn));
                }
            }
            taken.push(next);
        }
        taken
    }
}

/// A turn at a key, or a place in its queue. Dropping it passes the turn on.
pub struct Taken<'t> {
    turns: &'t Turns,
    key: Arc<str>,
    guard: Option<OwnedMutexGuard<()>>,
    /// Whether other callers went first.
    pub(crate) has_waited: bool,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.guard = None;
        // The map's reference alone: no other caller waits, and none can arrive meanwhile.
        self.turns.by_key.remove_if(&self.key, |_, turn| Arc::strong_count(turn) == 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures_util::future::join;
    use tokio::task::{JoinSet, yield_now};
    use tokio::time::{Instant, timeout};

    use super::*;

    fn keys(names: &[&str]) -> Vec<Arc<str>> {
        names.iter().map(|name| Arc::from(*name)).collect()
    }

    fn patience() -> Deadline {
        Deadline::within(Duration::from_secs(20))
    }

    fn is_idle(turns: &Turns) -> bool {
        turns.by_key.is_empty()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn one_caller_at_a_time_has_a_key_and_none_leaves_a_trace() {
        let turns = Arc::new(Turns::default());
        let at_it = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for n in 0..64 {
            let (turns, at_it) = (Arc::clone(&turns), Arc::clone(&at_it));
            tasks.spawn(async move {
                // In either order: no caller waits forever.
                let names = if n % 2 == 0 { ["a", "b"] } else { ["b", "a"] };
                let taken = turns.take(keys(&names), patience()).await;
                assert_eq!(at_it.fetch_add(1, Ordering::SeqCst), 0);
                yield_now().await;
                at_it.fetch_sub(1, Ordering::SeqCst);
                drop(taken);
            });
        }
        tasks.join_all().await;
        assert!(is_idle(&turns));
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_does_not_end_is_waited_for_a_quarter_of_the_time_by_each_and_leaves_nothing()
     {
        let turns = Turns::default();
        let kept = turns.take(keys(&["a"]), patience()).await;
        let begin = Instant::now();
        // The second one queues behind the first.
        let both =
            join(turns.take(keys(&["a"]), patience()), turns.take(keys(&["b", "a"]), patience()));
        drop(both.await);
        assert_eq!(begin.elapsed(), Duration::from_secs(5));
        let next = turns.take(keys(&["a"]), patience()).await;
        assert_eq!(begin.elapsed(), Duration::from_secs(5), "in another queue");
        drop(kept);
        assert!(!is_idle(&turns), "the other queue stays");
        let waits = timeout(Duration::from_millis(10), turns.take(keys(&["a"]), patience())).await;
        assert!(waits.is_err(), "it is given up");
        drop(next);
        assert!(is_idle(&turns));
    }
}
