//! Decides a batch across slots of a cluster in two waves, since no script sees all of it.
//!
//! 1. Ask every slot. If one denies, that is the verdict, and nothing has been written.
//! 2. Charge every slot. If one denies now, another client charged in between: the store returns the
//!    charges of the others and starts again, a bounded number of times.
//!
//! Asking first costs an admitted request one round trip more than charging at once and returning the
//! excess. In return a denied request writes nothing and blocks no capacity meanwhile.

use futures_util::future::join_all;
use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{Decision, Verdict};

use super::{InSlot, all_of_lookups, all_of_requests, each, join, worst};
use crate::connection::{Connection, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::lua_mode::call::{Call, TwinCheck};
use crate::lua_mode::driver_call::{NUMBERS_PER_DECISION, TwinRun, decision, decisions, per_twin};
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::rounds::Rounds;
use crate::store::RedisStore;

/// How many rounds a batch gets when other clients interfere.
const ROUNDS: usize = 8;

/// A twin's answer to a question.
struct TwinAnswer {
    decision: Decision,
    /// The decision to report if another limit denies the batch.
    denied: Decision,
}

/// What is needed to return a reserved charge: the time at which it counts as made, and its mark.
type Receipt = [i64; 2];

/// A twin's answer to a charge.
struct TwinReservation {
    decision: Decision,
    /// What is needed to return the charge; `None` if nothing was written.
    receipt: Option<Receipt>,
    /// The wait if another slot denies the batch.
    denied_wait_us: Option<u64>,
}

/// A slot's answer to the return of its charges.
struct Undone {
    decisions: Vec<Decision>,
    /// Whether a part may still be charged.
    charged: bool,
}

/// The part of a batch in one slot, and the call of its script.
struct SlotPart<'a, A> {
    batch: Batch<'a, A>,
    call: Call<'a>,
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Runs a batch whose parts lie in several slots.
    pub(crate) async fn apply_cross_slot<A: LuaProgram>(
        &self,
        whole: &Batch<'_, A>,
        parts: &[InSlot<'_, A>],
        deadline: Deadline,
    ) -> Result<Verdict, RedisError> {
        if !matches!(whole.operation(), Op::Acquire | Op::Peek) {
            return each(self, whole, parts, deadline).await;
        }
        let slot = |part| {
            let batch = InSlot::batch(part, whole)?;
            let call = Call::of(&self.inner.keys, &batch)?;
            Ok(SlotPart { batch, call })
        };
        let slots = parts.iter().map(slot).collect::<Result<Vec<_>, RedisError>>()?;
        let decisions = match whole.operation() {
            Op::Peek => shown(&slots, &self.ask_all(&slots, "show", deadline).await?),
            _ => self.acquire(&slots, deadline).await?,
        };
        Ok(join(parts, &decisions))
    }

    async fn acquire<A: LuaProgram>(
        &self,
        slots: &[SlotPart<'_, A>],
        deadline: Deadline,
    ) -> Result<Vec<Vec<Decision>>, RedisError> {
        let charging = deadline.to_charge();
        // An attempt counts once, so there is no second round.
        let attempts =
            slots.iter().flat_map(|slot| &slot.call.twins).any(|check| check.twin.attempts);
        let mut rounds = Rounds::new(if attempts { 1 } else { ROUNDS }, charging);
        // Whether a charge of an earlier round may remain.
        let mut charged = false;
        loop {
            let answers = self.ask_all(slots, "ask", charging).await;
            let answers = answers.map_err(|error| rounds.explain(error).after(charged))?;
            if !answers.iter().flatten().all(|answer| answer.decision.allowed) {
                let denied = self.denied(slots, &answers, deadline).await;
                return denied.map_err(|error| error.after(charged));
            }
            let reserved = join_all(slots.iter().map(|slot| self.reserve(slot, charging))).await;
            let admitted = |all: &Vec<TwinReservation>| all.iter().all(|one| one.decision.allowed);
            if reserved.iter().all(|slot| slot.as_ref().is_ok_and(admitted)) {
                let reserved = reserved.iter().flatten();
                let decided = slots.iter().zip(reserved).map(|(slot, reserved)| {
                    slot.call.by_check(reserved.iter().map(|one| one.decision).collect())
                });
                return Ok(decided.collect());
            }
            let back = deadline.to_give_back();
            let undoing = slots.iter().zip(&reserved).map(|(slot, all)| self.undo(slot, all, back));
            let undone = join_all(undoing).await;
            charged |= undone.iter().flatten().any(|undone| undone.charged);
            if let Some(error) = worst(&reserved) {
                let error = rounds.explain(error);
                return Err(error.after(charged || undone.iter().any(Result::is_err)));
            }
            if let Some(error) = worst(&undone) {
                return Err(error.in_part());
            }
            if !rounds.another() {
                return Ok(undone.into_iter().flatten().map(|undone| undone.decisions).collect());
            }
        }
    }

    /// The verdict of a batch that one of its slots denies. Attempts are charged nevertheless.
    async fn denied<A: LuaProgram>(
        &self,
        slots: &[SlotPart<'_, A>],
        answers: &[Vec<TwinAnswer>],
        deadline: Deadline,
    ) -> Result<Vec<Vec<Decision>>, RedisError> {
        let charging = slots.iter().zip(answers).map(async |(slot, answers)| {
            let attempts =
                || slot.call.twins.iter().enumerate().filter(|(_, check)| check.twin.attempts);
            let mut denied: Vec<_> = answers.iter().map(|answer| answer.denied).collect();
            if attempts().next().is_some() {
                let twins: Vec<TwinRun<'_>> =
                    attempts().map(|(_, check)| (check, &[][..])).collect();
                let answer = self.run(&slot.batch, &slot.call, "attempt", &twins, deadline).await?;
                let charged = decisions(&slot.batch, &twins, &answer);
                let charged = charged.ok_or_else(|| self.inner.unexpected(&answer))?;
                for ((place, _), charged) in attempts().zip(charged) {
                    denied[place] = charged;
                }
            }
            Ok(slot.call.by_check(denied))
        });
        all_of_requests(charging).await
    }

    async fn ask_all<A: LuaProgram>(
        &self,
        slots: &[SlotPart<'_, A>],
        operation: &'static str,
        deadline: Deadline,
    ) -> Result<Vec<Vec<TwinAnswer>>, RedisError> {
        all_of_lookups(slots.iter().map(|slot| self.ask(slot, operation, deadline))).await
    }

    async fn ask<A: LuaProgram>(
        &self,
        slot: &SlotPart<'_, A>,
        operation: &'static str,
        deadline: Deadline,
    ) -> Result<Vec<TwinAnswer>, RedisError> {
        let twins = slot.call.all();
        let answer = self.run(&slot.batch, &slot.call, operation, &twins, deadline).await?;
        let answers = per_twin(&twins, &answer, 2 * NUMBERS_PER_DECISION, |check, items| {
            let (stepped, denied) = items.split_at(NUMBERS_PER_DECISION);
            let decision = |items| decision(&check.twin, slot.cost(check), items);
            Some(TwinAnswer { decision: decision(stepped)?, denied: decision(denied)? })
        });
        answers.ok_or_else(|| self.inner.unexpected(&answer))
    }

    async fn reserve<A: LuaProgram>(
        &self,
        slot: &SlotPart<'_, A>,
        deadline: Deadline,
    ) -> Result<Vec<TwinReservation>, RedisError> {
        let twins = slot.call.all();
        let answer = self.run(&slot.batch, &slot.call, "reserve", &twins, deadline).await?;
        let reserved = per_twin(&twins, &answer, NUMBERS_PER_DECISION + 4, |check, items| {
            let (decided, receipt) = items.split_at(NUMBERS_PER_DECISION);
            let decision = decision(&check.twin, slot.cost(check), decided)?;
            let &[
                Reply::Integer(written),
                Reply::Integer(at_us),
                Reply::Integer(mark),
                Reply::Integer(wait_us),
            ] = receipt
            else {
                return None;
            };
            let denied_wait_us = u64::try_from(wait_us).ok();
            Some(TwinReservation {
                decision,
                receipt: (written == 1).then_some([at_us, mark]),
                denied_wait_us,
            })
        });
        reserved.ok_or_else(|| self.inner.unexpected(&answer))
    }

    /// Returns what a slot charged, if anything, and reports the slot's decisions afterwards.
    async fn undo<A: LuaProgram>(
        &self,
        slot: &SlotPart<'_, A>,
        reserved: &Result<Vec<TwinReservation>, RedisError>,
        deadline: Deadline,
    ) -> Result<Undone, RedisError> {
        let Ok(reserved) = reserved else {
            return Ok(Undone { decisions: Vec::new(), charged: false });
        };
        let denied = |reserved: &TwinReservation| Decision {
            retry_after_us: reserved.denied_wait_us,
            ..reserved.decision
        };
        let mut decisions: Vec<_> = reserved.iter().map(denied).collect();
        let written = slot.call.twins.iter().zip(reserved).enumerate().filter_map(
            |(place, (check, reserved))| Some((place, check, reserved.receipt.as_ref()?)),
        );
        let (counted, charged): (Vec<_>, Vec<_>) =
            written.partition(|(_, check, _)| check.twin.attempts);
        // An attempt stays counted.
        let mut still = !counted.is_empty();
        if !charged.is_empty() {
            let twins: Vec<TwinRun<'_>> =
                charged.iter().map(|(_, check, receipt)| (*check, &receipt[..])).collect();
            let answer = self.run(&slot.batch, &slot.call, "undo", &twins, deadline).await?;
            let shown = per_twin(&twins, &answer, NUMBERS_PER_DECISION + 1, |check, items| {
                let (shown, given_back) = items.split_at(NUMBERS_PER_DECISION);
                let decision = decision(&check.twin, slot.cost(check), shown)?;
                Some((decision, given_back == [Reply::Integer(1)]))
            });
            let shown = shown.ok_or_else(|| self.inner.unexpected(&answer))?;
            for ((place, _, _), (shown, given_back)) in charged.iter().zip(shown) {
                decisions[*place] = shown;
                still |= !given_back;
            }
        }
        Ok(Undone { decisions: slot.call.by_check(decisions), charged: still })
    }
}

impl<A: LuaProgram> SlotPart<'_, A> {
    fn cost(&self, check: &TwinCheck<'_>) -> u64 {
        self.batch.checks()[check.position].cost
    }
}

/// The decisions that a peek reports.
fn shown<A: LuaProgram>(
    slots: &[SlotPart<'_, A>],
    answers: &[Vec<TwinAnswer>],
) -> Vec<Vec<Decision>> {
    let allowed = answers.iter().flatten().all(|answer| answer.decision.allowed);
    let of_twin = |answer: &TwinAnswer| if allowed { answer.decision } else { answer.denied };
    let of_slot = |(slot, answers): (&SlotPart<'_, A>, &Vec<TwinAnswer>)| {
        slot.call.by_check(answers.iter().map(of_twin).collect())
    };
    slots.iter().zip(answers).map(of_slot).collect()
}
