//! The laws by name, and the report of a broken one.

use std::fmt;

use crate::trace::text::raw;

/// A law that every algorithm keeps on every backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Law {
    /// 1: In every window that the algorithm defines, admissions never exceed its bound.
    Safety,
    /// 2: A request is denied only if it does not fit.
    NoFalseDenial,
    /// 3: `retry_after` and `reset_after` are exact to the microsecond.
    HonestRetry,
    /// 4: A denial charges nothing, in any limit of the batch; limits that count attempts charge
    /// each attempt.
    DenialChargesNothing,
    /// 5: An expired state decides as an absent one.
    ExpiredIsAbsent,
    /// 6: A time before the state's timestamp creates no capacity and never panics.
    TimeGoingBack,
    /// 7: A batch charges every limit or none; limits that count attempts always charge.
    AllOrNothing,
    /// 8: Cost 0 and peeks change nothing and report what the next request would see.
    CostZeroIsAPeek,
    /// 9: Everything that is written disappears by itself soon after it stops mattering.
    NothingLeaks,
    /// 10: The same trace gives the same decisions, field by field, and the same states.
    OneAnswerEverywhere,
    /// 11: A state written under an old limit admits no more than the new limit's capacity, and
    /// blocks no longer than the new limit takes to recover from empty.
    ChangingALimit,
    /// 12: The generic cell rate algorithm decides as a bucket that counts tokens.
    BucketOfTokens,
    /// 13: A charge under an id is made once and settled once, however often the request is sent. A
    /// reservation that is never settled stays charged; a lease expires by itself.
    SettledOnce,
    /// 14: All of these hold at the store's own time, too: its clock keeps time, and a charge made
    /// by it counts until it expires by it.
    OwnClock,
}

impl Law {
    /// The law's number in the list of laws.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }
}

impl fmt::Display for Law {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "law {} ({self:?})", self.number())
    }
}

/// The outcome of a law: `Ok`, or how it was broken.
pub(crate) type LawResult = Result<(), String>;

/// Fails with this message unless the condition is true.
pub(crate) fn ensure(holds: bool, message: impl FnOnce() -> String) -> LawResult {
    if holds { Ok(()) } else { Err(message()) }
}

/// A law that a store or an algorithm has broken: how, and on which case.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The broken law.
    pub law: Law,
    /// The request, the answer, and the answer that was expected.
    pub message: String,
    /// The smallest failing case, in text that [`regression`](crate::regression) or
    /// [`algorithm_regression`](crate::algorithm_regression) reads; empty if the property has no
    /// input.
    pub case: String,
    /// The beginning of the call that tries the case again, up to the case.
    pub(crate) again: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { law, message, case, again } = self;
        write!(f, "{law} is broken: {message}")?;
        if case.is_empty() {
            return Ok(());
        }
        write!(
            f,
            "\n\non the case\n{case}\nTo keep it as a test, with your harness (`NAME::Limits` for one by \
             `algorithm_conformance!(NAME, …)`):\n\nratelimit_testkit::{again}, {});\n",
            raw(case)
        )
    }
}

impl std::error::Error for Failure {}
