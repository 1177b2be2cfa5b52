//! [`Rounds`]: which requests go to the store when a wait ends, and which wait for their answers.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::{DashMap, Entry};
use ratelimit_core::{Algorithm, Batch, Snapshot, decide};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use super::kept::Key;

/// The rounds that are open.
///
/// This is the single flight of Go's `x/sync/singleflight`, but for as many requests at once as the state admits: a request
/// that would pass after those under way goes as well, any other waits for their answers.
pub(super) struct Rounds<A: Algorithm> {
    /// By the hash of their requests' checks.
    open: DashMap<u128, Round<A>>,
    /// How many were opened.
    opened: AtomicU64,
}

/// Which round: one that was abandoned has a successor of the same checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name {
    checks: u128,
    number: u64,
}

/// Requests of the same checks that are under way together.
struct Round<A: Algorithm> {
    name: Name,
    /// What they leave, if nothing else changes the states.
    ahead: Snapshot<A::State>,
    under_way: usize,
    /// Closes when the round ends, which wakes the requests that wait for it. Once there is one, no request joins the round:
    /// it lasts no longer than the calls that are under way.
    waited_for: Option<watch::Sender<()>>,
}

/// What a request does next.
pub(super) enum Turn<'r, A: Algorithm> {
    /// It goes to the store, and holds this, if there is one, until what the answer says is kept.
    Goes(Option<UnderWay<'r, A>>),
    /// It waits for the end of a round.
    Waits(Ending),
}

/// The end of a round.
pub(super) struct Ending {
    round: Name,
    ended: watch::Receiver<()>,
}

/// A request under way. The round ends with the last of them, however that ends.
pub(super) struct UnderWay<'r, A: Algorithm> {
    rounds: &'r Rounds<A>,
    round: Name,
}

impl<A: Algorithm> fmt::Debug for Rounds<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds").field("open", &self.open.len()).finish_non_exhaustive()
    }
}

impl<A: Algorithm> Default for Rounds<A> {
    fn default() -> Self {
        Self { open: DashMap::new(), opened: AtomicU64::new(0) }
    }
}

impl<A: Algorithm> Rounds<A> {
    /// The turn of a request with these keys, which would leave these states. One that may not wait goes in any case.
    pub(super) fn turn(
        &self,
        batch: &Batch<'_, A>,
        keys: &[Key],
        left: Snapshot<A::State>,
        may_wait: bool,
    ) -> Turn<'_, A> {
        // Their order counts, as it does for the states.
        let checks = keys.iter().fold(0, |hash: u128, key| hash.rotate_left(1) ^ key.hash());
        let mut place = match self.open.entry(checks) {
            Entry::Occupied(place) => place,
            Entry::Vacant(place) => {
                let number = self.opened.fetch_add(1, Ordering::Relaxed);
                let name = Name { checks, number };
                place.insert(Round { name, ahead: left, under_way: 1, waited_for: None });
                return Turn::Goes(Some(UnderWay { rounds: self, round: name }));
            }
        };
        let round = place.get_mut();
        if round.waited_for.is_none() {
            let now = round.ahead.now.max(left.now);
            // The algorithm may be foreign: should it panic, the round is as it was.
            let mut ahead = Snapshot { now, states: round.ahead.states.clone() };
            if decide(batch, now, &mut ahead).is_ok_and(|verdict| verdict.allowed()) {
                round.ahead = ahead;
                round.under_way += 1;
                return Turn::Goes(Some(UnderWay { rounds: self, round: round.name }));
            }
        }
        if !may_wait {
            return Turn::Goes(None);
        }
        let ended = round.waited_for.get_or_insert_with(|| watch::Sender::new(())).subscribe();
        Turn::Waits(Ending { round: round.name, ended })
    }

    /// Waits for the end of a round, and ends one that takes too long: a caller may keep the future of a request under way
    /// and poll it no more. On no runtime there is no time to wait by.
    pub(super) async fn wait(&self, Ending { round, mut ended }: Ending, most: Duration) {
        if Handle::try_current().is_err() {
            return;
        }
        // No value is ever sent.
        if timeout(most, ended.changed()).await.is_err() {
            let _ended = self.open.remove_if(&round.checks, |_, open| open.name == round);
        }
    }
}

impl<A: Algorithm> Drop for UnderWay<'_, A> {
    fn drop(&mut self) {
        let Entry::Occupied(mut place) = self.rounds.open.entry(self.round.checks) else { return };
        let round = place.get_mut();
        if round.name != self.round {
            return;
        }
        round.under_way -= 1;
        if round.under_way == 0 {
            // Those that wait wake when nothing is locked any more.
            let _ended = place.remove();
        }
    }
}
