//! [`Blocks`]: a list that never moves what is in it, once it has more than a few.

use smallvec::SmallVec;

/// A list in blocks of `N`, a power of two. What is added makes at most one block, so that no call pays for
/// all that were added before.
pub(crate) struct Blocks<T, const N: usize> {
    /// All but the last are full. The first grows as a list does, so that a short one takes little, and is
    /// found without a look into other memory.
    blocks: SmallVec<[Vec<T>; 1]>,
    pub(crate) len: usize,
}

impl<T, const N: usize> Blocks<T, N> {
    pub(crate) fn new() -> Self {
        Self { blocks: SmallVec::new(), len: 0 }
    }

    #[inline]
    pub(crate) fn get(&self, place: usize) -> &T {
        &self.blocks[place / N][place % N]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, place: usize) -> &mut T {
        &mut self.blocks[place / N][place % N]
    }

    pub(crate) fn push(&mut self, item: T) {
        if self.len.is_multiple_of(N) {
            let room = if self.len == 0 { 0 } else { N };
            self.blocks.push(Vec::with_capacity(room));
        }
        if let Some(last) = self.blocks.last_mut() {
            last.push(item);
            self.len += 1;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_stays_where_it_is() {
        let mut blocks = Blocks::<usize, 4>::new();
        (0..4).for_each(|n| blocks.push(n));
        let first = std::ptr::from_ref(blocks.get(0));
        (4..100).for_each(|n| blocks.push(n));
        assert_eq!(std::ptr::from_ref(blocks.get(0)), first);
        *blocks.get_mut(50) += 1;
        let all: Vec<_> = (0..blocks.len).map(|place| *blocks.get(place)).collect();
        assert_eq!(all.iter().sum::<usize>(), 99 * 100 / 2 + 1);
        assert!(blocks.blocks.iter().all(|block| block.len() == 4 && block.capacity() == 4));
    }
}
