//! External connections by the crate `fred`.

use std::time::Duration;

use fred::clients::{Client, Pool};
use fred::error::{Error, ErrorKind};
use fred::interfaces::ClientLike;
use fred::types::config::Options;

use super::{External, Given, IntoConnection};
use crate::connection::node::fred::{self as node, reason};
use crate::connection::peer::Peer;
use crate::connection::reply::Reply;
use crate::connection::request::Commands;
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};

impl IntoConnection for Client {
    type Connection = External;

    fn into_connection(self) -> Result<External> {
        let address = address(&self)?;
        Ok(External::new(Given::Fred(self), &address))
    }
}

impl IntoConnection for Pool {
    type Connection = External;

    fn into_connection(self) -> Result<External> {
        let address = address(self.next())?;
        Ok(External::new(Given::Pool(self), &address))
    }
}

/// The servers in a client's configuration, which are no cluster.
fn address(client: &Client) -> Result<String> {
    if client.is_clustered() {
        return Err(RedisError::Config(
            "a client of a cluster sends a request again whose reply was lost, which would charge it twice; give a \
             URL instead, redis-cluster://host:port"
                .into(),
        ));
    }
    let hosts = client.client_config().server.hosts();
    let named = hosts.iter().map(|server| format!("{}:{}", server.host, server.port));
    Ok(named.collect::<Vec<_>>().join(","))
}

fn options(deadline: Deadline) -> Options {
    Options {
        // Whatever the client's own settings.
        max_attempts: Some(1),
        // An unconnected client fails at once instead of sending the request after it reconnects.
        fail_fast: true,
        // Slightly before our deadline, so the client does not send a request that waited until
        // then.
        timeout: Some(deadline.remaining().saturating_sub(Duration::from_millis(1))),
        ..Options::default()
    }
}

fn failed(peer: &Peer, error: &Error, deadline: Deadline) -> RedisError {
    match error.kind() {
        ErrorKind::Timeout => peer.timed_out(deadline),
        // Not sent: the client is not connected, or its queue is full.
        ErrorKind::Canceled | ErrorKind::Backpressure => {
            peer.unreachable("the client is not connected")
        }
        _ => peer.lost(reason(error)),
    }
}

pub(super) async fn ask(
    client: &Client,
    peer: &Peer,
    commands: Commands<'_>,
    deadline: Deadline,
) -> Result<Reply> {
    let options = options(deadline);
    let pipeline = || client.pipeline().with_options(&options);
    let one = client.with_options(&options);
    let answer = node::ask(&one, pipeline, peer, false, commands).await;
    answer.unwrap_or_else(|error| Err(failed(peer, &error, deadline)))
}
