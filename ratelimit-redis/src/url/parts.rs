//! Splits a URL into parts, and renders it without its login.

use std::str::FromStr;

use super::{SCHEMES, SOCKET};

/// The parts of a URL, each unambiguous.
pub(super) struct Parts<'u> {
    /// User and password, escaped.
    pub(super) login: Option<&'u str>,
    /// The servers as written.
    addresses: &'u str,
    /// Their hosts, without brackets, and ports; or the path of a Unix socket.
    pub(super) places: Vec<(String, Option<u16>)>,
    /// Service and database as written.
    path: &'u str,
    pub(super) service: Option<&'u str>,
    pub(super) database: u32,
    pub(super) query: &'u str,
}

impl<'u> Parts<'u> {
    /// `None` unless every part is unambiguous: text that is no valid host, port or number may be a
    /// misplaced or unescaped password.
    pub(super) fn of(url: &'u str) -> Option<Self> {
        let scheme = scheme(url)?;
        let rest = &url[scheme.len() + "://".len()..];
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_at(place.find('/').unwrap_or(place.len()));
        let (login, addresses) = match authority.rsplit_once('@') {
            Some((login, addresses)) => (Some(login), addresses),
            None => (None, authority),
        };
        let is_socket = scheme == SOCKET;
        let places = if is_socket {
            vec![(socket_of(addresses, path)?, Some(0))]
        } else {
            addresses.split(',').map(place_of).collect::<Option<_>>()?
        };
        let hides_more = authority.contains('#') || query.contains(['@', '#']);
        // A separate login per server is not supported: one login serves all of them.
        let logs_in_twice = login.is_some_and(|login| login.contains('@') && login.contains(','));
        let (service, database) = if is_socket {
            (None, 0)
        } else {
            service_and_database(path, scheme.ends_with("-sentinel"))?
        };
        (!hides_more && !logs_in_twice).then_some(Self {
            login,
            addresses,
            places,
            path,
            service,
            database,
            query,
        })
    }
}

/// The path of a Unix socket, before which no host stands.
fn socket_of(addresses: &str, path: &str) -> Option<String> {
    let is_path = addresses.is_empty() && path.len() > 1 && !path.contains(['@', '#']);
    decoded(path).filter(|path| is_path && !path.contains('\0'))
}

/// A host and its port.
fn place_of(address: &str) -> Option<(String, Option<u16>)> {
    let bracketed = address.strip_prefix('[').and_then(|host| host.split_once(']'));
    let (host, port) =
        bracketed.unwrap_or_else(|| address.split_at(address.find(':').unwrap_or(address.len())));
    let is_host = match bracketed {
        Some(_) => host.parse::<std::net::Ipv6Addr>().is_ok(),
        None => is_word(host),
    };
    let port = match port {
        "" => None,
        port => Some(number(port.strip_prefix(':')?)?),
    };
    is_host.then(|| (host.to_owned(), port))
}

/// Service and database: `/SERVICE/1`, or either of them. Only Sentinels have a service.
fn service_and_database(path: &str, names_service: bool) -> Option<(Option<&str>, u32)> {
    let path = path.strip_prefix('/').unwrap_or(path);
    let path = path.strip_suffix('/').unwrap_or(path);
    let (service, database) = match path.split_once('/') {
        Some((service, database)) => (Some(service), database),
        None if path.is_empty() || is_number(path) => (None, path),
        None => (Some(path), ""),
    };
    let is_service = service.is_none_or(|service| names_service && is_word(service));
    let database = if database.is_empty() { 0 } else { number(database)? };
    is_service.then_some((service, database))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// The number that digits alone write.
fn number<N: FromStr>(text: &str) -> Option<N> {
    text.parse().ok().filter(|_| is_number(text))
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// The text before `://`.
pub(super) fn scheme(url: &str) -> Option<&str> {
    url.split_once("://").map(|(scheme, _)| scheme).filter(|scheme| is_name(scheme))
}

/// Whether a text can be a scheme or an option's name.
pub(super) fn is_name(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "+-_.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.len() <= 20
        && text.chars().all(word)
}

/// Decodes percent-encoding; `None` if the result is not UTF-8.
pub(super) fn decoded(text: &str) -> Option<String> {
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    decoded.ok().map(Into::into)
}

/// The URL for display: without login and options. Where these are in a text that is no URL is not
/// known, so it is hidden.
pub(super) fn redacted(url: &str) -> String {
    let known = scheme(url).filter(|scheme| SCHEMES.iter().any(|(name, ..)| name == scheme));
    match (known, Parts::of(url)) {
        (Some(scheme), Some(Parts { addresses, path, .. })) => {
            format!("{scheme}://{addresses}{path}")
        }
        (Some(scheme), None) => format!("{scheme}://***"),
        (None, _) => "***".to_owned(),
    }
}
