//! Decides a batch across slots in the mode of transactions. Every attempt is charged whatever the other checks
//! decide, so each slot does its part and there is no second wave.

use ratelimit_core::Verdict;
use ratelimit_core::store::{Batch, Op};

use super::{InSlot, all_of_lookups, all_of_requests, in_order};
use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::mode::Multi;
use crate::multi_mode::verdict;
use crate::native::MultiProgram;
use crate::store::RedisStore;

impl<C: Connection> RedisStore<Multi, C> {
    /// Runs a batch whose parts lie in several slots.
    pub(crate) async fn apply_cross_slot<A: MultiProgram>(
        &self,
        whole: &Batch<'_, A>,
        parts: &[InSlot<'_, A>],
        deadline: Deadline,
    ) -> Result<Verdict> {
        let of_part =
            async |part: &InSlot<'_, A>| self.outcomes(&part.batch(whole)?, deadline).await;
        let doing = parts.iter().map(of_part);
        let outcomes = match whole.operation() {
            Op::Peek => all_of_lookups(doing).await?,
            _ => all_of_requests(doing).await?,
        };
        Ok(verdict(in_order(parts, outcomes)))
    }
}
