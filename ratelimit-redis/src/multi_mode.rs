//! The mode of native commands: one transaction (MULTI/EXEC) per batch, without scripting.
//!
//! A transaction cannot branch, so it charges whatever it reads.
//! [`Attempts`](ratelimit_core::Attempts) mean exactly that, and only they run here.
//!
//! 1. Read the entries of the batch and the server's time, which becomes the request's time. A peek, and
//!    an attempt that changes nothing, end here.
//! 2. Step in Rust, as the memory store does. In one transaction, read everything again, charge the
//!    result by native commands that add to whatever is stored by now, and read the time.
//! 3. Step again on the entries just before the charge, for the decision. If other clients charged
//!    first, take the excess back.
//!
//! A charge counts from the request's time and is decided as of that time, however late it arrives.
//! Expired entries stay for one more second, so all entries that counted at that time are still there.
//! The transaction's own time shows whether the charge arrived within that second. If not, or if more is
//! due than was charged, the request starts again at the transaction's time, a bounded number of times.
//!
//! A charge of another client that counts from a later time but arrived earlier counts as simultaneous
//! in a sliding window; otherwise it belongs to a later window. So ordering the charges by their times
//! explains every decision.
//!
//! Between a charge and its correction other clients see too much charged, never too little. A reset in between forgets the
//! charge, and the correction then lowers what is charged after it: the window admits so much more.
//!
//! A sliding log takes nothing back, because another client may already have made room for the charge. Nor does it take back
//! the rest of an entry that another attempt or a reset has removed meanwhile: yet another attempt may have made room for that
//! rest. So more counts than was charged, for a window at most. An amount taken back from a counter is stored beside its
//! count: see `stored.rs`.

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Limit, Limits, Refusal, Timestamp, Verdict};

use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, REMOVED, RedisError, Result, WRONG_TYPE};
use crate::mode::Multi;
use crate::native::{MultiProgram, Native};
use crate::rounds::Rounds;
use crate::store::{Inner, KeepsState, RedisStore};

mod pending;
mod stored;

use pending::{CheckOutcome, PendingCheck};
use stored::{CommandWords, StoredEntries, command};

/// How many times a charge is corrected before the batch fails as contended.
const ATTEMPTS: usize = 32;

/// Joins the outcomes. In a denied batch, each check that would have admitted reports how long to wait.
pub(crate) fn verdict(outcomes: Vec<CheckOutcome>) -> Verdict {
    let all_allowed = outcomes.iter().all(|outcome| outcome.decision.allowed);
    let decisions = outcomes.into_iter().map(|CheckOutcome { mut decision, denied_wait_us }| {
        if !all_allowed {
            decision.retry_after_us = denied_wait_us;
        }
        decision
    });
    Verdict::several(decisions.collect())
}

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

    /// Runs a batch whose keys all lie on one server. Returns the outcome of each check.
    pub(crate) async fn outcomes<A: MultiProgram>(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Vec<CheckOutcome>> {
        let mut request = MultiRequest::of(&self.inner, batch, deadline)?;
        if batch.operation() == Op::Reset {
            let delete = |check: &PendingCheck<'_, A>| command(["DEL", &check.key]);
            let commands: Vec<_> = request.checks.iter().map(delete).collect();
            request.send(&commands, deadline).await?;
            return Ok(request.checks.iter().map(PendingCheck::full).collect());
        }
        let mut now = request.read().await.map_err(RedisError::of_a_lookup)?;
        if batch.operation() == Op::Peek {
            return Ok(request.checks.iter().map(|check| check.peeked(now)).collect());
        }
        request.deadline = deadline.to_charge();
        let mut rounds = Rounds::new(ATTEMPTS, request.deadline, &self.inner.peer);
        loop {
            let charged = request.checks.iter().any(PendingCheck::is_charged);
            let exec = request.charge(now).await.map_err(|error| error.after(charged))?;
            let left = request.checks.iter_mut().flat_map(|check| check.judge(now, exec));
            let left: Vec<_> = left.collect();
            if !left.is_empty() {
                // The decision stands. If this fails, more stays charged than the limit has room for.
                let _ = request.send(&left, deadline.to_give_back()).await;
            }
            let outcomes: Option<Vec<_>> =
                request.checks.iter().map(|check| check.outcome).collect();
            if let Some(outcomes) = outcomes {
                return Ok(outcomes);
            }
            if !rounds.another() {
                break;
            }
            now = exec;
        }
        let undo: Vec<_> = request.checks.iter_mut().flat_map(PendingCheck::undo).collect();
        if !undo.is_empty() {
            let undone = request.send(&undo, deadline.to_give_back()).await;
            undone.map_err(RedisError::in_part)?;
        }
        let stays = request.checks.iter().any(PendingCheck::stays_charged);
        Err(rounds.contended().after(stays))
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
        Ok(limit.algorithm().state(&request.checks[0].found.entries()))
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
        for _ in 0..ATTEMPTS {
            let now = request.read().await?;
            let (ahead_us, commands) = request.checks[0].healing(now);
            longest_us = ahead_us.max(longest_us);
            if ahead_us == 0 || dry_run {
                let healed = (longest_us > 0).then_some((position, longest_us));
                return Ok(Vec::from_iter(healed));
            }
            request.send(&commands, request.deadline).await?;
        }
        Err(RedisError::Contended { attempts: ATTEMPTS })
    }
}

/// A batch on its way, whose keys all lie on one server.
struct MultiRequest<'b, A, C> {
    inner: &'b Inner<C>,
    batch: &'b Batch<'b, A>,
    checks: Vec<PendingCheck<'b, A>>,
    deadline: Deadline,
}

impl<'b, A: MultiProgram, C: Connection> MultiRequest<'b, A, C> {
    /// A batch before anything was read.
    fn of(inner: &'b Inner<C>, batch: &'b Batch<'b, A>, deadline: Deadline) -> Result<Self> {
        let pending = |check: &'b Check<'b, A>| {
            let native = native(check.limit)?;
            let key =
                inner.keys.of_multi(check.limit.state_name(), native.storage.name(), check.key);
            Ok(PendingCheck::new(check, key, native))
        };
        let checks = batch.checks().iter().map(pending).collect::<Result<Vec<_>>>()?;
        Ok(Self { inner, batch, checks, deadline })
    }

    /// Reads the entries of each check, and the time.
    async fn read(&mut self) -> Result<Timestamp> {
        let mut commands: Vec<_> = self.checks.iter().map(PendingCheck::reading).collect();
        if self.batch.time() == Now::Store {
            commands.push(command(["TIME"]));
        }
        let replies = match self.send(&commands, self.deadline).await {
            Err(error) => return Err(self.wrong_type(error).await),
            Ok(replies) => replies,
        };
        for (place, reply) in replies.iter().enumerate().take(self.checks.len()) {
            self.checks[place].found = self.found(place, reply).await?;
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
            let reading = self.send(&[pending.reading()], self.deadline).await;
            if reading.is_err_and(|error| error.is_wrong_type()) {
                return RedisError::corrupt(pending.check.limit, &pending.key, WRONG_TYPE);
            }
        }
        error
    }

    /// Parses the entries of a check in a reply. A value that no limit wrote is removed unless the batch only reads, so
    /// the limit recovers and the error is reported once.
    async fn found(&self, place: usize, reply: &Reply) -> Result<StoredEntries> {
        let pending = &self.checks[place];
        if !matches!(reply, Reply::Array(_)) {
            return Err(self.inner.peer.unexpected(reply));
        }
        if let Some(found) = StoredEntries::of(pending.storage, reply) {
            return Ok(found);
        }
        let mut detail = LEFT;
        if self.batch.operation() != Op::Peek {
            self.send(&[command(["DEL", &pending.key])], self.deadline).await?;
            detail = REMOVED;
        }
        Err(RedisError::corrupt(pending.check.limit, &pending.key, detail))
    }

    /// Reads the entries and charges what is due. Returns the transaction's time.
    async fn charge(&mut self, now: Timestamp) -> Result<Timestamp> {
        let mut all = Vec::new();
        // The places of the checks that are charged, and the indexes among the replies of their entries.
        let mut readings = Vec::with_capacity(self.checks.len());
        for (place, pending) in self.checks.iter_mut().enumerate() {
            let (commands, reading) = pending.commands(self.batch, now);
            readings.extend(reading.map(|reading| (place, all.len() + reading)));
            all.extend(commands);
        }
        if all.is_empty() {
            return Ok(now);
        }
        if self.batch.time() == Now::Store {
            all.push(command(["TIME"]));
        }
        let replies = self.send(&all, self.deadline).await?;
        for (place, reading) in readings {
            let reply = replies.get(reading).unwrap_or(&Reply::Nil);
            // This check and the others are charged by now.
            let found = self.found(place, reply).await;
            self.checks[place].found = found.map_err(RedisError::in_part)?;
        }
        self.time(&replies).map_err(RedisError::in_part)
    }

    async fn send(&self, commands: &[CommandWords], deadline: Deadline) -> Result<Vec<Reply>> {
        let commands: Vec<Vec<Argument<'_>>> =
            commands.iter().map(|c| c.iter().map(|word| Argument::Bytes(word)).collect()).collect();
        // All keys lie in the slot of the first.
        self.inner.connection.transaction(&self.checks[0].key, &commands, deadline).await
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
