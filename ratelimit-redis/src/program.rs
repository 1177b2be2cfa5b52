//! [`LuaProgram`]: what an algorithm needs to run on the server.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};

use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::{Calendar, CalendarWindow};
use smallvec::SmallVec;

use crate::codec::{RecordText, parsed};

mod built_in;
mod stack;

pub(crate) use built_in::{BUILT_IN, newest_of, newest_us};

/// An algorithm with a twin in Lua.
///
/// An algorithm of your own that has none runs in the mode that compares and sets: see
/// [`Builder::cas`](crate::Builder::cas). `algorithm_conformance!` of `ratelimit-testkit` tests
/// that a twin decides as the step does; `examples/own_twin.rs` shows how.
///
/// ```compile_fail,E0277
/// # use ratelimit_core::{Algorithm, Timestamp};
/// # use ratelimit_core::algorithm::Step;
/// # struct Mine;
/// # impl Algorithm for Mine {
/// #     type State = ();
/// #     fn capacity(&self) -> u64 { 1 }
/// #     fn step(&self, _: Option<&()>, _: Timestamp, _: u64) -> Step<()> { panic!("never called") }
/// # }
/// fn needs_a_twin<A: ratelimit_redis::LuaProgram>() {}
/// needs_a_twin::<Mine>(); // "`Mine` has no twin in Lua … build the store with `.cas()`"
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no twin in Lua, which the store's default mode runs",
    label = "no twin in Lua",
    note = "build the store with `.cas()`: that mode runs any algorithm whose state implements `Codec`",
    note = "or write the algorithm's twin in Lua and implement `LuaProgram`"
)]
pub trait LuaProgram: RecordText {
    /// The twins that decide together, each with its own state: one, except for a
    /// [`Stack`](ratelimit_core::Stack).
    fn twins(&self) -> impl IntoIterator<Item = Twin>;

    /// The stored state, or `None` if these twins do not write such a state. `stored` follows the
    /// order of the twins, and at least one of them has stored a value.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<Self::State>;
}

/// An algorithm's twin in Lua with the parameters of a limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Twin {
    pub(crate) program: &'static Program,
    /// In the order in which the program names them.
    pub(crate) parameters: SmallVec<[u64; MAX_PARAMETERS]>,
    pub(crate) capacity: u64,
    /// How many internal units the algorithm counts per unit of cost.
    pub(crate) unit: u64,
    /// Whether the limit charges attempts.
    pub(crate) attempts: bool,
    /// The place in a stack, such as `/0`; empty outside of one.
    pub(crate) place: String,
    /// The calendar whose windows the script reads behind the parameters.
    pub(crate) calendar: Option<&'static Calendar>,
}

impl Twin {
    /// This program for a limit of this [capacity](ratelimit_core::Algorithm::capacity), with these
    /// parameters in the order in which the program names them, each below 2^53.
    #[must_use]
    pub fn new<const N: usize>(
        program: &'static Program,
        capacity: u64,
        parameters: [u64; N],
    ) -> Self {
        let parameters = SmallVec::from_slice(&parameters);
        let (attempts, place, calendar) = (false, String::new(), None);
        Self { program, parameters, capacity, unit: 1, attempts, place, calendar }
    }

    /// Tells the script the windows of this calendar.
    pub(crate) fn by_calendar(self, calendar: &'static Calendar) -> Self {
        Self { calendar: Some(calendar), ..self }
    }

    /// Adds what a script reads of a calendar at this time: how long no window is longer than,
    /// and the begins of six windows, of which the third contains the time.
    pub(crate) fn told_at(&mut self, now: impl FnOnce() -> Timestamp) {
        let Some(calendar) = self.calendar else { return };
        let CalendarWindow { number, start, end_us } = calendar.window(now());
        let begin_us = |later: i64| calendar.start_us(number + later);
        let begins = [begin_us(-2), begin_us(-1), start.as_us(), end_us, begin_us(2), begin_us(3)];
        self.parameters.push(calendar.longest_us());
        self.parameters.extend(begins);
    }

    /// Sets how many internal units the algorithm counts per unit of cost. The capacity in units
    /// must be below 2^52.
    #[must_use]
    pub fn in_units(self, unit: u64) -> Self {
        Self { unit, ..self }
    }
}

/// One twin of a check.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TwinCheck<'a> {
    /// The check's position in the batch.
    pub(crate) position: usize,
    pub(crate) twin: Twin,
    /// The name of its field.
    pub(crate) field: Cow<'a, str>,
    /// The position of its key, from 1.
    pub(crate) key: usize,
    /// The position of its reservation's key; 0 for none.
    pub(crate) reservation: usize,
    pub(crate) life_us: u64,
    /// Whether its caller is exempt, so that it is charged nothing.
    pub(crate) exempt: bool,
}

impl TwinCheck<'_> {
    /// The same for longer than the batch is there.
    pub(crate) fn to_owned(&self) -> TwinCheck<'static> {
        TwinCheck { field: self.field.clone().into_owned().into(), ..self.clone() }
    }
}

/// An algorithm in Lua.
#[derive(Debug)]
pub struct Program {
    /// The name in scripts and in stored states: ASCII letters, digits, `-` and `_`. A store
    /// refuses a program whose name belongs to a different program that it knows, such as the
    /// built-in `gcra`.
    pub(crate) name: &'static str,
    /// The source, in sections.
    pub(crate) source: &'static str,
    pub(crate) keeps: Keeps,
    /// The names of the numbers of a state of a few numbers, as they are stored; empty for any
    /// other.
    pub(crate) state: &'static [&'static str],
    /// The names of a limit's numbers, in the order in which its [`Twin`] has them.
    pub(crate) parameters: &'static [&'static str],
}

/// The same program may stand at different addresses.
impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        let numbers = |program: &Self| (program.state, program.parameters);
        let of = |program: &Self| (program.name, program.source, program.keeps, numbers(program));
        std::ptr::eq(self, other) || of(self) == of(other)
    }
}

impl Eq for Program {}

/// A store knows no two programs of one name.
impl Hash for Program {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl Program {
    /// A program whose state is a few numbers. Its name consists of ASCII letters, digits, `-` and
    /// `_`. `state` names the numbers in the order in which they are stored; `sections` uses these
    /// names. `parameters` names the limit's numbers besides its capacity, in the order in which
    /// its [`Twin`] has them.
    ///
    /// Every number of a state is below 2^53. `src/lua/README.md` specifies what a section receives
    /// and what it leaves; `gcra.lua` beside it is an example, and `examples/own_twin.rs` a small
    /// one.
    ///
    /// # Panics
    /// `state` names no number.
    #[must_use]
    pub const fn of_numbers(
        name: &'static str,
        state: &'static [&'static str],
        parameters: &'static [&'static str],
        sections: &'static str,
    ) -> Self {
        assert!(!state.is_empty(), "a program without a number");
        Self { name, source: sections, keeps: Keeps::Numbers, state, parameters }
    }

    /// A program whose state has variable length. Its name consists of ASCII letters, digits, `-`
    /// and `_`. `parameters` names all of the limit's numbers, in the order in which its [`Twin`]
    /// has them. `src/lua/README.md` specifies what the `sections` receive and leave.
    #[must_use]
    pub const fn of_entries(
        name: &'static str,
        parameters: &'static [&'static str],
        sections: &'static str,
        keeps: Keeps,
    ) -> Self {
        Self { name, source: sections, keeps, state: &[], parameters }
    }

    /// Whether it is one of this crate's own, whose code cannot fail.
    pub(crate) fn is_built_in(&self) -> bool {
        BUILT_IN.iter().any(|built_in| std::ptr::eq(*built_in, self))
    }

    /// Whether the name can stand in a Lua string, pattern and format, and before a space.
    pub(crate) fn has_plain_name(&self) -> bool {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        !self.name.is_empty() && self.name.bytes().all(is_plain)
    }

    /// Whether its state is a few numbers.
    pub(crate) fn is_of_numbers(&self) -> bool {
        !self.state.is_empty()
    }

    /// The source between `--- name` and the next section. Empty if there is no such section.
    pub(crate) fn section(&self, name: &str) -> String {
        let mut lines =
            self.source.lines().skip_while(|line| line.strip_prefix("--- ") != Some(name));
        lines.next();
        lines.take_while(|line| !line.starts_with("--- ")).flat_map(|line| [line, "\n"]).collect()
    }
}

/// How the server stores a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keeps {
    /// A few numbers in a field of the hash that all limits of an identifier share.
    Numbers,
    /// A sorted set under a key of its own.
    SortedSet,
    /// A list under a key of its own.
    List,
}

/// The bytes of a packed number, the lowest first. The highest is below 32, so none looks like
/// text.
pub(crate) const PACKED_BYTES: usize = 7;

/// A number below 2^53, packed.
pub(crate) fn packed(number: u64) -> [u8; PACKED_BYTES] {
    let [bytes @ .., _] = number.to_le_bytes();
    bytes
}

/// A packed number, which is below 2^53.
fn unpacked(bytes: [u8; PACKED_BYTES]) -> Option<u64> {
    let mut all = [0; 8];
    all[..PACKED_BYTES].copy_from_slice(&bytes);
    Some(u64::from_le_bytes(all)).filter(|number| *number < 1 << 53)
}

/// The most parameters of any algorithm: a bucket and four windows, or those of a calendar.
const MAX_PARAMETERS: usize = 9;

/// A value found on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The program that wrote it, and its [numbers](Self::numbers).
    #[doc(hidden)]
    Numbers(&'static Program, FewNumbers),
    /// A sorted set's members and scores, in order.
    SortedSet(Vec<(String, u64)>),
    /// A list's elements, in order.
    List(Vec<Vec<u8>>),
}

/// Numbers, without an allocation for those of a state of a few numbers.
type FewNumbers = SmallVec<[u64; 6]>;

impl Stored {
    /// What this program stored in a field; `None` if another wrote it.
    pub(crate) fn of(program: &'static Program, field: &[u8]) -> Option<Self> {
        let (name, numbers) = Self::parse(field)?;
        (name == program.name).then_some(Self::Numbers(program, numbers))
    }

    /// Parses a field, or a state as a script answers it: a name and numbers, as text or packed. In
    /// a field, the time until which the key is kept follows.
    pub(crate) fn parse(field: &[u8]) -> Option<(&str, FewNumbers)> {
        let space = field.iter().position(|byte| *byte == b' ')?;
        let (name, rest) = (std::str::from_utf8(&field[..space]).ok()?, &field[space + 1..]);
        let is_text = |rest: &[u8]| rest.iter().all(|byte| byte.is_ascii_digit() || *byte == b' ');
        let before_kept = rest.split_last_chunk::<PACKED_BYTES>().map(|(before, _)| before);
        let numbers = if is_text(rest) {
            parsed(rest)?.into()
        } else if is_text(before_kept?) && !before_kept?.is_empty() {
            parsed(before_kept?)?.into()
        } else {
            let (packed, rest) = before_kept?.as_chunks::<PACKED_BYTES>();
            let packed = Some(packed).filter(|packed| rest.is_empty() && !packed.is_empty())?;
            packed.iter().map(|bytes| unpacked(*bytes)).collect::<Option<_>>()?
        };
        Some((name, numbers))
    }

    /// The numbers, if this program wrote them.
    #[must_use]
    pub fn numbers(&self, program: &Program) -> Option<&[u64]> {
        match self {
            Self::Numbers(by, numbers) if by.name == program.name => Some(numbers),
            _ => None,
        }
    }
}
