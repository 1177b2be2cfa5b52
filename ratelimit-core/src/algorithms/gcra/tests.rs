//! What no limit writes.

use super::*;
use crate::in_memory::InMemory;

/// No limit writes such a state, but a store may be given one.
#[test]
fn a_state_that_ends_before_it_was_written_has_no_compact_form() {
    let [tat_us, written_us] = [1, 2];
    let timestamp = Timestamp::saturating_from_us(written_us);
    assert_eq!(Gcra::to_compact(&GcraState { tat_us, surplus: 0, timestamp }), None);
}
