//! [`Trace`]: the limits and requests on which a law is tried.

use ratelimit_core::{
    Algorithm, Batch, Check, ConfigError, Limit, Now, Op, Policy, Rate, ReservationId, Timestamp,
};

use crate::seeds::{AlgorithmKind, Scale, by_attempts};

pub(crate) mod made;
pub(crate) mod text;

/// The limits on which a law is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Limits of one algorithm; every third batch asks for several keys of one limit.
    One(AlgorithmKind),
    /// Limits of one algorithm that count attempts.
    Attempts(AlgorithmKind),
    /// Batches over several limits of any algorithms, and several keys; sometimes one of the limits counts
    /// attempts.
    Mixed,
    /// Batches over several limits that count attempts, of the algorithms that support
    /// [increment-first](AlgorithmKind::INCREMENT_FIRST) charging.
    MixedAttempts,
}

impl Scope {
    /// The single-algorithm scopes that this scope covers.
    pub(crate) fn singles(self) -> Vec<Self> {
        match self {
            Self::One(_) | Self::Attempts(_) => vec![self],
            Self::Mixed => {
                let admissions = AlgorithmKind::ALL.into_iter().map(Self::One);
                admissions.chain(AlgorithmKind::ATTEMPTS.into_iter().map(Self::Attempts)).collect()
            }
            Self::MixedAttempts => {
                AlgorithmKind::INCREMENT_FIRST.into_iter().map(Self::Attempts).collect()
            }
        }
    }

    /// The limits that `make` builds for this scope's algorithm; none for a mixed scope.
    fn made(self, make: &dyn Fn(AlgorithmKind) -> Vec<Policy>) -> Vec<Policy> {
        match self {
            Self::One(kind) => make(kind),
            Self::Attempts(kind) => make(kind).into_iter().map(by_attempts).collect(),
            Self::Mixed | Self::MixedAttempts => {
                self.singles().into_iter().flat_map(|single| single.made(make)).collect()
            }
        }
    }

    /// The limits on which the laws are tried.
    pub(crate) fn seeds(self) -> Vec<Policy> {
        self.made(&AlgorithmKind::seeds)
    }

    /// The smallest limits, whose traces can be enumerated.
    pub(crate) fn tiny(self) -> Vec<Policy> {
        self.made(&AlgorithmKind::tiny)
    }

    /// Limits that do not refill during a test.
    pub(crate) fn slow(self) -> Vec<Policy> {
        self.made(&AlgorithmKind::slow)
    }

    /// The limits with this rate.
    pub(crate) fn at_rate(self, rate: Rate, burst: u64) -> Vec<Policy> {
        self.made(&|kind| vec![kind.policy(rate, burst)])
    }
}

/// Limits, and requests to them in order of arrival.
#[derive(Clone, PartialEq, Eq)]
pub struct Trace {
    /// The limits, each with a unique name.
    pub limits: Vec<Limit<Policy>>,
    /// The requests.
    pub requests: Vec<Request>,
}

/// A batch at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct Request {
    /// The time of the request.
    pub at: Timestamp,
    /// The operation.
    pub op: Op,
    /// The checks of the batch; no pair of limit and key occurs twice.
    pub asks: Vec<Ask>,
    /// The id of the request, if it has one.
    pub id: Option<ReservationId>,
}

/// A question to one limit about one key.
#[derive(Clone, PartialEq, Eq)]
pub struct Ask {
    /// The position of the limit in its trace.
    pub limit: usize,
    /// The key.
    pub key: String,
    /// The cost.
    pub cost: u64,
}

impl Request {
    /// The caller's metadata, for limits that keep it: arbitrary bytes, sometimes none.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        let [low, next, ..] = self.at.as_us().to_le_bytes();
        if low.is_multiple_of(4) { Vec::new() } else { vec![low, 0, b'\n', next, 255] }
    }

    /// The request as a batch.
    ///
    /// # Errors
    /// The request names a key twice.
    pub(crate) fn batch<'a>(
        &self,
        checks: &'a [Check<'a, Policy>],
        metadata: &'a [u8],
    ) -> Result<Batch<'a, Policy>, ConfigError> {
        let batch = Batch::new(checks)?.op(self.op).now(Now::At(self.at)).metadata(metadata);
        Ok(match self.id {
            Some(id) if id == made::DRAWN => batch.id(id).settled_once(),
            Some(id) => batch.id(id),
            None => batch,
        })
    }
}

impl Trace {
    /// The policy of an ask's limit.
    #[must_use]
    pub fn policy(&self, ask: &Ask) -> &Policy {
        self.limits[ask.limit].algorithm()
    }

    /// Whether an ask's limit counts attempts.
    #[must_use]
    pub fn counts_attempts(&self, ask: &Ask) -> bool {
        self.policy(ask).charges_denials()
    }

    /// Every pair of limit and key in the trace, once, at cost 1.
    #[must_use]
    pub fn everybody(&self) -> Vec<Ask> {
        let mut everybody: Vec<Ask> = Vec::new();
        for ask in self.requests.iter().flat_map(|request| &request.asks) {
            if !everybody.iter().any(|known| known.limit == ask.limit && known.key == ask.key) {
                everybody.push(Ask { cost: 1, ..ask.clone() });
            }
        }
        everybody
    }

    /// The latest time of any request.
    #[must_use]
    pub fn latest(&self) -> Timestamp {
        self.requests.iter().map(|request| request.at).max().unwrap_or_default()
    }

    /// The longest time that any limit takes to recover from empty, in microseconds.
    pub(crate) fn longest_us(&self) -> u64 {
        self.limits.iter().map(|l| Scale::of(l.algorithm()).full_us).max().unwrap_or(0)
    }
}

/// The units that a limit admits at once.
pub(crate) fn capacity(limit: &Limit<Policy>) -> u64 {
    limit.algorithm().capacity()
}
