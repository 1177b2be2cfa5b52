//! [`SharedRuntime`]: chooses where work runs that all callers depend on.
//!
//! Connectors, connections and look-ups serve every caller, and callers may have runtimes of their own. A runtime of one
//! thread runs its tasks only while a thread drives it. So a caller of another runtime relies on shared work only after
//! a *heartbeat* from its runtime, the [`Home`]. If none comes, or if that runtime has ended, the caller starts the work
//! again on its own runtime, which becomes the next home.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// How long a heartbeat counts. The next is asked for after half of it, so that requests in a row do not wait for one.
const FRESH: Duration = Duration::from_millis(100);
/// How long a home may take for a heartbeat: at least as long as a busy thread may take, at most as long as an attempt to
/// connect.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(100);
const LONGEST_PATIENCE: Duration = Duration::from_secs(3);

/// The runtime of shared work: the one that was given, or that of the first caller, until another takes over.
#[derive(Default)]
pub(crate) struct SharedRuntime {
    home: Mutex<Option<Arc<Home>>>,
    patience: Duration,
}

impl SharedRuntime {
    /// A home may take half of the deadline for a heartbeat. The other half serves to start again elsewhere.
    pub(crate) fn new(given: Option<Handle>, deadline: Duration) -> Self {
        let patience = (deadline / 2).clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE);
        Self { home: Mutex::new(given.map(|runtime| Home::of(runtime, patience))), patience }
    }

    /// Where shared work starts now: the home, or the caller's runtime if there is none any more.
    pub(crate) fn home(&self) -> Arc<Home> {
        let mut home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = &*home {
            if !home.is_here() {
                home.ask();
            }
            if !home.is_left() {
                return Arc::clone(home);
            }
        }
        Arc::clone(home.insert(Home::of(Handle::current(), self.patience)))
    }

    /// The runtime of the home, unless it has ended or a heartbeat is overdue.
    pub(crate) fn unless_overdue(&self) -> Option<Handle> {
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        (home.is_driven() || home.is_punctual()).then(|| home.runtime.clone())
    }
}

/// A runtime on which shared work runs, until it is left for good.
pub(crate) struct Home {
    runtime: Handle,
    patience: Duration,
    is_left: AtomicBool,
    pulse: Mutex<Pulse>,
    /// A heartbeat came, or the home was left.
    news: Notify,
    /// Heard by a task of the runtime, which ends with it.
    ends: watch::Sender<()>,
}

#[derive(Default)]
struct Pulse {
    /// Since when a heartbeat is due.
    asked: Option<Instant>,
    last: Option<Instant>,
}

impl Home {
    fn of(runtime: Handle, patience: Duration) -> Arc<Self> {
        let (ends, mut heard) = watch::channel(());
        drop(runtime.spawn(async move { heard.changed().await }));
        Arc::new(Self {
            runtime,
            patience,
            is_left: AtomicBool::new(false),
            pulse: Mutex::default(),
            news: Notify::new(),
            ends,
        })
    }

    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.runtime.spawn(work).abort_handle()
    }

    /// Whether its runtime has ended, or another home has replaced it or will. What runs here may never go on.
    pub(crate) fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Acquire) || self.ends.is_closed()
    }

    /// Whether work here goes on, as far as the caller knows without waiting.
    pub(crate) fn is_driven(self: &Arc<Self>) -> bool {
        if self.is_left() {
            return false;
        }
        if self.is_here() {
            return true;
        }
        let Some(age) = self.pulse().last.map(|last| last.elapsed()) else { return false };
        if age > FRESH / 2 {
            self.ask();
        }
        age < FRESH
    }

    /// Whether a heartbeat, which is asked for if none is due, is not overdue yet.
    fn is_punctual(self: &Arc<Self>) -> bool {
        self.ask();
        !self.is_left() && self.pulse().asked.is_none_or(|asked| asked.elapsed() < FRESH)
    }

    /// Waits for a heartbeat. Returns whether one came; otherwise the home is left.
    pub(crate) async fn beats(self: &Arc<Self>) -> bool {
        loop {
            let mut news = pin!(self.news.notified());
            news.as_mut().enable();
            if self.is_driven() {
                return true;
            }
            let patience = self.ask();
            if self.is_left() {
                return false;
            }
            // Each outcome is a reason to look again.
            let _ = timeout(patience, select(news, pin!(self.ends.closed()))).await;
        }
    }

    /// Waits for something that work here brings about. `None` if the home is left meanwhile: the work has to start
    /// again.
    pub(crate) async fn while_driven<T>(
        self: &Arc<Self>,
        something: impl Future<Output = T>,
    ) -> Option<T> {
        if self.is_here() {
            return Some(something.await);
        }
        let stops = async {
            while self.beats().await {
                sleep(FRESH).await;
            }
        };
        match select(pin!(something), pin!(stops)).await {
            Either::Left((done, _)) => Some(done),
            Either::Right(_) => None,
        }
    }

    fn is_here(&self) -> bool {
        Handle::try_current().is_ok_and(|here| here.id() == self.runtime.id())
    }

    fn pulse(&self) -> MutexGuard<'_, Pulse> {
        self.pulse.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a heartbeat, unless one is due already. Leaves the home if it has been due for too long. Returns how
    /// much longer it may take.
    fn ask(self: &Arc<Self>) -> Duration {
        let now = Instant::now();
        let due = {
            let mut pulse = self.pulse();
            let due = pulse.asked;
            pulse.asked = due.or(Some(now));
            due
        };
        let Some(asked) = due else {
            let home = Arc::clone(self);
            drop(self.spawn(async move {
                *home.pulse() = Pulse { asked: None, last: Some(Instant::now()) };
                home.news.notify_waiters();
            }));
            return self.patience;
        };
        let patience = self.patience.saturating_sub(now.saturating_duration_since(asked));
        if patience.is_zero() {
            self.leave();
        }
        patience
    }

    fn leave(&self) {
        self.is_left.store(true, Ordering::Release);
        self.news.notify_waiters();
    }
}
