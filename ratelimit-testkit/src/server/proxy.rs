//! [`FaultProxy`]: a network that fails on purpose, between a client and one server.

mod faults;
mod link;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::port::{Port, release};
use super::{DEADLINE, on_free_ports, wait_until};
use faults::Faults;
use link::Link;

/// A TCP proxy in front of one server of this machine, which does what is asked of it to whatever
/// passes. It begins as a faithful one, and ends with all its connections when it is dropped.
///
/// It reads along in the servers' protocol, RESP2 or RESP3, and so it knows which reply belongs to which
/// request, also where requests are pipelined or several tasks share the connection. Where it cannot (TLS,
/// replication, subscriptions) it still delays, hangs, cuts and refuses.
///
/// Of the faults that are counted, each setting replaces the one before of its kind; setting 0 ends it.
#[derive(Debug)]
pub struct FaultProxy {
    port: Port,
    target_port: u16,
    faults: Arc<Faults>,
    /// `None` while it refuses.
    listener: Mutex<Option<JoinHandle<()>>>,
}

impl FaultProxy {
    /// Starts a proxy in front of a port of this machine. Nobody needs to listen there yet.
    ///
    /// # Errors
    /// Why it cannot listen.
    pub fn start(target_port: u16) -> Result<Self, String> {
        on_free_ports(|| {
            let (port, faults) = (Port::claim()?, Arc::default());
            let listener = Mutex::new(Some(listen(port.number(), target_port, &faults)?));
            Ok(Self { port, target_port, faults, listener })
        })
    }

    /// The port that it listens on.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port.number()
    }

    /// Where it listens, for a client of a single server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// How many connections it has accepted so far.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.faults.accepted()
    }

    /// How many connections are open now.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.faults.open()
    }

    /// How many replies it has swallowed so far.
    #[must_use]
    pub fn swallowed(&self) -> usize {
        self.faults.swallowed()
    }

    /// How many requests it has kept from the server so far, by cutting.
    #[must_use]
    pub fn requests_cut(&self) -> usize {
        self.faults.requests_cut()
    }

    /// The next `n` requests are executed, but their replies go nowhere: each is read from the server, and
    /// the client's connection is cut instead. What the client sent on it after that request has reached the
    /// server, too, and is not answered either.
    pub fn swallow_replies(&self, n: usize) {
        self.swallow_matching("", n);
    }

    /// As [`swallow_replies`](Self::swallow_replies), only for requests whose bytes contain the pattern,
    /// such as `EVALSHA`: handshakes and `PING`s pass.
    pub fn swallow_matching(&self, pattern: &str, n: usize) {
        self.faults.swallow(pattern, n);
    }

    /// The next `n` requests do not reach the server: the connection is cut before, once what was asked
    /// earlier on it has been answered.
    pub fn cut_requests(&self, n: usize) {
        self.cut_matching("", n);
    }

    /// As [`cut_requests`](Self::cut_requests), only for requests whose bytes contain the pattern.
    pub fn cut_matching(&self, pattern: &str, n: usize) {
        self.faults.cut(pattern, n);
    }

    /// Hands on every chunk of bytes this much later, in either direction, one after the other: a round trip
    /// takes twice as long.
    pub fn delay(&self, latency: Duration) {
        self.faults.delay(latency);
    }

    /// Half-open: while it hangs, connections are accepted and stay open, and nothing passes in either
    /// direction, not even their end. What was held back passes afterwards.
    pub fn hang(&self, on: bool) {
        self.faults.hang(on);
    }

    /// Cuts all open connections.
    pub fn cut_all(&self) {
        self.faults.cut_all();
    }

    /// Whether new connections are refused, as by a machine where nobody listens. Open ones go on.
    ///
    /// # Panics
    /// If somebody else has taken the port meanwhile.
    pub fn refuse(&self, on: bool) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if on {
            stop_listening(self.port(), &self.faults, listener.take());
        } else if listener.is_none() {
            let again = || listen(self.port(), self.target_port, &self.faults);
            *listener = Some(wait_until(DEADLINE, again).expect("the port is claimed"));
        }
    }

    /// Ends every fault that is set. Connections that were cut stay cut.
    pub fn heal(&self) {
        self.swallow_replies(0);
        self.cut_requests(0);
        self.delay(Duration::ZERO);
        self.hang(false);
        self.refuse(false);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        let listener = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        stop_listening(self.port.number(), &self.faults, listener);
        self.faults.hang(false);
        self.faults.cut_all();
    }
}

fn listen(port: u16, target: u16, faults: &Arc<Faults>) -> Result<JoinHandle<()>, String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let told = |error| format!("the proxy cannot listen on port {port}: {error}");
    let listener = TcpListener::bind(address).map_err(told)?;
    faults.accept(true);
    let faults = Arc::clone(faults);
    Ok(thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            if !faults.accepts() {
                break;
            }
            Link::open(client, target, &faults);
        }
        release(listener);
    }))
}

fn stop_listening(port: u16, faults: &Faults, listener: Option<JoinHandle<()>>) {
    let Some(listener) = listener else { return };
    faults.accept(false);
    // It waits for a connection, and looks up when one comes.
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    if TcpStream::connect_timeout(&address, DEADLINE).is_ok() {
        let _ = listener.join();
    }
}
