//! [`Health`]: what a store's servers lack, in words that an operator can act on.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{AnyAlgorithm, Limit, ReservationId, Store};

use crate::connection::{Argument, Connection, Reply};
use crate::error::{RedisError, Result, is_denied};
use crate::store::{Mode, RedisStore};

mod clock;

/// What [`RedisStore::health`] found.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = ratelimit_redis::RedisStore::connect("redis://127.0.0.1:6379").await?;
/// let health = store.health().await;
/// for finding in health.findings() {
///     eprintln!("{finding}");
/// }
/// if !health.is_ready() {
///     return Err("the server is not ready".into());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Health {
    servers: Vec<Server>,
    findings: Vec<Finding>,
}

/// A server that stores keys.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Server {
    /// Host and port.
    pub address: Arc<str>,
    /// Product and version, such as `valkey 9.1.2`; `None` if the server does not say.
    pub version: Option<String>,
}

/// A problem that a health check found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The server, host and port.
    pub address: Arc<str>,
    /// Whether the store works despite it.
    pub severity: Severity,
    /// What is wrong, and how to fix it.
    pub message: String,
}

/// The severity of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// The store decides, but may lose limits, or was not checked in full.
    Warning,
    /// The store cannot decide, or decides wrongly.
    Error,
}

impl Health {
    /// Whether the store can decide.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity < Severity::Error)
    }

    /// All findings, the most severe first.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The servers that store keys.
    #[must_use]
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    fn find(&mut self, address: &Arc<str>, severity: Severity, message: impl Into<String>) {
        let finding = Finding { address: Arc::clone(address), severity, message: message.into() };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(f, "{severity}: Redis at {}: {}", self.address, self.message)
    }
}

/// The oldest major version of Redis that the tests run on.
const TRIED: u32 = 7;

/// The permissions that a cluster needs besides those of a mode.
const ON_A_CLUSTER: &str = " +cluster|slots +cluster|info +asking";

impl<M: Mode, C: Connection> RedisStore<M, C> {
    /// Checks every server that stores keys: whether it can do what the mode needs, whether it
    /// keeps what it stores, whether its clock is within a second of the program's, and whether
    /// some of its states, a hundred at most, are from its future: [`heal`](Self::heal) frees
    /// those. Call it at start; it decides a few requests on limits of its own.
    pub async fn health(&self) -> Health {
        let mut health = Health::default();
        self.look(&mut health).await;
        let each = self.one_of_each().await.unwrap_or_else(|error| {
            health.find(self.inner.peer.address(), Severity::Error, error.to_string());
            Vec::new()
        });
        for (address, identifier) in each {
            if let Err(error) = self.trial(&identifier).await {
                let (address, message) = self.described(Arc::clone(&address), error);
                health.find(&address, Severity::Error, message);
            }
            self.look_at_clock(&mut health, &address, &identifier).await;
        }
        health.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        health
    }
}

impl<M: Mode, C: Connection> RedisStore<M, C> {
    /// A test decision: one operation of every kind that the mode has. It decides for this
    /// identifier and leaves nothing behind.
    async fn trial(&self, identifier: &str) -> Result<()> {
        for (name, limit) in M::TRIALS {
            let limit = Limit::new(name, limit.parse::<AnyAlgorithm>()?)?;
            let limit = if M::ONLY_ATTEMPTS { limit.count_attempts()? } else { limit };
            let check = Check { limit: &limit, key: identifier, cost: 1 };
            let batch = Batch::one(&check);
            // What an earlier test that failed has left would spare this one a command.
            let _ = self.apply(&batch.op(Op::Reset)).await?;
            let _ = self.apply(&batch).await?;
            if limit.reservation_us().is_some() {
                let id = ReservationId::random();
                let _ = self.apply(&batch.id(id)).await?;
                let _ = self.apply(&batch.op(Op::Settle).id(id)).await?;
                // The record of the settlement would stay for an hour.
                let key = self.reservation_key(&limit, identifier, id);
                let (words, deadline) = (["DEL", &key].map(Argument::Text), self.inner.deadline());
                self.inner.connection.send(&key, &words, deadline).await?;
            }
            let _ = self.apply(&batch.op(Op::Reset)).await?;
        }
        Ok(())
    }

    /// Checks what the servers report about themselves, and about their cluster.
    async fn look(&self, health: &mut Health) {
        let is_cluster = self.inner.connection.is_cluster();
        let questions = [
            (&["INFO"][..], "its version and its eviction policy were not looked at", "+info"),
            (&["CLUSTER", "INFO"], "the state of the cluster was not looked at", "+cluster|info"),
        ];
        for (command, unseen, permission) in &questions[..=usize::from(is_cluster)] {
            let words: Vec<_> = command.iter().map(|word| Argument::Text(word)).collect();
            let answers = self.inner.connection.send_to_each(&words, self.inner.deadline()).await;
            for (address, answer) in answers {
                let info = match answer {
                    Ok(Reply::Text(text)) => Info::parse(&String::from_utf8_lossy(&text)),
                    Ok(_) => Info::default(),
                    Err(RedisError::Server { code, .. }) if code == "NOPERM" => {
                        let message = forbidden(unseen, &command.join(" "), permission);
                        health.find(&address, Severity::Warning, message);
                        Info::default()
                    }
                    Err(error) => {
                        health.find(&address, Severity::Error, error.to_string());
                        continue;
                    }
                };
                for (severity, message) in info.judge::<M>(is_cluster) {
                    health.find(&address, severity, message);
                }
                if words.len() == 1 {
                    health.servers.push(Server { address, version: info.version() });
                }
            }
        }
    }

    /// What an operator can do about an error.
    fn described(&self, address: Arc<str>, error: RedisError) -> (Arc<str>, String) {
        let error = if let RedisError::InPart(error) = error { *error } else { error };
        let RedisError::Server { address, code, message } = error else {
            return (address, error.to_string());
        };
        let prefix = self.prefix();
        let said = match &*code {
            code if is_denied(code, &message) => format!(
                "the user may not do what this mode needs ({message}); allow it: ACL SETUSER … \
                 ~{prefix}:* {}{}",
                M::COMMANDS,
                if self.inner.connection.is_cluster() { ON_A_CLUSTER } else { "" }
            ),
            "ERR" if message.contains("unknown command") => format!(
                "it lacks a command that this mode needs ({message}); use a mode that does without: \
                 without scripts that is the mode of transactions, for limits that count attempts"
            ),
            _ => format!("{code} {message}"),
        };
        (address, said)
    }
}

/// What was not looked at for want of a permission.
fn forbidden(unseen: &str, command: &str, permission: &str) -> String {
    format!("{unseen}, because the user may not {command}; allow it: ACL SETUSER … {permission}")
}

/// The fields of `INFO` and `CLUSTER INFO`.
#[derive(Default)]
struct Info(BTreeMap<String, String>);

impl Info {
    fn parse(text: &str) -> Self {
        let pair = |line: &str| {
            let (name, value) = line.trim_end().split_once(':')?;
            Some((name.to_owned(), value.to_owned()))
        };
        Self(text.lines().filter_map(pair).collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    fn version(&self) -> Option<String> {
        let name = self.get("server_name").unwrap_or("redis");
        let version = match name {
            "valkey" => self.get("valkey_version"),
            _ => self.get("redis_version"),
        };
        version.map(|version| format!("{name} {version}"))
    }

    /// What is wrong with the server that says this.
    fn judge<M: Mode>(&self, as_cluster: bool) -> Vec<(Severity, String)> {
        let major = |version: &str| version.split('.').next()?.parse::<u32>().ok();
        // Valkey reports here the Redis version that it is compatible with.
        let version = self.get("redis_version").unwrap_or_default();
        let (mode, oldest) = (M::NAME, M::OLDEST);
        let major = major(version).unwrap_or(u32::MAX);
        let policy = self.get("maxmemory_policy").unwrap_or("noeviction");
        let evicted = self.number("evicted_keys");
        let assigned = self.get("cluster_slots_assigned").unwrap_or("an unknown number");
        let judged = [
            (
                major < oldest,
                Severity::Error,
                format!("it is Redis {version}, and the mode {mode} needs {oldest}.0 or later"),
            ),
            (
                (oldest..TRIED).contains(&major),
                Severity::Warning,
                format!("it is Redis {version}; nothing before {TRIED}.0 has been tried"),
            ),
            (
                self.get("role") == Some("slave"),
                Severity::Error,
                "it is a replica, which takes no writes and hides what has expired; connect to its \
                 master, by Sentinel or as a cluster, so that a failover is followed"
                    .into(),
            ),
            (
                self.get("loading") == Some("1"),
                Severity::Error,
                "it is still loading its data; wait until it has started".into(),
            ),
            (
                self.get("cluster_enabled") == Some("1") && !as_cluster,
                Severity::Error,
                "it is part of a cluster and keeps a part of the keys only; use redis-cluster://"
                    .into(),
            ),
            (
                self.number("maxmemory") > 0 && policy != "noeviction",
                Severity::Warning,
                format!(
                    "when its memory is full it removes keys (maxmemory-policy {policy}), and with them \
                     limits that were used up, in silence; give the limits an instance of their own with \
                     maxmemory-policy noeviction, and alarm on evicted_keys"
                ),
            ),
            (
                evicted > 0,
                Severity::Warning,
                format!(
                    "it has removed {evicted} keys since it started because its memory was full; \
                     limits may have been among them"
                ),
            ),
            (
                self.get("cluster_state").is_some_and(|state| state != "ok"),
                Severity::Error,
                format!(
                    "the cluster is down as this node sees it ({assigned} of 16384 slots are assigned); \
                     look at CLUSTER NODES for masters that have failed, and at CLUSTER SLOTS for slots \
                     without an owner"
                ),
            ),
        ];
        let wrong = judged.into_iter().filter(|(is_so, ..)| *is_so);
        wrong.map(|(_, severity, message)| (severity, message)).collect()
    }
}
