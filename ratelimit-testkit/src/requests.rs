//! Whole requests to a limiter: of several limits that differ in everything, of callers that lack
//! identifiers, with every option. A model that knows the steps of the algorithms, and neither
//! batches nor verdicts, says by the name of each limit what must come out.

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use proptest::test_runner::{TestCaseError, TestError, TestRunner};
use ratelimit_core::algorithm::Quota as _;
use ratelimit_core::store::Op;
use ratelimit_core::{
    Account, AnyAlgorithm, Decision, Limit, Limits, NamedDecision, NamedDecisions, RateLimiter,
    Record, Request, Store, StoreError as _, Verdict,
};

use crate::law::LawResult;
use crate::suite::same;
pub use made::{AskedRequest, TestCaller};
use made::{LimitDraft, RequestCase, cases};
use model::{Due, Model};

mod made;
mod model;
#[cfg(test)]
mod wrong;

/// A store on which whole requests are tried: see [`try_requests`].
pub trait RequestHarness {
    /// The store.
    type Store: Store<AnyAlgorithm>;

    /// The number of cases, of some dozen requests each.
    const CASES: u32;

    /// Whether a limit can read what one of other numbers has left.
    const CHANGES: bool = true;

    /// Whether the store keeps records of callers. By default, it does not.
    const RECORDS: bool = false;

    /// Whether the store can keep this limit. By default, all.
    #[must_use]
    fn can_keep(limit: &Limit<AnyAlgorithm>) -> bool {
        let _ = limit;
        true
    }

    /// The operations that the store has. By default, all.
    #[must_use]
    fn can_do(op: Op) -> bool {
        let _ = op;
        true
    }

    /// Opens a store without states.
    fn store(&self) -> Self::Store;

    /// Sends a request to a limiter over the store, at the request's time.
    fn ask(
        &self,
        limiter: &RateLimiter<Arc<Self::Store>>,
        asked: &AskedRequest,
    ) -> impl Future<Output = Result<Verdict, <Self::Store as Store<AnyAlgorithm>>::Error>>;

    /// Replaces the record of a caller under the limit of this name, or clears it. By default,
    /// there are none.
    fn replace_record(
        &self,
        limiter: &RateLimiter<Arc<Self::Store>>,
        caller: &TestCaller,
        limit: &str,
        record: Option<Record<AnyAlgorithm>>,
    ) -> impl Future<Output = Result<(), <Self::Store as Store<AnyAlgorithm>>::Error>> {
        let _ = (limiter, caller, limit, record);
        std::future::ready(Ok(()))
    }

    /// Looks at what the store keeps after the requests of callers with these identifiers.
    fn look(
        &self,
        store: &Self::Store,
        identifiers: &BTreeSet<&str>,
    ) -> impl Future<Output = LawResult> {
        let _ = (store, identifiers);
        std::future::ready(Ok(()))
    }

    /// Runs a future to its end. By default, without a runtime.
    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        crate::harness::block_on(future)
    }
}

/// Tries whole requests on a store: what they say of each limit, by its name, is what a model says.
/// Of two limiters over the store, the limits of the second have the names of the first, and other
/// numbers.
///
/// # Errors
/// The smallest case found on which an answer differs, as text.
pub fn try_requests<H: RequestHarness>(harness: &H) -> LawResult {
    try_limiters(harness, LimitDraft::build, same(H::CASES))
}

/// How a limit of the first limiter or of the second is built.
type Build = fn(&LimitDraft, bool) -> Limit<AnyAlgorithm>;

fn try_limiters<H: RequestHarness>(harness: &H, build: Build, mut runner: TestRunner) -> LawResult {
    let all = cases(H::can_keep, H::can_do, [H::CHANGES, H::RECORDS]);
    let holds =
        |case| harness.block_on(holds_on(harness, build, &case)).map_err(TestCaseError::fail);
    let tried = runner.run(&all, holds);
    tried.map_err(|error| match error {
        TestError::Abort(reason) => reason.to_string(),
        TestError::Fail(reason, case) => format!("{reason}\non {case:#?}"),
    })
}

async fn holds_on<H: RequestHarness>(harness: &H, build: Build, case: &RequestCase) -> LawResult {
    let store = Arc::new(harness.store());
    let limiters = [false, true].map(|changed| {
        let limits = case.limits.iter().map(|limit| build(limit, changed));
        let limits = Limits::new(limits).expect("names of their own");
        let limiter = RateLimiter::new(limits, Arc::clone(&store));
        if case.allows_unlimited { limiter.allow_unlimited() } else { limiter }
    });
    let mut model = Model::new(&case.limits, case.allows_unlimited);
    for asked in &case.requests {
        let limiter = &limiters[usize::from(asked.changed)];
        if let Some((place, record)) = &asked.record {
            let limit = &case.limits[*place];
            let record = record.map(|record| limit.record(record));
            let set = harness.replace_record(limiter, &asked.caller, &limit.name, record).await;
            set.map_err(|error| format!("no record is set: {error}\n{asked:?}"))?;
            model.replace_record(asked);
        }
        let due = model.expect(asked);
        let got = harness.ask(limiter, asked).await;
        let said = match &got {
            Ok(verdict) => Said::from_verdict(asked.named(limiter, verdict), verdict),
            Err(error) => Said::Refused(error.kind()),
        };
        let wanted = Said::from_expected(due.clone());
        let in_words = || format!("{asked:?}\n got {got:?}\n due {due:?}");
        if said != wanted {
            return Err(in_words());
        }
        if let (Due::Refused { names, .. }, Err(error)) = (&due, &got) {
            let text = error.to_string();
            if let Some(name) = names.iter().find(|name| !text.contains(&format!("{name:?}"))) {
                return Err(format!("{}\n the error names no {name:?}", in_words()));
            }
        }
        if let (Due::Decided { decided, .. }, Ok(verdict)) = (&due, &got) {
            let request = asked.to(limiter);
            let applicable =
                request.applicable().map(|position| case.limits[position].name.as_str());
            if !applicable.eq(decided.iter().map(|(name, ..)| name.as_str())) {
                return Err(format!("other limits are applicable: {}", in_words()));
            }
            agrees_by_name((asked, asked.named(limiter, verdict)), verdict, &case.limits, decided)
                .map_err(|how| format!("{how}: {}", in_words()))?;
        }
    }
    let identifiers = case.requests.iter().flat_map(|asked| asked.caller.texts()).collect();
    harness.look(&store, &identifiers).await
}

/// What a limiter says by the names of its limits, in a form that can be compared.
#[derive(Debug, PartialEq)]
enum Said {
    Refused(ratelimit_core::ErrorKind),
    Decided { summary: Decision, decided: Vec<Named>, shadow: Vec<(String, Decision, bool)> },
}

/// A decision with the name of its limit, what it leaves beside itself, and whether it warns.
pub(crate) type Named = (String, Decision, Account, bool);

fn named(one: NamedDecision<'_, AnyAlgorithm>) -> Named {
    // The warnings follow from what was charged.
    let account = Account { charged: None, ..one.account() };
    (one.name().to_owned(), *one.decision(), account, one.is_warned())
}

impl Said {
    fn from_verdict(decisions: NamedDecisions<'_, AnyAlgorithm>, verdict: &Verdict) -> Self {
        let shadow = decisions.shadow().map(|one| {
            let (name, decision, _, warned) = named(one);
            (name, decision, warned)
        });
        Self::Decided {
            shadow: shadow.collect(),
            summary: *verdict.summary(),
            decided: decisions.map(named).collect(),
        }
    }

    fn from_expected(due: Due) -> Self {
        match due {
            Due::Refused { kind, .. } => Self::Refused(kind),
            Due::Decided { summary, decided, shadow } => Self::Decided { summary, decided, shadow },
        }
    }
}

/// Compares all that is found by a name, and all sums, with the decisions.
fn agrees_by_name(
    (asked, decisions): (&AskedRequest, NamedDecisions<'_, AnyAlgorithm>),
    verdict: &Verdict,
    limits: &[LimitDraft],
    decided: &[Named],
) -> LawResult {
    for limit in limits {
        let due = decided.iter().find(|(name, ..)| *name == limit.name);
        let got = decisions.by_name(&limit.name);
        let found = got.map(named);
        if found.as_ref() != due {
            return Err(format!("{:?} is found as {found:?}", limit.name));
        }
        let Some(got) = got else { continue };
        let deciding = limit.deciding(asked);
        let algorithm = deciding.algorithm();
        let window = got.window().map(|window| window.as_micros().try_into().unwrap_or(u64::MAX));
        if window != algorithm.window_us(got.decision()) || got.rate() != algorithm.rate() {
            return Err(format!("the quota of {:?} is another limit's", limit.name));
        }
    }
    let denied: Vec<_> = verdict.denied_by().map(|position| decided[position].0.as_str()).collect();
    let due: Vec<_> =
        decided.iter().filter(|(_, one, ..)| !one.allowed).map(|one| one.0.as_str()).collect();
    let most = |of: fn(&Account) -> u64| decided.iter().map(|(_, _, account, _)| of(account)).max();
    let owed = most(|account| account.owed).unwrap_or_default();
    let forgiven = most(|account| account.forgiven).unwrap_or_default();
    let is_unlimited = decided.is_empty();
    if denied != due
        || (verdict.owed(), verdict.forgiven()) != (owed, forgiven)
        || verdict.is_unlimited() != is_unlimited
    {
        return Err(format!(
            "denied by {denied:?} and not {due:?}, {owed} owed, {forgiven} forgiven"
        ));
    }
    Ok(())
}

impl AskedRequest {
    /// The request to a limiter, without its time.
    pub fn to<'a, S>(
        &'a self,
        limiter: &'a RateLimiter<S>,
    ) -> Request<'a, S, AnyAlgorithm, TestCaller> {
        let request = limiter.request(&self.caller).metadata(&self.metadata);
        let request = match self.costs.uniform() {
            Some(cost) => request.cost(cost),
            None => request.costs(&self.costs),
        };
        let request = match &self.numbers {
            Some(numbers) => request.numbers(numbers),
            None => request,
        };
        self.id.map_or(request, |id| request.id(id))
    }

    /// Whether it has numbers of its own, which only a request of [`to`](Self::to) brings.
    #[must_use]
    pub const fn has_numbers(&self) -> bool {
        self.numbers.is_some()
    }

    /// The decisions on it, each with the limit that made it.
    fn named<'a, S>(
        &'a self,
        limiter: &'a RateLimiter<S>,
        verdict: &'a Verdict,
    ) -> NamedDecisions<'a, AnyAlgorithm> {
        let named = limiter.named(verdict);
        match &self.numbers {
            Some(numbers) => named.numbers(numbers),
            None => named,
        }
    }
}

impl fmt::Display for AskedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.op, self.at)
    }
}
