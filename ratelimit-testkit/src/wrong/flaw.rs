//! The flaws that a store can have.

use crate::capability::Capability;
use crate::wrong::{Fold, OwnTimeFlaw};

/// The flaw of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// The store tests `current > limit` before the increment: one request too many is admitted.
    OffByOne,
    /// GET, decide, SET: another client does the same in between.
    ReadThenWrite,
    /// INCR without EXPIRE: the key stays forever.
    LosesTheTtl,
    /// A batch that one limit denies has already been charged to the limits before it.
    ChargesTheSiblings,
    /// Every attempt enters the sorted set before the count: a client that keeps trying is never admitted
    /// again.
    ChargesTheDenied,
    /// An admitted batch is charged to its first limit only.
    ChargesOnlyTheFirst,
    /// The state has a time to live in whole seconds and no timestamp: it counts for too long.
    OutlivesItsWindow,
    /// An entry made at `t` still counts at `t + window`.
    CountsTheBoundary,
    /// The elapsed time is an unsigned difference: when the clock goes back, it is huge, and the bucket is
    /// full.
    MintsWhenTimeGoesBack,
    /// `retry_after` is truncated to whole milliseconds.
    WaitsInMilliseconds,
    /// `retry_after` is a microsecond short.
    WaitsOneShort,
    /// A peek is an acquire.
    PeekCharges,
    /// After a limit changes, what was left under the old one is available in addition to the new one.
    AddsOldAndNew,
    /// The limit is stored with the first state written under it; a changed limit has no effect.
    KeepsTheOldLimit,
    /// The interval between two units is stored in whole milliseconds: 600/s becomes 1,000/s.
    RoundsTheInterval,
    /// INCR and EXPIRE on every request: the window of a client that keeps coming never ends.
    ExtendsTheWindow,
    /// A limit that should count attempts counts admissions.
    ForgetsTheDenied,
    /// A window counts denied attempts beyond its limit, as a bare INCR does: a refund then frees nothing.
    Overfills,
    /// A request that is sent twice under one id is charged twice.
    ChargesAgain,
    /// A settled reservation can be settled again, and returns its difference twice.
    SettlesAgain,
    /// A settlement accepts whatever limits and keys it names, regardless of those that were reserved.
    SettlesHalf,
    /// A settlement returns charges even if they no longer count.
    GivesBackWhatIsPast,
    /// A renewed reservation counts as charged at its renewal, and its settlement returns what was never taken.
    RenewsTheCharge,
    /// A release is a DEL that does not check the lease's owner: a late one frees another client's lease.
    ReleasesAnyLease,
    /// A lease does not expire: that of a crashed holder lasts forever.
    LeasesNeverEnd,
    /// Renewing an expired lease revives it, even if another lease has taken its place.
    RenewsWhatIsOver,
    /// The reservation of another limit of the batch makes the renewal of a lease that has ended succeed.
    RenewsByAnother,
    /// A settled reservation is kept for an hour, even if its id was drawn for one charge.
    RemembersDrawnIds,
    /// Reservations are kept forever.
    ReservesForEver,
    /// The store clears every state before a decision at its own time.
    ForgetsByItsOwnClock,
    /// The store's own clock stands still.
    OwnClockStands,
    /// The store's own clock runs at half speed.
    OwnClockAtHalfSpeed,
    /// The store's own clock runs at twice the speed.
    OwnClockAtDoubleSpeed,
    /// The store's own clock counts whole seconds.
    OwnClockInSeconds,
    /// Peeks at the store's own time read another clock, which stands still.
    PeeksByAnotherClock,
    /// Charges at the store's own time and charges at given times have separate accounts.
    KeepsTimesApart,
    /// Reservations are forgotten at the store's own time.
    HoldsNothingByItsOwnClock,
    /// A state written at a given time is removed when it expires, without the hour of grace.
    SweepsWithoutGrace,
    /// A request reads the store's own clock before it waits for the lock, so that one which came later may be decided
    /// before it, at a later time.
    ReadsTheClockFirst,
    /// A state written at the store's own time is removed when four fifths of its time have passed.
    SweepsEarly,
    /// Decisions at the store's own time have this flaw; those at given times are right.
    AtItsOwnTime(OwnTimeFlaw),
    /// Different keys share a state if they fold to the same key.
    FoldsKeys(Fold),
    /// Limits share a state if their names differ only in case.
    FoldsLimits,
    /// The store joins the name of the limit and the key with a full stop.
    JoinsNameAndKey,
    /// A reset treats the key as a pattern: `a*` resets all keys that begin with `a`.
    ResetsByPattern,
    /// The store refuses everything that needs one of these capabilities, and drops metadata.
    Cannot(&'static [Capability]),
}
