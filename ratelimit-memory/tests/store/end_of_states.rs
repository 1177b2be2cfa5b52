//! The end of time, at which no state can end.

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Refusal, SyncStore, Timestamp};
use ratelimit_memory::MemoryError;

use crate::common::{MIXED, Memory, limit, store};

#[test]
fn a_clock_at_the_end_of_time_is_refused_by_name() {
    for words in MIXED {
        let (store, clock): (Memory, _) = store(|builder| builder);
        let limits = ["l", "m"].map(|name| limit(name, words));
        let checks = limits.each_ref().map(|limit| Check { limit, key: "k", cost: 1 });
        let decide = |op, now| store.apply_now(&Batch::one(&checks[0]).op(op).now(now));
        let both = Batch::new(&checks).expect("distinct");
        let end = || {
            clock.set(Timestamp::MAX);
            for op in [Op::Acquire, Op::Peek, Op::Force, Op::Refund] {
                let refusal = Refusal::EndOfTime { now_us: Timestamp::MAX.as_us() };
                let refused = Err(MemoryError::Refused(refusal));
                assert_eq!(decide(op, Now::Store), refused, "{words}");
                assert_eq!(store.apply_now(&both.op(op)), refused, "{words}");
                assert_eq!(store.acquire_now(&limits[0], "k", 1), refused, "{words}");
            }
        };
        end();
        // Before the end every limit counts.
        clock.set(Timestamp::saturating_from_us(Timestamp::MAX.as_us() - 1));
        assert!(store.apply_now(&both).expect("decides").allowed());
        let denied = (0..200).any(|_| !decide(Op::Acquire, Now::Store).expect("decides").allowed());
        assert!(denied, "{words}");
        // Known keys are decided on other paths than new ones.
        end();
        // A given time says nothing about the clock.
        assert!(decide(Op::Acquire, Now::At(Timestamp::MAX)).is_ok());
    }
}
