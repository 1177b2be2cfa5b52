//! Calls by several threads while the table grows and time stands still: each key is admitted
//! exactly its burst. The segments of tests are small: one splits every few keys.

use super::*;

const BURST: u64 = 40;

/// Single checks, batches, several keys at once, and requests at a given time, which move a key to
/// the shards. Counts how often each key is admitted.
fn ask_anything(store: &Memory, names: &[String], admitted: &[AtomicU64], seed: u64, calls: usize) {
    let (limit, mut random) = (limit(BURST), fastrand::Rng::with_seed(seed));
    for _ in 0..calls {
        let (first, kind) = (random.usize(..names.len()), random.usize(..40));
        let width = names.len().min(if kind < 16 { 1 + kind } else { 1 });
        let keys: Vec<_> = (first..first + width).map(|key| key % names.len()).collect();
        let admit = |key: usize, verdict: Result<Verdict, MemoryError>| {
            let count = u64::from(verdict.expect("decides").allowed());
            admitted[key].fetch_add(count, Ordering::Relaxed);
        };
        if kind % 2 == 0 {
            let texts: Vec<_> = keys.iter().map(|key| names[*key].as_str()).collect();
            store.acquire_each_now(&limit, &texts, 1, |at, decided| admit(keys[at], decided));
        } else {
            let check = |key: &usize| Check { limit: &limit, key: &names[*key], cost: 1 };
            let checks: Vec<_> = keys.iter().map(check).collect();
            let now = if kind == 39 { Now::At(NOW) } else { Now::Store };
            let decided = store.apply_now(&Batch::new(&checks).expect("distinct").now(now));
            for key in keys {
                admit(key, decided.clone());
            }
        }
    }
}

#[test]
fn every_key_is_admitted_exactly_its_burst_while_segments_split() {
    for (keys, rounds, calls) in [(2, 6, 10_000), (256, 60, 800), (5_000, 3, 20_000)] {
        let names: Vec<String> = (0..keys).map(|n| format!("key {n}")).collect();
        for (round, threads) in (0..rounds).zip([2, 4, 8].into_iter().cycle()) {
            let (store, _): (Memory, _) = build_store(|builder| builder);
            let admitted: Vec<_> = names.iter().map(|_| AtomicU64::new(0)).collect();
            let ask = |seed| ask_anything(&store, &names, &admitted, seed, calls);
            std::thread::scope(|scope| {
                (0..threads).for_each(|seed| _ = scope.spawn(move || ask(seed)));
            });
            // The rest of each burst is admitted one by one.
            let limit = limit(BURST);
            for (name, admitted) in names.iter().zip(admitted) {
                let allowed =
                    |_: &u64| store.acquire_now(&limit, name, 1).expect("decides").allowed();
                let left = (0..=BURST).filter(allowed).count() as u64;
                assert_eq!(
                    admitted.into_inner() + left,
                    BURST,
                    "round {round}, {threads} threads: {name}"
                );
            }
            assert_eq!((store.len(), store.overflowed()), (keys, 0));
            assert_eq!(count_states(&store), keys);
        }
    }
}
