//! Records of a caller: set, listed and cleared by an operator.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use super::RateLimiter;
use crate::algorithms::Algorithm;
use crate::error::did_you_mean;
use crate::identifiers::{Identifiers, describe_identifiers};
use crate::limit::Limit;
use crate::record::Record;
use crate::refusal::Refusal;
use crate::store_traits::RecordStore;

/// How often to try when others write the same record at once: the last one wins.
const TRIES: usize = 256;

const LOWERS: &str = "one that raises what the limit admits stands, and this one would lower it or end it \
                      earlier; replace_record() does that all the same, and so does --replace of the tool";
const CONTENDED: &str = "others have changed it again and again meanwhile; try again";
const NO_NUMBERS: &str = "its numbers are of another algorithm or window than the limit, or have a debt where the limit \
                          counts attempts; only rate, burst, count and debt may differ";

impl<S: RecordStore<A>, A: Algorithm> RateLimiter<S, A> {
    /// Sets the [record](Record) of a caller under the limit of this name, and returns the one that
    /// stood before. All processes that share the store decide by it from now on.
    ///
    /// Records have no forms without waiting. On a store in memory this future is ready when it is
    /// polled first, so a program without a runtime blocks on it.
    ///
    /// It does not replace a record that raises what the limit admits by one that admits less, in
    /// any of its numbers, or that ends earlier: see [`replace_record`](Self::replace_record). Of
    /// two writers at once, the last wins: see
    /// [`set_record_if_unchanged`](Self::set_record_if_unchanged).
    ///
    /// # Errors
    /// The store's error; no limit of this name, one that is not
    /// [overridable](Limit::overridable) or does not apply to the caller; numbers of another
    /// algorithm or window; [`Refusal::Record`] if it would lower a record, has ended already by
    /// the store's clock, or if other writers came first 256 times.
    pub async fn set_record<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        limit: &str,
        record: Record<A>,
    ) -> Result<Option<Record<A>>, S::Error> {
        self.put_record(caller, limit, Some(&record), false).await
    }

    /// [`set_record`](Self::set_record), even if a record that raises what the limit admits is
    /// replaced by one that admits less.
    ///
    /// # Errors
    /// As for `set_record`.
    pub async fn replace_record<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        limit: &str,
        record: Record<A>,
    ) -> Result<Option<Record<A>>, S::Error> {
        self.put_record(caller, limit, Some(&record), true).await
    }

    /// [`replace_record`](Self::replace_record), if the record `seen` still stands, or none:
    /// returns whether it did. If not, another writer came first, and nothing has changed.
    ///
    /// # Errors
    /// As for `set_record`.
    pub async fn set_record_if_unchanged<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        limit: &str,
        seen: Option<&Record<A>>,
        record: Record<A>,
    ) -> Result<bool, S::Error> {
        let (limit, key) = self.overridable_for(caller, limit)?;
        suits(limit, &record)?;
        self.store.exchange_record(limit, &key, seen, Some(&record)).await
    }

    /// Clears the record of a caller under the limit of this name, and returns it.
    ///
    /// # Errors
    /// As for [`set_record`](Self::set_record).
    pub async fn clear_record<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        limit: &str,
    ) -> Result<Option<Record<A>>, S::Error> {
        self.put_record(caller, limit, None, true).await
    }

    /// The records of a caller that stand now, each with the name of its limit.
    ///
    /// # Errors
    /// The store's error.
    pub async fn records<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Vec<(&str, Record<A>)>, S::Error> {
        let mut found = Vec::new();
        for limit in self.limits.iter().filter(|limit| limit.is_overridable()) {
            if let Some(key) = limit.key_for(caller)
                && let Some(record) = self.store.record(limit, &key).await?
            {
                found.push((limit.name(), record));
            }
        }
        Ok(found)
    }

    async fn put_record<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        limit: &str,
        record: Option<&Record<A>>,
        replaces: bool,
    ) -> Result<Option<Record<A>>, S::Error> {
        let (limit, key) = self.overridable_for(caller, limit)?;
        record.map_or(Ok(()), |record| suits(limit, record))?;
        for _ in 0..TRIES {
            let before = self.store.record(limit, &key).await?;
            // One that the limit could not decide by has raised nothing.
            let raising = before.as_ref().filter(|before| suits(limit, before).is_ok());
            let lowers = || Some(record?.lowers(raising?, limit));
            if !replaces && lowers().unwrap_or(false) {
                return Err(refused(limit, LOWERS).into());
            }
            if self.store.exchange_record(limit, &key, before.as_ref(), record).await? {
                return Ok(before);
            }
        }
        Err(refused(limit, CONTENDED).into())
    }

    /// The overridable limit of this name, and the caller's key under it.
    fn overridable_for<'c, C: Identifiers + ?Sized>(
        &self,
        caller: &'c C,
        name: &str,
    ) -> Result<(&Limit<A>, Cow<'c, str>), Refusal> {
        let Some(limit) = self.limits.iter().find(|limit| limit.name() == name) else {
            let names = self.limits.iter().map(Limit::name);
            let meant = did_you_mean(name, names.clone());
            let limits = names.collect::<Vec<_>>().join(", ") + &meant;
            return Err(Refusal::UnknownLimit { name: name.into(), limits });
        };
        limit.takes_records()?;
        let key = limit.key_for(caller).ok_or_else(|| Refusal::MissingIdentifier {
            limit: name.into(),
            had: describe_identifiers(caller),
            wanted: limit.describe_identifiers(),
        })?;
        Ok((limit, key))
    }
}

fn refused<A: Algorithm>(limit: &Limit<A>, why: &'static str) -> Refusal {
    Refusal::Record { limit: limit.name().into(), why }
}

/// Whether the limit can decide by the record.
fn suits<A: Algorithm>(limit: &Limit<A>, record: &Record<A>) -> Result<(), Refusal> {
    let can = record.copied_numbers().is_none_or(|numbers| limit.at_numbers(numbers).is_ok());
    if can { Ok(()) } else { Err(refused(limit, NO_NUMBERS)) }
}
