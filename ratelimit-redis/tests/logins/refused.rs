//! Servers that refuse a login and explain it in their own words.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ratelimit_core::{ErrorKind, StoreError};
use ratelimit_redis::{Client, RedisError, RedisStore};
use ratelimit_testkit::RedisServer;

use super::fake::{self, MANNERS};
use super::{
    ESCAPED, Leaks, PASSWORD, PATIENCE, Told, USER, logs_no_password, told_by, with_client,
};

/// Every kind of URL that logs in to a server on this port.
fn ways(port: u16) -> Vec<String> {
    let mut ways = Vec::new();
    for protocol in ["resp2", "resp3"] {
        for login in [format!(":{ESCAPED}"), format!("{USER}:{ESCAPED}")] {
            for kind in ["redis", "redis-cluster"] {
                ways.push(format!("{kind}://{login}@127.0.0.1:{port}?protocol={protocol}"));
            }
            ways.push(format!("redis://{login}@127.0.0.1:{port}/3?protocol={protocol}"));
        }
        ways.push(format!(
            "redis-sentinel://{USER}:{ESCAPED}@127.0.0.1:{port}/cache?protocol={protocol}\
             &sentinel-user={USER}&sentinel-password={ESCAPED}"
        ));
    }
    ways
}

async fn a_servers_words_that_quote_a_login_are_withheld(client: Client) {
    let mut leaks = Leaks::default();
    let told = MANNERS.map(|manner| async move {
        let port = fake::start(manner).await;
        let told = ways(port).into_iter().map(|url| async move {
            // The clients wait forever for some replies.
            let told = told_by(&url, client, Duration::from_millis(300)).await;
            (format!("{manner:?}: {url}"), told)
        });
        join_all(told).await
    });
    for (case, told) in join_all(told).await.into_iter().flatten() {
        told.keeps_secret(&case, &mut leaks);
        assert!(told.0.len() > 4, "{case}: nothing went wrong");
    }
    logs_no_password(&mut leaks);
    leaks.none();
}

/// A real server with these arguments and commands, and what the error must say.
struct Refusing {
    what: &'static str,
    args: &'static [&'static str],
    told: &'static [&'static [&'static str]],
    /// The login and the options of the URL.
    login: &'static str,
    options: &'static str,
    says: &'static [&'static str],
    kind: ErrorKind,
}

const REFUSING: [Refusing; 14] = [
    Refusing {
        what: "no HELLO",
        args: &["--rename-command", "HELLO", ""],
        told: &[],
        login: ":PW@",
        options: "?protocol=resp3",
        says: &["HELLO", "protocol=resp2"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no HELLO, and a user",
        args: &["--rename-command", "HELLO", ""],
        told: &[],
        login: "us3r:PW@",
        options: "?protocol=resp3",
        says: &["HELLO", "protocol=resp2"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no AUTH",
        args: &["--rename-command", "AUTH", ""],
        told: &[],
        login: ":PW@",
        options: "",
        says: &["AUTH", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no AUTH, and a user",
        args: &["--rename-command", "AUTH", ""],
        told: &[],
        login: "us3r:PW@",
        options: "",
        says: &["AUTH", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no such user",
        args: &[],
        told: &[],
        login: "us3r:PW@",
        options: "",
        says: &["the user or the password is wrong", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no such user, RESP3",
        args: &[],
        told: &[],
        login: "us3r:PW@",
        options: "?protocol=resp3",
        says: &["the user or the password is wrong", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "another password",
        args: &["--requirepass", "other"],
        told: &[],
        login: ":PW@",
        options: "",
        says: &["the user or the password is wrong", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no login where one is wanted",
        args: &["--requirepass", "other"],
        told: &[],
        login: "",
        options: "",
        says: &["log in: give user and password", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no login where one is wanted, RESP3",
        args: &["--requirepass", "other"],
        told: &[],
        login: "",
        options: "?protocol=resp3",
        says: &["log in: give user and password", "user:password@host"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "a user who may nothing",
        args: &[],
        told: &[&["ACL", "SETUSER", "us3r", "on", ">PASSWORD", "-@all"]],
        login: "us3r:PW@",
        options: "",
        says: &["ACL SETUSER"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "a user who may nothing, RESP3",
        args: &[],
        told: &[&["ACL", "SETUSER", "us3r", "on", ">PASSWORD", "-@all"]],
        login: "us3r:PW@",
        options: "?protocol=resp3",
        says: &["ACL SETUSER"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "a user who may not SELECT",
        args: &[],
        told: &[&["ACL", "SETUSER", "us3r", "on", ">PASSWORD", "~*", "+@all", "-select"]],
        login: "us3r:PW@",
        options: "/3",
        says: &["SELECT", "ACL SETUSER"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no such database",
        args: &["--databases", "2"],
        told: &[],
        login: "",
        options: "/3",
        says: &["DB index is out of range", "databases"],
        kind: ErrorKind::Config,
    },
    Refusing {
        what: "no more clients",
        args: &["--maxclients", "1"],
        told: &[],
        login: ":PW@",
        options: "",
        says: &["maxclients"],
        kind: ErrorKind::Unavailable,
    },
];

impl Refusing {
    /// Checks that the error hides the server's words and names the place and the remedy.
    async fn reservations(&self, client: Client, leaks: &mut Leaks) {
        let server = RedisServer::start_with(&RedisServer::binaries()[0], self.args);
        let server = server.expect("redis-server");
        for words in self.told {
            let words: Vec<_> =
                words.iter().map(|word| word.replace("PASSWORD", PASSWORD)).collect();
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            let told = server.command(&words).expect("it is up").ok();
            told.unwrap_or_else(|error| panic!("{}: {error}", self.what));
        }
        // The only connection of a server whose connection limit is one, once the server has noticed that the
        // connection that found it ready is closed.
        let begun = Instant::now();
        let _watching = loop {
            let answered = server.client().and_then(|mut client| {
                client.command(&["PING"])?.ok()?;
                Ok(client)
            });
            match answered {
                Ok(client) => break client,
                Err(error) => assert!(begun.elapsed() < PATIENCE, "{}: {error}", self.what),
            }
        };
        let login = self.login.replace("PW", ESCAPED);
        let place = format!("127.0.0.1:{}", server.port());
        let url = with_client(&format!("redis://{login}{place}{}", self.options), client);
        let error = RedisStore::builder().deadline(PATIENCE).connect(&url).await;
        let error = error.expect_err(self.what);
        let mut told = Told::default();
        told.error(&error);
        told.keeps_secret(self.what, leaks);
        let said = error.to_string();
        for part in [&*place].iter().chain(self.says) {
            assert!(said.contains(part), "{} by {client}: no {part:?} in: {said}", self.what);
        }
        assert_eq!(error.kind(), self.kind, "{} by {client}: {error:?}", self.what);
    }
}

async fn a_refused_login_names_the_server_and_the_remedy(client: Client) {
    super::watch_logs();
    let mut leaks = Leaks::default();
    for refusing in &REFUSING {
        refusing.reservations(client, &mut leaks).await;
    }
    logs_no_password(&mut leaks);
    leaks.none();
}

/// So that clients can be given a password before the server is.
async fn a_password_that_the_server_does_not_ask_for_is_accepted(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    for login in ["", "default"] {
        for protocol in ["resp2", "resp3"] {
            let place = format!("127.0.0.1:{}?protocol={protocol}", server.port());
            let url = format!("redis://{login}:{ESCAPED}@{place}");
            let store = RedisStore::connect(&with_client(&url, client)).await;
            store.unwrap_or_else(|error| panic!("{url}: {error}"));
        }
    }
}

async fn a_missing_permission_is_reported_without_the_user(client: Client) {
    let mut leaks = Leaks::default();
    let server = RedisServer::start().expect("redis-server");
    let password = format!(">{PASSWORD}");
    for (rights, says) in [("+ping", "evalsha"), ("+ping +evalsha +eval", "ACL SETUSER")] {
        let mut words = vec!["ACL", "SETUSER", USER, "reset", "on", &password, "~*"];
        words.extend(rights.split(' '));
        server.command(&words).expect("it is up").ok().expect("a user");
        let url = format!("redis://{USER}:{ESCAPED}@127.0.0.1:{}", server.port());
        let told = told_by(&url, client, PATIENCE).await;
        told.keeps_secret(rights, &mut leaks);
        assert!(told.0.iter().any(|said| said.contains(says)), "{rights}: {:?}", told.0);
    }
    leaks.none();
}

/// The same for external clients, whose login the store does not know.
#[cfg(feature = "connection-manager")]
mod given {
    use ratelimit_core::Store;
    use redis::aio::{ConnectionManager, ConnectionManagerConfig};

    use super::*;

    fn manager(url: &str) -> ConnectionManager {
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(0)
            .set_response_timeout(Some(PATIENCE));
        redis::Client::open(url)
            .expect("a URL")
            .get_connection_manager_lazy(config)
            .expect("nothing is sent yet")
    }

    #[tokio::test]
    async fn a_managers_login_failure_reveals_no_login() {
        let mut leaks = Leaks::default();
        for (args, protocol) in [
            (&["--rename-command", "HELLO", ""][..], "resp3"),
            (&["--rename-command", "AUTH", ""], "resp2"),
            (&["--requirepass", "other"], "resp3"),
            (&["--requirepass", "other"], "resp2"),
        ] {
            let server = RedisServer::start_with(&RedisServer::binaries()[0], args);
            let server = server.expect("redis-server");
            let port = server.port();
            for login in [format!(":{ESCAPED}"), format!("{USER}:{ESCAPED}")] {
                let url = format!("redis://{login}@127.0.0.1:{port}?protocol={protocol}");
                let store = RedisStore::builder().over(manager(&url)).expect("a prefix");
                let mut told = Told::default();
                told.debug(&store);
                told.error(&asked(&store).await);
                told.keeps_secret(&url, &mut leaks);
            }
        }
        for manner in MANNERS {
            let port = fake::start(manner).await;
            let url = format!("redis://{USER}:{ESCAPED}@127.0.0.1:{port}?protocol=resp3");
            let builder = RedisStore::builder().deadline(Duration::from_secs(2));
            let store = builder.over(manager(&url)).expect("a prefix");
            let mut told = Told::default();
            told.error(&asked(&store).await);
            told.keeps_secret(&format!("{manner:?}: {url}"), &mut leaks);
        }
        leaks.none();
    }

    async fn asked<C: ratelimit_redis::Connection>(
        store: &RedisStore<ratelimit_redis::Lua, C>,
    ) -> RedisError {
        let limit = ratelimit_core::Limit::new(
            "seldom",
            ratelimit_core::Gcra::new("3/3650d".parse().unwrap(), 3).unwrap(),
        );
        let limit = limit.unwrap();
        let check = ratelimit_core::Check { limit: &limit, key: "a", cost: 1 };
        store.apply(&ratelimit_core::Batch::one(&check)).await.expect_err("it is refused")
    }
}

with_each_client! {
    a_servers_words_that_quote_a_login_are_withheld,
    a_refused_login_names_the_server_and_the_remedy,
    a_password_that_the_server_does_not_ask_for_is_accepted,
    a_missing_permission_is_reported_without_the_user,
}
