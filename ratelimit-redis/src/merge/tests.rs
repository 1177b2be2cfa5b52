//! In which call a request rides, by the numbers of calls.

use std::sync::Mutex;

use super::queue::{Joined, MOST_REQUESTS, MOST_STATES, Queue};
use super::*;

/// The requests of one key, by their numbers.
type Waiting = Arc<(u64, Mutex<Vec<usize>>)>;

/// Lets requests of these keys come in this order while a call is under way. Returns for each the number of the call in
/// which it rides: 1 for the next one.
fn rides(keys: impl IntoIterator<Item = u64>) -> Vec<usize> {
    let queue = Queue::<Waiting>::default();
    let Joined::Goes(mut call) = join(&queue, 0, usize::MAX) else {
        panic!("no call is under way")
    };
    let mut requests = 0;
    for key in keys {
        assert!(matches!(join(&queue, key, requests), Joined::Waits((), _)));
        requests += 1;
    }
    let mut rides = vec![0; requests];
    for number in 1.. {
        let Some((flight, next)) = queue.next(call) else { break };
        call = next;
        for group in flight.groups {
            for request in group.1.lock().expect("no panic").drain(..) {
                rides[request] = number;
            }
        }
    }
    rides
}

fn join(queue: &Queue<Waiting>, key: u64, request: usize) -> Joined<()> {
    queue.join(
        &[key],
        |group: &Waiting| group.0 == key,
        || Arc::new((key, Mutex::default())),
        |group| group.1.lock().expect("no panic").push(request),
    )
}

const HOT: u64 = 1;
const OTHER: u64 = 2;

#[test]
fn beside_any_number_of_requests_of_a_hot_key_another_key_rides_in_the_next_call() {
    for hot in [1, MOST_REQUESTS - 1, MOST_REQUESTS, 10_000] {
        let rides = rides(std::iter::repeat_n(HOT, hot).chain([OTHER]));
        assert_eq!(rides[hot], 1, "behind {hot}");
    }
}

#[test]
fn requests_of_one_key_do_not_use_up_the_places_of_others() {
    let queue = Queue::bounded(3);
    assert!(matches!(join(&queue, 0, 0), Joined::Goes(_)));
    for request in 0..3 {
        assert!(matches!(join(&queue, HOT, request), Joined::Waits(..)));
    }
    assert!(matches!(join(&queue, HOT, 3), Joined::Full));
    // Each other key has a place, as many as there are in the next call.
    let keys = OTHER..OTHER + MOST_STATES as u64 - 1;
    for key in keys.clone() {
        assert!(matches!(join(&queue, key, 0), Joined::Waits(..)), "{key}");
        assert!(matches!(join(&queue, key, 1), Joined::Full), "{key}");
    }
    assert!(matches!(join(&queue, keys.end, 0), Joined::Full));
}

/// Whatever comes first: the calls before it are full of requests that came earlier.
#[test]
fn a_request_waits_for_no_more_calls_than_requests_before_it_fill() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let hot_of_ten = random.u64(1..10);
        let keys: Vec<_> = (0..6_000)
            .map(|_| if random.u64(..10) < hot_of_ten { HOT } else { OTHER + random.u64(..100) })
            .collect();
        let rides = rides(keys.iter().copied());
        for (before, ride) in rides.iter().enumerate() {
            assert!((1..=1 + before / MOST_REQUESTS).contains(ride), "{seed}: {before}, {ride}");
        }
    }
}
