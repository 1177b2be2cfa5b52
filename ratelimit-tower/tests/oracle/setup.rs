//! What is generated: a layer, and the requests to it.

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::OnOutage;

/// A limit.
#[derive(Clone, Debug)]
pub(crate) struct LimitSpec {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The identifiers; the bare key, which is the same for all, if there are none.
    pub(crate) by: &'static [&'static str],
    pub(crate) required: bool,
    pub(crate) shadow: bool,
    /// What it does in an outage.
    pub(crate) on_outage: OnOutage,
    pub(crate) abnormal: bool,
    pub(crate) shown: Shown,
    pub(crate) unit: Option<&'static str>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Bucket { every_us: u64, burst: u64 },
    Window { limit: u64, length_us: u64 },
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

/// What a response costs; 304 is free.
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
}

/// A layer.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) limits: Vec<LimitSpec>,
    pub(crate) header: Option<Header>,
    pub(crate) user: Presence,
    pub(crate) fields: FieldChoice,
    pub(crate) mode: Mode,
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
    pub(crate) status: u16,
    pub(crate) bytes: u64,
    pub(crate) metered: Option<u64>,
    pub(crate) metered_of: Option<(&'static str, u64)>,
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

fn limits() -> impl Strategy<Value = Vec<LimitSpec>> {
    let kind = prop_oneof![
        (select(vec![20_000, 250_000, 1_000_000, 7_000_000, 90_000_000]), 1..5_u64)
            .prop_map(|(every_us, burst)| Kind::Bucket { every_us, burst }),
        (1..5_u64, select(vec![500_000, 1_000_000, 10_000_000, 3_600_000_000]))
            .prop_map(|(limit, length_us)| Kind::Window { limit, length_us }),
    ];
    let rare = || prop::bool::weighted(0.15);
    let shown = prop_oneof![
        6 => Just(Shown::Own),
        1 => Just(Shown::Hidden),
        1 => Just(Shown::As("tokens")),
        1 => Just(Shown::As("x.y_z-1")),
    ];
    let unit = prop::option::weighted(0.2, select(vec!["content-bytes", "tokens"]));
    let on_outage = select(vec![OnOutage::Open, OnOutage::Closed, OnOutage::Local]);
    let limit =
        (kind, select(IDENTIFIERS.to_vec()), rare(), rare(), on_outage, rare(), shown, unit);
    let limit = limit.prop_map(|(kind, by, required, shadow, on_outage, abnormal, shown, unit)| {
        LimitSpec { name: "", kind, by, required, shadow, on_outage, abnormal, shown, unit }
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

pub(crate) fn setup() -> impl Strategy<Value = Setup> {
    let headers = vec![Header::Forwarded, Header::XForwardedFor, Header::RealIp];
    let header = prop::option::weighted(0.7, select(headers));
    let user =
        vec![Presence::Optional, Presence::Optional, Presence::Mandatory, Presence::Unauthorized];
    let modes = vec![
        Mode::Awaited,
        Mode::Immediate,
        Mode::Immediate,
        Mode::Choosing,
        Mode::Reserving(Charged::Estimate),
        Mode::Reserving(Charged::Bytes),
        Mode::Reserving(Charged::Status),
    ];
    let fields = (prop::bool::weighted(0.8), any::<[bool; 2]>(), prop::bool::weighted(0.2));
    let fields = fields.prop_map(|(draft, [older, models], only_denials)| FieldChoice {
        draft,
        older,
        models,
        only_denials,
    });
    let grpc = prop::bool::weighted(0.2);
    (limits(), header, select(user), fields, select(modes), any::<bool>(), grpc).prop_map(
        |(limits, header, user, fields, mode, admits_outage, grpc)| Setup {
            limits,
            header,
            user,
            fields,
            mode,
            admits_outage,
            grpc,
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
    let handler = (
        select(vec![200, 200, 304, 404, 500]),
        0..5_u64,
        prop::option::weighted(0.3, 0..5_u64),
        prop::option::weighted(0.3, (select(names), 0..5_u64)),
    );
    let handler = handler.prop_map(|(status, bytes, metered, metered_of)| Handler {
        status,
        bytes,
        metered,
        metered_of,
    });
    let plans =
        vec![Plan::All, Plan::All, Plan::Backwards, Plan::First, Plan::Exempt, Plan::Refused];
    (
        select(vec![0, 0, 0, 1, 250, 999, 1_000, 5_000, 90_000]),
        net(),
        prop::collection::vec(line, 0..3),
        select(vec![Some("alice"), Some("bob"), None]),
        select(vec![1, 1, 1, 2, 0, 5]),
        costs,
        select(plans),
        prop::bool::weighted(0.05),
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
pub(crate) fn play() -> impl Strategy<Value = (Setup, Vec<Ask>)> {
    setup().prop_flat_map(|setup| {
        let asks = prop::collection::vec(ask(&setup), 1..12);
        (Just(setup), asks)
    })
}
