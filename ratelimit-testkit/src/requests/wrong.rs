//! Whole requests over the reference store, and limiters that read a policy wrongly, each of which
//! is caught.

use proptest::test_runner::{Config, RngAlgorithm, TestRng};
use ratelimit_core::Refusal;

use super::*;
use crate::pure::PureStore;

struct Pure;

impl RequestHarness for Pure {
    type Store = PureStore;

    const CASES: u32 = 512;
    const RECORDS: bool = true;

    fn store(&self) -> PureStore {
        PureStore::new()
    }

    async fn ask(
        &self,
        limiter: &RateLimiter<Arc<PureStore>>,
        asked: &AskedRequest,
    ) -> Result<Verdict, Refusal> {
        asked.to(limiter).at(asked.at).apply(asked.op).await
    }

    async fn replace_record(
        &self,
        limiter: &RateLimiter<Arc<PureStore>>,
        caller: &TestCaller,
        limit: &str,
        record: Option<Record<AnyAlgorithm>>,
    ) -> Result<(), Refusal> {
        match record {
            Some(record) => limiter.replace_record(caller, limit, record).await.map(drop),
            None => limiter.clear_record(caller, limit).await.map(drop),
        }
    }
}

/// The limit with another condition.
fn with_condition(
    draft: &LimitDraft,
    changed: bool,
    condition: impl FnOnce(&'static str, bool) -> Option<(&'static str, bool)>,
) -> Limit<AnyAlgorithm> {
    let when_user = draft.when_user.and_then(|(value, excludes)| condition(value, excludes));
    LimitDraft { when_user, ..draft.clone() }.build(changed)
}

/// What is wrong, and the limit as it is read.
const WRONG: [(&str, Build); 5] = [
    ("charges limits that do not apply", |draft, changed| {
        with_condition(draft, changed, |_, _| None)
    }),
    ("ignores when_not", |draft, changed| {
        with_condition(draft, changed, |value, excludes| (!excludes).then_some((value, excludes)))
    }),
    ("takes when_not for when", |draft, changed| {
        with_condition(draft, changed, |value, _| Some((value, false)))
    }),
    ("compares whole values", |draft, changed| {
        with_condition(draft, changed, |value, excludes| {
            Some((value.trim_end_matches('*'), excludes))
        })
    }),
    ("excludes callers that lack the identifier", |draft, changed| {
        let limit = draft.build(changed);
        match draft.when_user {
            Some((_, true)) => limit.when("user", "*").expect("a condition"),
            _ => limit,
        }
    }),
];

#[test]
fn a_limiter_says_of_each_limit_by_name_what_its_algorithm_decides() {
    try_requests(&Pure).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn limiters_that_read_a_policy_wrongly_are_caught() {
    // That it fails is enough.
    let config = Config { max_shrink_iters: 0, ..same(Pure::CASES).config().clone() };
    let runner = || {
        let same = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        TestRunner::new_with_rng(config.clone(), same)
    };
    let missed = WRONG.iter().filter(|(_, build)| try_limiters(&Pure, *build, runner()).is_ok());
    let missed: Vec<_> = missed.map(|(what, _)| *what).collect();
    assert!(missed.is_empty(), "{missed:?}");
}
