//! The mode of native commands: one transaction (MULTI/EXEC) per batch, without scripting.
//!
//! A transaction cannot branch, so it charges whatever it reads.
//! [`Attempts`](ratelimit_core::Attempts) mean exactly that, and only they run here. Each is stored as in
//! the well-known patterns: a counter, a list, or a sorted set.
//!
//! 1. Read the entries of the batch and the server's time, which becomes the request's time. A peek, and
//!    an attempt that changes nothing, end here.
//! 2. Step in Rust, as the memory store does. In one transaction, read everything again, charge the
//!    result by native commands that add to whatever is stored by now, and read the time.
//! 3. An attempt that did not fit at first is denied. For any other, step again on the entries just
//!    before the charge, for the decision.
//!
//! Nothing that was admitted is taken off, whatever other clients charge or reset meanwhile, so no limit
//! admits more than it may. Nor is anything taken back: attempts that come between may count although
//! they do not fit, for a window at most.
//!
//! A charge counts from the request's time and is decided as of that time. Expired entries stay for one
//! more second, so all entries that counted at that time are still there. The transaction's own time
//! shows whether it came within that second. If not, its admission is in doubt.
//!
//! A charge of another client that counts from a later time but arrived earlier counts as simultaneous.
//! So ordering the charges by their times explains every admission.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Check, Now, Op, Reservation, States, decide};
use ratelimit_core::{Limit, Limits, Refusal, ReservationId, Timestamp, Verdict};

use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, REMOVED, RedisError, Result, WRONG_TYPE};
use crate::mode::Multi;
use crate::native::{Entry, EntryStorage, MultiProgram, Native, as_of};
use crate::store::{Inner, KeepsState, RedisStore, cut, ttl_ms};

mod stored;

use stored::{CommandWords, StoredEntry, command, counted, removal, stored_entries, with};

/// How long expired entries stay stored. A charge that comes no later than this is decided as of the
/// time of its request.
const LATENESS_US: u64 = 1_000_000;

/// How often a state from the future is looked at again, if others charge it meanwhile.
const HEALS: usize = 32;

impl<C: Connection> RedisStore<Multi, C> {
    /// Checks that a transaction can decide all of these limits.
    ///
    /// # Errors
    /// The first limit that it cannot decide, by name, with the remedy.
    pub fn supports<A: MultiProgram>(limits: &Limits<A>) -> Result<()> {
        limits.iter().try_for_each(|limit| native(limit).map(drop))
    }

    /// The key on the server of a limit's entries for a caller's key; `None` if no transaction can
    /// decide the limit.
    #[must_use]
    pub fn key<A: MultiProgram>(&self, limit: &Limit<A>, key: &str) -> Option<String> {
        let native = limit.algorithm().native()?;
        Some(self.inner.keys.of_multi(limit.state_name(), native.storage.name(), key))
    }

    /// Decides a batch whose keys all lie on one server.
    pub(crate) async fn decided<'b, A: MultiProgram>(
        &'b self,
        batch: &'b Batch<'b, A>,
        deadline: Deadline,
    ) -> Result<MultiRequest<'b, A, C>> {
        let mut request = MultiRequest::of(&self.inner, batch, deadline)?;
        if batch.operation() != Op::Reset {
            request.now = request.read().await.map_err(RedisError::of_a_lookup)?;
        }
        request.verdict = decide(batch, request.now, &mut request)?;
        request.charge().await?;
        Ok(request)
    }
}

impl<A: MultiProgram, C: Connection> KeepsState<A> for RedisStore<Multi, C> {
    async fn state_within(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>> {
        let check = Check { limit, key, cost: 0 };
        let batch = Batch::one(&check).op(Op::Peek).now(Now::At(Timestamp::ZERO));
        let mut request = MultiRequest::of(&self.inner, &batch, deadline)?;
        request.read().await?;
        Ok(request.checks.swap_remove(0).state)
    }

    async fn heal_key(
        &self,
        limits: &Limits<A>,
        key: &str,
        dry_run: bool,
    ) -> Result<Vec<(usize, u64)>> {
        let lies_there = |own: String| self.inner.keys.lie_alike(&own, key);
        let position = limits.iter().position(|limit| self.key(limit, "").is_some_and(lies_there));
        let Some(position) = position else { return Ok(Vec::new()) };
        let limit = &limits.as_slice()[position];
        let check = Check { limit, key: "", cost: 0 };
        let batch = Batch::one(&check).op(Op::Peek);
        let mut request = MultiRequest::of(&self.inner, &batch, self.inner.deadline())?;
        key.clone_into(&mut request.checks[0].key);
        let mut longest_us = 0;
        // A charge in flight may bring back the entry that it was made in.
        for _ in 0..HEALS {
            let now = request.read().await?;
            let check = &request.checks[0];
            let (ahead_us, write) =
                cut(limit.algorithm(), check.state.as_ref(), now).unwrap_or((0, Write::Keep));
            longest_us = ahead_us.max(longest_us);
            if ahead_us == 0 || dry_run {
                let healed = (longest_us > 0).then_some((position, longest_us));
                return Ok(Vec::from_iter(healed));
            }
            let full = match write {
                Write::Put { state, expires } => {
                    limit.algorithm().newest(&state).zip(Some(expires))
                }
                Write::Keep | Write::Remove => None,
            };
            let charging = full.map(|(entry, expires)| check.charging(&entry, expires, now));
            let removing = [command(["DEL", key])].into_iter();
            let commands: Vec<_> = removing.chain(charging.unwrap_or_default()).collect();
            request.send(&commands).await?;
        }
        Err(RedisError::Contended { attempts: HEALS })
    }
}

/// One check of a batch.
struct MultiCheck<'b, A: MultiProgram> {
    check: &'b Check<'b, A>,
    key: String,
    native: Native,
    time: Now,
    found: Vec<StoredEntry>,
    /// The state that is these entries.
    state: Option<A::State>,
    /// What the decision requires.
    write: Write<A::State>,
}

impl<A: MultiProgram> MultiCheck<'_, A> {
    fn reading(&self) -> CommandWords {
        match self.native.storage {
            EntryStorage::Counters => command(["HGETALL", &self.key]),
            EntryStorage::List => command(["LRANGE", &self.key, "0", "-1"]),
            EntryStorage::SortedSet => command(["ZRANGE", &self.key, "0", "-1"]),
        }
    }

    /// What leads from the state that was read to this one; `None` if nothing has to be added.
    fn added(&self, after: &A::State) -> Option<Entry> {
        let algorithm = self.check.limit.algorithm();
        let mut entry = algorithm.newest(after)?;
        let before = self.state.as_ref().and_then(|before| algorithm.newest(before));
        // In a list, each request is an entry of its own.
        let before = before.filter(|before| {
            self.native.storage != EntryStorage::List && before.since == entry.since
        });
        let there = before.map_or(0, |before| before.charged.cost);
        entry.charged.cost = entry.charged.cost.checked_sub(there).filter(|cost| *cost > 0)?;
        Some(entry)
    }

    /// The commands that add an entry to a state which stops mattering at `expires`.
    fn charging(&self, entry: &Entry, expires: Timestamp, now: Timestamp) -> Vec<CommandWords> {
        let late_us = if self.time == Now::Store { LATENESS_US } else { 0 };
        let at = now.max(entry.since).as_us().saturating_sub(late_us);
        let oldest = self.native.oldest(&counted(&self.found), Timestamp::saturating_from_us(at));
        let past = self.found.iter().filter(|stored| stored.entry.since < oldest);
        let mut commands: Vec<_> =
            past.map(|stored| removal(self.native.storage, &self.key, &stored.text)).collect();
        let since = entry.since.as_us().to_string();
        let element = || StoredEntry::text_of(entry, ReservationId::random());
        match self.native.storage {
            EntryStorage::Counters => {
                let cost = entry.charged.cost.to_string();
                commands.push(command(["HINCRBY", &self.key, &since, &cost]));
            }
            EntryStorage::List => commands.push(with(command(["RPUSH", &self.key]), element())),
            EntryStorage::SortedSet => {
                commands.push(with(command(["ZADD", &self.key, &since]), element()));
                // As many newer charges leave no room for an older one.
                let older = format!("-{}", self.check.limit.algorithm().capacity() + 1);
                commands.push(command(["ZREMRANGEBYRANK", &self.key, "0", &older]));
            }
        }
        let ttl_ms = (ttl_ms(expires, now, self.time) + late_us / 1_000).to_string();
        // NX for a key without a time to live, GT for one with a shorter one.
        commands.extend(["NX", "GT"].map(|only| command(["PEXPIRE", &self.key, &ttl_ms, only])));
        commands
    }
}

/// A batch on its way, whose keys all lie on one server.
pub(crate) struct MultiRequest<'b, A: MultiProgram, C> {
    inner: &'b Inner<C>,
    batch: &'b Batch<'b, A>,
    checks: Vec<MultiCheck<'b, A>>,
    deadline: Deadline,
    now: Timestamp,
    pub(crate) verdict: Verdict,
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
    fn of(inner: &'b Inner<C>, batch: &'b Batch<'b, A>, deadline: Deadline) -> Result<Self> {
        let before = |check: &'b Check<'b, A>| {
            let native = native(check.limit)?;
            let storage = native.storage.name();
            let key = inner.keys.of_multi(check.limit.state_name(), storage, check.key);
            let (time, found, state, write) = (batch.time(), Vec::new(), None, Write::Keep);
            Ok(MultiCheck { check, key, native, time, found, state, write })
        };
        let checks = batch.checks().iter().map(before).collect::<Result<Vec<_>>>()?;
        let (now, verdict) = (Timestamp::ZERO, Verdict::several(Vec::new()));
        Ok(Self { inner, batch, checks, deadline, now, verdict })
    }

    /// The verdict if another slot denies the whole batch.
    pub(crate) fn denied_elsewhere(mut self) -> Result<Verdict> {
        Ok(decide(&self.batch.denied_elsewhere(), self.now, &mut self)?)
    }

    /// Reads the states, and the time.
    async fn read(&mut self) -> Result<Timestamp> {
        let mut commands: Vec<_> = self.checks.iter().map(MultiCheck::reading).collect();
        if self.batch.time() == Now::Store {
            commands.push(command(["TIME"]));
        }
        let replies = match self.send(&commands).await {
            Err(error) => return Err(self.wrong_type(error).await),
            Ok(replies) => replies,
        };
        for place in 0..self.checks.len() {
            let found = self.found(place, replies.get(place)).await?;
            let check = &mut self.checks[place];
            check.state = check.check.limit.algorithm().state(&counted(&found));
            check.found = found;
        }
        self.time(&replies)
    }

    /// The time of the transaction, from its last command, unless a time was given.
    fn time(&self, replies: &[Reply]) -> Result<Timestamp> {
        if let Now::At(now) = self.batch.time() {
            return Ok(now);
        }
        let reply = replies.last().unwrap_or(&Reply::Nil);
        match self.inner.time(reply)? {
            Timestamp::MAX => Err(Refusal::EndOfTime { now_us: Timestamp::MAX.as_us() }.into()),
            now => Ok(now),
        }
    }

    /// Names the key that has another type; otherwise returns the error unchanged.
    async fn wrong_type(&self, error: RedisError) -> RedisError {
        if !error.is_wrong_type() {
            return error;
        }
        for pending in &self.checks {
            let reading = self.send(&[pending.reading()]).await;
            if reading.is_err_and(|error| error.is_wrong_type()) {
                return RedisError::corrupt(pending.check.limit, &pending.key, WRONG_TYPE);
            }
        }
        error
    }

    /// Parses the entries of a check in a reply. A value that no limit wrote is removed unless the batch
    /// only reads, so the limit recovers and the error is reported once.
    async fn found(&self, place: usize, reply: Option<&Reply>) -> Result<Vec<StoredEntry>> {
        let check = &self.checks[place];
        let Some(reply @ Reply::Array(_)) = reply else {
            return Err(self.inner.peer.unexpected(reply.unwrap_or(&Reply::Nil)));
        };
        if let Some(found) = stored_entries(check.native.storage, reply) {
            return Ok(found);
        }
        let mut detail = LEFT;
        if self.batch.operation() != Op::Peek {
            self.send(&[command(["DEL", &check.key])]).await?;
            detail = REMOVED;
        }
        Err(RedisError::corrupt(check.check.limit, &check.key, detail))
    }

    /// Charges what the decision requires, and decides once more on the states just before.
    async fn charge(&mut self) -> Result<()> {
        let mut commands = Vec::new();
        // The places of the checks that admit so far, from when their charges count, and the places of the
        // entries before these among the replies.
        let mut again = Vec::with_capacity(self.checks.len());
        let checks = self.checks.iter().zip(self.verdict.decisions()).enumerate();
        for (place, (check, decision)) in checks {
            match &check.write {
                Write::Keep => {}
                Write::Remove => commands.push(command(["DEL", &check.key])),
                Write::Put { state, expires } => {
                    let Some(entry) = check.added(state) else { continue };
                    if decision.allowed {
                        again.push((place, entry.since, commands.len()));
                        commands.push(check.reading());
                    }
                    commands.extend(check.charging(&entry, *expires, self.now));
                }
            }
        }
        if commands.is_empty() {
            return Ok(());
        }
        if self.batch.time() == Now::Store {
            commands.push(command(["TIME"]));
        }
        let replies = self.send(&commands).await?;
        if again.is_empty() {
            return Ok(());
        }
        let charged = self.time(&replies).map_err(RedisError::in_part)?;
        if charged.saturating_us_since(self.now) > LATENESS_US {
            let address = Arc::clone(self.inner.peer.address());
            let deadline = Duration::from_micros(LATENESS_US);
            return Err(RedisError::TimedOut { address, deadline });
        }
        for (place, since, reading) in again {
            let found = self.found(place, replies.get(reading)).await;
            let before = as_of(since, counted(&found.map_err(RedisError::in_part)?));
            let check = &mut self.checks[place];
            check.state = check.check.limit.algorithm().state(&before);
        }
        self.verdict = decide(self.batch, self.now, self)?;
        Ok(())
    }

    async fn send(&self, commands: &[CommandWords]) -> Result<Vec<Reply>> {
        let commands: Vec<Vec<Argument<'_>>> =
            commands.iter().map(|c| c.iter().map(|word| Argument::Bytes(word)).collect()).collect();
        // All keys lie in the slot of the first.
        self.inner.connection.transaction(&self.checks[0].key, &commands, self.deadline).await
    }
}

fn native<A: MultiProgram>(limit: &Limit<A>) -> Result<Native> {
    let native = limit.algorithm().native();
    native.ok_or_else(|| RedisError::NotNative { limit: limit.name().into() })
}

/// Refuses what a transaction cannot decide: a limit, an operation, or an id.
pub(crate) fn refuse_unsupported<A: MultiProgram>(batch: &Batch<'_, A>) -> Result<()> {
    for check in batch.checks() {
        native(check.limit)?;
        let limit = || check.limit.name().into();
        if batch.reservation_id().is_some() {
            return Err(Refusal::CannotReserve { limit: limit() }.into());
        }
        if !matches!(batch.operation(), Op::Acquire | Op::Peek | Op::Reset) {
            return Err(RedisError::NoOperation { limit: limit(), op: batch.operation() });
        }
    }
    Ok(())
}
