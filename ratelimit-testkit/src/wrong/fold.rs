//! Ways in which databases, drivers and applications map different keys to one.

use std::net::IpAddr;

use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

/// A mapping of keys under which different keys become equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fold {
    /// Only the hash tag counts: `{a}b` is `{a}c`.
    HashTag,
    /// A collation ignores case: `Alice` is `alice`.
    Case,
    /// A collation ignores the case of ASCII letters only.
    AsciiCase,
    /// A collation ignores accents: `é` is `e`.
    Accents,
    /// The store replaces its own separator: `a:b` is `a_b`.
    Colons,
    /// Everything but letters and digits is replaced: `a-b` is `a.b`.
    Punctuation,
    /// Everything but letters and digits is removed: `a-b` is `ab`.
    LettersAndDigits,
    /// Keys are normalized to the canonical composition (NFC): `e` with a combining accent is `é`.
    Nfc,
    /// Keys are normalized to the canonical decomposition (NFD).
    Nfd,
    /// Keys are normalized to the compatibility composition (NFKC): `ﬁ` is `fi`, and a full-width `１` is `1`.
    Nfkc,
    /// Keys are normalized to the compatibility decomposition (NFKD).
    Nfkd,
    /// Full-width digits are digits.
    FullWidthDigits,
    /// An address loses its trailing zeros: `1.2.3.40` is `1.2.3.4`.
    TrailingZeros,
    /// The parts of an address are read as numbers: `1.2.3.04` is `1.2.3.4`.
    LeadingZeros,
    /// An address is stored in its canonical form: `0::1` is `::1`.
    Addresses,
    /// An IPv4-mapped IPv6 address is its IPv4 address: `::ffff:1.2.3.4` is `1.2.3.4`.
    MappedAddresses,
    /// A numeric key is stored as a number: `01` is `1`.
    Numbers,
    /// White space at both ends is removed.
    Trimmed,
    /// White space at the end is removed, as in a fixed-width column.
    PaddedWithSpaces,
    /// Several spaces become one.
    Spaces,
    /// The key ends at the first NUL.
    NulTerminated,
    /// The key ends at the first line break.
    FirstLine,
    /// The key is truncated to this many bytes.
    CutAt(usize),
    /// Only this many bytes at the end of the key count.
    EndOf(usize),
    /// This many bytes at either end count, and the length.
    EndsAndLength(usize),
    /// Zero-width characters are removed.
    ZeroWidth,
    /// Control characters are removed.
    Controls,
    /// Characters outside ASCII become `?`.
    QuestionMarks,
    /// The key ends at its first four-byte character.
    UpToFourBytes,
    /// Characters keep their lowest byte.
    LowBytes,
    /// Percent-encoded bytes are decoded.
    PercentDecoded,
    /// A plus is a space, as in a form.
    PlusIsSpace,
    /// Backslash escapes are resolved.
    Unescaped,
    /// Quotes around the key are removed.
    Unquoted,
    /// A path is normalized: `a//b` and `a/./b` are `a/b`.
    Paths,
    /// Keys are stored under a 32-bit hash: FNV-1a.
    Fnv32,
    /// Keys are stored under a 32-bit hash: CRC-32.
    Crc32,
    /// Keys are stored under a 32-bit hash: that of Java's strings.
    Times31,
    /// Only the sum of the bytes counts: `ab` is `ba`.
    SumOfBytes,
}

impl Fold {
    /// All folds; those with a length at several lengths.
    pub const ALL: [Self; 49] = [
        Self::HashTag,
        Self::Case,
        Self::AsciiCase,
        Self::Accents,
        Self::Colons,
        Self::Punctuation,
        Self::LettersAndDigits,
        Self::Nfc,
        Self::Nfd,
        Self::Nfkc,
        Self::Nfkd,
        Self::FullWidthDigits,
        Self::TrailingZeros,
        Self::LeadingZeros,
        Self::Addresses,
        Self::MappedAddresses,
        Self::Numbers,
        Self::Trimmed,
        Self::PaddedWithSpaces,
        Self::Spaces,
        Self::NulTerminated,
        Self::FirstLine,
        Self::CutAt(16),
        Self::CutAt(64),
        Self::CutAt(128),
        Self::CutAt(255),
        Self::CutAt(256),
        Self::CutAt(1_024),
        Self::CutAt(65_535),
        Self::EndOf(64),
        Self::EndOf(255),
        Self::EndsAndLength(64),
        Self::ZeroWidth,
        Self::Controls,
        Self::QuestionMarks,
        Self::UpToFourBytes,
        Self::LowBytes,
        Self::PercentDecoded,
        Self::PlusIsSpace,
        Self::Unescaped,
        Self::Unquoted,
        Self::Paths,
        Self::Fnv32,
        Self::Crc32,
        Self::Times31,
        Self::SumOfBytes,
        Self::CutAt(100),
        Self::CutAt(4_096),
        Self::EndsAndLength(16),
    ];

    /// The key after folding.
    #[must_use]
    pub fn folded(self, key: &str) -> String {
        match self {
            Self::HashTag => {
                let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
                tag.map_or(key, |(tag, _)| tag).to_owned()
            }
            Self::Case => key.to_lowercase(),
            Self::AsciiCase => key.to_ascii_lowercase(),
            Self::Accents => key.nfd().filter(|c| !is_combining_mark(*c)).collect(),
            Self::Colons => key.replace(':', "_"),
            Self::Punctuation => mapped(key, |c| Some(if c.is_alphanumeric() { c } else { '_' })),
            Self::LettersAndDigits => mapped(key, |c| c.is_alphanumeric().then_some(c)),
            Self::Nfc => key.nfc().collect(),
            Self::Nfd => key.nfd().collect(),
            Self::Nfkc => key.nfkc().collect(),
            Self::Nfkd => key.nfkd().collect(),
            Self::FullWidthDigits => {
                let digit = |c: char| u32::from(c).checked_sub(0xff10).filter(|n| *n < 10);
                let narrow = |c| digit(c).and_then(|n| char::from_digit(n, 10)).unwrap_or(c);
                mapped(key, |c| Some(narrow(c)))
            }
            Self::TrailingZeros => match key.parse::<IpAddr>() {
                Ok(_) => key.trim_end_matches('0').to_owned(),
                Err(_) => key.to_owned(),
            },
            Self::LeadingZeros => {
                let part =
                    |part: &str| part.parse().map_or(part.to_owned(), |n: u64| n.to_string());
                key.split('.').map(part).collect::<Vec<_>>().join(".")
            }
            Self::Addresses => address(key, Some),
            Self::MappedAddresses => address(key, |address| match address {
                IpAddr::V6(wide) => wide.to_ipv4_mapped().map(IpAddr::V4),
                IpAddr::V4(_) => None,
            }),
            Self::Numbers => key.parse().map_or(key.to_owned(), |n: f64| n.to_string()),
            Self::Trimmed => key.trim().to_owned(),
            Self::PaddedWithSpaces => key.trim_end_matches(' ').to_owned(),
            Self::Spaces => {
                key.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
            }
            Self::NulTerminated => up_to(key, |c| c == '\0'),
            Self::FirstLine => up_to(key, |c| c == '\n'),
            Self::CutAt(bytes) => text(&key.as_bytes()[..bytes.min(key.len())]),
            Self::EndOf(bytes) => text(&key.as_bytes()[key.len().saturating_sub(bytes)..]),
            Self::EndsAndLength(bytes) if key.len() > 2 * bytes => {
                let (begin, end) = (&key.as_bytes()[..bytes], &key.as_bytes()[key.len() - bytes..]);
                format!("{} {} {}", key.len(), text(begin), text(end))
            }
            Self::EndsAndLength(_) => key.to_owned(),
            Self::ZeroWidth => {
                let without =
                    |c| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}' | '\u{ad}');
                mapped(key, |c| (!without(c)).then_some(c))
            }
            Self::Controls => mapped(key, |c| (!c.is_control()).then_some(c)),
            Self::QuestionMarks => mapped(key, |c| Some(if c.is_ascii() { c } else { '?' })),
            Self::UpToFourBytes => up_to(key, |c| c.len_utf8() == 4),
            Self::LowBytes => mapped(key, |c| Some(char::from(u32::from(c).to_le_bytes()[0]))),
            Self::PercentDecoded => percent_decoded(key),
            Self::PlusIsSpace => key.replace('+', " "),
            Self::Unescaped => unescaped(key),
            Self::Unquoted => key.trim_matches(['"', '\'', '`']).to_owned(),
            Self::Paths => {
                let parts = key.split('/').filter(|part| !matches!(*part, "" | "."));
                parts.collect::<Vec<_>>().join("/")
            }
            Self::Fnv32 => {
                hashed(key, 0x811c_9dc5, |hash, byte| (hash ^ byte).wrapping_mul(0x0100_0193))
            }
            Self::Crc32 => (!hashed_bits(key)).to_string(),
            Self::Times31 => hashed(key, 0, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte)),
            Self::SumOfBytes => hashed(key, 0, u32::wrapping_add),
        }
    }
}

fn mapped(key: &str, map: impl Fn(char) -> Option<char>) -> String {
    key.chars().filter_map(map).collect()
}

fn up_to(key: &str, end: impl Fn(char) -> bool) -> String {
    key.split(end).next().unwrap_or_default().to_owned()
}

/// The key, or the address that it is read as.
fn address(key: &str, map: impl Fn(IpAddr) -> Option<IpAddr>) -> String {
    let taken_for = key.parse().ok().and_then(map);
    taken_for.map_or(key.to_owned(), |address| address.to_string())
}

/// Bytes as text, even if they begin or end within a character.
fn text(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}

fn hashed(key: &str, begin: u32, next: impl Fn(u32, u32) -> u32) -> String {
    key.bytes().fold(begin, |hash, byte| next(hash, byte.into())).to_string()
}

/// The CRC-32 register after these bytes, computed bit by bit.
fn hashed_bits(key: &str) -> u32 {
    key.bytes().fold(u32::MAX, |mut register, byte| {
        register ^= u32::from(byte);
        for _ in 0..8 {
            let out = register & 1;
            register >>= 1;
            if out == 1 {
                register ^= 0xedb8_8320;
            }
        }
        register
    })
}

fn percent_decoded(key: &str) -> String {
    let (bytes, mut decoded, mut at) = (key.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let hex = key.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        let byte = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        decoded.push(byte.unwrap_or(bytes[at]));
        at += if byte.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

fn unescaped(key: &str) -> String {
    let (mut plain, mut chars) = (String::new(), key.chars());
    while let Some(c) = chars.next() {
        plain.push(match c {
            '\\' => match chars.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some('r') => '\r',
                Some('0') => '\0',
                Some(other) => other,
                None => break,
            },
            other => other,
        });
    }
    plain
}
