//! [`Identifiers`]: who asks.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::rc::Rc;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::borrow::Borrow;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Who asks: a bare key (`"alice"`), or identifiers by their name (`[("ip", "…"), ("user", "…")]`).
///
/// | a bare key | identifiers by name |
/// |---|---|
/// | `str`, `String`, `Cow<str>`, `Box<str>`, `Arc<str>` | `[(name, value)]` as an array, slice or `Vec` |
/// | `IpAddr`, `Ipv4Addr`, `Ipv6Addr` | a tuple of two to six pairs, whose types may differ |
/// | | `BTreeMap`, `HashMap` |
///
/// A value is any [`IdentifierValue`]: a string of any kind, or an IP address.
///
/// ```
/// use std::borrow::Cow;
/// use std::collections::HashMap;
/// use std::net::IpAddr;
/// use ratelimit_core::Identifiers;
///
/// fn name_of(caller: &(impl Identifiers + ?Sized)) -> Option<Cow<'_, str>> {
///     caller.identifier("user")
/// }
///
/// let (ip, user): (IpAddr, String) = ("192.0.2.7".parse()?, "alice".into());
/// assert_eq!(name_of(&(("ip", ip), ("user", &user))).as_deref(), Some("alice"));
/// assert_eq!(name_of(&[("user", Cow::from("alice"))]).as_deref(), Some("alice"));
/// assert_eq!(name_of(&HashMap::from([("user", user.clone())])).as_deref(), Some("alice"));
/// assert_eq!(ip.bare().as_deref(), Some("192.0.2.7"));
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
///
/// An address is written as text for each request, which allocates. To check one address against
/// many limiters, write it once and pass the `str`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not identify a caller",
    label = "neither a key nor identifiers by name",
    note = "pass a key such as \"alice\" or an `IpAddr`, pairs such as `&[(\"ip\", ip)]`, a tuple of pairs of \
            different types such as `&((\"ip\", ip), (\"user\", &user))`, or a map of strings",
    note = "pairs need a name that is a string and a value that is an `IdentifierValue`"
)]
pub trait Identifiers {
    /// The bare key, for limits that name no identifier.
    fn bare(&self) -> Option<Cow<'_, str>> {
        None
    }

    /// The identifier of this name.
    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        let _ = name;
        None
    }

    /// The names of its identifiers, for messages: an error names what the request had. None by
    /// default.
    fn names(&self) -> Vec<&str> {
        Vec::new()
    }
}

/// What a request has, in words.
pub(crate) fn describe_identifiers(caller: &(impl Identifiers + ?Sized)) -> String {
    let names: Vec<_> = caller.names().iter().map(|name| format!("{name:?}")).collect();
    let bare = caller.bare().map(|_| "a bare key");
    match (bare, &*names) {
        (None, []) => "no identifier".into(),
        (Some(bare), []) => bare.into(),
        (None, names) => format!("identifier {}", names.join(", ")),
        (Some(bare), names) => format!("{bare} and identifier {}", names.join(", ")),
    }
}

/// The value of an identifier: a string of any kind, or an IP address.
///
/// Implement it for a type of your own, such as a user's id:
///
/// ```
/// use std::borrow::Cow;
/// use ratelimit_core::{IdentifierValue, Identifiers};
///
/// struct UserId(String);
/// impl IdentifierValue for UserId {
///     fn text(&self) -> Cow<'_, str> {
///         Cow::Borrowed(&self.0)
///     }
/// }
/// assert_eq!([("user", UserId("alice".into()))].identifier("user").as_deref(), Some("alice"));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no value of an identifier",
    note = "pass a string or an `IpAddr`, or implement `IdentifierValue` for this type; for a number, pass \
            `number.to_string()`"
)]
pub trait IdentifierValue {
    /// The value as text: borrowed if it is kept so.
    fn text(&self) -> Cow<'_, str>;
}

/// Strings, as values and as bare keys.
macro_rules! strings {
    ($($string:ty),+) => { $(
        impl IdentifierValue for $string {
            #[inline]
            fn text(&self) -> Cow<'_, str> {
                Cow::Borrowed(self)
            }
        }

        impl Identifiers for $string {
            #[inline]
            fn bare(&self) -> Option<Cow<'_, str>> {
                Some(Cow::Borrowed(self))
            }
        }
    )+ };
}

strings!(str, String, Cow<'_, str>, Box<str>, Rc<str>, Arc<str>);

/// Addresses, as values and as bare keys. An IPv4 address that is written as an IPv6 one
/// (`::ffff:192.0.2.7`) is the IPv4 address: a client has one key on sockets of either kind.
macro_rules! addresses {
    ($($address:ty),+) => { $(
        impl IdentifierValue for $address {
            fn text(&self) -> Cow<'_, str> {
                Cow::Owned(IpAddr::from(*self).to_canonical().to_string())
            }
        }

        impl Identifiers for $address {
            fn bare(&self) -> Option<Cow<'_, str>> {
                Some(self.text())
            }
        }
    )+ };
}

addresses!(IpAddr, Ipv4Addr, Ipv6Addr);

impl<T: IdentifierValue + ?Sized> IdentifierValue for &T {
    fn text(&self) -> Cow<'_, str> {
        (**self).text()
    }
}

#[deny(clippy::missing_trait_methods)]
impl<T: Identifiers + ?Sized> Identifiers for &T {
    fn bare(&self) -> Option<Cow<'_, str>> {
        (**self).bare()
    }

    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        (**self).identifier(name)
    }

    fn names(&self) -> Vec<&str> {
        (**self).names()
    }
}

/// Pairs of a name and a value.
macro_rules! pairs {
    ($([$($const:tt)*] $list:ty),+) => { $(
        impl<K: AsRef<str>, V: IdentifierValue, $($const)*> Identifiers for $list {
            #[inline]
            fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
                self.iter().find(|(known, _)| known.as_ref() == name).map(|(_, value)| value.text())
            }

            fn names(&self) -> Vec<&str> {
                self.iter().map(|(name, _)| name.as_ref()).collect()
            }
        }
    )+ };
}

pairs!([] [(K, V)], [const N: usize] [(K, V); N], [] Vec<(K, V)>);

impl<K: Borrow<str> + Ord, V: IdentifierValue> Identifiers for BTreeMap<K, V> {
    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        self.get(name).map(V::text)
    }

    fn names(&self) -> Vec<&str> {
        self.keys().map(Borrow::borrow).collect()
    }
}

#[cfg(feature = "std")]
impl<K, V, H> Identifiers for std::collections::HashMap<K, V, H>
where
    K: Borrow<str> + Eq + core::hash::Hash,
    V: IdentifierValue,
    H: core::hash::BuildHasher,
{
    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        self.get(name).map(V::text)
    }

    /// In alphabetical order, so that a message is the same each time.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.keys().map(Borrow::borrow).collect();
        names.sort_unstable();
        names
    }
}

/// Pairs of different types, as a tuple.
macro_rules! tuples {
    ($(($($name:ident $value:ident $position:tt),+)),+ $(,)?) => { $(
        impl<$($name: AsRef<str>, $value: IdentifierValue),+> Identifiers for ($(($name, $value),)+) {
            fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
                $( if self.$position.0.as_ref() == name {
                    return Some(self.$position.1.text());
                } )+
                None
            }

            fn names(&self) -> Vec<&str> {
                [$( self.$position.0.as_ref() ),+].into()
            }
        }
    )+ };
}

tuples! {
    (K0 V0 0, K1 V1 1),
    (K0 V0 0, K1 V1 1, K2 V2 2),
    (K0 V0 0, K1 V1 1, K2 V2 2, K3 V3 3),
    (K0 V0 0, K1 V1 1, K2 V2 2, K3 V3 3, K4 V4 4),
    (K0 V0 0, K1 V1 1, K2 V2 2, K3 V3 3, K4 V4 4, K5 V5 5),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(caller: &(impl Identifiers + ?Sized), name: &str) -> Option<String> {
        caller.identifier(name).map(Cow::into_owned)
    }

    fn bare(caller: &(impl Identifiers + ?Sized)) -> Option<String> {
        caller.bare().map(Cow::into_owned)
    }

    #[test]
    fn every_kind_of_string_and_address_is_a_bare_key() {
        let alice = Some("alice".to_string());
        assert_eq!(bare("alice"), alice);
        assert_eq!(bare(&&"alice"), alice);
        assert_eq!(bare(&"alice".to_string()), alice);
        assert_eq!(bare(&Cow::from("alice")), alice);
        assert_eq!(bare(&Box::<str>::from("alice")), alice);
        assert_eq!(bare(&Arc::<str>::from("alice")), alice);
        let ip = Ipv4Addr::new(192, 0, 2, 7);
        for same in [IpAddr::from(ip), ip.to_ipv6_mapped().into()] {
            assert_eq!(bare(&same).as_deref(), Some("192.0.2.7"));
        }
        assert_eq!(bare(&ip.to_ipv6_mapped()).as_deref(), Some("192.0.2.7"));
        assert_eq!(bare(&Ipv6Addr::LOCALHOST).as_deref(), Some("::1"));
    }

    #[test]
    fn identifiers_by_name_come_from_lists_maps_and_tuples_of_mixed_types() {
        let (ip, user) = (IpAddr::from([192, 0, 2, 7]), "alice".to_string());
        let found = |caller: &dyn Identifiers| {
            ["ip", "user", "path"].map(|name| caller.identifier(name).map(Cow::into_owned))
        };
        let both = [Some("192.0.2.7".to_string()), Some("alice".into()), None];
        assert_eq!(found(&(("ip", ip), ("user", &user))), both);
        assert_eq!(found(&[("ip", "192.0.2.7"), ("user", &user)]), both);
        assert_eq!(found(&[("ip", &ip as &dyn IdentifierValue), ("user", &user)]), both);
        assert_eq!(found(&[("ip", ip.to_string()), ("user", user.clone())].to_vec()), both);
        assert_eq!(found(&BTreeMap::from([("ip", "192.0.2.7"), ("user", "alice")])), both);
        #[cfg(feature = "std")]
        {
            let map = [("ip".to_string(), "192.0.2.7"), ("user".into(), "alice")];
            let map = std::collections::HashMap::from(map);
            assert_eq!(found(&map), both);
            assert_eq!(map.names(), ["ip", "user"]);
        }
        assert_eq!(text(&[("ip", ip)], "ip").as_deref(), Some("192.0.2.7"));
        let six = (("a", "1"), ("b", ip), ("c", &user), ("d", "4"), ("e", "5"), ("f", "6"));
        assert_eq!(six.names(), ["a", "b", "c", "d", "e", "f"]);
        assert_eq!(text(&six, "f").as_deref(), Some("6"));
        assert_eq!(text(&six, "b").as_deref(), Some("192.0.2.7"));
    }

    #[test]
    fn what_a_caller_had_is_told_also_of_what_is_no_text() {
        assert_eq!(describe_identifiers(&IpAddr::from([192, 0, 2, 7])), "a bare key");
        assert_eq!(
            describe_identifiers(&(("ip", Ipv6Addr::LOCALHOST), ("user", "alice"))),
            "identifier \"ip\", \"user\""
        );
    }
}
