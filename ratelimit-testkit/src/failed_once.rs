//! The smallest cases on which a law has failed once, in whichever store, each under the rule that
//! was broken. Every store tries all that it has the means for.
//!
//! `failed-once.txt` has a blank line between cases. Where a rule was broken on several limits,
//! each of them stands in place of `BEFORE`, and what it was changed to in place of `AFTER`.

use crate::Property;

/// The smallest cases on which some store has broken a law, each with the property that it broke,
/// for [`regression`](crate::regression).
#[must_use]
pub fn failed_once() -> Vec<(Property, String)> {
    let mut all = Vec::new();
    for case in include_str!("failed-once.txt").split("\n\n") {
        let property = match case.matches("limit l0:").count() {
            _ if case.contains("expires in time") => Property::KeepsWhatMatters,
            1 => Property::Agrees,
            _ => Property::AgreesAfterAChange,
        };
        let (limits, rest): (Vec<_>, Vec<_>) =
            case.lines().partition(|line| line.starts_with("on "));
        let rest = rest.join("\n");
        for limits in if limits.is_empty() { vec!["on BEFORE"] } else { limits } {
            let (before, after) = limits[3..].split_once(" => ").unwrap_or((&limits[3..], ""));
            all.push((property, rest.replace("BEFORE", before).replace("AFTER", after)));
        }
    }
    all
}
