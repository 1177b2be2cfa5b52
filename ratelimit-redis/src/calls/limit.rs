//! [`CallLimit`]: how many calls may be out at once.
//!
//! As many as keep the server busy, and not more: a request that waits shares a call, which costs
//! the server less. While a call takes mostly work, two suffice: the server decides one, and the
//! client prepares the other. While it takes mostly its way, more do. *TCP Vegas* (Brakmo and
//! Peterson, 1995) tells them apart: of `n` calls that take `t` each, where the quickest took `t₀`,
//! `n (t - t₀) / t` wait at the server.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::deadline::Deadline;

/// The fewest and the most calls at once.
const FEWEST: usize = 2;
const MOST: usize = 256;
/// How many calls wait at a busy server: with fewer, one more is let out; with more, one fewer.
const FEW_WAIT: u128 = 1;
const MANY_WAIT: u128 = 2;
/// For how long the quickest call counts. The way may change.
const COUNTS: Duration = Duration::from_secs(10);

/// How many calls may be out at once.
#[derive(Debug)]
pub(crate) struct CallLimit {
    permits: Semaphore,
    /// Permits that were replaced because a call did not end: a caller may keep its future and no
    /// longer poll it.
    replaced: AtomicUsize,
    way: Mutex<Way>,
}

/// What is known of the way to the server.
#[derive(Debug)]
struct Way {
    most: usize,
    /// The quickest call of this span and of the one before.
    quickest: [Duration; 2],
    since: Instant,
    /// When `most` was last changed. Calls that began before say nothing of it.
    changed: Instant,
}

impl Default for CallLimit {
    fn default() -> Self {
        let (quickest, now) = ([Duration::MAX; 2], Instant::now());
        let way = Way { most: FEWEST, quickest, since: now, changed: now };
        Self {
            permits: Semaphore::new(FEWEST),
            replaced: AtomicUsize::new(0),
            way: Mutex::new(way),
        }
    }
}

impl CallLimit {
    /// Lets a call out at once.
    pub(super) fn try_acquire(self: &Arc<Self>, deadline: Deadline) -> Option<Permit> {
        self.permits.try_acquire().ok()?.forget();
        Some(self.permit(deadline))
    }

    /// Lets a call out, at the latest when a quarter of this deadline is over.
    pub(crate) async fn acquire(self: &Arc<Self>, deadline: Deadline) -> Permit {
        match timeout_at(deadline.quarter_time(), self.permits.acquire()).await {
            Ok(Ok(permit)) => permit.forget(),
            _ => _ = self.replaced.fetch_add(1, Ordering::Relaxed),
        }
        self.permit(deadline)
    }

    /// How many more calls may be let out at once.
    pub(crate) fn free(&self) -> usize {
        self.permits.available_permits()
    }

    fn permit(self: &Arc<Self>, deadline: Deadline) -> Permit {
        let (limit, patience) = (Arc::clone(self), deadline.given() / 4);
        Permit { limit, begun: Instant::now(), patience, is_shared: false, has_landed: false }
    }

    fn way(&self) -> MutexGuard<'_, Way> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that is out. Dropping it lets the next one out.
#[derive(Debug)]
pub(crate) struct Permit {
    limit: Arc<CallLimit>,
    begun: Instant,
    /// After so long, another call may have replaced it.
    patience: Duration,
    /// Whether it carries several requests because no more calls may be out.
    is_shared: bool,
    has_landed: bool,
}

impl Permit {
    /// The call carries so many requests.
    pub(crate) fn carries(&mut self, requests: usize) {
        self.is_shared = requests > 1 && self.limit.free() == 0;
    }

    /// The server has answered: the call says how long the way is.
    pub(crate) const fn landed(&mut self) {
        self.has_landed = true;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let took = self.begun.elapsed();
        let let_out = if self.has_landed {
            self.limit.way().landed(self.begun, took, self.is_shared)
        } else {
            1
        };
        let one_fewer = |replaced: usize| replaced.checked_sub(1);
        let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
        let is_replaced =
            took >= self.patience && self.limit.replaced.fetch_update(set, get, one_fewer).is_ok();
        self.limit.permits.add_permits(let_out.saturating_sub(usize::from(is_replaced)));
    }
}

impl Way {
    /// Notes how long a call took. Returns how many calls its end lets out: one, unless the server
    /// has more to do than it should, or less.
    fn landed(&mut self, begun: Instant, took: Duration, is_shared: bool) -> usize {
        let now = begun + took;
        if now.saturating_duration_since(self.since) >= COUNTS {
            self.quickest = [Duration::MAX, self.quickest[0]];
            self.since = now;
        }
        self.quickest[0] = self.quickest[0].min(took);
        if !is_shared || begun < self.changed {
            return 1;
        }
        let quickest = self.quickest[0].min(self.quickest[1]);
        // In parts of a call's time, without a division.
        let (waits, one) =
            (took.saturating_sub(quickest).as_nanos() * self.most as u128, took.as_nanos());
        let more = match waits {
            _ if waits * 2 < one * FEW_WAIT => self.most / 2,
            _ if waits < one * FEW_WAIT => 1,
            _ => 0,
        };
        let more = more.min(MOST - self.most);
        let fewer = usize::from(waits > one * MANY_WAIT && self.most > FEWEST);
        if more + fewer > 0 {
            self.most = self.most + more - fewer;
            self.changed = now;
        }
        1 + more - fewer
    }
}
