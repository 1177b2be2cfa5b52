//! The mode of native commands: one transaction (MULTI/EXEC) per batch, without scripting.
//!
//! A transaction cannot branch, so it charges first and reads afterwards.
//! [`Attempts`](ratelimit_core::Attempts) mean exactly that, and only they run here.
//!
//! 1. Read the entries of the batch and the server's time, which becomes the request's time. A peek, and
//!    an attempt that changes nothing, end here.
//! 2. Step in Rust, as the memory store does. Charge the result by native commands that add to whatever
//!    is stored by now, and read everything again, with the time, in one transaction.
//! 3. Subtract the own charge: that yields the state just before it. Step again on that state for the
//!    decision. If other clients charged first, take the excess back.
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
//! Between a charge and its correction other clients see too much charged, never too little.
//!
//! A sliding log takes nothing back, because another client may already have made room for the charge. An amount taken back
//! from a counter is stored beside its count: see `stored.rs`.

use ratelimit_core::algorithm::{KeepsEntries, WindowEntry};
use ratelimit_core::store::{Batch, Check, EntryStore, Now, Op};
use ratelimit_core::{Limit, Limits, Refusal, Timestamp, Verdict};

use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, REMOVED, RedisError, Result, WRONG_TYPE};
use crate::mode::Multi;
use crate::native::{MultiProgram, Native};
use crate::rounds::Rounds;
use crate::store::RedisStore;

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
        Some(self.native_key(limit, limit.algorithm().native()?, key))
    }

    /// The stored state of a limit for a key.
    ///
    /// # Errors
    /// The server does not answer, no transaction can decide the limit, or no limit wrote the value.
    pub async fn state<A: MultiProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<A::State>> {
        self.state_within(limit, key, self.inner.deadline()).await
    }

    async fn state_within<A: MultiProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>> {
        let check = Check { limit, key, cost: 0 };
        let mut pending = [self.pending_check(&check)?];
        self.read(Now::At(Timestamp::ZERO), &mut pending, false, deadline).await?;
        Ok(limit.algorithm().state(&pending[0].found.entries()))
    }

    /// Cuts the state of a limit under a key if it is from the future, or only looks: by how much longer the state
    /// would hold its key than a full limit; 0 if it is not.
    pub(crate) async fn heal_at<A: MultiProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
        dry_run: bool,
    ) -> Result<u64> {
        let deadline = self.inner.deadline();
        let check = Check { limit, key: "", cost: 0 };
        let mut pending = [PendingCheck::new(&check, key.to_owned(), native(limit)?)];
        let mut longest_us = 0;
        // A charge in flight may bring back the entry that it was made in.
        for _ in 0..ATTEMPTS {
            let now = self.read(Now::Store, &mut pending, false, deadline).await?;
            let (ahead_us, commands) = pending[0].healing(now);
            longest_us = ahead_us.max(longest_us);
            if ahead_us == 0 || dry_run {
                return Ok(longest_us);
            }
            self.send_all(key, &commands, deadline).await?;
        }
        Err(RedisError::Contended { attempts: ATTEMPTS })
    }

    /// Runs a batch whose keys all lie on one server.
    pub(crate) async fn apply_in_slot<A: MultiProgram>(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Verdict> {
        self.outcomes(batch, deadline).await.map(verdict)
    }

    /// The outcome of each check of a batch.
    pub(crate) async fn outcomes<A: MultiProgram>(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Vec<CheckOutcome>> {
        let pending = batch.checks().iter().map(|check| self.pending_check(check));
        let mut pending = pending.collect::<Result<Vec<_>, _>>()?;
        if batch.operation() == Op::Reset {
            let delete = |pending: &PendingCheck<'_, A>| command(["DEL", &pending.key]);
            let commands: Vec<_> = pending.iter().map(delete).collect();
            self.send_all(&pending[0].key, &commands, deadline).await?;
            return Ok(pending.iter().map(PendingCheck::full).collect());
        }
        let writes = batch.operation() != Op::Peek;
        let read = self.read(batch.time(), &mut pending, writes, deadline).await;
        let mut now = read.map_err(RedisError::of_a_lookup)?;
        if !writes {
            return Ok(pending.iter().map(|pending| pending.peeked(now)).collect());
        }
        let charging = deadline.to_charge();
        let mut rounds = Rounds::new(ATTEMPTS, charging, self.inner.connection.address());
        loop {
            let charged = pending.iter().any(PendingCheck::is_charged);
            let exec = self.charge(&mut pending, batch, now, charging).await;
            let exec = exec.map_err(|error| error.after(charged))?;
            let left: Vec<_> =
                pending.iter_mut().flat_map(|pending| pending.judge(now, exec)).collect();
            if !left.is_empty() {
                // The decision stands. If this fails, more stays charged than the limit has room for.
                let _ = self.send_all(&pending[0].key, &left, deadline.to_give_back()).await;
            }
            let outcomes: Option<Vec<_>> = pending.iter().map(|pending| pending.outcome).collect();
            if let Some(outcomes) = outcomes {
                return Ok(outcomes);
            }
            if !rounds.another() {
                break;
            }
            now = exec;
        }
        let undo: Vec<_> = pending.iter_mut().flat_map(PendingCheck::undo).collect();
        if !undo.is_empty() {
            let undone = self.send_all(&pending[0].key, &undo, deadline.to_give_back()).await;
            undone.map_err(RedisError::in_part)?;
        }
        let stays = pending.iter().any(PendingCheck::stays_charged);
        Err(rounds.contended().after(stays))
    }

    /// A check before anything was read.
    fn pending_check<'b, A: MultiProgram>(
        &self,
        check: &'b Check<'b, A>,
    ) -> Result<PendingCheck<'b, A>> {
        let native = native(check.limit)?;
        Ok(PendingCheck::new(check, self.native_key(check.limit, native, check.key), native))
    }

    fn native_key<A: MultiProgram>(&self, limit: &Limit<A>, native: Native, key: &str) -> String {
        self.inner.keys.of_multi(limit.name(), native.name, key)
    }

    /// Reads the entries of each check, and the time. If the batch `writes`, values that no limit wrote
    /// are removed.
    async fn read<A: MultiProgram>(
        &self,
        time: Now,
        pending: &mut [PendingCheck<'_, A>],
        writes: bool,
        deadline: Deadline,
    ) -> Result<Timestamp> {
        let mut commands: Vec<_> = pending.iter().map(PendingCheck::reading).collect();
        if time == Now::Store {
            commands.push(command(["TIME"]));
        }
        let replies = self.send_all(&pending[0].key, &commands, deadline).await;
        let replies = match replies {
            Err(error) => return Err(self.wrong_type(pending, error, deadline).await),
            Ok(replies) => replies,
        };
        for (pending, reply) in pending.iter_mut().zip(&replies) {
            pending.found = self.found(pending, reply, writes, deadline).await?;
        }
        self.time(time, &replies)
    }

    /// The time of the transaction, from its last command, unless a time was given.
    fn time(&self, time: Now, replies: &[Reply]) -> Result<Timestamp> {
        match (time, replies.last()) {
            (Now::At(now), _) => Ok(now),
            (Now::Store, Some(reply)) => {
                let now = reply.as_time().ok_or_else(|| self.inner.unexpected(reply))?;
                if now == Timestamp::MAX {
                    return Err(Refusal::EndOfTime { now_us: now.as_us() }.into());
                }
                Ok(now)
            }
            (Now::Store, None) => Err(self.inner.unexpected(&Reply::Nil)),
        }
    }

    /// Names the key that has another type; otherwise returns the error unchanged.
    async fn wrong_type<A: MultiProgram>(
        &self,
        pending: &[PendingCheck<'_, A>],
        error: RedisError,
        deadline: Deadline,
    ) -> RedisError {
        if !error.is_wrong_type() {
            return error;
        }
        for pending in pending {
            let reading = self.send_all(&pending.key, &[pending.reading()], deadline).await;
            if reading.is_err_and(|error| error.is_wrong_type()) {
                return RedisError::corrupt(pending.check.limit, &pending.key, WRONG_TYPE);
            }
        }
        error
    }

    /// Parses the entries in a reply. A value that no limit wrote is removed if the batch `writes`, so
    /// the limit recovers and the error is reported once.
    async fn found<A: MultiProgram>(
        &self,
        pending: &PendingCheck<'_, A>,
        reply: &Reply,
        writes: bool,
        deadline: Deadline,
    ) -> Result<StoredEntries> {
        let Reply::Array(items) = reply else { return Err(self.inner.unexpected(reply)) };
        if let Some(found) = StoredEntries::of(pending.storage, items) {
            return Ok(found);
        }
        if !writes {
            return Err(RedisError::corrupt(pending.check.limit, &pending.key, LEFT));
        }
        self.send_all(&pending.key, &[command(["DEL", &pending.key])], deadline).await?;
        Err(RedisError::corrupt(pending.check.limit, &pending.key, REMOVED))
    }

    /// Charges what is due and reads the entries afterwards. Returns the transaction's time.
    async fn charge<A: MultiProgram>(
        &self,
        pending: &mut [PendingCheck<'_, A>],
        batch: &Batch<'_, A>,
        now: Timestamp,
        deadline: Deadline,
    ) -> Result<Timestamp> {
        let mut all = Vec::new();
        // The index among the replies of each check's last command, which reads its entries.
        let mut readings = Vec::with_capacity(pending.len());
        for pending in &mut *pending {
            let decided = pending.outcome.is_some();
            all.extend(pending.commands(batch, now));
            readings.push((!decided && pending.is_charged()).then(|| all.len() - 1));
        }
        if all.is_empty() {
            return Ok(now);
        }
        if batch.time() == Now::Store {
            all.push(command(["TIME"]));
        }
        let replies = self.send_all(&pending[0].key, &all, deadline).await?;
        for (pending, reading) in pending.iter_mut().zip(readings) {
            if let Some(reading) = reading {
                let reply = replies.get(reading).unwrap_or(&Reply::Nil);
                // This check and the others are charged by now.
                let found = self.found(pending, reply, true, deadline).await;
                pending.found = found.map_err(RedisError::in_part)?;
            }
        }
        self.time(batch.time(), &replies).map_err(RedisError::in_part)
    }

    async fn send_all(
        &self,
        key: &str,
        commands: &[CommandWords],
        deadline: Deadline,
    ) -> Result<Vec<Reply>> {
        let commands: Vec<Vec<Argument<'_>>> =
            commands.iter().map(|c| c.iter().map(|word| Argument::Bytes(word)).collect()).collect();
        self.inner.connection.transaction(key, &commands, deadline).await
    }
}

impl<A: MultiProgram + KeepsEntries, C: Connection> EntryStore<A> for RedisStore<Multi, C> {
    async fn entries(&self, limit: &Limit<A>, key: &str, now: Now) -> Result<Vec<WindowEntry>> {
        let deadline = self.inner.deadline();
        let state = self.state_within(limit, key, deadline).await?;
        let key = self.key(limit, key).unwrap_or_default();
        self.inner.entries(limit, &key, state, now, deadline).await
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
