//! External connections by the crate `redis`.

use redis::aio::{ConnectionLike, MultiplexedConnection};

use super::{External, Given, IntoConnection};
use crate::connection::node::redis_rs::{answered, command, executed, pipeline, reason, reply};
use crate::connection::peer::Peer;
use crate::connection::reply::Reply;
use crate::connection::request::Commands;
use crate::error::{RedisError, Result};

/// Names a server of which only the connection is known.
const UNNAMED: &str = "the server of the given connection";

impl IntoConnection for MultiplexedConnection {
    type Connection = External;

    fn into_connection(self) -> Result<External> {
        Ok(External::new(Given::Multiplexed(self), UNNAMED))
    }
}

#[cfg(feature = "connection-manager")]
impl IntoConnection for redis::aio::ConnectionManager {
    type Connection = External;

    fn into_connection(self) -> Result<External> {
        Ok(External::new(Given::Manager(self), UNNAMED))
    }
}

pub(super) async fn ask(
    mut client: impl ConnectionLike,
    peer: &Peer,
    commands: Commands<'_>,
) -> Result<Reply> {
    let answer = match commands {
        Commands::One(words) => {
            let value = client.req_packed_command(&command(words)).await;
            value.map(|value| reply(peer, value))
        }
        Commands::Transaction(_) => {
            let pipeline = pipeline(false, commands);
            let values = client.req_packed_commands(&pipeline, 0, pipeline.len()).await;
            values.map(|values| executed(peer, values))
        }
    };
    answer.unwrap_or_else(|error| Err(failed(peer, &error)))
}

/// The error of a failed request. The client does not say whether it had sent the request, except
/// when no server listened.
fn failed(peer: &Peer, error: &redis::RedisError) -> RedisError {
    if let Some(error) = answered(peer, error) {
        return error;
    }
    let reason = reason(error);
    if error.is_connection_refusal() { peer.unreachable(reason) } else { peer.lost(reason) }
}
