use std::net::{Ipv4Addr, Ipv6Addr};

use http::Request;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;

const PROXY: &str = "10.0.0.1";

fn behind(header: ProxyHeader) -> ClientAddress {
    ClientAddress::behind(["10.0.0.0/8", "2001:db8:1::/48"], header).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn headers(name: &str, lines: &[&str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(name.parse::<HeaderName>().unwrap(), line.parse().unwrap());
    }
    headers
}

fn resolve_xff(peer: &str, lines: &[&str]) -> String {
    let headers = headers("x-forwarded-for", lines);
    behind(ProxyHeader::XForwardedFor).resolve(ip(peer), &headers).to_string()
}

#[test]
fn the_rightmost_untrusted_hop_is_the_client() {
    assert_eq!(resolve_xff(PROXY, &["192.0.2.7"]), "192.0.2.7");
    assert_eq!(resolve_xff(PROXY, &["203.0.113.9, 192.0.2.7, 10.1.1.1"]), "192.0.2.7");
    assert_eq!(resolve_xff(PROXY, &["203.0.113.9", "192.0.2.7:4711", "10.1.1.1"]), "192.0.2.7");
    assert_eq!(
        resolve_xff("2001:db8:1::5", &["2001:db8:2::1, [2001:db8:1::9]:80"]),
        "2001:db8:2::1"
    );
    assert_eq!(resolve_xff(PROXY, &["::ffff:192.0.2.7, ::ffff:10.2.2.2"]), "192.0.2.7");
    assert_eq!(resolve_xff("::ffff:10.0.0.1", &["192.0.2.7"]), "192.0.2.7");
}

#[test]
fn a_peer_that_is_no_proxy_is_the_client_whatever_it_sends() {
    assert_eq!(resolve_xff("198.51.100.1", &["192.0.2.7, 10.0.0.1"]), "198.51.100.1");
    let headers = headers("forwarded", &["for=192.0.2.7"]);
    assert_eq!(ClientAddress::peer().resolve(ip(PROXY), &headers), ip(PROXY));
}

#[test]
fn what_a_proxy_cannot_tell_is_known_by_that_proxy() {
    assert_eq!(resolve_xff(PROXY, &[]), PROXY);
    assert_eq!(resolve_xff(PROXY, &["192.0.2.7, unknown"]), PROXY);
    assert_eq!(resolve_xff(PROXY, &["192.0.2.7, garbage, 10.3.3.3"]), "10.3.3.3");
    assert_eq!(resolve_xff(PROXY, &["10.4.4.4, 10.3.3.3"]), "10.4.4.4");
    let who = behind(ProxyHeader::Forwarded);
    for element in ["for=_hidden", "for=unknown", "proto=https", "for=\"192.0.2.7"] {
        let headers = headers("forwarded", &["for=192.0.2.7", element]);
        assert_eq!(who.resolve(ip(PROXY), &headers), ip(PROXY), "{element}");
    }
}

#[test]
fn only_the_header_that_the_proxies_write_is_read() {
    let mut both = headers("forwarded", &["for=203.0.113.1"]);
    both.extend(headers("x-forwarded-for", &["203.0.113.2"]));
    both.extend(headers("cf-connecting-ip", &["203.0.113.66", "203.0.113.3"]));
    for (header, address) in [
        (ProxyHeader::Forwarded, "203.0.113.1"),
        (ProxyHeader::XForwardedFor, "203.0.113.2"),
        (ProxyHeader::Single(HeaderName::from_static("cf-connecting-ip")), "203.0.113.3"),
        (ProxyHeader::Single(HeaderName::from_static("x-real-ip")), PROXY),
    ] {
        assert_eq!(behind(header).resolve(ip(PROXY), &both), ip(address));
    }
}

#[test]
fn identifiers_are_addresses_or_networks() {
    let text = |who: &ClientAddress, address: &str| {
        let headers = HeaderMap::new();
        who.identifier(who.resolve(ip(address), &headers)).as_str().to_owned()
    };
    let who = ClientAddress::peer();
    assert_eq!(text(&who, "192.0.2.7"), "192.0.2.7");
    assert_eq!(text(&who, "::ffff:192.0.2.7"), "192.0.2.7");
    assert_eq!(text(&who, "2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
    let who = who.ipv6_prefix(48).unwrap().ipv4_prefix(24).unwrap();
    assert_eq!(text(&who, "2001:db8:1:2:3:4:5:6"), "2001:db8:1::/48");
    assert_eq!(text(&who, "192.0.2.7"), "192.0.2.0/24");
    let who = who.ipv6_prefix(128).unwrap();
    assert_eq!(text(&who, "2001:db8::1"), "2001:db8::1");
}

#[test]
fn what_cannot_be_meant_is_refused_with_the_remedy() {
    let refused = |proxies: &[&str]| {
        ClientAddress::behind(proxies, ProxyHeader::Forwarded).unwrap_err().to_string()
    };
    assert!(refused(&[]).contains("no trusted proxy"));
    assert!(refused(&["10.0.0.0/33"]).contains("10.0.0.0/8"));
    assert!(refused(&["proxy.example"]).contains("proxy.example"));
    assert!(ClientAddress::peer().ipv6_prefix(0).is_err());
    assert!(ClientAddress::peer().ipv6_prefix(129).is_err());
    assert!(ClientAddress::peer().ipv4_prefix(33).is_err());
}

#[test]
fn a_network_of_mapped_addresses_is_the_ipv4_network() {
    let who = ClientAddress::behind(["::ffff:10.0.0.0/104"], ProxyHeader::XForwardedFor).unwrap();
    let headers = headers("x-forwarded-for", &["192.0.2.7"]);
    assert_eq!(who.resolve(ip(PROXY), &headers), ip("192.0.2.7"));
}

#[test]
fn without_a_peer_the_request_is_an_error_and_not_unlimited() {
    #[derive(Clone)]
    struct Connection(SocketAddr);
    let (mut parts, ()) = Request::new(()).into_parts();
    let who = ClientAddress::peer();
    assert!(matches!(who.identify(&mut parts), Found::Now(Err(IdentifyError::NotWired(_)))));
    parts.extensions.insert(PeerAddress("192.0.2.7:80".parse().unwrap()));
    let Found::Now(Ok(Some(found))) = who.identify(&mut parts) else { panic!("no identifier") };
    assert_eq!(found.as_str(), "192.0.2.7");
    parts.extensions.insert(Connection("192.0.2.8:80".parse().unwrap()));
    let who = who.from_extension(|connection: &Connection| Some(connection.0));
    let Found::Now(Ok(Some(found))) = who.identify(&mut parts) else { panic!("no identifier") };
    assert_eq!(found.as_str(), "192.0.2.8");
}

/// Addresses outside of the trusted networks.
fn client() -> impl Strategy<Value = IpAddr> {
    let v4 =
        (11_u8.., any::<[u8; 3]>()).prop_map(|(a, [b, c, d])| Ipv4Addr::new(a, b, c, d).into());
    let v6 = any::<[u16; 7]>()
        .prop_map(|[b, c, d, e, f, g, h]| IpAddr::from(Ipv6Addr::new(0x2a00, b, c, d, e, f, g, h)));
    prop_oneof![v4, v6]
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

/// The address as proxies write it.
fn written(address: IpAddr, style: u8, forwarded: bool) -> String {
    match (address, forwarded, style) {
        (IpAddr::V4(ip), true, 0) => format!("for={ip};proto=https"),
        (IpAddr::V4(ip), true, _) => format!("By=_x;For=\"{ip}:4711\";host=\"a,b;for=1.1.1.1\""),
        (IpAddr::V6(ip), true, 0) => format!("for=\"[{ip}]\""),
        (IpAddr::V6(ip), true, _) => format!("proto=http;for=\"[{ip}]:4711\""),
        (ip, false, 0) => ip.to_string(),
        (IpAddr::V4(ip), false, _) => format!("{ip}:4711"),
        (IpAddr::V6(ip), false, _) => format!("[{ip}]:4711"),
    }
}

/// A request that came through one or two proxies, after the client had written what it liked.
#[derive(Clone, Debug)]
struct Proxied {
    client: IpAddr,
    forwarded: bool,
    lines: Vec<String>,
}

impl Proxied {
    fn headers(&self) -> HeaderMap {
        let name = if self.forwarded { "forwarded" } else { "x-forwarded-for" };
        let lines: Vec<_> = self.lines.iter().map(String::as_str).collect();
        headers(name, &lines)
    }
}

fn proxied() -> impl Strategy<Value = Proxied> {
    let spoofs = prop::collection::vec(spoof(), 0..3);
    let all = (client(), spoofs, any::<bool>(), 0_u8..2, any::<bool>(), any::<bool>());
    all.prop_map(|(client, spoofs, joined, style, inner_proxy, forwarded)| {
        let mut ours = written(client, style, forwarded);
        if inner_proxy {
            ours = format!("{ours}, {}", written(ip("10.9.9.9"), style, forwarded));
        }
        // A proxy appends to the client's last line, or adds a line of its own.
        let mut lines = spoofs;
        match lines.last_mut() {
            Some(last) if joined => *last = format!("{last}, {ours}"),
            _ => lines.push(ours),
        }
        Proxied { client, forwarded, lines }
    })
}

/// Tries a way to find the client on many requests.
fn resists_spoofing(resolve: impl Fn(&Proxied) -> IpAddr) -> Result<(), String> {
    let mut runner = TestRunner::new_with_rng(
        Config { cases: 2_000, failure_persistence: None, ..Config::default() },
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    );
    let tried = runner.run(&proxied(), |request| {
        prop_assert_eq!(resolve(&request), request.client, "{:?}", request.lines);
        Ok(())
    });
    tried.map_err(|failed| failed.to_string())
}

#[test]
fn whatever_the_client_prepends_changes_nothing() {
    let resolve = |request: &Proxied| {
        let header =
            if request.forwarded { ProxyHeader::Forwarded } else { ProxyHeader::XForwardedFor };
        behind(header).resolve(ip(PROXY), &request.headers())
    };
    resists_spoofing(resolve).unwrap();
}

/// The ways of other crates. Each is fooled, so the test above can fail.
#[test]
fn readers_that_clients_can_fool_are_caught() {
    let address = |request: &Proxied, element: &str| {
        let address = if request.forwarded {
            forwarded::address_of_forwarded(element.as_bytes())
        } else {
            forwarded::address_of_node(element.as_bytes())
        };
        address.filter(|address| !behind(ProxyHeader::Forwarded).is_proxy(*address))
    };
    let nearest = || ip(PROXY);
    let leftmost = |request: &Proxied| {
        let all = request.lines.join(",");
        all.split(',').find_map(|element| address(request, element)).unwrap_or_else(nearest)
    };
    // The rightmost address, whatever stands to the right of it.
    let first_line_alone = |request: &Proxied| {
        let mut elements = request.lines[0].rsplit(',');
        elements.find_map(|element| address(request, element)).unwrap_or_else(nearest)
    };
    // From the left, as a grammar has it: a lone quote reaches to the end.
    let quotes_from_the_left = |request: &Proxied| {
        let (all, mut quoted, mut begin, mut elements) =
            (request.lines.join(", "), false, 0, Vec::new());
        for (at, c) in all.char_indices() {
            if c == '"' {
                quoted = !quoted;
            } else if c == ',' && !quoted {
                elements.push(all[begin..at].trim());
                begin = at + 1;
            }
        }
        elements.push(all[begin..].trim());
        let mut from_the_right = elements.iter().rev();
        from_the_right.find_map(|element| address(request, element)).unwrap_or_else(nearest)
    };
    resists_spoofing(leftmost).unwrap_err();
    resists_spoofing(first_line_alone).unwrap_err();
    resists_spoofing(quotes_from_the_left).unwrap_err();
}

proptest! {
    #[test]
    fn no_header_panics_or_changes_a_direct_peer(lines in prop::collection::vec(spoof(), 0..4)) {
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let who = behind(ProxyHeader::Forwarded);
        prop_assert_eq!(who.resolve(ip("192.0.2.1"), &headers("forwarded", &lines)), ip("192.0.2.1"));
        let _any = who.resolve(ip(PROXY), &headers("forwarded", &lines));
        let _any = behind(ProxyHeader::XForwardedFor)
            .resolve(ip(PROXY), &headers("x-forwarded-for", &lines));
    }
}
