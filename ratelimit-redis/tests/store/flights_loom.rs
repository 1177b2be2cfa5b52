//! Every interleaving of a few requests in the queue of those that ride together, over its own locks and wakers.

use std::task::{Context, Waker};
use std::time::Duration;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use tokio::time::Instant;

use crate::deadline::Deadline;
use flight::News;
use queue::{Departure, Joined, MOST_FLIGHTS};

#[allow(dead_code, unreachable_pub, reason = "of the store")]
#[path = "../../src/flights/flight.rs"]
mod flight;
/// The queue of the store itself, over loom's locks.
#[allow(dead_code, unreachable_pub, reason = "of the store")]
#[path = "../../src/flights/queue.rs"]
mod queue;
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Arc, Mutex, MutexGuard};
}

const GIVEN: Duration = Duration::from_secs(8);

/// The numbers of the requests in a flight are its load and, once it has landed, its outcome.
type Queue = queue::Queue<Vec<usize>, Vec<usize>>;
type Seat = flight::Seat<Vec<usize>, Vec<usize>>;

/// A caller's thread, which is woken.
struct Caller(thread::Thread);

impl std::task::Wake for Caller {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}

/// A model: the queue, and what was sent by it.
struct Model {
    queue: Queue,
    begin: Instant,
    in_flight: AtomicUsize,
    sent: loom::sync::Mutex<Vec<usize>>,
}

impl Model {
    fn new() -> loom::sync::Arc<Self> {
        loom::sync::Arc::new(Self {
            queue: Queue::new(GIVEN),
            begin: Instant::now(),
            in_flight: AtomicUsize::new(0),
            sent: loom::sync::Mutex::new(Vec::new()),
        })
    }

    /// All flights are taken, by requests of these numbers, and a request waits.
    fn full() -> (loom::sync::Arc<Self>, [u64; MOST_FLIGHTS], Seat) {
        let model = Self::new();
        let taken = std::array::from_fn(|n| match model.join(100 + n) {
            Joined::Goes(number) => number,
            other => panic!("{other:?}"),
        });
        let Joined::Waits(seat, None) = model.join(1) else { panic!("all flights are taken") };
        (model, taken, seat)
    }

    /// A request whose caller waits for nothing.
    fn join(&self, number: usize) -> Joined<Vec<usize>, Vec<usize>> {
        self.join_as(Waker::noop().clone(), number)
    }

    fn join_as(&self, caller: Waker, number: usize) -> Joined<Vec<usize>, Vec<usize>> {
        let deadline = Deadline::within(GIVEN);
        self.queue.join(deadline, self.begin, caller, |load, _| {
            load.push(number);
            true
        })
    }

    /// A call of these requests.
    fn call(&self, requests: Vec<usize>) {
        assert!(self.in_flight.fetch_add(1, Ordering::SeqCst) < MOST_FLIGHTS, "too many at once");
        self.sent.lock().expect("no panic").extend(requests);
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Sends the flights that wait, as the store's task does.
    fn send(&self, mut departure: Option<Departure<Vec<usize>, Vec<usize>>>) {
        while let Some(mut going) = departure {
            self.queue.begin(&mut going);
            let Departure { number, flight } = going;
            let (load, wanted) = flight.depart(self.begin).expect("one sender");
            let wanted = load.iter().zip(wanted).filter(|(_, wanted)| wanted.is_some());
            let wanted: Vec<_> = wanted.map(|(number, _)| *number).collect();
            self.call(wanted.clone());
            flight.settle(wanted, || panic!("it has departed"));
            departure = self.queue.next(number, self.begin);
        }
    }

    /// Asks as the store does: alone if a flight is free, and otherwise with others. Returns the seat of a request that
    /// waits.
    fn ask(&self, number: usize) -> Option<Seat> {
        let caller = Waker::from(std::sync::Arc::new(Caller(thread::current())));
        match self.join_as(caller, number) {
            Joined::Goes(flight) => {
                self.call(vec![number]);
                self.send(self.queue.next(flight, self.begin));
                None
            }
            Joined::Waits(seat, departure) => {
                self.send(departure);
                Some(seat)
            }
            Joined::Alone => panic!("few are not too many"),
        }
    }

    /// Waits as the store's caller does.
    fn arrives(mut seat: Seat, number: usize) {
        let caller = std::sync::Arc::new(Caller(thread::current()));
        let waker = Waker::from(caller);
        loop {
            match seat.news(&Context::from_waker(&waker)) {
                News::Outcome(landed) => return assert!(landed.contains(&number)),
                News::None => {}
                News::TakenBack | News::Late => panic!("its time has just begun"),
            }
            thread::park();
        }
    }
}

fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(run);
}

/// Requests at once while all flights but one are taken: each is sent once, and learns it.
#[test]
fn each_request_is_sent_once_and_is_woken() {
    model(|| {
        let model = Model::new();
        let taken: Vec<_> = (1..MOST_FLIGHTS).map(|n| model.join(100 + n)).collect();
        model.in_flight.fetch_add(taken.len(), Ordering::SeqCst);
        let threads = [1, 2].map(|number| {
            let model = loom::sync::Arc::clone(&model);
            thread::spawn(move || {
                if let Some(seat) = model.ask(number) {
                    Model::arrives(seat, number);
                }
            })
        });
        for thread in threads {
            thread.join().expect("no panic");
        }
        let mut sent = std::mem::take(&mut *model.sent.lock().expect("no panic"));
        sent.sort_unstable();
        assert_eq!(sent, [1, 2]);
        // A flight is free again.
        assert!(matches!(model.join(3), Joined::Goes(_)));
    });
}

/// A request that is dropped while its flight departs is sent, or taken back, and never both.
#[test]
fn a_dropped_request_is_sent_or_taken_back() {
    model(|| {
        let (model, [number, _], seat) = Model::full();
        let other = loom::sync::Arc::clone(&model);
        let thread = thread::spawn(move || other.send(other.queue.next(number, other.begin)));
        let is_taken_back = seat.take_back();
        thread.join().expect("no panic");
        assert_ne!(is_taken_back, model.sent.lock().expect("no panic").contains(&1));
        assert!(matches!(model.join(3), Joined::Goes(_)));
    });
}

/// A sender ends while another request overtakes its flight: one of both sends what waits.
#[test]
fn a_flight_that_is_overtaken_is_ended_once() {
    model(|| {
        let (model, [number, _], seat) = Model::full();
        let other = loom::sync::Arc::clone(&model);
        let departs = |departure: Option<Departure<_, _>>, now| {
            departure.is_some_and(|departure| departure.flight.depart(now).is_some())
        };
        let later = model.begin + GIVEN / 2;
        let thread = thread::spawn(move || departs(other.queue.watch(later), later));
        let ended = departs(model.queue.next(number, model.begin), model.begin);
        let overtook = thread.join().expect("no panic");
        assert_ne!(ended, overtook);
        drop(seat);
    });
}

/// A flight whose sender does not begin is sent by another; one that has departed is not sent again.
#[test]
fn a_flight_that_has_not_departed_in_time_waits_again() {
    for departs in [false, true] {
        model(move || {
            let (model, [number, _], _seat) = Model::full();
            let first = model.queue.next(number, model.begin).expect("it waits");
            assert!(!departs || first.flight.depart(model.begin).is_some());
            assert_ne!(model.queue.watch(model.begin + GIVEN / 2).is_some(), departs);
        });
    }
}

/// A sender that ends while others join returns those that wait, or they find a free flight.
#[test]
fn an_abandoned_queue_strands_no_request() {
    model(|| {
        let model = Model::new();
        let taken: Vec<_> = (0..MOST_FLIGHTS).map(|n| model.join(100 + n)).collect();
        let Some(Joined::Goes(number)) = taken.into_iter().next() else { panic!("it is alone") };
        let other = loom::sync::Arc::clone(&model);
        let thread = thread::spawn(move || other.join(1));
        let returned = model.queue.abandon(number);
        for flight in &returned {
            flight.settle(Vec::new(), Vec::new);
        }
        match thread.join().expect("no panic") {
            Joined::Waits(_, None) => assert_eq!(returned.len(), 1),
            Joined::Goes(_) => assert_eq!(returned.len(), 0),
            other => panic!("{other:?}"),
        }
    });
}
