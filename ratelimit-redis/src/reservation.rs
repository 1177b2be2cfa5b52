//! Encodes a [`Reservation`] under a key of its own, in every mode: `TIMESTAMP SINCE COST COUNTS
//! TERM TERM TERM`, and after the settlement `TIMESTAMP SINCE COST SETTLED`. One that is then
//! forgotten early has the time at which it is as its TIMESTAMP, later than SINCE. `driver.lua`
//! reads and writes the same text.
//!
//! In a batch with several checks the [group](ReservationGroup) follows: ` @FINGERPRINT
//! LIMIT,LIMIT`.
//!
//! A reservation that was charged in one slot of several ends with ` ?`. The caller that charged it
//! may take it back until another caller learns that the id has it.

use std::sync::Arc;

use ratelimit_core::store::{Batch, Check, Reservation, ReservationGroup};
use ratelimit_core::{Algorithm, ReservationId, Timestamp};

use crate::key::Keys;

/// Marks, as its end, a reservation that its writer may take back.
pub(crate) const RESERVED: &[u8] = b" ?";

/// Removes that mark; `None` if there is none.
pub(crate) fn confirmed(bytes: &[u8]) -> Option<Vec<u8>> {
    bytes.strip_suffix(RESERVED).map(<[u8]>::to_vec)
}

/// The group of a batch with an id and several checks. It reveals no more of identifiers than the
/// keys do.
pub(crate) fn group<A: Algorithm>(
    keys: &Keys,
    batch: &Batch<'_, A>,
) -> Option<Arc<ReservationGroup>> {
    batch.reservation_group(|| fingerprint(keys, batch))
}

/// A hash of the keys of a batch, independent of their order.
pub(crate) fn fingerprint<A: Algorithm>(keys: &Keys, batch: &Batch<'_, A>) -> u64 {
    let id = batch.reservation_id().unwrap_or(ReservationId::new(0));
    let of_check =
        |check: &Check<'_, A>| keys.of_reservation(check.limit.state_name(), id, check.key);
    let all = batch.checks().iter().map(of_check);
    let mut all: Vec<_> = all.collect();
    all.sort_unstable();
    let hash = blake3::hash(all.join("\n").as_bytes());
    hash.as_bytes().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The text of a group; empty for none.
pub(crate) fn group_text(group: Option<&Arc<ReservationGroup>>) -> String {
    group.map_or_else(String::new, |group| format!(" @{:016x} {}", group.fingerprint, group.limits))
}

pub(crate) fn encode(reservation: &Reservation) -> Vec<u8> {
    let (timestamp_us, since_us, cost) =
        (reservation.timestamp.as_us(), reservation.since.as_us(), reservation.cost);
    let rest = match (reservation.settled, reservation.counts, reservation.terms) {
        (Some(settled), ..) => settled.to_string(),
        (None, counts, [first, second, third]) => format!("{counts} {first} {second} {third}"),
    };
    let group = group_text(reservation.group.as_ref());
    format!("{timestamp_us} {since_us} {cost} {rest}{group}").into_bytes()
}

/// `None` if these bytes are no reservation.
pub(crate) fn decode(bytes: &[u8]) -> Option<Reservation> {
    let text = std::str::from_utf8(bytes.strip_suffix(RESERVED).unwrap_or(bytes)).ok()?;
    let (text, group) = match text.split_once(" @") {
        None => (text, None),
        Some((text, group)) => {
            let (fingerprint, limits) = group.split_once(' ')?;
            let fingerprint = u64::from_str_radix(fingerprint, 16).ok()?;
            (text, Some(Arc::new(ReservationGroup { limits: limits.into(), fingerprint })))
        }
    };
    let words = text.split(' ').map(str::parse::<u64>).collect::<Result<Vec<_>, _>>().ok()?;
    let (timestamp_us, since_us, cost, settled, counts, terms) = match words[..] {
        [timestamp, since, cost, settled] => (timestamp, since, cost, Some(settled), 0, [0; 3]),
        [timestamp, since, cost, counts, first, second, third] => {
            (timestamp, since, cost, None, counts, [first, second, third])
        }
        _ => return None,
    };
    let (timestamp, since) = (Timestamp::from_us(timestamp_us)?, Timestamp::from_us(since_us)?);
    Some(Reservation { timestamp, cost, counts, terms, settled, since, group })
}
