//! [`RedisStore`]: a connection, a key prefix and the mode that decides batches.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ratelimit_core::algorithm::{LoggedRequest, Recovery, Write};
use ratelimit_core::store::{Batch, LogStore, Now, Reservation, Snapshot, decide};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, Clock, Limit, ReservationId, Store, SystemClock, Timestamp, Verdict,
};

use crate::calls::SharedCalls;
use crate::connection::{Argument, Connection, Peer, RedisConnection, Reply, TryAgain};
use crate::deadline::Deadline;
use crate::error::{LEFT, RedisError, Result, WRONG_TYPE};
use crate::key::Keys;
use crate::mode::{Lua, Sealed};
use crate::records::{KnownRecords, Looked, Premise};
use crate::reservation;
use crate::runtime::StoreRuntime;
use crate::script::Script;
use crate::scripts::Scripts;
use crate::turns::{Taken, Turns};

/// What the store does with a batch whose keys lie in several slots of a cluster, and so on several
/// servers. A batch within one slot, or on a single server, is one script whatever you choose.
/// [`Tag`](crate::Tag) keeps identifiers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CrossSlot {
    /// Decides in two waves; the calls of a wave run concurrently. The first wave asks every
    /// server, and nothing is written if one denies. The second wave charges every server. If one
    /// denies now, because another client charged in between, the store takes the other charges
    /// back.
    ///
    /// No limit ever admits more than it may. If a caller stops after the second wave and before
    /// the charges are taken back, they stay: the caller is denied or gets no answer, and up to the
    /// batch's cost is unavailable until it refills. A charge also stays if it can no longer be
    /// told apart from other clients' charges, because a window ended in between; if the algorithm
    /// has no [`undo`](Algorithm::undo) (in Lua: no `undo`, `settle` or `mark`); or if the limit
    /// counts attempts. Two batches that compete for the last place of several limits may both be
    /// denied.
    ///
    /// In every other operation each server does its own part. If one part fails and another
    /// succeeds, the error is [`RedisError::InPart`]. A request under an id can be repeated and
    /// takes effect once.
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
    /// Used by the Lua mode.
    pub(crate) records: KnownRecords,
    /// Used by the compare-and-set mode.
    pub(crate) turns: Turns,
    /// Used by the Lua mode; `None` if it does not merge.
    pub(crate) calls: Option<SharedCalls>,
    /// Where they are sent.
    pub(crate) runtime: Arc<StoreRuntime>,
    deadline: Duration,
    /// The program's, if it was set.
    clock: Option<Arc<dyn Clock>>,
    /// Whether the server has refused `SET … IFEQ`.
    pub(crate) lacks_ifeq: AtomicBool,
}

impl<C: fmt::Debug> fmt::Debug for Inner<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("connection", &self.connection)
            .field("prefix", &self.keys.prefix)
            .finish_non_exhaustive()
    }
}

impl<C: Connection> Inner<C> {
    /// The deadline of a decision that begins now.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::within(self.deadline)
    }

    /// What the program's clock says.
    pub(crate) fn program_time(&self) -> Timestamp {
        let system = || SystemClock::new().now();
        self.clock.as_ref().map_or_else(system, Clock::now)
    }

    /// What a script answers, called by its hash, and by its text if the server does not know it.
    /// The arguments begin as [`evalsha`] returns them; `key` is one of the keys.
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

/// The arguments of a script's call up to its keys, with room for those of so many checks.
/// [`Inner::eval`] sets the hash.
pub(crate) fn evalsha<'w>(
    keys: impl ExactSizeIterator<Item = &'w str>,
    checks: usize,
) -> Vec<Argument<'w>> {
    const ARGUMENTS_PER_CHECK: usize = 16;
    let count = keys.len();
    let mut words = Vec::with_capacity(count + ARGUMENTS_PER_CHECK * checks);
    words.extend([Argument::Text("EVALSHA"), Argument::Text(""), Argument::Number(count as u64)]);
    words.extend(keys.map(Argument::Text));
    words
}

/// Adds the time, as `begin.lua` reads it: none, or a given one and by how many milliseconds it
/// extends the life of keys.
pub(crate) fn push_time(words: &mut Vec<Argument<'_>>, time: Now) {
    match time {
        Now::Store => words.push(Argument::Text("")),
        Now::At(now) => {
            words.extend([now.as_us(), time.padding_us() / 1_000].map(Argument::Number));
        }
    }
}

/// A mode that decides limits of this algorithm: [`Lua`], [`Cas`](crate::Cas) or
/// [`Multi`](crate::Multi). All modes decide alike; each keeps its own states.
///
/// ```
/// use ratelimit_core::{AnyAlgorithm, Limit, Store};
/// use ratelimit_core::store::{Batch, Check, Op};
/// use ratelimit_redis::{Mode, RedisError, RedisStore};
///
/// async fn reset<M: Mode<AnyAlgorithm>>(
///     store: &RedisStore<M>,
///     limit: &Limit<AnyAlgorithm>,
///     key: &str,
/// ) -> Result<bool, RedisError> {
///     let was_there = store.state(limit, key).await?.is_some();
///     let check = Check { limit, key, cost: 0 };
///     let _ = store.apply(&Batch::one(&check).op(Op::Reset)).await?;
///     Ok(was_there)
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = ratelimit_servers::RedisServer::start()?;
/// # let store = RedisStore::connect(&server.url()).await?;
/// # let limit = Limit::new("login", "fixed-window 5/m".parse()?)?.count_attempts()?;
/// # let check = Check { limit: &limit, key: "alice", cost: 1 };
/// # let _ = store.apply(&Batch::one(&check)).await?;
/// assert!(reset(&store, &limit, "alice").await?);
/// assert!(!reset(&store.in_mode::<ratelimit_redis::Multi>(), &limit, "alice").await?);
/// # Ok(())
/// # }
/// ```
pub trait Mode<A: Algorithm = AnyAlgorithm>: Sealed + Sized {
    /// A part of a batch on one server.
    #[doc(hidden)]
    type InSlot<'s, C: Connection>: InSlot
    where
        A: 's;

    /// How the checks of a batch stand, as far as this process knows, and what that assumes. A mode
    /// without records refuses a batch that looks for some.
    #[doc(hidden)]
    fn look<C: Connection>(
        _store: &RedisStore<Self, C>,
        batch: &Batch<'_, A>,
    ) -> Result<Looked<A>> {
        batch.without_records()?;
        Ok(Looked::NOTHING)
    }

    /// Decides a batch whose keys all lie on one server, by what it assumes, and notes the states
    /// that it left where that is asked for and known.
    #[doc(hidden)]
    #[must_use]
    fn decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        premises: &'s [Premise],
        deadline: Deadline,
        _left: Option<&'s mut Option<Snapshot<A::State>>>,
    ) -> impl Future<Output = Result<Verdict>> + Send {
        async move {
            let mut slot = Self::would_decide(store, batch, premises, deadline, true).await?;
            slot.charge().await?;
            Ok(slot.verdict().clone())
        }
    }

    /// What it would decide. If it `prepares` a charge, a value that no limit wrote is removed;
    /// otherwise nothing is written.
    #[doc(hidden)]
    fn would_decide<'s, C: Connection>(
        store: &'s RedisStore<Self, C>,
        batch: &'s Batch<'s, A>,
        premises: &'s [Premise],
        deadline: Deadline,
        prepares: bool,
    ) -> impl Future<Output = Result<Self::InSlot<'s, C>>> + Send;

    /// Waits until no other caller of this store works on the keys of a batch, in a mode in which
    /// they would disturb each other.
    #[doc(hidden)]
    #[must_use]
    fn take_turns<'s, C: Connection>(
        _store: &'s RedisStore<Self, C>,
        _batch: &Batch<'_, A>,
        _deadline: Deadline,
    ) -> impl Future<Output = Vec<Taken<'s>>> + Send {
        std::future::ready(Vec::new())
    }

    /// The keys under which a limit has a state, or parts of it, for an identifier.
    #[doc(hidden)]
    fn keys_of<C: Connection>(
        store: &RedisStore<Self, C>,
        limit: &Limit<A>,
        identifier: &str,
    ) -> Vec<String>;

    /// The stored state of a limit for an identifier.
    #[doc(hidden)]
    fn read<C: Connection>(
        store: &RedisStore<Self, C>,
        limit: &Limit<A>,
        identifier: &str,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Option<A::State>>> + Send {
        async move {
            let key = Self::keys_of(store, limit, identifier).pop().unwrap_or_default();
            let mut states = Self::read_at(store, &[limit], &key, deadline).await?.states;
            Ok(states.pop().flatten())
        }
    }

    /// The states that these limits have under this key.
    #[doc(hidden)]
    fn read_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        deadline: Deadline,
    ) -> impl Future<Output = Result<StatesAt<A::State>>> + Send;

    /// Replaces the states of some of these limits by a full one, unless they have changed
    /// meanwhile.
    #[doc(hidden)]
    fn replace_at<C: Connection>(
        store: &RedisStore<Self, C>,
        limits: &[&Limit<A>],
        key: &str,
        states: StatesAt<A::State>,
        full: Vec<Option<Write<A::State>>>,
        deadline: Deadline,
    ) -> impl Future<Output = Result<()>> + Send;

    /// How to read when the newest charges of built-in states were made under a key, by what that
    /// says about its limit; `None` if the mode keeps no state there.
    #[doc(hidden)]
    fn newest_at(limit: &str) -> Option<NewestAt>;
}

/// What a mode decides about a part of a batch, before the whole is decided.
pub trait InSlot: Send {
    /// The verdict, so far.
    fn verdict(&self) -> &Verdict;

    /// The verdict if another part denies.
    fn denied(&mut self) -> Result<Verdict>;

    /// Whether others have changed its states since. One that has expired was not changed by
    /// others.
    fn has_changed_since(&self, _before: &Self) -> bool {
        true
    }

    /// Charges the part. Returns whether all of it is charged; otherwise others came first.
    fn charge(&mut self) -> impl Future<Output = Result<bool>> + Send;

    /// Takes back what it has charged, where the mode can. Returns whether nothing is charged any
    /// more.
    fn take_back(&mut self, _deadline: Deadline) -> impl Future<Output = Result<bool>> + Send {
        std::future::ready(Ok(false))
    }
}

/// The states of limits under a key, as of a moment.
#[derive(Debug)]
pub struct StatesAt<S> {
    pub(crate) now: Timestamp,
    /// In the order of the limits.
    pub(crate) states: Vec<Option<S>>,
    /// What was read, by which the mode sees that nothing has changed.
    pub(crate) read: Vec<Vec<u8>>,
}

/// How to read when charges were made.
#[derive(Debug)]
pub struct NewestAt {
    /// The command, and its arguments after the key.
    pub(crate) command: &'static str,
    pub(crate) arguments: &'static [&'static str],
    pub(crate) times: TimesIn,
}

/// The times in the strings of a reply.
pub(crate) type TimesIn = fn(&[&[u8]]) -> Vec<u64>;

impl<M, C: Connection> RedisStore<M, C> {
    /// The stored state of a limit for a key.
    ///
    /// # Errors
    /// The server does not answer, no limit wrote the value, or the mode cannot decide the limit.
    pub async fn state<A: Algorithm>(&self, limit: &Limit<A>, key: &str) -> Result<Option<A::State>>
    where
        M: Mode<A>,
    {
        M::read(self, limit, key, self.inner.deadline()).await
    }

    /// The key on the server of a limit's reservation for a caller's key under an id. In the mode
    /// of transactions there is none.
    #[must_use]
    pub fn reservation_key<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> String
    where
        M: Mode<A>,
    {
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
    ) -> Result<Option<Reservation>>
    where
        M: Mode<A>,
    {
        let key = self.reservation_key(limit, key, id);
        let Some(bytes) = self.inner.get(limit, &key, self.inner.deadline()).await? else {
            return Ok(None);
        };
        let reservation = reservation::decode(&bytes);
        reservation.map(Some).ok_or_else(|| RedisError::corrupt(limit, &key, LEFT))
    }
}

impl<A: Algorithm, M: Mode<A>, C: Connection> LogStore<A> for RedisStore<M, C>
where
    Self: Store<A, Error = RedisError>,
{
    async fn logged(&self, limit: &Limit<A>, key: &str, now: Now) -> Result<Vec<LoggedRequest>> {
        let deadline = self.inner.deadline();
        let state = M::read(self, limit, key, deadline).await?;
        let Some(state) = state else { return Ok(Vec::new()) };
        let now = self.inner.now(&self.inner.keys.shared(key), now, deadline).await?;
        Ok(limit.algorithm().logged(&state, now).to_vec())
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

/// By how much longer a state holds its key than a full limit does, and the full limit as of `now`
/// to cut it to; `None` for a state that is not from the future.
///
/// Where requests have numbers of their own, a slower bucket holds its key for longer: there the
/// time of the state tells.
pub(crate) fn cut<A: Algorithm>(
    limit: &Limit<A>,
    state: Option<&A::State>,
    now: Timestamp,
) -> Option<(u64, Write<A::State>)> {
    let algorithm = limit.algorithm();
    let may_be_slower = limit.max().is_some() && algorithm.recovery() == Some(Recovery::Gradual);
    if may_be_slower && algorithm.charged_at(state, now) <= now {
        return None;
    }
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
        let inner = &self.inner;
        f.debug_struct("RedisStore").field("mode", &M::NAME).field("inner", inner).finish()
    }
}

impl<M, C: Connection> RedisStore<M, C> {
    pub(crate) fn new(
        connection: C,
        keys: Keys,
        cross_slot: CrossSlot,
        (deadline, clock): (Duration, Option<Arc<dyn Clock>>),
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
            records: KnownRecords::default(),
            turns: Turns::default(),
            deadline,
            clock,
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
