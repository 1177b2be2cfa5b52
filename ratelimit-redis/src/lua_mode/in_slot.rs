//! A part of a batch across slots: asked, then charged, and taken back if another part denies.

use ratelimit_core::Verdict;
use ratelimit_core::store::Op;

use super::call::Call;
use super::driver_call::DriverAnswer;
use crate::connection::{Argument, Connection};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::program::LuaProgram;
use crate::store::InSlot;

/// A call, and what it decided at last.
pub struct LuaInSlot<'s, A: LuaProgram, C> {
    call: Call<'s, A, C>,
    answer: DriverAnswer,
    verdict: Verdict,
}

impl<'s, A: LuaProgram, C: Connection> LuaInSlot<'s, A, C> {
    /// What a call would decide, and writes nothing; but if it `prepares` a charge, a value that no
    /// limit wrote is removed.
    pub(super) async fn of(call: Call<'s, A, C>, prepares: bool) -> Result<Self> {
        let removes = prepares && call.batch.operation() != Op::Peek;
        let answer = call.run(if removes { "ask" } else { "peek" }, &[]).await?;
        let verdict = call.would_decide(call.batch, &answer)?;
        Ok(Self { call, answer, verdict })
    }
}

impl<A: LuaProgram, C: Connection> InSlot for LuaInSlot<'_, A, C> {
    fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    fn denied(&mut self) -> Result<Verdict> {
        self.call.would_decide(&self.call.batch.denied_elsewhere(), &self.answer)
    }

    async fn charge(&mut self) -> Result<bool> {
        let extends = self.call.batch.operation() == Op::Extend;
        self.answer = self.call.run(if extends { "grow" } else { "reserve" }, &[]).await?;
        self.verdict = self.call.decided(&self.answer)?;
        Ok(self.verdict.allowed())
    }

    async fn take_back(&mut self, deadline: Deadline) -> Result<bool> {
        let written = self.call.twins.iter().zip(&self.answer.notes);
        let written = written.filter(|(_, made)| *made != "-");
        // An attempt stays counted.
        let (counted, charged): (Vec<_>, Vec<_>) =
            written.partition(|(check, _)| check.twin.attempts);
        if charged.is_empty() {
            return Ok(counted.is_empty());
        }
        let (twins, made): (_, Vec<_>) =
            charged.into_iter().map(|(check, made)| (check.clone(), Argument::Text(made))).unzip();
        let answer = self.call.with_twins(twins, deadline).run("undo", &made).await?;
        Ok(counted.is_empty() && answer.notes.iter().all(|note| note == "1"))
    }
}
