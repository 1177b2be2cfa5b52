//! What a limiter must say: the steps of the algorithms, one limit after the other, by name.

use std::collections::{BTreeMap, HashMap};

use ratelimit_core::algorithm::{AnyState, Step, Write};
use ratelimit_core::store::{Op, Reservation};
use ratelimit_core::{
    Account, Algorithm as _, AnyAlgorithm, Decision, ErrorKind, Limit, ReservationId, Timestamp,
};

use super::Named;
use super::made::{AskedRequest, LimitDraft, MAX, TestRecord};

/// What must come out.
#[derive(Clone, Debug)]
pub(crate) enum Due {
    /// An error of this kind, which names these.
    Refused { kind: ErrorKind, names: Vec<String> },
    /// A decision of each limit that applies, in the order of the policy.
    Decided { summary: Decision, decided: Vec<Named>, shadow: Vec<(String, Decision, bool)> },
}

/// A limit's name and the identifiers that it counts by.
type ModelKey = (String, Vec<&'static str>);

/// The states of all keys, and the reservations of all ids.
pub(crate) struct Model<'l> {
    limits: &'l [LimitDraft],
    allows_unlimited: bool,
    states: HashMap<ModelKey, AnyState>,
    reservations: BTreeMap<(ReservationId, String), Reservation>,
    records: HashMap<ModelKey, TestRecord>,
}

/// A limit that applies, with its state before the request and its step.
struct Stepped {
    key: ModelKey,
    limit: Limit<AnyAlgorithm>,
    cost: u64,
    before: Option<AnyState>,
    step: Step<AnyState>,
    forgiven: u64,
    reservation: Option<Reservation>,
    /// Whether a record decides, so that nothing is charged.
    spared: bool,
}

impl<'l> Model<'l> {
    pub(crate) fn new(limits: &'l [LimitDraft], allows_unlimited: bool) -> Self {
        let (states, reservations, records) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        Self { limits, allows_unlimited, states, reservations, records }
    }

    /// Replaces the record that a request comes with.
    pub(crate) fn replace_record(&mut self, asked: &AskedRequest) {
        let Some((place, record)) = asked.record else { return };
        let limit = &self.limits[place];
        let key = (limit.name.clone(), asked.caller.key(limit).expect("it applies"));
        match record {
            Some(record) => _ = self.records.insert(key, record),
            None => _ = self.records.remove(&key),
        }
    }

    /// What a request must be told. Changes the states as it does.
    pub(crate) fn expect(&mut self, asked: &AskedRequest) -> Due {
        let refused = |kind, names| Due::Refused { kind, names };
        let limits = self.limits;
        let (mut given, _) = asked.costs.parts();
        if let Some((unknown, _)) =
            given.find(|(name, _)| limits.iter().all(|limit| limit.name != *name))
        {
            return refused(ErrorKind::Invalid, vec![unknown.to_owned()]);
        }
        let is_larger =
            |limit: &&LimitDraft| asked.own.get(&limit.name).is_some_and(|own| *own > MAX);
        if let Some(limit) = limits.iter().find(is_larger) {
            return refused(ErrorKind::Invalid, vec![limit.name.clone()]);
        }
        let lacks = |limit: &&LimitDraft| {
            let is_asked = limit.required && !limit.shadow && asked.caller.meets(limit);
            is_asked && asked.caller.key(limit).is_none()
        };
        if let Some(limit) = limits.iter().find(lacks) {
            return refused(ErrorKind::Invalid, vec![limit.name.clone()]);
        }
        let applying = |shadow: bool| {
            limits
                .iter()
                .filter(move |limit| limit.shadow == shadow && asked.caller.key(limit).is_some())
        };
        let mut enforced = limits.iter().filter(|limit| !limit.shadow).peekable();
        if applying(false).next().is_none() && !self.allows_unlimited && enforced.peek().is_some() {
            let names = enforced.map(|limit| limit.name.clone()).collect();
            return refused(ErrorKind::Invalid, names);
        }
        let decided = match self.decide_together(&applying(false).collect::<Vec<_>>(), asked) {
            Ok(decided) => decided,
            Err(refused) => return refused,
        };
        let allowed = decided.iter().all(|(_, one, ..)| one.allowed);
        let mut shadow = Vec::new();
        for limit in applying(true).filter(|_| allowed) {
            if let Ok(one) = self.decide_together(&[limit], asked) {
                shadow.extend(one.into_iter().map(|(name, one, _, warned)| (name, one, warned)));
            }
        }
        Due::Decided { summary: summary(&decided), decided, shadow }
    }

    /// The decisions of limits that are charged together or not at all.
    fn decide_together(
        &mut self,
        limits: &[&LimitDraft],
        asked: &AskedRequest,
    ) -> Result<Vec<Named>, Due> {
        let mut stepped = Vec::new();
        let mut known = limits.is_empty() || asked.op != Op::Settle;
        for limit in limits {
            let one = self.step_limit(limit, asked)?;
            known |= one.reservation.is_some();
            stepped.push(one);
        }
        if !known {
            return Err(Due::Refused { kind: ErrorKind::Ended, names: Vec::new() });
        }
        let allowed = stepped.iter().all(|one| one.step.decision.allowed);
        let mut decided = Vec::new();
        for one in stepped {
            let now = asked.at;
            let counts_attempts = one.limit.counts_attempts() && !one.spared;
            let algorithm = one.limit.algorithm();
            let mut decision = one.step.decision;
            let written = allowed || counts_attempts;
            let after = match &one.step.write {
                Write::Put { state, .. } if written => Some(state.clone()),
                Write::Remove if written => None,
                _ => one.before.clone(),
            };
            if !allowed && decision.allowed {
                if counts_attempts {
                    let again = algorithm.step(after.as_ref(), now, one.cost).decision;
                    decision.retry_after_us = again.retry_after_us;
                } else {
                    decision = algorithm.step(one.before.as_ref(), now, 0).decision;
                    decision.cost = one.cost;
                }
            }
            let owed = algorithm.owed(after.as_ref(), now);
            let used = |state: Option<&AnyState>| {
                let decision = algorithm.step(state, now, 0).decision;
                decision.limit - decision.remaining + algorithm.owed(state, now)
            };
            // A peek tells what would be written.
            let (before, after_it) = (used(one.before.as_ref()), used(after.as_ref()));
            let warned = one.limit.warns_at_percent().is_some_and(|percent| {
                let reached = |used: u64| used * 100 >= u64::from(percent.get()) * decision.limit;
                decision.allowed && written && !reached(before) && reached(after_it)
            });
            let account = Account { owed, forgiven: one.forgiven, charged: None };
            decided.push((one.key.0.clone(), decision, account, warned));
            if asked.op == Op::Peek {
                continue;
            }
            if let (Some(id), Some(reservation), true) = (asked.id, one.reservation, allowed) {
                self.reservations.insert((id, one.key.0.clone()), reservation);
            }
            match after {
                Some(state) => _ = self.states.insert(one.key, state),
                None => _ = self.states.remove(&one.key),
            }
        }
        Ok(decided)
    }

    fn step_limit(&self, limit: &LimitDraft, asked: &AskedRequest) -> Result<Stepped, Due> {
        let key = (limit.name.clone(), asked.caller.key(limit).expect("it applies"));
        // A record goes before the numbers of the request, and these before those of the policy.
        let record = self.records.get(&key).copied();
        let built = match record {
            Some(TestRecord::Numbers(number)) => limit.build_at(number),
            _ => limit.deciding(asked),
        };
        let algorithm = built.algorithm();
        let (cost, now) = (asked.costs.get(&limit.name), asked.at);
        let before = self.states.get(&key).cloned();
        let state = before.as_ref();
        let unsupported =
            || Due::Refused { kind: ErrorKind::Unsupported, names: vec![limit.name.clone()] };
        let mut reservation = None;
        let mut charged = 0;
        let is_exempt = record == Some(TestRecord::Exempt);
        let spared = match asked.op {
            Op::Acquire | Op::Peek => is_exempt || record == Some(TestRecord::Blocked),
            Op::Force => is_exempt,
            _ => false,
        };
        let step = match asked.op {
            _ if spared => {
                let mut decision = algorithm.step(state, now, 0).decision;
                decision.cost = cost;
                if !is_exempt {
                    // For ever.
                    decision = Decision {
                        allowed: false,
                        remaining: 0,
                        retry_after_us: None,
                        replenish_after_us: 0,
                        ..decision
                    };
                }
                if asked.id.is_some() {
                    let made = Reservation::new(algorithm.charged_at(state, now), cost);
                    reservation = Some(Reservation { counts: 0, ..made });
                }
                Step { decision, write: Write::Keep }
            }
            Op::Refund => algorithm.refund(state, now, cost).ok_or_else(unsupported)?,
            Op::Force => algorithm.force(state, now, cost).ok_or_else(unsupported)?,
            Op::Reset => {
                let mut decision = algorithm.step(None, now, 0).decision;
                decision.cost = cost;
                Step { decision, write: Write::Remove }
            }
            Op::Settle => {
                let of =
                    self.reservations.get(&(asked.id.expect("settled by id"), limit.name.clone()));
                let of = of.filter(|of| is_live(of, algorithm, now));
                if let Some(of) = of {
                    reservation = Some(Reservation { settled: Some(cost), ..of.clone() });
                    charged = of.cost;
                    // An exempt caller is charged no more than it has reserved.
                    let most = if is_exempt { of.cost } else { u64::MAX };
                    let settled = algorithm.settle(state, now, of, cost.min(most));
                    let mut step = settled.ok_or_else(unsupported)?;
                    step.decision.cost = cost;
                    step
                } else {
                    let mut decision = algorithm.step(state, now, 0).decision;
                    decision.cost = cost;
                    Step { decision, write: Write::Keep }
                }
            }
            _ => {
                let step = built.step(state, now, cost);
                if asked.id.is_some() {
                    built.reservation_us().ok_or_else(unsupported)?;
                    reservation = Some(if step.decision.allowed {
                        algorithm.record(state, now, cost, None)
                    } else {
                        Reservation::new(algorithm.charged_at(state, now), cost)
                    });
                }
                step
            }
        };
        let is_told = match asked.op {
            _ if is_exempt => false,
            Op::Force => true,
            // A lease ends at any cost, and a reservation that has ended has nothing to forgive.
            Op::Settle => reservation.is_some() && !algorithm.has_leases(),
            _ => false,
        };
        let more = cost.saturating_sub(charged);
        let forgiven = if is_told { forgiven(algorithm, state, now, more) } else { 0 };
        Ok(Stepped { key, limit: built, cost, before, step, forgiven, reservation, spared })
    }
}

fn is_live(reservation: &Reservation, algorithm: &AnyAlgorithm, now: Timestamp) -> bool {
    let life_us = algorithm.reservation_us().unwrap_or(Reservation::LIFE_US);
    now.as_us() < reservation.since.as_us() + life_us
}

/// What a charge of this cost passes capacity and debt by.
fn forgiven(algorithm: &AnyAlgorithm, state: Option<&AnyState>, now: Timestamp, cost: u64) -> u64 {
    let left = algorithm.step(state, now, 0).decision.remaining;
    (cost + algorithm.owed(state, now)).saturating_sub(left + algorithm.debt())
}

/// What is shown of all: the limit with the least remaining, the first of several, and the longest
/// waits.
fn summary(decided: &[Named]) -> Decision {
    let all = || decided.iter().map(|(_, one, ..)| one);
    let Some(least) = all().map(|one| one.remaining).min() else {
        return Decision {
            allowed: true,
            cost: 0,
            limit: u64::MAX,
            remaining: u64::MAX,
            retry_after_us: Some(0),
            replenish_after_us: 0,
            reset_after_us: 0,
        };
    };
    let tied = || all().filter(|one| one.remaining == least);
    let shown = tied().next().expect("the least is one of them");
    let grows = tied().all(|one| one.replenish_after_us > 0);
    let waits: Option<Vec<_>> = all().map(|one| one.retry_after_us).collect();
    Decision {
        allowed: all().all(|one| one.allowed),
        cost: shown.cost,
        limit: shown.limit,
        remaining: least,
        retry_after_us: waits.and_then(|waits| waits.into_iter().max()),
        replenish_after_us: if grows {
            tied().map(|one| one.replenish_after_us).max().unwrap_or(0)
        } else {
            0
        },
        reset_after_us: all().map(|one| one.reset_after_us).max().unwrap_or_default(),
    }
}
