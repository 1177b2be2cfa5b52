//! Encodes a window log's state: `window-log START`, then per entry `TIMESTAMP COST BYTES:` and that
//! many bytes of metadata, of any value.

use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::{WindowEntry, WindowLogState};

pub(super) const NAME: &[u8] = b"window-log ";

pub(super) fn encode(state: &WindowLogState) -> Vec<u8> {
    let mut bytes = NAME.to_vec();
    bytes.extend(state.start.as_us().to_string().bytes());
    for WindowEntry { timestamp, cost, metadata } in &state.entries {
        let head = format!(" {} {cost} {}:", timestamp.as_us(), metadata.len());
        bytes.extend(head.bytes());
        bytes.extend_from_slice(metadata);
    }
    bytes
}

/// Decodes the bytes after the name.
pub(super) fn decode(bytes: &[u8]) -> Option<WindowLogState> {
    let (start, mut rest) = match bytes.iter().position(|byte| *byte == b' ') {
        Some(end) => (&bytes[..end], &bytes[end..]),
        None => (bytes, &[][..]),
    };
    let start = Timestamp::from_us(super::number(start)?)?;
    let mut entries = Vec::new();
    while let Some(entry) = rest.strip_prefix(b" ") {
        let (timestamp, entry) = super::number_before(entry, b' ')?;
        let (cost, entry) = super::number_before(entry, b' ')?;
        let (length, entry) = super::number_before(entry, b':')?;
        let (metadata, more) = entry.split_at_checked(usize::try_from(length).ok()?)?;
        entries.push(WindowEntry {
            timestamp: Timestamp::from_us(timestamp)?,
            cost,
            metadata: metadata.into(),
        });
        rest = more;
    }
    rest.is_empty().then_some(WindowLogState { start, entries })
}
