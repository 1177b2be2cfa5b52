//! Batches of several keys, by several threads, while the table grows. The segments of tests are small: one
//! splits every few keys.

use ratelimit_core::{Gcra, ManualClock};

use super::*;

const KEYS: usize = 256;
const BURST: u64 = 4;

type Memory = MemoryStore<Gcra, ManualClock>;

fn limit() -> Limit<Gcra> {
    let gcra = Gcra::new("1/d".parse().expect("a rate"), BURST).expect("a limit");
    Limit::new("l", gcra).expect("a name")
}

/// Charges all keys, in batches of three to five, in an order that begins at another key per thread. Returns
/// how often each key was admitted.
fn ask_in_batches(store: &Memory, names: &[String], thread: usize) -> Vec<u64> {
    let limit = limit();
    let mut admitted = vec![0; KEYS];
    let (mut place, mut width) = (thread, 3 + thread % 3);
    while place < KEYS + thread {
        let keys: Vec<usize> = (place..place + width).map(|place| place % KEYS).collect();
        let check = |key: &usize| Check { limit: &limit, key: &names[*key], cost: 1 };
        let checks: Vec<_> = keys.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("distinct");
        if store.apply_now(&batch).expect("decides").allowed() {
            for key in keys {
                admitted[key] += 1;
            }
        }
        place += width;
        width = 3 + (width + 1) % 3;
    }
    admitted
}

#[test]
fn every_key_of_batches_is_admitted_exactly_its_burst_while_segments_split() {
    let names: Vec<String> = (0..KEYS).map(|n| format!("key {n}")).collect();
    for round in 0..300 {
        let clock = ManualClock::new(Timestamp::saturating_from_us(1_795_218_392_123_456));
        let store: Memory = MemoryStore::builder().capacity(1 << 10).shards(4).clock(clock).build();
        let threads = 2 + round % 3;
        let counts: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let ask = |thread| {
                let (store, names) = (&store, &names);
                scope.spawn(move || ask_in_batches(store, names, thread))
            };
            let threads: Vec<_> = (0..threads).map(ask).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let limit = limit();
        for (key, name) in names.iter().enumerate() {
            let admitted: u64 = counts.iter().map(|counts| counts[key]).sum();
            let allowed = |_: &u64| store.acquire_now(&limit, name, 1).expect("decides").allowed();
            let left = (0..=BURST).filter(allowed).count() as u64;
            assert_eq!(admitted + left, BURST, "round {round}, {threads} threads: {name}");
        }
        assert_eq!((store.len(), store.overflowed()), (KEYS, 0));
        assert_eq!(counted(&store), KEYS);
    }
}
