//! The model: what a layer answers and charges, computed from the configuration and the requests
//! alone. It is written after the guide and not after the code. It knows no store, and one limit at
//! a time: for each key it has the state of a limit, which the algorithm's step changes, or how
//! many places are held.

use std::collections::{BTreeMap, HashMap};

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm as _, Decision, OnOutage, Timestamp};

use crate::outage::{Breaker, Pending};
use crate::setup::{Ask, Busy, LimitSpec, Mode, Net, Plan, Presence, Setup, Shown};
use crate::underway::Underway;

/// What a layer should answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Each of `RateLimit-Policy`, `RateLimit`, the older three, and the tokens of a provider.
    pub(crate) fields: Vec<(&'static str, String)>,
    pub(crate) retry_after_us: Option<u64>,
    /// The end of the problem's type.
    pub(crate) problem: Option<&'static str>,
    pub(crate) violated: Vec<String>,
    /// What the handler sees: each limit's own name, and what remains.
    pub(crate) shown_to_handler: Vec<(String, u64)>,
    /// Each limit that the store charged or was asked to: its name, whose it is, and at what cost.
    pub(crate) asked: Vec<(String, Vec<String>, u64)>,
}

/// How a wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    Admitted { after_us: u64 },
    TooLong,
    Never,
}

/// Who has a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keeper {
    Store,
    /// The fallback of this node keeps it, for as long as the store is unreachable.
    Node,
}

pub(crate) type Key = (Keeper, &'static str, Vec<String>);

/// A limit that applies: whose it is, and the cost.
pub(crate) type Applies<'a> = (&'a LimitSpec, Vec<String>, u64);

/// What one limit says of a request.
pub(crate) struct Said<'a> {
    pub(crate) limit: &'a LimitSpec,
    pub(crate) whose: Vec<String>,
    pub(crate) decision: Decision,
    /// Where it is charged, if anywhere, and what a reservation of it is.
    pub(crate) charged: Option<(Keeper, Reservation)>,
    /// It holds places of which it does not know when they are free.
    is_busy: bool,
}

pub(crate) struct Model<'a> {
    pub(crate) setup: &'a Setup,
    pub(crate) now_us: u64,
    pub(crate) states: HashMap<Key, AnyState>,
    pub(crate) held: HashMap<Key, u64>,
    pub(crate) underway: Vec<Underway<'a>>,
    /// For how long requests hold their places, once one has ended.
    pub(crate) hold_us: Option<u64>,
    pub(crate) breaker: Breaker,
    /// Whether the store has answered since it was last charged what it had missed.
    pub(crate) answered: bool,
    pub(crate) pending: Pending<'a>,
    /// How many requests each limit has allowed, denied and spared by its choice, without the
    /// store.
    pub(crate) without_store: BTreeMap<(&'static str, u8), [u64; 3]>,
}

impl<'a> Model<'a> {
    pub(crate) fn new(setup: &'a Setup) -> Self {
        Self {
            setup,
            now_us: 0,
            states: HashMap::new(),
            held: HashMap::new(),
            underway: Vec::new(),
            hold_us: None,
            breaker: Breaker::default(),
            answered: false,
            pending: Pending::default(),
            without_store: BTreeMap::new(),
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::from_us(self.now_us).expect("in this century")
    }

    pub(crate) fn passes(&mut self, ms: u64) {
        self.now_us += ms * 1_000;
    }

    /// The client's address as a limit counts it.
    fn address(&self, ask: &Ask) -> String {
        let Some(header) = self.setup.header else { return ask.peer.identity() };
        if !ask.peer.is_proxy() {
            return ask.peer.identity();
        }
        if header.is_single() {
            let last = ask.lines.last().and_then(|line| line.first());
            return last.and_then(|hop| hop.net).unwrap_or(ask.peer).identity();
        }
        let mut nearest = ask.peer;
        for hop in ask.lines.iter().rev().flat_map(|line| line.iter().rev()) {
            let Some(net) = hop.net else { break };
            nearest = net;
            if !net.is_proxy() {
                break;
            }
        }
        nearest.identity()
    }

    /// Whether the request is one of those to which the limit applies.
    fn is_meant(limit: &LimitSpec, ask: &Ask) -> bool {
        let is = |wanted: &str| match (wanted, ask.user) {
            ("b*", Some(user)) => user.starts_with('b'),
            (wanted, user) => user == Some(wanted),
        };
        limit.when_user.is_none_or(|(user, excludes)| is(user) != excludes)
    }

    /// Whose limit it is; `None` if it does not apply, as the request lacks an identifier of it.
    fn whose(&self, limit: &LimitSpec, ask: &Ask) -> Option<Vec<String>> {
        if !Self::is_meant(limit, ask) {
            return None;
        }
        let identifier = |name: &&str| match *name {
            "ip" => Some(self.address(ask)),
            _ => ask.user.map(str::to_owned),
        };
        limit.by.iter().map(identifier).collect()
    }

    /// The limits of the request's plan.
    fn limits(&self, ask: &Ask) -> Vec<&'a LimitSpec> {
        let all = self.setup.limits.iter();
        match ask.plan {
            Plan::Backwards if self.setup.mode == Mode::Choosing => all.rev().collect(),
            Plan::First if self.setup.mode == Mode::Choosing => all.take(1).collect(),
            _ => all.collect(),
        }
    }

    fn cost(&self, limit: &LimitSpec, ask: &Ask) -> u64 {
        let own = ask.costs.iter().rev().find(|(name, _)| *name == limit.name);
        let cost = own.map_or(ask.cost, |(_, cost)| *cost);
        if matches!(self.setup.mode, Mode::Reserving(_)) { cost.max(1) } else { cost }
    }

    /// What a limit says, and what it leaves.
    fn step(&self, key: &Key, (limit, _, cost): &Applies<'a>) -> (Decision, Option<AnyState>) {
        let algorithm = self.algorithm(key.0, limit);
        if !limit.kind.is_leases() {
            let state = self.states.get(key);
            let step = limit.kind.limit(algorithm).step(state, self.now(), *cost);
            return (step.decision, step.write.after(state).cloned());
        }
        let (places, held) = (algorithm.capacity(), self.leases_held(key));
        let allowed = held + cost <= places;
        let held = if allowed { held + cost } else { held };
        (self.busy(*cost, (places, held), allowed), None)
    }

    fn leases_held(&self, key: &Key) -> u64 {
        self.held.get(key).copied().unwrap_or_default()
    }

    /// What a limit of so many places says, of which so many are held. When the next is free
    /// depends on the holders.
    fn busy(&self, cost: u64, (places, held): (u64, u64), allowed: bool) -> Decision {
        let wait_us = match self.setup.fields.busy {
            Busy::Untold => None,
            Busy::Hint { ms } => Some(ms * 1_000),
            Busy::Estimated => self.hold_us.map(|us| (us * cost.max(1)).div_ceil(places)),
        };
        let is_never = cost > places;
        Decision {
            allowed,
            cost,
            limit: places,
            remaining: places - held,
            retry_after_us: if allowed { Some(0) } else { wait_us.filter(|_| !is_never) },
            replenish_after_us: if held > 0 { wait_us.unwrap_or_default() } else { 0 },
            reset_after_us: if held > 0 { wait_us.unwrap_or_default() } else { 0 },
        }
    }

    /// Asks these limits: all are charged, or none but those that count attempts.
    pub(crate) fn ask_all(
        &mut self,
        keeper: Keeper,
        limits: Vec<Applies<'a>>,
        denied_elsewhere: bool,
    ) -> Vec<Said<'a>> {
        let key = |(limit, whose, _): &Applies<'a>| (keeper, limit.name, whose.clone());
        let stepped: Vec<_> = limits.iter().map(|one| self.step(&key(one), one)).collect();
        let all_fit = !denied_elsewhere && stepped.iter().all(|(decision, _)| decision.allowed);
        let said = limits.into_iter().zip(stepped).map(|(one, (mut decision, after))| {
            let (key, now) = (key(&one), self.now());
            let (limit, whose, cost) = one;
            let algorithm = self.algorithm(keeper, limit);
            let before = self.states.get(&key).cloned();
            let counts_attempts = limit.kind.attempts;
            let charged = limit.kind.limit(algorithm).reservation_us().is_some();
            let charged =
                charged.then(|| (keeper, algorithm.record(before.as_ref(), now, cost, None)));
            if !all_fit && decision.allowed {
                if counts_attempts {
                    let again = algorithm.step(after.as_ref(), now, cost).decision;
                    decision.retry_after_us = again.retry_after_us;
                } else if limit.kind.is_leases() {
                    decision =
                        self.busy(cost, (algorithm.capacity(), self.leases_held(&key)), true);
                } else {
                    decision = algorithm.step(before.as_ref(), now, 0).decision;
                    decision.cost = cost;
                }
            }
            if all_fit && limit.kind.is_leases() {
                *self.held.entry(key).or_default() += cost;
            } else if all_fit || counts_attempts {
                self.set(key, after);
            }
            let is_busy = limit.kind.is_leases() && decision.remaining < decision.limit;
            Said { limit, whose, decision, charged: charged.filter(|_| all_fit), is_busy }
        });
        said.collect()
    }

    pub(crate) fn set(&mut self, key: Key, state: Option<AnyState>) {
        match state {
            Some(state) => _ = self.states.insert(key, state),
            None => _ = self.states.remove(&key),
        }
    }

    /// The next request.
    pub(crate) fn answer(&mut self, ask: &Ask) -> Answer {
        let setup = self.setup;
        if setup.mode == Mode::Choosing && ask.plan == Plan::Exempt {
            return self.admit(ask, Answer::default(), None);
        }
        let about_blank = |status| Answer { status, problem: Some("blank"), ..Answer::default() };
        if setup.mode == Mode::Choosing && ask.plan == Plan::Refused {
            return about_blank(402);
        }
        match (ask.user, setup.user) {
            (None, Presence::Mandatory) => return about_blank(400),
            (None, Presence::Unauthorized) => return about_blank(401),
            _ => {}
        }
        let limits = self.limits(ask);
        let with_key =
            |limit: &&'a LimitSpec| Some((*limit, self.whose(limit, ask)?, self.cost(limit, ask)));
        let (shadow, enforced): (Vec<_>, Vec<_>) = limits.iter().partition(|limit| limit.shadow);
        let lacks = |limit: &&LimitSpec| {
            limit.required && Self::is_meant(limit, ask) && self.whose(limit, ask).is_none()
        };
        let apply: Vec<_> = enforced.iter().filter_map(with_key).collect();
        let shadow_apply: Vec<_> = shadow.iter().filter_map(with_key).collect();
        let none_applies = apply.is_empty() && !enforced.is_empty();
        if enforced.iter().any(lacks) || none_applies {
            // A user is missing that a limit wants, or the service has no limit for this request.
            let wants_user = |limit: &&LimitSpec| match limit.when_user {
                Some((_, false)) => true,
                _ => limit.by.contains(&"user") && Self::is_meant(limit, ask),
            };
            let is_clients = ask.user.is_none() && enforced.iter().any(wants_user);
            return about_blank(if is_clients { 400 } else { 500 });
        }
        let mut asked = Vec::new();
        let mut is_away = false;
        let said = if apply.is_empty() {
            Vec::new()
        } else if setup.fallback.is_some() {
            self.ask_fallback(apply, ask.away, &mut is_away, &mut asked)
        } else if ask.away {
            if setup.admits_outage {
                return self.admit(ask, Answer::default(), None);
            }
            let violated = apply.iter().filter_map(|(limit, ..)| client_name(limit)).collect();
            let problem = Some("temporary-reduced-capacity");
            return Answer { status: 503, problem, violated, ..Answer::default() };
        } else {
            let said = self.ask_all(Keeper::Store, apply, false);
            asked.extend(said.iter().map(Said::request));
            said
        };
        let allowed = said.iter().all(|said| said.decision.allowed);
        let mut in_shadow = Vec::new();
        for one in shadow_apply.into_iter().filter(|_| allowed) {
            if setup.fallback.is_some() {
                in_shadow.push(self.ask_fallback(vec![one], ask.away, &mut is_away, &mut asked));
            } else if !ask.away {
                in_shadow.push(self.ask_all(Keeper::Store, vec![one], false));
                asked.extend(in_shadow.iter().flatten().last().map(Said::request));
            }
        }
        let fields =
            if allowed && setup.fields.only_denials { Vec::new() } else { fields(setup, &said) };
        let seen = said.iter().map(|said| (said.limit.name.to_owned(), said.decision.remaining));
        let seen = if allowed { seen.collect() } else { Vec::new() };
        let answer = Answer { fields, shown_to_handler: seen, asked, ..Answer::default() };
        if allowed {
            let all = said.into_iter().chain(in_shadow.into_iter().flatten()).collect();
            return self.admit(ask, answer, Some(all));
        }
        let denied = || said.iter().filter(|said| !said.decision.allowed);
        let is_never = |said: &Said<'_>| {
            said.decision.retry_after_us.is_none()
                && (!said.limit.kind.is_leases() || said.decision.cost > said.decision.limit)
        };
        let never = denied().any(is_never);
        // One that counts attempts may have let the last one pass.
        let longest_us = said.iter().filter_map(|said| said.decision.retry_after_us).max();
        let answer = Answer {
            retry_after_us: longest_us.filter(|us| *us > 0 && !never),
            violated: denied().filter_map(|said| client_name(said.limit)).collect(),
            ..answer
        };
        let closes = |said: &Said<'_>| said.limit.on_outage == OnOutage::Closed;
        if is_away && denied().any(closes) {
            let problem = Some("temporary-reduced-capacity");
            return Answer { status: 503, problem, fields: Vec::new(), ..answer };
        }
        let is_abnormal = denied().any(|said| said.limit.abnormal);
        let problem = if is_abnormal { "abnormal-usage-detected" } else { "quota-exceeded" };
        Answer { status: 429, problem: Some(problem), ..answer }
    }

    /// A client waits until its limits admit it, for as long as it has patience. Returns when it
    /// goes on, in microseconds from now, or why it does not.
    pub(crate) fn wait(&mut self, ask: &Ask) -> Waited {
        self.passes(ask.after_ms);
        let with_key = |limit: &'a LimitSpec| Some((limit, self.whose(limit, ask)?, ask.cost));
        let apply: Vec<_> = self.setup.limits.iter().filter_map(with_key).collect();
        if apply.iter().any(|(limit, _, cost)| limit.kind.algorithm().capacity() < *cost) {
            return Waited::Never;
        }
        let said = self.ask_all(Keeper::Store, apply.clone(), false);
        let waits = said.iter().filter_map(|said| said.decision.retry_after_us);
        let wait_us = waits.max().unwrap_or_default();
        if wait_us > ask.patience_ms * 1_000 {
            return Waited::TooLong;
        }
        // Timers are rounded up to milliseconds.
        let after_us = wait_us.next_multiple_of(1_000);
        if wait_us > 0 {
            self.now_us += after_us;
            let admitted = self.ask_all(Keeper::Store, apply, false);
            assert!(admitted.iter().all(|said| said.decision.allowed), "it waits for too short");
        }
        Waited::Admitted { after_us }
    }

    /// How much of each limit is left in the store, and owed, for each caller that it knows.
    pub(crate) fn remaining_and_owed(&self) -> Vec<(&'a LimitSpec, Vec<String>, u64, u64)> {
        let limits = self.setup.limits.iter();
        let of = |limit: &'a LimitSpec| {
            let keys = self.states.keys().chain(self.held.keys());
            let keys =
                keys.filter(|(keeper, name, _)| *keeper == Keeper::Store && *name == limit.name);
            keys.map(move |key| {
                let (algorithm, state) = (limit.kind.algorithm(), self.states.get(key));
                let left = algorithm.step(state, self.now(), 0).decision.remaining;
                let left = left - self.leases_held(key);
                (limit, key.2.clone(), left, algorithm.owed(state, self.now()))
            })
        };
        limits.flat_map(of).collect()
    }
}

impl<'a> Said<'a> {
    pub(crate) fn new((limit, whose, _): Applies<'a>, decision: Decision) -> Self {
        Self { limit, whose, decision, charged: None, is_busy: false }
    }

    pub(crate) fn request(&self) -> (String, Vec<String>, u64) {
        (self.limit.name.to_owned(), self.whose.clone(), self.decision.cost)
    }
}

/// The name of a limit to clients.
fn client_name(limit: &LimitSpec) -> Option<String> {
    match limit.shown {
        Shown::Own => Some(limit.name.to_owned()),
        Shown::As(name) => Some(name.to_owned()),
        Shown::Hidden => None,
    }
}

/// The fields that describe these limits.
fn fields(setup: &Setup, said: &[Said<'_>]) -> Vec<(&'static str, String)> {
    let seconds = |us: u64| us.div_ceil(1_000_000);
    let visible: Vec<_> =
        said.iter().filter_map(|said| Some((client_name(said.limit)?, said))).collect();
    let mut fields = Vec::new();
    if setup.fields.draft && !visible.is_empty() {
        let policy = visible.iter().map(|(name, said)| {
            let own = said.limit.kind.is_leases().then_some("concurrent-requests");
            let unit = said.limit.unit.or(own);
            let unit = unit.map_or(String::new(), |unit| format!(";qu=\"{unit}\""));
            let window_ms = said.limit.kind.window_ms().filter(|ms| *ms >= 1_000);
            let window = window_ms.map_or(String::new(), |ms| format!(";w={}", ms.div_ceil(1_000)));
            format!("\"{name}\";q={}{unit}{window}", said.decision.limit)
        });
        let limit = visible.iter().map(|(name, said)| {
            let Decision { remaining, replenish_after_us: more_us, .. } = said.decision;
            let more = match more_us {
                0 => String::new(),
                more_us => format!(";t={}", seconds(more_us)),
            };
            format!("\"{name}\";r={remaining}{more}")
        });
        fields.push(("ratelimit-policy", policy.collect::<Vec<_>>().join(", ")));
        fields.push(("ratelimit", limit.collect::<Vec<_>>().join(", ")));
    }
    if setup.fields.older
        && let Some((_, least)) = visible.iter().min_by_key(|(_, said)| said.decision.remaining)
    {
        let Decision { limit, remaining, reset_after_us: reset_us, .. } = least.decision;
        fields.push(("x-ratelimit-limit", limit.to_string()));
        fields.push(("x-ratelimit-remaining", remaining.to_string()));
        if !least.is_busy || reset_us > 0 {
            fields.push(("x-ratelimit-reset", seconds(reset_us).to_string()));
        }
    }
    for (provided, names) in [
        (
            "requests",
            ["anthropic-ratelimit-requests-limit", "anthropic-ratelimit-requests-remaining"],
        ),
        ("tokens", ["anthropic-ratelimit-tokens-limit", "anthropic-ratelimit-tokens-remaining"]),
    ] {
        let mut of_name = visible.iter().filter(|(name, _)| name == provided);
        if let (true, Some((_, said))) = (setup.fields.models, of_name.next()) {
            fields.push((names[0], said.decision.limit.to_string()));
            fields.push((names[1], said.decision.remaining.to_string()));
        }
    }
    fields
}

impl Net {
    /// The client's identifier: its address, or its network.
    pub(crate) fn identity(self) -> String {
        match self {
            Self::V4(n) | Self::Mapped(n) | Self::Translated(n) => format!("203.0.113.{n}"),
            Self::V6 { network, .. } => format!("2001:db8:0:{network:x}::/64"),
            Self::LinkLocal(n) => format!("fe80::{n:x}"),
            Self::Proxy(n) | Self::MappedProxy(n) => format!("10.0.0.{n}"),
            Self::Proxy6(_) => "2001:db8:ff::/64".to_owned(),
        }
    }

    pub(crate) fn is_proxy(self) -> bool {
        matches!(self, Self::Proxy(_) | Self::MappedProxy(_) | Self::Proxy6(_))
    }
}
