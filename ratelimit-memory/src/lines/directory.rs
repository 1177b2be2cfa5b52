//! [`Directory`]: which segment a key lies in, and how segments split.
//!
//! A segment owns the keys whose addresses begin with the same bits, as many as it is deep. The
//! directory has a table with a word for every beginning of the greatest depth so far: the segment's number
//! and its depth. When a segment has to lie deeper than that, there is a table twice as large from then on; the
//! old one stays where it is, as others may be reading it, and whoever does finds in the end that it is
//! not the one that counts.
//! When a segment splits, a new one takes the keys whose next bit is 1. All its lines are locked from the
//! first entry that moves until the directory says so: whoever has locked a line, and finds that the
//! directory still says what it said before, has the right one. Who finds a key's entry there need not ask: see
//! `line.rs`.

use std::sync::OnceLock;

use super::address::{Address, MAX_DEPTH, Tag};
use super::line::{Begun, Line, Locked, SLOTS, Seen};
use super::{FULL_SLOTS, LINES};
use crate::sync::{AtomicU32, AtomicUsize, Mutex, Ordering, lock};

/// Segments that are made together.
const CHUNK: usize = if cfg!(any(test, loom)) { 2 } else { 32 };
/// How deep the first segments lie: there are four of them, unless fewer hold all keys there can be.
const FIRST_DEPTH: u32 = if cfg!(loom) {
    0
} else if cfg!(test) {
    1
} else {
    2
};
/// From so many bits on the table is larger than a processor's own caches are: a megabyte.
const FAR_BITS: u32 = 8;
/// The bits of a word of the directory that tell the depth.
const DEPTH_BITS: u32 = 5;

/// Lines that lie, and split, together.
#[derive(Debug)]
pub(crate) struct Segment([Line; LINES]);

impl Segment {
    fn new() -> Self {
        Self(std::array::from_fn(|_| Line::new()))
    }
}

/// Where a key lies, as long as the directory says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route<'t> {
    /// How many bits of the address chose the word.
    bits: u32,
    /// Where the directory says so, and what.
    place: &'t AtomicU32,
    word: u32,
    segment: &'t Segment,
    address: Address,
}

/// A line's place in the one order in which lines are locked.
pub(crate) type LineId = (usize, usize);

impl<'t> Route<'t> {
    #[inline(always)]
    const fn number(self) -> usize {
        (self.word >> DEPTH_BITS) as usize
    }

    #[inline(always)]
    const fn depth(self) -> u32 {
        self.word & ((1 << DEPTH_BITS) - 1)
    }

    /// Whether the table that this was found in says so still, if it still counts.
    #[inline(always)]
    pub(super) fn table_says(self) -> bool {
        self.place.load(Ordering::Acquire) == self.word
    }

    /// What is kept of the key there.
    #[inline(always)]
    pub(crate) const fn tag(self) -> Tag {
        self.address.tag(self.depth())
    }

    /// The line that the key lies in unless that is full, and the one that it lies in otherwise.
    #[inline(always)]
    pub(crate) const fn lines(self) -> [&'t Line; 2] {
        let lines = &self.segment.0;
        [&lines[self.address.first()], &lines[self.address.second()]]
    }

    /// Begins to look for the key, so that its lines are on their way while something else is done. In a small table
    /// only the first one: the other would be near anyhow, and more often than not another thread's.
    #[inline(always)]
    pub(crate) fn begun(self) -> Begun {
        let [first, second] = self.lines();
        if self.bits >= FAR_BITS {
            std::hint::black_box(second.begun());
        }
        first.begun()
    }

    /// Looks for the key in both, without a lock. An entry that has moved, and has not been looked for with the
    /// lock since, is not found.
    #[inline(always)]
    pub(crate) fn find(self, begun: Begun) -> Option<(&'t Line, Seen)> {
        let tag = self.tag();
        let [first, second] = self.lines();
        if let Some(seen) = first.look(begun, tag) {
            return Some((first, seen));
        }
        Some((second, second.look(second.begun(), tag)?))
    }

    /// The same two lines' places in the order of locking.
    pub(crate) const fn ids(self) -> [LineId; 2] {
        let number = self.number();
        [(number, self.address.first()), (number, self.address.second())]
    }
}

/// A table of so many bits: a word for every beginning of an address.
type Table = OnceLock<Box<[AtomicU32]>>;
/// Segments that were made together.
type Chunk = OnceLock<Box<[Segment; CHUNK]>>;

/// The segments, and who lies in which.
#[derive(Debug)]
pub(crate) struct Directory {
    /// How many bits of an address choose a word: those of the table that counts.
    bits: AtomicU32,
    /// How many there can be.
    most_bits: u32,
    /// By their bits. All but the one that counts are empty or out of date.
    tables: [Table; MAX_DEPTH as usize + 1],
    chunks: Box<[Chunk]>,
    /// How many segments there are.
    count: AtomicUsize,
    /// Locked by whoever splits a segment, before any line.
    splitting: Mutex<()>,
}

impl Directory {
    /// For so many keys at the most.
    pub(crate) fn new(capacity: usize) -> Self {
        // At the denser end there are 1.5 times as many keys as on the average.
        let segments = capacity.saturating_mul(3).div_ceil(2 * FULL_SLOTS);
        let most_bits = segments.next_power_of_two().trailing_zeros().clamp(1, MAX_DEPTH);
        let depth = FIRST_DEPTH.min(most_bits);
        let bits = depth.max(1);
        let directory = Self {
            bits: AtomicU32::new(bits),
            most_bits,
            tables: std::array::from_fn(|_| OnceLock::new()),
            // A quarter more than all keys fill: those that cannot split any more let keys spill.
            chunks: (0..(segments + segments / 4).clamp(1 << bits, 1 << most_bits).div_ceil(CHUNK))
                .map(|_| OnceLock::new())
                .collect(),
            count: AtomicUsize::new(1 << depth),
            splitting: Mutex::new(()),
        };
        for (word, place) in directory.table(bits).iter().zip(0..) {
            let number: u32 = place >> (bits - depth);
            word.store((number << DEPTH_BITS) | depth, Ordering::Relaxed);
        }
        if cfg!(loom) {
            // It does not know how `OnceLock` hands over what is made later.
            (1..=most_bits).for_each(|bits| _ = directory.table(bits));
            (0..directory.most_segments()).for_each(|number| _ = directory.segment(number));
        }
        directory
    }

    #[inline(always)]
    fn table(&self, bits: u32) -> &[AtomicU32] {
        let new = || (0..1 << bits).map(|_| AtomicU32::new(0)).collect();
        self.tables[bits as usize].get_or_init(new)
    }

    #[inline(always)]
    fn segment(&self, number: usize) -> &Segment {
        &self.chunks[number / CHUNK].get_or_init(new_chunk)[number % CHUNK]
    }

    pub(crate) fn line(&self, id: LineId) -> &Line {
        &self.segment(id.0).0[id.1]
    }

    pub(crate) fn segments(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn most_segments(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    #[inline(always)]
    pub(crate) fn route(&self, address: Address) -> Route<'_> {
        let bits = self.bits.load(Ordering::Acquire);
        let place = &self.table(bits)[address.place(bits)];
        let word = place.load(Ordering::Acquire);
        let segment = self.segment((word >> DEPTH_BITS) as usize);
        Route { bits, place, word, segment, address }
    }

    /// Whether the key still lies where it did.
    #[inline(always)]
    pub(crate) fn is_still(&self, route: Route<'_>) -> bool {
        self.bits.load(Ordering::Acquire) == route.bits && route.table_says()
    }

    /// Splits the segment of this route, unless somebody has. `false` if it cannot be split further.
    pub(crate) fn split(&self, route: Route<'_>) -> bool {
        let _splitting = lock(&self.splitting);
        if !self.is_still(route) {
            return true;
        }
        if self.segments() >= self.most_segments() {
            return false;
        }
        let route = if route.depth() < route.bits {
            route
        } else if route.bits < self.most_bits {
            self.double(route.bits);
            self.route(route.address)
        } else {
            return false;
        };
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let upper = self.segment(number);
        let held: Vec<_> = route.segment.0.iter().map(Line::lock).collect();
        let held: Vec<_> =
            held.into_iter().zip(&upper.0).map(|(line, to)| divided(line, to)).collect();
        self.publish(route, number);
        drop(held);
        true
    }

    /// Has a table with one bit more count from now on, in which everything lies where it did.
    fn double(&self, bits: u32) {
        let doubled = self.table(bits + 1).as_chunks().0;
        for (word, [one, other]) in self.table(bits).iter().zip(doubled) {
            let word = word.load(Ordering::Relaxed);
            one.store(word, Ordering::Relaxed);
            other.store(word, Ordering::Relaxed);
        }
        self.bits.store(bits + 1, Ordering::Release);
    }

    /// Says of the lower half of what the route's segment owned that it lies one deeper there, and of the
    /// upper half that it lies in another.
    fn publish(&self, route: Route<'_>, upper: usize) {
        let width_bits = route.bits - route.depth();
        let begin = route.address.place(route.bits) >> width_bits << width_bits;
        let middle = begin + (1 << (width_bits - 1));
        let word = |number: usize| {
            (u32::try_from(number).unwrap_or_default() << DEPTH_BITS) | (route.depth() + 1)
        };
        for (place, to) in
            self.table(route.bits)[begin..begin + (1 << width_bits)].iter().enumerate()
        {
            let number = if begin + place < middle { route.number() } else { upper };
            to.store(word(number), Ordering::Release);
        }
    }

    /// A slot of this line whose entry could be moved to its own other line. So segments are fuller before they
    /// split: 24 to 26 bytes a key, where it would be 26.5 to 28.3.
    fn vacated(&self, route: Route<'_>, place: usize, line: &mut Locked<'_>) -> Option<usize> {
        (0..SLOTS).find(|slot| {
            let entry = line.get(*slot);
            let other = self.line((route.number(), entry.other_line(place, route.depth())));
            let Some(mut other) = other.try_lock() else { return false };
            let Some(free) = other.free_slot() else { return false };
            other.set(free, entry);
            line.clear(*slot);
            true
        })
    }

    /// Moves an entry of these lines to its other line, if that has a place or can be given one; says whether it
    /// did. Never waits for another line while it holds two.
    pub(crate) fn relocate(&self, route: Route<'_>, held: &mut [Locked<'_>; 2]) -> bool {
        for (line, (number, place)) in held.iter_mut().zip(route.ids()) {
            for slot in 0..SLOTS {
                let entry = line.get(slot);
                let at = entry.other_line(place, route.depth());
                // Of the two that are held, neither has a place.
                let Some(mut other) = self.line((number, at)).try_lock() else { continue };
                let free = other.free_slot();
                if let Some(free) = free.or_else(|| self.vacated(route, at, &mut other)) {
                    other.set(free, entry);
                    line.clear(slot);
                    return true;
                }
            }
        }
        false
    }
}

fn new_chunk() -> Box<[Segment; CHUNK]> {
    // By way of a vector, as an array would be made on the stack.
    let segments: Vec<_> = (0..CHUNK).map(|_| Segment::new()).collect();
    segments.try_into().unwrap_or_else(|_| Box::new(std::array::from_fn(|_| Segment::new())))
}

/// The line with its entries one deeper, those of the upper half moved to a line that nobody knows yet.
fn divided<'l>(mut line: Locked<'l>, upper: &Line) -> Locked<'l> {
    let mut upper = upper.lock();
    for slot in 0..SLOTS {
        let entry = line.get(slot);
        if entry.is_free() {
            continue;
        }
        match entry.deeper() {
            (entry, true) => {
                upper.set(slot, entry);
                line.clear(slot);
            }
            (entry, false) => line.set(slot, entry),
        }
    }
    if line.has_spilled() {
        upper.spill();
    }
    line
}
