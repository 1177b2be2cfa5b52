//! The records of callers, read and written: in every mode that decides by them, under the same
//! keys.

use ratelimit_core::store::{Now, RecordStore};
use ratelimit_core::{Algorithm, Limit, Limits, Record, Refusal};

use crate::codec::RecordText;
use crate::connection::{Argument, Connection, Reply, TryAgain};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::key::StoredKey;
use crate::mode::{Cas, Lua};
use crate::records;
use crate::scripts::RECORD;
use crate::store::{Inner, Mode, RedisStore, evalsha};

impl<C: Connection> Inner<C> {
    /// The text of the record of a key, and the key on the server of its records.
    async fn record_text<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        deadline: Deadline,
    ) -> Result<(String, Option<Vec<u8>>)> {
        let hash = self.keys.of_records(key);
        let words = ["HGET", &hash, limit.state_name()].map(Argument::Text);
        let reply = self.connection.send(&hash, &words, deadline).await?;
        Ok((hash, self.value(reply)?))
    }

    async fn record<A: RecordText>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Record<A>>> {
        let deadline = self.deadline();
        let (hash, text) = self.record_text(limit, key, deadline).await?;
        let Some(text) = text else { return Ok(None) };
        let record = records::decode(limit, &hash, &text)?;
        let now = self.now(&hash, Now::Store, deadline).await?;
        Ok(Some(record).filter(|record| record.stands_at(now)))
    }

    async fn exchange_record<A: RecordText>(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool> {
        const NO_TEXT: &str =
            "its algorithm writes no numbers as text; implement RecordText::numbers_to_text";
        limit.takes_records()?;
        let text = |record: Option<&Record<A>>| match record.map(records::encode) {
            Some(None) => Err(Refusal::Record { limit: limit.name().into(), why: NO_TEXT }),
            text => Ok(text.flatten().unwrap_or_default()),
        };
        let (standing, next) = (text(standing)?, text(next)?);
        let deadline = self.deadline();
        let (hash, mut seen) = self.record_text(limit, key, deadline).await?;
        if let Some(stands) = &seen {
            // Another version may write the same record in other words.
            let stands = records::decode(limit, &hash, stands)?;
            seen = seen.filter(|_| records::encode(&stands).as_deref() == Some(&*standing));
        }
        let mut words = evalsha(std::iter::once(&*hash), 1);
        words.push(Argument::Text(limit.state_name()));
        // Where nothing that reads so stood, the script finds that it differs, or that the next one
        // has ended.
        words.push(Argument::Bytes(seen.as_deref().unwrap_or(standing.as_bytes())));
        words.push(Argument::Text(&next));
        let answer = self.eval(&hash, &RECORD, &mut words, TryAgain::Wait, deadline).await?;
        match &*answer {
            b"0" => Ok(false),
            b"1" => Ok(true),
            b"2" => Err(limit.refuses_ended().into()),
            _ => Err(self.peer.unexpected(&Reply::Text(answer))),
        }
    }
}

macro_rules! keeps_records {
    ($($mode:ident),+) => { $(
        impl<A: RecordText, C: Connection> RecordStore<A> for RedisStore<$mode, C>
        where
            $mode: Mode<A>,
        {
            async fn record(&self, limit: &Limit<A>, key: &str) -> Result<Option<Record<A>>> {
                self.inner.record(limit, key).await
            }

            async fn exchange_record(
                &self,
                limit: &Limit<A>,
                key: &str,
                standing: Option<&Record<A>>,
                next: Option<&Record<A>>,
            ) -> Result<bool> {
                self.inner.exchange_record(limit, key, standing, next).await
            }
        }
    )+ };
}

// A transaction cannot decide by a record.
keeps_records!(Lua, Cas);

/// The records of a caller, each with its limit.
type RecordsOf<'l, A> = (StoredKey, Vec<(&'l Limit<A>, Record<A>)>);

impl<M, C: Connection> RedisStore<M, C> {
    /// The [records](Record) in a key of a [`scan`](Self::scan), under these limits, and what the
    /// key tells about their identifier. `None` for a key without records. Those that have ended
    /// may be among them.
    ///
    /// # Errors
    /// As of every command, and a record that this version cannot read.
    pub async fn records_in<'l, A: RecordText>(
        &self,
        limits: &'l Limits<A>,
        key: &str,
    ) -> Result<Option<RecordsOf<'l, A>>> {
        let Some(identifier) = self.inner.keys.read_records(key) else { return Ok(None) };
        let words = ["HGETALL", key].map(Argument::Text);
        let reply = self.inner.connection.send(key, &words, self.inner.deadline()).await?;
        let fields = reply.strings().unwrap_or_default();
        let mut records = Vec::new();
        for field in fields.chunks_exact(2) {
            let is_its = |limit: &&Limit<A>| limit.state_name().as_bytes() == field[0];
            if let Some(limit) = limits.iter().find(is_its) {
                records.push((limit, records::decode(limit, key, field[1])?));
            }
        }
        Ok(Some((identifier, records)))
    }
}
