//! Encodes a window log's state: `window-log START`, then per entry `TIMESTAMP COST BYTES:` and
//! that many bytes of metadata, of any value.

use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::{LoggedRequest, WindowLogState};

use super::{Codec, number, number_before, take_sized};

const NAME: &[u8] = b"window-log ";

impl Codec for WindowLogState {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = NAME.to_vec();
        bytes.extend(self.start.as_us().to_string().bytes());
        for LoggedRequest { timestamp, cost, metadata } in &self.entries {
            let head = format!(" {} {cost} {}:", timestamp.as_us(), metadata.len());
            bytes.extend(head.bytes());
            bytes.extend_from_slice(metadata);
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.strip_prefix(NAME)?;
        let end = bytes.iter().position(|byte| *byte == b' ').unwrap_or(bytes.len());
        let (start, mut rest) = bytes.split_at(end);
        let start = Timestamp::from_us(number(start)?)?;
        let mut entries = Vec::new();
        while let Some(entry) = rest.strip_prefix(b" ") {
            let (timestamp, entry) = number_before(entry, b' ')?;
            let (cost, more) = number_before(entry, b' ')?;
            rest = more;
            let (metadata, timestamp) = (take_sized(&mut rest)?, Timestamp::from_us(timestamp)?);
            entries.push(LoggedRequest { timestamp, cost, metadata: metadata.into() });
        }
        rest.is_empty().then_some(Self { start, entries })
    }
}
