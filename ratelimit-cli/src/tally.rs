//! [`Tally`]: the counts of a replay.

use std::collections::HashMap;

use ratelimit_core::{Identifiers, Limits, Op, Policy, Timestamp, Verdict};

use crate::caller::{BARE_NAME, Caller};
use crate::input::Entry;
use crate::timeline::Timeline;

/// How many identifier names are kept for a warning: a trace may contain as many as it has lines.
const MAX_UNLIMITED_NAMES: usize = 16;

/// The counts of a replay.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Lines that asked to be admitted.
    pub(crate) requests: u64,
    pub(crate) denied: u64,
    /// Peeks, refunds, resets and forced charges.
    pub(crate) other: u64,
    pub(crate) bad_lines: u64,
    /// Operations that the store does not support.
    pub(crate) refused_operations: u64,
    /// The earliest and the latest time of a line.
    pub(crate) span: Option<(Timestamp, Timestamp)>,
    pub(crate) limits: Vec<LimitTally>,
    /// The identifiers that the policy names.
    pub(crate) identifiers: Vec<IdentifierTally>,
    pub(crate) timeline: Timeline,
    /// The identifier names of requests to which no limit applied.
    pub(crate) unlimited_names: Vec<String>,
}

/// The counts of one limit, in the order of the policy.
#[derive(Clone, Debug)]
pub(crate) struct LimitTally {
    pub(crate) applied: u64,
    pub(crate) denied: u64,
    /// The positions in [`Tally::identifiers`] of the limit's identifiers.
    identifiers: Vec<usize>,
}

/// The counts of the callers under one identifier name.
#[derive(Debug)]
pub(crate) struct IdentifierTally {
    pub(crate) name: String,
    /// By identifier, with its denials, if there were any.
    pub(crate) callers: HashMap<Box<str>, Option<Box<Denials>>>,
}

/// The denials of one caller.
#[derive(Clone, Debug)]
pub(crate) struct Denials {
    pub(crate) first: Timestamp,
    pub(crate) last: Timestamp,
    /// Requests denied because of this caller: by a limit whose first identifier names it.
    pub(crate) requests: u64,
    /// Those denials by limit, in the order of the policy.
    pub(crate) by_limit: Vec<u64>,
}

/// One of the most-denied callers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offender<'t> {
    pub(crate) name: &'t str,
    pub(crate) value: &'t str,
    pub(crate) denials: &'t Denials,
}

impl Tally {
    pub(crate) fn new(limits: &Limits<Policy>) -> Self {
        let mut identifiers: Vec<IdentifierTally> = Vec::new();
        let mut place_of = |name: &str| {
            identifiers.iter().position(|known| known.name == name).unwrap_or_else(|| {
                identifiers
                    .push(IdentifierTally { name: name.to_owned(), callers: HashMap::new() });
                identifiers.len() - 1
            })
        };
        let limits = limits
            .iter()
            .map(|limit| {
                let mut identifiers: Vec<_> = limit.identifier_names().map(&mut place_of).collect();
                if identifiers.is_empty() {
                    identifiers.push(place_of(BARE_NAME));
                }
                LimitTally { applied: 0, denied: 0, identifiers }
            })
            .collect();
        Self {
            requests: 0,
            denied: 0,
            other: 0,
            bad_lines: 0,
            refused_operations: 0,
            span: None,
            limits,
            identifiers,
            timeline: Timeline::default(),
            unlimited_names: Vec::new(),
        }
    }

    /// The number of decided lines.
    pub(crate) const fn decisions(&self) -> u64 {
        self.requests + self.other
    }

    /// The number of admitted requests.
    pub(crate) const fn admitted(&self) -> u64 {
        self.requests - self.denied
    }

    /// Counts one decision. `applied` lists the positions of the limits in `verdict`.
    pub(crate) fn count(&mut self, entry: &Entry<'_>, verdict: &Verdict, applied: &[usize]) {
        self.span = Some(match self.span {
            Some((first, last)) => (first.min(entry.at), last.max(entry.at)),
            None => (entry.at, entry.at),
        });
        if entry.op != Op::Acquire {
            self.other += 1;
            return;
        }
        self.requests += 1;
        self.timeline.count(entry.at, verdict.allowed());
        for &place in applied {
            self.limits[place].applied += 1;
        }
        if applied.is_empty() {
            self.count_unlimited(&entry.caller);
        }
        for tally in &mut self.identifiers {
            if let Some(value) = identifier(&entry.caller, &tally.name)
                && !tally.callers.contains_key(value)
            {
                tally.callers.insert(value.into(), None);
            }
        }
        if !verdict.allowed() {
            self.denied += 1;
            self.count_denial(entry, verdict, applied);
        }
    }

    /// Records the identifier names, for the warning that no limit ever applied.
    fn count_unlimited(&mut self, caller: &Caller<'_>) {
        let bare = caller.bare.is_some().then_some(BARE_NAME);
        let named = caller.named.iter().map(|(name, _)| &**name);
        for name in bare.into_iter().chain(named) {
            let few = self.unlimited_names.len() < MAX_UNLIMITED_NAMES;
            if few && self.unlimited_names.iter().all(|known| known != name) {
                self.unlimited_names.push(name.to_owned());
            }
        }
    }

    fn count_denial(&mut self, entry: &Entry<'_>, verdict: &Verdict, applied: &[usize]) {
        let mut blamed: Vec<usize> = Vec::new();
        for (&place, decision) in applied.iter().zip(verdict.decisions()) {
            if decision.allowed {
                continue;
            }
            let limits = self.limits.len();
            let limit = &mut self.limits[place];
            limit.denied += 1;
            for (nth, &of) in limit.identifiers.iter().enumerate() {
                let tally = &mut self.identifiers[of];
                let Some(value) = identifier(&entry.caller, &tally.name) else { continue };
                let Some(caller) = tally.callers.get_mut(value) else { continue };
                let denials = caller.get_or_insert_with(|| {
                    Box::new(Denials {
                        first: entry.at,
                        last: entry.at,
                        requests: 0,
                        by_limit: vec![0; limits],
                    })
                });
                denials.first = denials.first.min(entry.at);
                denials.last = denials.last.max(entry.at);
                if nth == 0 {
                    denials.by_limit[place] += 1;
                    if !blamed.contains(&of) {
                        blamed.push(of);
                        denials.requests += 1;
                    }
                }
            }
        }
    }

    /// Whether there were requests, and no limit applied to any of them.
    pub(crate) fn nothing_applied(&self) -> bool {
        self.requests > 0 && self.limits.iter().all(|limit| limit.applied == 0)
    }

    /// The most-denied callers, the worst first.
    pub(crate) fn offenders(&self, most: usize) -> Vec<Offender<'_>> {
        let mut offenders: Vec<_> = self
            .identifiers
            .iter()
            .flat_map(|tally| {
                tally.callers.iter().map(|(value, denials)| (&*tally.name, value, denials))
            })
            .filter_map(|(name, value, denials)| {
                let denials = denials.as_deref().filter(|denials| denials.requests > 0)?;
                Some(Offender { name, value, denials })
            })
            .collect();
        offenders.sort_unstable_by(|a, b| {
            let most_first = b.denials.requests.cmp(&a.denials.requests);
            let earliest_first = a.denials.first.cmp(&b.denials.first);
            most_first.then(earliest_first).then_with(|| (a.name, a.value).cmp(&(b.name, b.value)))
        });
        offenders.truncate(most);
        offenders
    }
}

impl IdentifierTally {
    /// The number of callers that were denied at least once.
    pub(crate) fn denied(&self) -> u64 {
        self.callers.values().filter(|denials| denials.is_some()).count() as u64
    }
}

fn identifier<'c>(caller: &'c Caller<'_>, name: &str) -> Option<&'c str> {
    match name {
        BARE_NAME => caller.bare().or_else(|| caller.identifier(name)),
        name => caller.identifier(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::Decision;

    const POLICY: &str = r#"
        [[limit]]
        name = "a"
        key = ["ip"]
        algorithm = "gcra"
        rate = "1/s"
        [[limit]]
        name = "b"
        key = ["ip", "user"]
        algorithm = "gcra"
        rate = "1/s"
    "#;

    fn decision(allowed: bool) -> Decision {
        Decision {
            allowed,
            cost: 1,
            limit: 1,
            remaining: 0,
            retry_after_us: Some(0),
            replenish_after_us: 0,
            reset_after_us: 0,
        }
    }

    #[test]
    fn a_request_denied_by_two_limits_is_one_denial_of_its_caller() {
        let mut tally = Tally::new(&toml::from_str(POLICY).expect("a policy"));
        let entry = |at, ip| Entry {
            at: Timestamp::saturating_from_us(at),
            caller: Caller {
                bare: None,
                named: vec![("ip".into(), ip), ("user".into(), "u".into())],
                bare_only: false,
            },
            cost: 1,
            op: Op::Acquire,
        };
        let verdict = |a, b| Verdict::several(vec![decision(a), decision(b)]);
        tally.count(&entry(5, "x".into()), &verdict(true, true), &[0, 1]);
        tally.count(&entry(9, "x".into()), &verdict(false, false), &[0, 1]);
        tally.count(&entry(7, "x".into()), &verdict(true, false), &[0, 1]);
        tally.count(&entry(8, "y".into()), &verdict(false, true), &[0, 1]);
        assert_eq!((tally.requests, tally.admitted(), tally.denied), (4, 1, 3));
        assert_eq!(tally.limits.iter().map(|l| l.denied).collect::<Vec<_>>(), [2, 2]);
        let identifiers: Vec<_> =
            tally.identifiers.iter().map(|k| (&*k.name, k.callers.len(), k.denied())).collect();
        assert_eq!(identifiers, [("ip", 2, 2), ("user", 1, 1)]);
        let offenders = tally.offenders(10);
        assert_eq!(offenders.len(), 2);
        let worst = &offenders[0];
        assert_eq!((worst.name, worst.value), ("ip", "x"));
        assert_eq!((worst.denials.requests, &*worst.denials.by_limit), (2, &[1, 2][..]));
        assert_eq!((worst.denials.first.as_us(), worst.denials.last.as_us()), (7, 9));
    }
}
