//! Every fault of the proxy, observed from both sides.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ratelimit_servers::{FaultProxy, RedisServer, RespClient, RespValue};

use super::ok;

const INCR: &[u8] = b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n";
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
/// As TLS begins: no request, and no reply either.
const HELLO: &[u8] = b"\x16\x03\x01\x02";

/// A server, a proxy in front of it, and a connection through the proxy that has been used.
fn behind_a_proxy() -> (RedisServer, FaultProxy, TcpStream) {
    let server = RedisServer::start().expect("a server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let stream = through(&proxy);
    (server, proxy, stream)
}

/// A connection to the proxy.
fn to(proxy: &FaultProxy) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    stream
}

/// A connection through the proxy that has been used.
fn through(proxy: &FaultProxy) -> TcpStream {
    let mut stream = to(proxy);
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

/// Nothing arrives for a while, and the connection stays open.
fn is_silent(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let kind = stream.read(&mut [0]).expect_err("nothing").kind();
    assert!(matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{kind}");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
}

fn counted(server: &RedisServer) -> String {
    server.command(&["GET", "n"]).expect("a reply").to_string()
}

#[test]
fn only_matching_requests_lose_their_replies_or_never_reach_the_server() {
    let (server, proxy, mut stream) = behind_a_proxy();
    let mut untouched = through(&proxy);
    proxy.swallow_matching("INCR", 2);
    for (executed, is_cut) in [(1, false), (2, false), (2, true)] {
        if is_cut {
            proxy.cut_matching("INCR", 1);
        }
        stream.write_all(&[PING, INCR, PING].concat()).expect("sent");
        assert_eq!(rest(&mut stream), b"+PONG\r\n", "what came before is answered, and no more");
        assert_eq!((counted(&server), proxy.swallowed()), (executed.to_string(), executed));
        stream = through(&proxy);
    }
    assert_eq!(proxy.requests_cut(), 1);
    proxy.cut_matching("", 1);
    stream.write_all(PING).expect("sent");
    assert_eq!(rest(&mut stream), b"");
    for (stream, due) in [(&mut untouched, b":3\r\n"), (&mut through(&proxy), b":4\r\n")] {
        assert_eq!(ask(stream, INCR, 4), due);
    }
}

#[test]
fn nested_replies_and_pushes_do_not_confuse_the_proxy() {
    let (server, proxy, _) = behind_a_proxy();
    let mut client = RespClient::connect(proxy.port()).expect("it listens");
    client.command(&["HELLO", "3"]).expect("RESP3").ok().expect("a map");
    assert_eq!(client.command(&["CLIENT", "TRACKING", "ON", "BCAST"]), Ok(ok()));
    proxy.swallow_matching("INCR", 1);
    client.send(&["EVAL", "return {1, {2, {3, false}}, 'x'}", "0"]).expect("sent");
    client.send(&["HGETALL", "absent"]).expect("sent");
    client.send(&["INCR", "n"]).expect("sent");
    assert_eq!(client.receive().expect("the array").to_string(), "[1, [2, [3, (nil)]], x]");
    assert_eq!(client.receive(), Ok(RespValue::Array(vec![])));
    let message = loop {
        match client.receive() {
            Ok(push) => assert!(push.to_string().starts_with("[invalidate"), "{push}"),
            Err(message) => break message,
        }
    };
    assert!(message.contains("closed") || message.contains("reset"), "{message}");
    assert_eq!(counted(&server), "1");
}

#[test]
fn a_hanging_proxy_passes_nothing_and_hides_the_end_of_the_server() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.hang(true);
    stream.write_all(INCR).expect("sent");
    let mut new = to(&proxy);
    new.write_all(PING).expect("sent");
    is_silent(&mut stream);
    is_silent(&mut new);
    assert_eq!(counted(&server), "(nil)");
    proxy.hang(false);
    assert_eq!(ask(&mut stream, b"", 4), b":1\r\n", "late, but it arrives");
    assert_eq!(ask(&mut new, b"", 7), b"+PONG\r\n");
    proxy.hang(true);
    server.stop();
    is_silent(&mut stream);
    proxy.hang(false);
    assert_eq!(rest(&mut stream), b"");
    server.restart().expect("again");
    through(&proxy);
}

/// What is held back passes when it is released, and never once its connection is cut.
#[test]
fn a_hold_lets_one_direction_pass_and_begins_at_what_matches() {
    let (server, proxy, mut stream) = behind_a_proxy();
    proxy.hold_requests("INCR");
    assert_eq!(ask(&mut stream, PING, 7), b"+PONG\r\n");
    assert!(!proxy.is_holding());
    stream.write_all(INCR).expect("sent");
    is_silent(&mut stream);
    assert!(proxy.is_holding());
    assert_eq!(counted(&server), "(nil)");
    proxy.hold_replies("INCR");
    is_silent(&mut stream);
    assert!(proxy.is_holding());
    assert_eq!(counted(&server), "1");
    proxy.release();
    assert!(!proxy.is_holding());
    assert_eq!(ask(&mut stream, b"", 4), b":1\r\n");
    proxy.hold_requests("");
    stream.write_all(INCR).expect("sent");
    is_silent(&mut stream);
    proxy.cut_all();
    proxy.release();
    assert_eq!(rest(&mut stream), b"");
    assert_eq!(counted(&server), "1");
}

#[test]
fn refuse_affects_new_connections_only_and_cut_all_open_ones_only() {
    let (_server, proxy, mut stream) = behind_a_proxy();
    let mut another = through(&proxy);
    for _ in 0..3 {
        proxy.refuse(true);
        proxy.refuse(true);
        let refused = TcpStream::connect(("127.0.0.1", proxy.port()));
        assert_eq!(refused.expect_err("no process listens").kind(), ErrorKind::ConnectionRefused);
        assert_eq!(ask(&mut stream, PING, 7), b"+PONG\r\n");
        proxy.refuse(false);
        through(&proxy);
    }
    proxy.cut_all();
    assert_eq!((rest(&mut stream), rest(&mut another)), (vec![], vec![]));
    through(&proxy);
    assert_eq!(proxy.connections(), 6);
}

#[test]
fn silence_affects_open_connections_only_and_a_delay_all() {
    let (_server, proxy, mut stream) = behind_a_proxy();
    proxy.silence();
    stream.write_all(PING).expect("sent");
    let delay = Duration::from_millis(5);
    proxy.delay(delay..2 * delay);
    let begin = Instant::now();
    through(&proxy);
    assert!(begin.elapsed() >= 2 * delay, "there and back: {:?}", begin.elapsed());
    proxy.heal();
    is_silent(&mut stream);
}

#[test]
fn other_protocols_pass_unchanged_both_ways() {
    let (server, proxy, _) = behind_a_proxy();
    let mut client = RespClient::connect(proxy.port()).expect("it listens");
    let subscribed = client.command(&["SUBSCRIBE", "news"]).expect("subscribed").to_string();
    assert_eq!(subscribed, "[subscribe, news, 1]");
    server.command(&["PUBLISH", "news", "today"]).expect("published");
    assert_eq!(client.receive().expect("the news").to_string(), "[message, news, today]");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let proxy = FaultProxy::start(listener.local_addr().expect("bound").port()).expect("a proxy");
    proxy.swallow_matching("", 1);
    let mut stream = to(&proxy);
    let (mut accepted, _) = listener.accept().expect("a caller");
    ask(&mut accepted, HELLO, 0);
    assert_eq!(ask(&mut stream, b"", HELLO.len()), HELLO, "also before any request");
    ask(&mut stream, HELLO, 0);
    assert_eq!(ask(&mut accepted, b"", HELLO.len()), HELLO);
    assert_eq!(proxy.swallowed(), 0);
}
