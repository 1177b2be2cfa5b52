//! [`Reload`]: the limits of a [`RateLimiter`], replaced while it is in use.
//!
//! [`RateLimiter`] does not change: [`Reload`] swaps whole limiters, so a request never sees the
//! limits of two policies.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use derive_where::derive_where;
use ratelimit_core::{Algorithm, AnyAlgorithm, ConfigError, Limit, Limits, RateLimiter, Store};

use crate::lock;

mod part;
mod watch;

pub use part::Part;
use part::Requirement;
pub use watch::Watch;

/// The longest policy document, in bytes.
const MAX_DOCUMENT_BYTES: u64 = 1 << 20;

/// A limiter whose limits are replaced while it is in use: by a call, or when a file changes.
///
/// A request takes the [`limiter`](Self::limiter) of the moment and keeps it to its end, so that it
/// is decided by the old limits or by the new ones, never by some of each. The store stays, with
/// its states: a limit that keeps its name, its algorithm and its window keeps its states, under
/// the law that a state written under other numbers never creates more than the new capacity and
/// never locks a key for longer than the new limit takes to recover. With another name, algorithm
/// or window, a limit starts at full capacity.
///
/// ```
/// use ratelimit_core::{Limits, AnyAlgorithm};
/// use ratelimit_layers::Reload;
/// use ratelimit_memory::MemoryStore;
///
/// let policy = |burst: u32| {
///     format!("[[limit]]\nname = 'burst'\nalgorithm = 'gcra'\nrate = '10/s'\nburst = {burst}\n")
/// };
/// let limits: Limits<AnyAlgorithm> = toml::from_str(&policy(20))?;
/// let reload = Reload::new(limits, MemoryStore::new());
/// assert_eq!(reload.limiter().check_now("alice")?.limit(), 20);
///
/// let changes = reload.read(&policy(5))?;
/// assert_eq!(changes.to_string(), "changed burst");
/// assert_eq!(reload.limiter().check_now("alice")?.limit(), 5);
///
/// assert!(reload.read("[[limit]]").is_err()); // the policy in force stays
/// assert_eq!(reload.limiter().check_now("alice")?.limit(), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Clones share everything.
#[derive_where(Clone, Debug)]
pub struct Reload<S, A = AnyAlgorithm> {
    #[derive_where(skip(Debug))]
    shared: Arc<SharedReload<S, A>>,
}

type Validate<A> = Box<dyn Fn(&Limits<A>) -> Result<(), ConfigError> + Send + Sync>;

struct SharedReload<S, A> {
    store: Arc<S>,
    limiter: ArcSwap<RateLimiter<Arc<S>, A>>,
    /// Locked while limits are replaced, so that replacements come one after the other.
    state: Mutex<ReloadState<A>>,
}

struct ReloadState<A> {
    /// Why the last attempt to replace the limits failed, if it did.
    last_error: Option<Arc<ReloadError>>,
    /// What the users of the limits require of them.
    requirements: Vec<Requirement>,
    validate: Option<Validate<A>>,
}

impl<S: Store<A>, A: Algorithm + Clone + PartialEq> Reload<S, A> {
    /// Begins with these limits in this store.
    #[must_use]
    pub fn new(limits: Limits<A>, store: S) -> Self {
        Self::over(RateLimiter::new(limits, Arc::new(store)))
    }

    /// Begins with this limiter. Those that replace it have its settings, such as
    /// [`allow_unlimited`](RateLimiter::allow_unlimited).
    #[must_use]
    pub fn over(limiter: RateLimiter<Arc<S>, A>) -> Self {
        let (store, limiter) = (Arc::clone(limiter.store()), ArcSwap::from_pointee(limiter));
        let state = ReloadState { last_error: None, requirements: Vec::new(), validate: None };
        Self { shared: Arc::new(SharedReload { store, limiter, state: Mutex::new(state) }) }
    }

    /// Refuses limits for which this is an error, those in force included. For a policy over a
    /// [`Fallback`](crate::Fallback): `validate(move |limits| fallback.validate(limits))`, with a
    /// clone of it. A layer of `ratelimit-tower` adds its own checks by itself.
    ///
    /// Its panic is an error, too. It runs while the policy is being replaced. From it, ask only
    /// [`limiter`](Self::limiter) and [`store`](Self::store) of this value: everything else waits
    /// for the replacement, and so for itself.
    ///
    /// # Errors
    /// The limits in force are not valid.
    pub fn validate(
        self,
        validate: impl Fn(&Limits<A>) -> Result<(), ConfigError> + Send + Sync + 'static,
    ) -> Result<Self, ConfigError> {
        let mut state = lock(&self.shared.state);
        validate(self.limiter().limits())?;
        state.validate = Some(Box::new(validate));
        drop(state);
        Ok(self)
    }

    /// The limiter of the moment. Decide a whole request by it, and [name](RateLimiter::named) its
    /// verdict by it.
    #[must_use]
    pub fn limiter(&self) -> Arc<RateLimiter<Arc<S>, A>> {
        self.shared.limiter.load_full()
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.shared.store
    }

    /// Why the last attempt to replace the limits failed; `None` if it succeeded, or if there was
    /// none.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<ReloadError>> {
        lock(&self.shared.state).last_error.clone()
    }

    /// Replaces the limits.
    ///
    /// # Errors
    /// Limits that are not [valid](Self::validate), or not what a [part](Self::part) requires. The
    /// limits in force stay.
    pub fn replace(&self, limits: Limits<A>) -> Result<PolicyChanges, Arc<ReloadError>> {
        self.attempt(None, || Ok(limits))
    }

    /// Replaces the limits by these, which are from this file, if they are from one.
    fn attempt(
        &self,
        path: Option<&Path>,
        limits: impl FnOnce() -> Result<Limits<A>, ReloadError>,
    ) -> Result<PolicyChanges, Arc<ReloadError>> {
        let mut state = lock(&self.shared.state);
        let valid = limits().and_then(|limits| {
            let validate = || state.validate.as_ref().map_or(Ok(()), |validate| validate(&limits));
            // Code of others. Its panic would end a watch without a word.
            let panicked = |_| Err(ConfigError::new("the function given to `validate` panicked"));
            let checked = catch_unwind(AssertUnwindSafe(validate)).unwrap_or_else(panicked);
            let checked = checked.and_then(|()| part::check(&limits, &state.requirements));
            let path = || path.map(Path::to_path_buf);
            checked.map_err(|error| ReloadError::Limits { path: path(), error })?;
            Ok(limits)
        });
        match valid {
            Ok(limits) => {
                let before = self.limiter();
                let changes = PolicyChanges::between(before.limits(), &limits);
                if !changes.is_empty() {
                    self.shared.limiter.store(Arc::new(before.with_limits(limits)));
                }
                state.last_error = None;
                drop(state);
                #[cfg(feature = "tracing")]
                if !changes.is_empty() {
                    tracing::info!(%changes, "the policy is replaced");
                }
                Ok(changes)
            }
            Err(error) => {
                let error = Arc::new(error);
                state.last_error = Some(Arc::clone(&error));
                drop(state);
                #[cfg(feature = "tracing")]
                tracing::error!(%error, "the policy is not replaced: the one in force stays");
                Err(error)
            }
        }
    }
}

impl<S: Store<AnyAlgorithm>> Reload<S> {
    /// Replaces the limits by those of this document, in TOML.
    ///
    /// # Errors
    /// A document that is no policy; and as [`replace`](Self::replace). The limits in force stay.
    pub fn read(&self, document: &str) -> Result<PolicyChanges, Arc<ReloadError>> {
        self.attempt(None, || parse_limits(None, document))
    }

    /// Replaces the limits by those of this file.
    ///
    /// # Errors
    /// A file that cannot be read; and as [`read`](Self::read). The limits in force stay.
    pub async fn read_file(
        &self,
        path: impl AsRef<Path>,
    ) -> Result<PolicyChanges, Arc<ReloadError>> {
        let path = path.as_ref();
        let document = watch::document(path).await;
        self.attempt(Some(path), || parse_limits(Some(path), &document?))
    }
}

fn parse_limits(path: Option<&Path>, document: &str) -> Result<Limits<AnyAlgorithm>, ReloadError> {
    toml::from_str(document).map_err(|error| ReloadError::Document {
        path: path.map(Path::to_path_buf),
        error: Box::new(error),
    })
}

/// What a new policy changes, by the names of limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PolicyChanges {
    /// Limits that are new. They begin at full capacity.
    pub added: Vec<Box<str>>,
    /// Limits that are gone. Their states expire by themselves.
    pub removed: Vec<Box<str>>,
    /// Limits with other parameters. They keep their states, unless the algorithm or its window is
    /// another.
    pub changed: Vec<Box<str>>,
    /// Whether the limits are in another order.
    pub reordered: bool,
}

impl PolicyChanges {
    fn between<A: Algorithm + PartialEq>(old: &Limits<A>, new: &Limits<A>) -> Self {
        let was = |limit: &Limit<A>| old.iter().find(|before| before.name() == limit.name());
        let is = |limit: &Limit<A>| new.iter().find(|after| after.name() == limit.name());
        let names = |limits: &Limits<A>, are: &dyn Fn(&Limit<A>) -> bool| -> Vec<Box<str>> {
            limits.iter().filter(|limit| are(limit)).map(|limit| limit.name().into()).collect()
        };
        let kept = names(old, &|limit| is(limit).is_some());
        Self {
            added: names(new, &|limit| was(limit).is_none()),
            removed: names(old, &|limit| is(limit).is_none()),
            changed: names(new, &|limit| was(limit).is_some_and(|before| before != limit)),
            reordered: names(new, &|limit| was(limit).is_some()) != kept,
        }
    }

    /// Whether nothing differs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for PolicyChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { added, removed, changed, .. } = self;
        let lists = [("added", added), ("removed", removed), ("changed", changed)];
        let some = lists.iter().filter(|(_, names)| !names.is_empty());
        let mut told: Vec<_> =
            some.map(|(what, names)| format!("{what} {}", names.join(", "))).collect();
        told.extend(self.reordered.then(|| "reordered".into()));
        told.extend(told.is_empty().then(|| "nothing changed".into()));
        f.write_str(&told.join("; "))
    }
}

/// Why limits were not replaced. The limits in force stay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The file cannot be read.
    #[error("the policy {path:?} cannot be read: {error}")]
    #[non_exhaustive]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The document is no policy.
    #[error("{}{error}", of_file(path.as_deref()))]
    #[non_exhaustive]
    Document {
        /// The file, if it is from one.
        path: Option<PathBuf>,
        /// What is wrong, with the line.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The limits are not valid here.
    #[error("{}{error}", of_file(path.as_deref()))]
    #[non_exhaustive]
    Limits {
        /// The file, if they are from one.
        path: Option<PathBuf>,
        /// What is wrong, with the limit.
        error: ConfigError,
    },
}

fn of_file(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!("the policy {}: ", path.display()))
}
