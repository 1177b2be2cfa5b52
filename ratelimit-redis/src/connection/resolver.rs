//! [`Resolver`]: looks up the addresses of a name, in one thread at a time.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};

type Name = (String, u16);
type Looked = Result<Vec<SocketAddr>, Arc<io::Error>>;
type LookUp = dyn Fn(&Name) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Looks up names.
///
/// The system's look-up occupies a thread until it ends and cannot be cancelled. So there is at most one
/// per name: it continues when the attempt that started it is given up, and the next attempt waits for
/// the same one (*singleflight*).
pub(crate) struct Resolver {
    look_up: Arc<LookUp>,
    running: Mutex<HashMap<Name, Shared<BoxFuture<'static, Looked>>>>,
}

impl Resolver {
    /// The system's resolver, shared by all connections of the process.
    pub(crate) fn system() -> Arc<Self> {
        static SYSTEM: LazyLock<Arc<Resolver>> = LazyLock::new(|| {
            Arc::new(Resolver::new(|(host, port)| {
                Ok((&**host, *port).to_socket_addrs()?.collect())
            }))
        });
        Arc::clone(&SYSTEM)
    }

    pub(crate) fn new(
        look_up: impl Fn(&Name) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self { look_up: Arc::new(look_up), running: Mutex::default() }
    }

    /// The addresses in the order in which to try them: IPv6 and IPv4 alternate.
    pub(crate) async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let name = (host.to_owned(), port);
        let running = {
            let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            // Drops look-ups that have ended or whose runtime has.
            running.retain(|_, looking| looking.peek().is_none());
            running.entry(name).or_insert_with_key(|name| self.begin(name.clone())).clone()
        };
        match running.await {
            Ok(addresses) if addresses.is_empty() => {
                Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
            }
            Ok(addresses) => Ok(in_turn(addresses)),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        }
    }

    fn begin(&self, name: Name) -> Shared<BoxFuture<'static, Looked>> {
        let look_up = Arc::clone(&self.look_up);
        let looking = tokio::task::spawn_blocking(move || look_up(&name).map_err(Arc::new));
        looking
            .map(|looked| looked.unwrap_or_else(|ended| Err(Arc::new(io::Error::other(ended)))))
            .boxed()
            .shared()
    }
}

/// Alternates the address families, starting with that of the first address: an unreachable family costs
/// a single delay.
fn in_turn(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(first) = addresses.first().map(SocketAddr::is_ipv6) else { return addresses };
    let count = addresses.len();
    let (one, other): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first);
    let (mut one, mut other) = (one.into_iter(), other.into_iter());
    let mut mixed = Vec::with_capacity(count);
    while mixed.len() < count {
        mixed.extend(one.next());
        mixed.extend(other.next());
    }
    mixed
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn address_families_alternate() {
        let addresses = |all: &[&str]| -> Vec<SocketAddr> {
            all.iter().map(|address| address.parse().expect("an address")).collect()
        };
        let mixed =
            in_turn(addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.0.0.1:1", "1.0.0.2:1"]));
        let due = addresses(&["[::1]:1", "1.0.0.1:1", "[::2]:1", "1.0.0.2:1", "[::3]:1"]);
        assert_eq!(mixed, due);
        assert_eq!(in_turn(Vec::new()), Vec::new());
    }

    #[tokio::test]
    async fn a_hanging_look_up_takes_one_thread_for_all_its_callers() {
        let threads = Arc::new(AtomicUsize::new(0));
        let (answer, answers) = mpsc::channel::<()>();
        let (count, answers) = (Arc::clone(&threads), Mutex::new(answers));
        let resolver = Resolver::new(move |(_, port)| {
            count.fetch_add(1, Ordering::SeqCst);
            answers.lock().expect("no panic").recv().map_err(io::Error::other)?;
            Ok(vec![SocketAddr::from(([127, 0, 0, 1], *port))])
        });
        for _ in 0..100 {
            // Every caller gives up.
            let looking = timeout(Duration::from_millis(1), resolver.resolve("slow.example", 1));
            looking.await.expect_err("it hangs");
        }
        answer.send(()).expect("it still waits");
        let found = resolver.resolve("slow.example", 1).await.expect("the look-up that had begun");
        assert_eq!(found, [SocketAddr::from(([127, 0, 0, 1], 1))]);
        assert_eq!(threads.load(Ordering::SeqCst), 1);
        answer.send(()).expect("the next look-up");
        resolver.resolve("slow.example", 1).await.expect("looked up anew");
        assert_eq!(threads.load(Ordering::SeqCst), 2);
    }
}
