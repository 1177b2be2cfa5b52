//! The one place where keys on the server are made.
//!
//! A key is `{prefix}:{version}:{limit}:{tag}`, where the tag is the identifier in braces: on a
//! cluster all keys of one identifier lie in one slot. The limit's part is empty for the key that all
//! limits of an identifier share, a hash with a field each.
//!
//! Identifiers come from strangers. Bytes that mean something in a key, to a cluster or to a terminal
//! are escaped as `%XX`, so that two identifiers never meet in one key; long ones are hashed.

use std::fmt::Write as _;

use ratelimit_core::HoldId;

/// Raised when what is stored under a key changes its meaning.
const VERSION: u32 = 1;
/// The longest escaped identifier that stands in a key; a longer one is hashed.
const MAX_IDENTIFIER_BYTES: usize = 128;

/// The key that all limits of an identifier share.
pub(crate) fn shared(prefix: &str, identifier: &str) -> String {
    of_limit(prefix, "", identifier)
}

/// The key of a limit's state in the mode that compares and sets. No limit's name has a `!`, so that
/// it is nobody else's.
pub(crate) fn of_cas(prefix: &str, limit: &str, identifier: &str) -> String {
    of_limit(prefix, &format!("{limit}!"), identifier)
}

/// The key of a limit's entries in the mode of native commands, for each algorithm another. No limit's
/// name has a `+`, so that it is nobody else's.
pub(crate) fn of_multi(prefix: &str, limit: &str, algorithm: &str, identifier: &str) -> String {
    of_limit(prefix, &format!("{limit}+{algorithm}"), identifier)
}

/// The key of what a limit holds for an identifier under an id. No limit's name has a `#`.
pub(crate) fn of_hold(prefix: &str, limit: &str, id: HoldId, identifier: &str) -> String {
    of_limit(prefix, &format!("{limit}#{id}"), identifier)
}

/// The same in the mode that compares and sets.
pub(crate) fn of_cas_hold(prefix: &str, limit: &str, id: HoldId, identifier: &str) -> String {
    of_limit(prefix, &format!("{limit}!#{id}"), identifier)
}

/// The key of a limit whose state is a list. No limit's name has a `+`, so that the same limit can have
/// been kept in another way before.
pub(crate) fn of_list(prefix: &str, limit: &str, identifier: &str) -> String {
    of_limit(prefix, &format!("{limit}+"), identifier)
}

/// The key of a limit whose state needs one of its own.
pub(crate) fn of_limit(prefix: &str, limit: &str, identifier: &str) -> String {
    let mut key = String::with_capacity(prefix.len() + limit.len() + identifier.len() + 8);
    // Writing to a string cannot fail.
    let _ = write!(key, "{prefix}:{VERSION}:{limit}:{{");
    let begin = key.len();
    push_identifier(&mut key, begin, identifier);
    key.push('}');
    key
}

fn push_identifier(key: &mut String, begin: usize, identifier: &str) {
    if identifier.is_empty() {
        // Braces with nothing in between are no hash tag. A single % is no escape, and so nobody else's.
        key.push('%');
        return;
    }
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

/// Characters that delimit, that a cluster or a pattern reads, or that a terminal acts upon. All of
/// them are ASCII, two digits of hexadecimal each.
fn is_special(c: char) -> bool {
    c.is_ascii_control()
        || matches!(c, '{' | '}' | '%' | ' ' | '*' | '?' | '[' | ']' | '\\' | '"' | '\'')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_readable_and_tagged() {
        assert_eq!(shared("rl", "1.2.3.4"), "rl:1::{1.2.3.4}");
        assert_eq!(of_limit("rl", "login", "bob@example.org"), "rl:1:login:{bob@example.org}");
    }

    #[test]
    fn what_is_held_and_what_is_listed_have_keys_that_no_limit_has() {
        let id = HoldId::new(0x2a);
        let hex = "0000000000000000000000000000002a";
        assert_eq!(of_hold("rl", "jobs", id, "bob"), format!("rl:1:jobs#{hex}:{{bob}}"));
        assert_eq!(of_cas_hold("rl", "jobs", id, "bob"), format!("rl:1:jobs!#{hex}:{{bob}}"));
        assert_eq!(of_list("rl", "jobs", "bob"), "rl:1:jobs+:{bob}");
    }

    #[test]
    fn what_means_something_elsewhere_is_escaped() {
        for (identifier, tag) in [
            ("", "%"),
            ("%", "%25"),
            ("{abc}:evil{zzz}", "%7Babc%7D:evil%7Bzzz%7D"),
            ("a\0\r\n", "a%00%0D%0A"),
            ("#1", "%231"),
            ("a#1", "a#1"),
            ("naïve", "naïve"),
            ("*", "%2A"),
        ] {
            assert_eq!(shared("rl", identifier), format!("rl:1::{{{tag}}}"), "{identifier:?}");
        }
    }

    #[test]
    fn a_long_identifier_is_hashed_to_the_same_key_everywhere() {
        let key = shared("rl", &"x".repeat(1_000_000));
        assert_eq!(key, "rl:1::{#d1966755fb9b775eac208616536d1dc8}");
    }

    proptest! {
        #[test]
        fn two_identifiers_never_share_a_key(a in ".{0,200}", b in "[%#{}0-9A-F]{0,6}", c in "[%#{}0-9A-F]{0,6}") {
            prop_assert_eq!(a == b, shared("rl", &a) == shared("rl", &b));
            prop_assert_eq!(b == c, shared("rl", &b) == shared("rl", &c));
        }

        #[test]
        fn a_key_has_exactly_one_hash_tag_around_the_identifier(identifier in any::<String>()) {
            let key = of_limit("rl", "l", &identifier);
            prop_assert_eq!(key.find('{'), Some("rl:1:l:".len()));
            prop_assert_eq!(key.find('}'), Some(key.len() - 1));
            prop_assert_ne!(key, "rl:1:l:{}");
        }
    }
}
