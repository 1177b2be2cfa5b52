//! What no client shows of a server that speaks TLS.

use ratelimit_servers::{RedisServer, RespClient, RespValue};

#[test]
fn a_side_door_takes_commands_and_the_port_takes_none_in_plain_text() {
    let binary = &RedisServer::binaries()[0];
    let args = ["--tls-auth-clients", "yes", "--requirepass", "secret"];
    let server = RedisServer::start_tls_with(binary, &args).expect("a server with TLS");
    let port = server.port();
    assert_eq!(server.url(), format!("rediss://127.0.0.1:{port}"));
    let mut plain = RespClient::connect(port).expect("it listens");
    assert!(plain.command(&["PING"]).is_err());
    assert_eq!(server.command(&["PING"]), Ok(RespValue::text("PONG")));
    server.revive().expect("again");
    assert_eq!(server.command(&["PING"]), Ok(RespValue::text("PONG")));
}
