//! [`LuaProgram`]: what an algorithm needs to run on the server.

use std::sync::OnceLock;

use ratelimit_core::Algorithm;

use crate::script::Script;

mod built_in;
mod composed;

pub(crate) use built_in::BUILT_IN;

/// An algorithm with a twin in Lua.
///
/// An algorithm of your own that has none runs in the mode that compares and sets: see [`Builder::cas`](crate::Builder::cas).
///
/// ```compile_fail,E0277
/// # use ratelimit_core::{Algorithm, Step, Timestamp};
/// # struct Mine;
/// # impl Algorithm for Mine {
/// #     type State = ();
/// #     fn capacity(&self) -> u64 { 1 }
/// #     fn step(&self, _: Option<&()>, _: Timestamp, _: u64) -> Step<()> { unimplemented!() }
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
pub trait LuaProgram: Algorithm {
    /// The twins that decide together, each with a state of its own: one, but for a
    /// [`Stack`](ratelimit_core::Stack).
    fn twins(&self) -> Vec<Twin>;

    /// The state that is stored, or `None` if it is not one that these twins write. What each of them
    /// left stands in their order; at least one did.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<Self::State>;
}

/// An algorithm's twin in Lua, and the numbers of a limit.
#[derive(Clone, Debug)]
pub struct Twin {
    pub(crate) program: &'static Program,
    pub(crate) parameters: Parameters,
    pub(crate) capacity: u64,
    /// How many units of its own the algorithm counts for one of cost.
    pub(crate) unit: u64,
    /// Whether attempts are charged.
    pub(crate) attempts: bool,
    /// Where in a stack, such as `/0`; empty outside of one.
    pub(crate) place: String,
}

impl Twin {
    /// This program for a limit of this [capacity](Algorithm::capacity), with these numbers.
    #[must_use]
    pub const fn new(program: &'static Program, capacity: u64, parameters: Parameters) -> Self {
        Self { program, parameters, capacity, unit: 1, attempts: false, place: String::new() }
    }

    /// The same, of an algorithm that counts so many units of its own for one of cost. The capacity in units is below
    /// 2^52.
    #[must_use]
    pub fn in_units(self, unit: u64) -> Self {
        Self { unit, ..self }
    }
}

/// An algorithm in Lua.
#[derive(Debug)]
pub struct Program {
    /// What the algorithm is called in scripts and in what they store. A store refuses a program that is
    /// called as another one which it knows, such as a built-in one: `gcra`. Letters and digits of ASCII, `-` and `_`.
    pub(crate) name: &'static str,
    /// Its text: sections if its state is a few numbers; otherwise a chunk that returns the algorithm's table.
    pub(crate) source: &'static str,
    pub(crate) keeps: Keeps,
    /// What its numbers are called, if its state is a few.
    pub(crate) numbers: Option<Numbers>,
    /// How a single check of it is acquired, if its state is of variable length.
    pub(crate) alone: Option<Alone>,
    /// The script that acquires a single check of it at the server's time.
    pub(crate) acquires_one: OnceLock<Script>,
}

/// How a single check is acquired by a script of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alone {
    /// What the [`Parameters`] are called there.
    pub(crate) parameters: &'static [&'static str],
    pub(crate) source: &'static str,
    /// Whether it is one under an id, too.
    pub(crate) reservations: bool,
}

/// What the numbers of a program are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// What the numbers of the state are called, as they are stored.
    state: &'static [&'static str],
    /// What the numbers of a limit are called, in the order of the [`Parameters`].
    parameters: &'static [&'static str],
}

impl Program {
    /// A program of this name, of ASCII letters, digits, `-` and `_`. Its state is a few numbers, which are called so in its `sections`, in the order in which they are
    /// stored; `parameters` are the numbers of a limit beside its capacity, in the order of the [`Parameters`].
    ///
    /// Every number of a state is below 2^53. What a section is given, and what it leaves, stands in
    /// `src/lua/README.md`; `gcra.lua` beside it is an example, and `examples/own_twin.rs` a small one.
    #[must_use]
    pub const fn of_numbers(
        name: &'static str,
        state: &'static [&'static str],
        parameters: &'static [&'static str],
        sections: &'static str,
    ) -> Self {
        let numbers = Some(Numbers { state, parameters });
        Self {
            name,
            source: sections,
            keeps: Keeps::Numbers,
            numbers,
            alone: None,
            acquires_one: OnceLock::new(),
        }
    }

    /// A program of this name, of ASCII letters, digits, `-` and `_`, and of a state of variable length: `source` is a chunk that returns the algorithm's table, as
    /// `src/lua/README.md` describes it.
    #[must_use]
    pub const fn of_entries(name: &'static str, source: &'static str, keeps: Keeps) -> Self {
        Self { name, source, keeps, numbers: None, alone: None, acquires_one: OnceLock::new() }
    }

    /// The same, with a script of its own that acquires a single check.
    pub(crate) const fn of_entries_alone(
        name: &'static str,
        source: &'static str,
        keeps: Keeps,
        alone: Alone,
    ) -> Self {
        let alone = Some(alone);
        Self { name, source, keeps, numbers: None, alone, acquires_one: OnceLock::new() }
    }

    /// Whether it is the same, wherever it lies.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let of = |program: &Self| (program.name, program.source, program.keeps, program.numbers);
        std::ptr::eq(self, other) || of(self) == of(other)
    }

    /// Whether scripts and what they store can say what it is called: in a text, a pattern and a format of Lua, and
    /// before a space.
    pub(crate) fn has_plain_name(&self) -> bool {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        !self.name.is_empty() && self.name.bytes().all(is_plain)
    }

    fn state(&self) -> &'static [&'static str] {
        self.numbers.map_or(&[], |numbers| numbers.state)
    }

    pub(crate) fn parameters(&self) -> &'static [&'static str] {
        self.numbers.map_or(&[], |numbers| numbers.parameters)
    }

    /// The lines of a section: those between `--- name` and the next one. Empty if there is none.
    pub(crate) fn section(&self, name: &str) -> String {
        let mut lines =
            self.source.lines().skip_while(|line| line.strip_prefix("--- ") != Some(name));
        lines.next();
        lines.take_while(|line| !line.starts_with("--- ")).flat_map(|line| [line, "\n"]).collect()
    }

    /// Declares the numbers of the state, from the text `seen`, or those of a fresh one. `corrupt` is what is done
    /// where that is no state.
    pub(crate) fn parsing(&self, seen: &str, corrupt: &str) -> String {
        let (names, fresh) = (self.state().join(", "), self.section("fresh"));
        let read = self.reading(seen, corrupt);
        format!("local {names}\nif {seen} then\n{read}else\n{fresh}end\n")
    }

    /// Does `corrupt` where the text `seen` is there and is no state.
    pub(crate) fn refusing(&self, seen: &str, corrupt: &str) -> String {
        let (names, read) = (self.state().join(", "), self.reading(seen, corrupt));
        format!("if {seen} then\nlocal {names}\n{read}end\n")
    }

    /// Sets the numbers of the state from the text `seen`.
    fn reading(&self, seen: &str, corrupt: &str) -> String {
        let names = self.state().join(", ");
        let last = self.state().last().copied().unwrap_or_default();
        let numbers = self.state().iter().map(|name| format!("{name} + 0")).collect::<Vec<_>>();
        let mut valid: Vec<_> = self.state().iter().map(|name| format!("{name} < 2^53")).collect();
        let own = self.section("valid");
        if !own.is_empty() {
            valid.push(own.trim().to_owned());
        }
        format!(
            "{names} = match({seen}, '^{name}{digits}$')\n\
             if not {last} then {corrupt} end\n\
             {names} = {numbers}\n\
             if not ({valid}) then {corrupt} end\n",
            name = self.name.replace('-', "%-"),
            digits = " (%d+)".repeat(self.state().len()),
            numbers = numbers.join(", "),
            valid = valid.join(" and "),
        )
    }

    /// The text of the numbers of the state, as it is stored.
    pub(crate) fn written(&self) -> String {
        let digits = " %d".repeat(self.state().len());
        format!("format('{}{digits}', {})", self.name, self.state().join(", "))
    }

    /// What makes the algorithm's table for the driver.
    pub(crate) fn chunk(&self) -> String {
        let Some(Numbers { state, parameters }) = self.numbers else {
            return format!("(function()\n{}end)()", self.source);
        };
        let quoted = |names: &[&str]| {
            names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
        };
        let or = |section: &str, otherwise: &str| match self.section(section) {
            none if none.is_empty() => otherwise.to_owned(),
            some => some.trim().to_owned(),
        };
        let limits: Vec<_> =
            ["capacity"].iter().chain(parameters).map(|name| format!("limit.{name}")).collect();
        let names = state.join(", ");
        format!(
            "of_numbers('{name}', {{ {quoted_state} }}, {{ {quoted_parameters} }},\n\
             function(limit, state, now, operation, charge, made)\n\
             local {names}\n\
             if operation == 'valid' or operation == 'mark' then\n\
             {names} = unpack(state)\n\
             if operation == 'valid' then return {valid} end\n\
             return {mark}\n\
             end\n\
             local {parameters} = {limits}\n\
             if state then {names} = unpack(state) else\n\
             {fresh}\
             end\n\
             local at = now\n\
             {level}\
             if operation == 'wait' then\n\
             local room, fits_us = charge\n\
             {wait}\
             return fits_us\n\
             end\n\
             local after, expires = used + charge\n\
             if operation == 'give' then\n\
             {give}\
             after = used > charge and used - charge or 0\n\
             elseif operation == 'fill' and after > capacity then\n\
             {fill}\n\
             elseif operation == 'force' and after > capacity then\n\
             after = used > capacity and used or capacity\n\
             end\n\
             if after == used or after == 0 or (operation == 'acquire' and after > capacity) then\n\
             return used, after, at\n\
             end\n\
             {move_}\
             return used, after, at, {{ {names} }}, expires\n\
             end, {refunds}, {marks})",
            name = self.name,
            quoted_state = quoted(state),
            quoted_parameters = quoted(parameters),
            valid = or("valid", "true"),
            mark = or("mark", "nil"),
            parameters = [&["capacity"], parameters].concat().join(", "),
            limits = limits.join(", "),
            fresh = self.section("fresh"),
            level = self.section("level"),
            wait = self.section("wait"),
            give = self.section("give"),
            fill = or("fill", FILL),
            move_ = self.section("move"),
            refunds = !self.section("give").is_empty(),
            marks = !self.section("mark").is_empty(),
        )
    }
}

/// A charge that does not fit leaves a full limit.
pub(crate) const FILL: &str = "after = used > capacity and used or capacity";

/// How a state is kept on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// A few numbers, in a field of the hash that all limits of an identifier share.
    Numbers,
    /// A sorted set under a key of its own.
    SortedSet,
    /// A list under a key of its own.
    List,
}

/// The most numbers that an algorithm has: a bucket and four windows.
const MAX_PARAMETERS: usize = 9;

/// An algorithm's numbers, in the order of its twin's `parameters`.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    numbers: [u64; MAX_PARAMETERS],
    count: usize,
}

impl Parameters {
    /// These numbers, each below 2^53.
    #[must_use]
    pub fn new<const N: usize>(given: [u64; N]) -> Self {
        const { assert!(N <= MAX_PARAMETERS, "more parameters than a program may have") };
        let mut numbers = [0; MAX_PARAMETERS];
        numbers[..N].copy_from_slice(&given);
        Self { numbers, count: N }
    }

    /// The numbers.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.numbers[..self.count]
    }
}

/// What was found on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Who wrote it, and its numbers.
    Numbers(String, Vec<u64>),
    /// A sorted set's members and scores, in order.
    SortedSet(Vec<(String, u64)>),
    /// A list's elements, in order.
    List(Vec<Vec<u8>>),
}

impl Stored {
    /// A field's text: a name and numbers.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let (name, numbers) = text.split_once(' ')?;
        let numbers = numbers.split(' ').map(|word| word.parse().ok());
        Some(Self::Numbers(name.to_owned(), numbers.collect::<Option<_>>()?))
    }

    /// The numbers, if they were written by this program.
    #[must_use]
    pub fn numbers(&self, program: &Program) -> Option<&[u64]> {
        match self {
            Self::Numbers(name, numbers) if name == program.name => Some(numbers),
            _ => None,
        }
    }
}
