//! A request that rides in a flight with others, or goes at once and alone.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;

use ratelimit_core::Verdict;
use ratelimit_core::store::{Now, Op, Snapshot, decide};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until};

use super::call::Call;
use super::sender::{LoneRequest, send};
use crate::connection::{Connection, Reply};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::flat::{MOST_CHECKS, Role, TwinCheck};
use crate::flights::{
    Charged, FlightOutcome, GroupOutcome, Joined, Load, News, Queued, RiderVerdict, RiderVerdicts,
    Seat,
};
use crate::program::LuaProgram;
use crate::store::Inner;

/// How often a task looks at the clock for the requests that wait, in parts of their time.
const LOOKS: u32 = 8;

impl<A: LuaProgram, C: Connection> Call<'_, A, C> {
    /// Decides a batch by a flat script, together with others that wait for the connection. Returns `None`, with nothing
    /// written, for a batch that no flat script decides.
    pub(super) async fn apply_riding(
        &self,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Option<Verdict>> {
        let alone = |left| Box::pin(self.apply_flat(left));
        // The task that sends for others runs there.
        let queues = self.inner.queues.as_ref().filter(|_| self.rides());
        let Some((queues, runtime)) = queues.zip(Handle::try_current().ok()) else {
            return alone(left).await;
        };
        let queue = queues.of(&self.keys[0]);
        loop {
            let (mut place, mut is_first) = (0, false);
            let costs = || self.batch.checks().iter().map(|check| check.cost);
            let mut board = |load: &mut Load, seat| {
                let boarded = load.add(seat, &self.keys, &self.twins, costs(), &runtime);
                (place, is_first) = boarded.unwrap_or_default();
                boarded.is_some()
            };
            let joined = poll_fn(|context| {
                Poll::Ready(queue.join(
                    self.deadline,
                    Instant::now(),
                    context.waker().clone(),
                    &mut board,
                ))
            });
            let mut seat = match joined.await {
                Joined::Alone => return alone(left).await,
                Joined::Goes(number) => {
                    let _alone =
                        LoneRequest { inner: self.inner, queue: &queue, number, runtime: &runtime };
                    return alone(left).await;
                }
                Joined::Waits(seat, departure) => {
                    if let Some(departure) = departure {
                        let given = self.inner.given_runtime();
                        send(self.inner, &queue, departure, given.as_ref().unwrap_or(&runtime));
                    }
                    seat
                }
            };
            // Those of this runtime that boarded before have seen to it.
            if is_first && queue.begins_to_watch(runtime.id()) {
                let inner = Arc::downgrade(self.inner);
                runtime.spawn(watch(inner, Arc::clone(&queue), self.deadline));
            }
            let Some(outcome) = outcome(&mut seat, self.deadline).await else {
                if !seat.take_back() {
                    return Err(self.inner.peer.timed_out(self.deadline));
                }
                let given = self.deadline.given();
                return Err(self.inner.peer.unreachable(format!(
                    "within {given:?} the server did not answer the call before it, and nothing was sent"
                )));
            };
            let of_group = match &*outcome {
                FlightOutcome::NotSent => continue,
                FlightOutcome::Lost(error) => return Err(error.clone()),
                FlightOutcome::Landed(outcomes) => &outcomes[place],
            };
            return match of_group {
                GroupOutcome::Failed(error) => Err(error.clone()),
                GroupOutcome::Apart => alone(left).await,
                GroupOutcome::Charged(charged) => self.part(charged, seat.number, left).map(Some),
            };
        }
    }

    /// The verdict of the request in a seat. The first of its group that asks derives those of all.
    fn part(
        &self,
        charged: &Charged,
        seat: usize,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        let is_noted = left.is_some();
        let parts = charged.verdicts.get_or_init(|| self.parts(charged, is_noted));
        let (parts, states) = parts.as_ref().map_err(Clone::clone)?;
        let place = charged.requests.binary_search_by_key(&seat, |request| request.seat);
        match place.ok().and_then(|place| parts.get(place)) {
            Some(RiderVerdict::Known(verdict)) => {
                if let Some(left) = left {
                    let states = states.as_ref().and_then(|states| states.downcast_ref());
                    *left = states.cloned();
                }
                verdict.clone()
            }
            Some(RiderVerdict::Panicked(panic)) => {
                let panic = panic.lock().unwrap_or_else(PoisonError::into_inner).take();
                resume_unwind(panic.unwrap_or_else(|| Box::new("a step panicked")))
            }
            None => {
                Err(self.inner.peer.unexpected(&Reply::Other("no part for this request".into())))
            }
        }
    }

    /// The parts of a group's requests: the steps in Rust on the states that the script read, one after the other. With
    /// them, if `is_noted`, the states that the last of these steps left.
    fn parts(&self, charged: &Charged, is_noted: bool) -> RiderVerdicts {
        let seen = self
            .seen(charged.now, &charged.seen)
            .ok_or_else(|| self.inner.peer.unexpected(&Reply::Text(charged.seen.to_vec())))?;
        let mut states = seen.snapshot;
        let mut checks = self.batch.checks().to_vec();
        let (mut admitted, mut has_panicked) = (0, false);
        let mut step = |costs: &[u64]| {
            for (check, cost) in checks.iter_mut().zip(costs) {
                check.cost = *cost;
            }
            // An algorithm is code of others: a panic concerns the request whose step it was.
            let step = || decide(&self.batch.with_checks(&checks), charged.now, &mut states);
            match catch_unwind(AssertUnwindSafe(step)) {
                Ok(verdict) => {
                    admitted += u64::from(verdict.as_ref().is_ok_and(Verdict::allowed));
                    RiderVerdict::Known(verdict.map_err(RedisError::from))
                }
                Err(panic) => {
                    has_panicked = true;
                    RiderVerdict::Panicked(Mutex::new(Some(panic)))
                }
            }
        };
        let parts = charged.requests.iter().map(|request| step(&request.costs)).collect();
        if admitted == charged.admitted || has_panicked {
            let states = is_noted.then(|| -> Box<dyn Any + Send + Sync> { Box::new(states) });
            return Ok((parts, states));
        }
        Err(self.inner.peer.disagrees(self.batch.checks()[0].limit.name()))
    }

    /// Whether the batch rides with others. It goes alone if it does not charge, has an id, metadata or a given time,
    /// counts attempts, or if a state has variable length.
    fn rides(&self) -> bool {
        let is_plain = self.batch.operation() == Op::Acquire
            && self.batch.time() == Now::Store
            && self.batch.is_plain()
            && self.twins.len() <= MOST_CHECKS;
        let fits = |check: &TwinCheck<'_>| {
            let twin = &check.twin;
            twin.program.is_of_numbers()
                && !twin.attempts
                && self.check(check).cost <= twin.capacity
        };
        let charges = |check: &TwinCheck<'_>| check.shape.role != Role::Look;
        is_plain && self.twins.iter().all(fits) && self.twins.iter().any(charges)
    }
}

/// Waits for what becomes of a request that has just boarded; `None` if its time is over.
async fn outcome(
    seat: &mut Seat<Load, FlightOutcome>,
    deadline: Deadline,
) -> Option<Arc<FlightOutcome>> {
    // Made if the flight is late: most requests never look at the clock.
    let mut timer = None;
    let mut is_extended = false;
    poll_fn(|context| {
        match seat.news(context) {
            News::Outcome(outcome) => return Poll::Ready(Some(outcome)),
            News::TakenBack => return Poll::Ready(None),
            News::None => return Poll::Pending,
            News::Late => {}
        }
        let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline.at())));
        while timer.as_mut().poll(context).is_ready() {
            // The flight that it is in has ended by then, and knows whether the request was charged.
            if is_extended || seat.take_back() {
                return Poll::Ready(None);
            }
            is_extended = true;
            timer.as_mut().reset(deadline.extended().at());
        }
        Poll::Pending
    })
    .await
}

/// Looks at the clock for all requests that wait on this runtime. No caller can do this for others, since it may keep its
/// future and no longer poll it; nor can the task that sends, whose runtime may stand still.
async fn watch<C: Connection>(inner: Weak<Inner<C>>, queue: Arc<Queued>, deadline: Deadline) {
    let runtime = Handle::current();
    loop {
        sleep(deadline.given() / LOOKS).await;
        let departure = queue.watch(Instant::now());
        if let (Some(departure), Some(inner)) = (departure, inner.upgrade()) {
            send(&inner, &queue, departure, &runtime);
        }
        if queue.ends_to_watch(runtime.id()) {
            return;
        }
    }
}
