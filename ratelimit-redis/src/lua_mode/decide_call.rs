//! Calls `decide.lua` for one request, as a group of one: an acquire or a peek, without an id, of
//! limits whose state is a few numbers. The script returns the states that it read, and the step in
//! Rust derives the decision.

use ratelimit_core::Verdict;
use ratelimit_core::store::{Op, Snapshot};

use super::answer::of_one;
use super::call::Call;
use crate::connection::{Argument, Connection, Reply, TryAgain, refused_in_part};
use crate::error::{RedisError, Result};
use crate::program::{LuaProgram, TwinCheck};
use crate::script::Script;
use crate::scripts::READ;
use crate::store::{evalsha, push_time};

impl<A: LuaProgram, C: Connection> Call<'_, A, C> {
    /// Decides a batch by `decide.lua`. Returns `None`, with nothing written, for anything else: an
    /// id, a state of variable length, or a value that no limit wrote.
    pub(super) async fn apply_decide(
        &self,
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Option<Verdict>> {
        let plain = matches!(self.batch.operation(), Op::Peek | Op::Acquire);
        let has_id = self.batch.reservation_id().is_some();
        if !plain || self.batch.is_part() || has_id || !self.has_few_numbers() {
            return Ok(None);
        }
        // What only reads for the sake of a record, the driver reads.
        if self.is_blocked() || (self.looks() && self.only_reads()) {
            return Ok(None);
        }
        let texts = self.texts()?;
        let answer = if self.only_reads() {
            // One key per field.
            let keys = self.twins.iter().map(|check| &*self.keys[check.key - 1]);
            let mut words = evalsha(keys, 1);
            words.extend(self.twins.iter().map(|check| Argument::Text(&check.field)));
            self.eval(&READ, words).await.map_err(RedisError::of_a_lookup)
        } else {
            let Some(shape) = texts.shape(&self.twins) else { return Ok(None) };
            let mut words = evalsha(self.all_keys().into_iter(), self.twins.len());
            push_time(&mut words, self.batch.time());
            self.push_premises(&mut words);
            // Any charge above the capacity fails; the cap prevents an overflow.
            let cost = |check: &TwinCheck<'_>| self.charge_of(check).min(check.twin.capacity + 1);
            push_part(&mut words, &shape, &self.twins, PartGroups::ALONE, cost);
            self.eval(texts.decide(self.looks()), words).await.map_err(|error| self.explain(error))
        };
        let answer = match answer {
            Ok(answer) => answer,
            // The driver reports which key it is.
            Err(error) if error.is_wrong_type() => return Ok(None),
            Err(error) => return Err(error),
        };
        // The driver decides on what the script did not understand.
        let Some((now, line, seen)) = of_one(self.batch.time(), &answer) else { return Ok(None) };
        if let Some(stale) = self.stale(now, line, seen) {
            return Err(stale);
        }
        if let Some(refused) = line.strip_prefix('!') {
            return Err(refused_in_part(self.inner.peer.address(), refused));
        }
        let Some(mut seen) = self.seen(now, seen).filter(|_| line != "?") else {
            // The script understood every state that it admitted.
            if line == "1" {
                return Err(self.inner.peer.unexpected(&Reply::Text(answer)));
            }
            return Ok(None);
        };
        let verdict = self.verdict(line, &mut seen)?;
        if let Some(left) = left {
            *left = Some(seen.snapshot);
        }
        Ok(Some(verdict))
    }

    /// What a check charges: nothing, if its caller is exempt.
    fn charge_of(&self, check: &TwinCheck<'_>) -> u64 {
        if check.exempt { 0 } else { self.check(check).cost }
    }

    /// Whether it writes nothing: a peek, a check that costs nothing, a cost that never fits.
    fn only_reads(&self) -> bool {
        let cost = |check| self.charge_of(check);
        let all_cost_nothing = || self.twins.iter().all(|check| cost(check) == 0);
        let never_fits = || self.twins.iter().any(|check| cost(check) > check.twin.capacity);
        let attempts = || self.twins.iter().any(|check| check.twin.attempts && cost(check) > 0);
        self.batch.operation() == Op::Peek || all_cost_nothing() || never_fits() && !attempts()
    }

    /// The answer of a script.
    async fn eval<'w>(
        &'w self,
        script: &'w Script,
        mut words: Vec<Argument<'w>>,
    ) -> Result<Vec<u8>> {
        let key = &self.keys[0];
        self.inner.eval(key, script, &mut words, TryAgain::Wait, self.deadline).await
    }
}

/// The groups of a part.
#[derive(Clone, Copy)]
pub(super) struct PartGroups {
    /// How many there are, and how many of them are a single request at the costs of the part, or
    /// at their own if they have own numbers; `None` for one request alone.
    pub(super) counts: Option<[usize; 2]>,
    /// Whether each brings its numbers.
    pub(super) has_own_numbers: bool,
}

impl PartGroups {
    const ALONE: Self = Self { counts: None, has_own_numbers: false };
}

/// Adds what `decide.lua` reads of a set of limits: their algorithms and fields, and their numbers
/// unless groups have their own. Unless it is one request alone, also how many groups are charged
/// by them, first those of a single request at these costs.
pub(super) fn push_part<'w>(
    words: &mut Vec<Argument<'w>>,
    shape: &'w [u8],
    checks: &'w [TwinCheck<'_>],
    groups: PartGroups,
    cost: impl Fn(&TwinCheck<'_>) -> u64,
) {
    let count = |count: usize| Argument::Number(count as u64);
    let keys = checks.iter().map(|check| check.key).max().unwrap_or_default();
    let shared = if groups.has_own_numbers { &[][..] } else { checks };
    let numbers = shared.iter().map(|check| 1 + check.twin.parameters.len()).sum();
    if groups.counts.is_none() && keys == 1 {
        words.push(Argument::Bytes(shape));
    } else {
        let [single, groups] = groups.counts.unwrap_or([1, 1]).map(count);
        words.extend([Argument::Text(""), Argument::Bytes(shape)]);
        words.extend([count(keys), count(numbers), single, groups]);
    }
    if keys > 1 {
        let spans = || checks.chunk_by(|one, next| one.key == next.key);
        words.push(count(spans().count()));
        words.extend(spans().flat_map(|span| [count(span[0].key), count(span.len())]));
    }
    words.extend(checks.iter().map(|check| Argument::Text(&check.field)));
    words.extend(checks.iter().map(|check| Argument::Number(cost(check) * check.twin.unit)));
    words.extend(numbers_of(shared).map(Argument::Number));
}

/// The numbers of limits, as `decide.lua` reads them.
pub(super) fn numbers_of(checks: &[TwinCheck<'_>]) -> impl Iterator<Item = u64> {
    checks.iter().flat_map(|TwinCheck { twin, .. }| {
        std::iter::once(twin.capacity * twin.unit).chain(twin.parameters.iter().copied())
    })
}
