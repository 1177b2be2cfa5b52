//! Calls the driver (`driver.lua`), which decides what no [flat script](super::flat_call) does, and answers
//! numbers.

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Decision, Limit, Verdict};

use super::call::{Call, TwinCheck};
use crate::connection::{Argument, Connection, Reply, TryAgain};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::mode::Lua;
use crate::program::{LuaProgram, Twin};
use crate::store::{RedisStore, evalsha};

/// How many integers the script returns per decision.
pub(crate) const NUMBERS_PER_DECISION: usize = 6;

/// A twin to run, with the numbers that an operation of the cross-slot protocol adds to its arguments.
pub(crate) type TwinRun<'c> = (&'c TwinCheck<'c>, &'c [i64]);

impl<C: Connection> RedisStore<Lua, C> {
    /// Decides a batch by the driver.
    pub(super) async fn apply_driver<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        deadline: Deadline,
    ) -> Result<Verdict, RedisError> {
        let answer = self.run(batch, call, operation(batch), &call.all(), deadline).await;
        let answer = answer.map_err(|error| match batch.operation() {
            Op::Peek => error.of_a_lookup(),
            _ => error,
        })?;
        let decisions = decisions(batch, &call.all(), &answer);
        let decisions = decisions.ok_or_else(|| self.inner.unexpected(&answer))?;
        Ok(Verdict::several(call.by_check(decisions)))
    }

    /// Runs an operation of the driver for these twins of a call.
    pub(crate) async fn run<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        operation: &str,
        twins: &[TwinRun<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let programs = twins.iter().map(|(check, _)| check.twin.program);
        let script = self.inner.scripts.driver(programs.collect());
        let script = script.map_err(|program| call.misnamed(batch, program))?;
        let key = &call.keys[0];
        let mut words = arguments(call, batch, operation, twins);
        let answer = self.inner.eval(key, &script, &mut words, TryAgain::Wait, deadline).await;
        answer.map_err(|error| call.explain(batch, error))
    }
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Cuts the states from the future under a key, or only finds them: the position of each limit that has one,
    /// and by how much longer the state would hold its key than a full limit.
    pub(crate) async fn heal_at<A: LuaProgram>(
        &self,
        limits: &[Limit<A>],
        key: &str,
        dry_run: bool,
    ) -> Result<Vec<(usize, u64)>, RedisError> {
        let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key: "", cost: 1 }).collect();
        let (op, operation) = if dry_run { (Op::Peek, "ahead") } else { (Op::Force, "heal") };
        let batch = Batch::new(&checks)?.op(op);
        let call = Call::at_key(&self.inner.keys, &batch, key)?;
        if call.twins.is_empty() {
            return Ok(Vec::new());
        }
        let deadline = self.inner.deadline();
        let answer = self.run(&batch, &call, operation, &call.all(), deadline).await?;
        let decisions = decisions(&batch, &call.all(), &answer);
        let decisions = decisions.ok_or_else(|| self.inner.unexpected(&answer))?;
        let found =
            call.twins.iter().zip(decisions).map(|(twin, decision)| {
                (twin.position, decision.retry_after_us.unwrap_or_default())
            });
        Ok(found.filter(|(_, ahead_us)| *ahead_us > 0).collect())
    }
}

impl Call<'_> {
    /// All twins, without further numbers.
    pub(crate) fn all(&self) -> Vec<TwinRun<'_>> {
        self.twins.iter().map(|check| (check, &[][..])).collect()
    }
}

/// The name of an operation in the driver.
pub(super) const fn operation<A: LuaProgram>(batch: &Batch<'_, A>) -> &'static str {
    match batch.operation() {
        Op::Acquire => "acquire",
        Op::Peek => "peek",
        Op::Force => "force",
        Op::Refund => "refund",
        Op::Reset => "reset",
        Op::Settle if batch.is_settled_once() => "settle-once",
        Op::Settle => "settle",
        Op::Renew => "renew",
    }
}

/// The call's arguments, as `driver.lua` reads them.
fn arguments<'w, A: LuaProgram>(
    call: &'w Call<'_>,
    batch: &'w Batch<'_, A>,
    operation: &'w str,
    twins: &[TwinRun<'w>],
) -> Vec<Argument<'w>> {
    let mut words = evalsha(call.keys.iter().map(String::as_str));
    let now = match batch.time() {
        Now::Store => Argument::Text(""),
        Now::At(now) => Argument::Number(now.as_us()),
    };
    words.extend([
        Argument::Text(operation),
        now,
        Argument::Number(batch.time().padding_us() / 1_000),
        Argument::Bytes(metadata(batch)),
        Argument::Text(&call.group),
    ]);
    for (check, more) in twins {
        let Twin { program, parameters, capacity, unit, attempts, .. } = &check.twin;
        words.extend([
            Argument::Text(program.name),
            Argument::Number(check.key as u64),
            Argument::Text(&check.field),
            Argument::Number(batch.checks()[check.position].cost),
            Argument::Number(if *attempts { *capacity } else { 0 }),
            Argument::Number(check.reservation as u64),
            Argument::Number(check.life_us),
        ]);
        if program.numbers.is_some() {
            words.extend([capacity * unit, *unit].map(Argument::Number));
        }
        words.extend(parameters.as_slice().iter().map(|number| Argument::Number(*number)));
        words.extend(more.iter().copied().map(Argument::Integer));
    }
    words
}

/// The metadata for the script: empty if no limit of the batch stores any.
fn metadata<'b, A: LuaProgram>(batch: &'b Batch<'_, A>) -> &'b [u8] {
    let charges = matches!(batch.operation(), Op::Acquire | Op::Force);
    let is_stored =
        || batch.checks().iter().any(|c| c.limit.algorithm().metadata_bytes().is_some());
    if charges && is_stored() { batch.metadata_given() } else { &[] }
}

/// Parses a reply of one decision per twin.
pub(crate) fn decisions<A: LuaProgram>(
    batch: &Batch<'_, A>,
    twins: &[TwinRun<'_>],
    answer: &Reply,
) -> Option<Vec<Decision>> {
    per_twin(twins, answer, NUMBERS_PER_DECISION, |check, items| {
        decision(&check.twin, batch.checks()[check.position].cost, items)
    })
}

/// Parses a reply of `count` integers per twin.
pub(crate) fn per_twin<T>(
    twins: &[TwinRun<'_>],
    answer: &Reply,
    count: usize,
    read: impl Fn(&TwinCheck<'_>, &[Reply]) -> Option<T>,
) -> Option<Vec<T>> {
    let Reply::Array(items) = answer else { return None };
    if items.len() != twins.len() * count {
        return None;
    }
    let items = items.chunks_exact(count);
    twins.iter().zip(items).map(|((check, _), items)| read(check, items)).collect()
}

/// Parses a decision and validates each of its numbers.
pub(crate) fn decision(twin: &Twin, cost: u64, items: &[Reply]) -> Option<Decision> {
    let &[
        Reply::Integer(allowed @ (0 | 1)),
        Reply::Integer(limit),
        Reply::Integer(remaining),
        Reply::Integer(retry_after),
        Reply::Integer(replenish_after),
        Reply::Integer(reset_after),
    ] = items
    else {
        return None;
    };
    let limit = match limit {
        -1 => twin.capacity,
        limit => u64::try_from(limit).ok()?,
    };
    Some(Decision {
        allowed: allowed == 1,
        cost,
        limit,
        remaining: u64::try_from(remaining).ok().filter(|remaining| *remaining <= limit)?,
        retry_after_us: match retry_after {
            -1 => None,
            us => Some(u64::try_from(us).ok()?),
        },
        replenish_after_us: u64::try_from(replenish_after).ok()?,
        reset_after_us: u64::try_from(reset_after).ok()?,
    })
}
