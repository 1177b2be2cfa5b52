//! [`RedisStore`]: a connection, a key prefix and the mode that decides batches.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ratelimit_core::algorithm::{KeepsEntries, WindowEntry, Write};
use ratelimit_core::store::{Batch, EntryStore, Now, Reservation, Snapshot, decide};
use ratelimit_core::{Algorithm, Limit, Limits, ReservationId, Store, Timestamp, Verdict};

use crate::calls::SharedCalls;
use crate::connection::{Argument, Connection, Peer, RedisConnection, Reply, TryAgain};
use crate::deadline::Deadline;
use crate::error::{LEFT, RedisError, Result, WRONG_TYPE};
use crate::key::Keys;
use crate::mode::{KeepsReservations, Lua, Mode};
use crate::reservation;
use crate::runtime::StoreRuntime;
use crate::script::Script;
use crate::scripts::Scripts;
use crate::turns::Turns;

/// What the store does with a batch whose keys lie in several slots of a cluster, and so on several
/// servers. A batch within one slot, or on a single server, is one script whatever you choose.
/// [`Tag`](crate::Tag) keeps identifiers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrossSlot {
    /// Decides in two waves; the calls of a wave run concurrently. The first wave asks every server, and
    /// nothing is written if one denies. The second wave charges every server. If one denies now, because
    /// another client charged in between, the store takes the other charges back.
    ///
    /// No limit ever admits more than it may. If a caller stops after the second wave and before the charges
    /// are taken back, they stay: the caller is denied or gets no answer, and up to the batch's cost is
    /// unavailable until it refills. A charge also stays if it can no longer be told apart from other
    /// clients' charges, because a window ended in between; if the algorithm has no
    /// [`undo`](Algorithm::undo) (in Lua: no `undo`, `settle` or `mark`); or if the limit counts attempts.
    /// Two batches that compete for the last place of several limits may both be denied.
    ///
    /// In every other operation each server does its own part. If one part fails and another succeeds, the
    /// error is [`RedisError::InPart`]. A request under an id can be repeated and takes effect once.
    #[default]
    Reserve,
    /// Refuses the batch with [`RedisError::CrossSlot`] before it sends a request.
    Refuse,
}

/// A [`Store`] on Redis or a compatible server, in the mode `M`. See the [crate's
/// documentation](crate).
///
/// Cheap to clone; clones share the connection.
pub struct RedisStore<M = Lua, C = RedisConnection> {
    pub(crate) inner: Arc<Inner<C>>,
    mode: PhantomData<M>,
}

/// What the clones of a store share.
pub(crate) struct Inner<C> {
    pub(crate) connection: C,
    /// The servers, as messages name them.
    pub(crate) peer: Peer,
    pub(crate) keys: Keys,
    pub(crate) cross_slot: CrossSlot,
    pub(crate) scripts: Scripts,
    /// Used by the compare-and-set mode.
    pub(crate) turns: Turns,
    /// Used by the Lua mode; `None` if it does not merge.
    pub(crate) calls: Option<SharedCalls>,
    /// Where they are sent.
    pub(crate) runtime: Arc<StoreRuntime>,
    deadline: Duration,
    /// Whether the server has refused `SET … IFEQ`.
    pub(crate) lacks_ifeq: AtomicBool,
}

impl<C: Connection> Inner<C> {
    /// The deadline of a decision that begins now.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::within(self.deadline)
    }

    /// What a script answers, called by its hash, and by its text if the server does not know it. The arguments
    /// begin as [`evalsha`] returns them; `key` is one of the keys.
    pub(crate) async fn eval<'w>(
        &self,
        key: &str,
        script: &'w Script,
        words: &mut [Argument<'w>],
        try_again: TryAgain,
        deadline: Deadline,
    ) -> Result<Vec<u8>> {
        words[1] = Argument::Text(&script.sha);
        let mut is_known = true;
        loop {
            let answer = match try_again {
                TryAgain::Wait => self.connection.send(key, words, deadline).await,
                TryAgain::Return => self.connection.send_splittable(key, words, deadline).await,
            };
            match answer {
                Ok(Reply::Text(answer)) => return Ok(answer),
                Ok(other) => return Err(self.peer.unexpected(&other)),
                // The server restarted, was flushed, or never saw it. Nothing has run yet.
                Err(RedisError::Server { code, .. }) if is_known && code == "NOSCRIPT" => {
                    is_known = false;
                    words[0] = Argument::Text("EVAL");
                    words[1] = Argument::Text(&script.text);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The time of a request: the one that it was given, or that of the server which keeps `key`.
    pub(crate) async fn now(&self, key: &str, now: Now, deadline: Deadline) -> Result<Timestamp> {
        if let Now::At(now) = now {
            return Ok(now);
        }
        self.time(&self.connection.send(key, &[Argument::Text("TIME")], deadline).await?)
    }

    /// The time in the reply to TIME.
    pub(crate) fn time(&self, reply: &Reply) -> Result<Timestamp> {
        reply.as_time().ok_or_else(|| self.peer.unexpected(reply))
    }

    /// The value in the reply to GET.
    pub(crate) fn value(&self, reply: Reply) -> Result<Option<Vec<u8>>> {
        match reply {
            Reply::Nil => Ok(None),
            Reply::Text(bytes) => Ok(Some(bytes)),
            other => Err(self.peer.unexpected(&other)),
        }
    }

    /// The bytes of a limit's state under a key.
    pub(crate) async fn get<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<Option<Vec<u8>>> {
        match self.connection.send(key, &["GET", key].map(Argument::Text), deadline).await {
            Ok(reply) => self.value(reply),
            Err(error) if error.is_wrong_type() => Err(RedisError::corrupt(limit, key, WRONG_TYPE)),
            Err(error) => Err(error),
        }
    }
}

/// The arguments of a script's call up to its keys. [`Inner::eval`] sets the hash.
pub(crate) fn evalsha<'w>(keys: impl ExactSizeIterator<Item = &'w str>) -> Vec<Argument<'w>> {
    const ARGUMENTS_PER_KEY: usize = 16;
    let count = keys.len();
    let mut words = Vec::with_capacity(ARGUMENTS_PER_KEY * count);
    words.extend([Argument::Text("EVALSHA"), Argument::Text(""), Argument::Number(count as u64)]);
    words.extend(keys.map(Argument::Text));
    words
}

/// How a mode with reservations decides a batch whose keys all lie on one server.
pub(crate) trait SingleSlot<A: Algorithm>: Sync {
    /// Runs the batch.
    fn apply_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Verdict>> + Send;

    /// Checks whether that would be refused, and writes nothing.
    fn try_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// A mode that keeps the states of this algorithm.
pub trait KeepsState<A: Algorithm> {
    /// The stored state of a limit for a key.
    #[doc(hidden)]
    fn state_within(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Option<A::State>>> + Send;

    /// Cuts the states of these limits under a key that are from the future, or only finds them: the position of each
    /// limit that has one, and by how much longer the state would hold its key than a full limit.
    #[doc(hidden)]
    fn heal_key(
        &self,
        limits: &Limits<A>,
        key: &str,
        dry_run: bool,
    ) -> impl Future<Output = Result<Vec<(usize, u64)>>> + Send;
}

impl<M: Mode, C: Connection> RedisStore<M, C> {
    /// The stored state of a limit for a key.
    ///
    /// # Errors
    /// The server does not answer, no limit wrote the value, or the mode cannot decide the limit.
    pub async fn state<A: Algorithm>(&self, limit: &Limit<A>, key: &str) -> Result<Option<A::State>>
    where
        Self: KeepsState<A>,
    {
        self.state_within(limit, key, self.inner.deadline()).await
    }
}

impl<M: KeepsReservations, C: Connection> RedisStore<M, C> {
    /// The key on the server of a limit's reservation for a caller's key under an id.
    #[must_use]
    pub fn reservation_key<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> String {
        self.inner.keys.of_reservation(&format!("{}{}", limit.state_name(), M::MARK), id, key)
    }

    /// The reservation of a limit for a key under an id, if the server still has it.
    ///
    /// # Errors
    /// The server does not answer, or the value is no reservation.
    pub async fn reservation<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> Result<Option<Reservation>> {
        let key = self.reservation_key(limit, key, id);
        let Some(bytes) = self.inner.get(limit, &key, self.inner.deadline()).await? else {
            return Ok(None);
        };
        let reservation = reservation::decode(&bytes);
        reservation.map(Some).ok_or_else(|| RedisError::corrupt(limit, &key, LEFT))
    }
}

impl<A: KeepsEntries, M: Mode, C: Connection> EntryStore<A> for RedisStore<M, C>
where
    Self: KeepsState<A> + Store<A, Error = RedisError>,
{
    async fn entries(&self, limit: &Limit<A>, key: &str, now: Now) -> Result<Vec<WindowEntry>> {
        let deadline = self.inner.deadline();
        let state = self.state_within(limit, key, deadline).await?;
        let Some(state) = state else { return Ok(Vec::new()) };
        let now = self.inner.now(&self.inner.keys.shared(key), now, deadline).await?;
        Ok(limit.algorithm().entries_of(&state, now).to_vec())
    }
}

/// Refuses an operation that an algorithm lacks: what is refused on no states is refused on any.
pub(crate) fn refuse_unsupported<A: Algorithm>(batch: &Batch<'_, A>) -> Result<()> {
    let now = Timestamp::ZERO;
    let _ = decide(batch, now, &mut Snapshot { now, states: Vec::new() })?;
    Ok(())
}

/// The time to live of a key whose state stops mattering at `expires`.
pub(crate) fn ttl_ms(expires: Timestamp, now: Timestamp, time: Now) -> u64 {
    (expires.saturating_us_since(now) + time.padding_us()).div_ceil(1_000).max(1)
}

/// By how much longer a state holds its key than a full limit does, and the full limit as of `now` to cut it to;
/// `None` for a state that is not from the future.
pub(crate) fn cut<A: Algorithm>(
    algorithm: &A,
    state: Option<&A::State>,
    now: Timestamp,
) -> Option<(u64, Write<A::State>)> {
    let full = algorithm.filled(now);
    let held_us = algorithm.step(state, now, 0).decision.reset_after_us;
    let ahead_us = held_us.saturating_sub(full.decision.reset_after_us);
    (ahead_us > 0).then_some((ahead_us, full.write))
}

// By hand: a derive would require `Clone` and `Debug` of the mode.
impl<M, C> Clone for RedisStore<M, C> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), mode: PhantomData }
    }
}

impl<M: Mode, C: fmt::Debug> fmt::Debug for RedisStore<M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("mode", &M::NAME)
            .field("connection", &self.inner.connection)
            .field("prefix", &self.inner.keys.prefix)
            .finish_non_exhaustive()
    }
}

impl<M, C: Connection> RedisStore<M, C> {
    pub(crate) fn new(
        connection: C,
        keys: Keys,
        cross_slot: CrossSlot,
        deadline: Duration,
        merges: bool,
        runtime: Arc<StoreRuntime>,
    ) -> Self {
        let inner = Inner {
            calls: merges.then(|| SharedCalls::new(connection.is_cluster())),
            runtime,
            peer: Peer::new(Arc::clone(connection.address())),
            connection,
            keys,
            cross_slot,
            scripts: Scripts::default(),
            turns: Turns::default(),
            deadline,
            lacks_ifeq: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner), mode: PhantomData }
    }
}

impl<M, C> RedisStore<M, C> {
    /// The prefix of every key.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.inner.keys.prefix
    }

    /// The same connection and prefix in another mode. The modes keep separate states.
    #[must_use]
    pub fn in_mode<N: Mode>(&self) -> RedisStore<N, C> {
        RedisStore { inner: Arc::clone(&self.inner), mode: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_lives_until_the_whole_millisecond_in_which_its_state_ends() {
        let at = Timestamp::saturating_from_us;
        for (ends_us, due) in [(0, 1), (1_000, 1), (1_001, 1), (2_000, 1), (2_001, 2), (3_000, 2)] {
            assert_eq!(ttl_ms(at(ends_us), at(1_000), Now::Store), due, "{ends_us}");
        }
    }
}
