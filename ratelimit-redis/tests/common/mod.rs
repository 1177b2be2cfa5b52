//! Looking at a server, and meddling with it, beside the store under test.

use ratelimit_testkit::RedisServer;

/// A connection beside the store's, to look and to meddle.
pub(crate) fn aside(server: &RedisServer) -> redis::Connection {
    let client = redis::Client::open(server.url()).expect("a URL");
    client.get_connection().expect("the server is up")
}

/// Sends a command and takes its answer.
pub(crate) fn query<T: redis::FromRedisValue>(
    connection: &mut redis::Connection,
    words: &[&str],
) -> T {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(*word);
    }
    command.query(connection).expect("the server answers")
}
