//! A proxy that records the commands of a client and their replies.

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Parser, Value};

use crate::measure::Fallible;

use super::relay::{each_chunk, relay};

/// The name of a command and its arguments.
pub(super) type RecordedCommand = Vec<Vec<u8>>;

/// The command of these arguments.
pub(super) fn command(words: &[&str]) -> RecordedCommand {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// The longest wait for the record of the last reply once the client has it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Commands that set up or keep alive a connection and belong to no decision.
const UPKEEP: [&str; 6] = ["AUTH", "CLIENT", "HELLO", "INFO", "PING", "SELECT"];

/// What a client and the server have sent on a connection since it was looked at last.
#[derive(Default)]
struct SentBytes {
    requests: Mutex<Vec<u8>>,
    replies: Mutex<Vec<u8>>,
}

/// A proxy in front of the server, which keeps what clients send through it, and the replies.
pub(super) struct RecordingProxy {
    port: u16,
    connections: Arc<Mutex<Vec<Arc<SentBytes>>>>,
}

impl RecordingProxy {
    /// Listens on a free port, and forwards everything to this port.
    pub(super) fn start(server_port: u16) -> io::Result<Self> {
        let connections = Arc::<Mutex<Vec<_>>>::default();
        let kept = Arc::clone(&connections);
        let port = relay(server_port, move || {
            let sent = Arc::<SentBytes>::default();
            lock(&kept).push(Arc::clone(&sent));
            let of_replies = Arc::clone(&sent);
            [
                Box::new(move |from, to| copy(from, to, &sent.requests)),
                Box::new(move |from, to| copy(from, to, &of_replies.replies)),
            ]
        })?;
        Ok(Self { port, connections })
    }

    /// The URL of the proxy, for a client of a single server.
    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The commands since the last call, in the order of each connection, with the reply to each.
    pub(super) fn take(&self) -> Fallible<Vec<(RecordedCommand, Value)>> {
        let deadline = Instant::now() + PATIENCE;
        let mut taken = Vec::new();
        for sent in lock(&self.connections).iter() {
            let commands = parse_values(&std::mem::take(&mut *lock(&sent.requests)));
            let commands: Vec<_> = commands.into_iter().filter_map(words).collect();
            // The client may have a reply a moment before it is recorded.
            while parse_values(&lock(&sent.replies)).len() < commands.len() {
                if Instant::now() > deadline {
                    return Err("the server has not replied to a recorded command".into());
                }
                thread::yield_now();
            }
            let replies = parse_values(&std::mem::take(&mut *lock(&sent.replies)));
            taken.extend(commands.into_iter().zip(replies));
        }
        taken.retain(|(command, _)| !is_upkeep(command));
        Ok(taken)
    }
}

fn lock<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps bytes before it forwards them, so that a command is kept before its reply.
fn copy(from: TcpStream, mut to: TcpStream, kept: &Mutex<Vec<u8>>) {
    each_chunk(from, |bytes| {
        lock(kept).extend(bytes);
        to.write_all(bytes).is_ok()
    });
    drop(to.shutdown(Shutdown::Both));
}

/// The values that are there in full.
fn parse_values(mut bytes: &[u8]) -> Vec<Value> {
    let mut parser = Parser::new();
    std::iter::from_fn(|| parser.parse_value(&mut bytes).ok()).collect()
}

fn is_upkeep(command: &RecordedCommand) -> bool {
    let name = command.first().map(|name| String::from_utf8_lossy(name).to_ascii_uppercase());
    name.is_none_or(|name| UPKEEP.contains(&name.as_str()))
}

/// The arguments of a request, which is an array of strings.
fn words(request: Value) -> Option<RecordedCommand> {
    let Value::Array(words) = request else { return None };
    let word = |word| match word {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    };
    words.into_iter().map(word).collect()
}
