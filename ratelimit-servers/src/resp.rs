//! A minimal client for the servers' protocol, RESP2 and RESP3, for tests without a client crate.

use std::fmt;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::DEADLINE;

/// A server's reply.
///
/// RESP3 types appear as RESP2 would show them: a map as an array of keys and values, a double as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RespValue {
    /// A null reply: an absent key.
    Nil,
    /// An integer; 1 and 0 stand for true and false.
    Integer(i64),
    /// A status such as `OK`, or a string. Usually, but not necessarily, UTF-8.
    Text(Vec<u8>),
    /// Several replies.
    Array(Vec<RespValue>),
    /// An error that begins with its code, such as `MOVED 12182 127.0.0.1:7002`.
    Error(String),
}

impl RespValue {
    /// Parses the first value of the input: a reply, or a request. Returns the value and its length in bytes, or `None` if the
    /// input is incomplete.
    ///
    /// # Errors
    /// The input is not the servers' protocol.
    pub fn parse(input: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let mut cursor = Cursor { input, at: 0 };
        let value = cursor.value()?;
        Ok(value.map(|value| (value, cursor.at)))
    }

    /// A text reply, for comparisons.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self::Text(text.as_bytes().to_vec())
    }

    /// The text, if the reply is one and UTF-8.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }

    /// The number, if the reply is one.
    #[must_use]
    pub const fn as_integer(&self) -> Option<i64> {
        match self {
            Self::Integer(integer) => Some(*integer),
            _ => None,
        }
    }

    /// The elements of an array; empty otherwise.
    #[must_use]
    pub fn as_array(&self) -> &[Self] {
        match self {
            Self::Array(parts) => parts,
            _ => &[],
        }
    }

    /// The text of an error, if the reply is one.
    #[must_use]
    pub fn as_error(&self) -> Option<&str> {
        match self {
            Self::Error(message) => Some(message),
            _ => None,
        }
    }

    /// The reply itself, unless it is an error.
    ///
    /// # Errors
    /// The text of the error.
    pub fn ok(self) -> Result<Self, String> {
        match self {
            Self::Error(message) => Err(message),
            value => Ok(value),
        }
    }
}

impl fmt::Display for RespValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("(nil)"),
            Self::Integer(integer) => write!(f, "{integer}"),
            Self::Text(text) => f.write_str(&String::from_utf8_lossy(text)),
            Self::Array(parts) => {
                f.write_str("[")?;
                for (at, part) in parts.iter().enumerate() {
                    write!(f, "{}{part}", if at == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Self::Error(message) => write!(f, "error: {message}"),
        }
    }
}

/// Encodes a request as a client sends it.
pub(super) fn encode(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        let word = word.as_ref();
        request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        request.extend_from_slice(word);
        request.extend_from_slice(b"\r\n");
    }
    request
}

/// A position in the input. Its methods return `None` at a premature end.
struct Cursor<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn line(&mut self) -> Option<&'a [u8]> {
        let rest = &self.input[self.at..];
        let length = rest.windows(2).position(|two| two == b"\r\n")?;
        self.at += length + 2;
        Some(&rest[..length])
    }

    fn value(&mut self) -> Result<Option<RespValue>, String> {
        // Also of an incomplete line: what is no reply must not be kept until its line ends.
        let Some(kind) = self.input.get(self.at) else { return Ok(None) };
        if !b"+,(-:#_$=!*~>%\r".contains(kind) {
            return Err(format!("no reply begins with {:?}", char::from(*kind)));
        }
        let Some(line) = self.line() else { return Ok(None) };
        let Some((kind, rest)) = line.split_first() else { return Err("an empty line".into()) };
        let text = String::from_utf8_lossy(rest);
        Ok(Some(match kind {
            b'+' | b',' | b'(' => RespValue::Text(rest.to_vec()),
            b'-' => RespValue::Error(text.into_owned()),
            b':' => RespValue::Integer(number(&text)?),
            b'#' => RespValue::Integer(i64::from(rest == b"t")),
            b'_' => RespValue::Nil,
            b'$' | b'=' | b'!' => {
                let Ok(length) = usize::try_from(number(&text)?) else {
                    return Ok(Some(RespValue::Nil));
                };
                let Some(text) = self.bulk(length) else { return Ok(None) };
                match kind {
                    b'!' => RespValue::Error(String::from_utf8_lossy(text).into_owned()),
                    _ => RespValue::Text(text.to_vec()),
                }
            }
            b'*' | b'~' | b'>' => return self.parts(number(&text)?),
            b'%' => return self.parts(number(&text)? * 2),
            _ => return Err(format!("no reply begins with {:?}", String::from_utf8_lossy(line))),
        }))
    }

    /// The next `length` bytes.
    fn bulk(&mut self, length: usize) -> Option<&'a [u8]> {
        let text = self.input.get(self.at..self.at + length)?;
        self.input.get(self.at + length + 1)?;
        self.at += length + 2;
        Some(text)
    }

    fn parts(&mut self, count: i64) -> Result<Option<RespValue>, String> {
        if count < 0 {
            return Ok(Some(RespValue::Nil));
        }
        let mut parts = Vec::new();
        for _ in 0..count {
            let Some(part) = self.value()? else { return Ok(None) };
            parts.push(part);
        }
        Ok(Some(RespValue::Array(parts)))
    }
}

fn number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a number"))
}

/// A blocking connection to a server, for tests that send several commands on one connection, such as `ASKING`
/// and the command after it.
#[derive(Debug)]
pub struct RespClient {
    stream: TcpStream,
    received: Vec<u8>,
}

impl RespClient {
    /// Connects to a port of this machine.
    ///
    /// # Errors
    /// The port is not listening.
    pub fn connect(port: u16) -> Result<Self, String> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let connect = || {
            let stream = TcpStream::connect_timeout(&address, DEADLINE)?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(DEADLINE))?;
            Ok(stream)
        };
        let message = |error: std::io::Error| format!("no connection to port {port}: {error}");
        Ok(Self { stream: connect().map_err(message)?, received: Vec::new() })
    }

    /// Sends a command and waits up to 10 seconds for its reply.
    ///
    /// # Errors
    /// The connection broke, or no reply came. An error reply is not an error here but [`RespValue::Error`].
    pub fn command(&mut self, words: &[impl AsRef<[u8]>]) -> Result<RespValue, String> {
        self.send(words)?;
        let name = words.first().map_or(&b""[..], AsRef::as_ref);
        self.receive().map_err(|error| format!("{}: {error}", String::from_utf8_lossy(name)))
    }

    /// Sends a command; [`receive`](Self::receive) reads its reply later.
    ///
    /// # Errors
    /// The connection broke.
    pub fn send(&mut self, words: &[impl AsRef<[u8]>]) -> Result<(), String> {
        self.stream.write_all(&encode(words)).map_err(|error| format!("not sent: {error}"))
    }

    /// Waits up to 10 seconds for the next reply.
    ///
    /// # Errors
    /// The connection broke, or no reply came.
    pub fn receive(&mut self) -> Result<RespValue, String> {
        self.receive_within(DEADLINE)
    }

    /// Waits up to `limit` for the next reply.
    ///
    /// # Errors
    /// The connection broke, or no reply came.
    pub fn receive_within(&mut self, limit: Duration) -> Result<RespValue, String> {
        let deadline = Instant::now() + limit;
        let mut chunk = [0; 4096];
        loop {
            if let Some((value, length)) = RespValue::parse(&self.received)? {
                self.received.drain(..length);
                return Ok(value);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("no reply within {limit:?}"));
            }
            let timed = self.stream.set_read_timeout(Some(left));
            match timed.and_then(|()| self.stream.read(&mut chunk)) {
                Ok(0) => return Err("the connection was closed instead of a reply".into()),
                Ok(read) => self.received.extend_from_slice(&chunk[..read]),
                Err(error) if timed_out(&error) => {}
                Err(error) => return Err(format!("no reply: {error}")),
            }
        }
    }
}

fn timed_out(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_both_protocols_is_read_and_never_too_early() {
        let parts = |parts: &[RespValue]| RespValue::Array(parts.to_vec());
        let (one, text) = (RespValue::Integer(1), RespValue::text("ab"));
        let nested = parts(&[one.clone(), parts(std::slice::from_ref(&text))]);
        for (input, value) in [
            ("+ab\r\n", text.clone()),
            ("$2\r\nab\r\n", text.clone()),
            ("$-1\r\n", RespValue::Nil),
            ("*-1\r\n", RespValue::Nil),
            ("_\r\n", RespValue::Nil),
            (":1\r\n", one.clone()),
            ("#t\r\n", one.clone()),
            (",1.5\r\n", RespValue::text("1.5")),
            ("=2\r\nab\r\n", text.clone()),
            ("-MOVED 1 a:2\r\n", RespValue::Error("MOVED 1 a:2".into())),
            ("!2\r\nab\r\n", RespValue::Error("ab".into())),
            ("*2\r\n:1\r\n*1\r\n+ab\r\n", nested),
            ("%1\r\n+ab\r\n:1\r\n", parts(&[text.clone(), one])),
            (">1\r\n+ab\r\n", parts(&[text])),
        ] {
            for cut in 0..input.len() {
                assert_eq!(
                    RespValue::parse(&input.as_bytes()[..cut]),
                    Ok(None),
                    "{input:?} cut at {cut}"
                );
            }
            let followed = format!("{input}+more\r\n");
            assert_eq!(
                RespValue::parse(followed.as_bytes()),
                Ok(Some((value, input.len()))),
                "{input:?}"
            );
        }
        assert!(RespValue::parse(b"\x16\x03\x01\r\n").is_err());
    }
}
