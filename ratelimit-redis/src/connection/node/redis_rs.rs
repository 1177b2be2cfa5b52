//! A connection by the crate `redis`.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, IntoConnectionInfo, ProtocolVersion,
    RedisConnectionInfo, Value,
};

use super::{Endpoint, Settings, server_error};
use crate::connection::{Reply, Word};
use crate::error::RedisError;

#[derive(Clone)]
pub(crate) struct Node {
    connection: MultiplexedConnection,
    address: Arc<str>,
}

impl Node {
    pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Self, RedisError> {
        let address = Arc::clone(&endpoint.address);
        let refused = |error: redis::RedisError| match answered(&address, &error) {
            Some(error) => error,
            None => {
                RedisError::Unreachable { address: Arc::clone(&address), reason: reason(&error) }
            }
        };
        let server = ConnectionAddr::Tcp(endpoint.host.clone(), endpoint.port);
        let info = server
            .into_connection_info()
            .map_err(refused)?
            .set_tcp_settings(TcpSettings::default().set_nodelay(true))
            .set_redis_settings(login(&endpoint.settings));
        // The deadline is the caller's.
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let client = redis::Client::open(info).map_err(refused)?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        Ok(Self { connection: connection.map_err(refused)?, address })
    }

    pub(crate) async fn send(&self, asking: bool, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        let mut connection = self.connection.clone();
        if !asking {
            let value = connection.send_packed_command(&command(words)).await;
            return self.reply(value.map_err(|error| self.failed(&error))?);
        }
        let mut pipeline = redis::pipe();
        pipeline.cmd("ASKING").add_command(command(words));
        let values = connection.send_packed_commands(&pipeline, 1, 1).await;
        let value = values.map_err(|error| self.failed(&error))?.pop().unwrap_or(Value::Nil);
        self.reply(value)
    }

    pub(crate) async fn transaction(
        &self,
        asking: bool,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        // The client's own transactions have no place for ASKING in front.
        let mut pipeline = redis::pipe();
        if asking {
            pipeline.cmd("ASKING");
        } else {
            pipeline.atomic();
        }
        if asking {
            pipeline.cmd("MULTI");
        }
        for words in commands {
            pipeline.add_command(command(words));
        }
        if asking {
            pipeline.cmd("EXEC");
        }
        // Of all the replies only that of EXEC.
        let skipped = commands.len() + if asking { 2 } else { 1 };
        let mut connection = self.connection.clone();
        let values = connection.send_packed_commands(&pipeline, skipped, 1).await;
        match values.map_err(|error| self.failed(&error))?.pop().map(|value| self.reply(value)) {
            Some(Ok(Reply::Array(replies))) => Ok(replies),
            Some(Err(error)) => Err(error),
            other => Err(RedisError::Protocol {
                address: Arc::clone(&self.address),
                answer: format!("{other:?}"),
            }),
        }
    }

    fn failed(&self, error: &redis::RedisError) -> RedisError {
        answered(&self.address, error).unwrap_or_else(|| RedisError::Lost {
            address: Arc::clone(&self.address),
            reason: reason(error),
        })
    }

    fn reply(&self, value: Value) -> Result<Reply, RedisError> {
        reply(&self.address, value)
    }
}

fn login(settings: &Settings) -> RedisConnectionInfo {
    let protocol = if settings.resp3 { ProtocolVersion::RESP3 } else { ProtocolVersion::RESP2 };
    let mut login =
        RedisConnectionInfo::default().set_db(settings.database.into()).set_protocol(protocol);
    if let Some(user) = &settings.user {
        login = login.set_username(user);
    }
    if let Some(password) = &settings.password {
        login = login.set_password(password);
    }
    login
}

fn command(words: &[Word<'_>]) -> redis::Cmd {
    let mut command = redis::Cmd::new();
    for word in words {
        match word {
            Word::Text(text) => command.arg(*text),
            Word::Bytes(bytes) => command.arg(*bytes),
            Word::Number(number) => command.arg(*number),
            Word::Integer(number) => command.arg(*number),
        };
    }
    command
}

/// What a connection met, in one line.
fn reason(error: &redis::RedisError) -> String {
    match error.kind() {
        redis::ErrorKind::Parse => "what answers there does not speak the Redis protocol".into(),
        _ => error.to_string(),
    }
}

/// An error that the server itself answered, and so did not execute the command.
fn answered(address: &Arc<str>, error: &redis::RedisError) -> Option<RedisError> {
    // Of a transaction that was not taken, what the first command met that was at fault.
    if error.code() == Some("EXECABORT")
        && let Some(errors) = error.clone().into_server_errors()
        && let Some((_, first)) = errors.first()
    {
        return answered(address, &first.clone().into());
    }
    let detail = error.detail().unwrap_or_default();
    match (error.code(), error.kind()) {
        (Some(code), _) => Some(server_error(address, code, detail)),
        (None, redis::ErrorKind::AuthenticationFailed) => {
            Some(server_error(address, "WRONGPASS", "the user or the password is wrong"))
        }
        (None, _) => None,
    }
}

fn reply(address: &Arc<str>, value: Value) -> Result<Reply, RedisError> {
    let replies = |values: Vec<Value>| {
        values.into_iter().map(|value| reply(address, value)).collect::<Result<_, _>>()
    };
    Ok(match value {
        Value::Nil => Reply::Nil,
        Value::Int(number) => Reply::Integer(number),
        Value::BulkString(bytes) => Reply::Text(bytes),
        Value::SimpleString(text) => Reply::Text(text.into_bytes()),
        Value::Okay => Reply::Text(b"OK".to_vec()),
        Value::Array(values) => Reply::Array(replies(values)?),
        // Of RESP3, as RESP2 answers them.
        Value::Double(number) => Reply::Text(number.to_string().into_bytes()),
        Value::Map(pairs) => {
            Reply::Array(replies(pairs.into_iter().flat_map(|(k, v)| [k, v]).collect())?)
        }
        Value::ServerError(error) => {
            let error = redis::RedisError::from(error);
            return Err(answered(address, &error).unwrap_or_else(|| RedisError::Protocol {
                address: Arc::clone(address),
                answer: error.to_string(),
            }));
        }
        other => Reply::Other(format!("{other:?}")),
    })
}
