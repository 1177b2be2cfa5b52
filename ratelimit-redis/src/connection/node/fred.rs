//! One connection by the crate `fred`.
//!
//! The client can reconnect and repeat requests. Here it has no policy for either: when the
//! connection ends, so does the task that drives it, and with it the node.

use std::fmt::Write;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
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
use tokio::sync::broadcast::Receiver;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{Endpoint, Settings};
use crate::connection::peer::Peer;
use crate::connection::request::Commands;
use crate::connection::{Argument, Reply};
use crate::error::{RedisError, Result};

pub(crate) struct Node {
    client: Client,
    peer: Peer,
    /// The task that drives the connection, as long as the node lives.
    _task: AbortOnDropHandle<()>,
    /// Whether the client ended the connection; closed without that if its runtime has ended.
    ended: watch::Receiver<bool>,
    traffic: Traffic,
    /// Without a listener the client logs each error, with all that the server said about a login.
    _listens: Receiver<(Error, Option<Server>)>,
}

impl Node {
    pub(crate) async fn connect(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Self> {
        let config = config(endpoint, address)?;
        let client = Client::new(config, Some(performance()), Some(connection()), None);
        let listens = client.error_rx();
        let mut connections = client.reconnect_rx();
        let mut connected = AbortOnDropHandle::new(client.connect());
        let refused = tokio::select! {
            biased;
            _ = connections.recv() => None,
            ended = &mut connected => Some(match ended {
                Ok(Err(error)) => error,
                Ok(Ok(())) => Error::new_canceled(),
                Err(error) => error.into(),
            }),
        };
        if let Some(error) = refused {
            return Err(not_connected(endpoint, &error));
        }
        let (sender, ended) = watch::channel(false);
        let task = tokio::spawn(async move {
            if connected.await.is_ok() {
                sender.send_replace(true);
            }
        });
        let node = Self {
            client,
            peer: endpoint.peer.clone(),
            _task: AbortOnDropHandle::new(task),
            ended,
            traffic: Traffic::default(),
            _listens: listens,
        };
        // The client reports a connection that was closed at once as connected.
        let ping = node.client.custom_raw(command("PING"), Vec::<Value>::new());
        let error = match node.answered(pin!(ping)).await {
            Ok(_) => None,
            Err(FredFailure::Answered { error, .. }) => Some(error),
            Err(FredFailure::NotSent | FredFailure::Aborted) => Some(Error::new_canceled()),
        };
        error.map_or(Ok(node), |error| Err(not_connected(endpoint, &error)))
    }

    pub(crate) async fn send(&self, asking: bool, commands: Commands<'_>) -> Result<Reply> {
        let pipeline = || self.client.pipeline().with_options(&Options::default());
        let asked = pin!(ask(&self.client, pipeline, &self.peer, asking, commands));
        self.answered(asked).await.unwrap_or_else(|failure| Err(self.failed(failure)))
    }

    /// The result of a request, or the fact that there will be none: commands to a task that has
    /// ended are still accepted and would wait forever.
    async fn answered<T>(
        &self,
        mut request: Pin<&mut impl Future<Output = Result<T, Error>>>,
    ) -> Result<T, FredFailure> {
        let mut ended = self.ended.clone();
        // Nothing is sent any more.
        if ended.has_changed().is_err() {
            return Err(FredFailure::NotSent);
        }
        let mut passage = self.traffic.begin();
        let answer = tokio::select! {
            biased;
            answer = &mut request => Some(answer),
            _ = ended.wait_for(|ended| *ended) => request.now_or_never(),
        };
        match answer {
            Some(Ok(answer)) => {
                passage.answered();
                Ok(answer)
            }
            Some(Err(error)) if !error.is_canceled() => {
                Err(FredFailure::Answered { error, alone: passage.is_alone() })
            }
            // Left in the queue. The client delivers all replies before it ends a connection; but
            // if its runtime ends, it also cancels requests that it has sent.
            _ => Err(match ended.wait_for(|ended| *ended).await {
                Ok(_) => FredFailure::NotSent,
                Err(_) => FredFailure::Aborted,
            }),
        }
    }

    fn failed(&self, failure: FredFailure) -> RedisError {
        match failure {
            FredFailure::NotSent => self.peer.unreachable("the connection has ended"),
            FredFailure::Aborted => {
                self.peer.lost("the runtime that drove the connection has ended")
            }
            // The client closes the connection after some server errors and reports the error to
            // all pending requests. If only one was pending, the error is its reply.
            FredFailure::Answered { error, alone: true } if code(error.details()).is_some() => {
                server_answer(&self.peer, &error)
            }
            FredFailure::Answered { error, .. } => self.peer.lost(reason(&error)),
        }
    }
}

/// Counts the requests that are pending on a connection.
#[derive(Default)]
pub(super) struct Traffic {
    /// How many requests began. A request's number is the count before it.
    begun: AtomicU64,
    /// How many of them no caller waits for any longer.
    ended: AtomicU64,
    /// The value of `begun` when a caller last abandoned a request, which may still be pending.
    given_up: AtomicU64,
    /// The highest number of an answered request, plus one. Replies come in order, so every request
    /// that was abandoned before this one began has been answered too.
    answered: AtomicU64,
}

impl Traffic {
    pub(super) fn begin(&self) -> Passage<'_> {
        let number = self.begun.fetch_add(1, Ordering::SeqCst);
        // If a later request is among those that ended, this one is not alone, and `is_alone`
        // detects it.
        let others = self.ended.load(Ordering::SeqCst) != number;
        let given_up = self.given_up.load(Ordering::SeqCst);
        let overtaken = given_up == 0 || self.answered.load(Ordering::SeqCst) > given_up;
        Passage { traffic: self, number, alone: !others && overtaken, ended: false }
    }
}

/// A pending request. Dropping it unanswered abandons it.
pub(super) struct Passage<'t> {
    traffic: &'t Traffic,
    number: u64,
    /// Whether no other request was pending when it began.
    alone: bool,
    ended: bool,
}

impl Passage<'_> {
    pub(super) fn answered(&mut self) {
        self.traffic.answered.fetch_max(self.number + 1, Ordering::SeqCst);
        self.ended = true;
    }

    /// Whether no other request has been pending since it began.
    pub(super) fn is_alone(&self) -> bool {
        self.alone && self.traffic.begun.load(Ordering::SeqCst) == self.number + 1
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let begun = self.traffic.begun.load(Ordering::SeqCst);
            self.traffic.given_up.fetch_max(begun, Ordering::SeqCst);
        }
        self.traffic.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Why there is no reply.
enum FredFailure {
    /// The request was never sent.
    NotSent,
    /// The connection's runtime ended, and the request may have been sent.
    Aborted,
    /// The client's error, and whether no other request was pending meanwhile.
    Answered { error: Error, alone: bool },
}

fn config(endpoint: &Endpoint, address: Option<SocketAddr>) -> Result<Config> {
    let server = match address {
        Some(address) => ServerConfig::Centralized { server: server(endpoint, address) },
        #[cfg(unix)]
        None => ServerConfig::Unix { path: endpoint.host.clone().into() },
        #[cfg(not(unix))]
        None => return Err(endpoint.no_sockets()),
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
#[cfg(feature = "tls")]
fn server(endpoint: &Endpoint, address: SocketAddr) -> Server {
    Server::new_with_tls(host(address), address.port(), Some(endpoint.host.clone()))
}

#[cfg(not(feature = "tls"))]
fn server(_endpoint: &Endpoint, address: SocketAddr) -> Server {
    Server::new(host(address), address.port())
}

/// The form that the client joins with a port.
fn host(address: SocketAddr) -> String {
    match address {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    }
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
            keepalive: Some(super::keepalive()),
            #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
            user_timeout: Some(super::USER_TIMEOUT),
            ..TcpConfig::default()
        },
        ..ConnectionConfig::default()
    }
}

fn performance() -> PerformanceConfig {
    PerformanceConfig { default_command_timeout: Duration::ZERO, ..PerformanceConfig::default() }
}

fn command(name: &str) -> CustomCommand {
    CustomCommand::new(name.to_owned(), ClusterHash::FirstKey, false)
}

/// A command's name and its arguments. These are parts of one buffer: the client clones each of
/// them twice, which costs an allocation for text of its own.
fn custom(words: &[Argument<'_>]) -> (CustomCommand, Vec<Value>) {
    let (name, arguments) = match words {
        [Argument::Text(name), arguments @ ..] => (command(name), arguments),
        [Argument::Bytes(name), arguments @ ..] => {
            (command(&String::from_utf8_lossy(name)), arguments)
        }
        _ => (command(""), words),
    };
    let mut buffer = BytesMut::with_capacity(arguments.iter().map(Argument::most_bytes).sum());
    let arguments = arguments.iter().map(|word| {
        // Writing to a buffer in memory never fails.
        let _ = match word {
            Argument::Text(text) => buffer.write_str(text),
            Argument::Bytes(bytes) => {
                buffer.extend_from_slice(bytes);
                Ok(())
            }
            Argument::Number(number) => write!(buffer, "{number}"),
        };
        Value::Bytes(buffer.split().freeze())
    });
    (name, arguments.collect())
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
    Ok(executed(peer, Box::pin(in_one(pipeline(), asking, commands)).await?))
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
/// fault. Without one before it, a command may have failed while the others were executed.
fn executed(peer: &Peer, mut answers: Vec<Result<Value, Error>>) -> Result<Reply> {
    let executed = answers.pop().unwrap_or(Ok(Value::Null));
    executed.map(reply_of).map_err(|error| {
        let first = answers.into_iter().find_map(Result::err);
        let is_inside =
            first.is_none() && matches!(code(error.details()), Some("WRONGTYPE" | "ERR"));
        server_answer(peer, &first.unwrap_or(error)).after(is_inside)
    })
}

/// The error of a failed connection attempt: a refused login, or a failure on the way.
fn not_connected(endpoint: &Endpoint, error: &Error) -> RedisError {
    let said = error.details();
    if code(said).is_some() {
        return login_refused(endpoint, said);
    }
    #[cfg(feature = "tls")]
    {
        let met = in_words(said);
        if let Some(refused) =
            crate::connection::tls::refused_as(endpoint.peer.address(), &met, &met)
        {
            return refused;
        }
    }
    match error.kind() {
        ErrorKind::IO if !["reset", "Broken pipe"].iter().any(|part| said.contains(part)) => {
            endpoint.peer.unreachable(reason(error))
        }
        ErrorKind::IO | ErrorKind::Protocol | ErrorKind::Parse | ErrorKind::Canceled => {
            endpoint.broken_off(&reason(error))
        }
        // The client's description of a reply that does not fit the login.
        _ => login_refused(endpoint, "ERR"),
    }
}

fn login_refused(endpoint: &Endpoint, said: &str) -> RedisError {
    let (code, detail) = said.split_once(' ').unwrap_or((said, ""));
    endpoint.peer.refused_login(&endpoint.settings, code, detail)
}

/// Why a connection failed, in one line. Passes on only the system's own words: the client's text
/// may quote the server.
pub(in crate::connection) fn reason(error: &Error) -> String {
    match error.kind() {
        ErrorKind::Protocol | ErrorKind::Parse => {
            "what answers there does not speak the Redis protocol".into()
        }
        ErrorKind::Canceled => "the connection was closed".into(),
        ErrorKind::IO => in_words(error.details()),
        ErrorKind::Cluster if code(error.details()) == Some("CLUSTERDOWN") => {
            "the client ended the connection over a CLUSTERDOWN".into()
        }
        kind => format!("the connection has ended ({})", kind.to_str()),
    }
}

/// Extracts the system's message from the client's debug text: `Os { …, message: "…" }` or `Custom
/// { kind: …, error: … }`.
fn in_words(shown: &str) -> String {
    let after = |name| shown.split_once(name).map(|(_, rest)| rest.trim_end_matches([' ', '}']));
    let said = after("message: ").or_else(|| after("error: ")).unwrap_or(shown);
    said.trim_matches('"').to_owned()
}

/// The code of an error, if a server sent it: the client keeps only the text.
fn code(text: &str) -> Option<&str> {
    let code = text.split(' ').next()?;
    (!code.is_empty() && code.bytes().all(|byte| byte.is_ascii_uppercase())).then_some(code)
}

/// An error reply of the server, which did not execute the command.
fn server_answer(peer: &Peer, error: &Error) -> RedisError {
    let text = error.details();
    let (code, detail) = text.split_once(' ').unwrap_or((text, ""));
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
