//! [Records](Record) of callers on the server: their text, what this process knows of them, and
//! what a request assumes.
//!
//! A caller's records are a hash under the tag of its states, a field per limit. The script that
//! decides does not understand them: the request sends the bytes that it assumes, none for nearly
//! all callers, and the script compares them with what stands. If they differ, it charges nothing
//! and answers what stands, and the request is sent again (*optimistic concurrency control*; Kung
//! and Robinson, 1981). So each decision is made by the record that stands at that moment; what a
//! process knows of records spares round trips and decides nothing. The compare-and-set mode reads
//! records with the states and remembers none; what it writes with a state is compared alike.
//!
//! A record is `1 END CHANGE`: the version; when it ends, in microseconds, or `-`; and `blocked`,
//! `exempt`, or the algorithm and its numbers, such as `gcra 100/s burst 200`. A version that is
//! not known is an error of the limit, so that no block of a newer one is overlooked.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ratelimit_core::store::{Batch, Check, Now, Standing};
use ratelimit_core::{Algorithm, Limit, Record, Timestamp};

use crate::codec::{RecordText, take_sized};
use crate::connection::Argument;
use crate::error::RedisError;
use crate::key::Keys;

/// Reported for a record that cannot be read, by each request until it is gone.
const UNREADABLE: &str = "no record that this version can read; remove the field with HDEL, or the \
                          key with DEL if it is no hash, and set the record anew";
/// The callers whose records a process knows at most. With more, it forgets them all, and asks once
/// more for each.
const MOST_KNOWN: usize = 1 << 16;
/// How often a request is sent again because a record has changed, if its deadline admits.
pub(crate) const TRIES: usize = 256;

/// What this process knows of records on the server.
#[derive(Debug, Default)]
pub(crate) struct KnownRecords(Mutex<HashMap<String, Vec<KnownRecord>>>);

#[derive(Debug)]
struct KnownRecord {
    field: Box<str>,
    text: Vec<u8>,
    /// Whether it has ended by the server's clock.
    has_ended: bool,
}

impl KnownRecords {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<KnownRecord>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The text of a record, and whether that has ended.
    pub(crate) fn get(&self, key: &str, field: &str) -> Option<(Vec<u8>, bool)> {
        let all = self.lock();
        let known = all.get(key)?.iter().find(|known| &*known.field == field)?;
        Some((known.text.clone(), known.has_ended))
    }

    /// Notes what stands: nothing, if the text is empty.
    fn note(&self, key: &str, field: &str, text: &[u8], now: Timestamp) {
        let mut all = self.lock();
        if text.is_empty() && !all.contains_key(key) {
            return;
        }
        if all.len() >= MOST_KNOWN && !all.contains_key(key) {
            all.clear();
        }
        let of_key = all.entry(key.to_owned()).or_default();
        of_key.retain(|known| &*known.field != field);
        if !text.is_empty() {
            let (field, has_ended) = (field.into(), has_ended(text, now));
            of_key.push(KnownRecord { field, text: text.to_vec(), has_ended });
        }
        if of_key.is_empty() {
            all.remove(key);
        }
    }

    /// Forgets the records of these callers. One that cannot be read may have been mended, so the
    /// next request asks again.
    pub(crate) fn forget<A: Algorithm>(&self, keys: &Keys, batch: &Batch<'_, A>) {
        let mut all = self.lock();
        for check in batch.checks() {
            all.remove(&keys.of_records(check.key));
        }
    }

    /// Notes what the server answered about these premises. `None` if it cannot be read.
    pub(crate) fn learn<'p>(
        &self,
        premises: impl IntoIterator<Item = &'p Premise>,
        now: Timestamp,
        mut answer: &[u8],
    ) -> Option<()> {
        for premise in premises {
            self.note(&premise.key, &premise.field, take_sized(&mut answer)?, now);
        }
        answer.is_empty().then_some(())
    }
}

/// What a request assumes about the record of a caller under a limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Premise {
    pub(crate) key: String,
    pub(crate) field: Box<str>,
    text: Vec<u8>,
    /// When it ends, as the script reads it.
    end: String,
}

impl Premise {
    /// That there is no record.
    pub(crate) fn of_none(key: String, field: &str) -> Self {
        Self { key, field: field.into(), text: Vec::new(), end: String::new() }
    }
}

/// Adds what `premises.lua` reads; the keys of the premises are the last ones of the call.
pub(crate) fn push_premises<'w>(
    words: &mut Vec<Argument<'w>>,
    premises: impl ExactSizeIterator<Item = &'w Premise>,
) {
    words.push(Argument::Number(premises.len() as u64));
    for premise in premises {
        words.extend([
            Argument::Text(&premise.field),
            Argument::Bytes(&premise.text),
            Argument::Text(&premise.end),
        ]);
    }
}

/// How the checks of a batch stand, and what that assumes. Nothing if no check looks for a record.
#[derive(Debug)]
pub struct Looked<A> {
    standings: Vec<Standing<A>>,
    pub(crate) premises: Vec<Premise>,
}

impl<A: Algorithm> Looked<A> {
    pub(crate) const NOTHING: Self = Self { standings: Vec::new(), premises: Vec::new() };

    /// The checks that decide.
    pub(crate) fn checks<'p>(&'p self, batch: &Batch<'p, A>) -> Vec<Check<'p, A>> {
        if self.standings.is_empty() { Vec::new() } else { batch.checks_by(&self.standings) }
    }

    /// The batch of these checks.
    pub(crate) fn ruled<'p>(
        &'p self,
        batch: &Batch<'p, A>,
        checks: &'p [Check<'p, A>],
    ) -> Batch<'p, A> {
        if self.standings.is_empty() {
            return *batch;
        }
        batch.with_checks(checks).standing_so(&self.standings)
    }
}

/// How the checks of a batch stand by the records of their callers. `known` says, from the key and
/// the field, the text of each and whether that has ended.
///
/// # Errors
/// A record that this version cannot read.
pub(crate) fn look<A: RecordText>(
    keys: &Keys,
    batch: &Batch<'_, A>,
    mut known: impl FnMut(&str, &str) -> Option<(Vec<u8>, bool)>,
) -> Result<Looked<A>, RedisError> {
    if !batch.is_overridable() {
        return Ok(Looked::NOTHING);
    }
    let mut looked = Looked::NOTHING;
    for check in batch.checks() {
        let limit = check.limit;
        if !limit.is_overridable() {
            looked.standings.push(Standing::Policy);
            continue;
        }
        let (key, field) = (keys.of_records(check.key), limit.state_name());
        let known = known(&key, field);
        let mut premise = Premise::of_none(key, field);
        let mut record = None;
        if let Some((text, has_ended)) = known {
            let read = decode(limit, &premise.key, &text)?;
            let stands = match (read.end(), batch.time()) {
                (None, _) => true,
                (Some(_), Now::At(now)) => read.stands_at(now),
                (Some(end), Now::Store) => {
                    let sign = if has_ended { "-" } else { "" };
                    premise.end = format!("{sign}{}", end.as_us());
                    !has_ended
                }
            };
            premise.text = text;
            record = Some(read).filter(|_| stands);
        }
        looked.standings.push(limit.standing(record.as_ref(), Timestamp::ZERO));
        looked.premises.push(premise);
    }
    Ok(looked)
}

/// The text of a record. `None` if its numbers have none.
pub(crate) fn encode<A: RecordText>(record: &Record<A>) -> Option<String> {
    let change = match record.algorithm() {
        Some(numbers) => numbers.numbers_to_text()?,
        None if record.is_blocked() => "blocked".to_owned(),
        None => "exempt".to_owned(),
    };
    let end = record.end().map_or("-".to_owned(), |end| end.as_us().to_string());
    Some(format!("1 {end} {change}"))
}

/// The record of a limit under a key.
pub(crate) fn decode<A: RecordText>(
    limit: &Limit<A>,
    key: &str,
    text: &[u8],
) -> Result<Record<A>, RedisError> {
    let read = || {
        let (end, change) =
            (end_of(text).ok()?, std::str::from_utf8(text).ok()?.splitn(3, ' ').nth(2)?);
        let record = match change {
            "blocked" => Record::blocked(),
            "exempt" => Record::exempt(),
            numbers => A::numbers_from_text(numbers)?,
        };
        Some(match end {
            Some(end) => record.until(end),
            None => record.forever(),
        })
    };
    read().ok_or_else(|| RedisError::corrupt(limit, key, UNREADABLE))
}

/// Whether a record has ended by now.
pub(crate) fn has_ended(text: &[u8], now: Timestamp) -> bool {
    end_of(text).ok().flatten().is_some_and(|end| end <= now)
}

/// No record.
struct NoRecord;

/// When a record ends; `None` for never.
fn end_of(text: &[u8]) -> Result<Option<Timestamp>, NoRecord> {
    let end = || std::str::from_utf8(text).ok()?.strip_prefix("1 ")?.split_once(' ');
    match end().ok_or(NoRecord)?.0 {
        "-" => Ok(None),
        end => end.parse().ok().and_then(Timestamp::from_us).map(Some).ok_or(NoRecord),
    }
}
