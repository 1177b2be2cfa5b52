//! `Store::apply` of the three modes: the entry of every decision. Each function calls only functions below it.
//!
//! A batch whose keys lie in one slot goes to its mode (`lua_mode.rs`, `cas_mode.rs`, `multi_mode.rs`), any
//! other to `cross_slot.rs`.

use ratelimit_core::store::{Batch, Op, Snapshot, SnapshotStore, WithSnapshot};
use ratelimit_core::{Algorithm, Refusal, Store, Verdict};

use crate::codec::Codec;
use crate::connection::Connection;
use crate::cross_slot::{self, split};
use crate::error::{RedisError, Result};
use crate::mode::{Cas, Lua, Multi};
use crate::multi_mode;
use crate::native::MultiProgram;
use crate::program::LuaProgram;
use crate::store::{RedisStore, SingleSlot};

/// The verdict on a valid batch without checks, which needs no server.
fn of_no_checks<A: Algorithm>(batch: &Batch<'_, A>) -> Result<Option<Verdict>> {
    batch.validate()?;
    match (batch.checks(), batch.reservation_id()) {
        ([], Some(id)) if batch.operation().needs_id() => {
            Err(Refusal::UnknownReservation { id }.into())
        }
        ([], _) => Ok(Some(Verdict::several(Vec::new()))),
        _ => Ok(None),
    }
}

impl<A: LuaProgram, C: Connection> Store<A> for RedisStore<Lua, C> {
    type Error = RedisError;

    // Not `async`: a future around the future would move every verdict once more.
    fn apply(&self, batch: &Batch<'_, A>) -> impl Future<Output = Result<Verdict>> + Send {
        self.apply_noting(batch, None)
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        cross_slot::server_of(self, batch)
    }
}

/// For limits whose state is a few numbers, in one slot.
impl<A: LuaProgram, C: Connection> SnapshotStore<A> for RedisStore<Lua, C> {
    async fn apply_with_snapshot(&self, batch: &Batch<'_, A>) -> Result<WithSnapshot<A::State>> {
        let mut left = None;
        let verdict = self.apply_noting(batch, Some(&mut left)).await?;
        Ok((verdict, left))
    }
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Applies a batch, and notes the states that it left where that is asked for and known.
    async fn apply_noting<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        if let Some(verdict) = of_no_checks(batch)? {
            return Ok(verdict);
        }
        let deadline = self.inner.deadline();
        match split(self, batch, deadline)? {
            None => self.apply_in_one_slot(batch, deadline, left).await,
            // Boxed, so the future of all other batches stays small.
            Some(across) => Box::pin(across.apply()).await,
        }
    }
}

impl<A: Algorithm<State: Codec>, C: Connection> Store<A> for RedisStore<Cas, C> {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict> {
        if let Some(verdict) = of_no_checks(batch)? {
            return Ok(verdict);
        }
        let deadline = self.inner.deadline();
        match (split(self, batch, deadline)?, batch.operation()) {
            (Some(across), Op::Acquire | Op::Extend) => Box::pin(across.acquire()).await,
            // A read-only batch may span slots.
            (None, _) | (_, Op::Peek) => self.apply_in_slot(batch, deadline).await,
            (Some(across), _) => Box::pin(across.each()).await,
        }
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        cross_slot::server_of(self, batch)
    }
}

impl<A: MultiProgram, C: Connection> Store<A> for RedisStore<Multi, C> {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict> {
        if let Some(verdict) = of_no_checks(batch)? {
            return Ok(verdict);
        }
        multi_mode::refuse_unsupported(batch)?;
        let deadline = self.inner.deadline();
        match split(self, batch, deadline)? {
            None => Ok(self.decided(batch, deadline).await?.verdict),
            Some(across) => Box::pin(across.apply()).await,
        }
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        cross_slot::server_of(self, batch)
    }
}
