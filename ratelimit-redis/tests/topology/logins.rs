//! No user and no password shows in an error, its sources, any `Debug` output or the clients' logs,
//! whatever else is wrong with the URL and whatever a server says about the login. The place and
//! the remedy do show.

mod fake;
mod refused;

use std::error::Error;
use std::fmt::Debug;
use std::sync::{Once, PoisonError};

use crate::common::prelude::*;

/// As sent, and as escaped in a URL. The middle part occurs nowhere else.
const PASSWORD: &str = "pa5/s-w0rd";
const ESCAPED: &str = "pa5%2Fs-w0rd";
const USER: &str = "us3r";

/// The texts that reveal a secret: a part of the password, as text and as byte values, and the
/// user.
const GIVES_AWAY: [&str; 4] = ["w0rd", "119, 48, 114, 100", "us3r", "117, 115, 51, 114"];

/// Everything that was said in one case.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    fn debug(&mut self, shown: &impl Debug) {
        self.0.extend([format!("{shown:?}"), format!("{shown:#?}")]);
    }

    /// Records an error and all its sources.
    fn error(&mut self, error: &RedisError) {
        self.debug(error);
        let mut next: Option<&dyn Error> = Some(error);
        while let Some(error) = next {
            self.0.extend([error.to_string(), format!("{error:?}"), format!("{error:#?}")]);
            next = error.source();
        }
    }

    /// Records whether any of it reveals a secret.
    fn keeps_secret(&self, case: &str, leaks: &mut Leaks) {
        let gives = |said: &&String| GIVES_AWAY.iter().any(|part| said.contains(part));
        leaks.0.extend(self.0.iter().find(gives).map(|said| format!("{case}\n  → {said}")));
    }
}

/// The secrets that were revealed, over all cases of a test.
#[derive(Default)]
struct Leaks(Vec<String>);

impl Leaks {
    /// There are none, and none in the logs.
    fn none(mut self) {
        LOGS.0.lock().unwrap_or_else(PoisonError::into_inner).keeps_secret("logged", &mut self);
        assert!(self.0.is_empty(), "{} leaks:\n{}", self.0.len(), self.0.join("\n"));
    }
}

/// What the clients' logs have said of a password. All tests of this program share one log. fred
/// does log a user, in the server's words about missing permissions.
struct Logs(Mutex<Told>);

static LOGS: Logs = Logs(Mutex::new(Told(Vec::new())));

impl log::Log for Logs {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let told = record.args().to_string();
        // After this reply to a request, which is no login, fred closes a connection and logs the
        // whole reply.
        if record.target().starts_with("fred::router") && told.contains("CLUSTERDOWN") {
            return;
        }
        if GIVES_AWAY[..2].iter().any(|part| told.contains(part)) {
            let said = format!("{} {}: {told}", record.level(), record.target());
            self.0.lock().unwrap_or_else(PoisonError::into_inner).0.push(said);
        }
    }

    fn flush(&self) {}
}

/// Records logs from now on.
fn watch_logs() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LOGS).expect("no other logger");
        // At the level below, fred logs the error with which its task ends.
        log::set_max_level(log::LevelFilter::Debug);
    });
}

/// Connects, and calls everything that can be called. Returns all that was said.
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
    let limit = seldom();
    let answers = [
        acquire(&store, &limit, "a").await.map(drop),
        store.state(&limit, "a").await.map(drop),
        acquire(&store.in_mode::<Cas>(), &limit, "a").await.map(drop),
    ];
    answers.iter().filter_map(|answer| answer.as_ref().err()).for_each(|error| told.error(error));
    let health = store.health().await;
    told.debug(&health);
    told.0.extend(health.findings().iter().map(ToString::to_string));
    told
}
