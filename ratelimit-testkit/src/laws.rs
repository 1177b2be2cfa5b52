//! The laws of a store, each as a function of a store and a trace or a limit. They compare the
//! store with the pure step, which the laws of algorithms judge.

pub(crate) mod agreement;
pub(crate) mod capabilities;
pub(crate) mod changes;
pub(crate) mod concurrency;
pub(crate) mod identifiers;
pub(crate) mod kept;
pub(crate) mod own_clock;
pub(crate) mod small;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::Now;
use ratelimit_core::{Algorithm, AnyAlgorithm, ErrorKind, Limit, Verdict};

use crate::capability::{Able, Capability};
use crate::harness::AnyStore;
use crate::law::ensure;
use crate::pure::PureStore;
use crate::suite::guard::note_request;
use crate::trace::TraceRequest;

/// How often a request is repeated while the store reports contention.
const CONTENDED: usize = 1_000;

/// A store's answer to a request: a verdict, or a kind of error and its message.
pub(crate) type Said = Result<Verdict, (ErrorKind, String)>;

/// The states of a key in two stores.
pub(crate) type Both<A> = [Option<<A as Algorithm>::State>; 2];

/// The texts of two states that differ, as far as they matter to this limit; `None` if they do not.
pub(crate) type Difference<A> = fn(&A, Both<A>) -> Option<[Option<String>; 2]>;

/// How two states differ, as far as they matter to this limit.
pub(crate) fn difference(
    algorithm: &AnyAlgorithm,
    states: Both<AnyAlgorithm>,
) -> Option<[Option<String>; 2]> {
    if states[0] == states[1] {
        return None;
    }
    let [got, due] = states.map(|state| describe_state(algorithm, state?));
    (got != due).then_some([got, due])
}

/// The text of a state as far as it matters to this limit: of a log the entries that had not
/// expired when its newest entry was made. A store may keep more, or sweep it at leisure.
fn describe_state(algorithm: &AnyAlgorithm, state: AnyState) -> Option<String> {
    match (algorithm, state) {
        (AnyAlgorithm::SlidingLog(log), AnyState::SlidingLog(mut state)) => {
            let newest = state.entries.last()?.timestamp;
            let counts = |us: u64| us + log.window_us() > newest.as_us();
            state.entries.retain(|entry| counts(entry.timestamp.as_us()));
            Some(format!("{state:?}"))
        }
        (_, state) => Some(format!("{state:?}")),
    }
}

/// A fresh store under test for one law.
pub(crate) struct Subject<'a, A: Algorithm> {
    pub(crate) store: &'a dyn AnyStore<A>,
    /// The store's capabilities.
    pub(crate) able: Able,
    /// How states are compared, if they are: otherwise by peeks.
    pub(crate) difference: Option<Difference<A>>,
}

impl<A: Algorithm> Subject<'_, A> {
    /// Runs a future to completion, as the harness does.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let mut output = None;
        self.store.block_on(Box::pin(async { output = Some(future.await) }));
        output.expect("`Harness::block_on` runs a future to its end")
    }

    /// The caller's metadata that is sent with a request.
    pub(crate) fn metadata(&self, request: &TraceRequest) -> Vec<u8> {
        if self.able.can(Capability::Metadata) { request.metadata() } else { Vec::new() }
    }

    /// Executes a request that is not refused.
    pub(crate) async fn ask(
        &self,
        limits: &[Limit<A>],
        request: &TraceRequest,
        now: Now,
    ) -> Result<Verdict, String> {
        match self.answer(limits, request, now).await? {
            Ok(verdict) => Ok(verdict),
            Err((_, error)) => Err(format!("{request:?} failed: {error}")),
        }
    }

    /// The store's answer to a request: a verdict of the right shape, or an error.
    pub(crate) async fn answer(
        &self,
        limits: &[Limit<A>],
        request: &TraceRequest,
        now: Now,
    ) -> Result<Said, String> {
        let (checks, metadata) = (request.checks(limits), self.metadata(request));
        let batch = match request.batch(&checks, &metadata) {
            Ok(batch) => batch.now(now),
            Err(error) => return Err(format!("{request:?} was refused: {error}")),
        };
        for _ in 0..CONTENDED {
            note_request();
            match self.store.apply(&batch).await {
                Ok(verdict) => {
                    let count = verdict.decisions().len();
                    ensure(count == checks.len(), || {
                        format!("{request:?} has {} checks and got {count} decisions", checks.len())
                    })?;
                    return Ok(Ok(verdict));
                }
                // Contention charges nothing, and callers ask again.
                Err((ErrorKind::Contended, _)) => {}
                Err(error) => return Ok(Err(error)),
            }
        }
        Err(format!("{request:?} was contended {CONTENDED} times in a row"))
    }

    /// The pure step's answer to a request.
    pub(crate) fn expected_answer(
        &self,
        pure: &PureStore<A>,
        limits: &[Limit<A>],
        request: &TraceRequest,
    ) -> Said {
        let answer = pure.answer(limits, request, &self.metadata(request));
        answer.map_err(|refusal| (refusal.kind(), refusal.to_string()))
    }
}
