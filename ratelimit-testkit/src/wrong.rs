//! Stores that are wrong on purpose: each breaks a law in a way that real limiters do, and the law must
//! catch it. A law that catches nothing is no law.
//!
//! They are one [sound store](WrongStore) over the pure step, with one [`Flaw`] or none.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Decision, Hold, HoldId, Limit, LogEntry, Now, Op, Policy, PolicyState,
    Refusal, States, Store, Tick, Verdict, Write, decide,
};

use crate::harness::Harness;
use crate::pure::{Refused, fingerprint};
use crate::seeds::{Kind, Scale, by_attempts, limit, rate, refill};

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// `if current > limit` is asked before the increment: one more gets through.
    OffByOne,
    /// GET, decide, SET: somebody else does the same in between.
    ReadThenWrite,
    /// INCR without EXPIRE: the key stays for ever.
    LosesTheTtl,
    /// A batch denied by one limit has been charged to the others before.
    ChargesTheSiblings,
    /// Every attempt goes into the sorted set, and only then are they counted: a client that keeps
    /// trying is never let in again.
    ChargesTheDenied,
    /// An admitted batch is charged to its first limit only.
    ChargesOnlyTheFirst,
    /// The state has a time to live in whole seconds, and no time of its own: it counts for longer
    /// than it should.
    OutlivesItsWindow,
    /// An entry made at `t` still counts at `t + window`.
    CountsTheBoundary,
    /// The time elapsed is an unsigned difference: when the clock goes back, it is ages, and the
    /// bucket is full.
    MintsWhenTimeGoesBack,
    /// `retry_after` is cut down to whole milliseconds.
    WaitsInMilliseconds,
    /// `retry_after` is a microsecond short.
    WaitsOneShort,
    /// The key is cut down to its hash tag: `{a}b` is `{a}c`.
    CutsKeysToTheirTag,
    /// A peek is an acquire.
    PeekCharges,
    /// When a limit is changed, what was left under the old one may be used up on top of the new one.
    AddsOldAndNew,
    /// The limit is kept beside the state that was first written under it, and a new one is not heard.
    KeepsTheOldLimit,
    /// The interval between two units is kept in whole milliseconds: 600/s are 1,000/s.
    RoundsTheInterval,
    /// INCR and EXPIRE, every time: the window of a client that keeps coming never ends.
    ExtendsTheWindow,
    /// A limit that is to count attempts counts what it admits.
    ForgetsTheDenied,
    /// What is sent twice under one id is charged twice.
    ChargesAgain,
    /// What has been settled can be settled again, and gives back twice.
    SettlesAgain,
    /// A settlement under an id settles the limits and keys that it names, whatever was reserved with them.
    SettlesHalf,
    /// What is given back at a settlement is not asked whether it still counts.
    GivesBackWhatIsPast,
    /// A reservation that is renewed counts as charged anew, and is given back where it never was taken.
    RenewsTheCharge,
    /// A release is a DEL, without a look at whose lease it is: one that comes too late frees another's.
    ReleasesAnyLease,
    /// A lease has no end of its own: that of a holder that died is held for ever.
    LeasesNeverEnd,
    /// A lease that is over comes back when it is renewed, whoever has its place.
    RenewsWhatIsOver,
    /// What is held under an id is kept for ever.
    HoldsForEver,
}

struct Entry {
    state: PolicyState,
    /// Under which limit it was written, and when.
    policy: Policy,
    written: Tick,
    expires: Tick,
    /// When the store removes it, by its own clock.
    sweep_at: Option<Tick>,
}

type Key = (String, String);

/// What is held under an id.
struct HeldEntry {
    hold: Hold,
    sweep_at: Option<Tick>,
}

/// A store over the pure step with one flaw, or none. Its own clock stands still.
pub struct WrongStore {
    flaw: Option<Flaw>,
    entries: Mutex<HashMap<Key, Entry>>,
    holds: Mutex<HashMap<(Key, HoldId), HeldEntry>>,
    /// Held for a whole decision: what makes the sound store atomic.
    turn: Mutex<()>,
}

/// What the own clock of a [`WrongStore`] says.
const OWN: Tick = Tick::saturating_from_us(1_795_218_392_123_456);

/// How much longer than it should a state counts that outlives its window.
const OUTLIVES_US: u64 = 1_000_000;

impl WrongStore {
    /// A store with this flaw, or without any.
    #[must_use]
    pub fn new(flaw: Option<Flaw>) -> Self {
        Self { flaw, entries: Mutex::default(), holds: Mutex::default(), turn: Mutex::default() }
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, limit: &Limit<Policy>, key: &str) -> Key {
        let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        let cut = tag.map_or(key, |(tag, _)| tag);
        let key = if self.is(Flaw::CutsKeysToTheirTag) { cut } else { key };
        (limit.name().to_owned(), key.to_owned())
    }

    /// The limit that the store believes to be asked for.
    fn limit(&self, key: &Key, asked: &Limit<Policy>) -> Limit<Policy> {
        let policy = asked.algorithm();
        let scale = Scale::of(policy);
        let believed = match self.flaw {
            Some(Flaw::OffByOne) => {
                let one_more = if Kind::of(policy).is_bucket() {
                    let refill = refill(policy);
                    let rate = rate(refill.tick_units, refill.token_units * refill.tick_us);
                    Kind::of(policy).policy(rate, scale.capacity + 1)
                } else {
                    Kind::of(policy).policy(rate(scale.capacity + 1, scale.full_us), 0)
                };
                if policy.charges_denials() { by_attempts(one_more) } else { one_more }
            }
            Some(Flaw::RoundsTheInterval) if Kind::of(policy) == Kind::Gcra => {
                let whole_ms = (scale.unit_us / 1_000).max(1);
                Kind::Gcra.policy(rate(1, whole_ms * 1_000), scale.capacity)
            }
            Some(Flaw::KeepsTheOldLimit) => {
                self.entries().get(key).map_or(*policy, |entry| entry.policy)
            }
            _ => *policy,
        };
        limit(asked.name(), believed)
    }

    /// What the store takes for the state of a key.
    fn read(&self, key: &Key, policy: &Policy, now: Tick) -> Option<PolicyState> {
        let entries = self.entries();
        let entry = entries.get(key)?;
        let minted = match self.flaw {
            Some(Flaw::MintsWhenTimeGoesBack) => now < entry.written,
            Some(Flaw::AddsOldAndNew) => entry.policy != *policy,
            _ => false,
        };
        let mut state = entry.state.clone();
        if let (true, PolicyState::Concurrency(held)) = (self.is(Flaw::LeasesNeverEnd), &mut state)
        {
            let cost = held.leases.iter().map(|lease| lease.cost).sum();
            held.leases = vec![LogEntry { tick: now, cost }];
        }
        (!minted).then_some(state)
    }

    fn keys(&self, batch: &Batch<'_, Policy>) -> Vec<Key> {
        batch.checks().iter().map(|check| self.key(check.limit, check.key)).collect()
    }

    /// What the store takes for what is held under the id of a batch.
    fn read_hold(&self, key: &Key, batch: &Batch<'_, Policy>, now: Tick) -> Option<Hold> {
        let holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hold = holds.get(&(key.clone(), batch.hold_id()?))?.hold.clone();
        match (self.flaw, batch.operation()) {
            (Some(Flaw::ChargesAgain), Op::Acquire) => return None,
            (Some(Flaw::SettlesAgain), Op::Settle) => hold.settled = None,
            (Some(Flaw::SettlesHalf), Op::Settle) => {
                hold.group = batch.hold_group(|| fingerprint(&self.keys(batch)));
            }
            (Some(Flaw::GivesBackWhatIsPast), Op::Settle) => hold.tick = now,
            (Some(Flaw::RenewsWhatIsOver), Op::Renew) => hold.since = now,
            (Some(Flaw::ReleasesAnyLease), Op::Settle) => {
                let entries = self.entries();
                let state = entries.get(key).map(|entry| &entry.state);
                if let Some(PolicyState::Concurrency(held)) = state {
                    hold.tick = held.leases.last().map_or(hold.tick, |lease| lease.tick);
                    hold.since = now;
                }
            }
            _ => {}
        }
        Some(hold)
    }

    fn write_hold(&self, key: &Key, batch: &Batch<'_, Policy>, mut hold: Hold, expires: Tick) {
        let Some(id) = batch.hold_id() else { return };
        if self.is(Flaw::RenewsTheCharge) && batch.operation() == Op::Renew {
            hold.tick = hold.since;
        }
        let sweep_at = (!self.is(Flaw::HoldsForEver)).then(|| sweep_at(batch.time(), expires));
        let mut holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        holds.insert((key.clone(), id), HeldEntry { hold, sweep_at });
    }

    /// When the store believes the request to be made.
    fn now(&self, batch: &Batch<'_, Policy>) -> Tick {
        let Now::At(now) = batch.time() else { return OWN };
        let late_us = match self.flaw {
            Some(Flaw::OutlivesItsWindow) => OUTLIVES_US,
            Some(Flaw::CountsTheBoundary) => 0,
            _ => return now,
        };
        let entries = self.entries();
        let expired = batch.checks().iter().filter_map(|check| {
            let expires = entries.get(&self.key(check.limit, check.key))?.expires;
            let outlived = expires <= now && now <= expires.saturating_add_us(late_us);
            outlived.then(|| Tick::saturating_from_us(expires.as_us().saturating_sub(1)))
        });
        expired.min().unwrap_or(now)
    }

    fn write(&self, key: &Key, policy: &Policy, now: Now, write: Write<PolicyState>) {
        let mut entries = self.entries();
        match write {
            Write::Keep => {}
            Write::Remove => {
                entries.remove(key);
            }
            Write::Put { mut state, mut expires } => {
                let written = written_at(now);
                if let (true, PolicyState::FirstRequestWindow(window)) =
                    (self.is(Flaw::ExtendsTheWindow), &mut state)
                {
                    window.start = window.start.max(written);
                    expires = window.start.saturating_add_us(Scale::of(policy).full_us);
                }
                let sweep_at = (!self.is(Flaw::LosesTheTtl)).then(|| sweep_at(now, expires));
                let entry = Entry { state, policy: *policy, written, expires, sweep_at };
                entries.insert(key.clone(), entry);
            }
        }
    }

    /// The answer of [`Flaw::AddsOldAndNew`]: from the old limit, as long as something is left there.
    fn serve_old(&self, batch: &Batch<'_, Policy>, now: Tick) -> Option<Verdict> {
        let ([check], true) = (batch.checks(), self.is(Flaw::AddsOldAndNew)) else { return None };
        let key = self.key(check.limit, check.key);
        let (old, state) = {
            let entries = self.entries();
            let entry = entries.get(&key).filter(|e| e.policy != *check.limit.algorithm())?;
            (entry.policy, entry.state.clone())
        };
        let step = old.step(Some(&state), now, check.cost);
        if !step.decision.allowed || check.cost == 0 || batch.operation() != Op::Acquire {
            return None;
        }
        self.write(&key, &old, batch.time(), step.write);
        let limit = check.limit.algorithm().capacity();
        Some(Verdict::one(Decision { limit, ..step.decision }))
    }

    /// What is charged although the batch was denied.
    fn charge_denied(&self, batch: &Batch<'_, Policy>, keys: &[Key], now: Tick) {
        for (check, key) in batch.checks().iter().zip(keys) {
            let policy = check.limit.algorithm();
            let state = self.read(key, policy, now);
            let step = policy.step(state.as_ref(), now, check.cost);
            if self.is(Flaw::ChargesTheSiblings) && step.decision.allowed {
                self.write(key, policy, batch.time(), step.write);
            }
            let fits_ever = check.cost <= policy.capacity();
            if self.is(Flaw::ChargesTheDenied) && !step.decision.allowed && fits_ever {
                let charged = attempted(policy, state.as_ref(), now, check.cost);
                self.write(key, policy, batch.time(), charged);
            }
        }
    }

    /// The answer as the store tells it.
    fn tell(&self, batch: &Batch<'_, Policy>, verdict: &Verdict) -> Verdict {
        let told = verdict.decisions().iter().zip(batch.checks()).map(|(decision, check)| {
            let mut told = *decision;
            match self.flaw {
                Some(Flaw::OffByOne) => {
                    told.limit = check.limit.algorithm().capacity();
                    told.remaining = told.remaining.saturating_sub(1);
                }
                Some(Flaw::WaitsInMilliseconds) => {
                    told.retry_after_us = told.retry_after_us.map(|us| us / 1_000 * 1_000);
                }
                Some(Flaw::WaitsOneShort) => {
                    told.retry_after_us = told.retry_after_us.map(|us| us.saturating_sub(1));
                }
                _ => {}
            }
            told
        });
        match &*told.collect::<Vec<_>>() {
            [one] => Verdict::one(*one),
            several => Verdict::several(several.to_vec()),
        }
    }
}

/// When something is written, by the clock that it is decided by.
const fn written_at(now: Now) -> Tick {
    match now {
        Now::Store => OWN,
        Now::At(at) => at,
    }
}

/// When what expires then is removed, by the store's own clock.
fn sweep_at(now: Now, expires: Tick) -> Tick {
    let padding_us = if now == Now::Store { 0 } else { Now::PADDING_US };
    OWN.saturating_add_us(expires.saturating_us_since(written_at(now)) + padding_us)
}

/// A state into which a denied attempt went, too.
fn attempted(
    policy: &Policy,
    state: Option<&PolicyState>,
    now: Tick,
    cost: u64,
) -> Write<PolicyState> {
    if let (Policy::SlidingLog(log), Some(PolicyState::SlidingLog(state))) = (policy, state) {
        let mut state = state.clone();
        let tick = state.entries.last().map_or(now, |last| last.tick.max(now));
        match state.entries.last_mut() {
            Some(last) if last.tick == tick => last.cost += cost,
            _ => state.entries.push(LogEntry { tick, cost }),
        }
        let expires = tick.saturating_add_us(log.window_us());
        return Write::Put { state: PolicyState::SlidingLog(state), expires };
    }
    policy.force(state, now, cost).map_or(Write::Keep, |step| step.write)
}

impl Store<Policy> for WrongStore {
    type Error = Refused;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refused> {
        let mut read_before = None;
        if self.is(Flaw::ReadThenWrite) {
            read_before = Some(self.read_all(batch));
            let_others_run().await;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.decide(batch, read_before).map_err(Refused)
    }
}

impl WrongStore {
    fn read_all(&self, batch: &Batch<'_, Policy>) -> Vec<Option<PolicyState>> {
        let now = self.now(batch);
        let read = |check: &Check<'_, Policy>| {
            self.read(&self.key(check.limit, check.key), check.limit.algorithm(), now)
        };
        batch.checks().iter().map(read).collect()
    }

    fn decide(
        &self,
        batch: &Batch<'_, Policy>,
        read: Option<Vec<Option<PolicyState>>>,
    ) -> Result<Verdict, Refusal> {
        let now = self.now(batch);
        if let Some(verdict) = self.serve_old(batch, now) {
            return Ok(verdict);
        }
        let keys: Vec<Key> =
            batch.checks().iter().map(|check| self.key(check.limit, check.key)).collect();
        let asked = || keys.iter().zip(batch.checks());
        let limits: Vec<_> = asked().map(|(key, check)| self.limit(key, check.limit)).collect();
        let believed = batch.checks().iter().zip(&limits);
        let checks: Vec<_> = believed.map(|(check, limit)| Check { limit, ..*check }).collect();
        let op = match batch.operation() {
            Op::Peek if self.is(Flaw::PeekCharges) => Op::Acquire,
            op => op,
        };
        let believed = Batch::new(&checks).expect("as distinct as before").op(op);
        let believed = believed.metadata(batch.metadata_given());
        let believed = batch.hold_id().map_or(believed, |id| believed.id(id));

        let states = read.unwrap_or_else(|| self.read_all(batch));
        let holds = keys.iter().map(|key| self.read_hold(key, batch, now)).collect();
        let (writes, hold_writes, fingerprint) = (Vec::new(), Vec::new(), fingerprint(&keys));
        let mut held = Held { states, writes, holds, hold_writes, fingerprint };
        let verdict = decide(&believed, now, &mut held)?;
        for (position, write) in held.writes {
            let policy = limits[position].algorithm();
            let denied = !verdict.decisions()[position].allowed;
            let skipped = match self.flaw {
                Some(Flaw::ChargesOnlyTheFirst) => position > 0,
                Some(Flaw::ForgetsTheDenied) => denied && policy.charges_denials(),
                _ => false,
            };
            if !skipped {
                self.write(&keys[position], policy, batch.time(), write);
            }
        }
        for (position, hold, expires) in held.hold_writes {
            self.write_hold(&keys[position], batch, hold, expires);
        }
        if !verdict.allowed() && op == Op::Acquire {
            self.charge_denied(batch, &keys, now);
        }
        Ok(self.tell(batch, &verdict))
    }
}

/// The states as they were read, and what is to be written.
struct Held {
    states: Vec<Option<PolicyState>>,
    writes: Vec<(usize, Write<PolicyState>)>,
    holds: Vec<Option<Hold>>,
    hold_writes: Vec<(usize, Hold, Tick)>,
    fingerprint: u64,
}

impl States<PolicyState> for Held {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.states[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        self.writes.push((position, write));
    }

    fn hold(&self, position: usize) -> Option<Hold> {
        self.holds[position].clone()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn put_hold(&mut self, position: usize, hold: Hold, expires: Tick) {
        self.hold_writes.push((position, hold, expires));
    }
}

/// Where another task gets in between.
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

/// A harness for stores with this flaw, or without any.
#[derive(Clone, Copy, Debug, Default)]
pub struct WrongHarness(pub Option<Flaw>);

impl Harness for WrongHarness {
    type Store = WrongStore;

    const SMALL_TRACE_REQUESTS: u32 = 3;

    fn new() -> Self {
        Self(None)
    }

    fn store(&self) -> WrongStore {
        WrongStore::new(self.0)
    }

    async fn state(
        &self,
        store: &WrongStore,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Option<PolicyState> {
        store.entries().get(&store.key(limit, key)).map(|entry| entry.state.clone())
    }

    async fn leaks(&self, store: &WrongStore, within: Duration) -> Vec<String> {
        let by = OWN + within;
        let leaking = |key: String, sweep_at: Option<Tick>| match sweep_at {
            Some(at) if at <= by => None,
            Some(at) => Some(format!("{key} until {at}")),
            None => Some(format!("{key} for ever")),
        };
        let entries = store.entries();
        let states = entries.iter().map(|(key, entry)| (format!("{key:?}"), entry.sweep_at));
        let holds = store.holds.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = holds.iter().map(|(key, entry)| (format!("{key:?}"), entry.sweep_at));
        states.chain(holds).filter_map(|(key, sweep_at)| leaking(key, sweep_at)).collect()
    }
}
