//! All runs of a few nodes that draw from one fixed window, checked exhaustively by stateright.
//!
//! The nodes run [`AllotmentSlot`], the server runs [`FixedWindow`]'s own steps and settlements. In any order, requests come, messages
//! arrive late or never, callers lose patience, nodes crash, and allotments end. The wrong variants prove that the properties
//! can fail.

mod checks;

use std::collections::BTreeMap;

use ratelimit_core::algorithm::{FixedWindowState, Recovery, Write};
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, Decision, FixedWindow, ReservationId, Timestamp};
use stateright::{Model, Property};

use super::slot::{AllotmentSlot, Draw, Ended, SlotDecision, Terms};

/// What is wrong, if anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    None,
    /// A draw whose answer is lost counts as charged.
    TrustsALostDraw,
    /// An allotment lives on in the next window.
    OutlivesItsWindow,
    /// What is given back is spent as well.
    SpendsWhatItGaveBack,
    /// A clock that is slow is trusted.
    TrustsASlowClock,
    /// The server forgets at the end of a window what is owed.
    ForgetsDebt,
}

#[derive(Clone, Debug)]
pub(super) struct Nodes {
    pub(super) limit: u64,
    pub(super) debt: u64,
    /// The length of a window and of a lifetime. A tick of the server's clock is a microsecond.
    pub(super) window: u64,
    /// Whether each node's clock runs at half the speed of the server's.
    pub(super) are_slow: Vec<bool>,
    /// How many requests come to each node.
    pub(super) requests: Vec<u8>,
    /// When the run ends.
    pub(super) ticks: u64,
    /// How many callers give up. A message that never arrives is lost.
    pub(super) losses: u8,
    pub(super) crashes: u8,
    /// How many allotments end before their time.
    pub(super) early: u8,
    /// How many times another process charges the limit and the debt, whatever remains.
    pub(super) forced: u8,
    pub(super) flaw: Flaw,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ModelState {
    now: u64,
    server: ModelServer,
    nodes: Vec<ModelNode>,
    /// What is in flight. A message can arrive before those that were sent before it.
    network: BTreeMap<u8, Message>,
    losses: u8,
    crashes: u8,
    early: u8,
    forced: u8,
    /// What was used and not forgiven, by window.
    used: Vec<u64>,
    /// Whether a request was served without a call.
    has_served: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct ModelServer {
    start: u64,
    ends: u64,
    count: u64,
    /// When each reservation was charged, at what cost, and whether it is settled.
    reservations: BTreeMap<u128, (u64, u64, bool)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct ModelNode {
    slot: AllotmentSlot,
    requests: u8,
    draws: u8,
    /// The requests that wait for an answer, by message.
    calls: BTreeMap<u8, ModelCall>,
    /// What a wrong variant counts beside the slot.
    extra: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ModelCall {
    Plain,
    /// When it was sent, by the server's clock.
    Draw(Draw, u64),
    /// What was left is given back before this draw, or before the request is asked alone.
    Settle(Option<Draw>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Message {
    Acquire { node: usize, cost: u64, id: Option<u128> },
    Settle { node: usize, id: u128, used: u64, is_awaited: bool },
    Reply { node: usize, decision: Option<Decision>, window: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModelEvent {
    Tick,
    /// A request comes to this node.
    Request(usize),
    /// The message of this number arrives; its answer has the same number.
    Arrive(u8),
    /// The caller at this node gives up this call before the answer has come.
    GiveUp(usize, u8),
    /// The allotment of this node ends: because it is over, or early, which is always allowed.
    End(usize),
    Crash(usize),
    /// Another process charges.
    Force,
}

fn at(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(us)
}

impl ModelServer {
    fn state(&self) -> Option<FixedWindowState> {
        let (start, count, ends_us) = (at(self.start), self.count, self.ends);
        (count > 0).then_some(FixedWindowState { start, count, ends_us })
    }

    fn write(&mut self, write: &Write<FixedWindowState>) {
        let before = self.state();
        let after = write.after(before.as_ref());
        (self.start, self.ends, self.count) =
            after.map_or((0, 0, 0), |state| (state.start.as_us(), state.ends_us, state.count));
    }
}

impl Nodes {
    fn fixed_window(&self) -> FixedWindow {
        let rate = ratelimit_core::Rate::per_us(self.limit, self.window).expect("a rate");
        FixedWindow::with_debt(rate, self.debt).expect("a limit")
    }

    fn terms(&self) -> Terms {
        let trusts = !self.are_slow.contains(&true) || self.flaw == Flaw::TrustsASlowClock;
        let drift_ppm = if trusts { 0 } else { 500_000 };
        Terms { lifetime_us: self.window, drift_ppm, divisor: 1, most: self.limit }
    }

    /// What the clock of a node says.
    fn local(&self, node: usize, now: u64) -> Timestamp {
        at(if self.are_slow[node] { now / 2 } else { now })
    }

    fn send(state: &mut ModelState, message: Message) -> u8 {
        // The same situation has the same numbers, whatever came before.
        let is_free = |number: &u8| {
            let mut nodes = state.nodes.iter();
            !state.network.contains_key(number) && !nodes.any(|own| own.calls.contains_key(number))
        };
        let number = (0..u8::MAX).find(is_free).expect("few messages");
        state.network.insert(number, message);
        number
    }

    /// Sends what is left of an allotment back.
    fn settle(state: &mut ModelState, node: usize, ended: &Ended, is_awaited: bool) -> u8 {
        let (id, used) = (ended.id.as_u128(), ended.used[0]);
        Self::send(state, Message::Settle { node, id, used, is_awaited })
    }

    fn ask(state: &mut ModelState, node: usize, draw: Option<Draw>) {
        let (id, cost) = (draw.map(|draw| draw.id.as_u128()), draw.map_or(1, |draw| draw.times));
        let sent = Self::send(state, Message::Acquire { node, cost, id });
        let call = draw.map_or(ModelCall::Plain, |draw| ModelCall::Draw(draw, state.now));
        state.nodes[node].calls.insert(sent, call);
    }

    fn request(&self, state: &mut ModelState, node: usize) {
        let (now, local) = (state.now, self.local(node, state.now));
        let own = &mut state.nodes[node];
        let id = ReservationId::new((node as u128) << 8 | u128::from(own.draws));
        own.requests += 1;
        let answer = if own.extra > 0 {
            own.extra -= 1;
            SlotDecision::Serve(Vec::new())
        } else {
            own.slot.request(&self.terms(), local, &[1], || id)
        };
        own.draws += u8::from(matches!(answer, SlotDecision::Ask { draw: Some(_), .. }));
        match answer {
            SlotDecision::Serve(_) => {
                state.has_served = true;
                count(state, now / self.window, 1);
            }
            SlotDecision::Ask { ended: Some(ended), draw } => {
                let sent = Self::settle(state, node, &ended, true);
                state.nodes[node].calls.insert(sent, ModelCall::Settle(draw));
            }
            SlotDecision::Ask { ended: None, draw } => Self::ask(state, node, draw),
        }
    }

    /// What the server does with a message.
    fn serve(&self, state: &mut ModelState, number: u8, message: Message) {
        let (window, now, server) = (self.fixed_window(), at(state.now), &mut state.server);
        let before = server.state();
        let (node, decision) = match message {
            Message::Acquire { node, cost, id } => {
                let known = id.is_some_and(|id| server.reservations.contains_key(&id));
                let step = window.step(before.as_ref(), now, if known { 0 } else { cost });
                server.write(&step.write);
                if let (Some(id), true, false) = (id, step.decision.allowed, known) {
                    server.reservations.insert(id, (state.now, cost, false));
                }
                (node, Some(step.decision))
            }
            Message::Settle { node, id, used, is_awaited } => {
                if let Some((charged, cost, is_settled)) = server.reservations.get_mut(&id)
                    && !*is_settled
                {
                    *is_settled = true;
                    let reservation = Reservation::new(at(*charged), *cost);
                    let step = window.settle(before.as_ref(), now, &reservation, used);
                    server.write(&step.expect("a reservation").write);
                }
                if !is_awaited {
                    return;
                }
                (node, None)
            }
            Message::Reply { .. } => return,
        };
        let window = state.now / self.window;
        let call = state.nodes[node].calls.get(&number);
        if matches!(call, Some(ModelCall::Draw(..))) {
            state.network.insert(number, Message::Reply { node, decision, window });
        } else {
            // No allotment depends on when these answers come.
            self.answered(state, node, number, (decision, window));
        }
    }

    /// What a node does with the answer to a call.
    fn answered(
        &self,
        state: &mut ModelState,
        node: usize,
        number: u8,
        said: (Option<Decision>, u64),
    ) {
        let Some(call) = state.nodes[node].calls.remove(&number) else { return };
        let (decision, window) = said;
        let slot = &mut state.nodes[node].slot;
        match (call, decision) {
            (ModelCall::Settle(draw), _) => Self::ask(state, node, draw),
            (ModelCall::Plain, Some(decision)) => {
                slot.tell([&decision].into_iter());
                if decision.allowed {
                    count(state, window, 1);
                }
            }
            (ModelCall::Draw(draw, sent), Some(decision)) if decision.allowed => {
                let recovery = match self.flaw {
                    Flaw::OutlivesItsWindow => Recovery::Gradual,
                    _ => Recovery::AtReset,
                };
                let sent = self.local(node, sent);
                let (_, ended) =
                    slot.drawn(&self.terms(), (draw, sent), &[1], &[(decision, recovery)]);
                if let Some(ended) = ended {
                    Self::settle(state, node, &ended, false);
                }
                count(state, window, 1);
            }
            (ModelCall::Draw(draw, _), Some(_)) => {
                slot.not_drawn(&self.terms(), draw.id, None);
                Self::ask(state, node, None);
            }
            (ModelCall::Plain | ModelCall::Draw(..), None) => {}
        }
    }

    /// What a node does when an answer does not come.
    fn gave_up(&self, state: &mut ModelState, node: usize, call: u8) {
        let terms = self.terms();
        let Some(lost) = state.nodes[node].calls.remove(&call) else { return };
        let slot = &mut state.nodes[node].slot;
        match lost {
            ModelCall::Plain => {}
            ModelCall::Settle(draw) => Self::ask(state, node, draw),
            ModelCall::Draw(draw, _) if self.flaw == Flaw::TrustsALostDraw => {
                slot.not_drawn(&terms, draw.id, None);
                state.nodes[node].extra += draw.times - 1;
            }
            ModelCall::Draw(draw, _) => {
                slot.not_drawn(&terms, draw.id, None);
                let id = draw.id.as_u128();
                Self::send(state, Message::Settle { node, id, used: 0, is_awaited: false });
            }
        }
    }

    fn end(&self, state: &mut ModelState, node: usize) {
        let slot = &mut state.nodes[node].slot;
        let Some((id, _)) = slot.ends() else { return };
        let before = slot.clone();
        if let Some(ended) = slot.expire(id) {
            if self.flaw == Flaw::SpendsWhatItGaveBack {
                state.nodes[node].slot = before;
            }
            Self::settle(state, node, &ended, false);
        }
    }
}

fn count(state: &mut ModelState, window: u64, used: u64) {
    let window = usize::try_from(window).expect("a few windows");
    state.used[window] += used;
}

impl Model for Nodes {
    type State = ModelState;
    type Action = ModelEvent;

    fn init_states(&self) -> Vec<ModelState> {
        let windows = usize::try_from(self.ticks / self.window + 1).expect("a few windows");
        vec![ModelState {
            now: 0,
            server: ModelServer::default(),
            nodes: vec![ModelNode::default(); self.are_slow.len()],
            network: BTreeMap::new(),
            losses: 0,
            crashes: 0,
            early: 0,
            forced: 0,
            used: vec![0; windows],
            has_served: false,
        }]
    }

    fn actions(&self, state: &ModelState, events: &mut Vec<ModelEvent>) {
        if state.now < self.ticks {
            events.push(ModelEvent::Tick);
        }
        if state.forced < self.forced {
            events.push(ModelEvent::Force);
        }
        for number in state.network.keys() {
            events.push(ModelEvent::Arrive(*number));
        }
        for (node, own) in state.nodes.iter().enumerate() {
            if own.requests < self.requests[node] {
                events.push(ModelEvent::Request(node));
            }
            if let Some((_, until)) = own.slot.ends()
                && (until <= self.local(node, state.now) || state.early < self.early)
            {
                events.push(ModelEvent::End(node));
            }
            if state.losses < self.losses {
                // To lose patience with a request that draws nothing changes nothing.
                let draws = own.calls.iter().filter(|(_, call)| **call != ModelCall::Plain);
                events.extend(draws.map(|(call, _)| ModelEvent::GiveUp(node, *call)));
            }
            if state.crashes < self.crashes {
                events.push(ModelEvent::Crash(node));
            }
        }
    }

    fn next_state(&self, last: &ModelState, event: ModelEvent) -> Option<ModelState> {
        let mut state = last.clone();
        match event {
            ModelEvent::Tick => {
                state.now += 1;
                if self.flaw == Flaw::ForgetsDebt && state.now.is_multiple_of(self.window) {
                    state.server = ModelServer { count: 0, ..state.server };
                }
            }
            ModelEvent::Force => {
                state.forced += 1;
                let (window, cost, now) =
                    (self.fixed_window(), self.limit + self.debt, at(state.now));
                let before = state.server.state();
                let forgiven = window.forgiven(before.as_ref(), now, cost);
                state.server.write(&window.force(before.as_ref(), now, cost)?.write);
                let current = state.now / self.window;
                count(&mut state, current, cost - forgiven);
            }
            ModelEvent::Request(node) => self.request(&mut state, node),
            ModelEvent::Arrive(number) => match state.network.remove(&number)? {
                Message::Reply { node, decision, window } => {
                    self.answered(&mut state, node, number, (decision, window));
                }
                message => self.serve(&mut state, number, message),
            },
            ModelEvent::GiveUp(node, call) => {
                state.losses += 1;
                self.gave_up(&mut state, node, call);
            }
            ModelEvent::End(node) => {
                let (_, until) = state.nodes[node].slot.ends()?;
                state.early += u8::from(self.local(node, state.now) < until);
                self.end(&mut state, node);
            }
            ModelEvent::Crash(node) => {
                state.crashes += 1;
                let ModelNode { requests, draws, .. } = state.nodes[node];
                state.nodes[node] = ModelNode { requests, draws, ..ModelNode::default() };
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "no windows use more than their limits and the debt",
                |model: &Self, state: &ModelState| {
                    (0..state.used.len()).all(|first| {
                        let bounds = (1..).map(|windows| windows * model.limit + model.debt);
                        let mut sum = 0;
                        state.used[first..].iter().zip(bounds).all(|(used, bound)| {
                            sum += used;
                            sum <= bound
                        })
                    })
                },
            ),
            Property::always(
                "unused budget is back once nothing is under way",
                |model: &Self, state: &ModelState| {
                    let is_quiet = state.network.is_empty() && state.losses + state.crashes == 0;
                    let are_empty = || state.nodes.iter().all(|node| node.slot.is_empty());
                    let current = state.now / model.window;
                    let counts = if state.server.start / model.window == current {
                        state.server.count
                    } else {
                        0
                    };
                    let used = usize::try_from(current).map_or(0, |window| state.used[window]);
                    // What earlier windows owe counts as well.
                    !is_quiet || !are_empty() || counts == used || model.debt > 0
                },
            ),
            Property::sometimes("a request is served without a call", |_, state: &ModelState| {
                state.has_served
            }),
            Property::sometimes(
                "two nodes share a whole limit",
                |model: &Self, state: &ModelState| {
                    let served = state.nodes.iter().filter(|node| node.requests > 0).count();
                    served > 1 && state.has_served && state.used.contains(&model.limit)
                },
            ),
        ]
    }
}
