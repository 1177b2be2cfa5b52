//! One connection by the crate `fred`.
//!
//! The client can reconnect and repeat requests. Here it has no policy for either: when the
//! connection ends, so does the task that drives it, and with it the node.

use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fred::bytes::BytesMut;
use fred::clients::{Client, Pipeline, WithOptions};
use fred::error::{Error, ErrorKind};
use fred::interfaces::{ClientLike, EventInterface, Resp3Frame};
#[cfg(feature = "tls")]
use fred::types::config::TlsConnector;
use fred::types::config::{
    Config, ConnectionConfig, Options, PerformanceConfig, Server, ServerConfig, TcpConfig,
};
use fred::types::{ClusterHash, CustomCommand, RespVersion, Value};
use futures_util::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::broadcast::Receiver;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
use super::stream::USER_TIMEOUT;
use super::stream::{keepalive, open};
use crate::connection::endpoint::{Endpoint, Settings};
use crate::connection::peer::Peer;
use crate::connection::reply::Reply;
use crate::connection::request::{Argument, Commands};
use crate::error::{RedisError, Result};

pub(crate) struct Node {
    client: Client,
    peer: Peer,
    /// The task that drives the connection, as long as the node lives.
    _task: AbortOnDropHandle<()>,
    /// Whether that task has ended, by itself or with its runtime.
    ended: CancellationToken,
    /// How many requests began, and how many were answered.
    begun: AtomicU64,
    answered: AtomicU64,
    /// Whether the server is known to serve its part of a cluster, if it is of one.
    serves: AtomicBool,
    /// Without a listener the client logs each error, with all that the server said about a login.
    _listens: Receiver<(Error, Option<Server>)>,
}

impl Node {
    pub(crate) async fn connect(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Self> {
        let config = config(endpoint, address)?;
        let performance = PerformanceConfig {
            default_command_timeout: Duration::ZERO,
            ..PerformanceConfig::default()
        };
        let client = Client::new(config, Some(performance), Some(connection()), None);
        let listens = client.error_rx();
        let mut connections = client.reconnect_rx();
        let mut connected = AbortOnDropHandle::new(client.connect());
        let attempt = tokio::select! {
            biased;
            _ = connections.recv() => Ok(()),
            ended = &mut connected => {
                ended.unwrap_or_else(|error| Err(error.into())).and(Err(Error::new_canceled()))
            }
        };
        if let Err(error) = attempt {
            return Err(not_connected(endpoint, address, &error).await);
        }
        let ended = CancellationToken::new();
        let ends = ended.clone().drop_guard();
        let task = tokio::spawn(async move {
            let _ends = ends;
            let _ = connected.await;
        });
        let node = Self {
            client,
            peer: endpoint.peer.clone(),
            _task: AbortOnDropHandle::new(task),
            ended,
            begun: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            serves: AtomicBool::new(!endpoint.settings.is_cluster),
            _listens: listens,
        };
        // The client reports a connection that was closed at once as connected.
        match node.exchange(false, Commands::One(&[Argument::Text("PING")])).await {
            Ok(_) | Err(RedisError::Server { .. }) => Ok(node),
            Err(_) => Err(cut_off(endpoint, address).await),
        }
    }

    pub(crate) async fn send(&self, asking: bool, commands: Commands<'_>) -> Result<Reply> {
        let asks_owners = matches!(commands, Commands::One([Argument::Text("CLUSTER"), ..]));
        if !asks_owners && !self.serves.load(Ordering::Acquire) {
            Box::pin(self.check_cluster()).await?;
        }
        self.exchange(asking, commands).await
    }

    /// Checks once whether the cluster serves. The client ends a connection over a `CLUSTERDOWN`,
    /// and of all that waits there, none can tell whether it was executed: so nothing is sent
    /// before the cluster is up, as far as this server knows.
    async fn check_cluster(&self) -> Result<()> {
        let words = ["CLUSTER", "INFO"].map(Argument::Text);
        match self.exchange(false, Commands::One(&words)).await {
            Ok(Reply::Text(info)) if info.windows(18).any(|part| part == b"cluster_state:fail") => {
                Err(self.peer.error("CLUSTERDOWN", "The cluster is down"))
            }
            // A user without permission for it goes without.
            Ok(_) | Err(RedisError::Server { .. }) => {
                self.serves.store(true, Ordering::Release);
                Ok(())
            }
            Err(error) => Err(error.of_a_lookup()),
        }
    }

    async fn exchange(&self, asking: bool, commands: Commands<'_>) -> Result<Reply> {
        // A client whose task has ended still accepts requests, and never answers them.
        if self.ended.is_cancelled() {
            return Err(self.peer.unreachable("the connection has ended"));
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst);
        let is_first = self.answered.load(Ordering::SeqCst) == number;
        let pipeline = || self.client.pipeline().with_options(&Options::default());
        let mut asked = pin!(ask(&self.client, pipeline, &self.peer, asking, commands));
        let answer = tokio::select! {
            biased;
            answer = &mut asked => Some(answer),
            () = self.ended.cancelled() => asked.now_or_never(),
        };
        match answer {
            Some(Ok(reply)) => {
                self.answered.fetch_add(1, Ordering::SeqCst);
                reply
            }
            // The client ends the connection over a CLUSTERDOWN, and reports it to all that waits
            // there. It is the reply to a request that is the only one.
            Some(Err(error))
                if *error.kind() == ErrorKind::Cluster
                    && is_first
                    && self.begun.load(Ordering::SeqCst) == number + 1 =>
            {
                Err(server_answer(&self.peer, &error))
            }
            Some(Err(error)) => Err(self.peer.lost(reason(&error))),
            None => Err(self.peer.lost("the task that drove the connection has ended")),
        }
    }
}

fn config(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Config> {
    let server = match address {
        Some(address) => ServerConfig::Centralized { server: server(endpoint, address) },
        #[cfg(unix)]
        None => ServerConfig::Unix { path: endpoint.host.clone().into() },
        #[cfg(not(unix))]
        None => return Err(endpoint.peer.unreachable("this system has no Unix sockets")),
    };
    let Settings { user, password, database, resp3, .. } = &*endpoint.settings;
    let Ok(numbered) = u8::try_from(*database) else {
        return Err(RedisError::Config(format!(
            "the client fred knows the databases 0 to 255, and the URL asks {address} for another; \
             choose one of these, or client=redis",
            address = endpoint.peer.address()
        )));
    };
    Ok(Config {
        server,
        username: user.clone(),
        password: password.clone(),
        database: (numbered > 0).then_some(numbered),
        #[cfg(feature = "tls")]
        tls: endpoint.settings.tls.as_ref().map(|tls| TlsConnector::Rustls(tls.connector()).into()),
        version: if *resp3 { RespVersion::RESP3 } else { RespVersion::RESP2 },
        fail_fast: true,
        ..Config::default()
    })
}

/// The server by its address, with its name for the certificate.
fn server(endpoint: &Endpoint, address: SocketAddr) -> Server {
    let (shown, port) = (address.to_string(), address.port());
    // The client joins them again: an IPv6 address stays in brackets.
    let host = shown.rsplit_once(':').map_or(&*shown, |(host, _)| host);
    let server = Server::new(host, port);
    #[cfg(feature = "tls")]
    let server = Server { tls_server_name: Some(endpoint.host.as_str().into()), ..server };
    #[cfg(not(feature = "tls"))]
    let _ = endpoint;
    server
}

/// Connects once and without timeouts: the caller enforces the deadlines.
fn connection() -> ConnectionConfig {
    ConnectionConfig {
        connection_timeout: Duration::ZERO,
        internal_command_timeout: Duration::ZERO,
        max_command_attempts: 1,
        tcp: TcpConfig {
            // With Nagle's algorithm a script waits for the replies to those before it: over a long
            // way, twice as long.
            nodelay: Some(true),
            keepalive: Some(keepalive()),
            #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
            user_timeout: Some(USER_TIMEOUT),
            ..TcpConfig::default()
        },
        ..ConnectionConfig::default()
    }
}

/// A command's name and its arguments. These are parts of one buffer: the client clones each of
/// them twice, which costs an allocation for text of its own.
fn custom(words: &[Argument<'_>]) -> (CustomCommand, Vec<Value>) {
    let mut buffer = BytesMut::with_capacity(words.iter().map(Argument::most_bytes).sum());
    let mut words = words.iter().map(|word| {
        match word {
            Argument::Text(text) => buffer.extend_from_slice(text.as_bytes()),
            Argument::Bytes(bytes) => buffer.extend_from_slice(bytes),
            // Writing to a buffer in memory never fails.
            Argument::Number(number) => write!(buffer, "{number}").unwrap_or_default(),
        }
        buffer.split().freeze()
    });
    let name = words.next().unwrap_or_default();
    let name = CustomCommand::new(String::from_utf8_lossy(&name), ClusterHash::FirstKey, false);
    (name, words.map(Value::Bytes).collect())
}

/// The server's reply to commands; the client's own failure is the outer error.
pub(in crate::connection) async fn ask(
    client: &impl ClientLike,
    pipeline: impl FnOnce() -> WithOptions<Pipeline<Client>>,
    peer: &Peer,
    asking: bool,
    commands: Commands<'_>,
) -> Result<Result<Reply>, Error> {
    if let (false, Commands::One(words)) = (asking, commands) {
        let (name, arguments) = custom(words);
        return Ok(reply(peer, client.custom_raw(name, arguments).await?));
    }
    // No other request runs in between: the client passes a pipeline to its only task, which writes
    // it completely. Rare and large, so boxed.
    let answers = Box::pin(in_one(pipeline(), asking, commands)).await?;
    Ok(executed(peer, matches!(commands, Commands::Transaction(_)), answers))
}

/// Sends commands as one pipeline, without other requests in between. Returns one reply per
/// command, all from the server; the client's own failure is the error.
async fn in_one(
    pipeline: WithOptions<Pipeline<Client>>,
    asking: bool,
    commands: Commands<'_>,
) -> Result<Vec<Result<Value, Error>>, Error> {
    let all = commands.each(asking);
    for words in &all {
        let (name, arguments) = custom(words);
        // Into the pipeline's own queue.
        let _: Value = pipeline.custom(name, arguments).await?;
    }
    let mut answers = pipeline.try_all::<Value>().await;
    match answers.pop() {
        // The client reports it once for all of them.
        Some(Err(error)) if answers.len() + 1 != all.len() => Err(error),
        last => {
            answers.extend(last);
            Ok(answers)
        }
    }
}

/// The last of these replies. If it is an error, the first error of them: that of the command at
/// fault. Without one before it, a command of a transaction may have failed while the others were
/// executed.
fn executed(
    peer: &Peer,
    is_transaction: bool,
    mut answers: Vec<Result<Value, Error>>,
) -> Result<Reply> {
    let executed = answers.pop().unwrap_or(Ok(Value::Null));
    executed.map(reply_of).map_err(|error| {
        if let Some(first) = answers.into_iter().find_map(Result::err) {
            return server_answer(peer, &first);
        }
        let error = server_answer(peer, &error);
        if !is_transaction {
            return error;
        }
        let is_inside = matches!(
            &error, RedisError::Server { code, .. } if matches!(&**code, "WRONGTYPE" | "ERR")
        );
        error.after(is_inside)
    })
}

/// Why no connection was made: a refused login, or a failure on the way.
async fn not_connected(
    endpoint: &Endpoint,
    address: Option<SocketAddr>,
    error: &Error,
) -> RedisError {
    match error.kind() {
        ErrorKind::IO | ErrorKind::Canceled => cut_off(endpoint, address).await,
        ErrorKind::Protocol | ErrorKind::Parse => endpoint.broken_off(&reason(error)),
        #[cfg(feature = "tls")]
        ErrorKind::Tls => endpoint.peer.unreachable(reason(error)),
        // The server's reply, or the client's description of one that does not fit the login.
        _ => {
            let (code, detail) = code_and_message(error);
            endpoint.refused_login(code, detail)
        }
    }
}

/// Why a connection did not last. The client keeps an error of the system or of TLS only as a text
/// for debugging, so that it has to be met again.
async fn cut_off(endpoint: &Endpoint, address: Option<SocketAddr>) -> RedisError {
    match try_again(endpoint, address).await {
        Err(error) => endpoint.not_connected(&error),
        Ok(_) => endpoint.broken_off("it ended the connection at once"),
    }
}

async fn try_again(endpoint: &Endpoint, address: Option<SocketAddr>) -> io::Result<u8> {
    let mut stream = open(endpoint, address).await?;
    // A server that refuses a certificate says so after a request.
    stream.write_all(b"PING\r\n").await?;
    stream.read_u8().await
}

/// Why a connection failed, in one line, by the kind of the error: its text may quote the server.
pub(in crate::connection) fn reason(error: &Error) -> String {
    match error.kind() {
        ErrorKind::Protocol | ErrorKind::Parse => {
            "what answers there does not speak the Redis protocol".into()
        }
        ErrorKind::IO | ErrorKind::Canceled => "the connection was closed".into(),
        ErrorKind::Cluster => "the client ended the connection over a CLUSTERDOWN".into(),
        kind => format!("the connection has ended ({})", kind.to_str()),
    }
}

/// The parts of an error reply, which the client keeps as text.
fn code_and_message(error: &Error) -> (&str, &str) {
    error.details().split_once(' ').unwrap_or((error.details(), ""))
}

/// An error reply of the server, which did not execute the command.
fn server_answer(peer: &Peer, error: &Error) -> RedisError {
    let (code, detail) = code_and_message(error);
    peer.error(code, detail)
}

/// Converts a frame to its RESP2 form.
fn reply(peer: &Peer, frame: Resp3Frame) -> Result<Reply> {
    Value::try_from(frame).map(reply_of).map_err(|error| match error.kind() {
        // Neither a value nor an error.
        ErrorKind::Protocol => peer.unexpected(&Reply::Other("a reply of another kind".into())),
        _ => server_answer(peer, &error),
    })
}

/// Converts a client's value to its RESP2 form.
fn reply_of(value: Value) -> Reply {
    match value {
        Value::Null => Reply::Nil,
        Value::Integer(number) => Reply::Integer(number),
        Value::Boolean(yes) => Reply::Integer(yes.into()),
        Value::Double(number) => Reply::Text(number.to_string().into_bytes()),
        Value::String(text) => Reply::Text(text.into_inner().into()),
        Value::Bytes(bytes) => Reply::Text(bytes.into()),
        Value::Queued => Reply::Text(b"QUEUED".to_vec()),
        Value::Array(values) => Reply::Array(values.into_iter().map(reply_of).collect()),
        Value::Map(map) => {
            let pairs = map.inner().into_iter();
            Reply::Array(
                pairs.flat_map(|(key, value)| [reply_of(key.into()), reply_of(value)]).collect(),
            )
        }
    }
}
