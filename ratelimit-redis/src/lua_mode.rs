//! The Lua mode: one script per batch, run where the states are.
//!
//! [`call`] collects the keys and twins of a batch. [`decide_call`] serves almost all requests: a
//! script of the twins' sections answers the states that it read, and Rust derives the verdict.
//! [`merge`] lets such requests share calls, and [`sender`] sends them. [`driver_call`] serves all
//! others. [`in_slot`] is a part of a batch across slots.

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Op, Snapshot};
use ratelimit_core::{Limit, Verdict};

use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::records::{self, Looked, Premise};
use crate::store::{Mode, NewestAt, RedisStore, StatesAt, refuse_unsupported};

mod answer;
mod call;
mod decide_call;
mod driver_call;
mod in_slot;
mod merge;
mod sender;
mod states;

use call::{Call, key_of};
use in_slot::LuaInSlot;

impl<A: LuaProgram> Mode<A> for Lua {
    type InSlot<'s, C: Connection>
        = LuaInSlot<'s, A, C>
    where
        A: 's;

    fn look<C: Connection>(store: &RedisStore<Self, C>, batch: &Batch<'_, A>) -> Result<Looked<A>> {
        let inner = &store.inner;
        let looked = records::look(&inner.keys, batch, |key, field| inner.records.get(key, field));
        looked.inspect_err(|_| inner.records.forget(&inner.keys, batch))
    }

    // Not `async`, as `Store::apply` is not.
    fn decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        premises: &'s [Premise],
        deadline: Deadline,
        mut left: Option<&'s mut Option<Snapshot<A::State>>>,
    ) -> impl Future<Output = Result<Verdict>> + Send {
        // Boxed once, so that the futures of the layers around a store stay small.
        Box::pin(async move {
            if matches!(batch.operation(), Op::Refund | Op::Force | Op::Adopt) {
                refuse_unsupported(batch)?;
            }
            let call = Call::of(&store.inner, batch, premises, deadline)?;
            match call.apply_merged(left.as_deref_mut()).await? {
                Some(verdict) => Ok(verdict),
                // Rare and large: unboxed, it would enlarge every request's future.
                None => Box::pin(call.apply_driver(left)).await,
            }
        })
    }

    async fn would_decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        premises: &'s [Premise],
        deadline: Deadline,
        prepares: bool,
    ) -> Result<LuaInSlot<'s, A, C>> {
        LuaInSlot::of(Call::of(&store.inner, batch, premises, deadline)?, prepares).await
    }

    async fn read<C: Connection>(
        store: &RedisStore<Self, C>,
        limit: &Limit<A>,
        identifier: &str,
        deadline: Deadline,
    ) -> Result<Option<A::State>> {
        store.stored_state(limit, identifier, deadline).await
    }

    fn keys_of<C: Connection>(
        store: &RedisStore<Self, C>,
        limit: &Limit<A>,
        identifier: &str,
    ) -> Vec<String> {
        let twins = limit.algorithm().twins().into_iter();
        twins.map(|twin| key_of(&store.inner.keys, limit, &twin, identifier)).collect()
    }

    async fn read_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        deadline: Deadline,
    ) -> Result<StatesAt<A::State>> {
        store.states_at(limits, key, deadline).await
    }

    async fn replace_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        states: StatesAt<A::State>,
        full: Vec<Option<Write<A::State>>>,
        deadline: Deadline,
    ) -> Result<()> {
        let replaces = full.iter().map(Option::is_some).collect();
        store.fill_at(limits, key, (states.read, replaces), deadline).await
    }

    fn newest_at(limit: &str) -> Option<NewestAt> {
        states::newest_at(limit)
    }
}
