//! The mode of native commands: each batch a transaction, with no scripting.
//!
//! A transaction cannot branch, so it charges first and looks afterwards. That is what
//! [`Attempts`](ratelimit_core::Attempts) means, and only they run here.
//!
//! 1. Read the entries of the batch, and the server's time. A peek, and an attempt that leaves
//!    nothing, end here.
//! 2. Step in Rust, as the memory store does. What it would write is charged by native commands, which
//!    add to what is there, whatever that is by now; and all of it is read again, in one transaction.
//! 3. Take away what was charged: that is what was there when it was. Step again. If the same is to be
//!    charged, as it nearly always is, the decision is that of this step; otherwise what was charged is
//!    corrected, and looked at again, a bounded number of times.
//!
//! Between a charge and its correction others see too much charged, never too little.

use std::collections::BTreeMap;
use std::sync::Arc;

use ratelimit_core::{
    Batch, Check, Decision, EntryStore, HoldId, KeepsEntries, Limit, Limits, MAX_INTEGER, Now, Op,
    Refusal, Store, Tick, Verdict, WindowEntry, Write,
};

use crate::connection::{Connection, Reply, Word};
use crate::error::{LEFT, RedisError, WRONG_TYPE};
use crate::native::{Entry, KeptIn, MultiProgram, Native};
use crate::slots::{Here, each};
use crate::store::{Multi, RedisStore, ttl_ms};

/// How often a charge is corrected before the batch is given up as contended.
const ATTEMPTS: usize = 32;

/// How long a key lives that a correction alone has made.
const UNDONE_TTL_MS: &str = "1000";

/// An entry as it is kept, and under what: a hash's field, or the text of an element.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kept {
    text: Vec<u8>,
    entry: Entry,
}

/// A counter at zero: since when it counted, and its field.
type Spent = (Tick, Vec<u8>);

/// What is kept under a key: the entries, oldest first, and counters at zero.
type Found = (Vec<Kept>, Vec<Spent>);

/// What one check adds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Charge {
    since: Tick,
    tick: Tick,
    cost: u64,
    expires: Tick,
}

/// A check on its way.
struct Asked<'b, A> {
    check: &'b Check<'b, A>,
    key: String,
    kept_in: KeptIn,
    /// What names its element among those of others.
    id: String,
    found: Vec<Kept>,
    /// Counters at zero, which corrections leave.
    spent: Vec<Spent>,
    /// What was removed with the charge: it was there before.
    removed: Vec<Kept>,
    charged: Option<Charge>,
    decision: Option<Decision>,
}

/// What a step says is to be done.
struct Due {
    decision: Decision,
    charge: Option<Charge>,
    /// What is kept and counts no longer.
    past: Vec<Kept>,
    /// Since when the oldest entry counts that is to stay.
    oldest: Tick,
}

type Command = Vec<Vec<u8>>;

impl<A: MultiProgram, C: Connection> Store<A> for RedisStore<Multi, C> {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        batch.validate()?;
        if batch.checks().is_empty() {
            return Ok(Verdict::several(Vec::new()));
        }
        for check in batch.checks() {
            native(check.limit)?;
            let limit = || check.limit.name().into();
            if batch.hold_id().is_some() {
                return Err(Refusal::CannotHold { limit: limit() }.into());
            }
            if !matches!(batch.operation(), Op::Acquire | Op::Peek | Op::Reset) {
                return Err(RedisError::NoOperation { limit: limit(), op: batch.operation() });
            }
        }
        if batch.operation() != Op::Peek && self.inner.connection.may_repeat() {
            return Err(RedisError::MayRepeat);
        }
        // Each attempt is charged whatever the others come to, so that each slot can do its part.
        match self.inner.parts(batch)? {
            None => self.apply_here(batch).await,
            Some(parts) => Box::pin(each(self, batch, &parts)).await,
        }
    }
}

impl<A: MultiProgram, C: Connection> Here<A> for RedisStore<Multi, C> {
    async fn apply_here(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        let asked = batch.checks().iter().map(|check| Ok(self.asked(check, native(check.limit)?)));
        let mut asked = asked.collect::<Result<Vec<_>, RedisError>>()?;
        if batch.operation() == Op::Reset {
            return self.reset(&asked).await;
        }
        let writes = batch.operation() != Op::Peek;
        let read = self.read(batch.time(), &mut asked, writes).await;
        let now = read.map_err(RedisError::of_a_lookup)?;
        if batch.operation() == Op::Peek {
            let decisions = asked.iter().map(|asked| asked.due(&asked.found, now).decision);
            return Ok(Verdict::several(decisions.collect()));
        }
        let mut rounds = self.inner.rounds(ATTEMPTS);
        loop {
            let charged = asked.iter().any(|asked| asked.charged.is_some());
            let charging = self.charge(&mut asked, batch, now).await;
            charging.map_err(|error| error.after(charged))?;
            for asked in asked.iter_mut().filter(|asked| asked.decision.is_none()) {
                asked.judge(now);
            }
            let decisions: Option<Vec<_>> = asked.iter().map(|asked| asked.decision).collect();
            if let Some(decisions) = decisions {
                return Ok(Verdict::several(decisions));
            }
            if !rounds.another() {
                break;
            }
        }
        // Nothing stays charged.
        let undo: Vec<_> = asked.iter().flat_map(Asked::undo).collect();
        if !undo.is_empty() {
            self.send_all(&asked[0].key, &undo).await.map_err(RedisError::in_part)?;
        }
        Err(rounds.contended())
    }

    /// Nothing is ever held here.
    async fn try_here(&self, _batch: &Batch<'_, A>) -> Result<(), RedisError> {
        Ok(())
    }
}

impl<C: Connection> RedisStore<Multi, C> {
    /// Whether a transaction can decide all of these limits, and if not, which one it cannot.
    ///
    /// # Errors
    /// The first limit that it cannot decide, by name, with the remedy.
    pub fn supports<A: MultiProgram>(limits: &Limits<A>) -> Result<(), RedisError> {
        limits.iter().try_for_each(|limit| native(limit).map(drop))
    }

    /// The key on the server under which a limit keeps its entries for a caller's key; `None` if no
    /// transaction can decide it.
    #[must_use]
    pub fn key<A: MultiProgram>(&self, limit: &Limit<A>, key: &str) -> Option<String> {
        Some(self.native_key(limit, limit.algorithm().native()?, key))
    }

    /// The state that is stored for a key of a limit.
    ///
    /// # Errors
    /// A server that does not answer, a limit that no transaction can decide, or a value that no limit
    /// wrote.
    pub async fn state<A: MultiProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<A::State>, RedisError> {
        let check = Check { limit, key, cost: 0 };
        let mut asked = [self.asked(&check, native(limit)?)];
        self.read(Now::At(Tick::ZERO), &mut asked, false).await?;
        Ok(limit.algorithm().state(&entries(&asked[0].found)))
    }

    /// A check of which nothing is known yet.
    fn asked<'b, A: MultiProgram>(&self, check: &'b Check<'b, A>, native: Native) -> Asked<'b, A> {
        Asked {
            check,
            key: self.native_key(check.limit, native, check.key),
            kept_in: native.kept_in,
            id: HoldId::random().to_string(),
            found: Vec::new(),
            spent: Vec::new(),
            removed: Vec::new(),
            charged: None,
            decision: None,
        }
    }

    fn native_key<A: MultiProgram>(&self, limit: &Limit<A>, native: Native, key: &str) -> String {
        self.inner.keys.of_multi(limit.name(), native.name, key)
    }

    async fn reset<A: MultiProgram>(&self, asked: &[Asked<'_, A>]) -> Result<Verdict, RedisError> {
        let commands: Vec<_> = asked.iter().map(|asked| words(["DEL", &asked.key])).collect();
        self.send_all(&asked[0].key, &commands).await?;
        let full = |asked: &Asked<'_, A>| {
            let step = asked.check.limit.algorithm().step(None, Tick::ZERO, 0);
            step.costing(asked.check.cost).decision
        };
        Ok(Verdict::several(asked.iter().map(full).collect()))
    }

    /// Reads what is kept for each check, and tells the time. A value that no limit wrote is removed if the
    /// batch `writes`.
    async fn read<A: MultiProgram>(
        &self,
        time: Now,
        asked: &mut [Asked<'_, A>],
        writes: bool,
    ) -> Result<Tick, RedisError> {
        let mut commands: Vec<_> = asked.iter().map(Asked::reading).collect();
        if time == Now::Store {
            commands.push(words(["TIME"]));
        }
        let replies = self.send_all(&asked[0].key, &commands).await;
        let replies = match replies {
            Err(error) => return Err(self.wrong_type(asked, error).await),
            Ok(replies) => replies,
        };
        for (asked, reply) in asked.iter_mut().zip(&replies) {
            (asked.found, asked.spent) = self.found(asked, reply, writes).await?;
        }
        match (time, replies.last()) {
            (Now::At(now), _) => Ok(now),
            (Now::Store, Some(reply)) => {
                reply.as_time().ok_or_else(|| self.inner.unexpected(reply))
            }
            (Now::Store, None) => Err(self.inner.unexpected(&Reply::Nil)),
        }
    }

    /// Which of the keys is of another type; otherwise the error as it is.
    async fn wrong_type<A: MultiProgram>(
        &self,
        asked: &[Asked<'_, A>],
        error: RedisError,
    ) -> RedisError {
        if !matches!(&error, RedisError::Server { code, .. } if code == "WRONGTYPE") {
            return error;
        }
        for asked in asked {
            let reading = self.send_all(&asked.key, &[asked.reading()]).await;
            if matches!(&reading, Err(RedisError::Server { code, .. }) if code == "WRONGTYPE") {
                return RedisError::corrupt(asked.check.limit, &asked.key, WRONG_TYPE);
            }
        }
        error
    }

    /// The entries that a reply tells of. A value that nobody of ours wrote is removed if the batch `writes`,
    /// so that the limit heals, and told once.
    async fn found<A: MultiProgram>(
        &self,
        asked: &Asked<'_, A>,
        reply: &Reply,
        writes: bool,
    ) -> Result<Found, RedisError> {
        let Reply::Array(items) = reply else { return Err(self.inner.unexpected(reply)) };
        if let Some(found) = kept(asked.kept_in, items) {
            return Ok(found);
        }
        if !writes {
            return Err(RedisError::corrupt(asked.check.limit, &asked.key, LEFT));
        }
        self.send_all(&asked.key, &[words(["DEL", &asked.key])]).await?;
        Err(RedisError::corrupt(asked.check.limit, &asked.key, "it has been removed"))
    }

    /// Charges what is due, and reads what is kept then.
    async fn charge<A: MultiProgram>(
        &self,
        asked: &mut [Asked<'_, A>],
        batch: &Batch<'_, A>,
        now: Tick,
    ) -> Result<(), RedisError> {
        let mut all = Vec::new();
        // Where the reading of each check, its last command, stands among the replies.
        let mut readings = Vec::with_capacity(asked.len());
        for asked in &mut *asked {
            let commands = asked.commands(batch, now);
            let some = !commands.is_empty();
            all.extend(commands);
            readings.push(some.then(|| all.len() - 1));
        }
        if all.is_empty() {
            return Ok(());
        }
        let replies = self.send_all(&asked[0].key, &all).await?;
        for (asked, reading) in asked.iter_mut().zip(readings) {
            if let Some(reading) = reading {
                let reply = replies.get(reading).unwrap_or(&Reply::Nil);
                // It is charged by now, and so are the others.
                let found = self.found(asked, reply, true).await;
                (asked.found, asked.spent) = found.map_err(RedisError::in_part)?;
            }
        }
        Ok(())
    }

    async fn send_all(&self, key: &str, commands: &[Command]) -> Result<Vec<Reply>, RedisError> {
        let commands: Vec<Vec<Word<'_>>> =
            commands.iter().map(|c| c.iter().map(|word| Word::Bytes(word)).collect()).collect();
        self.inner.connection.transaction(key, &commands).await
    }
}

impl<A: MultiProgram + KeepsEntries, C: Connection> EntryStore<A> for RedisStore<Multi, C> {
    async fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, RedisError> {
        let state = self.state(limit, key).await?;
        let key = self.key(limit, key).unwrap_or_default();
        self.inner.entries(limit, &key, state, now).await
    }
}

impl<A: MultiProgram> Asked<'_, A> {
    /// What is to be done if this is kept.
    fn due(&self, found: &[Kept], now: Tick) -> Due {
        let algorithm = self.check.limit.algorithm();
        let before = algorithm.state(&entries(found));
        let step = algorithm.step(before.as_ref(), now, self.check.cost);
        let decision = step.decision;
        let Write::Put { state, expires } = step.write else {
            return Due { decision, charge: None, past: Vec::new(), oldest: now };
        };
        let after = algorithm.entries(&state);
        let (Some(oldest), Some(newest)) = (after.first(), after.last()) else {
            return Due { decision, charge: None, past: Vec::new(), oldest: now };
        };
        let is_past = |kept: &&Kept| kept.entry.since < oldest.since;
        let past = found.iter().filter(is_past).cloned().collect();
        let before = before.map(|state| algorithm.entries(&state)).unwrap_or_default();
        let there = match self.kept_in {
            // Each request is an entry of its own.
            KeptIn::List => None,
            KeptIn::Counters | KeptIn::SortedSet => {
                before.iter().find(|entry| algorithm.is_same(entry.since, newest.since))
            }
        };
        let there = there.map_or(0, |entry| entry.charged.cost);
        let cost = newest.charged.cost.saturating_sub(there);
        let oldest = oldest.since;
        let charge = Charge { since: newest.since, tick: newest.charged.tick, cost, expires };
        Due { decision, charge: Some(charge).filter(|charge| charge.cost > 0), past, oldest }
    }

    /// Decides, if what was charged is what is due with what was there without it.
    fn judge(&mut self, now: Tick) {
        let before = self.before();
        let due = self.due(&before, now);
        let (Some(charged), Some(charge)) = (&self.charged, &due.charge) else {
            let nothing = self.charged.is_none() && due.charge.is_none();
            self.decision = nothing.then_some(due.decision);
            return;
        };
        let algorithm = self.check.limit.algorithm();
        let is_charged =
            |due: &Charge| due.cost == charged.cost && algorithm.is_same(due.since, charged.since);
        self.decision = if !self.is_there() {
            None
        } else if is_charged(charge) {
            Some(due.decision)
        } else if self.kept_in == KeptIn::SortedSet {
            // Others that came later were quicker. If it is the same when they count as come with
            // this one, it may stay where it is.
            let mut together = before;
            for kept in &mut together {
                kept.entry.since = kept.entry.since.min(charged.since);
            }
            let strict = self.due(&together, now);
            let stays = strict.charge.as_ref().is_some_and(is_charged);
            stays.then_some(if due.decision.allowed { strict.decision } else { due.decision })
        } else {
            None
        };
    }

    /// Whether what was charged is kept: a list that ended meanwhile takes no more.
    fn is_there(&self) -> bool {
        match self.kept_in {
            KeptIn::Counters => true,
            KeptIn::List | KeptIn::SortedSet => self.found.iter().any(|kept| self.is_own(kept)),
        }
    }

    fn is_own(&self, kept: &Kept) -> bool {
        element_id(&kept.text) == Some(self.id.as_bytes())
    }

    /// What was kept when this check was charged.
    fn before(&self) -> Vec<Kept> {
        let gone = |kept: &&Kept| !self.found.iter().any(|other| other.text == kept.text);
        // What was removed is older than all else.
        let mut found: Vec<_> = self.removed.iter().filter(gone).cloned().collect();
        found.extend_from_slice(&self.found);
        let Some(charged) = &self.charged else { return found };
        match self.kept_in {
            KeptIn::Counters => {
                if let Some(own) = found.iter_mut().find(|kept| kept.entry.since == charged.since) {
                    let cost = &mut own.entry.charged.cost;
                    *cost = cost.saturating_sub(charged.cost);
                }
                found.retain(|kept| kept.entry.charged.cost > 0);
            }
            KeptIn::List | KeptIn::SortedSet => found.retain(|kept| !self.is_own(kept)),
        }
        found
    }

    fn reading(&self) -> Command {
        match self.kept_in {
            KeptIn::Counters => words(["HGETALL", &self.key]),
            KeptIn::List => words(["LRANGE", &self.key, "0", "-1"]),
            KeptIn::SortedSet => words(["ZRANGE", &self.key, "0", "-1"]),
        }
    }

    /// The commands that take back what was charged.
    fn undo(&self) -> Vec<Command> {
        let Some(charged) = &self.charged else { return Vec::new() };
        let since = charged.since.as_us().to_string();
        match self.kept_in {
            KeptIn::Counters => {
                // A key that has ended meanwhile begins anew with it.
                vec![
                    words(["HINCRBY", &self.key, &since, &format!("-{}", charged.cost)]),
                    words(["PEXPIRE", &self.key, UNDONE_TTL_MS, "NX"]),
                ]
            }
            KeptIn::List | KeptIn::SortedSet => {
                let own = self.found.iter().filter(|kept| self.is_own(kept));
                own.map(|kept| removal(self.kept_in, &self.key, &kept.text)).collect()
            }
        }
    }

    /// The commands that take back what was charged before, and charge what is due; none if it has
    /// been decided, or nothing is to be charged.
    fn commands(&mut self, batch: &Batch<'_, A>, now: Tick) -> Vec<Command> {
        if self.decision.is_some() {
            return Vec::new();
        }
        let mut commands = self.undo();
        let before = self.before();
        let due = self.due(&before, now);
        commands.extend(due.past.iter().map(|past| removal(self.kept_in, &self.key, &past.text)));
        if let Some(charge) = &due.charge {
            // The current one stays: somebody else may be about to count in it.
            let oldest = due.oldest.min(charge.since);
            let over = self.spent.iter().filter(|(since, _)| *since < oldest);
            commands.extend(over.map(|(_, text)| removal(self.kept_in, &self.key, text)));
        }
        let goes_on = before.len() > due.past.len();
        self.removed = due.past;
        self.charged = due.charge;
        let Some(charge) = &self.charged else {
            if !commands.is_empty() {
                commands.push(self.reading());
            }
            return commands;
        };
        let (since, cost) = (charge.since.as_us().to_string(), charge.cost.to_string());
        let element = format!("{since} {cost} {} {} ", self.id, charge.tick.as_us());
        commands.push(match self.kept_in {
            KeptIn::Counters => words(["HINCRBY", &self.key, &since, &cost]),
            KeptIn::SortedSet => words(["ZADD", &self.key, &since, &element]),
            KeptIn::List => {
                // A list that is there goes on; where it has ended meanwhile, nothing is pushed.
                let mut push = words([if goes_on { "RPUSHX" } else { "RPUSH" }, &self.key]);
                push.push([element.as_bytes(), batch.metadata_given()].concat());
                push
            }
        });
        let ttl_ms = ttl_ms(charge.expires, now, batch.time()).to_string();
        // For a key that has no time to live yet, and for one that has less.
        commands.push(words(["PEXPIRE", &self.key, &ttl_ms, "NX"]));
        commands.push(words(["PEXPIRE", &self.key, &ttl_ms, "GT"]));
        commands.push(self.reading());
        commands
    }
}

fn native<A: MultiProgram>(limit: &Limit<A>) -> Result<Native, RedisError> {
    let native = limit.algorithm().native();
    native.ok_or_else(|| RedisError::NotNative { limit: limit.name().into() })
}

fn entries(found: &[Kept]) -> Vec<Entry> {
    found.iter().map(|kept| kept.entry.clone()).collect()
}

fn words<const N: usize>(words: [&str; N]) -> Command {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

fn removal(kept_in: KeptIn, key: &str, text: &[u8]) -> Command {
    let mut command = match kept_in {
        KeptIn::Counters => words(["HDEL", key]),
        KeptIn::List => words(["LREM", key, "1"]),
        KeptIn::SortedSet => words(["ZREM", key]),
    };
    command.push(text.to_vec());
    command
}

/// The entries of a reply, oldest first, and the counters at zero; `None` if there is one that nobody of
/// ours wrote.
fn kept(kept_in: KeptIn, items: &[Reply]) -> Option<Found> {
    let text = |reply: &Reply| match reply {
        Reply::Text(text) => Some(text.clone()),
        _ => None,
    };
    match kept_in {
        KeptIn::Counters => {
            let (mut counters, mut spent) = (BTreeMap::new(), Vec::new());
            for pair in items.chunks(2) {
                let [field, count] = pair else { return None };
                let (field, count) = (text(field)?, text(count)?);
                let since = Tick::from_us(number(&field)?)?;
                let count: i64 = std::str::from_utf8(&count).ok()?.parse().ok()?;
                match u64::try_from(count) {
                    // No limit counts so far.
                    Ok(cost) if cost > MAX_INTEGER => return None,
                    Ok(cost) if cost > 0 => {
                        let entry = Entry::plain(since, cost);
                        counters.insert(since, Kept { text: field, entry });
                    }
                    // Zero or, until its charge is made, below is what a correction leaves.
                    _ => spent.push((since, field)),
                }
            }
            Some((counters.into_values().collect(), spent))
        }
        KeptIn::List | KeptIn::SortedSet => {
            let entries = items.iter().map(|item| element(text(item)?)).collect::<Option<_>>()?;
            Some((entries, Vec::new()))
        }
    }
}

/// "SINCE COST ID TICK METADATA", of which the metadata may be any bytes.
fn element(text: Vec<u8>) -> Option<Kept> {
    let mut parts = text.splitn(5, |byte| *byte == b' ');
    let since = Tick::from_us(number(parts.next()?)?)?;
    let cost = number(parts.next()?).filter(|cost| *cost > 0)?;
    let _id = parts.next()?;
    let tick = Tick::from_us(number(parts.next()?)?)?;
    let metadata: Arc<[u8]> = parts.next()?.into();
    let charged = WindowEntry { tick, cost, metadata };
    Some(Kept { entry: Entry { since, charged }, text })
}

fn element_id(text: &[u8]) -> Option<&[u8]> {
    text.splitn(5, |byte| *byte == b' ').nth(2)
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}
