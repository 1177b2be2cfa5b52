//! Loom explores the table: lines that are read without their lock, taken over and moved, and segments that
//! split.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ratelimit-memory --lib --release loom_`

use loom::sync::Arc;
use loom::thread;
use ratelimit_core::Tick;

use super::line::{Line, Seen};
use super::*;
use crate::hash::CALLER_BITS;

/// Every interleaving of a few threads. One is not enough: a model in which loom sees nothing to try is none.
fn model(test: impl Fn() + Send + Sync + 'static) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let tried = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&tried);
    loom::model::Builder::new().check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        test();
    });
    assert!(tried.load(Ordering::Relaxed) > 1, "nothing to try");
}

/// Keys by the bits that matter to a table of one segment of four lines, which can split once: the half, and the
/// line.
fn address(upper: u64, line: u64, key: u64) -> Address {
    // The upper bits are made uneven: those at either end stay where they are.
    let top = if upper == 0 { 0 } else { (1 << CALLER_BITS) - 1 };
    Address::new((top << (64 - CALLER_BITS)) | (key << 27) | line)
}

fn packed(lines: &Lines, at_us: u64, span_us: u64) -> Packed {
    let at = Tick::saturating_from_us(at_us);
    lines.pack(Small { at, span_us, extra: 0 }).expect("fits")
}

fn lines() -> Arc<Lines> {
    Arc::new(Lines::new(8, Tick::ZERO))
}

/// Puts a state into the first free or expired place, as a store does.
fn insert(lines: &Lines, address: Address, state: Packed, now_us: u64) -> bool {
    let mut pair = lines.lock(address);
    let entry = Entry::new(pair.route.tag(), state);
    for line in &mut pair.lines {
        if let Some(slot) = line.expired_slot(now_us).or_else(|| line.free_slot()) {
            line.set(slot, entry);
            return true;
        }
    }
    false
}

fn fill(lines: &Lines, upper: u64, keys: std::ops::Range<u64>) {
    for key in keys {
        assert!(insert(lines, address(upper, 0, key), packed(lines, 1, 1_000), 0));
    }
}

fn get(lines: &Lines, address: Address) -> Option<Packed> {
    lines.lock(address).state()
}

/// What a reader without a lock finds and believes.
fn seen(lines: &Lines, address: Address) -> Option<Packed> {
    let route = lines.route(address);
    let (line, seen) = route.find(route.begun())?;
    line.is_still(&seen).then(|| seen.entry.state())
}

/// Two states whose words are all different.
fn old_and_new(lines: &Lines) -> [Packed; 2] {
    [packed(lines, 1, 100), packed(lines, 2, 200)]
}

/// Writes another state of a key that lies in its first line, where `seen` was seen before. Without another
/// look: loom compares an access only with the last one before it, and would not see past that look to
/// what a reader did.
fn rewrite(lines: &Lines, route: Route<'_>, seen: &Seen, state: Packed) {
    let mut line = route.lines()[0].try_lock_seen(seen).expect("nobody else writes");
    assert!(lines.is_still(route));
    line.set(seen.slot, Entry::new(route.tag(), state));
}

/// A thread that writes another state of a key.
fn writer(lines: &Arc<Lines>, key: Address, state: Packed) -> thread::JoinHandle<()> {
    let lines = Arc::clone(lines);
    let route = lines.route(key);
    let (_, seen) = route.find(route.begun()).expect("there");
    thread::spawn(move || rewrite(&lines, lines.route(key), &seen, state))
}

#[test]
fn loom_a_reader_sees_the_old_state_or_the_new_one_and_no_mixture() {
    for slot in 0..2 {
        model(move || {
            let lines = lines();
            let [old, new] = old_and_new(&lines);
            // The line's own bits lie in the first slot: a key in another one is another case.
            fill(&lines, 0, 10..10 + slot);
            let key = address(0, 0, 1);
            assert!(insert(&lines, key, old, 0));
            let writer = writer(&lines, key, new);
            let read = seen(&lines, key);
            assert!(read.is_none_or(|read| read == old || read == new), "{read:?}");
            writer.join().expect("no panic");
            assert_eq!(seen(&lines, key), Some(new));
        });
    }
}

/// A reader that believes what it read at once.
#[test]
#[should_panic(expected = "a mixture")]
fn loom_catches_a_reader_that_does_not_read_again() {
    model(|| {
        let lines = lines();
        let [old, new] = old_and_new(&lines);
        fill(&lines, 0, 10..11);
        let key = address(0, 0, 1);
        assert!(insert(&lines, key, old, 0));
        let writer = writer(&lines, key, new);
        let route = lines.route(key);
        if let Some((_, seen)) = route.find(route.begun()) {
            let read = seen.entry.state();
            assert!(read == old || read == new, "a mixture");
        }
        writer.join().expect("no panic");
    });
}

#[test]
fn loom_two_writers_of_one_line_lose_nothing() {
    model(|| {
        let lines = lines();
        let state = packed(&lines, 1, 100);
        let other = Arc::clone(&lines);
        let (here, there) = (address(0, 0, 1), address(0, 0, 2));
        let thread = thread::spawn(move || insert(&other, there, packed(&other, 1, 100), 0));
        assert!(insert(&lines, here, state, 0));
        assert!(thread.join().expect("no panic"));
        assert_eq!((get(&lines, here), get(&lines, there)), (Some(state), Some(state)));
        assert_eq!(lines.len(), 2);
    });
}

/// A line whose lock is read and then taken, in two steps.
#[test]
#[should_panic(expected = "lost")]
fn loom_catches_a_line_that_is_not_really_locked() {
    use crate::sync::{AtomicU64, Ordering};
    model(|| {
        let words: Arc<[AtomicU64; 3]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
        let insert = |words: &[AtomicU64; 3], value| {
            // Should be one access.
            let taken = words[0].load(Ordering::Acquire) == 1;
            words[0].store(1, Ordering::Release);
            if taken {
                return false;
            }
            let free = usize::from(words[1].load(Ordering::Relaxed) != 0);
            words[1 + free].store(value, Ordering::Relaxed);
            words[0].store(0, Ordering::Release);
            true
        };
        let other = Arc::clone(&words);
        let thread = thread::spawn(move || insert(&other, 7));
        let here = insert(&words, 8);
        let there = thread.join().expect("no panic");
        let kept = words[1..].iter().filter(|word| word.load(Ordering::Relaxed) != 0).count();
        assert_eq!(kept, usize::from(here) + usize::from(there), "lost");
    });
}

/// A writer that decides on what it saw, and does not look once it holds the line.
#[test]
#[should_panic(expected = "an update is lost")]
fn loom_catches_a_writer_that_does_not_look_again_with_the_line_held() {
    model(|| {
        let lines = lines();
        let key = address(0, 0, 1);
        assert!(insert(&lines, key, packed(&lines, 1, 100), 0));
        let add_one = move |lines: &Lines| {
            let route = lines.route(key);
            let Some((line, seen)) = route.find(route.begun()) else { return 0 };
            let Small { at, span_us, extra } = lines.unpack(seen.entry.state());
            let next = packed(lines, at.as_us(), span_us + 1 + extra);
            line.lock().set(seen.slot, Entry::new(route.tag(), next));
            1
        };
        let other = Arc::clone(&lines);
        let thread = thread::spawn(move || add_one(&other));
        let added = add_one(&lines) + thread.join().expect("no panic");
        let state = get(&lines, key).expect("there");
        assert_eq!(lines.unpack(state).span_us, 100 + added, "an update is lost");
    });
}

#[test]
fn loom_an_expired_place_is_taken_over_by_one() {
    model(|| {
        let lines = lines();
        // All eight places that these keys can have are taken, and one of them has expired.
        fill(&lines, 0, 10..17);
        assert!(insert(&lines, address(0, 0, 1), packed(&lines, 1, 2), 0));
        let other = Arc::clone(&lines);
        let (here, there) = (address(0, 0, 2), address(0, 0, 3));
        let thread = thread::spawn(move || insert(&other, there, packed(&other, 9, 9), 9));
        let here = insert(&lines, here, packed(&lines, 9, 9), 9).then_some(here);
        let there = thread.join().expect("no panic").then_some(there);
        assert!(here.is_some() ^ there.is_some());
        assert_eq!(lines.len(), 8);
        let winner = here.or(there).expect("one of them");
        assert_eq!(get(&lines, winner), Some(packed(&lines, 9, 9)));
    });
}

/// A key that is looked for while its segment splits, and afterwards.
fn is_found_beside_a_split(lines: &Arc<Lines>, key: Address) {
    let state = packed(lines, 1, 100);
    assert!(insert(lines, key, state, 0));
    let other = Arc::clone(lines);
    let thread = thread::spawn(move || other.directory.split(other.route(key)));
    // Without the lock it is found or not believed; with it, found.
    assert!(seen(lines, key).is_none_or(|read| read == state));
    assert_eq!(get(lines, key), Some(state));
    assert!(thread.join().expect("no panic"));
    assert_eq!((get(lines, key), lines.len()), (Some(state), 1));
}

/// A charge of a key as a store makes it, on what was seen without the lock; says whether it was made. `is_still` is
/// what it asks with the line held.
fn charge(
    lines: &Lines,
    key: Address,
    state: Packed,
    is_still: impl Fn(&Locked<'_>, &Seen) -> bool,
) -> bool {
    let route = lines.route(key);
    let Some((line, seen)) = route.find(route.begun()) else { return false };
    let Some(mut held) = line.try_lock_seen(&seen) else { return false };
    if !is_still(&held, &seen) {
        return false;
    }
    held.set(seen.slot, Entry::new(route.tag(), state));
    true
}

/// A charge of a key, decided on what was seen without the lock, while the key's segment splits: what it wrote
/// is there afterwards. The key lies in the second place of its line, so that the line's first word tells
/// nothing of it.
fn is_charged_beside_a_split(upper: u64, is_still: impl Fn(&Locked<'_>, &Seen) -> bool) {
    let lines = lines();
    let [old, new] = old_and_new(&lines);
    fill(&lines, 0, 10..11);
    let key = address(upper, 0, 1);
    assert!(insert(&lines, key, old, 0));
    let other = Arc::clone(&lines);
    let thread = thread::spawn(move || other.directory.split(other.route(key)));
    let charged = charge(&lines, key, new, is_still);
    assert!(thread.join().expect("no panic"));
    assert_eq!(get(&lines, key), Some(if charged { new } else { old }), "lost beside a split");
}

#[test]
fn loom_a_charge_is_not_lost_while_its_segment_splits() {
    for upper in [0, 1] {
        model(move || is_charged_beside_a_split(upper, |held, seen| held.is_still(seen)));
    }
}

/// A charge that does not look again with the line held, as if a lock that was free and a first word that
/// is the same said that nothing has moved.
#[test]
#[should_panic(expected = "lost beside a split")]
fn loom_catches_a_charge_that_takes_an_unchanged_first_word_for_an_unchanged_line() {
    model(|| is_charged_beside_a_split(1, |_, _| true));
}

/// A charge of a key, decided on what was seen without the lock, while somebody else makes way in its full lines
/// and moves the key's entry to its other line.
#[test]
fn loom_a_charge_is_not_lost_while_its_entry_goes_to_its_other_line() {
    model(|| {
        let lines = lines();
        let [old, new] = old_and_new(&lines);
        // Its other line is the fourth, that of all others the second.
        let key = address(0, 0, 1 << 12);
        assert_eq!((key.first(), key.second()), (0, 3));
        assert!(insert(&lines, key, old, 0));
        fill(&lines, 0, 10..17);
        let other = Arc::clone(&lines);
        let thread = thread::spawn(move || {
            let Pair { route, lines: mut held } = other.lock(address(0, 0, 1));
            assert!(other.directory.relocate(route, &mut held));
        });
        let charged = charge(&lines, key, new, |held, seen| held.is_still(seen));
        thread.join().expect("no panic");
        assert_eq!(get(&lines, key), Some(if charged { new } else { old }));
        assert_eq!(lines.len(), 8);
    });
}

#[test]
fn loom_a_key_is_found_while_its_segment_splits() {
    for upper in [0, 1] {
        model(move || is_found_beside_a_split(&lines(), address(upper, 0, 1)));
    }
}

#[test]
fn loom_an_insert_beside_a_split_lands_where_it_is_found() {
    model(|| {
        let lines = lines();
        let (here, there) = (address(0, 0, 1), address(0, 1, 2));
        let other = Arc::clone(&lines);
        let thread = thread::spawn(move || other.directory.split(other.route(there)));
        assert!(insert(&lines, here, packed(&lines, 1, 100), 0));
        assert!(thread.join().expect("no panic"));
        assert!(get(&lines, here).is_some());
        assert_eq!(lines.segments(), 2);
    });
}

/// An insert that does not ask, with the line locked, whether it still is its key's.
#[test]
#[should_panic(expected = "lost in a split")]
fn loom_catches_an_insert_that_does_not_ask_again_where_it_belongs() {
    model(|| {
        let lines = lines();
        let key = address(0, 0, 1);
        let other = Arc::clone(&lines);
        let thread = thread::spawn(move || other.directory.split(other.route(key)));
        let route = lines.route(key);
        let line: &Line = route.lines()[0];
        let mut locked = line.lock();
        locked.set(0, Entry::new(route.tag(), packed(&lines, 1, 100)));
        drop(locked);
        assert!(thread.join().expect("no panic"));
        assert!(get(&lines, key).is_some(), "lost in a split");
    });
}

/// A table whose directory doubles when this key's segment splits once more.
fn lines_about_to_double(key: Address) -> Arc<Lines> {
    let lines = Arc::new(Lines::new(32, Tick::ZERO));
    assert!(lines.directory.split(lines.route(key)));
    lines
}

#[test]
fn loom_a_key_is_found_while_the_directory_doubles() {
    model(|| {
        let key = address(1, 0, 1);
        let lines = lines_about_to_double(key);
        is_found_beside_a_split(&lines, key);
        assert_eq!(lines.segments(), 3);
    });
}

/// An insert that asks the table it knows whether the line still is its key's, and not whether that table
/// still counts.
#[test]
#[should_panic(expected = "lost in a table of old")]
fn loom_catches_an_insert_that_asks_a_table_that_does_not_count_any_more() {
    model(|| {
        let key = address(1, 0, 1);
        let lines = lines_about_to_double(key);
        let other = Arc::clone(&lines);
        let thread = thread::spawn(move || other.directory.split(other.route(key)));
        let route = lines.route(key);
        let mut locked = route.lines()[0].lock();
        let inserted = route.table_says();
        if inserted {
            locked.set(0, Entry::new(route.tag(), packed(&lines, 1, 100)));
        }
        drop(locked);
        assert!(thread.join().expect("no panic"));
        assert_eq!(get(&lines, key).is_some(), inserted, "lost in a table of old");
    });
}

#[test]
fn loom_two_that_find_a_segment_full_split_it_once() {
    model(|| {
        let lines = lines();
        fill(&lines, 0, 10..18);
        let key = address(0, 0, 1);
        let other = Arc::clone(&lines);
        let route = lines.route(key);
        let thread = thread::spawn(move || other.directory.split(other.route(key)));
        assert!(lines.directory.split(route));
        // Whoever comes second finds that it has been done, or that no more can be.
        thread.join().expect("no panic");
        assert_eq!(lines.segments(), 2);
        assert!((10..18).all(|n| get(&lines, address(0, 0, n)).is_some()));
    });
}
