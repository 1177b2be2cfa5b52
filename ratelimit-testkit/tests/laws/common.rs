//! Harnesses of wrong stores.

/// Writes harnesses: each of a store with this flaw, or without one, and with these capabilities listed as lacking.
macro_rules! harnesses {
    ($($harness:ident has $flaw:expr, lacks $lacks:expr;)+) => { $(
        struct $harness;

        impl ratelimit_testkit::Harness for $harness {
            type Store = ratelimit_testkit::wrong::WrongStore;
            const CASES: u32 = 16;
            const SMALL_TRACE_REQUESTS: u32 = 2;
            const LACKS: &'static [ratelimit_testkit::Capability] = $lacks;

            fn new() -> Self {
                Self
            }

            fn store(&self) -> Self::Store {
                ratelimit_testkit::wrong::WrongHarness($flaw).store()
            }

            fn clock(&self, store: &Self::Store) -> ratelimit_testkit::StoreClock {
                ratelimit_testkit::wrong::WrongHarness($flaw).clock(store)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &ratelimit_core::Limit<ratelimit_core::Policy>,
                key: &str,
            ) -> Option<ratelimit_core::PolicyState> {
                ratelimit_testkit::wrong::WrongHarness($flaw).state(store, limit, key).await
            }

            async fn leaks(
                &self,
                store: &Self::Store,
                within: std::time::Duration,
            ) -> Vec<String> {
                ratelimit_testkit::wrong::WrongHarness($flaw).leaks(store, within).await
            }
        }
    )+ };
}
