//! [`Trace`]: the limits and requests on which a law is tried.

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Algorithm, ConfigError, Limit, ReservationId, Timestamp};

pub(crate) mod made;
mod seldom;
pub(crate) mod text;

/// Limits, and requests to them in order of arrival.
pub(crate) struct Trace<A> {
    /// The limits. Of several with one name, each is what the limit was changed to.
    pub(crate) limits: Vec<Limit<A>>,
    /// The limits as text, as a policy document or their harness has them.
    pub(crate) texts: Vec<String>,
    pub(crate) requests: Vec<TraceRequest>,
}

/// A batch at one moment.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct TraceRequest {
    pub(crate) at: Timestamp,
    pub(crate) op: Op,
    /// The checks of the batch; no name of a limit and key occur twice together.
    pub(crate) asks: Vec<Ask>,
    pub(crate) id: Option<ReservationId>,
}

/// A question to one limit about one key.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Ask {
    /// The position of the limit in its trace.
    pub(crate) limit: usize,
    pub(crate) key: String,
    pub(crate) cost: u64,
}

impl TraceRequest {
    /// An operation without an id on one key.
    pub(crate) fn one(at: Timestamp, op: Op, ask: Ask) -> Self {
        Self { at, op, asks: vec![ask], id: None }
    }

    /// The caller's metadata, for limits that keep it: arbitrary bytes, often none.
    pub(crate) fn metadata(&self) -> Vec<u8> {
        let [low, next, ..] = self.at.as_us().to_le_bytes();
        if low.is_multiple_of(2) { Vec::new() } else { vec![low, 0, b'\n', next, 255] }
    }

    /// The request's checks of these limits.
    pub(crate) fn checks<'a, A>(&'a self, limits: &'a [Limit<A>]) -> Vec<Check<'a, A>> {
        let check =
            |ask: &'a Ask| Check { limit: &limits[ask.limit], key: &ask.key, cost: ask.cost };
        self.asks.iter().map(check).collect()
    }

    /// The request as a batch of these checks.
    ///
    /// # Errors
    /// The request names a key twice.
    pub(crate) fn batch<'a, A: Algorithm>(
        &self,
        checks: &'a [Check<'a, A>],
        metadata: &'a [u8],
    ) -> Result<Batch<'a, A>, ConfigError> {
        let batch = Batch::new(checks)?.op(self.op).now(Now::At(self.at)).metadata(metadata);
        Ok(match self.id {
            Some(id) if id == made::DRAWN => batch.id(id).settled_once(),
            Some(id) => batch.id(id),
            None => batch,
        })
    }
}

impl<A> Trace<A> {
    /// Every pair of limit and key in the trace, once, at cost 0.
    pub(crate) fn everybody(&self) -> Vec<Ask> {
        let mut everybody: Vec<Ask> = Vec::new();
        for ask in self.requests.iter().flat_map(|request| &request.asks) {
            let ask = Ask { cost: 0, ..ask.clone() };
            if !everybody.contains(&ask) {
                everybody.push(ask);
            }
        }
        everybody
    }

    /// The latest time of any request.
    pub(crate) fn latest(&self) -> Timestamp {
        self.requests.iter().map(|request| request.at).max().unwrap_or_default()
    }
}
