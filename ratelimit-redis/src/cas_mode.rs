//! The mode that compares and sets: any algorithm, stepped in Rust, with no Lua of its own.
//!
//! 1. Read the states of the batch, and the server's time.
//! 2. Decide, with [`decide`], as the memory store does.
//! 3. Write, if all that was read is still as it was; otherwise begin anew, a bounded number of times.
//!
//! What was decided on unchanged states could have been decided in one go: time only goes on
//! meanwhile, by no more than a round trip. A value that was changed and changed back is the same
//! state, and no harm.

use ratelimit_core::{
    Algorithm, Batch, Limit, Now, Op, States, Store, Tick, Verdict, Write, decide,
};

use crate::codec::Codec;
use crate::connection::{Connection, Reply, Word};
use crate::error::RedisError;
use crate::key;
use crate::program::Script;
use crate::store::{Cas, RedisStore};

/// How often a batch is decided before it is given up as contended.
const ATTEMPTS: usize = 32;

/// A check's key, what was read there, and what becomes of it.
struct Slot<S> {
    key: String,
    read: Option<Vec<u8>>,
    state: Option<S>,
    write: Write<S>,
}

/// The states of a batch as they were read; writes are noted, not made.
struct Slots<'s, S>(&'s mut [Slot<S>]);

impl<S> States<S> for Slots<'_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        self.0[position].state.as_ref()
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        self.0[position].write = write;
    }
}

impl<A: Algorithm, C: Connection> Store<A> for RedisStore<Cas, C>
where
    A::State: Codec,
{
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        for _ in 0..ATTEMPTS {
            let mut slots = Vec::with_capacity(batch.checks().len());
            for check in batch.checks() {
                slots.push(self.read::<A>(check.limit, check.key, batch.operation()).await?);
            }
            let now = match batch.time() {
                Now::At(now) => now,
                Now::Store => self.time().await?,
            };
            let verdict = decide(batch, now, &mut Slots(&mut slots))
                .map_err(|error| RedisError::Unsupported(error.to_string()))?;
            let changes = slots.iter().any(|slot| match slot.write {
                Write::Keep => false,
                Write::Put { .. } => true,
                Write::Remove => slot.read.is_some(),
            });
            let padding_us = match batch.time() {
                Now::Store => 0,
                Now::At(_) => Now::PADDING_US,
            };
            if !changes || self.write(&slots, now, padding_us).await? {
                return Ok(verdict);
            }
        }
        Err(RedisError::Contended { attempts: ATTEMPTS })
    }
}

impl<C: Connection> RedisStore<Cas, C> {
    /// The key on the server under which a limit keeps its state for a caller's key.
    #[must_use]
    pub fn key<A: Algorithm>(&self, limit: &Limit<A>, key: &str) -> String {
        key::of_cas(&self.inner.prefix, limit.name(), key)
    }

    /// The state that is stored for a key of a limit.
    ///
    /// # Errors
    /// A server that does not answer, or a value that is no state.
    pub async fn state<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<A::State>, RedisError>
    where
        A::State: Codec,
    {
        let key = self.key(limit, key);
        match self.get(limit, &key).await? {
            None => Ok(None),
            Some(bytes) if bytes.is_empty() => Ok(None),
            Some(bytes) => match A::State::decode(&bytes) {
                Some(state) => Ok(Some(state)),
                None => Err(corrupt(limit, &key, "not a state")),
            },
        }
    }

    async fn read<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        op: Op,
    ) -> Result<Slot<A::State>, RedisError>
    where
        A::State: Codec,
    {
        let key = self.key(limit, key);
        let read = self.get(limit, &key).await?;
        // Nothing at all is what `SET … IFEQ` leaves, for a millisecond, of a state that was removed.
        let written = read.as_deref().filter(|bytes| !bytes.is_empty());
        let state = written.and_then(A::State::decode);
        if written.is_some() && state.is_none() && op != Op::Reset {
            // Removed if it is still there, so that the limit heals, and told once.
            let slot = Slot { key: key.clone(), read, state, write: Write::Remove };
            self.write(&[slot], Tick::ZERO, 0).await?;
            return Err(corrupt(limit, &key, "not a state; it has been removed"));
        }
        Ok(Slot { key, read, state, write: Write::Keep })
    }

    async fn get<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Vec<u8>>, RedisError> {
        match self.inner.connection.send(&[Word::Text("GET"), Word::Text(key)]).await {
            Ok(Reply::Nil) => Ok(None),
            Ok(Reply::Text(bytes)) => Ok(Some(bytes)),
            Ok(other) => Err(self.inner.unexpected(&other)),
            Err(RedisError::Server { code, .. }) if code == "WRONGTYPE" => {
                Err(corrupt(limit, key, "a value of another type; remove the key"))
            }
            Err(error) => Err(error),
        }
    }

    /// The server's time.
    async fn time(&self) -> Result<Tick, RedisError> {
        let reply = self.inner.connection.send(&[Word::Text("TIME")]).await?;
        let number = |reply: &Reply| match reply {
            Reply::Text(digits) => std::str::from_utf8(digits).ok()?.parse::<u64>().ok(),
            Reply::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        let time = match &reply {
            Reply::Array(parts) => match &parts[..] {
                [seconds, us] => number(seconds).zip(number(us)),
                _ => None,
            },
            _ => None,
        };
        let (seconds, us) = time.ok_or_else(|| self.inner.unexpected(&reply))?;
        Ok(Tick::saturating_from_us(seconds.saturating_mul(1_000_000).saturating_add(us)))
    }

    /// Writes, and says whether all that was read was still as it was.
    async fn write<S: Codec>(
        &self,
        slots: &[Slot<S>],
        now: Tick,
        padding_us: u64,
    ) -> Result<bool, RedisError> {
        if let [slot] = slots
            && let Some(written) = self.write_one(slot, now, padding_us).await?
        {
            return Ok(written);
        }
        let script = compare_and_set();
        let changes: Vec<_> =
            slots.iter().map(|slot| Change::of(&slot.write, now, padding_us)).collect();
        let mut words =
            vec![Word::Text("EVALSHA"), Word::Text(&script.sha), Word::Number(slots.len() as u64)];
        words.extend(slots.iter().map(|slot| Word::Text(&slot.key)));
        for (slot, change) in slots.iter().zip(&changes) {
            let read = slot.read.as_deref();
            words.push(Word::Text(if read.is_some() { "1" } else { "0" }));
            words.push(Word::Bytes(read.unwrap_or_default()));
            words.extend([Word::Text(change.kind), Word::Bytes(&change.value)]);
            words.push(Word::Number(change.ttl_ms));
        }
        match self.inner.eval(script, &mut words).await? {
            Reply::Integer(written @ (0 | 1)) => Ok(written == 1),
            other => Err(self.inner.unexpected(&other)),
        }
    }

    /// Writes a single key without scripting; `None` if that takes a script on this server.
    async fn write_one<S: Codec>(
        &self,
        slot: &Slot<S>,
        now: Tick,
        padding_us: u64,
    ) -> Result<Option<bool>, RedisError> {
        let change = Change::of(&slot.write, now, padding_us);
        let mut words = vec![Word::Text("SET"), Word::Text(&slot.key), Word::Bytes(&change.value)];
        match &slot.read {
            None => words.push(Word::Text("NX")),
            Some(read) if self.inner.may_have_ifeq() => {
                words.extend([Word::Text("IFEQ"), Word::Bytes(read)]);
            }
            Some(_) => return Ok(None),
        }
        words.extend([Word::Text("PX"), Word::Number(change.ttl_ms)]);
        match self.inner.connection.send(&words).await {
            Ok(Reply::Text(_)) => Ok(Some(true)),
            Ok(Reply::Nil) => Ok(Some(false)),
            Ok(other) => Err(self.inner.unexpected(&other)),
            // "ERR syntax error": the server does not know IFEQ, and has written nothing.
            Err(RedisError::Server { code, message, .. })
                if code == "ERR" && message.contains("syntax") && slot.read.is_some() =>
            {
                self.inner.note_lack_of_ifeq();
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// What becomes of a key, for the server.
struct Change {
    kind: &'static str,
    value: Vec<u8>,
    ttl_ms: u64,
}

impl Change {
    fn of<S: Codec>(write: &Write<S>, now: Tick, padding_us: u64) -> Self {
        match write {
            Write::Keep => Self { kind: "", value: Vec::new(), ttl_ms: 1 },
            // Where it cannot be deleted it is emptied, and gone in a millisecond.
            Write::Remove => Self { kind: "remove", value: Vec::new(), ttl_ms: 1 },
            Write::Put { state, expires } => Self {
                kind: "put",
                value: state.encode(),
                ttl_ms: (expires.saturating_us_since(now) + padding_us).div_ceil(1_000).max(1),
            },
        }
    }
}

fn compare_and_set() -> &'static Script {
    static SCRIPT: std::sync::OnceLock<Script> = std::sync::OnceLock::new();
    SCRIPT.get_or_init(|| Script::from_text(include_str!("lua/compare_and_set.lua")))
}

fn corrupt<A: Algorithm>(limit: &Limit<A>, key: &str, detail: &str) -> RedisError {
    RedisError::Corrupt { limit: limit.name().into(), key: key.into(), detail: detail.into() }
}
