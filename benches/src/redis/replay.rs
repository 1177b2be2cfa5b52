//! A recorded decision, sent again for many callers.

use std::error::Error;
use std::ops::Range;

use redis::Value;

use crate::keys::Key;

use super::wire::{Command, Wire, command};

/// Decisions that are sent in one piece before their replies are read.
const DEPTH: usize = 100;
/// The caller that is recorded. No other caller has this number.
const RECORDED: usize = 7_777_777_777_777;

/// What begins the keys of the commands that decisions are compared with. No decision is about them.
const BASELINE: &str = "baseline:";

/// An INCR for each caller, to compare a decision with.
pub(super) fn incr() -> Result<Template, String> {
    Template::new(&[command(&["INCR", &format!("{BASELINE}{}", recorded().as_str())])])
}

/// The caller in whose name a decision is recorded.
pub(super) fn recorded() -> Key {
    Key::new(RECORDED)
}

/// Commands in the name of one caller, to be sent in the names of others.
pub(super) struct Template {
    bytes: Vec<u8>,
    /// Where the caller's name stands.
    holes: Vec<usize>,
    replies: usize,
}

impl Template {
    /// The commands, in each of which the recorded caller's name may stand any number of times. Fails if no
    /// command has it, for then all callers would be one.
    pub(super) fn new(commands: &[Command]) -> Result<Self, String> {
        let caller = recorded();
        let name = caller.as_str().as_bytes();
        let mut bytes = Vec::new();
        for command in commands {
            bytes.extend(redis::pack_command(command));
        }
        let windows = bytes.windows(name.len()).enumerate();
        let holes: Vec<_> =
            windows.filter(|(_, window)| *window == name).map(|(at, _)| at).collect();
        if holes.is_empty() && !commands.is_empty() {
            return Err(format!("no command names the caller {}: {commands:?}", caller.as_str()));
        }
        Ok(Self { bytes, holes, replies: commands.len() })
    }

    /// The bytes of one decision.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Sends the commands for each of these callers. Fails at the first error that the server replies.
    pub(super) fn send(
        &self,
        wire: &mut Wire,
        callers: Range<usize>,
    ) -> Result<(), Box<dyn Error>> {
        let callers: Vec<_> = callers.collect();
        for callers in callers.chunks(DEPTH) {
            let mut requests = self.bytes.repeat(callers.len());
            for (caller, request) in
                callers.iter().zip(requests.chunks_mut(self.bytes.len().max(1)))
            {
                let name = Key::new(*caller);
                let name = name.as_str().as_bytes();
                for at in &self.holes {
                    request[*at..at + name.len()].copy_from_slice(name);
                }
            }
            wire.exchange(&requests, self.replies * callers.len())?;
        }
        Ok(())
    }
}

/// A key of a caller, with all that the server keeps under it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    key: Vec<u8>,
    /// 0 without an end.
    ttl_ms: u64,
    dump: Vec<u8>,
}

/// What the server keeps for the recorded caller or another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept(Vec<Held>);

impl Kept {
    /// Reads it.
    pub(super) fn read(wire: &mut Wire, caller: &Key) -> Result<Self, Box<dyn Error>> {
        let pattern = format!("*{}*", caller.as_str());
        let Value::Array(keys) = wire.ask(&command(&["KEYS", &pattern]))? else {
            return Err("KEYS: no array".into());
        };
        let mut held = Vec::new();
        for key in keys {
            let Value::BulkString(key) = key else { return Err("KEYS: no string".into()) };
            if key.starts_with(BASELINE.as_bytes()) {
                continue;
            }
            let dump = wire.ask(&vec![b"DUMP".to_vec(), key.clone()])?;
            let ttl_ms = wire.ask(&vec![b"PTTL".to_vec(), key.clone()])?;
            // A key that ended in between is as good as absent.
            let (Value::BulkString(dump), Value::Int(ttl_ms)) = (dump, ttl_ms) else { continue };
            held.push(Held { key, ttl_ms: u64::try_from(ttl_ms).unwrap_or(0), dump });
        }
        held.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(Self(held))
    }

    /// Whether there is no key of the caller.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the same keys hold the same, whoever's they are and however long they live.
    fn says_the_same(&self, other: &Self) -> bool {
        let dumps = |kept: &Self| kept.0.iter().map(|held| held.dump.clone()).collect::<Vec<_>>();
        dumps(self) == dumps(other)
    }
}

/// A decision as it was recorded: what is sent, what was kept for its caller before, and after.
pub(super) struct Recorded {
    pub(super) commands: Vec<Command>,
    pub(super) before: Kept,
    pub(super) after: Kept,
}

impl Recorded {
    /// The commands that put a caller where the recorded one was before the decision.
    pub(super) fn restoring(&self) -> Result<Template, String> {
        let mut commands = Vec::new();
        for held in &self.after.0 {
            if self.before.0.iter().all(|before| before.key != held.key) {
                commands.push(vec![b"DEL".to_vec(), held.key.clone()]);
            }
        }
        for Held { key, ttl_ms, dump } in &self.before.0 {
            let name = recorded();
            if dump.windows(name.as_str().len()).any(|bytes| bytes == name.as_str().as_bytes()) {
                return Err(format!(
                    "the value under {} names its caller, so that it cannot be copied",
                    String::from_utf8_lossy(key)
                ));
            }
            let (ttl_ms, restore) = (ttl_ms.to_string().into_bytes(), b"RESTORE".to_vec());
            commands.push(vec![restore, key.clone(), ttl_ms, dump.clone(), b"REPLACE".to_vec()]);
        }
        Template::new(&commands)
    }

    /// Whether the decision changes what is kept.
    fn writes(&self) -> bool {
        !self.before.says_the_same(&self.after)
    }

    /// Fails unless this caller's keys were changed as the recorded decision changed its own, or left alone as
    /// it left them: a replay that the server decided otherwise is another measurement.
    pub(super) fn verify(&self, wire: &mut Wire, caller: usize) -> Result<(), Box<dyn Error>> {
        let kept = Kept::read(wire, &Key::new(caller))?;
        let as_many = kept.0.len() == self.after.0.len();
        if as_many && kept.says_the_same(&self.before) != self.writes() {
            return Ok(());
        }
        Err(format!(
            "replayed, the decision did something else than when it was recorded: {} keys of caller {caller}, {} of \
             the recorded one; it {} them",
            kept.0.len(),
            self.after.0.len(),
            if self.writes() { "should have changed" } else { "should not have changed" }
        )
        .into())
    }
}
