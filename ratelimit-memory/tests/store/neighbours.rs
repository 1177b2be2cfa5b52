//! One caller fills what the store bounds. What its neighbours notice is in the guide's table of
//! bounds, and is no refusal. A store full of keys is tested in `at_the_cap`, and one full of
//! reservations in `reservations`.

use std::time::Duration;

use ratelimit_core::SyncStore as _;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_memory::MemoryError;

use crate::common::{Memory, ask, limit, store};

/// A key has room for sixteen entries, whatever others have.
#[test]
fn a_log_that_fills_the_store_leaves_every_other_key_its_part() {
    let filler = limit("filler", "sliding-log 1000/h");
    for words in [
        "sliding-log 16/h",
        "window-log 16/h",
        "concurrency 16/h",
        "sliding-log 16/h count attempts",
        "bucketed-window bucket 1m rates 16/h, 16/2h",
    ] {
        let (store, clock): (Memory, _) = store(|builder| builder.capacity(3).entries(48));
        let neighbour = limit("neighbour", words);
        let mut admitted = u64::from(ask(&store, (&neighbour, "known"), Op::Acquire, 1).allowed());
        let check = Check { limit: &filler, key: "mallory", cost: 1 };
        let full = loop {
            clock.advance(Duration::from_micros(1));
            if let Err(error) = store.apply_now(&Batch::one(&check)) {
                break error;
            }
        };
        assert_eq!(full, MemoryError::Entries { most: 48 });
        for key in ["known", "new"] {
            for _ in 0..20 {
                clock.advance(Duration::from_micros(1));
                admitted += u64::from(ask(&store, (&neighbour, key), Op::Acquire, 1).allowed());
            }
        }
        assert_eq!((admitted, store.overflowed()), (32, 0), "{words}");
        assert!(store.entry_count() <= 2 * 48);
    }
}
