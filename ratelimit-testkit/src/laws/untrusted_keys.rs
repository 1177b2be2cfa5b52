//! Law 10 for untrusted keys, which a client may choose.

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{Op, Policy, Timestamp};

use crate::harness::Harness;
use crate::laws::{Kept, Subject};
use crate::seeds::limit;
use crate::trace::text::{Case, Unreadable, limit_line, lines, read_limit, read_quoted};
use crate::trace::{Ask, Request};

/// Different keys of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UntrustedKeys {
    pub(crate) policy: Policy,
    pub(crate) keys: Vec<String>,
}

/// Fragments known to confuse servers, patterns, scripts or code that joins keys with a separator.
const PIECES: &[&str] = &[
    "a", "b", "{", "}", "{a}", "{b}", "{}", "\0", "\r\n", "\n", "*", "?", "[a-z]", ":", "|", "\\",
    "\\|", "%", "%7B", "%25", "$1", " ", "\"", "'", "\u{fffd}", "ä", "a\u{308}", "🦀", "\u{202e}",
    "..", "/", "1", "0", "l0", "nil", "~", "#", "=", ",", "\u{7f}", "\u{80}", "\u{1}",
];

/// Keys made of such fragments, some of them so long that a store must hash or refuse them.
pub(crate) fn untrusted_keys(policy: BoxedStrategy<Policy>) -> BoxedStrategy<UntrustedKeys> {
    let short = prop::collection::vec(select(PIECES), 0..6).prop_map(|pieces| pieces.concat());
    let long = (short.clone(), select(&[100, 511, 1_000, 100_000][..]))
        .prop_map(|(end, bytes)| "x".repeat(bytes) + &end);
    let any = ".{0,12}";
    let key = prop_oneof![6 => short, 1 => long, 1 => any];
    (policy, prop::collection::vec(key, 2..12))
        .prop_map(|(policy, mut keys)| {
            // The closest neighbours of each key: one character shorter or longer.
            let mut cut: Vec<String> = keys.iter().take(2).cloned().collect();
            for key in &mut cut {
                key.pop();
            }
            keys.extend(cut);
            keys.extend(keys.first().map(|key| format!("{key}\0")));
            keys.sort_unstable();
            keys.dedup();
            UntrustedKeys { policy, keys }
        })
        .boxed()
}

/// Law 10 for untrusted keys: every key has its own state, and no two different keys share one, whatever bytes
/// they contain.
///
/// # Errors
/// How the store breaks the law.
pub async fn different_keys_never_meet<H: Harness>(
    subject: &Subject<'_, H>,
    case: &UntrustedKeys,
) -> Kept {
    let at = Timestamp::saturating_from_us(1_795_218_392_123_456);
    // The names share a prefix, so that a store that concatenates name and key is caught, too.
    let limits = [limit("l", case.policy), limit("l0", case.policy)];
    let shown = |key: &str| key.chars().take(40).collect::<String>();
    for (number, limit) in [(0, &limits[0]), (1, &limits[1])] {
        let capacity = crate::trace::capacity(limit);
        for key in &case.keys {
            let ask = Ask { limit: number, key: key.clone(), cost: capacity };
            let request = Request { at, op: Op::Acquire, asks: vec![ask.clone()], id: None };
            let first = subject.ask(&limits, &request).await?;
            subject.ensure(first.allowed() && first.remaining() == 0, || {
                format!(
                    "the key {:?} was never used and has {} of {capacity} left: it shares its state \
                     with another of {:?}",
                    shown(key),
                    first.remaining(),
                    case.keys.iter().map(|key| shown(key)).collect::<Vec<_>>()
                )
            })?;
            let again = subject.ask(&limits, &request).await?;
            subject.ensure(!again.allowed(), || {
                format!("the key {:?} was used up and is not: its state was lost", shown(key))
            })?;
        }
    }
    Ok(())
}

impl Case for UntrustedKeys {
    fn text(&self) -> String {
        let keys = self.keys.iter().map(|key| format!("key {key:?}\n"));
        format!("{}\n{}", limit_line(&limit("l", self.policy)), keys.collect::<String>())
    }

    fn read(text: &str) -> Result<Self, Unreadable> {
        let (mut policy, mut keys) = (None, Vec::new());
        for line in lines(text) {
            if let Some(limit) = read_limit(line)? {
                policy = Some(*limit.algorithm());
                continue;
            }
            let key = line.strip_prefix("key ").and_then(read_quoted);
            keys.push(key.ok_or_else(|| Unreadable::new(line, "write `key \"KEY\"`"))?);
        }
        let none = || Unreadable::new(text, "no line names a limit");
        Ok(Self { policy: policy.ok_or_else(none)?, keys })
    }
}
