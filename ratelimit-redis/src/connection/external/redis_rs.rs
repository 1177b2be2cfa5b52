//! External connections to one server by the crate `redis`.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};

use super::{External, IntoConnection};
use crate::connection::node::redis_rs::{answered, command, executed, reason, reply, transaction};
use crate::connection::peer::Peer;
use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// Names a server of which only the connection is known.
pub(super) const UNNAMED: &str = "the server of the given connection";

/// A connection to one server; clones share it.
pub trait OneServer: ConnectionLike + Clone + Send + Sync + 'static {}

impl OneServer for MultiplexedConnection {}
#[cfg(feature = "connection-manager")]
impl OneServer for redis::aio::ConnectionManager {}

impl IntoConnection for MultiplexedConnection {
    type Connection = External<Self>;

    fn into_connection(self, deadline: Duration) -> External<Self> {
        External::new(self, deadline, UNNAMED)
    }
}

#[cfg(feature = "connection-manager")]
impl IntoConnection for redis::aio::ConnectionManager {
    type Connection = External<Self>;

    fn into_connection(self, deadline: Duration) -> External<Self> {
        External::new(self, deadline, UNNAMED)
    }
}

impl<C: OneServer> Connection for External<C> {
    async fn send(
        &self,
        _key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let (mut client, command) = (self.client.clone(), command(words));
        let asked = async {
            let value = client.req_packed_command(&command).await;
            reply(&self.peer, value.map_err(|error| failed(&self.peer, &error))?)
        };
        self.within(deadline, asked).await
    }

    async fn transaction(
        &self,
        _key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let mut client = self.client.clone();
        let (pipeline, count) = transaction(false, commands);
        let asked = async {
            let values = client.req_packed_commands(&pipeline, 0, count).await;
            executed(&self.peer, values.map_err(|error| failed(&self.peer, &error))?)
        };
        self.within(deadline, asked).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        vec![(Arc::clone(self.address()), self.send("", words, deadline).await)]
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        self.peer.address()
    }
}

/// The error of a failed request. The client does not say whether it had sent the request, except when
/// no server listened.
pub(super) fn failed(peer: &Peer, error: &redis::RedisError) -> RedisError {
    if let Some(error) = answered(peer, error) {
        return error;
    }
    let reason = reason(error);
    if error.is_connection_refusal() { peer.unreachable(reason) } else { peer.lost(reason) }
}
