//! Puts a request into the [queue](crate::merge), and derives its verdict from what the script saw.

use std::any::Any;
use std::hash::BuildHasher;
use std::sync::{Arc, LazyLock};

use hashbrown::DefaultHashBuilder;
use ratelimit_core::{Batch, Now, Op, Snapshot, Verdict, decide};
use smallvec::SmallVec;
use tokio::runtime::{self, Handle};

use super::call::{Call, TwinCheck};
use super::flat_call::states;
use super::flight::{Sender, send_next};
use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::flat::{MOST_MERGED, Role, Shape};
use crate::merge::{Answers, Charged, Group, GroupCheck, Joined, Outcome, Place, Queue, Requests};
use crate::mode::Lua;
use crate::program::LuaProgram;
use crate::store::RedisStore;

/// The checks of a batch that need no allocation.
const FEW: usize = 2;

/// Hashes states to find those that requests share. Two states of one hash are taken for one, which delays requests and
/// changes no decision.
static STATES: LazyLock<DefaultHashBuilder> = LazyLock::new(DefaultHashBuilder::default);

impl<C: Connection> RedisStore<Lua, C> {
    /// Decides a batch by a flat script, together with others that come while a call is under way. Returns `None`,
    /// with nothing written, for a batch that no flat script decides.
    pub(super) async fn apply_merged<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        deadline: Deadline,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Option<Verdict>, RedisError> {
        let Some((queues, shapes)) = self.inner.queues.as_ref().zip(shapes(batch, call)) else {
            return Box::pin(self.apply_flat(batch, call, deadline, left)).await;
        };
        // The task that sends for others runs there.
        let Ok(runtime) = Handle::try_current() else {
            return Box::pin(self.apply_flat(batch, call, deadline, left)).await;
        };
        let queue = queues.of(&call.keys[0]);
        loop {
            let (place, under_way) =
                match join(&queue, batch, call, &shapes, (deadline, runtime.id())) {
                    Joined::Waits(place, under_way) => (place, under_way),
                    Joined::Full => return Err(self.inner.overloaded()),
                    Joined::Goes(number) => {
                        let _sender = Sender::new(&self.inner, queue, number, runtime);
                        return Box::pin(self.apply_flat(batch, call, deadline, left)).await;
                    }
                };
            place.watch_on(&runtime, deadline);
            // The caller of the call under way may have stopped polling it.
            let overtake = || send_next(&self.inner, &queue, under_way, &runtime);
            let Some(outcome) = place.outcome(deadline, overtake).await else {
                let was_sent = !place.take_back();
                return Err(self.inner.overdue(was_sent, deadline));
            };
            match outcome {
                Outcome::Apart => {
                    return Box::pin(self.apply_flat(batch, call, deadline, left)).await;
                }
                Outcome::Failed(error) => return Err(error.clone()),
                Outcome::NotSent => {}
                Outcome::Charged(charged) => {
                    let is_noted = left.is_some();
                    let derive =
                        |requests: &_| self.answers(batch, call, charged, requests, is_noted);
                    let (verdict, states) = place.answer(derive)?;
                    if let Some(left) = left {
                        *left = states.and_then(|states| states.downcast_ref()).cloned();
                    }
                    return Ok(verdict);
                }
            }
        }
    }

    /// The verdicts of a group's requests: the steps in Rust on the states that the script read, one after the
    /// other. With them, if `is_noted`, the states that the last of these steps left.
    fn answers<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
        call: &Call<'_>,
        charged: &Charged,
        requests: &Requests,
        is_noted: bool,
    ) -> Result<Answers, RedisError> {
        let states = states(batch, call, charged.seen.split('\n')).ok_or_else(|| {
            self.inner.protocol(format!("a text of {} bytes", charged.seen.len()))
        })?;
        let mut states = Snapshot { now: charged.now, states };
        let mut checks = batch.checks().to_vec();
        let mut verdicts = Vec::with_capacity(requests.size());
        let mut admitted = 0;
        for costs in requests.wanted() {
            let Some(costs) = costs else {
                verdicts.push(None);
                continue;
            };
            for (check, cost) in checks.iter_mut().zip(costs) {
                check.cost = *cost;
            }
            let verdict = decide(&batch.with_checks(&checks), charged.now, &mut states)?;
            admitted += u64::from(verdict.allowed());
            verdicts.push(Some(verdict));
        }
        if admitted == charged.admitted {
            let states = is_noted.then(|| -> Box<dyn Any + Send + Sync> { Box::new(states) });
            return Ok(Answers { verdicts, states });
        }
        Err(self.inner.disagrees(batch.checks()[0].limit.name()))
    }
}

/// How the checks of a batch take part in a merged call. `None` if the batch goes alone: it does not charge, it has
/// an id, metadata or a given time, it counts attempts, or a state has variable length.
fn shapes<A: LuaProgram>(batch: &Batch<'_, A>, call: &Call<'_>) -> Option<SmallVec<[Shape; FEW]>> {
    let is_plain = batch.operation() == Op::Acquire
        && batch.time() == Now::Store
        && batch.is_plain()
        && call.twins.len() <= MOST_MERGED;
    let cost = |check: &TwinCheck<'_>| batch.checks()[check.position].cost;
    let fits = |check: &TwinCheck<'_>| {
        let twin = &check.twin;
        twin.program.numbers.is_some() && !twin.attempts && cost(check) <= twin.capacity
    };
    if !is_plain || !call.twins.iter().all(fits) || !call.twins.iter().any(|check| cost(check) > 0)
    {
        return None;
    }
    let shape = |check: &TwinCheck<'_>| Shape {
        program: check.twin.program,
        role: if cost(check) == 0 { Role::Look } else { Role::Charge },
        key: check.key,
    };
    Some(call.twins.iter().map(shape).collect())
}

/// Puts a request into the queue.
fn join<A: LuaProgram>(
    queue: &Queue<Arc<Group>>,
    batch: &Batch<'_, A>,
    call: &Call<'_>,
    shapes: &[Shape],
    (deadline, runtime): (Deadline, runtime::Id),
) -> Joined<Place> {
    let parts = || call.twins.iter().zip(shapes);
    let state = |check: &TwinCheck<'_>| STATES.hash_one((&call.keys[check.key - 1], &check.field));
    let hashes: SmallVec<[u64; FEW]> = call.twins.iter().map(state).collect();
    queue.join(
        &hashes,
        |group: &Arc<Group>| {
            let same = |(one, (check, shape)): (&GroupCheck, (&TwinCheck<'_>, &Shape))| {
                one.is_of(shape, check.position, &check.field, &check.twin)
            };
            group.keys == *call.keys
                && group.checks.len() == shapes.len()
                && group.checks.iter().zip(parts()).all(same)
        },
        || {
            let check = |(check, shape): (&TwinCheck<'_>, &Shape)| GroupCheck {
                shape: *shape,
                position: check.position,
                field: check.field.to_string(),
                twin: check.twin.clone(),
            };
            let checks = parts().map(check).collect();
            Arc::new(Group::new(call.keys.to_vec(), checks, batch.checks().len()))
        },
        |group| group.add(batch.checks().iter().map(|check| check.cost), deadline, runtime),
    )
}
