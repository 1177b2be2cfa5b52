//! [`FaultProxy`]: a network that fails on purpose, between clients and one server.

mod faults;
mod link;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::port::{Port, release};
use crate::{DEADLINE, on_free_ports, wait_until};
use faults::{Faults, Hold};
use link::ProxyLink;

/// A TCP proxy in front of one server of this machine that injects faults on request. It begins
/// without faults, and closes all its connections when it is dropped.
///
/// The proxy parses the servers' protocol, RESP2 or RESP3, and therefore knows which reply belongs
/// to which request, also where requests are pipelined or several tasks share the connection. Where
/// it cannot parse (TLS, replication, subscriptions) it can still hang, cut and refuse.
///
/// Setting a counted fault replaces the earlier setting of its kind; a count of 0 ends it.
#[derive(Debug)]
pub struct FaultProxy {
    port: Port,
    target_port: u16,
    faults: Arc<Faults>,
    /// `None` while the proxy refuses connections.
    listener: Mutex<Option<JoinHandle<()>>>,
}

impl FaultProxy {
    /// Starts a proxy in front of a port of this machine. The port need not be listening yet.
    ///
    /// # Errors
    /// The proxy cannot listen.
    pub fn start(target_port: u16) -> Result<Self, String> {
        on_free_ports(|| {
            let (port, faults) = (Port::claim()?, Arc::default());
            let listener = Mutex::new(Some(listen(port.number(), target_port, &faults)?));
            Ok(Self { port, target_port, faults, listener })
        })
    }

    /// The proxy's port.
    pub const fn port(&self) -> u16 {
        self.port.number()
    }

    /// The proxy's URL, for a client of a single server.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// The number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.faults.state().accepted
    }

    /// The number of replies swallowed so far.
    pub fn swallowed(&self) -> usize {
        self.faults.state().swallow.done
    }

    /// The number of requests that cuts have kept from the server so far.
    pub fn requests_cut(&self) -> usize {
        self.faults.state().cut.done
    }

    /// Swallows the replies to the next `n` requests whose bytes contain the pattern, such as
    /// `EVALSHA`: the server executes each of them, and the proxy reads its reply and then cuts the
    /// client's connection. Later requests on that connection have reached the server, too, and are
    /// not answered either. The empty pattern is in all.
    pub fn swallow_matching(&self, pattern: &str, n: usize) {
        self.faults.state().swallow.set(pattern, n);
    }

    /// Keeps the next `n` requests whose bytes contain the pattern from the server: the proxy cuts
    /// the connection before each of them, once the server has answered the earlier ones on it.
    pub fn cut_matching(&self, pattern: &str, n: usize) {
        self.faults.state().cut.set(pattern, n);
    }

    /// Makes all connections half-open: while the proxy hangs, it accepts connections and keeps
    /// them open, and nothing passes in either direction, not even the end of a connection.
    /// Afterwards, everything that was delayed passes.
    pub fn hang(&self, on: bool) {
        self.faults.change(|state| state.hangs = on);
    }

    /// Holds back each request whose bytes contain the pattern, and what follows it on its
    /// connection, until another hold or [`release`](Self::release). Replies pass. The empty
    /// pattern is in all.
    pub fn hold_requests(&self, pattern: &str) {
        self.faults.change(|state| state.hold = Hold::requests(pattern));
    }

    /// Holds back the replies to requests whose bytes contain the pattern, and those beside them on
    /// their connection, until another hold or [`release`](Self::release). Requests pass.
    pub fn hold_replies(&self, pattern: &str) {
        self.faults.change(|state| state.hold = Hold::replies(pattern));
    }

    /// Ends a hold: what was held back passes.
    pub fn release(&self) {
        self.faults.change(|state| state.hold = Hold::default());
    }

    /// Whether the last hold holds something back.
    pub fn is_holding(&self) -> bool {
        self.faults.state().hold.holds_some
    }

    /// Makes the open connections half-open for good: nothing passes on them any more, as after a
    /// firewall has forgotten them. New connections work.
    pub fn silence(&self) {
        self.faults.change(|state| state.audible_from = state.accepted);
    }

    /// Delays all that passes, each time by a random duration of this range; an empty range ends
    /// it.
    pub fn delay(&self, by: Range<Duration>) {
        self.faults.state().delay = by;
    }

    /// Cuts all open connections.
    pub fn cut_all(&self) {
        self.faults.cut_all();
    }

    /// Sets whether the proxy refuses new connections, like a machine without a listener. Open ones
    /// continue.
    ///
    /// # Panics
    /// Another process has taken the port in the meantime.
    pub fn refuse(&self, on: bool) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if on {
            stop_listening(self.port(), &self.faults, listener.take());
        } else if listener.is_none() {
            let again = || listen(self.port(), self.target_port, &self.faults);
            *listener = Some(wait_until(DEADLINE, again).expect("the port is claimed"));
        }
    }

    /// Ends every fault. Connections that were cut stay cut, and silent ones silent.
    pub fn heal(&self) {
        self.swallow_matching("", 0);
        self.cut_matching("", 0);
        self.hang(false);
        self.release();
        self.delay(Duration::ZERO..Duration::ZERO);
        self.refuse(false);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        let listener = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        stop_listening(self.port.number(), &self.faults, listener);
        self.release();
        self.faults.change(|state| (state.hangs, state.audible_from) = (false, 0));
        self.faults.cut_all();
    }
}

fn listen(port: u16, target: u16, faults: &Arc<Faults>) -> Result<JoinHandle<()>, String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let message = |error| format!("the proxy cannot listen on port {port}: {error}");
    let listener = TcpListener::bind(address).map_err(message)?;
    faults.state().accepts = true;
    let faults = Arc::clone(faults);
    Ok(thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            if !faults.state().accepts {
                break;
            }
            ProxyLink::open(client, target, &faults);
        }
        release(listener);
    }))
}

fn stop_listening(port: u16, faults: &Faults, listener: Option<JoinHandle<()>>) {
    let Some(listener) = listener else { return };
    faults.state().accepts = false;
    // The accepting thread only checks for its end when a connection comes.
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    if TcpStream::connect_timeout(&address, DEADLINE).is_ok() {
        let _ = listener.join();
    }
}
