//! External connections by the crate `redis`.

use redis::aio::{ConnectionLike, MultiplexedConnection};

use super::{External, Given, IntoConnection};
use crate::connection::node::redis_rs::{self as node, answered, command, executed, reason, reply};
use crate::connection::peer::Peer;
use crate::connection::{Argument, Reply};
use crate::error::RedisError;

/// Names a server of which only the connection is known.
const UNNAMED: &str = "the server of the given connection";

impl IntoConnection for MultiplexedConnection {
    type Connection = External;

    fn into_connection(self) -> Result<External, RedisError> {
        Ok(External::new(Given::Multiplexed(self), UNNAMED))
    }
}

#[cfg(feature = "connection-manager")]
impl IntoConnection for redis::aio::ConnectionManager {
    type Connection = External;

    fn into_connection(self) -> Result<External, RedisError> {
        Ok(External::new(Given::Manager(self), UNNAMED))
    }
}

pub(super) async fn send(
    mut client: impl ConnectionLike,
    peer: &Peer,
    words: &[Argument<'_>],
) -> Result<Reply, RedisError> {
    let value = client.req_packed_command(&command(words)).await;
    reply(peer, value.map_err(|error| failed(peer, &error))?)
}

pub(super) async fn transaction(
    mut client: impl ConnectionLike,
    peer: &Peer,
    commands: &[Vec<Argument<'_>>],
) -> Result<Vec<Reply>, RedisError> {
    let (pipeline, count) = node::transaction(false, commands);
    let values = client.req_packed_commands(&pipeline, 0, count).await;
    executed(peer, values.map_err(|error| failed(peer, &error))?)
}

/// The error of a failed request. The client does not say whether it had sent the request, except when
/// no server listened.
fn failed(peer: &Peer, error: &redis::RedisError) -> RedisError {
    if let Some(error) = answered(peer, error) {
        return error;
    }
    let reason = reason(error);
    if error.is_connection_refusal() { peer.unreachable(reason) } else { peer.lost(reason) }
}
