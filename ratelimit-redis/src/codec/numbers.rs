//! States as numbers. Every mode stores them in this order: the compare-and-set mode as text,
//! scripts packed.

use std::fmt::Write as _;

use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::{BucketCount, LoggedCost};

/// What is stored as one number after the other.
pub(crate) trait Numbers: Sized {
    /// Their names, if each has one.
    const NAMES: &'static [&'static str] = &[];

    /// Adds each number to a text, with a space before it.
    fn put(&self, text: &mut String);

    /// Takes it from the first of these numbers.
    fn take(numbers: &mut &[u64]) -> Option<Self>;

    /// It, if these are its numbers and no others.
    fn of(mut numbers: &[u64]) -> Option<Self> {
        Self::take(&mut numbers).filter(|_| numbers.is_empty())
    }
}

impl Numbers for u64 {
    fn put(&self, text: &mut String) {
        let _ = write!(text, " {self}");
    }

    fn take(numbers: &mut &[u64]) -> Option<Self> {
        numbers.split_off_first().copied()
    }
}

impl Numbers for Timestamp {
    fn put(&self, text: &mut String) {
        self.as_us().put(text);
    }

    fn take(numbers: &mut &[u64]) -> Option<Self> {
        u64::take(numbers).and_then(Self::from_us)
    }
}

/// All that follow, at least one.
impl<T: Numbers> Numbers for Vec<T> {
    fn put(&self, text: &mut String) {
        for each in self {
            each.put(text);
        }
    }

    fn take(numbers: &mut &[u64]) -> Option<Self> {
        let mut all = vec![T::take(numbers)?];
        while !numbers.is_empty() {
            all.push(T::take(numbers)?);
        }
        Some(all)
    }
}

/// Stores these fields, in this order.
macro_rules! in_fields {
    ($state:ident { $($field:ident),+ }) => {
        impl $crate::codec::Numbers for $state {
            const NAMES: &'static [&'static str] = &[$(stringify!($field)),+];

            fn put(&self, text: &mut String) {
                $( self.$field.put(text); )+
            }

            fn take(numbers: &mut &[u64]) -> Option<Self> {
                Some(Self { $( $field: $crate::codec::Numbers::take(numbers)? ),+ })
            }
        }
    };
}
pub(crate) use in_fields;

in_fields!(BucketCount { start, count });
in_fields!(LoggedCost { timestamp, cost });

/// The text of a state: a name and the numbers.
pub(crate) fn encode_numbers(name: &str, state: &impl Numbers) -> Vec<u8> {
    let mut text = name.to_owned();
    state.put(&mut text);
    text.into_bytes()
}

/// The state of such a text; `None` if it is none of this name.
pub(crate) fn decode_numbers<S: Numbers>(name: &str, bytes: &[u8]) -> Option<S> {
    S::of(&parsed(bytes.strip_prefix(name.as_bytes())?.strip_prefix(b" ")?)?)
}

/// The numbers in a text, one space between two of them.
pub(crate) fn parsed(text: &[u8]) -> Option<Vec<u64>> {
    std::str::from_utf8(text).ok()?.split(' ').map(|word| word.parse().ok()).collect()
}
