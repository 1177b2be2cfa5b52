//! Computes the cluster slot of a key, as the Redis Cluster specification defines it.

use crc::{CRC_16_XMODEM, Crc};

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;

static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The slot of a key: that of its hash tag, if it has one.
pub(crate) fn of(key: &str) -> u16 {
    CRC.checksum(tag(key).as_bytes()) % SLOTS
}

/// The text between the first `{` and the next `}`, unless it is empty; otherwise the whole key.
fn tag(key: &str) -> &str {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    tag.map(|(tag, _)| tag).filter(|tag| !tag.is_empty()).unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tag_determines_the_slot() {
        // As CLUSTER KEYSLOT answers.
        for (key, slot) in [
            ("foo", 12_182),
            ("123456789", 12_739),
            ("", 0),
            ("{foo}", 12_182),
            ("rl:1::{foo}", 12_182),
            ("rl:{foo}:evil{zzz}", 12_182),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
            ("foo{bar", 15_278),
        ] {
            assert_eq!(of(key), slot, "{key}");
        }
    }
}
