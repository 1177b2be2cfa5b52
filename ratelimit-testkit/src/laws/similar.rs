//! Law 10 for identifiers that a store may confuse.

use std::collections::HashSet;

use ratelimit_core::{Limit, Op, Policy, Timestamp};

use crate::capability::Capability;
use crate::harness::{Harness, join_all};
use crate::law::Violation;
use crate::laws::{Kept, Subject};
use crate::seeds::{limit, rate};
use crate::trace::{Ask, Request, Scope};

mod table;

pub(crate) use table::groups;

/// Keys of limits that are alike in one respect.
pub(crate) struct Group {
    /// The respect: what a store would have to do to confuse them.
    pub(crate) alike: String,
    /// Places that all differ.
    pub(crate) places: Vec<Place>,
}

/// A key of a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) limit: String,
    pub(crate) key: String,
}

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const CAPACITY: u64 = 2;
/// How many places are asked concurrently.
const AT_ONCE: usize = 64;
/// Keys that a store which resets by pattern would take for patterns.
const PATTERNS: [&str; 7] = ["*", "?*", "[a-z]", "%", "_", ".*", ""];

/// Law 10 for similar identifiers: a charge to one never shows in another, however little they differ. The
/// table has some six hundred identifiers, in groups that some database, driver or function treats as equal. A
/// reset of one, even if it looks like a pattern, resets no other.
///
/// # Errors
/// The identifiers that share a state, and the respect in which they are alike.
pub async fn similar_keys_never_meet<H: Harness>(subject: &Subject<'_, H>, scope: Scope) -> Kept {
    let policies = scope.at_rate(rate(CAPACITY, 3_600_000_000), CAPACITY);
    let policy = policies.into_iter().find(|policy| subject.able().can_keep(policy));
    let policy = policy.expect("a scope of which the store can keep nothing is not tried");
    let groups = groups();
    let mut seen = HashSet::new();
    let places: Vec<_> = groups.iter().flat_map(|group| &group.places).cloned().collect();
    let places: Vec<_> = places.into_iter().filter(|place| seen.insert(place.clone())).collect();
    let keys = Keys { subject, policy };
    for some in places.chunks(AT_ONCE) {
        let charged =
            join_all(some.iter().map(|place| keys.takes_all(&place.limit, &place.key))).await;
        for (place, first) in some.iter().zip(charged) {
            if !first? {
                return keys.diagnose(&groups, place).await;
            }
        }
    }
    if subject.able().can(Capability::Reset) {
        keys.reset_only_themselves(&places).await?;
    }
    Ok(())
}

struct Keys<'a, H: Harness> {
    subject: &'a Subject<'a, H>,
    policy: Policy,
}

impl<H: Harness> Keys<'_, H> {
    async fn ask(&self, on: &str, key: &str, op: Op, cost: u64) -> Result<(bool, u64), Violation> {
        let limits: [Limit<Policy>; 1] = [limit(on, self.policy)];
        let asks = vec![Ask { limit: 0, key: key.to_owned(), cost }];
        let request = Request { at: AT, op, asks, id: None };
        let verdict = self.subject.ask(&limits, &request).await?;
        Ok((verdict.allowed(), verdict.remaining()))
    }

    /// Takes everything that a key has left, and returns whether that was the full capacity.
    async fn takes_all(&self, on: &str, key: &str) -> Result<bool, Violation> {
        Ok(self.ask(on, key, Op::Acquire, CAPACITY).await? == (true, 0))
    }

    /// Finds the place that shares a state with this one: group by group, on limits of their own.
    async fn diagnose(&self, groups: &[Group], found: &Place) -> Kept {
        for (n, Group { alike, places }) in groups.iter().enumerate() {
            for (place, Place { limit, key }) in places.iter().enumerate() {
                if self.takes_all(&format!("{limit}-{n}"), key).await? {
                    continue;
                }
                for (m, other) in places[..place].iter().enumerate() {
                    self.takes_all(&format!("{}-{n}-{m}", other.limit), &other.key).await?;
                    if self.takes_all(&format!("{limit}-{n}-{m}"), key).await? {
                        continue;
                    }
                    let (one, other) = (shown(&places[place]), shown(other));
                    return self.subject.broken(format!(
                        "{one} shares its state with {other}. The store takes for the same what is alike in: {alike}"
                    ));
                }
            }
        }
        self.subject.broken(format!(
            "{} was never used, and something of it is: it shares its state with another key, or with one that was \
             charged at the same time",
            shown(found)
        ))
    }

    /// Resets keys that look like patterns, and checks that all others keep their states.
    async fn reset_only_themselves(&self, places: &[Place]) -> Kept {
        let on = &places[0].limit;
        for pattern in PATTERNS {
            self.ask(on, pattern, Op::Reset, 0).await?;
        }
        let others = places.iter().filter(|place| {
            place.limit == *on && place.key.len() < 8 && !PATTERNS.contains(&&*place.key)
        });
        let others: Vec<_> = others.collect();
        for some in others.chunks(AT_ONCE) {
            let peeks = some.iter().map(|place| self.ask(on, &place.key, Op::Peek, 1));
            for (place, said) in some.iter().zip(join_all(peeks).await) {
                let (allowed, _) = said?;
                self.subject.ensure(!allowed, || {
                    format!(
                        "{} was used up, and is not after a reset of the keys {PATTERNS:?}: the store resets by \
                         patterns",
                        shown(place)
                    )
                })?;
            }
        }
        Ok(())
    }
}

/// A place, shortened if it is long: the difference may lie at its end, its beginning or in the middle.
fn shown(Place { limit, key }: &Place) -> String {
    let signs: Vec<char> = key.chars().collect();
    if signs.len() <= 60 {
        return format!("{key:?} of limit {limit}");
    }
    let (begin, end): (String, String) =
        (signs[..20].iter().collect(), signs[signs.len() - 20..].iter().collect());
    format!("{begin:?} … {end:?} ({} bytes) of limit {limit}", key.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_places_of_a_group_differ() {
        for group in groups() {
            let distinct: HashSet<_> = group.places.iter().collect();
            assert_eq!(distinct.len(), group.places.len(), "{}", group.alike);
            assert!(distinct.len() > 1, "{}", group.alike);
        }
    }
}
