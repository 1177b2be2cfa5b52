//! [`Caller`]: the caller of a request, as the input names it.

use std::borrow::Cow;

use compact_str::CompactString;
use ratelimit_core::{AnyAlgorithm, Condition, ConfigError, Identifiers, Limit, Limits};
use serde::{Serialize, Serializer};
use smallvec::SmallVec;

use crate::address::client_as_counted;
use crate::failure::Failure;

/// The caller of a request: a bare key, named identifiers, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Caller {
    /// The bare key.
    #[serde(rename = "key", skip_serializing_if = "Option::is_none")]
    pub bare: Option<CompactString>,
    /// The identifiers by name.
    #[serde(rename = "keys", skip_serializing_if = "Named::is_untold")]
    pub named: Named,
}

/// As many identifiers as most requests have.
const FEW: usize = 4;

/// Identifiers by name, in the order of the input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    pub(crate) list: SmallVec<[(Cow<'static, str>, CompactString); FEW]>,
    /// Whether a decision line names only the bare key. That is so for access logs: the address
    /// identifies the caller, and the path would make every line long.
    pub(crate) bare_only: bool,
}

impl Named {
    fn parts(&self) -> impl Iterator<Item = String> {
        self.list.iter().map(|(name, value)| format!("{name}={value}"))
    }

    /// The identifiers as people read them: `ip=192.0.2.7 user=bob`.
    pub fn display(&self) -> String {
        crate::text::printable(&self.parts().collect::<Vec<_>>().join(" "), 200)
    }

    fn is_untold(&self) -> bool {
        self.bare_only || self.list.is_empty()
    }
}

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.list.iter().map(|(name, value)| (name, value)))
    }
}

/// The name of the bare key beside the named identifiers.
pub(crate) const BARE_NAME: &str = "key";

/// Whether a limit can apply where callers have identifiers of these names, `key` for a
/// bare key.
pub fn check_names(limit: &Limit<AnyAlgorithm>, names: &[String]) -> Result<(), ConfigError> {
    let known = names.iter().map(|name| Some(&**name).filter(|name| *name != BARE_NAME));
    limit.check_identifiers(&known.collect::<Vec<_>>())
}

impl Identifiers for Caller {
    fn bare(&self) -> Option<Cow<'_, str>> {
        self.bare.as_deref().map(Cow::Borrowed)
    }

    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        self.identifier(name).map(Cow::Borrowed)
    }

    fn names(&self) -> Vec<&str> {
        self.named.list.iter().map(|(name, _)| &**name).collect()
    }
}

impl Caller {
    /// The value of the identifier of this name.
    pub fn identifier(&self, name: &str) -> Option<&str> {
        self.named.list.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The caller that the arguments of `check`, `inspect` and `reset` name. If limits of the
    /// policy use identifiers, a bare key that contains `=` is written as `key=…`: otherwise a
    /// misspelt identifier would be one. An IPv6 address `ip=…` is its network of this prefix
    /// length, as in the HTTP layer.
    pub fn from_args(
        keys: &[String],
        limits: &Limits<AnyAlgorithm>,
        ipv6_prefix: u8,
    ) -> Result<Self, Failure> {
        let conditions = limits.iter().flat_map(Limit::conditions).map(Condition::identifier);
        let names = limits.iter().flat_map(Limit::identifier_names).chain(conditions);
        let names: Vec<_> = names.collect();
        let mut caller = Self::default();
        for key in keys {
            let bare = match key.split_once('=') {
                Some((name, value)) if names.contains(&name) => {
                    if caller.identifier(name).is_some() {
                        return Err(Failure::input(format!("{name} is given twice; give it once")));
                    }
                    let value = match name {
                        "ip" => client_as_counted(value, ipv6_prefix),
                        _ => value.into(),
                    };
                    caller.named.list.push((name.to_owned().into(), value));
                    continue;
                }
                Some((BARE_NAME, value)) if !names.is_empty() => value,
                Some((name, _)) if !names.is_empty() => {
                    return Err(Failure::input(format!(
                        "no limit of the policy counts by {name:?}. {} Write a bare key that contains \"=\" as \
                         {BARE_NAME}={key}",
                        list_identifiers(limits)
                    )));
                }
                _ => key,
            };
            if caller.bare.is_some() {
                return Err(Failure::input(format!(
                    "{key:?} is a second bare key; ask about one caller at a time. {}",
                    list_identifiers(limits)
                )));
            }
            caller.bare = Some(bare.into());
        }
        if !limits.iter().any(|limit| limit.key_for(&caller).is_some()) {
            return Err(Failure::input(match keys {
                [key] if caller.named.list.is_empty() => {
                    let name = names.first().copied().unwrap_or_default();
                    let value = caller.bare.as_deref().unwrap_or(key);
                    format!(
                        "{key:?} is a bare key, and no limit of the policy counts by one. {} Write identifiers by name, such \
                         as {name}={value}",
                        list_identifiers(limits)
                    )
                }
                _ => format!(
                    "no limit of the policy applies to {}. {}",
                    keys.join(" "),
                    list_identifiers(limits)
                ),
            }));
        }
        Ok(caller)
    }

    /// The limits that apply to the caller, shadow limits too, each with its key.
    pub fn keys<'l>(
        &'l self,
        limits: &'l Limits<AnyAlgorithm>,
    ) -> Vec<(&'l Limit<AnyAlgorithm>, Cow<'l, str>)> {
        limits.iter().filter_map(|limit| Some((limit, limit.key_for(self)?))).collect()
    }

    /// What must be said of limits that count by what the caller has, and do not apply to it.
    pub fn note_unmet(&self, limits: &Limits<AnyAlgorithm>) -> Option<String> {
        let has = |name: &str| {
            self.identifier(name).is_some() || self.bare.is_some() && name == BARE_NAME
        };
        let unmet = limits.iter().filter(|limit| !limit.is_met_by(self));
        let unmet = unmet.filter(|limit| names(limit).into_iter().all(has));
        let unmet: Vec<_> = unmet.map(|limit| limit.name().to_owned() + &when(limit)).collect();
        (!unmet.is_empty()).then(|| {
            format!(
                "left out are {}; to include one, name these identifiers too, as in path=/login",
                unmet.join("; ")
            )
        })
    }

    /// The bare key of a trace. Of an access log, it is an identifier that has a name.
    pub fn bare_of_trace(&self) -> Option<&str> {
        self.bare.as_deref().filter(|_| !self.named.bare_only)
    }

    /// The caller as people read it: `alice`, or `ip=192.0.2.7 user=bob`.
    pub fn display(&self) -> String {
        let bare = self.bare.iter().map(ToString::to_string);
        crate::text::printable(&bare.chain(self.named.parts()).collect::<Vec<_>>().join(" "), 200)
    }
}

/// A sentence that lists the identifiers which the policy's limits use.
pub fn list_identifiers(limits: &Limits<AnyAlgorithm>) -> String {
    let each: Vec<_> = limits
        .iter()
        .map(|limit| match limit.identifier_names().len() {
            0 => format!("{} needs a bare key{}", limit.name(), when(limit)),
            _ => format!("{} needs {}", limit.name(), counts_by(limit)),
        })
        .collect();
    format!("Of the policy's limits {}.", each.join("; "))
}

/// The names of the identifiers that a limit counts by, [`BARE_NAME`] for a bare key.
pub(crate) fn names(limit: &Limit<AnyAlgorithm>) -> Vec<&str> {
    let names: Vec<_> = limit.identifier_names().collect();
    if names.is_empty() { vec![BARE_NAME] } else { names }
}

/// The conditions of a limit in words, after a space; nothing without conditions.
fn when(limit: &Limit<AnyAlgorithm>) -> String {
    match limit.describe_conditions() {
        none if none.is_empty() => none,
        when => format!(" {when}"),
    }
}

/// What a limit counts by, and when: `ip + user when path = "/login"`.
pub(crate) fn counts_by(limit: &Limit<AnyAlgorithm>) -> String {
    joined_names(limit) + &when(limit)
}

/// The names of the identifiers that a limit counts by, as people read them.
pub fn joined_names(limit: &Limit<AnyAlgorithm>) -> String {
    names(limit).join(" + ")
}

/// A key of a limit as `inspect` takes its caller: `alice`, or `ip=192.0.2.7 path=/login`.
pub fn key_as_arguments(limit: &Limit<AnyAlgorithm>, key: &str) -> String {
    let mut names = limit.identifier_names();
    let Some(mut shown) = names.next().map(|name| format!("{name}=")) else {
        return key.to_owned();
    };
    // In a key of several identifiers a bar parts their values, and a backslash escapes.
    let (is_joined, mut chars) = (names.len() > 0, key.chars());
    while let Some(c) = chars.next() {
        match c {
            '|' if is_joined => shown.extend(names.next().map(|name| format!(" {name}="))),
            '\\' if is_joined => shown.extend(chars.next()),
            c => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_shown_as_inspect_takes_it() {
        for (names, key, shown) in [
            (&[][..], "a|b", "a|b"),
            (&["ip"], "a|b", "ip=a|b"),
            (&["ip", "path"], "192.0.2.7|/login", "ip=192.0.2.7 path=/login"),
            (&["ip", "path"], "a|b\\|c\\\\", "ip=a path=b|c\\"),
        ] {
            let policy = "gcra 1/s".parse().expect("a policy");
            let limit = Limit::new("limit", policy).and_then(|limit| limit.by(names));
            assert_eq!(key_as_arguments(&limit.expect("a limit"), key), shown);
        }
    }
}
