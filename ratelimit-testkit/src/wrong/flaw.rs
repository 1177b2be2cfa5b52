//! What can be wrong with a store.

use crate::capability::Capability;
use crate::wrong::{Fold, OwnTimeFlaw};

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// `if current > limit` is asked before the increment: one more gets through.
    OffByOne,
    /// GET, decide, SET: somebody else does the same in between.
    ReadThenWrite,
    /// INCR without EXPIRE: the key stays for ever.
    LosesTheTtl,
    /// A batch denied by one limit has been charged to the others before.
    ChargesTheSiblings,
    /// Every attempt goes into the sorted set, and only then are they counted: a client that keeps
    /// trying is never let in again.
    ChargesTheDenied,
    /// An admitted batch is charged to its first limit only.
    ChargesOnlyTheFirst,
    /// The state has a time to live in whole seconds, and no time of its own: it counts for longer
    /// than it should.
    OutlivesItsWindow,
    /// An entry made at `t` still counts at `t + window`.
    CountsTheBoundary,
    /// The time elapsed is an unsigned difference: when the clock goes back, it is ages, and the
    /// bucket is full.
    MintsWhenTimeGoesBack,
    /// `retry_after` is cut down to whole milliseconds.
    WaitsInMilliseconds,
    /// `retry_after` is a microsecond short.
    WaitsOneShort,
    /// A peek is an acquire.
    PeekCharges,
    /// When a limit is changed, what was left under the old one may be used up on top of the new one.
    AddsOldAndNew,
    /// The limit is kept beside the state that was first written under it, and a new one is not heard.
    KeepsTheOldLimit,
    /// The interval between two units is kept in whole milliseconds: 600/s are 1,000/s.
    RoundsTheInterval,
    /// INCR and EXPIRE, every time: the window of a client that keeps coming never ends.
    ExtendsTheWindow,
    /// A limit that is to count attempts counts what it admits.
    ForgetsTheDenied,
    /// A window counts denied attempts on beyond its limit, as a bare INCR does: what is given back then is not left.
    Overfills,
    /// What is sent twice under one id is charged twice.
    ChargesAgain,
    /// What has been settled can be settled again, and gives back twice.
    SettlesAgain,
    /// A settlement under an id settles the limits and keys that it names, whatever was reserved with them.
    SettlesHalf,
    /// What is given back at a settlement is not asked whether it still counts.
    GivesBackWhatIsPast,
    /// A reservation that is renewed counts as charged anew, and is given back where it never was taken.
    RenewsTheCharge,
    /// A release is a DEL, without a look at whose lease it is: one that comes too late frees another's.
    ReleasesAnyLease,
    /// A lease has no end of its own: that of a holder that died is held for ever.
    LeasesNeverEnd,
    /// A lease that is over comes back when it is renewed, whoever has its place.
    RenewsWhatIsOver,
    /// What is held under an id is kept for ever.
    ReservesForEver,
    /// Every state is cleared before a decision at the store's own time.
    ForgetsByItsOwnClock,
    /// The store's own clock stands still.
    OwnClockStands,
    /// The store's own clock runs at half speed.
    OwnClockAtHalfSpeed,
    /// The store's own clock runs at twice the speed.
    OwnClockAtDoubleSpeed,
    /// The store's own clock counts whole seconds.
    OwnClockInSeconds,
    /// Peeks at the store's own time ask another clock, which stands still.
    PeeksByAnotherClock,
    /// What was charged at the store's own time and what was charged at a given time are kept apart.
    KeepsTimesApart,
    /// What is held under an id is forgotten at the store's own time.
    HoldsNothingByItsOwnClock,
    /// A decision at the store's own time is wrong in this way; one at a given time is right.
    AtItsOwnTime(OwnTimeFlaw),
    /// Keys that differ are one key.
    FoldsKeys(Fold),
    /// Limits have one name whose names differ in the case of their letters.
    FoldsLimits,
    /// The name of the limit and the key are joined with a full stop.
    JoinsNameAndKey,
    /// A reset takes the key for a pattern: `a*` resets all keys that begin with an `a`.
    ResetsByPattern,
    /// Whatever needs one of these is refused, and metadata are dropped.
    Cannot(&'static [Capability]),
}
