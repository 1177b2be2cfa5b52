//! The one place where keys on the server are made.
//!
//! A key is `{prefix}:{version}:{limit}:{tag}`, where the tag is the identifier in braces: on a
//! cluster all keys of one identifier lie in one slot. The limit's part is empty for the key that all
//! limits of an identifier share, a hash with a field each.
//!
//! Identifiers come from strangers. Bytes that mean something in a key, to a cluster or to a terminal
//! are escaped as `%XX`, so that two identifiers never meet in one key; long ones are hashed.

use std::fmt::Write as _;

use ratelimit_core::ReservationId;

use crate::error::RedisError;

/// Raised when what is stored under a key changes its meaning.
const VERSION: u32 = 1;
/// The longest escaped identifier that stands in a key; a longer one is hashed.
const MAX_IDENTIFIER_BYTES: usize = 128;

/// Which part of a key decides where in a cluster it is kept. What has the same tag is kept together, and
/// a batch over it is one script.
///
/// ```
/// use ratelimit_redis::{RedisStore, Tag};
///
/// // "acme/alice" and "acme/1.2.3.4" lie in one slot.
/// let by_tenant = RedisStore::builder().tag(Tag::UpTo('/'));
/// // Everything of this store does.
/// let of_acme = RedisStore::builder().tag(Tag::Fixed("acme".into()));
/// # let _ = (by_tenant, of_acme);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tag {
    /// Each identifier by itself, spread over the whole cluster.
    #[default]
    Identifier,
    /// What an identifier begins with, up to this character: identifiers such as `tenant/user` and
    /// `tenant/address` are kept with the tenant. One without the character is its own tag.
    UpTo(char),
    /// This text for all that a store keeps: one slot for a tenant with a store of its own.
    Fixed(String),
}

/// How the keys of a store are made.
#[derive(Clone)]
pub(crate) struct Keys {
    prefix: String,
    tag: Tag,
    secret: Option<[u8; blake3::KEY_LEN]>,
}

/// Begins every key of a store that was given no other.
const DEFAULT_PREFIX: &str = "rl";
/// Where the secret is used, so that the same secret gives another hash everywhere else.
const HASH_CONTEXT: &str = "ratelimit-redis 2026-11-21 identifiers in keys";

impl Default for Keys {
    fn default() -> Self {
        Self { prefix: DEFAULT_PREFIX.to_owned(), tag: Tag::default(), secret: None }
    }
}

impl Keys {
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn set_prefix(&mut self, prefix: &str) {
        prefix.clone_into(&mut self.prefix);
    }

    pub(crate) fn set_tag(&mut self, tag: Tag) {
        self.tag = tag;
    }

    pub(crate) fn set_secret(&mut self, secret: &[u8]) {
        self.secret = Some(blake3::derive_key(HASH_CONTEXT, secret));
    }

    /// Whether identifiers are spread over a cluster, and not all kept in one slot.
    pub(crate) fn are_spread(&self) -> bool {
        !matches!(self.tag, Tag::Fixed(_))
    }

    /// Refuses what would take the hash tag's place, or hide nothing.
    pub(crate) fn validate(&self) -> Result<(), RedisError> {
        let plain = |text: &str| !text.contains(['{', '}']) && !text.chars().any(char::is_control);
        if !plain(&self.prefix) {
            return Err(RedisError::Config(format!(
                "the prefix {:?} holds braces or control characters; choose one without",
                self.prefix
            )));
        }
        if self.secret == Some(blake3::derive_key(HASH_CONTEXT, b"")) {
            return Err(RedisError::Config(
                "the secret that hides identifiers is empty; give one that nobody can guess, the same to the whole fleet".into(),
            ));
        }
        Ok(())
    }

    /// The key that all limits of an identifier share.
    pub(crate) fn shared(&self, identifier: &str) -> String {
        self.of_limit("", identifier)
    }

    /// The key of a limit's state in the mode that compares and sets. No limit's name has a `!`, so that
    /// it is nobody else's.
    pub(crate) fn of_cas(&self, limit: &str, identifier: &str) -> String {
        self.of_limit(&format!("{limit}!"), identifier)
    }

    /// The key of a limit's entries in the mode of native commands, for each algorithm another. No
    /// limit's name has a `+`, so that it is nobody else's.
    pub(crate) fn of_multi(&self, limit: &str, algorithm: &str, identifier: &str) -> String {
        self.of_limit(&format!("{limit}+{algorithm}"), identifier)
    }

    /// The key of what a limit holds for an identifier under an id. No limit's name has a `#`.
    pub(crate) fn of_reservation(
        &self,
        limit: &str,
        id: ReservationId,
        identifier: &str,
    ) -> String {
        self.of_limit(&format!("{limit}#{id}"), identifier)
    }

    /// The same in the mode that compares and sets.
    pub(crate) fn of_cas_reservation(
        &self,
        limit: &str,
        id: ReservationId,
        identifier: &str,
    ) -> String {
        self.of_limit(&format!("{limit}!#{id}"), identifier)
    }

    /// The key of a limit whose state is a list. No limit's name has a `+`, so that the same limit can
    /// have been kept in another way before.
    pub(crate) fn of_list(&self, limit: &str, identifier: &str) -> String {
        self.of_limit(&format!("{limit}+"), identifier)
    }

    /// The key of a limit whose state needs one of its own.
    pub(crate) fn of_limit(&self, limit: &str, identifier: &str) -> String {
        let prefix = &self.prefix;
        let mut key = String::with_capacity(prefix.len() + limit.len() + identifier.len() + 8);
        // Writing to a string cannot fail.
        let _ = write!(key, "{prefix}:{VERSION}:{limit}:{{");
        let (tag, rest) = match &self.tag {
            Tag::Identifier => (identifier, None),
            Tag::UpTo(end) => match identifier.find(*end) {
                Some(place) => (&identifier[..place], Some(&identifier[place..])),
                None => (identifier, None),
            },
            Tag::Fixed(tag) => (&**tag, Some(identifier)),
        };
        self.push_identifier(&mut key, tag);
        key.push('}');
        if let Some(rest) = rest {
            self.push_identifier(&mut key, rest);
        }
        key
    }

    fn push_identifier(&self, key: &mut String, identifier: &str) {
        if let Some(secret) = &self.secret {
            let hash = blake3::keyed_hash(secret, identifier.as_bytes());
            let _ = write!(key, "#{}", &hash.to_hex()[..32]);
            return;
        }
        if identifier.is_empty() {
            // Braces with nothing in between are no hash tag. A single % is no escape, and so nobody
            // else's.
            key.push('%');
            return;
        }
        let begin = key.len();
        for (place, c) in identifier.char_indices() {
            // A # at the start says that a hash follows.
            if is_special(c) || (c == '#' && place == 0) {
                let _ = write!(key, "%{:02X}", u32::from(c));
            } else {
                key.push(c);
            }
            if key.len() - begin > MAX_IDENTIFIER_BYTES {
                key.truncate(begin);
                let hash = blake3::hash(identifier.as_bytes());
                let _ = write!(key, "#{}", &hash.to_hex()[..32]);
                return;
            }
        }
    }
}

/// The key of an answer that is remembered, in the slot of this key. No other key ends with a `#` after
/// which an id follows.
pub(crate) fn of_answer(key: &str, request: ReservationId) -> String {
    format!("{key}#{request}")
}

/// Characters that delimit, that a cluster or a pattern reads, or that a terminal acts upon. All of
/// them are below U+00A0, two digits of hexadecimal each.
fn is_special(c: char) -> bool {
    c.is_control() || matches!(c, '{' | '}' | '%' | ' ' | '*' | '?' | '[' | ']' | '\\' | '"' | '\'')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_readable_and_tagged() {
        assert_eq!(Keys::default().shared("1.2.3.4"), "rl:1::{1.2.3.4}");
        assert_eq!(
            Keys::default().of_limit("login", "bob@example.org"),
            "rl:1:login:{bob@example.org}"
        );
    }

    #[test]
    fn what_is_held_and_what_is_listed_have_keys_that_no_limit_has() {
        let id = ReservationId::new(0x2a);
        let hex = "0000000000000000000000000000002a";
        assert_eq!(
            Keys::default().of_reservation("jobs", id, "bob"),
            format!("rl:1:jobs#{hex}:{{bob}}")
        );
        assert_eq!(
            Keys::default().of_cas_reservation("jobs", id, "bob"),
            format!("rl:1:jobs!#{hex}:{{bob}}")
        );
        assert_eq!(Keys::default().of_list("jobs", "bob"), "rl:1:jobs+:{bob}");
    }

    #[test]
    fn what_means_something_elsewhere_is_escaped() {
        for (identifier, tag) in [
            ("", "%"),
            ("%", "%25"),
            ("{abc}:evil{zzz}", "%7Babc%7D:evil%7Bzzz%7D"),
            ("a\0\r\n", "a%00%0D%0A"),
            ("\u{9b}2J", "%9B2J"),
            ("#1", "%231"),
            ("a#1", "a#1"),
            ("naïve", "naïve"),
            ("*", "%2A"),
        ] {
            assert_eq!(
                Keys::default().shared(identifier),
                format!("rl:1::{{{tag}}}"),
                "{identifier:?}"
            );
        }
    }

    #[test]
    fn a_long_identifier_is_hashed_to_the_same_key_everywhere() {
        let key = Keys::default().shared(&"x".repeat(1_000_000));
        assert_eq!(key, "rl:1::{#d1966755fb9b775eac208616536d1dc8}");
    }

    #[test]
    fn with_a_secret_nothing_of_an_identifier_is_to_be_read() {
        let keyed = |secret: &[u8], identifier: &str| {
            let mut keys = Keys::default();
            keys.set_secret(secret);
            keys.validate().expect("a secret");
            keys.shared(identifier)
        };
        let key = keyed(b"the fleet's", "1.2.3.4");
        assert_eq!(key, keyed(b"the fleet's", "1.2.3.4"));
        assert_eq!(key, "rl:1::{#62cd02fd6ba147366876a2c8e71df168}");
        assert_ne!(key, keyed(b"another's", "1.2.3.4"));
        assert_ne!(keyed(b"the fleet's", ""), keyed(b"the fleet's", "%"));
        let mut keys = Keys::default();
        keys.set_secret(b"");
        let told = keys.validate().expect_err("no secret at all").to_string();
        assert!(told.contains("is empty"), "{told}");
    }

    fn tagged(tag: Tag) -> Keys {
        let mut keys = Keys::default();
        keys.set_tag(tag);
        keys
    }

    #[test]
    fn a_tenants_identifiers_share_a_tag_and_no_key() {
        let keys = tagged(Tag::UpTo('/'));
        for (identifier, key) in [
            ("acme/alice", "rl:1::{acme}/alice"),
            ("acme/1.2.3.4", "rl:1::{acme}/1.2.3.4"),
            ("acme", "rl:1::{acme}"),
            ("acme/", "rl:1::{acme}/"),
            ("/alice", "rl:1::{%}/alice"),
            ("", "rl:1::{%}"),
        ] {
            assert_eq!(keys.shared(identifier), key, "{identifier}");
        }
        let fixed = tagged(Tag::Fixed("acme".into()));
        assert_eq!(fixed.shared("alice"), "rl:1::{acme}alice");
        assert_eq!(fixed.of_limit("login", ""), "rl:1:login:{acme}%");
    }

    proptest! {
        #[test]
        fn two_identifiers_never_share_a_key(a in ".{0,200}", b in "[%#{}0-9A-F]{0,6}", c in "[%#{}0-9A-F]{0,6}") {
            prop_assert_eq!(a == b, Keys::default().shared(&a) == Keys::default().shared(&b));
            prop_assert_eq!(b == c, Keys::default().shared(&b) == Keys::default().shared(&c));
        }

        #[test]
        fn two_of_a_tenant_never_share_a_key(
            a in "[/%#{}a]{0,5}", b in "[/%#{}a]{0,5}", end in prop::sample::select(vec!['/', '#', '%', 'a']),
        ) {
            for keys in [tagged(Tag::UpTo(end)), tagged(Tag::Fixed("acme".into()))] {
                prop_assert_eq!(a == b, keys.shared(&a) == keys.shared(&b));
            }
        }

        #[test]
        fn a_key_has_exactly_one_hash_tag_around_the_identifier(identifier in any::<String>()) {
            let key = Keys::default().of_limit("l", &identifier);
            prop_assert_eq!(key.find('{'), Some("rl:1:l:".len()));
            prop_assert_eq!(key.find('}'), Some(key.len() - 1));
            prop_assert_ne!(key, "rl:1:l:{}");
        }
    }
}
