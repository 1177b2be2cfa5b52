//! The address of a client, as logs write it and as the HTTP layer names it.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use compact_str::{CompactString, ToCompactString as _, format_compact};

/// The address that a text is: with or without a port or brackets.
pub(crate) fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    if !text.starts_with(|c: char| c.is_ascii_hexdigit() || c == ':' || c == '[') {
        return None;
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let ip = bare.parse().ok().or_else(|| Some(text.parse::<SocketAddr>().ok()?.ip()))?;
    Some(match ip {
        IpAddr::V6(ip) => in_ipv6(ip).map_or(IpAddr::V6(ip), IpAddr::V4),
        IpAddr::V4(_) => ip,
    })
}

/// The client of a text, which may be a list of the client and its proxies: the first address, of
/// those behind the last member that is none. So the HTTP layer reads the list, from its end: who
/// wrote such a member may have written all before it.
pub(crate) fn client(text: &str, ipv6_prefix: u8) -> CompactString {
    let first = text.split(',').next().unwrap_or(text).trim();
    match text.rsplit(',').map_while(address).last() {
        Some(IpAddr::V4(ip)) => ip.to_compact_string(),
        // As the HTTP layer does: a client has a network.
        Some(IpAddr::V6(ip)) if !ip.is_unicast_link_local() && ipv6_prefix < 128 => {
            let network = ip.to_bits() & (u128::MAX << (128 - u32::from(ipv6_prefix)));
            format_compact!("{}/{ipv6_prefix}", Ipv6Addr::from_bits(network))
        }
        Some(IpAddr::V6(ip)) => ip.to_compact_string(),
        None => first.into(),
    }
}

/// An address as it is counted, and any other text as it is.
pub(crate) fn client_as_counted(text: &str, ipv6_prefix: u8) -> CompactString {
    address(text).map_or_else(|| text.into(), |_| client(text, ipv6_prefix))
}

/// The IPv4 address that an IPv6 address stands for: mapped, or translated (RFC 6052).
fn in_ipv6(ip: Ipv6Addr) -> Option<std::net::Ipv4Addr> {
    match ip.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            Some(std::net::Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_named_as_the_http_layer_names_it() {
        for (text, name) in [
            ("192.0.2.7", "192.0.2.7"),
            ("192.0.2.7:5678", "192.0.2.7"),
            ("[192.0.2.7]", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("[::ffff:192.0.2.7]:80", "192.0.2.7"),
            ("64:ff9b::192.0.2.7", "192.0.2.7"),
            ("2001:db8::1", "2001:db8::/64"),
            ("[2001:db8::1]:443", "2001:db8::/64"),
            ("fe80::1", "fe80::1"),
            ("192.0.2.7, 198.51.100.1, 203.0.113.2", "192.0.2.7"),
            ("-, 192.0.2.7", "192.0.2.7"),
            ("unknown, 192.0.2.7, 10.0.0.1", "192.0.2.7"),
            ("client.example.org", "client.example.org"),
            ("unknown", "unknown"),
            ("192.0.2.9, unknown, 192.0.2.7, 10.0.0.1", "192.0.2.7"),
        ] {
            assert_eq!(client(text, 64), name, "{text}");
        }
        assert_eq!(client("2001:db8:1:2:3::1", 48), "2001:db8:1::/48");
        assert_eq!(client("2001:db8::1", 128), "2001:db8::1");
        for text in ["", "bob", "2001:db8::/64", "a, 192.0.2.7"] {
            assert_eq!(client_as_counted(text, 64), text);
        }
        assert_eq!(client_as_counted("[2001:db8::1]", 64), "2001:db8::/64");
    }
}
