//! Stores that break a rule, each of which is caught.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::{Clock as _, Refusal};

use super::*;

/// How a store is wrong.
trait Wrong: Send + Sync + 'static {
    /// Before a batch is decided.
    fn before(_: &WrongStore<Self>, _: &Batch<'_, Any>)
    where
        Self: Sized,
    {
    }

    /// Before a record changes.
    fn at_change(_: &WrongStore<Self>, _: &Limit<Any>, _: &str)
    where
        Self: Sized,
    {
    }

    /// Decides the batch. Others come before it and after it.
    fn decides(
        store: &PureStore,
        batch: &Batch<'_, Any>,
    ) -> impl Future<Output = Result<Verdict, Refusal>> + Send {
        async move {
            yields().await;
            let verdict = store.decide(batch);
            yields().await;
            verdict
        }
    }

    /// The record that is kept in place of one.
    fn keeps(record: &Record<Any>) -> Record<Any> {
        record.clone()
    }

    /// The limit that decides in place of one.
    fn sees(limit: &Limit<Any>) -> Limit<Any> {
        limit.clone()
    }
}

/// Lets all others run that are ready.
async fn yields() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

struct WrongStore<W>(PureStore, std::marker::PhantomData<W>);

impl<W: Wrong> Store<Any> for WrongStore<W> {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, Any>) -> Result<Verdict, Refusal> {
        W::before(self, batch);
        let limits: Vec<_> = batch.checks().iter().map(|check| W::sees(check.limit)).collect();
        let checks = batch.checks().iter().zip(&limits);
        let checks: Vec<_> = checks.map(|(check, limit)| Check { limit, ..*check }).collect();
        W::decides(&self.0, &batch.with_checks(&checks)).await
    }
}

impl<W: Wrong> RecordStore<Any> for WrongStore<W> {
    async fn record(&self, limit: &Limit<Any>, key: &str) -> Result<Option<Record<Any>>, Refusal> {
        self.0.record(limit, key).await
    }

    async fn exchange_record(
        &self,
        limit: &Limit<Any>,
        key: &str,
        standing: Option<&Record<Any>>,
        next: Option<&Record<Any>>,
    ) -> Result<bool, Refusal> {
        W::at_change(self, limit, key);
        self.0.exchange_record(limit, key, standing, next.map(W::keeps).as_ref()).await
    }
}

struct OfWrong<W>(std::marker::PhantomData<W>);

impl<W: Wrong> Harness<Any> for OfWrong<W> {
    type Store = WrongStore<W>;

    /// As many races as find a record that is read too early.
    const CASES: u32 = 256;

    fn new() -> Self {
        Self(std::marker::PhantomData)
    }

    fn store(&self) -> Self::Store {
        WrongStore(PureStore::new(), std::marker::PhantomData)
    }

    fn clock(&self, store: &Self::Store) -> StoreClock {
        store.0.clock().into()
    }

    async fn state(&self, store: &Self::Store, limit: &Limit<Any>, key: &str) -> Option<AnyState> {
        store.0.state(limit, key)
    }

    async fn leaks(&self, _: &Self::Store, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

fn broken<W: Wrong>() -> Vec<RecordRule> {
    RecordRule::ALL.into_iter().filter(|rule| rule.held_by::<OfWrong<W>>().is_err()).collect()
}

struct Right;
impl Wrong for Right {}

/// Takes the record away with the state.
struct ForgetsWithTheState;
impl Wrong for ForgetsWithTheState {
    fn before(store: &WrongStore<Self>, batch: &Batch<'_, Any>) {
        for check in batch.checks().iter().filter(|_| batch.operation() == Op::Reset) {
            let record = crate::block_on(store.0.record(check.limit, check.key)).expect("told");
            let cleared = store.0.exchange_record(check.limit, check.key, record.as_ref(), None);
            let _ = crate::block_on(cleared);
        }
    }
}

/// Starts again with the numbers of a record.
struct GrantsASecondBurst;
impl Wrong for GrantsASecondBurst {
    fn at_change(store: &WrongStore<Self>, limit: &Limit<Any>, key: &str) {
        let check = Check { limit, key, cost: 0 };
        let _ = store.0.decide(&Batch::one(&check).op(Op::Reset));
    }
}

/// Looks for no record.
struct IgnoresRecords;
impl Wrong for IgnoresRecords {
    fn sees(limit: &Limit<Any>) -> Limit<Any> {
        let plain = Limit::new(limit.name(), *limit.algorithm()).expect("a name");
        if limit.counts_attempts() { plain.count_attempts().expect("it can") } else { plain }
    }
}

/// Reads the records before it takes the lock of the states.
struct ReadsRecordsBeforeTheLock;
impl Wrong for ReadsRecordsBeforeTheLock {
    async fn decides(store: &PureStore, batch: &Batch<'_, Any>) -> Result<Verdict, Refusal> {
        let read = store.records().clone();
        // Others come between.
        yields().await;
        store.decide_by(batch, || &read)
    }
}

/// The same record with another end, if it has one.
fn ending(record: &Record<Any>, end: impl Fn(u64) -> u64) -> Record<Any> {
    let Some(old) = record.end() else { return record.clone() };
    let change = match record.algorithm() {
        Some(numbers) => Record::numbers(*numbers),
        None if record.is_blocked() => Record::blocked(),
        None => Record::exempt(),
    };
    change.until(Timestamp::saturating_from_us(end(old.as_us())))
}

/// A record stands at its end, too.
struct StandsAtTheEnd;
impl Wrong for StandsAtTheEnd {
    fn keeps(record: &Record<Any>) -> Record<Any> {
        ending(record, |us| us.saturating_add(1))
    }
}

/// A record has a time to live in whole seconds.
struct EndsInSeconds;
impl Wrong for EndsInSeconds {
    fn keeps(record: &Record<Any>) -> Record<Any> {
        ending(record, |us| us / SECOND_US * SECOND_US)
    }
}

/// The wait of a denial does not see the end of the record that denies.
struct WaitsPastTheEnd;
impl Wrong for WaitsPastTheEnd {
    async fn decides(store: &PureStore, batch: &Batch<'_, Any>) -> Result<Verdict, Refusal> {
        let now = match batch.time() {
            Now::Store => store.clock().now(),
            Now::At(now) => now,
        };
        let mut read = store.records().clone();
        read.retain(|_, record| record.stands_at(now));
        for record in read.values_mut() {
            *record = ending(record, |_| u64::MAX);
        }
        store.decide_by(batch, || &read)
    }
}

#[test]
fn wrong_stores_are_caught() {
    assert_eq!(broken::<Right>(), []);
    assert!(broken::<ForgetsWithTheState>().contains(&RecordRule::OutlivesStates));
    assert!(broken::<GrantsASecondBurst>().contains(&RecordRule::RaisesWithoutASecondBurst));
    for broken in [broken::<StandsAtTheEnd>(), broken::<EndsInSeconds>()] {
        assert!(broken.contains(&RecordRule::Agrees), "{broken:?}");
        assert!(broken.contains(&RecordRule::BlocksUntilTheEnd), "{broken:?}");
    }
    assert!(broken::<WaitsPastTheEnd>().contains(&RecordRule::RaisesWithoutASecondBurst));
    assert!(broken::<IgnoresRecords>().len() > 4);
    // No rule of one request at a time sees it, and on a busy machine its race is a rare one.
    let breaks = |rule: RecordRule| rule.held_by::<OfWrong<ReadsRecordsBeforeTheLock>>().is_err();
    let mut in_turn =
        RecordRule::ALL.into_iter().filter(|rule| *rule != RecordRule::AnswersInSomeOrder);
    assert!(!in_turn.any(breaks));
    assert!((0..50).any(|_| breaks(RecordRule::AnswersInSomeOrder)));
}
