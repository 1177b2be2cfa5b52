//! [`Load`]: what a call carries, and what happens to it.

use std::any::Any;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use hashbrown::{DefaultHashBuilder, HashTable};
use ratelimit_core::{Timestamp, Verdict};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::program::TwinCheck;
use crate::records::Premise;

/// The most keys in a call, those of records included: the server needs a quarter of a millisecond
/// for them.
const MOST_KEYS: usize = 64;
/// The most states.
const MOST_STATES: usize = 2 * MOST_KEYS;
/// The most requests. If each had another cost, the server would need half a millisecond.
const MOST_REQUESTS: usize = 1_024;
/// The most states or costs of a request that need no allocation.
const FEW: usize = 2;

/// A request that waits for a call.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) limits: LimitSet,
    /// The keys on the server, each once.
    pub(crate) keys: SmallVec<[String; 1]>,
    /// What it assumes about records.
    pub(crate) premises: Box<[Premise]>,
    pub(crate) costs: SmallVec<[u64; FEW]>,
    pub(crate) deadline: Deadline,
    pub(crate) answer: Answer,
}

/// Who wants to know what happens to a request. Dropped before it was sent, it says that it was
/// not; afterwards, that its outcome is lost.
#[derive(Debug)]
pub(crate) struct Answer {
    caller: Option<oneshot::Sender<Outcome>>,
    /// Set when it is sent, for a caller that watches the clock itself.
    is_sent: Option<Arc<AtomicBool>>,
    was_sent: bool,
}

/// What happens to a request that waits. Without one, it was not sent.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Too little of its time was left, so it was not sent.
    TooLate,
    /// The task that sent it has ended, so the reply can no longer come.
    Lost,
    /// What became of its group, in which it has this place.
    Sent(Arc<GroupOutcome>, usize),
}

/// The requests of a call, in groups.
#[derive(Debug, Default)]
pub(crate) struct Load {
    /// In the order in which they came.
    pub(crate) groups: Vec<Group>,
    /// The earliest of its requests' deadlines; `None` if it carries nothing.
    pub(crate) deadline: Option<Deadline>,
    /// The last group that reads and writes a state, by the state's hash. Two states of one hash
    /// are taken for one, which parts groups and changes no decision.
    last: HashTable<(u64, usize)>,
    hasher: DefaultHashBuilder,
    keys: usize,
    states: usize,
    requests: usize,
}

/// The limits of a request, with what the script needs to know of them.
#[derive(Debug, PartialEq)]
pub(crate) struct LimitSet(pub(crate) SmallVec<[TwinCheck<'static>; 1]>);

/// Requests of the same limits, at the same numbers, for the same keys, which assume the same about
/// records. The script charges them in order, first come, first served.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) limits: LimitSet,
    /// The keys on the server, each once.
    pub(crate) keys: SmallVec<[String; 1]>,
    /// What they assume about records.
    pub(crate) premises: Box<[Premise]>,
    /// The hashes of its states.
    states: SmallVec<[u64; FEW]>,
    /// What each request costs per check.
    pub(crate) costs: Costs,
    /// Who asked for each.
    answers: SmallVec<[Answer; 1]>,
}

impl Load {
    /// Adds a request, unless its caller no longer wants it, or too little of its time is left: a
    /// call ends by the earliest deadline of its requests, so each of them knows in time whether it
    /// was charged. Returns a request for which there is no room. An empty call has room for every
    /// request.
    pub(crate) fn add(&mut self, request: Box<Waiting>, now: Instant) -> Option<Box<Waiting>> {
        let deadline = request.deadline;
        if request.answer.is_unwanted() {
            return None;
        }
        if deadline.remaining_at(now) <= deadline.given() / 4 {
            request.answer.send(Outcome::TooLate);
            return None;
        }
        if self.requests >= MOST_REQUESTS {
            return Some(request);
        }
        let state = |check: &TwinCheck<'_>| {
            self.hasher.hash_one((&request.keys[check.key - 1], &check.field))
        };
        let states: SmallVec<[u64; FEW]> = request.limits.0.iter().map(state).collect();
        // Requests that share a state are decided in the order in which they came.
        let last = states.iter().filter_map(|state| self.last_of(*state)).max();
        let is_same = |place: &usize| {
            let group = &self.groups[*place];
            group.limits == request.limits
                && group.keys == request.keys
                && group.premises == request.premises
        };
        let same = last.filter(is_same);
        // The script reads a premise as it reads a state.
        let keys = request.keys.len() + request.premises.len();
        let all = (self.keys + keys, self.states + states.len());
        if same.is_none() && self.requests > 0 && (all.0 > MOST_KEYS || all.1 > MOST_STATES) {
            return Some(request);
        }
        let Waiting { limits, keys, premises, costs, answer, .. } = *request;
        let place = same.unwrap_or_else(|| {
            (self.keys, self.states) = all;
            let (costs, answers) = (SmallVec::new(), SmallVec::new());
            self.open(Group { limits, keys, premises, states, costs, answers })
        });
        self.requests += 1;
        let earliest = |known: Deadline| if known.at() <= deadline.at() { known } else { deadline };
        self.deadline = Some(self.deadline.map_or(deadline, earliest));
        self.groups[place].costs.push(costs);
        self.groups[place].answers.push(answer);
        None
    }

    /// Adds a group, and returns its place.
    fn open(&mut self, group: Group) -> usize {
        let place = self.groups.len();
        for state in &group.states {
            match self.last.find_mut(*state, |(hash, _)| hash == state) {
                Some((_, last)) => *last = place,
                None => _ = self.last.insert_unique(*state, (*state, place), |(hash, _)| *hash),
            }
        }
        self.groups.push(group);
        place
    }

    fn last_of(&self, state: u64) -> Option<usize> {
        self.last.find(state, |(hash, _)| *hash == state).map(|(_, place)| *place)
    }

    /// How many requests it carries.
    pub(crate) const fn requests(&self) -> usize {
        self.requests
    }

    /// How many states they have.
    pub(crate) const fn states(&self) -> usize {
        self.states
    }

    /// From here on, its requests may be charged.
    pub(crate) fn depart(&mut self) {
        let answers = self.groups.iter_mut().flat_map(|group| &mut group.answers);
        answers.for_each(Answer::depart);
    }
}

impl LimitSet {
    /// Whether both are the same limits but for their numbers: each customer may have its own.
    pub(crate) fn differs_in_numbers_only(&self, other: &Self) -> bool {
        let are_alike = |(own, other): (&TwinCheck<'_>, &TwinCheck<'_>)| {
            (own.position, own.key, &own.field) == (other.position, other.key, &other.field)
                && own.twin.program == other.twin.program
                && own.twin.attempts == other.twin.attempts
        };
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(are_alike)
    }

    /// Whether its Lua may fail, after others were written.
    pub(crate) fn can_fail(&self) -> bool {
        self.0.iter().any(|check| !check.twin.program.is_built_in())
    }
}

impl Group {
    /// Whether both read and write one state.
    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        self.states.iter().any(|state| other.states.contains(state))
    }

    /// Tells its callers what became of it.
    pub(crate) fn answer(self, outcome: impl FnOnce(Costs) -> GroupOutcome) {
        let outcome = Arc::new(outcome(self.costs));
        for (place, answer) in self.answers.into_iter().enumerate() {
            answer.send(Outcome::Sent(Arc::clone(&outcome), place));
        }
    }
}

/// The costs of a group's requests.
pub(crate) type Costs = SmallVec<[SmallVec<[u64; FEW]>; 1]>;

impl Answer {
    pub(crate) const fn new(
        caller: oneshot::Sender<Outcome>,
        is_sent: Option<Arc<AtomicBool>>,
    ) -> Self {
        Self { caller: Some(caller), is_sent, was_sent: false }
    }

    fn is_unwanted(&self) -> bool {
        self.caller.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn depart(&mut self) {
        self.was_sent = true;
        if let Some(is_sent) = &self.is_sent {
            is_sent.store(true, Ordering::Release);
        }
    }

    fn send(mut self, outcome: Outcome) {
        if let Some(caller) = self.caller.take() {
            // It may have given up.
            let _ = caller.send(outcome);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(caller) = self.caller.take().filter(|_| self.was_sent) {
            let _ = caller.send(Outcome::Lost);
        }
    }
}

/// What became of the requests of a group.
#[derive(Debug)]
pub(crate) enum GroupOutcome {
    /// The script charged them.
    Charged(Charged),
    /// The call failed. The error says whether they may have been charged.
    Failed(RedisError),
    /// They were not charged, and are to be decided one by one.
    Apart,
}

/// What the script answered about a group.
#[derive(Debug)]
pub(crate) struct Charged {
    pub(crate) now: Timestamp,
    /// How many requests it admitted.
    pub(crate) admitted: u64,
    /// The states that it read.
    pub(crate) seen: Box<[u8]>,
    /// What each request costs, in order.
    pub(crate) costs: Costs,
    /// The verdict of each. The first that asks derives all, one after the other.
    pub(crate) verdicts: OnceLock<Verdicts>,
}

/// The verdicts of a group's requests, and the states that the last of them left.
pub(crate) type Verdicts = Result<(Vec<RequestVerdict>, Option<Box<dyn Any + Send + Sync>>)>;

/// The verdict of one request: a panic of its step is its own.
#[derive(Debug)]
pub(crate) enum RequestVerdict {
    Known(Result<Verdict>),
    Panicked(Mutex<Option<Box<dyn Any + Send>>>),
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_keys_of_premises_count_as_those_of_states_do() {
        let premise = |n: usize| Premise::of_none(format!("records {n}"), "api/gcra");
        for (premises, most) in [(0, MOST_KEYS), (1, MOST_KEYS / 2), (3, MOST_KEYS / 4)] {
            let (mut load, mut callers) = (Load::default(), Vec::new());
            let fits = |n: usize| {
                let (caller, outcome) = oneshot::channel();
                callers.push(outcome);
                let request = Waiting {
                    limits: LimitSet(SmallVec::new()),
                    keys: SmallVec::from_iter([format!("state {n}")]),
                    premises: (0..premises).map(premise).collect(),
                    costs: SmallVec::new(),
                    deadline: Deadline::within(Duration::from_secs(60)),
                    answer: Answer::new(caller, None),
                };
                load.add(Box::new(request), Instant::now()).is_none()
            };
            assert_eq!(
                (0..2 * MOST_KEYS).map(fits).take_while(|fits| *fits).count(),
                most,
                "{premises}"
            );
        }
    }
}
