//! [`LuaProgram`]: what an algorithm needs to run on the server.

use ratelimit_core::Algorithm;

mod built_in;
mod composed;

pub(crate) use built_in::BUILT_IN;

/// An algorithm with a twin in Lua.
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
    /// Whether attempts are charged.
    pub(crate) attempts: bool,
    /// Where in a stack, such as `/0`; empty outside of one.
    pub(crate) place: String,
}

impl Twin {
    /// This program for a limit of this [capacity](Algorithm::capacity), with these numbers.
    #[must_use]
    pub const fn new(program: &'static Program, capacity: u64, parameters: Parameters) -> Self {
        Self { program, parameters, capacity, attempts: false, place: String::new() }
    }
}

/// An algorithm in Lua.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// What the algorithm is called in scripts and in what they store. A store refuses a program that is
    /// called as another one which it knows, such as a built-in one: `gcra`.
    pub name: &'static str,
    /// Its text, a chunk that returns the algorithm's table. What that holds is said at the head of
    /// `gcra.lua`.
    pub source: &'static str,
    /// How its state is kept.
    pub keeps: Keeps,
}

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
        let mut words = text.split(' ');
        let name = words.next()?.to_owned();
        let numbers = words.map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
        (!numbers.is_empty()).then_some(Self::Numbers(name, numbers))
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
