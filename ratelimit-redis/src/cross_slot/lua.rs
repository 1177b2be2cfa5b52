//! Decides a batch across slots of a cluster in two waves, since no script sees all of it.
//!
//! 1. Ask every slot. If one denies, that is the verdict, and nothing has been written.
//! 2. Charge every slot. If one denies now, another client charged in between: the store returns the
//!    charges of the others and starts again, a bounded number of times.
//!
//! Asking first costs an admitted request one round trip more than charging at once and returning the
//! excess. In return a denied request writes nothing and blocks no capacity meanwhile.

use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{Refusal, Verdict};

use super::{InSlot, all_of_lookups, charge_attempts, each, join, knows_id, worst};
use crate::concurrent::all;
use crate::connection::{Argument, Connection};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::lua_mode::call::Call;
use crate::lua_mode::driver_call::DriverAnswer;
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::rounds::Rounds;
use crate::store::RedisStore;

/// How many rounds a batch gets when other clients interfere.
const ROUNDS: usize = 8;

/// The part of a batch in one slot, and the call of its script.
struct SlotPart<'a, A> {
    batch: Batch<'a, A>,
    call: Call<'a>,
}

/// What a slot decides, and the answer from which that follows.
struct SlotDecision {
    verdict: Verdict,
    answer: DriverAnswer,
}

impl SlotDecision {
    fn allowed(&self) -> bool {
        self.verdict.allowed()
    }
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Runs a batch whose parts lie in several slots.
    pub(crate) async fn apply_cross_slot<A: LuaProgram>(
        &self,
        whole: &Batch<'_, A>,
        parts: &[InSlot<'_, A>],
        deadline: Deadline,
    ) -> Result<Verdict> {
        match whole.operation() {
            Op::Acquire | Op::Peek => self.in_waves(whole, parts, deadline).await,
            Op::Extend => {
                let known = knows_id(self, whole, parts, deadline).await?;
                let pick = |wanted| {
                    let picked = parts.iter().zip(&known).filter(|(_, known)| **known == wanted);
                    picked.filter_map(|(part, _)| part.only(|_| true)).collect::<Vec<_>>()
                };
                let (known, mut parts) = (pick(true), pick(false));
                if let (Some(id), []) = (whole.reservation_id(), &known[..]) {
                    return Err(Refusal::UnknownReservation { id }.into());
                }
                let extended = self.in_waves(whole, &known, deadline).await?;
                let shown = parts.iter().map(|part| part.untouched(self, whole, deadline));
                let mut verdicts = all_of_lookups(shown).await?;
                verdicts.push(extended);
                parts.push(InSlot::of_all(&known));
                Ok(join(&parts, &verdicts))
            }
            _ => each(self, whole, parts, deadline).await,
        }
    }

    /// Asks every slot, and then charges every slot.
    async fn in_waves<A: LuaProgram>(
        &self,
        whole: &Batch<'_, A>,
        parts: &[InSlot<'_, A>],
        deadline: Deadline,
    ) -> Result<Verdict> {
        let slot = |part| {
            let batch = InSlot::batch(part, whole)?;
            let call = Call::of(&self.inner.keys, &batch)?;
            Ok(SlotPart { batch, call })
        };
        let slots = parts.iter().map(slot).collect::<Result<Vec<_>>>()?;
        if whole.operation() == Op::Peek {
            let shown = self.ask_all(&slots, "peek", deadline).await?;
            return self.joined(parts, &slots, &shown);
        }
        let charging = deadline.to_charge();
        let reserve = if whole.operation() == Op::Extend { "grow" } else { "reserve" };
        // An attempt counts once, so there is no second round.
        let attempts =
            slots.iter().flat_map(|slot| &slot.call.twins).any(|check| check.twin.attempts);
        let most = if attempts { 1 } else { ROUNDS };
        let mut rounds = Rounds::new(most, charging, self.inner.connection.address());
        // Whether a charge of an earlier round may remain.
        let mut charged = false;
        // What each slot decided in the last round, of which one denied.
        let mut denied: Option<Vec<_>> = None;
        loop {
            let asked = self.ask_all(&slots, "ask", charging).await;
            let asked = asked.map_err(|error| rounds.explain(error).after(charged))?;
            if !asked.iter().all(SlotDecision::allowed) {
                let verdict = self.joined(parts, &slots, &asked)?;
                let denied = charge_attempts(self, whole, parts, verdict, deadline).await;
                return denied.map_err(|error| error.after(charged));
            }
            if let Some(denied) = denied.filter(|_| !rounds.is_in_time()) {
                return self.joined(parts, &slots, &denied);
            }
            let reserving = slots.iter().map(|slot| self.decide_in(slot, reserve, charging));
            let reserved = all(reserving).await;
            if reserved.iter().all(|slot| slot.as_ref().is_ok_and(SlotDecision::allowed)) {
                let reserved: Vec<_> = reserved.into_iter().flatten().collect();
                return self.joined(parts, &slots, &reserved);
            }
            rounds.begin();
            let back = deadline.to_give_back();
            let undoing = slots.iter().zip(&reserved).map(|(slot, all)| self.undo(slot, all, back));
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
                return self.joined(parts, &slots, &reserved);
            }
            denied = Some(reserved);
        }
    }

    async fn ask_all<A: LuaProgram>(
        &self,
        slots: &[SlotPart<'_, A>],
        operation: &str,
        deadline: Deadline,
    ) -> Result<Vec<SlotDecision>> {
        all_of_lookups(slots.iter().map(|slot| self.decide_in(slot, operation, deadline))).await
    }

    /// Runs an operation in a slot.
    async fn decide_in<A: LuaProgram>(
        &self,
        SlotPart { batch, call }: &SlotPart<'_, A>,
        operation: &str,
        deadline: Deadline,
    ) -> Result<SlotDecision> {
        let answer = self.run(batch, call, operation, &[], deadline).await?;
        let verdict = match operation {
            "reserve" | "grow" => self.decided(batch, call, &answer)?,
            _ => self.would_decide(batch, call, &answer)?,
        };
        Ok(SlotDecision { verdict, answer })
    }

    /// Returns what a slot charged, if anything. Returns whether no part is still charged.
    async fn undo<A: LuaProgram>(
        &self,
        SlotPart { batch, call }: &SlotPart<'_, A>,
        reserved: &Result<SlotDecision>,
        deadline: Deadline,
    ) -> Result<bool> {
        let Ok(SlotDecision { answer, .. }) = reserved else { return Ok(true) };
        let written = call.twins.iter().zip(&answer.notes);
        let written = written.filter(|(_, made)| *made != "-");
        // An attempt stays counted.
        let (counted, charged): (Vec<_>, Vec<_>) =
            written.partition(|(check, _)| check.twin.attempts);
        if charged.is_empty() {
            return Ok(counted.is_empty());
        }
        let (twins, made): (_, Vec<_>) =
            charged.into_iter().map(|(check, made)| (check.clone(), Argument::Text(made))).unzip();
        let answer = self.run(batch, &call.with_twins(twins), "undo", &made, deadline).await?;
        Ok(counted.is_empty() && answer.notes.iter().all(|note| note == "1"))
    }

    /// The verdict of what each slot decides. If one denies, those that allow report what they decide in a denied batch.
    fn joined<A: LuaProgram>(
        &self,
        parts: &[InSlot<'_, A>],
        slots: &[SlotPart<'_, A>],
        decided: &[SlotDecision],
    ) -> Result<Verdict> {
        let is_denied = !decided.iter().all(SlotDecision::allowed);
        let verdicts = slots.iter().zip(decided).map(|(SlotPart { batch, call }, slot)| {
            if is_denied && slot.allowed() {
                return self.would_decide(&batch.denied_elsewhere(), call, &slot.answer);
            }
            Ok(slot.verdict.clone())
        });
        Ok(join(parts, &verdicts.collect::<Result<Vec<_>>>()?))
    }
}
