//! The harness of the wrong stores.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::{AnyAlgorithm, Clock, Limit, ManualClock, SystemClock};
use ratelimit_testkit::{Capability, Harness, StoreClock};

use super::{BEGIN, Flaw, WrongStore};
use crate::capabilities::CLAIMS;

/// The harness of wrong stores, which makes the claims of this number.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WrongHarness<const CLAIMED: usize = 0> {
    /// The flaw of its stores, or none.
    pub(crate) flaw: Option<Flaw>,
    /// Whether their clocks run, or are set.
    pub(crate) in_real_time: bool,
}

impl<const CLAIMED: usize> WrongHarness<CLAIMED> {
    /// Of stores with this flaw, whose clocks are set.
    pub(crate) const fn with_flaw(flaw: Option<Flaw>) -> Self {
        Self { flaw, in_real_time: false }
    }
}

impl<const CLAIMED: usize> Harness for WrongHarness<CLAIMED> {
    type Store = WrongStore;

    const CASES: u32 = 16;
    const SMALL_TRACE_REQUESTS: u32 = if CLAIMED == 0 { 3 } else { 2 };
    const LACKS: &'static [Capability] = CLAIMS[CLAIMED].1;

    fn new() -> Self {
        Self::with_flaw(CLAIMS[CLAIMED].0)
    }

    fn store(&self) -> WrongStore {
        let manual = (!self.in_real_time).then(|| ManualClock::new(BEGIN));
        let clock: Box<dyn Clock> = match &manual {
            Some(clock) => Box::new(clock.clone()),
            None => Box::new(SystemClock::new()),
        };
        let (flaw, began, contents) = (self.flaw, clock.now(), Mutex::default());
        let (latest_us, calls) = (AtomicU64::new(0), AtomicU64::new(0));
        WrongStore { flaw, clock, manual, began, latest_us, calls, contents }
    }

    fn clock(&self, store: &WrongStore) -> StoreClock {
        store.manual.as_ref().map_or(StoreClock::Real, StoreClock::from)
    }

    async fn state(
        &self,
        store: &WrongStore,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
    ) -> Option<AnyState> {
        let key = store.key(limit, key);
        let state = store.contents().entries.get(&key).map(|entry| entry.state.clone());
        state.filter(|_| !store.cannot(Capability::States))
    }

    async fn leaks(&self, store: &WrongStore, within: Duration) -> Vec<String> {
        let (by, contents) = (store.clock.now() + within, store.contents());
        let states =
            contents.entries.iter().map(|(key, entry)| (format!("{key:?}"), entry.sweep_at));
        let reserved =
            contents.reservations.iter().map(|(key, (_, at))| (format!("{key:?}"), Some(*at)));
        let all = states.chain(reserved);
        all.filter(|(_, at)| at.is_none_or(|at| at > by))
            .map(|(key, at)| format!("{key} until {at:?}"))
            .collect()
    }
}
