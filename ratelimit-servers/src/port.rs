//! Ports that no other test takes.

use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
#[cfg(unix)]
use std::net::{Shutdown, TcpStream};
use std::ops::Range;

/// Below the range that systems use for outgoing connections, so that a restarted server finds its
/// port free.
const PORTS: Range<u16> = 10_000..32_000;
const ATTEMPTS: usize = 1_000;

/// A free TCP port, claimed as long as the value lives.
///
/// The claim is a bound UDP socket of the same number. Every test on the machine sees it; it lasts
/// while the port's server is down, and it ends with the process in every case.
#[derive(Debug)]
pub(super) struct Port {
    number: u16,
    _claim: UdpSocket,
}

impl Port {
    pub(super) fn claim() -> Result<Self, String> {
        let mut message = String::new();
        for _ in 0..ATTEMPTS {
            match Self::claim_one(fastrand::u16(PORTS)) {
                Ok(port) => return Ok(port),
                Err(error) => message = error.to_string(),
            }
        }
        Err(format!("none of {ATTEMPTS} ports from {PORTS:?} is free: {message}"))
    }

    fn claim_one(number: u16) -> io::Result<Self> {
        let claim = UdpSocket::bind((Ipv4Addr::LOCALHOST, number))?;
        release(TcpListener::bind((Ipv4Addr::LOCALHOST, number))?);
        Ok(Self { number, _claim: claim })
    }

    pub(super) const fn number(&self) -> u16 {
        self.number
    }
}

/// Stops listening at once. Closing the socket may not be enough: a process that another thread is
/// just starting inherits the listener until it executes its own program.
pub(super) fn release(listener: TcpListener) {
    #[cfg(unix)]
    {
        let stream = TcpStream::from(std::os::fd::OwnedFd::from(listener));
        // Some systems cannot shut down a listener; closing it must do.
        let _ = stream.shutdown(Shutdown::Both);
    }
    #[cfg(not(unix))]
    drop(listener);
}
