//! [`Flight`]: requests that go together, and what became of them.

use std::sync::PoisonError;
use std::task::{Context, Waker};

use tokio::time::Instant;

use super::sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::deadline::Deadline;

/// Requests that go together. `L` is what they ask, `O` what became of them.
#[derive(Debug)]
pub(crate) struct Flight<L, O> {
    cabin: Mutex<Cabin<L, O>>,
    /// How many requests of the queue wait.
    waiting: Arc<AtomicUsize>,
    /// When half of the first request's time is over.
    pub(super) half_time: Instant,
}

#[derive(Debug)]
struct Cabin<L, O> {
    load: L,
    passengers: Vec<Passenger>,
    /// From then on no request boards or leaves.
    has_departed: bool,
    /// Whether each caller watches the clock itself.
    is_late: bool,
    outcome: Option<Arc<O>>,
}

#[derive(Debug)]
struct Passenger {
    deadline: Deadline,
    waker: Option<Waker>,
    /// Whether its caller still wants it.
    is_wanted: bool,
}

/// A request's place in a flight. Dropping it before the flight departs takes the request back.
#[derive(Debug)]
pub(crate) struct Seat<L, O> {
    flight: Arc<Flight<L, O>>,
    pub(crate) number: usize,
    /// Whether the next look has to see what the flight knows. The first need not, whose waker has just gone on board.
    looks: bool,
    /// Whether the caller knows the outcome. Dropping the seat then does nothing.
    is_over: bool,
}

/// What a request learns.
#[derive(Debug)]
pub(crate) enum News<O> {
    /// What became of the flight.
    Outcome(Arc<O>),
    /// The flight left without it, because too little of its time was left.
    TakenBack,
    /// Nothing yet: it will be woken.
    None,
    /// Nothing yet, and no one else watches the clock for it.
    Late,
}

impl<L: Default, O> Flight<L, O> {
    /// A flight whose first request has this deadline.
    pub(super) fn new(waiting: Arc<AtomicUsize>, deadline: Deadline) -> Self {
        let cabin = Cabin {
            load: L::default(),
            passengers: Vec::new(),
            has_departed: false,
            is_late: false,
            outcome: None,
        };
        Self { cabin: Mutex::new(cabin), waiting, half_time: deadline.half_time() }
    }

    /// Gives a request a seat, and takes its waker, unless `board` has no room for it.
    pub(super) fn board(
        flight: &Arc<Self>,
        deadline: Deadline,
        caller: &mut Option<Waker>,
        board: impl FnOnce(&mut L, usize) -> bool,
    ) -> Option<Seat<L, O>> {
        let mut cabin = flight.cabin();
        let number = cabin.passengers.len();
        if !board(&mut cabin.load, number) {
            return None;
        }
        let waker = caller.take();
        let looks = cabin.is_late || waker.is_none();
        cabin.passengers.push(Passenger { deadline, waker, is_wanted: true });
        flight.waiting.fetch_add(1, Ordering::Relaxed);
        Some(Seat { flight: Arc::clone(flight), number, looks, is_over: false })
    }

    /// Looks at the load: `is_wanted` says whether a caller still wants the request in a seat.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&L, &dyn Fn(usize) -> bool) -> T) -> T {
        let cabin = self.cabin();
        look(&cabin.load, &|seat| cabin.passengers[seat].is_wanted)
    }

    /// The load, which is sent now, and the deadline of each request that a caller still wants. `None` if another sender has
    /// sent it.
    ///
    /// A request that has no more than a quarter of its time left is not sent any more. So a call has time, and its outcome
    /// is known by the deadline of each request in it.
    pub(crate) fn depart(&self, now: Instant) -> Option<(L, Vec<Option<Deadline>>)> {
        let (mut late, mut wanted) = (Vec::new(), Vec::new());
        let mut cabin = self.cabin();
        if cabin.has_departed {
            return None;
        }
        let load = std::mem::take(&mut cabin.load);
        cabin.has_departed = true;
        for passenger in &mut cabin.passengers {
            let deadline = passenger.deadline;
            if passenger.is_wanted {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                if deadline.remaining_at(now) <= deadline.given() / 4 {
                    passenger.is_wanted = false;
                    late.extend(passenger.waker.take());
                }
            }
            wanted.push(passenger.is_wanted.then_some(deadline));
        }
        drop(cabin);
        late.into_iter().for_each(Waker::wake);
        Some((load, wanted))
    }

    /// Tells all requests what became of them: `sent` if they have departed, `unsent` otherwise. Only the first outcome
    /// counts.
    pub(crate) fn settle(&self, sent: O, unsent: impl FnOnce() -> O) {
        let mut cabin = self.cabin();
        if cabin.outcome.is_some() {
            return;
        }
        let outcome = if cabin.has_departed {
            sent
        } else {
            // Its requests go elsewhere: no other sender may send them.
            cabin.has_departed = true;
            let wanted = cabin.passengers.iter().filter(|passenger| passenger.is_wanted).count();
            self.waiting.fetch_sub(wanted, Ordering::Relaxed);
            unsent()
        };
        cabin.outcome = Some(Arc::new(outcome));
        Self::wake_all(cabin);
    }
}

impl<L, O> Flight<L, O> {
    /// Whether no caller wants any of its requests.
    pub(super) fn is_empty(&self) -> bool {
        !self.cabin().passengers.iter().any(|passenger| passenger.is_wanted)
    }

    pub(super) fn has_departed(&self) -> bool {
        self.cabin().has_departed
    }

    /// Lets each caller watch the clock itself from now on. A timer each from the start would cost more than all else.
    pub(super) fn warn(&self) {
        let mut cabin = self.cabin();
        if !cabin.is_late {
            cabin.is_late = true;
            Self::wake_all(cabin);
        }
    }

    fn wake_all(mut cabin: MutexGuard<'_, Cabin<L, O>>) {
        let passengers = cabin.passengers.iter_mut();
        let wakers: Vec<_> = passengers.filter_map(|passenger| passenger.waker.take()).collect();
        drop(cabin);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn cabin(&self) -> MutexGuard<'_, Cabin<L, O>> {
        self.cabin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L, O> Seat<L, O> {
    /// What the request learns now. Without news, its caller is woken when there are some.
    pub(crate) fn news(&mut self, context: &Context<'_>) -> News<O> {
        if !std::mem::replace(&mut self.looks, true) {
            return News::None;
        }
        let mut cabin = self.flight.cabin();
        if !cabin.passengers[self.number].is_wanted {
            return News::TakenBack;
        }
        if let Some(outcome) = &cabin.outcome {
            self.is_over = true;
            return News::Outcome(Arc::clone(outcome));
        }
        let is_late = cabin.is_late;
        let waker = &mut cabin.passengers[self.number].waker;
        match waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => *waker = Some(context.waker().clone()),
        }
        if is_late { News::Late } else { News::None }
    }

    /// Takes the request back. Returns whether that was in time: before the flight departed.
    pub(crate) fn take_back(&self) -> bool {
        let mut cabin = self.flight.cabin();
        let has_departed = cabin.has_departed;
        let passenger = &mut cabin.passengers[self.number];
        if !has_departed && passenger.is_wanted {
            passenger.is_wanted = false;
            self.flight.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        !passenger.is_wanted
    }
}

impl<L, O> Drop for Seat<L, O> {
    fn drop(&mut self) {
        if !self.is_over {
            self.take_back();
        }
    }
}
