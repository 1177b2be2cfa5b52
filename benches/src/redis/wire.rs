//! A connection that sends many requests at once, and a proxy that records the commands of a client and their replies.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Parser, Value};

/// The name of a command and its arguments.
pub(super) type Command = Vec<Vec<u8>>;

/// The command of these arguments.
pub(super) fn command(words: &[&str]) -> Command {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// The longest wait for the record of the last reply once the client has it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Commands that set up or keep alive a connection and belong to no decision.
const UPKEEP: [&str; 6] = ["AUTH", "CLIENT", "HELLO", "INFO", "PING", "SELECT"];

/// A blocking connection to the server.
pub(super) struct Wire {
    stream: TcpStream,
    parser: Parser,
}

impl Wire {
    /// Connects to a port of this machine.
    pub(super) fn connect(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, parser: Parser::new() })
    }

    /// Sends one command and reads its reply.
    pub(super) fn ask(&mut self, command: &Command) -> Result<Value, Box<dyn Error>> {
        self.stream.write_all(&redis::pack_command(command))?;
        self.reply()
    }

    /// Sends encoded requests in one piece, reads this many replies, and passes on each with its position.
    pub(super) fn exchange(
        &mut self,
        requests: &[u8],
        replies: usize,
        look: impl Fn(usize, &Value) -> Result<(), String>,
    ) -> Result<(), Box<dyn Error>> {
        self.stream.write_all(requests)?;
        for place in 0..replies {
            look(place, &self.reply()?)?;
        }
        Ok(())
    }

    fn reply(&mut self) -> Result<Value, Box<dyn Error>> {
        let reply = self.parser.parse_value(&mut self.stream)?;
        match error_in(&reply) {
            Some(error) => Err(format!("the server replied {error}").into()),
            None => Ok(reply),
        }
    }
}

/// The first error of a reply, also inside the reply of a transaction.
fn error_in(reply: &Value) -> Option<String> {
    match reply {
        Value::ServerError(error) => Some(format!("{error:?}")),
        Value::Array(parts) => parts.iter().find_map(error_in),
        _ => None,
    }
}

/// A command that went through the proxy, and its reply once the server has sent it.
struct Exchanged {
    command: Command,
    reply: OnceLock<Value>,
}

type Log = Mutex<Vec<Arc<Exchanged>>>;

/// A proxy in front of the server, which keeps the commands that clients send through it, and the replies.
pub(super) struct Recorder {
    port: u16,
    log: Arc<Log>,
}

impl Recorder {
    /// Listens on a free port, and forwards everything to this port.
    pub(super) fn start(server_port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let log = Arc::<Log>::default();
        let kept = Arc::clone(&log);
        // The thread ends with the program.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let kept = Arc::clone(&kept);
                thread::spawn(move || {
                    // An error ends the connection, which the client notices.
                    drop(connect(&client, server_port, &kept));
                    drop(client.shutdown(Shutdown::Both));
                });
            }
        });
        Ok(Self { port, log })
    }

    /// The URL of the proxy, for a client of a single server.
    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port of the proxy.
    #[cfg(test)]
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The commands since the last call, in order, with the reply to each.
    pub(super) fn take(&self) -> Result<Vec<(Command, Value)>, Box<dyn Error>> {
        let mut taken = std::mem::take(&mut *lock(&self.log));
        taken.retain(|exchanged| !is_upkeep(&exchanged.command));
        let deadline = Instant::now() + PATIENCE;
        // The client may have a reply a moment before it is recorded.
        let replied = |exchanged: &Arc<Exchanged>| loop {
            if let Some(reply) = exchanged.reply.get() {
                return Ok((exchanged.command.clone(), reply.clone()));
            }
            if Instant::now() > deadline {
                let name = exchanged.command.first().map(|name| String::from_utf8_lossy(name));
                return Err(format!("the server has not replied to {}", name.unwrap_or_default()));
            }
            thread::yield_now();
        };
        Ok(taken.iter().map(replied).collect::<Result<_, _>>()?)
    }
}

fn is_upkeep(command: &Command) -> bool {
    let name = command.first().map(|name| String::from_utf8_lossy(name).to_ascii_uppercase());
    name.is_none_or(|name| UPKEEP.contains(&name.as_str()))
}

fn lock(log: &Log) -> MutexGuard<'_, Vec<Arc<Exchanged>>> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forwards both ways until one side ends. A command is recorded before it is forwarded, so that it precedes its
/// reply.
fn connect(client: &TcpStream, server_port: u16, log: &Log) -> io::Result<()> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, server_port))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let replies = Replies { server: server.try_clone()?, client: client.try_clone()? };
    let (sent, unanswered) = mpsc::channel();
    thread::spawn(move || replies.hand_on(&unanswered));
    let (mut parser, mut requests) = (Parser::new(), client);
    while let Some(command) = parser.parse_value(&mut requests).ok().and_then(words) {
        let request = redis::pack_command(&command);
        let exchanged = Arc::new(Exchanged { command, reply: OnceLock::new() });
        lock(log).push(Arc::clone(&exchanged));
        // Without the other thread there are no replies, which the client notices.
        drop(sent.send(exchanged));
        server.write_all(&request)?;
    }
    server.shutdown(Shutdown::Both)
}

/// The way back: forwards the bytes of the server unchanged.
struct Replies {
    server: TcpStream,
    client: TcpStream,
}

impl Replies {
    /// Keeps each reply with the command that it answers, until one side ends.
    fn hand_on(mut self, unanswered: &mpsc::Receiver<Arc<Exchanged>>) {
        let mut parser = Parser::new();
        while let Ok(reply) = parser.parse_value(&mut self) {
            let Ok(exchanged) = unanswered.recv() else { break };
            // Each is set once.
            drop(exchanged.reply.set(reply));
        }
        drop(self.client.shutdown(Shutdown::Both));
    }
}

impl Read for Replies {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.server.read(buffer)?;
        self.client.write_all(&buffer[..length])?;
        Ok(length)
    }
}

/// The arguments of a request, which is an array of strings.
fn words(request: Value) -> Option<Command> {
    let Value::Array(words) = request else { return None };
    let word = |word| match word {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    };
    words.into_iter().map(word).collect()
}
