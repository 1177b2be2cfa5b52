//! A connection that sends many requests at once, and a proxy that records what a client sends.

use std::error::Error;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use redis::{Parser, Value};

/// The name of a command and its arguments.
pub(super) type Command = Vec<Vec<u8>>;

/// The command of these words.
pub(super) fn command(words: &[&str]) -> Command {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// Commands that keep a connection up and belong to no decision.
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

    /// Sends encoded requests in one piece and reads this many replies.
    pub(super) fn exchange(
        &mut self,
        requests: &[u8],
        replies: usize,
    ) -> Result<(), Box<dyn Error>> {
        self.stream.write_all(requests)?;
        for _ in 0..replies {
            self.reply()?;
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

/// A proxy in front of the server, which keeps the commands that clients send through it.
pub(super) struct Recorder {
    port: u16,
    commands: Arc<Mutex<Vec<Command>>>,
}

impl Recorder {
    /// Listens on a free port, and hands everything on to this port.
    pub(super) fn start(server_port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let commands = Arc::<Mutex<Vec<Command>>>::default();
        let kept = Arc::clone(&commands);
        // The thread ends with the program.
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let kept = Arc::clone(&kept);
                thread::spawn(move || {
                    // An error is the end of a connection, which the client notices.
                    drop(connect(&client, server_port, &kept));
                    drop(client.shutdown(Shutdown::Both));
                });
            }
        });
        Ok(Self { port, commands })
    }

    /// Where it listens, for a client of a single server.
    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port that it listens on.
    #[cfg(test)]
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The commands that were sent since the last call, in their order.
    pub(super) fn take(&self) -> Vec<Command> {
        let mut commands = std::mem::take(&mut *lock(&self.commands));
        commands.retain(|command| !is_upkeep(command));
        commands
    }
}

fn is_upkeep(command: &Command) -> bool {
    let name = command.first().map(|name| String::from_utf8_lossy(name).to_ascii_uppercase());
    name.is_none_or(|name| UPKEEP.contains(&name.as_str()))
}

fn lock(commands: &Mutex<Vec<Command>>) -> MutexGuard<'_, Vec<Command>> {
    commands.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands on both ways until one side ends. A command is kept before it is handed on, so that it is
/// there when its reply is.
fn connect(client: &TcpStream, server_port: u16, kept: &Mutex<Vec<Command>>) -> io::Result<()> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, server_port))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut replies, mut to_client) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || {
        // An error is the end of the connection.
        drop(io::copy(&mut replies, &mut to_client));
        drop(to_client.shutdown(Shutdown::Both));
    });
    let (mut parser, mut requests) = (Parser::new(), client);
    while let Some(command) = parser.parse_value(&mut requests).ok().and_then(words) {
        let request = redis::pack_command(&command);
        lock(kept).push(command);
        server.write_all(&request)?;
    }
    server.shutdown(Shutdown::Both)
}

/// The words of a request, which is an array of strings.
fn words(request: Value) -> Option<Command> {
    let Value::Array(words) = request else { return None };
    let word = |word| match word {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    };
    words.into_iter().map(word).collect()
}
