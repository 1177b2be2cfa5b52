//! The model: what a layer answers and charges, computed from the configuration and the requests alone. It is written after the guide
//! and not after the code, and knows no store: a limit is a number per key.

use std::collections::HashMap;

use ratelimit_core::OnOutage;

use crate::setup::{Ask, Charged, Kind, LimitSpec, Mode, Net, Plan, Presence, Setup, Shown};

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
    pub(crate) seen: Vec<(String, u64)>,
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

/// What one limit says of a request.
struct Said<'a> {
    limit: &'a LimitSpec,
    whose: Vec<String>,
    cost: u64,
    fits: bool,
    remaining: u64,
    /// Never, if there is none.
    retry_us: Option<u64>,
    more_us: u64,
    reset_us: u64,
}

pub(crate) struct Model<'a> {
    setup: &'a Setup,
    now_us: u64,
    /// The time at which a bucket is full, or a window's number and its count.
    buckets: HashMap<(String, Vec<String>), u64>,
    windows: HashMap<(String, Vec<String>), (u64, u64)>,
}

impl<'a> Model<'a> {
    pub(crate) fn new(setup: &'a Setup) -> Self {
        Self { setup, now_us: 0, buckets: HashMap::new(), windows: HashMap::new() }
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

    /// Whose limit it is; `None` if the request lacks an identifier of it.
    fn whose(&self, limit: &LimitSpec, ask: &Ask) -> Option<Vec<String>> {
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

    /// How much is used of a limit, in units of time for a bucket.
    fn used(&self, limit: &LimitSpec, whose: &[String]) -> u64 {
        let key = (limit.name.to_owned(), whose.to_vec());
        match limit.kind {
            Kind::Bucket { .. } => {
                self.buckets.get(&key).map_or(0, |full| full.saturating_sub(self.now_us))
            }
            Kind::Window { length_us, .. } => match self.windows.get(&key) {
                Some((number, count)) if *number == self.now_us / length_us => *count,
                _ => 0,
            },
        }
    }

    fn set_used(&mut self, limit: &LimitSpec, whose: &[String], used: u64) {
        let key = (limit.name.to_owned(), whose.to_vec());
        match limit.kind {
            Kind::Bucket { .. } => self.buckets.insert(key, self.now_us + used).map(|_| ()),
            Kind::Window { length_us, .. } => {
                self.windows.insert(key, (self.now_us / length_us, used)).map(|_| ())
            }
        };
    }

    /// What a cost uses, and what there is in all.
    fn sizes(limit: &LimitSpec, cost: u64) -> (u64, u64) {
        match limit.kind {
            Kind::Bucket { every_us, burst } => (cost * every_us, burst * every_us),
            Kind::Window { limit, .. } => (cost, limit),
        }
    }

    /// What the limit says, with this much used.
    fn says(
        &self,
        limit: &'a LimitSpec,
        whose: Vec<String>,
        cost: u64,
        used: u64,
        fits: bool,
    ) -> Said<'a> {
        let (asked, all) = Self::sizes(limit, cost);
        let remaining = match limit.kind {
            Kind::Bucket { every_us, .. } => all.saturating_sub(used) / every_us,
            Kind::Window { .. } => all.saturating_sub(used),
        };
        let until_end_us = match limit.kind {
            Kind::Bucket { .. } => used,
            Kind::Window { .. } if used == 0 => 0,
            Kind::Window { length_us, .. } => length_us - self.now_us % length_us,
        };
        let until = |needed: u64| match limit.kind {
            Kind::Bucket { .. } => (used + needed).saturating_sub(all),
            Kind::Window { .. } => until_end_us,
        };
        let one_more = Self::sizes(limit, remaining + 1).0;
        let more_us = if one_more > all { 0 } else { until(one_more) };
        let retry_us = if fits { Some(0) } else { (asked <= all).then(|| until(asked)) };
        Said { limit, whose, cost, fits, remaining, retry_us, more_us, reset_us: until_end_us }
    }

    /// Asks these limits: all are charged, or none.
    fn ask_all(&mut self, limits: Vec<(&'a LimitSpec, Vec<String>, u64)>) -> Vec<Said<'a>> {
        let fits = |(limit, whose, cost): &(&LimitSpec, Vec<String>, u64)| {
            let (asked, all) = Self::sizes(limit, *cost);
            asked == 0 || self.used(limit, whose) + asked <= all
        };
        let each: Vec<_> = limits.iter().map(fits).collect();
        let all_fit = each.iter().all(|fits| *fits);
        let said = limits.into_iter().zip(each).map(|((limit, whose, cost), fits)| {
            let mut used = self.used(limit, &whose);
            let asked = Self::sizes(limit, cost).0;
            if all_fit && asked > 0 {
                used += asked;
                self.set_used(limit, &whose, used);
            }
            self.says(limit, whose, cost, used, fits)
        });
        said.collect()
    }

    /// The next request.
    pub(crate) fn answer(&mut self, ask: &Ask) -> Answer {
        self.now_us += ask.after_ms * 1_000;
        let setup = self.setup;
        let ok = |answer: Answer| Answer { status: ask.handler.status, ..answer };
        if setup.mode == Mode::Choosing && ask.plan == Plan::Exempt {
            return ok(Answer::default());
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
        let lacks = |limit: &&LimitSpec| limit.required && self.whose(limit, ask).is_none();
        let apply: Vec<_> = enforced.iter().filter_map(with_key).collect();
        let shadow_apply: Vec<_> = shadow.iter().filter_map(with_key).collect();
        let none_applies = apply.is_empty() && !enforced.is_empty();
        if enforced.iter().any(lacks) || none_applies {
            return about_blank(400);
        }
        if ask.away && !apply.is_empty() {
            if setup.admits_outage {
                return ok(Answer::default());
            }
            let violated = apply.iter().filter_map(|(limit, ..)| shown(limit)).collect();
            let problem = Some("temporary-reduced-capacity");
            return Answer { status: 503, problem, violated, ..Answer::default() };
        }
        let said = self.ask_all(apply);
        let allowed = said.iter().all(|said| said.fits);
        let mut asked: Vec<_> = said.iter().map(Said::asked).collect();
        let mut charged_in_shadow = Vec::new();
        if allowed && !ask.away {
            for one in shadow_apply {
                let said = self.ask_all(vec![one]);
                asked.extend(said.iter().map(Said::asked));
                charged_in_shadow.extend(said.into_iter().filter(|said| said.fits));
            }
        }
        let fields =
            if allowed && setup.fields.only_denials { Vec::new() } else { fields(setup, &said) };
        let seen = said.iter().map(|said| (said.limit.name.to_owned(), said.remaining));
        let seen = if allowed { seen.collect() } else { Vec::new() };
        let answer = Answer { fields, seen, asked, ..Answer::default() };
        if allowed {
            if let Mode::Reserving(charged) = setup.mode {
                for said in said.iter().chain(&charged_in_shadow) {
                    self.settle(said, charged, ask);
                }
            }
            return ok(answer);
        }
        let denied = || said.iter().filter(|said| !said.fits);
        let never = denied().any(|said| said.retry_us.is_none());
        let longest_us = denied().filter_map(|said| said.retry_us).max();
        let is_abnormal = denied().any(|said| said.limit.abnormal);
        Answer {
            status: 429,
            retry_after_us: longest_us.filter(|_| !never),
            problem: Some(if is_abnormal { "abnormal-usage-detected" } else { "quota-exceeded" }),
            violated: denied().filter_map(|said| shown(said.limit)).collect(),
            ..answer
        }
    }

    /// A client waits until its limits admit it, for as long as it has patience. Returns when it goes on, in microseconds from now,
    /// or why it does not.
    pub(crate) fn wait(&mut self, ask: &Ask) -> Waited {
        self.now_us += ask.after_ms * 1_000;
        let with_key = |limit: &'a LimitSpec| Some((limit, self.whose(limit, ask)?, ask.cost));
        let limits = self.setup.limits.iter().filter(|limit| !limit.shadow);
        let apply: Vec<_> = limits.filter_map(with_key).collect();
        let said = self.ask_all(apply.clone());
        let mut wait_us = 0;
        for denied in said.iter().filter(|said| !said.fits) {
            let Some(retry_us) = denied.retry_us else { return Waited::Never };
            wait_us = retry_us.max(wait_us);
        }
        if wait_us > ask.patience_ms * 1_000 {
            return Waited::TooLong;
        }
        if wait_us > 0 {
            self.now_us += wait_us;
            let admitted = self.ask_all(apply).iter().all(|said| said.fits);
            assert!(admitted, "the model waits for too short");
        }
        Waited::Admitted { after_us: wait_us }
    }

    /// What a layer answers while the store is away and a fallback decides: the status, and the limits that deny.
    pub(crate) fn in_outage(&mut self, ask: &Ask) -> (u16, Vec<String>) {
        self.now_us += ask.after_ms * 1_000;
        let with_key =
            |limit: &'a LimitSpec| Some((limit, self.whose(limit, ask)?, self.cost(limit, ask)));
        let limits = self.setup.limits.iter().filter(|limit| !limit.shadow);
        let apply: Vec<_> = limits.filter_map(with_key).collect();
        let refuses = |(limit, whose, cost): &&(&LimitSpec, Vec<String>, u64)| {
            let (asked, all) = Self::sizes(limit, *cost);
            match limit.on_outage {
                OnOutage::Open => false,
                OnOutage::Closed => true,
                OnOutage::Local => asked > 0 && self.used(limit, whose) + asked > all,
            }
        };
        let denied: Vec<_> = apply.iter().filter(refuses).collect();
        let is_closed = denied.iter().any(|one| one.0.on_outage == OnOutage::Closed);
        let names = denied.iter().filter_map(|one| shown(one.0)).collect();
        if !denied.is_empty() {
            return (if is_closed { 503 } else { 429 }, names);
        }
        let is_local = |one: &(&LimitSpec, _, _)| one.0.on_outage == OnOutage::Local;
        self.ask_all(apply.into_iter().filter(is_local).collect());
        (200, names)
    }

    /// The response has ended: the request costs this under the limit.
    fn settle(&mut self, said: &Said<'_>, charged: Charged, ask: &Ask) {
        let handler = &ask.handler;
        let by_response = match charged {
            _ if handler.status == 304 => Some(0),
            Charged::Estimate => None,
            Charged::Bytes => Some(handler.bytes),
            Charged::Status => Some(u64::from(handler.status / 100)),
        };
        let own =
            handler.metered_of.filter(|(name, _)| *name == said.limit.name).map(|(_, cost)| cost);
        let cost = own.or(handler.metered).or(by_response).unwrap_or(said.cost);
        let used = self.used(said.limit, &said.whose);
        let (reserved, all) = Self::sizes(said.limit, said.cost);
        let (real, _) = Self::sizes(said.limit, cost);
        self.set_used(said.limit, &said.whose, (used - reserved + real).min(all));
    }
}

impl Said<'_> {
    fn asked(&self) -> (String, Vec<String>, u64) {
        (self.limit.name.to_owned(), self.whose.clone(), self.cost)
    }
}

/// The name of a limit to clients.
fn shown(limit: &LimitSpec) -> Option<String> {
    match limit.shown {
        Shown::Own => Some(limit.name.to_owned()),
        Shown::As(name) => Some(name.to_owned()),
        Shown::Hidden => None,
    }
}

/// The fields that describe these limits.
fn fields(setup: &Setup, said: &[Said<'_>]) -> Vec<(&'static str, String)> {
    let seconds = |us: u64| us.div_ceil(1_000_000);
    let visible: Vec<_> = said.iter().filter_map(|said| Some((shown(said.limit)?, said))).collect();
    let mut fields = Vec::new();
    if setup.fields.draft && !visible.is_empty() {
        let policy = visible.iter().map(|(name, said)| {
            let (capacity, window_us) = match said.limit.kind {
                Kind::Bucket { every_us, burst } => (burst, burst * every_us),
                Kind::Window { limit, length_us } => (limit, length_us),
            };
            let unit = said.limit.unit.map_or(String::new(), |unit| format!(";qu=\"{unit}\""));
            let window = if window_us < 1_000_000 {
                String::new()
            } else {
                format!(";w={}", seconds(window_us))
            };
            format!("\"{name}\";q={capacity}{unit}{window}")
        });
        let limit = visible.iter().map(|(name, said)| {
            let more = if said.more_us == 0 {
                String::new()
            } else {
                format!(";t={}", seconds(said.more_us))
            };
            format!("\"{name}\";r={}{more}", said.remaining)
        });
        fields.push(("ratelimit-policy", policy.collect::<Vec<_>>().join(", ")));
        fields.push(("ratelimit", limit.collect::<Vec<_>>().join(", ")));
    }
    let capacity = |said: &Said<'_>| match said.limit.kind {
        Kind::Bucket { burst, .. } => burst,
        Kind::Window { limit, .. } => limit,
    };
    if setup.fields.older
        && let Some((_, least)) = visible.iter().min_by_key(|(_, said)| said.remaining)
    {
        fields.push(("x-ratelimit-limit", capacity(least).to_string()));
        fields.push(("x-ratelimit-remaining", least.remaining.to_string()));
        fields.push(("x-ratelimit-reset", seconds(least.reset_us).to_string()));
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
            fields.push((names[0], capacity(said).to_string()));
            fields.push((names[1], said.remaining.to_string()));
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
