//! [`Decider`]: decides the requests of lines, by one policy or by two.

use ratelimit_core::{Op, Policy, RateLimiter, Store};

use super::judge::{Judge, Touched};
use crate::compare::Comparison;
use crate::decision_line::{DecisionLine, push_json};
use crate::input::{BadLine, Entry};
use crate::tally::Tally;

/// Decides lines, and reuses its buffers from line to line.
pub(super) struct Decider<'r, S> {
    pub(super) this: Judge<'r, S>,
    /// The policy to compare with.
    other: Option<(Judge<'r, S>, Comparison)>,
    /// The last request's decision line, if decision lines are written.
    pub(super) line: Option<Vec<u8>>,
}

/// Why a line is skipped.
pub(super) enum Skipped {
    /// The line is not a request.
    Bad(BadLine),
    /// The line asks for an operation that the store does not support.
    Refused(BadLine),
}

/// Why a line was not decided.
pub(super) enum Refused<E> {
    Line(Skipped),
    /// The store failed.
    ByStore(E),
}

impl<'r, S: Store<Policy>> Decider<'r, S> {
    pub(super) fn new(
        limiter: &'r RateLimiter<S>,
        other: Option<&'r RateLimiter<S>>,
        nearness: bool,
        forgets: bool,
    ) -> Self {
        let other = other.map(|other| {
            (Judge::new(other, false, forgets), Comparison::new(other.limits().clone()))
        });
        Self { this: Judge::new(limiter, nearness, forgets), other, line: None }
    }

    pub(super) async fn decide(&mut self, entry: &Entry) -> Result<(), Refused<S::Error>> {
        self.this.validate(entry).map_err(|bad| Refused::Line(Skipped::Bad(bad)))?;
        if let Some((other, _)) = &self.other {
            let refused =
                |BadLine(told)| Refused::Line(Skipped::Bad(BadLine(format!("--compare: {told}"))));
            other.validate(entry).map_err(refused)?;
        }
        let verdict = self.this.decide(entry).await?;
        if let Some(line) = &mut self.line {
            line.clear();
            let limits = self.this.limiter.limits().as_slice();
            let parts = self.this.decided(entry, verdict.allowed());
            push_json(line, &DecisionLine::new(limits, &verdict, parts));
        }
        self.compare(entry, verdict.allowed()).await
    }

    /// Decides the request by the other policy as well, and counts the difference.
    async fn compare(&mut self, entry: &Entry, allowed: bool) -> Result<(), Refused<S::Error>> {
        let Some((other, comparison)) = &mut self.other else { return Ok(()) };
        let verdict = match other.decide(entry).await {
            Ok(verdict) => verdict,
            // The algorithms of the other policy lack this operation: it has no effect there.
            Err(Refused::Line(_)) => return Ok(()),
            Err(refused) => return Err(refused),
        };
        if entry.op == Op::Acquire {
            let this = self.this.decided(entry, allowed);
            let that = other.decided(entry, verdict.allowed());
            comparison.count((&self.this.tally, this), (&other.tally, that));
        }
        Ok(())
    }

    /// The counts, the keys that were used, and the same of the other policy.
    pub(super) fn finish(self) -> (Tally, Touched, Option<(Comparison, Touched)>) {
        let other = self.other.map(|(judge, mut comparison)| {
            comparison.tally = Some(judge.tally);
            (comparison, judge.touched.unwrap_or_default())
        });
        (self.this.tally, self.this.touched.unwrap_or_default(), other)
    }
}
