//! A recorded decision, replayed for many callers.

use std::ops::Range;

use redis::{Connection, ConnectionLike, Value};

use crate::keys::CallerKey;
use crate::measure::Fallible;

use super::recorder::{RecordedCommand, command};

/// Decisions that are sent in one piece before their replies are read.
const DEPTH: usize = 100;
/// The caller that is recorded, and the one before it. No other caller has these numbers.
const RECORDED: usize = 7_777_777_777_777;
const WARMING_UP: usize = 7_777_777_777_776;

/// The prefix of the keys of the INCRs that decisions are compared with. No decision uses them.
const BASELINE: &str = "baseline:";

/// An INCR for each caller, to compare a decision with.
pub(super) fn incr() -> Result<Template, String> {
    Template::new(&[command(&["INCR", &format!("{BASELINE}{}", recorded_caller().as_str())])])
}

/// The caller for which a decision is recorded.
pub(super) fn recorded_caller() -> CallerKey {
    CallerKey::new(RECORDED)
}

/// The caller for which a decision is made before the recording, so that its scripts are loaded.
pub(super) fn warming_up() -> CallerKey {
    CallerKey::new(WARMING_UP)
}

/// Commands for one caller, to be sent for others.
pub(super) struct Template {
    bytes: Vec<u8>,
    /// The positions of the caller's name.
    holes: Vec<usize>,
    replies: usize,
    /// The expected replies; empty if any reply will do.
    due: Vec<Value>,
}

impl Template {
    /// A template of these commands, each of which may name the recorded caller any number of
    /// times. Fails if no command names it: then all callers would be one.
    pub(super) fn new(commands: &[RecordedCommand]) -> Result<Self, String> {
        let caller = recorded_caller();
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
        Ok(Self { bytes, holes, replies: commands.len(), due: Vec::new() })
    }

    /// The bytes of one decision.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Sends the commands for each of these callers. Fails at the first error that the server
    /// replies, and at the first reply that means another decision than the recorded one.
    pub(super) fn send(&self, wire: &mut Connection, callers: Range<usize>) -> Fallible {
        // What has no keys is not restored, and the client sends nothing that is empty.
        let callers: Vec<_> = if self.replies > 0 { callers.collect() } else { Vec::new() };
        for callers in callers.chunks(DEPTH) {
            let mut requests = self.bytes.repeat(callers.len());
            for (caller, request) in
                callers.iter().zip(requests.chunks_mut(self.bytes.len().max(1)))
            {
                let name = CallerKey::new(*caller);
                let name = name.as_str().as_bytes();
                for at in &self.holes {
                    request[*at..at + name.len()].copy_from_slice(name);
                }
            }
            let count = self.replies * callers.len();
            for (position, reply) in
                wire.req_packed_commands(&requests, 0, count)?.into_iter().enumerate()
            {
                let reply = reply.extract_error()?;
                let due = self.due.get(position % self.replies);
                if due.is_some_and(|due| !is_like(due, &reply)) {
                    return Err(format!(
                        "replayed, the decision was answered {reply:?} for caller {}, and {due:?} when it was recorded",
                        callers[position / self.replies]
                    )
                    .into());
                }
            }
        }
        Ok(())
    }
}

/// Whether two replies mean the same decision, whatever its time. Texts agree by what a script says
/// of its first group; numbers, and lists by their first number, by whether it is negative, 0 or
/// positive. Later numbers are waits, and results of PEXPIRE.
fn is_like(recorded: &Value, replayed: &Value) -> bool {
    match (recorded, replayed) {
        (Value::BulkString(recorded), Value::BulkString(replayed)) => {
            sign(recorded) == sign(replayed)
        }
        (Value::Int(recorded), Value::Int(replayed)) => recorded.signum() == replayed.signum(),
        (Value::Array(recorded), Value::Array(replayed)) => {
            let mut pairs = recorded.iter().zip(replayed).enumerate();
            recorded.len() == replayed.len()
                && pairs.all(|(position, pair)| match pair {
                    (Value::Int(_), Value::Int(_)) if position > 0 => true,
                    (recorded, replayed) => is_like(recorded, replayed),
                })
        }
        (recorded, replayed) => recorded == replayed,
    }
}

/// What a script decided: the line of its first group.
fn sign(text: &[u8]) -> Option<&[u8]> {
    text.split(|byte| *byte == b'\n').nth(1)
}

/// A key of a caller, with its serialized value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Dumped {
    key: Vec<u8>,
    /// Its expiry in milliseconds since the Unix epoch; 0 without one.
    end_ms: u64,
    /// The memory that it takes.
    bytes: u64,
    dump: Vec<u8>,
}

/// The keys that the server stores for one caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredKeys(Vec<Dumped>);

impl StoredKeys {
    /// Reads the keys of a caller.
    pub(super) fn read(wire: &mut Connection, caller: &CallerKey) -> Fallible<Self> {
        let keys: Vec<Vec<u8>> =
            redis::cmd("KEYS").arg(format!("*{}*", caller.as_str())).query(wire)?;
        let mut dumped = Vec::new();
        for key in keys.into_iter().filter(|key| !key.starts_with(BASELINE.as_bytes())) {
            let mut ask = |command: &[&str]| {
                let mut cmd = redis::cmd(command[0]);
                cmd.arg(&command[1..]).arg(&key).query::<Value>(wire)
            };
            let answers = (ask(&["DUMP"])?, ask(&["PEXPIRETIME"])?, ask(&["MEMORY", "USAGE"])?);
            // A key that expired in between counts as absent.
            let (Value::BulkString(dump), Value::Int(end_ms), Value::Int(bytes)) = answers else {
                continue;
            };
            let (end_ms, bytes) = (u64::try_from(end_ms).unwrap_or(0), u64::try_from(bytes)?);
            dumped.push(Dumped { key, end_ms, bytes, dump });
        }
        dumped.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(Self(dumped))
    }

    /// The memory that the keys take.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|dumped| dumped.bytes).sum()
    }

    /// Whether keys of the same shape have the same content, of any caller and with any time to
    /// live.
    fn says_the_same(&self, other: &Self) -> bool {
        self.0.iter().map(|kept| &kept.dump).eq(other.0.iter().map(|kept| &kept.dump))
    }
}

/// A recorded decision: its commands, and the caller's keys before and after.
pub(super) struct RecordedDecision {
    pub(super) commands: Vec<RecordedCommand>,
    /// The reply to each command.
    pub(super) replies: Vec<Value>,
    pub(super) before: StoredKeys,
    pub(super) after: StoredKeys,
}

impl RecordedDecision {
    /// The decision as a template for other callers, whose replies must mean the same.
    pub(super) fn replaying(&self) -> Result<Template, String> {
        Ok(Template { due: self.replies.clone(), ..Template::new(&self.commands)? })
    }

    /// The commands that give a caller the keys that the recorded one had before the decision, with
    /// the same expiry: extending the life of a key is a part of the cost of a decision.
    pub(super) fn restoring(&self) -> Result<Template, String> {
        let mut commands = Vec::new();
        for dumped in &self.after.0 {
            if self.before.0.iter().all(|before| before.key != dumped.key) {
                commands.push(vec![b"DEL".to_vec(), dumped.key.clone()]);
            }
        }
        for Dumped { key, end_ms, dump, .. } in &self.before.0 {
            let name = recorded_caller();
            if dump.windows(name.as_str().len()).any(|bytes| bytes == name.as_str().as_bytes()) {
                return Err(format!(
                    "the value under {} names its caller, so that it cannot be copied",
                    String::from_utf8_lossy(key)
                ));
            }
            let mut restore = vec![b"RESTORE".to_vec(), key.clone(), end_ms.to_string().into()];
            restore.extend([dump.clone(), b"REPLACE".to_vec(), b"ABSTTL".to_vec()]);
            commands.push(restore);
        }
        Template::new(&commands)
    }

    /// Whether the decision changes a key.
    fn writes(&self) -> bool {
        !self.before.says_the_same(&self.after)
    }

    /// Fails unless this caller's keys changed as those of the recorded one did: a replay that the
    /// server decided otherwise measures something else.
    pub(super) fn verify(&self, wire: &mut Connection, caller: usize) -> Fallible {
        let kept = StoredKeys::read(wire, &CallerKey::new(caller))?;
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
