//! The Lua mode: one script per batch, run where the states are.
//!
//! [`call`] collects the keys and twins of a batch. [`decide_call`] serves almost all requests: a script
//! with the twins' sections answers the states that it read, and Rust derives the verdict. [`merge`] lets such
//! requests share calls, and [`sender`] sends them. [`driver_call`] serves all others.

use ratelimit_core::Verdict;
use ratelimit_core::store::{Batch, Op, Snapshot};

use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::store::{RedisStore, SingleSlot, refuse_unsupported};

pub(crate) mod answer;
pub(crate) mod call;
mod decide_call;
pub(crate) mod driver_call;
mod merge;
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
        mut left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        if matches!(batch.operation(), Op::Refund | Op::Force | Op::Adopt) {
            refuse_unsupported(batch)?;
        }
        let call = Call::of(&self.inner, batch, deadline)?;
        match call.apply_merged(left.as_deref_mut()).await? {
            Some(verdict) => Ok(verdict),
            // Rare and large: unboxed, it would enlarge every request's future.
            None => Box::pin(call.apply_driver(left)).await,
        }
    }
}
