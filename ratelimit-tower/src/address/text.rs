//! Addresses as text. The formatter of the standard library writes the same and takes longer than a
//! decision.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use arrayvec::ArrayString;

use crate::identify::Identifier;

/// `192.0.2.7`. The text is put together in a register and stored at once: reading single bytes
/// that were just written as whole words stalls a processor for longer than all else takes.
pub(super) fn of_ipv4(address: Ipv4Addr) -> Identifier {
    let (mut text, mut bytes) = (0_u128, 0);
    for octet in address.octets() {
        let octet = OCTETS[usize::from(octet)];
        text |= u128::from(octet) << (8 * bytes);
        bytes += 4 - octet.leading_zeros() / 8;
    }
    // Only ASCII, and at most 16 bytes. The last dot is no part of it.
    let text = text.to_le_bytes();
    let length = usize::try_from(bytes).unwrap_or_default().saturating_sub(1);
    str::from_utf8(&text).ok().and_then(|text| text.get(..length)).unwrap_or_default().into()
}

/// Each octet and a dot, in up to four bytes; the first character is the lowest byte.
static OCTETS: [u32; 256] = {
    let mut octets = [0; 256];
    let mut octet = 0;
    while octet < 256 {
        let (mut text, mut rest) = (((b'.' as u32) << 8) | (b'0' as u32 + octet % 10), octet / 10);
        while rest > 0 {
            text = (text << 8) | (b'0' as u32 + rest % 10);
            rest /= 10;
        }
        octets[octet as usize] = text;
        octet += 1;
    }
    octets
};

/// `2001:db8::/64` by RFC 5952, or `2001:db8::1` at a length of 128. The address is a network's,
/// and not mapped from IPv4.
pub(super) fn of_ipv6(network: Ipv6Addr, prefix_length: u8) -> Identifier {
    // At most 39 bytes, and 4 of the length.
    let mut text = ArrayString::<64>::new();
    let segments = network.segments();
    let zeros = longest_zeros(&segments);
    for (position, segment) in segments.into_iter().enumerate() {
        if zeros.contains(&position) {
            if position == zeros.start {
                text.push_str("::");
            }
            continue;
        }
        if position > 0 && position != zeros.end {
            text.push(':');
        }
        push_hexadecimal(&mut text, segment);
    }
    if prefix_length < 128 {
        text.push('/');
        text.push_str(itoa::Buffer::new().format(prefix_length));
    }
    text.as_str().into()
}

/// The zeros that `::` stands for: the first of the longest runs, of two segments or more.
fn longest_zeros(segments: &[u16; 8]) -> Range<usize> {
    let (mut longest, mut run) = (0..0, 0..0);
    for (position, segment) in segments.iter().enumerate() {
        run = if *segment == 0 { run.start..position + 1 } else { position + 1..position + 1 };
        if run.len() > longest.len() {
            longest = run.clone();
        }
    }
    if longest.len() < 2 { 0..0 } else { longest }
}

/// Without leading zeros.
fn push_hexadecimal(text: &mut ArrayString<64>, number: u16) {
    let digits = number.to_be_bytes().map(|byte| [byte >> 4, byte & 15]);
    let digits = digits.as_flattened();
    let first = digits.iter().take(3).take_while(|digit| **digit == 0).count();
    for digit in &digits[first..] {
        text.push(char::from(if *digit < 10 { b'0' + digit } else { b'a' - 10 + digit }));
    }
}

#[cfg(test)]
mod tests {
    use ipnet::Ipv6Net;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn addresses_are_written_as_the_standard_library_does(
            ipv4: [u8; 4],
            // Zeros, so that there are runs of them, and all lengths of digits.
            ipv6 in prop::array::uniform8(prop_oneof![Just(0), 0..=0x2f_u16, any::<u16>()]),
            prefix_length in 1..=128_u8,
        ) {
            let ipv4 = Ipv4Addr::from(ipv4);
            prop_assert_eq!(of_ipv4(ipv4), ipv4.to_string().into());
            let ipv6 = Ipv6Addr::from(ipv6);
            prop_assume!(ipv6.to_ipv4_mapped().is_none());
            prop_assert_eq!(of_ipv6(ipv6, 128), ipv6.to_string().into());
            let network = Ipv6Net::new(ipv6, prefix_length).unwrap().trunc();
            let expected = network.to_string();
            let expected = expected.strip_suffix("/128").unwrap_or(&expected);
            prop_assert_eq!(of_ipv6(network.addr(), prefix_length), expected.into());
        }
    }
}
