//! The mode of native commands: one transaction (MULTI/EXEC) per batch, without scripting.
//!
//! A transaction cannot branch, so it charges whatever it reads. A limit that [counts
//! attempts](Limit::count_attempts) means exactly that, and no other limit runs here.
//!
//! 1. Read the entries of the batch and the server's time, which becomes the request's time. A
//!    peek, and an attempt that changes nothing, end here.
//! 2. Step in Rust, as the memory store does. In one transaction, read everything again, charge the
//!    result by native commands that add to whatever is stored by now, and read the time.
//! 3. An attempt that did not fit at first is denied. For any other, step again on the entries just
//!    before the charge, for the decision.
//!
//! Nothing that was admitted is taken off, whatever other clients charge or reset meanwhile, so no
//! limit admits more than it may. Nor is anything taken back: attempts that come between may count
//! although they do not fit, for a window at most.
//!
//! A charge counts from the request's time and is decided as of that time. Expired entries stay for
//! one more second, so all entries that counted at that time are still there. The transaction's own
//! time shows whether it came within that second. If not, its admission is in doubt.
//!
//! A charge of another client that counts from a later time but arrived earlier counts as
//! simultaneous. So ordering the charges by their times explains every admission.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Check, Now, Op, Reservation, States, decide};
use ratelimit_core::{Limit, Limits, RateLimiter, Refusal, ReservationId, Timestamp, Verdict};

use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, REMOVED, RedisError, Result, WRONG_TYPE};
use crate::mode::Multi;
use crate::native::{MultiProgram, Native, NativeCharge, Storage};
use crate::records::Premise;
use crate::store::{InSlot, Inner, Mode, NewestAt, RedisStore, StatesAt, TimesIn, ttl_ms};

mod stored;

use stored::{Found, Words, command, counter, element, element_of, parsed, reading, removal};

/// How long expired entries stay stored. A charge that comes no later than this is decided as of
/// the time of its request.
const LATENESS_US: u64 = 1_000_000;

impl<C: Connection> RedisStore<Multi, C> {
    /// A limiter over this store, of limits that a transaction can decide.
    ///
    /// [`RateLimiter::new`] takes any limits, and their requests fail.
    ///
    /// # Errors
    /// As [`supports`](Self::supports).
    pub fn limiter<A: MultiProgram>(self, limits: Limits<A>) -> Result<RateLimiter<Self, A>> {
        Self::supports(&limits)?;
        Ok(RateLimiter::new(limits, self))
    }

    /// Checks that a transaction can decide all of these limits: that each counts attempts, by an
    /// algorithm whose entries native commands can add, and looks for no records.
    ///
    /// # Errors
    /// The first limit that it cannot decide, by name, with the remedy.
    pub fn supports<A: MultiProgram>(limits: &Limits<A>) -> Result<()> {
        limits.iter().try_for_each(|limit| {
            Batch::one(&Check { limit, key: "", cost: 0 }).without_records()?;
            native(limit).map(drop)
        })
    }

    /// The key on the server of a limit's entries for a caller's key; `None` if no transaction can
    /// decide the limit.
    #[must_use]
    pub fn key<A: MultiProgram>(&self, limit: &Limit<A>, key: &str) -> Option<String> {
        let native = native(limit).ok()?;
        Some(self.inner.keys.of_multi(limit.state_name(), native.storage.name(), key))
    }
}

impl<A: MultiProgram> Mode<A> for Multi {
    type InSlot<'s, C: Connection>
        = MultiRequest<'s, A, C>
    where
        A: 's;

    async fn would_decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        _premises: &'s [Premise],
        deadline: Deadline,
        _prepares: bool,
    ) -> Result<MultiRequest<'s, A, C>> {
        let mut request = MultiRequest::of(&store.inner, batch, deadline)?;
        if batch.operation() != Op::Reset {
            request.now = request.read().await.map_err(RedisError::of_a_lookup)?;
        }
        request.verdict = decide(batch, request.now, &mut request)?;
        Ok(request)
    }

    fn keys_of<C: Connection>(
        store: &RedisStore<Self, C>,
        limit: &Limit<A>,
        identifier: &str,
    ) -> Vec<String> {
        Vec::from_iter(store.key(limit, identifier))
    }

    async fn read_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        deadline: Deadline,
    ) -> Result<StatesAt<A::State>> {
        // A key has the state of one limit.
        let check = Check { limit: limits[0], key: "", cost: 0 };
        let batch = Batch::one(&check).op(Op::Peek);
        let mut request = MultiRequest::of(&store.inner, &batch, deadline)?;
        key.clone_into(&mut request.checks[0].key);
        let now = request.read().await?;
        Ok(StatesAt { now, states: vec![request.checks.swap_remove(0).state], read: Vec::new() })
    }

    /// Whatever it has become: what others charge meanwhile counts from its future, and is read
    /// again.
    async fn replace_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        states: StatesAt<A::State>,
        mut full: Vec<Option<Write<A::State>>>,
        deadline: Deadline,
    ) -> Result<()> {
        let check = Check { limit: limits[0], key: "", cost: 0 };
        let batch = Batch::one(&check);
        let mut request = MultiRequest::of(&store.inner, &batch, deadline)?;
        key.clone_into(&mut request.checks[0].key);
        let mut commands = vec![command([&"DEL", &key])];
        if let Some(Write::Put { state, expires }) = full.swap_remove(0)
            && let Some(entry) = check.limit.algorithm().newest(&state)
        {
            commands.extend(request.checks[0].charging(&entry, expires, (states.now, Now::Store)));
        }
        request.send(&commands).await.map(drop)
    }

    fn newest_at(limit: &str) -> Option<NewestAt> {
        const LAST: &[&str] = &["-1", "-1"];
        let in_hash: TimesIn =
            |pairs| pairs.chunks(2).filter_map(counter).map(|(_, it)| it.since.as_us()).collect();
        let in_element: TimesIn =
            |items| items.iter().filter_map(element).map(|(_, it)| it.since.as_us()).collect();
        let name = limit.split_once('+')?.1;
        let storage = Storage::ALL.into_iter().find(|storage| storage.name() == name)?;
        let (command, arguments, times) = match storage {
            Storage::Counters => ("HGETALL", &[][..], in_hash),
            Storage::List => ("LRANGE", LAST, in_element),
            Storage::SortedSet => ("ZRANGE", LAST, in_element),
        };
        Some(NewestAt { command, arguments, times })
    }
}

/// One check of a batch.
struct MultiCheck<'b, A: MultiProgram> {
    check: &'b Check<'b, A>,
    key: String,
    native: Native,
    found: Found,
    /// The state that is these entries.
    state: Option<A::State>,
    /// What the decision requires.
    write: Write<A::State>,
}

impl<A: MultiProgram> MultiCheck<'_, A> {
    /// What leads from the state that was read to this one; `None` if nothing has to be added.
    fn added(&self, after: &A::State) -> Option<NativeCharge> {
        let algorithm = self.check.limit.algorithm();
        let mut entry = algorithm.newest(after)?;
        let before = self.state.as_ref().and_then(|before| algorithm.newest(before));
        // In a list, each request is an entry of its own.
        let grows = self.native.storage != Storage::List;
        let there = before.filter(|before| grows && before.since == entry.since);
        let there = there.map_or(0, |before| before.charged.cost);
        entry.charged.cost = entry.charged.cost.checked_sub(there).filter(|cost| *cost > 0)?;
        Some(entry)
    }

    /// The commands that add an entry to a state which stops mattering at `expires`.
    fn charging(
        &self,
        entry: &NativeCharge,
        expires: Timestamp,
        (now, time): (Timestamp, Now),
    ) -> Vec<Words> {
        let Self { check, key, native, found, .. } = self;
        let late_us = if time == Now::Store { LATENESS_US } else { 0 };
        let at = now.max(entry.since).as_us().saturating_sub(late_us);
        let oldest = native.oldest(&found.1, Timestamp::saturating_from_us(at));
        let past = found.0.iter().zip(&found.1).filter(|(_, entry)| entry.since < oldest);
        let mut commands: Vec<_> =
            past.map(|(text, _)| removal(native.storage, key, text)).collect();
        let (since, cost) = (entry.since.as_us().to_string(), entry.charged.cost.to_string());
        let element = || element_of(entry, ReservationId::random());
        match native.storage {
            Storage::Counters => commands.push(command([&"HINCRBY", key, &since, &cost])),
            Storage::List => commands.push(command([&"RPUSH", key, &element()])),
            Storage::SortedSet => {
                commands.push(command([&"ZADD", key, &since, &element()]));
                // As many newer charges leave no room for an older one.
                let older = format!("-{}", check.limit.algorithm().capacity() + 1);
                commands.push(command([&"ZREMRANGEBYRANK", key, &"0", &older]));
            }
        }
        let ttl_ms = (ttl_ms(expires, now, time) + late_us / 1_000).to_string();
        // NX for a key without a time to live, GT for one with a shorter one.
        commands.extend(["NX", "GT"].map(|only| command([&"PEXPIRE", key, &ttl_ms, &only])));
        commands
    }
}

/// A batch on its way, whose keys all lie on one server.
pub struct MultiRequest<'b, A: MultiProgram, C> {
    inner: &'b Inner<C>,
    batch: &'b Batch<'b, A>,
    checks: Vec<MultiCheck<'b, A>>,
    deadline: Deadline,
    now: Timestamp,
    verdict: Verdict,
}

impl<A: MultiProgram, C> States<A::State> for MultiRequest<'_, A, C> {
    fn get(&self, position: usize) -> Option<&A::State> {
        self.checks[position].state.as_ref()
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        self.checks[position].write = write;
    }

    // No batch with an id comes here.
    fn reservation(&self, _: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

impl<'b, A: MultiProgram, C: Connection> MultiRequest<'b, A, C> {
    /// A batch before anything was read.
    ///
    /// # Errors
    /// No transaction can decide a limit, or the operation.
    fn of(inner: &'b Inner<C>, batch: &'b Batch<'b, A>, deadline: Deadline) -> Result<Self> {
        let before = |check: &'b Check<'b, A>| {
            let (native, limit) = (native(check.limit)?, || check.limit.name().into());
            if batch.reservation_id().is_some() {
                return Err(Refusal::CannotReserve { limit: limit() }.into());
            }
            if !matches!(batch.operation(), Op::Acquire | Op::Peek | Op::Reset) {
                return Err(RedisError::NoOperation { limit: limit(), op: batch.operation() });
            }
            let storage = native.storage.name();
            let key = inner.keys.of_multi(check.limit.state_name(), storage, check.key);
            let (found, state, write) = (Found::default(), None, Write::Keep);
            Ok(MultiCheck { check, key, native, found, state, write })
        };
        let checks = batch.checks().iter().map(before).collect::<Result<Vec<_>>>()?;
        let (now, verdict) = (Timestamp::ZERO, Verdict::several(Vec::new()));
        Ok(Self { inner, batch, checks, deadline, now, verdict })
    }

    /// Reads the states, and the time.
    async fn read(&mut self) -> Result<Timestamp> {
        let reading = self.checks.iter().map(|check| reading(check.native.storage, &check.key));
        let (replies, now) = match self.send_timed(reading.collect()).await {
            Err(error) if error.is_wrong_type() => return Err(self.wrong_type(error).await),
            sent => sent?,
        };
        for place in 0..self.checks.len() {
            let found = self.found(place, replies.get(place)).await?;
            let check = &mut self.checks[place];
            check.state = check.check.limit.algorithm().state(&found.1);
            check.found = found;
        }
        Ok(now)
    }

    /// Names the key that has another type.
    async fn wrong_type(&self, error: RedisError) -> RedisError {
        for MultiCheck { check, key, native, .. } in &self.checks {
            let read = self.send(&[reading(native.storage, key)]).await;
            if read.is_err_and(|error| error.is_wrong_type()) {
                return RedisError::corrupt(check.limit, key, WRONG_TYPE);
            }
        }
        error
    }

    /// Parses the entries of a check in a reply. A value that no limit wrote is removed unless the
    /// batch only reads, so the limit recovers and the error is reported once.
    async fn found(&self, place: usize, reply: Option<&Reply>) -> Result<Found> {
        let check = &self.checks[place];
        let Some(reply @ Reply::Array(_)) = reply else {
            return Err(self.inner.peer.unexpected(reply.unwrap_or(&Reply::Nil)));
        };
        if let Some(found) = parsed(check.native.storage, reply) {
            return Ok(found);
        }
        let removes = self.batch.operation() != Op::Peek;
        if removes {
            self.send(&[command([&"DEL", &check.key])]).await?;
        }
        let detail = if removes { REMOVED } else { LEFT };
        Err(RedisError::corrupt(check.check.limit, &check.key, detail))
    }

    /// Sends these commands. Returns the replies, and the time of the transaction unless one was
    /// given.
    async fn send_timed(&self, mut commands: Vec<Words>) -> Result<(Vec<Reply>, Timestamp)> {
        if let Now::At(now) = self.batch.time() {
            return Ok((self.send(&commands).await?, now));
        }
        commands.push(command([&"TIME"]));
        let replies = self.send(&commands).await?;
        let now = self.inner.time(replies.last().unwrap_or(&Reply::Nil))?;
        Ok((replies, now))
    }

    async fn send(&self, commands: &[Words]) -> Result<Vec<Reply>> {
        let commands: Vec<Vec<Argument<'_>>> =
            commands.iter().map(|c| c.iter().map(|word| Argument::Bytes(word)).collect()).collect();
        // All keys lie in the slot of the first.
        self.inner.connection.transaction(&self.checks[0].key, &commands, self.deadline).await
    }
}

impl<A: MultiProgram, C: Connection> InSlot for MultiRequest<'_, A, C> {
    fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    fn denied(&mut self) -> Result<Verdict> {
        Ok(decide(&self.batch.denied_elsewhere(), self.now, self)?)
    }

    /// Charges what the decision requires, and decides once more on the states just before.
    async fn charge(&mut self) -> Result<bool> {
        let mut commands = Vec::new();
        // The places of the checks that admit so far, from when their charges count, and the places
        // of the entries before these among the replies.
        let mut again = Vec::with_capacity(self.checks.len());
        let checks = self.checks.iter().zip(self.verdict.decisions()).enumerate();
        for (place, (check, decision)) in checks {
            match &check.write {
                Write::Keep => {}
                Write::Remove => commands.push(command([&"DEL", &check.key])),
                Write::Put { state, expires } => {
                    let Some(entry) = check.added(state) else { continue };
                    if decision.allowed {
                        again.push((place, entry.since, commands.len()));
                        commands.push(reading(check.native.storage, &check.key));
                    }
                    commands.extend(check.charging(
                        &entry,
                        *expires,
                        (self.now, self.batch.time()),
                    ));
                }
            }
        }
        if commands.is_empty() {
            return Ok(self.verdict.allowed());
        }
        let (replies, charged) = self.send_timed(commands).await?;
        if charged.saturating_us_since(self.now) > LATENESS_US && !again.is_empty() {
            let address = Arc::clone(self.inner.peer.address());
            let deadline = Duration::from_micros(LATENESS_US);
            return Err(RedisError::TimedOut { address, deadline });
        }
        for (place, since, reading) in again {
            let found = self.found(place, replies.get(reading)).await;
            let before = found.map_err(RedisError::in_part)?.1.into_iter();
            // Later ones count as if they had come then.
            let before: Vec<_> =
                before.map(|it| NativeCharge { since: it.since.min(since), ..it }).collect();
            let check = &mut self.checks[place];
            check.state = check.check.limit.algorithm().state(&before);
        }
        self.verdict = decide(self.batch, self.now, self)?;
        Ok(self.verdict.allowed())
    }
}

fn native<A: MultiProgram>(limit: &Limit<A>) -> Result<Native> {
    let native = limit.algorithm().native().filter(|_| limit.counts_attempts());
    native.ok_or_else(|| RedisError::NotNative { limit: limit.name().into() })
}
