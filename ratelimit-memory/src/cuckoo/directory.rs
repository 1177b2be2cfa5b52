//! [`Directory`]: the directory of *extendible hashing* (Fagin et al., 1979): which segment a key
//! lies in, and how segments split.
//!
//! A segment of depth *d* owns the keys whose addresses begin with the same *d* bits. The directory
//! has a word for each prefix of the greatest possible depth, with the number and depth of its
//! segment, and a table of the segments. Both have their full size from the start: some 16 bytes
//! per thousand keys of the store's capacity. When a segment splits, a new one takes the keys whose
//! next bit is 1. The split holds the locks of all buckets of the segment from the first entry that
//! it moves until it has updated the directory. So a thread that has locked a bucket, and finds the
//! directory's word unchanged, has the right bucket. A thread that finds the key's entry there need
//! not check: see `bucket.rs`.

use once_cell::race::OnceBox;
use prefetch_index::prefetch_index;
use ratelimit_core::for_memory::Compact;

use super::address::{Address, KeyTag, MAX_DEPTH};
use super::bucket::{Bucket, BucketGuard, OptimisticRead, SLOTS};
use super::entry::{EXTRA, LOCKED};
use super::{BUCKETS, FULL_SLOTS};
use crate::sync::{AtomicU32, AtomicUsize, Mutex, Ordering, lock};

/// The depth of the first segments, at most 1: there is one, but two in tests.
const FIRST_DEPTH: u32 = if cfg!(all(test, not(loom))) { 1 } else { 0 };
/// The bits of a directory word that tell the depth.
const DEPTH_BITS: u32 = 5;

/// Buckets that are allocated, and split, together.
type Segment = [Bucket; BUCKETS];

/// A segment made where it stays: by way of the stack, it would overflow that of a small thread,
/// such as loom's.
fn new_segment() -> Box<Segment> {
    let buckets: Box<[Bucket]> = (0..BUCKETS).map(|_| Bucket::new()).collect();
    // They are as many as they should be, so this ends at once.
    buckets.try_into().unwrap_or_else(|_| new_segment())
}

/// Where a key lies, while the directory's word is unchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyRoute<'t> {
    /// The directory's word for the key, and its value when the route was made.
    pointer: &'t AtomicU32,
    word: u32,
    segment: &'t Segment,
    address: Address,
}

/// A bucket's place in the global locking order: segment, then bucket.
pub(crate) type BucketIndex = (usize, usize);

impl<'t> KeyRoute<'t> {
    #[inline(always)]
    const fn number(self) -> usize {
        (self.word >> DEPTH_BITS) as usize
    }

    #[inline(always)]
    const fn depth(self) -> u32 {
        self.word & ((1 << DEPTH_BITS) - 1)
    }

    /// Whether the directory's word is unchanged, so that the key still lies here.
    #[inline(always)]
    pub(super) fn is_still(self) -> bool {
        self.pointer.load(Ordering::Acquire) == self.word
    }

    /// The tag of the key in this segment.
    #[inline(always)]
    pub(crate) const fn tag(self) -> KeyTag {
        self.address.tag(self.depth())
    }

    /// The key's first bucket and its alternate.
    #[inline(always)]
    pub(crate) const fn buckets(self) -> [&'t Bucket; 2] {
        let buckets = self.segment;
        [&buckets[self.address.first()], &buckets[self.address.second()]]
    }

    /// Prefetches both buckets. Unlike a read, a prefetch does not stall the processor: it goes on
    /// with the instructions that follow until they need the buckets.
    #[inline(always)]
    pub(crate) fn prefetch(self) {
        let buckets = self.segment.as_slice();
        prefetch_index(buckets, self.address.first());
        prefetch_index(buckets, self.address.second());
    }

    /// Looks for the key in both buckets, without a lock. It does not find an entry that a split
    /// has moved, until a locked lookup has rewritten that entry.
    #[inline(always)]
    pub(crate) fn find(self) -> Option<OptimisticRead<'t>> {
        Bucket::look::<0>(self.buckets(), self.tag())
    }

    /// Looks as [`find`](Self::find) does, but only for an unlocked entry whose state has only a
    /// time and a span. Returns that state as well, its time counted from the epoch.
    #[inline(always)]
    pub(crate) fn find_span(self) -> Option<(OptimisticRead<'t>, Compact)> {
        let seen = Bucket::look::<{ LOCKED | EXTRA }>(self.buckets(), self.tag())?;
        Some((seen, seen.span_since_epoch()))
    }

    /// The places of both buckets in the locking order.
    pub(crate) const fn ids(self) -> [BucketIndex; 2] {
        let number = self.number();
        [(number, self.address.first()), (number, self.address.second())]
    }
}

/// The segments, and the word of each prefix.
#[derive(Debug)]
pub(crate) struct Directory {
    /// How many of the lowest address bits the prefix leaves out.
    shift: u32,
    /// A word per prefix.
    pointers: Box<[AtomicU32]>,
    segments: Box<[OnceBox<Segment>]>,
    /// The number of segments.
    count: AtomicUsize,
    /// Locked by a split, before any bucket.
    splitting: Mutex<()>,
}

impl Directory {
    /// Creates the directory of a table of at most `capacity` keys.
    pub(crate) fn new(capacity: usize) -> Self {
        // At the denser end, segments have 1.5 times the average number of keys.
        let segments = capacity.saturating_mul(3).div_ceil(2 * FULL_SLOTS);
        let bits = segments.next_power_of_two().trailing_zeros().clamp(1, MAX_DEPTH);
        let depth = FIRST_DEPTH;
        let word = |index: u32| AtomicU32::new(((index >> (bits - depth)) << DEPTH_BITS) | depth);
        let directory = Self {
            shift: u64::BITS - bits,
            pointers: (0..1 << bits).map(word).collect(),
            // A quarter more than all keys fill: keys of segments that cannot split any more spill
            // to shards.
            segments: (0..(segments + segments / 4).clamp(2, 1 << bits))
                .map(|_| OnceBox::new())
                .collect(),
            count: AtomicUsize::new(1 << depth),
            splitting: Mutex::new(()),
        };
        // Loom does not model how an `OnceBox` publishes a value that is made later.
        let first =
            if cfg!(all(test, loom)) { directory.segments.len() } else { directory.segments() };
        (0..first).for_each(|number| _ = directory.segment(number));
        directory
    }

    #[inline(always)]
    fn segment(&self, number: usize) -> &Segment {
        self.segments[number].get_or_init(new_segment)
    }

    pub(crate) fn bucket(&self, id: BucketIndex) -> &Bucket {
        &self.segment(id.0)[id.1]
    }

    /// The bits of a prefix, which are the greatest depth of a segment.
    const fn bits(&self) -> u32 {
        u64::BITS - self.shift
    }

    pub(crate) fn segments(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn route(&self, address: Address) -> KeyRoute<'_> {
        let pointer = &self.pointers[address.directory_index(self.shift)];
        let word = pointer.load(Ordering::Acquire);
        let segment = self.segment((word >> DEPTH_BITS) as usize);
        KeyRoute { pointer, word, segment, address }
    }

    /// Splits the segment of this route, unless another thread has. Returns `false` if it cannot
    /// split further.
    pub(crate) fn split(&self, route: KeyRoute<'_>) -> bool {
        let _splitting = lock(&self.splitting);
        if !route.is_still() {
            return true;
        }
        if self.segments() >= self.segments.len() || route.depth() >= self.bits() {
            return false;
        }
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let upper = self.segment(number);
        let held: Vec<_> = route.segment.iter().map(Bucket::lock).collect();
        let held: Vec<_> =
            held.into_iter().zip(upper).map(|(bucket, to)| divide(bucket, to)).collect();
        self.publish(route, number);
        drop(held);
        true
    }

    /// Publishes a split: the lower half of the prefixes stays with the route's segment, the upper
    /// half goes to segment `upper`, and both are one deeper.
    fn publish(&self, route: KeyRoute<'_>, upper: usize) {
        let width_bits = self.bits() - route.depth();
        let begin = route.address.directory_index(self.shift) >> width_bits << width_bits;
        let middle = begin + (1 << (width_bits - 1));
        let word = |number: usize| {
            (u32::try_from(number).unwrap_or_default() << DEPTH_BITS) | (route.depth() + 1)
        };
        for (index, to) in self.pointers[begin..begin + (1 << width_bits)].iter().enumerate() {
            let number = if begin + index < middle { route.number() } else { upper };
            to.store(word(number), Ordering::Release);
        }
    }

    /// Relocates an entry of these buckets to its alternate bucket, where it frees a slot first if
    /// it has to; returns whether it did. It never waits for a bucket while it holds two.
    pub(crate) fn relocate(&self, route: KeyRoute<'_>, held: &mut [BucketGuard<'_>; 2]) -> bool {
        let mut all = held.iter_mut().zip(route.ids());
        all.any(|(bucket, (_, index))| self.vacate(route, index, bucket, true).is_some())
    }

    /// Frees a slot of this bucket by relocating its entry, and returns the slot. If it
    /// `may_go_on`, it frees a slot for that entry in the same way. With it segments are fuller
    /// before they split: 24 to 26 bytes per key instead of 26.5 to 28.3.
    fn vacate(
        &self,
        route: KeyRoute<'_>,
        index: usize,
        bucket: &mut BucketGuard<'_>,
        may_go_on: bool,
    ) -> Option<usize> {
        (0..SLOTS).find(|slot| {
            let entry = bucket.get(*slot);
            let at = entry.alternate_bucket(index, route.depth());
            // The lock fails if the alternate is one of the locked buckets, and none of these has a
            // free slot.
            let Some(mut other) = self.bucket((route.number(), at)).try_lock() else {
                return false;
            };
            let free = match other.free_slot() {
                None if may_go_on => self.vacate(route, at, &mut other, false),
                free => free,
            };
            let Some(free) = free else { return false };
            other.set(free, entry);
            bucket.clear(*slot);
            true
        })
    }
}

/// Divides a bucket for a split: entries of the upper half move to `upper`, a bucket that no other
/// thread can reach yet; the rest stay, one level deeper.
fn divide<'l>(mut bucket: BucketGuard<'l>, upper: &Bucket) -> BucketGuard<'l> {
    let mut upper = upper.lock();
    for slot in 0..SLOTS {
        let entry = bucket.get(slot);
        if entry.is_free() {
            continue;
        }
        match entry.deeper() {
            (entry, true) => {
                upper.set(slot, entry);
                bucket.clear(slot);
            }
            (entry, false) => bucket.set(slot, entry),
        }
    }
    if bucket.has_spilled() {
        upper.spill();
    }
    bucket
}
