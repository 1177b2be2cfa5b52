//! [`KeyHasher`]: `SipHash-1-3` of a limit's name and a key, with a random key of its own.
//!
//! The standard library's `RandomState` is the same function, but it can be given the two only piece by
//! piece, which costs as much again (22 against 11 ns, names of 5 and keys of 20 bytes). Here each string
//! is a message of its own, ended by its length as the function says, and the state is carried from the
//! first to the second.

use std::fmt;

/// Hashes keys so that nobody can choose some that collide.
#[derive(Clone, Copy)]
pub(crate) struct KeyHasher {
    start: State,
}

/// Without what nobody else may know.
impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyHasher").finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
struct State {
    v0: u64,
    v1: u64,
    v2: u64,
    v3: u64,
}

impl KeyHasher {
    /// With keys that nobody else knows.
    #[cfg(not(loom))]
    pub(crate) fn random() -> Self {
        use std::hash::BuildHasher;
        let random = std::hash::RandomState::new();
        Self::new(random.hash_one(0), random.hash_one(1))
    }

    /// Loom runs the same execution again and again, and needs it to be the same: fixed keys.
    #[cfg(loom)]
    pub(crate) const fn random() -> Self {
        Self::new(0, 0)
    }

    const fn new(key_0: u64, key_1: u64) -> Self {
        let start = State {
            v0: key_0 ^ 0x736f_6d65_7073_6575,
            v1: key_1 ^ 0x646f_7261_6e64_6f6d,
            v2: key_0 ^ 0x6c79_6765_6e65_7261,
            v3: key_1 ^ 0x7465_6462_7974_6573,
        };
        Self { start }
    }

    /// The hash of a limit's name and a key.
    pub(crate) fn hash(&self, limit: &str, caller: &str) -> u64 {
        let mut state = self.start;
        state.message(limit.as_bytes());
        // So that where the one ends and the other begins is told as well.
        state.v2 ^= 0xee;
        state.message(caller.as_bytes());
        state.finish()
    }
}

impl State {
    #[inline]
    fn message(&mut self, bytes: &[u8]) {
        let (blocks, rest) = bytes.as_chunks();
        for block in blocks {
            self.block(u64::from_le_bytes(*block));
        }
        // The lowest byte of the length.
        self.block(up_to_seven(rest) | ((bytes.len() as u64) << 56));
    }

    #[inline]
    const fn block(&mut self, block: u64) {
        self.v3 ^= block;
        self.round();
        self.v0 ^= block;
    }

    #[inline]
    const fn round(&mut self) {
        let Self { mut v0, mut v1, mut v2, mut v3 } = *self;
        v0 = v0.wrapping_add(v1);
        v2 = v2.wrapping_add(v3);
        v1 = v1.rotate_left(13) ^ v0;
        v3 = v3.rotate_left(16) ^ v2;
        v0 = v0.rotate_left(32).wrapping_add(v3);
        v2 = v2.wrapping_add(v1);
        v3 = v3.rotate_left(21) ^ v0;
        v1 = v1.rotate_left(17) ^ v2;
        v2 = v2.rotate_left(32);
        *self = Self { v0, v1, v2, v3 };
    }

    #[inline]
    const fn finish(mut self) -> u64 {
        self.v2 ^= 0xff;
        self.round();
        self.round();
        self.round();
        self.v0 ^ self.v1 ^ self.v2 ^ self.v3
    }
}

/// Up to seven bytes as a number, the first one lowest: in two reads, or three, instead of a copy of a length that
/// nobody knows beforehand.
#[inline]
fn up_to_seven(bytes: &[u8]) -> u64 {
    match (bytes.first_chunk::<4>(), bytes.last_chunk::<4>(), bytes) {
        (Some(first), Some(last), _) => {
            let low = u64::from(u32::from_le_bytes(*first));
            low | (u64::from(u32::from_le_bytes(*last)) << (8 * (bytes.len() - 4)))
        }
        (_, _, [first, .., last]) => {
            let middle = bytes.len() / 2;
            u64::from(*first)
                | (u64::from(bytes[middle]) << (8 * middle))
                | (u64::from(*last) << (8 * (bytes.len() - 1)))
        }
        (_, _, [only]) => u64::from(*only),
        _ => 0,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::hash::{DefaultHasher, Hasher};

    #[test]
    fn one_message_is_hashed_as_the_standard_library_does() {
        let bytes: Vec<u8> = (0..=255).cycle().take(600).collect();
        for length in (0..70).chain([255, 256, 257, 600]) {
            let mut due = DefaultHasher::new();
            due.write(&bytes[..length]);
            let mut state = KeyHasher::new(0, 0).start;
            state.message(&bytes[..length]);
            assert_eq!(state.finish(), due.finish(), "{length} bytes");
        }
    }

    #[test]
    fn where_the_name_ends_counts_and_so_does_the_key() {
        let hasher = KeyHasher::random();
        let all = [
            ("a", "bc"),
            ("ab", "c"),
            ("", "abc"),
            ("abc", ""),
            ("abcdefg7", "x"),
            ("abcdefg", "7x"),
        ];
        let mut told: Vec<_> = all.iter().map(|(limit, key)| hasher.hash(limit, key)).collect();
        told.push(KeyHasher::random().hash("a", "bc"));
        told.sort_unstable();
        told.dedup();
        assert_eq!(told.len(), all.len() + 1);
    }
}
