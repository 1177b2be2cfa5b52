//! [`CallLimit`]: how many calls may be out at once.
//!
//! As many as keep the server busy, and not more: a request that waits shares a call, which costs
//! the server less. While a call takes mostly work, two suffice: the server decides one, and the
//! client prepares the other. While it takes mostly its way, more do.
//!
//! A call that takes longer than its way and its own work has waited. A call of one request that
//! has the way for itself shows how long the way is. The store holds the others back for one now
//! and then, as *BBR* does (Cardwell et al., 2016: `ProbeRTT`).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use crate::deadline::Deadline;

/// The fewest and the most calls at once.
const FEWEST: u16 = 2;
const MOST: u16 = 256;
/// A call of fewer requests and states does not show what each costs.
const MANY: u32 = 16;
/// When a store first measures the way: its first calls are slow.
const FIRST_MEASURED: Duration = Duration::from_millis(20);
/// How often it measures the way, which may change: so many times as long as the way at least,
/// because nothing else is decided for the length of two ways.
const MEASURED_EVERY: Duration = Duration::from_secs(10);
const MEASURED_EVERY_WAYS: u32 = 100;

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
    /// How many calls may be out.
    most: u16,
    /// When `most` was last changed. Calls that began before say nothing of it.
    changed: Instant,
    /// The quickest call since the way was last measured.
    quickest: Duration,
    /// The least time that a call since then took longer than the quickest, per request and state.
    work: Option<Duration>,
    /// When the way is next measured.
    measured_at: Instant,
}

impl Default for CallLimit {
    fn default() -> Self {
        let now = Instant::now();
        let measured_at = now + FIRST_MEASURED;
        let (quickest, work) = (Duration::MAX, None);
        let way = Way { most: FEWEST, changed: now, quickest, work, measured_at };
        Self {
            permits: Semaphore::new(FEWEST.into()),
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

    /// Lets a call out, at the latest when a quarter of this deadline is over. If it is time to
    /// measure the way, the call has it for itself, and carries one request.
    pub(crate) async fn acquire(self: &Arc<Self>, deadline: Deadline) -> Permit {
        match timeout_at(deadline.quarter_time(), self.permits.acquire()).await {
            Ok(Ok(permit)) => permit.forget(),
            _ => _ = self.replaced.fetch_add(1, Ordering::Relaxed),
        }
        let others = self.hold_back(deadline.given() / 4).await;
        let mut permit = self.permit(deadline);
        permit.others = others;
        permit
    }

    /// How many more calls may be let out at once.
    pub(crate) fn free(&self) -> usize {
        self.permits.available_permits()
    }

    /// Holds back so many other calls if it is time to measure the way, once those that are out
    /// have ended.
    async fn hold_back(&self, patience: Duration) -> u16 {
        let (others, patience) = {
            let (mut way, now) = (self.way(), Instant::now());
            if now < way.measured_at {
                return 0;
            }
            (way.measured_at, way.changed) = (now + MEASURED_EVERY, now);
            (way.most - 1, way.quickest.saturating_mul(4).min(patience))
        };
        // A call that does not end soon may never do so.
        match timeout(patience, self.permits.acquire_many(others.into())).await {
            Ok(Ok(permits)) => permits.forget(),
            _ => return 0,
        }
        // More than half as many have to show again that they do not wait.
        let mut way = self.way();
        way.most = FEWEST.max(way.most / 2);
        way.most - 1
    }

    fn permit(self: &Arc<Self>, deadline: Deadline) -> Permit {
        Permit {
            limit: Arc::clone(self),
            begun: Instant::now(),
            patience: deadline.given() / 4,
            others: 0,
            parts: 1,
            is_shared: false,
            has_landed: false,
        }
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
    /// So many other calls are held back until it ends.
    others: u16,
    /// How many requests and states it carries.
    parts: u32,
    /// Whether it carries several requests because no more calls may be out.
    is_shared: bool,
    has_landed: bool,
}

impl Permit {
    /// Whether the call measures the way, and so carries one request.
    pub(crate) const fn measures(&self) -> bool {
        self.others > 0
    }

    /// The call carries so many requests with so many states.
    pub(crate) fn carries(&mut self, requests: usize, states: usize) {
        self.parts = u32::try_from(requests + states).unwrap_or(u32::MAX);
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
        let let_out = if self.has_landed { self.limit.way().landed(self, took) } else { 1 };
        let one_fewer = |replaced: usize| replaced.checked_sub(1);
        let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
        let is_replaced =
            took >= self.patience && self.limit.replaced.fetch_update(set, get, one_fewer).is_ok();
        let let_out = usize::from(let_out + self.others);
        self.limit.permits.add_permits(let_out.saturating_sub(usize::from(is_replaced)));
    }
}

impl Way {
    /// Notes how long a call took. Returns how many calls its end lets out: one, unless the server
    /// has more to do than it should, or less.
    fn landed(&mut self, call: &Permit, took: Duration) -> u16 {
        let now = call.begun + took;
        if call.measures() {
            (self.quickest, self.work) = (took, None);
            self.measured_at = now + MEASURED_EVERY.max(took * MEASURED_EVERY_WAYS);
        }
        if took <= self.quickest {
            self.quickest = took;
            return 1;
        }
        if call.begun < self.changed {
            return 1;
        }
        let longer = took.saturating_sub(self.quickest);
        if call.parts >= MANY {
            let each = longer / call.parts;
            self.work = Some(self.work.map_or(each, |work| work.min(each)));
        }
        let own = self.work.map_or(Duration::ZERO, |work| work * call.parts);
        let waited = longer.saturating_sub(own);
        // A call may wait for another, or for half of its way.
        let fair = own + self.quickest / 2;
        let (more, fewer) = if call.is_shared && waited * 2 < fair {
            ((self.most / 2).min(MOST - self.most), 0)
        } else {
            (0, u16::from(waited > fair && self.most > FEWEST))
        };
        if more + fewer > 0 {
            self.most = self.most + more - fewer;
            self.changed = now;
        }
        1 + more - fewer
    }
}
