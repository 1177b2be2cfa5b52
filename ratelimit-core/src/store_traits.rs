//! The [`Store`] traits: a store keeps states and decides batches.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::future::Future;

use crate::algorithms::{Algorithm, LoggedRequest, Write};
use crate::batch::{Batch, Check, States};
use crate::decision::Verdict;
use crate::error::ErrorKind;
use crate::limit::Limit;
use crate::op::Now;
use crate::record::Record;
use crate::refusal::Refusal;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

#[cfg(feature = "dyn")]
pub(crate) mod erased;

/// A store keeps states and decides batches atomically.
///
/// # Contract
///
/// For implementers; `ratelimit-testkit` tests all of it:
///
/// - The store decides a batch as [`decide`](crate::store::decide) does, isolated from every other
///   batch that shares a key.
/// - For [`Now::Store`](crate::store::Now::Store) it reads its own clock, as late as it can.
/// - It removes every state by itself, soon after the state has expired.
/// - A state belongs to the pair of the limit's [state name](Limit::state_name) and the check's
///   key, of any bytes.
/// - A [shadow limit](Limit::shadow) is to a store a limit like any other.
/// - A store without [records](RecordStore) refuses a batch with a limit that looks for them:
///   [`Batch::without_records`].
/// - A future that is dropped before it is done leaves the batch charged or not charged, and stops
///   no later one.
/// - An error means that the batch was not charged, unless its kind is
///   [`Indeterminate`](ErrorKind::Indeterminate). A denial is not an error.
pub trait Store<A: Algorithm>: Send + Sync {
    /// The error type, which includes every [`Refusal`].
    type Error: StoreError + From<Refusal>;

    /// Applies the operation of a batch to all of its checks, or to none.
    fn apply(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;

    /// Reports what this store counts of its own work, for metrics: nothing by default. A layer
    /// that wraps a store also reports the inner store's counts.
    ///
    /// Each count has the name of its metric. One that only grows has a name that ends in `_total`;
    /// any other rises and falls.
    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let _ = report;
    }

    /// Which of several servers decides this batch, as far as the store knows: a number of its own
    /// choice, the same for all batches that fail together. `None`, the default, from a store with
    /// one server. A layer that wraps a store forwards it.
    ///
    /// A layer that stops asking after failures, such as a circuit breaker, counts them by this
    /// number: one server that is down takes away only its own keys. A batch that several servers
    /// decide together has a number of their combination. The store answers from memory.
    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        let _ = batch;
        None
    }
}

/// A store that decides without waiting, so that it needs no runtime.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not decide without waiting",
    label = "this store is asynchronous",
    note = "methods whose names end in `_now`, and `immediate()` of a layer, need a store in memory; await the methods \
            without `_now`, and leave `immediate()` out, for a store on a server"
)]
pub trait SyncStore<A: Algorithm>: Store<A> {
    /// [`Store::apply`] without waiting.
    ///
    /// # Errors
    /// Those of [`Store::apply`].
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error>;

    /// Acquires one check at the store's own time, as nearly all requests do. A store can override
    /// this with a shorter path than [`apply_now`](Self::apply_now).
    ///
    /// # Errors
    /// Those of [`Store::apply`].
    #[inline]
    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, Self::Error> {
        self.apply_now(&Batch::one(&Check { limit, key, cost }))
    }
}

/// A store that lists the admitted requests of an algorithm that [keeps them](Algorithm::logged).
pub trait LogStore<A: Algorithm>: Store<A> {
    /// The admitted requests of this key that count, oldest first.
    fn logged(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<LoggedRequest>, Self::Error>> + Send;
}

/// A store that keeps [records](Record) of callers, and reads them in the step that decides.
///
/// # Contract
///
/// - Each decision is made by the records that stand at that moment: it and the changes of records
///   are linearizable.
/// - Records live apart from states: neither a reset nor the end of a state takes one away. A store
///   forgets a record only once it has ended.
/// - Only limits that [look for records](Limit::overridable) have some. A record belongs to the
///   limit's [state name](Limit::state_name) and the key.
///
/// A store without records refuses a batch with such a limit: [`Refusal::NoRecords`].
///
/// The limiter's methods, such as [`set_record`](crate::RateLimiter::set_record), are made of these
/// two.
pub trait RecordStore<A: Algorithm>: Store<A> {
    /// The record of this key that stands now.
    fn record(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> impl Future<Output = Result<Option<Record<A>>, Self::Error>> + Send;

    /// Puts `next` in the place of the record `standing`, none for one that is cleared or new, and
    /// returns whether that still stood. Otherwise nothing has changed.
    fn exchange_record(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> impl Future<Output = Result<bool, Self::Error>> + Send;
}

/// A store that reports the states that a decision left.
///
/// A layer that wraps it, such as a denial cache, can then decide further requests by itself, as
/// the store would.
pub trait SnapshotStore<A: Algorithm>: Store<A> {
    /// [`Store::apply`], and the states that the decision left. `None` where the store does not
    /// know them, or where to read them would cost more than to decide.
    fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<WithSnapshot<A::State>, Self::Error>> + Send;
}

/// A verdict, and the states that it left if they are known.
pub type WithSnapshot<S> = (Verdict, Option<Snapshot<S>>);

/// The states of a batch's checks, as a decision left them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot<S> {
    /// The time of the decision.
    pub now: Timestamp,
    /// A state for each check, in their order; `None` for a key that is new. After a denial these
    /// are the states that the store read, because [a denial charges nothing](Algorithm#contract).
    pub states: Vec<Option<S>>,
}

/// Steps on known states, as a layer that wraps a store does: [`decide`](crate::store::decide)
/// leaves in them the states that it would write. There are no reservations among them.
impl<S> States<S> for Snapshot<S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.states.get(position)?.as_ref()
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let Some(state) = self.states.get_mut(position) else { return };
        match write {
            Write::Keep => {}
            Write::Put { state: after, .. } => *state = Some(after),
            Write::Remove => *state = None,
        }
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

/// The error of a store.
pub trait StoreError: core::error::Error + Send + Sync + 'static {
    /// The kind of the error.
    fn kind(&self) -> ErrorKind;
}

impl StoreError for Refusal {
    fn kind(&self) -> ErrorKind {
        self.kind()
    }
}

/// A store behind a pointer is a store.
macro_rules! stores_behind {
    ($($pointer:ty),+) => { $(
        #[deny(clippy::missing_trait_methods)]
        impl<A: Algorithm, S: Store<A> + ?Sized> Store<A> for $pointer {
            type Error = S::Error;

            fn apply(
                &self,
                batch: &Batch<'_, A>,
            ) -> impl Future<Output = Result<Verdict, Self::Error>> + Send {
                (**self).apply(batch)
            }

            fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
                (**self).report_counts(report);
            }

            fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
                (**self).server_of(batch)
            }
        }

        impl<A: Algorithm, S: LogStore<A> + ?Sized> LogStore<A> for $pointer {
            fn logged(
                &self,
                limit: &Limit<A>,
                key: &str,
                now: Now,
            ) -> impl Future<Output = Result<Vec<LoggedRequest>, Self::Error>> + Send {
                (**self).logged(limit, key, now)
            }
        }

        impl<A: Algorithm, S: RecordStore<A> + ?Sized> RecordStore<A> for $pointer {
            fn record(
                &self,
                limit: &Limit<A>,
                key: &str,
            ) -> impl Future<Output = Result<Option<Record<A>>, Self::Error>> + Send {
                (**self).record(limit, key)
            }

            fn exchange_record(
                &self,
                limit: &Limit<A>,
                key: &str,
                standing: Option<&Record<A>>,
                next: Option<&Record<A>>,
            ) -> impl Future<Output = Result<bool, Self::Error>> + Send {
                (**self).exchange_record(limit, key, standing, next)
            }
        }

        impl<A: Algorithm, S: SnapshotStore<A> + ?Sized> SnapshotStore<A> for $pointer {
            fn apply_with_snapshot(
                &self,
                batch: &Batch<'_, A>,
            ) -> impl Future<Output = Result<WithSnapshot<A::State>, Self::Error>> + Send
            {
                (**self).apply_with_snapshot(batch)
            }
        }

        #[deny(clippy::missing_trait_methods)]
        impl<A: Algorithm, S: SyncStore<A> + ?Sized> SyncStore<A> for $pointer {
            fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error> {
                (**self).apply_now(batch)
            }

            #[inline]
            fn acquire_now(
                &self,
                limit: &Limit<A>,
                key: &str,
                cost: u64,
            ) -> Result<Verdict, Self::Error> {
                (**self).acquire_now(limit, key, cost)
            }
        }
    )+ };
}

stores_behind!(&S, Arc<S>);
