//! Every interleaving of a few requests in the queue of those that merge.

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use queue::{Joined, Queue};

/// The queue of the store itself, over loom's locks.
#[allow(dead_code, unreachable_pub, reason = "of the store")]
#[path = "../../src/merge/queue.rs"]
mod queue;
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}

/// The numbers of requests that wait together, by their state.
type Group = Arc<(u64, Mutex<Vec<usize>>)>;

/// Joins as a request of this number for this state.
fn join(queue: &Queue<Group>, number: usize, state: u64) -> Joined<()> {
    queue.join(
        &[state],
        |group: &Group| group.0 == state,
        || Arc::new((state, Mutex::new(Vec::new()))),
        |group| group.1.lock().expect("no panic").push(number),
    )
}

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
    let mut call = match join(queue, number, state) {
        Joined::Goes(call) => call,
        Joined::Waits((), _) => return,
        Joined::Full => panic!("three are not too many"),
    };
    log.call(vec![(state, vec![number])]);
    if !queue.end(call) {
        return;
    }
    while let Some((flight, next)) = queue.next(call) {
        call = next;
        let take =
            |group: &Group| (group.0, std::mem::take(&mut *group.1.lock().expect("no panic")));
        log.call(flight.groups.iter().map(take).collect());
    }
    // As the task does when it ends: nothing is left that is its own.
    assert_eq!(queue.abandon(call).len(), 0);
}

/// Three requests at once, of one state or of two. The queue sends each exactly once, whichever thread is the sender.
#[test]
fn each_request_is_sent_once_and_no_two_calls_are_under_way() {
    for states in [[7, 7, 7], [7, 8, 7]] {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let (queue, log) = (Arc::new(Queue::default()), Arc::new(Log::default()));
            let threads = [1, 2].map(|number| {
                let (queue, log) = (Arc::clone(&queue), Arc::clone(&log));
                thread::spawn(move || ask(&queue, &log, number, states[number]))
            });
            ask(&queue, &log, 0, states[0]);
            for thread in threads {
                thread.join().expect("no panic");
            }
            let mut sent: Vec<_> = std::mem::take(&mut *log.sent.lock().expect("no panic"))
                .into_iter()
                .flat_map(|(state, numbers)| numbers.into_iter().map(move |n| (n, state)))
                .collect();
            sent.sort_unstable();
            assert_eq!(sent, [(0, states[0]), (1, states[1]), (2, states[2])]);
            // No call is under way: the next request goes at once.
            assert!(matches!(join(&queue, 3, 9), Joined::Goes(_)));
        });
    }
}

/// A sender that ends while others join: each of them is returned by the sender, or goes itself.
#[test]
fn an_abandoned_queue_returns_each_request_that_waits() {
    loom::model(|| {
        let queue = Arc::new(Queue::<Group>::default());
        let Joined::Goes(call) = join(&queue, 0, 1) else { panic!("no call is under way") };
        let other = Arc::clone(&queue);
        let thread = thread::spawn(move || join(&other, 1, 2));
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
        let Joined::Goes(call) = join(&queue, 0, 1) else { panic!("no call is under way") };
        let Joined::Waits((), waits_for) = join(&queue, 1, 2) else { panic!("one is under way") };
        assert_eq!(waits_for, call);
        let next = move |queue: &Queue<Group>| {
            queue.next(call).map(|(flight, call)| (flight.groups.len(), call))
        };
        let other = Arc::clone(&queue);
        let thread = thread::spawn(move || next(&other));
        let ended = queue.end(call).then(|| next(&queue)).flatten();
        let overtook = thread.join().expect("no panic");
        assert_ne!(ended.is_some(), overtook.is_some());
        let (groups, next) = ended.or(overtook).expect("one of both");
        assert_eq!(groups, 1);
        // The other one returns no requests of the sender.
        assert_eq!(queue.abandon(call).len(), 0);
        assert!(matches!(join(&queue, 2, 3), Joined::Waits(..)));
        assert_eq!(queue.next(next).expect("it waits").0.groups.len(), 1);
    });
}
