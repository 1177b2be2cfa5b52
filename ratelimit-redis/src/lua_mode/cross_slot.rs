//! Decides a batch across slots of a cluster in two waves, since no script sees all of it.
//!
//! 1. Ask every slot. If one denies, that is the verdict, and nothing has been written.
//! 2. Charge every slot. If one denies now, another client charged in between: the store returns the
//!    charges of the others and starts again, a bounded number of times.
//!
//! Asking first costs an admitted request one round trip more than charging at once and returning the
//! excess. In return a denied request writes nothing and blocks no capacity meanwhile.

use futures_util::future::join_all;
use ratelimit_core::{Batch, Decision, Op, Verdict};

use super::{ANSWERS_PER_TWIN, Call, Part, Receipt, decision};
use crate::connection::{Connection, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::program::LuaProgram;
use crate::slots::{InSlot, asked, done, each, together, worst};
use crate::store::{Lua, RedisStore, Rounds};

/// How many rounds a batch gets when other clients interfere.
const ROUNDS: usize = 8;

/// A twin's answer to a question.
struct Told {
    decision: Decision,
    /// The decision to report if another limit denies the batch.
    denied: Decision,
}

/// A twin's answer to a charge.
struct Reserved {
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
struct Slot<'a, A> {
    batch: Batch<'a, A>,
    call: Call<'a>,
}

impl<C: Connection> RedisStore<Lua, C> {
    /// Runs a batch whose parts lie in several slots.
    pub(super) async fn apply_cross_slot<A: LuaProgram>(
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
            Ok(Slot { batch, call: Call::of(&self.inner.keys, &batch) })
        };
        let slots = parts.iter().map(slot).collect::<Result<Vec<_>, RedisError>>()?;
        let decisions = match whole.operation() {
            Op::Peek => shown(&slots, &self.ask_all(&slots, "show", deadline).await?),
            _ => self.acquire(&slots, deadline).await?,
        };
        Ok(together(parts, &decisions))
    }

    async fn acquire<A: LuaProgram>(
        &self,
        slots: &[Slot<'_, A>],
        deadline: Deadline,
    ) -> Result<Vec<Vec<Decision>>, RedisError> {
        let charging = deadline.to_charge();
        // An attempt counts once, so there is no second round.
        let attempts = slots.iter().flat_map(|slot| &slot.call.parts).any(|p| p.twin.attempts);
        let mut rounds = Rounds::new(if attempts { 1 } else { ROUNDS }, charging);
        // Whether a charge of an earlier round may remain.
        let mut charged = false;
        loop {
            let told = self.ask_all(slots, "ask", charging).await;
            let told = told.map_err(|error| rounds.told(error).after(charged))?;
            if !told.iter().flatten().all(|told| told.decision.allowed) {
                let denied = self.denied(slots, &told, deadline).await;
                return denied.map_err(|error| error.after(charged));
            }
            let reserved = join_all(slots.iter().map(|slot| self.reserve(slot, charging))).await;
            let admitted = |all: &Vec<Reserved>| all.iter().all(|one| one.decision.allowed);
            if reserved.iter().all(|slot| slot.as_ref().is_ok_and(admitted)) {
                let decided = |(slot, all): (&Slot<'_, A>, _)| slot.by_check(decisions(all));
                let reserved = reserved.into_iter().flatten();
                return Ok(slots.iter().zip(reserved).map(decided).collect());
            }
            let back = deadline.to_give_back();
            let undoing = slots.iter().zip(&reserved).map(|(slot, all)| self.undo(slot, all, back));
            let undone = join_all(undoing).await;
            charged |= undone.iter().flatten().any(|undone| undone.charged);
            if let Some(error) = worst(&reserved) {
                let error = rounds.told(error);
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
        slots: &[Slot<'_, A>],
        told: &[Vec<Told>],
        deadline: Deadline,
    ) -> Result<Vec<Vec<Decision>>, RedisError> {
        let charging = slots.iter().zip(told).map(async |(slot, told)| {
            let attempts = || slot.call.parts.iter().enumerate().filter(|(_, p)| p.twin.attempts);
            let mut decisions: Vec<_> = told.iter().map(|told| told.denied).collect();
            if attempts().next().is_some() {
                let parts: Vec<_> = attempts().map(|(_, part)| (part, None)).collect();
                let answer = self.call(slot, "attempt", &parts, deadline).await?;
                let charged = answers(&parts, &answer, ANSWERS_PER_TWIN, |part, items| {
                    decision(&part.twin, slot.cost(part), items)
                });
                let charged = charged.ok_or_else(|| self.inner.unexpected(&answer))?;
                for ((place, _), charged) in attempts().zip(charged) {
                    decisions[place] = charged;
                }
            }
            Ok(slot.by_check(decisions))
        });
        done(charging).await
    }

    async fn ask_all<A: LuaProgram>(
        &self,
        slots: &[Slot<'_, A>],
        operation: &'static str,
        deadline: Deadline,
    ) -> Result<Vec<Vec<Told>>, RedisError> {
        asked(slots.iter().map(|slot| self.ask(slot, operation, deadline))).await
    }

    async fn ask<A: LuaProgram>(
        &self,
        slot: &Slot<'_, A>,
        operation: &'static str,
        deadline: Deadline,
    ) -> Result<Vec<Told>, RedisError> {
        let parts = slot.all();
        let answer = self.call(slot, operation, &parts, deadline).await?;
        let told = answers(&parts, &answer, 2 * ANSWERS_PER_TWIN, |part, items| {
            let (stepped, denied) = items.split_at(ANSWERS_PER_TWIN);
            let cost = slot.cost(part);
            let decision = |items| decision(&part.twin, cost, items);
            Some(Told { decision: decision(stepped)?, denied: decision(denied)? })
        });
        told.ok_or_else(|| self.inner.unexpected(&answer))
    }

    async fn reserve<A: LuaProgram>(
        &self,
        slot: &Slot<'_, A>,
        deadline: Deadline,
    ) -> Result<Vec<Reserved>, RedisError> {
        let parts = slot.all();
        let answer = self.call(slot, "reserve", &parts, deadline).await?;
        let reserved = answers(&parts, &answer, ANSWERS_PER_TWIN + 4, |part, items| {
            let (decided, receipt) = items.split_at(ANSWERS_PER_TWIN);
            let decision = decision(&part.twin, slot.cost(part), decided)?;
            let &[
                Reply::Integer(written),
                Reply::Integer(at_us),
                Reply::Integer(mark),
                Reply::Integer(wait_us),
            ] = receipt
            else {
                return None;
            };
            let receipt = Receipt { at_us, mark };
            let denied_wait_us = u64::try_from(wait_us).ok();
            Some(Reserved { decision, receipt: (written == 1).then_some(receipt), denied_wait_us })
        });
        reserved.ok_or_else(|| self.inner.unexpected(&answer))
    }

    /// Returns what a slot charged, if anything, and reports the slot's decisions afterwards.
    async fn undo<A: LuaProgram>(
        &self,
        slot: &Slot<'_, A>,
        reserved: &Result<Vec<Reserved>, RedisError>,
        deadline: Deadline,
    ) -> Result<Undone, RedisError> {
        let Ok(reserved) = reserved else {
            return Ok(Undone { decisions: Vec::new(), charged: false });
        };
        let denied = |reserved: &Reserved| Decision {
            retry_after_us: reserved.denied_wait_us,
            ..reserved.decision
        };
        let mut decisions: Vec<_> = reserved.iter().map(denied).collect();
        let written = slot.call.parts.iter().zip(reserved).enumerate();
        let written = written.filter_map(|(place, (part, one))| Some((place, part, one.receipt?)));
        let (counted, charged): (Vec<_>, Vec<_>) =
            written.partition(|(_, part, _)| part.twin.attempts);
        // An attempt stays counted.
        let mut still = !counted.is_empty();
        if !charged.is_empty() {
            let parts: Vec<_> =
                charged.iter().map(|(_, part, receipt)| (*part, Some(*receipt))).collect();
            let answer = self.call(slot, "undo", &parts, deadline).await?;
            let shown = answers(&parts, &answer, ANSWERS_PER_TWIN + 1, |part, items| {
                let (shown, given_back) = items.split_at(ANSWERS_PER_TWIN);
                let decision = decision(&part.twin, slot.cost(part), shown)?;
                Some((decision, given_back == [Reply::Integer(1)]))
            });
            let shown = shown.ok_or_else(|| self.inner.unexpected(&answer))?;
            for ((place, _, _), (shown, given_back)) in charged.iter().zip(shown) {
                decisions[*place] = shown;
                still |= !given_back;
            }
        }
        Ok(Undone { decisions: slot.by_check(decisions), charged: still })
    }

    /// Calls the script of a slot for some of its twins.
    async fn call<A: LuaProgram>(
        &self,
        slot: &Slot<'_, A>,
        operation: &'static str,
        parts: &[(&Part<'_>, Option<Receipt>)],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let answer = self.run(&slot.batch, &slot.call, operation, parts, deadline).await;
        answer.map_err(|error| slot.call.described(&slot.batch, error))
    }
}

impl<A: LuaProgram> Slot<'_, A> {
    fn all(&self) -> Vec<(&Part<'_>, Option<Receipt>)> {
        self.call.parts.iter().map(|part| (part, None)).collect()
    }

    fn cost(&self, part: &Part<'_>) -> u64 {
        self.batch.checks()[part.check].cost
    }

    /// Joins the decisions of a check's twins.
    fn by_check(&self, decisions: Vec<Decision>) -> Vec<Decision> {
        self.call.by_check(decisions)
    }
}

/// The answers of these twins, `per_twin` integers each.
fn answers<T>(
    parts: &[(&Part<'_>, Option<Receipt>)],
    answer: &Reply,
    per_twin: usize,
    read: impl Fn(&Part<'_>, &[Reply]) -> Option<T>,
) -> Option<Vec<T>> {
    let Reply::Array(items) = answer else { return None };
    if items.len() != parts.len() * per_twin {
        return None;
    }
    let items = items.chunks_exact(per_twin);
    parts.iter().zip(items).map(|((part, _), items)| read(part, items)).collect()
}

fn decisions(reserved: Vec<Reserved>) -> Vec<Decision> {
    reserved.into_iter().map(|reserved| reserved.decision).collect()
}

/// The decisions that a peek reports.
fn shown<A: LuaProgram>(slots: &[Slot<'_, A>], told: &[Vec<Told>]) -> Vec<Vec<Decision>> {
    let allowed = told.iter().flatten().all(|told| told.decision.allowed);
    let of_twin = |told: &Told| if allowed { told.decision } else { told.denied };
    let of_slot = |(slot, told): (&Slot<'_, A>, &Vec<Told>)| {
        slot.by_check(told.iter().map(of_twin).collect())
    };
    slots.iter().zip(told).map(of_slot).collect()
}
