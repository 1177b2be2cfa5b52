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
    /// Whether the connection no longer alternates requests and replies: everything passes
    /// unchanged.
    opaque: bool,
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
                scope.spawn(|| self.pump(server, client, true));
                self.pump(client, server, false);
            });
        }
        Ok(())
    }

    /// Forwards replies, or requests, as far as they may pass, until either end closes.
    fn pump(&self, mut from: &TcpStream, mut to: &TcpStream, answers: bool) {
        let mut read = Vec::new();
        let mut chunk = vec![0; 1 << 16];
        loop {
            let length = from.read(&mut chunk).unwrap_or_default();
            self.faults.wait_to_pass(self.id);
            if length == 0 {
                break;
            }
            read.extend_from_slice(&chunk[..length]);
            if !answers {
                self.faults.wait_while_requests_are_held(self.id, &read);
            } else if self.talk().due.contains(&Fate::ReplyHeld) {
                self.faults.wait_while_replies_are_held(self.id);
            }
            let (passes, then_cut) = self.sort(&mut read, answers);
            if to.write_all(&passes).is_err() {
                break;
            }
            if answers {
                self.talk().handing_on = false;
                self.answered.notify_all();
            }
            if then_cut {
                self.wait_until_answered();
                break;
            }
        }
        self.faults.cut_one(self.id);
    }

    /// Takes what may pass, and tells whether to cut the connection once it has passed.
    fn sort(&self, read: &mut Vec<u8>, answers: bool) -> (Vec<u8>, bool) {
        let mut talk = self.talk();
        talk.handing_on |= answers;
        let mut passes = 0;
        while !talk.opaque {
            match RespValue::parse(&read[passes..]) {
                Err(_) => talk.opaque = true,
                Ok(None) => return (read.drain(..passes).collect(), false),
                Ok(Some((message, length))) => {
                    let bytes = &read[passes..passes + length];
                    let is_cut = if answers {
                        self.swallows(&mut talk, bytes)
                    } else {
                        self.cuts(&mut talk, &message, bytes)
                    };
                    if is_cut {
                        return (read.drain(..passes).collect(), true);
                    }
                    passes += length;
                }
            }
        }
        (std::mem::take(read), false)
    }

    /// Whether this request is cut; otherwise its reply is due.
    fn cuts(&self, talk: &mut Talk, request: &RespValue, bytes: &[u8]) -> bool {
        let fate = self.faults.fate(bytes);
        if fate != Fate::Cut {
            let name = request.as_array().first().and_then(RespValue::as_text).unwrap_or_default();
            talk.opaque = ENDS_THE_TALK.contains(&name.to_ascii_uppercase().as_str());
            talk.due.push_back(fate);
        }
        fate == Fate::Cut
    }

    /// Whether this reply is swallowed. A push belongs to no request.
    fn swallows(&self, talk: &mut Talk, bytes: &[u8]) -> bool {
        let swallows = bytes[0] != b'>' && talk.due.pop_front() == Some(Fate::ReplySwallowed);
        if swallows {
            // No later request is answered either, so the other direction need not wait.
            talk.due.clear();
            self.faults.state().swallow.done += 1;
        }
        swallows
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
