//! Which requests a layer may decide by itself.

use ratelimit_core::Algorithm;
use ratelimit_core::store::{Batch, Now, Op};

/// Whether a batch only acquires, at the store's time, from limits that charge what they admit until it recovers: neither
/// attempts, each of which is charged, nor leases, which their holders release.
pub(crate) fn acquires_plainly<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    let lasts = |algorithm: &A| !algorithm.charges_denials() && !algorithm.has_leases();
    batch.operation() == Op::Acquire
        && batch.time() == Now::Store
        && batch.is_plain()
        && !batch.checks().is_empty()
        && batch.checks().iter().all(|check| lasts(check.limit.algorithm()))
}
