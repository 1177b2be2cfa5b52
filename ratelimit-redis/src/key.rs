//! Builds all keys on the server.
//!
//! A key is `{prefix}:{version}:{limit}:{tag}`. The tag is the identifier in braces, so a cluster
//! keeps all keys of one identifier in one slot. The limit's part begins with its state name, such
//! as `daily/sliding-log/1d`. It is empty in the key that all limits of an identifier share: a hash
//! with one field per state name.
//!
//! Identifiers are untrusted. Bytes that have a meaning in a key, to a cluster or to a terminal are
//! escaped as `%XX`, so two identifiers never share a key. Long identifiers are hashed.

use std::fmt::Write as _;

use ratelimit_core::ReservationId;

use crate::error::{RedisError, Result};

/// Incremented when stored values change their meaning.
const VERSION: &str = "1";
/// The longest escaped identifier that stands in a key; longer ones are hashed.
const MAX_IDENTIFIER_BYTES: usize = 128;

/// The part of a key that decides its slot in a cluster. Keys with the same tag lie in one slot,
/// and a batch over them is one script.
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
    /// Each identifier is its own tag, spread over the whole cluster.
    #[default]
    Identifier,
    /// The part of an identifier up to this character: `tenant/user` and `tenant/address` lie in
    /// the tenant's slot. An identifier without the character is its own tag.
    UpTo(char),
    /// This text for all keys of the store: one slot, for example for a tenant with its own store.
    Fixed(String),
}

/// What a key on the server tells: [`RedisStore::read_key`](crate::RedisStore::read_key).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredKey {
    /// It has states of this identifier.
    Identifier(String),
    /// It has states of an identifier that a secret hides, or that is so long that a hash stands
    /// for it.
    Hidden,
    /// It is a reservation, a cached reply, or no key of the store.
    Other,
}

/// Builds and reads the keys of a store.
#[derive(Clone)]
pub(crate) struct Keys {
    pub(crate) prefix: String,
    pub(crate) tag: Tag,
    secret: Option<[u8; blake3::KEY_LEN]>,
}

/// What stands in the place of the limit in the key of records: with a `#`, so that it is not taken
/// for states.
const RECORDS: &str = "#records";
/// The default prefix of every key.
const DEFAULT_PREFIX: &str = "rl";
/// Separates this use of the secret: the same secret gives other hashes elsewhere.
const HASH_CONTEXT: &str = "ratelimit-redis 2026-11-21 identifiers in keys";

impl Default for Keys {
    fn default() -> Self {
        Self { prefix: DEFAULT_PREFIX.to_owned(), tag: Tag::default(), secret: None }
    }
}

impl Keys {
    pub(crate) fn set_secret(&mut self, secret: &[u8]) {
        self.secret = Some(blake3::derive_key(HASH_CONTEXT, secret));
    }

    /// Whether identifiers are spread over a cluster rather than in one slot.
    pub(crate) fn are_spread(&self) -> bool {
        !matches!(self.tag, Tag::Fixed(_))
    }

    /// Refuses a prefix or tag that would replace the hash tag, and a secret that hides nothing.
    pub(crate) fn validate(&self) -> Result<()> {
        let plain = |text: &str| !text.contains(['{', '}']) && !text.chars().any(char::is_control);
        if !plain(&self.prefix) {
            return Err(RedisError::Config(format!(
                "the prefix {:?} contains braces or control characters; choose one without",
                self.prefix
            )));
        }
        if self.secret == Some(blake3::derive_key(HASH_CONTEXT, b"")) {
            return Err(RedisError::Config(
                "the secret that hides identifiers is empty; choose one that cannot be guessed, the same for all stores that share limits".into(),
            ));
        }
        Ok(())
    }

    /// A pattern of `SCAN` for the keys of the store, and hardly any other.
    pub(crate) fn pattern(&self) -> String {
        let mut pattern = String::new();
        for c in self.prefix.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '\\') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        format!("{pattern}:{VERSION}:*")
    }

    /// What the key says about its limit: the part between the version and the tag; `None` if the
    /// store has no such key.
    pub(crate) fn limit_of<'k>(&self, key: &'k str) -> Option<&'k str> {
        Some(self.parts(key)?.0)
    }

    /// The limit's part of a key, and what begins with the tag.
    fn parts<'k>(&self, key: &'k str) -> Option<(&'k str, &'k str)> {
        let rest = key.strip_prefix(&self.prefix)?.strip_prefix(':')?;
        rest.strip_prefix(VERSION)?.strip_prefix(':')?.split_once(":{")
    }

    /// Reads the identifier from a key, as [`of_limit`](Self::of_limit) wrote it.
    pub(crate) fn read(&self, key: &str) -> StoredKey {
        let parts = self.parts(key).and_then(|(limit, rest)| Some((limit, rest.split_once('}')?)));
        let Some((limit, (tag, rest))) = parts else { return StoredKey::Other };
        // In the limit's part `#` announces a reservation's id, and behind an identifier a reply's.
        if limit.contains('#') || (self.tag == Tag::Identifier && !rest.is_empty()) {
            return StoredKey::Other;
        }
        let identifier = match self.tag {
            Tag::Fixed(_) => unescape(rest),
            _ if rest.is_empty() => unescape(tag),
            _ => unescape(tag).zip(unescape(rest)).map(|(tag, rest)| tag + &rest),
        };
        identifier.map_or(StoredKey::Hidden, StoredKey::Identifier)
    }

    /// Whether these keys are of the same limits, and differ in the identifier only.
    pub(crate) fn lie_alike(&self, one: &str, other: &str) -> bool {
        self.limit_of(one).is_some_and(|limit| self.limit_of(other) == Some(limit))
    }

    /// The key that all limits of an identifier share.
    pub(crate) fn shared(&self, identifier: &str) -> String {
        self.of_limit("", identifier)
    }

    /// The key of a limit's state in the compare-and-set mode. No state name contains `!`, so no
    /// other key equals it.
    pub(crate) fn of_cas(&self, limit: &str, identifier: &str) -> String {
        self.of_limit(&format!("{limit}!"), identifier)
    }

    /// The key of a limit's entries in the mode of native commands, in this data type. No state
    /// name contains `+`, so no other key equals it.
    pub(crate) fn of_multi(&self, limit: &str, storage: &str, identifier: &str) -> String {
        self.of_limit(&format!("{limit}+{storage}"), identifier)
    }

    /// The key of a limit's reservation under an id. No state name contains `#`. In the
    /// compare-and-set mode, the limit is its state name and `!`.
    pub(crate) fn of_reservation(
        &self,
        limit: &str,
        id: ReservationId,
        identifier: &str,
    ) -> String {
        self.of_limit(&format!("{limit}#{id}"), identifier)
    }

    /// The key of an identifier's records. No state name is empty before a `#`.
    pub(crate) fn of_records(&self, identifier: &str) -> String {
        self.of_limit(RECORDS, identifier)
    }

    /// The key of the records of the identifier that another key is of.
    pub(crate) fn records_beside(&self, key: &str) -> Option<String> {
        let (_, tagged) = self.parts(key)?;
        Some(format!("{}:{VERSION}:{RECORDS}:{{{tagged}", self.prefix))
    }

    /// The identifier whose records these are, if they are records; `Hidden` if it cannot be read.
    pub(crate) fn read_records(&self, key: &str) -> Option<StoredKey> {
        let (limit, _) = self.parts(key)?;
        let shared = (limit == RECORDS).then(|| key.replacen(&format!(":{RECORDS}:"), "::", 1))?;
        Some(self.read(&shared))
    }

    /// The key of a limit whose state is a list. No state name contains `+`.
    pub(crate) fn of_list(&self, limit: &str, identifier: &str) -> String {
        self.of_limit(&format!("{limit}+"), identifier)
    }

    /// The key of a limit whose state has a key of its own.
    pub(crate) fn of_limit(&self, limit: &str, identifier: &str) -> String {
        let prefix = &self.prefix;
        let mut key = String::with_capacity(prefix.len() + limit.len() + identifier.len() + 8);
        for part in [prefix, ":", VERSION, ":", limit, ":{"] {
            key.push_str(part);
        }
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
            // Empty braces are no hash tag. A single `%` is no escape, so no other identifier
            // yields it.
            key.push('%');
            return;
        }
        if identifier.len() <= MAX_IDENTIFIER_BYTES && identifier.bytes().all(is_plain) {
            key.push_str(identifier);
            return;
        }
        let begin = key.len();
        for (place, c) in identifier.char_indices() {
            // A leading `#` announces a hash.
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

/// The text behind `%XX`; `None` for a hash.
fn unescape(text: &str) -> Option<String> {
    if text.starts_with('#') {
        return None;
    }
    if text == "%" {
        return Some(String::new());
    }
    let mut parts = text.split('%');
    let mut plain = parts.next()?.to_owned();
    for part in parts {
        let code = u8::from_str_radix(part.get(..2)?, 16).ok()?;
        plain.push(char::from(code));
        plain.push_str(&part[2..]);
    }
    Some(plain)
}

/// Whether a character stands for itself wherever it is. Nearly all identifiers have only such
/// characters.
const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'/' | b':' | b'@' | b'_')
}

/// Characters that delimit, that a cluster or a pattern interprets, or that control a terminal. All
/// are below U+00A0, so two hexadecimal digits suffice.
fn is_special(c: char) -> bool {
    c.is_control() || matches!(c, '{' | '}' | '%' | ' ' | '*' | '?' | '[' | ']' | '\\' | '"' | '\'')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_readable_and_tagged_and_those_of_reservations_and_lists_apart() {
        let (keys, id) = (Keys::default(), ReservationId::new(0x2a));
        let hex = "0000000000000000000000000000002a";
        for (key, due) in [
            (keys.shared("1.2.3.4"), "rl:1::{1.2.3.4}".to_owned()),
            (keys.of_limit("login", "bob@example.org"), "rl:1:login:{bob@example.org}".into()),
            (keys.of_reservation("jobs", id, "bob"), format!("rl:1:jobs#{hex}:{{bob}}")),
            (keys.of_reservation("jobs!", id, "bob"), format!("rl:1:jobs!#{hex}:{{bob}}")),
            (keys.of_list("jobs", "bob"), "rl:1:jobs+:{bob}".into()),
        ] {
            assert_eq!(key, due);
        }
    }

    #[test]
    fn special_characters_are_escaped_and_long_identifiers_are_hashed() {
        for (identifier, tag) in [
            (&*"x".repeat(1_000_000), "#d1966755fb9b775eac208616536d1dc8"),
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
            let key = Keys::default().shared(identifier);
            assert_eq!(key, format!("rl:1::{{{tag}}}"), "{identifier:?}");
        }
    }

    #[test]
    fn no_plain_character_is_special() {
        for byte in (0..=u8::MAX).filter(|byte| is_plain(*byte)) {
            let c = char::from(byte);
            assert!(c.is_ascii() && !is_special(c) && c != '#', "{c:?}");
        }
    }

    #[test]
    fn with_a_secret_a_key_reveals_nothing_of_the_identifier() {
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
        let message = keys.validate().expect_err("no secret at all").to_string();
        assert!(message.contains("is empty"), "{message}");
    }

    #[test]
    fn records_lie_beside_states_and_are_taken_for_none() {
        for keys in [Keys::default(), tagged(Tag::UpTo('/'))] {
            let records = keys.of_records("acme/bob");
            assert_eq!(keys.read(&records), StoredKey::Other);
            let identifier = StoredKey::Identifier("acme/bob".into());
            assert_eq!(keys.read_records(&records), Some(identifier));
            for state in [keys.shared("acme/bob"), keys.of_list("jobs", "acme/bob")] {
                assert_eq!(keys.records_beside(&state).as_deref(), Some(&*records));
                assert_eq!(keys.read_records(&state), None);
            }
        }
        assert_eq!(Keys::default().of_records("bob"), "rl:1:#records:{bob}");
    }

    fn tagged(tag: Tag) -> Keys {
        Keys { tag, ..Keys::default() }
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

    #[test]
    fn keys_of_no_state_tell_no_identifier() {
        let (keys, id) = (Keys::default(), ReservationId::new(17));
        let [jobs, bob] = [keys.of_reservation("jobs", id, "bob"), keys.shared("bob")];
        for key in [&*jobs, &(bob + "#17"), "rl:replay-1", "rl:x:y:{z}", "other:1::{bob}"] {
            assert_eq!(keys.read(key), StoredKey::Other, "{key}");
        }
        for key in [keys.of_list("jobs", "bob"), keys.of_cas("jobs", "bob")] {
            assert_eq!(keys.read(&key), StoredKey::Identifier("bob".into()), "{key}");
        }
    }

    proptest! {
        /// Nor can one be guessed: a client without the secret cannot tell the key of any
        /// identifier, of any length.
        #[test]
        fn with_a_secret_the_key_of_every_identifier_depends_on_it(identifier in ".{0,300}", end in prop::sample::select(vec!['/', 'a'])) {
            for tag in [Tag::Identifier, Tag::UpTo(end), Tag::Fixed("acme".into())] {
                let [one, other, open] = [Some("one"), Some("other"), None].map(|secret| {
                    let mut keys = tagged(tag.clone());
                    if let Some(secret) = secret {
                        keys.set_secret(secret.as_bytes());
                    }
                    keys
                });
                let parts = |keys: &Keys| {
                    let key = keys.shared(&identifier);
                    let (tag, rest) = key.split_once('}').expect("a tag");
                    [tag.to_owned(), rest.to_owned()]
                };
                for (one, others) in parts(&one).iter().zip(parts(&other).iter().zip(&parts(&open))) {
                    let is_hidden = |two: &String| one != two || one.is_empty();
                    prop_assert!(is_hidden(others.0) && is_hidden(others.1), "{one} {others:?}");
                }
                prop_assert_eq!(one.read(&one.shared(&identifier)), StoredKey::Hidden);
            }
        }

        #[test]
        fn two_identifiers_never_share_a_key_and_each_is_read_from_its_own(
            a in ".{0,200}", b in "[/%#{}0-9A-F]{0,5}", c in "[/%#{}0-9A-F]{0,5}", end in prop::sample::select(vec!['/', '#', '%', 'A']),
        ) {
            for keys in [Keys::default(), tagged(Tag::UpTo(end)), tagged(Tag::Fixed("acme".into()))] {
                prop_assert_eq!(a == b, keys.shared(&a) == keys.shared(&b));
                prop_assert_eq!(b == c, keys.shared(&b) == keys.shared(&c));
                for identifier in [&a, &b, &c] {
                    let key = keys.shared(identifier);
                    // Only a long one is hashed.
                    let has_hash = ["{#", "}#"].iter().any(|hash| key.contains(hash));
                    let is_hashed = has_hash && identifier.len() > 42;
                    let due = StoredKey::Identifier(identifier.clone());
                    let due = if is_hashed { StoredKey::Hidden } else { due };
                    prop_assert_eq!(keys.read(&key), due, "{}", key);
                }
            }
        }
    }
}
