use http::Request;
use proptest::prelude::*;

use super::*;

const PROXY: &str = "10.0.0.1";

fn behind(header: ProxyHeader) -> ClientAddress {
    ClientAddress::behind(["10.0.0.0/8", "2001:db8:1::/48"], header).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn headers(name: &str, lines: &[impl AsRef<str>]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(name.parse::<HeaderName>().unwrap(), line.as_ref().parse().unwrap());
    }
    headers
}

#[test]
fn the_rightmost_untrusted_hop_is_the_client_of_a_proxy_and_any_other_peer_is_the_client() {
    for (peer, lines, client) in [
        (PROXY, &["::ffff:192.0.2.7, ::ffff:10.2.2.2"][..], "192.0.2.7"),
        ("2001:db8:1::5", &["2001:db8:2::1, [2001:db8:1::9]:80"], "2001:db8:2::1"),
        ("::ffff:10.0.0.1", &["192.0.2.7"], "192.0.2.7"),
        ("198.51.100.1", &["192.0.2.7, 10.0.0.1"], "198.51.100.1"),
        // What a proxy cannot tell is known by that proxy.
        (PROXY, &[], PROXY),
        (PROXY, &["192.0.2.7, unknown"], PROXY),
        (PROXY, &["192.0.2.7, garbage, 10.3.3.3"], "10.3.3.3"),
        (PROXY, &["10.4.4.4, 10.3.3.3"], "10.4.4.4"),
    ] {
        let headers = headers("x-forwarded-for", lines);
        let resolved = behind(ProxyHeader::XForwardedFor).resolve(ip(peer), &headers);
        assert_eq!(resolved, ip(client), "{peer}: {lines:?}");
    }
    let mapped = ClientAddress::behind(["::ffff:10.0.0.0/104"], ProxyHeader::XForwardedFor);
    let reported = headers("x-forwarded-for", &["192.0.2.7"]);
    assert_eq!(mapped.unwrap().resolve(ip(PROXY), &reported), ip("192.0.2.7"));
    // A proxy behind a translator, and a client behind another.
    let translated = ClientAddress::behind(["64:ff9b::10.0.0.0/104"], ProxyHeader::XForwardedFor);
    let reported = headers("x-forwarded-for", &["64:FF9B::c000:207"]);
    let proxy = ip("64:ff9b::10.0.0.1");
    assert_eq!(translated.unwrap().resolve(proxy, &reported), ip("192.0.2.7"));
}

#[test]
fn only_the_header_that_the_proxies_write_is_read() {
    // Readers that begin at the left take the quote for one that reaches to the end.
    let mut all = headers("forwarded", &["for=203.0.113.9, for=\"10.0.0.1, for=203.0.113.1"]);
    all.extend(headers("x-forwarded-for", &["203.0.113.2"]));
    all.extend(headers("cf-connecting-ip", &["203.0.113.66", "203.0.113.3"]));
    let single = |name| ProxyHeader::Single(HeaderName::from_static(name));
    for (who, address) in [
        (behind(ProxyHeader::Forwarded), "203.0.113.1"),
        (behind(ProxyHeader::XForwardedFor), "203.0.113.2"),
        (behind(single("cf-connecting-ip")), "203.0.113.3"),
        (behind(single("x-real-ip")), PROXY),
        (ClientAddress::peer(), PROXY),
    ] {
        assert_eq!(who.resolve(ip(PROXY), &all), ip(address));
    }
}

#[test]
fn identifiers_are_addresses_or_networks_of_the_peer_that_the_server_tells() {
    #[derive(Clone)]
    struct PeerConnection(SocketAddr);
    let who = ClientAddress::peer();
    let with = |length| who.clone().ipv6_prefix(length).unwrap();
    let own = who.clone().from_extension(|connection: &PeerConnection| Some(connection.0));
    for (who, peer, identifier) in [
        (&who, "192.0.2.7:80", "192.0.2.7"),
        (&who, "[::ffff:192.0.2.7]:80", "192.0.2.7"),
        (&who, "[64:ff9b::192.0.2.7]:80", "192.0.2.7"),
        (&with(128), "[64:ff9b:1::192.0.2.7]:80", "64:ff9b:1::c000:207"),
        (&who, "[fe80::1:2:3:4]:80", "fe80::1:2:3:4"),
        (&with(48), "[febf::1]:80", "febf::1"),
        (&who, "[fec0::1]:80", "fec0::/64"),
        (&who, "[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1:2::/64"),
        (&with(48), "[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1::/48"),
        (&with(128), "[2001:db8::1]:80", "2001:db8::1"),
        (&own, "192.0.2.7:80", "192.0.2.8"),
    ] {
        let (mut parts, ()) = Request::new(()).into_parts();
        // A request without a peer is an error, and not unlimited.
        assert!(matches!(
            who.identify(&mut parts),
            Identification::Now(Err(IdentifyError::NotWired(_)))
        ));
        parts.extensions.insert(PeerAddress(peer.parse().unwrap()));
        parts.extensions.insert(PeerConnection("192.0.2.8:80".parse().unwrap()));
        let Identification::Now(found) = who.identify(&mut parts) else { panic!("it waits") };
        assert_eq!(found.unwrap(), Some(identifier.into()), "{peer}");
    }
}

#[test]
fn what_cannot_be_meant_is_refused_with_the_remedy() {
    for (proxies, remedy) in [
        (&[][..], "no trusted proxy"),
        (&["10.0.0.0/33"], "10.0.0.0/8"),
        (&["proxy.example"], "proxy.example"),
    ] {
        let refused = ClientAddress::behind(proxies, ProxyHeader::Forwarded).unwrap_err();
        assert!(refused.to_string().contains(remedy), "{refused}");
    }
    assert!([0, 129].iter().all(|length| ClientAddress::peer().ipv6_prefix(*length).is_err()));
}

/// Addresses outside of the trusted networks, of every kind.
fn client() -> impl Strategy<Value = IpAddr> {
    let of_ipv4 = |prefix: u128| {
        any::<u32>().prop_map(move |low| IpAddr::V6(Ipv6Addr::from_bits(prefix | u128::from(low))))
    };
    let all = prop_oneof![
        any::<IpAddr>(),
        of_ipv4(0xffff << 32),
        of_ipv4(0x64_ff9b << 96),
        any::<u64>()
            .prop_map(|low| IpAddr::V6(Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(low)))),
        // Short ones, in which a port reads like a group.
        any::<[u16; 3]>()
            .prop_map(|[a, b, c]| Ipv6Addr::new(0x2001, 0xdb8, a, 0, 0, 0, b, c).into()),
    ];
    all.prop_filter("trusted", |address| {
        !behind(ProxyHeader::Forwarded).is_proxy(canonical(*address))
    })
}

/// What a client may write: anything that a header can hold, and what parsers are weak against.
fn spoof() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ -~]{0,40}",
        "(for=)?(\"|\\\\|,|;|=|\\[|\\]|10\\.0\\.0\\.1|unknown| ){0,12}",
        Just("10.0.0.1, 10.0.0.2".to_owned()),
        Just("for=10.0.0.1, for=\"".to_owned()),
    ]
}

/// How a proxy writes an address.
#[allow(clippy::struct_excessive_bools, reason = "each differs from the next by itself")]
#[derive(Clone, Copy, Debug)]
struct Style {
    forwarded: bool,
    port: Option<u16>,
    /// Around an IPv6 address with a port; proxies that leave them out exist.
    brackets: bool,
    zone: bool,
    upper: bool,
    /// Groups written in full.
    long: bool,
}

fn style() -> impl Strategy<Value = Style> {
    // A shorter port is read as a group of an address without brackets, in the same /64.
    let port = prop::option::of(10_000..=u16::MAX);
    (port, any::<[bool; 5]>()).prop_map(|(port, [forwarded, brackets, zone, upper, long])| Style {
        forwarded,
        port,
        brackets,
        zone,
        upper,
        long,
    })
}

fn write_address(address: IpAddr, style: Style) -> String {
    let mut text = match address {
        IpAddr::V6(address) if style.long => {
            address.segments().map(|group| format!("{group:04x}")).join(":")
        }
        address => address.to_string(),
    };
    if style.upper {
        text = text.to_uppercase();
    }
    if address.is_ipv6() && style.zone {
        text.push_str("%eth0");
    }
    // RFC 7239 asks for brackets.
    if address.is_ipv6() && (style.brackets || style.forwarded) {
        text = format!("[{text}]");
    }
    if let Some(port) = style.port {
        text = format!("{text}:{port}");
    }
    match (style.forwarded, style.long) {
        (true, true) => format!("By=_x;For=\"{text}\";host=\"a,b;for=1.1.1.1\""),
        (true, false) => format!("for=\"{text}\";proto=https"),
        (false, _) => text,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn whatever_the_client_prepends_changes_nothing(
        client in client(),
        mut lines in prop::collection::vec(spoof(), 0..3),
        style in style(),
        [joined, inner_proxy]: [bool; 2],
    ) {
        let mut ours = write_address(client, style);
        if inner_proxy {
            ours = format!("{ours}, {}", write_address(ip("10.9.9.9"), style));
        }
        // A proxy appends to the client's last line, or adds a line of its own.
        match lines.last_mut() {
            Some(last) if joined => *last = format!("{last}, {ours}"),
            _ => lines.push(ours),
        }
        let (header, name) = if style.forwarded {
            (ProxyHeader::Forwarded, "forwarded")
        } else {
            (ProxyHeader::XForwardedFor, "x-forwarded-for")
        };
        let resolved = behind(header).resolve(ip(PROXY), &headers(name, &lines));
        prop_assert_eq!(resolved, canonical(client), "{:?}", lines);
    }
}
