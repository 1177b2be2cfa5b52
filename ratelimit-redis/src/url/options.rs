//! Parses the options after `?` in a URL. Errors do not quote values: one of them is a password.

use std::path::PathBuf;

use super::parts::{decoded, is_name};
use crate::client::Client;
use crate::mode::{Cas, Lua, Multi};

/// The certificate files, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// The trusted authorities, instead of the system's.
    pub(crate) ca: Option<PathBuf>,
    /// The client certificate, with its chain.
    pub(crate) certificate: Option<PathBuf>,
    /// The key of that certificate.
    pub(crate) key: Option<PathBuf>,
}

#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) client: Option<Client>,
    pub(crate) mode: Option<&'static str>,
    pub(crate) resp3: bool,
    pub(crate) merge: Option<bool>,
    pub(crate) tls: TlsFiles,
    pub(crate) service: Option<String>,
    pub(crate) sentinel_user: Option<String>,
    pub(crate) sentinel_password: Option<String>,
    /// What a URL of a Unix socket may say here.
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: Option<u32>,
}

const KNOWN: &str = "accepted are client, mode, protocol, merge, tls-ca, tls-cert, tls-key, service, \
                     sentinel-user and sentinel-password; user and password stand before the host, user:password@host";

impl Options {
    pub(super) fn of(query: &str) -> Result<Self, String> {
        let mut options = Self::default();
        let mut seen = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = match pair.split_once('=') {
                Some((name, value)) if is_name(name) => (name, value),
                _ => return Err("what follows ? is not of the form name=value".into()),
            };
            if seen.contains(&name) {
                return Err(format!("{name} is given twice; give it once"));
            }
            seen.push(name);
            let not_utf8 = || "the value of an option is not UTF-8".to_owned();
            options.set(name, decoded(value).ok_or_else(not_utf8)?)?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        let is_empty = value.is_empty();
        match name {
            "client" => return client(&value).map(|client| self.client = Some(client)),
            "mode" => {
                let modes = [Lua::NAME, Cas::NAME, Multi::NAME].map(|mode| (mode, mode));
                let none = "this mode is not known; accepted are mode=lua, mode=cas and mode=multi";
                self.mode = Some(one_of(&modes, &value, none)?);
            }
            "protocol" => {
                let known = [("2", false), ("resp2", false), ("3", true), ("resp3", true)];
                let none =
                    "this protocol is not known; accepted are protocol=resp2 and protocol=resp3";
                self.resp3 = one_of(&known, &value, none)?;
            }
            "merge" => {
                let none = "merge is neither on nor off; accepted are merge=on and merge=off";
                self.merge = Some(one_of(&[("on", true), ("off", false)], &value, none)?);
            }
            "tls-ca" => self.tls.ca = Some(PathBuf::from(value)),
            "tls-cert" => self.tls.certificate = Some(PathBuf::from(value)),
            "tls-key" => self.tls.key = Some(PathBuf::from(value)),
            "service" | "sentinelServiceName" => self.service = Some(value),
            "sentinel-user" => self.sentinel_user = Some(value),
            "sentinel-password" => self.sentinel_password = Some(value),
            "user" => self.user = Some(value),
            "pass" | "password" => self.password = Some(value),
            "db" => {
                let number = value.parse().map_err(|_| "db is not the number of a database")?;
                self.database = Some(number);
            }
            _ => return Err(format!("the option {name} is not known; {KNOWN}")),
        }
        if is_empty {
            return Err(format!("{name} is empty; give it a value, or leave it out"));
        }
        Ok(())
    }

    /// Whether the options fit the scheme.
    pub(super) fn fit(
        &self,
        scheme: &str,
        asks_sentinels: bool,
        encrypted: bool,
    ) -> Result<(), String> {
        let of_sentinels = [&self.service, &self.sentinel_user, &self.sentinel_password];
        let is_socket = scheme == super::SOCKET;
        let logs_in = self.user.is_some() || self.password.is_some() || self.database.is_some();
        let refusal = if is_socket && !cfg!(unix) {
            "this system has no Unix sockets; use redis://"
        } else if !is_socket && logs_in {
            "db, user, pass and password are for redis+unix://; elsewhere user and password stand before the host, \
             user:password@host, and the database after it"
        } else if self.user.is_some() && self.password.is_none() {
            "user without pass; give both"
        } else if encrypted && !cfg!(feature = "tls") {
            "an encrypted connection needs the feature tls of ratelimit-redis, which this program was built without"
        } else if !encrypted && self.tls != TlsFiles::default() {
            "tls-ca, tls-cert and tls-key are for encrypted connections; use rediss://, rediss-sentinel:// or \
             rediss-cluster://"
        } else if self.tls.certificate.is_some() != self.tls.key.is_some() {
            "give both tls-cert and tls-key, or neither"
        } else if !asks_sentinels && of_sentinels.into_iter().any(Option::is_some) {
            "service, sentinel-user and sentinel-password are for redis-sentinel://"
        } else if self.sentinel_user.is_some() && self.sentinel_password.is_none() {
            "sentinel-user without sentinel-password; give both"
        } else {
            return Ok(());
        };
        Err(refusal.into())
    }
}

fn client(value: &str) -> Result<Client, String> {
    if let Some(client) = Client::ALL.iter().find(|client| client.name() == value) {
        return Ok(*client);
    }
    match value {
        "redis" | "fred" => Err(format!(
            "client={value} needs the feature {value} of ratelimit-redis, which this program was built \
             without; use client={}",
            Client::default()
        )),
        _ => Err("this client is not known; accepted are client=redis and client=fred".into()),
    }
}

/// The meaning of a value, by those that are known.
fn one_of<T: Copy>(known: &[(&str, T)], value: &str, none: &str) -> Result<T, String> {
    let found = known.iter().find(|(name, _)| *name == value);
    found.map(|(_, meaning)| *meaning).ok_or_else(|| none.into())
}
