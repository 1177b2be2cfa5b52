//! Clients of the crate `fred`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fred::clients::{Client, Pool};
use fred::error::{Error, ErrorKind};
use fred::interfaces::ClientLike;
use fred::types::config::Options;

use super::{IntoConnection, within};
use crate::connection::node::fred::{custom, executed, in_one, reason, reply, transaction};
use crate::connection::{Connection, Reply, Word};
use crate::error::RedisError;

/// A client of `fred` that a program shares with a store: see [`IntoConnection`].
#[derive(Clone)]
pub struct SharedFred {
    clients: Clients,
    options: Options,
    deadline: Duration,
    address: Arc<str>,
}

#[derive(Clone)]
enum Clients {
    One(Client),
    Several(Pool),
}

impl IntoConnection for Client {
    type Connection = SharedFred;

    fn into_connection(self, deadline: Duration) -> SharedFred {
        let address = address(&self);
        SharedFred::new(Clients::One(self), deadline, address)
    }
}

impl IntoConnection for Pool {
    type Connection = SharedFred;

    fn into_connection(self, deadline: Duration) -> SharedFred {
        let address = address(self.next());
        SharedFred::new(Clients::Several(self), deadline, address)
    }
}

/// The servers that a client was told of.
fn address(client: &Client) -> Arc<str> {
    let hosts = client.client_config().server.hosts();
    hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",").into()
}

impl SharedFred {
    fn new(clients: Clients, deadline: Duration, address: Arc<str>) -> Self {
        let options = Options {
            // Whatever the client was built with.
            max_attempts: Some(1),
            // One that is not connected says so, instead of sending it whenever it is again.
            fail_fast: true,
            // A moment earlier than ours, for the client not to send what has waited until then.
            timeout: Some(deadline.saturating_sub(Duration::from_millis(1))),
            ..Options::default()
        };
        Self { clients, options, deadline, address }
    }

    fn client(&self) -> &Client {
        match &self.clients {
            Clients::One(client) => client,
            Clients::Several(pool) => pool.next_connected(),
        }
    }

    fn failed(&self, error: &Error) -> RedisError {
        let (address, deadline) = (Arc::clone(&self.address), self.deadline);
        match error.kind() {
            ErrorKind::Timeout => RedisError::TimedOut { address, deadline },
            // Not sent: the client is not connected, or takes no more.
            ErrorKind::Canceled | ErrorKind::Backpressure => {
                let reason = "the client is not connected".into();
                RedisError::Unreachable { address, reason }
            }
            _ => RedisError::Lost { address, reason: reason(error) },
        }
    }
}

impl Connection for SharedFred {
    async fn send(&self, _key: &str, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        let (name, arguments) = custom(words);
        let client = self.client().with_options(&self.options);
        let asked = async {
            let frame = client.custom_raw(name, arguments).await;
            reply(&self.address, frame.map_err(|error| self.failed(&error))?)
        };
        within(self.deadline, &self.address, asked).await
    }

    async fn transaction(
        &self,
        _key: &str,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        let commands = transaction(false, commands);
        let pipeline = self.client().pipeline().with_options(&self.options);
        let asked = async {
            let answers = in_one(pipeline, commands).await;
            executed(&self.address, answers.map_err(|error| self.failed(&error))?)
        };
        within(self.deadline, &self.address, asked).await
    }

    async fn send_to_each(&self, words: &[Word<'_>]) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        vec![(Arc::clone(&self.address), self.send("", words).await)]
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}

impl fmt::Debug for SharedFred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedFred")
            .field("address", &self.address)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
