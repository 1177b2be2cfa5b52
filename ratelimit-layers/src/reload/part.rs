//! [`Part`]: those limits of a [`Reload`] that one user of it takes, such as a layer in front of a
//! service.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use derive_where::derive_where;
use ratelimit_core::{Algorithm, AnyAlgorithm, ConfigError, Limits, RateLimiter, Store};

use super::{Reload, ReloadState};
use crate::lock;

/// Those limits of a [`Reload`] that one user of it takes, such as a layer in front of a service.
/// `Part::from(&reload)` has all.
///
/// See [`Reload::part`].
#[derive_where(Clone, Debug)]
pub struct Part<S, A = AnyAlgorithm> {
    reload: Reload<S, A>,
    /// `None` for all limits.
    names: Option<Arc<[Box<str>]>>,
    #[derive_where(skip(Debug))]
    latest: Arc<ArcSwapOption<Latest<S, A>>>,
}

/// The part of the limits that were in force when it was asked for last.
struct Latest<S, A> {
    whole: Arc<RateLimiter<Arc<S>, A>>,
    part: Arc<RateLimiter<Arc<S>, A>>,
}

impl<S, A> From<&Reload<S, A>> for Part<S, A> {
    fn from(reload: &Reload<S, A>) -> Self {
        Self { reload: reload.clone(), names: None, latest: Arc::default() }
    }
}

impl<S: Store<A>, A: Algorithm + Clone + PartialEq> Reload<S, A> {
    /// The limits of these names, for one of several users of one policy, such as the layers of a
    /// service. A name that ends in `*` matches all that begin with the rest of it.
    ///
    /// From then on a policy without one of these names is refused, and so is one with a limit that
    /// is in no part: it would limit nothing. Users of a part see a new policy with their next
    /// request.
    ///
    /// ```
    /// use ratelimit_core::{Limits, AnyAlgorithm};
    /// use ratelimit_layers::Reload;
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let policy = |name: &str| {
    ///     let limit = |name| format!("[[limit]]\nname = '{name}'\nalgorithm = 'gcra'\nrate = '10/s'\n");
    ///     limit("all") + &limit(name)
    /// };
    /// let limits: Limits<AnyAlgorithm> = toml::from_str(&policy("search.burst"))?;
    /// let reload = Reload::new(limits, MemoryStore::new());
    /// let (all, searches) = (reload.part(["all"])?, reload.part(["search.*"])?);
    /// assert_eq!(searches.limiter().limits().iter().count(), 1);
    ///
    /// assert!(reload.read(&policy("serach.burst")).is_err());
    /// assert!(reload.read(&policy("search.daily")).is_ok());
    /// # drop(all);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`check_parts`](Self::check_parts) checks the limits in force, once all parts are made.
    ///
    /// # Errors
    /// A name that no limit has.
    pub fn part<N: AsRef<str>>(
        &self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<Part<S, A>, ConfigError> {
        let names: Arc<[Box<str>]> = names.into_iter().map(|name| name.as_ref().into()).collect();
        let requirement = Requirement { names: Some(names.clone()), user: None };
        let mut state = lock(&self.shared.state);
        requirement.check(self.shared.limiter.load().limits())?;
        state.require(requirement);
        Ok(Part { names: Some(names), ..Part::from(self) })
    }

    /// Checks the limits in force as a new policy is checked, for the start of a program that has
    /// made all parts.
    ///
    /// # Errors
    /// A limit that is in no part; one that counts by an identifier that its part does not have.
    pub fn check_parts(&self) -> Result<(), ConfigError> {
        let state = lock(&self.shared.state);
        check(self.shared.limiter.load().limits(), &state.requirements)
    }
}

impl<S: Store<A>, A: Algorithm + Clone + PartialEq> Part<S, A> {
    /// The limiter of the moment. Decide a whole request by it, and [name](RateLimiter::named) its
    /// verdict by it.
    #[must_use]
    pub fn limiter(&self) -> Arc<RateLimiter<Arc<S>, A>> {
        let whole = self.reload.limiter();
        let Some(names) = &self.names else { return whole };
        if let Some(latest) = &*self.latest.load()
            && Arc::ptr_eq(&latest.whole, &whole)
        {
            return Arc::clone(&latest.part);
        }
        // No policy without these names is in force.
        let Ok(limits) = whole.limits().only(names) else { return whole };
        let part = Arc::new(whole.with_limits(limits));
        self.latest.store(Some(Arc::new(Latest { whole, part: Arc::clone(&part) })));
        part
    }

    /// Refuses, from now on, policies with a limit of this part that counts by any other identifier
    /// than these, of which `None` is the bare key; or whose algorithm does not suit a user that
    /// `reserves` costs, or one that does not.
    ///
    /// # Errors
    /// A limit in force that is, or does not.
    pub fn require(&self, known: &[Option<&str>], reserves: bool) -> Result<(), ConfigError> {
        let mut known: Vec<_> = known.iter().map(|name| name.map(Into::into)).collect();
        known.sort_unstable();
        let requirement = Requirement { names: self.names.clone(), user: Some((known, reserves)) };
        let mut state = lock(&self.reload.shared.state);
        let met = requirement.check(self.reload.shared.limiter.load().limits());
        state.require(requirement);
        met
    }
}

impl<A> ReloadState<A> {
    fn require(&mut self, requirement: Requirement) {
        if !self.requirements.contains(&requirement) {
            self.requirements.push(requirement);
        }
    }
}

/// What a part requires of the limits.
#[derive(PartialEq)]
pub(super) struct Requirement {
    names: Option<Arc<[Box<str>]>>,
    /// The identifiers that the part's user has, and whether it reserves.
    user: Option<(Vec<Option<Box<str>>>, bool)>,
}

impl Requirement {
    fn takes<A: Algorithm>(&self, limit: &ratelimit_core::Limit<A>) -> bool {
        let Some(names) = &self.names else { return true };
        names.iter().any(|name| limit.is_named_by(name))
    }

    fn check<A: Algorithm + Clone>(&self, limits: &Limits<A>) -> Result<(), ConfigError> {
        if let Some(names) = &self.names {
            limits.only(names)?;
        }
        let Some((known, reserves)) = &self.user else { return Ok(()) };
        let known: Vec<_> = known.iter().map(Option::as_deref).collect();
        let mut taken = limits.iter().filter(|limit| self.takes(limit));
        taken.try_for_each(|limit| {
            limit.check_identifiers(&known)?;
            limit.check_reserving(*reserves)
        })
    }
}

/// Checks that these limits are what all parts require, and that each limit is in one, if there are
/// parts.
pub(super) fn check<A: Algorithm + Clone>(
    limits: &Limits<A>,
    requirements: &[Requirement],
) -> Result<(), ConfigError> {
    requirements.iter().try_for_each(|requirement| requirement.check(limits))?;
    let is_taken = |limit| requirements.iter().any(|requirement| requirement.takes(limit));
    match limits.iter().find(|limit| !is_taken(limit)) {
        Some(limit) if !requirements.is_empty() => {
            let parts = requirements.iter().filter_map(|requirement| requirement.names.as_deref());
            let names: BTreeSet<_> = parts.flatten().map(|name| format!("{name:?}")).collect();
            let names: Vec<_> = names.into_iter().collect();
            let no_part = format!(
                "no part of the policy has it, so it would limit nothing; the parts have {}",
                names.join(", ")
            );
            Err(ConfigError::new(no_part).in_limit(limit.name()))
        }
        _ => Ok(()),
    }
}
