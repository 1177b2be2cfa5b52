//! [`Builder`]: a store's size, locks and clock.

use ratelimit_core::algorithm::InMemory;
use ratelimit_core::for_memory::Compact;
use ratelimit_core::{Clock, Timestamp};

use super::{MemoryStore, sweep};
use crate::capacity::Capacity;
use crate::clock::PreciseClock;
use crate::cuckoo::CuckooTable;
use crate::hash::{CALLER_BITS, KeyHasher};
use crate::records::Records;
use crate::shard::{MOST_SLOTS, Shard};
use crate::sync::{AtomicU64, AtomicUsize, Mutex};

/// The default capacity, in keys.
const DEFAULT_CAPACITY: usize = 1 << 20;
/// The most records, by default.
const DEFAULT_RECORDS: usize = 1 << 16;
/// Log entries per key of the capacity, by default.
const ENTRIES_A_KEY: usize = 16;
/// The fewest log entries of a store, by default.
const LEAST_ENTRIES: usize = 1 << 16;

/// The settings of a [`MemoryStore`] that is to be built.
#[derive(Clone, Debug)]
pub struct Builder<C = PreciseClock> {
    pub(super) capacity: usize,
    pub(super) reservations: Option<usize>,
    pub(super) entries: Option<usize>,
    pub(super) records: usize,
    pub(super) shards: usize,
    /// The clock, or how to make the default one, which is done only if the store uses it: making
    /// one panics where the system has no time (`wasm32-unknown-unknown`).
    pub(super) clock: Result<C, fn() -> C>,
}

impl Builder<PreciseClock> {
    pub(super) fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(4, std::num::NonZero::get);
        let clock = Err(PreciseClock::new as fn() -> PreciseClock);
        let capacity = DEFAULT_CAPACITY;
        Self {
            capacity,
            reservations: None,
            entries: None,
            records: DEFAULT_RECORDS,
            shards: threads * 16,
            clock,
        }
    }
}

impl<C: Clock> Builder<C> {
    /// The most keys that the store may have: at least 1, at most 4,294,967,295, and 1,048,576 by
    /// default. Memory grows with the keys; only 16 bytes per thousand keys of the capacity are
    /// allocated up front.
    ///
    /// # At capacity
    /// A new key that finds no room shares one state per limit with all other such keys: together
    /// they are admitted what the limit admits one key. A batch that names several of them is
    /// charged the sum of their costs, or nothing. A key gets a state of its own, at full capacity,
    /// as soon as there is room for it. A key is therefore admitted at most twice its limit within
    /// any time: once by the shared state, and once by its own.
    #[must_use]
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys.clamp(1, MOST_SLOTS);
        self
    }

    /// The most reservations and leases that the store may have: at least 1, and by default as many
    /// as [keys](Self::capacity). They do not count as keys. Each takes some 170 bytes for every
    /// limit of its request, until it is settled or an hour has passed; a lease until it is
    /// released or expires. A reservation under a generated id (such as
    /// [`RateLimiter::reserve`](ratelimit_core::RateLimiter)) is forgotten [ten
    /// seconds](ratelimit_core::store::Reservation::REPEAT_US) after its settlement; an id of a
    /// caller after an hour.
    ///
    /// # At the cap
    /// A request under an id of a caller gets [`MemoryError::Full`](super::MemoryError::Full). One
    /// under an id that the layer drew is charged [without a
    /// record](ratelimit_core::Verdict::is_unrecorded), which
    /// [`MemoryStore::unrecorded`](super::MemoryStore::unrecorded) counts: its estimate stays
    /// charged, and a lease holds its place until it expires.
    #[must_use]
    pub fn reservations(mut self, reservations: usize) -> Self {
        self.reservations = Some(reservations.clamp(1, MOST_SLOTS));
        self
    }

    /// The most entries that all logs together may keep, at least 2. Entries are what sliding and
    /// window logs have admitted, leases, and the buckets of bucketed windows. The default is
    /// sixteen per key of the [capacity](Self::capacity), but no fewer than 65,536. An entry takes
    /// 16 bytes; in a window log it takes 32 bytes and its metadata.
    ///
    /// # At the cap
    /// A key always has room for its part, the entries per key of the capacity, so that a long log
    /// takes no room from other keys. There may thus be up to twice as many. A key with more gets
    /// [`MemoryError::Entries`](super::MemoryError::Entries).
    #[must_use]
    pub const fn entries(mut self, entries: usize) -> Self {
        self.entries = Some(if entries < 2 { 2 } else { entries });
        self
    }

    /// The most [records](ratelimit_core::Record) of callers, 65,536 by default. They count neither
    /// as keys nor as reservations, and none is ever evicted: at the cap, those that have ended
    /// make room, and then a new one gets [`MemoryError::Records`](super::MemoryError::Records).
    /// Each takes some 100 bytes and its key.
    #[must_use]
    pub const fn records(mut self, records: usize) -> Self {
        self.records = records;
        self
    }

    /// The number of locks that the keys are spread over, rounded up to a power of two, at most
    /// 16,384. The default is sixteen per processor.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// Sets the clock, such as a [`ManualClock`](ratelimit_core::ManualClock) in a test. The store
    /// then reads no system clock. `wasm32-unknown-unknown` has none, so a store there needs this
    /// setting.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> Builder<D> {
        let Self { capacity, reservations, entries, records, shards, .. } = self;
        Builder { capacity, reservations, entries, records, shards, clock: Ok(clock) }
    }

    /// Builds the store.
    #[must_use]
    pub fn build<A: InMemory>(self) -> MemoryStore<A, C> {
        let shards = self.shards.clamp(1, 1 << CALLER_BITS).next_power_of_two();
        let hasher = KeyHasher::random();
        let in_proportion = self.capacity.saturating_mul(ENTRIES_A_KEY).max(LEAST_ENTRIES);
        let most_entries = self.entries.unwrap_or(in_proportion);
        let most_reservations = self.reservations.unwrap_or(self.capacity);
        let nothing = Compact { at: Timestamp::ZERO, span_us: 0, extra: 0 };
        let has_compact_states = A::from_compact(nothing).is_some();
        let clock = self.clock.unwrap_or_else(|make| make());
        MemoryStore {
            table: has_compact_states.then(|| CuckooTable::new(self.capacity, clock.now())),
            shards: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            overflow: Mutex::new(Shard::new()),
            reservations: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            records: Records::new(self.records),
            shared_hash: hasher.hash(""),
            hasher,
            clock,
            capacity: Capacity::new(self.capacity, most_reservations, most_entries),
            overflowed: AtomicU64::new(0),
            unrecorded: AtomicU64::new(0),
            next_to_sweep: AtomicUsize::new(0),
            buckets_when_full: AtomicUsize::new(sweep::MOST_BUCKETS_WHEN_FULL),
        }
    }
}
