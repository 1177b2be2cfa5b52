//! [`Trace`]: what a law is tried on.

use ratelimit_core::{
    Algorithm, Batch, Check, ConfigError, Limit, Now, Op, Policy, Rate, ReservationId, Timestamp,
};

use crate::seeds::{AlgorithmKind, Scale, by_attempts};

pub(crate) mod made;
pub(crate) mod words;

/// Which limits a law is tried on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Limits of one algorithm; in every third batch several keys of one limit.
    One(AlgorithmKind),
    /// Limits of one algorithm that count attempts.
    Attempts(AlgorithmKind),
    /// Batches over several limits of any algorithms, and several keys; now and then one of the limits
    /// counts attempts.
    Mixed,
    /// Batches over several limits that count attempts, of the algorithms that can do so
    /// [blindly](AlgorithmKind::INCREMENT_FIRST).
    MixedAttempts,
}

impl Scope {
    /// The scopes of one algorithm that it consists of.
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

    /// A limit of this scope, if it is of one algorithm, made by `make` of its kind.
    fn made(self, make: &dyn Fn(AlgorithmKind) -> Vec<Policy>) -> Vec<Policy> {
        match self {
            Self::One(kind) => make(kind),
            Self::Attempts(kind) => make(kind).into_iter().map(by_attempts).collect(),
            Self::Mixed | Self::MixedAttempts => {
                self.singles().into_iter().flat_map(|single| single.made(make)).collect()
            }
        }
    }

    /// The limits that the laws are tried on.
    pub(crate) fn seeds(self) -> Vec<Policy> {
        self.made(&AlgorithmKind::seeds)
    }

    /// The tiniest of them, of which every trace can be tried.
    pub(crate) fn tiny(self) -> Vec<Policy> {
        self.made(&AlgorithmKind::tiny)
    }

    /// Limits to which nothing comes back within the time of a test.
    pub(crate) fn slow(self) -> Vec<Policy> {
        self.made(&AlgorithmKind::slow)
    }

    /// The limits of this rate.
    pub(crate) fn at_rate(self, rate: Rate, burst: u64) -> Vec<Policy> {
        self.made(&|kind| vec![kind.policy(rate, burst)])
    }
}

/// Some limits, and requests to them in order of arrival.
#[derive(Clone, PartialEq, Eq)]
pub struct Trace {
    /// The limits, each with a name of its own.
    pub limits: Vec<Limit<Policy>>,
    /// The requests.
    pub requests: Vec<Request>,
}

/// One batch at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct Request {
    /// When.
    pub at: Timestamp,
    /// What is to be done.
    pub op: Op,
    /// Of whom: each pair of limit and key once.
    pub asks: Vec<Ask>,
    /// Under which id, if under any.
    pub id: Option<ReservationId>,
}

/// One limit asked about one key.
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
    /// What a limit that keeps metadata is told of the caller: bytes of any kind, and now and then none.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        let [low, next, ..] = self.at.as_us().to_le_bytes();
        if low.is_multiple_of(4) { Vec::new() } else { vec![low, 0, b'\n', next, 255] }
    }

    /// The batch that it is.
    ///
    /// # Errors
    /// A key named twice.
    pub(crate) fn batch<'a>(
        &self,
        checks: &'a [Check<'a, Policy>],
        metadata: &'a [u8],
    ) -> Result<Batch<'a, Policy>, ConfigError> {
        let batch = Batch::new(checks)?.op(self.op).now(Now::At(self.at)).metadata(metadata);
        Ok(self.id.map_or(batch, |id| batch.id(id)))
    }
}

impl Trace {
    /// What a limit of the trace decides by.
    #[must_use]
    pub fn policy(&self, ask: &Ask) -> &Policy {
        self.limits[ask.limit].algorithm()
    }

    /// Whether the limit of an ask counts attempts.
    #[must_use]
    pub fn counts_attempts(&self, ask: &Ask) -> bool {
        self.policy(ask).charges_denials()
    }

    /// Every pair of limit and key that is asked about, once, at cost 1.
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

    /// The longest that any limit takes to recover from empty, in microseconds.
    pub(crate) fn longest_us(&self) -> u64 {
        self.limits.iter().map(|l| Scale::of(l.algorithm()).full_us).max().unwrap_or(0)
    }
}

/// The units that a policy may admit at once.
pub(crate) fn capacity(limit: &Limit<Policy>) -> u64 {
    limit.algorithm().capacity()
}
