//! [`OpenRounds`]: which requests go to the store at once, and which wait for their answers.
//!
//! When a wait ends, all requests of an attack arrive at once, and one answer decides most of them.
//! So they step a copy of the kept states, one after the other: requests that pass go to the store,
//! the others wait for the answers. A single flight would admit one request per round trip where
//! many may pass.
//!
//! From the first request that waits, no request joins the round, so it lasts as long as one call.
//! A request waits at most twice, because its first call may arrive up to a round trip early and be
//! denied. Then it goes only if it passes after those in flight: where a limit refills faster than
//! the store answers, no wait ends with a denial, and without that bound nearly every request of an
//! attack would reach the store.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dashmap::DashMap;
use derive_where::derive_where;
use ratelimit_core::store::{Batch, Snapshot, decide};
use ratelimit_core::{Algorithm, Verdict};
use tokio::sync::watch;
use tokio::time::timeout;

use super::kept::KeyGeneration;

/// How many requests of the same checks go to the store at once while no state is known: enough for
/// a caller that makes a few at once, who then never waits.
const UNKNOWN_AT_ONCE: usize = 4;

/// The rounds that are open.
///
/// This is the single flight of Go's `x/sync/singleflight`, but for as many requests at once as the
/// state admits: a request that would pass after those in flight goes as well, any other waits for
/// their answers.
#[derive_where(Default)]
pub(super) struct OpenRounds<A: Algorithm> {
    /// By the hash of their requests' checks.
    open: DashMap<u128, Open<A>>,
}

/// The latest round of the same checks.
struct Open<A: Algorithm> {
    round: Weak<SharedRound>,
    /// What this round leaves, and those before it which are in flight, if nothing else changes the
    /// states; `None` while these are not known.
    ahead: Option<Snapshot<A::State>>,
}

/// Requests of the same checks that are in flight together, each of which holds it. It closes when
/// the last one ends, which wakes those that wait for it. From the first that waits on, no request
/// joins it, so that it lasts no longer than their calls.
type SharedRound = watch::Sender<()>;

/// What a request does next.
pub(super) enum Turn<'r, A: Algorithm> {
    /// It goes to the store, and holds this, if there is one, until what the answer says is kept.
    Goes(Option<RoundMember<'r, A>>),
    /// It waits for the end of a round.
    Waits(RoundEnd),
    /// It may not wait any more, and does not pass after those in flight.
    Denied(Verdict),
}

/// The end of a round.
pub(super) struct RoundEnd {
    checks: u128,
    round: Weak<SharedRound>,
    ended: watch::Receiver<()>,
}

/// A request of a round. Dropping it ends the request's part, however that ends.
pub(super) struct RoundMember<'r, A: Algorithm> {
    rounds: &'r OpenRounds<A>,
    checks: u128,
    round: Option<Arc<SharedRound>>,
}

impl<A: Algorithm> OpenRounds<A> {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// The turn of a request with these keys, which would leave these states if they are known.
    pub(super) fn turn(
        &self,
        batch: &Batch<'_, A>,
        keys: &[KeyGeneration],
        mut left: Option<Snapshot<A::State>>,
        may_wait: bool,
    ) -> Turn<'_, A> {
        // Their order counts, as it does for the states.
        let checks = keys.iter().fold(0, |hash: u128, key| hash.rotate_left(1) ^ key.hash);
        let new = || Open { round: Weak::new(), ahead: None };
        let mut open = self.open.entry(checks).or_insert_with(new);
        let round = open.round.upgrade();
        if let Some(round) = &round {
            // What it does if it does not pass and may not wait.
            let refused = match (&mut left, &open.ahead) {
                (Some(left), Some(before)) => {
                    left.now = left.now.max(before.now);
                    left.states.clone_from(&before.states);
                    // The algorithm may be foreign: should it panic, the round is as it was.
                    let decided = decide(batch, left.now, left).ok();
                    decided.filter(|verdict| !verdict.allowed()).map(Turn::Denied)
                }
                // This thread holds it as well.
                (None, _) if Arc::strong_count(round) > UNKNOWN_AT_ONCE => Some(Turn::Goes(None)),
                _ => None,
            };
            if may_wait && (refused.is_some() || round.receiver_count() > 0) {
                let (round, ended) = (Arc::downgrade(round), round.subscribe());
                return Turn::Waits(RoundEnd { checks, round, ended });
            }
            if let Some(refused) = refused {
                return refused;
            }
        }
        let round = round.filter(|round| round.receiver_count() == 0).unwrap_or_default();
        *open = Open { round: Arc::downgrade(&round), ahead: left };
        Turn::Goes(Some(RoundMember { rounds: self, checks, round: Some(round) }))
    }

    /// Waits for the end of a round, and abandons one that takes too long: a caller may keep the
    /// future of a request in flight and poll it no more.
    pub(super) async fn wait(&self, mut end: RoundEnd, most: Duration) {
        // No value is ever sent.
        if timeout(most, end.ended.changed()).await.is_err() {
            let is_its = |_: &u128, open: &Open<A>| open.round.ptr_eq(&end.round);
            let _abandoned = self.open.remove_if(&end.checks, is_its);
        }
    }
}

impl<A: Algorithm> RoundMember<'_, A> {
    /// Whether requests wait for its round.
    pub(super) fn is_waited_for(&self) -> bool {
        self.round.as_ref().is_some_and(|round| round.receiver_count() > 0)
    }
}

impl<A: Algorithm> Drop for RoundMember<'_, A> {
    fn drop(&mut self) {
        let mut last = None;
        let _ended = self.rounds.open.remove_if(&self.checks, |_, open| {
            last = self.round.take().and_then(Arc::into_inner);
            open.round.strong_count() == 0
        });
        // Those that wait wake when nothing is locked any more.
        drop(last);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use ratelimit_core::algorithm::{GcraState, Step};
    use ratelimit_core::store::Check;
    use ratelimit_core::{Gcra, Limit, Timestamp};

    use super::*;

    /// Its step panics at a cost of 3.
    #[derive(Debug)]
    struct Trap(Gcra);

    impl Algorithm for Trap {
        type State = GcraState;

        fn capacity(&self) -> u64 {
            self.0.capacity()
        }

        fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
            assert!(cost != 3, "a trap");
            self.0.step(state, now, cost)
        }
    }

    #[test]
    fn a_step_that_panics_leaves_the_round_as_it_was() {
        let four = Gcra::per_hour(4).build().expect("a limit");
        let limit = Limit::new("l", Trap(four)).expect("a name");
        let rounds = OpenRounds::default();
        // What is known of the store is as of before the first.
        let turn = |cost| {
            let check = Check { limit: &limit, key: "a", cost };
            let now = Timestamp::ZERO;
            let mut left = Snapshot { now, states: vec![None] };
            if cost != 3 {
                let _ = decide(&Batch::one(&check), now, &mut left);
            }
            rounds.turn(&Batch::one(&check), &[], Some(left), true)
        };
        let _first = turn(1);
        let _next = turn(2);
        assert!(catch_unwind(AssertUnwindSafe(|| turn(3))).is_err());
        let _last = turn(1);
        assert!(matches!(turn(1), Turn::Waits(_)));
    }
}
