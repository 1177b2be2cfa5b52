//! The Lua mode: one script per batch, run where the states are.
//!
//! [`call`] collects the keys and twins of a batch. [`flat_call`] serves almost all requests: a script of
//! the twins' sections answers the states that it read, and Rust derives the verdict. [`rider`] lets such
//! requests ride together, and [`sender`] sends them. [`driver_call`] serves all others.

use ratelimit_core::store::{Batch, Op, Snapshot};
use ratelimit_core::{Refusal, Timestamp, Verdict};

use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::store::{RedisStore, SingleSlot};

pub(crate) mod answer;
pub(crate) mod call;
pub(crate) mod driver_call;
mod flat_call;
mod rider;
mod sender;
pub(crate) mod states;

use call::Call;

impl<A: LuaProgram, C: Connection> SingleSlot<A> for RedisStore<Lua, C> {
    async fn apply_in_slot(&self, batch: &Batch<'_, A>, deadline: Deadline) -> Result<Verdict> {
        self.apply_in_one_slot(batch, deadline, None).await
    }

    async fn try_in_slot(&self, batch: &Batch<'_, A>, deadline: Deadline) -> Result<()> {
        let call = Call::of(&self.inner, batch, deadline)?;
        let answer = call.run("peek", &[]).await?;
        call.would_decide(batch, &answer).map(drop)
    }
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Runs the batch, and notes the states that it left where that is asked for and known.
    pub(crate) async fn apply_in_one_slot<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        refuse_unsupported(batch)?;
        let call = Call::of(&self.inner, batch, deadline)?;
        match call.apply_riding(left).await? {
            Some(verdict) => Ok(verdict),
            // Rare and large: unboxed, it would enlarge every request's future.
            None => Box::pin(call.apply_driver()).await,
        }
    }
}

/// Refuses operations that an algorithm lacks, whatever the state.
fn refuse_unsupported<A: LuaProgram>(batch: &Batch<'_, A>) -> Result<()> {
    for check in batch.checks() {
        let (algorithm, op) = (check.limit.algorithm(), batch.operation());
        let step = match op {
            Op::Refund => algorithm.refund(None, Timestamp::ZERO, 0),
            Op::Force | Op::Adopt => algorithm.force(None, Timestamp::ZERO, 0),
            _ => continue,
        };
        if step.is_none() {
            let limit = check.limit.name().into();
            return Err(Refusal::Unsupported { limit, op }.into());
        }
    }
    Ok(())
}
