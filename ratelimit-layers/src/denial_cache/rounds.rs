//! [`Rounds`]: which requests go to the store at once, and which wait for their answers.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::{DashMap, Entry};
use ratelimit_core::{Algorithm, Batch, Snapshot, Verdict, decide};
use tokio::sync::watch;
use tokio::time::timeout;

use super::kept::Key;

/// How many requests of the same checks go to the store at once while no state is known: enough for a caller that makes a few
/// at once, who then never waits.
const UNKNOWN_AT_ONCE: usize = 4;

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
    /// What they leave, if nothing else changes the states; `None` while these are not known.
    ahead: Option<Snapshot<A::State>>,
    under_way: usize,
    /// Is told when the round ends, and closes when it is abandoned: both wake the requests that wait for it. Once there is one,
    /// no request joins the round that may wait: it lasts no longer than the calls that are under way.
    waited_for: Option<watch::Sender<()>>,
}

/// What a request does next.
pub(super) enum Turn<'r, A: Algorithm> {
    /// It goes to the store, and holds this, if there is one, until what the answer says is kept.
    Goes(Option<UnderWay<'r, A>>),
    /// It waits for the end of a round.
    Waits(Ending),
    /// It may not wait any more, and does not pass after those under way.
    Denied(Verdict),
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
    /// The turn of a request with these keys, which would leave these states if they are known.
    pub(super) fn turn(
        &self,
        batch: &Batch<'_, A>,
        keys: &[Key],
        left: Option<Snapshot<A::State>>,
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
        // Why it does not pass, where states are known; and what the round leaves if it goes.
        let (mut passes, mut denied, mut ahead) = (true, None, left);
        match (&mut ahead, &round.ahead) {
            (Some(left), Some(before)) => {
                left.now = left.now.max(before.now);
                left.states.clone_from(&before.states);
                // The algorithm may be foreign: should it panic, the round is as it was.
                let verdict = decide(batch, left.now, left).ok();
                denied = verdict.filter(|verdict| !verdict.allowed());
                passes = denied.is_none();
            }
            (Some(_), None) => {}
            (None, _) => passes = round.under_way < UNKNOWN_AT_ONCE,
        }
        if passes && !(may_wait && round.waited_for.is_some()) {
            round.ahead = ahead;
            round.under_way += 1;
            return Turn::Goes(Some(UnderWay { rounds: self, round: round.name }));
        }
        if may_wait {
            let ended = round.waited_for.get_or_insert_with(|| watch::Sender::new(())).subscribe();
            return Turn::Waits(Ending { round: round.name, ended });
        }
        denied.map_or(Turn::Goes(None), Turn::Denied)
    }

    /// Waits for the end of a round, and ends one that takes too long: a caller may keep the future of a request under way
    /// and poll it no more. Returns whether it ended by itself.
    pub(super) async fn wait(&self, Ending { round, mut ended }: Ending, most: Duration) -> bool {
        let Ok(told) = timeout(most, ended.changed()).await else {
            let _abandoned = self.open.remove_if(&round.checks, |_, open| open.name == round);
            return false;
        };
        told.is_ok()
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
            let ended = place.remove();
            if let Some(waited_for) = ended.waited_for {
                waited_for.send_replace(());
            }
        }
    }
}
