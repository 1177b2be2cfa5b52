//! A request that is sent at once and alone, or waits and shares a call with others.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ratelimit_core::Verdict;
use ratelimit_core::store::{Now, Op, Snapshot, decide};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::call::Call;
use super::sender;
use crate::calls::{
    Answer, Calls, Charged, GroupOutcome, LimitSet, Outcome, RequestVerdict, Verdicts, Waiting,
};
use crate::connection::{Connection, Reply};
use crate::error::{RedisError, Result};
use crate::program::{LuaProgram, TwinCheck};
use crate::runtime::Home;

impl<A: LuaProgram, C: Connection> Call<'_, A, C> {
    /// Decides a batch by `decide.lua`, together with others that wait for a call. Returns `None`,
    /// with nothing written, for a batch that it does not decide.
    pub(super) async fn apply_merged(
        &self,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Option<Verdict>> {
        let Some(shared) = self.inner.calls.as_ref().filter(|_| self.merges()) else {
            return self.apply_decide(left).await;
        };
        while !self.deadline.is_over() {
            let home = self.inner.runtime.home();
            let home = home.map_err(|reason| self.inner.peer.unreachable(reason))?;
            let calls = shared.of(home, &self.keys[0]);
            let is_here = home.is_here();
            if is_here && let Some(mut permit) = calls.begin_alone(self.deadline) {
                let verdict = self.apply_decide(left).await;
                if verdict.is_ok() {
                    permit.landed();
                }
                return verdict;
            }
            let Some(outcome) = self.wait(home, is_here, &calls).await? else {
                home.ends();
                continue;
            };
            let (outcome, place) = match outcome {
                Outcome::Sent(outcome, place) => (outcome, place),
                Outcome::Lost => {
                    return Err(self
                        .inner
                        .peer
                        .lost("the task that sent it has ended with its runtime"));
                }
                Outcome::TooLate => break,
            };
            return match &*outcome {
                GroupOutcome::Failed(error) => Err(error.clone()),
                GroupOutcome::Apart => self.apply_decide(left).await,
                GroupOutcome::Charged(charged) => self.verdict_of(charged, place, left).map(Some),
            };
        }
        let given = self.deadline.given();
        Err(self.inner.peer.unreachable(format!(
            "within {given:?} the server did not answer the call before it, and nothing was sent"
        )))
    }

    /// Waits for a call with others. `None` if it was not sent, because the task that would have
    /// sent it has ended.
    async fn wait(&self, home: &Home, is_here: bool, calls: &Calls) -> Result<Option<Outcome>> {
        let (caller, mut outcome) = oneshot::channel();
        // Where the task may stand still, the caller watches the clock. Others need no timer: the
        // task does.
        let is_sent = (!is_here).then(|| Arc::new(AtomicBool::new(false)));
        let request = Box::new(Waiting {
            limits: LimitSet(self.twins.iter().map(TwinCheck::to_owned).collect()),
            keys: self.keys.clone(),
            premises: self.premises.into(),
            costs: self.batch.checks().iter().map(|check| check.cost).collect(),
            deadline: self.deadline,
            answer: Answer::new(caller, is_sent.clone()),
        });
        let start = |waiting| {
            let run = sender::run(Arc::downgrade(self.inner), Arc::clone(&calls.limit), waiting);
            drop(home.spawn(run));
        };
        if !calls.wait(request, start) {
            return Ok(Some(Outcome::Sent(Arc::new(GroupOutcome::Apart), 0)));
        }
        let Some(is_sent) = is_sent else { return Ok((&mut outcome).await.ok()) };
        let mut answered = timeout_at(self.deadline.at(), &mut outcome).await;
        if answered.is_err() && is_sent.load(Ordering::Acquire) {
            // Its call ends by then, and knows whether it was charged.
            answered = timeout_at(self.deadline.extended().at(), &mut outcome).await;
            return answered.map(Result::ok).map_err(|_| self.inner.peer.timed_out(self.deadline));
        }
        let given = self.deadline.given();
        answered.map(Result::ok).map_err(|_| {
            let remedy = home.remedy();
            self.inner.peer.unreachable(format!("within {given:?} it was not sent{remedy}"))
        })
    }

    /// The verdict of the request at this place in its group. The first that asks derives those of
    /// all.
    fn verdict_of(
        &self,
        charged: &Charged,
        place: usize,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        let is_noted = left.is_some();
        let verdicts = charged.verdicts.get_or_init(|| self.verdicts(charged, is_noted));
        let (verdicts, states) = verdicts.as_ref().map_err(Clone::clone)?;
        match verdicts.get(place) {
            Some(RequestVerdict::Known(verdict)) => {
                if let Some(left) = left {
                    let states = states.as_ref().and_then(|states| states.downcast_ref());
                    *left = states.cloned();
                }
                verdict.clone()
            }
            Some(RequestVerdict::Panicked(panic)) => {
                let panic = panic.lock().unwrap_or_else(PoisonError::into_inner).take();
                resume_unwind(panic.unwrap_or_else(|| Box::new("a step panicked")))
            }
            None => {
                Err(self.inner.peer.unexpected(&Reply::Other("no verdict on this request".into())))
            }
        }
    }

    /// The verdicts of a group: the steps in Rust on the states that the script read, one after the
    /// other. With them, if `is_noted`, the states that the last of these steps left.
    fn verdicts(&self, charged: &Charged, is_noted: bool) -> Verdicts {
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
                    RequestVerdict::Known(verdict.map_err(RedisError::from))
                }
                Err(panic) => {
                    has_panicked = true;
                    RequestVerdict::Panicked(Mutex::new(Some(panic)))
                }
            }
        };
        let verdicts = charged.costs.iter().map(|costs| step(costs)).collect();
        if admitted == charged.admitted || has_panicked {
            let states = is_noted.then(|| -> Box<dyn Any + Send + Sync> { Box::new(states) });
            return Ok((verdicts, states));
        }
        Err(self.inner.peer.disagrees(self.batch.checks()[0].limit.name()))
    }

    /// Whether the batch may share a call. It is sent alone if it does not charge, has an id,
    /// metadata or a given time, counts attempts, or if a state has variable length.
    fn merges(&self) -> bool {
        let is_plain = self.batch.operation() == Op::Acquire
            && self.batch.time() == Now::Store
            && self.batch.is_plain();
        let fits = |check: &TwinCheck<'_>| {
            let twin = &check.twin;
            twin.program.is_of_numbers()
                && !twin.attempts
                && !check.exempt
                && self.check(check).cost <= twin.capacity
        };
        let charges = |check: &TwinCheck<'_>| self.check(check).cost > 0;
        let is_plain = is_plain && !self.is_blocked();
        is_plain && self.twins.iter().all(fits) && self.twins.iter().any(charges)
    }
}
