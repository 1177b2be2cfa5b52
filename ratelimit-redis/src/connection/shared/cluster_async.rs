//! A connection to a cluster by the crate `redis`.

use std::sync::Arc;
use std::time::Duration;

use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr,
};
use redis::{ErrorKind, Value};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::redis_rs::failed;
use super::{IntoConnection, Shared, within};
use crate::connection::node::redis_rs::{command, executed, reply, transaction};
use crate::connection::peer::Peer;
use crate::connection::route::{Hint, MAX_REDIRECTIONS, Place, hint};
use crate::connection::{Connection, Reply, Word};
use crate::error::RedisError;

/// What a cluster is called of which only the connection is known.
const UNNAMED: &str = "the cluster of the given connection";

/// How long to wait before a server that cannot say yet is asked again.
const PAUSE: Duration = Duration::from_millis(25);

/// A connection to a cluster that was built with `retries(0)`.
///
/// The client itself sends a request again whose answer was lost, up to sixteen times, and cannot be told
/// not to but when it is built. Without retries it does not follow `MOVED` and `ASK` either: the store
/// does that. A slot that is on its way to a server which the client does not know yet is not
/// available until it has arrived.
///
/// ```no_run
/// use ratelimit_redis::{RedisStore, WithoutRetries};
/// use redis::cluster::ClusterClientBuilder;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = ClusterClientBuilder::new(["redis://127.0.0.1:7000"]).retries(0).build()?;
/// let connection = client.get_async_connection().await?;
/// let store = RedisStore::builder().over(WithoutRetries(connection))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct WithoutRetries<C>(pub C);

impl IntoConnection for ClusterConnection {
    type Connection = Shared<Self>;

    fn into_connection(self, deadline: Duration) -> Shared<Self> {
        Shared::new(self, deadline, UNNAMED)
    }
}

impl IntoConnection for WithoutRetries<ClusterConnection> {
    type Connection = Shared<Self>;

    fn into_connection(self, deadline: Duration) -> Shared<Self> {
        Shared::new(self, deadline, UNNAMED)
    }
}

impl Connection for Shared<ClusterConnection> {
    async fn send(&self, key: &str, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        let request = Request::Command(words);
        let asked = once(&self.client, &self.peer, by_slot(key), false, &request);
        within(self.deadline, self.address(), asked).await.map(only)
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        let request = Request::Transaction(commands);
        let asked = once(&self.client, &self.peer, by_slot(key), false, &request);
        within(self.deadline, self.address(), asked).await
    }

    async fn send_to_each(&self, words: &[Word<'_>]) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        to_masters(&self.client, self.deadline, &self.peer, words).await
    }

    fn is_cluster(&self) -> bool {
        true
    }

    fn may_repeat(&self) -> bool {
        true
    }

    fn address(&self) -> &Arc<str> {
        self.peer.address()
    }
}

impl Connection for Shared<WithoutRetries<ClusterConnection>> {
    async fn send(&self, key: &str, words: &[Word<'_>]) -> Result<Reply, RedisError> {
        self.follow(key, &Request::Command(words)).await.map(only)
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Word<'_>>],
    ) -> Result<Vec<Reply>, RedisError> {
        self.follow(key, &Request::Transaction(commands)).await
    }

    async fn send_to_each(&self, words: &[Word<'_>]) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        to_masters(&self.client.0, self.deadline, &self.peer, words).await
    }

    fn is_cluster(&self) -> bool {
        true
    }

    fn address(&self) -> &Arc<str> {
        self.peer.address()
    }
}

impl Shared<WithoutRetries<ClusterConnection>> {
    /// What a request comes to that is sent to where the servers say, until one has taken it.
    async fn follow(&self, key: &str, request: &Request<'_>) -> Result<Vec<Reply>, RedisError> {
        let until = Instant::now() + self.deadline;
        let (mut route, mut asking) = (by_slot(key), false);
        let mut redirections = 0;
        loop {
            let asked = once(&self.client.0, &self.peer, route, asking, request);
            let Ok(answer) = timeout_at(until, asked).await else {
                let address = Arc::clone(self.address());
                return Err(RedisError::TimedOut { address, deadline: self.deadline });
            };
            let error = match answer {
                Ok(replies) => return Ok(replies),
                Err(error) => error,
            };
            // Nothing was executed after any of these.
            (route, asking) = match Turn::after(&error) {
                Turn::Elsewhere(there, asking) if redirections < MAX_REDIRECTIONS => {
                    redirections += 1;
                    (there, asking)
                }
                Turn::Elsewhere(..) | Turn::Later => {
                    let again = Instant::now() + PAUSE;
                    if again >= until {
                        return Err(error);
                    }
                    sleep_until(again).await;
                    (by_slot(key), false)
                }
                Turn::Never => return Err(error),
            };
        }
    }
}

/// What to do after an error.
enum Turn {
    /// Ask there, with `ASKING` before it or not.
    Elsewhere(SingleNodeRoutingInfo, bool),
    /// Ask again in a moment. By then the client may know more: it looks after each of these errors.
    Later,
    /// Give up.
    Never,
}

impl Turn {
    fn after(error: &RedisError) -> Self {
        match hint(error) {
            Hint::Moved(there) => Self::to(&there, false),
            Hint::Ask(there) => Self::to(&there, true),
            Hint::Again | Hint::Elsewhere => Self::Later,
            Hint::Doubt | Hint::Final => Self::Never,
        }
    }

    fn to(there: &Place<'_>, asking: bool) -> Self {
        let host = there.host.trim_start_matches('[').trim_end_matches(']');
        match host {
            // The one that was asked, by another port: the client finds out.
            "" | "?" => Self::Later,
            host => {
                let host = host.to_owned();
                Self::Elsewhere(SingleNodeRoutingInfo::ByAddress { host, port: there.port }, asking)
            }
        }
    }
}

fn by_slot(key: &str) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
}

/// What is asked.
enum Request<'a> {
    Command(&'a [Word<'a>]),
    Transaction(&'a [Vec<Word<'a>>]),
}

/// The answer to a command.
fn only(mut replies: Vec<Reply>) -> Reply {
    replies.pop().unwrap_or(Reply::Nil)
}

/// What the client makes of a request.
async fn once(
    client: &ClusterConnection,
    peer: &Peer,
    route: SingleNodeRoutingInfo,
    asking: bool,
    request: &Request<'_>,
) -> Result<Vec<Reply>, RedisError> {
    let mut client = client.clone();
    let failed = |error: redis::RedisError| match error.kind() {
        ErrorKind::ClusterConnectionNotFound => {
            peer.unreachable("the client has no connection to the server of the key")
        }
        _ => failed(peer, &error),
    };
    match request {
        Request::Command(words) if asking => {
            let mut pipeline = redis::pipe();
            pipeline.cmd("ASKING").add_command(command(words));
            let values = client.route_pipeline(pipeline, 0, 2, route).await;
            let value = values.map_err(failed)?.pop().unwrap_or(Value::Nil);
            Ok(vec![reply(peer, value)?])
        }
        Request::Command(words) => {
            let value = client.route_command(command(words), RoutingInfo::SingleNode(route)).await;
            Ok(vec![reply(peer, value.map_err(failed)?)?])
        }
        Request::Transaction(commands) => {
            let (pipeline, count) = transaction(asking, commands);
            let values = client.route_pipeline(pipeline, 0, count, route).await;
            executed(peer, values.map_err(failed)?)
        }
    }
}

async fn to_masters(
    client: &ClusterConnection,
    deadline: Duration,
    peer: &Peer,
    words: &[Word<'_>],
) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
    let mut client = client.clone();
    let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
    let asked = async {
        let value = client.route_command(command(words), masters).await;
        value.map_err(|error| failed(peer, &error))
    };
    match within(deadline, peer.address(), asked).await {
        Ok(value) => by_server(peer, value),
        Err(error) => vec![(Arc::clone(peer.address()), Err(error))],
    }
}

/// The answers of several servers, apart.
fn by_server(peer: &Peer, value: Value) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
    let Value::Map(answers) = value else {
        return vec![(Arc::clone(peer.address()), reply(peer, value))];
    };
    let answer = |(server, value)| {
        let peer = match server {
            Value::BulkString(name) => peer.at(String::from_utf8_lossy(&name).into()),
            _ => peer.clone(),
        };
        let reply = reply(&peer, value);
        (Arc::clone(peer.address()), reply)
    };
    answers.into_iter().map(answer).collect()
}
