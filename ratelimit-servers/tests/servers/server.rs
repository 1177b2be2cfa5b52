//! Servers start quickly, restart on the same port, and say why if they do not.

use std::time::SystemTime;

use ratelimit_servers::{RedisServer, RespClient, RespValue};

use super::{ok, refused};

#[test]
fn a_server_answers_stops_and_starts_again_on_its_port() {
    let mut server = RedisServer::start().expect("a server");
    let port = server.port();
    let ping = || RespClient::connect(port)?.command(&["PING"]);
    assert_eq!(ping(), Ok(RespValue::text("PONG")));
    assert_eq!(server.url(), format!("redis://127.0.0.1:{port}"));
    server.stop();
    assert!(ping().is_err() && server.pid().is_none());
    let message = server.command(&["PING"]).expect_err("stopped");
    assert!(message.contains(&port.to_string()), "{message}");
    assert!(server.pause().is_err() && server.resume().is_err());
    server.restart().expect("again");
    assert_eq!(ping(), Ok(RespValue::text("PONG")));
    drop(server);
    assert!(ping().is_err());
}

#[test]
fn a_servers_clock_goes_where_it_is_set() {
    let (server, clock) = RedisServer::start_with_clock().expect("a server and cc");
    let ahead_s = || {
        let time = server.command(&["TIME"]).expect("it is up");
        let seconds: i64 = time.as_array()[0].as_text().expect("text").parse().expect("seconds");
        let now = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs();
        seconds - i64::try_from(now).expect("a time")
    };
    for due in [0, 3_600, -3_600] {
        clock.set_ahead(due).expect("its directory is there");
        assert!((due - 60..=due + 60).contains(&ahead_s()), "{}", ahead_s());
    }
}

#[test]
fn what_does_not_start_says_why_and_the_remedy() {
    let message = RedisServer::start_with("no-such-redis-server", &[]).expect_err("no such binary");
    assert!(message.contains("apt-get install redis-server"), "{message}");
    let message = RedisServer::start_with(&RedisServer::binaries()[0], &["--no-such-option", "1"])
        .expect_err("no such option");
    assert!(message.contains("no-such-option"), "in the server's own words: {message}");
}

#[test]
fn the_shared_server_is_started_once_and_answers_whatever_the_reply() {
    let server = RedisServer::shared().expect("a server");
    assert_eq!(server.command(&["SET", "command", "1"]), Ok(ok()));
    let same = RedisServer::shared().expect("the same");
    let listed = same.command(&["MGET", "command", "no such key"]).expect("a reply");
    assert_eq!(listed.as_array(), [RespValue::text("1"), RespValue::Nil]);
    assert!(refused(server.command(&["GET"])).contains("number of arguments"));
}

#[test]
fn a_replica_has_what_its_master_wrote_before() {
    let binary = &RedisServer::binaries()[0];
    let master = RedisServer::start_with(binary, &["--requirepass", "secret"]).expect("a server");
    let mut stranger = RespClient::connect(master.port()).expect("it listens");
    assert!(refused(stranger.command(&["PING"])).starts_with("NOAUTH"));
    assert_eq!(master.command(&["SET", "a", "1"]), Ok(ok()));
    let replica = RedisServer::replica_of(&master).expect("a replica");
    assert_eq!(replica.command(&["GET", "a"]), Ok(RespValue::text("1")));
    assert!(refused(replica.command(&["SET", "a", "2"])).starts_with("READONLY"));
    let mut client = master.client().expect("it listens");
    assert_eq!(client.command(&["SET", "a", "2"]), Ok(ok()));
    assert_eq!(client.command(&["WAIT", "1", "5000"]), Ok(RespValue::Integer(1)));
    assert_eq!(replica.command(&["GET", "a"]), Ok(RespValue::text("2")));
}
