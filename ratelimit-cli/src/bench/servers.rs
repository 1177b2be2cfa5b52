//! The servers behind a store: their processor time, and the removal of what a benchmark wrote.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use ratelimit_redis::{Argument, Connection, Deadline, RedisConnection, RedisUrl, Reply};

use crate::failure::Failure;
use crate::store::DEADLINE;

/// The number of keys that one step of a scan examines.
const SCANNED_AT_ONCE: u64 = 1_000;
/// How often a scan is repeated while it finds keys. A request whose answer was lost may be executed after the
/// scan has passed its key.
const SCANS: usize = 3;

/// Administrative connections to the servers that keep the states.
pub(crate) struct Servers {
    /// The URL as given, with its password.
    url: String,
    connection: Arc<RedisConnection>,
}

/// The processor time of all servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuTime {
    /// The time of the whole process.
    pub(crate) process: Duration,
    /// The time of the main thread, which executes commands; `None` if a server does not report it.
    pub(crate) main_thread: Option<Duration>,
}

impl CpuTime {
    /// The time added since an earlier reading.
    pub(crate) fn since(self, earlier: Self) -> Self {
        let main_thread = self.main_thread.zip(earlier.main_thread);
        Self {
            process: self.process.saturating_sub(earlier.process),
            main_thread: main_thread.map(|(now, then)| now.saturating_sub(then)),
        }
    }
}

impl Servers {
    /// Connects.
    pub(crate) async fn open(url: &RedisUrl, text: &str) -> Result<Self, Failure> {
        let connection = RedisConnection::open(text, DEADLINE).await;
        let connection =
            connection.map_err(|error| Failure::store(&format!("--store {url}"), &error))?;
        Ok(Self { url: text.to_owned(), connection: Arc::new(connection) })
    }

    /// Connects, and checks that keys with this prefix can be removed again.
    pub(crate) async fn connect(url: &RedisUrl, text: &str, prefix: &str) -> Result<Self, Failure> {
        let what = format!("--store {url}");
        let servers = Self::open(url, text).await?;
        let refused = |reason: String| {
            Failure::input(format!(
                "{what}: the keys of a benchmark could not be removed: {reason}; let the user run SCAN and UNLINK \
                 (ACL SETUSER … +scan +unlink ~{prefix}*), or use another"
            ))
        };
        for node in servers.nodes().await.map_err(refused)? {
            node.scan("0", prefix, 1).await.map_err(refused)?;
        }
        let probe = format!("{prefix}:{{probe}}");
        let unlink = [Argument::Text("UNLINK"), Argument::Text(&probe)];
        let unlinked = servers.connection.send(&probe, &unlink, Deadline::within(DEADLINE)).await;
        unlinked.map_err(|error| refused(error.to_string()))?;
        Ok(servers)
    }

    /// The processor time so far, or why the servers do not report it.
    pub(crate) async fn cpu(&self) -> Result<CpuTime, String> {
        let mut sum = CpuTime { main_thread: Some(Duration::ZERO), ..CpuTime::default() };
        for (address, reply) in self
            .connection
            .send_to_each(&["INFO", "cpu"].map(Argument::Text), Deadline::within(DEADLINE))
            .await
        {
            let Reply::Text(info) = reply.map_err(|error| error.to_string())? else {
                return Err(format!("Redis at {address} answered INFO with no text"));
            };
            let time = cpu_in(&String::from_utf8_lossy(&info));
            let time =
                time.ok_or_else(|| format!("INFO of Redis at {address} has no used_cpu_user"))?;
            sum.process += time.process;
            sum.main_thread = sum.main_thread.zip(time.main_thread).map(|(sum, time)| sum + time);
        }
        Ok(sum)
    }

    /// Removes every key with this prefix from every server, and returns how many there were.
    pub(crate) async fn remove(&self, prefix: &str) -> Result<u64, String> {
        let mut removed = 0;
        for _ in 0..SCANS {
            let before = removed;
            for node in self.nodes().await? {
                removed += node.remove(prefix).await?;
            }
            if removed == before {
                break;
            }
        }
        Ok(removed)
    }

    /// Each server separately; for a cluster, every master.
    pub(crate) async fn nodes(&self) -> Result<Vec<Node>, String> {
        if !self.connection.is_cluster() {
            let connection = Arc::clone(&self.connection);
            return Ok(vec![Node { connection, in_cluster: false }]);
        }
        let mut nodes = Vec::new();
        for (address, reply) in self
            .connection
            .send_to_each(&[Argument::Text("PING")], Deadline::within(DEADLINE))
            .await
        {
            reply.map_err(|error| error.to_string())?;
            let url = node_url(&self.url, &address)
                .ok_or_else(|| format!("{address} is no address to connect to"))?;
            let connection = RedisConnection::open(&url, DEADLINE).await;
            let connection = Arc::new(connection.map_err(|error| error.to_string())?);
            nodes.push(Node { connection, in_cluster: true });
        }
        Ok(nodes)
    }
}

/// One server.
pub(crate) struct Node {
    connection: Arc<RedisConnection>,
    in_cluster: bool,
}

impl Node {
    /// One step of a scan: returns the next cursor and the keys found.
    pub(crate) async fn scan(
        &self,
        cursor: &str,
        prefix: &str,
        count: u64,
    ) -> Result<(String, Vec<String>), String> {
        let pattern = format!("{prefix}*");
        let words = [
            Argument::Text("SCAN"),
            Argument::Text(cursor),
            Argument::Text("MATCH"),
            Argument::Text(&pattern),
            Argument::Text("COUNT"),
            Argument::Number(count),
        ];
        let reply = self
            .connection
            .send("", &words, Deadline::within(DEADLINE))
            .await
            .map_err(|error| error.to_string())?;
        let address = self.connection.address();
        scanned(reply)
            .ok_or_else(|| format!("Redis at {address} answered SCAN with something else"))
    }

    async fn remove(&self, prefix: &str) -> Result<u64, String> {
        let mut removed = 0;
        let mut cursor = "0".to_owned();
        loop {
            let (next, keys) = self.scan(&cursor, prefix, SCANNED_AT_ONCE).await?;
            removed += self.unlink(&keys).await?;
            if next == "0" {
                return Ok(removed);
            }
            cursor = next;
        }
    }

    async fn unlink(&self, keys: &[String]) -> Result<u64, String> {
        // On a cluster, all keys of a command must be in one slot.
        let at_once = if self.in_cluster { 1 } else { keys.len().max(1) };
        let unlinked = join_all(keys.chunks(at_once).map(|keys| async {
            let mut words = vec![Argument::Text("UNLINK")];
            words.extend(keys.iter().map(|key| Argument::Text(key)));
            self.connection.send("", &words, Deadline::within(DEADLINE)).await
        }));
        let mut removed = 0;
        for reply in unlinked.await {
            if let Reply::Integer(count) = reply.map_err(|error| error.to_string())? {
                removed += u64::try_from(count).unwrap_or(0);
            }
        }
        Ok(removed)
    }
}

/// The cursor and the keys of a reply to SCAN.
fn scanned(reply: Reply) -> Option<(String, Vec<String>)> {
    let Reply::Array(parts) = reply else { return None };
    let [Reply::Text(cursor), Reply::Array(keys)] = &parts[..] else { return None };
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    let key = |key: &Reply| match key {
        Reply::Text(key) => text(key),
        _ => None,
    };
    Some((text(cursor)?, keys.iter().map(key).collect::<Option<_>>()?))
}

/// The URL of one node of a cluster, with the credentials and options of the cluster's URL.
fn node_url(cluster: &str, address: &str) -> Option<String> {
    let (scheme, rest) = cluster.split_once("://")?;
    let scheme = scheme.strip_suffix("-cluster")?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = place.split('/').next().unwrap_or_default();
    let login = authority.rsplit_once('@').map_or(String::new(), |(login, _)| format!("{login}@"));
    let mark = if query.is_empty() { "" } else { "?" };
    Some(format!("{scheme}://{login}{address}{mark}{query}"))
}

/// The processor time in a reply to INFO.
fn cpu_in(info: &str) -> Option<CpuTime> {
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Duration::try_from_secs_f64(line.trim().parse().ok()?).ok()
    };
    let process = field("used_cpu_user")? + field("used_cpu_sys")?;
    let main_thread = field("used_cpu_user_main_thread").zip(field("used_cpu_sys_main_thread"));
    Some(CpuTime { process, main_thread: main_thread.map(|(user, system)| user + system) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_url_keeps_the_credentials_and_options_of_its_cluster() {
        for (cluster, address, node) in [
            ("redis-cluster://h:1,h:2", "10.0.0.1:7000", "redis://10.0.0.1:7000"),
            (
                "rediss-cluster://bob:s%40cret@h:1/0?tls-ca=/a/b&mode=cas",
                "[::1]:7000",
                "rediss://bob:s%40cret@[::1]:7000?tls-ca=/a/b&mode=cas",
            ),
        ] {
            assert_eq!(node_url(cluster, address).as_deref(), Some(node));
        }
        assert_eq!(node_url("redis://h:1", "h:2"), None);
    }

    #[test]
    fn main_thread_time_is_reported_if_the_server_reports_it() {
        let ms = Duration::from_millis;
        let old =
            "# CPU\r\nused_cpu_sys:1.5\r\nused_cpu_user:2.25\r\nused_cpu_sys_children:9.0\r\n";
        let time = cpu_in(old).expect("a time");
        assert_eq!(time, CpuTime { process: ms(3_750), main_thread: None });
        let new = format!("{old}used_cpu_sys_main_thread:0.5\r\nused_cpu_user_main_thread:1.0\r\n");
        let later = cpu_in(&new).expect("a time");
        assert_eq!(later.main_thread, Some(ms(1_500)));
        assert_eq!(later.since(time), CpuTime::default());
        assert_eq!(cpu_in("# Memory\r\nused_memory:5\r\n"), None);
    }
}
