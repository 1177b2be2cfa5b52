//! [`StoreRuntime`]: where connections live and shared calls are sent.
//!
//! A task runs only while its runtime does, and callers may have runtimes of their own. So a store
//! lives on one runtime: the one that [`Builder::runtime`](crate::Builder::runtime) names, or else
//! that of its first request. If a request comes from another runtime, and the first one has ended
//! or is a `current_thread` runtime, which runs only while its thread drives it, the store starts a
//! thread of its own and stays there.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::{io, thread};

use tokio::runtime::{Builder, Handle, RuntimeFlavor};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// The runtime of a store. It moves once at most: to a thread of the store.
#[derive(Debug)]
pub(crate) struct StoreRuntime {
    place: Place,
    first: OnceLock<Arc<Home>>,
    own: OnceLock<Arc<Home>>,
}

/// Where a store lives.
#[derive(Clone, Debug, Default)]
pub(crate) enum Place {
    /// Where the first request comes from, until another one needs a thread.
    #[default]
    Caller,
    /// On this runtime.
    Named(Handle),
    /// On a thread of the store.
    OwnThread,
}

/// A runtime on which a store lives, until it moves.
#[derive(Debug)]
pub(crate) struct Home {
    runtime: Handle,
    /// Whether the user named it.
    is_named: bool,
    /// Heard by a task of the runtime, which ends with it.
    ends: watch::Sender<()>,
    /// Whether another task of the store has ended with it.
    is_ending: AtomicBool,
    /// Ends the store's own thread when it is dropped; `None` on any other runtime.
    thread: Option<oneshot::Sender<()>>,
}

impl Default for StoreRuntime {
    fn default() -> Self {
        Self::new(Place::default())
    }
}

impl StoreRuntime {
    pub(crate) const fn new(place: Place) -> Self {
        Self { place, first: OnceLock::new(), own: OnceLock::new() }
    }

    /// The runtime on which the store lives now, for a caller here.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn home(&self) -> Result<&Arc<Home>, String> {
        if let Some(own) = self.own.get() {
            return Ok(own);
        }
        let named = match &self.place {
            Place::OwnThread => return self.own_thread(),
            Place::Named(runtime) => Some(runtime),
            Place::Caller => None,
        };
        let first = self.first.get_or_init(|| {
            let runtime = named.map_or_else(Handle::current, Handle::clone);
            Arc::new(Home::on(runtime, named.is_some(), None))
        });
        if first.serves_here() { Ok(first) } else { self.own_thread() }
    }

    fn own_thread(&self) -> Result<&Arc<Home>, String> {
        let home = Home::on_own_thread();
        let home = home.map_err(|error| format!("the store cannot start its thread: {error}"))?;
        // Of several callers that start one, the thread of one stays.
        Ok(self.own.get_or_init(|| Arc::new(home)))
    }
}

impl Home {
    fn on(runtime: Handle, is_named: bool, thread: Option<oneshot::Sender<()>>) -> Self {
        let (ends, mut heard) = watch::channel(());
        drop(runtime.spawn(async move { heard.changed().await }));
        Self { runtime, is_named, ends, is_ending: AtomicBool::new(false), thread }
    }

    /// On a thread that ends when the home is dropped.
    fn on_own_thread() -> io::Result<Self> {
        let (started, starts) = mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || match Builder::new_current_thread().enable_all().build() {
            Err(error) => drop(started.send(Err(error))),
            Ok(runtime) => {
                let _ = started.send(Ok(runtime.handle().clone()));
                let _ = runtime.block_on(stopped);
            }
        };
        thread::Builder::new().name("ratelimit-redis".into()).spawn(run)?;
        let handle = starts.recv().map_err(io::Error::other)??;
        Ok(Self::on(handle, false, Some(stop)))
    }

    /// Whether what a caller of this thread waits for goes on here, where the first requests came
    /// from.
    fn serves_here(&self) -> bool {
        let of_one_thread = self.runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let stops = of_one_thread && !self.is_named && !self.is_here();
        !stops && !self.has_ended()
    }

    fn has_ended(&self) -> bool {
        self.ends.is_closed() || self.is_ending.load(Ordering::Acquire)
    }

    /// Notes that a task of the store has ended with it: a runtime ends its tasks one after the
    /// other.
    pub(crate) fn ends(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    /// Whether the store moved here.
    pub(crate) fn is_own_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Whether the caller runs on it.
    pub(crate) fn is_here(&self) -> bool {
        Handle::try_current().is_ok_and(|here| here.id() == self.runtime.id())
    }

    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(work)
    }

    /// Waits until the runtime has ended.
    pub(crate) async fn ended(&self) {
        self.ends.closed().await;
    }

    /// What to do about a runtime that runs no tasks, for a message to a caller whose time is over.
    pub(crate) fn remedy(&self) -> &'static str {
        if self.is_here() || self.is_own_thread() {
            ""
        } else if self.is_named {
            "; does the runtime that Builder::runtime names run?"
        } else {
            "; do all threads of the store's runtime wait? Builder::own_thread gives it one of its own"
        }
    }
}
