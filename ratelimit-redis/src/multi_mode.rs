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
//! Between a charge and its correction others see too much charged, never too little.

use ratelimit_core::{
    Batch, Check, EntryStore, KeepsEntries, Limit, Limits, Now, Op, Refusal, Store, Timestamp,
    Verdict, WindowEntry,
};

use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{LEFT, RedisError, WRONG_TYPE};
use crate::native::{MultiProgram, Native};
use crate::slots::{self, SingleSlot, each};
use crate::store::{Multi, RedisStore, Rounds};

mod asked;
mod kept;

use asked::{Asked, Outcome};
use kept::{Command, Found, words};

/// How many times a charge is corrected before the batch fails as contended.
const ATTEMPTS: usize = 32;

impl<A: MultiProgram, C: Connection> Store<A> for RedisStore<Multi, C> {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        batch.validate()?;
        if batch.checks().is_empty() {
            return Ok(Verdict::several(Vec::new()));
        }
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
        if batch.operation() != Op::Peek && self.inner.connection.may_repeat() {
            return Err(RedisError::MayRepeat);
        }
        let deadline = self.inner.deadline();
        let Some(parts) = self.inner.parts(batch)? else {
            return self.apply_in_slot(batch, deadline).await;
        };
        if batch.operation() == Op::Reset {
            return Box::pin(each(self, batch, &parts, deadline)).await;
        }
        // Every attempt is charged whatever the other checks decide, so each slot can do its part.
        let of_part =
            async |part: &slots::InSlot<'_, A>| self.outcomes(&part.batch(batch)?, deadline).await;
        let doing = parts.iter().map(of_part);
        let outcomes = Box::pin(async {
            match batch.operation() {
                Op::Peek => slots::asked(doing).await,
                _ => slots::done(doing).await,
            }
        });
        let mut all: Vec<(usize, Outcome)> = Vec::with_capacity(batch.checks().len());
        for (part, outcomes) in parts.iter().zip(outcomes.await?) {
            all.extend(part.positions().iter().copied().zip(outcomes));
        }
        all.sort_unstable_by_key(|(position, _)| *position);
        Ok(verdict(all.into_iter().map(|(_, outcome)| outcome).collect()))
    }
}

impl<A: MultiProgram, C: Connection> SingleSlot<A> for RedisStore<Multi, C> {
    async fn apply_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Verdict, RedisError> {
        match batch.operation() {
            Op::Reset => self.reset(batch, deadline).await,
            _ => self.outcomes(batch, deadline).await.map(verdict),
        }
    }

    /// This mode has no reservations.
    async fn try_in_slot(&self, _: &Batch<'_, A>, _: Deadline) -> Result<(), RedisError> {
        Ok(())
    }
}

/// Joins the outcomes. In a denied batch, each check that would have admitted reports how long to wait.
fn verdict(outcomes: Vec<Outcome>) -> Verdict {
    let all_allowed = outcomes.iter().all(|outcome| outcome.decision.allowed);
    let decisions = outcomes.into_iter().map(|Outcome { mut decision, denied_wait_us }| {
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
    pub fn supports<A: MultiProgram>(limits: &Limits<A>) -> Result<(), RedisError> {
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
    ) -> Result<Option<A::State>, RedisError> {
        self.state_within(limit, key, self.inner.deadline()).await
    }

    async fn state_within<A: MultiProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>, RedisError> {
        let check = Check { limit, key, cost: 0 };
        let native = native(limit)?;
        let mut asked = [Asked::new(&check, self.native_key(limit, native, key), native)];
        self.read(Now::At(Timestamp::ZERO), &mut asked, false, deadline).await?;
        Ok(limit.algorithm().state(&asked[0].found.entries()))
    }

    /// The outcome of each check of a batch.
    async fn outcomes<A: MultiProgram>(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Vec<Outcome>, RedisError> {
        let mut asked = self.asked(batch)?;
        let writes = batch.operation() != Op::Peek;
        let read = self.read(batch.time(), &mut asked, writes, deadline).await;
        let mut now = read.map_err(RedisError::of_a_lookup)?;
        if !writes {
            return Ok(asked.iter().map(|asked| asked.peeked(now)).collect());
        }
        let charging = deadline.to_charge();
        let mut rounds = Rounds::new(ATTEMPTS, charging);
        loop {
            let charged = asked.iter().any(Asked::is_charged);
            let exec = self.charge(&mut asked, batch, now, charging).await;
            let exec = exec.map_err(|error| error.after(charged))?;
            let left: Vec<_> = asked.iter_mut().flat_map(|asked| asked.judge(now, exec)).collect();
            if !left.is_empty() {
                // The decision stands. If this fails, more stays charged than the limit has room for.
                let _ = self.send_all(&asked[0].key, &left, deadline.to_give_back()).await;
            }
            let outcomes: Option<Vec<_>> = asked.iter().map(|asked| asked.outcome).collect();
            if let Some(outcomes) = outcomes {
                return Ok(outcomes);
            }
            if !rounds.another() {
                break;
            }
            now = exec;
        }
        let undo: Vec<_> = asked.iter_mut().flat_map(Asked::undo).collect();
        if !undo.is_empty() {
            let undone = self.send_all(&asked[0].key, &undo, deadline.to_give_back()).await;
            undone.map_err(RedisError::in_part)?;
        }
        let stays = asked.iter().any(Asked::stays_charged);
        Err(rounds.contended().after(stays))
    }

    /// The checks of a batch, before anything was read.
    fn asked<'b, A: MultiProgram>(
        &self,
        batch: &'b Batch<'_, A>,
    ) -> Result<Vec<Asked<'b, A>>, RedisError> {
        let asked = batch.checks().iter().map(|check| {
            let native = native(check.limit)?;
            Ok(Asked::new(check, self.native_key(check.limit, native, check.key), native))
        });
        asked.collect()
    }

    fn native_key<A: MultiProgram>(&self, limit: &Limit<A>, native: Native, key: &str) -> String {
        self.inner.keys.of_multi(limit.name(), native.name, key)
    }

    async fn reset<A: MultiProgram>(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> Result<Verdict, RedisError> {
        let asked = self.asked(batch)?;
        let commands: Vec<_> = asked.iter().map(|asked| words(["DEL", &asked.key])).collect();
        self.send_all(&asked[0].key, &commands, deadline).await?;
        let full = |asked: &Asked<'_, A>| {
            let step = asked.check.limit.algorithm().step(None, Timestamp::ZERO, 0);
            step.costing(asked.check.cost).decision
        };
        Ok(Verdict::several(asked.iter().map(full).collect()))
    }

    /// Reads the entries of each check, and the time. If the batch `writes`, values that no limit wrote
    /// are removed.
    async fn read<A: MultiProgram>(
        &self,
        time: Now,
        asked: &mut [Asked<'_, A>],
        writes: bool,
        deadline: Deadline,
    ) -> Result<Timestamp, RedisError> {
        let mut commands: Vec<_> = asked.iter().map(Asked::reading).collect();
        if time == Now::Store {
            commands.push(words(["TIME"]));
        }
        let replies = self.send_all(&asked[0].key, &commands, deadline).await;
        let replies = match replies {
            Err(error) => return Err(self.wrong_type(asked, error, deadline).await),
            Ok(replies) => replies,
        };
        for (asked, reply) in asked.iter_mut().zip(&replies) {
            asked.found = self.found(asked, reply, writes, deadline).await?;
        }
        self.time(time, &replies)
    }

    /// The time of the transaction, from its last command, unless a time was given.
    fn time(&self, time: Now, replies: &[Reply]) -> Result<Timestamp, RedisError> {
        match (time, replies.last()) {
            (Now::At(now), _) => Ok(now),
            (Now::Store, Some(reply)) => {
                reply.as_time().ok_or_else(|| self.inner.unexpected(reply))
            }
            (Now::Store, None) => Err(self.inner.unexpected(&Reply::Nil)),
        }
    }

    /// Names the key that has another type; otherwise returns the error unchanged.
    async fn wrong_type<A: MultiProgram>(
        &self,
        asked: &[Asked<'_, A>],
        error: RedisError,
        deadline: Deadline,
    ) -> RedisError {
        if !matches!(&error, RedisError::Server { code, .. } if code == "WRONGTYPE") {
            return error;
        }
        for asked in asked {
            let reading = self.send_all(&asked.key, &[asked.reading()], deadline).await;
            if matches!(&reading, Err(RedisError::Server { code, .. }) if code == "WRONGTYPE") {
                return RedisError::corrupt(asked.check.limit, &asked.key, WRONG_TYPE);
            }
        }
        error
    }

    /// Parses the entries in a reply. A value that no limit wrote is removed if the batch `writes`, so
    /// the limit recovers and the error is reported once.
    async fn found<A: MultiProgram>(
        &self,
        asked: &Asked<'_, A>,
        reply: &Reply,
        writes: bool,
        deadline: Deadline,
    ) -> Result<Found, RedisError> {
        let Reply::Array(items) = reply else { return Err(self.inner.unexpected(reply)) };
        if let Some(found) = Found::of(asked.kept_in, items) {
            return Ok(found);
        }
        if !writes {
            return Err(RedisError::corrupt(asked.check.limit, &asked.key, LEFT));
        }
        self.send_all(&asked.key, &[words(["DEL", &asked.key])], deadline).await?;
        Err(RedisError::corrupt(asked.check.limit, &asked.key, "it has been removed"))
    }

    /// Charges what is due and reads the entries afterwards. Returns the transaction's time.
    async fn charge<A: MultiProgram>(
        &self,
        asked: &mut [Asked<'_, A>],
        batch: &Batch<'_, A>,
        now: Timestamp,
        deadline: Deadline,
    ) -> Result<Timestamp, RedisError> {
        let mut all = Vec::new();
        // The index among the replies of each check's last command, which reads its entries.
        let mut readings = Vec::with_capacity(asked.len());
        for asked in &mut *asked {
            let decided = asked.outcome.is_some();
            all.extend(asked.commands(batch, now));
            readings.push((!decided && asked.is_charged()).then(|| all.len() - 1));
        }
        if all.is_empty() {
            return Ok(now);
        }
        if batch.time() == Now::Store {
            all.push(words(["TIME"]));
        }
        let replies = self.send_all(&asked[0].key, &all, deadline).await?;
        for (asked, reading) in asked.iter_mut().zip(readings) {
            if let Some(reading) = reading {
                let reply = replies.get(reading).unwrap_or(&Reply::Nil);
                // This check and the others are charged by now.
                let found = self.found(asked, reply, true, deadline).await;
                asked.found = found.map_err(RedisError::in_part)?;
            }
        }
        self.time(batch.time(), &replies).map_err(RedisError::in_part)
    }

    async fn send_all(
        &self,
        key: &str,
        commands: &[Command],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let commands: Vec<Vec<Argument<'_>>> =
            commands.iter().map(|c| c.iter().map(|word| Argument::Bytes(word)).collect()).collect();
        self.inner.connection.transaction(key, &commands, deadline).await
    }
}

impl<A: MultiProgram + KeepsEntries, C: Connection> EntryStore<A> for RedisStore<Multi, C> {
    async fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, RedisError> {
        let deadline = self.inner.deadline();
        let state = self.state_within(limit, key, deadline).await?;
        let key = self.key(limit, key).unwrap_or_default();
        self.inner.entries(limit, &key, state, now, deadline).await
    }
}

fn native<A: MultiProgram>(limit: &Limit<A>) -> Result<Native, RedisError> {
    let native = limit.algorithm().native();
    native.ok_or_else(|| RedisError::NotNative { limit: limit.name().into() })
}
