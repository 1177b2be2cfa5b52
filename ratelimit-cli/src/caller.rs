//! [`Caller`]: the caller of a request, as the input names it.

use std::borrow::Cow;

use ratelimit_core::{Identifiers, Limit, Limits, Policy};

use crate::failure::Failure;

/// The caller of a request: a bare key, named identifiers, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller<'a> {
    pub(crate) bare: Option<Cow<'a, str>>,
    /// In the order of the input.
    pub(crate) named: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    /// Whether a decision line names only the bare key. That is so for access logs: the address identifies the
    /// caller, and the path would make every line long.
    pub(crate) bare_only: bool,
}

/// The name of the bare key beside the named identifiers.
pub(crate) const BARE_NAME: &str = "key";

impl Identifiers for Caller<'_> {
    fn bare(&self) -> Option<&str> {
        self.bare.as_deref()
    }

    fn identifier(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(known, _)| known == name).map(|(_, value)| &**value)
    }

    fn names(&self) -> Vec<&str> {
        self.named.iter().map(|(name, _)| &**name).collect()
    }
}

impl<'a> Caller<'a> {
    /// The caller that the arguments of `check`, `inspect` and `reset` name. `name=value` is an identifier only
    /// if a limit of the policy uses that name; a bare key may contain `=`.
    pub(crate) fn from_args(keys: &'a [String], limits: &Limits<Policy>) -> Result<Self, Failure> {
        let known = |name: &str| {
            limits.iter().any(|limit| limit.identifier_names().any(|known| known == name))
        };
        let mut caller = Self::default();
        for key in keys {
            match key.split_once('=') {
                Some((name, value)) if known(name) => {
                    if caller.identifier(name).is_some() {
                        return Err(Failure::input(format!("{name} is given twice; give it once")));
                    }
                    caller.named.push((name.into(), value.into()));
                }
                _ if caller.bare.is_some() => {
                    return Err(Failure::input(format!(
                        "{key:?} is a second bare key; ask about one caller at a time. {}",
                        wanted(limits)
                    )));
                }
                _ => caller.bare = Some(key.into()),
            }
        }
        if !limits.iter().any(|limit| limit.key_for(&caller).is_some()) {
            return Err(Failure::input(format!(
                "no limit of the policy applies to {}. {}",
                keys.join(" "),
                wanted(limits)
            )));
        }
        Ok(caller)
    }

    /// The same without the text that it was read from.
    pub(crate) fn into_owned(self) -> Caller<'static> {
        let owned = |text: Cow<'_, str>| Cow::Owned(text.into_owned());
        let named = self.named.into_iter().map(|(name, value)| (owned(name), owned(value)));
        Caller { bare: self.bare.map(owned), named: named.collect(), bare_only: self.bare_only }
    }

    /// The limits that apply to the caller, shadow limits too, each with its key.
    pub(crate) fn keys<'l>(
        &'l self,
        limits: &'l Limits<Policy>,
    ) -> Vec<(&'l Limit<Policy>, Cow<'l, str>)> {
        limits.iter().filter_map(|limit| Some((limit, limit.key_for(self)?))).collect()
    }

    /// The caller as people read it: `alice`, or `ip=192.0.2.7 user=bob`.
    pub(crate) fn display(&self) -> String {
        let named = self.named.iter().map(|(name, value)| format!("{name}={value}"));
        let parts: Vec<_> = self.bare.iter().map(ToString::to_string).chain(named).collect();
        crate::text::printable(&parts.join(" "), 200)
    }
}

/// A sentence that lists the identifiers which the policy's limits use.
pub(crate) fn wanted(limits: &Limits<Policy>) -> String {
    let each: Vec<_> = limits
        .iter()
        .map(|limit| match joined_names(limit.identifier_names()) {
            names if names == BARE_NAME => format!("{} wants a bare key", limit.name()),
            names => format!("{} wants {names}", limit.name()),
        })
        .collect();
    format!("Of the policy's limits {}.", each.join("; "))
}

/// The identifiers of a limit, as people read them.
pub(crate) fn joined_names<'n>(names: impl ExactSizeIterator<Item = &'n str>) -> String {
    if names.len() == 0 {
        return BARE_NAME.to_owned();
    }
    names.collect::<Vec<_>>().join(" + ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(text: &str) -> Limits<Policy> {
        toml::from_str(text).expect("a policy")
    }

    fn strings(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    const BY_IP: &str =
        "[[limit]]\nname = \"a\"\nkey = [\"ip\"]\nalgorithm = \"gcra\"\nrate = \"1/s\"";
    const BARE: &str = "[[limit]]\nname = \"a\"\nalgorithm = \"gcra\"\nrate = \"1/s\"";

    #[test]
    fn an_argument_is_an_identifier_only_if_the_policy_uses_its_name() {
        let keys = strings(&["ip=a=b"]);
        let caller = Caller::from_args(&keys, &limits(BY_IP)).expect("a caller");
        assert_eq!((caller.identifier("ip"), caller.bare()), (Some("a=b"), None));
        let caller = Caller::from_args(&keys, &limits(BARE)).expect("a caller");
        assert_eq!((caller.identifier("ip"), caller.bare()), (None, Some("ip=a=b")));
    }

    #[test]
    fn a_caller_without_a_limit_is_told_which_identifiers_the_policy_needs() {
        let keys = strings(&["alice"]);
        let error = Caller::from_args(&keys, &limits(BY_IP)).expect_err("no limit").to_string();
        assert!(error.contains("a wants ip"), "{error}");
        assert!(Caller::from_args(&strings(&["a", "b"]), &limits(BARE)).is_err());
        assert!(Caller::from_args(&strings(&["ip=a", "ip=b"]), &limits(BY_IP)).is_err());
    }
}
