//! Decides a batch across slots of a cluster in two waves, since no script sees all of it.
//!
//! 1. Ask every slot. If one denies, that is the verdict, and nothing has been written.
//! 2. Charge every slot. If one denies now, another client charged in between: the store returns the
//!    charges of the others and starts again, a bounded number of times.
//!
//! Asking first costs an admitted request one round trip more than charging at once and returning the
//! excess. In return a denied request writes nothing and blocks no capacity meanwhile.

use ratelimit_core::store::Op;
use ratelimit_core::{Refusal, Verdict};

use super::{Across, InSlot, all_of_lookups, join, worst};
use crate::concurrent::all;
use crate::connection::{Argument, Connection};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::lua_mode::call::Call;
use crate::lua_mode::driver_call::DriverAnswer;
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::rounds::Rounds;

/// How many rounds a batch gets when other clients interfere.
const ROUNDS: usize = 8;

/// What a slot decides, and the answer from which that follows.
struct SlotDecision {
    verdict: Verdict,
    answer: DriverAnswer,
}

impl<A: LuaProgram, C: Connection> Across<'_, A, Lua, C> {
    /// Runs the batch.
    pub(crate) async fn apply(mut self) -> Result<Verdict> {
        match self.whole.operation() {
            Op::Acquire | Op::Peek => self.in_waves().await,
            Op::Extend => {
                let mut known = self.knows_id().await?.into_iter();
                let parts = std::mem::take(&mut self.parts).into_iter();
                let (known, mut parts) = parts.partition(|_| known.next().unwrap_or_default());
                self.parts = known;
                if let (Some(id), []) = (self.whole.reservation_id(), &self.parts[..]) {
                    return Err(Refusal::UnknownReservation { id }.into());
                }
                let extended = self.in_waves().await?;
                let shown = parts.iter().map(|part| self.untouched(part));
                let mut verdicts = all_of_lookups(&parts, shown).await?;
                verdicts.push(extended);
                parts.push(InSlot::of_all(&self.parts));
                Ok(join(&parts, &verdicts))
            }
            _ => self.each().await,
        }
    }

    /// Asks every slot, and then charges every slot.
    async fn in_waves(&self) -> Result<Verdict> {
        let Self { store, whole, parts, deadline } = self;
        let asking = if whole.operation() == Op::Peek { *deadline } else { deadline.to_charge() };
        let batches = parts.iter().map(|part| part.batch(whole)).collect::<Result<Vec<_>>>()?;
        let slots = batches.iter().map(|batch| Call::of(&store.inner, batch, asking));
        let slots = slots.collect::<Result<Vec<_>>>()?;
        if whole.operation() == Op::Peek {
            let peeking = slots.iter().map(|slot| decide_in(slot, "peek"));
            return self.joined(&slots, &all_of_lookups(&self.parts, peeking).await?);
        }
        let reserve = if whole.operation() == Op::Extend { "grow" } else { "reserve" };
        // An attempt counts once, so there is no second round.
        let attempts = slots.iter().flat_map(|slot| &slot.twins).any(|check| check.twin.attempts);
        let most = if attempts { 1 } else { ROUNDS };
        let mut rounds = Rounds::new(most, asking, &store.inner.peer);
        // Whether a charge of an earlier round may remain.
        let mut charged = false;
        // What each slot decided in the last round, of which one denied.
        let mut denied: Option<Vec<_>> = None;
        loop {
            let asking = slots.iter().map(|slot| decide_in(slot, "ask"));
            let asked = all_of_lookups(&self.parts, asking).await;
            let asked = asked.map_err(|error| rounds.explain(error).after(charged))?;
            if !asked.iter().all(|slot| slot.verdict.allowed()) {
                let denied = self.charge_attempts(self.joined(&slots, &asked)?).await;
                return denied.map_err(|error| error.after(charged));
            }
            if let Some(denied) = denied.filter(|_| !rounds.is_in_time()) {
                return self.joined(&slots, &denied);
            }
            let reserved = all(slots.iter().map(|slot| decide_in(slot, reserve))).await;
            if reserved.iter().all(|slot| slot.as_ref().is_ok_and(|slot| slot.verdict.allowed())) {
                let reserved: Vec<_> = reserved.into_iter().flatten().collect();
                return self.joined(&slots, &reserved);
            }
            rounds.begin();
            let back = deadline.to_give_back();
            let undoing = slots.iter().zip(&reserved).map(|(slot, all)| undo(slot, all, back));
            let undone = all(undoing).await;
            charged |= undone.iter().flatten().any(|undone| !undone);
            if let Some(error) = worst(&reserved) {
                let error = rounds.explain(error);
                return Err(error.after(charged || undone.iter().any(Result::is_err)));
            }
            if let Some(error) = worst(&undone) {
                return Err(error.in_part());
            }
            let reserved: Vec<_> = reserved.into_iter().flatten().collect();
            if !rounds.another() {
                return self.joined(&slots, &reserved);
            }
            denied = Some(reserved);
        }
    }

    /// The verdict of what each slot decides. If one denies, those that allow report what they decide in a denied batch.
    fn joined(&self, slots: &[Call<'_, A, C>], decided: &[SlotDecision]) -> Result<Verdict> {
        let is_denied = !decided.iter().all(|slot| slot.verdict.allowed());
        let verdicts = slots.iter().zip(decided).map(|(call, slot)| {
            if is_denied && slot.verdict.allowed() {
                return call.would_decide(&call.batch.denied_elsewhere(), &slot.answer);
            }
            Ok(slot.verdict.clone())
        });
        Ok(join(&self.parts, &verdicts.collect::<Result<Vec<_>>>()?))
    }
}

/// Runs an operation in a slot.
async fn decide_in<A: LuaProgram, C: Connection>(
    slot: &Call<'_, A, C>,
    operation: &str,
) -> Result<SlotDecision> {
    let answer = slot.run(operation, &[]).await?;
    let verdict = match operation {
        "reserve" | "grow" => slot.decided(&answer)?,
        _ => slot.would_decide(slot.batch, &answer)?,
    };
    Ok(SlotDecision { verdict, answer })
}

/// Returns what a slot charged, if anything. Returns whether no part is still charged.
async fn undo<A: LuaProgram, C: Connection>(
    slot: &Call<'_, A, C>,
    reserved: &Result<SlotDecision>,
    deadline: Deadline,
) -> Result<bool> {
    let Ok(SlotDecision { answer, .. }) = reserved else { return Ok(true) };
    let written = slot.twins.iter().zip(&answer.notes).filter(|(_, made)| *made != "-");
    // An attempt stays counted.
    let (counted, charged): (Vec<_>, Vec<_>) = written.partition(|(check, _)| check.twin.attempts);
    if charged.is_empty() {
        return Ok(counted.is_empty());
    }
    let (twins, made): (_, Vec<_>) =
        charged.into_iter().map(|(check, made)| (check.clone(), Argument::Text(made))).unzip();
    let answer = slot.with_twins(twins, deadline).run("undo", &made).await?;
    Ok(counted.is_empty() && answer.notes.iter().all(|note| note == "1"))
}
