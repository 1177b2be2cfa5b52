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
    let headers = headers("x-forwarded-for", &["192.0.2.7"]);
    assert_eq!(mapped.unwrap().resolve(ip(PROXY), &headers), ip("192.0.2.7"));
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

/// Addresses outside of the trusted networks.
fn client() -> impl Strategy<Value = IpAddr> {
    let all = any::<IpAddr>().prop_map(|address| address.to_canonical());
    all.prop_filter("trusted", |address| !behind(ProxyHeader::Forwarded).is_proxy(*address))
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

/// The address as proxies write it, with its port and without.
fn written(address: IpAddr, with_port: bool, forwarded: bool) -> String {
    let socket = SocketAddr::new(address, 4711).to_string();
    match (forwarded, with_port) {
        (true, true) => format!("By=_x;For=\"{socket}\";host=\"a,b;for=1.1.1.1\""),
        (true, false) => format!("for=\"{}\";proto=https", socket.trim_end_matches(":4711")),
        (false, true) => socket,
        (false, false) => address.to_string(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn whatever_the_client_prepends_changes_nothing(
        client in client(),
        mut lines in prop::collection::vec(spoof(), 0..3),
        [joined, with_port, inner_proxy, forwarded]: [bool; 4],
    ) {
        let mut ours = written(client, with_port, forwarded);
        if inner_proxy {
            ours = format!("{ours}, {}", written(ip("10.9.9.9"), with_port, forwarded));
        }
        // A proxy appends to the client's last line, or adds a line of its own.
        match lines.last_mut() {
            Some(last) if joined => *last = format!("{last}, {ours}"),
            _ => lines.push(ours),
        }
        let (header, name) = if forwarded {
            (ProxyHeader::Forwarded, "forwarded")
        } else {
            (ProxyHeader::XForwardedFor, "x-forwarded-for")
        };
        let resolved = behind(header).resolve(ip(PROXY), &headers(name, &lines));
        prop_assert_eq!(resolved, client, "{:?}", lines);
    }
}
