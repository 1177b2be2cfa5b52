//! The search for a sequential order: Wing and Gong's depth-first search with Lowe's memoization of
//! visited states.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Check, Op, Reservation, Standing, States, decide};
use ratelimit_core::{Algorithm, Decision, ErrorKind, Limit, Record, ReservationId, Timestamp};

use super::{Entry, Event, LimitKey, RecordChange};
use crate::pure::fingerprint;

/// The first of these limits that has the states of this one: itself, or one of other numbers.
pub(super) fn state_of<A: Algorithm>(limits: &[Limit<A>], limit: usize) -> usize {
    let name = limits[limit].state_name();
    limits.iter().position(|other| other.state_name() == name).unwrap_or(limit)
}

/// The result of a search.
pub(super) enum SearchOutcome {
    Order,
    /// No order; the bits are the requests of the longest order found before the search got stuck.
    None(u128),
    OutOfSteps,
}

/// Searches for an order of these requests and changes of records, which are sorted by the time of
/// asking.
pub(super) fn search<A: Algorithm<State: PartialEq>>(
    limits: &[Limit<A>],
    records: &[Record<A>],
    times: &[Timestamp],
    events: &[Entry<'_>],
    steps: usize,
) -> SearchOutcome {
    let states: Vec<_> = (0..limits.len()).map(|limit| state_of(limits, limit)).collect();
    let (states, tried) = (&states[..], HashMap::new());
    let mut search =
        Search { limits, records, states, times, events, tried, longest: 0, left: steps };
    let none = StoreStates { states: Vec::new(), reservations: Vec::new(), records: Vec::new() };
    match search.explain(0, none) {
        Some(true) => SearchOutcome::Order,
        Some(false) => SearchOutcome::None(search.longest),
        None => SearchOutcome::OutOfSteps,
    }
}

/// When a request was answered. One whose answer is unknown may take effect at any later time.
fn answer_time(entry: Entry<'_>) -> u64 {
    match entry {
        Entry::Asked(event) if event.is_indeterminate() => u64::MAX,
        Entry::Asked(event) => event.answered,
        Entry::Changed(change) => change.answered,
    }
}

/// The states of a store, sorted by limit and key, so that equal contents compare equal.
#[derive(Clone, PartialEq)]
struct StoreStates<S> {
    states: Vec<(LimitKey, S)>,
    reservations: Vec<((LimitKey, ReservationId), Reservation)>,
    /// By position.
    records: Vec<(LimitKey, usize)>,
}

/// Finds a limit and key in entries that they sort.
fn get<P: Ord, T>(all: &[(P, T)], limit_key: &P) -> Result<usize, usize> {
    all.binary_search_by(|(other, _)| other.cmp(limit_key))
}

fn put<P: Ord, T>(all: &mut Vec<(P, T)>, limit_key: P, thing: T) {
    match get(all, &limit_key) {
        Ok(position) => all[position].1 = thing,
        Err(position) => all.insert(position, (limit_key, thing)),
    }
}

/// The states as one request sees them.
struct EventView<'e, S> {
    event: &'e Event,
    /// By limit the first that has its states.
    states: &'e [usize],
    known: StoreStates<S>,
}

impl<S> EventView<'_, S> {
    fn limit_key(&self, position: usize) -> LimitKey {
        let (limit, key, _) = self.event.asks[position];
        (self.states[limit], key)
    }
}

impl<S> States<S> for EventView<'_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        let found = get(&self.known.states, &self.limit_key(position)).ok()?;
        Some(&self.known.states[found].1)
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let limit_key = self.limit_key(position);
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => put(&mut self.known.states, limit_key, state),
            Write::Remove => self.known.states.retain(|(other, _)| *other != limit_key),
        }
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        let limit_key = (self.limit_key(position), self.event.id?);
        let found = get(&self.known.reservations, &limit_key).ok()?;
        Some(self.known.reservations[found].1.clone())
    }

    fn fingerprint(&self) -> u64 {
        let limit_keys: Vec<_> =
            (0..self.event.asks.len()).map(|position| self.limit_key(position)).collect();
        fingerprint(&limit_keys)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, _expires: Timestamp) {
        if let Some(id) = self.event.id {
            let limit_key = self.limit_key(position);
            put(&mut self.known.reservations, (limit_key, id), reservation);
        }
    }
}

struct Search<'h, A: Algorithm> {
    limits: &'h [Limit<A>],
    records: &'h [Record<A>],
    /// By limit the first that has its states.
    states: &'h [usize],
    times: &'h [Timestamp],
    events: &'h [Entry<'h>],
    /// The visited configurations: the requests placed so far, and the states after them, by a hash
    /// of what these decide. Requests that could have come at many times leave thousands of
    /// different states.
    tried: HashMap<(u128, u64), Vec<StoreStates<A::State>>>,
    longest: u128,
    left: usize,
}

impl<A: Algorithm<State: PartialEq>> Search<'_, A> {
    /// Whether the remaining requests can be ordered. `None` if the search has exceeded its step
    /// limit.
    fn explain(&mut self, mut come: u128, known: StoreStates<A::State>) -> Option<bool> {
        // A request that can never change anything may come first if its answer fits now: the
        // others still find the same states.
        while let Some(position) = self.changing_nothing(come, &known) {
            come |= 1 << position;
        }
        if come.count_ones() > self.longest.count_ones() {
            self.longest = come;
        }
        if come.count_ones() as usize == self.events.len() {
            return Some(true);
        }
        let configuration = (come, self.hash(&known));
        if self.tried.get(&configuration).is_some_and(|tried| tried.contains(&known)) {
            return Some(false);
        }
        self.left = self.left.checked_sub(1)?;
        for position in self.next(come) {
            // Different times may lead to the same states.
            let mut outcomes: Vec<_> = self.outcomes(self.events[position], &known).collect();
            outcomes.dedup();
            for after in outcomes {
                if self.explain(come | (1 << position), after)? {
                    return Some(true);
                }
            }
        }
        self.tried.entry(configuration).or_default().push(known);
        Some(false)
    }

    /// A hash of what states decide at the ends of the run. A state need not be `Hash`.
    fn hash(&self, known: &StoreStates<A::State>) -> u64 {
        let mut hasher = DefaultHasher::new();
        known.records.hash(&mut hasher);
        for ((limit, key), state) in &known.states {
            for at in self.times.first().into_iter().chain(self.times.last()) {
                let decision = self.limits[*limit].algorithm().step(Some(state), *at, 0).decision;
                (key, decision.remaining, decision.reset_after_us).hash(&mut hasher);
            }
        }
        hasher.finish()
    }

    /// The requests that may come next: those asked before any other remaining request was
    /// answered. They are tried in the order of their answers, which is usually right and takes a
    /// tenth of the steps.
    fn next(&self, come: u128) -> Vec<usize> {
        let left = || (0..self.events.len()).filter(|position| come & (1 << position) == 0);
        let first_answer = left().map(|position| answer_time(self.events[position])).min();
        let by = first_answer.unwrap_or(u64::MAX);
        let mut next: Vec<_> =
            left().filter(|position| self.events[*position].asked() < by).collect();
        next.sort_unstable_by_key(|position| answer_time(self.events[*position]));
        next
    }

    fn changing_nothing(&self, come: u128, known: &StoreStates<A::State>) -> Option<usize> {
        let fits = |position: &usize| {
            let event = self.events[*position];
            !self.may_write(event) && self.outcomes(event, known).next().is_some()
        };
        self.next(come).into_iter().find(fits)
    }

    /// Whether a request with this answer can have changed anything, wherever in the order it came.
    fn may_write(&self, entry: Entry<'_>) -> bool {
        let event = match entry {
            Entry::Asked(event) => event,
            Entry::Changed(change) => return change.is_done,
        };
        let Ok(decisions) = &event.answer else { return event.is_indeterminate() };
        let counts = |(limit, ..): &(usize, usize, u64)| self.limits[*limit].counts_attempts();
        match event.op {
            Op::Peek => false,
            Op::Acquire => {
                decisions.iter().all(|each| each.allowed) || event.asks.iter().any(counts)
            }
            _ => true,
        }
    }

    /// The states that a request may leave if it comes next and gets its recorded answer.
    fn outcomes<'o>(
        &'o self,
        entry: Entry<'o>,
        known: &'o StoreStates<A::State>,
    ) -> Box<dyn Iterator<Item = StoreStates<A::State>> + 'o> {
        let (Entry::Asked(Event { clock: [from, to], .. })
        | Entry::Changed(RecordChange { clock: [from, to], .. })) = entry;
        let begin = self.times.partition_point(|time| time < from);
        let times = self.times[begin..].iter().take_while(move |time| *time <= to);
        let event = match entry {
            Entry::Asked(event) => event,
            Entry::Changed(change) => {
                return Box::new(times.filter_map(|now| self.changed(change, known, *now)));
            }
        };
        let unknown = event.is_indeterminate();
        let decided = times.filter_map(move |now| {
            let mut view = EventView { event, states: self.states, known: known.clone() };
            let answer = self.decide_event(&mut view, *now);
            (unknown || answer == event.answer).then_some(view.known)
        });
        Box::new(unknown.then(|| known.clone()).into_iter().chain(decided))
    }

    /// What a change of a record leaves if it comes next, at this time, and gets its answer.
    fn changed(
        &self,
        change: &RecordChange,
        known: &StoreStates<A::State>,
        now: Timestamp,
    ) -> Option<StoreStates<A::State>> {
        let limit_key = (self.states[change.limit], change.key);
        let stands = get(&known.records, &limit_key).ok().map(|found| known.records[found].1);
        let stands = stands.filter(|record| self.records[*record].stands_at(now));
        if (stands == change.before) != change.is_done {
            return None;
        }
        let mut after = known.clone();
        match change.after {
            _ if !change.is_done => {}
            Some(record) => put(&mut after.records, limit_key, record),
            None => after.records.retain(|(other, _)| *other != limit_key),
        }
        Some(after)
    }

    fn decide_event(
        &self,
        view: &mut EventView<'_, A::State>,
        now: Timestamp,
    ) -> Result<Vec<Decision>, ErrorKind> {
        let event = view.event;
        let names: Vec<String> = event.asks.iter().map(|(_, key, _)| key.to_string()).collect();
        let checks: Vec<_> = event
            .asks
            .iter()
            .zip(&names)
            .map(|((limit, _, cost), key)| Check { limit: &self.limits[*limit], key, cost: *cost })
            .collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(event.op);
        let batch = event.id.map_or(batch, |id| batch.id(id));
        let standing = |(position, check): (usize, &Check<'_, A>)| {
            let records = &view.known.records;
            let found = get(records, &view.limit_key(position)).ok().map(|found| records[found].1);
            let found = found.filter(|_| check.limit.is_overridable());
            check.limit.standing(found.map(|record| &self.records[record]), now)
        };
        let standings: Vec<Standing<A>> = batch.checks().iter().enumerate().map(standing).collect();
        let checks = batch.checks_by(&standings);
        let batch = batch.with_checks(&checks).standing_so(&standings);
        let verdict = decide(&batch, now, view).map_err(|refusal| refusal.kind())?;
        Ok(verdict.decisions().to_vec())
    }
}
