//! The scripts that decide almost all requests: the sections of their twins one after the other, without closures, tables or
//! the driver. A request alone is a group of one. `lua/README.md` specifies what a section receives and what it leaves.
//!
//! - [`deciding`] makes a script for any number of requests; [`generator`] has its text.
//! - [`alone`] makes the script of a single check whose state has variable length.
//! - [`READ`] returns states, and writes nothing.
//!
//! All of them answer one text: a line with the time, then for each group
//!
//! | text | meaning |
//! | --- | --- |
//! | `N` ⏎ LENGTH`:`STATE… | it admitted N requests; the states are those it read |
//! | `=` ⏎ LENGTH`:`STATE… | it only read |
//! | `?` ⏎ | it did not understand a state or may not write one, and wrote nothing |
//! | `!` ERROR ⏎ | the server refused a command after one that wrote |

use std::sync::Arc;

use crate::program::{Alone, Program};
use crate::script::Script;

mod generator;

pub(crate) use generator::{MOST_CHECKS, MOST_KINDS, deciding};

/// How a check takes part in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Role {
    /// It costs nothing; the script only returns its state.
    Look,
    /// It is charged if all checks admit.
    Charge,
    /// It is charged in any case, up to the capacity.
    Attempt,
}

/// A check, as far as the script's text depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) program: &'static Program,
    pub(crate) role: Role,
    /// The position of its key, from 1.
    pub(crate) key: usize,
}

impl Shape {
    /// Whether a script decides both in the same way.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.program.is(other.program) && self.role == other.role && self.key == other.key
    }
}

/// Returns states, and writes nothing.
pub(crate) const READ: &str = include_str!("lua/read.lua");

const BEGIN: &str = "\
local call, match, format = redis.call, string.match, string.format
local ceil, floor = math.ceil, math.floor
local pcall0, pack0, unpack0 = redis.pcall, struct.pack, struct.unpack
";
const ITS_TIME: &str = "\
local t = call('TIME')
local now = t[1] * 1000000 + t[2]
if now >= 2^52 - 1 then return redis.error_reply('RLTIME ' .. format('%d', now)) end
";
const GIVEN_TIME: &str = "local now, padding_ms = ARGV[1] + 0, ARGV[2] + 0\n";

/// The script that acquires a single check of a state of variable length, if the program has one.
pub(crate) fn alone(program: &'static Program, given_time: bool) -> Option<&'static Arc<Script>> {
    let alone = program.alone.as_ref()?;
    let script = &program.acquires_alone[usize::from(given_time)];
    Some(script.get_or_init(|| Arc::new(acquiring(alone, given_time))))
}

/// The program contributes the text; this function adds the time and the arguments as local variables.
fn acquiring(alone: &Alone, given_time: bool) -> Script {
    let (begin, time, first_arg) = if given_time {
        (GIVEN_TIME, "local time = ''", 3)
    } else {
        (ITS_TIME, "local time, padding_ms = t[1] .. ' ' .. t[2], 0", 1)
    };
    let names = [&["charge"], alone.parameters].concat();
    let numbers: Vec<_> =
        (0..names.len()).map(|n| format!("ARGV[{}] + 0", first_arg + 1 + n)).collect();
    let life = first_arg + 1 + names.len();
    let text = format!(
        "{BEGIN}{begin}{time}\n\
         local field, life_us = ARGV[{first_arg}], ARGV[{life}]\n\
         local {} = {}\n{}",
        names.join(", "),
        numbers.join(", "),
        alone.source
    );
    Script::from_text(&text)
}

/// What the server says of a command that it refused, from the error's code on.
const REFUSAL: &str = "(match(done.err, '%u%u+ .*') or done.err)";
