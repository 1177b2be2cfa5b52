//! [`Decisions`]: what the limits decided, for the handler of a request.

use http::Extensions;
use ratelimit_core::{Algorithm, Decision, NamedDecisions};

/// The decisions of the limits about an admitted request: an extension of each request behind a
/// layer that [tells its handlers](crate::RateLimitLayer::tell_handlers).
///
/// Layers inside each other add to it, the outer one first. It is empty where no limit has decided.
/// It has the limits' own names, and those that clients do not see, without shadow limits.
///
/// ```
/// use axum::Extension;
/// use ratelimit_tower::Decisions;
///
/// async fn search(Extension(decisions): Extension<Decisions>) -> String {
///     match decisions.by_name("searches") {
///         Some(searches) => format!("{} of {} searches left", searches.remaining, searches.limit),
///         None => "unlimited".to_owned(),
///     }
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions(Vec<(Box<str>, Decision, bool)>);

impl Decisions {
    pub(crate) fn from_named<A: Algorithm>(decisions: NamedDecisions<'_, A>) -> Self {
        let told = decisions.map(|one| (one.name().into(), *one.decision(), one.is_warned()));
        Self(told.collect())
    }

    /// The decision of the limit of this name; `None` if that did not apply to the request.
    #[must_use]
    pub fn by_name(&self, limit: &str) -> Option<&Decision> {
        self.iter().find(|(name, _)| *name == limit).map(|(_, decision)| decision)
    }

    /// All decisions, with the names of their limits.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Decision)> {
        self.0.iter().map(|(name, decision, _)| (&**name, decision))
    }

    /// The names of the limits of which the request crosses the threshold at which they
    /// [warn](ratelimit_core::Limit::warn_at_percent).
    pub fn warned(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(.., warns)| *warns).map(|(name, ..)| &**name)
    }

    /// Adds them to those of outer layers.
    pub(crate) fn add_to(self, request: &mut Extensions) {
        request.get_or_insert_default::<Self>().0.extend(self.0);
    }
}
