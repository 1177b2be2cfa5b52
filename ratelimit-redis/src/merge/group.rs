//! [`Group`]: requests of the same limits for the same keys.

use std::any::Any;
use std::hash::{Hash, Hasher};
use std::iter::Peekable;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ratelimit_core::{Timestamp, Verdict};
use smallvec::SmallVec;
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::flat::Shape;
use crate::program::Twin;

/// Requests of the same limits for the same keys. The script charges them in order, first come, first served.
#[derive(Debug)]
pub(crate) struct Group {
    /// The keys on the server, each once.
    pub(crate) keys: Vec<String>,
    pub(crate) checks: Vec<GroupCheck>,
    requests: Mutex<Requests>,
    outcome: OnceLock<Outcome>,
    /// The answers to the requests that were sent. The first that asks derives all of them.
    answers: OnceLock<Result<Answers, RedisError>>,
    /// The outcome, or that the group is late.
    news: Notify,
    /// Whether each caller watches the clock itself: half of the time is over, or one that did so has gone.
    is_late: AtomicBool,
}

/// A check of every request of a group.
#[derive(Debug)]
pub(crate) struct GroupCheck {
    pub(crate) shape: Shape,
    /// The position of its cost among those of the request.
    pub(crate) position: usize,
    pub(crate) field: String,
    pub(crate) twin: Twin,
}

/// The requests of a group.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// Whether they have been sent. From then on none joins or leaves.
    is_sent: bool,
    /// How many costs a request has.
    checks: usize,
    costs: Vec<u64>,
    each: Vec<Request>,
    /// The earliest deadline.
    earliest: Option<Deadline>,
    /// The runtimes of the callers, on each of which a task [watches](Group::watch) the clock.
    watched_on: SmallVec<[runtime::Id; 1]>,
}

#[derive(Debug)]
struct Request {
    deadline: Deadline,
    /// Whether its caller still wants it.
    is_wanted: bool,
}

/// What became of the requests of a group.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// The script charged them.
    Charged(Charged),
    /// The call failed. The error says whether they may have been charged.
    Failed(RedisError),
    /// They were not charged, and are to be decided one by one.
    Apart,
    /// They were not sent, because the task that was to send them has ended.
    NotSent,
}

/// What the script answered about a group.
#[derive(Clone, Debug)]
pub(crate) struct Charged {
    pub(crate) now: Timestamp,
    /// How many requests it admitted.
    pub(crate) admitted: u64,
    /// The states that it read, a line each.
    pub(crate) seen: Arc<str>,
}

/// What a group's requests are told.
#[derive(Debug)]
pub(crate) struct Answers {
    /// The verdict of each; `None` for those that were taken back.
    pub(crate) verdicts: Vec<Option<Verdict>>,
    /// The `Snapshot` that all of them left, if the request that derived the verdicts asked for it.
    pub(crate) states: Option<Box<dyn Any + Send + Sync>>,
}

/// The place of a request in its group. Dropping it before the request is sent takes the request back.
#[derive(Debug)]
pub(crate) struct Place {
    group: Arc<Group>,
    number: usize,
    /// Whether none before it in the group has a caller on its runtime.
    is_first_there: bool,
    /// Whether it watches the clock itself, because its deadline is earlier than those before it in the group.
    watches: bool,
}

impl Group {
    /// A group without requests, each of which has costs for this many checks.
    pub(crate) fn new(keys: Vec<String>, checks: Vec<GroupCheck>, costs: usize) -> Self {
        Self {
            keys,
            checks,
            requests: Mutex::new(Requests { checks: costs, ..Requests::default() }),
            outcome: OnceLock::new(),
            answers: OnceLock::new(),
            news: Notify::new(),
            is_late: AtomicBool::new(false),
        }
    }

    /// Adds a request of a caller on this runtime.
    pub(crate) fn add(
        self: &Arc<Self>,
        costs: impl Iterator<Item = u64>,
        deadline: Deadline,
        runtime: runtime::Id,
    ) -> Place {
        let mut requests = self.requests();
        requests.costs.extend(costs);
        let number = requests.each.len();
        requests.each.push(Request { deadline, is_wanted: true });
        // Requests of one store have the same time, but may come from a group whose sender has gone.
        let watches = requests.earliest.is_some_and(|earliest| deadline.at() < earliest.at());
        if watches || number == 0 {
            requests.earliest = Some(deadline);
        }
        let is_first_there = !requests.watched_on.contains(&runtime);
        if is_first_there {
            requests.watched_on.push(runtime);
        }
        Place { group: Arc::clone(self), number, is_first_there, watches }
    }

    /// Lets each caller watch the clock itself once half of the time is over. A timer for each from the start would cost more
    /// than all else, and no caller can do this for others: it may keep its future and no longer poll it.
    async fn watch(self: Arc<Self>, deadline: Deadline) {
        let until = deadline.half_time();
        loop {
            let next = self.news.notified();
            if self.outcome.get().is_some() || self.is_late.load(Ordering::SeqCst) {
                return;
            }
            if timeout_at(until, next).await.is_err() {
                self.warn();
            }
        }
    }

    /// The requests, which are sent now, and the earliest of their deadlines. `None` if no caller wants them any more.
    ///
    /// A request that has waited for three quarters of its time is not sent any more. So a call has time, and its
    /// outcome is known by the deadline of each request in it.
    pub(crate) fn send(&self) -> Option<(Vec<Run>, Deadline)> {
        let mut requests = self.requests();
        requests.is_sent = true;
        if requests.take_back_late() {
            self.warn();
        }
        let mut runs: Vec<Run> = Vec::new();
        for costs in requests.wanted().flatten() {
            match runs.last_mut() {
                Some(run) if *run.costs == *costs => run.count += 1,
                _ => runs.push(Run { count: 1, costs: costs.into() }),
            }
        }
        let wanted = requests.each.iter().filter(|request| request.is_wanted);
        Some((runs, wanted.map(|request| request.deadline).min_by_key(|deadline| deadline.at())?))
    }

    /// Tells all callers what became of their requests. Only the first outcome counts.
    pub(crate) fn settle(&self, outcome: Outcome) {
        if self.outcome.set(outcome).is_ok() {
            self.news.notify_waiters();
        }
    }

    /// Lets each caller watch the clock itself from now on.
    fn warn(&self) {
        self.is_late.store(true, Ordering::SeqCst);
        self.news.notify_waiters();
    }

    /// Tells all callers that the task which was to send their requests, or did, has ended.
    pub(crate) fn give_up(&self, lost: RedisError) {
        let is_sent = self.requests().is_sent;
        self.settle(if is_sent { Outcome::Failed(lost) } else { Outcome::NotSent });
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests of the same costs, one after the other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) count: u64,
    pub(crate) costs: Box<[u64]>,
}

impl Requests {
    /// Takes back the requests that have no more than a quarter of their time left. Returns whether there are any.
    fn take_back_late(&mut self) -> bool {
        let (mut are_late, now) = (false, Instant::now());
        for request in self.each.iter_mut().filter(|request| request.is_wanted) {
            let deadline = request.deadline;
            let is_late = deadline.remaining_at(now) <= deadline.given() / 4;
            request.is_wanted = !is_late;
            are_late |= is_late;
        }
        are_late
    }

    /// How many requests have joined.
    pub(crate) fn size(&self) -> usize {
        self.each.len()
    }

    /// The costs of each request, `None` for those that were taken back.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = Option<&[u64]>> {
        let costs = self.costs.chunks(self.checks);
        costs.zip(&self.each).map(|(costs, request)| request.is_wanted.then_some(costs))
    }
}

/// When a request that waits does something by itself.
#[derive(Clone, Copy)]
enum Moment {
    /// The call under way may stand still: it is overtaken.
    HalfTime,
    /// The request is taken back, if it is not in a call.
    TimeOver,
    /// The call that it is in has ended, and knows whether the request was sent.
    CallEnded,
}

impl Moment {
    /// The moments of a request, in order.
    fn all(deadline: Deadline) -> [(Self, Instant); 3] {
        [
            (Self::HalfTime, deadline.half_time()),
            (Self::TimeOver, deadline.at()),
            (Self::CallEnded, deadline.extended().at()),
        ]
    }
}

impl Place {
    /// Has a task watch the clock on the caller's runtime, one for all callers there.
    pub(crate) fn watch_on(&self, runtime: &Handle, deadline: Deadline) {
        if self.is_first_there {
            runtime.spawn(Arc::clone(&self.group).watch(deadline));
        }
    }

    /// Waits for what becomes of the request; `None` if its time is over. `overtake` runs if half of the time is over.
    pub(crate) async fn outcome(
        &self,
        deadline: Deadline,
        overtake: impl Fn(),
    ) -> Option<&Outcome> {
        let Group { outcome, news, is_late, .. } = &*self.group;
        // Made by the first look at the clock: most requests never look.
        let mut moments = None;
        loop {
            // From here on no news is missed.
            let next = news.notified();
            if let ControlFlow::Break(known) = self.known() {
                return known;
            }
            if !self.watches && !is_late.load(Ordering::SeqCst) {
                next.await;
                continue;
            }
            let moments: &mut Peekable<_> =
                moments.get_or_insert_with(|| Moment::all(deadline).into_iter().peekable());
            let Some((moment, until)) = moments.peek() else { return outcome.get() };
            if timeout_at(*until, next).await.is_ok() {
                continue;
            }
            match moment {
                Moment::HalfTime => overtake(),
                Moment::TimeOver => {
                    self.group.warn();
                    if self.take_back() {
                        return outcome.get();
                    }
                }
                // The last one.
                Moment::CallEnded => {}
            }
            moments.next();
        }
    }

    /// Breaks with the request's outcome, or with `None` if it has been taken back.
    fn known(&self) -> ControlFlow<Option<&Outcome>> {
        let Group { outcome, is_late, .. } = &*self.group;
        if is_late.load(Ordering::SeqCst) && self.is_taken_back() {
            return ControlFlow::Break(None);
        }
        outcome.get().map_or(ControlFlow::Continue(()), |known| ControlFlow::Break(Some(known)))
    }

    fn is_taken_back(&self) -> bool {
        !self.group.requests().each[self.number].is_wanted
    }

    /// The verdict of the request, and the states that its group left, if they are known. `derive` derives the answers to
    /// all requests of the group, in their order.
    pub(crate) fn answer(
        &self,
        derive: impl FnOnce(&Requests) -> Result<Answers, RedisError>,
    ) -> Result<(Option<Verdict>, Option<&(dyn Any + Send + Sync)>), RedisError> {
        let answers = self.group.answers.get_or_init(|| derive(&self.group.requests()));
        let answers = answers.as_ref().map_err(Clone::clone)?;
        let verdict = answers.verdicts.get(self.number).cloned().flatten();
        Ok((verdict, answers.states.as_deref()))
    }

    /// Takes the request back. Returns whether that was in time: before it was sent.
    pub(crate) fn take_back(&self) -> bool {
        let mut requests = self.group.requests();
        let is_sent = requests.is_sent;
        let request = &mut requests.each[self.number];
        request.is_wanted &= is_sent;
        !request.is_wanted
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.group.outcome.get().is_some() {
            return;
        }
        self.take_back();
        if self.watches {
            self.group.warn();
        }
    }
}

impl GroupCheck {
    /// Whether the requests of both charge the same limit in the same way.
    pub(crate) fn is_like(&self, other: &GroupCheck) -> bool {
        self.is_of(&other.shape, other.position, &other.field, &other.twin)
    }

    /// Whether it has these parts.
    pub(crate) fn is_of(&self, shape: &Shape, position: usize, field: &str, twin: &Twin) -> bool {
        self.shape.is(shape)
            && self.position == position
            && self.field == field
            && self.twin.capacity == twin.capacity
            && self.twin.unit == twin.unit
            && self.twin.parameters.as_slice() == twin.parameters.as_slice()
    }
}

impl Hash for GroupCheck {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.shape.program.name.hash(state);
        self.field.hash(state);
        self.twin.capacity.hash(state);
        self.twin.parameters.as_slice().hash(state);
    }
}
