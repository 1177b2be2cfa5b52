//! Reads `Forwarded` (RFC 7239) and `X-Forwarded-For` from the right.
//!
//! Each proxy appends what it knows, so only the right end of a list comes from a trusted proxy.
//! Everything to the left may be written by the client: a lone quote, a backslash or a comma there
//! must not change how the right end is read. Parsers that begin at the left cannot promise that;
//! these functions split at the last separator outside of quotes.

use std::net::IpAddr;

/// The parts of a text between separators outside of quoted strings, from the right, trimmed. Empty
/// ones are left out.
pub(super) fn split_from_the_right(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let (mut quoted, mut end) = (false, text.len());
    let is_separator = move |at: &usize| {
        // An odd number of backslashes before a quote escapes it.
        let backslashes = || text[..*at].iter().rev().take_while(|byte| **byte == b'\\').count();
        if text[*at] == b'"' && !(quoted && backslashes() % 2 == 1) {
            quoted = !quoted;
        }
        text[*at] == separator && !quoted
    };
    let starts = (0..text.len()).rev().filter(is_separator).map(|at| at + 1).chain([0]);
    let parts = starts.map(move |start| {
        let part = &text[start..end];
        end = start.saturating_sub(1);
        part.trim_ascii()
    });
    parts.filter(|part| !part.is_empty())
}

/// The address of the `for` parameter of an element of `Forwarded`. `None` if there is none, if it
/// is `unknown` or obfuscated, or if the element is malformed.
pub(super) fn address_of_forwarded(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    for pair in split_from_the_right(element, b';') {
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&pair[..equals], &pair[equals + 1..]);
        if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
            return None; // RFC 7239, section 4: no parameter occurs twice
        }
    }
    address_of_node(&unquoted(found?)?)
}

/// A token as it is, or the content of a quoted string without its escapes.
fn unquoted(value: &[u8]) -> Option<Vec<u8>> {
    let Some(inner) = value.strip_prefix(b"\"") else { return Some(value.to_vec()) };
    let inner = inner.strip_suffix(b"\"")?;
    let mut text = Vec::with_capacity(inner.len());
    let mut bytes = inner.iter();
    while let Some(byte) = bytes.next() {
        text.push(if *byte == b'\\' { *bytes.next()? } else { *byte });
    }
    Some(text)
}

/// The address of a node: `192.0.2.7`, `192.0.2.7:4711`, `2001:db8::1`, `[2001:db8::1]:4711`,
/// `fe80::1%eth0`. The port and the zone are dropped. `None` for everything else, such as `unknown`
/// and `_hidden`.
///
/// Some proxies write `2001:db8::1:46532`: an IPv6 address and its port, without brackets. Where
/// all of it is an address, it is read as one; a port of up to four digits then changes no more
/// than the last group.
pub(super) fn address_of_node(node: &[u8]) -> Option<IpAddr> {
    let node = std::str::from_utf8(node).ok()?.trim_matches('"');
    if let Some(bracketed) = node.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        let is_port = port.is_empty() || port.starts_with(':');
        return without_zone(address).parse().ok().filter(|_| is_port);
    }
    let before_port = || {
        let (address, port) = node.rsplit_once(':')?;
        let is_port = (1..=5).contains(&port.len()) && port.bytes().all(|b| b.is_ascii_digit());
        without_zone(address).parse().ok().filter(|_| is_port)
    };
    without_zone(node).parse().ok().or_else(before_port)
}

fn without_zone(address: &str) -> &str {
    address.split_once('%').map_or(address, |(address, _zone)| address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_form_and_nothing_else_is() {
        for (node, address) in [
            ("192.0.2.7", Some("192.0.2.7")),
            ("192.0.2.7:80", Some("192.0.2.7")),
            ("2001:db8::1", Some("2001:db8::1")),
            ("[2001:db8::1]", Some("2001:db8::1")),
            ("[2001:db8::1]:80", Some("2001:db8::1")),
            ("fe80::1%eth0", Some("fe80::1")),
            ("[fe80::1%25eth0]:80", Some("fe80::1")),
            ("fe80::1%eth0:80", Some("fe80::1")),
            // A port without brackets.
            ("2001:db8::7:46532", Some("2001:db8::7")),
            ("2001:DB8:1:2:3:4:5:6:443", Some("2001:db8:1:2:3:4:5:6")),
            ("::ffff:203.0.113.9:51234", Some("::ffff:203.0.113.9")),
            ("64:ff9b::203.0.113.9:443", Some("64:ff9b::203.0.113.9")),
            ("2001:db8::7:465321", None),
            ("2001:db8::7:46532:46532", None),
            ("192.0.2.7:", None),
            ("192.0.2.7:_port", None),
            ("[2001:db8::1]x", None),
            ("[2001:db8::1", None),
            ("unknown", None),
            ("_hidden:_port", None),
            ("example.org", None),
            ("", None),
            ("\u{ff}", None),
        ] {
            let address = address.map(|text| text.parse().unwrap());
            assert_eq!(address_of_node(node.as_bytes()), address, "{node}");
            let quoted = format!(r#"for="{node}";proto=https"#);
            assert_eq!(address_of_forwarded(quoted.as_bytes()), address, "{quoted}");
        }
        for element in
            ["FOR=192.0.2.7", r#"for="\192.0.2.7""#, r#"host="a;for=192.0.2.9";for=192.0.2.7"#]
        {
            let address = Some("192.0.2.7".parse().unwrap());
            assert_eq!(address_of_forwarded(element.as_bytes()), address, "{element}");
        }
        for element in [
            "for=192.0.2.7;for=192.0.2.8",
            "by=192.0.2.7",
            "192.0.2.7",
            r#"for="192.0.2.7"#,
            "for=",
        ] {
            assert_eq!(address_of_forwarded(element.as_bytes()), None, "{element}");
        }
    }
}
