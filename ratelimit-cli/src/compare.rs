//! [`Comparison`]: the same requests under another policy.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::summary::shown_caller;
use crate::table::Table;
use crate::tally::{Decided, Tally};
use crate::text::count;

/// What another policy decided, and where it differed.
#[derive(Debug, Default)]
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
    fn count(&mut self, by_this: bool) {
        self.only_this += u64::from(by_this);
        self.only_other += u64::from(!by_this);
    }
}

/// A caller, by the name of an identifier and its value, and how the policies differ for it.
type Differing<'c> = (&'c (Box<str>, Box<str>), &'c Difference);

impl Comparison {
    /// Counts one request as both policies decided it. A difference belongs to the callers because of whom the policy that
    /// denied did so.
    pub(crate) fn count(&mut self, this: (&Tally, &Decided<'_>), other: (&Tally, &Decided<'_>)) {
        let by_this = !this.1.verdict.allowed();
        let (tally, denied) = match (by_this, !other.1.verdict.allowed()) {
            (false, false) => return,
            (true, true) => {
                self.both += 1;
                return;
            }
            (true, false) => this,
            (false, true) => other,
        };
        self.total.count(by_this);
        for (kind, value) in tally.blamed(denied) {
            let caller = (tally.identifiers[kind].name.as_str().into(), value.into());
            self.callers.entry(caller).or_default().count(by_this);
        }
    }

    /// The number of callers for whom the policies differ.
    pub(crate) fn differing(&self) -> u64 {
        self.callers.len() as u64
    }

    /// The callers for whom the policies differ, those with the most requests first.
    pub(crate) fn callers(&self, most: usize) -> Vec<Differing<'_>> {
        let mut differing: Vec<_> = self.callers.iter().collect();
        differing.sort_unstable_by_key(|(caller, difference)| {
            (Reverse(difference.only_this + difference.only_other), *caller)
        });
        differing.truncate(most);
        differing
    }

    /// The same as a table, with so many characters of each name.
    pub(crate) fn table(&self, most: usize, chars: usize) -> Table {
        let rows = self.callers(most).into_iter().map(|((name, value), difference)| {
            let Difference { only_this, only_other } = *difference;
            vec![shown_caller(name, value, chars), count(only_this), count(only_other)]
        });
        let columns = ["caller", "#denied only by this", "#denied only by the other"];
        Table::new(&columns, rows)
    }
}
