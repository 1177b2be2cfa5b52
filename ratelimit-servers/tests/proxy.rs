//! Every fault of the proxy, observed from both sides.
#![cfg(unix)]
#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ratelimit_servers::{FaultProxy, RedisServer, RespClient, RespValue};

const INCR: &[u8] = b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n";
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

/// A server, a proxy in front of it, and a connection through the proxy that has been used.
fn behind_a_proxy() -> (RedisServer, FaultProxy, TcpStream) {
    let server = RedisServer::start().expect("a server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let stream = through(&proxy);
    (server, proxy, stream)
}

/// A connection through the proxy that has been used.
fn through(proxy: &FaultProxy) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    assert_eq!(ask(&mut stream, PING, 7), b"+PONG\r\n");
    stream
}

fn ask(stream: &mut TcpStream, request: &[u8], reply_bytes: usize) -> Vec<u8> {
    stream.write_all(request).expect("sent");
    let mut reply = vec![0; reply_bytes];
    stream.read_exact(&mut reply).expect("a reply");
    reply
}

/// Everything that arrives until the connection is cut.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("not cut: {error}"),
        _ => rest,
    }
}

/// Whether nothing arrives for a while and the connection stays open.
fn silent(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let outcome = stream.read(&mut [0]);
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    outcome.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
}

fn counted(server: &RedisServer) -> String {
    server.command(&["GET", "n"]).expect("a reply").to_string()
}

#[test]
fn a_proxy_without_faults_is_transparent() {
    let (server, proxy, mut stream) = behind_a_proxy();
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}", proxy.port()));
    let (many, replies) = (INCR.repeat(1000), (1..=1000).map(|n| format!(":{n}\r\n")));
    let replies: String = replies.collect();
    assert_eq!(ask(&mut stream, &many, replies.len()), replies.as_bytes());
    let mut client = RespClient::connect(proxy.port()).expect("it listens");
    let large = "x".repeat(3_000_000);
    assert_eq!(client.command(&["SET", "large", &large]), Ok(RespValue::text("OK")));
    assert_eq!(client.command(&["GET", "large"]), Ok(RespValue::text(&large)));
    assert_eq!(ask(&mut stream, b"GET n\r\n", 10), b"$4\r\n1000\r\n", "inline, too");
    assert_eq!((proxy.connections(), proxy.open_connections()), (2, 2));
    drop(server);
    assert_eq!(rest(&mut stream), b"", "the server's end is the connection's");
}

#[test]
fn a_request_whose_reply_is_swallowed_has_been_executed() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.swallow_replies(2);
    for done in 1..=2 {
        stream.write_all(INCR).expect("sent");
        assert_eq!(rest(&mut stream), b"");
        assert_eq!((counted(&server), proxy.swallowed()), (done.to_string(), done));
        if done == 1 {
            stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("it listens");
        }
    }
    assert_eq!(ask(&mut through(&proxy), INCR, 4), b":3\r\n");
}

#[test]
fn only_replies_to_matching_requests_are_swallowed() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.swallow_matching("INCR", 1);
    let mut untouched = through(&proxy);
    stream.write_all(&[PING, INCR, PING].concat()).expect("sent");
    assert_eq!(rest(&mut stream), b"+PONG\r\n", "what came before is answered, and no more");
    assert_eq!(counted(&server), "1");
    assert_eq!(ask(&mut untouched, INCR, 4), b":2\r\n", "it was once");
}

#[test]
fn nested_replies_and_pushes_do_not_confuse_the_proxy() {
    let (server, proxy, _) = behind_a_proxy();
    let mut client = RespClient::connect(proxy.port()).expect("it listens");
    client.command(&["HELLO", "3"]).expect("RESP3").ok().expect("a map");
    client.command(&["CLIENT", "TRACKING", "ON", "BCAST"]).expect("a reply").ok().expect("OK");
    proxy.swallow_matching("INCR", 1);
    let nested = "return {1, {2, {3, false}}, 'x'}";
    client.send(&["EVAL", nested, "0"]).expect("sent");
    client.send(&["HGETALL", "absent"]).expect("sent");
    client.send(&["INCR", "n"]).expect("sent");
    assert_eq!(client.receive().expect("the array").to_string(), "[1, [2, [3, (nil)]], x]");
    assert_eq!(client.receive(), Ok(RespValue::Array(vec![])));
    loop {
        match client.receive() {
            Ok(push) => assert!(push.to_string().starts_with("[invalidate"), "{push}"),
            Err(message) => {
                break assert!(
                    message.contains("closed") || message.contains("reset"),
                    "{message}"
                );
            }
        }
    }
    assert_eq!(counted(&server), "1");
}

#[test]
fn a_cut_request_never_reaches_the_server() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.cut_matching("INCR", 1);
    stream.write_all(&[PING, INCR, PING].concat()).expect("sent");
    assert_eq!(rest(&mut stream), b"+PONG\r\n", "what came before is answered, and no more");
    assert_eq!((counted(&server).as_str(), proxy.requests_cut()), ("(nil)", 1));
    let mut stream = through(&proxy);
    proxy.cut_requests(1);
    stream.write_all(PING).expect("sent");
    assert_eq!(rest(&mut stream), b"");
    assert_eq!(ask(&mut through(&proxy), INCR, 4), b":1\r\n");
}

#[test]
fn a_delay_applies_in_both_directions() {
    let (_server, proxy, mut stream) = behind_a_proxy();
    proxy.delay(Duration::from_millis(40));
    let begin = Instant::now();
    ask(&mut stream, PING, 7);
    assert!(begin.elapsed() >= Duration::from_millis(80), "{:?}", begin.elapsed());
    proxy.heal();
}

#[test]
fn a_half_open_connection_passes_nothing_and_stays_open() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.hang(true);
    stream.write_all(INCR).expect("sent");
    let mut new = TcpStream::connect(("127.0.0.1", proxy.port())).expect("accepted");
    new.write_all(PING).expect("sent");
    assert!(silent(&mut stream) && silent(&mut new));
    assert_eq!(counted(&server), "(nil)");
    proxy.hang(false);
    assert_eq!(ask(&mut stream, b"", 4), b":1\r\n", "late, but it arrives");
    new.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    assert_eq!(ask(&mut new, b"", 7), b"+PONG\r\n");
}

#[test]
fn a_hanging_proxy_hides_the_end_of_the_server() {
    let (mut server, proxy, mut stream) = behind_a_proxy();
    proxy.hang(true);
    server.stop();
    assert!(silent(&mut stream));
    proxy.hang(false);
    assert_eq!(rest(&mut stream), b"");
    server.restart().expect("again");
    through(&proxy);
}

#[test]
fn cut_all_closes_open_connections_and_accepts_new_ones() {
    let (_server, proxy, mut stream) = behind_a_proxy();
    let mut another = through(&proxy);
    proxy.cut_all();
    assert_eq!(proxy.open_connections(), 0);
    assert_eq!((rest(&mut stream), rest(&mut another)), (vec![], vec![]));
    through(&proxy);
    assert_eq!(proxy.connections(), 3);
}

#[test]
fn refuse_affects_new_connections_only() {
    let (_server, proxy, mut stream) = behind_a_proxy();
    for _ in 0..3 {
        proxy.refuse(true);
        proxy.refuse(true);
        let refused = TcpStream::connect(("127.0.0.1", proxy.port()));
        assert_eq!(refused.expect_err("no process listens").kind(), ErrorKind::ConnectionRefused);
        assert_eq!(ask(&mut stream, PING, 7), b"+PONG\r\n");
        proxy.refuse(false);
        through(&proxy);
    }
    assert_eq!(proxy.connections(), 4);
}

#[test]
fn other_protocols_pass_unchanged() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.swallow_replies(1);
    // A TLS handshake: this server does not understand it, and answers nothing or an error.
    stream.write_all(b"\x16\x03\x01\r\n").expect("sent");
    assert!(rest_or_silence(&mut stream).is_none_or(|message| message.starts_with(b"-ERR")));
    assert_eq!(proxy.swallowed(), 0);
    proxy.heal();
    let mut client = RespClient::connect(proxy.port()).expect("it listens");
    let mut subscribed = client.command(&["SUBSCRIBE", "news"]).expect("subscribed").to_string();
    assert_eq!(subscribed, "[subscribe, news, 1]");
    server.command(&["PUBLISH", "news", "today"]).expect("published");
    subscribed = client.receive().expect("the news").to_string();
    assert_eq!(subscribed, "[message, news, today]");
}

fn rest_or_silence(stream: &mut TcpStream) -> Option<Vec<u8>> {
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let mut bytes = vec![0; 64];
    let read = stream.read(&mut bytes).ok()?;
    bytes.truncate(read);
    Some(bytes)
}

#[test]
fn a_proxy_ends_with_its_connections() {
    let (server, proxy, mut stream) = behind_a_proxy();
    let port = proxy.port();
    proxy.hang(true);
    drop(proxy);
    assert_eq!(rest(&mut stream), b"");
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    assert!(server.command(&["PING"]).is_ok());
    let in_front_of_nothing = FaultProxy::start(port).expect("the port may be closed");
    let mut stream =
        TcpStream::connect(("127.0.0.1", in_front_of_nothing.port())).expect("the proxy does");
    assert_eq!(rest(&mut stream), b"");
}
