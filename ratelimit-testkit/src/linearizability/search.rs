//! The search for an order.

use std::collections::HashMap;

use ratelimit_core::{
    Algorithm, Batch, Check, Decision, ErrorKind, Limit, Op, Reservation, ReservationId, States,
    Timestamp, Write, decide,
};

use super::{Event, Place};
use crate::pure::fingerprint;

/// How many states are tried after each other before it is given up: some seconds.
const STEPS: usize = 200_000;

/// What came of a search.
pub(super) enum Found {
    Order,
    /// None, and the places of those that the longest one has that got stuck.
    None(u128),
    OutOfSteps,
}

/// Looks for an order of these requests, which come in the order of asking.
pub(super) fn search<A: Algorithm<State: PartialEq>>(
    limits: &[Limit<A>],
    times: &[Timestamp],
    events: &[&Event],
) -> Found {
    let mut search =
        Search { limits, times, events, tried: HashMap::new(), longest: 0, left: STEPS };
    match search.explain(0, Kept { states: Vec::new(), reservations: Vec::new() }) {
        Some(true) => Found::Order,
        Some(false) => Found::None(search.longest),
        None => Found::OutOfSteps,
    }
}

/// What a store keeps: in the order of places, so that what is the same looks the same.
#[derive(PartialEq)]
struct Kept<S> {
    states: Vec<(Place, S)>,
    reservations: Vec<((Place, ReservationId), Reservation)>,
}

impl<S: Clone> Clone for Kept<S> {
    fn clone(&self) -> Self {
        Self { states: self.states.clone(), reservations: self.reservations.clone() }
    }
}

/// What there is at a place, among things in the order of their places.
fn get<P: Ord, T>(all: &[(P, T)], place: &P) -> Result<usize, usize> {
    all.binary_search_by(|(other, _)| other.cmp(place))
}

fn put<P: Ord, T>(all: &mut Vec<(P, T)>, place: P, thing: T) {
    match get(all, &place) {
        Ok(position) => all[position].1 = thing,
        Err(position) => all.insert(position, (place, thing)),
    }
}

/// What is kept, as it is seen by one request.
struct Held<'e, S> {
    event: &'e Event,
    kept: Kept<S>,
}

impl<S> Held<'_, S> {
    fn place(&self, position: usize) -> Place {
        let (limit, key, _) = self.event.asks[position];
        (limit, key)
    }
}

impl<S> States<S> for Held<'_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        let found = get(&self.kept.states, &self.place(position)).ok()?;
        Some(&self.kept.states[found].1)
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let place = self.place(position);
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => put(&mut self.kept.states, place, state),
            Write::Remove => self.kept.states.retain(|(other, _)| *other != place),
        }
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        let place = (self.place(position), self.event.id?);
        let found = get(&self.kept.reservations, &place).ok()?;
        Some(self.kept.reservations[found].1.clone())
    }

    fn fingerprint(&self) -> u64 {
        let places: Vec<_> = (0..self.event.asks.len()).map(|place| self.place(place)).collect();
        fingerprint(&places)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, _expires: Timestamp) {
        if let Some(id) = self.event.id {
            let place = self.place(position);
            put(&mut self.kept.reservations, (place, id), reservation);
        }
    }
}

struct Search<'h, A: Algorithm> {
    limits: &'h [Limit<A>],
    times: &'h [Timestamp],
    events: &'h [&'h Event],
    /// What has been tried: who has come, and what was kept then.
    tried: HashMap<u128, Vec<Kept<A::State>>>,
    longest: u128,
    left: usize,
}

impl<A: Algorithm<State: PartialEq>> Search<'_, A> {
    /// Whether there is an order of all that have not come yet. `None` if there are no steps left.
    fn explain(&mut self, mut come: u128, kept: Kept<A::State>) -> Option<bool> {
        // Whoever never changes anything can just as well come first, if told so: the others find what they
        // would have found.
        while let Some(place) = self.changing_nothing(come, &kept) {
            come |= 1 << place;
        }
        if come.count_ones() > self.longest.count_ones() {
            self.longest = come;
        }
        if come.count_ones() as usize == self.events.len() {
            return Some(true);
        }
        if self.tried.get(&come).is_some_and(|tried| tried.contains(&kept)) {
            return Some(false);
        }
        self.left = self.left.checked_sub(1)?;
        for place in self.next(come) {
            // At different times it may come to the same.
            let mut outcomes: Vec<_> = self.outcomes(self.events[place], &kept).collect();
            outcomes.dedup();
            for after in outcomes {
                if self.explain(come | (1 << place), after)? {
                    return Some(true);
                }
            }
        }
        self.tried.entry(come).or_default().push(kept);
        Some(false)
    }

    /// Those who may come next: they had asked before anybody else that is left was answered. In the order
    /// of their answers, which is most often the one that is looked for: that takes a tenth of the steps.
    fn next(&self, come: u128) -> Vec<usize> {
        let left = || (0..self.events.len()).filter(|place| come & (1 << place) == 0);
        let first_answer = left().map(|place| self.events[place].answered).min();
        let by = first_answer.unwrap_or(u64::MAX);
        let mut next: Vec<_> = left().filter(|place| self.events[*place].asked < by).collect();
        next.sort_unstable_by_key(|place| self.events[*place].answered);
        next
    }

    fn changing_nothing(&self, come: u128, kept: &Kept<A::State>) -> Option<usize> {
        let fits = |place: &usize| {
            let event = self.events[*place];
            !self.may_write(event) && self.outcomes(event, kept).next().is_some()
        };
        self.next(come).into_iter().find(fits)
    }

    /// Whether a request that was told this can have changed anything, wherever it came.
    fn may_write(&self, event: &Event) -> bool {
        let Ok(decisions) = &event.answer else { return false };
        let counts =
            |(limit, ..): &(usize, usize, u64)| self.limits[*limit].algorithm().charges_denials();
        match event.op {
            Op::Peek => false,
            Op::Acquire => {
                decisions.iter().all(|each| each.allowed) || event.asks.iter().any(counts)
            }
            _ => true,
        }
    }

    /// What may be kept after a request, if it comes now and is told what it was told.
    fn outcomes(
        &self,
        event: &Event,
        kept: &Kept<A::State>,
    ) -> impl Iterator<Item = Kept<A::State>> {
        let [from, to] = event.clock;
        let begin = self.times.partition_point(|time| *time < from);
        let times = self.times[begin..].iter().take_while(move |time| **time <= to);
        times.filter_map(move |now| {
            let mut held = Held { event, kept: kept.clone() };
            (self.decided(&mut held, *now) == event.answer).then_some(held.kept)
        })
    }

    fn decided(
        &self,
        held: &mut Held<'_, A::State>,
        now: Timestamp,
    ) -> Result<Vec<Decision>, ErrorKind> {
        let event = held.event;
        let names: Vec<String> = event.asks.iter().map(|(_, key, _)| key.to_string()).collect();
        let checks: Vec<_> = event
            .asks
            .iter()
            .zip(&names)
            .map(|((limit, _, cost), key)| Check { limit: &self.limits[*limit], key, cost: *cost })
            .collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(event.op);
        let batch = event.id.map_or(batch, |id| batch.id(id));
        let verdict = decide(&batch, now, held).map_err(|refusal| refusal.kind())?;
        Ok(verdict.decisions().to_vec())
    }
}
