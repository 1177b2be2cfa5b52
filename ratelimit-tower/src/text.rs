//! [`Text`]: ASCII text of bounded length, on the stack.

use std::fmt;

/// ASCII text of up to this many bytes, a power of two, so that no access is checked. It is aligned, because the standard library
/// validates aligned words faster than bytes.
#[repr(align(16))]
pub(crate) struct Text<const BYTES: usize> {
    bytes: [u8; BYTES],
    length: usize,
}

impl<const BYTES: usize> Text<BYTES> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; BYTES], length: 0 }
    }

    /// Appends this ASCII character. Text that is too long is no text: see [`as_str`](Self::as_str).
    pub(crate) const fn push(&mut self, byte: u8) {
        self.bytes[self.length % BYTES] = byte;
        self.length += 1;
    }

    /// The bytes; none if there were too many.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// The text; empty if it was too long.
    pub(crate) fn as_str(&self) -> &str {
        // All bytes are validated, which takes less than to validate a rest that fills no word.
        let text = str::from_utf8(&self.bytes).ok().and_then(|text| text.get(..self.length));
        text.unwrap_or_default()
    }
}

impl<const BYTES: usize> fmt::Write for Text<BYTES> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.push(byte));
        Ok(())
    }
}
