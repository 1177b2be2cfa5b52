//! The Lua mode: each batch one script, decided where the states are.

use ratelimit_core::{Algorithm, Batch, Check, Decision, Limit, Now, Op, Store, Verdict};

use crate::connection::{Connection, Reply, Word};
use crate::error::RedisError;
use crate::key;
use crate::program::{Keeps, LuaProgram, Stored};
use crate::store::{Lua, RedisStore};

/// Integers that the script answers for a check.
const ANSWERS_PER_CHECK: usize = 5;

impl<C: Connection> RedisStore<Lua, C> {
    /// The key on the server under which a limit keeps its state for a caller's key.
    #[must_use]
    pub fn key<A: LuaProgram>(&self, limit: &Limit<A>, key: &str) -> String {
        match limit.algorithm().program().keeps {
            Keeps::Numbers => key::shared(&self.inner.prefix, key),
            Keeps::SortedSet => key::of_limit(&self.inner.prefix, limit.name(), key),
        }
    }

    /// The state that is stored for a key of a limit; `None` too if a limit of this name, but of
    /// another algorithm, wrote what is there.
    ///
    /// # Errors
    /// A server that does not answer, or a value that no limit wrote.
    pub async fn state<A: LuaProgram>(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<A::State>, RedisError> {
        let key = self.key(limit, key);
        let keeps = limit.algorithm().program().keeps;
        let words = match keeps {
            Keeps::Numbers => {
                [Word::Text("HGET"), Word::Text(&key), Word::Text(limit.name())].to_vec()
            }
            Keeps::SortedSet => [
                Word::Text("ZRANGE"),
                Word::Text(&key),
                Word::Number(0),
                Word::Text("-1"),
                Word::Text("WITHSCORES"),
            ]
            .to_vec(),
        };
        let corrupt = |detail: &str| RedisError::Corrupt {
            limit: limit.name().into(),
            key: key.clone(),
            detail: detail.into(),
        };
        let reply = self.inner.connection.send(&words).await.map_err(|error| match &error {
            RedisError::Server { code, .. } if code == "WRONGTYPE" => corrupt(WRONG_TYPE),
            _ => error,
        })?;
        let stored = match (reply, keeps) {
            (Reply::Nil, _) => return Ok(None),
            (Reply::Array(items), Keeps::SortedSet) if items.is_empty() => return Ok(None),
            (Reply::Array(items), Keeps::SortedSet) => members(&items).map(Stored::SortedSet),
            (Reply::Text(text), Keeps::Numbers) => {
                std::str::from_utf8(&text).ok().and_then(Stored::from_text)
            }
            (other, _) => return Err(self.inner.unexpected(&other)),
        };
        let stored = stored.ok_or_else(|| corrupt("not a state at all"))?;
        match limit.algorithm().decode(&stored) {
            Some(state) => Ok(Some(state)),
            None => match stored {
                Stored::Numbers(writer, _) if writer != limit.algorithm().program().name => {
                    Ok(None)
                }
                _ => Err(corrupt("numbers that no limit writes")),
            },
        }
    }

    async fn run<A: LuaProgram>(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        let checks = batch.checks();
        let names: Vec<String> =
            checks.iter().map(|check| self.key(check.limit, check.key)).collect();
        let mut keys: Vec<&str> = Vec::with_capacity(names.len());
        let positions: Vec<usize> = names
            .iter()
            .map(|name| {
                keys.iter().position(|known| known == name).unwrap_or_else(|| {
                    keys.push(name);
                    keys.len() - 1
                })
            })
            .collect();

        let script = self
            .inner
            .scripts
            .of(checks.iter().map(|check| check.limit.algorithm().program()).collect());
        let mut words =
            vec![Word::Text("EVALSHA"), Word::Text(&script.sha), Word::Number(keys.len() as u64)];
        words.extend(keys.iter().map(|key| Word::Text(key)));
        let (now, padding_ms) = match batch.time() {
            Now::Store => (Word::Text(""), 0),
            Now::At(now) => (Word::Number(now.as_us()), Now::PADDING_US / 1_000),
        };
        words.extend([Word::Text(operation(batch.operation())), now, Word::Number(padding_ms)]);
        let parameters: Vec<_> =
            checks.iter().map(|check| check.limit.algorithm().parameters()).collect();
        for ((check, position), parameters) in checks.iter().zip(&positions).zip(&parameters) {
            words.extend([
                Word::Text(check.limit.algorithm().program().name),
                Word::Number(*position as u64 + 1),
                Word::Text(check.limit.name()),
                Word::Number(exact_cost(check)),
            ]);
            words.extend(parameters.as_slice().iter().map(|number| Word::Number(*number)));
        }

        let answer = self.inner.eval(&script, &mut words).await;
        let answer = answer.map_err(|error| described(error, checks, &names))?;
        self.verdict(checks, &answer)
    }

    fn verdict<A: Algorithm>(
        &self,
        checks: &[Check<'_, A>],
        answer: &Reply,
    ) -> Result<Verdict, RedisError> {
        let unexpected = || self.inner.unexpected(answer);
        let Reply::Array(items) = answer else { return Err(unexpected()) };
        if items.len() != checks.len() * ANSWERS_PER_CHECK {
            return Err(unexpected());
        }
        let decisions = checks
            .iter()
            .zip(items.chunks_exact(ANSWERS_PER_CHECK))
            .map(|(check, items)| decision(check, items))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(unexpected)?;
        Ok(match *decisions {
            [decision] => Verdict::one(decision),
            _ => Verdict::several(decisions),
        })
    }
}

impl<A: LuaProgram, C: Connection> Store<A> for RedisStore<Lua, C> {
    type Error = RedisError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, RedisError> {
        if batch.checks().is_empty() {
            return Ok(Verdict::several(Vec::new()));
        }
        self.run(batch).await
    }
}

const WRONG_TYPE: &str =
    "a value of another type; remove the key, or give the store another prefix";

fn operation(op: Op) -> &'static str {
    match op {
        Op::Acquire => "acquire",
        Op::Peek => "peek",
        Op::Force => "force",
        Op::Refund => "refund",
        Op::Reset => "reset",
    }
}

/// A cost that stays exact in a double. What is above the capacity is all the same.
fn exact_cost<A: Algorithm>(check: &Check<'_, A>) -> u64 {
    check.cost.min(check.limit.algorithm().capacity() + 1)
}

/// What a check was answered, each number checked before it goes in.
fn decision<A: Algorithm>(check: &Check<'_, A>, items: &[Reply]) -> Option<Decision> {
    let &[
        Reply::Integer(allowed @ (0 | 1)),
        Reply::Integer(limit),
        Reply::Integer(remaining),
        Reply::Integer(retry_after),
        Reply::Integer(reset_after),
    ] = items
    else {
        return None;
    };
    let limit = match limit {
        -1 => check.limit.algorithm().capacity(),
        limit => u64::try_from(limit).ok()?,
    };
    Some(Decision {
        allowed: allowed == 1,
        cost: check.cost,
        limit,
        remaining: u64::try_from(remaining).ok().filter(|remaining| *remaining <= limit)?,
        retry_after_us: match retry_after {
            -1 => None,
            us => Some(u64::try_from(us).ok()?),
        },
        reset_after_us: u64::try_from(reset_after).ok()?,
    })
}

/// An error of the script's own, or of a key of a wrong type, said of the check that it is about.
fn described<A: Algorithm>(
    error: RedisError,
    checks: &[Check<'_, A>],
    keys: &[String],
) -> RedisError {
    let RedisError::Server { code, message, .. } = &error else { return error };
    let corrupt = |position: usize, detail: &str| {
        let (check, key) = (checks.get(position)?, keys.get(position)?);
        Some(RedisError::Corrupt {
            limit: check.limit.name().into(),
            key: key.clone(),
            detail: detail.into(),
        })
    };
    let described =
        match code.as_str() {
            "RLCORRUPT" => message.trim().parse().ok().and_then(|position: usize| {
                corrupt(position.checked_sub(1)?, "it has been removed")
            }),
            "WRONGTYPE" if checks.len() == 1 => corrupt(0, WRONG_TYPE),
            _ => None,
        };
    described.unwrap_or(error)
}

/// Members and scores from an answer that alternates them.
fn members(items: &[Reply]) -> Option<Vec<(String, u64)>> {
    items
        .chunks(2)
        .map(|pair| match pair {
            [Reply::Text(member), Reply::Text(score)] => {
                let member = String::from_utf8(member.clone()).ok()?;
                Some((member, score_us(std::str::from_utf8(score).ok()?)?))
            }
            _ => None,
        })
        .collect()
}

/// A score as an integer. Servers write large ones as `1.7e+15`.
fn score_us(text: &str) -> Option<u64> {
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let (mantissa, exponent) = text.split_once("e+")?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let zeros = exponent.parse::<usize>().ok()?.checked_sub(fraction.len())?;
    format!("{whole}{fraction}{}", "0".repeat(zeros.min(20))).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_read_in_every_form_a_server_writes() {
        assert_eq!(score_us("1795218392123456"), Some(1_795_218_392_123_456));
        assert_eq!(score_us("1.7e+15"), Some(1_700_000_000_000_000));
        assert_eq!(score_us("2e+3"), Some(2_000));
        assert_eq!(score_us("1.5"), None);
        assert_eq!(score_us("nan"), None);
        assert_eq!(score_us("1.25e+1"), None);
    }
}
