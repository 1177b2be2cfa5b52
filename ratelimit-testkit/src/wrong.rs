//! Stores that are wrong on purpose. Each breaks a law as real limiters do, and that law must catch it: a law
//! that catches nothing proves nothing.
//!
//! All are one [sound store](WrongStore) over the pure step, with one [`Flaw`] or none.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::task::Poll;

use ratelimit_core::{
    Algorithm, Batch, Check, Decision, Limit, LogEntry, ManualClock, Now, Op, Policy, PolicyState,
    Refusal, Reservation, ReservationId, States, Store, SystemClock, Timestamp, Verdict, Write,
    decide,
};

use crate::capability::Capability;
use crate::pure::{Refused, fingerprint};
use crate::seeds::{AlgorithmKind, Scale, by_attempts, limit, rate, refill};
use attempts::{attempted, overfilled, still_overfilled};
pub use flaw::Flaw;
pub use fold::Fold;
pub use harness::{WrongHarness, WrongInRealTime};
use own_time::OwnClock;
pub use own_time::OwnTimeFlaw;

mod attempts;
mod flaw;
mod fold;
mod harness;
mod own_time;

struct Entry {
    state: PolicyState,
    /// The limit under which the state was written.
    policy: Policy,
    written: Timestamp,
    expires: Timestamp,
    /// When the store removes the state, by its own clock.
    sweep_at: Option<Timestamp>,
}

type Key = (String, String);

/// A reservation under an id.
struct HeldEntry {
    reservation: Reservation,
    sweep_at: Option<Timestamp>,
}

/// A store over the pure step with one flaw, or none. Its own clock is set by hand, or runs.
pub struct WrongStore {
    flaw: Option<Flaw>,
    clock: OwnClock,
    /// When the store first read its clock.
    began: OnceLock<Timestamp>,
    /// The latest given time, in microseconds.
    latest_us: AtomicU64,
    /// The number of requests at the store's own time.
    calls: AtomicU64,
    entries: Mutex<HashMap<Key, Entry>>,
    reservations: Mutex<HashMap<(Key, ReservationId), HeldEntry>>,
    /// Locked for a whole decision, which makes the sound store atomic.
    turn: Mutex<()>,
}

/// The initial time of a [`WrongStore`] whose clock is set by hand.
const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// How much too long a state counts under [`Flaw::OutlivesItsWindow`].
const OUTLIVES_US: u64 = 1_000_000;

impl WrongStore {
    /// Creates a store with this flaw, or without any.
    #[must_use]
    pub fn new(flaw: Option<Flaw>) -> Self {
        Self::by(flaw, OwnClock::Manual(ManualClock::new(BEGIN)))
    }

    /// As [`new`](Self::new), with a clock that runs.
    #[must_use]
    pub fn in_real_time(flaw: Option<Flaw>) -> Self {
        Self::by(flaw, OwnClock::System(SystemClock::new()))
    }

    fn by(flaw: Option<Flaw>, clock: OwnClock) -> Self {
        Self {
            flaw,
            began: OnceLock::new(),
            clock,
            latest_us: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            entries: Mutex::default(),
            reservations: Mutex::default(),
            turn: Mutex::default(),
        }
    }

    /// The time in the store's belief.
    fn own_now(&self, op: Op) -> Timestamp {
        let now = self.clock.now();
        let began = *self.began.get_or_init(|| now);
        let since_us = now.saturating_us_since(began);
        match self.flaw {
            Some(Flaw::OwnClockStands) => began,
            Some(Flaw::PeeksByAnotherClock) if op == Op::Peek => began,
            Some(Flaw::OwnClockAtHalfSpeed) => began.saturating_add_us(since_us / 2),
            Some(Flaw::OwnClockAtDoubleSpeed) => now.saturating_add_us(since_us),
            Some(Flaw::OwnClockInSeconds) => {
                Timestamp::saturating_from_us(now.as_us() - now.as_us() % 1_000_000)
            }
            _ => now,
        }
    }

    fn cannot(&self, capability: Capability) -> bool {
        matches!(self.flaw, Some(Flaw::Cannot(lacking)) if lacking.contains(&capability))
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// The flaw of this decision, if it is made at the store's own time.
    fn own_time_flaw(&self, batch: &Batch<'_, Policy>) -> Option<OwnTimeFlaw> {
        match (self.flaw, batch.time()) {
            (Some(Flaw::AtItsOwnTime(flaw)), Now::Store) => Some(flaw),
            _ => None,
        }
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a limit's key, regardless of the clock.
    fn key(&self, limit: &Limit<Policy>, key: &str) -> Key {
        let key = match self.flaw {
            Some(Flaw::FoldsKeys(fold)) => fold.folded(key),
            Some(Flaw::JoinsNameAndKey) => {
                return (format!("{}.{key}", limit.name()), String::new());
            }
            _ => key.to_owned(),
        };
        let name = limit.name();
        (if self.is(Flaw::FoldsLimits) { name.to_lowercase() } else { name.to_owned() }, key)
    }

    /// The place of a batch's check.
    fn place(&self, batch: &Batch<'_, Policy>, check: &Check<'_, Policy>) -> Key {
        let (mut name, mut key) = self.key(check.limit, check.key);
        if self.own_time_flaw(batch) == Some(OwnTimeFlaw::OneKey) {
            key.clear();
        }
        if self.is(Flaw::KeepsTimesApart) && batch.time() == Now::Store {
            name.push_str(", by its own clock");
        }
        (name, key)
    }

    /// The limit that the store believes is asked for.
    fn limit(&self, key: &Key, asked: &Limit<Policy>) -> Limit<Policy> {
        let policy = asked.algorithm();
        let scale = Scale::of(policy);
        let believed = match self.flaw {
            Some(Flaw::OffByOne) => {
                let one_more = if AlgorithmKind::of(policy).is_bucket() {
                    let refill = refill(policy);
                    let rate = rate(refill.tick_units, refill.token_units * refill.tick_us);
                    AlgorithmKind::of(policy).policy(rate, scale.capacity + 1)
                } else {
                    AlgorithmKind::of(policy).policy(rate(scale.capacity + 1, scale.full_us), 0)
                };
                if policy.charges_denials() { by_attempts(one_more) } else { one_more }
            }
            Some(Flaw::RoundsTheInterval) if AlgorithmKind::of(policy) == AlgorithmKind::Gcra => {
                let whole_ms = (scale.unit_us / 1_000).max(1);
                AlgorithmKind::Gcra.policy(rate(1, whole_ms * 1_000), scale.capacity)
            }
            Some(Flaw::KeepsTheOldLimit) => {
                self.entries().get(key).map_or(*policy, |entry| entry.policy)
            }
            _ => *policy,
        };
        limit(asked.name(), believed)
    }

    /// The state of a key in the store's belief.
    fn read(&self, key: &Key, policy: &Policy, now: Timestamp) -> Option<PolicyState> {
        let entries = self.entries();
        let entry = entries.get(key)?;
        let minted = match self.flaw {
            Some(Flaw::MintsWhenTimeGoesBack) => now < entry.written,
            Some(Flaw::AddsOldAndNew) => entry.policy != *policy,
            _ => false,
        };
        let mut state = entry.state.clone();
        if let (true, PolicyState::Concurrency(concurrent)) =
            (self.is(Flaw::LeasesNeverEnd), &mut state)
        {
            let cost = concurrent.leases.iter().map(|lease| lease.cost).sum();
            concurrent.leases = vec![LogEntry { timestamp: now, cost }];
        }
        (!minted).then_some(state)
    }

    fn keys(&self, batch: &Batch<'_, Policy>) -> Vec<Key> {
        batch.checks().iter().map(|check| self.key(check.limit, check.key)).collect()
    }

    /// The reservation under a batch's id in the store's belief.
    fn read_reservation(
        &self,
        key: &Key,
        batch: &Batch<'_, Policy>,
        now: Timestamp,
    ) -> Option<Reservation> {
        let reservations = self.reservations.lock().unwrap_or_else(PoisonError::into_inner);
        let mut reservation =
            reservations.get(&(key.clone(), batch.reservation_id()?))?.reservation.clone();
        match (self.flaw, batch.operation()) {
            (Some(Flaw::ChargesAgain), Op::Acquire) => return None,
            (Some(Flaw::SettlesAgain), Op::Settle) => reservation.settled = None,
            (Some(Flaw::SettlesHalf), Op::Settle) => {
                reservation.group = batch.reservation_group(|| fingerprint(&self.keys(batch)));
            }
            (Some(Flaw::GivesBackWhatIsPast), Op::Settle) => reservation.timestamp = now,
            (Some(Flaw::RenewsWhatIsOver), Op::Renew) => reservation.since = now,
            (Some(Flaw::RenewsByAnother), Op::Renew) if batch.checks().len() > 1 => {
                reservation.since = now;
            }
            (Some(Flaw::ReleasesAnyLease), Op::Settle) => {
                let entries = self.entries();
                let state = entries.get(key).map(|entry| &entry.state);
                if let Some(PolicyState::Concurrency(concurrent)) = state {
                    reservation.timestamp = concurrent
                        .leases
                        .last()
                        .map_or(reservation.timestamp, |lease| lease.timestamp);
                    reservation.since = now;
                }
            }
            _ => {}
        }
        Some(reservation)
    }

    fn write_reservation(
        &self,
        key: &Key,
        batch: &Batch<'_, Policy>,
        mut reservation: Reservation,
        expires: Timestamp,
    ) {
        let Some(id) = batch.reservation_id() else { return };
        if self.is(Flaw::RenewsTheCharge) && batch.operation() == Op::Renew {
            reservation.timestamp = reservation.since;
        }
        let sweep_at =
            (!self.is(Flaw::ReservesForEver)).then(|| self.sweep_at(batch.time(), expires));
        let mut reservations = self.reservations.lock().unwrap_or_else(PoisonError::into_inner);
        reservations.insert((key.clone(), id), HeldEntry { reservation, sweep_at });
    }

    /// The time of the request in the store's belief.
    fn now(&self, batch: &Batch<'_, Policy>) -> Timestamp {
        let now = match batch.time() {
            Now::At(now) => now,
            Now::Store => self.own_now(batch.operation()),
        };
        let late_us = match self.flaw {
            Some(Flaw::OutlivesItsWindow) => OUTLIVES_US,
            Some(Flaw::CountsTheBoundary) => 0,
            _ => return now,
        };
        let entries = self.entries();
        let expired = batch.checks().iter().filter_map(|check| {
            let expires = entries.get(&self.place(batch, check))?.expires;
            let outlived = expires <= now && now <= expires.saturating_add_us(late_us);
            outlived.then(|| Timestamp::saturating_from_us(expires.as_us().saturating_sub(1)))
        });
        expired.min().unwrap_or(now)
    }

    /// The time of a write, by the clock that decides it.
    fn written_at(&self, now: Now) -> Timestamp {
        match now {
            Now::Store => self.own_now(Op::Acquire),
            Now::At(at) => at,
        }
    }

    /// When a state with this expiry is removed, by the store's own clock.
    fn sweep_at(&self, now: Now, expires: Timestamp) -> Timestamp {
        let mut us = expires.saturating_us_since(self.written_at(now));
        if self.is(Flaw::SweepsEarly) && now == Now::Store {
            us = us / 5 * 4;
        }
        if !self.is(Flaw::SweepsWithoutGrace) {
            us += now.padding_us();
        }
        self.clock.now().saturating_add_us(us)
    }

    fn write(&self, key: &Key, policy: &Policy, now: Now, write: Write<PolicyState>) {
        let mut entries = self.entries();
        match write {
            Write::Keep => {}
            Write::Remove => {
                entries.remove(key);
                if let (true, (_, key)) = (self.is(Flaw::ResetsByPattern), key)
                    && let Some(begin) = key.strip_suffix('*')
                {
                    entries.retain(|(_, other), _| !other.starts_with(begin));
                }
            }
            Write::Put { mut state, mut expires } => {
                let written = self.written_at(now);
                if let (true, PolicyState::FirstRequestWindow(window)) =
                    (self.is(Flaw::ExtendsTheWindow), &mut state)
                {
                    window.start = window.start.max(written);
                    expires = window.start.saturating_add_us(Scale::of(policy).full_us);
                }
                let sweep_at = (!self.is(Flaw::LosesTheTtl)).then(|| self.sweep_at(now, expires));
                let entry = Entry { state, policy: *policy, written, expires, sweep_at };
                entries.insert(key.clone(), entry);
            }
        }
    }

    /// The answer of [`Flaw::AddsOldAndNew`]: the old limit decides as long as it has something left.
    fn serve_old(&self, batch: &Batch<'_, Policy>, now: Timestamp) -> Option<Verdict> {
        let ([check], true) = (batch.checks(), self.is(Flaw::AddsOldAndNew)) else { return None };
        let key = self.place(batch, check);
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

    /// Charges a denied batch where the flaw says so.
    fn charge_denied(&self, batch: &Batch<'_, Policy>, keys: &[Key], now: Timestamp) {
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

    /// The answer that the store gives.
    fn tell(&self, batch: &Batch<'_, Policy>, verdict: &Verdict) -> Verdict {
        let changed = verdict.decisions().iter().zip(batch.checks()).map(|(decision, check)| {
            let mut changed = *decision;
            match self.flaw {
                Some(Flaw::OffByOne) => {
                    changed.limit = check.limit.algorithm().capacity();
                    changed.remaining = changed.remaining.saturating_sub(1);
                }
                Some(Flaw::WaitsInMilliseconds) => {
                    changed.retry_after_us = changed.retry_after_us.map(|us| us / 1_000 * 1_000);
                }
                Some(Flaw::AtItsOwnTime(_)) => changed.cost = check.cost,
                Some(Flaw::WaitsOneShort) => {
                    changed.retry_after_us = changed.retry_after_us.map(|us| us.saturating_sub(1));
                }
                _ => {}
            }
            changed
        });
        match &*changed.collect::<Vec<_>>() {
            [one] => Verdict::one(*one),
            several => Verdict::several(several.to_vec()),
        }
    }
}

impl Store<Policy> for WrongStore {
    type Error = Refused;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refused> {
        let mut read_before = None;
        let races = self.own_time_flaw(batch) == Some(OwnTimeFlaw::ReadThenWrite)
            && batch.reservation_id().is_none();
        if races || self.is(Flaw::ReadThenWrite) {
            read_before = Some(self.read_all(batch));
            let_others_run().await;
        }
        if self.is(Flaw::ReadsTheClockFirst) && batch.time() == Now::Store {
            let now = Now::At(self.own_now(batch.operation()));
            for _ in 0..self.calls.fetch_add(1, Ordering::SeqCst) % 3 {
                let_others_run().await;
            }
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            return self.decide(&batch.now(now), None).map_err(Refused);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.refuse_what_it_cannot(batch)?;
        self.decide(batch, read_before).map_err(Refused)
    }
}

impl WrongStore {
    fn refuse_what_it_cannot(&self, batch: &Batch<'_, Policy>) -> Result<(), Refused> {
        let (Some(Flaw::Cannot(lacking)), Some(first)) = (self.flaw, batch.checks().first()) else {
            return Ok(());
        };
        let (op, checks) = (batch.operation(), batch.checks());
        let any = |of: &dyn Fn(&Check<'_, Policy>) -> bool| checks.iter().any(of);
        let needed = |capability: &Capability| match *capability {
            Capability::Batches => checks.len() > 1,
            Capability::SeveralKeys => any(&|check| check.key != first.key),
            Capability::Reservations => batch.reservation_id().is_some(),
            Capability::Attempts => any(&|check| check.limit.algorithm().charges_denials()),
            Capability::Algorithm(kind) => {
                any(&|check| AlgorithmKind::of(check.limit.algorithm()) == kind)
            }
            Capability::PastTimes => match batch.time() {
                Now::Store => false,
                Now::At(at) => self.latest_us.fetch_max(at.as_us(), Ordering::SeqCst) > at.as_us(),
            },
            Capability::States | Capability::Metadata | Capability::TimesInOrder => false,
            Capability::Refund | Capability::Force | Capability::Reset => {
                Capability::of(op) == Some(*capability)
            }
        };
        let needed = lacking.iter().any(needed);
        let limit = first.limit.name().to_owned();
        if needed { Err(Refused(Refusal::Unsupported { limit, op })) } else { Ok(()) }
    }

    fn forget_by_its_own_clock(&self, batch: &Batch<'_, Policy>) {
        let calls = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let forgets = self.own_time_flaw(batch) == Some(OwnTimeFlaw::ForgetsNowAndThen);
        if forgets && calls.is_multiple_of(own_time::FORGETS_EVERY) {
            for check in batch.checks() {
                self.entries().remove(&self.place(batch, check));
            }
        }
        if self.is(Flaw::ForgetsByItsOwnClock) {
            self.entries().clear();
        }
        if self.is(Flaw::ForgetsByItsOwnClock) || self.is(Flaw::HoldsNothingByItsOwnClock) {
            self.reservations.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    fn read_all(&self, batch: &Batch<'_, Policy>) -> Vec<Option<PolicyState>> {
        let now = self.now(batch);
        let read = |check: &Check<'_, Policy>| {
            self.read(&self.place(batch, check), check.limit.algorithm(), now)
        };
        batch.checks().iter().map(read).collect()
    }

    fn decide(
        &self,
        batch: &Batch<'_, Policy>,
        read: Option<Vec<Option<PolicyState>>>,
    ) -> Result<Verdict, Refusal> {
        if batch.time() == Now::Store {
            self.forget_by_its_own_clock(batch);
        }
        let now = self.now(batch);
        if let Some(verdict) = self.serve_old(batch, now) {
            return Ok(verdict);
        }
        let keys: Vec<Key> = batch.checks().iter().map(|check| self.place(batch, check)).collect();
        let asked = || keys.iter().zip(batch.checks());
        let limits: Vec<_> = asked().map(|(key, check)| self.limit(key, check.limit)).collect();
        let believed = batch.checks().iter().zip(&limits);
        let own = self.own_time_flaw(batch);
        let cost = |asked| own.map_or(asked, |flaw| flaw.cost(asked));
        let believed =
            believed.map(|(check, limit)| Check { limit, cost: cost(check.cost), ..*check });
        let checks: Vec<_> = believed.collect();
        let op = match batch.operation() {
            Op::Peek if self.is(Flaw::PeekCharges) => Op::Acquire,
            op => op,
        };
        let believed = Batch::new(&checks).expect("as distinct as before").op(op);
        let metadata =
            if self.cannot(Capability::Metadata) { &[][..] } else { batch.metadata_given() };
        let believed = believed.metadata(metadata);
        let believed = batch.reservation_id().map_or(believed, |id| believed.id(id));
        let forgets = batch.is_settled_once() && !self.is(Flaw::RemembersDrawnIds);
        let believed = if forgets { believed.settled_once() } else { believed };

        let states = read.unwrap_or_else(|| self.read_all(batch));
        let reservations = keys.iter().map(|key| self.read_reservation(key, batch, now)).collect();
        let (writes, reservation_writes, fingerprint) =
            (Vec::new(), Vec::new(), fingerprint(&keys));
        let mut view = View { states, writes, reservations, reservation_writes, fingerprint };
        let mut verdict = decide(&believed, now, &mut view)?;
        let several = op == Op::Acquire && checks.iter().any(|check| check.cost > 1);
        if own == Some(OwnTimeFlaw::ForcesTheDenied) && several && !verdict.allowed() {
            view.writes.clear();
            view.reservation_writes.clear();
            verdict = decide(&believed.op(Op::Force), now, &mut view)?;
        }
        for (position, write) in view.writes {
            let policy = limits[position].algorithm();
            let denied = !verdict.decisions()[position].allowed;
            let skipped = match self.flaw {
                Some(Flaw::ChargesOnlyTheFirst) => position > 0,
                Some(Flaw::ForgetsTheDenied) => denied && policy.charges_denials(),
                _ => own.is_some_and(|flaw| flaw.skips(op, position)),
            };
            let (before, cost) = (view.states[position].as_ref(), checks[position].cost);
            let write = match op {
                _ if !self.is(Flaw::Overfills) || !policy.charges_denials() => write,
                Op::Refund => still_overfilled(write, before, policy.capacity(), cost),
                _ if denied => overfilled(write, before, cost),
                _ => write,
            };
            if !skipped {
                self.write(&keys[position], policy, batch.time(), write);
            }
        }
        for (position, reservation, expires) in view.reservation_writes {
            self.write_reservation(&keys[position], batch, reservation, expires);
        }
        if !verdict.allowed() && op == Op::Acquire {
            self.charge_denied(batch, &keys, now);
        }
        Ok(self.tell(batch, &verdict))
    }
}

/// The states read for a batch, and the writes to make.
struct View {
    states: Vec<Option<PolicyState>>,
    writes: Vec<(usize, Write<PolicyState>)>,
    reservations: Vec<Option<Reservation>>,
    reservation_writes: Vec<(usize, Reservation, Timestamp)>,
    fingerprint: u64,
}

impl States<PolicyState> for View {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.states[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        self.writes.push((position, write));
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        self.reservations[position].clone()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        self.reservation_writes.push((position, reservation, expires));
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
