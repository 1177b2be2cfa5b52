//! Stores that are wrong on purpose, each as real limiters have been. A law that catches nothing
//! proves nothing; whether one would notice a fault of the real code, `cargo mutants` asks.
//!
//! All are one sound store over the pure step, with one [`Flaw`] or none.

use std::collections::{BTreeSet, HashMap};
use std::future::poll_fn;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use ratelimit_core::algorithm::{AnyState, Write};
use ratelimit_core::store::{Batch, Check, Now, Op, Reservation, States, decide};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, Clock, Decision, Limit, ManualClock, Refusal, ReservationId, Store,
    Timestamp, Verdict,
};
use ratelimit_testkit::{AlgorithmKind, Capability};

mod fold;
mod harness;

pub(crate) use fold::Fold;
pub(crate) use harness::WrongHarness;

/// The flaw of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Flaw {
    /// The store tests `current > limit` before the increment: one request too many is admitted.
    OffByOne,
    /// GET, decide, SET for this operation: another client does the same, or another operation, in
    /// between.
    ReadThenWrite(Op),
    /// INCR without EXPIRE: the key stays forever.
    LosesTheTtl,
    /// INCR and EXPIRE on every request: the window of a client that keeps coming never ends.
    ExtendsTheWindow,
    /// What is owed at the end of a window is forgotten.
    ForgetsDebt,
    /// A forced charge or a settlement does not tell what it forgives.
    ForgivesInSilence,
    /// An extension that is repeated after a lost answer charges again what it has added.
    ExtendsAgain,
    /// A settlement gives back the whole cost of an extended reservation, also the part that had
    /// flowed back before.
    ReturnsWhatFlowedBack,
    /// All limits of a batch are charged the cost of its first.
    ChargesTheFirstCost,
    /// A batch that one limit denies has already been charged to the limits before it.
    ChargesTheSiblings,
    /// The state has a time to live in whole seconds and no timestamp: it counts for too long.
    OutlivesItsWindow,
    /// The elapsed time is an unsigned difference: when the clock goes back, it is huge, and the
    /// bucket is full.
    MintsWhenTimeGoesBack,
    /// `retry_after` is a microsecond short.
    WaitsOneShort,
    /// All limits of one name share a state, whatever their algorithm or window: one refunds what
    /// another has charged.
    KnowsNamesOnly,
    /// Other numbers have a state of their own: a raise grants a second burst.
    GrantsASecondBurst,
    /// A request that is sent twice under one id warns twice.
    WarnsAgain,
    /// The limit is stored with the first state written under it; a changed limit has no effect.
    KeepsTheOldLimit,
    /// Requests for one limit and key at the same time share a call, by the numbers of the first.
    SharesNumbers,
    /// The reservation of a lease does not know that it was renewed.
    ForgetsRenewals,
    /// A request that is sent twice under one id is charged twice.
    ChargesAgain,
    /// A release is a DEL that does not check the lease's owner: a late one frees another client's
    /// lease.
    ReleasesAnyLease,
    /// The store's own clock stands still.
    OwnClockStands,
    /// A request reads the store's own clock before it waits for the lock, so that one which came
    /// later may be decided before it, at a later time.
    ReadsTheClockFirst,
    /// A cache repeats a denial for as long as that said, although this operation has changed the
    /// limit.
    KeepsDenials(Op),
    /// A state written at a given time is removed when it expires, without the hour of grace.
    SweepsWithoutGrace,
    /// A state written at the store's own time is removed when four fifths of its time have passed.
    SweepsEarly,
    /// Different keys, or limits of different names, share a state if these fold to the same text.
    FoldsKeys(Fold),
    FoldsNames(Fold),
    /// A limit's name and a key are one text, with this between them.
    JoinsKeys(&'static str),
    /// Only so many checks of a batch are charged.
    ChargesTheFirstFew(usize),
    /// The store refuses everything that needs one of these capabilities, and drops metadata.
    Cannot(&'static [Capability]),
}

/// The state name of a limit, and a key.
type Key = (String, String);

struct Entry {
    state: AnyState,
    /// The limit under which the state was written.
    algorithm: AnyAlgorithm,
    written: Timestamp,
    expires: Timestamp,
    /// When the store removes the state, by its own clock.
    sweep_at: Option<Timestamp>,
}

#[derive(Default)]
struct Contents {
    entries: HashMap<Key, Entry>,
    /// The states that denied, and until when they are believed.
    denied: HashMap<Key, (Option<AnyState>, Timestamp)>,
    /// The numbers by which requests in flight are decided, and how many there are.
    shared: HashMap<Key, (AnyAlgorithm, usize)>,
    /// Reservations, and when they are removed.
    reservations: HashMap<(Key, ReservationId), (Reservation, Timestamp)>,
}

/// A store over the pure step with one flaw, or none. Its own clock is set by hand, or runs.
pub(crate) struct WrongStore {
    flaw: Option<Flaw>,
    clock: Box<dyn Clock>,
    /// The clock, if it is set by hand.
    manual: Option<ManualClock>,
    began: Timestamp,
    /// The latest given time, in microseconds.
    latest_us: AtomicU64,
    /// The number of requests at the store's own time.
    calls: AtomicU64,
    contents: Mutex<Contents>,
}

/// The same limit with one unit more, in the words of its policy: of a bucket's burst, or of a
/// window's count.
fn one_more(algorithm: &AnyAlgorithm) -> AnyAlgorithm {
    let text = algorithm.to_string();
    let begin = text.find(" burst ").map(|at| at + " burst ".len());
    let begin = begin.or_else(|| text.find(' ').map(|at| at + 1)).expect("a name and a rate");
    let digits = text[begin..].chars().take_while(char::is_ascii_digit).count();
    let (count, rest) = text[begin..].split_at(digits);
    let more = count.parse::<u64>().expect("a count") + 1;
    format!("{}{more}{rest}", &text[..begin]).parse().expect("as before")
}

/// The initial time of a [`WrongStore`] whose clock is set by hand.
const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// How much too long a state counts under [`Flaw::OutlivesItsWindow`].
const OUTLIVES_US: u64 = 1_000_000;

impl WrongStore {
    /// The keys of a batch.
    fn keys(&self, batch: &Batch<'_, AnyAlgorithm>) -> Vec<Key> {
        batch.checks().iter().map(|check| self.key(check.limit, check.key)).collect()
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cannot(&self, capability: Capability) -> bool {
        matches!(self.flaw, Some(Flaw::Cannot(lacking)) if lacking.contains(&capability))
    }

    fn key(&self, limit: &Limit<AnyAlgorithm>, key: &str) -> Key {
        let (name, state_name) = (limit.name(), limit.state_name());
        match self.flaw {
            Some(Flaw::FoldsKeys(fold)) => (state_name.to_owned(), fold.fold(key)),
            Some(Flaw::FoldsNames(fold)) => (fold.fold(name), key.to_owned()),
            Some(Flaw::JoinsKeys(sign)) => (String::new(), format!("{name}{sign}{key}")),
            Some(Flaw::KnowsNamesOnly) => (name.to_owned(), key.to_owned()),
            Some(Flaw::GrantsASecondBurst) => (limit.algorithm().to_string(), key.to_owned()),
            _ => (state_name.to_owned(), key.to_owned()),
        }
    }

    /// The time of a request in the store's belief.
    fn time(&self, batch: &Batch<'_, AnyAlgorithm>) -> Timestamp {
        match batch.time() {
            Now::At(now) => now,
            Now::Store if self.is(Flaw::OwnClockStands) => self.began,
            Now::Store => self.clock.now(),
        }
    }

    /// When a state with this expiry is removed, by the store's own clock.
    fn sweep_at(&self, now: Now, written: Timestamp, expires: Timestamp) -> Timestamp {
        let mut us = expires.saturating_us_since(written);
        if self.is(Flaw::SweepsEarly) && now == Now::Store {
            us = us / 5 * 4;
        }
        if !self.is(Flaw::SweepsWithoutGrace) {
            us += now.padding_us();
        }
        self.clock.now().saturating_add_us(us)
    }

    /// Refuses what the store cannot do.
    fn able(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<(), Refusal> {
        let Some(Flaw::Cannot(lacking)) = self.flaw else { return Ok(()) };
        let (op, checks) = (batch.operation(), batch.checks());
        let any = |of: &dyn Fn(&Check<'_, AnyAlgorithm>) -> bool| checks.iter().any(of);
        let needed = |capability: &Capability| match *capability {
            Capability::Batches => checks.len() > 1,
            Capability::SeveralKeys => any(&|check| check.key != checks[0].key),
            Capability::Reservations => batch.reservation_id().is_some(),
            Capability::Attempts => any(&|check| check.limit.counts_attempts()),
            Capability::Admissions => any(&|check| !check.limit.counts_attempts()),
            Capability::Calendars => any(&|check| check.limit.state_name().ends_with(')')),
            Capability::Algorithm(kind) => {
                any(&|check| AlgorithmKind::from_algorithm(check.limit.algorithm()) == kind)
            }
            Capability::PastTimes => match batch.time() {
                Now::Store => false,
                Now::At(at) => self.latest_us.fetch_max(at.as_us(), Ordering::SeqCst) > at.as_us(),
            },
            Capability::States
            | Capability::Metadata
            | Capability::TimesInOrder
            | Capability::Changes => false,
            Capability::Refund | Capability::Force | Capability::Reset => {
                Capability::for_op(op) == Some(*capability)
            }
        };
        let limit = checks[0].limit.name().to_owned();
        if lacking.iter().any(needed) { Err(Refusal::Unsupported { limit, op }) } else { Ok(()) }
    }

    fn decide(
        &self,
        batch: &Batch<'_, AnyAlgorithm>,
        read: Option<Vec<Option<AnyState>>>,
    ) -> Result<Verdict, Refusal> {
        let mut contents = self.contents();
        // Behind the lock.
        let mut now = self.time(batch);
        let keys = self.keys(batch);
        if self.is(Flaw::OutlivesItsWindow) {
            let ends = keys.iter().filter_map(|key| Some(contents.entries.get(key)?.expires));
            let outlived =
                |end: &Timestamp| *end <= now && now <= end.saturating_add_us(OUTLIVES_US);
            let before =
                |end: Timestamp| Timestamp::saturating_from_us(end.as_us().saturating_sub(1));
            now = ends.filter(outlived).map(before).min().unwrap_or(now);
        }
        let limits: Vec<_> = keys
            .iter()
            .zip(batch.checks())
            .map(|(key, check)| self.limit(&contents, key, check))
            .collect();
        let checks = batch.checks().iter().zip(&limits);
        let cost = |check: &Check<'_, AnyAlgorithm>| match self.flaw {
            Some(Flaw::ChargesTheFirstCost) => batch.checks()[0].cost,
            _ => check.cost,
        };
        let checks = checks.map(|(check, limit)| Check { limit, cost: cost(check), ..*check });
        let checks: Vec<_> = checks.collect();
        let mut believed = batch.with_checks(&checks);
        if self.cannot(Capability::Metadata) {
            believed = believed.metadata(&[]);
        }
        let mut states = read.unwrap_or_else(|| self.read(&contents, &keys, now));
        let is_kept = (batch.operation(), batch.time()) == (Op::Acquire, Now::Store);
        if let Some(Flaw::KeepsDenials(ignored)) = self.flaw {
            for (key, state) in keys.iter().zip(&mut states) {
                match contents.denied.get(key) {
                    Some((denied, until)) if is_kept && now < *until => state.clone_from(denied),
                    Some(_) if ![ignored, Op::Acquire, Op::Peek].contains(&batch.operation()) => {
                        _ = contents.denied.remove(key);
                    }
                    _ => {}
                }
            }
        }
        let first = states.first().cloned().flatten();
        let mut view = View {
            store: self,
            contents: &mut contents,
            keys: &keys,
            batch: &believed,
            now,
            states,
        };
        let verdict = decide(&believed, now, &mut view)?;
        if let ([key], Some(wait_us), true) = (&keys[..], verdict.summary().retry_after_us, is_kept)
            && !verdict.allowed()
        {
            contents.denied.insert(key.clone(), (first, now.saturating_add_us(wait_us)));
        }
        if self.is(Flaw::ChargesTheSiblings)
            && !verdict.allowed()
            && batch.operation() == Op::Acquire
        {
            for (key, check) in keys.iter().zip(&checks) {
                let algorithm = check.limit.algorithm();
                let state = contents.entries.get(key).map(|entry| entry.state.clone());
                let step = check.limit.step(state.as_ref(), now, check.cost);
                if step.decision.allowed {
                    self.write(&mut contents, key, algorithm, (now, batch.time()), step.write);
                }
            }
        }
        Ok(self.tell(batch, &verdict))
    }

    /// The limit that the store believes is asked for.
    fn limit(
        &self,
        contents: &Contents,
        key: &Key,
        check: &Check<'_, AnyAlgorithm>,
    ) -> Limit<AnyAlgorithm> {
        let algorithm = check.limit.algorithm();
        let believed = match self.flaw {
            Some(Flaw::OffByOne) => one_more(algorithm),
            Some(Flaw::KeepsTheOldLimit) => {
                contents.entries.get(key).map_or(*algorithm, |entry| entry.algorithm)
            }
            Some(Flaw::SharesNumbers) => {
                contents.shared.get(key).map_or(*algorithm, |(first, _)| *first)
            }
            _ => *algorithm,
        };
        let limit = Limit::new(check.limit.name(), believed).expect("as plain as before");
        let limit = limit.warn_at_percent(50).expect("as all do");
        // What the limit was changed from may have a debt.
        let attempts = check.limit.counts_attempts().then(|| limit.clone().count_attempts().ok());
        attempts.flatten().unwrap_or(limit)
    }

    /// The states of these keys in the store's belief.
    fn read(&self, contents: &Contents, keys: &[Key], now: Timestamp) -> Vec<Option<AnyState>> {
        let minted = |entry: &Entry| self.is(Flaw::MintsWhenTimeGoesBack) && now < entry.written;
        let forgotten = |entry: &Entry| match (&entry.state, &entry.algorithm) {
            (AnyState::FixedWindow(window), AnyAlgorithm::FixedWindow(of)) => {
                let ends = window.start.saturating_add_us(of.window_us());
                self.is(Flaw::ForgetsDebt) && ends <= now
            }
            _ => false,
        };
        let read = |key| contents.entries.get(key).filter(|e| !minted(e) && !forgotten(e));
        keys.iter().map(|key| read(key).map(|entry| entry.state.clone())).collect()
    }

    /// The reservation under a batch's id in the store's belief.
    fn reservation(
        &self,
        contents: &Contents,
        key: &Key,
        batch: &Batch<'_, AnyAlgorithm>,
    ) -> Option<Reservation> {
        let (reservation, _) =
            contents.reservations.get(&(key.clone(), batch.reservation_id()?))?;
        let mut reservation = reservation.clone();
        match (self.flaw, batch.operation()) {
            (Some(Flaw::ChargesAgain), Op::Acquire) => return None,
            (Some(Flaw::ExtendsAgain), Op::Extend) => reservation.cost = 0,
            (Some(Flaw::ReturnsWhatFlowedBack), Op::Settle) => {
                reservation.counts = reservation.cost;
            }
            (Some(Flaw::ReleasesAnyLease), Op::Settle) => {
                if let Some(AnyState::Concurrency(of)) = contents.entries.get(key).map(|e| &e.state)
                {
                    let last = of.entries.last().map(|lease| lease.timestamp);
                    reservation.timestamp = last.unwrap_or(reservation.timestamp);
                    reservation.since = self.time(batch);
                }
            }
            _ => {}
        }
        Some(reservation)
    }

    fn write(
        &self,
        contents: &mut Contents,
        key: &Key,
        algorithm: &AnyAlgorithm,
        (written, now): (Timestamp, Now),
        write: Write<AnyState>,
    ) {
        match write {
            Write::Keep => {}
            Write::Remove => {
                contents.entries.remove(key);
            }
            Write::Put { mut state, mut expires } => {
                if let (
                    true,
                    AnyState::FirstRequestWindow(window),
                    AnyAlgorithm::FirstRequestWindow(of),
                ) = (self.is(Flaw::ExtendsTheWindow), &mut state, algorithm)
                {
                    window.start = window.start.max(written);
                    expires = window.start.saturating_add_us(of.window_us());
                }
                let sweep_at = self.sweep_at(now, written, expires);
                let sweep_at = (!self.is(Flaw::LosesTheTtl)).then_some(sweep_at);
                let entry = Entry { state, algorithm: *algorithm, written, expires, sweep_at };
                contents.entries.insert(key.clone(), entry);
            }
        }
    }

    /// The answer that the store gives.
    fn tell(&self, batch: &Batch<'_, AnyAlgorithm>, verdict: &Verdict) -> Verdict {
        let told = |(decision, check): (&Decision, &Check<'_, AnyAlgorithm>)| {
            let mut told = *decision;
            match self.flaw {
                Some(Flaw::OffByOne) => {
                    told.limit = check.limit.algorithm().capacity();
                    told.remaining = told.remaining.saturating_sub(1);
                }
                Some(Flaw::WaitsOneShort) => {
                    told.retry_after_us = told.retry_after_us.map(|us| us.saturating_sub(1));
                }
                _ => {}
            }
            told
        };
        let told: Vec<_> = verdict.decisions().iter().zip(batch.checks()).map(told).collect();
        let accounts = verdict.accounts().map(|(position, mut account)| {
            if self.is(Flaw::ForgivesInSilence) {
                account.forgiven = 0;
            }
            if self.is(Flaw::WarnsAgain) && batch.operation() == Op::Acquire {
                account.charged = None;
            }
            (position, account)
        });
        Verdict::several(told).with_accounts(accounts)
    }
}

impl Store<AnyAlgorithm> for WrongStore {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Refusal> {
        self.able(batch)?;
        let mut read = None;
        if self.is(Flaw::ReadThenWrite(batch.operation())) {
            read = Some(self.read(&self.contents(), &self.keys(batch), self.time(batch)));
            let_others_run().await;
        }
        if self.is(Flaw::ReadsTheClockFirst) && batch.time() == Now::Store {
            let now = Now::At(self.time(batch));
            for _ in 0..self.calls.fetch_add(1, Ordering::SeqCst) % 3 {
                let_others_run().await;
            }
            return self.decide(&batch.now(now), None);
        }
        if let ([check], true) = (batch.checks(), self.is(Flaw::SharesNumbers)) {
            let key = self.key(check.limit, check.key);
            let first = (*check.limit.algorithm(), 0);
            self.contents().shared.entry(key.clone()).or_insert(first).1 += 1;
            let_others_run().await;
            let decided = self.decide(batch, None);
            let mut contents = self.contents();
            let left = contents.shared.get_mut(&key).map_or(0, |(_, left)| {
                *left = left.saturating_sub(1);
                *left
            });
            if left == 0 {
                contents.shared.remove(&key);
            }
            return decided;
        }
        self.decide(batch, read)
    }
}

/// What was read for a batch, and where its writes go.
struct View<'v> {
    store: &'v WrongStore,
    contents: &'v mut Contents,
    keys: &'v [Key],
    batch: &'v Batch<'v, AnyAlgorithm>,
    now: Timestamp,
    states: Vec<Option<AnyState>>,
}

impl States<AnyState> for View<'_> {
    fn get(&self, position: usize) -> Option<&AnyState> {
        self.states[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<AnyState>) {
        let lost = matches!(self.store.flaw, Some(Flaw::ChargesTheFirstFew(n)) if position >= n);
        let write = if lost { Write::Keep } else { write };
        let algorithm = self.batch.checks()[position].limit.algorithm();
        let at = (self.now, self.batch.time());
        self.store.write(self.contents, &self.keys[position], algorithm, at, write);
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        self.store.reservation(self.contents, &self.keys[position], self.batch)
    }

    fn fingerprint(&self) -> u64 {
        let keys: BTreeSet<_> = self.keys.iter().collect();
        BuildHasherDefault::<DefaultHasher>::default().hash_one(keys)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        let sweep_at = self.store.sweep_at(self.batch.time(), self.now, expires);
        let Some(id) = self.batch.reservation_id() else { return };
        if self.store.is(Flaw::ForgetsRenewals) && self.batch.operation() == Op::Renew {
            return;
        }
        self.contents
            .reservations
            .insert((self.keys[position].clone(), id), (reservation, sweep_at));
    }
}

/// Lets other tasks interleave.
async fn let_others_run() {
    let mut waited = false;
    poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
