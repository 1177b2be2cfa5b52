//! [`Snapshot`]: states as a script read them, to decide on in Rust.

use ratelimit_core::{Reservation, States, Timestamp, Write};

/// The states of a batch's checks. The script has already written; the writes are kept for requests that it
/// decided after this one.
pub(crate) struct Snapshot<S>(pub(crate) Vec<Option<S>>);

impl<S> States<S> for Snapshot<S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.0.get(position)?.as_ref()
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let Some(state) = self.0.get_mut(position) else { return };
        match write {
            Write::Keep => {}
            Write::Put { state: after, .. } => *state = Some(after),
            Write::Remove => *state = None,
        }
    }

    fn reservation(&self, _position: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(
        &mut self,
        _position: usize,
        _reservation: Reservation,
        _expires: Timestamp,
    ) {
    }
}
