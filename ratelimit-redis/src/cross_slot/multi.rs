//! Decides a batch across slots in the mode of transactions. Every attempt is charged whatever the other checks
//! decide, so each slot does its part and there is no second wave.

use ratelimit_core::Verdict;

use super::{Across, join};
use crate::connection::Connection;
use crate::error::Result;
use crate::mode::Multi;
use crate::native::MultiProgram;

impl<A: MultiProgram, C: Connection> Across<'_, A, Multi, C> {
    /// Runs the batch.
    pub(crate) async fn apply(&self) -> Result<Verdict> {
        let Self { store, whole, parts, deadline } = self;
        let batches = parts.iter().map(|part| part.batch(whole)).collect::<Result<Vec<_>>>()?;
        let deciding = batches.iter().map(|batch| store.decided(batch, *deadline));
        let decided = self.all_of(deciding).await?;
        let is_denied = !decided.iter().all(|slot| slot.verdict.allowed());
        let verdicts = decided.into_iter().map(|slot| match slot.verdict.allowed() {
            true if is_denied => slot.denied_elsewhere(),
            _ => Ok(slot.verdict),
        });
        Ok(join(parts, &verdicts.collect::<Result<Vec<_>>>()?))
    }
}
