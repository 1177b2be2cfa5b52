//! Sends what waits for a [call](crate::calls): one call after the other, until the store is
//! dropped.
//!
//! A caller may be dropped, or keep its future and no longer poll it. So a task sends, on the
//! store's runtime.
//!
//! One request's failure is its own. If the server refuses a whole script, each request repeats
//! alone and gets its own error. If a step panics, its own caller panics. A program whose Lua may
//! fail after another group was written shares a script with no other group.

use std::sync::{Arc, OnceLock, Weak};

use ratelimit_core::Timestamp;
use ratelimit_core::store::Now;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::answer::{first_line, time};
use super::decide_call::{PartGroups, numbers_of, push_part};
use crate::calls::{CallLimit, Charged, Costs, Group, GroupOutcome, LimitSet, Load, Waiting};
use crate::codec::take_sized;
use crate::concurrent::all;
use crate::connection::{Argument, Connection, Reply, TryAgain, refused_in_part};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::program::{TwinCheck, packed};
use crate::records::push_premises;
use crate::scripts::Shape;
use crate::store::{Inner, evalsha, push_time};

/// Takes requests from the channel, and sends all that wait in one call as soon as one may be out.
pub(super) async fn run<C: Connection>(
    inner: Weak<Inner<C>>,
    limit: Arc<CallLimit>,
    mut waiting: mpsc::Receiver<Box<Waiting>>,
) {
    let mut left = None;
    loop {
        let next = if left.is_some() { left.take() } else { waiting.recv().await };
        let Some(first) = next else { return };
        let mut permit = limit.acquire(first.deadline).await;
        let (mut load, mut next, now) = (Load::default(), Some(first), Instant::now());
        // As many calls as may be out share what waits.
        let all = (1 + waiting.len()).div_ceil(1 + limit.free());
        let mut share = if permit.measures() { 1 } else { all };
        while let Some(request) = next {
            left = load.add(request, now);
            share -= 1;
            next = if left.is_some() || share == 0 { None } else { waiting.try_recv().ok() };
        }
        let (Some(deadline), Some(inner)) = (load.deadline, inner.upgrade()) else { continue };
        permit.carries(load.requests(), load.states());
        load.depart();
        tokio::spawn(async move {
            if inner.send(load, deadline).await {
                permit.landed();
            }
            // Callers that ask again at once go together: they ask before the next call is out.
            tokio::task::yield_now().await;
        });
    }
}

/// Whether a group is one request.
fn is_single(group: &Group) -> bool {
    group.costs.len() == 1
}

/// Groups of the same limits, each at the numbers of the first or at its own.
struct ScriptPart {
    groups: Vec<Group>,
}

/// What a group of its own numbers brings along: what each limit is charged by a single request,
/// and the numbers, packed.
type OwnNumbers = Vec<u8>;

impl ScriptPart {
    /// The limits of its first group.
    fn limits(&self) -> &LimitSet {
        &self.groups[0].limits
    }

    /// What each group brings along, if not all have the numbers of the first.
    fn own_numbers(&self) -> Vec<OwnNumbers> {
        if self.groups.iter().all(|group| group.limits == *self.limits()) {
            return Vec::new();
        }
        let of_group = |group: &Group| {
            let checks = &group.limits.0;
            let charge = |check: &TwinCheck<'_>| group.costs[0][check.position] * check.twin.unit;
            let all = checks.iter().map(charge).chain(numbers_of(checks));
            all.flat_map(packed).collect()
        };
        self.groups.iter().map(of_group).collect()
    }

    /// Adds the arguments of its groups, whose limits have this shape, and which bring this along.
    fn push<'w>(&'w self, shape: &'w Shape, own: &'w [OwnNumbers], words: &mut Vec<Argument<'w>>) {
        let checks = &self.limits().0;
        let first = &self.groups[0].costs[0];
        let has_own_numbers = !own.is_empty();
        let is_like_first =
            |group: &&Group| is_single(group) && (has_own_numbers || group.costs[0] == *first);
        let single = self.groups.iter().take_while(is_like_first).count();
        let cost = |check: &TwinCheck<'_>| first[check.position];
        let groups = PartGroups { counts: Some([single, self.groups.len()]), has_own_numbers };
        push_part(words, shape, checks, groups, cost);
        for (place, group) in self.groups.iter().enumerate() {
            words.extend(own.get(place).map(|own| Argument::Bytes(own)));
            if place < single {
                continue;
            }
            // Requests of the same costs, one after the other.
            let checks = &group.limits.0;
            let runs = || group.costs.chunk_by(|one, next| one == next);
            words.push(Argument::Number(runs().count() as u64));
            for run in runs() {
                let charge = |check: &TwinCheck<'_>| run[0][check.position] * check.twin.unit;
                words.push(Argument::Number(run.len() as u64));
                words.extend(checks.iter().map(|check| Argument::Number(charge(check))));
            }
        }
    }
}

/// The parts of each script. Groups of the same limits go together, at whatever numbers, unless the
/// later one shares a state with one of them or between them: requests that share a state are
/// decided in the order in which they came.
fn scripts(groups: Vec<Group>) -> Vec<Vec<ScriptPart>> {
    let mut parts: Vec<ScriptPart> = Vec::new();
    for group in groups {
        let limits = &group.limits;
        let mut part = None;
        for (number, earlier) in parts.iter().enumerate().rev() {
            if earlier.groups.iter().any(|other| other.shares_with(&group)) {
                break;
            }
            if earlier.limits().differs_in_numbers_only(limits) && !limits.can_fail() {
                part = Some(number);
                break;
            }
        }
        match part {
            Some(part) => parts[part].groups.push(group),
            None => parts.push(ScriptPart { groups: vec![group] }),
        }
    }
    let mut calls: Vec<Vec<ScriptPart>> = Vec::new();
    for mut part in parts {
        // Single requests of one cost share its arguments; no two of these groups share a state.
        part.groups.sort_by_key(|group| (!is_single(group), group.costs[0][0]));
        // Code of others may fail, after groups before it were written.
        let joins =
            |call: &&mut Vec<ScriptPart>| !part.limits().can_fail() && !call[0].limits().can_fail();
        match calls.last_mut().filter(joins) {
            Some(call) => call.push(part),
            None => calls.push(vec![part]),
        }
    }
    calls
}

impl<C: Connection> Inner<C> {
    /// Sends a load, and tells its callers what became of it. Returns whether the server has
    /// answered.
    async fn send(&self, load: Load, deadline: Deadline) -> bool {
        let calls = scripts(load.groups);
        let answered = all(calls.into_iter().map(|call| self.charge(call, deadline))).await;
        answered.into_iter().all(|answered| answered)
    }

    /// Charges the requests of these groups by one script, and tells their callers. Returns whether
    /// the server has answered.
    async fn charge(&self, call: Vec<ScriptPart>, deadline: Deadline) -> bool {
        let failed = match self.call(&call, deadline).await {
            Ok(Some(answer)) => {
                self.answer(call, &answer);
                return true;
            }
            // The server executed nothing: on its own, each request gets its own error.
            Ok(None) | Err(RedisError::Server { .. }) => None,
            Err(error) => Some(error),
        };
        for group in call.into_iter().flat_map(|part| part.groups) {
            let failed = failed.clone();
            group.answer(|_| failed.map_or(GroupOutcome::Apart, GroupOutcome::Failed));
        }
        false
    }

    /// What the script answers. `None` if there is no such script, with nothing sent.
    async fn call(&self, call: &[ScriptPart], deadline: Deadline) -> Result<Option<Vec<u8>>> {
        let programs =
            call.iter().flat_map(|part| &part.limits().0).map(|check| check.twin.program);
        let Ok(texts) = self.scripts.of(programs) else { return Ok(None) };
        let shapes = call.iter().map(|part| texts.shape(&part.limits().0));
        let Some(shapes) = shapes.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let groups = call.iter().flat_map(|part| &part.groups);
        let mut keys: Vec<_> = groups.clone().flat_map(|group| &group.keys).collect();
        let premises: Vec<_> = groups.flat_map(|group| &group.premises).collect();
        let of_states = keys.len();
        keys.extend(premises.iter().map(|premise| &premise.key));
        let mut words = evalsha(keys.iter().map(|key| key.as_str()), of_states);
        push_time(&mut words, Now::Store);
        if !premises.is_empty() {
            push_premises(&mut words, premises.iter().copied());
        }
        let own: Vec<_> = call.iter().map(ScriptPart::own_numbers).collect();
        for ((part, shape), own) in call.iter().zip(&shapes).zip(&own) {
            part.push(shape, own, &mut words);
        }
        let script = texts.decide(!premises.is_empty());
        self.eval(keys[0], script, &mut words, TryAgain::Return, deadline).await.map(Some)
    }

    /// Tells the callers of each group what the script answered. What cannot be read fails for
    /// itself and all after it.
    fn answer(&self, call: Vec<ScriptPart>, answer: &[u8]) {
        let line = first_line(answer).and_then(|(line, rest)| Some((time(line)?, rest)));
        let (now, mut rest) = line.map_or((None, answer), |(now, rest)| (Some(now), rest));
        if let (Some(now), Some(("~", records))) = (now, first_line(rest)) {
            let groups = || call.iter().flat_map(|part| &part.groups);
            let premises = groups().flat_map(|group| &group.premises);
            let read = self.records.learn(premises, now, records);
            let stale = read.map_or_else(
                || self.peer.unexpected(&Reply::Text(answer.to_vec())),
                |()| RedisError::STALE,
            );
            for group in call.into_iter().flat_map(|part| part.groups) {
                // What looks for no record does not wait for those of others.
                let looks = !group.premises.is_empty();
                let outcome =
                    if looks { GroupOutcome::Failed(stale.clone()) } else { GroupOutcome::Apart };
                group.answer(|_| outcome);
            }
            return;
        }
        for part in call {
            let states = part.limits().0.len();
            for group in part.groups {
                group.answer(|costs| {
                    let outcome = now.and_then(|now| self.outcome(now, &mut rest, states, costs));
                    let unread = || self.peer.unexpected(&Reply::Text(answer.to_vec()));
                    outcome.unwrap_or_else(|| GroupOutcome::Failed(unread()))
                });
            }
        }
    }

    /// What the script answered about a group of so many states.
    fn outcome(
        &self,
        now: Timestamp,
        rest: &mut &[u8],
        states: usize,
        costs: Costs,
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
        let verdicts = OnceLock::new();
        Some(GroupOutcome::Charged(Charged { now, admitted, seen, costs, verdicts }))
    }
}
