//! Calls of every kind, by several threads, while the table grows and time stands still: each key is admitted exactly its
//! burst. The segments of tests are small: one splits every few keys.

use super::*;

const BURST: u64 = 40;

/// Single checks, batches, several keys at once, requests at a given time (which move a key to the shards), and peeks
/// and refunds of cost 0. Returns how often each key was admitted.
fn ask_anything(store: &Memory, names: &[String], thread: u64, calls: usize) -> Vec<u64> {
    let (limit, mut random) = (limit(BURST), fastrand::Rng::with_seed(thread));
    let mut below = |bound| random.usize(..bound);
    let mut admitted = vec![0; names.len()];
    for _ in 0..calls {
        let (key, kind) = (below(names.len()), below(40));
        let name = |position: usize| names[(key + position) % names.len()].as_str();
        let check = |position: usize, cost| Check { limit: &limit, key: name(position), cost };
        let mut admit = |position: usize, cost: u64, allowed: bool| {
            admitted[(key + position) % names.len()] += if allowed { cost } else { 0 };
        };
        let one = |cost, op, now| {
            let check = check(0, cost);
            store.apply_now(&Batch::one(&check).op(op).now(now)).expect("decides").allowed()
        };
        match kind {
            0 => admit(0, 1, one(1, Op::Acquire, Now::At(NOW))),
            1 => _ = one(1, Op::Peek, Now::Store),
            2 => _ = one(0, Op::Refund, Now::Store),
            3..8 => {
                let checks: Vec<_> =
                    (0..names.len().min(kind - 1)).map(|at| check(at, 1)).collect();
                let batch = Batch::new(&checks).expect("distinct");
                let allowed = store.apply_now(&batch).expect("decides").allowed();
                (0..checks.len()).for_each(|at| admit(at, 1, allowed));
            }
            8 => {
                let positions = [0, 1, 2, 0, 3, 4, 0, 5, 6, 7, 1];
                let mut next = 0;
                store.acquire_each_now(&limit, &positions.map(name), 1, |position, decided| {
                    assert_eq!(position, next);
                    next += 1;
                    admit(positions[position], 1, decided.expect("decides").allowed());
                });
                assert_eq!(next, positions.len());
            }
            _ => admit(0, 1 + kind as u64 % 2, one(1 + kind as u64 % 2, Op::Acquire, Now::Store)),
        }
    }
    admitted
}

#[test]
fn every_key_is_admitted_exactly_its_burst_while_segments_split() {
    for (keys, rounds, calls) in [(2, 6, 10_000), (256, 60, 800), (5_000, 3, 20_000)] {
        let names: Vec<String> = (0..keys).map(|n| format!("key {n}")).collect();
        for round in 0..rounds {
            let (store, _): (Memory, _) = built(|builder| builder);
            let threads = [2, 4, 8][round % 3];
            let counts: Vec<Vec<u64>> = std::thread::scope(|scope| {
                let ask = |thread| {
                    let (store, names) = (&store, &names);
                    scope.spawn(move || ask_anything(store, names, thread, calls))
                };
                let threads: Vec<_> = (0..threads).map(ask).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            // The rest of each burst is admitted one by one.
            let limit = limit(BURST);
            for (key, name) in names.iter().enumerate() {
                let admitted: u64 = counts.iter().map(|counts| counts[key]).sum();
                let allowed =
                    |_: &u64| store.acquire_now(&limit, name, 1).expect("decides").allowed();
                let left = (0..=BURST).filter(allowed).count() as u64;
                assert_eq!(admitted + left, BURST, "round {round}, {threads} threads: {name}");
            }
            assert_eq!((store.len(), store.overflowed()), (keys, 0));
            assert_eq!(counted(&store), keys);
        }
    }
}
