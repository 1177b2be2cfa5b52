//! Law 10 for identifiers that a store may confuse.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use ratelimit_core::store::{Now, Op};
use ratelimit_core::{Algorithm, Decision, Limit, Timestamp};

use crate::capability::Capability;
use crate::law::{LawResult, ensure};
use crate::laws::Subject;
use crate::trace::made::{Instance, limit};
use crate::trace::{Ask, TraceRequest};

/// Identifiers of which some database, driver, script or function takes two for one, beside each
/// other.
const ALIKE: &[&[&str]] = &[
    &["", " ", "  ", "\0", "\t", "a", " a", "a ", "a\0", "a\0b", "a\n", "a\r\nb", "a\u{200b}"],
    &[
        "A", "ä", "a\u{308}", "Ä", "é", "e\u{301}", "e", "ß", "ss", "ﬁ", "fi", "１", "1", "²", "2",
        "K", "\u{212a}",
    ],
    &["{a}b", "{a}c", "{a}", "{", "}", "{}", "{}a", "{b}a", "a{", "a}", "}{", "{{a}}"],
    &[
        "a:b", "a_b", "a.b", "a-b", "a|b", "a\\|b", "a/b", "a//b", "a/./b", "a/../b", "ab", "a,b",
        "a;b", "a b", "a\nb", "a+b",
    ],
    &[
        "a%20b", "a%2520b", "%61", "\\u0061", "&amp;", "&", "\"a\"", "'a'", "`a`", "\\", "\\\\",
        "$1", "?", "??",
    ],
    &[
        "01", "1.0", "+1", "1e0", "0x1", "-1", "10", "100", "1_000", "1000", "l0", "0", "nil",
        "null", "false",
    ],
    &[
        "::1",
        "0:0:0:0:0:0:0:1",
        "127.0.0.1",
        "127.0.0.10",
        "::ffff:127.0.0.1",
        "10.0.0.1",
        "10.0.0.01",
    ],
    &[
        "🦀", "🦞", "\u{fffd}", "\u{202e}", "\u{e9}", "\u{1e9}", "\u{80}", "\u{7f}", "\u{1}", "Aa",
        "BB", "ba",
    ],
    &["*", "a*", "?*", "[a-z]", "_", ".*", "a%", "costarring", "liquid", "declinate", "macallums"],
];

/// Characters of identifiers that differ at one end or in the middle, at which a store may have cut
/// or hashed them.
const LENGTHS: [usize; 8] = [16, 32, 64, 128, 129, 255, 1_000, 100_000];

/// Keys that a store which resets by pattern would take for patterns.
const PATTERNS: [&str; 6] = ["*", "?*", "[a-z]", "a%", "_", ".*"];

/// Names of limits: the first has all identifiers.
const NAMES: [&str; 11] = [
    "l",
    // `l` + `0:x` and `l0` + `:x` join to the same text.
    "l0",
    "L",
    // Separators.
    "l.a",
    "l_a",
    "l-a",
    // Keys, too: name and key may be swapped.
    "0",
    "00",
    ".",
    // They differ in the last byte that a name may have.
    "a_name-may-have-64-bytes-of-which-only.the.last.one.tells.them-0",
    "a_name-may-have-64-bytes-of-which-only.the.last.one.tells.them-1",
];

/// Keys of the limits whose names are alike.
const FEW: [&str; 8] = ["", "0", "a", "b", "ab", "a:b", "l", "l0"];

const AT: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
/// How many identifiers are asked concurrently.
const AT_ONCE: usize = 64;

/// Identifiers that all differ, and little.
fn identifiers() -> BTreeSet<String> {
    let mut all: BTreeSet<String> =
        ALIKE.iter().copied().flatten().map(|key| (*key).to_owned()).collect();
    for length in LENGTHS {
        let (half, rest) = ("x".repeat(length / 2), "x".repeat(length - length / 2));
        for sign in ["", "y", "z"] {
            all.extend([
                format!("{sign}{half}{rest}"),
                format!("{half}{sign}{rest}"),
                format!("{half}{rest}{sign}"),
            ]);
        }
    }
    all
}

/// Law 10 for similar identifiers: a charge to one never shows in another, however little they
/// differ. A reset of one, even if it looks like a pattern, resets no other. All limits are of this
/// algorithm.
pub(crate) async fn two_identifiers_never_meet<A: Algorithm + Clone>(
    subject: &Subject<'_, A>,
    instance: Instance<A>,
) -> LawResult {
    let capacity = instance.algorithm.capacity();
    let limits = NAMES.map(|name| limit(name, instance.clone()));
    let asked = Asked { subject, limits: &limits };
    let few = |limit| FEW.map(|key| Ask { limit, key: key.to_owned(), cost: 0 });
    let all = identifiers().into_iter().map(|key| Ask { limit: 0, key, cost: 0 });
    let asks: Vec<Ask> = all.chain((1..limits.len()).flat_map(few)).collect();
    for some in asks.chunks(AT_ONCE) {
        let charged = some.iter().map(|one| asked.ask(one, Op::Acquire, capacity));
        let charged = join_all(charged).await;
        for (charged, one) in charged.into_iter().zip(some) {
            let charged = charged?;
            if !charged.allowed || charged.remaining > 0 {
                return asked.meets(&asks, one, capacity).await;
            }
        }
    }
    for some in asks.chunks(AT_ONCE) {
        let left = join_all(some.iter().map(|one| asked.ask(one, Op::Peek, 1))).await;
        for (left, one) in left.into_iter().zip(some) {
            let left = left?;
            ensure(!left.allowed, || {
                format!("{} was used up, and is not: its state was lost", asked.describe(one))
            })?;
        }
    }
    if !subject.able.can(Capability::Reset) {
        return Ok(());
    }
    for pattern in PATTERNS {
        asked.ask(&Ask { limit: 0, key: pattern.to_owned(), cost: 0 }, Op::Reset, 0).await?;
    }
    for one in asks.iter().filter(|ask| ask.limit > 0 || !PATTERNS.contains(&&*ask.key)) {
        let left = asked.ask(one, Op::Peek, 1).await?;
        ensure(!left.allowed, || {
            format!(
                "{} was used up, and is not after a reset of {PATTERNS:?}: the store resets by patterns",
                asked.describe(one)
            )
        })?;
    }
    Ok(())
}

/// A store that is asked for identifiers of these limits.
struct Asked<'a, A: Algorithm> {
    subject: &'a Subject<'a, A>,
    limits: &'a [Limit<A>],
}

impl<A: Algorithm> Asked<'_, A> {
    async fn ask(&self, ask: &Ask, op: Op, cost: u64) -> Result<Decision, String> {
        let request = TraceRequest::one(AT, op, Ask { cost, ..ask.clone() });
        Ok(*self.subject.ask(self.limits, &request, Now::At(AT)).await?.summary())
    }

    /// An identifier, shortened if it is long.
    fn describe(&self, ask: &Ask) -> String {
        let (name, key) = (self.limits[ask.limit].name(), &ask.key);
        let begin: String = key.chars().take(40).collect();
        format!("{begin:?} ({} bytes) of limit {name}", key.len())
    }

    /// Names the identifier that shares its state with this one, if both can be reset.
    async fn meets(&self, asks: &[Ask], found: &Ask, capacity: u64) -> LawResult {
        let others = asks.iter().take_while(|other| *other != found);
        for other in others.filter(|_| self.subject.able.can(Capability::Reset)) {
            self.ask(other, Op::Reset, 0).await?;
            self.ask(found, Op::Reset, 0).await?;
            self.ask(other, Op::Acquire, capacity).await?;
            let apart = self.ask(found, Op::Acquire, capacity).await?.allowed;
            ensure(apart, || {
                format!("{} shares its state with {}", self.describe(found), self.describe(other))
            })?;
        }
        let found = self.describe(found);
        Err(format!(
            "{found} was never used, and something of it is, among many that are asked at once"
        ))
    }
}
