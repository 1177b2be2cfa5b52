//! A minimal client for the servers' protocol, RESP2 and RESP3, for tests without a client crate.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use crate::DEADLINE;

/// A server's reply.
///
/// RESP3 types appear as RESP2 would show them: a map as an array of keys and values, a double as
/// text.
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
    /// Parses the first value of the input: a reply, or a request. Returns the value and its length
    /// in bytes, or `None` if the input is incomplete.
    ///
    /// # Errors
    /// The input is not the servers' protocol.
    pub fn parse(input: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let mut rest = input;
        match take_value(&mut rest) {
            Ok(value) => Ok(Some((value, input.len() - rest.len()))),
            Err(wrong) => wrong.map_or(Ok(None), Err),
        }
    }

    /// A text reply, for comparisons.
    pub fn text(text: &str) -> Self {
        Self::Text(text.as_bytes().to_vec())
    }

    /// The text, if the reply is one and UTF-8.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }

    /// The number, if the reply is one.
    pub const fn as_integer(&self) -> Option<i64> {
        match self {
            Self::Integer(integer) => Some(*integer),
            _ => None,
        }
    }

    /// The elements of an array; empty otherwise.
    pub fn as_array(&self) -> &[Self] {
        match self {
            Self::Array(parts) => parts,
            _ => &[],
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
                let parts: Vec<_> = parts.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", parts.join(", "))
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

/// What is wrong with the input; nothing if it is only incomplete.
type Wrong = Option<String>;

/// Takes the first value off the input.
fn take_value(input: &mut &[u8]) -> Result<RespValue, Wrong> {
    let kind = *input.first().ok_or(None)?;
    // Also of an incomplete line: what is no reply must not be kept until its line ends.
    if !b"+,(-:#_$=!*~>%".contains(&kind) {
        return Err(Some(format!("no reply begins with {:?}", char::from(kind))));
    }
    let length = input.windows(2).position(|two| two == b"\r\n").ok_or(None)?;
    let line = &take(input, length)?[1..];
    let text = String::from_utf8_lossy(line);
    let number = || text.parse::<i64>().map_err(|_| Some(format!("{text:?} is not a number")));
    match kind {
        b'-' => return Ok(RespValue::Error(text.into_owned())),
        b':' => return Ok(RespValue::Integer(number()?)),
        b'#' => return Ok(RespValue::Integer(i64::from(line == b"t"))),
        b'_' => return Ok(RespValue::Nil),
        b'+' | b',' | b'(' => return Ok(RespValue::Text(line.to_vec())),
        _ => {}
    }
    let Ok(length) = usize::try_from(number()?) else { return Ok(RespValue::Nil) };
    let count = if kind == b'%' { 2 * length } else { length };
    Ok(match kind {
        b'!' => RespValue::Error(String::from_utf8_lossy(take(input, length)?).into_owned()),
        b'$' | b'=' => RespValue::Text(take(input, length)?.to_vec()),
        _ => RespValue::Array((0..count).map(|_| take_value(input)).collect::<Result<_, _>>()?),
    })
}

/// Takes so many bytes and the end of their line off the input.
fn take<'a>(input: &mut &'a [u8], length: usize) -> Result<&'a [u8], Wrong> {
    let text = input.get(..length).filter(|text| text.len() + 2 <= input.len()).ok_or(None)?;
    *input = &input[length + 2..];
    Ok(text)
}

/// A blocking connection to a server, for tests that send several commands on one connection, such
/// as `ASKING` and the command after it.
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
            stream.set_read_timeout(Some(DEADLINE))?;
            stream.set_write_timeout(Some(DEADLINE))?;
            Ok(stream)
        };
        let message = |error: std::io::Error| format!("no connection to port {port}: {error}");
        Ok(Self { stream: connect().map_err(message)?, received: Vec::new() })
    }

    /// Sends a command and waits up to 10 seconds for its reply.
    ///
    /// # Errors
    /// The connection broke, or no reply came. An error reply is not an error here but
    /// [`RespValue::Error`].
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
        let mut chunk = [0; 4096];
        loop {
            if let Some((value, length)) = RespValue::parse(&self.received)? {
                self.received.drain(..length);
                return Ok(value);
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err("the connection was closed instead of a reply".into()),
                Ok(read) => self.received.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("no reply within {DEADLINE:?}: {error}")),
            }
        }
    }
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
