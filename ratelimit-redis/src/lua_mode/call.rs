//! [`Call`]: a batch whose keys lie in one slot, and its keys and twins as a script gets them.

use std::borrow::Cow;
use std::sync::Arc;

use ratelimit_core::store::{Batch, Check, Now, Op, Reservation, Standing};
use ratelimit_core::{Limit, Refusal, Timestamp};
use smallvec::SmallVec;

use crate::connection::{Argument, Connection, Reply, refused_in_part};
use crate::deadline::Deadline;
use crate::error::{LEFT, REMOVED, RedisError, Result, WRONG_TYPE};
use crate::key::Keys;
use crate::program::{Keeps, LuaProgram, Program, Twin, TwinCheck};
use crate::records::{Premise, push_premises};
use crate::reservation;
use crate::scripts::Texts;
use crate::store::Inner;

/// A batch that scripts decide, with all that they are called with.
pub(crate) struct Call<'a, A, C> {
    pub(super) inner: &'a Arc<Inner<C>>,
    pub(crate) batch: &'a Batch<'a, A>,
    /// What it assumes about records.
    pub(super) premises: &'a [Premise],
    pub(super) deadline: Deadline,
    pub(crate) keys: SmallVec<[String; 1]>,
    pub(crate) twins: SmallVec<[TwinCheck<'a>; 1]>,
    /// The text of the reservations' group.
    pub(super) group: String,
    pub(super) fingerprint: u64,
}

impl<'a, A: LuaProgram, C: Connection> Call<'a, A, C> {
    /// # Errors
    /// A twin has another number of parameters than its program names.
    pub(crate) fn of(
        inner: &'a Arc<Inner<C>>,
        batch: &'a Batch<'a, A>,
        premises: &'a [Premise],
        deadline: Deadline,
    ) -> Result<Self> {
        let keys = &inner.keys;
        let group = reservation::group(keys, batch);
        let mut call = Self {
            inner,
            batch,
            premises,
            deadline,
            keys: SmallVec::new(),
            twins: SmallVec::with_capacity(batch.checks().len()),
            fingerprint: group.as_ref().map_or(0, |group| group.fingerprint),
            group: reservation::group_text(group.as_ref()),
        };
        for (position, &Check { limit, key, .. }) in batch.checks().iter().enumerate() {
            let reservation_key = |id| keys.of_reservation(limit.state_name(), id, key);
            let reservation =
                batch.reservation_id().map_or(0, |id| call.index(reservation_key(id)));
            for twin in limit.algorithm().twins() {
                let attempts = limit.counts_attempts() && !batch.is_spared(position);
                let mut twin = Twin { attempts, ..twin };
                validate(limit.name(), &twin)?;
                twin.told_at(|| match batch.time() {
                    Now::At(now) => now,
                    Now::Store => inner.program_time(),
                });
                let known = call.shared_with(&twin, key);
                let key = known.unwrap_or_else(|| call.index(key_of(keys, limit, &twin, key)));
                let life_us = limit.reservation_us().unwrap_or(Reservation::LIFE_US);
                let field = field_of(limit, &twin);
                let exempt = matches!(batch.standing(position), Standing::Exempt);
                call.twins.push(TwinCheck {
                    position,
                    twin,
                    field,
                    key,
                    reservation,
                    life_us,
                    exempt,
                });
            }
        }
        Ok(call)
    }

    /// Keeps the twins whose states lie under keys like this one, and asks about this key instead.
    pub(super) fn narrow_to(&mut self, key: &str) {
        let lies_there = |own: &str| self.inner.keys.lie_alike(own, key);
        self.twins.retain(|twin| lies_there(&self.keys[twin.key - 1]));
        for twin in &mut self.twins {
            twin.key = 1;
        }
        self.keys = SmallVec::from_iter([key.to_owned()]);
    }

    /// The call for some of its twins, by another deadline, whatever records stand by now.
    pub(crate) fn with_twins(
        &self,
        twins: SmallVec<[TwinCheck<'a>; 1]>,
        deadline: Deadline,
    ) -> Self {
        let (keys, group) = (self.keys.clone(), self.group.clone());
        Self { premises: &[], deadline, keys, twins, group, ..*self }
    }

    /// Its keys, and behind them those of its premises.
    pub(super) fn all_keys(&self) -> SmallVec<[&str; 2]> {
        let premises = self.premises.iter().map(|premise| &*premise.key);
        self.keys.iter().map(String::as_str).chain(premises).collect()
    }

    /// Whether it looks for records, so that it assumes something about them.
    pub(super) const fn looks(&self) -> bool {
        !self.premises.is_empty()
    }

    /// Adds what it assumes, if it assumes anything.
    pub(super) fn push_premises<'w>(&'w self, words: &mut Vec<Argument<'w>>) {
        if self.looks() {
            push_premises(words, self.premises.iter());
        }
    }

    /// The error of an answer that shows other records than it assumes, which are noted; `None` for
    /// any other answer.
    pub(super) fn stale(&self, now: Timestamp, line: &str, records: &[u8]) -> Option<RedisError> {
        if !self.looks() || line != "~" {
            return None;
        }
        let read = self.inner.records.learn(self.premises, now, records);
        Some(match read {
            Some(()) => RedisError::STALE,
            None => self.inner.peer.unexpected(&Reply::Text(records.to_vec())),
        })
    }

    /// Whether the record of a caller denies it.
    pub(super) fn is_blocked(&self) -> bool {
        let denies = matches!(self.batch.operation(), Op::Acquire | Op::Peek | Op::Extend);
        let blocked = |place| matches!(self.batch.standing(place), Standing::Blocked(_));
        denies && (0..self.batch.checks().len()).any(blocked)
    }

    /// The index of the key that a twin shares with the one before it: limits of an identifier
    /// share a hash.
    fn shared_with(&self, twin: &Twin, identifier: &str) -> Option<usize> {
        let in_hash = |twin: &Twin| twin.program.keeps == Keeps::Numbers;
        let last = self.twins.last()?;
        let is_same = in_hash(twin) && in_hash(&last.twin) && self.check(last).key == identifier;
        is_same.then_some(last.key)
    }

    /// The index of a key, adding it if it is new.
    fn index(&mut self, key: String) -> usize {
        let known = self.keys.iter().position(|known| *known == key);
        known.unwrap_or_else(|| {
            self.keys.push(key);
            self.keys.len() - 1
        }) + 1
    }

    /// The check of a twin.
    pub(super) fn check(&self, twin: &TwinCheck<'_>) -> &'a Check<'a, A> {
        &self.batch.checks()[twin.position]
    }

    /// Whether each state is a few numbers, so that a script answers all of it.
    pub(super) fn has_few_numbers(&self) -> bool {
        self.twins.iter().all(|check| check.twin.program.is_of_numbers())
    }

    /// Attributes an error of the script to the check that caused it.
    pub(crate) fn explain(&self, error: RedisError) -> RedisError {
        let RedisError::Server { address, code, message } = &error else { return error };
        if code == "RLPART" {
            return refused_in_part(address, message);
        }
        self.of_code(code, message).unwrap_or(error)
    }

    /// The scripts that know its programs.
    ///
    /// # Errors
    /// A program whose name belongs to another one or is not allowed in scripts.
    pub(super) fn texts(&self) -> Result<Arc<Texts>> {
        let programs = self.twins.iter().map(|check| check.twin.program);
        self.inner.scripts.of(programs).map_err(|program| self.misnamed(program))
    }

    fn misnamed(&self, program: &Program) -> RedisError {
        let twin = self.twins.iter().find(|twin| std::ptr::eq(twin.twin.program, program));
        let limit = twin.map_or("", |twin| self.check(twin).limit.name());
        if !program.has_plain_name() {
            return RedisError::Config(format!(
                "limit {limit:?}: the program {:?} needs a name of ASCII letters, digits, '-' and '_'",
                program.name
            ));
        }
        RedisError::Config(format!(
            "limit {limit:?}: the program {:?} is not the one that the store knows by this name, and what \
             either stores would be taken for the other's; give it another name",
            program.name
        ))
    }

    /// The error for a code of the driver and the numbers after it.
    fn of_code(&self, code: &str, numbers: &str) -> Option<RedisError> {
        let mut numbers = numbers.split_whitespace().map_while(|word| word.parse::<u64>().ok());
        if code == "RLTIME" {
            return Some(Refusal::EndOfTime { now_us: numbers.next()? }.into());
        }
        if code == "RLWINDOW" {
            let place = usize::try_from(numbers.next()?).ok()?.checked_sub(1)?;
            let limit = self.check(self.twins.get(place)?).limit.name().to_owned();
            let server = Timestamp::from_us(numbers.next()?)?;
            let client = self.inner.program_time();
            let address = Arc::clone(self.inner.peer.address());
            return Some(RedisError::OtherWindow { limit, address, server, client });
        }
        let mut place = || usize::try_from(numbers.next()?).ok()?.checked_sub(1);
        let twin = self.twins.get(place()?)?;
        let limit = self.check(twin).limit;
        let mut corrupt =
            |detail| Some(RedisError::corrupt(limit, self.keys.get(place()?)?, detail));
        match code {
            "RLCORRUPT" if self.batch.operation() == Op::Peek => corrupt(LEFT),
            "RLCORRUPT" => corrupt(REMOVED),
            "RLWRONGTYPE" => corrupt(WRONG_TYPE),
            _ => None,
        }
    }
}

/// Refuses a twin whose number of parameters differs from its program's.
fn validate(limit: &str, twin: &Twin) -> Result<()> {
    let (program, given) = (twin.program, twin.parameters.len());
    let named = program.parameters.len();
    if named != given {
        return Err(RedisError::Config(format!(
            "limit {limit:?}: the twin has {given} parameters, and the program {:?} names {named}; give it as many",
            program.name
        )));
    }
    Ok(())
}

/// The field of a limit's twin: the limit's state name, and in a stack its place.
pub(super) fn field_of<'a, A: LuaProgram>(limit: &'a Limit<A>, twin: &Twin) -> Cow<'a, str> {
    match &*twin.place {
        "" => limit.state_name().into(),
        place => format!("{}{place}", limit.state_name()).into(),
    }
}

/// The key on the server of a twin's state.
pub(super) fn key_of<A: LuaProgram>(
    keys: &Keys,
    limit: &Limit<A>,
    twin: &Twin,
    key: &str,
) -> String {
    match twin.program.keeps {
        Keeps::Numbers => keys.shared(key),
        Keeps::SortedSet => keys.of_limit(&field_of(limit, twin), key),
        Keeps::List => keys.of_list(&field_of(limit, twin), key),
    }
}
