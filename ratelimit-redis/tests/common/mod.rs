//! Looking at a server, and meddling with it, beside the store under test.

#![allow(dead_code, reason = "not everybody needs all of it")]

use ratelimit_redis::Client;
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

/// The server's URL, for a store by this client.
pub(crate) fn url(server: &RedisServer, client: Client) -> String {
    with_client(&server.url(), client)
}

/// A URL, for a store by this client.
pub(crate) fn with_client(url: &str, client: Client) -> String {
    let name = match client {
        #[cfg(feature = "redis")]
        Client::Redis => "redis",
        #[cfg(feature = "fred")]
        Client::Fred => "fred",
        other => panic!("a client that has no name: {other:?}"),
    };
    let mark = if url.contains('?') { '&' } else { '?' };
    format!("{url}{mark}client={name}")
}

/// Runs each of these cases by each client that there is.
#[allow(unused_macros, reason = "not by everybody who looks")]
macro_rules! with_each_client {
    ($($case:ident),* $(,)?) => {
        #[cfg(feature = "redis")]
        mod by_redis {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(ratelimit_redis::Client::Redis).await;
                }
            )*
        }

        #[cfg(feature = "fred")]
        mod by_fred {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(ratelimit_redis::Client::Fred).await;
                }
            )*
        }
    };
}
