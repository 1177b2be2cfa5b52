//! External connections to a cluster by the crate `redis`.

use std::sync::Arc;
use std::time::Duration;

use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, Route as NodeRoute, RoutingInfo, SingleNodeRoutingInfo, SlotAddr,
};
use redis::{ErrorKind, Value};

use super::redis_rs::failed;
use super::{External, IntoConnection};
use crate::connection::follow::{Next, Route, TryAgain, follow};
use crate::connection::node::redis_rs::{command, executed, reply, transaction};
use crate::connection::peer::Peer;
use crate::connection::route::Place;
use crate::connection::{Argument, Connection, Reply};
use crate::deadline::Deadline;
use crate::error::RedisError;

/// Names a cluster of which only the connection is known.
const UNNAMED: &str = "the cluster of the given connection";

/// A connection to a cluster that was built with `retries(0)`.
///
/// The client repeats a request whose reply was lost, up to sixteen times, and only its builder can
/// prevent that. Without retries it does not follow `MOVED` and `ASK` either; the store does. A slot
/// that migrates to a server which the client does not know yet is unavailable until it has arrived.
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
    type Connection = External<Self>;

    fn into_connection(self, deadline: Duration) -> External<Self> {
        External::new(self, deadline, UNNAMED)
    }
}

impl IntoConnection for WithoutRetries<ClusterConnection> {
    type Connection = External<Self>;

    fn into_connection(self, deadline: Duration) -> External<Self> {
        External::new(self, deadline, UNNAMED)
    }
}

impl Connection for External<ClusterConnection> {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let request = Request::Command(words);
        let asked = once(&self.client, &self.peer, by_slot(key), false, &request);
        self.within(deadline, asked).await.map(only)
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let request = Request::Transaction(commands);
        let asked = once(&self.client, &self.peer, by_slot(key), false, &request);
        self.within(deadline, asked).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.to_masters(&self.client, words, deadline).await
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

impl Connection for External<WithoutRetries<ClusterConnection>> {
    async fn send(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        self.follow(key, &Request::Command(words), TryAgain::Wait, deadline).await.map(only)
    }

    async fn send_splittable(
        &self,
        key: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        self.follow(key, &Request::Command(words), TryAgain::Return, deadline).await.map(only)
    }

    async fn transaction(
        &self,
        key: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        self.follow(key, &Request::Transaction(commands), TryAgain::Wait, deadline).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.to_masters(&self.client.0, words, deadline).await
    }

    fn is_cluster(&self) -> bool {
        true
    }

    fn address(&self) -> &Arc<str> {
        self.peer.address()
    }
}

impl External<WithoutRetries<ClusterConnection>> {
    /// The result of a request that follows redirections until a server executes it.
    async fn follow(
        &self,
        key: &str,
        request: &Request<'_>,
        try_again: TryAgain,
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        follow(&BySlot(key), try_again, deadline, |to, asking| {
            self.within(deadline, once(&self.client.0, &self.peer, to, asking, request))
        })
        .await
    }
}

impl<C> External<C> {
    async fn to_masters(
        &self,
        client: &ClusterConnection,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        let (mut client, peer) = (client.clone(), &self.peer);
        let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let asked = async {
            let value = client.route_command(command(words), masters).await;
            value.map_err(|error| failed(peer, &error))
        };
        match self.within(deadline, asked).await {
            Ok(value) => by_server(peer, value),
            Err(error) => vec![(Arc::clone(peer.address()), Err(error))],
        }
    }
}

/// The route to the owner of a key's slot, which the client knows. The client updates its table after
/// each error that names another owner.
struct BySlot<'k>(&'k str);

impl Route for BySlot<'_> {
    type To = SingleNodeRoutingInfo;

    async fn owner(&self, _: Deadline) -> Result<SingleNodeRoutingInfo, RedisError> {
        Ok(by_slot(self.0))
    }

    fn sent_to(
        &self,
        place: &Place<'_>,
        _: &SingleNodeRoutingInfo,
        _: bool,
    ) -> Next<SingleNodeRoutingInfo> {
        match place.host.trim_start_matches('[').trim_end_matches(']') {
            // The asked host at another port: the client finds out.
            "" | "?" => Next::Again,
            host => {
                let (host, port) = (host.to_owned(), place.port);
                Next::Ask(SingleNodeRoutingInfo::ByAddress { host, port })
            }
        }
    }

    async fn instead_of(
        &self,
        _: &SingleNodeRoutingInfo,
        _: bool,
        _: u64,
        _: Deadline,
    ) -> Next<SingleNodeRoutingInfo> {
        Next::Again
    }

    fn rounds(&self) -> u64 {
        0
    }

    fn doubt(&self) {}

    fn astray(&self, last: RedisError) -> RedisError {
        last
    }
}

fn by_slot(key: &str) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(NodeRoute::with_key(key, SlotAddr::Master))
}

/// A request.
enum Request<'a> {
    Command(&'a [Argument<'a>]),
    Transaction(&'a [Vec<Argument<'a>>]),
}

/// The reply to a command.
fn only(mut replies: Vec<Reply>) -> Reply {
    replies.pop().unwrap_or(Reply::Nil)
}

/// The client's result of a request, sent once.
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

/// The replies of several servers, separated.
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
