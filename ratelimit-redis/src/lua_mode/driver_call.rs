//! Calls the driver (`driver.lua`), which runs what [`decide.lua`](super::decide_call) does not.

use ratelimit_core::store::{Batch, Op, Snapshot, decide};
use ratelimit_core::{Timestamp, Verdict};

use super::answer::{Seen, of_one, state, stored};
use super::call::Call;
use crate::codec::take_sized;
use crate::connection::{Argument, Connection, Reply, TryAgain};
use crate::error::{RedisError, Result};
use crate::program::{LuaProgram, Twin, TwinCheck};
use crate::store::{StatesAt, evalsha, push_time};

/// What the driver answered.
pub(crate) struct DriverAnswer {
    now: Timestamp,
    /// What it did: see [`RedisStore::verdict`].
    line: String,
    /// What it says of each twin, for an operation that says something.
    pub(crate) notes: Vec<String>,
    /// What it read.
    pub(super) seen: Vec<u8>,
}

impl<A: LuaProgram, C: Connection> Call<'_, A, C> {
    /// Decides a batch by the driver, and notes the states that it left where that is asked for and
    /// known: of a long state, the answer has a part.
    pub(super) async fn apply_driver(
        &self,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict> {
        let number = |twin: &TwinCheck<'_>| Argument::Number(twin.position as u64);
        let limits = match self.batch.operation() {
            Op::Adopt => self.twins.iter().map(number).collect(),
            _ => Vec::new(),
        };
        let answer = self.run(&self.operation(), &limits).await;
        let answer = answer.map_err(|error| match self.batch.operation() {
            Op::Peek => error.of_a_lookup(),
            _ => error,
        })?;
        let mut seen = self.seen_in(&answer)?;
        let verdict = self.verdict(&answer.line, &mut seen)?;
        if let Some(left) = left
            && self.batch.operation() == Op::Acquire
            && self.has_few_numbers()
        {
            *left = Some(seen.snapshot);
        }
        Ok(verdict)
    }

    /// The verdict that follows from an answer.
    pub(crate) fn decided(&self, answer: &DriverAnswer) -> Result<Verdict> {
        self.verdict(&answer.line, &mut self.seen_in(answer)?)
    }

    /// The verdict on the states in an answer, if this batch of the same checks was decided on
    /// them.
    pub(crate) fn would_decide(
        &self,
        batch: &Batch<'_, A>,
        answer: &DriverAnswer,
    ) -> Result<Verdict> {
        Ok(decide(batch, answer.now, &mut self.seen_in(answer)?)?)
    }

    fn seen_in(&self, answer: &DriverAnswer) -> Result<Seen<A::State>> {
        self.seen(answer.now, &answer.seen)
            .ok_or_else(|| self.inner.peer.unexpected(&Reply::Text(answer.seen.clone())))
    }

    /// Runs an operation of the driver for the twins of a call, each with what the operation needs
    /// besides.
    pub(crate) async fn run(
        &self,
        operation: &str,
        given_each: &[Argument<'_>],
    ) -> Result<DriverAnswer> {
        let texts = self.texts()?;
        let layout = texts.layout(&self.twins).ok_or_else(|| {
            RedisError::Config(
                "a request has more limits or keys than a script can tell apart".into(),
            )
        })?;
        let mut words = self.arguments(operation, &layout, given_each);
        let answer = self
            .inner
            .eval(
                &self.keys[0],
                texts.driver(self.looks()),
                &mut words,
                TryAgain::Wait,
                self.deadline,
            )
            .await;
        let answer = answer.map_err(|error| self.explain(error))?;
        let parsed = of_one(self.batch.time(), &answer);
        if let Some(stale) = parsed.and_then(|(now, line, seen)| self.stale(now, line, seen)) {
            return Err(stale);
        }
        let parsed = parsed.map(|(now, line, seen)| {
            let mut words = line.split(' ');
            let line = words.next().unwrap_or_default().to_owned();
            let notes = words.map(str::to_owned).collect();
            DriverAnswer { now, line, notes, seen: seen.to_vec() }
        });
        parsed.ok_or_else(|| self.inner.peer.unexpected(&Reply::Text(answer)))
    }

    /// The states in an answer about the twins at one key, and what each twin stored there.
    pub(super) fn states_in(&self, answer: &DriverAnswer) -> Option<StatesAt<A::State>> {
        let mut states = Vec::new();
        states.resize_with(self.batch.checks().len(), || None);
        let (mut rest, mut read) = (&answer.seen[..], Vec::with_capacity(self.twins.len()));
        for here in self.twins.chunk_by(|one, next| one.position == next.position) {
            let position = here[0].position;
            let algorithm = self.batch.checks()[position].limit.algorithm();
            let twins: Vec<_> = algorithm.twins().into_iter().collect();
            // Those of a limit's twins that lie under another key count as new.
            let mut stored = vec![None; twins.len()];
            for check in here {
                let text = take_sized(&mut rest)?;
                let place = twins.iter().position(|twin| twin.place == check.twin.place)?;
                stored[place] = self::stored(&check.twin, text).ok()?;
                read.push(text.to_vec());
            }
            states[position] = state(algorithm, &stored).ok()?;
        }
        Some(StatesAt { now: answer.now, states, read })
    }

    /// The name of an operation in the driver.
    fn operation(&self) -> String {
        match self.batch.operation() {
            Op::Acquire if self.batch.is_denied_elsewhere() => "attempt".to_owned(),
            // Denied whatever the states are: only attempts are charged.
            Op::Acquire
                if self.is_blocked() && self.twins.iter().any(|twin| twin.twin.attempts) =>
            {
                "attempt".to_owned()
            }
            Op::Acquire | Op::Extend if self.is_blocked() => "ask".to_owned(),
            Op::Settle if self.batch.is_settled_once() => "settle-once".to_owned(),
            operation => operation.to_string(),
        }
    }

    /// The call's arguments, as `driver.lua` reads them.
    fn arguments<'w>(
        &'w self,
        operation: &'w str,
        layout: &'w [u8],
        given_each: &[Argument<'w>],
    ) -> Vec<Argument<'w>> {
        let mut words = evalsha(self.all_keys().into_iter(), self.twins.len());
        push_time(&mut words, self.batch.time());
        self.push_premises(&mut words);
        words.extend([
            Argument::Text(operation),
            Argument::Bytes(layout),
            Argument::Bytes(self.metadata()),
        ]);
        let has_id = self.twins.iter().any(|check| check.reservation != 0);
        words.extend(has_id.then_some(Argument::Text(&self.group)));
        for (place, check) in self.twins.iter().enumerate() {
            let Twin { program, parameters, capacity, unit, .. } = &check.twin;
            words.extend([Argument::Text(&check.field), Argument::Number(self.check(check).cost)]);
            words.extend(has_id.then_some(Argument::Number(check.life_us)));
            words.extend(given_each.get(place));
            let units = program.is_of_numbers().then_some([capacity * unit, *unit]);
            words.extend(units.map(|[capacity, _]| Argument::Number(capacity)));
            words.extend(parameters.iter().map(|number| Argument::Number(*number)));
            words.extend(units.map(|[_, unit]| Argument::Number(unit)));
        }
        words
    }

    /// The metadata for the script: empty if no limit of the batch stores any.
    fn metadata(&self) -> &[u8] {
        let charges = matches!(self.batch.operation(), Op::Acquire | Op::Force);
        let is_stored =
            || self.batch.checks().iter().any(|c| c.limit.algorithm().metadata_bytes().is_some());
        if charges && is_stored() { self.batch.metadata_given() } else { &[] }
    }
}
