//! [`Condition`]: which requests a limit applies to, by the values of their identifiers.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use super::{Limit, checked_name};
use crate::algorithms::Algorithm;
use crate::error::ConfigError;
use crate::identifiers::Identifiers;

/// A condition of a [`Limit`]: the values that an identifier must have, or must not have, for the
/// limit to apply. See [`Limit::when`] and [`Limit::when_not`].
///
/// ```
/// use ratelimit_core::{Gcra, Limit};
/// let login = Limit::new("login", Gcra::per_minute(5).build()?)?
///     .by(["ip"])?
///     .when("method", "POST")?
///     .when_not("path", ["/health", "/assets/*"])?;
/// let [method, path] = login.conditions() else { unreachable!() };
/// assert_eq!(method.to_string(), r#"method = "POST""#);
/// assert_eq!(path.to_string(), r#"not path = "/health" or "/assets/*""#);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    identifier: Box<str>,
    values: Box<[Box<str>]>,
    excludes: bool,
}

impl Condition {
    fn new(
        identifier: &str,
        ConditionValues(values): ConditionValues,
        excludes: bool,
    ) -> Result<Self, ConfigError> {
        checked_name(identifier, "an identifier in `when`")?;
        if values.is_empty() {
            return Err(ConfigError::new(format!(
                "`when` gives {identifier:?} no value; name at least one, or \"*\" for any"
            )));
        }
        for (position, value) in values.iter().enumerate() {
            let wrong = if value.is_empty() {
                "is empty; write a value, or \"*\" for any"
            } else if value.strip_suffix('*').unwrap_or(value).contains('*') {
                "has a * before its end; a * stands for any end of a value, as in \"/admin/*\""
            } else if values[..position].contains(value) {
                "is there twice; name each value once"
            } else {
                continue;
            };
            return Err(ConfigError::new(format!(
                "the value {value:?} of {identifier:?} in `when` {wrong}"
            )));
        }
        Ok(Self { identifier: identifier.into(), values: values.into(), excludes })
    }

    /// The name of the identifier.
    #[must_use]
    pub fn identifier(&self) -> &str {
        &self.identifier
    }

    fn place(&self) -> (&str, bool) {
        (&self.identifier, self.excludes)
    }

    /// The values; one that ends in `*` stands for all that begin with the rest of it.
    #[must_use]
    pub fn values(&self) -> impl ExactSizeIterator<Item = &str> {
        self.values.iter().map(|value| &**value)
    }

    /// Whether these are the values that the identifier must not have.
    #[must_use]
    pub const fn excludes(&self) -> bool {
        self.excludes
    }

    /// Whether a caller meets it. One that lacks the identifier has none of the values.
    #[must_use]
    pub fn is_met_by(&self, caller: &(impl Identifiers + ?Sized)) -> bool {
        let has = |value: &str| self.values.iter().any(|pattern| covers(pattern, value));
        let found = caller.identifier(&self.identifier).is_some_and(|value| has(&value));
        found != self.excludes
    }
}

/// In words: `method = "POST" or "PUT"`, `not path = "/health"`.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let not = if self.excludes { "not " } else { "" };
        let values: Vec<_> = self.values.iter().map(|value| format!("{value:?}")).collect();
        write!(f, "{not}{} = {}", self.identifier, values.join(" or "))
    }
}

/// Whether a value matches this pattern; for two patterns, whether the first matches all that the
/// second does.
fn covers(pattern: &str, value: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => value.starts_with(beginning),
        None => pattern == value,
    }
}

/// The values of an identifier in a [`Condition`]: one text, or a list of alternatives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionValues(Vec<Box<str>>);

impl From<&str> for ConditionValues {
    fn from(value: &str) -> Self {
        Self(vec![value.into()])
    }
}

impl From<String> for ConditionValues {
    fn from(value: String) -> Self {
        Self(vec![value.into()])
    }
}

impl<V: AsRef<str>> From<&[V]> for ConditionValues {
    fn from(values: &[V]) -> Self {
        Self(values.iter().map(|value| value.as_ref().into()).collect())
    }
}

impl<V: AsRef<str>, const N: usize> From<[V; N]> for ConditionValues {
    fn from(values: [V; N]) -> Self {
        Self::from(&values[..])
    }
}

impl<V: AsRef<str>> From<Vec<V>> for ConditionValues {
    fn from(values: Vec<V>) -> Self {
        Self::from(&values[..])
    }
}

impl<A: Algorithm> Limit<A> {
    /// The same limit, which applies only to callers whose identifier of this name has this value,
    /// or one of these. A value that ends in `*` stands for all that begin with the rest of it.
    ///
    /// With several conditions, a caller must meet each. To others the limit does not apply, even
    /// if it is [required](Self::required). No state belongs to a condition: the limit keeps its
    /// states when its conditions change.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let login = Limit::new("login", Gcra::per_minute(5).build()?)?
    ///     .by(["ip"])?
    ///     .when("method", "POST")?
    ///     .when("path", ["/login", "/signup/*"])?;
    /// let caller = |path| [("ip", "192.0.2.7"), ("method", "POST"), ("path", path)];
    /// assert_eq!(login.key_for(&caller("/signup/team")).as_deref(), Some("192.0.2.7"));
    /// assert_eq!(login.key_for(&caller("/")), None);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// An identifier that could not be the name of a limit, or that an earlier call names; no
    /// value, an empty one, or one with a `*` before its end; conditions that no caller meets.
    pub fn when(
        self,
        identifier: &str,
        values: impl Into<ConditionValues>,
    ) -> Result<Self, ConfigError> {
        self.with_condition(identifier, values.into(), false)
    }

    /// The same limit, which does not apply to callers whose identifier of this name has this
    /// value, or one of these. A caller that lacks the identifier is not excluded, so that
    /// `when_not("user", "*")` leaves only callers without a user.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let api = Limit::new("api", Gcra::per_second(10).build()?)?
    ///     .by(["ip"])?
    ///     .when_not("path", "/health")?;
    /// assert_eq!(api.key_for(&[("ip", "192.0.2.7"), ("path", "/health")]), None);
    /// assert!(api.key_for(&[("ip", "192.0.2.7"), ("path", "/")]).is_some());
    /// assert!(api.key_for(&[("ip", "192.0.2.7")]).is_some());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As [`when`](Self::when).
    pub fn when_not(
        self,
        identifier: &str,
        values: impl Into<ConditionValues>,
    ) -> Result<Self, ConfigError> {
        self.with_condition(identifier, values.into(), true)
    }

    fn with_condition(
        mut self,
        identifier: &str,
        values: ConditionValues,
        excludes: bool,
    ) -> Result<Self, ConfigError> {
        let in_limit = |error: ConfigError| error.in_limit(&*self.name);
        let condition = Condition::new(identifier, values, excludes).map_err(in_limit)?;
        if self.conditions.iter().any(|other| other.place() == condition.place()) {
            let twice =
                format!("`when` names {identifier:?} twice; give all of its values at once");
            return Err(in_limit(ConfigError::new(twice)));
        }
        self.conditions.push(condition);
        // By name: limits are equal in whatever order their conditions were given.
        self.conditions.sort_by(|one, other| one.place().cmp(&other.place()));
        self.check_can_be_met()?;
        Ok(self)
    }

    /// Checks that some caller meets all conditions.
    pub(super) fn check_can_be_met(&self) -> Result<(), ConfigError> {
        let Some(identifier) = unmet_by_all(&[self]) else { return Ok(()) };
        Err(ConfigError::new(format!(
            "it never applies: no request with {} has a value of {identifier:?} that meets it; change \
             `when`, or take the limit out",
            self.describe_identifiers()
        ))
        .in_limit(&*self.name))
    }

    /// The conditions under which it applies, by the names of their identifiers; none by default.
    #[must_use]
    pub fn conditions(&self) -> &[Condition] {
        &self.conditions
    }

    /// Whether a caller meets all conditions. The limit applies to it if it also has the
    /// [identifiers](Self::identifier_names).
    // Outlined, so that limits without conditions stay as small as they are.
    #[inline(never)]
    #[must_use]
    pub fn is_met_by(&self, caller: &(impl Identifiers + ?Sized)) -> bool {
        self.conditions.iter().all(|condition| condition.is_met_by(caller))
    }

    /// Whether no caller meets the conditions of this limit and of the other: one of them applies
    /// to a request, or none.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let limit = |name| Limit::new(name, Gcra::per_second(10).build()?)?.by(["ip"]);
    /// let reads = limit("reads")?.when("method", ["GET", "HEAD"])?;
    /// let writes = limit("writes")?.when_not("method", ["GET", "HEAD", "OPTIONS"])?;
    /// assert!(reads.is_apart_from(&writes) && !reads.is_apart_from(&limit("all")?));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub fn is_apart_from(&self, other: &Self) -> bool {
        unmet_by_all(&[self, other]).is_some()
    }

    /// Its identifiers and its conditions, in words: `"ip" when method = "POST"`.
    pub(crate) fn describe_identifiers(&self) -> String {
        let names: Vec<_> = self.identifier_names().map(|name| format!("{name:?}")).collect();
        let names = if names.is_empty() { "a bare key".into() } else { names.join(" and ") };
        let when = self.describe_conditions();
        if when.is_empty() { names } else { format!("{names} {when}") }
    }

    /// Its conditions in words, such as `when method = "POST" and not path = "/health"`; empty
    /// without conditions.
    #[must_use]
    pub fn describe_conditions(&self) -> String {
        let all: Vec<_> = self.conditions.iter().map(|condition| format!("{condition}")).collect();
        if all.is_empty() { String::new() } else { format!("when {}", all.join(" and ")) }
    }
}

/// The identifier of which no value meets the conditions of all these limits, though they need one.
fn unmet_by_all<A: Algorithm>(limits: &[&Limit<A>]) -> Option<String> {
    let conditions: Vec<_> = limits.iter().flat_map(|limit| &limit.conditions).collect();
    let wanted = conditions.iter().filter(|one| !one.excludes).map(|one| one.identifier());
    let mut needed = wanted.chain(limits.iter().flat_map(|limit| limit.identifier_names()));
    needed.find(|identifier| no_value_meets(&conditions, identifier)).map(Into::into)
}

/// Whether no value of this identifier meets all these conditions.
fn no_value_meets(conditions: &[&Condition], identifier: &str) -> bool {
    let of = |excludes: bool| {
        conditions
            .iter()
            .filter(move |one| one.excludes == excludes && one.identifier() == identifier)
    };
    // Of two patterns, what both match is what the narrower matches, or nothing.
    let common = |one, other| match (covers(one, other), covers(other, one)) {
        (true, _) => Some(other),
        (false, true) => Some(one),
        (false, false) => None,
    };
    let mut left = vec!["*"];
    for condition in of(false) {
        let narrowed =
            left.iter().flat_map(|one| condition.values().map(move |value| common(*one, value)));
        left = narrowed.flatten().collect();
    }
    let is_excluded =
        |one: &&str| of(true).any(|condition| condition.values().any(|value| covers(value, one)));
    left.iter().all(is_excluded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gcra;
    use alloc::string::ToString;

    fn limit() -> Limit<Gcra> {
        let limit = Limit::new("l", Gcra::per_second(1).build().expect("a limit"));
        limit.and_then(|limit| limit.by(["ip"])).expect("a name")
    }

    fn applies(limit: &Limit<Gcra>, method: Option<&str>, path: Option<&str>) -> bool {
        let named = [("ip", Some("a")), ("method", method), ("path", path)];
        let named = named.into_iter().filter_map(|(name, value)| Some((name, value?)));
        limit.key_for(&named.collect::<Vec<_>>()).is_some()
    }

    #[test]
    fn a_limit_applies_to_callers_that_have_one_of_the_values_of_each_identifier() {
        let login = limit().when("method", ["POST", "PUT"]).and_then(|it| it.when("path", "/log*"));
        let login = login.expect("conditions");
        for (method, path, due) in [
            (Some("POST"), Some("/login"), true),
            (Some("PUT"), Some("/log"), true),
            (Some("GET"), Some("/login"), false),
            (Some("POST"), Some("/lo"), false),
            (Some("POST"), Some("/Login"), false),
            (Some("POST"), None, false),
            (None, Some("/login"), false),
        ] {
            assert_eq!(applies(&login, method, path), due, "{method:?} {path:?}");
        }
        assert!(limit().conditions().is_empty());
        assert!(applies(&limit(), None, None));
    }

    #[test]
    fn each_excluded_value_excludes_and_a_missing_identifier_does_not() {
        let others =
            limit().when_not("method", "OPTIONS").and_then(|it| it.when_not("path", "/h*"));
        let others = others.expect("conditions");
        for (method, path, due) in [
            (Some("GET"), Some("/"), true),
            (None, None, true),
            (Some("OPTIONS"), Some("/"), false),
            (Some("OPTIONS"), None, false),
            (Some("GET"), Some("/health"), false),
        ] {
            assert_eq!(applies(&others, method, path), due, "{method:?} {path:?}");
        }
        let inside = limit().when("path", "/api/*").and_then(|it| it.when_not("path", "/api/ok"));
        let inside = inside.expect("conditions");
        let paths =
            ["/api/", "/api/ok", "/api/okay", "/"].map(|path| applies(&inside, None, Some(path)));
        assert_eq!(paths, [true, false, true, false]);
        let without = limit().when_not("path", "*").expect("a condition");
        assert!(applies(&without, None, None) && !applies(&without, None, Some("/")));
        let with_any = limit().when("path", "*").expect("a condition");
        assert!(!applies(&with_any, None, None) && applies(&with_any, None, Some("/")));
    }

    #[test]
    fn a_limit_without_its_key_applies_to_no_caller_whatever_its_conditions() {
        let both = limit().when("path", "/").expect("a condition");
        assert_eq!(both.key_for(&[("path", "/")]), None);
        assert_eq!(both.key_for("a"), None);
    }

    #[test]
    fn conditions_that_say_nothing_or_never_hold_are_refused_with_the_remedy() {
        let none: [&str; 0] = [];
        for (refused, says) in [
            (limit().when("a b", "x"), "an identifier in `when` must be"),
            (limit().when("path", none), "no value; name at least one"),
            (limit().when("path", ""), "is empty; write a value"),
            (limit().when("path", "/a*b"), "a * before its end"),
            (limit().when("path", ["/a", "/b", "/a"]), "is there twice"),
            (
                limit().when("path", "/a").and_then(|it| it.when("path", "/b")),
                "all of its values at once",
            ),
            (
                limit().when("path", ["/a", "/ab"]).and_then(|it| it.when_not("path", "/a*")),
                "it never applies",
            ),
            (
                limit().when_not("path", "*").and_then(|it| it.when("path", "/a*")),
                "it never applies",
            ),
            (limit().when_not("ip", "*"), "no request with \"ip\""),
            (limit().when_not("user", "*").and_then(|it| it.by(["user"])), "it never applies"),
        ] {
            let error = refused.expect_err(says);
            assert_eq!(error.limit(), Some("l"), "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
        let all: [Result<_, _>; 3] = [
            limit().when("path", "/a*").and_then(|it| it.when_not("path", ["/a", "/ab*"])),
            limit().when("path", ["/a", "/b"]).and_then(|it| it.when_not("path", "/a")),
            limit().when("ip", "192.0.2.*").and_then(|it| it.when_not("ip", "192.0.2.1")),
        ];
        assert!(all.iter().all(Result::is_ok), "{all:?}");
    }

    #[test]
    fn two_limits_are_apart_if_no_value_meets_both() {
        let of = |wanted: &[&str], excluded: &[&str]| {
            let mut limit = limit();
            if !wanted.is_empty() {
                limit = limit.when("path", wanted).expect("a condition");
            }
            if !excluded.is_empty() {
                limit = limit.when_not("path", excluded).expect("a condition");
            }
            limit
        };
        for (one, other, due) in [
            (of(&["/a"], &[]), of(&["/b"], &[]), true),
            (of(&["/a", "/b"], &[]), of(&["/b"], &[]), false),
            (of(&["/a*"], &[]), of(&["/ab*"], &[]), false),
            (of(&["/a*"], &[]), of(&["/ab*"], &["/ab"]), false),
            (of(&["/a*"], &["/ab*"]), of(&["/abc", "/ab/d*"], &[]), true),
            (of(&["/a"], &[]), of(&[], &["/a"]), true),
            (of(&[], &["/a"]), of(&[], &["/b"]), false),
            (of(&[], &["*"]), of(&["/a"], &[]), true),
            (of(&[], &[]), of(&["/a"], &[]), false),
        ] {
            assert_eq!(one.is_apart_from(&other), due, "{one:?} {other:?}");
            assert_eq!(other.is_apart_from(&one), due, "{other:?} {one:?}");
        }
        let anonymous = limit().when_not("user", "*").expect("a condition");
        let known = limit().by(["user"]).expect("an identifier");
        assert!(anonymous.is_apart_from(&known));
    }

    #[test]
    fn a_misspelt_identifier_of_a_condition_is_named() {
        let known = [Some("ip"), Some("method")];
        let misspelt = limit().when("metod", "POST").expect("a condition");
        let error = misspelt.check_identifiers(&known).expect_err("misspelt").to_string();
        assert!(error.contains("its condition names \"metod\", which no request has"), "{error}");
        assert!(error.ends_with("did you mean \"method\"?"), "{error}");
        let right = limit().when("method", "POST").expect("a condition");
        assert_eq!(right.check_identifiers(&known), Ok(()));
        let excluded = limit().when_not("pth", "/").expect("a condition");
        assert!(excluded.check_identifiers(&known).is_err());
    }

    #[test]
    fn a_share_keeps_the_conditions() {
        let all = limit().when("path", "/a").and_then(|limit| limit.when_not("user", "b"));
        let all = all.expect("conditions");
        let share = all.share(core::num::NonZeroU64::MIN).expect("a share");
        assert_eq!(share.conditions(), all.conditions());
    }
}
