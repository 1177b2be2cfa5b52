//! [`Comparison`]: the same requests under another policy.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::tally::{Decided, Tally};
use crate::text::{count, plural};

/// What another policy decided, and where it differed.
#[derive(Default)]
pub(crate) struct Comparison {
    /// The other policy's own counts, once the replay has ended.
    pub(crate) tally: Tally,
    /// Requests that both policies denied.
    pub(crate) both: u64,
    /// Over all requests.
    pub(crate) total: Difference,
    /// By the name of an identifier and its value.
    pub(crate) callers: HashMap<(Box<str>, Box<str>), Difference>,
}

/// How many requests only one of the policies denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) only_this: u64,
    pub(crate) only_other: u64,
}

impl Difference {
    /// All of them.
    pub(crate) const fn requests(&self) -> u64 {
        self.only_this + self.only_other
    }
}

/// A caller, by the name of an identifier and its value, and how the policies differ for it.
type Differs<'c> = (&'c (Box<str>, Box<str>), &'c Difference);

impl Comparison {
    /// Counts one request as both policies decided it. A difference belongs to the callers because of whom the policy that
    /// denied did so.
    pub(crate) fn count(&mut self, this: (&Tally, &Decided<'_>), other: (&Tally, &Decided<'_>)) {
        let by_this = !this.1.verdict.allowed();
        let by_other = !other.1.verdict.allowed();
        self.both += u64::from(by_this && by_other);
        if by_this == by_other {
            return;
        }
        let (tally, denied) = if by_this { this } else { other };
        let count = |difference: &mut Difference| {
            difference.only_this += u64::from(by_this);
            difference.only_other += u64::from(by_other);
        };
        count(&mut self.total);
        for (kind, value) in tally.blamed(denied) {
            let caller = (tally.identifiers[kind].name.as_str().into(), value.into());
            count(self.callers.entry(caller).or_default());
        }
    }

    /// The callers with the most requests of this kind, the most first.
    pub(crate) fn callers(&self, most: usize, of: impl Fn(&Difference) -> u64) -> Vec<Differs<'_>> {
        let mut differing: Vec<_> = self.callers.iter().filter(|(_, one)| of(one) > 0).collect();
        differing.sort_unstable_by_key(|(caller, difference)| (Reverse(of(difference)), *caller));
        differing.truncate(most);
        differing
    }

    /// What the other policy would change, after its name.
    pub(crate) fn sentence(&self) -> String {
        format!(
            "would newly deny {} and free {}; both policies deny {}",
            plural(self.total.only_other, "request", "requests"),
            count(self.total.only_this),
            count(self.both),
        )
    }
}
