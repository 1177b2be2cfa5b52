//! Splits a URL into parts, and renders it without its secrets.

/// The parts of a URL, each unambiguous.
pub(super) struct Parts<'u> {
    /// User and password, escaped.
    pub(super) login: Option<&'u str>,
    pub(super) places: Vec<Place<'u>>,
    /// Includes the slash.
    pub(super) path: &'u str,
    pub(super) query: &'u str,
    names_service: bool,
}

/// A server of a URL.
#[derive(Clone, Copy)]
pub(super) struct Place<'u> {
    /// As written in the URL.
    address: &'u str,
    /// Without brackets.
    pub(super) host: &'u str,
    pub(super) port: Option<u16>,
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
        let places = addresses.split(',').map(place_of).collect::<Option<_>>()?;
        let hides_more = authority.contains('#') || query.contains(['@', '#']);
        // A separate login per server is not supported: one login serves all of them.
        let logs_in_twice = login.is_some_and(|login| login.contains('@') && login.contains(','));
        let names_service = scheme.ends_with("-sentinel");
        (is_path(path, names_service) && !hides_more && !logs_in_twice).then_some(Self {
            login,
            places,
            path,
            query,
            names_service,
        })
    }

    /// Whether the URL has its password in its place, so that no other part can be one.
    pub(super) fn gives_password(&self) -> bool {
        let password = self.login.and_then(|login| login.split_once(':'));
        password.is_some_and(|(_, password)| !password.is_empty())
    }

    /// Whether a server may be shown.
    pub(super) fn may_show(&self, place: &Place<'_>) -> bool {
        self.gives_password() || is_certain(place.host)
    }

    /// Whether a service may be shown.
    pub(super) fn may_show_service(&self, service: &str) -> bool {
        self.gives_password() || service == super::DEFAULT_SERVICE
    }

    /// The servers, without those that may be a password.
    fn shown_places(&self) -> String {
        let shown = |place: &Place<'_>| {
            if self.may_show(place) { place.address } else { HIDDEN }.to_owned()
        };
        self.places.iter().map(shown).collect::<Vec<_>>().join(",")
    }

    /// Service and database, unless they may be a password.
    fn shown_path(&self) -> String {
        let path = self.path.strip_prefix('/').unwrap_or(self.path);
        let is_database =
            |text: &str| text.len() <= MAX_DATABASE_DIGITS && (is_number(text) || text.is_empty());
        let is_plain = match path.split_once('/') {
            None => is_database(path) || (self.names_service && self.may_show_service(path)),
            Some((service, database)) => self.may_show_service(service) && is_database(database),
        };
        if is_plain || self.gives_password() { self.path.to_owned() } else { format!("/{HIDDEN}") }
    }
}

/// Replaces a part that may be a password.
pub(crate) const HIDDEN: &str = "***";

/// The most digits of a database number that is shown: a longer number may be a password.
const MAX_DATABASE_DIGITS: usize = 2;

/// Whether a text is certainly a host, in a URL without a password in its place: an address,
/// `localhost`, or several labels of which the last consists of letters, as in a domain.
fn is_certain(host: &str) -> bool {
    let is_label = |label: &str| !label.is_empty() && !label.contains('_');
    let is_domain = || {
        host.rsplit_once('.').is_some_and(|(rest, last)| {
            let is_letters = last.len() > 1 && last.bytes().all(|byte| byte.is_ascii_alphabetic());
            is_letters && rest.split('.').all(is_label)
        })
    };
    host.parse::<std::net::IpAddr>().is_ok() || host == "localhost" || is_domain()
}

/// A host and its port.
fn place_of(address: &str) -> Option<Place<'_>> {
    let (host, port) = match address.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':')?)),
        None => match address.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (address, None),
        },
    };
    let is_host = if address.starts_with('[') {
        host.parse::<std::net::Ipv6Addr>().is_ok()
    } else {
        is_word(host)
    };
    let port = match port {
        None => None,
        Some(port) => Some(port.parse().ok().filter(|_| is_number(port))?),
    };
    is_host.then_some(Place { address, host, port })
}

/// Whether the path is empty, a database, or (for Sentinels) a service and a database.
fn is_path(path: &str, names_service: bool) -> bool {
    let path = path.strip_prefix('/').unwrap_or(path);
    match path.split_once('/') {
        None => path.is_empty() || is_number(path) || (names_service && is_word(path)),
        Some((service, database)) => {
            names_service && is_word(service) && (database.is_empty() || is_number(database))
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// The text before `://`.
pub(super) fn scheme(url: &str) -> Option<&str> {
    url.split_once("://").map(|(scheme, _)| scheme).filter(|scheme| is_name(scheme))
}

/// Whether a text can be a scheme or an option's name, which reveal nothing.
pub(super) fn is_name(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "+-_.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.len() <= 20
        && text.chars().all(word)
}

/// Decodes percent-encoding; `None` if the result is not UTF-8.
pub(super) fn decoded(text: &str) -> Option<String> {
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    decoded.ok().map(std::borrow::Cow::into_owned)
}

/// The URL for display: the servers, without any part that is or may be a password.
pub(crate) fn redacted(url: &str) -> String {
    match (scheme(url).filter(|scheme| super::is_known(scheme)), Parts::of(url)) {
        (Some(scheme), Some(parts)) => {
            format!("{scheme}://{}{}", parts.shown_places(), parts.shown_path())
        }
        (Some(scheme), None) => format!("{scheme}://{HIDDEN}"),
        (None, _) => HIDDEN.to_owned(),
    }
}
