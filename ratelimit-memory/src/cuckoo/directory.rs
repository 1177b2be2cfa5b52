//! [`Directory`]: which segment a key lies in, and how segments split.
//!
//! A segment owns the keys whose addresses begin with the same bits, as many as it is deep. The directory is a
//! table with a word for every beginning of the greatest depth that there can be, the segment's number and its
//! depth, and one of the segments: from the start, some 16 bytes for each thousand keys of the store's
//! capacity. When a segment splits, a new one takes the keys whose next bit is 1. All its buckets are locked from
//! the first entry that moves until the directory says so: whoever has locked a bucket, and finds that the
//! directory still says what it said before, has the right one. Who finds a key's entry there need not ask: see
//! `bucket.rs`.

use once_cell::race::OnceBox;
use prefetch_index::prefetch_index;
use ratelimit_core::Compact;

use super::address::{Address, MAX_DEPTH, Tag};
use super::bucket::{Bucket, Locked, SLOTS, Snapshot};
use super::entry::{EXTRA, LOCKED};
use super::{BUCKETS, FULL_SLOTS};
use crate::sync::{AtomicU32, AtomicUsize, Mutex, Ordering, lock};

/// How deep the first segments lie, at most 1: there is one, but in tests two.
const FIRST_DEPTH: u32 = if cfg!(all(test, not(loom))) { 1 } else { 0 };
/// The bits of a word of the directory that tell the depth.
const DEPTH_BITS: u32 = 5;

/// Buckets that lie, and split, together.
#[derive(Debug)]
pub(crate) struct Segment([Bucket; BUCKETS]);

impl Segment {
    fn boxed() -> Box<Self> {
        Box::new(Self(std::array::from_fn(|_| Bucket::new())))
    }
}

/// Where a key lies, as long as the directory says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route<'t> {
    /// Where the directory says so, and what.
    place: &'t AtomicU32,
    word: u32,
    segment: &'t Segment,
    address: Address,
}

/// A bucket's place in the one order in which buckets are locked.
pub(crate) type BucketIndex = (usize, usize);

impl<'t> Route<'t> {
    #[inline(always)]
    const fn number(self) -> usize {
        (self.word >> DEPTH_BITS) as usize
    }

    #[inline(always)]
    const fn depth(self) -> u32 {
        self.word & ((1 << DEPTH_BITS) - 1)
    }

    /// Whether the key still lies where it did.
    #[inline(always)]
    pub(super) fn is_still(self) -> bool {
        self.place.load(Ordering::Acquire) == self.word
    }

    /// What is kept of the key there.
    #[inline(always)]
    pub(crate) const fn tag(self) -> Tag {
        self.address.tag(self.depth())
    }

    /// The bucket that the key lies in unless that is full, and the one that it lies in otherwise.
    #[inline(always)]
    pub(crate) const fn buckets(self) -> [&'t Bucket; 2] {
        let buckets = &self.segment.0;
        [&buckets[self.address.first()], &buckets[self.address.second()]]
    }

    /// Has the key's buckets brought while something else is done. A processor does not wait for them here, as it
    /// would have to if they were read: until it needs them it gets on with what comes next, up to the next
    /// call.
    #[inline(always)]
    pub(crate) fn prefetch(self) {
        let buckets = self.segment.0.as_slice();
        prefetch_index(buckets, self.address.first());
        prefetch_index(buckets, self.address.second());
    }

    /// Looks for the key in both, without a lock. An entry that has moved, and has not been looked for with the
    /// lock since, is not found.
    #[inline(always)]
    pub(crate) fn find(self) -> Option<Snapshot<'t>> {
        Bucket::look::<0>(self.buckets(), self.tag())
    }

    /// The same, but only an entry that nobody is writing, and whose state is but a time and a span: that as
    /// well, the time counted from the epoch on.
    #[inline(always)]
    pub(crate) fn find_span(self) -> Option<(Snapshot<'t>, Compact)> {
        let seen = Bucket::look::<{ LOCKED | EXTRA }>(self.buckets(), self.tag())?;
        Some((seen, seen.span_since_epoch()))
    }

    /// The same two buckets' places in the order of locking.
    pub(crate) const fn ids(self) -> [BucketIndex; 2] {
        let number = self.number();
        [(number, self.address.first()), (number, self.address.second())]
    }
}

/// The segments, and who lies in which.
#[derive(Debug)]
pub(crate) struct Directory {
    /// How many bits of an address do not choose a word.
    shift: u32,
    /// A word for every beginning of an address.
    places: Box<[AtomicU32]>,
    segments: Box<[OnceBox<Segment>]>,
    /// How many segments there are.
    count: AtomicUsize,
    /// Locked by whoever splits a segment, before any bucket.
    splitting: Mutex<()>,
}

impl Directory {
    /// For so many keys at the most.
    pub(crate) fn new(capacity: usize) -> Self {
        // At the denser end there are 1.5 times as many keys as on the average.
        let segments = capacity.saturating_mul(3).div_ceil(2 * FULL_SLOTS);
        let bits = segments.next_power_of_two().trailing_zeros().clamp(1, MAX_DEPTH);
        let depth = FIRST_DEPTH;
        let word = |place: u32| AtomicU32::new(((place >> (bits - depth)) << DEPTH_BITS) | depth);
        let directory = Self {
            shift: u64::BITS - bits,
            places: (0..1 << bits).map(word).collect(),
            // A quarter more than all keys fill: those that cannot split any more let keys spill.
            segments: (0..(segments + segments / 4).clamp(2, 1 << bits))
                .map(|_| OnceBox::new())
                .collect(),
            count: AtomicUsize::new(1 << depth),
            splitting: Mutex::new(()),
        };
        // Loom does not know how an `OnceBox` hands over what is made later.
        let first =
            if cfg!(all(test, loom)) { directory.most_segments() } else { directory.segments() };
        (0..first).for_each(|number| _ = directory.segment(number));
        directory
    }

    #[inline(always)]
    fn segment(&self, number: usize) -> &Segment {
        self.segments[number].get_or_init(Segment::boxed)
    }

    pub(crate) fn bucket(&self, id: BucketIndex) -> &Bucket {
        &self.segment(id.0).0[id.1]
    }

    /// How many bits of an address choose a word, and how deep a segment can lie.
    const fn bits(&self) -> u32 {
        u64::BITS - self.shift
    }

    pub(crate) fn segments(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn most_segments(&self) -> usize {
        self.segments.len()
    }

    #[inline(always)]
    pub(crate) fn route(&self, address: Address) -> Route<'_> {
        let place = &self.places[address.place(self.shift)];
        let word = place.load(Ordering::Acquire);
        let segment = self.segment((word >> DEPTH_BITS) as usize);
        Route { place, word, segment, address }
    }

    /// Splits the segment of this route, unless somebody has. `false` if it cannot be split further.
    pub(crate) fn split(&self, route: Route<'_>) -> bool {
        let _splitting = lock(&self.splitting);
        if !route.is_still() {
            return true;
        }
        if self.segments() >= self.most_segments() || route.depth() >= self.bits() {
            return false;
        }
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let upper = self.segment(number);
        let held: Vec<_> = route.segment.0.iter().map(Bucket::lock).collect();
        let held: Vec<_> =
            held.into_iter().zip(&upper.0).map(|(bucket, to)| divided(bucket, to)).collect();
        self.publish(route, number);
        drop(held);
        true
    }

    /// Says of the lower half of what the route's segment owned that it lies one deeper there, and of the
    /// upper half that it lies in another.
    fn publish(&self, route: Route<'_>, upper: usize) {
        let width_bits = self.bits() - route.depth();
        let begin = route.address.place(self.shift) >> width_bits << width_bits;
        let middle = begin + (1 << (width_bits - 1));
        let word = |number: usize| {
            (u32::try_from(number).unwrap_or_default() << DEPTH_BITS) | (route.depth() + 1)
        };
        for (place, to) in self.places[begin..begin + (1 << width_bits)].iter().enumerate() {
            let number = if begin + place < middle { route.number() } else { upper };
            to.store(word(number), Ordering::Release);
        }
    }

    /// A slot of this bucket whose entry could be moved to its own alternate bucket. So segments are fuller before they
    /// split: 24 to 26 bytes a key, where it would be 26.5 to 28.3.
    fn vacated(&self, route: Route<'_>, place: usize, bucket: &mut Locked<'_>) -> Option<usize> {
        (0..SLOTS).find(|slot| {
            let entry = bucket.get(*slot);
            let other = self.bucket((route.number(), entry.alternate_bucket(place, route.depth())));
            let Some(mut other) = other.try_lock() else { return false };
            let Some(free) = other.free_slot() else { return false };
            other.set(free, entry);
            bucket.clear(*slot);
            true
        })
    }

    /// Moves an entry of these buckets to its alternate bucket, if that has a place or can be given one; says whether it
    /// did. Never waits for another bucket while it holds two.
    pub(crate) fn relocate(&self, route: Route<'_>, held: &mut [Locked<'_>; 2]) -> bool {
        for (bucket, (number, place)) in held.iter_mut().zip(route.ids()) {
            for slot in 0..SLOTS {
                let entry = bucket.get(slot);
                let at = entry.alternate_bucket(place, route.depth());
                // Of the two that are held, neither has a place.
                let Some(mut other) = self.bucket((number, at)).try_lock() else { continue };
                let free = other.free_slot();
                if let Some(free) = free.or_else(|| self.vacated(route, at, &mut other)) {
                    other.set(free, entry);
                    bucket.clear(slot);
                    return true;
                }
            }
        }
        false
    }
}

/// The bucket with its entries one deeper, those of the upper half moved to a bucket that nobody knows yet.
fn divided<'l>(mut bucket: Locked<'l>, upper: &Bucket) -> Locked<'l> {
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
