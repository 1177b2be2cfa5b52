//! One check on its way through a transaction: what to charge, from the first read, and what is decided,
//! from the read just before the charge.

use ratelimit_core::algorithm::{WindowEntry, Write};
use ratelimit_core::store::{Batch, Check, Now};
use ratelimit_core::{Decision, ReservationId, Timestamp};

use super::stored::{
    CommandWords, Cut, StoredEntries, StoredEntry, addition, command, removal, with,
};
use crate::native::{Entry, EntryStorage, MultiProgram, Native, Windows};
use crate::store::{cut, ttl_ms};

/// How long expired entries stay stored, for charges that arrive late and are decided as of the time of
/// their request.
const LATENESS_US: u64 = 1_000_000;

/// The time to live of a key that only a correction has created.
const UNDONE_TTL_MS: &str = "1000";

/// The result of a check.
#[derive(Clone, Copy)]
pub(crate) struct CheckOutcome {
    pub(crate) decision: Decision,
    /// The wait if another check denies the batch.
    pub(crate) denied_wait_us: Option<u64>,
}

/// A reduction of an entry: an attempt that did not fit took the place of the rest.
#[derive(Clone, Copy)]
struct Less {
    since: Timestamp,
    left: u64,
}

/// What a step requires.
struct Due {
    outcome: CheckOutcome,
    /// What the check adds, and when that stops mattering.
    charge: Option<(Entry, Timestamp)>,
    less: Vec<Less>,
}

/// The commands that reduce entries.
#[derive(Default)]
struct Changes {
    commands: Vec<CommandWords>,
    /// The cuts that are added to counters.
    cuts: Vec<Cut>,
}

/// The own charge.
struct Own {
    since: Timestamp,
    cost: u64,
    /// The charge as it is stored; `None` in a counter.
    element: Option<StoredEntry>,
    /// The cuts that came with it.
    cuts: Vec<Cut>,
}

/// One check on its way.
pub(super) struct PendingCheck<'b, A> {
    pub(super) check: &'b Check<'b, A>,
    pub(super) key: String,
    pub(super) storage: EntryStorage,
    windows: Windows,
    /// What was read last: without the own charge.
    pub(super) found: StoredEntries,
    pub(super) outcome: Option<CheckOutcome>,
    /// Whether an earlier charge of this check stays.
    was_charged: bool,
    /// Identifies its element among those of other clients.
    id: String,
    own: Option<Own>,
}

impl Changes {
    /// Reduces a counter to `left`.
    fn cut(&mut self, key: &str, stored: &StoredEntry, left: u64) {
        let cut = Cut { since: stored.entry.since, left, raw: stored.raw };
        for before in stored.cuts.iter().filter(|before| **before != cut) {
            self.commands.push(removal(EntryStorage::Counters, key, &before.field()));
        }
        self.commands.push(with(with(command(["HINCRBY", key]), cut.field()), b"1".to_vec()));
        self.cuts.push(cut);
    }

    /// Reduces the elements of a moment to `left`, in an order on which all clients agree.
    fn drop(&mut self, key: &str, mut moment: Vec<&StoredEntry>, mut left: u64) {
        while let Some(stored) = moment.pop() {
            let cost = stored.entry.charged.cost;
            let stays = left.min(cost);
            left -= stays;
            if stays == cost {
                continue;
            }
            self.commands.push(removal(EntryStorage::SortedSet, key, &stored.text));
            self.commands.extend(stored.part(stays).map(|part| addition(key, &part)));
        }
    }
}

impl<'b, A: MultiProgram> PendingCheck<'b, A> {
    /// A check before anything was read.
    pub(super) fn new(check: &'b Check<'b, A>, key: String, native: Native) -> Self {
        Self {
            check,
            key,
            storage: native.storage,
            windows: native.windows,
            found: StoredEntries::default(),
            outcome: None,
            was_charged: false,
            id: ReservationId::random().to_string(),
            own: None,
        }
    }

    pub(super) fn is_charged(&self) -> bool {
        self.own.is_some()
    }

    /// Whether a charge stays that is never taken back.
    pub(super) fn stays_charged(&self) -> bool {
        self.windows.displaces() && (self.was_charged || self.own.is_some())
    }

    /// The result for the entries that were read.
    pub(super) fn peeked(&self, now: Timestamp) -> CheckOutcome {
        self.due(&self.found.entries(), now).outcome
    }

    /// The result of a reset.
    pub(super) fn full(&self) -> CheckOutcome {
        let step = self.check.limit.algorithm().step(None, Timestamp::ZERO, 0);
        let decision = step.costing(self.check.cost).decision;
        CheckOutcome { decision, denied_wait_us: None }
    }

    pub(super) fn reading(&self) -> CommandWords {
        match self.storage {
            EntryStorage::Counters => command(["HGETALL", &self.key]),
            EntryStorage::List => command(["LRANGE", &self.key, "0", "-1"]),
            EntryStorage::SortedSet => command(["ZRANGE", &self.key, "0", "-1"]),
        }
    }

    /// What the step requires on these entries.
    fn due(&self, entries: &[Entry], now: Timestamp) -> Due {
        let (algorithm, cost) = (self.check.limit.algorithm(), self.check.cost);
        let before = algorithm.state(entries);
        let step = algorithm.step(before.as_ref(), now, cost);
        let denied_wait_us = if step.decision.allowed {
            algorithm.wait_us(step.write.after(before.as_ref()), now, cost)
        } else {
            step.decision.retry_after_us
        };
        let outcome = CheckOutcome { decision: step.decision, denied_wait_us };
        let nothing = Due { outcome, charge: None, less: Vec::new() };
        let Write::Put { state, expires } = step.write else { return nothing };
        let after = algorithm.entries(&state);
        let Some(newest) = after.last() else { return nothing };
        let before = before.map(|state| algorithm.entries(&state)).unwrap_or_default();
        let cost_in = |entries: &[Entry], since| {
            let same = entries.iter().find(|entry| self.windows.is_same(entry.since, since));
            same.map_or(0, |entry| entry.charged.cost)
        };
        let there = match self.storage {
            // Each request is an entry of its own.
            EntryStorage::List => 0,
            EntryStorage::Counters | EntryStorage::SortedSet => cost_in(&before, newest.since),
        };
        let mut entry = newest.clone();
        entry.charged.cost = entry.charged.cost.saturating_sub(there);
        let charge = (entry.charged.cost > 0).then_some((entry, expires));
        if !self.windows.displaces() {
            return Due { charge, ..nothing };
        }
        let oldest = self.windows.oldest(entries, now.max(newest.since));
        let counted = before.iter().filter(|entry| entry.since >= oldest);
        let less = counted.filter_map(|entry| {
            let left = cost_in(&after, entry.since);
            (left < entry.charged.cost).then_some(Less { since: entry.since, left })
        });
        Due { charge, less: less.collect(), ..nothing }
    }

    /// The commands that charge what is due, and the place of the one that reads the entries before; none if the check is
    /// decided. If nothing is to be charged, this decides it. An earlier charge is taken back, or stays.
    pub(super) fn commands(
        &mut self,
        batch: &Batch<'_, A>,
        now: Timestamp,
    ) -> (Vec<CommandWords>, Option<usize>) {
        if self.outcome.is_some() {
            return (Vec::new(), None);
        }
        let mut commands = self.undo();
        if self.own.take().is_some() && self.windows.displaces() {
            self.was_charged = true;
            self.id = ReservationId::random().to_string();
        }
        let Due { outcome, charge, less } = self.due(&self.found.entries(), now);
        let changes = self.changes(&less);
        let Some((entry, expires)) = charge else {
            // If the limit was made smaller, more counts than fits into it.
            commands.extend(changes.commands);
            self.outcome = Some(outcome);
            return (commands, None);
        };
        commands.extend(self.clearing(batch.time(), now.max(entry.since)));
        let reading = commands.len();
        commands.push(self.reading());
        let adding = self.adding(&entry, now, batch.metadata_given());
        let element = adding.last().and_then(|text| StoredEntry::element(text));
        commands.push(adding);
        commands.extend(changes.commands);
        let late_ms = if batch.time() == Now::Store { LATENESS_US / 1_000 } else { 0 };
        let ttl_ms = (ttl_ms(expires, now, batch.time()) + late_ms).to_string();
        // NX for a key without a time to live, GT for one with a shorter one.
        commands.push(command(["PEXPIRE", &self.key, &ttl_ms, "NX"]));
        commands.push(command(["PEXPIRE", &self.key, &ttl_ms, "GT"]));
        let (since, cost, cuts) = (entry.since, entry.charged.cost, changes.cuts);
        self.own = Some(Own { since, cost, element, cuts });
        (commands, Some(reading))
    }

    /// By how much longer the entries hold their key than a full limit does, and the commands that replace them by a
    /// full limit as of `now`; none unless they are from the future.
    pub(super) fn healing(&self, now: Timestamp) -> (u64, Vec<CommandWords>) {
        let algorithm = self.check.limit.algorithm();
        let before = algorithm.state(&self.found.entries());
        let Some((ahead_us, Write::Put { state, expires })) = cut(algorithm, before.as_ref(), now)
        else {
            return (0, Vec::new());
        };
        let mut commands = vec![command(["DEL", &self.key])];
        let entries = algorithm.entries(&state);
        commands.extend(entries.iter().map(|entry| self.adding(entry, entry.since, &[])));
        let ttl_ms = (ttl_ms(expires, now, Now::Store) + LATENESS_US / 1_000).to_string();
        commands.push(command(["PEXPIRE", &self.key, &ttl_ms]));
        (ahead_us, commands)
    }

    /// The commands that remove entries which no longer count, even for a late charge.
    fn clearing(&self, time: Now, at: Timestamp) -> Vec<CommandWords> {
        let late_us = if time == Now::Store { LATENESS_US } else { 0 };
        let at = Timestamp::saturating_from_us(at.as_us().saturating_sub(late_us));
        let oldest = self.windows.oldest(&self.found.entries(), at);
        let past = self.found.0.iter().filter(|stored| stored.entry.since < oldest);
        past.flat_map(StoredEntry::fields)
            .map(|text| removal(self.storage, &self.key, &text))
            .collect()
    }

    fn adding(&self, entry: &Entry, now: Timestamp, metadata: &[u8]) -> CommandWords {
        let (since, cost) = (entry.since.as_us().to_string(), entry.charged.cost);
        let element = |metadata: &[u8]| {
            let charged = WindowEntry { metadata: metadata.into(), ..entry.charged.clone() };
            StoredEntry::text_of(&Entry { charged, ..*entry }, &self.id)
        };
        match self.storage {
            EntryStorage::Counters => command(["HINCRBY", &self.key, &since, &cost.to_string()]),
            EntryStorage::SortedSet => with(command(["ZADD", &self.key, &since]), element(&[])),
            EntryStorage::List => {
                // An existing window continues; if its list has expired meanwhile, nothing is pushed.
                let begins = entry.since == now;
                let push = command([if begins { "RPUSH" } else { "RPUSHX" }, &self.key]);
                with(push, element(metadata))
            }
        }
    }

    /// The commands that apply these reductions.
    fn changes(&self, less: &[Less]) -> Changes {
        let mut changes = Changes::default();
        for Less { since, left } in less {
            let mut of_it = self.found.0.iter().filter(|stored| stored.entry.since == *since);
            match self.storage {
                EntryStorage::Counters => {
                    if let Some(stored) = of_it.next() {
                        changes.cut(&self.key, stored, *left);
                    }
                }
                EntryStorage::List | EntryStorage::SortedSet => {
                    changes.drop(&self.key, of_it.collect(), *left);
                }
            }
        }
        if !changes.commands.is_empty() {
            changes.commands.push(self.undone());
        }
        changes
    }

    /// Decides on the entries that were read just before the charge, at the server's time `exec`, as of the
    /// time from which the charge counts. Returns the commands that remain. The check stays undecided if
    /// the charge came too late, or is less than what is due.
    pub(super) fn judge(&mut self, now: Timestamp, exec: Timestamp) -> Vec<CommandWords> {
        let Some(own) = &self.own else { return Vec::new() };
        let is_late = exec.saturating_us_since(now) > LATENESS_US;
        // A list that expired meanwhile takes no charge that continues a window.
        let is_there =
            self.storage != EntryStorage::List || own.since == now || !self.found.0.is_empty();
        if self.outcome.is_some() || is_late || !is_there {
            return Vec::new();
        }
        let others = self.found.entries();
        let view = self.windows.as_of(&others, own.since);
        let Due { outcome, charge, less } = self.due(&view, now);
        let due = match &charge {
            Some((Entry { since, charged }, _)) => {
                if !self.windows.is_same(*since, own.since) || charged.cost > own.cost {
                    return Vec::new();
                }
                charged.cost
            }
            None => 0,
        };
        self.outcome = Some(outcome);
        if !self.windows.displaces() {
            return self.reduced(due);
        }
        // Other clients may have made room, at a later time or in a type without sums: then the charge
        // stays.
        if self.storage != EntryStorage::Counters || view != others {
            return Vec::new();
        }
        let is_cut = |less: &&Less| {
            own.cuts.iter().any(|cut| cut.since == less.since && cut.left <= less.left)
        };
        let less: Vec<_> = less.iter().filter(|less| !is_cut(less)).copied().collect();
        let cuts = self.changes(&less).commands;
        self.reduced(due).into_iter().chain(cuts).collect()
    }

    /// The commands that take the charge back, unless it stays.
    pub(super) fn undo(&mut self) -> Vec<CommandWords> {
        if self.windows.displaces() { Vec::new() } else { self.reduced(0) }
    }

    /// Lets a key end which a correction has created, because it expired meanwhile or another client removed it.
    fn undone(&self) -> CommandWords {
        command(["PEXPIRE", &self.key, UNDONE_TTL_MS, "NX"])
    }

    /// The commands that reduce the charge to `due`.
    fn reduced(&mut self, due: u64) -> Vec<CommandWords> {
        let Some(Own { since, cost, element, .. }) = &mut self.own else { return Vec::new() };
        let more = cost.saturating_sub(due);
        *cost -= more;
        if more == 0 {
            return Vec::new();
        }
        let Some(whole) = element.take() else {
            let (since, less) = (since.as_us().to_string(), format!("-{more}"));
            return vec![command(["HINCRBY", &self.key, &since, &less]), self.undone()];
        };
        *element = whole.part(due);
        let push = |part: &StoredEntry| with(command(["RPUSHX", &self.key]), part.text.clone());
        let gone = removal(self.storage, &self.key, &whole.text);
        element.iter().map(push).chain([gone]).collect()
    }
}
