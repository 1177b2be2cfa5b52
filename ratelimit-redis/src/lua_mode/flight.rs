//! Sends the requests that [wait](crate::merge): one call after the other, until none waits.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use futures_util::future::join_all;
use ratelimit_core::Timestamp;
use tokio::runtime::Handle;

use crate::connection::{Argument, Connection, Reply, TryAgain};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::flat::{Role, Shape};
use crate::merge::{Charged, Flight, Group, Outcome, Queue, Run};
use crate::store::{Inner, evalsha};

/// The caller whose request is under way. When it has its answer or stops waiting, the requests that came meanwhile
/// are sent.
pub(super) struct Sender<'s, C: Connection> {
    inner: &'s Arc<Inner<C>>,
    queue: Arc<Queue<Arc<Group>>>,
    /// The number of its call.
    call: u64,
    /// Of the caller: the sender may be dropped elsewhere.
    runtime: Handle,
}

impl<'s, C: Connection> Sender<'s, C> {
    pub(super) fn new(
        inner: &'s Arc<Inner<C>>,
        queue: Arc<Queue<Arc<Group>>>,
        call: u64,
        runtime: Handle,
    ) -> Self {
        Self { inner, queue, call, runtime }
    }
}

impl<C: Connection> Drop for Sender<'_, C> {
    fn drop(&mut self) {
        if self.queue.end(self.call) {
            send_next(self.inner, &self.queue, self.call, &self.runtime);
        }
    }
}

/// Sends the requests that wait for the call of this number, and those that come meanwhile. Does nothing if another
/// sender has ended that call.
pub(super) fn send_next<C: Connection>(
    inner: &Arc<Inner<C>>,
    queue: &Arc<Queue<Arc<Group>>>,
    call: u64,
    runtime: &Handle,
) {
    let (inner, queue) = (Arc::clone(inner), Arc::clone(queue));
    let mut under_way = UnderWay { inner, queue, call, flight: Flight::default() };
    runtime.spawn(async move { while under_way.fly().await {} });
}

/// The sender of one flight after the other. Dropping it, with its runtime, lets the callers know, and those whose
/// requests were not sent yet send them themselves.
struct UnderWay<C: Connection> {
    inner: Arc<Inner<C>>,
    queue: Arc<Queue<Arc<Group>>>,
    /// The number of the call under way.
    call: u64,
    flight: Flight<Arc<Group>>,
}

impl<C: Connection> Drop for UnderWay<C> {
    fn drop(&mut self) {
        for group in self.flight.groups.drain(..).chain(self.queue.abandon(self.call)) {
            group.give_up(self.inner.lost("the task that sent it has ended with its runtime"));
        }
    }
}

impl<C: Connection> UnderWay<C> {
    /// Takes the next flight when this task runs, not earlier: a runtime that no thread drives must not keep
    /// requests. Returns whether there was one.
    async fn fly(&mut self) -> bool {
        let Some((flight, call)) = self.queue.next(self.call) else { return false };
        (self.flight, self.call) = (flight, call);
        join_all(parts(&self.flight.groups).iter().map(|part| self.inner.charge(part))).await;
        self.flight = Flight::default();
        // Callers that ask again at once go together.
        tokio::task::yield_now().await;
        true
    }
}

/// A group whose requests are sent now.
struct Sent<'g> {
    group: &'g Group,
    runs: Vec<Run>,
    deadline: Deadline,
}

impl Sent<'_> {
    fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.group.checks.iter().map(|check| check.shape)
    }

    /// Whether one script decides both.
    fn has_shapes_of(&self, other: &Self) -> bool {
        self.group.checks.len() == other.group.checks.len()
            && self.shapes().zip(other.shapes()).all(|(one, other)| one.is(&other))
    }

    /// Whether both charge the same limits.
    fn has_limits_of(&self, other: &Self) -> bool {
        self.has_shapes_of(other)
            && self
                .group
                .checks
                .iter()
                .zip(&other.group.checks)
                .all(|(one, other)| one.is_like(other))
    }

    /// Whether it is one request.
    fn is_single(&self) -> bool {
        matches!(&self.runs[..], [Run { count: 1, .. }])
    }

    /// The charge of a request in the algorithms' units, for each check that costs something.
    fn charges<'w>(&self, run: &Run) -> impl Iterator<Item = Argument<'w>> {
        let charged = self.group.checks.iter().filter(|check| check.shape.role != Role::Look);
        charged.map(|check| Argument::Number(run.costs[check.position] * check.twin.unit))
    }
}

/// The groups of each script. All of them are sent now.
fn parts(groups: &[Arc<Group>]) -> Vec<Vec<Sent<'_>>> {
    let sent = groups.iter().filter_map(|group| {
        let (runs, deadline) = group.send()?;
        Some(Sent { group, runs, deadline })
    });
    let mut parts: Vec<Vec<Sent<'_>>> = Vec::new();
    for sent in sent {
        let part = parts.iter_mut().find(|part| {
            // Code of others may fail, after groups before it were written.
            let can_fail = sent.shapes().any(|shape| !shape.program.is_built_in());
            !can_fail && part[0].has_shapes_of(&sent)
        });
        match part {
            Some(part) => part.push(sent),
            None => parts.push(vec![sent]),
        }
    }
    parts
}

impl<C: Connection> Inner<C> {
    /// Charges the requests of these groups by one script.
    async fn charge(&self, part: &[Sent<'_>]) {
        let mut sorted: Vec<&Sent<'_>> = part.iter().collect();
        if sorted.len() > 1 {
            // Those of one set of limits together, single requests first.
            let limits = BuildHasherDefault::<DefaultHasher>::new();
            sorted.sort_by_cached_key(|sent| {
                (limits.hash_one(&sent.group.checks), !sent.is_single(), sent.runs[0].costs[0])
            });
        }
        match self.call(&sorted).await {
            Ok(Some((now, answers))) => {
                for (sent, answer) in sorted.iter().zip(&answers) {
                    sent.group.settle(self.outcome(now, answer));
                }
            }
            // The server executed nothing: on its own, each request gets its own error.
            Ok(None) | Err(RedisError::Server { .. }) => settle(&sorted, &Outcome::Apart),
            Err(error) => settle(&sorted, &Outcome::Failed(error)),
        }
    }

    /// The time, and the answer about each group. `None` if there is no such script, with nothing sent.
    async fn call(
        &self,
        sorted: &[&Sent<'_>],
    ) -> Result<Option<(Timestamp, Vec<Reply>)>, RedisError> {
        let shapes: Vec<_> = sorted[0].shapes().collect();
        let Ok(Some(script)) = self.scripts.merging(&shapes) else { return Ok(None) };
        let keys: Vec<_> = sorted.iter().flat_map(|sent| &sent.group.keys).collect();
        let mut words = evalsha(keys.iter().map(|key| key.as_str()));
        for same in sorted.chunk_by(|one, next| one.has_limits_of(next)) {
            add(&mut words, same);
        }
        let deadline = sorted.iter().map(|sent| sent.deadline).min_by_key(|deadline| deadline.at());
        let Some(deadline) = deadline else { return Ok(None) };
        let reply = self.eval(keys[0], &script, &mut words, TryAgain::Return, deadline).await?;
        let shape = self.unexpected(&reply);
        let Reply::Array(mut answers) = reply else { return Err(shape) };
        if answers.len() != sorted.len() + 1 {
            return Err(shape);
        }
        let now = time(&answers.remove(0)).ok_or(shape)?;
        Ok(Some((now, answers)))
    }

    /// What a script answered about a group.
    fn outcome(&self, now: Timestamp, answer: &Reply) -> Outcome {
        let Reply::Text(text) = answer else { return Outcome::Failed(self.unexpected(answer)) };
        let charged = || {
            let (admitted, seen) = std::str::from_utf8(text).ok()?.split_once('\n')?;
            Some(Charged { now, admitted: admitted.parse().ok()?, seen: seen.into() })
        };
        match text.first() {
            Some(b'?') => Outcome::Apart,
            Some(b'!') => {
                let text = String::from_utf8_lossy(&text[1..]);
                let (code, message) = text.split_once(' ').unwrap_or((&text, ""));
                Outcome::Failed(self.server_error(code, message).in_part())
            }
            _ => {
                charged().map_or_else(|| Outcome::Failed(self.unexpected(answer)), Outcome::Charged)
            }
        }
    }
}

/// The same outcome for all groups.
fn settle(groups: &[&Sent<'_>], outcome: &Outcome) {
    for sent in groups {
        sent.group.settle(outcome.clone());
    }
}

/// Adds the arguments of groups of the same limits.
fn add<'w>(words: &mut Vec<Argument<'w>>, same: &[&'w Sent<'_>]) {
    let first = &same[0].runs[0];
    let is_like_first = |sent: &&&Sent<'_>| sent.is_single() && sent.runs[0].costs == first.costs;
    let single = same.iter().take_while(is_like_first).count();
    words.extend([single, same.len()].map(|count| Argument::Number(count as u64)));
    for check in &same[0].group.checks {
        words.push(Argument::Text(&check.field));
        if check.shape.role != Role::Look {
            let twin = &check.twin;
            words.push(Argument::Number(twin.capacity * twin.unit));
            words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
            words.push(Argument::Number(first.costs[check.position] * twin.unit));
        }
    }
    for sent in &same[single..] {
        words.push(Argument::Number(sent.runs.len() as u64));
        for run in &sent.runs {
            words.push(Argument::Number(run.count));
            words.extend(sent.charges(run));
        }
    }
}

/// Parses the time: seconds and microseconds.
fn time(reply: &Reply) -> Option<Timestamp> {
    let Reply::Text(text) = reply else { return None };
    super::flat_call::time(std::str::from_utf8(text).ok()?)
}
