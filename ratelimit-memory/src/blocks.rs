//! [`Blocks`]: a list that never moves its items once it has more than one block.

use smallvec::SmallVec;

/// A list in blocks of `N` items, a power of two. Adding an item allocates at most one block, so
/// that no call pays for the items before it.
pub(crate) struct Blocks<T, const N: usize> {
    /// All blocks but the last are full. The first grows as a `Vec` does, so that a short list
    /// takes little memory, and it is stored inline, which saves a cache miss.
    blocks: SmallVec<[Vec<T>; 1]>,
    pub(crate) len: usize,
}

impl<T, const N: usize> Blocks<T, N> {
    pub(crate) fn new() -> Self {
        Self { blocks: SmallVec::new(), len: 0 }
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> &T {
        &self.blocks[index / N][index % N]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> &mut T {
        &mut self.blocks[index / N][index % N]
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
