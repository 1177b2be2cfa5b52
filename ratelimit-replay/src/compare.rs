//! [`Comparison`]: the same requests under another policy.

use std::cmp::Reverse;

use crate::by_hash::{ByHash, hash_of};
use crate::tally::{Decided, Tally};
use crate::text::{count, plural};

/// What another policy decided, and where it differed.
#[derive(Default)]
pub struct Comparison {
    /// The other policy's own counts, once the replay has ended.
    pub tally: Tally,
    /// Requests that both policies denied.
    pub(crate) both: u64,
    /// Over all requests.
    pub(crate) total: Differing,
    /// By the hash of the name of an identifier and its value.
    pub(crate) callers: ByHash<(NamedCaller, Differing)>,
    /// Requests of callers that are not counted, because there were too many.
    pub(crate) left_out: u64,
}

/// How many requests only this policy denied, and how many only the other.
pub(crate) type Differing = [u64; 2];
/// A caller: the name of an identifier and its value.
type NamedCaller = (Box<str>, Box<str>);

impl Comparison {
    /// Counts one request as both policies decided it. A difference belongs to the callers because
    /// of whom the policy that denied did so.
    pub(crate) fn count(&mut self, this: (&Tally, &Decided<'_>), other: (&Tally, &Decided<'_>)) {
        let by_this = !this.1.verdict.allowed();
        let by_other = !other.1.verdict.allowed();
        self.both += u64::from(by_this && by_other);
        if by_this == by_other {
            return;
        }
        let (tally, denied) = if by_this { this } else { other };
        self.total[usize::from(by_other)] += 1;
        for (kind, value) in tally.callers_to_blame(denied) {
            let name = tally.identifiers[kind].name.as_str();
            let new = || ((name.into(), value.into()), Differing::default());
            match self.callers.of(hash_of(&(name, value)), new) {
                Some((_, differing)) => differing[usize::from(by_other)] += 1,
                None => self.left_out += 1,
            }
        }
    }

    /// The callers with the most requests of this kind, the most first.
    pub(crate) fn callers(
        &self,
        most: usize,
        of: impl Fn(&Differing) -> u64,
    ) -> Vec<&(NamedCaller, Differing)> {
        let mut differing: Vec<_> = self.callers.values().filter(|(_, one)| of(one) > 0).collect();
        differing.sort_unstable_by_key(|(caller, requests)| (Reverse(of(requests)), caller));
        differing.truncate(most);
        differing
    }

    /// How many requests the callers for whom the policies differ lack, because there were too
    /// many callers.
    pub fn left_out(&self) -> Option<String> {
        let left_out = Some(self.left_out).filter(|requests| *requests > 0)?;
        Some(format!(
            "the policies differ for more callers than are counted one by one; left out are {}",
            plural(left_out, "request", "requests")
        ))
    }

    /// What the other policy would change, after its name.
    pub(crate) fn sentence(&self) -> String {
        let [only_this, only_other] = self.total;
        format!(
            "would newly deny {} and free {}; both policies deny {}",
            plural(only_other, "request", "requests"),
            count(only_this),
            count(self.both),
        )
    }
}
