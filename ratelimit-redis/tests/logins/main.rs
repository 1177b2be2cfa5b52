//! No user and no password is told: not by an error, nor by what it came from, nor by anything that can be
//! shown, nor in the clients' logs, wherever in a URL it was written and whatever a server says of it.
//! The place and the remedy are told all the same.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod fake;
mod refused;
mod urls;

use std::error::Error;
use std::fmt::Debug;
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use common::with_client;
use ratelimit_core::{Batch, Check, Gcra, Limit, Policy, Store};
use ratelimit_redis::{Client, RedisError, RedisStore};

/// As it is sent, and as it stands in a URL. The middle of it stands nowhere else.
const PASSWORD: &str = "pa5/s-w0rd";
const ESCAPED: &str = "pa5%2Fs-w0rd";
const USER: &str = "us3r";

/// What would give them away: a part of the password, as text and as the numbers of its bytes, and the user.
const GIVES_AWAY: [&str; 5] = ["w0rd", "119, 48, 114, 100", "us3r", "117, 115, 51, 114", "31337"];

/// Longer than anything here takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// All that has been said in one case, to be looked at.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    fn debug(&mut self, shown: &impl Debug) {
        self.0.extend([format!("{shown:?}"), format!("{shown:#?}")]);
    }

    /// An error, and everything that it came from.
    fn error(&mut self, error: &RedisError) {
        self.debug(error);
        let mut next: Option<&dyn Error> = Some(error);
        while let Some(error) = next {
            self.0.extend([error.to_string(), format!("{error:?}"), format!("{error:#?}")]);
            next = error.source();
        }
    }

    /// Notes whether anything of it gives something away.
    fn keeps_secret(&self, case: &str, leaks: &mut Leaks) {
        self.keeps(&GIVES_AWAY, case, leaks);
    }

    fn keeps(&self, secrets: &[&str], case: &str, leaks: &mut Leaks) {
        let gives = |said: &&String| secrets.iter().any(|part| said.contains(part));
        leaks.0.extend(self.0.iter().find(gives).map(|said| format!("{case}\n  → {said}")));
    }
}

/// What was given away, in all cases of a test.
#[derive(Default)]
struct Leaks(Vec<String>);

impl Leaks {
    fn none(&self) {
        assert!(self.0.is_empty(), "{} leaks:\n{}", self.0.len(), self.0.join("\n"));
    }
}

/// What the clients log.
struct Logs(Mutex<Vec<String>>);

static LOGS: Logs = Logs(Mutex::new(Vec::new()));

impl log::Log for Logs {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let told = record.args().to_string();
        // Over this answer to a request, which is no login, fred ends a connection and logs all of it.
        if record.target().starts_with("fred::router") && told.contains("CLUSTERDOWN") {
            return;
        }
        let said = format!("{} {}: {told}", record.level(), record.target());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(said);
    }

    fn flush(&self) {}
}

/// From now on what is logged is kept. All cases of this program log to one place, none of them a secret.
fn watch_logs() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LOGS).expect("nobody else");
        // At the level below, fred logs the error with which its task ends.
        log::set_max_level(log::LevelFilter::Debug);
    });
}

/// Notes whether a password was logged. Of a user fred logs what the server says that it may not.
fn logs_no_password(leaks: &mut Leaks) {
    let logged = Told(LOGS.0.lock().unwrap_or_else(PoisonError::into_inner).clone());
    logged.keeps(&GIVES_AWAY[..2], "logged", leaks);
}

/// Connects, and asks for whatever there is to be asked for; what all of it says.
async fn told_by(url: &str, client: Client, deadline: Duration) -> Told {
    watch_logs();
    let mut told = Told::default();
    let builder = RedisStore::builder().deadline(deadline);
    told.debug(&builder);
    let store = match builder.connect(&with_client(url, client)).await {
        Ok(store) => store,
        Err(error) => {
            told.error(&error);
            return told;
        }
    };
    told.debug(&store);
    let limit: Limit<Policy> =
        Limit::new("seldom", Gcra::new("3/3650d".parse().unwrap(), 3).unwrap().into()).unwrap();
    let batch = [Check { limit: &limit, key: "a", cost: 1 }];
    let batch = Batch::new(&batch).unwrap();
    let answers = [
        store.apply(&batch).await.map(drop),
        store.state(&limit, "a").await.map(drop),
        store.in_mode::<ratelimit_redis::Cas>().apply(&batch).await.map(drop),
    ];
    answers.iter().filter_map(|answer| answer.as_ref().err()).for_each(|error| told.error(error));
    let health = store.health().await;
    told.debug(&health);
    told.0.extend(health.findings().iter().map(ToString::to_string));
    told
}
