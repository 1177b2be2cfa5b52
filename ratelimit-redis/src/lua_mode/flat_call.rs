//! Calls a [script](crate::flat) for one request, as a group of one: an acquire or a peek, without an id,
//! of limits whose state is a few numbers. The script returns the states that it read, and the step in Rust
//! derives the decision.

use std::sync::{Arc, LazyLock};

use ratelimit_core::Verdict;
use ratelimit_core::store::{Now, Op, Snapshot};
use smallvec::SmallVec;

use super::answer::of_one;
use super::call::Call;
use crate::connection::{Argument, Connection, Reply, TryAgain, refused_in_part};
use crate::error::Result;
use crate::flat::{MOST_CHECKS, Role, TwinCheck};
use crate::program::LuaProgram;
use crate::script::Script;
use crate::store::evalsha;

/// Returns states, and writes nothing.
static READ: LazyLock<Arc<Script>> =
    LazyLock::new(|| Arc::new(Script::from_text(include_str!("../lua/read.lua"))));

impl<A: LuaProgram, C: Connection> Call<'_, A, C> {
    /// Decides a batch by a flat script. Returns `None`, with nothing written, for anything else: an id,
    /// a state of variable length, or a value that no limit wrote.
    pub(super) async fn apply_flat(
        &self,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Option<Verdict>> {
        let Some((script, mut words)) = self.flat_call()? else { return Ok(None) };
        let answer = match self
            .inner
            .eval(&self.keys[0], &script, &mut words, TryAgain::Wait, self.deadline)
            .await
        {
            Ok(answer) => answer,
            // The driver reports which key it is.
            Err(error) if error.is_wrong_type() => return Ok(None),
            Err(error) if Arc::ptr_eq(&script, &READ) => return Err(error.of_a_lookup()),
            Err(error) => return Err(self.explain(error)),
        };
        // The driver decides on what the script did not understand.
        let Some((now, line, seen)) = of_one(self.batch.time(), &answer) else { return Ok(None) };
        if let Some(refused) = line.strip_prefix('!') {
            return Err(refused_in_part(self.inner.peer.address(), refused));
        }
        let Some(mut seen) = self.seen(now, seen).filter(|_| line != "?") else {
            // The script understood every state that it admitted.
            if line == "1" {
                return Err(self.inner.peer.unexpected(&Reply::Text(answer)));
            }
            return Ok(None);
        };
        let verdict = self.verdict(line, &mut seen)?;
        if let Some(left) = left {
            *left = Some(seen.snapshot);
        }
        Ok(Some(verdict))
    }

    /// The flat script for this batch, if it has one, and the call's arguments.
    fn flat_call(&self) -> Result<Option<(Arc<Script>, Vec<Argument<'_>>)>> {
        let peeks = self.batch.operation() == Op::Peek;
        let plain = peeks || self.batch.operation() == Op::Acquire;
        let has_id = self.batch.reservation_id().is_some();
        if !plain || self.batch.is_part() || has_id || !self.has_few_numbers() {
            return Ok(None);
        }
        let given = given(self.batch.time());
        let shapes: SmallVec<[_; 2]> = self.twins.iter().map(|check| check.shape).collect();
        let never_fits =
            || self.twins.iter().any(|check| self.check(check).cost > check.twin.capacity);
        let attempts = || shapes.iter().any(|shape| shape.role == Role::Attempt);
        let reads_only = peeks
            || shapes.iter().all(|shape| shape.role == Role::Look)
            || (!attempts() && never_fits());
        if reads_only {
            let registered = self.inner.scripts.register(self.twins.iter().map(|c| c.twin.program));
            registered.map_err(|program| self.misnamed(program))?;
            // One key per field.
            let mut words =
                evalsha(self.twins.iter().map(|check| &*self.keys[check.shape.key - 1]));
            words.extend(self.twins.iter().map(|check| Argument::Text(&check.field)));
            return Ok(Some((Arc::clone(&READ), words)));
        }
        if shapes.len() > MOST_CHECKS {
            return Ok(None);
        }
        let script = self.inner.scripts.deciding(&[&shapes], given.is_some());
        let script = script.map_err(|program| self.misnamed(program))?;
        let Some((script, kinds)) = script else { return Ok(None) };
        let mut words = evalsha(self.keys.iter().map(String::as_str));
        words.extend(given.iter().flatten().copied().map(Argument::Number));
        words.extend([kinds[0] as u64, 1, 1].map(Argument::Number));
        for check in &self.twins {
            // Any charge above the capacity fails; the cap prevents an overflow.
            let cost = self.check(check).cost.min(check.twin.capacity + 1);
            push_check(&mut words, check, cost);
        }
        Ok(Some((script, words)))
    }
}

/// Adds the arguments about a check: its field and, unless it costs nothing, the numbers of its limit and its charge.
pub(super) fn push_check<'w>(
    words: &mut Vec<Argument<'w>>,
    TwinCheck { field, twin, shape, .. }: &'w TwinCheck<'_>,
    cost: u64,
) {
    words.push(Argument::Text(field));
    if shape.role != Role::Look {
        words.push(Argument::Number(twin.capacity * twin.unit));
        words.extend(twin.parameters.iter().copied().map(Argument::Number));
        words.push(Argument::Number(cost * twin.unit));
    }
}

/// A given time, and by how many milliseconds it extends the life of keys.
pub(super) fn given(time: Now) -> Option<[u64; 2]> {
    match time {
        Now::Store => None,
        Now::At(now) => Some([now.as_us(), time.padding_us() / 1_000]),
    }
}
