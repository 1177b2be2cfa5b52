//! One caller fills what the store bounds. Its neighbours notice no more than the guide's table of bounds says, and get no refusal.
//! That the driver decides once there are too many scripts is tested in `scripts`.

use crate::common::{PATIENCE, limit, server};
use crate::flights::{Gated, remaining};

/// The most requests that wait for a connection.
const MOST_WAITING: usize = 65_536;

#[tokio::test]
async fn a_caller_that_fills_the_flights_makes_others_go_alone() {
    let (server, limit) = (server(), limit("api", "gcra 9/3650d"));
    // So long that none of them is late, however slowly they come.
    let gated = Gated::new(&server, PATIENCE * 100, None).await;
    let in_flight = gated.fills(&limit).await;
    let waiting: Vec<_> = (0..MOST_WAITING).map(|_| gated.kept(&limit, "mallory")).collect();
    let calls = || *gated.gate.calls.lock().expect("no panic");
    let before = calls();
    let alone = gated.asks(&[(&limit, "alice", 1)]).await;
    assert_eq!(calls(), before + 1);
    drop(waiting);
    let waits = gated.asks(&[(&limit, "alice", 1)]).await;
    assert_eq!(calls(), before + 1, "there is room again");
    gated.gate.opens();
    let left = [remaining(alone).await, remaining(waits).await];
    assert_eq!(left.iter().min(), Some(&7), "{left:?}");
    drop(in_flight);
}
