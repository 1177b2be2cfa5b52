//! [`Waiter`]: waits until a request is admitted.

use std::sync::Arc;
use std::time::Duration;

use derive_where::derive_where;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, ConfigError, Decision, Gcra, Identifiers, Limit, LimitCosts, Numbers,
    OnOutage, RateLimiter, Store, Verdict,
};
use tokio::time::{Instant, sleep_until};

mod layer;
mod queue;

pub use layer::{WaitLayer, WaitService, WaitServiceError};

use queue::{LONGEST_HOLD, QueueKey, QueuePosition, Turn, WaitQueues};

use crate::fields::advice::Advice;
use crate::gate::Deciding;

/// The numbers of a caller, where they are not those of the limits.
type NumbersOf<A> = dyn Fn(&dyn Identifiers) -> Option<Arc<Numbers<A>>> + Send + Sync;

/// Waits until a request is admitted, instead of refusing it.
///
/// Callers with the same identifiers are served in the order in which they came, in this process:
/// the first of them asks the store and sleeps for the wait that it returns, and the others wait
/// behind it. Past a wait that is kept and not polled they go on after a second, and then not
/// always in order. Callers with other identifiers do not wait for them, unless a limit denies
/// both: those whom one limit has denied under one key are served in the order in which it denied
/// them, and callers that come later wait behind them. So one request at a time asks a limit that
/// is used up, and a request of a large cost is not starved by smaller ones.
///
/// Other processes, and requests that do not wait, know nothing of these queues: as long as they
/// take all that comes back, a request that needs more than they leave is denied again and again.
/// Give such requests a limit of their own, or a smaller cost.
///
/// A wait that is dropped has charged nothing, unless the store was deciding at that moment.
///
/// A place of a [`Concurrency`](ratelimit_core::Concurrency) limit has to be given back, and no
/// wait does that: such a limit is refused. Acquire it by
/// [`reserve`](RateLimiter::reserve).
///
/// The limiter knows the client's own limit. What another service says remains goes to
/// [`adopt`](Self::adopt), and what it asks for to [`hold_back`](Self::hold_back).
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::*;
/// use ratelimit_tower::Waiter;
///
/// # async fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), ratelimit_tower::WaitError<S::Error>> {
/// let waiter = Waiter::new(limiter).jitter(Duration::from_millis(50));
/// waiter.until_allowed("api.example.com", Duration::from_secs(30)).await?;
/// // send the request
/// # Ok(())
/// # }
/// ```
#[derive_where(Clone, Debug)]
pub struct Waiter<S, A = AnyAlgorithm> {
    #[derive_where(skip(Debug))]
    limiter: Arc<RateLimiter<S, A>>,
    #[derive_where(skip(Debug))]
    queues: Arc<WaitQueues>,
    jitter: Duration,
    #[derive_where(skip(Debug))]
    numbers: Option<Arc<NumbersOf<A>>>,
    /// Its charge in the store is the time for which a caller is held back, in microseconds.
    #[derive_where(skip(Debug))]
    holds: Option<Arc<Limit<A>>>,
}

/// Why a wait ended without an admission. Nothing was charged, unless the store's error is
/// `Indeterminate`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError<E> {
    /// The wait would be longer than the caller allows. With a verdict, its `retry_after` is the
    /// wait; without one, other callers were still waiting ahead.
    #[error("the wait would be longer than the {max_wait:?} that the caller allows")]
    TooLong {
        /// What the caller allows.
        max_wait: Duration,
        /// The denial, if the store was asked.
        verdict: Option<Verdict>,
    },
    /// The callers are [held back](Waiter::hold_back) for longer than this caller allows.
    #[error(
        "the requests are held back for another {wait:?}, longer than the {max_wait:?} that the caller allows"
    )]
    HeldBack {
        /// What the caller allows.
        max_wait: Duration,
        /// How long the requests are still held back.
        wait: Duration,
    },
    /// No wait is long enough: the cost is above the capacity of a limit, a limit has a rate of 0,
    /// or it never admits the caller again, such as where a record blocks it for ever.
    #[error("{}", why_never(verdict))]
    Never {
        /// The denial.
        verdict: Verdict,
    },
    /// A limit grants leases, which no wait gives back.
    #[error(transparent)]
    Unsuitable(ConfigError),
    /// The store cannot decide.
    #[error(transparent)]
    Store(#[from] E),
}

/// Why this denial has no end, and what to do about it.
fn why_never(verdict: &Verdict) -> &'static str {
    let endless =
        verdict.decisions().iter().find(|one| !one.allowed && one.retry_after_us.is_none());
    match endless {
        Some(denial) if denial.limit == 0 => {
            "a limit has a rate of 0, which admits nothing; give it, or the caller, another rate"
        }
        Some(denial) if denial.cost <= denial.limit => {
            "a limit never admits the caller again, such as where a record blocks it for ever; clear that record"
        }
        _ => "the cost is above the capacity of a limit; lower it, or split the request",
    }
}

impl<S: Store<A>, A: Algorithm> Waiter<S, A> {
    /// A waiter for admissions of this limiter. Its clones have one queue.
    #[must_use]
    pub fn new(limiter: impl Into<Arc<RateLimiter<S, A>>>) -> Self {
        let (limiter, queues) = (limiter.into(), Arc::default());
        Self { limiter, queues, jitter: Duration::ZERO, numbers: None, holds: None }
    }

    /// Checks that every limit [suits](Limit::check_reserving) a waiter. Without this check, each
    /// wait for such a limit is refused.
    ///
    /// # Errors
    /// A limit that grants leases.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.limiter.limits().iter().try_for_each(|limit| limit.check_reserving(false))?;
        Ok(self)
    }

    /// The same waiter, which shares through its store for how long callers are held back: with all
    /// waiters over this store that use this name, in any process.
    /// [`hold_back_all`](Self::hold_back_all) and [`WaitLayer::heed_answers`] tell them. Each
    /// request then asks the store twice.
    ///
    /// The store keeps it under a limit of this name, which has to differ from the names of other
    /// limits. It has to be a store that can [adopt](Op::Adopt), and the clock is the store's.
    /// While a `Fallback` decides without the store, each process holds back by what it was told
    /// itself.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratelimit_core::*;
    /// use ratelimit_tower::Waiter;
    ///
    /// # async fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), Box<dyn std::error::Error>>
    /// # where S::Error: 'static {
    /// let waiter = Waiter::new(limiter).shared_holds("provider-holds")?;
    /// waiter.hold_back_all("api.example.com", Duration::from_secs(7)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// No limit can have this name, or one of the limiter has it.
    pub fn shared_holds(self, name: &str) -> Result<Self, ConfigError>
    where
        A: From<Gcra>,
    {
        if self.limiter.limits().has(name) {
            return Err(ConfigError::new(format!(
                "{name:?} is the name of a limit; choose another name for what is held back"
            )));
        }
        // A microsecond of a hold is a unit, of which one flows back per microsecond.
        let most_us = u64::try_from(LONGEST_HOLD.as_micros()).unwrap_or(u64::MAX);
        let charged = Gcra::per_second(1_000_000).burst(most_us).build()?;
        // In an outage, each process holds back by what it was told itself.
        let holds = Limit::new(name, charged.into())?.on_outage(OnOutage::Open);
        let holds = Some(Arc::new(holds));
        Ok(Self { holds, ..self })
    }

    /// The same waiter, whose waits are longer by a random time of up to this, so that processes
    /// that share a limit do not all ask at the same moment. No wait exceeds the caller's maximum;
    /// the store's calls come on top, one or, for a caller that queued, two.
    #[must_use]
    pub const fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// The same waiter, whose limits decide the requests of each caller by the [numbers](Numbers)
    /// that this function returns, in place of their own. `None` for a caller without any.
    ///
    /// The function is called each time that the store is asked, so it looks the numbers up and
    /// does not build them: a caller that waits is admitted by those that it has by then. Numbers
    /// that a limit does not accept are an error of the store.
    ///
    /// ```
    /// # use std::collections::HashMap;
    /// # use std::sync::Arc;
    /// # use ratelimit_core::*;
    /// use ratelimit_tower::Waiter;
    ///
    /// # fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>, of: HashMap<String, Arc<Numbers>>) {
    /// let waiter = Waiter::new(limiter)
    ///     .numbers_of(move |caller| of.get(&*caller.identifier("tenant")?).cloned());
    /// # drop(waiter);
    /// # }
    /// ```
    #[must_use]
    pub fn numbers_of(
        mut self,
        numbers: impl Fn(&dyn Identifiers) -> Option<Arc<Numbers<A>>> + Send + Sync + 'static,
    ) -> Self {
        self.numbers = Some(Arc::new(numbers));
        self
    }

    /// Waits until a request of cost 1 is admitted, and returns the [summary](Verdict::summary) of
    /// the verdict.
    ///
    /// # Errors
    /// The wait would be longer than `max_wait`; the store's error.
    pub async fn until_allowed<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        max_wait: Duration,
    ) -> Result<Decision, WaitError<S::Error>> {
        self.until_n_allowed(caller, 1, max_wait).await
    }

    /// Waits until a request of this cost is admitted.
    ///
    /// # Errors
    /// The wait would be longer than `max_wait`; a cost above the capacity, at once; the store's
    /// error.
    pub async fn until_n_allowed<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
        max_wait: Duration,
    ) -> Result<Decision, WaitError<S::Error>> {
        let limiter = &*self.limiter;
        // A maximum beyond what the clock can tell is none.
        let deadline = Instant::now().checked_add(max_wait);
        let too_long = |verdict| WaitError::TooLong { max_wait, verdict };
        let held_back = |wait| WaitError::HeldBack { max_wait, wait };
        let (limits, request) = (limiter.limits().as_slice(), limiter.request(caller));
        let applicable: Vec<_> = request.applicable().collect();
        for limit in applicable.iter().map(|position| &limits[*position]) {
            limit.check_reserving(false).map_err(WaitError::Unsuitable)?;
        }
        let mut position = self.queues.enter(self.queue_of(caller));
        // Those who would wait for too long need not queue up for it.
        position.held_until(deadline).map_err(held_back)?;
        let numbers = self.numbers_for(caller);
        let deciding = Deciding { limiter, numbers: numbers.as_deref() };
        if applicable.iter().any(|position| deciding.capacity(&limits[*position]) < cost) {
            // No wait is long enough. Only the store can say so in a verdict. During an outage it
            // may admit the request in its turn.
            let verdict = deciding.request(caller).cost(cost).peek().await?;
            if !verdict.allowed() && verdict.retry_after().is_none() {
                return Err(WaitError::Never { verdict });
            }
        }
        let _turn = position.take_turn(deadline).await.ok_or_else(|| too_long(None))?;
        let shared = self.shared_queues(caller, &applicable);
        // The turn at a limit that has denied it, and the limits at which it has let those before
        // it go.
        let (mut at_limit, mut passed): (Option<Turn<'_>>, Vec<usize>) = (None, Vec::new());
        loop {
            if let Some(at) = position.held_until(deadline).map_err(held_back)? {
                (at_limit, passed) = Default::default();
                self.sleep(at, deadline, [Some(&position), None]).await;
                continue;
            }
            if let Some(wait) = self.held_elsewhere(caller).await? {
                position.hold_back(wait);
                continue;
            }
            let is_busy = |limit: &usize| {
                !passed.contains(limit) && self.queues.is_waited_in(&shared[*limit])
            };
            if let Some(busy) = (0..shared.len()).find(is_busy) {
                drop(at_limit.take());
                let turn = position.turn_in(shared[busy].clone(), deadline).await;
                at_limit = Some(turn.ok_or_else(|| too_long(None))?);
                passed.push(busy);
                continue;
            }
            let asked = Instant::now();
            let turns = [Some(&position), at_limit.as_ref().map(|turn| &turn.position)];
            turns.into_iter().flatten().for_each(|turn| turn.goes_on_by(asked));
            let numbers = self.numbers_for(caller);
            let deciding = Deciding { limiter, numbers: numbers.as_deref() };
            let verdict = deciding.request(caller).cost(cost).check().await?;
            if verdict.allowed() {
                return Ok(*verdict.summary());
            }
            let Some(wait) = verdict.retry_after() else {
                return Err(WaitError::Never { verdict });
            };
            let answered = Instant::now();
            let is_in_time = |at: &Instant| deadline.is_none_or(|deadline| *at <= deadline);
            let Some(at) = answered.checked_add(wait).filter(is_in_time) else {
                return Err(too_long(Some(verdict)));
            };
            let decisions = verdict.decisions().iter().zip(0..);
            let denials = decisions.filter(|(decision, _)| !decision.allowed);
            let longest = denials.max_by_key(|(decision, _)| decision.retry_after_us);
            // One that recovers while the store is asked is asked by all at once: in turns they
            // would not use it up.
            let denier = longest.filter(|_| wait >= answered - asked).map(|(_, denier)| denier);
            if let Some(denier) = denier.filter(|denier| *denier < shared.len())
                && (at_limit.is_none() || passed.last() != Some(&denier))
            {
                drop(at_limit.take());
                let turn = position.turn_in(shared[denier].clone(), deadline).await;
                at_limit = Some(turn.ok_or_else(|| too_long(None))?);
                passed.push(denier);
            }
            passed.drain(..passed.len().saturating_sub(1));
            let turns = [Some(&position), at_limit.as_ref().map(|turn| &turn.position)];
            self.sleep(at, deadline, turns).await;
        }
    }

    /// Sleeps until then, longer by the jitter, and no longer than the deadline, while the caller
    /// keeps these turns.
    async fn sleep(
        &self,
        at: Instant,
        deadline: Option<Instant>,
        turns: [Option<&QueuePosition<'_>>; 2],
    ) {
        if at <= Instant::now() {
            return;
        }
        let latest = at.checked_add(self.jitter).unwrap_or(at);
        turns.into_iter().flatten().for_each(|turn| turn.goes_on_by(latest));
        let most_us = u64::try_from(self.jitter.as_micros()).unwrap_or(u64::MAX);
        let jitter = Duration::from_micros(fastrand::u64(..=most_us));
        let jittered = at.checked_add(jitter).unwrap_or(at);
        sleep_until(deadline.map_or(jittered, |deadline| jittered.min(deadline))).await;
    }

    /// For how long the caller is held back by what the store says.
    async fn held_elsewhere<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Option<Duration>, S::Error> {
        let Some(holds) = &self.holds else { return Ok(None) };
        // All of it is there again when the time is over.
        let check =
            Check { limit: holds, key: &self.hold_key(caller), cost: holds.algorithm().capacity() };
        let verdict = self.limiter.store().apply(&Batch::one(&check).op(Op::Peek)).await?;
        Ok(verdict.retry_after().filter(|_| !verdict.allowed()))
    }

    /// Holds back the requests of callers with these identifiers for this long, because the service
    /// that they go to asks for it: nothing that begins to wait from now on, or waits already, is
    /// admitted before. The longest time that was asked for counts, and at most a day, so that a
    /// service's mistake does not stop a client for good.
    ///
    /// A request whose maximum wait is shorter is refused at once, and charges nothing. Requests
    /// that were admitted before are not called back. When the time is over, requests go in the
    /// order in which they came, as fast as the limiter allows.
    ///
    /// It holds back the requests of this waiter and its clones.
    /// [`hold_back_all`](Self::hold_back_all) tells other processes.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use http::HeaderMap;
    /// use ratelimit_tower::{Advice, Waiter};
    ///
    /// # fn example<S: Store<AnyAlgorithm>>(waiter: Waiter<S>, headers: &HeaderMap) {
    /// if let Some(wait) = Advice::from_headers(headers).wait() {
    ///     waiter.hold_back("api.example.com", wait);
    /// }
    /// # }
    /// ```
    pub fn hold_back<C: Identifiers + ?Sized>(&self, caller: &C, wait: Duration) {
        self.queues.hold_back(self.queue_of(caller), wait);
    }

    /// The same for all waiters with the same [shared holds](Self::shared_holds); without these,
    /// for this one.
    ///
    /// # Errors
    /// The store's error: a store by MULTI cannot adopt. This waiter holds its requests back
    /// nevertheless.
    pub async fn hold_back_all<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        wait: Duration,
    ) -> Result<(), S::Error> {
        self.hold_back(caller, wait);
        let Some(holds) = &self.holds else { return Ok(()) };
        let wait_us = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX);
        // The longest counts: adopting never leaves more than before.
        let cost = holds.algorithm().capacity().saturating_sub(wait_us);
        let check = Check { limit: holds, key: &self.hold_key(caller), cost };
        self.limiter.store().apply(&Batch::one(&check).op(Op::Adopt)).await.map(drop)
    }

    /// Adopts what the service that the requests go to says remains: each limit of the limiter that
    /// the answer names has no more left afterwards, and never more than before. All processes that
    /// share the limiter's store share what it says, so they do not all run into its limit. Returns
    /// the verdict, or `None` if the answer names no limit of the limiter.
    ///
    /// The service had not seen the requests that were in flight. An answer that comes late may
    /// hold back more than needed.
    ///
    /// # Errors
    /// The store's error: a store by MULTI cannot adopt.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use http::HeaderMap;
    /// use ratelimit_tower::{Advice, Waiter};
    ///
    /// # async fn example<S: Store<AnyAlgorithm>>(waiter: Waiter<S>, headers: &HeaderMap) -> Result<(), S::Error> {
    /// waiter.adopt("api.example.com", &Advice::from_headers(headers)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn adopt<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        advice: &Advice,
    ) -> Result<Option<Verdict>, S::Error> {
        let numbers = self.numbers_for(caller);
        let deciding = Deciding { limiter: &self.limiter, numbers: numbers.as_deref() };
        let (mut remaining, mut is_told) = (LimitCosts::from(0), false);
        for limit in self.limiter.limits() {
            let told = advice.limits.iter().filter(|told| told.name == limit.name());
            let told = told.map(|told| told.remaining).min();
            is_told |= told.is_some();
            let capacity = deciding.capacity(limit);
            remaining.set(limit.name(), told.map_or(capacity, |told| told.min(capacity)));
        }
        if !is_told {
            return Ok(None);
        }
        deciding.request(caller).costs(&remaining).adopt().await.map(Some)
    }

    /// The caller's own numbers now.
    fn numbers_for<C: Identifiers + ?Sized>(&self, caller: &C) -> Option<Arc<Numbers<A>>> {
        self.numbers.as_ref().and_then(|numbers| numbers(&caller))
    }

    /// The queue of a caller: the keys that its limits count by.
    fn queue_of<C: Identifiers + ?Sized>(&self, caller: &C) -> QueueKey {
        QueueKey::Caller(self.keys_of(caller))
    }

    fn keys_of<C: Identifiers + ?Sized>(&self, caller: &C) -> Vec<Option<String>> {
        let limits = self.limiter.limits().iter();
        limits.map(|limit| Some(limit.key_for(caller)?.into_owned())).collect()
    }

    /// The queues at the limits that apply to a caller, in the order of a verdict's decisions; none
    /// if all callers of one have one queue anyway.
    fn shared_queues<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        applicable: &[usize],
    ) -> Vec<QueueKey> {
        let limits = self.limiter.limits().as_slice();
        let queue = |position: &usize| {
            let key = limits[*position].key_for(caller)?.into_owned();
            Some(QueueKey::Limit(*position, key))
        };
        if limits.len() < 2 { Vec::new() } else { applicable.iter().filter_map(queue).collect() }
    }

    /// The key under which a caller is held back in the store: as under the only limit, or of all
    /// of them, each with its length.
    fn hold_key<C: Identifiers + ?Sized>(&self, caller: &C) -> String {
        let mut keys = self.keys_of(caller);
        if let [only] = &mut keys[..] {
            return only.take().unwrap_or_default();
        }
        let part = |key: &Option<String>| match key {
            Some(key) => format!("{}:{key}", key.len()),
            None => "-".to_owned(),
        };
        keys.iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests;
