//! [`Comparison`]: the same requests under another policy.

use std::collections::HashMap;

use ratelimit_core::{Limits, Policy};

use crate::summary::shown_caller;
use crate::table::Table;
use crate::tally::{Decided, Tally};
use crate::text::count;

/// What another policy decided, and where it differed.
#[derive(Debug)]
pub(crate) struct Comparison {
    pub(crate) limits: Limits<Policy>,
    /// The other policy's own counts, once the replay has ended.
    pub(crate) tally: Option<Tally>,
    /// Requests that both policies denied.
    pub(crate) both: u64,
    /// Over all requests.
    pub(crate) total: Difference,
    /// By the name of an identifier and its value.
    callers: HashMap<(Box<str>, Box<str>), Difference>,
}

/// How many requests only one of the policies denied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) only_this: u64,
    pub(crate) only_other: u64,
}

impl Difference {
    const fn count(&mut self, by_this: bool) {
        if by_this {
            self.only_this += 1;
        } else {
            self.only_other += 1;
        }
    }

    pub(crate) const fn total(self) -> u64 {
        self.only_this + self.only_other
    }
}

/// A caller for whom the policies differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Differing<'c> {
    pub(crate) name: &'c str,
    pub(crate) value: &'c str,
    pub(crate) difference: Difference,
}

impl Comparison {
    pub(crate) fn new(limits: Limits<Policy>) -> Self {
        let total = Difference::default();
        Self { limits, tally: None, both: 0, total, callers: HashMap::new() }
    }

    /// Counts one request as both policies decided it. A difference belongs to the callers because of whom the policy that
    /// denied did so.
    pub(crate) fn count(&mut self, this: (&Tally, Decided<'_>), other: (&Tally, Decided<'_>)) {
        let (tally, denied) = match (this.1.allowed, other.1.allowed) {
            (true, true) => return,
            (false, false) => {
                self.both += 1;
                return;
            }
            (false, true) => this,
            (true, false) => other,
        };
        let by_this = !this.1.allowed;
        self.total.count(by_this);
        for (kind, name) in tally.blamed(denied) {
            self.callers.entry((kind.into(), name.into())).or_default().count(by_this);
        }
    }

    /// The number of callers for whom the policies differ.
    pub(crate) fn differing(&self) -> u64 {
        self.callers.len() as u64
    }

    /// The callers for whom the policies differ, those with the most requests first.
    pub(crate) fn callers(&self, most: usize) -> Vec<Differing<'_>> {
        let differing = self.callers.iter();
        let differing =
            differing.map(|((name, value), &difference)| Differing { name, value, difference });
        let mut differing: Vec<_> = differing.collect();
        differing.sort_unstable_by(|a, b| {
            let most_first = b.difference.total().cmp(&a.difference.total());
            most_first.then_with(|| (a.name, a.value).cmp(&(b.name, b.value)))
        });
        differing.truncate(most);
        differing
    }

    /// The same as a table, with so many characters of each name.
    pub(crate) fn table(&self, most: usize, chars: usize) -> Table {
        let rows = self.callers(most).into_iter().map(|Differing { name, value, difference }| {
            let Difference { only_this, only_other } = difference;
            vec![shown_caller(name, value, chars), count(only_this), count(only_other)]
        });
        let columns = ["caller", "#denied only by this", "#denied only by the other"];
        Table::new(&columns, rows)
    }
}
