//! Every interleaving of a few requests in the queue of those that merge.

#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use queue::{Joined, Queue};

/// The queue of the store itself, over loom's locks.
#[allow(dead_code, unreachable_pub, reason = "of the store")]
#[path = "../src/merge/queue.rs"]
mod queue;
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

/// The numbers of requests that wait together, by their state.
type Group = Arc<(u64, Mutex<Vec<usize>>)>;

/// What the requests of a model did.
#[derive(Default)]
struct Log {
    calls: AtomicUsize,
    /// The state and the requests of each group that was sent, in this order.
    sent: Mutex<Vec<(u64, Vec<usize>)>>,
}

impl Log {
    /// A call of these requests: no other is under way.
    fn call(&self, groups: Vec<(u64, Vec<usize>)>) {
        assert_eq!(self.calls.fetch_add(1, Ordering::SeqCst), 0, "two calls at once");
        thread::yield_now();
        self.sent.lock().expect("no panic").extend(groups);
        self.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Asks as the store does: alone if no call is under way, and then for those that have come meanwhile.
fn ask(queue: &Queue<Group>, log: &Log, number: usize, state: u64) {
    let joined = queue.join(
        &[state],
        |group: &Group| group.0 == state,
        || Arc::new((state, Mutex::new(Vec::new()))),
        |group| group.1.lock().expect("no panic").push(number),
    );
    match joined {
        Joined::Waits((), _) => {}
        Joined::Full => panic!("three are not too many"),
        Joined::Goes(mut call) => {
            log.call(vec![(state, vec![number])]);
            if !queue.end(call) {
                return;
            }
            while let Some((flight, next)) = queue.next(call) {
                call = next;
                let take = |group: &Group| {
                    (group.0, std::mem::take(&mut *group.1.lock().expect("no panic")))
                };
                log.call(flight.groups.iter().map(take).collect());
            }
            // As the task does when it ends: nothing is left that is its own.
            assert_eq!(queue.abandon(call).len(), 0);
        }
    }
}

/// Three requests at once, of these states. The queue sends each exactly once, whichever thread is the sender.
fn each_is_sent_once(states: [u64; 3]) {
    loom::model(move || {
        let (queue, log) = (Arc::new(Queue::default()), Arc::new(Log::default()));
        let threads: Vec<_> = (1..3)
            .map(|number| {
                let (queue, log) = (Arc::clone(&queue), Arc::clone(&log));
                thread::spawn(move || ask(&queue, &log, number, states[number]))
            })
            .collect();
        ask(&queue, &log, 0, states[0]);
        for thread in threads {
            thread.join().expect("no panic");
        }
        let mut sent: Vec<_> = std::mem::take(&mut *log.sent.lock().expect("no panic"))
            .into_iter()
            .flat_map(|(state, numbers)| numbers.into_iter().map(move |number| (number, state)))
            .collect();
        sent.sort_unstable();
        assert_eq!(sent, [(0, states[0]), (1, states[1]), (2, states[2])]);
        // No call is under way: the next request goes at once.
        let joined = queue.join(&[9], |_| false, || unreachable!(), |_| ());
        assert!(matches!(joined, Joined::Goes(_)), "{joined:?}");
    });
}

#[test]
fn each_request_of_one_state_is_sent_once_and_no_two_calls_are_under_way() {
    each_is_sent_once([7, 7, 7]);
}

#[test]
fn each_request_of_different_states_is_sent_once_and_no_two_calls_are_under_way() {
    each_is_sent_once([7, 8, 7]);
}

/// A sender that ends while others join: each of them is returned by the sender, or goes itself.
#[test]
fn an_abandoned_queue_returns_each_request_that_waits() {
    loom::model(|| {
        let queue = Arc::new(Queue::<Group>::default());
        let join = |queue: &Queue<Group>, state: u64| {
            queue.join(&[state], |_| false, || Arc::new((state, Mutex::new(Vec::new()))), |_| ())
        };
        let Joined::Goes(call) = join(&queue, 1) else { panic!("no call is under way") };
        let other = Arc::clone(&queue);
        let thread = thread::spawn(move || {
            other.join(&[2], |_| false, || Arc::new((2, Mutex::new(Vec::new()))), |_| ())
        });
        let returned = queue.abandon(call).len();
        match thread.join().expect("no panic") {
            Joined::Waits((), _) => assert_eq!(returned, 1),
            Joined::Goes(_) => assert_eq!(returned, 0),
            Joined::Full => panic!("two are not too many"),
        }
    });
}

/// A request that waits overtakes the call under way while the sender of that call ends it. One of both sends the
/// request, and the other does nothing.
#[test]
fn a_call_that_is_overtaken_is_ended_once() {
    loom::model(|| {
        let queue = Arc::new(Queue::<Group>::default());
        let join = |state: u64| {
            queue.join(&[state], |_| false, || Arc::new((state, Mutex::new(Vec::new()))), |_| ())
        };
        let Joined::Goes(call) = join(1) else { panic!("no call is under way") };
        let Joined::Waits((), waits_for) = join(2) else { panic!("a call is under way") };
        assert_eq!(waits_for, call);
        let other = Arc::clone(&queue);
        let thread = thread::spawn(move || {
            other.next(waits_for).map(|(flight, call)| (flight.groups.len(), call))
        });
        let ended = queue.end(call).then(|| queue.next(call)).flatten();
        let ended = ended.map(|(flight, call)| (flight.groups.len(), call));
        let overtook = thread.join().expect("no panic");
        assert_ne!(ended.is_some(), overtook.is_some());
        let (groups, call) = ended.or(overtook).expect("one of both");
        assert_eq!(groups, 1);
        // The other one returns no requests of the sender.
        assert_eq!(queue.abandon(waits_for).len(), 0);
        assert!(matches!(join(3), Joined::Waits(..)));
        assert_eq!(queue.next(call).expect("it waits").0.groups.len(), 1);
    });
}
