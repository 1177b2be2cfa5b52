//! Tests the contract of a node with both clients.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use ratelimit_servers::{RedisServer, RespValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Node;
use crate::client::Client;
use crate::connection::endpoint::{Endpoint, Settings};
use crate::connection::peer::Peer;
use crate::connection::reply::Reply;
use crate::connection::request::{Argument, Commands};
use crate::error::{RedisError, Result};

macro_rules! by_each_client {
    ($($case:ident),* $(,)?) => {
        #[cfg(feature = "redis")]
        mod by_redis {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    super::$case(super::Client::Redis).await;
                }
            )*
        }

        #[cfg(feature = "fred")]
        mod by_fred {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    super::$case(super::Client::Fred).await;
                }
            )*
        }
    };
}

by_each_client! {
    bytes_survive_unchanged,
    a_servers_error_keeps_its_code,
    a_transaction_is_sent_once_and_returns_the_first_error,
    no_other_request_runs_inside_a_transaction,
    a_request_on_an_ended_connection_fails_at_once,
    a_request_whose_runtime_ends_may_have_been_done,
    requests_that_are_kept_hold_up_no_other,
    dropping_a_node_closes_its_connection,
    an_abandoned_connection_attempt_closes_its_socket,
}

/// Longer than any step here takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn endpoint(client: Client, port: u16) -> Endpoint {
    Endpoint::new("127.0.0.1", port, &Arc::new(Settings { client, ..Settings::default() }))
}

async fn node(client: Client, port: u16) -> Arc<Node> {
    let connecting = timeout(PATIENCE, Node::connect(&endpoint(client, port))).await;
    Arc::new(connecting.expect("in time").expect("the server is up"))
}

fn texts<'w>(words: &[&'w str]) -> Vec<Argument<'w>> {
    words.iter().map(|word| Argument::Text(word)).collect()
}

async fn send(node: &Node, words: &[&str]) -> Result<Reply> {
    let words = texts(words);
    timeout(PATIENCE, node.send(false, Commands::One(&words))).await.expect("in time")
}

/// A request on a task of its own.
fn sending(node: &Arc<Node>, word: &'static str) -> JoinHandle<Result<Reply>> {
    let node = Arc::clone(node);
    tokio::spawn(async move { send(&node, &[word]).await })
}

async fn transaction(node: &Node, asking: bool, commands: &[&[&str]]) -> Result<Vec<Reply>> {
    let commands: Vec<_> = commands.iter().map(|words| texts(words)).collect();
    let sent = timeout(PATIENCE, node.send(asking, Commands::Transaction(&commands))).await;
    Peer::new("a node").array(sent.expect("in time")?)
}

/// The code of a server's error.
fn code(error: &RedisError) -> &str {
    match error {
        RedisError::Server { code, .. } => code,
        other => panic!("not a server's error: {other:?}"),
    }
}

/// Records the commands that the fake server receives.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Vec<String>>>>);

impl Heard {
    /// How many of them have this name.
    fn of(&self, name: &str) -> usize {
        self.0.lock().expect("no panic").iter().filter(|words| words[0] == name).count()
    }

    async fn until(&self, count: usize, name: &str) {
        while self.of(name) < count {
            tokio::task::yield_now().await;
        }
    }
}

/// What a server notes when a client closes its connection.
const END: &str = "the end";

/// Starts a server that accepts a client's login and answers anything else by `answer`, or closes
/// the connection.
async fn server(
    answer: impl Fn(&[String]) -> Option<&'static str> + Send + Sync + 'static,
) -> (u16, Heard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let (heard, answer) = (Heard::default(), Arc::new(answer));
    let noted = heard.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, noted.clone(), Arc::clone(&answer)));
        }
    });
    (port, heard)
}

async fn serve(
    mut stream: TcpStream,
    heard: Heard,
    answer: Arc<impl Fn(&[String]) -> Option<&'static str> + Send + Sync + 'static>,
) {
    let mut buffer = Vec::new();
    while let Ok(1..) = stream.read_buf(&mut buffer).await {
        while let Ok(Some((command, length))) = RespValue::parse(&buffer) {
            buffer.drain(..length);
            let words: Vec<_> = command.as_array().iter().map(ToString::to_string).collect();
            let said = match words[0].as_str() {
                "PING" => "+PONG\r\n",
                "CLIENT" => "+OK\r\n",
                "INFO" => "$0\r\n\r\n",
                _ => {
                    let said = answer(&words);
                    heard.0.lock().expect("no panic").push(words);
                    let Some(said) = said else { return };
                    said
                }
            };
            if stream.write_all(said.as_bytes()).await.is_err() {
                return;
            }
        }
    }
    heard.0.lock().expect("no panic").push(vec![END.to_owned()]);
}

/// So a fleet can change its client or protocol, and keeps its limits.
async fn bytes_survive_unchanged(client: Client) {
    let redis = RedisServer::start().expect("redis-server");
    let all: Vec<u8> = (0..=255).collect();
    let set = [Argument::Text("SET"), Argument::Bytes(&all), Argument::Bytes(&all)];
    let get = [Argument::Bytes(b"GET"), Argument::Bytes(&all)];
    let echo = |word| [Argument::Text("ECHO"), word];
    for resp3 in [false, true] {
        let settings = Arc::new(Settings { client, resp3, ..Settings::default() });
        let node = Node::connect(&Endpoint::new("127.0.0.1", redis.port(), &settings)).await;
        let node = node.expect("it is up");
        for (words, due) in [
            (&set[..], b"OK".to_vec()),
            (&get, all.clone()),
            (&echo(Argument::Number(u64::MAX)), u64::MAX.to_string().into()),
            (&echo(Argument::Text("")), Vec::new()),
        ] {
            let reply = node.send(false, Commands::One(words)).await.expect("answered");
            assert_eq!(reply, Reply::Text(due));
        }
        let reply = node.send(false, Commands::Transaction(&[get.to_vec()])).await.expect("read");
        assert_eq!(reply, Reply::Array(vec![Reply::Text(all.clone())]));
    }
}

async fn a_servers_error_keeps_its_code(client: Client) {
    for (said, expected) in [
        ("-MOVED 5 127.0.0.1:1\r\n", "MOVED"),
        ("-ASK 5 127.0.0.1:1\r\n", "ASK"),
        ("-TRYAGAIN Multiple keys request during rehashing of slot\r\n", "TRYAGAIN"),
        ("-CLUSTERDOWN The cluster is down\r\n", "CLUSTERDOWN"),
        ("-READONLY You can't write against a read only replica.\r\n", "READONLY"),
        ("-LOADING Redis is loading the dataset in memory\r\n", "LOADING"),
        ("-MASTERDOWN Link with MASTER is down\r\n", "MASTERDOWN"),
        ("-OOM command not allowed when used memory > 'maxmemory'.\r\n", "OOM"),
        ("-NOAUTH Authentication required.\r\n", "NOAUTH"),
        ("-NOPERM this user has no permissions\r\n", "NOPERM"),
        ("-NOSCRIPT No matching script.\r\n", "NOSCRIPT"),
        ("-WRONGTYPE Operation against a key\r\n", "WRONGTYPE"),
        ("-BUSY Redis is busy running a script.\r\n", "BUSY"),
        ("-CROSSSLOT Keys in request don't hash to the same slot\r\n", "CROSSSLOT"),
        ("-ERR unknown command 'x'\r\n", "ERR"),
        ("-EXECABORT Transaction discarded\r\n", "EXECABORT"),
    ] {
        for asking in [false, true] {
            let is_asking = |words: &[String]| words[0] == "ASKING";
            let answer =
                move |words: &[String]| Some(if is_asking(words) { "+OK\r\n" } else { said });
            let (port, heard) = server(answer).await;
            let (node, get) = (node(client, port).await, ["GET", "key"].map(Argument::Text));
            let error = node.send(asking, Commands::One(&get)).await.expect_err(expected);
            assert_eq!(code(&error), expected, "asking: {asking}, {error}");
            let rest = said.trim_end().split_once(' ').expect("a message").1;
            assert!(error.to_string().contains(rest), "{error}");
            assert_eq!(heard.of("GET"), 1, "{expected}: sent once");
        }
    }
}

async fn a_transaction_is_sent_once_and_returns_the_first_error(client: Client) {
    for (said, expected) in
        [("-MOVED 5 127.0.0.1:1\r\n", "MOVED"), ("-ASK 5 127.0.0.1:1\r\n", "ASK")]
    {
        let (port, heard) = server(move |words| {
            Some(match words[0].as_str() {
                "MULTI" | "ASKING" => "+OK\r\n",
                "EXEC" => "-EXECABORT Transaction discarded because of previous errors.\r\n",
                "GET" => "+QUEUED\r\n",
                _ => said,
            })
        })
        .await;
        let node = node(client, port).await;
        for (asking, sent) in [(false, 1), (true, 2)] {
            let commands: [&[&str]; 3] = [&["GET", "n"], &["INCR", "n"], &["GET", "n"]];
            let error = transaction(&node, asking, &commands).await.expect_err(expected);
            assert_eq!(code(&error), expected, "asking: {asking}");
            assert_eq!((heard.of("INCR"), heard.of("EXEC")), (sent, sent), "sent once");
        }
    }
}

async fn no_other_request_runs_inside_a_transaction(client: Client) {
    let (port, heard) = server(|words| {
        Some(match words[0].as_str() {
            "EXEC" => "*2\r\n:1\r\n:2\r\n",
            _ => "+OK\r\n",
        })
    })
    .await;
    let node = node(client, port).await;
    let tasks: Vec<_> = (0..60)
        .map(|n| {
            let node = Arc::clone(&node);
            tokio::spawn(async move {
                let text = n.to_string();
                let both = ["FIRST", "SECOND"].map(|name| texts(&[name, &text]));
                let (asking, commands) = match n % 3 {
                    0 => (false, Commands::One(&[Argument::Text("ALONE")])),
                    1 => (true, Commands::One(&[Argument::Text("ASKED")])),
                    _ => (n % 2 == 0, Commands::Transaction(&both)),
                };
                node.send(asking, commands).await.map(drop)
            })
        })
        .collect();
    for task in tasks {
        timeout(PATIENCE, task).await.expect("in time").expect("no panic").expect("answered");
    }
    let heard = heard.0.lock().expect("no panic");
    let mut seen = BTreeSet::new();
    for (at, words) in heard.iter().enumerate() {
        let next = |n: usize| heard[at + n].clone();
        match words[0].as_str() {
            "ASKING" => assert!(matches!(next(1)[0].as_str(), "ASKED" | "MULTI"), "{heard:?}"),
            "MULTI" => {
                assert_eq!((&*next(1)[0], &*next(2)[0], &*next(3)[0]), ("FIRST", "SECOND", "EXEC"));
                assert_eq!(next(1)[1], next(2)[1]);
            }
            "ASKED" => assert_eq!(heard[at - 1][0], "ASKING"),
            _ => {}
        }
        seen.insert(words[0].clone());
    }
    assert_eq!(seen.len(), 7, "{seen:?}");
}

async fn a_request_on_an_ended_connection_fails_at_once(client: Client) {
    let (port, heard) = server(|_| None).await;
    let node = node(client, port).await;
    send(&node, &["LAST"]).await.expect_err("no answer");
    for _ in 0..3 {
        let error = send(&node, &["MORE"]).await.expect_err("it has ended");
        assert!(
            matches!(error, RedisError::Lost { .. } | RedisError::Unreachable { .. }),
            "{error:?}"
        );
        transaction(&node, false, &[&["MORE"]]).await.expect_err("it has ended");
    }
    assert_eq!(heard.of("MORE"), 0);
}

async fn a_request_whose_runtime_ends_may_have_been_done(client: Client) {
    let (port, heard) = server(|_| Some("")).await;
    // What the client notices first differs.
    for sent in 1..=20 {
        let own = tokio::runtime::Runtime::new().expect("a runtime");
        let node = own.spawn(node(client, port)).await.expect("no panic");
        let sending = sending(&node, "SENT");
        heard.until(sent, "SENT").await;
        own.shutdown_background();
        let error = sending.await.expect("no panic").expect_err("no answer");
        assert!(matches!(error, RedisError::Lost { .. }), "{error:?}");
        send(&node, &["LATER"]).await.expect_err("nothing drives it");
        assert_eq!(heard.of("LATER"), 0);
    }
}

/// Their futures are polled once and kept, as by a timeout around all of them.
async fn requests_that_are_kept_hold_up_no_other(client: Client) {
    let redis = RedisServer::start().expect("redis-server");
    let node = node(client, redis.port()).await;
    let mut kept: Vec<_> = (0..2_000).map(|_| Box::pin(send(&node, &["PING"]))).collect();
    let mut context = Context::from_waker(Waker::noop());
    for future in &mut kept {
        let _ = future.as_mut().poll(&mut context);
    }
    assert_eq!(send(&node, &["ECHO", "a"]).await.expect("answered"), Reply::Text(b"a".to_vec()));
}

/// fred closes the connection after this error, and reports it to all pending requests.
#[cfg(feature = "fred")]
#[tokio::test]
async fn an_error_that_may_belong_to_another_request_is_no_reply() {
    let (port, heard) = server(|words| {
        // The first reply belongs to the first request.
        Some(if words[0] == "SECOND" { "-CLUSTERDOWN The cluster is down\r\n" } else { "" })
    })
    .await;
    let node = node(Client::Fred, port).await;
    let first = sending(&node, "FIRST");
    heard.until(1, "FIRST").await;
    let second = send(&node, &["SECOND"]).await.expect_err("the connection ends");
    let first = first.await.expect("no panic").expect_err("the connection ends");
    for error in [first, second] {
        assert!(matches!(error, RedisError::Lost { .. }), "{error:?}");
    }
}

/// An abandoned request may still be pending, so that another one's error may be its reply.
#[cfg(feature = "fred")]
#[tokio::test]
async fn an_error_after_an_abandoned_request_is_no_reply() {
    let (port, heard) = server(|words| {
        Some(if words[0] == "GIVENUP" { "" } else { "-CLUSTERDOWN The cluster is down\r\n" })
    })
    .await;
    let node = node(Client::Fred, port).await;
    let given_up = timeout(Duration::from_millis(10), send(&node, &["GIVENUP"]));
    given_up.await.expect_err("no answer");
    heard.until(1, "GIVENUP").await;
    let error = send(&node, &["LAST"]).await.expect_err("down");
    assert!(matches!(error, RedisError::Lost { .. }), "whose answer is it: {error:?}");
}

async fn dropping_a_node_closes_its_connection(client: Client) {
    let (port, heard) = server(|_| Some("+OK\r\n")).await;
    let node = node(client, port).await;
    send(&node, &["ANY"]).await.expect("answered");
    assert_eq!(heard.of(END), 0);
    drop(node);
    timeout(PATIENCE, heard.until(1, END)).await.expect("it ends");
}

async fn an_abandoned_connection_attempt_closes_its_socket(client: Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = endpoint(client, listener.local_addr().expect("bound").port());
    let (mut stream, _) = tokio::select! {
        _ = Node::connect(&endpoint) => panic!("no server answers"),
        begun = listener.accept() => begun.expect("a caller"),
    };
    let ended = timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await;
    let _ = ended.expect("in time");
}

#[tokio::test]
async fn a_dead_first_address_does_not_make_a_host_unreachable() {
    let server = RedisServer::start().expect("redis-server");
    // It accepts connections and sends nothing.
    let dead = TcpListener::bind(("127.0.0.2", 0)).await.expect("a port");
    let dead = dead.local_addr().expect("bound");
    let alive = SocketAddr::from(([127, 0, 0, 1], server.port()));
    let refuses = SocketAddr::from(([127, 0, 0, 2], server.port()));
    for client in Client::ALL {
        let settings = Settings { client: *client, ..Settings::default() };
        let endpoint = Endpoint::new("redis.example", 6_379, &Arc::new(settings));
        for first in [vec![dead], vec![refuses], vec![dead, refuses], vec![]] {
            let addresses = [first, vec![alive]].concat().into_iter();
            let connected = timeout(PATIENCE, Node::connect_to_any(&endpoint, addresses)).await;
            assert!(connected.expect("in time").is_ok(), "{client}");
        }
        let away = [refuses, refuses].into_iter();
        let Err(error) = Node::connect_to_any(&endpoint, away).await else {
            panic!("no server is there")
        };
        assert!(error.to_string().contains("redis.example:6379"), "{error}");
    }
}
