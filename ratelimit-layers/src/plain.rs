//! Which requests a layer may decide by itself.

use ratelimit_core::store::{Batch, Now, Op};
use ratelimit_core::{Algorithm, Limit};

/// Whether a batch only acquires, at the store's time, from limits that charge what they admit
/// until it recovers: neither attempts, each of which is charged, nor leases, which their holders
/// release, nor by records of their callers, which only the store knows.
pub(crate) fn acquires_plainly<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    batch.is_plain() && acquires(batch)
}

/// The same, or under an id that was drawn for this one request: nothing can have been charged
/// under it before, so that its denial is that of a plain request.
pub(crate) fn acquires_anew<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    let is_drawn = batch.reservation_id().is_none() || batch.is_settled_once();
    is_drawn && batch.metadata_given().is_empty() && !batch.is_part() && acquires(batch)
}

fn acquires<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    // By the record of a caller, the store alone decides.
    let lasts = |limit: &Limit<A>| {
        !limit.counts_attempts() && !limit.algorithm().has_leases() && !limit.is_overridable()
    };
    batch.operation() == Op::Acquire
        && batch.time() == Now::Store
        && !batch.checks().is_empty()
        && batch.checks().iter().all(|check| lasts(check.limit))
}
