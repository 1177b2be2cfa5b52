//! Decides a batch across slots in the mode of transactions. Every attempt is charged whatever the other checks
//! decide, so each slot does its part and there is no second wave.

use ratelimit_core::Verdict;

use super::{Across, InSlot, in_order};
use crate::connection::Connection;
use crate::error::Result;
use crate::mode::Multi;
use crate::multi_mode::verdict;
use crate::native::MultiProgram;

impl<A: MultiProgram, C: Connection> Across<'_, A, Multi, C> {
    /// Runs the batch.
    pub(crate) async fn apply(&self) -> Result<Verdict> {
        let of_part = async |part: &InSlot<'_, A>| {
            self.store.outcomes(&part.batch(self.whole)?, self.deadline).await
        };
        let outcomes = self.all_of(self.parts.iter().map(of_part)).await?;
        Ok(verdict(in_order(&self.parts, outcomes)))
    }
}
