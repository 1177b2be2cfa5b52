//! What a limit's callers needed, and the smallest limits that would have denied no more than a
//! share of them.
//!
//! A caller needs the most that it used at once of the same limit without a bound: with that
//! capacity and any larger one the limit alone denies it nothing, with a smaller one at least once.
//! A forced charge counts in full. Of a lockout it needs one more: the charge that reaches the
//! count locks it out, whether it comes back meanwhile or not.

use std::collections::BTreeMap;

use ratelimit_core::{Algorithm, AnyAlgorithm, ConfigError, Limit, Limits, Timestamp};

use crate::text::decimal;

/// These limits without a bound, to observe what callers use: one for each window of each. The
/// first has the limit's name. A rate of 0 counts as one of 1, which a bound can be raised from.
pub(crate) fn unbounded(
    limits: &Limits<AnyAlgorithm>,
) -> Result<Limits<AnyAlgorithm>, ConfigError> {
    let mut unbounded = Vec::new();
    for (place, limit) in limits.iter().enumerate() {
        for (nth, window) in windows(limit.algorithm()).into_iter().enumerate() {
            let name = if nth == 0 { limit.name().to_owned() } else { further(limits, place, nth) };
            let larger = |(largest, best), bit| {
                let capacity = largest | 1_u64 << bit;
                with_capacity(&window, capacity).map_or((largest, best), |wide| (capacity, wide))
            };
            let (_, largest) = (0..53).rev().fold((0, window), larger);
            unbounded.push(with_algorithm(limit, &name, largest)?);
        }
    }
    Limits::new(unbounded)
}

/// The name of a further window of a limit, which no limit has.
fn further(limits: &Limits<AnyAlgorithm>, place: usize, nth: usize) -> String {
    let mut name = format!("{place}.{nth}");
    while limits.iter().any(|limit| limit.name() == name) {
        name.push('_');
    }
    name
}

/// A limit like this one, of another name and algorithm, that denies. A shadow limit requires no
/// identifiers.
pub fn with_algorithm(
    limit: &Limit<AnyAlgorithm>,
    name: &str,
    algorithm: AnyAlgorithm,
) -> Result<Limit<AnyAlgorithm>, ConfigError> {
    let mut other = Limit::new(name, algorithm)?.by(limit.identifier_names())?;
    for condition in limit.conditions() {
        let values = condition.values().collect::<Vec<_>>();
        other = if condition.excludes() {
            other.when_not(condition.identifier(), values)?
        } else {
            other.when(condition.identifier(), values)?
        };
    }
    let other = if limit.counts_attempts() { other.count_attempts()? } else { other };
    let requires = limit.is_required() && !limit.is_shadow();
    Ok(if requires { other.required() } else { other })
}

/// The windows of an algorithm, each alone. Algorithms of other kinds are a single one.
pub(crate) fn windows(algorithm: &AnyAlgorithm) -> Vec<AnyAlgorithm> {
    let text = algorithm.to_string();
    let alone = |rate: &str| {
        let words = text.split(' ').filter(|word| !is_rate(word) || *word == rate);
        words.collect::<Vec<_>>().join(" ").replace(',', "").parse().ok()
    };
    text.split(' ').filter(is_rate).filter_map(alone).collect()
}

/// Whether a word of an algorithm is a rate. The name of a time zone may have a slash, too.
fn is_rate(word: &&str) -> bool {
    word.starts_with(|first: char| first.is_ascii_digit()) && word.contains('/')
}

/// What the callers of one limit needed.
pub struct Needs {
    pub(crate) algorithm: AnyAlgorithm,
    /// The capacity that each caller needed, the largest first.
    pub(crate) capacities: Vec<u64>,
    /// Requests of callers that are not among them, because there were too many callers.
    pub(crate) left_out: u64,
}

impl Needs {
    /// The number of callers.
    pub const fn callers(&self) -> u64 {
        self.capacities.len() as u64
    }

    /// How many callers this algorithm alone denies at least once, or locks out.
    pub fn callers_denied_by(&self, algorithm: &AnyAlgorithm) -> u64 {
        self.capacities.partition_point(|need| *need > algorithm.capacity()) as u64
    }

    /// The algorithm with the smallest capacity that denies at most this many callers; `None` if
    /// there was no caller, the algorithm has no capacity that is large enough, or its rate is 0:
    /// it denies on purpose.
    pub fn smallest(&self, most_denied: u64) -> Option<AnyAlgorithm> {
        self.capacities.first().filter(|_| self.algorithm.capacity() > 0)?;
        let least = least_capacity(&self.algorithm);
        with_capacity(&self.algorithm, self.after(most_denied).unwrap_or(1).max(least))
    }

    /// The most that a caller needed which the algorithm alone admits.
    pub(crate) fn most_admitted(&self) -> Option<u64> {
        self.after(self.callers_denied_by(&self.algorithm))
    }

    /// The largest need after those of so many callers.
    fn after(&self, callers: u64) -> Option<u64> {
        self.capacities.get(usize::try_from(callers).ok()?).copied()
    }

    /// The number of callers by what they needed: exactly below 100, above rounded up to two
    /// digits, though not beyond the capacity where it was enough.
    pub(crate) fn histogram(&self) -> BTreeMap<u64, u64> {
        let capacity = self.algorithm.capacity();
        let mut histogram = BTreeMap::new();
        for need in &self.capacities {
            let unit = 10_u64.pow(need.ilog10().saturating_sub(1));
            let rounded = need.div_ceil(unit).saturating_mul(unit);
            let most = if *need <= capacity { capacity } else { u64::MAX };
            *histogram.entry(rounded.min(most)).or_default() += 1;
        }
        histogram
    }
}

/// The same algorithm with another capacity: the burst of a bucket, the count of a window. Several
/// windows keep their ratio.
fn with_capacity(algorithm: &AnyAlgorithm, capacity: u64) -> Option<AnyAlgorithm> {
    let is_bucket = matches!(algorithm.name(), "gcra" | "token-bucket");
    let mut words = Vec::new();
    let text = algorithm.to_string();
    let mut given = text.split_whitespace();
    while let Some(word) = given.next() {
        match word.split_once('/').filter(|_| is_rate(&word)) {
            Some(("0", period)) if is_bucket => words.push(format!("1/{period} burst {capacity}")),
            Some(_) if is_bucket => words.push(format!("{word} burst {capacity}")),
            Some((count, period)) => {
                let scaled = count.parse::<u128>().ok()?.max(1) * u128::from(capacity);
                let count = scaled.div_ceil(u128::from(algorithm.capacity().max(1)));
                words.push(format!("{count}/{period}"));
            }
            None if word == "burst" => drop(given.next()),
            None => words.push(word.to_owned()),
        }
    }
    words.join(" ").parse().ok()
}

/// Whether a limit recovers in full within a second, so that a log in whole seconds tells too
/// little of it.
pub fn is_finer_than_a_second(limit: &Limit<AnyAlgorithm>) -> bool {
    let at = Timestamp::saturating_from_us(1 << 50);
    let algorithm = limit.algorithm();
    let full = algorithm.step(None, at, algorithm.capacity());
    !algorithm.has_leases() && full.decision.reset_after_us < 1_000_000
}

/// What to know of such limits.
pub(crate) fn finer_than_a_second(limits: &Limits<AnyAlgorithm>) -> Option<String> {
    let finer = limits.iter().filter(|limit| is_finer_than_a_second(limit));
    let names: Vec<_> = finer.map(Limit::name).collect();
    (!names.is_empty()).then(|| {
        format!(
            "{}: finer than the times of the log, which are whole seconds: the requests of a second count as \
             simultaneous, so more are denied here than were the times exact",
            names.join(", ")
        )
    })
}

/// The smallest capacity beside the debt: one window of a calendar pays all that may be owed.
fn least_capacity(algorithm: &AnyAlgorithm) -> u64 {
    match algorithm {
        AnyAlgorithm::FixedWindow(window) if window.calendar().is_some() => window.debt().max(1),
        _ => 1,
    }
}

/// The field of a policy document that has the capacity: `burst = 30` or `rate = "5/s"`.
pub fn setting(algorithm: &AnyAlgorithm) -> String {
    let text = algorithm.to_string();
    let text = text.split_once(" debt ").map_or(&*text, |(text, _)| text);
    match (text.rsplit_once(" burst "), text.split_once(" rates ")) {
        (Some((_, burst)), _) => format!("burst = {burst}"),
        (_, Some((_, rates))) => format!("rates = [\"{}\"]", rates.replace(", ", "\", \"")),
        _ => format!("rate = \"{}\"", text.split(' ').find(is_rate).unwrap_or_default()),
    }
}

/// The share of callers that may be denied, in millionths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeniedShare(u64);

impl DeniedShare {
    const WHOLE: u64 = 100_000_000;

    /// Parses a share such as `0.1%`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let refused =
            || "write a share of 0% to 100% with at most 6 decimals, such as 0.1%".to_owned();
        let number = text.strip_suffix('%').ok_or_else(refused)?;
        let is_exact = number.split_once('.').is_none_or(|(_, decimals)| decimals.len() <= 6);
        let (whole, millionths) = decimal(number).filter(|_| is_exact).ok_or_else(refused)?;
        let part = whole.saturating_mul(1_000_000).saturating_add(millionths.unwrap_or(0));
        if part <= Self::WHOLE { Ok(Self(part)) } else { Err(refused()) }
    }

    /// Whether it is more than 0%.
    pub const fn is_some_share(self) -> bool {
        self.0 > 0
    }

    /// The most that this share of a number is, in whole ones.
    pub fn part_of(self, callers: u64) -> u64 {
        let part = u128::from(callers) * u128::from(self.0) / u128::from(Self::WHOLE);
        u64::try_from(part).unwrap_or(callers)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use ratelimit_core::Timestamp;
    use ratelimit_core::algorithm::Write;
    use ratelimit_core::store::Op;
    use ratelimit_testkit::limit_in_words;

    use super::*;
    use crate::caller::Caller;
    use crate::input::InputEntry;
    use crate::observed::Observed;
    use crate::tally::Tally;

    #[test]
    fn a_share_is_exact() {
        for (text, of) in
            [("0%", 0), ("0.1%", 1), ("0.199999%", 1), ("0.2%", 2), ("50%", 500), ("100%", 1_000)]
        {
            assert_eq!(
                DeniedShare::parse(text).map(|share| share.part_of(1_000)),
                Ok(of),
                "{text}"
            );
        }
        for text in ["", "%", "1", "-1%", "100.1%", "0.0000001%", "1e2%", ".5%", "1.%"] {
            assert!(DeniedShare::parse(text).is_err(), "{text}");
        }
    }

    /// How many callers a limit denies at least once.
    fn count_denied(limit: &Limit<AnyAlgorithm>, log: &[(String, Timestamp, u64, Op)]) -> u64 {
        let (mut states, mut denied) = (HashMap::new(), BTreeSet::new());
        for (key, at, cost, op) in log {
            match op {
                Op::Reset => drop(states.remove(key)),
                Op::Acquire => {
                    let step = limit.step(states.get(key), *at, *cost);
                    if !step.decision.allowed {
                        denied.insert(key);
                    }
                    if let Write::Put { state, .. } = step.write {
                        states.insert(key, state);
                    }
                }
                _ => {}
            }
        }
        denied.len() as u64
    }

    #[test]
    fn the_smallest_capacity_is_the_first_that_denies_few_enough() {
        for words in [
            "gcra 1/s burst 3",
            "token-bucket 1/2s",
            "fixed-window 3/5s",
            "fixed-window 30/day zone Europe/Berlin",
            "first-request-window 3/5s",
            "window-log 3/5s count attempts",
            "sliding-counter 3/5s",
            "sliding-log 3/5s",
            "bucketed-window bucket 1s rates 1/1s,3/5s",
        ] {
            let limit = limit_in_words("limit", words);
            let algorithm = limit.algorithm();
            let with = |algorithm| with_algorithm(&limit, "limit", algorithm).expect(words);
            let limits = Limits::new([limit.clone()]).expect(words);
            let mut observed = Observed::new(&limits, false).expect(words);
            let (mut tally, mut log) = (Tally::new(&limits, true), Vec::new());
            let mut random = 1_u64;
            for n in 0..3_000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let draw = random >> 40;
                let key = format!("k{}", draw % 30 * (draw / 30 % 30) / 29);
                let at = Timestamp::saturating_from_us(1_000_000_000 + n * 20_000);
                let op = match n % 50 {
                    13 => Op::Reset,
                    27 => Op::Peek,
                    _ => Op::Acquire,
                };
                let cost = draw / 900 % 3;
                let caller = Caller { bare: Some(key.as_str().into()), ..Caller::default() };
                let costs = cost.into();
                let entry = InputEntry { at, caller, costs, op, ..InputEntry::default() };
                observed.count(&entry, &tally.key_hashes(&entry.caller), &mut tally);
                log.push((key, at, cost, op));
            }
            let nearness = tally.limits[0].nearness.as_ref().expect("counted");
            let needs = nearness.needs(*algorithm);
            assert_eq!(needs.callers_denied_by(algorithm), count_denied(&limit, &log), "{words}");
            for most in [0, 1, 5, 20] {
                let found = needs.smallest(most).expect(words);
                let denies = count_denied(&with(found), &log);
                assert!(denies <= most, "{words}: {found}");
                assert_eq!(needs.callers_denied_by(&found), denies, "{words}: {found}");
                // Every smaller one denies more.
                for less in 1..found.capacity() {
                    let less = with_capacity(algorithm, less).expect(words);
                    let denies = count_denied(&with(less), &log);
                    assert!(denies > most, "{words}: {less} beside {found}");
                }
            }
        }
    }

    #[test]
    fn a_setting_is_written_as_a_policy_document_has_it() {
        for (words, due) in [
            ("gcra 1/s burst 3", "burst = 3"),
            ("gcra 1/s burst 3 debt 7", "burst = 3"),
            ("fixed-window 5/s debt 7", "rate = \"5/s\""),
            ("fixed-window 5/month zone Europe/Berlin anchor 15 debt 3", "rate = \"5/month\""),
            ("sliding-log 3/5s", "rate = \"3/5s\""),
            ("bucketed-window bucket 1s rates 1/1s, 3/5s", "rates = [\"1/1s\", \"3/5s\"]"),
        ] {
            assert_eq!(setting(&words.parse().expect(words)), due);
        }
    }
}
