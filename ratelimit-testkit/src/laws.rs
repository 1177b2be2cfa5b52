//! The laws of a store, each as a function of a store and a trace or a limit. They compare the store with the pure step, which
//! the laws of algorithms judge.

pub(crate) mod agreement;
pub(crate) mod capabilities;
pub(crate) mod changes;
pub(crate) mod concurrency;
pub(crate) mod identifiers;
pub(crate) mod kept;
pub(crate) mod own_clock;
pub(crate) mod small;

use ratelimit_core::store::Now;
use ratelimit_core::{Algorithm, ErrorKind, Limit, Store, StoreError, Verdict};

use crate::capability::{Able, Capability};
use crate::harness::Harness;
use crate::law::{Law, Violation};
use crate::pure::{PureStore, Refused};
use crate::suite::guard::note_request;
use crate::trace::TraceRequest;

/// How often a request is repeated while the store reports contention.
const CONTENDED: usize = 1_000;

/// The outcome of a law: `Ok`, or how the store broke it.
pub(crate) type LawResult = Result<(), Violation>;

/// A store's answer to a request: a verdict, or a kind of error and its message.
pub(crate) type Said = Result<Verdict, (ErrorKind, String)>;

/// The text of a state, as far as it matters to this limit; `None` if another algorithm wrote it.
pub(crate) type Shown<A> = fn(&A, <A as Algorithm>::State) -> Option<String>;

/// A fresh store under test for one law.
pub(crate) struct Subject<'a, A: Algorithm, H: Harness<A>> {
    pub(crate) law: Law,
    pub(crate) harness: &'a H,
    pub(crate) store: &'a H::Store,
    /// How states are compared, if they are: otherwise by peeks.
    pub(crate) shown: Option<Shown<A>>,
}

impl<A: Algorithm, H: Harness<A>> Subject<'_, A, H> {
    /// Reports that the store broke the law, and how.
    pub(crate) fn broken<T>(&self, message: impl Into<String>) -> Result<T, Violation> {
        Err(Violation { law: self.law, message: message.into() })
    }

    /// Fails with this message unless the condition is true.
    pub(crate) fn ensure(&self, holds: bool, message: impl FnOnce() -> String) -> LawResult {
        if holds { Ok(()) } else { self.broken(message()) }
    }

    /// The store's capabilities.
    #[allow(clippy::unused_self, reason = "of this subject")]
    pub(crate) const fn able(&self) -> Able {
        Able::of::<A, H>()
    }

    /// The caller's metadata that is sent with a request.
    pub(crate) fn metadata(&self, request: &TraceRequest) -> Vec<u8> {
        if self.able().can(Capability::Metadata) { request.metadata() } else { Vec::new() }
    }

    /// Executes a request that is not refused.
    pub(crate) async fn ask(
        &self,
        limits: &[Limit<A>],
        request: &TraceRequest,
        now: Now,
    ) -> Result<Verdict, Violation> {
        match self.answer(limits, request, now).await? {
            Ok(verdict) => Ok(verdict),
            Err((_, error)) => self.broken(format!("{request:?} failed: {error}")),
        }
    }

    /// The store's answer to a request: a verdict of the right shape, or an error.
    pub(crate) async fn answer(
        &self,
        limits: &[Limit<A>],
        request: &TraceRequest,
        now: Now,
    ) -> Result<Said, Violation> {
        let (checks, metadata) = (request.checks(limits), self.metadata(request));
        let batch = match request.batch(&checks, &metadata) {
            Ok(batch) => batch.now(now),
            Err(error) => return self.broken(format!("{request:?} was refused: {error}")),
        };
        for _ in 0..CONTENDED {
            note_request();
            match self.store.apply(&batch).await {
                Ok(verdict) => {
                    let count = verdict.decisions().len();
                    self.ensure(count == checks.len(), || {
                        format!("{request:?} has {} checks and got {count} decisions", checks.len())
                    })?;
                    return Ok(Ok(verdict));
                }
                // Contention charges nothing, and callers ask again.
                Err(error) if error.kind() == ErrorKind::Contended => {}
                Err(error) => return Ok(Err((error.kind(), error.to_string()))),
            }
        }
        self.broken(format!("{request:?} was contended {CONTENDED} times in a row"))
    }

    /// The pure step's answer to a request.
    pub(crate) fn due(
        &self,
        pure: &PureStore<A>,
        limits: &[Limit<A>],
        request: &TraceRequest,
    ) -> Said {
        pure.answer(limits, request, &self.metadata(request)).map_err(|refusal| {
            let refused = Refused(refusal);
            (refused.kind(), refused.to_string())
        })
    }
}
