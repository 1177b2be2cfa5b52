//! The compare-and-set mode: optimistic concurrency control (Kung and Robinson, "On Optimistic
//! Methods for Concurrency Control", 1981) for any algorithm, stepped in Rust, without Lua of its
//! own.
//!
//! 1. Read the states of the batch, the reservations under its id, the records of its callers, and
//!    the server's time: at one moment if they lie in one slot, else concurrently.
//! 2. Decide with [`decide`], as the memory store does.
//! 3. Write if nothing that was read has changed, and no record has ended. Otherwise start again
//!    after a jittered pause, a bounded number of times.
//!
//! Callers of one process take turns at a key, so only other processes can interfere.
//!
//! A state that expired meanwhile was not changed by another client: it is read again without
//! counting as an attempt. A writing request removes a value that no limit wrote; a read-only
//! request only reports it.
//!
//! A decision on unchanged states is equivalent to one made at once: only time passes meanwhile, by
//! at most a round trip. A value that changed and changed back is the same state, so ABA does no
//! harm. A key outlives its state by a deadline, or one that came and went would look as if it
//! never was.

use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use futures_util::future::join;
use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Check, Now, Op, Reservation, Snapshot, States, decide};
use ratelimit_core::{Algorithm, Limit, Timestamp, Verdict};

use crate::codec::{Codec, RecordText};
use crate::concurrent::all;
use crate::connection::{Argument, Connection, Reply, TryAgain, slot};
use crate::deadline::Deadline;
use crate::error::{LEFT, REMOVED, RedisError, Result};
use crate::mode::Cas;
use crate::program::newest_us;
use crate::records::{self, Looked, Premise, push_premises};
use crate::reservation;
use crate::rounds::Rounds;
use crate::script::{Premises, Script};
use crate::store::{Mode, NewestAt, RedisStore, StatesAt, TimesIn, evalsha, push_time, ttl_ms};
use crate::turns::Taken;

mod in_slot;

use in_slot::CasInSlot;

static COMPARE_AND_SET: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("lua/compare_and_set.lua"), &[], Premises::First));

/// How many times a batch is decided before it fails as contended.
const ATTEMPTS: usize = 32;

/// A key, the value that was read, and the change to make.
#[derive(Clone)]
pub(crate) struct CasValue {
    pub(crate) key: String,
    pub(crate) read: Option<Vec<u8>>,
    pub(crate) change: Write<Vec<u8>>,
}

/// What a batch read. Writes are recorded here, not made.
pub(crate) struct Reads<S> {
    /// One slot per check's state, then, if the batch has an id, one per reservation.
    pub(crate) slots: Vec<CasValue>,
    pub(crate) states: Vec<Option<S>>,
    pub(crate) reservations: Vec<Option<Reservation>>,
    /// The time of the server, or the one that was given.
    pub(crate) now: Timestamp,
    fingerprint: u64,
}

impl CasValue {
    /// The value that was read. Empty counts as missing: a removal by `SET … IFEQ` leaves an empty
    /// value for a millisecond.
    fn written(&self) -> Option<&[u8]> {
        self.read.as_deref().filter(|bytes| !bytes.is_empty())
    }

    pub(crate) fn changes(&self) -> bool {
        match self.change {
            Write::Keep => false,
            Write::Put { .. } => true,
            Write::Remove => self.read.is_some(),
        }
    }
}

/// The attempts at one batch.
pub(crate) struct BatchAttempts {
    pub(crate) rounds: Rounds,
    /// What the last attempt read and could not write.
    read: Option<Vec<Option<Vec<u8>>>>,
}

impl BatchAttempts {
    /// Starts another attempt on these values.
    ///
    /// # Errors
    /// [`RedisError::Contended`] if no attempt is left.
    pub(crate) fn next(&mut self, slots: &[CasValue]) -> Result<()> {
        let read: Vec<_> =
            slots.iter().map(CasValue::written).map(|read| read.map(<[u8]>::to_vec)).collect();
        let again = match &self.read {
            None => self.rounds.may_charge(),
            Some(before) => {
                let expired = before.iter().zip(&read).filter(|(before, now)| before != now);
                // A removal by another client looks the same; each state of a batch counts as
                // expired once.
                if expired.clone().count() > 0 && expired.clone().all(|(_, now)| now.is_none()) {
                    self.rounds.another_after_expiry(slots.len())
                } else {
                    self.rounds.another()
                }
            }
        };
        self.read = Some(read);
        if again { Ok(()) } else { Err(self.rounds.contended()) }
    }
}

impl<S> Reads<S> {
    pub(crate) fn changes(&self) -> bool {
        self.slots.iter().any(CasValue::changes)
    }

    /// Marks new and grown reservations as `reserved`, and those that the id already has as
    /// confirmed.
    fn reserve_back<A: Algorithm>(&mut self, checks: &[Check<'_, A>], reserved: bool) {
        let slots = &mut self.slots[self.states.len()..];
        for ((slot, reservation), check) in slots.iter_mut().zip(&self.reservations).zip(checks) {
            match (&mut slot.change, reservation) {
                (Write::Put { state, .. }, _) if reserved => {
                    state.extend_from_slice(reservation::RESERVED);
                }
                (Write::Keep, Some(reservation)) => {
                    let life_us = check.limit.reservation_us().unwrap_or(Reservation::LIFE_US);
                    let expires = reservation.since.saturating_add_us(life_us);
                    let confirmed = slot.read.as_deref().and_then(reservation::confirmed);
                    slot.change =
                        confirmed.map_or(Write::Keep, |state| Write::Put { state, expires });
                }
                _ => {}
            }
        }
    }
}

impl<S: Codec> States<S> for Reads<S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.states[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        self.slots[position].change = write.map(|state| state.encode());
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        self.reservations[position].clone()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        let place = self.states.len() + position;
        self.slots[place].change = Write::Put { state: reservation::encode(&reservation), expires };
    }
}

impl<A: RecordText<State: Codec>> Mode<A> for Cas {
    type InSlot<'s, C: Connection>
        = CasInSlot<'s, A, C>
    where
        A: 's;

    /// It reads records together with the states.
    fn look<C: Connection>(_: &RedisStore<Self, C>, _: &Batch<'_, A>) -> Result<Looked<A>> {
        Ok(Looked::NOTHING)
    }

    async fn decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        _premises: &'s [Premise],
        deadline: Deadline,
        _left: Option<&'s mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        let request = store.request(batch.time(), deadline);
        let writes = batch.operation() != Op::Peek;
        let turn = if writes { request.turn(batch).await } else { Vec::new() };
        let mut attempts = request.attempts(&turn);
        loop {
            let decided = request.decided(batch, false, writes).await;
            let decided = decided.map_err(|error| attempts.rounds.explain(error))?;
            let (verdict, reads, looked) = decided;
            if !reads.changes() {
                return Ok(verdict);
            }
            attempts.next(&reads.slots)?;
            let written = request.write(&reads.slots, &looked.premises, reads.now).await;
            if written.map_err(|error| attempts.rounds.explain(error))? {
                return Ok(verdict);
            }
            attempts.rounds.pause().await;
        }
    }

    async fn would_decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        _premises: &'s [Premise],
        deadline: Deadline,
        prepares: bool,
    ) -> Result<CasInSlot<'s, A, C>> {
        CasInSlot::of(store.request(batch.time(), deadline), batch, prepares).await
    }

    async fn take_turns<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Vec<Taken<'s>> {
        store.request(batch.time(), deadline).turn(batch).await
    }

    fn keys_of<C: Connection>(
        store: &RedisStore<Self, C>,
        limit: &Limit<A>,
        identifier: &str,
    ) -> Vec<String> {
        vec![store.key(limit, identifier)]
    }

    async fn read_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        deadline: Deadline,
    ) -> Result<StatesAt<A::State>> {
        let request = store.request(Now::Store, deadline);
        // A key has the state of one limit.
        let (slot, state) = request.found(limits[0], key.to_owned(), false).await?;
        let now = request.now(key).await?;
        Ok(StatesAt { now, states: vec![state], read: Vec::from_iter(slot.read) })
    }

    async fn replace_at<C: Connection>(
        store: &RedisStore<Self, C>,
        _limits: &[&Limit<A>],
        key: &str,
        mut states: StatesAt<A::State>,
        mut full: Vec<Option<Write<A::State>>>,
        deadline: Deadline,
    ) -> Result<()> {
        let Some(write) = full.swap_remove(0) else { return Ok(()) };
        let change = write.map(|state| state.encode());
        let slot = CasValue { key: key.to_owned(), read: states.read.pop(), change };
        store.request(Now::Store, deadline).write(&[slot], &[], states.now).await.map(drop)
    }

    fn newest_at(limit: &str) -> Option<NewestAt> {
        let is_state = limit.ends_with('!') && !limit.contains('+');
        let times: TimesIn = |read| read.iter().filter_map(|state| newest_us(state)).collect();
        is_state.then_some(NewestAt { command: "GET", arguments: &[], times })
    }
}

impl<C: Connection> RedisStore<Cas, C> {
    /// The key on the server of a limit's state for a caller's key.
    #[must_use]
    pub fn key<A: Algorithm>(&self, limit: &Limit<A>, key: &str) -> String {
        self.inner.keys.of_cas(limit.state_name(), key)
    }

    /// A request that is decided as of this time, and ends by this deadline.
    pub(crate) fn request(&self, time: Now, deadline: Deadline) -> CasRequest<'_, C> {
        CasRequest { store: self, time, deadline }
    }
}

/// What all exchanges of a request with the servers have in common.
pub(crate) struct CasRequest<'s, C> {
    store: &'s RedisStore<Cas, C>,
    time: Now,
    deadline: Deadline,
}

impl<'s, C: Connection> CasRequest<'s, C> {
    /// The attempts at a batch whose callers took these turns.
    pub(crate) fn attempts(&self, turn: &[Taken<'_>]) -> BatchAttempts {
        let has_waited = turn.iter().any(|taken| taken.has_waited);
        let peer = &self.store.inner.peer;
        let rounds = Rounds::new(ATTEMPTS, self.deadline, peer).after_others(has_waited);
        BatchAttempts { rounds, read: None }
    }

    /// The same by another deadline.
    fn until(&self, deadline: Deadline) -> Self {
        Self { deadline, ..*self }
    }

    /// Waits until no other caller of this store works on the keys of a batch, or a quarter of the
    /// time is over.
    async fn turn<A: Algorithm>(&self, batch: &Batch<'_, A>) -> Vec<Taken<'s>> {
        let keys = batch.checks().iter().map(|check| self.store.key(check.limit, check.key).into());
        self.store.inner.turns.take(keys.collect(), self.deadline).await
    }

    /// The time of the request, on the server that keeps this key.
    pub(crate) async fn now(&self, key: &str) -> Result<Timestamp> {
        self.store.inner.now(key, self.time, self.deadline).await
    }

    /// The value of a limit under a key.
    pub(crate) async fn get<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Vec<u8>>> {
        self.store.inner.get(limit, key, self.deadline).await
    }

    /// The value under a key, and the state that it is. One that is none is an error, and is
    /// removed if `removes`.
    pub(crate) async fn found<A: Algorithm<State: Codec>>(
        &self,
        limit: &Limit<A>,
        key: String,
        removes: bool,
    ) -> Result<(CasValue, Option<A::State>)> {
        let read = self.get(limit, &key).await?;
        let mut slot = CasValue { key, read, change: Write::Keep };
        let state = self.decoded(limit, &mut slot, removes, A::State::decode).await?;
        Ok((slot, state))
    }

    /// Decides on the stored states: the verdict, the writes that it requires, and how the checks
    /// stand by the records of their callers. New reservations are marked `reserved` if they may
    /// have to be taken back. Nothing is charged yet. If the batch `writes`, values that no limit
    /// wrote are removed.
    pub(crate) async fn decided<A: RecordText<State: Codec>>(
        &self,
        batch: &Batch<'_, A>,
        reserved: bool,
        writes: bool,
    ) -> Result<(Verdict, Reads<A::State>, Looked<A>)> {
        let read = self.read(batch, writes).await;
        let (mut reads, looked) = read.map_err(RedisError::of_a_lookup)?;
        let checks = looked.checks(batch);
        let ruled = looked.ruled(batch, &checks);
        let verdict = decide(&ruled, reads.now, &mut reads)?;
        if matches!(ruled.operation(), Op::Acquire | Op::Extend) && verdict.allowed() {
            reads.reserve_back(ruled.checks(), reserved);
        }
        Ok((verdict, reads, looked))
    }

    /// Reads all that a batch needs, and the time: at one moment if one server has all of it.
    async fn read<A: RecordText<State: Codec>>(
        &self,
        batch: &Batch<'_, A>,
        writes: bool,
    ) -> Result<(Reads<A::State>, Looked<A>)> {
        let (store, checks, id) = (self.store, batch.checks(), batch.reservation_id());
        let mut keys: Vec<_> =
            checks.iter().map(|check| store.key(check.limit, check.key)).collect();
        if let Some(id) = id {
            let reserved = |check: &Check<'_, A>| store.reservation_key(check.limit, check.key, id);
            keys.extend(checks.iter().map(reserved));
        }
        let overridable = checks.iter().filter(|check| check.limit.is_overridable());
        let of_records: Vec<_> = overridable
            .map(|check| (store.inner.keys.of_records(check.key), check.limit.state_name()))
            .collect();
        let first = keys.first().map_or("", String::as_str);
        let each = async || {
            let reading = keys.iter().zip(checks.iter().cycle());
            let reading = reading.map(|(key, check)| self.get(check.limit, key));
            all(reading).await.into_iter().collect::<Result<Vec<_>>>()
        };
        let (mut read, now) = match self.read_at_once(&keys, &of_records).await {
            Ok(Some(read)) => read,
            Err(error) if error.is_wrong_type() => {
                // The states say which of them it is.
                let read = each().await?;
                if !of_records.is_empty() {
                    return Err(error);
                }
                (read, self.now(first).await?)
            }
            Err(error) => return Err(error),
            Ok(None) => {
                let (read, now) = join(each(), self.now(first)).await;
                (read?, now?)
            }
        };
        let mut of_records = read.split_off(keys.len()).into_iter();
        let looked = records::look(&store.inner.keys, batch, |_, _| {
            let text = of_records.next()??;
            let has_ended = records::has_ended(&text, now);
            Some((text, has_ended))
        })?;
        let (slots, states) = (Vec::with_capacity(keys.len()), Vec::with_capacity(checks.len()));
        let fingerprint = id.map_or(0, |_| reservation::fingerprint(&store.inner.keys, batch));
        let mut reads = Reads { slots, states, reservations: Vec::new(), now, fingerprint };
        for (place, (key, read)) in keys.into_iter().zip(read).enumerate() {
            let limit = checks[place % checks.len()].limit;
            let mut slot = CasValue { key, read, change: Write::Keep };
            if place >= checks.len() {
                let decoded = self.decoded(limit, &mut slot, writes, reservation::decode).await?;
                reads.reservations.push(decoded);
            } else if batch.operation() == Op::Reset {
                // It does not have to understand the state.
                reads.states.push(slot.written().and_then(A::State::decode));
            } else {
                let decoded = self.decoded(limit, &mut slot, writes, A::State::decode).await?;
                reads.states.push(decoded);
            }
            reads.slots.push(slot);
        }
        Ok((reads, looked))
    }

    /// Reads several keys, fields of records and the time, at one moment: what is not written is
    /// not compared afterwards, so a peek at several limits would otherwise show them as of
    /// different moments. `None` if there are no records, and one key, or one of another slot.
    async fn read_at_once(
        &self,
        keys: &[String],
        of_records: &[(String, &str)],
    ) -> Result<Option<(Vec<Option<Vec<u8>>>, Timestamp)>> {
        let [first, others @ ..] = keys else { return Ok(None) };
        let inner = &self.store.inner;
        let is_cluster = inner.connection.is_cluster();
        let is_elsewhere = |key: &String| is_cluster && slot::of(key) != slot::of(first);
        if of_records.is_empty() && (others.is_empty() || others.iter().any(is_elsewhere)) {
            return Ok(None);
        }
        let reads = keys.iter().map(|key| ["GET", key].map(Argument::Text).to_vec());
        let of_records = of_records.iter();
        let of_records =
            of_records.map(|(key, field)| ["HGET", key, field].map(Argument::Text).to_vec());
        let reads = reads.chain(of_records);
        let commands: Vec<_> = reads.chain([vec![Argument::Text("TIME")]]).collect();
        let mut replies = inner.connection.transaction(first, &commands, self.deadline).await?;
        let told =
            replies.pop().filter(|_| replies.len() + 1 == commands.len()).unwrap_or(Reply::Nil);
        let now = inner.time(&told)?;
        let now = if let Now::At(given) = self.time { given } else { now };
        let values = replies.into_iter().map(|reply| inner.value(reply));
        Ok(Some((values.collect::<Result<_>>()?, now)))
    }

    /// Decodes a slot's value. A value that does not decode is an error, and is removed if
    /// `removes`.
    async fn decoded<A: Algorithm, T>(
        &self,
        limit: &Limit<A>,
        slot: &mut CasValue,
        removes: bool,
        decode: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let found = slot.written().and_then(decode);
        if found.is_some() || slot.written().is_none() {
            return Ok(found);
        }
        if removes {
            // If it is unchanged, so the limit recovers and the error is reported once.
            slot.change = Write::Remove;
            self.write(std::slice::from_ref(slot), &[], Timestamp::ZERO).await?;
        }
        Err(RedisError::corrupt(limit, &slot.key, if removes { REMOVED } else { LEFT }))
    }

    /// Makes the noted changes, if any. Returns whether everything that was read was still
    /// unchanged, and so were the records that it assumes.
    pub(crate) async fn write(
        &self,
        slots: &[CasValue],
        premises: &[Premise],
        now: Timestamp,
    ) -> Result<bool> {
        if !slots.iter().any(CasValue::changes) {
            return Ok(true);
        }
        if let [slot] = slots
            && premises.is_empty()
            && let Some(written) = self.write_one(slot, now).await?
        {
            return Ok(written);
        }
        let of_states = slots.iter().map(|slot| &*slot.key);
        let keys: Vec<_> = of_states.chain(premises.iter().map(|premise| &*premise.key)).collect();
        let mut words = evalsha(keys.into_iter(), slots.len());
        // Without records, no time matters.
        push_time(&mut words, if premises.is_empty() { Now::At(now) } else { self.time });
        push_premises(&mut words, premises.iter());
        for slot in slots {
            let (kind, value, ttl_ms) = self.change(&slot.change, now);
            let read = slot.read.as_deref();
            words.push(Argument::Text(if read.is_some() { "1" } else { "0" }));
            words.push(Argument::Bytes(read.unwrap_or_default()));
            words.extend([Argument::Text(kind), Argument::Bytes(value), Argument::Number(ttl_ms)]);
        }
        let (inner, key) = (&self.store.inner, &slots[0].key);
        let wait = TryAgain::Wait;
        let answer = inner.eval(key, &COMPARE_AND_SET, &mut words, wait, self.deadline).await?;
        match &*answer {
            b"0" => Ok(false),
            b"1" => Ok(true),
            // The records that stand, behind a line of their own.
            other if other.split(|byte| *byte == b'\n').nth(1) == Some(b"~") => Ok(false),
            _ => Err(inner.peer.unexpected(&Reply::Text(answer))),
        }
    }

    /// Writes a single key without scripting; `None` if this server needs a script for it.
    async fn write_one(&self, slot: &CasValue, now: Timestamp) -> Result<Option<bool>> {
        // SET cannot only compare, as a batch of several keys may require.
        if matches!(slot.change, Write::Keep) {
            return Ok(None);
        }
        let (_, value, ttl_ms) = self.change(&slot.change, now);
        let mut words =
            vec![Argument::Text("SET"), Argument::Text(&slot.key), Argument::Bytes(value)];
        match &slot.read {
            None => words.push(Argument::Text("NX")),
            Some(read) if !self.store.inner.lacks_ifeq.load(Ordering::Relaxed) => {
                words.extend([Argument::Text("IFEQ"), Argument::Bytes(read)]);
            }
            Some(_) => return Ok(None),
        }
        words.extend([Argument::Text("PX"), Argument::Number(ttl_ms)]);
        match self.store.inner.connection.send(&slot.key, &words, self.deadline).await {
            Ok(Reply::Text(_)) => Ok(Some(true)),
            Ok(Reply::Nil) => Ok(Some(false)),
            Ok(other) => Err(self.store.inner.peer.unexpected(&other)),
            // "ERR syntax error": the server does not know IFEQ and has written nothing.
            Err(RedisError::Server { code, message, .. })
                if code == "ERR" && message.contains("syntax") && slot.read.is_some() =>
            {
                self.store.inner.lacks_ifeq.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// A change as the server gets it: its kind, the value, and for how many milliseconds that
    /// lives.
    fn change<'w>(
        &self,
        write: &'w Write<Vec<u8>>,
        now: Timestamp,
    ) -> (&'static str, &'w [u8], u64) {
        match write {
            Write::Keep => ("", &[], 1),
            // Without DEL, the value is emptied and expires after a millisecond.
            Write::Remove => ("remove", &[], 1),
            Write::Put { state, expires } => {
                // For as long as another request may be in flight that read no value.
                let late_ms = u64::try_from(self.deadline.given().as_millis()).unwrap_or(u64::MAX);
                ("put", state, ttl_ms(*expires, now, self.time).saturating_add(late_ms))
            }
        }
    }
}
