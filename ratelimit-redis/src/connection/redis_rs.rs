//! A connection by the `redis` crate, to a single server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, Value};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::{Connection, Reply, Word};
use crate::error::RedisError;

/// One multiplexed connection to a single server, shared by all who ask and made anew after it broke.
///
/// It is not the client's own connection manager, because a failure must tell whether the command
/// had been sent: only a connection that is made on our side of that line can.
pub struct RedisConnection {
    client: Client,
    address: Arc<str>,
    deadline: Duration,
    current: Mutex<Current>,
}

/// The connection in use, and how many there were before it.
#[derive(Default)]
struct Current {
    connection: Option<MultiplexedConnection>,
    generation: u64,
}

impl RedisConnection {
    /// Connects to the server at a URL, `redis://[user:password@]host[:port][/database]`.
    ///
    /// # Errors
    /// A URL that is not one, a server that cannot be reached within the deadline, or one that lets
    /// nobody in without a password.
    pub async fn open(url: &str, deadline: Duration) -> Result<Self, RedisError> {
        let info = url.into_connection_info().map_err(|error| {
            // The client's message may repeat the URL, and with it a password.
            let reason = error.detail().map_or_else(|| error.category().to_owned(), |_| "not a Redis URL".to_owned());
            RedisError::Config(format!(
                "the store's URL cannot be used ({reason}); write redis://[user:password@]host[:port][/database]"
            ))
        })?;
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let address: Arc<str> = info.addr().to_string().into();
        let client = Client::open(info).map_err(|error| unreachable(&address, &error))?;
        let connection = Self { client, address, deadline, current: Mutex::default() };
        // Without a password a server lets connect, and refuses the first command.
        connection.send(&[Word::Text("PING")]).await?;
        Ok(connection)
    }

    /// The connection in use, or a new one.
    async fn current(&self, until: Instant) -> Result<(MultiplexedConnection, u64), RedisError> {
        let connect = async {
            let mut current = self.current.lock().await;
            if let Some(connection) = &current.connection {
                return Ok((connection.clone(), current.generation));
            }
            // The deadline is ours, and so are the two halves of it.
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(None)
                .set_response_timeout(None);
            let connection =
                self.client.get_multiplexed_async_connection_with_config(&config).await.map_err(
                    |error| match server_error(&self.address, &error) {
                        Some(error) => error,
                        None => unreachable(&self.address, &error),
                    },
                )?;
            current.connection = Some(connection.clone());
            current.generation += 1;
            Ok((connection, current.generation))
        };
        timeout_at(until, connect).await.unwrap_or_else(|_| {
            Err(RedisError::Unreachable {
                address: Arc::clone(&self.address),
                reason: format!("no connection within {:?}", self.deadline),
            })
        })
    }

    /// Forgets a connection that broke, unless somebody has made another one since.
    async fn forget(&self, generation: u64) {
        let mut current = self.current.lock().await;
        if current.generation == generation {
            current.connection = None;
        }
    }
}

impl Connection for RedisConnection {
    async fn send(&self, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        let command = command(words);
        self.sent(async |mut connection| {
            let value = connection.send_packed_command(&command).await?;
            Ok(reply(&self.address, value))
        })
        .await
    }

    async fn transaction(&self, commands: &[Vec<Word<'_>>]) -> Result<Vec<Reply>, RedisError> {
        let mut pipeline = redis::pipe();
        pipeline.atomic();
        for words in commands {
            pipeline.add_command(command(words));
        }
        // Of all the replies only that of EXEC.
        let skipped = commands.len() + 1;
        self.sent(async |mut connection| {
            let mut values = connection.send_packed_commands(&pipeline, skipped, 1).await?;
            Ok(match values.pop().map(|value| reply(&self.address, value)) {
                Some(Ok(Reply::Array(replies))) => Ok(replies),
                Some(Err(error)) => Err(error),
                other => Err(RedisError::Protocol {
                    address: Arc::clone(&self.address),
                    answer: format!("{other:?}"),
                }),
            })
        })
        .await
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}

impl RedisConnection {
    /// What a request on the connection comes to, within the deadline.
    async fn sent<T>(
        &self,
        request: impl AsyncFnOnce(
            MultiplexedConnection,
        ) -> Result<Result<T, RedisError>, redis::RedisError>,
    ) -> Result<T, RedisError> {
        let until = Instant::now() + self.deadline;
        let (connection, generation) = self.current(until).await?;
        let error = match timeout_at(until, request(connection)).await {
            Ok(Ok(answer)) => return answer,
            Ok(Err(error)) => server_error(&self.address, &error).unwrap_or_else(|| {
                RedisError::Lost { address: Arc::clone(&self.address), reason: error.to_string() }
            }),
            Err(_) => {
                RedisError::TimedOut { address: Arc::clone(&self.address), deadline: self.deadline }
            }
        };
        // A connection that was lost or does not answer is of no more use, and a server that has
        // become a replica will not be a master again on this one.
        let usable = matches!(&error, RedisError::Server { code, .. } if code != "READONLY");
        if !usable {
            self.forget(generation).await;
        }
        Err(error)
    }
}

fn command(words: &[Word<'_>]) -> redis::Cmd {
    let mut command = redis::Cmd::new();
    for word in words {
        match word {
            Word::Text(text) => command.arg(*text),
            Word::Bytes(bytes) => command.arg(*bytes),
            Word::Number(number) => command.arg(*number),
        };
    }
    command
}

/// Without the client's own form, in which a password would stand.
impl fmt::Debug for RedisConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConnection")
            .field("address", &self.address)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

fn unreachable(address: &Arc<str>, error: &redis::RedisError) -> RedisError {
    RedisError::Unreachable { address: Arc::clone(address), reason: reason(error) }
}

/// What a connection met, in one line.
fn reason(error: &redis::RedisError) -> String {
    match error.kind() {
        redis::ErrorKind::Parse => "what answers there does not speak the Redis protocol".into(),
        _ => error.to_string(),
    }
}

/// An error that the server itself answered, and so did not execute the command.
fn server_error(address: &Arc<str>, error: &redis::RedisError) -> Option<RedisError> {
    // Of a transaction that was not taken, what the first command met that was at fault.
    if error.code() == Some("EXECABORT")
        && let Some(errors) = error.clone().into_server_errors()
        && let Some((_, first)) = errors.first()
    {
        return server_error(address, &first.clone().into());
    }
    let detail = || error.detail().unwrap_or_default().to_owned();
    let (code, message) = match (error.code(), error.kind()) {
        (Some(code @ ("NOAUTH" | "WRONGPASS")), _) => (code, format!("{} ({LOGIN})", detail())),
        (Some(code), _) => (code, detail()),
        (None, redis::ErrorKind::AuthenticationFailed) => {
            ("WRONGPASS", format!("the user or the password is wrong ({LOGIN})"))
        }
        (None, _) => return None,
    };
    Some(RedisError::Server { address: Arc::clone(address), code: code.to_owned(), message })
}

const LOGIN: &str = "give them in the URL, redis://user:password@host:port";

fn reply(address: &Arc<str>, value: Value) -> Result<Reply, RedisError> {
    Ok(match value {
        Value::Nil => Reply::Nil,
        Value::Int(number) => Reply::Integer(number),
        Value::BulkString(bytes) => Reply::Text(bytes),
        Value::SimpleString(text) => Reply::Text(text.into_bytes()),
        Value::Okay => Reply::Text(b"OK".to_vec()),
        Value::Array(values) => Reply::Array(
            values.into_iter().map(|value| reply(address, value)).collect::<Result<_, _>>()?,
        ),
        // Of RESP3, as RESP2 answers them.
        Value::Double(number) => Reply::Text(number.to_string().into_bytes()),
        Value::Map(pairs) => Reply::Array(
            pairs
                .into_iter()
                .flat_map(|(name, value)| [name, value])
                .map(|value| reply(address, value))
                .collect::<Result<_, _>>()?,
        ),
        Value::ServerError(error) => {
            let error = redis::RedisError::from(error);
            return Err(server_error(address, &error).unwrap_or_else(|| RedisError::Protocol {
                address: Arc::clone(address),
                answer: error.to_string(),
            }));
        }
        other => Reply::Other(format!("{other:?}")),
    })
}
