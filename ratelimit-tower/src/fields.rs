//! [`Fields`]: the header fields of an answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{HeaderName, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Response};
use ratelimit_core::{Algorithm, Clock, ConfigError, Gcra, Limit, SystemClock};

/// The names of the fields about a limit, what remains of it and its reset: the words are between
/// this and that.
macro_rules! three_fields {
    ($before:literal, $after:literal) => {
        [
            HeaderName::from_static(concat!($before, "limit", $after)),
            HeaderName::from_static(concat!($before, "remaining", $after)),
            HeaderName::from_static(concat!($before, "reset", $after)),
        ]
    };
}

pub(crate) mod advice;
mod draft;
mod entry;
mod models;
mod older;

use crate::rejection::LimitDenial;

pub(crate) use entry::{FieldEntry, PolicyField};
pub use models::ModelFields;

/// The largest integer of a structured field (RFC 9651: 15 digits). Larger values are written as
/// this one.
const MAX_FIELD_INTEGER: u64 = 999_999_999_999_999;

/// The unit of a limit, for the `RateLimit-Policy` field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unit {
    /// Requests. The field does not name this unit.
    #[default]
    Requests,
    /// `content-bytes`: the size of bodies.
    ContentBytes,
    /// `concurrent-requests`: requests at the same time. A limit of this unit has no window.
    ConcurrentRequests,
    /// Another unit, such as `tokens`. The draft defines no other; clients that do not know it
    /// ignore the limit.
    Other(Box<str>),
}

impl Unit {
    /// As the field names it; `None` for requests.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Requests => None,
            Self::ContentBytes => Some("content-bytes"),
            Self::ConcurrentRequests => Some("concurrent-requests"),
            Self::Other(name) => Some(name),
        }
    }
}

/// The names of the older fields, and the form of the time at which the limit has recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum XRateLimit {
    /// In seconds from now.
    Seconds,
    /// As a Unix time in seconds, by the clock of this machine.
    UnixTime,
    /// In seconds, and without the `X-`: `RateLimit-Limit`, `RateLimit-Remaining` and
    /// `RateLimit-Reset` of drafts up to -06.
    Unprefixed,
}

/// The wait in a response that a limit of [`Concurrency`](ratelimit_core::Concurrency) denies.
///
/// A place is free as soon as another request ends, which no limit knows. The limit itself knows
/// only when the first lease ends, such as 30 s later. A client that honours it would wait far too
/// long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BusyWait {
    /// None: the client chooses when to retry; most clients double their waits. Such a denial has
    /// no `Retry-After`, unless another limit denied as well.
    #[default]
    Untold,
    /// This one.
    Hint(Duration),
    /// By how long requests have held their places of late (a running mean, over all callers),
    /// divided by the places: when the next one is free, if requests begin at any time. None until
    /// a request has ended. Only a layer that reserves (`RateLimitLayer::reserve`) knows it.
    Estimated,
}

/// What clients see of one limit, where that differs from the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Shown {
    name: Option<Box<str>>,
    unit: Option<Unit>,
    is_hidden: bool,
    /// Set for a limit that is no [`Lockout`](ratelimit_core::Lockout) but means abnormal usage, or
    /// the other way round.
    is_abnormal: Option<bool>,
}

/// Which header fields an answer has, and what they say of each limit.
///
/// By default every answer has `RateLimit` and `RateLimit-Policy`, and every denial has
/// `Retry-After` as well, unless the request can never be admitted, or lacks a place
/// ([`BusyWait`]). All waits are rounded up to whole seconds, so that a client that honours them is
/// admitted.
///
/// ```
/// use ratelimit_tower::{Fields, Unit, XRateLimit};
///
/// let fields = Fields::new()
///     .x_ratelimit(XRateLimit::UnixTime)
///     .unit("bandwidth", Unit::ContentBytes);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Fields {
    without_draft: bool,
    x_ratelimit: Option<XRateLimit>,
    of_models: Option<ModelFields>,
    only_denials: bool,
    pub(crate) busy_wait: BusyWait,
    jitter: Duration,
    limits: Arc<[(Box<str>, Shown)]>,
    pub(crate) partition_secret: Option<[u8; 32]>,
}

impl Fields {
    /// `RateLimit`, `RateLimit-Policy` and `Retry-After`.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same without the fields of the draft.
    pub const fn without_draft(mut self) -> Self {
        self.without_draft = true;
        self
    }

    /// The same with `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset` of the
    /// limit with the least remaining, or the same fields without `X-`.
    pub const fn x_ratelimit(mut self, reset: XRateLimit) -> Self {
        self.x_ratelimit = Some(reset);
        self
    }

    /// The same with the fields of a provider of language models.
    pub const fn model_fields(mut self, fields: ModelFields) -> Self {
        self.of_models = Some(fields);
        self
    }

    /// The same, on denials only.
    pub const fn only_on_denials(mut self) -> Self {
        self.only_denials = true;
        self
    }

    /// The same, with this wait where a limit of [`Concurrency`](ratelimit_core::Concurrency)
    /// denies.
    pub const fn busy_wait(mut self, busy_wait: BusyWait) -> Self {
        self.busy_wait = busy_wait;
        self
    }

    /// The same, where a `Retry-After` is later by a random time of up to this if all of the quota
    /// is back at that moment, as at the end of a window: not all denied clients return at once
    /// then. The waits of a bucket differ from client to client by themselves.
    pub const fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// The same, where the limit of this name has this unit. Limits of
    /// [`Concurrency`](ratelimit_core::Concurrency) have theirs by themselves.
    pub fn unit(self, limit: &str, unit: Unit) -> Self {
        self.with(limit, |shown| shown.unit = Some(unit))
    }

    /// The same, where clients do not see the limit of this name: no field describes it, and no
    /// problem names it. It denies as before, with its `Retry-After`. The other fields of such a
    /// denial describe limits that have something left, so a client has to go by `Retry-After`.
    ///
    /// ```
    /// use ratelimit_tower::Fields;
    ///
    /// // The budget in micro-cents is no customer's concern, and `burst-v2` is `burst` to them.
    /// let fields = Fields::new().hide("money").rename("burst-v2", "burst")?;
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    pub fn hide(self, limit: &str) -> Self {
        self.with(limit, |shown| shown.is_hidden = true)
    }

    /// The same, where clients know the limit of this name by another.
    ///
    /// # Errors
    /// A name that no limit could have.
    pub fn rename(self, limit: &str, name: &str) -> Result<Self, ConfigError> {
        Limit::new(name, Gcra::new("1/s".parse()?, 1)?)?;
        Ok(self.with(limit, |shown| shown.name = Some(name.into())))
    }

    /// The same, where a denial by the limit of this name means that the client behaves abnormally,
    /// such as a limit that counts failed logins: the problem type is `abnormal-usage-detected`
    /// then, and not `quota-exceeded`. A [`Lockout`](ratelimit_core::Lockout) means that by itself.
    pub fn abnormal_usage(self, limit: &str) -> Self {
        self.with(limit, |shown| shown.is_abnormal = Some(true))
    }

    /// The same, where a denial by the limit of this name means that a quota is exceeded, although
    /// it is a [`Lockout`](ratelimit_core::Lockout).
    pub fn exceeded_quota(self, limit: &str) -> Self {
        self.with(limit, |shown| shown.is_abnormal = Some(false))
    }

    /// The same with this change of what clients see of a limit.
    fn with(mut self, limit: &str, change: impl FnOnce(&mut Shown)) -> Self {
        let mut shown = self.settings_of(limit).cloned().unwrap_or_default();
        change(&mut shown);
        let others = self.limits.iter().filter(|(name, _)| **name != *limit).cloned();
        self.limits = others.chain([(limit.into(), shown)]).collect();
        self
    }

    fn settings_of(&self, limit: &str) -> Option<&Shown> {
        let mut limits = self.limits.iter();
        limits.find(|(name, _)| **name == *limit).map(|(_, shown)| shown)
    }

    /// The name by which clients know the limit of this name; `None` if they do not.
    pub(crate) fn name_of<'a>(&'a self, limit: &'a str) -> Option<&'a str> {
        match self.settings_of(limit) {
            Some(shown) if shown.is_hidden => None,
            shown => Some(shown.and_then(|shown| shown.name.as_deref()).unwrap_or(limit)),
        }
    }

    /// Whether a denial by this limit is [abnormal usage](Self::abnormal_usage).
    pub(crate) fn is_abnormal<A: Algorithm>(&self, limit: &Limit<A>) -> bool {
        let set = self.settings_of(limit.name()).and_then(|shown| shown.is_abnormal);
        set.unwrap_or_else(|| limit.algorithm().denies_abnormal_usage())
    }

    /// The wait until the end of a window, and its jitter.
    pub(crate) fn with_jitter(&self, wait_us: u64) -> u64 {
        let most_us = u64::try_from(self.jitter.as_micros()).unwrap_or(u64::MAX);
        if most_us == 0 { wait_us } else { wait_us.saturating_add(fastrand::u64(..=most_us)) }
    }

    /// The same with a partition key (`pk`), which shows a client which of its requests share a
    /// quota.
    ///
    /// It is the first 12 bytes of the keyed BLAKE3 hash, under this secret, of the limit's name
    /// and the identifiers. So a client cannot see whose key it is, and all servers of a service
    /// with the secret send the same key.
    #[cfg(feature = "partition-key")]
    pub const fn partition_key(mut self, secret: [u8; 32]) -> Self {
        self.partition_secret = Some(secret);
        self
    }

    /// The partition key of the limit for the caller with this key, if there is to be one.
    #[cfg(feature = "partition-key")]
    pub(crate) fn partition_key_of(&self, limit: &str, key: &str) -> Option<[u8; 12]> {
        let mut hasher = blake3::Hasher::new_keyed(self.partition_secret.as_ref()?);
        // A name holds no NUL, so the pair differs from every other.
        hasher.update(limit.as_bytes()).update(&[0]).update(key.as_bytes());
        hasher.finalize().as_bytes().first_chunk().copied()
    }

    /// Whether an answer has fields other than `Retry-After`.
    pub(crate) const fn tells(&self, allowed: bool) -> bool {
        let tells_some =
            !self.without_draft || self.x_ratelimit.is_some() || self.of_models.is_some();
        tells_some && !(allowed && self.only_denials)
    }

    /// The fields that describe these limits; `None` without limits.
    pub(crate) fn tell(&self, entries: &[FieldEntry<'_>]) -> Option<AnswerFields> {
        // The first of equal ones, as a verdict does.
        let shown = entries.iter().min_by_key(|entry| entry.remaining)?;
        let lists = if self.without_draft { None } else { draft::lists(entries) };
        if self.x_ratelimit.is_none() && self.of_models.is_none() {
            return Some(AnswerFields { lists, of_limits: Box::default() });
        }
        let older = self.x_ratelimit.map(|reset| {
            let (names, from_us) = match reset {
                XRateLimit::Seconds => (&PREFIXED, 0),
                XRateLimit::Unprefixed => (&UNPREFIXED, 0),
                XRateLimit::UnixTime => (&PREFIXED, SystemClock::new().now().as_us()),
            };
            let reset = |after_us| whole_seconds(from_us.saturating_add(after_us));
            let values =
                [Some(shown.limit), Some(shown.remaining), shown.reset_after_us.map(reset)];
            let values = values
                .map(|value| value.map(|value| HeaderValue::from(value.min(MAX_FIELD_INTEGER))));
            LimitFields { names: names.clone(), values, remaining: shown.remaining }
        });
        let models = self.of_models.into_iter().flat_map(|fields| {
            let now = SystemTime::now();
            entries.iter().filter_map(move |entry| fields.tell(entry, now))
        });
        Some(AnswerFields { lists, of_limits: older.into_iter().chain(models).collect() })
    }
}

/// The fields of one answer, other than `Retry-After`. They are written when the store has decided,
/// and added when there is a response.
pub(crate) struct AnswerFields {
    lists: Option<[HeaderValue; 2]>,
    /// Most answers have none.
    of_limits: Box<[LimitFields]>,
}

/// Three fields that describe one limit.
struct LimitFields {
    names: [HeaderName; 3],
    /// The limit, what remains, and the reset, if that is known.
    values: [Option<HeaderValue>; 3],
    remaining: u64,
}

static UNPREFIXED: [HeaderName; 3] = three_fields!("ratelimit-", "");
static PREFIXED: [HeaderName; 3] = three_fields!("x-ratelimit-", "");

impl AnswerFields {
    /// Adds the fields to an answer of the inner service, unless a layer in between denied the
    /// request: then the fields are its own.
    pub(crate) fn add_to<B>(self, response: &mut Response<B>) {
        if response.extensions().get::<LimitDenial>().is_none() {
            self.write_to(response.headers_mut());
        }
    }

    /// Adds the fields. Those of an inner layer stay; of those that describe one limit, the ones
    /// with less remaining do.
    pub(crate) fn write_to(self, headers: &mut HeaderMap) {
        // They are lists, and a list may have several lines.
        if let Some([policy, limit]) = self.lists {
            headers.append(draft::RATELIMIT_POLICY, policy);
            headers.append(draft::RATELIMIT, limit);
        }
        for LimitFields { names, values, remaining } in self.of_limits {
            let inner = headers.get(&names[1]);
            let inner = inner.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
            if inner.is_some_and(|inner| inner <= remaining) {
                continue;
            }
            for (name, value) in names.into_iter().zip(values) {
                match value {
                    Some(value) => headers.insert(name, value),
                    None => headers.remove(name),
                };
            }
        }
    }
}

/// Sets `Retry-After`, rounded up. A denied request waits for at least one second.
pub(crate) fn write_retry_after(retry_after_us: u64, headers: &mut HeaderMap) {
    let seconds = whole_seconds(retry_after_us).clamp(1, MAX_FIELD_INTEGER);
    headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
}

/// Whole seconds, rounded up.
const fn whole_seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

#[cfg(test)]
mod tests;
