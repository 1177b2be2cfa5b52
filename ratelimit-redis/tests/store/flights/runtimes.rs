//! Callers on runtimes of their own, each of which runs its tasks only while a thread drives it.

use super::{Gated, Task, remaining, turns};
use crate::common::prelude::*;

/// What remains after a request that may be stranded.
async fn in_time(waits: Task) -> u64 {
    timeout(2 * PATIENCE, remaining(waits)).await.expect("it is not stranded")
}

#[test]
fn a_runtime_that_ends_or_stands_still_strands_no_request_of_another() {
    for ends in [true, false] {
        let (lasting, other) = (runtime(), runtime());
        let (server, limit) = (server(), limit("api", "gcra 10/3650d"));
        let gated = lasting.block_on(Gated::new(&server, Duration::from_secs(2), None));
        other.block_on(async {
            let _in_flight = gated.fills(&limit).await;
            let _waits = gated.asks(&[(&limit, "alice", 1)]).await;
        });
        let waits = lasting.block_on(gated.asks(&[(&limit, "bob", 1)]));
        let kept = if ends { None } else { Some(other) };
        gated.gate.opens();
        assert_eq!(lasting.block_on(in_time(waits)), 9);
        drop(kept);
    }
}

/// The flights of a runtime, both sent by its tasks, and the requests in them. What comes next waits behind them.
fn flies_from(other: &Runtime, gated: &Gated, limit: &Limit<Policy>) -> [Task; 2] {
    other.block_on(async {
        let flies = async |key| {
            let alone = gated.fills(limit).await;
            let waits = gated.asks(&[(limit, key, 1)]).await;
            (alone, waits)
        };
        // From here on the server knows the scripts, so that each call is one command.
        let (alone, waits) = flies("warm").await;
        gated.gate.opens();
        for task in alone.into_iter().chain([waits]) {
            remaining(task).await;
        }
        gated.gate.closes();
        let (alone, first) = flies("alice").await;
        let [one, two] = <[Task; 2]>::try_from(alone).expect("two");
        gated.gate.open.add_permits(1);
        remaining(one).await;
        let second = gated.asks(&[(limit, "carol", 1)]).await;
        gated.gate.open.add_permits(1);
        remaining(two).await;
        [first, second]
    })
}

/// A store whose connection no runtime of a caller drives.
fn gated_apart(server: &RedisServer) -> (Runtime, Gated) {
    let home = driven_runtime();
    let gated = home.block_on(Gated::new(server, PATIENCE, None));
    (home, gated)
}

#[test]
fn a_flight_goes_from_a_runtime_on_which_one_of_its_callers_waits() {
    let (lasting, other) = (runtime(), runtime());
    let (server, limit) = (server(), limit("api", "gcra 10/3650d"));
    let (_home, gated) = gated_apart(&server);
    let [first, _second] = flies_from(&other, &gated, &limit);
    let waits = lasting.block_on(gated.asks(&[(&limit, "bob", 1)]));
    gated.gate.open.add_permits(1);
    other.block_on(async {
        remaining(first).await;
        turns().await;
    });
    // The other runtime stands still from here on.
    gated.gate.opens();
    assert_eq!(lasting.block_on(in_time(waits)), 9);
}

#[test]
fn a_request_that_waits_behind_flights_of_a_runtime_that_ends_goes_by_itself() {
    let (lasting, other) = (runtime(), runtime());
    let (server, limit) = (server(), limit("api", "gcra 10/3650d"));
    let (_home, gated) = gated_apart(&server);
    let _in_flight = flies_from(&other, &gated, &limit);
    let waits = lasting.block_on(gated.asks(&[(&limit, "bob", 1)]));
    drop(other);
    gated.gate.opens();
    assert_eq!(lasting.block_on(in_time(waits)), 9);
}
