//! [`Load`]: what a flight carries, and what became of it.

use std::any::Any;
use std::hash::BuildHasher;
use std::sync::{Mutex, OnceLock};

use hashbrown::{DefaultHashBuilder, HashTable};
use ratelimit_core::{Timestamp, Verdict};
use smallvec::SmallVec;
use tokio::runtime::Handle;

use crate::error::{RedisError, Result};
use crate::flat::{Shape, TwinCheck};

/// The most keys in a flight: the server needs a quarter of a millisecond for them.
pub(crate) const MOST_KEYS: usize = 64;
/// The most states.
const MOST_STATES: usize = 2 * MOST_KEYS;
/// The most requests. If each had another cost, the server would need half a millisecond.
pub(crate) const MOST_REQUESTS: usize = 1_024;
/// The most states or costs of a request that need no allocation.
const FEW: usize = 2;

/// The requests of a flight: sets of limits, and the groups that are charged by them.
#[derive(Debug, Default)]
pub(crate) struct Load {
    pub(crate) limits: Vec<LimitSet>,
    /// In the order in which they came.
    pub(crate) groups: Vec<Group>,
    /// The last group that reads and writes a state, by the state's hash. Two states of one hash are taken for one, which
    /// parts groups and changes no decision.
    last: HashTable<(u64, usize)>,
    hasher: DefaultHashBuilder,
    keys: usize,
    states: usize,
    requests: usize,
    /// The runtimes of the callers.
    runtimes: SmallVec<[Handle; 1]>,
}

/// The limits of a request, with what the script needs to know of them.
#[derive(Debug)]
pub(crate) struct LimitSet(pub(crate) Vec<TwinCheck<'static>>);

/// Requests of the same limits for the same keys. The script charges them in order, first come, first served.
#[derive(Debug)]
pub(crate) struct Group {
    /// The place of its limits among those of the flight.
    pub(crate) limits: usize,
    /// The keys on the server, each once.
    pub(crate) keys: SmallVec<[String; 1]>,
    /// The hashes of its states.
    states: SmallVec<[u64; FEW]>,
    pub(crate) requests: SmallVec<[FlightRequest; 1]>,
}

/// A request: the cost of each check.
#[derive(Clone, Debug)]
pub(crate) struct FlightRequest {
    pub(crate) seat: usize,
    pub(crate) costs: SmallVec<[u64; FEW]>,
    runtime: usize,
}

impl Load {
    /// Adds a request. Returns the place of its group, and whether it is the first of its runtime; `None` if there is no room.
    pub(crate) fn add(
        &mut self,
        seat: usize,
        keys: &SmallVec<[String; 1]>,
        checks: &[TwinCheck<'_>],
        costs: impl Iterator<Item = u64>,
        runtime: &Handle,
    ) -> Option<(usize, bool)> {
        let is_empty = self.requests == 0;
        if self.requests >= MOST_REQUESTS {
            return None;
        }
        let known = self.limits.iter().position(|limits| limits.0 == *checks);
        let state = |check: &TwinCheck<'_>| {
            self.hasher.hash_one((&keys[check.shape.key - 1], &check.field))
        };
        let states: SmallVec<[u64; FEW]> = checks.iter().map(state).collect();
        // Requests that share a state are decided in the order in which they came.
        let last = states.iter().filter_map(|state| self.last_of(*state)).max();
        let is_same = |place: &usize| {
            let group = &self.groups[*place];
            Some(group.limits) == known && group.keys == *keys
        };
        let place = if let Some(place) = last.filter(is_same) {
            place
        } else {
            let all = (self.keys + keys.len(), self.states + checks.len());
            if !is_empty && (all.0 > MOST_KEYS || all.1 > MOST_STATES) {
                return None;
            }
            (self.keys, self.states) = all;
            let limits = known.unwrap_or_else(|| {
                self.limits.push(LimitSet(checks.iter().map(TwinCheck::to_owned).collect()));
                self.limits.len() - 1
            });
            self.open(Group { limits, keys: keys.clone(), states, requests: SmallVec::new() })
        };
        let known = self.runtimes.iter().position(|known| known.id() == runtime.id());
        let is_first = known.is_none();
        let runtime = known.unwrap_or_else(|| {
            self.runtimes.push(runtime.clone());
            self.runtimes.len() - 1
        });
        self.requests += 1;
        self.groups[place].requests.push(FlightRequest { seat, costs: costs.collect(), runtime });
        Some((place, is_first))
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

    /// The runtime of the first caller that waits: a thread drives it.
    pub(crate) fn runtime(&self, is_wanted: &dyn Fn(usize) -> bool) -> Option<&Handle> {
        let mut requests = self.groups.iter().flat_map(|group| &group.requests);
        let wanted = requests.find(|request| is_wanted(request.seat));
        self.runtimes.get(wanted?.runtime)
    }
}

impl LimitSet {
    /// The shapes of its checks.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.0.iter().map(|check| check.shape)
    }

    /// Whether its Lua may fail, after others were written.
    pub(crate) fn can_fail(&self) -> bool {
        self.0.iter().any(|check| !check.shape.program.is_built_in())
    }
}

impl Group {
    /// Whether both read and write one state.
    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        self.states.iter().any(|state| other.states.contains(state))
    }
}

/// What became of a flight.
#[derive(Debug)]
pub(crate) enum FlightOutcome {
    /// What became of each group.
    Landed(Vec<GroupOutcome>),
    /// Its sender has ended, so the replies can no longer come.
    Lost(RedisError),
    /// Its sender has ended before it departed.
    NotSent,
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
    /// The requests that were sent, in order.
    pub(crate) requests: SmallVec<[FlightRequest; 1]>,
    /// The verdict of each. The first that asks derives all, one after the other.
    pub(crate) verdicts: OnceLock<RiderVerdicts>,
}

/// The verdicts of a group's requests.
pub(crate) type RiderVerdicts = Result<(Vec<RiderVerdict>, Option<Box<dyn Any + Send + Sync>>)>;

/// The verdict of one request: a panic of its step is its own.
#[derive(Debug)]
pub(crate) enum RiderVerdict {
    Known(Result<Verdict>),
    Panicked(Mutex<Option<Box<dyn Any + Send>>>),
}
