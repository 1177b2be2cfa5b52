//! Requests that share calls beside requests that are sent alone, over ways of several lengths.
//!
//! Both are stores of ours, on one client each, with 500 tasks. A proxy holds all bytes back for
//! half a round trip, each way, without holding up what follows.

use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ratelimit_redis::RedisStore;

use crate::keys::{CallerKey, KeyDraw, Spread};
use crate::measure::Fallible;

use super::lab::Lab;
use super::plain::WIDE;
use super::relay::{Pump, each_chunk, relay};
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

/// A way to this port on which all bytes need so long, as a port of its own.
fn slow_way(to: u16, delay: Duration) -> io::Result<u16> {
    let delayed = move || -> Pump { Box::new(move |from, to| forward(from, to, delay)) };
    relay(to, move || [delayed(), delayed()])
}

/// Writes each chunk so long after it was read, whatever comes after it.
fn forward(from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
    });
    each_chunk(from, |bytes| sender.send((Instant::now() + delay, bytes.to_vec())).is_ok());
}
