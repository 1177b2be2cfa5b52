//! Requests that share calls beside requests that go alone, over ways of several lengths.
//!
//! Both are stores of ours, on one client each, with 500 tasks. A proxy holds all bytes back for
//! half a round trip, each way, without holding up what follows.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ratelimit_redis::RedisStore;

use crate::keys::{CallerKey, KeyDraw, Spread};
use crate::measure::Fallible;

use super::lab::Lab;
use super::plain::WIDE;
use super::throughput::{DRAWN, NamedLimit, ONE, OurStore, THREE, Workload, charge};

/// How long all bytes need, there and back.
const ROUND_TRIPS: [(Duration, &str); 5] = [
    (Duration::from_micros(100), "0.1 ms"),
    (Duration::from_micros(500), "0.5 ms"),
    (Duration::from_millis(1), "1 ms"),
    (Duration::from_millis(4), "4 ms"),
    (Duration::from_millis(20), "20 ms"),
];
const TASKS: [usize; 2] = [64, 500];
const CALLERS: usize = 10_000;

/// Measures a request of one limit, and one of three, of which one is for all callers.
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    lab.flush()?;
    let (one, three): (&[NamedLimit], &[NamedLimit]) = (&ONE, &THREE);
    let callers: Vec<_> = (0..CALLERS).map(CallerKey::new).collect();
    let drawn = Arc::new(KeyDraw::new(Spread::Uniform, CALLERS, 1).keys(DRAWN)?);
    for (round_trip, name) in ROUND_TRIPS {
        let port = slow_way(lab.server.port(), round_trip / 2)?;
        for (part, limits) in [("way, one limit", one), ("way, three limits", three)] {
            for client in ["redis", "fred"] {
                let url = format!("redis://127.0.0.1:{port}?client={client}");
                let shared = RedisStore::connect(&url).await?;
                let alone = RedisStore::connect(&format!("{url}&merge=off")).await?;
                let shared = Arc::new(OurStore::of_limits(WIDE, shared, limits)?);
                let alone = Arc::new(OurStore::of_limits(WIDE, alone, limits)?);
                charge(&alone, &callers).await?;
                for tasks in TASKS {
                    let load = Workload {
                        part,
                        client,
                        peer: name,
                        servers: std::slice::from_ref(&lab.server),
                        nodes: 1,
                        tasks,
                        keys: CALLERS,
                        callers: [&drawn, &drawn],
                    };
                    load.measure(lab.quick, &mut lab.report, &shared, &alone).await?;
                }
            }
        }
    }
    Ok(())
}

/// A way to this port on which all bytes need so long, as a port of its own. Its threads end with
/// the program.
fn slow_way(to: u16, delay: Duration) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            // An error ends a connection, which the client notices.
            drop(forward(&client, to, delay));
        }
    });
    Ok(port)
}

fn forward(client: &TcpStream, to: u16, delay: Duration) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, to))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    for (mut from, mut to) in
        [(client.try_clone()?, server.try_clone()?), (server.try_clone()?, client.try_clone()?)]
    {
        let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
        thread::spawn(move || {
            let mut chunk = vec![0; 1 << 16];
            while let Ok(length @ 1..) = from.read(&mut chunk) {
                if sender.send((Instant::now() + delay, chunk[..length].to_vec())).is_err() {
                    break;
                }
            }
        });
        thread::spawn(move || {
            for (due, bytes) in receiver {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
        });
    }
    Ok(())
}
