//! [`Limit`]: an algorithm with a name, kept per identifier.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::num::{NonZeroU8, NonZeroU64};

use derive_where::derive_where;

use crate::algorithms::Algorithm;
use crate::error::{ConfigError, did_you_mean};
use crate::identifiers::Identifiers;
use crate::share::Share;

mod condition;
mod numbers;
mod step;
mod warning;

pub use condition::{Condition, ConditionValues};

/// A named algorithm. A store keeps a state per [state name](Self::state_name) and key.
///
/// ```
/// use ratelimit_core::{Gcra, Limit};
/// let per_address = Limit::new("burst", Gcra::new("10/s".parse()?, 20)?)?.by(["ip"])?;
/// assert_eq!(per_address.name(), "burst");
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[allow(clippy::struct_excessive_bools, reason = "each is a field of a document")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit<A> {
    name: Arc<str>,
    state_name: Arc<str>,
    fingerprint: u64,
    identifier_names: Vec<Box<str>>,
    conditions: Vec<Condition>,
    required: bool,
    shadow: bool,
    on_outage: Option<OnOutage>,
    counts_attempts: bool,
    warn_percent: Option<NonZeroU8>,
    overridable: bool,
    /// The largest numbers that a request may have of its own. In a box, because few limits have
    /// them.
    max: Option<Box<A>>,
    algorithm: A,
}

/// The outage behaviour of a limit: how its requests are decided while the store is unreachable. A
/// layer that wraps the store applies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnOutage {
    /// They are allowed, without a limit.
    Open,
    /// They are denied.
    Closed,
    /// They are limited in this process, by [this node's share](Limit::share) of the limit.
    Local,
}

impl OnOutage {
    /// The names in a policy document: `open`, `closed` and `local`.
    pub const NAMES: [&str; 3] = ["open", "closed", "local"];

    /// The name in a policy document.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl core::str::FromStr for OnOutage {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        [Self::Open, Self::Closed, Self::Local]
            .into_iter()
            .find(|one| one.name() == name)
            .ok_or_else(|| {
                let accepted = "\"open\", \"closed\" or \"local\"";
                ConfigError::new(format!("on_outage = {name:?} is not known; write {accepted}"))
            })
    }
}

/// The longest name of a limit or an identifier, in bytes.
const MAX_NAME_BYTES: usize = 64;

impl<A: Algorithm> Limit<A> {
    /// A limit of this name, which counts by the bare key.
    ///
    /// # Errors
    /// A name that is empty, longer than 64 bytes, or holds anything but ASCII letters, digits,
    /// `-`, `_` and `.` (it becomes a part of keys on a server). A [state
    /// kind](Algorithm::state_kind) with other characters.
    pub fn new(name: &str, algorithm: A) -> Result<Self, ConfigError> {
        checked_name(name, "a limit's name").map_err(|error| error.in_limit(name))?;
        let state_name = state_name(name, &algorithm)?;
        Ok(Self {
            name: name.into(),
            fingerprint: fingerprint(&state_name),
            state_name,
            identifier_names: Vec::new(),
            conditions: Vec::new(),
            required: false,
            shadow: false,
            on_outage: None,
            counts_attempts: false,
            warn_percent: None,
            overridable: false,
            max: None,
            algorithm,
        })
    }

    /// The same limit, which counts by the identifier of this name, such as `ip` or `user`. With
    /// several names, it counts by their combinations.
    ///
    /// # Errors
    /// A name given twice, one that could not be the name of a limit, or one that its
    /// [conditions](Self::when_not) exclude.
    pub fn by<K: AsRef<str>>(
        mut self,
        identifier_names: impl IntoIterator<Item = K>,
    ) -> Result<Self, ConfigError> {
        for kind in identifier_names {
            let kind = kind.as_ref();
            checked_name(kind, "an identifier in `key`").map_err(|e| e.in_limit(&*self.name))?;
            if self.identifier_names.iter().any(|known| **known == *kind) {
                let twice = format!("`key` names {kind:?} twice; name each identifier once");
                return Err(ConfigError::new(twice).in_limit(&*self.name));
            }
            self.identifier_names.push(kind.into());
        }
        self.check_can_be_met()?;
        Ok(self)
    }

    /// The same limit, required of every request: a request that lacks its identifiers is an error,
    /// even if other limits apply to it.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let per_user = Limit::new("user", Gcra::new("10/s".parse()?, 20)?)?.by(["user"])?.required();
    /// assert!(per_user.is_required());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub fn required(mut self) -> Self {
        self.required = true;
        self
    }

    /// Whether a request without its identifiers is an error, if it meets its
    /// [conditions](Self::when).
    #[must_use]
    pub const fn is_required(&self) -> bool {
        self.required
    }

    /// Whether it is required of this caller, and lacks an identifier.
    pub(crate) fn misses(&self, caller: &(impl Identifiers + ?Sized)) -> bool {
        self.required && self.is_met_by(caller) && self.key_for(caller).is_none()
    }

    /// The same limit in shadow mode: it decides and charges, and never denies.
    ///
    /// A [`RateLimiter`](crate::RateLimiter) decides shadow limits after the others have admitted
    /// the request, each by itself, and adds their decisions to the verdict: see
    /// [`Verdict::shadow_decisions`](crate::Verdict::shadow_decisions). An error of the store
    /// leaves a decision out. To try a limit before it is enforced, give it a name of its own.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let stricter = Limit::new("stricter", Gcra::new("5/s".parse()?, 5)?)?.shadow();
    /// assert!(stricter.is_shadow());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub const fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Whether it is in shadow mode.
    #[inline]
    #[must_use]
    pub const fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// The same limit, with what happens to requests while its store is unreachable.
    #[must_use]
    pub const fn on_outage(mut self, on_outage: OnOutage) -> Self {
        self.on_outage = Some(on_outage);
        self
    }

    /// What to answer while the store is unreachable, if chosen by [`on_outage`](Self::on_outage).
    #[must_use]
    pub const fn outage(&self) -> Option<OnOutage> {
        self.on_outage
    }

    /// The same limit as one of `nodes` nodes enforces it by itself: the shares of all nodes
    /// together admit at most what the limit admits, except those of a
    /// [`SlidingCounter`](crate::SlidingCounter), which admit up to `nodes` − 1 more. See
    /// [`Share`].
    ///
    /// ```
    /// use core::num::NonZeroU64;
    /// use ratelimit_core::{Gcra, Limit};
    /// let limit = Limit::new("api", Gcra::new("10/s".parse()?, 20)?)?;
    /// let share = limit.share(NonZeroU64::new(4).expect("not 0"))?;
    /// assert_eq!(share.algorithm(), &Gcra::new("5/2s".parse()?, 5)?);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A limit that is too small for so many nodes, by its name.
    pub fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError>
    where
        A: Share,
    {
        let algorithm = self.algorithm.share(nodes).map_err(|error| error.in_limit(&*self.name))?;
        self.by_algorithm(algorithm)
    }

    /// Checks that it counts by none but these identifiers, and that its [conditions](Self::when)
    /// name no others; `None` among them is the bare key. A limit that counts by another one never
    /// applies, and nothing shows it.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let misspelt = Limit::new("burst", Gcra::per_second(10).build()?)?.by(["kye"])?;
    /// let refused = misspelt.check_identifiers(&[Some("ip"), Some("key")]).unwrap_err().to_string();
    /// assert!(refused.ends_with("did you mean \"key\"?"), "{refused}");
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// The first identifier that is not among them.
    pub fn check_identifiers(&self, known: &[Option<&str>]) -> Result<(), ConfigError> {
        let bare = self.identifier_names.is_empty().then_some(None);
        let counted = self.identifier_names().map(Some).chain(bare);
        let counted = counted.map(|name| ("it counts by", name));
        let of_conditions = self.conditions.iter().map(|one| Some(one.identifier()));
        let mut wanted = counted.chain(of_conditions.map(|name| ("its condition names", name)));
        let unknown = wanted.find(|(_, name)| !known.contains(name));
        let Some((wants, unknown)) = unknown else { return Ok(()) };
        let in_words = |name: Option<&str>| match name {
            Some(name) => format!("{name:?}"),
            None => "a bare key".into(),
        };
        let known_words: Vec<_> = known.iter().copied().map(in_words).collect();
        let meant = match unknown {
            Some(name) => match did_you_mean(name, known.iter().copied().flatten()) {
                none if none.is_empty() => "; name one of these, or add it".into(),
                near => near,
            },
            None => "; name its identifiers, or add a bare key (to a layer by `.key(…)`)".into(),
        };
        Err(ConfigError::new(format!(
            "{wants} {}, which no request has; requests have {}{meant}",
            in_words(unknown),
            if known_words.is_empty() { "nothing".into() } else { known_words.join(", ") },
        ))
        .in_limit(&*self.name))
    }

    /// Checks that its algorithm suits a caller that `reserves` costs and settles them, or one that
    /// does not. A lease that no caller releases keeps its place until it ends.
    ///
    /// ```
    /// use ratelimit_core::{Concurrency, Limit, SlidingCounter};
    /// let jobs = Limit::new("jobs", Concurrency::new("5/30s".parse()?)?)?;
    /// assert!(jobs.check_reserving(true).is_ok() && jobs.check_reserving(false).is_err());
    /// let counted = Limit::new("api", SlidingCounter::per_minute(100).build()?)?;
    /// assert!(counted.check_reserving(true).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// It reserves, and the algorithm cannot; or it does not, and the algorithm grants leases.
    pub fn check_reserving(&self, reserves: bool) -> Result<(), ConfigError> {
        let why = match (reserves, self.algorithm.has_leases()) {
            (true, _) if self.reservation_us().is_none() => {
                "its algorithm cannot reserve a cost; take gcra, token-bucket, fixed-window or concurrency, or do not reserve"
            }
            (false, true) => {
                "it grants leases, and no request releases one, so a place is free only when its lease ends; reserve (`.reserve(…)` of a layer, or `reserve` of a limiter)"
            }
            _ => return Ok(()),
        };
        Err(ConfigError::new(why).in_limit(&*self.name))
    }

    /// The name.
    #[must_use]
    #[inline]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is its name, or the beginning of its name and `*`.
    #[must_use]
    pub fn is_named_by(&self, pattern: &str) -> bool {
        match pattern.strip_suffix('*') {
            Some(beginning) => self.name.starts_with(beginning),
            None => *self.name == *pattern,
        }
    }

    /// What its states belong to, besides a key: its name, and behind a `/` the
    /// [kind](Algorithm::state_kind) of its algorithm's states. So limits of one name whose
    /// algorithm or window differ have a state each, and those of other numbers share one.
    ///
    /// ```
    /// use ratelimit_core::{FixedWindow, Limit};
    /// let [old, new] = [10, 50].map(|count| FixedWindow::per_day(count).build());
    /// let (old, new) = (Limit::new("daily", old?)?, Limit::new("daily", new?)?);
    /// assert_eq!(old.state_name(), "daily/fixed-window/1d");
    /// assert_eq!(old.state_name(), new.state_name());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub fn state_name(&self) -> &str {
        &self.state_name
    }

    /// A hash of the [state name](Self::state_name), the same in every process. Stores mix it into
    /// the hash of a key, so that they hash the key once for all of its limits.
    #[inline]
    #[must_use]
    pub const fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The names of its identifiers; none if it counts by the bare key.
    pub fn identifier_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.identifier_names.iter().map(|kind| &**kind)
    }

    /// The algorithm.
    #[inline]
    #[must_use]
    pub const fn algorithm(&self) -> &A {
        &self.algorithm
    }

    /// The key of a caller under this limit; `None` if the limit does not apply, because the caller
    /// lacks one of the identifiers or does not meet a [condition](Self::when).
    ///
    /// A single identifier is its own key. Several are joined so that no two combinations meet.
    #[inline]
    pub fn key_for<'a>(&self, caller: &'a (impl Identifiers + ?Sized)) -> Option<Cow<'a, str>> {
        if !self.conditions.is_empty() && !self.is_met_by(caller) {
            return None;
        }
        match &*self.identifier_names {
            [] => caller.bare(),
            [name] => caller.identifier(name),
            _ => self.joined_key_for(caller).map(Cow::Owned),
        }
    }

    #[inline(never)]
    fn joined_key_for(&self, caller: &(impl Identifiers + ?Sized)) -> Option<String> {
        let mut joined = String::new();
        for (position, name) in self.identifier_names.iter().enumerate() {
            if position > 0 {
                joined.push('|');
            }
            push_escaped(&mut joined, &caller.identifier(name)?);
        }
        Some(joined)
    }
}

/// The state name of a limit of this name and algorithm. The name has no `/`.
fn state_name<A: Algorithm>(name: &str, algorithm: &A) -> Result<Arc<str>, ConfigError> {
    let kind = algorithm.state_kind();
    let plain = |b: u8| is_plain(b) || matches!(b, b'/' | b'(' | b')');
    if !kind.bytes().all(plain) {
        let other = format!(
            "the kind of its algorithm's states is {kind:?}; take the characters A-Z a-z 0-9 - _ . / ( ) only"
        );
        return Err(ConfigError::new(other).in_limit(name));
    }
    Ok(if kind.is_empty() { name.into() } else { format!("{name}/{kind}").into() })
}

/// The hash of a state's name.
///
/// Source: FNV-1a of 64 bits, then the finalizer of `MurmurHash3`, so that a change of one
/// character changes every bit with even chance. It does not resist crafted collisions: the author
/// of the limits is trusted.
const fn fingerprint(name: &str) -> u64 {
    let (bytes, mut hash, mut at) = (name.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// Appends one part of a joined key, with the separator and the escape sign escaped.
fn push_escaped(joined: &mut String, part: &str) {
    for c in part.chars() {
        match c {
            '|' => joined.push_str("\\|"),
            '\\' => joined.push_str("\\\\"),
            c => joined.push(c),
        }
    }
}

/// The error of two limits of one name.
pub(crate) fn name_is_taken(name: &str) -> ConfigError {
    ConfigError::new("two limits have this name; give each a name of its own").in_limit(name)
}

const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

fn checked_name(name: &str, what: &str) -> Result<(), ConfigError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_plain) {
        return Err(ConfigError::new(format!(
            "{what} must be 1 to {MAX_NAME_BYTES} of the characters A-Z a-z 0-9 - _ . and is {name:?}"
        )));
    }
    Ok(())
}

/// The limits of one policy: at least one, no two of one name.
///
/// With the `serde` feature it is read from a document, such as TOML:
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use ratelimit_core::{Limits, AnyAlgorithm};
/// let limits: Limits<AnyAlgorithm> = toml::from_str(r#"
///     [[limit]]
///     name      = "burst"
///     key       = ["ip"]
///     algorithm = "gcra"
///     rate      = "10/s"
///     burst     = 20
/// "#).expect("a policy");
/// assert_eq!(limits.iter().count(), 1);
/// # }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[derive_where(Clone)]
pub struct Limits<A>(Arc<[Limit<A>]>);

impl<A: Algorithm> Limits<A> {
    /// These limits, in this order.
    ///
    /// # Errors
    /// No limit at all, or two of one name.
    pub fn new(limits: impl IntoIterator<Item = Limit<A>>) -> Result<Self, ConfigError> {
        let limits: Vec<_> = limits.into_iter().collect();
        if limits.is_empty() {
            return Err(ConfigError::new("a policy needs at least one limit: add a [[limit]]"));
        }
        for (position, limit) in limits.iter().enumerate() {
            if limits[..position].iter().any(|earlier| earlier.name == limit.name) {
                return Err(name_is_taken(&limit.name));
            }
        }
        Ok(Self(limits.into()))
    }

    /// Whether these are a copy of the others, which a comparison of pointers tells.
    #[inline]
    pub(crate) fn is_copy_of(&self, others: &Self) -> bool {
        Arc::ptr_eq(&self.0, &others.0)
    }

    /// Those of these limits that have one of these names, in the order of the policy. A name that
    /// ends in `*` stands for all that begin with the rest of it, such as `search.*`.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limits};
    /// let all = Limits::builder()
    ///     .limit("burst", Gcra::per_second(10))
    ///     .limit("search.burst", Gcra::per_second(2))
    ///     .limit("search.daily", Gcra::per_day(100))
    ///     .build()?;
    /// assert_eq!(all.only(&["search.*"])?.iter().count(), 2);
    /// assert!(all.only(&["brust"]).unwrap_err().to_string().contains("did you mean \"burst\"?"));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A name that no limit has, so that nothing is unlimited because of a misspelt name; no name
    /// at all.
    pub fn only<N: AsRef<str>>(&self, names: &[N]) -> Result<Self, ConfigError>
    where
        A: Clone,
    {
        for name in names {
            if !self.iter().any(|limit| limit.is_named_by(name.as_ref())) {
                let meant = did_you_mean(name.as_ref(), self.iter().map(Limit::name));
                let none = format!("the policy has no limit {:?}{meant}", name.as_ref());
                return Err(ConfigError::new(none));
            }
        }
        let taken = |limit: &&Limit<A>| names.iter().any(|name| limit.is_named_by(name.as_ref()));
        Self::new(self.iter().filter(taken).cloned())
    }

    /// Whether a limit has this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.iter().any(|limit| limit.name() == name)
    }

    /// The limits, in the order of the policy.
    pub fn iter(&self) -> core::slice::Iter<'_, Limit<A>> {
        self.0.iter()
    }

    /// The limits as a slice.
    #[must_use]
    pub fn as_slice(&self) -> &[Limit<A>] {
        &self.0
    }
}

impl<'a, A> IntoIterator for &'a Limits<A> {
    type Item = &'a Limit<A>;
    type IntoIter = core::slice::Iter<'a, Limit<A>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gcra;

    fn limit(name: &str) -> Limit<Gcra> {
        Limit::new(name, Gcra::per_second(1).build().expect("a limit")).expect("a name")
    }

    #[test]
    fn joined_keys_of_different_callers_never_meet() {
        let both = limit("x").by(["ip", "path"]).expect("two kinds");
        let key =
            |ip, path| both.key_for(&[("ip", ip), ("path", path)]).expect("applies").into_owned();
        assert_eq!(key("1.2.3.4", "/login"), "1.2.3.4|/login");
        assert_ne!(key("a|b", "c"), key("a", "b|c"));
        assert_ne!(key("a\\", "b"), key("a", "\\b"));
        assert_ne!(key("a\\|b", "c"), key("a\\", "b|c"));
    }

    #[test]
    fn a_limit_applies_only_to_callers_with_all_its_identifiers() {
        let both = limit("x").by(["ip", "user"]).expect("two kinds");
        assert_eq!(both.key_for(&[("ip", "1.2.3.4")]), None);
        assert_eq!(both.key_for("1.2.3.4"), None);
        assert_eq!(limit("y").key_for("alice").as_deref(), Some("alice"));
        assert_eq!(limit("y").key_for(&[("ip", "1.2.3.4")]), None);
    }

    #[test]
    fn bad_names_and_twins_are_refused_by_name() {
        let gcra = *limit("x").algorithm();
        for name in ["", "a:b", "{a}", "a b", &"x".repeat(65)] {
            assert!(Limit::new(name, gcra).is_err(), "{name}");
        }
        let twice = Limits::new([limit("burst"), limit("burst")]).expect_err("twins");
        assert_eq!(twice.limit(), Some("burst"));
        assert!(Limits::<Gcra>::new([]).is_err());
        assert!(limit("x").by(["ip", "ip"]).is_err());
    }
}
