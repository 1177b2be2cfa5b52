//! What a request allocates while the store is unreachable. The crate `allocation-counter` counts
//! for this whole program.

use std::pin::pin;
use std::task::Poll;

use allocation_counter::measure;
use ratelimit_core::store::Batch;
use ratelimit_core::{OnOutage, Store as _};

use crate::common::{checks, limit, paused_runtime, poll};
use crate::fallback::{ask, down, layered_store};

/// The verdict has one for its source, and one for several decisions. The others are lists of the
/// checks.
#[test]
fn in_an_outage_a_request_computes_no_share() {
    for (count, due) in [(1, 5), (3, 7)] {
        let named = |n| limit(&format!("l{n}"), "gcra 60/m burst 60").on_outage(OnOutage::Local);
        let limits: Vec<_> = (0..count).map(named).collect();
        let store = layered_store(&limits);
        paused_runtime().block_on(async {
            down(&store, &limits).await;
            assert!(ask(&store, &limits, 1).await.allowed());
            let checks = checks(&limits, "alice", 1);
            let batch = Batch::new(&checks).expect("distinct");
            let counted = measure(|| {
                let said = poll(pin!(store.apply(&batch)));
                assert!(matches!(said, Poll::Ready(Ok(verdict)) if verdict.allowed()));
            });
            assert_eq!(counted.count_total, due, "{count} limits");
        });
    }
}
