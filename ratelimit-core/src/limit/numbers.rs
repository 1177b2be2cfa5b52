//! At which other numbers a limit decides: those of a request, or of a record of its caller.

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::{Limit, fingerprint, state_name};
use crate::algorithms::Algorithm;
use crate::error::ConfigError;

/// Why a limit does not accept the numbers of a request.
pub(crate) type Unaccepted = &'static str;

const NO_MAX: Unaccepted = "it accepts no numbers of a request; give it the largest that it accepts: max in a document, \
                            accepts_up_to() in code";
const OTHER_STATES: Unaccepted = "they are of another algorithm or window than the limit; only rate, burst, count and debt may differ";
const TOO_LARGE: Unaccepted = "they are larger than the limit accepts; stay within its max";
const OWED_ATTEMPTS: Unaccepted = "they have a debt, and the limit counts attempts, so that denied requests would be owed; leave it out";
const OLD_LIMIT: Unaccepted = "the key, count, shadow, overridable or on_outage of the limit has changed since they were built; build \
                               them from the limits in force";

impl<A: Algorithm> Limit<A> {
    /// The same limit, to which a request may bring [numbers of its own](crate::Numbers): another
    /// rate, burst, count or debt, none larger than that of `max`. Without a `max` it accepts none.
    ///
    /// The limit's own numbers stay those of requests without any, and `max` does not bind them.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let (free, most) = (Gcra::per_second(10).build()?, Gcra::per_second(1_000).burst(2_000).build()?);
    /// let api = Limit::new("api", free)?.accepts_up_to(most)?;
    /// assert!(api.with_numbers("100/s burst 200".parse()?).is_ok());
    /// assert!(api.with_numbers("100/s burst 2001".parse()?).is_err());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A `max` of another algorithm or window; an algorithm that does not
    /// [compare numbers](Algorithm::is_within).
    pub fn accepts_up_to(mut self, max: A) -> Result<Self, ConfigError> {
        let refused = if max.state_kind() != self.algorithm.state_kind() {
            "max is of another algorithm or window than the limit; only rate, burst, count and debt may differ"
        } else if !max.is_within(&max) {
            "max has no meaning for its algorithm, which compares no numbers; implement \
             Algorithm::is_within, or leave it out"
        } else {
            self.max = Some(Box::new(max));
            return Ok(self);
        };
        Err(ConfigError::new(refused).in_limit(&*self.name))
    }

    /// The largest numbers that it [accepts](Self::accepts_up_to) of a request.
    #[must_use]
    pub fn max(&self) -> Option<&A> {
        self.max.as_deref()
    }

    /// The limit at numbers of a request, if it [accepts](Self::accepts_up_to) them. It reads and
    /// writes the states of this limit.
    ///
    /// # Errors
    /// Numbers that it does not accept: of another algorithm or window, or larger than its `max`.
    pub fn with_numbers(&self, numbers: A) -> Result<Self, ConfigError> {
        let own = self.by_algorithm(numbers)?;
        self.accepts(&own).map_err(|why| self.refuses_numbers(why))?;
        Ok(own)
    }

    /// The same limit, which looks for a [record](crate::Record) of its caller with each decision.
    /// All other limits ignore records, and refuse to have one set.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limit};
    /// let api = Limit::new("api", Gcra::per_second(10).build()?)?.overridable();
    /// assert!(api.is_overridable());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub const fn overridable(mut self) -> Self {
        self.overridable = true;
        self
    }

    /// Whether it looks for a [record](crate::Record) of its caller.
    #[inline]
    #[must_use]
    pub const fn is_overridable(&self) -> bool {
        self.overridable
    }

    /// The limit at the numbers of a [record](crate::Record), which its `max` does not bind.
    pub(crate) fn at_numbers(&self, numbers: A) -> Result<Self, ConfigError> {
        let own = self.by_algorithm(numbers)?;
        self.can_decide_by(&own).map_err(|why| self.refuses_numbers(why))?;
        Ok(own)
    }

    /// The same limit by another algorithm, without a `max`, which was that of its own.
    pub(super) fn by_algorithm(&self, algorithm: A) -> Result<Self, ConfigError> {
        // Without formatting a name: the locked batch makes a record's numbers a limit each time.
        let (state_name, fingerprint) = if algorithm.state_kind() == self.algorithm.state_kind() {
            (Arc::clone(&self.state_name), self.fingerprint)
        } else {
            let state_name = state_name(&self.name, &algorithm)?;
            let fingerprint = fingerprint(&state_name);
            (state_name, fingerprint)
        };
        Ok(Self {
            name: Arc::clone(&self.name),
            fingerprint,
            state_name,
            identifier_names: self.identifier_names.clone(),
            conditions: self.conditions.clone(),
            max: None,
            algorithm,
            ..*self
        })
    }

    fn refuses_numbers(&self, why: Unaccepted) -> ConfigError {
        ConfigError::new(alloc::format!("its other numbers: {why}")).in_limit(&*self.name)
    }

    /// Whether this limit of its name reads and writes its states.
    fn can_decide_by(&self, own: &Self) -> Result<(), Unaccepted> {
        if own.fingerprint != self.fingerprint {
            Err(OTHER_STATES)
        } else if self.would_owe_attempts(&own.algorithm) {
            Err(OWED_ATTEMPTS)
        } else {
            Ok(())
        }
    }

    /// Whether its denied requests would be owed at these numbers.
    pub(crate) fn would_owe_attempts(&self, numbers: &A) -> bool {
        self.counts_attempts && numbers.debt() > 0
    }

    /// Whether it accepts this limit of its name, which was made of it or of an earlier version.
    pub(crate) fn accepts(&self, own: &Self) -> Result<(), Unaccepted> {
        let Some(max) = &self.max else { return Err(NO_MAX) };
        // The limit in force says to whom it applies. A changed threshold of a warning counts once
        // the numbers are built anew.
        let settings = |of: &Self| (of.shadow, of.counts_attempts, of.overridable, of.on_outage);
        self.can_decide_by(own)?;
        if settings(own) != settings(self) || own.identifier_names != self.identifier_names {
            return Err(OLD_LIMIT);
        }
        if own.algorithm.is_within(max) { Ok(()) } else { Err(TOO_LARGE) }
    }
}
