//! [`Keyspace`]: the keys of a server, and the commands that the store uses.

use std::collections::{BTreeMap, VecDeque};

use ratelimit_redis::Reply;

type Bytes = Vec<u8>;

/// What a server keeps under its keys. A clone is a snapshot.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keyspace(BTreeMap<Bytes, Entry>);

#[derive(Clone, Debug)]
struct Entry {
    value: Value,
    expires_ms: Option<u64>,
}

#[derive(Clone, Debug)]
enum Value {
    Text(Bytes),
    Hash(BTreeMap<Bytes, Bytes>),
    List(VecDeque<Bytes>),
    /// Scores and members, in order. The store's scores are whole numbers.
    Sorted(Vec<(i64, Bytes)>),
}

impl Value {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(_) => false,
            Self::Hash(fields) => fields.is_empty(),
            Self::List(elements) => elements.is_empty(),
            Self::Sorted(members) => members.is_empty(),
        }
    }
}

/// The error that a server answers, from its code on.
pub(crate) type Refused = String;

fn syntax() -> Refused {
    "ERR syntax error".into()
}

fn text(word: &[u8]) -> Result<&str, Refused> {
    std::str::from_utf8(word).map_err(|_| syntax())
}

fn number<T: std::str::FromStr>(word: &[u8]) -> Result<T, Refused> {
    text(word)?.parse().map_err(|_| "ERR value is not an integer or out of range".into())
}

fn integer(count: usize) -> Reply {
    Reply::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

pub(crate) fn ok() -> Reply {
    Reply::Text(b"OK".to_vec())
}

fn texts<'t>(all: impl IntoIterator<Item = &'t Bytes>) -> Reply {
    Reply::Array(all.into_iter().cloned().map(Reply::Text).collect())
}

/// The positions from `first` to `last`, both included, where -1 is the last of `length`.
fn range(first: i64, last: i64, length: usize) -> std::ops::Range<usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let place = |index: i64| if index < 0 { length + index } else { index };
    let (first, end) = (place(first).max(0), place(last).saturating_add(1).min(length));
    let at = |index: i64| usize::try_from(index).unwrap_or(0);
    if first < end { at(first)..at(end) } else { 0..0 }
}

/// A getter of a key's value of one type, made if it is absent.
macro_rules! typed {
    ($($name:ident: $variant:ident($type:ty);)+) => { $(
        fn $name(&mut self, key: &[u8]) -> Result<&mut $type, Refused> {
            let fresh = || Entry { value: Value::$variant(Default::default()), expires_ms: None };
            match &mut self.0.entry(key.to_vec()).or_insert_with(fresh).value {
                Value::$variant(value) => Ok(value),
                _ => Err("WRONGTYPE Operation against a key holding the wrong kind of value".into()),
            }
        }
    )+ };
}

impl Keyspace {
    typed! {
        hash: Hash(BTreeMap<Bytes, Bytes>);
        list: List(VecDeque<Bytes>);
        sorted: Sorted(Vec<(i64, Bytes)>);
        text: Text(Bytes);
    }

    /// Executes a command at a time.
    pub(crate) fn execute(&mut self, now_us: u64, words: &[Bytes]) -> Result<Reply, Refused> {
        let ms = now_us / 1_000;
        let (name, arguments) = words.split_first().ok_or_else(syntax)?;
        let name = text(name)?.to_ascii_uppercase();
        match (&*name, arguments) {
            ("PING", _) => return Ok(Reply::Text(b"PONG".to_vec())),
            ("TIME", _) => {
                let part = |number: u64| Reply::Text(number.to_string().into_bytes());
                return Ok(Reply::Array(vec![part(now_us / 1_000_000), part(now_us % 1_000_000)]));
            }
            ("KEYS", [pattern]) => {
                let prefix = pattern.strip_suffix(b"*").unwrap_or(pattern);
                self.0.retain(|_, entry| entry.expires_ms.is_none_or(|at| ms <= at));
                return Ok(texts(self.0.keys().filter(|key| key.starts_with(prefix))));
            }
            _ => {}
        }
        let (key, rest) = arguments.split_first().ok_or_else(syntax)?;
        if self.0.get(key).and_then(|entry| entry.expires_ms).is_some_and(|at| ms > at) {
            self.0.remove(key);
        }
        let reply = self.of_key(&name, key, rest, ms);
        if self.0.get(key).is_some_and(|entry| entry.value.is_empty()) {
            self.0.remove(key);
        }
        reply
    }

    fn of_key(
        &mut self,
        name: &str,
        key: &Bytes,
        rest: &[Bytes],
        now_ms: u64,
    ) -> Result<Reply, Refused> {
        match (name, rest) {
            ("DEL" | "UNLINK", others) => {
                let removed =
                    std::iter::once(key).chain(others).filter(|key| self.0.remove(*key).is_some());
                Ok(integer(removed.count()))
            }
            ("PTTL", []) => Ok(Reply::Integer(match self.0.get(key) {
                None => -2,
                Some(Entry { expires_ms: None, .. }) => -1,
                Some(Entry { expires_ms: Some(at), .. }) => {
                    i64::try_from(at.saturating_sub(now_ms)).unwrap_or(i64::MAX)
                }
            })),
            ("PEXPIRE", [ttl_ms]) => {
                let at = now_ms.saturating_add(number(ttl_ms)?);
                let found = self.0.get_mut(key).map(|entry| entry.expires_ms = Some(at));
                Ok(Reply::Integer(found.is_some().into()))
            }
            ("GET", []) if !self.0.contains_key(key) => Ok(Reply::Nil),
            ("GET", []) => Ok(Reply::Text(self.text(key)?.clone())),
            ("SET", [value, options @ ..]) => self.set(key, value, options, now_ms),
            ("HGET", [field]) => {
                Ok(self.hash(key)?.get(field).cloned().map_or(Reply::Nil, Reply::Text))
            }
            ("HMGET", fields) => {
                let hash = self.hash(key)?;
                let value = |field| hash.get(field).cloned().map_or(Reply::Nil, Reply::Text);
                Ok(Reply::Array(fields.iter().map(value).collect()))
            }
            ("HSET", pairs) if !pairs.is_empty() && pairs.len().is_multiple_of(2) => {
                let hash = self.hash(key)?;
                let set = |pair: &[Bytes]| hash.insert(pair[0].clone(), pair[1].clone()).is_none();
                Ok(integer(pairs.chunks(2).map(set).filter(|is_new| *is_new).count()))
            }
            ("HLEN", []) => Ok(integer(self.hash(key)?.len())),
            ("HGETALL", []) => {
                let pairs = self.hash(key)?.iter().flat_map(|(field, value)| [field, value]);
                Ok(Reply::Array(pairs.cloned().map(Reply::Text).collect()))
            }
            ("HDEL", fields) => {
                let hash = self.hash(key)?;
                Ok(integer(fields.iter().filter(|field| hash.remove(*field).is_some()).count()))
            }
            (_, rest) if name.starts_with('Z') => self.of_sorted(name, key, rest),
            _ if name.starts_with(['L', 'R']) => self.of_list(name, key, rest),
            // A script would take an error for a key of another type, and leave the batch to the
            // driver.
            _ => unreachable!("the model lacks the command {name}"),
        }
    }

    fn set(
        &mut self,
        key: &Bytes,
        value: &Bytes,
        options: &[Bytes],
        now_ms: u64,
    ) -> Result<Reply, Refused> {
        let (mut expires_ms, mut is_due) = (None, true);
        let mut options = options.iter();
        while let Some(option) = options.next() {
            match text(option)? {
                "PX" => {
                    let ttl_ms: u64 = number(options.next().ok_or_else(syntax)?)?;
                    if ttl_ms == 0 {
                        return Err("ERR invalid expire time in 'set' command".into());
                    }
                    expires_ms = Some(now_ms.saturating_add(ttl_ms));
                }
                "NX" => is_due = !self.0.contains_key(key),
                "IFEQ" => {
                    let expected = options.next().ok_or_else(syntax)?;
                    is_due = self.0.contains_key(key) && self.text(key)? == expected;
                }
                _ => return Err(syntax()),
            }
        }
        if !is_due {
            return Ok(Reply::Nil);
        }
        self.0.insert(key.clone(), Entry { value: Value::Text(value.clone()), expires_ms });
        Ok(ok())
    }

    fn of_sorted(&mut self, name: &str, key: &[u8], rest: &[Bytes]) -> Result<Reply, Refused> {
        let members = self.sorted(key)?;
        match (name, rest) {
            ("ZCARD", []) => Ok(integer(members.len())),
            ("ZCOUNT", [least, most]) if least == b"-inf" => {
                let most: i64 = number(most)?;
                Ok(integer(members.iter().filter(|(score, _)| *score <= most).count()))
            }
            ("ZADD", [score, member]) => {
                let (score, before) = (number(score)?, members.len());
                members.retain(|(_, other)| other != member);
                let is_new = members.len() == before;
                members.push((score, member.clone()));
                members.sort_unstable();
                Ok(Reply::Integer(is_new.into()))
            }
            ("ZREM", removed) => {
                let before = members.len();
                members.retain(|(_, member)| !removed.contains(member));
                Ok(integer(before - members.len()))
            }
            ("ZREMRANGEBYRANK", [first, last]) => {
                let removed = range(number(first)?, number(last)?, members.len());
                Ok(integer(members.drain(removed).count()))
            }
            ("ZRANGE", [first, last, options @ ..]) => {
                let with_scores = !options.is_empty();
                let shown = &members[range(number(first)?, number(last)?, members.len())];
                let mut reply = Vec::new();
                for (score, member) in shown {
                    reply.push(Reply::Text(member.clone()));
                    if with_scores {
                        reply.push(Reply::Text(score.to_string().into_bytes()));
                    }
                }
                Ok(Reply::Array(reply))
            }
            _ => Err(format!("ERR unknown command '{name}'")),
        }
    }

    fn of_list(&mut self, name: &str, key: &[u8], rest: &[Bytes]) -> Result<Reply, Refused> {
        let elements = self.list(key)?;
        let at = |index: &[u8], length| Ok::<_, Refused>(range(number(index)?, -1, length).next());
        match (name, rest) {
            ("LLEN", []) => Ok(integer(elements.len())),
            ("LINDEX", [index]) => {
                let found = at(index, elements.len())?.map(|index| elements[index].clone());
                Ok(found.map_or(Reply::Nil, Reply::Text))
            }
            ("LRANGE", [first, last]) => {
                let shown = range(number(first)?, number(last)?, elements.len());
                Ok(texts(elements.range(shown)))
            }
            ("LSET", [index, element]) => {
                let index = at(index, elements.len())?.ok_or("ERR index out of range")?;
                elements[index].clone_from(element);
                Ok(ok())
            }
            ("LTRIM", [first, last]) => {
                let kept = range(number(first)?, number(last)?, elements.len());
                *elements = elements.range(kept).cloned().collect();
                Ok(ok())
            }
            ("RPUSHX", _) if elements.is_empty() => Ok(Reply::Integer(0)),
            ("RPUSH" | "RPUSHX", added) if !added.is_empty() => {
                elements.extend(added.iter().cloned());
                Ok(integer(elements.len()))
            }
            _ => Err(format!("ERR unknown command '{name}'")),
        }
    }
}
