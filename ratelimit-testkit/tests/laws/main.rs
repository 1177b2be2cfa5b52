//! The laws, held against sound stores and wrong ones. One program, because what the tests have in
//! common is compiled once.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod admissions;
mod algorithms;
mod budgets;
mod calendars;
mod capabilities;
mod changed_numbers;
mod documents;
mod examples;
mod linearizability;
mod months;
mod oracle;
mod reservations;
mod up_to;
mod warnings;
mod wrong;
mod wrong_algorithms;
mod wrong_lockouts;
mod wrong_stores;

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{AnyAlgorithm, Limit, Refusal, ReservationId, Timestamp, Verdict};
use ratelimit_testkit::{PureStore, limit_in_words as limit};

/// An operation on one key of these limits, under the id of this number if it has one, at the same
/// cost for all.
fn ask(
    store: &PureStore,
    limits: &[&Limit<AnyAlgorithm>],
    (op, id, cost): (Op, Option<u128>, u64),
    at_us: u64,
) -> Result<Verdict, Refusal> {
    let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key: "a", cost }).collect();
    let now = Now::At(Timestamp::saturating_from_us(at_us));
    let batch = Batch::new(&checks).expect("different limits").op(op).now(now);
    store.decide(&id.map_or(batch, |id| batch.id(ReservationId::new(id))))
}
