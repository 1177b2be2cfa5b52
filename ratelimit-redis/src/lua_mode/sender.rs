//! Sends [flights](crate::flights), one after the other, until no request waits.
//!
//! A caller may be dropped, or keep its future and no longer poll it; a runtime may end or stall. So a task sends, on the
//! runtime that the store was given, or else on that of the first caller that waits, because a thread drives it. If a flight
//! is older than a quarter of a deadline and has not departed, another caller's runtime sends it. One task per runtime
//! watches the clock for all requests that wait there, because a timer per request would cost more than everything else.
//!
//! A request with less than a quarter of its time left is not sent, and a flight ends by the earliest deadline in it. So each
//! request knows by its own deadline whether it may have been charged.
//!
//! One request's failure is its own. If the server refuses a whole script, each request repeats alone and gets its own
//! error. If a step panics, its own caller panics. A program whose Lua may fail after another group was written shares a
//! script with no other group.

use std::sync::{Arc, OnceLock};

use ratelimit_core::Timestamp;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::answer::{first_line, time};
use super::flat_call::push_check;
use crate::codec::take_sized;
use crate::concurrent::all;
use crate::connection::{Argument, Connection, Reply, TryAgain, refused_in_part};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::flat::{MOST_KINDS, Role};
use crate::flights::{
    Charged, Departure, Flight, FlightOutcome, Group, GroupOutcome, LimitSet, Load, Queued,
};
use crate::store::{Inner, evalsha};

/// A request that goes alone. When it has its answer or is dropped, the next flight departs.
pub(super) struct LoneRequest<'s, C: Connection> {
    pub(super) inner: &'s Arc<Inner<C>>,
    pub(super) queue: &'s Arc<Queued>,
    pub(super) number: u64,
    /// Of the caller: this may be dropped elsewhere.
    pub(super) runtime: &'s Handle,
}

impl<C: Connection> Drop for LoneRequest<'_, C> {
    fn drop(&mut self) {
        if let Some(departure) = self.queue.next(self.number, Instant::now()) {
            let of_caller = runtime_of(self.inner, &departure);
            send(self.inner, self.queue, departure, of_caller.as_ref().unwrap_or(self.runtime));
        }
    }
}

/// Sends a flight from this runtime, and those that wait after it.
pub(super) fn send<C: Connection>(
    inner: &Arc<Inner<C>>,
    queue: &Arc<Queued>,
    departure: Departure<Load, FlightOutcome>,
    runtime: &Handle,
) {
    let (inner, queue) = (Arc::clone(inner), Arc::clone(queue));
    let sender = Sender { inner, queue, departure: Some(departure), has_begun: false };
    runtime.spawn(sender.run());
}

/// The runtime that was given, or where the first of a flight's callers waits: a thread drives that runtime.
fn runtime_of<C>(inner: &Inner<C>, departure: &Departure<Load, FlightOutcome>) -> Option<Handle> {
    let of_caller = || departure.flight.look(|load, is_wanted| load.runtime(is_wanted).cloned());
    inner.given_runtime().or_else(of_caller)
}

/// Sends one flight after the other. Dropping it, with its runtime, lets the callers know, and those whose requests were
/// not sent yet send them themselves.
struct Sender<C: Connection> {
    inner: Arc<Inner<C>>,
    queue: Arc<Queued>,
    departure: Option<Departure<Load, FlightOutcome>>,
    /// Whether the flight of the departure is certain.
    has_begun: bool,
}

impl<C: Connection> Drop for Sender<C> {
    fn drop(&mut self) {
        let Some(Departure { number, flight }) = self.departure.take() else { return };
        let begun = self.has_begun.then_some(flight);
        for flight in begun.into_iter().chain(self.queue.abandon(number)) {
            let lost = self.inner.peer.lost("the task that sent it has ended with its runtime");
            flight.settle(FlightOutcome::Lost(lost), || FlightOutcome::NotSent);
        }
    }
}

impl<C: Connection> Sender<C> {
    async fn run(mut self) {
        while let Some(departure) = &mut self.departure {
            self.queue.begin(departure);
            self.has_begun = true;
            let (number, flight) = (departure.number, &departure.flight);
            let outcome = self.inner.fly(flight).await;
            // The server answers two flights at once if it read them at once. Then the next ones would go at once, too, and
            // the server would wait for the client, and the client for the server.
            if self.queue.turns_with_another() {
                tokio::task::yield_now().await;
            }
            if let Some(outcome) = outcome {
                flight.settle(outcome, || FlightOutcome::NotSent);
            }
            // Callers that ask again at once go together.
            tokio::task::yield_now().await;
            self.departure = self.queue.next(number, Instant::now());
            self.has_begun = false;
            let Some(departure) = self.departure.take() else { return };
            match runtime_of(&self.inner, &departure) {
                Some(other) if other.id() != Handle::current().id() => {
                    return send(&self.inner, &self.queue, departure, &other);
                }
                _ => self.departure = Some(departure),
            }
        }
    }
}

/// A group whose requests are sent now, and its place in the flight.
type Sent = (usize, Group);

/// Whether a group is one request.
fn is_single((_, group): &Sent) -> bool {
    group.requests.len() == 1
}

/// Groups of the same limits.
struct ScriptPart<'f> {
    limits: &'f LimitSet,
    groups: Vec<Sent>,
}

impl ScriptPart<'_> {
    /// Adds the arguments of its groups.
    fn add<'w>(&'w self, kind: usize, words: &mut Vec<Argument<'w>>) {
        let first = &self.groups[0].1.requests[0].costs;
        let is_like_first = |sent: &&Sent| is_single(sent) && sent.1.requests[0].costs == *first;
        let single = self.groups.iter().take_while(is_like_first).count();
        let counts = [kind, single, self.groups.len()];
        words.extend(counts.map(|count| Argument::Number(count as u64)));
        for check in &self.limits.0 {
            let cost = first[check.position];
            push_check(words, check, cost);
        }
        let charged = || self.limits.0.iter().filter(|check| check.shape.role != Role::Look);
        for (_, group) in &self.groups[single..] {
            // Requests of the same costs, one after the other.
            let runs = || group.requests.chunk_by(|one, next| one.costs == next.costs);
            words.push(Argument::Number(runs().count() as u64));
            for run in runs() {
                let costs = &run[0].costs;
                words.push(Argument::Number(run.len() as u64));
                words.extend(
                    charged()
                        .map(|check| Argument::Number(costs[check.position] * check.twin.unit)),
                );
            }
        }
    }
}

/// The parts of each script. Groups of the same limits go together, unless the later one shares a state with one of them or
/// between them: requests that share a state are decided in the order in which they came.
fn calls(limits: &[LimitSet], groups: Vec<Group>) -> Vec<Vec<ScriptPart<'_>>> {
    let mut parts: Vec<ScriptPart<'_>> = Vec::new();
    for (place, group) in groups.into_iter().enumerate().filter(|(_, g)| !g.requests.is_empty()) {
        let limits = &limits[group.limits];
        let mut part = None;
        for (number, earlier) in parts.iter().enumerate().rev() {
            if earlier.groups.iter().any(|(_, other)| other.shares_with(&group)) {
                break;
            }
            if std::ptr::eq(earlier.limits, limits) && !limits.can_fail() {
                part = Some(number);
                break;
            }
        }
        match part {
            Some(part) => parts[part].groups.push((place, group)),
            None => parts.push(ScriptPart { limits, groups: vec![(place, group)] }),
        }
    }
    let mut calls: Vec<Vec<ScriptPart<'_>>> = Vec::new();
    for mut part in parts {
        // Single requests of one cost share its arguments; no two of these groups share a state.
        part.groups.sort_by_key(|sent| (!is_single(sent), sent.1.requests[0].costs[0]));
        // Code of others may fail, after groups before it were written.
        let joins = |call: &&mut Vec<ScriptPart<'_>>| {
            let mut kinds: Vec<*const LimitSet> =
                call.iter().chain([&part]).map(|s| std::ptr::from_ref(s.limits)).collect();
            kinds.sort_unstable();
            kinds.dedup();
            let can_fail = part.limits.can_fail() || call[0].limits.can_fail();
            !can_fail && kinds.len() <= MOST_KINDS
        };
        match calls.last_mut().filter(joins) {
            Some(call) => call.push(part),
            None => calls.push(vec![part]),
        }
    }
    calls
}

impl<C: Connection> Inner<C> {
    /// Sends a flight. Returns what became of it; `None` if another sender has sent it.
    async fn fly(&self, flight: &Flight<Load, FlightOutcome>) -> Option<FlightOutcome> {
        let (load, wanted) = flight.depart(Instant::now())?;
        let Load { limits, mut groups, .. } = load;
        let deadline = wanted.iter().flatten().min_by_key(|deadline| deadline.at()).copied();
        for group in &mut groups {
            group.requests.retain(|request| wanted[request.seat].is_some());
        }
        let mut outcomes: Vec<_> = groups.iter().map(|_| GroupOutcome::Apart).collect();
        if let Some(deadline) = deadline {
            let calls = calls(&limits, groups);
            let charged = all(calls.into_iter().map(|call| self.charge(call, deadline))).await;
            for (place, outcome) in charged.into_iter().flatten() {
                outcomes[place] = outcome;
            }
        }
        Some(FlightOutcome::Landed(outcomes))
    }

    /// Charges the requests of these groups by one script. Returns what became of each group, by its place in the flight.
    async fn charge(
        &self,
        call: Vec<ScriptPart<'_>>,
        deadline: Deadline,
    ) -> Vec<(usize, GroupOutcome)> {
        let failed = match self.call(&call, deadline).await {
            Ok(Some(answer)) => return self.outcomes(call, &answer),
            // The server executed nothing: on its own, each request gets its own error.
            Ok(None) | Err(RedisError::Server { .. }) => None,
            Err(error) => Some(error),
        };
        let outcome = || failed.clone().map_or(GroupOutcome::Apart, GroupOutcome::Failed);
        let groups = call.into_iter().flat_map(|part| part.groups);
        groups.map(|(place, _)| (place, outcome())).collect()
    }

    /// What the script answers. `None` if there is no such script, with nothing sent.
    async fn call(&self, call: &[ScriptPart<'_>], deadline: Deadline) -> Result<Option<Vec<u8>>> {
        let kinds: Vec<Vec<_>> = call.iter().map(|part| part.limits.shapes().collect()).collect();
        let kinds: Vec<&[_]> = kinds.iter().map(Vec::as_slice).collect();
        let deciding = self.scripts.deciding(&kinds, false);
        let Ok(Some((script, kinds))) = deciding else { return Ok(None) };
        let groups = call.iter().flat_map(|part| &part.groups);
        let keys: Vec<_> = groups.flat_map(|(_, group)| &group.keys).collect();
        let mut words = evalsha(keys.iter().map(|key| key.as_str()));
        for (part, kind) in call.iter().zip(kinds) {
            part.add(kind, &mut words);
        }
        self.eval(keys[0], &script, &mut words, TryAgain::Return, deadline).await.map(Some)
    }

    /// What became of each group, as the script answered. What cannot be read fails for itself and all after it.
    fn outcomes(&self, call: Vec<ScriptPart<'_>>, answer: &[u8]) -> Vec<(usize, GroupOutcome)> {
        let unread = || {
            let answer = self.peer.unexpected(&Reply::Text(answer.to_vec()));
            GroupOutcome::Failed(answer)
        };
        let line = first_line(answer).and_then(|(line, rest)| Some((time(line)?, rest)));
        let (now, mut rest) = line.map_or((None, answer), |(now, rest)| (Some(now), rest));
        let mut outcomes = Vec::new();
        for part in call {
            let states = part.limits.0.len();
            for (place, group) in part.groups {
                let outcome = now.and_then(|now| self.outcome(now, &mut rest, states, group));
                outcomes.push((place, outcome.unwrap_or_else(unread)));
            }
        }
        outcomes
    }

    /// What the script answered about a group of so many states.
    fn outcome(
        &self,
        now: Timestamp,
        rest: &mut &[u8],
        states: usize,
        group: Group,
    ) -> Option<GroupOutcome> {
        let (line, after) = first_line(rest)?;
        *rest = after;
        if line == "?" {
            return Some(GroupOutcome::Apart);
        }
        if let Some(refused) = line.strip_prefix('!') {
            return Some(GroupOutcome::Failed(refused_in_part(self.peer.address(), refused)));
        }
        let admitted = line.parse().ok()?;
        for _ in 0..states {
            take_sized(rest)?;
        }
        let seen = after[..after.len() - rest.len()].into();
        let Group { requests, .. } = group;
        let verdicts = OnceLock::new();
        Some(GroupOutcome::Charged(Charged { now, admitted, seen, requests, verdicts }))
    }
}
