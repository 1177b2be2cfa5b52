//! Servers that refuse a login and explain it in their own words.

use std::slice;

use futures_util::future::join_all;

use super::fake::{self, MANNERS};
use super::{ESCAPED, Leaks, PASSWORD, Told, USER, told_by};
use crate::common::prelude::*;

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
    leaks.none();
}

const WRONG: &str = "the user or the password is wrong";
const NONE: &str = "log in: give user and password";
const WHERE: &str = "user:password@host";
const RESP3: &str = "?protocol=resp3";

/// The arguments of a real server, the permissions of a user there, the logins and options of URLs,
/// and what each error must say.
type Refusing = (
    &'static [&'static str],
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static [&'static str],
);

const REFUSING: [Refusing; 9] = [
    (
        &["--rename-command", "HELLO", ""],
        "",
        &[(":PW@", RESP3), ("us3r:PW@", RESP3)],
        &["HELLO", "protocol=resp2"],
    ),
    (&["--rename-command", "AUTH", ""], "", &[(":PW@", ""), ("us3r:PW@", "")], &["AUTH", WHERE]),
    (&[], "", &[("us3r:PW@", ""), ("us3r:PW@", RESP3)], &[WRONG, WHERE]),
    (&["--requirepass", "other"], "", &[(":PW@", "")], &[WRONG, WHERE]),
    (&["--requirepass", "other"], "", &[("", ""), ("", RESP3)], &[NONE, WHERE]),
    (&[], "-@all", &[("us3r:PW@", ""), ("us3r:PW@", RESP3)], &["ACL SETUSER"]),
    (&[], "+@all -select", &[("us3r:PW@", "/3")], &["SELECT", "ACL SETUSER"]),
    (&["--databases", "2"], "", &[("", "/3")], &["DB index is out of range", "databases"]),
    (&["--maxclients", "1"], "", &[(":PW@", "")], &["maxclients"]),
];

/// The error hides the server's words and names the place and the remedy.
async fn a_refused_login_names_the_server_and_the_remedy(client: Client) {
    super::watch_logs();
    let mut leaks = Leaks::default();
    for (args, rights, urls, says) in REFUSING {
        let server = server_with(args);
        if !rights.is_empty() {
            permit(slice::from_ref(&server), USER, PASSWORD, &format!("~* {rights}"));
        }
        // The only connection of a server whose connection limit is one, once the server has
        // noticed that the connection that found it ready is closed.
        let _watching = until(async || {
            let mut client = server.client()?;
            client.command(&["PING"])?.ok()?;
            Ok::<_, String>(client)
        })
        .await;
        let (place, full) = (format!("127.0.0.1:{}", server.port()), says == ["maxclients"]);
        for (login, options) in urls {
            let url = format!("redis://{}{place}{options}", login.replace("PW", ESCAPED));
            let error = store_within(PATIENCE, &url, client).await.expect_err(&url);
            let mut told = Told::default();
            told.error(&error);
            told.keeps_secret(&url, &mut leaks);
            let said = error.to_string();
            for part in [&*place].iter().chain(says) {
                assert!(said.contains(part), "{url} by {client}: no {part:?} in: {said}");
            }
            let kind = if full { ErrorKind::Unavailable } else { ErrorKind::Config };
            assert_eq!(error.kind(), kind, "{url} by {client}: {error:?}");
        }
    }
    leaks.none();
}

/// So that clients can be given a password before the server is.
async fn a_password_that_the_server_does_not_ask_for_is_accepted(client: Client) {
    let server = server();
    for login in ["", "default"] {
        for protocol in ["resp2", "resp3"] {
            let place = format!("127.0.0.1:{}?protocol={protocol}", server.port());
            let _ = store(&format!("redis://{login}:{ESCAPED}@{place}"), client).await;
        }
    }
}

async fn a_missing_permission_is_reported_without_the_user(client: Client) {
    let (mut leaks, server) = (Leaks::default(), server());
    for (rights, says) in [("+ping", "evalsha"), ("+ping +evalsha +eval", "ACL SETUSER")] {
        permit(slice::from_ref(&server), USER, PASSWORD, &format!("~* {rights}"));
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
        let (mut leaks, mut servers, mut urls) = (Leaks::default(), Vec::new(), Vec::new());
        for args in [
            &["--rename-command", "HELLO", ""][..],
            &["--rename-command", "AUTH", ""],
            &["--requirepass", "other"],
        ] {
            let server = server_with(args);
            urls.extend(["resp2", "resp3"].map(|protocol| (server.port(), protocol)));
            servers.push(server);
        }
        for manner in MANNERS {
            urls.push((fake::start(manner).await, "resp3"));
        }
        for (port, protocol) in urls {
            let url = format!("redis://{USER}:{ESCAPED}@127.0.0.1:{port}?protocol={protocol}");
            let builder = RedisStore::builder().deadline(Duration::from_secs(2));
            let store = builder.over(manager(&url)).expect("a prefix");
            let mut told = Told::default();
            told.debug(&store);
            told.error(&acquire(&store, &seldom(), "a").await.expect_err(&url));
            told.keeps_secret(&url, &mut leaks);
        }
        leaks.none();
    }
}

with_each_client! {
    a_servers_words_that_quote_a_login_are_withheld,
    a_refused_login_names_the_server_and_the_remedy,
    a_password_that_the_server_does_not_ask_for_is_accepted,
    a_missing_permission_is_reported_without_the_user,
}
