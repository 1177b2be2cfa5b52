//! `Store::apply` of all modes: the entry of every decision. Each function calls only functions
//! below it.
//!
//! A batch whose keys lie in one slot goes to its mode (`lua_mode.rs`, `cas_mode.rs`,
//! `multi_mode.rs`), any other to `cross_slot.rs`.

use ratelimit_core::store::{Batch, Snapshot, SnapshotStore, WithSnapshot};
use ratelimit_core::{Algorithm, Refusal, Store, Verdict};

use crate::connection::Connection;
use crate::cross_slot::{self, split};
use crate::error::{RedisError, Result};
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::store::{Mode, RedisStore};

/// The verdict on a valid batch without checks, which needs no server.
fn of_no_checks<A: Algorithm>(batch: &Batch<'_, A>) -> Result<Option<Verdict>> {
    batch.validate()?;
    match (batch.checks(), batch.reservation_id()) {
        ([], Some(id)) if batch.operation().needs_id() => {
            Err(Refusal::UnknownReservation { limit: None, id }.into())
        }
        ([], _) => Ok(Some(Verdict::several(Vec::new()))),
        _ => Ok(None),
    }
}

impl<A: Algorithm, M: Mode<A>, C: Connection> Store<A> for RedisStore<M, C> {
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
impl<A: LuaProgram + 'static, C: Connection> SnapshotStore<A> for RedisStore<Lua, C> {
    async fn apply_with_snapshot(&self, batch: &Batch<'_, A>) -> Result<WithSnapshot<A::State>> {
        let mut left = None;
        let verdict = self.apply_noting(batch, Some(&mut left)).await?;
        Ok((verdict, left))
    }
}

impl<M, C: Connection> RedisStore<M, C> {
    /// Applies a batch, and notes the states that it left where that is asked for and known.
    async fn apply_noting<A: Algorithm>(
        &self,
        batch: &Batch<'_, A>,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict>
    where
        M: Mode<A>,
    {
        if let Some(verdict) = of_no_checks(batch)? {
            return Ok(verdict);
        }
        let deadline = self.inner.deadline();
        // Boxed, so the future of all other batches stays small.
        let across = split(self, batch, deadline)?.map(|across| Box::pin(across.apply()));
        match across {
            None if batch.is_overridable() => {
                Box::pin(cross_slot::decide(self, batch, deadline, left)).await
            }
            None => M::decide(self, batch, &[], deadline, left).await,
            Some(across) => across.await,
        }
    }
}
