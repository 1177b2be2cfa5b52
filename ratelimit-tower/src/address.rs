//! [`ClientAddress`]: the address of the client, also behind proxies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use derive_where::derive_where;
use http::Extensions;
use http::header::{FORWARDED, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use ipnet::{IpNet, Ipv4Net};
use ratelimit_core::ConfigError;

use crate::identify::{Identification, Identify, IdentifyError};
use crate::log::LogLines;

mod forwarded;
mod text;

/// The address of the other end of the connection, as an extension of the request. A server over
/// hyper inserts it; with axum, `into_make_service_with_connect_info::<SocketAddr>()` inserts its
/// own `ConnectInfo`, which is read too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// The header in which the proxies of a service write the addresses that they have seen.
///
/// A service names the one header that its own proxies write. Reading whichever is there would let
/// a client choose: a proxy that writes `X-Forwarded-For` passes a client's `Forwarded` on as it
/// came.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProxyHeader {
    /// `Forwarded`, RFC 7239. Each proxy appends an element.
    Forwarded,
    /// `X-Forwarded-For`. Each proxy appends an address.
    XForwardedFor,
    /// A header that the proxy sets to one address, and replaces if a client sends it, such as
    /// `CF-Connecting-IP`.
    Single(HeaderName),
}

/// Identifies the client by its address: an IPv4 address, or the /64 network of an IPv6 address.
///
/// ```
/// use ratelimit_tower::{ClientAddress, ProxyHeader};
///
/// // Clients connect directly: only the connection counts, whatever the headers are.
/// let direct = ClientAddress::peer();
///
/// // Clients come through these proxies, which append to `X-Forwarded-For`.
/// let behind = ClientAddress::behind(["10.0.0.0/8", "2001:db8:1::/48"], ProxyHeader::XForwardedFor)?;
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
///
/// # Trusted proxies
///
/// If the peer is a trusted proxy, the list in the header is read from the right: addresses of
/// trusted proxies are skipped, and the first other address is the client. Entries to its left can
/// be written by the client, and never count.
///
/// Where a trusted proxy reports something other than an address (`unknown`, `_hidden`, an error)
/// or nothing at all, the client is known by the address of that proxy. Such clients share one
/// limit; none is unlimited. A warning with the address is logged once per minute.
///
/// # IPv6
///
/// A subscriber owns at least a /64 and can send from each of its addresses, so the network
/// identifies the client. [`ipv6_prefix`](Self::ipv6_prefix) sets another length, such as 56 or 48.
/// IPv4 addresses that are mapped into IPv6 (`::ffff:192.0.2.7`), or translated to it
/// (`64:ff9b::192.0.2.7`, RFC 6052), are the IPv4 address. A link-local address (`fe80::/10`) is an
/// identifier by itself, since all hosts of a link share its network; zone ids are dropped.
#[derive(Clone)]
#[derive_where(Debug)]
pub struct ClientAddress {
    proxies: Arc<[IpNet]>,
    header: Option<ProxyHeader>,
    ipv6_prefix: u8,
    #[derive_where(skip)]
    peer: PeerLookup,
    /// The proxies whose reports could not be read.
    #[derive_where(skip)]
    unreported: Arc<LogLines>,
}

type PeerLookup = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;

/// Reads an element of a list.
type AddressOf = fn(&[u8]) -> Option<IpAddr>;

impl ClientAddress {
    /// The address of the connection. No header is read.
    #[must_use]
    pub fn peer() -> Self {
        Self {
            proxies: Arc::default(),
            header: None,
            ipv6_prefix: 64,
            peer: Arc::new(peer_address),
            unreported: Arc::new(LogLines::every(Duration::from_secs(60))),
        }
    }

    /// The address that these trusted proxies report in this header. Each is a network
    /// (`10.0.0.0/8`) or an address.
    ///
    /// # Errors
    /// A text that is neither; no proxy at all.
    pub fn behind<N: AsRef<str>>(
        proxies: impl IntoIterator<Item = N>,
        header: ProxyHeader,
    ) -> Result<Self, ConfigError> {
        let proxies: Vec<_> =
            proxies.into_iter().map(|text| network(text.as_ref())).collect::<Result<_, _>>()?;
        if proxies.is_empty() {
            let none = "no trusted proxy is listed; list the networks of the proxies, or use \
                        ClientAddress::peer()";
            return Err(ConfigError::new(none));
        }
        Ok(Self { proxies: proxies.into(), header: Some(header), ..Self::peer() })
    }

    /// The same, with IPv6 clients identified by a network of this prefix length; 64 by default.
    ///
    /// # Errors
    /// A length of 0, or above 128.
    pub fn ipv6_prefix(mut self, length: u8) -> Result<Self, ConfigError> {
        if !(1..=128).contains(&length) {
            return Err(ConfigError::new(format!(
                "a prefix of /{length} does not tell IPv6 clients apart; write 1 to 128"
            )));
        }
        self.ipv6_prefix = length;
        Ok(self)
    }

    /// The same, with the peer's address taken from this extension of the request, which the server
    /// inserts.
    ///
    /// With tonic: `ClientAddress::peer().from_extension(|info: &TcpConnectInfo|
    /// info.remote_addr())`.
    #[must_use]
    pub fn from_extension<T, F>(mut self, address: F) -> Self
    where
        T: Send + Sync + 'static,
        F: Fn(&T) -> Option<SocketAddr> + Send + Sync + 'static,
    {
        self.peer = Arc::new(move |extensions| Some(address(extensions.get()?)?.ip()));
        self
    }

    /// The address of the client of a request that came from this peer with these headers. It has
    /// no prefix applied yet.
    ///
    /// ```
    /// use http::HeaderMap;
    /// use ratelimit_tower::{ClientAddress, ProxyHeader};
    ///
    /// let who = ClientAddress::behind(["10.0.0.1"], ProxyHeader::XForwardedFor)?;
    /// let mut headers = HeaderMap::new();
    /// headers.insert("x-forwarded-for", "203.0.113.9, 192.0.2.7".parse()?);
    /// assert_eq!(who.resolve("10.0.0.1".parse()?, &headers).to_string(), "192.0.2.7");
    /// assert_eq!(who.resolve("198.51.100.1".parse()?, &headers).to_string(), "198.51.100.1");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    #[must_use]
    pub fn resolve(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = canonical(peer);
        match &self.header {
            Some(header) if self.is_proxy(peer) => self.address_from(peer, header, headers),
            _ => peer,
        }
    }

    /// The address that this proxy reports: the first that is no trusted proxy, or the last one
    /// before what cannot be read.
    fn address_from(&self, peer: IpAddr, header: &ProxyHeader, headers: &HeaderMap) -> IpAddr {
        let (name, address): (&HeaderName, AddressOf) = match header {
            ProxyHeader::Forwarded => (&FORWARDED, forwarded::address_of_forwarded),
            ProxyHeader::XForwardedFor => (&X_FORWARDED_FOR, forwarded::address_of_node),
            ProxyHeader::Single(name) => {
                let value = headers.get_all(name).iter().next_back();
                let address = value.and_then(|value| forwarded::address_of_node(value.as_bytes()));
                return address.map_or_else(|| self.unreported_by(peer, name), canonical);
            }
        };
        let mut nearest = peer;
        // A list may be split over several lines.
        let lines = headers.get_all(name).iter().rev().map(HeaderValue::as_bytes);
        let mut hops =
            lines.flat_map(|line| forwarded::split_from_the_right(line, b',')).peekable();
        if hops.peek().is_none() {
            return self.unreported_by(peer, name);
        }
        for element in hops {
            let Some(hop) = address(element) else { return self.unreported_by(nearest, name) };
            nearest = canonical(hop);
            if !self.is_proxy(nearest) {
                break;
            }
        }
        nearest
    }

    /// All clients of this proxy are one, which is seldom meant.
    #[cold]
    fn unreported_by(&self, proxy: IpAddr, header: &HeaderName) -> IpAddr {
        if let Some(requests) = self.unreported.count_request(&proxy.to_string()) {
            tracing::warn!(
                %proxy, %header, requests,
                "a trusted proxy reports no client address that can be read; all its clients share one limit"
            );
        }
        proxy
    }

    fn is_proxy(&self, address: IpAddr) -> bool {
        self.proxies.iter().any(|network| network.contains(&address))
    }
}

impl Identify for ClientAddress {
    fn identify(&self, request: &mut Parts) -> Identification {
        let Some(peer) = (self.peer)(&request.extensions) else {
            return Identification::Now(Err(IdentifyError::not_wired(
                "the request has no extension with the peer's address; with axum, serve \
                 `app.into_make_service_with_connect_info::<SocketAddr>()` and enable the feature \
                 `axum`; with tonic, use `from_extension`; with hyper, insert a `PeerAddress`",
            )));
        };
        Identification::Now(Ok(Some(match (peer, &self.header) {
            // Most clients. The general way copies the address byte by byte, and stalls when it is
            // read whole.
            (IpAddr::V4(ip), None) => text::of_ipv4(ip),
            _ => match self.resolve(peer, &request.headers) {
                IpAddr::V4(ip) => text::of_ipv4(ip),
                IpAddr::V6(ip) if ip.is_unicast_link_local() => text::of_ipv6(ip, 128),
                // Its network, such as `2001:db8::/64`.
                IpAddr::V6(ip) => {
                    let network = ip.to_bits() & (u128::MAX << (128 - u32::from(self.ipv6_prefix)));
                    text::of_ipv6(Ipv6Addr::from_bits(network), self.ipv6_prefix)
                }
            },
        })))
    }
}

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The IPv4 address that an IPv6 address stands for: mapped (`::ffff:0:0/96`), or translated
/// (`64:ff9b::/96`, RFC 6052). Any other address as it is.
fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(ipv6) => in_ipv6(ipv6).map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// The IPv4 address that this one stands for.
const fn in_ipv6(address: Ipv6Addr) -> Option<Ipv4Addr> {
    match address.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            Some(Ipv4Addr::from_bits((high as u32) << 16 | low as u32))
        }
        _ => None,
    }
}

fn peer_address(extensions: &Extensions) -> Option<IpAddr> {
    #[cfg(feature = "axum")]
    {
        use axum::extract::ConnectInfo;
        use axum::extract::connect_info::MockConnectInfo;

        let connected = extensions.get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| peer);
        let mocked = || extensions.get().map(|MockConnectInfo(peer)| peer);
        if let Some(peer) = connected.or_else(mocked) {
            return Some(peer.ip());
        }
    }
    Some(extensions.get::<PeerAddress>()?.0.ip())
}

fn network(text: &str) -> Result<IpNet, ConfigError> {
    let parsed = text.parse::<IpNet>().ok().or_else(|| text.parse().ok().map(IpAddr::into));
    let Some(network) = parsed else {
        return Err(ConfigError::new(format!(
            "{text:?} is no network; write one such as 10.0.0.0/8, or an address"
        )));
    };
    // Networks of mapped addresses, since addresses are compared as what they are mapped from.
    if let IpNet::V6(mapped) = network
        && let Some(v4) = in_ipv6(mapped.network())
        && let Some(Ok(v4)) = mapped.prefix_len().checked_sub(96).map(|p| Ipv4Net::new(v4, p))
    {
        return Ok(v4.into());
    }
    Ok(network)
}

#[cfg(test)]
mod tests;
