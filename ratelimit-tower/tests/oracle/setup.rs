//! What is generated: a layer, and the requests to it.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{AnyAlgorithm, Limit, OnOutage};

/// A limit.
#[derive(Clone, Debug)]
pub(crate) struct LimitSpec {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The identifiers; the bare key, which is the same for all, if there are none.
    pub(crate) by: &'static [&'static str],
    /// The user to whom it applies alone, or, if it excludes, not.
    pub(crate) when_user: Option<(&'static str, bool)>,
    pub(crate) required: bool,
    pub(crate) shadow: bool,
    /// What it does in an outage.
    pub(crate) on_outage: OnOutage,
    pub(crate) abnormal: bool,
    pub(crate) shown: Shown,
    pub(crate) unit: Option<&'static str>,
}

/// An algorithm and its numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) algorithm: &'static str,
    /// In the time: 1 of a bucket, the places of leases.
    pub(crate) count: u64,
    pub(crate) each_ms: u64,
    /// Of a bucket.
    pub(crate) burst: Option<u64>,
    pub(crate) debt: u64,
    pub(crate) attempts: bool,
}

impl Kind {
    pub(crate) fn algorithm(self) -> AnyAlgorithm {
        let Self { algorithm, count, each_ms, burst, debt, .. } = self;
        let burst = burst.map_or(String::new(), |burst| format!(" burst {burst}"));
        let debt = if debt > 0 { format!(" debt {debt}") } else { String::new() };
        let words = format!("{algorithm} {count}/{each_ms}ms{burst}{debt}");
        words.parse().expect(&words)
    }

    /// A limit by this algorithm, which counts as this kind does.
    pub(crate) fn limit(self, algorithm: AnyAlgorithm) -> Limit<AnyAlgorithm> {
        let limit = Limit::new("limit", algorithm).expect("a name");
        if self.attempts { limit.count_attempts().expect("it can") } else { limit }
    }

    /// Whether it limits how many are underway at once.
    pub(crate) fn is_leases(self) -> bool {
        self.algorithm == "concurrency"
    }

    /// In which time all of it is admitted, if in any.
    pub(crate) fn window_ms(self) -> Option<u64> {
        (!self.is_leases()).then(|| self.each_ms * self.burst.unwrap_or(1))
    }
}

/// What a denial for want of a place says about the wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Busy {
    Untold,
    Hint { ms: u64 },
    Estimated,
}

/// The fallback that decides while the store is unreachable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outages {
    pub(crate) failures: u32,
    pub(crate) nodes: u64,
    pub(crate) charges: bool,
}

/// What clients see of a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shown {
    Own,
    Hidden,
    As(&'static str),
}

/// How the layer decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Awaited,
    Immediate,
    Choosing,
    Reserving(Charged),
}

/// How the layer charges a response: 304 costs nothing, nor does 500 if the setup says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charged {
    Estimate,
    Bytes,
    Status,
}

/// Whether a request may lack its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Optional,
    Mandatory,
    Unauthorized,
}

/// The header in which proxies report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    Forwarded,
    XForwardedFor,
    RealIp,
}

impl Header {
    pub(crate) fn is_single(self) -> bool {
        self == Self::RealIp
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Forwarded => "forwarded",
            Self::XForwardedFor => "x-forwarded-for",
            Self::RealIp => "x-real-ip",
        }
    }
}

#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice by itself")]
pub(crate) struct FieldChoice {
    pub(crate) draft: bool,
    pub(crate) older: bool,
    pub(crate) models: bool,
    pub(crate) only_denials: bool,
    pub(crate) busy: Busy,
}

/// A layer.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) limits: Vec<LimitSpec>,
    pub(crate) header: Option<Header>,
    pub(crate) user: Presence,
    pub(crate) fields: FieldChoice,
    pub(crate) mode: Mode,
    pub(crate) frees_500: bool,
    /// A fallback around the store, or else whether requests are admitted that the store cannot
    /// decide.
    pub(crate) fallback: Option<Outages>,
    pub(crate) admits_outage: bool,
    pub(crate) grpc: bool,
}

/// Which limits a layer that chooses takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    All,
    Backwards,
    First,
    Exempt,
    /// It has not paid.
    Refused,
}

/// An address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Net {
    V4(u8),
    Mapped(u8),
    Translated(u8),
    V6 { network: u8, host: u16 },
    LinkLocal(u8),
    Proxy(u8),
    MappedProxy(u8),
    Proxy6(u8),
}

/// An element of a list of addresses, as it is written.
#[derive(Clone, Debug)]
pub(crate) struct Hop {
    /// `None` if it is no address.
    pub(crate) net: Option<Net>,
    pub(crate) text: String,
}

/// What the service does with a request.
#[derive(Clone, Debug)]
pub(crate) struct Handler {
    /// Whether the response waits until the client goes on.
    pub(crate) waits: bool,
    pub(crate) outcome: Outcome,
    pub(crate) body: Frames,
    /// Whether it keeps what is reserved for longer than the response takes.
    pub(crate) keeps: bool,
    pub(crate) metered: Option<u64>,
    pub(crate) metered_of: Option<(&'static str, u64)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    Answers { status: u16 },
    Fails,
    Panics,
}

/// A body of a response.
#[derive(Clone, Debug)]
pub(crate) struct Frames {
    pub(crate) bytes: VecDeque<u64>,
    /// It breaks off after these.
    pub(crate) breaks: bool,
    /// It says that the last frame is the last.
    pub(crate) tells_end: bool,
    /// Each frame is metered.
    pub(crate) meters: bool,
}

impl Frames {
    pub(crate) fn is_over(&self) -> bool {
        self.tells_end && self.bytes.is_empty() && !self.breaks
    }
}

/// What happens to a request that is in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Go {
    /// Its next step: the response, a frame of the body, the end of what is kept.
    On,
    /// The client leaves.
    Off,
    Through,
}

/// What happens.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Ask(Box<Ask>),
    /// One of those that are underway goes on.
    Go(prop::sample::Index, Go),
}

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) after_ms: u64,
    pub(crate) peer: Net,
    pub(crate) lines: Vec<Vec<Hop>>,
    pub(crate) user: Option<&'static str>,
    pub(crate) cost: u64,
    pub(crate) costs: Vec<(&'static str, u64)>,
    pub(crate) plan: Plan,
    pub(crate) away: bool,
    pub(crate) handler: Handler,
    /// How long a client waits for its turn.
    pub(crate) patience_ms: u64,
}

const NAMES: [&str; 4] = ["burst", "requests", "money", "daily"];
const IDENTIFIERS: [&[&str]; 5] = [&[], &["ip"], &["user"], &["ip", "user"], &["user", "ip"]];

/// Algorithms that suit a layer that reserves, or one that does not.
fn kind(reserves: bool) -> impl Strategy<Value = Kind> {
    let kind = |algorithm, count, each_ms, burst, (debt, attempts)| Kind {
        algorithm,
        count,
        each_ms,
        burst,
        debt,
        attempts,
    };
    let attempts = move || prop::bool::weighted(if reserves { 0.0 } else { 0.4 });
    let debt = prop_oneof![2 => Just(0), 1 => 1..6_u64];
    let owes = (debt, attempts())
        .prop_map(|(debt, attempts)| if attempts { (0, true) } else { (debt, false) });
    let owes = owes.boxed();
    let bucket =
        (select(vec!["gcra", "token-bucket"]), select(vec![20, 250, 1_000, 7_000, 90_000]));
    let bucket = (bucket, 1..5_u64, owes.clone());
    let bucket = bucket
        .prop_map(move |((name, each_ms), burst, owes)| kind(name, 1, each_ms, Some(burst), owes));
    let lengths = || select(vec![500, 1_000, 10_000, 3_600_000]);
    let window = (1..5_u64, lengths(), owes);
    let window = window
        .prop_map(move |(count, each_ms, owes)| kind("fixed-window", count, each_ms, None, owes));
    let others = ["first-request-window", "sliding-log", "sliding-counter", "window-log"];
    let names = if reserves { vec!["concurrency"] } else { others.to_vec() };
    let other = (select(names), 1..5_u64, lengths(), attempts());
    let other = other.prop_map(move |(name, count, each_ms, attempts)| {
        kind(name, count, each_ms.max(if reserves { 10_000 } else { 0 }), None, (0, attempts))
    });
    prop_oneof![bucket, window, other]
}

fn limits(reserves: bool) -> impl Strategy<Value = Vec<LimitSpec>> {
    let rare = || prop::bool::weighted(0.15);
    let shown = prop_oneof![
        6 => Just(Shown::Own),
        1 => Just(Shown::Hidden),
        1 => Just(Shown::As("tokens")),
        1 => Just(Shown::As("x.y_z-1")),
    ];
    let unit = prop::option::weighted(0.2, select(vec!["content-bytes", "tokens"]));
    let on_outage = select(vec![OnOutage::Open, OnOutage::Closed, OnOutage::Local]);
    let when_user = prop::option::weighted(0.2, (select(vec!["alice", "b*"]), any::<bool>()));
    let limit = (
        kind(reserves),
        (select(IDENTIFIERS.to_vec()), when_user),
        rare(),
        rare(),
        on_outage,
        rare(),
        shown,
        unit,
    );
    let limit = limit.prop_map(|(kind, by, required, shadow, on_outage, abnormal, shown, unit)| {
        let (name, (by, when_user)) = ("", by);
        LimitSpec { name, kind, by, when_user, required, shadow, on_outage, abnormal, shown, unit }
    });
    let names = Just(NAMES.to_vec()).prop_shuffle();
    (prop::collection::vec(limit, 1..=4), names).prop_map(|(mut limits, names)| {
        for (limit, name) in limits.iter_mut().zip(names) {
            limit.name = name;
        }
        // Two limits of one name are two items that no client could tell apart.
        let mut taken = Vec::new();
        for limit in &mut limits {
            if let Shown::As(name) = limit.shown {
                if taken.contains(&name) {
                    limit.shown = Shown::Own;
                }
                taken.push(name);
            }
        }
        limits
    })
}

const MODES: [Mode; 8] = [
    Mode::Awaited,
    Mode::Awaited,
    Mode::Immediate,
    Mode::Immediate,
    Mode::Choosing,
    Mode::Reserving(Charged::Estimate),
    Mode::Reserving(Charged::Bytes),
    Mode::Reserving(Charged::Status),
];

fn setup(mode: Mode) -> impl Strategy<Value = Setup> {
    let headers = vec![Header::Forwarded, Header::XForwardedFor, Header::RealIp];
    let header = prop::option::weighted(0.7, select(headers));
    let user =
        vec![Presence::Optional, Presence::Optional, Presence::Mandatory, Presence::Unauthorized];
    let busy = prop_oneof![
        Just(Busy::Untold),
        select(vec![1, 1_500, 60_000]).prop_map(|ms| Busy::Hint { ms }),
        Just(Busy::Estimated),
    ];
    let fields = (prop::bool::weighted(0.8), any::<[bool; 2]>(), prop::bool::weighted(0.2), busy);
    let fields = fields.prop_map(|(draft, [older, models], only_denials, busy)| FieldChoice {
        draft,
        older,
        models,
        only_denials,
        busy,
    });
    let outages = (1..4_u32, 1..3_u64, any::<bool>());
    let outages =
        outages.prop_map(|(failures, nodes, charges)| Outages { failures, nodes, charges });
    // A fallback may have to wait.
    let weight = if mode == Mode::Awaited { 0.8 } else { 0.4 };
    let fallback = prop::option::weighted(weight, outages)
        .prop_map(move |fallback| fallback.filter(|_| mode != Mode::Immediate));
    let frees = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2));
    let reserves = matches!(mode, Mode::Reserving(_));
    (limits(reserves), header, select(user), fields, fallback, frees).prop_map(
        move |(mut limits, header, user, fields, fallback, frees)| {
            // Of shadow limits alone, the first that an outage leaves without a reservation hides
            // the others.
            limits[0].shadow &= !(reserves && fallback.is_some());
            let (frees_500, admits_outage, grpc) = frees;
            Setup { limits, header, user, fields, mode, frees_500, fallback, admits_outage, grpc }
        },
    )
}

fn net() -> impl Strategy<Value = Net> {
    prop_oneof![
        3 => (1..3_u8).prop_map(Net::V4),
        1 => (1..3_u8).prop_map(Net::Mapped),
        1 => (1..3_u8).prop_map(Net::Translated),
        2 => (1..3_u8, any::<u16>()).prop_map(|(network, host)| Net::V6 { network, host }),
        1 => (1..3_u8).prop_map(Net::LinkLocal),
        3 => (1..3_u8).prop_map(Net::Proxy),
        1 => (1..3_u8).prop_map(Net::MappedProxy),
        1 => (1..3_u8).prop_map(Net::Proxy6),
    ]
}

impl Net {
    pub(crate) fn text(self) -> String {
        match self {
            Self::V4(n) => format!("203.0.113.{n}"),
            Self::Mapped(n) => format!("::ffff:203.0.113.{n}"),
            Self::Translated(n) => format!("64:ff9b::203.0.113.{n}"),
            Self::V6 { network, host } => format!("2001:db8:0:{network:x}::a:{host:x}"),
            Self::LinkLocal(n) => format!("fe80::{n:x}"),
            Self::Proxy(n) => format!("10.0.0.{n}"),
            Self::MappedProxy(n) => format!("::ffff:10.0.0.{n}"),
            Self::Proxy6(n) => format!("2001:db8:ff::{n:x}"),
        }
    }
}

/// An address in every form that proxies write, or something else.
fn hop(header: Option<Header>) -> BoxedStrategy<Hop> {
    let is_forwarded = header == Some(Header::Forwarded);
    // A shorter port of an address without brackets reads like its last group.
    let port = prop::option::of(10_000..=u16::MAX);
    let address = (net(), port, any::<[bool; 5]>()).prop_map(
        move |(net, port, [brackets, zone, upper, quotes, spaces])| {
            let mut text = net.text();
            let is_ipv6 = text.contains(':');
            if zone && is_ipv6 {
                text.push_str("%eth0");
            }
            if is_ipv6 && (brackets || is_forwarded) {
                text = format!("[{text}]");
            }
            if let Some(port) = port {
                text = format!("{text}:{port}");
            }
            if upper {
                text = text.to_uppercase();
            }
            if quotes || (is_forwarded && is_ipv6) {
                text = format!("\"{text}\"");
            }
            if is_forwarded {
                let name = if upper { "FOR" } else { "for" };
                text = format!("by=_x;{name}={text};host=\"a,b;for=9.9.9.9\"");
            }
            if spaces {
                text = format!(" \t{text}  ");
            }
            Hop { net: Some(net), text }
        },
    );
    let garbage = if is_forwarded {
        vec![
            "for=unknown",
            "for=_hidden",
            "proto=https",
            "for=9.9.9.9;for=9.9.9.8",
            "for=",
            "9.9.9.9",
        ]
    } else {
        vec![
            "unknown",
            "_hidden",
            "203.0.113.300",
            "[2001:db8::1",
            "1.2.3.4.5",
            "example.org:80",
            "010.0.0.1",
        ]
    };
    let garbage = select(garbage).prop_map(|text| Hop { net: None, text: text.to_owned() });
    prop_oneof![6 => address, 1 => garbage].boxed()
}

fn ask(setup: &Setup) -> impl Strategy<Value = Ask> + use<> {
    let names: Vec<_> = setup.limits.iter().map(|limit| limit.name).collect();
    let per_line = if setup.header.is_some_and(Header::is_single) { 1..2 } else { 1..4_usize };
    let line = prop::collection::vec(hop(setup.header), per_line);
    // A choice of one limit knows no cost of the others.
    let most = if setup.mode == Mode::Choosing { 1 } else { 2 };
    let costs = prop::collection::vec((select(names.clone()), 0..4_u64), 0..most);
    let outcome = prop_oneof![
        8 => select(vec![200, 200, 304, 404, 500]).prop_map(|status| Outcome::Answers { status }),
        1 => Just(Outcome::Fails),
        1 => Just(Outcome::Panics),
    ];
    let rare = |weight| prop::bool::weighted(weight);
    let body = (prop::collection::vec_deque(0..4_u64, 0..3), rare(0.1), any::<bool>(), rare(0.2));
    let body = body.prop_map(|(bytes, breaks, tells_end, meters)| Frames {
        bytes,
        breaks,
        tells_end,
        meters,
    });
    let handler = (
        (rare(0.4), rare(0.15)),
        outcome,
        body,
        prop::option::weighted(0.3, 0..5_u64),
        prop::option::weighted(0.3, (select(names), 0..5_u64)),
    );
    let handler = handler.prop_map(|((waits, keeps), outcome, body, metered, metered_of)| {
        Handler { waits, outcome, body, keeps, metered, metered_of }
    });
    let plans =
        vec![Plan::All, Plan::All, Plan::Backwards, Plan::First, Plan::Exempt, Plan::Refused];
    (
        select(vec![0, 0, 0, 0, 1, 250, 999, 1_000, 5_000, 90_000, 4_000_000]),
        net(),
        prop::collection::vec(line, 0..3),
        select(vec![Some("alice"), Some("bob"), None]),
        select(vec![1, 1, 1, 2, 0, 5]),
        costs,
        select(plans),
        prop::bool::weighted(if setup.fallback.is_some() { 0.4 } else { 0.05 }),
        (handler, select(vec![0, 100, 1_000, 30_000, 10_000_000])),
    )
        .prop_map(
            |(after_ms, peer, lines, user, cost, costs, plan, away, (handler, patience_ms))| Ask {
                after_ms,
                peer,
                lines,
                user,
                cost,
                costs,
                plan,
                away,
                handler,
                patience_ms,
            },
        )
}

/// A layer, and requests to it.
pub(crate) fn play() -> impl Strategy<Value = (Setup, Vec<Step>)> {
    select(MODES.to_vec()).prop_flat_map(setup).prop_flat_map(|setup| {
        let ask = ask(&setup).prop_map(|ask| Step::Ask(Box::new(ask)));
        let go = prop_oneof![3 => Just(Go::On), 1 => Just(Go::Off), 2 => Just(Go::Through)];
        let go = (any::<prop::sample::Index>(), go).prop_map(|(nth, go)| Step::Go(nth, go));
        let steps = prop::collection::vec(prop_oneof![ask, go], 1..16);
        (Just(setup), steps)
    })
}

/// The same, all of which wait for their turn.
pub(crate) fn waits() -> impl Strategy<Value = (Setup, Vec<Ask>)> {
    setup(Mode::Awaited).prop_flat_map(|setup| {
        let asks = prop::collection::vec(ask(&setup), 1..12);
        (Just(setup), asks)
    })
}
