//! One connection through a proxy, with one thread per direction.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::faults::{Fate, Faults};
use crate::{DEADLINE, RespValue};

/// The state that both directions of a connection share.
pub(super) struct ProxyLink {
    id: usize,
    faults: Arc<Faults>,
    talk: Mutex<Talk>,
    answered: Condvar,
}

#[derive(Default)]
struct Talk {
    /// The fates of the pending replies, the next one first.
    due: VecDeque<Fate>,
    /// Whether replies have been taken and are on their way to the client.
    handing_on: bool,
    /// Whether the connection no longer alternates requests and replies: everything passes unchanged.
    opaque: bool,
}

/// The result of parsing what was read.
struct Sorted {
    passes: Vec<u8>,
    /// Whether the bytes are replies.
    answers: bool,
    /// Whether to cut the connection once they have passed.
    then_cut: bool,
}

/// Commands after which a connection no longer alternates requests and replies.
const ENDS_THE_TALK: [&str; 6] =
    ["PSYNC", "SYNC", "MONITOR", "SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"];

impl ProxyLink {
    /// Connects the client to the server, and returns at once.
    pub(super) fn open(client: TcpStream, target: u16, faults: &Arc<Faults>) {
        // Without a second handle the connection could not be cut, so it is closed.
        let Ok(handle) = client.try_clone() else { return };
        let (talk, answered) = (Mutex::default(), Condvar::new());
        let id = faults.accepted_one(handle);
        let link = Self { id, faults: Arc::clone(faults), talk, answered };
        thread::spawn(move || {
            // An error ends the connection.
            let _ = link.run(&client, target);
            link.faults.cut_one(id);
        });
    }

    fn run(&self, client: &TcpStream, target: u16) -> std::io::Result<()> {
        // While the proxy hangs, no client learns whether the server is up.
        self.faults.wait_out();
        let server = &TcpStream::connect((Ipv4Addr::LOCALHOST, target))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        if self.faults.connected(self.id, server.try_clone()?) {
            thread::scope(|scope| {
                scope.spawn(|| self.pump(server, client, Self::replies));
                self.pump(client, server, Self::requests);
            });
        }
        Ok(())
    }

    /// Forwards what `sort` makes of the bytes read, until either end closes.
    fn pump(
        &self,
        mut from: &TcpStream,
        mut to: &TcpStream,
        sort: fn(&Self, &mut Vec<u8>) -> Sorted,
    ) {
        let mut read = Vec::new();
        let mut chunk = vec![0; 1 << 16];
        loop {
            let length = from.read(&mut chunk).unwrap_or_default();
            self.faults.wait_to_pass(self.id);
            if length == 0 {
                break;
            }
            read.extend_from_slice(&chunk[..length]);
            let sorted = sort(self, &mut read);
            if to.write_all(&sorted.passes).is_err() {
                break;
            }
            if sorted.answers {
                self.talk().handing_on = false;
                self.answered.notify_all();
            }
            if sorted.then_cut {
                self.wait_until_answered();
                break;
            }
        }
        self.faults.cut_one(self.id);
    }

    /// Takes the requests that may pass.
    fn requests(&self, read: &mut Vec<u8>) -> Sorted {
        let sorted = |passes, then_cut| Sorted { passes, answers: false, then_cut };
        let mut talk = self.talk();
        let mut passes = 0;
        while !talk.opaque {
            let Ok(request) = request(&read[passes..]) else {
                talk.opaque = true;
                break;
            };
            let Some((name, length)) = request else {
                return sorted(read.drain(..passes).collect(), false);
            };
            let fate = self.faults.fate(&read[passes..passes + length]);
            if fate == Fate::Cut {
                return sorted(read.drain(..passes).collect(), true);
            }
            talk.due.push_back(fate);
            talk.opaque = ENDS_THE_TALK.contains(&name.to_ascii_uppercase().as_str());
            passes += length;
        }
        sorted(std::mem::take(read), false)
    }

    /// Takes the replies that may pass.
    fn replies(&self, read: &mut Vec<u8>) -> Sorted {
        let sorted = |passes, then_cut| Sorted { passes, answers: true, then_cut };
        let mut talk = self.talk();
        talk.handing_on = true;
        let mut passes = 0;
        while !talk.opaque {
            let Ok(reply) = RespValue::parse(&read[passes..]) else {
                talk.opaque = true;
                break;
            };
            let Some((_, length)) = reply else {
                return sorted(read.drain(..passes).collect(), false);
            };
            // A push belongs to no request.
            let swallowed = read[passes] != b'>'
                && talk.due.pop_front().is_some_and(|fate| fate == Fate::ReplySwallowed);
            if swallowed {
                // No later request is answered either, so the other direction need not wait.
                talk.due.clear();
                self.faults.state().swallow.done += 1;
                return sorted(read.drain(..passes).collect(), true);
            }
            passes += length;
        }
        sorted(std::mem::take(read), false)
    }

    /// Waits until the client has the replies to all its requests.
    fn wait_until_answered(&self) {
        let waiting = |talk: &mut Talk| (talk.handing_on || !talk.due.is_empty()) && !talk.opaque;
        // A timeout makes no difference: the connection is cut either way.
        drop(self.answered.wait_timeout_while(self.talk(), DEADLINE, waiting));
    }

    fn talk(&self) -> MutexGuard<'_, Talk> {
        self.talk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name and length of the first request; `None` if it is incomplete.
fn request(read: &[u8]) -> Result<Option<(String, usize)>, String> {
    match read.first() {
        None => Ok(None),
        Some(b'*') => {
            let found = RespValue::parse(read)?;
            Ok(found.map(|(words, length)| {
                let name = words.as_array().first().and_then(RespValue::as_text);
                (name.unwrap_or_default().to_owned(), length)
            }))
        }
        Some(first) if first.is_ascii_graphic() => {
            let Some(end) = read.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
            let line = String::from_utf8_lossy(&read[..end]);
            let name = line.split_whitespace().next().unwrap_or_default().to_owned();
            Ok(Some((name, end + 1)))
        }
        Some(_) => Err("no request".into()),
    }
}
