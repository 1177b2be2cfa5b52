//! The part of the model that is about admitted requests: what they have reserved is settled when
//! the last of what they hold ends.

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::{Algorithm as _, AnyAlgorithm, Timestamp};

use crate::model::{Answer, Keeper, Model, Said};
use crate::setup::{Ask, Charged, Go, Handler, Mode, Outcome};

/// A settlement in the store: the limit's name, whose it is, at what cost, and how much of that is
/// forgiven.
pub(crate) type Settled = (String, Vec<String>, u64, u64);

/// An admitted request, until the last of what it holds ends.
pub(crate) struct Underway<'a> {
    handler: Handler,
    /// What is reserved.
    reserved: Option<Vec<Said<'a>>>,
    since_us: u64,
    phase: Phase,
    meter: Option<u64>,
    by_response: Option<u64>,
    counts_bytes: bool,
    /// The handler keeps the reservation.
    is_kept: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Handled,
    /// The body is sent; after its last frame nothing is reserved for it.
    Sent {
        last: bool,
    },
    /// The response is over, and something may be kept.
    Over,
}

impl Underway<'_> {
    /// The service answers, fails or panics.
    fn ends(&mut self, charged: Charged, is_free: impl Fn(u16) -> bool) -> Phase {
        match self.handler.outcome {
            Outcome::Panics => Phase::Over,
            Outcome::Fails => {
                self.by_response = is_free(500).then_some(0);
                Phase::Over
            }
            Outcome::Answers { status } => {
                self.by_response = match charged {
                    _ if is_free(status) => Some(0),
                    Charged::Estimate => None,
                    Charged::Bytes => Some(0),
                    Charged::Status => Some(u64::from(status / 100)),
                };
                self.counts_bytes = charged == Charged::Bytes && !is_free(status);
                Phase::Sent { last: false }
            }
        }
    }

    /// A frame of the body is sent, or there is none.
    fn sends(&mut self) -> Phase {
        let body = &mut self.handler.body;
        let Some(bytes) = body.bytes.pop_front() else { return Phase::Over };
        if let (true, Some(sent)) = (self.counts_bytes, &mut self.by_response) {
            *sent += bytes;
        }
        if body.meters {
            self.meter = Some(self.meter.unwrap_or_default() + 1);
        }
        Phase::Sent { last: body.is_over() }
    }
}

/// How much more than a limit and its debt have room for is charged.
fn forgiven(algorithm: &AnyAlgorithm, state: Option<&AnyState>, now: Timestamp, more: u64) -> u64 {
    let left = algorithm.step(state, now, 0).decision.remaining;
    (more + algorithm.owed(state, now)).saturating_sub(left + algorithm.debt())
}

impl<'a> Model<'a> {
    /// The request goes to its handler, if limits `have` decided with what they said.
    pub(crate) fn admit(
        &mut self,
        ask: &Ask,
        answer: Answer,
        have: Option<Vec<Said<'a>>>,
    ) -> Answer {
        let handler = ask.handler.clone();
        let reserved = have.filter(|_| matches!(self.setup.mode, Mode::Reserving(_)));
        self.underway.push(Underway {
            since_us: self.now_us,
            phase: Phase::Handled,
            meter: handler.metered,
            by_response: None,
            counts_bytes: false,
            is_kept: reserved.is_some() && handler.keeps,
            reserved,
            handler,
        });
        let status = match ask.handler.outcome {
            Outcome::Answers { status } => status,
            Outcome::Fails | Outcome::Panics => 0,
        };
        Answer { status, ..answer }
    }

    /// One of those that are underway goes on. Returns what is settled, and whether it is underway
    /// still.
    pub(crate) fn go(&mut self, nth: usize, go: Go) -> (Vec<Settled>, bool) {
        let setup = self.setup;
        let is_free = |status| status == 304 || (status == 500 && setup.frees_500);
        let charged = match setup.mode {
            Mode::Reserving(charged) => charged,
            _ => Charged::Estimate,
        };
        let one = &mut self.underway[nth];
        one.phase = match (one.phase, go) {
            (Phase::Over, _) => {
                one.is_kept = false;
                Phase::Over
            }
            (_, Go::Off) => Phase::Over,
            (Phase::Handled, _) => one.ends(charged, is_free),
            (Phase::Sent { .. }, _) => one.sends(),
        };
        let ended = matches!(one.phase, Phase::Over | Phase::Sent { last: true }) && !one.is_kept;
        let stays = one.phase != Phase::Over || one.is_kept;
        let mut settled = if ended { self.settle(nth) } else { Vec::new() };
        match go {
            _ if !stays => drop(self.underway.remove(nth)),
            Go::Through => {
                settled.extend(self.go(nth, go).0);
                return (settled, false);
            }
            Go::On | Go::Off => {}
        }
        (settled, stays)
    }

    /// All of what a request has reserved costs what the handler says, or else the response, or
    /// else the estimate.
    fn settle(&mut self, nth: usize) -> Vec<Settled> {
        let one = &mut self.underway[nth];
        let Some(reserved) = one.reserved.take() else { return Vec::new() };
        let (all, metered_of) = (one.meter.or(one.by_response), one.handler.metered_of);
        let held_us = (self.now_us - one.since_us).max(1);
        self.hold_us = Some(match self.hold_us {
            None => held_us,
            Some(mean) => (mean - mean / 8 + held_us / 8).max(1),
        });
        let (mut settled, now) = (Vec::new(), self.now());
        for said in reserved {
            let Some((keeper, reservation)) = said.charged else { continue };
            let own = metered_of.filter(|(name, _)| *name == said.limit.name);
            let cost = own.map(|(_, cost)| cost).or(all).unwrap_or(said.decision.cost);
            let key = (keeper, said.limit.name, said.whose.clone());
            let mut lost = 0;
            if said.limit.kind.is_leases() {
                *self.held.entry(key).or_default() -= said.decision.cost;
            } else {
                let algorithm = self.algorithm(keeper, said.limit);
                let state = self.states.get(&key);
                lost = forgiven(&algorithm, state, now, cost.saturating_sub(reservation.cost));
                let step = algorithm.settle(state, now, &reservation, cost).expect("it reserves");
                let after = step.write.after(state).cloned();
                self.set(key, after);
            }
            if keeper == Keeper::Store {
                settled.push((said.limit.name.to_owned(), said.whose, cost, lost));
            }
        }
        settled
    }
}
