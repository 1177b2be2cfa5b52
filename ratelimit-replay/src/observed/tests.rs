use ratelimit_core::RateLimiter;
use ratelimit_memory::MemoryStore;

use super::*;
use crate::caller::Caller;
use crate::nearness::Nearness;
use crate::tally::Decided;

/// A tally that counts so many callers one by one, and keeps details of so many, after a request
/// of each of these callers in turn; the limit admits the first of each.
fn tally_of(most: usize, detailed: usize, callers: &[&str]) -> Tally {
    let policy = "[[limit]]\nname = \"one\"\nalgorithm = \"fixed-window\"\nrate = \"1/d\"";
    let limits: Limits<AnyAlgorithm> = toml::from_str(policy).expect("a policy");
    let mut observed = Observed::new(&limits, true).expect("windows");
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let mut tally = Tally::of_at_most(most, limiter.limits(), true);
    tally.detailed.most = detailed;
    for (n, name) in callers.iter().enumerate() {
        let mut caller = Caller { bare: Some((*name).into()), ..Caller::default() };
        caller.named.list.push(("path".into(), format!("/{n}").into()));
        let at = Timestamp::saturating_from_us(n as u64);
        let line = Some(format!("line {n}").into_bytes().into());
        let entry = InputEntry { at, caller, costs: 1.into(), line, ..InputEntry::default() };
        let request = limiter.request(&entry.caller).at(at);
        let verdict = pollster::block_on(request.apply(Op::Acquire)).expect("it decides");
        let keys = tally.key_hashes(&entry.caller);
        tally.count(&Decided::new((&limiter, None), &entry, &verdict), &keys);
        observed.count(&entry, &keys, &mut tally);
    }
    tally.sum_up_needs();
    tally
}

#[test]
fn callers_after_too_many_others_are_left_out_and_it_is_said() {
    assert_eq!(tally_of(2, 9, &["a", "b", "a", "b"]).left_out(), None);
    let tally = tally_of(2, 9, &["a", "b", "c", "a", "c", "d"]);
    let due = "only the first 2 callers by an identifier or under a limit are counted one by one; left out are 3 \
               requests by key, 3 requests under limit one";
    assert_eq!(tally.left_out().as_deref(), Some(due));
    // What is not told of callers is complete.
    assert_eq!((tally.requests, tally.denied), (6, 2));
    let counts = &tally.limits[0];
    let histogram = counts.nearness.as_ref().map(Nearness::histogram).expect("counted");
    assert_eq!((histogram.callers_denied, histogram.uncounted), (1, 3));
    let needs = counts.needs.as_ref().expect("observed");
    assert_eq!((needs.callers(), needs.left_out), (2, 3));
}

#[test]
fn details_are_kept_of_those_denied_most_and_tell_how_many_lines_came_before_them() {
    // `c` comes once others have details, and overtakes them.
    let callers = ["a", "a", "b", "b", "b", "c", "c", "c", "c", "c", "d", "d"];
    let tally = tally_of(9, 1, &callers);
    let offenders = tally.offenders(9);
    let kept = offenders.iter().map(|offender| {
        let details = offender.denials.details.as_ref();
        let told = details.map(|details| (details.before, details.lines.len()));
        (offender.value, offender.denials.requests, told)
    });
    let due = [("c", 4, Some((2, 2))), ("b", 2, None), ("a", 1, None), ("d", 1, None)];
    assert_eq!(kept.collect::<Vec<_>>(), due);
    // Each of its paths may be one of those that came before.
    let details = offenders[0].denials.details.as_ref().expect("kept");
    let bounds: Vec<_> = details.paths.top(9).iter().map(|(_, n)| (n.most, n.others)).collect();
    assert_eq!(bounds, [(3, 2), (3, 2)]);
}
