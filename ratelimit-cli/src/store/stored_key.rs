//! Reads the identifier from a key on Redis: `{prefix}:{version}:{limit}:{tag}rest`, as `ratelimit-redis` writes it.

use ratelimit_redis::Tag;

/// What a key on Redis tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredKey {
    /// The state of this identifier.
    Identifier(String),
    /// The state of an identifier that is hidden by a secret, or so long that a hash stands for it.
    Hidden,
    /// A reservation, a cached reply, or a key of another program.
    Other,
}

impl StoredKey {
    /// Reads a key that begins with this prefix.
    pub(crate) fn read(key: &str, prefix: &str, tag: &Tag) -> Self {
        let parts = || {
            let rest = key.strip_prefix(prefix)?.strip_prefix(':')?;
            let (version, rest) = rest.split_once(':')?;
            let (limit, rest) = rest.split_once(":{")?;
            let (tagged, rest) = rest.split_once('}')?;
            version.bytes().all(|b| b.is_ascii_digit()).then_some((limit, tagged, rest))
        };
        let Some((limit, tagged, rest)) = parts() else { return Self::Other };
        // No limit's name contains `#`, which announces a reservation's id. After an identifier, it announces a reply's.
        if limit.contains('#') || (tag == &Tag::Identifier && !rest.is_empty()) {
            return Self::Other;
        }
        let identifier = match tag {
            Tag::Fixed(_) => unescape(rest),
            _ if rest.is_empty() => unescape(tagged),
            _ => unescape(tagged).zip(unescape(rest)).map(|(tagged, rest)| tagged + &rest),
        };
        identifier.map_or(Self::Hidden, Self::Identifier)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_tells_its_identifier() {
        let named = |name: &str| StoredKey::Identifier(name.into());
        let (each, up_to) = (Tag::Identifier, Tag::UpTo('/'));
        let fixed = Tag::Fixed("acme".into());
        for (key, tag, due) in [
            ("rl:1::{1.2.3.4}", &each, named("1.2.3.4")),
            ("rl:1:login:{bob@example.org}", &each, named("bob@example.org")),
            ("rl:1:login!:{a%20b%7D%25}", &each, named("a b}%")),
            ("rl:1::{2001:db8::1}", &each, named("2001:db8::1")),
            ("rl:1::{%}", &each, named("")),
            ("rl:1::{%23a}", &each, named("#a")),
            ("rl:1::{#0123456789abcdef0123456789abcdef}", &each, StoredKey::Hidden),
            ("rl:1::{acme}/alice", &up_to, named("acme/alice")),
            ("rl:1::{alone}", &up_to, named("alone")),
            ("rl:1::{acme}alice", &fixed, named("alice")),
            ("rl:1::{acme}#0123456789abcdef0123456789abcdef", &fixed, StoredKey::Hidden),
            ("rl:1:login#17:{bob}", &each, StoredKey::Other),
            ("rl:1::{bob}#17", &each, StoredKey::Other),
            ("rl:replay-1", &each, StoredKey::Other),
            ("rl:x:y:{z}", &each, StoredKey::Other),
        ] {
            assert_eq!(StoredKey::read(key, "rl", tag), due, "{key}");
        }
    }
}
