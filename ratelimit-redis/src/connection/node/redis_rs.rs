//! One connection by the crate `redis`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo, Value};
use tokio::io::AsyncWriteExt;
use tokio_util::task::AbortOnDropHandle;

use super::stream::open;
use crate::connection::endpoint::{Endpoint, Settings};
use crate::connection::peer::Peer;
use crate::connection::reply::Reply;
use crate::connection::request::{Argument, Commands};
use crate::error::{RedisError, Result};

/// How many requests the client takes at once: more than any program sends.
const BUFFER: usize = 1 << 24;

pub(crate) struct Node {
    connection: MultiplexedConnection,
    /// The task that reads and writes. It ends with the connection or with the node.
    driver: AbortOnDropHandle<()>,
    peer: Peer,
}

impl Node {
    /// Connects and logs in. The client opens no stream: the task that drives it is ours, and once
    /// it has ended, nothing more can be sent. Nor does the client log in, since it would quote the
    /// server's error, which may quote the password.
    pub(crate) async fn connect(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Self> {
        let stream = open(endpoint, address).await;
        let mut stream = stream.map_err(|error| endpoint.not_connected(&error))?;
        let login = login(&endpoint.settings);
        // A server at its connection limit has said so before it is asked, and does not read.
        let written = stream.write_all(&login.get_packed_pipeline()).await;
        #[allow(clippy::default_trait_access, reason = "its type is of the crate combine")]
        let mut decoder = Default::default();
        for place in 1..=login.len() {
            let answer = redis::parse_redis_value_async(&mut decoder, &mut stream).await;
            let error = match answer {
                // Of the last command, only the existence of an answer matters.
                Ok(Value::ServerError(error)) if place < login.len() && !wants_no_login(&error) => {
                    error.into()
                }
                Ok(_) => continue,
                Err(error) => error,
            };
            return Err(refused(endpoint, &error));
        }
        written.map_err(|error| endpoint.not_connected(&error))?;
        // The caller enforces the deadline. A full buffer would give its next place to a future
        // that may no longer be polled.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFER);
        let nothing = RedisConnectionInfo::default().set_skip_set_lib_name();
        let connected = MultiplexedConnection::new_with_config(&nothing, stream, config).await;
        let (connection, driver) = connected.map_err(|error| refused(endpoint, &error))?;
        let driver = AbortOnDropHandle::new(tokio::spawn(driver));
        Ok(Self { connection, driver, peer: endpoint.peer.clone() })
    }

    pub(crate) async fn send(&self, asking: bool, commands: Commands<'_>) -> Result<Reply> {
        if self.driver.is_finished() {
            return Err(self.peer.unreachable("the connection has ended"));
        }
        let mut connection = self.connection.clone();
        if let (false, Commands::One(words)) = (asking, commands) {
            let value = connection.send_packed_command(&command(words)).await;
            return reply(&self.peer, value.map_err(|error| self.failed(&error))?);
        }
        // No other request runs in between.
        let pipeline = pipeline(asking, commands);
        let values = connection.send_packed_commands(&pipeline, 0, pipeline.len()).await;
        executed(&self.peer, values.map_err(|error| self.failed(&error))?)
    }

    fn failed(&self, error: &redis::RedisError) -> RedisError {
        answered(&self.peer, error).unwrap_or_else(|| self.peer.lost(reason(error)))
    }
}

/// The commands of the login. The last one is any that every server answers: a server that rejects
/// our certificate says so only after a request.
fn login(settings: &Settings) -> redis::Pipeline {
    let mut login = redis::pipe();
    let (user, password) = (settings.user.as_deref(), settings.password.as_deref());
    if settings.resp3 {
        login.cmd("HELLO").arg(3);
        if let Some(password) = password {
            login.arg("AUTH").arg(user.unwrap_or("default")).arg(password);
        }
    } else if let Some(password) = password {
        login.cmd("AUTH").arg(user).arg(password);
    }
    if settings.database != 0 {
        login.cmd("SELECT").arg(settings.database);
    }
    login.cmd("PING");
    login
}

/// Whether the server refused a password only because it asks for none. With a user's name before
/// the password, as in RESP3 and by the client fred, a server says nothing about that.
fn wants_no_login(error: &redis::ServerError) -> bool {
    let said = error.details().unwrap_or_default();
    said.contains("without any password configured") || said.contains("no password is set")
}

/// Commands, each with a reply. The client's own transactions cannot send ASKING first.
pub(in crate::connection) fn pipeline(asking: bool, commands: Commands<'_>) -> redis::Pipeline {
    let mut pipeline = redis::pipe();
    for words in commands.each(asking) {
        pipeline.add_command(command(words));
    }
    pipeline
}

/// The last of these replies. If it is an error, the first error of them: that of the command at
/// fault. An error inside of it is of a command that failed while the others were executed.
pub(in crate::connection) fn executed(peer: &Peer, mut values: Vec<Value>) -> Result<Reply> {
    let executed = values.pop().unwrap_or(Value::Nil);
    let is_error = |value: &Value| matches!(value, Value::ServerError(_));
    if !is_error(&executed) {
        return reply(peer, executed).map_err(RedisError::in_part);
    }
    reply(peer, values.into_iter().find(is_error).unwrap_or(executed))
}

pub(in crate::connection) fn command(words: &[Argument<'_>]) -> redis::Cmd {
    let bytes = words.iter().map(Argument::most_bytes).sum();
    let mut command = redis::Cmd::with_capacity(words.len(), bytes);
    for word in words {
        match word {
            Argument::Text(text) => command.arg(*text),
            Argument::Bytes(bytes) => command.arg(*bytes),
            Argument::Number(number) => command.arg(*number),
        };
    }
    command
}

/// The error when a server, or a device before it, refuses the login.
fn refused(endpoint: &Endpoint, error: &redis::RedisError) -> RedisError {
    if let Some(code) = error.code() {
        let detail = error.detail().unwrap_or_default();
        return endpoint.refused_login(code, detail);
    }
    match io_error(error) {
        Some(cause) => endpoint.not_connected(cause),
        None => endpoint.broken_off(&reason(error)),
    }
}

/// The error of the system or of TLS.
fn io_error(error: &redis::RedisError) -> Option<&io::Error> {
    type Shared = Arc<dyn std::error::Error + Send + Sync>;
    std::error::Error::source(error)?.downcast_ref::<Shared>()?.downcast_ref()
}

/// Why a connection failed, in one line. Passes on only the system's own words: the client's text
/// may quote the server.
pub(in crate::connection) fn reason(error: &redis::RedisError) -> String {
    match error.kind() {
        redis::ErrorKind::Parse => "what answers there does not speak the Redis protocol".into(),
        redis::ErrorKind::Io => error.to_string(),
        _ => format!("the connection has ended ({})", error.category()),
    }
}

/// An error reply of the server, which did not execute the command.
pub(in crate::connection) fn answered(
    peer: &Peer,
    error: &redis::RedisError,
) -> Option<RedisError> {
    let detail = error.detail().unwrap_or_default();
    match (error.code(), error.kind()) {
        (Some(code), _) => Some(peer.error(code, detail)),
        // An external client, which logged in itself.
        (None, redis::ErrorKind::AuthenticationFailed) => {
            Some(peer.error("WRONGPASS", "the user or the password is wrong"))
        }
        (None, _) => None,
    }
}

pub(in crate::connection) fn reply(peer: &Peer, value: Value) -> Result<Reply> {
    let replies = |values: Vec<Value>| {
        values.into_iter().map(|value| reply(peer, value)).collect::<Result<_, _>>()
    };
    Ok(match value {
        Value::Nil => Reply::Nil,
        Value::Int(number) => Reply::Integer(number),
        Value::BulkString(bytes) => Reply::Text(bytes),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => {
            Reply::Text(text.into_bytes())
        }
        Value::Okay => Reply::Text(b"OK".to_vec()),
        Value::Array(values) | Value::Set(values) => Reply::Array(replies(values)?),
        // RESP3 types, as RESP2 represents them.
        Value::Boolean(yes) => Reply::Integer(yes.into()),
        Value::Double(number) => Reply::Text(number.to_string().into_bytes()),
        Value::Map(pairs) => {
            Reply::Array(replies(pairs.into_iter().flat_map(|(k, v)| [k, v]).collect())?)
        }
        Value::ServerError(error) => {
            let error = redis::RedisError::from(error);
            return Err(answered(peer, &error).unwrap_or_else(|| peer.error("ERR", "")));
        }
        Value::Push { .. } => Reply::Other("a push".into()),
        _ => Reply::Other("a reply of another kind".into()),
    })
}
