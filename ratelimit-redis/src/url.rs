//! [`RedisUrl`]: the servers and how to reach them, in one line.

use std::fmt;
use std::str::FromStr;

use crate::client::Client;
use crate::error::{RedisError, Result};

mod options;
mod parts;

pub(crate) use options::{Options, TlsFiles};
use parts::{Parts, redacted};

/// The parsed URL of a store. It is safe to log: [`Display`](fmt::Display), [`Debug`](fmt::Debug)
/// and errors about it never contain what stands before the `@`, nor the value of an option other
/// than the name of a file or a service. Of a text that is no valid URL they show at most the
/// scheme.
///
/// | URL | servers |
/// |---|---|
/// | `redis://[user:password@]host[:port][/database]`, also `valkey://` | one |
/// | `redis-sentinel://[user:password@]host[:port][,host[:port]…][/SERVICE][/database]` | the master that these sentinels name |
/// | `redis-cluster://[user:password@]host[:port][,host[:port]…]` | the cluster that these are of |
/// | `rediss://`, `rediss-sentinel://`, `rediss-cluster://` | the same, encrypted (feature `tls`) |
/// | `redis+unix://[user:password@]/path/to/socket` | one, at a Unix socket |
///
/// The default port is 6379, that of a Sentinel 26379, the default database 0, the default service
/// `mymaster`. IPv6 addresses stand in brackets. In user, password and option values, characters
/// with a meaning in a URL are written as `%XX`: `%40` for `@`, `%2F` for `/`, `%3A` for `:`, `%3F`
/// for `?`, `%23` for `#`. User and password are for the servers that store the states.
///
/// | option | |
/// |---|---|
/// | `client=redis`, `client=fred` | the [`Client`], of those that the crate was built with |
/// | `mode=lua`, `mode=cas`, `mode=multi` | the mode, which has to be that of the store |
/// | `protocol=resp2`, `protocol=resp3` | the protocol; the default is `resp2` |
/// | `merge=on`, `merge=off` | whether requests [merge](crate::Builder::merge); the default is `on` |
/// | `tls-ca=FILE` | the authorities to trust, as PEM, instead of the system's |
/// | `tls-cert=FILE`, `tls-key=FILE` | the client certificate and its key, as PEM |
/// | `service=NAME` | the Sentinels' name for the servers; also `sentinelServiceName=` |
/// | `sentinel-user=USER`, `sentinel-password=PASSWORD` | the login at the Sentinels; by default none |
/// | `db=DATABASE`, `user=USER`, `pass=PASSWORD` | at a Unix socket, where other clients write them so; also `password=` |
///
/// # Examples
///
/// ```
/// use ratelimit_redis::RedisUrl;
///
/// let url: RedisUrl = "redis-cluster://user:secret@10.0.0.1,10.0.0.2:7000?mode=lua".parse()?;
/// assert_eq!(url.to_string(), "redis-cluster://10.0.0.1,10.0.0.2:7000");
///
/// let error = "redis://user:secret@host/users".parse::<RedisUrl>().unwrap_err();
/// assert!(!error.to_string().contains("secret"));
/// # Ok::<(), ratelimit_redis::RedisError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(crate) kind: Kind,
    is_encrypted: bool,
    /// The server, the Sentinels, or some servers of a cluster: hosts without brackets, and ports.
    /// A host that begins with `/` is the path of a Unix socket, without a port.
    pub(crate) places: Vec<(String, u16)>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    /// The name by which Sentinels know the master and its replicas.
    pub(crate) service: String,
    pub(crate) options: Options,
    /// Without login and options.
    shown: String,
}

/// The kind of servers at the places.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    One,
    Sentinels,
    Cluster,
}

/// What a scheme says: the kind of servers, and whether the connection is encrypted.
const SCHEMES: [(&str, Kind, bool); 8] = [
    ("redis", Kind::One, false),
    ("valkey", Kind::One, false),
    ("rediss", Kind::One, true),
    ("redis-sentinel", Kind::Sentinels, false),
    ("rediss-sentinel", Kind::Sentinels, true),
    ("redis-cluster", Kind::Cluster, false),
    ("rediss-cluster", Kind::Cluster, true),
    (SOCKET, Kind::One, false),
];

/// The scheme of a Unix socket.
const SOCKET: &str = "redis+unix";

const KNOWN_SCHEMES: &str = "accepted are redis://, valkey://, redis-sentinel://, redis-cluster://, \
                             encrypted rediss://, rediss-sentinel://, rediss-cluster://, and redis+unix://";
const ESCAPES: &str =
    "in user, password and options %40 for @, %2F for /, %3A for :, %3F for ?, %23 for #";
const DEFAULT_SERVICE: &str = "mymaster";

impl Kind {
    fn write(self, scheme: &str) -> String {
        let more = match self {
            Self::One if scheme == SOCKET => {
                return format!("{scheme}://[user:password@]/path/to/socket");
            }
            Self::One => "[/database]",
            Self::Sentinels => "[,host[:port]…][/SERVICE][/database]",
            Self::Cluster => "[,host[:port]…]",
        };
        format!("{scheme}://[user:password@]host[:port]{more}")
    }

    const fn port(self) -> u16 {
        match self {
            Self::Sentinels => 26_379,
            _ => 6_379,
        }
    }
}

impl RedisUrl {
    /// Parses a URL.
    ///
    /// # Errors
    /// [`RedisError::Config`] if the URL is invalid, with what is wrong and what is accepted.
    pub fn parse(url: &str) -> Result<Self> {
        read(url).map_err(|what| RedisError::Config(format!("{}: {what}", redacted(url))))
    }

    /// The mode in the URL: `lua`, `cas` or `multi`.
    #[must_use]
    pub const fn mode(&self) -> Option<&'static str> {
        self.options.mode
    }

    /// The client in the URL.
    #[must_use]
    pub const fn client(&self) -> Option<Client> {
        self.options.client
    }

    /// Whether the URL says that requests [merge](crate::Builder::merge).
    #[must_use]
    pub const fn merge(&self) -> Option<bool> {
        self.options.merge
    }

    /// The files for an encrypted connection.
    pub(crate) fn tls(&self) -> Option<&TlsFiles> {
        self.is_encrypted.then_some(&self.options.tls)
    }

    /// The error for a URL that contradicts another setting.
    pub(crate) fn refused(&self, what: &str) -> RedisError {
        RedisError::Config(format!("{}: {what}", self.shown))
    }
}

impl FromStr for RedisUrl {
    type Err = RedisError;

    fn from_str(url: &str) -> Result<Self> {
        Self::parse(url)
    }
}

/// Without login and options.
impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

/// Without login and options.
impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisUrl").field(&self.shown).finish()
    }
}

fn read(url: &str) -> Result<RedisUrl, String> {
    let Some(scheme) = parts::scheme(url) else {
        return Err(format!("this is no URL; {KNOWN_SCHEMES}"));
    };
    let Some((_, kind, is_encrypted)) = SCHEMES.into_iter().find(|(name, ..)| *name == scheme)
    else {
        return Err(format!("what stands before :// is not known; {KNOWN_SCHEMES}"));
    };
    let no_url =
        || format!("this is no URL of a Redis; write {}, and {ESCAPES}", kind.write(scheme));
    let parts = Parts::of(url).ok_or_else(no_url)?;
    if kind == Kind::One && parts.places.len() > 1 {
        return Err(no_url());
    }
    if kind == Kind::Cluster && parts.database != 0 {
        return Err(format!("a cluster has only database 0; write {}", kind.write(scheme)));
    }
    let mut options = Options::of(parts.query)?;
    options.fit(scheme, kind == Kind::Sentinels, is_encrypted)?;
    let (user, password) = login(parts.login)?;
    if password.is_some() && options.password.is_some() {
        return Err("the login is given twice; give it once".into());
    }
    let service = match (parts.service, &options.service) {
        (Some(_), Some(_)) => return Err("the service is given twice; give it once".into()),
        (Some(service), None) => service,
        (None, service) => service.as_deref().unwrap_or(DEFAULT_SERVICE),
    };
    let places = parts.places.into_iter().map(|(host, port)| (host, port.unwrap_or(kind.port())));
    Ok(RedisUrl {
        kind,
        is_encrypted,
        places: places.collect(),
        user: user.or(options.user.take()),
        password: password.or(options.password.take()),
        database: options.database.take().unwrap_or(parts.database),
        service: service.to_owned(),
        options,
        shown: redacted(url),
    })
}

/// User and password, unescaped.
fn login(login: Option<&str>) -> Result<(Option<String>, Option<String>), String> {
    let Some(login) = login.filter(|login| !login.is_empty()) else { return Ok((None, None)) };
    let Some((user, password)) = login.split_once(':') else {
        return Err(
            "a user without a password; write user:password@host, user:@host for one who has \
                    none, and :password@host for the default user"
                .into(),
        );
    };
    let not_utf8 = || format!("user or password is not UTF-8; write {ESCAPES}");
    let user = parts::decoded(user).ok_or_else(not_utf8)?;
    let password = parts::decoded(password).ok_or_else(not_utf8)?;
    let user = (!user.is_empty()).then_some(user);
    let password = (user.is_some() || !password.is_empty()).then_some(password);
    Ok((user, password))
}

#[cfg(test)]
mod tests;
