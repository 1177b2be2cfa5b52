//! [`LuaProgram`]: what an algorithm needs to run on the server.

use std::hash::{Hash, Hasher};

use ratelimit_core::Algorithm;
use smallvec::SmallVec;

use crate::codec::parsed;

mod built_in;
mod composed;

pub(crate) use built_in::BUILT_IN;

/// An algorithm with a twin in Lua.
///
/// An algorithm of your own that has none runs in the mode that compares and sets: see [`Builder::cas`](crate::Builder::cas).
/// `algorithm_conformance!` of `ratelimit-testkit` tests that a twin decides as the step does; `examples/own_twin.rs` shows how.
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
pub trait LuaProgram: Algorithm {
    /// The twins that decide together, each with its own state: one, except for a
    /// [`Stack`](ratelimit_core::Stack).
    fn twins(&self) -> Vec<Twin>;

    /// The stored state, or `None` if these twins do not write such a state. `stored` follows the order
    /// of the twins, and at least one of them has stored a value.
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
}

impl Twin {
    /// This program for a limit of this [capacity](Algorithm::capacity), with these parameters in the order in which the
    /// program names them, each below 2^53.
    #[must_use]
    pub fn new<const N: usize>(
        program: &'static Program,
        capacity: u64,
        parameters: [u64; N],
    ) -> Self {
        let parameters = SmallVec::from_slice(&parameters);
        Self { program, parameters, capacity, unit: 1, attempts: false, place: String::new() }
    }

    /// Sets how many internal units the algorithm counts per unit of cost. The capacity in units must be
    /// below 2^52.
    #[must_use]
    pub fn in_units(self, unit: u64) -> Self {
        Self { unit, ..self }
    }
}

/// An algorithm in Lua.
#[derive(Debug)]
pub struct Program {
    /// The name in scripts and in stored states: ASCII letters, digits, `-` and `_`. A store refuses a
    /// program whose name belongs to a different program that it knows, such as the built-in `gcra`.
    pub(crate) name: &'static str,
    /// The source: sections for a state of a few numbers, otherwise a chunk that returns the algorithm's
    /// table.
    pub(crate) source: &'static str,
    pub(crate) keeps: Keeps,
    /// The names of the numbers of a state of a few numbers, as they are stored; empty for any other.
    state: &'static [&'static str],
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
    /// A program whose state is a few numbers. Its name consists of ASCII letters, digits, `-` and `_`.
    /// `state` names the numbers in the order in which they are stored; `sections` uses these names.
    /// `parameters` names the limit's numbers besides its capacity, in the order in which its
    /// [`Twin`] has them.
    ///
    /// Every number of a state is below 2^53. `src/lua/README.md` specifies what a section receives and
    /// what it leaves; `gcra.lua` beside it is an example, and `examples/own_twin.rs` a small one.
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

    /// A program whose state has variable length. Its name consists of ASCII letters, digits, `-` and
    /// `_`. `source` is a chunk that returns the algorithm's table, as `src/lua/README.md` specifies.
    #[must_use]
    pub const fn of_entries(name: &'static str, source: &'static str, keeps: Keeps) -> Self {
        Self { name, source, keeps, state: &[], parameters: &[] }
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

    /// The section that charges an attempt which does not fit. By default it leaves the limit full.
    pub(crate) fn fill(&self) -> String {
        match self.section("fill") {
            none if none.is_empty() => "after = used > capacity and used or capacity\n".to_owned(),
            some => some,
        }
    }

    /// How many bytes a stored state has.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.name.len() + 1 + PACKED_BYTES * (self.state.len() + 1)
    }

    /// The format of a stored state, for `struct`: the name, the numbers, and until when the key is kept.
    fn packed_format(&self) -> String {
        let numbers = format!("I{PACKED_BYTES}").repeat(self.state.len() + 1);
        format!("<c{}{numbers}", self.name.len() + 1)
    }

    /// Declares the state's numbers and reads them from `seen`, or sets those of a fresh state. `kept` is set to the time in
    /// milliseconds until which the key is kept, and stays 0 if that is not known. `unknown` runs if `seen` is no state of this
    /// algorithm.
    pub(crate) fn parsing(&self, seen: &str, kept: &str, unknown: &str) -> String {
        let (names, fresh) = (self.state.join(", "), self.section("fresh"));
        let read = self.reading(seen, kept, unknown);
        format!("local {names}\nif {seen} then\n{read}else\n{fresh}end\n")
    }

    /// Runs `unknown` if `seen` exists and is no state of this algorithm.
    pub(crate) fn refusing(&self, seen: &str, unknown: &str) -> String {
        let (names, read) = (self.state.join(", "), self.reading(seen, "_", unknown));
        format!("if {seen} then\nlocal {names}, _\n{read}end\n")
    }

    /// Sets the state's numbers from `seen`.
    fn reading(&self, seen: &str, kept: &str, unknown: &str) -> String {
        let names = self.state.join(", ");
        let mut valid: Vec<_> = self.state.iter().map(|name| format!("{name} < 2^53")).collect();
        let own = self.section("valid");
        if !own.is_empty() {
            valid.push(own.trim().to_owned());
        }
        format!(
            "local name0\n\
             if #{seen} == {bytes} then name0, {names}, {kept} = unpack0('{format}', {seen}) end\n\
             if not (name0 == '{name} ' and {valid}) then\n\
             {unknown}\n\
             end\n",
            bytes = self.packed_bytes(),
            format = self.packed_format(),
            name = self.name,
            valid = valid.join(" and "),
        )
    }

    /// An expression for the state as it is stored, under a key that is kept until then.
    pub(crate) fn written(&self, kept: &str) -> String {
        let (format, names) = (self.packed_format(), self.state.join(", "));
        format!("pack0('{format}', '{} ', {names}, {kept})", self.name)
    }

    /// An expression for the algorithm's table, for the driver.
    pub(crate) fn chunk(&self) -> String {
        if !self.is_of_numbers() {
            return format!("(function()\n{}end)()", self.source);
        }
        let Self { state, parameters, .. } = *self;
        let quoted: Vec<_> = ["capacity", "cost_unit"]
            .iter()
            .chain(parameters)
            .map(|name| format!("'{name}'"))
            .collect();
        let limits: Vec<_> =
            ["capacity"].iter().chain(parameters).map(|name| format!("limit.{name}")).collect();
        let (give, mark) = (self.section("give"), self.section("mark"));
        let terms = self.section("terms");
        let removed = "if gone then return true, 'remove', nil, nil, at end\n";
        format!(
            "of_numbers({{ {quoted} }},\n\
             function(seen)\n\
             local {names}, kept0\n\
             {read}\
             return {mark}\n\
             end,\n\
             function(limit, seen, operation, charge, made, reservation)\n\
             local {parameters} = {limits}\n\
             local cost_unit = limit.cost_unit\n\
             local kept0\n\
             {parsed}\
             local at = now\n\
             {level}\
             local after, expires = used + charge\n\
             if operation == 'give' or operation == 'undo' or operation == 'left' then\n\
             {give}\
             if operation == 'left' then return floor((used > charge and charge or used) / cost_unit) end\n\
             after = used > charge and used - charge or 0\n\
             elseif operation == 'fill' and after > capacity then\n\
             {fill}\
             elseif operation == 'force' then\n\
             if after > {most} then after = used > {most} and used or {most} end\n\
             elseif charge > 0 and after > capacity then\n\
             return false, nil, nil, nil, at\n\
             end\n\
             if after == used then return true, nil, nil, nil, at end\n\
             local gone = after == 0\n\
             {ends}\
             {move_}\
             if operation ~= 'acquire' then\n\
             {carry}\
             end\n\
             {removed}\
             kept0 = kept_ms(state_ttl_ms(expires))\n\
             return true, 'put', {written}, expires, at, {terms}\n\
             end, {settles}, {keeps_terms})",
            quoted = quoted.join(", "),
            names = state.join(", "),
            read = self.reading("seen", "kept0", "error(CORRUPT)"),
            mark = if mark.is_empty() { "nil" } else { mark.trim() },
            parameters = [&["capacity"], parameters].concat().join(", "),
            limits = limits.join(", "),
            parsed = self.parsing("seen", "kept0", "error(CORRUPT)"),
            level = self.section("level"),
            give = if give.is_empty() { "charge = 0\n" } else { &give },
            fill = self.fill(),
            most = if parameters.contains(&"most") { "most" } else { "capacity" },
            carry = self.section("carry"),
            ends = if self.section("carry").is_empty() { removed } else { "" },
            move_ = self.section("move"),
            written = self.written("kept0"),
            settles = !give.is_empty() && mark.is_empty(),
            terms =
                if terms.is_empty() { "nil".to_owned() } else { format!("{{ {} }}", terms.trim()) },
            keeps_terms = !terms.is_empty(),
        )
    }
}

/// How the server stores a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// A few numbers in a field of the hash that all limits of an identifier share.
    Numbers,
    /// A sorted set under a key of its own.
    SortedSet,
    /// A list under a key of its own.
    List,
}

/// The bytes of a packed number, the lowest first. The highest is below 32, so none looks like text.
const PACKED_BYTES: usize = 7;

/// A packed number, which is below 2^53.
fn unpacked(bytes: [u8; PACKED_BYTES]) -> Option<u64> {
    let mut all = [0; 8];
    all[..PACKED_BYTES].copy_from_slice(&bytes);
    Some(u64::from_le_bytes(all)).filter(|number| *number < 1 << 53)
}

/// The most parameters of any algorithm: a bucket and four windows.
const MAX_PARAMETERS: usize = 9;

/// A value found on the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The name of the program that wrote it, and its numbers.
    Numbers(String, Vec<u64>),
    /// A sorted set's members and scores, in order.
    SortedSet(Vec<(String, u64)>),
    /// A list's elements, in order.
    List(Vec<Vec<u8>>),
}

impl Stored {
    /// Parses a field, or a state as a script answers it: a name and numbers, as text or packed. In a field, the time until which
    /// the key is kept follows.
    pub(crate) fn from_field(field: &[u8]) -> Option<Self> {
        let space = field.iter().position(|byte| *byte == b' ')?;
        let (name, rest) = (std::str::from_utf8(&field[..space]).ok()?, &field[space + 1..]);
        let is_text = |rest: &[u8]| rest.iter().all(|byte| byte.is_ascii_digit() || *byte == b' ');
        let before_kept = rest.split_last_chunk::<PACKED_BYTES>().map(|(before, _)| before);
        let numbers = if is_text(rest) {
            parsed(rest)?
        } else if is_text(before_kept?) && !before_kept?.is_empty() {
            parsed(before_kept?)?
        } else {
            let (packed, rest) = before_kept?.as_chunks::<PACKED_BYTES>();
            let packed = Some(packed).filter(|packed| rest.is_empty() && !packed.is_empty())?;
            packed.iter().map(|bytes| unpacked(*bytes)).collect::<Option<_>>()?
        };
        Some(Self::Numbers(name.to_owned(), numbers))
    }

    /// The numbers, if this program wrote them.
    #[must_use]
    pub fn numbers(&self, program: &Program) -> Option<&[u64]> {
        match self {
            Self::Numbers(name, numbers) if name == program.name => Some(numbers),
            _ => None,
        }
    }
}
