//! Decides a batch across slots in the mode of transactions. Every attempt is charged whatever the other checks
//! decide, so each slot does its part and there is no second wave.

use ratelimit_core::Verdict;
use ratelimit_core::store::{Batch, Op};

use super::{InSlot, all_of_lookups, all_of_requests, join};
use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::mode::Multi;
use crate::multi_mode::{CheckOutcome, verdict};
use crate::native::MultiProgram;
use crate::store::RedisStore;

impl<C: Connection> RedisStore<Multi, C> {
    /// Runs a batch whose parts lie in several slots.
    pub(crate) async fn apply_cross_slot<A: MultiProgram>(
        &self,
        whole: &Batch<'_, A>,
        parts: &[InSlot<'_, A>],
        deadline: Deadline,
    ) -> Result<Verdict, RedisError> {
        if whole.operation() == Op::Reset {
            let resetting =
                parts.iter().map(async |part| self.reset(&part.batch(whole)?, deadline).await);
            return Ok(join(parts, &all_of_requests(resetting).await?));
        }
        let of_part =
            async |part: &InSlot<'_, A>| self.outcomes(&part.batch(whole)?, deadline).await;
        let doing = parts.iter().map(of_part);
        let outcomes = match whole.operation() {
            Op::Peek => all_of_lookups(doing).await?,
            _ => all_of_requests(doing).await?,
        };
        let mut all: Vec<(usize, CheckOutcome)> = Vec::with_capacity(whole.checks().len());
        for (part, outcomes) in parts.iter().zip(outcomes) {
            all.extend(part.positions.iter().copied().zip(outcomes));
        }
        all.sort_unstable_by_key(|(position, _)| *position);
        Ok(verdict(all.into_iter().map(|(_, outcome)| outcome).collect()))
    }
}
