//! [`Tally`]: the counts of a replay.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use ratelimit_core::store::Op;
use ratelimit_core::{
    AnyAlgorithm, Condition, ConfigError, Limit, Limits, NamedDecision, NamedDecisions, Numbers,
    RateLimiter, Record, Timestamp, Verdict,
};

use crate::by_hash::{ByHash, MAX_CALLERS, hash_of};
use crate::caller::{BARE_NAME, Caller, check_names, names};
use crate::frequent::Frequent;
use crate::input::{InputEntry, line_text};
use crate::nearness::{KeyHashes, Nearness, key_hash};
use crate::records::{self, GivenRecord};
use crate::suggest::Needs;
use crate::text::{count, plural};
use crate::timeline::Timeline;

/// How many identifier names are kept for a warning: a trace may contain as many as it has lines.
const MAX_NAMES: usize = 16;
/// How many denied lines are kept of a caller.
pub(crate) const LINES: usize = 10;
/// Of how many callers the details of denials are kept: of at least so many of those denied most,
/// and of at most twice as many.
const DETAILED: usize = 500;
/// How many paths of a caller are counted.
const MAX_PATHS: usize = 100;

/// The counts of a replay.
#[derive(Default)]
pub struct Tally {
    /// Lines that asked to be admitted.
    pub(crate) requests: u64,
    pub(crate) denied: u64,
    /// Peeks, refunds, resets and forced charges.
    pub(crate) other: u64,
    /// Lines that are no request.
    pub bad_lines: u64,
    /// Operations that the store does not support.
    pub(crate) refused_operations: u64,
    /// The earliest and the latest time of a line.
    pub(crate) span: Option<(Timestamp, Timestamp)>,
    /// The counts of each limit, in the order of the policy.
    pub limits: Vec<LimitTally>,
    /// The identifier names that the policy uses.
    pub(crate) identifiers: Vec<IdentifierTally>,
    pub(crate) timeline: Timeline,
    /// The identifier names of the requests, while the policy uses one that none of them had.
    pub(crate) names: Vec<String>,
    pub(crate) detailed: Detailed,
    /// How many callers are counted one by one, by an identifier or under a limit.
    most_callers: usize,
}

/// The counts of one limit, in the order of the policy.
pub struct LimitTally {
    pub(crate) limit: Limit<AnyAlgorithm>,
    pub(crate) applied: u64,
    /// Denied requests; of a shadow limit, those that it would have denied.
    pub(crate) denied: u64,
    /// Requests that crossed the threshold at which it warns.
    pub(crate) warned: u64,
    /// How near its callers came, if that is asked for.
    pub nearness: Option<Nearness>,
    /// What its callers needed, if that was observed.
    pub needs: Option<Needs>,
    /// The positions in [`Tally::identifiers`] of the limit's identifiers.
    identifiers: Vec<usize>,
    /// The records of its callers, by key.
    records: HashMap<Box<str>, RecordTally>,
}

/// A record, and what it decided.
pub(crate) struct RecordTally {
    pub(crate) record: Record<AnyAlgorithm>,
    /// Requests that were decided while it stood.
    pub(crate) requests: u64,
    pub(crate) denied: u64,
}

/// One decided line.
pub struct Decided<'d> {
    pub(crate) entry: &'d InputEntry,
    pub(crate) limits: &'d Limits<AnyAlgorithm>,
    pub(crate) verdict: &'d Verdict,
    pub(crate) named: NamedDecisions<'d, AnyAlgorithm>,
    placed: Vec<Placed<'d>>,
}

/// A limit's decision, and the place of the limit in the policy.
pub type Placed<'d> = (usize, NamedDecision<'d, AnyAlgorithm>);

impl<'d> Decided<'d> {
    /// The decision of a limiter, by the numbers of the request if it has some.
    pub fn new<S>(
        (limiter, numbers): (&'d RateLimiter<S>, Option<&'d Numbers>),
        entry: &'d InputEntry,
        verdict: &'d Verdict,
    ) -> Self {
        let named = limiter.named(verdict);
        let named = match numbers {
            Some(numbers) => named.numbers(numbers),
            None => named,
        };
        let limits = limiter.limits();
        let place = |name: &str| limits.iter().position(|limit| limit.name() == name);
        let all = named.clone().chain(named.shadow());
        let placed = all.filter_map(|one| Some((place(one.name())?, one))).collect();
        Self { entry, limits, verdict, named, placed }
    }

    /// What each limit that applies decided, shadow limits last.
    pub fn each(&self) -> impl Iterator<Item = Placed<'d>> {
        self.placed.iter().copied()
    }

    /// The enforced ones that denied.
    fn denying(&self) -> impl Iterator<Item = Placed<'d>> {
        self.each().filter(|(_, one)| !one.allowed && !one.configured().is_shadow())
    }
}

/// The counts of the callers under one identifier name.
pub(crate) struct IdentifierTally {
    pub(crate) name: String,
    /// By the hash of the identifier.
    pub(crate) callers: ByHash<CallerTally>,
    /// Requests of callers that are not counted, because there were too many.
    pub(crate) left_out: u64,
}

/// The counts of one caller.
pub(crate) struct CallerTally {
    value: Box<str>,
    requests: u64,
    denials: Option<Box<Denials>>,
}

/// The denials of one caller.
#[derive(Clone, Debug, Default)]
pub(crate) struct Denials {
    pub(crate) first: Timestamp,
    pub(crate) last: Timestamp,
    /// Requests denied because of this caller: by a limit whose first identifier names it.
    pub(crate) requests: u64,
    /// Those denials by the position of the limit in the policy.
    by_limit: Vec<(usize, u64)>,
    /// What the lines of these requests tell, if lines are kept and the caller is among those
    /// denied most.
    pub(crate) details: Option<Box<Details>>,
    /// The spells of denials. A spell begins with a denied request, and ends when the wait of its
    /// last denial does, or when a request is admitted before that. One without either has no end.
    pub(crate) spells: u64,
    /// How long the ended spells were, all together.
    denied_us: u64,
    /// The longest ended spell.
    longest_us: u64,
    /// Whether the last denial has no wait, and nothing ended it.
    is_endless: bool,
    /// When the spell began that has not ended yet, and when the wait of its last denial is over:
    /// `None` for never.
    spell: Option<(Timestamp, Option<Timestamp>)>,
}

impl Denials {
    /// Counts a denial that lasts until `until`, or for ever.
    fn denied(&mut self, at: Timestamp, until: Option<Timestamp>) {
        self.requests += 1;
        match &mut self.spell {
            Some((_, end)) if end.is_none_or(|end| at <= end) => *end = until,
            _ => {
                self.end_spell(Some(at));
                self.spells += 1;
                self.spell = Some((at, until));
            }
        }
    }

    /// Ends the spell that goes on: `None` if no request follows.
    fn end_spell(&mut self, at: Option<Timestamp>) {
        let Some((since, until)) = self.spell.take() else { return };
        let Some(end) = at.into_iter().chain(until).min() else {
            self.is_endless = true;
            return;
        };
        let us = end.saturating_us_since(since);
        self.denied_us = self.denied_us.saturating_add(us);
        self.longest_us = self.longest_us.max(us);
    }

    /// How long the spells were, all together, and the longest; `None` if one has no end.
    pub(crate) fn denied_us(&self) -> Option<(u64, u64)> {
        (!self.is_endless).then_some((self.denied_us, self.longest_us))
    }
}

/// What the lines of a caller's denied requests tell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    /// How many requests were denied before those.
    pub(crate) before: u64,
    pub(crate) paths: Frequent,
    /// The user agent of the first of them that tells one.
    pub(crate) agent: Option<String>,
    /// The lines of the first of them.
    pub(crate) lines: Vec<String>,
}

/// Whose details are kept.
pub(crate) struct Detailed {
    /// By the place of the identifier and the hash of the caller.
    callers: Vec<(usize, u64)>,
    /// Of how many callers they are kept.
    pub(crate) most: usize,
    /// Of a caller that was denied so often, or less, none are begun.
    least: u64,
}

impl Default for Detailed {
    fn default() -> Self {
        Self { callers: Vec::new(), most: DETAILED, least: 0 }
    }
}

/// One of the most-denied callers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offender<'t> {
    pub(crate) name: &'t str,
    pub(crate) value: &'t str,
    pub(crate) requests: u64,
    pub(crate) denials: &'t Denials,
}

impl Tally {
    /// `nearness`: whether to count how near callers came to each limit, which takes memory per
    /// caller.
    pub(crate) fn new(limits: &Limits<AnyAlgorithm>, nearness: bool) -> Self {
        Self::of_at_most(MAX_CALLERS, limits, nearness)
    }

    /// The same, which counts so many callers one by one.
    pub(crate) fn of_at_most(most: usize, limits: &Limits<AnyAlgorithm>, nearness: bool) -> Self {
        let mut identifiers: Vec<IdentifierTally> = Vec::new();
        let mut place_of = |name: &str| {
            identifiers.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
                let (name, callers) = (name.to_owned(), ByHash::new(most));
                identifiers.push(IdentifierTally { name, callers, left_out: 0 });
                identifiers.len() - 1
            })
        };
        let tally = |limit: &Limit<AnyAlgorithm>| {
            let identifiers = names(limit).into_iter().map(&mut place_of).collect();
            let nearness = nearness.then(|| Nearness::of_at_most(most));
            let (limit, needs) = (limit.clone(), None);
            let records = HashMap::new();
            let (applied, denied, warned) = (0, 0, 0);
            LimitTally { limit, applied, denied, warned, nearness, needs, identifiers, records }
        };
        let limits = limits.iter().map(tally).collect();
        Self { limits, identifiers, most_callers: most, ..Self::default() }
    }

    /// Counts what these records decide, as far as the limits decide by them.
    pub(crate) fn count_records(&mut self, records: &[GivenRecord]) {
        for counts in &mut self.limits {
            let of_limit = records::of(records, &counts.limit).map(|(key, record)| {
                (key.into(), RecordTally { record: record.clone(), requests: 0, denied: 0 })
            });
            counts.records = of_limit.collect();
        }
    }

    /// Whether a limit charges this request nothing, because of a record of its caller.
    pub(crate) fn is_exempt(&self, place: usize, entry: &InputEntry) -> bool {
        let LimitTally { limit, records, .. } = &self.limits[place];
        let key = limit.key_for(&entry.caller).filter(|_| !records.is_empty());
        let record = key.and_then(|key| records.get(&*key)).map(|counts| &counts.record);
        record.is_some_and(|record| record.is_exempt() && record.stands_at(entry.at))
    }

    /// The records, those that decided most first, each with its limit and the key of its caller.
    pub(crate) fn records(&self) -> Vec<(&Limit<AnyAlgorithm>, &str, &RecordTally)> {
        let all = self.limits.iter().flat_map(|counts| {
            counts.records.iter().map(|(key, record)| (&counts.limit, &**key, record))
        });
        let mut all: Vec<_> = all.collect();
        all.sort_unstable_by_key(|(limit, key, counts)| {
            (Reverse(counts.requests), limit.name(), *key)
        });
        all
    }

    /// Sums up what callers needed, if that was observed.
    pub(crate) fn sum_up_needs(&mut self) {
        for counts in &mut self.limits {
            let algorithm = *counts.limit.algorithm();
            counts.needs = counts.nearness.as_ref().map(|nearness| nearness.needs(algorithm));
        }
    }

    /// Whether a limit warns.
    pub(crate) fn warn(&self) -> bool {
        self.limits.iter().any(|counts| counts.limit.warns_at_percent().is_some())
    }

    /// The number of decided lines.
    pub const fn decisions(&self) -> u64 {
        self.requests + self.other
    }

    /// The number of admitted requests.
    pub(crate) const fn admitted(&self) -> u64 {
        self.requests - self.denied
    }

    /// Which requests the counts of single callers lack, because there were too many callers.
    pub fn left_out(&self) -> Option<String> {
        let requests = |n, of: &str| (n > 0).then(|| plural(n, "request", "requests") + of);
        let by = |kind: &IdentifierTally| requests(kind.left_out, &format!(" by {}", kind.name));
        let of_limit = |counts: &LimitTally| {
            let left_out = counts.nearness.as_ref().map_or(0, Nearness::left_out);
            requests(left_out, &format!(" under limit {}", counts.limit.name()))
        };
        let identifiers = self.identifiers.iter().filter_map(by);
        let all: Vec<_> = identifiers.chain(self.limits.iter().filter_map(of_limit)).collect();
        (!all.is_empty()).then(|| {
            let most = count(self.most_callers as u64);
            format!(
                "only the first {most} callers by an identifier or under a limit are counted one by one; left out are {}",
                all.join(", ")
            )
        })
    }

    /// The hashes of a caller's keys, of which only counting how near it came takes some.
    pub(crate) fn key_hashes(&self, caller: &Caller) -> KeyHashes {
        let hash = |counts: &LimitTally| {
            counts.nearness.as_ref().and_then(|_| key_hash(&counts.limit, caller))
        };
        self.limits.iter().map(hash).collect()
    }

    /// Counts one decision about a caller with these keys.
    pub(crate) fn count(&mut self, decided: &Decided<'_>, keys: &KeyHashes) {
        let (entry, allowed) = (decided.entry, decided.verdict.allowed());
        let (first, last) = self.span.unwrap_or((entry.at, entry.at));
        self.span = Some((first.min(entry.at), last.max(entry.at)));
        if entry.op != Op::Peek && self.warn() {
            for (place, one) in decided.each() {
                self.limits[place].warned += u64::from(one.is_warned());
            }
        }
        if entry.op != Op::Acquire {
            self.other += 1;
            return;
        }
        self.requests += 1;
        let by_limit = decided.each().map(|(place, one)| (place, one.allowed));
        self.timeline.count(entry.at, allowed, by_limit);
        for (place, one) in decided.each() {
            let tally = &mut self.limits[place];
            tally.applied += 1;
            tally.denied += u64::from(!one.allowed);
            if let Some(nearness) = &mut tally.nearness
                && let Some(Some(hash)) = keys.get(place)
            {
                nearness.decided(*hash, &one);
            }
            if !tally.records.is_empty()
                && let Some(key) = tally.limit.key_for(&entry.caller)
                && let Some(counts) = tally.records.get_mut(&*key)
                && counts.record.stands_at(entry.at)
            {
                counts.requests += 1;
                counts.denied += u64::from(!one.allowed);
            }
        }
        let is_unmet =
            |counts: &LimitTally| counts.applied == 0 && !counts.limit.conditions().is_empty();
        if self.identifiers.iter().any(|kind| kind.callers.len() == 0)
            || self.limits.iter().any(is_unmet)
        {
            self.count_names(&entry.caller);
        }
        for kind in &mut self.identifiers {
            let Some(name) = identifier(&entry.caller, &kind.name) else { continue };
            let new = || CallerTally { value: name.into(), requests: 0, denials: None };
            let Some(caller) = kind.callers.of(hash_of(name), new) else {
                kind.left_out += 1;
                continue;
            };
            caller.requests += 1;
            if let Some(denials) = caller.denials.as_mut().filter(|_| allowed) {
                denials.end_spell(Some(entry.at));
            }
        }
        if !allowed {
            self.denied += 1;
            self.count_denial(decided);
        }
    }

    /// Counts a line that is not decided.
    pub(crate) const fn count_undecided(&mut self, entry: &InputEntry) {
        match entry.op {
            Op::Acquire => self.requests += 1,
            _ => self.other += 1,
        }
    }

    /// Records the identifier names, for the warning that a limit never applied.
    fn count_names(&mut self, caller: &Caller) {
        let bare = caller.bare.is_some().then_some(BARE_NAME);
        let named = caller.named.list.iter().map(|(kind, _)| &**kind);
        for kind in bare.into_iter().chain(named) {
            let conditions = self.limits.iter().flat_map(|counts| counts.limit.conditions());
            let is_used = self.identifiers.iter().any(|used| used.name == kind)
                || conditions.map(Condition::identifier).any(|used| used == kind);
            let few = self.names.len() < MAX_NAMES;
            if (few || is_used) && self.names.iter().all(|known| known != kind) {
                self.names.push(kind.to_owned());
            }
        }
    }

    fn count_denial(&mut self, decided: &Decided<'_>) {
        let entry = decided.entry;
        let until = decided.denying().try_fold(entry.at, |until, (_, one)| {
            Some(until.max(entry.at.saturating_add_us(one.retry_after_us?)))
        });
        for (place, _) in decided.denying() {
            for (nth, &kind) in self.limits[place].identifiers.iter().enumerate() {
                let identifiers = &mut self.identifiers[kind];
                let name = identifier(&entry.caller, &identifiers.name);
                let caller = name.and_then(|name| identifiers.callers.get_mut(hash_of(name)));
                let Some(caller) = caller else { continue };
                let denials = caller.denials.get_or_insert_with(|| {
                    Box::new(Denials { first: entry.at, ..Denials::default() })
                });
                denials.first = denials.first.min(entry.at);
                denials.last = denials.last.max(entry.at);
                if nth == 0 {
                    match denials.by_limit.binary_search_by_key(&place, |(place, _)| *place) {
                        Ok(at) => denials.by_limit[at].1 += 1,
                        Err(at) => denials.by_limit.insert(at, (place, 1)),
                    }
                }
            }
        }
        for (kind, name) in self.callers_to_blame(decided) {
            let hash = hash_of(name);
            let caller = self.identifiers[kind].callers.get_mut(hash);
            let Some(denials) = caller.and_then(|caller| caller.denials.as_mut()) else { continue };
            denials.denied(entry.at, until);
            let Some(line) = &entry.line else { continue };
            let before = denials.requests - 1;
            if denials.details.is_none() && before >= self.detailed.least {
                let paths = Frequent::after(before);
                denials.details = Some(Box::new(Details { before, paths, ..Details::default() }));
                self.detailed.callers.push((kind, hash));
            }
            let Some(details) = &mut denials.details else { continue };
            if details.lines.len() < LINES {
                details.lines.push(line_text(line));
            }
            if details.agent.is_none() {
                details.agent = entry.agent_text().map(Cow::into_owned);
            }
            if let Some(path) = entry.caller.identifier("path") {
                details.paths.count(path, MAX_PATHS);
            }
            self.bound_details();
        }
    }

    /// Drops the details of callers that are not among those denied most, once there are many.
    fn bound_details(&mut self) {
        let Self { detailed: Detailed { callers, most, least }, identifiers, .. } = self;
        if callers.len() < 2 * *most {
            return;
        }
        let mut by_denials: Vec<_> = callers
            .drain(..)
            .map(|(kind, hash)| {
                let caller = identifiers[kind].callers.get(hash);
                let denials = caller.and_then(|caller| caller.denials.as_ref());
                (Reverse(denials.map_or(0, |denials| denials.requests)), kind, hash)
            })
            .collect();
        // Of several, those that have had details for longest.
        by_denials.sort_by_key(|(requests, ..)| *requests);
        for (place, (Reverse(requests), kind, hash)) in by_denials.into_iter().enumerate() {
            if place < *most {
                callers.push((kind, hash));
                *least = requests;
            } else if let Some(caller) = identifiers[kind].callers.get_mut(hash)
                && let Some(denials) = &mut caller.denials
            {
                denials.details = None;
            }
        }
    }

    /// Ends the spells that go on, as there are no further requests.
    pub(crate) fn end_spells(&mut self) {
        let callers = self.identifiers.iter_mut().flat_map(|kind| kind.callers.values_mut());
        for denials in callers.filter_map(|caller| caller.denials.as_mut()) {
            denials.end_spell(None);
        }
    }

    /// The callers because of whom a request was denied: by a limit whose first identifier names
    /// them. Each has the place of that identifier.
    pub(crate) fn callers_to_blame<'e>(&self, decided: &Decided<'e>) -> Vec<(usize, &'e str)> {
        let mut blamed = Vec::new();
        for (place, _) in decided.denying() {
            let Some(&kind) = self.limits[place].identifiers.first() else { continue };
            let name = identifier(&decided.entry.caller, &self.identifiers[kind].name);
            blamed.extend(name.map(|name| (kind, name)).filter(|one| !blamed.contains(one)));
        }
        blamed
    }

    /// The names of the limits that denied a caller, and how often.
    pub(crate) fn by_limit<'t>(
        &'t self,
        denials: &'t Denials,
    ) -> impl Iterator<Item = (&'t str, u64)> {
        denials.by_limit.iter().map(|(place, denied)| (self.limits[*place].limit.name(), *denied))
    }

    /// The identifiers that name callers: each is the first of a limit.
    pub(crate) fn blamable(&self) -> impl Iterator<Item = &IdentifierTally> {
        let firsts: BTreeSet<_> =
            self.limits.iter().filter_map(|l| l.identifiers.first()).collect();
        firsts.into_iter().map(|kind| &self.identifiers[*kind])
    }

    /// Whether there were requests, and no limit applied to any of them.
    pub fn nothing_applied(&self) -> bool {
        self.requests > 0 && self.limits.iter().all(|limit| limit.applied == 0)
    }

    /// Of each limit that never applied because of an identifier that no request has, or of
    /// conditions that none met: which, the remedy, and whether an identifier is missing.
    pub fn unmet(&self) -> impl Iterator<Item = (ConfigError, bool)> {
        let unmet = self.limits.iter().filter(|counts| self.requests > 0 && counts.applied == 0);
        unmet.filter_map(|LimitTally { limit, .. }| match check_names(limit, &self.names) {
            Err(unknown) => Some((unknown, true)),
            Ok(()) if limit.conditions().is_empty() => None,
            Ok(()) => {
                let none = format!(
                    "it applies {}, which no request meets; compare the values with those of the log",
                    limit.describe_conditions()
                );
                Some((ConfigError::new(none).in_limit(limit.name()), false))
            }
        })
    }

    /// The most-denied callers, the worst first.
    pub(crate) fn offenders(&self, most: usize) -> Vec<Offender<'_>> {
        let all = self.identifiers.iter().flat_map(|kind| {
            kind.callers.values().filter_map(|CallerTally { value, requests, denials }| {
                let denials = denials.as_deref().filter(|denials| denials.requests > 0)?;
                Some(Offender { name: &kind.name, value, requests: *requests, denials })
            })
        });
        let mut offenders: Vec<_> = all.collect();
        offenders.sort_unstable_by_key(|offender| {
            let Offender { name, value, denials, .. } = *offender;
            (Reverse(denials.requests), denials.first, name, value)
        });
        offenders.truncate(most);
        offenders
    }
}

impl IdentifierTally {
    /// The number of callers that were denied at least once.
    pub(crate) fn denied(&self) -> u64 {
        self.callers.values().filter(|caller| caller.denials.is_some()).count() as u64
    }
}

fn identifier<'c>(caller: &'c Caller, kind: &str) -> Option<&'c str> {
    match kind {
        BARE_NAME => caller.bare.as_deref().or_else(|| caller.identifier(kind)),
        kind => caller.identifier(kind),
    }
}
