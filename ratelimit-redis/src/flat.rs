//! The scripts that decide almost all requests: the sections of their twins one after the other, without closures, tables or
//! the driver. A request alone is a group of one. `lua/README.md` specifies what a section receives and what it leaves.
//!
//! - [`deciding`] makes a script for any number of requests; [`generator`] has its text.
//! - `read.lua` returns states, and writes nothing.
//!
//! All of them answer one text: a line with the time, then for each group
//!
//! | text | meaning |
//! | --- | --- |
//! | `N` ⏎ LENGTH`:`STATE… | it admitted N requests; the states are those it read |
//! | `=` ⏎ LENGTH`:`STATE… | it only read |
//! | `?` ⏎ | it did not understand a state or may not write one, and wrote nothing |
//! | `!` ERROR ⏎ | the server refused a command after one that wrote |

use std::borrow::Cow;

use crate::program::{Program, Twin};

mod generator;

pub(crate) use generator::{MOST_CHECKS, MOST_KINDS, deciding};

/// How a check takes part in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// It costs nothing; the script only returns its state.
    Look,
    /// It is charged if all checks admit.
    Charge,
    /// It is charged in any case, up to the capacity.
    Attempt,
}

/// A check, as far as the script's text depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) program: &'static Program,
    pub(crate) role: Role,
    /// The position of its key, from 1.
    pub(crate) key: usize,
}

/// One twin of a check.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TwinCheck<'a> {
    /// The check's position in the batch.
    pub(crate) position: usize,
    pub(crate) twin: Twin,
    /// The name of its field.
    pub(crate) field: Cow<'a, str>,
    pub(crate) shape: Shape,
    /// The index of its reservation's key; 0 for none.
    pub(crate) reservation: usize,
    pub(crate) life_us: u64,
}

impl TwinCheck<'_> {
    /// The same for longer than the batch is there.
    pub(crate) fn to_owned(&self) -> TwinCheck<'static> {
        let Self { position, twin, field, shape, reservation, life_us } = self.clone();
        let field = field.into_owned().into();
        TwinCheck { position, twin, field, shape, reservation, life_us }
    }
}

const BEGIN: &str = "\
local call, match, format = redis.call, string.match, string.format
local ceil, floor = math.ceil, math.floor
local pcall0, pack0, unpack0, may0 = redis.pcall, struct.pack, struct.unpack, redis.acl_check_cmd
";
const ITS_TIME: &str = "\
local t = call('TIME')
local now = t[1] * 1000000 + t[2]
if now >= 2^52 - 1 then return redis.error_reply('RLTIME ' .. format('%d', now)) end
local time0, padding_ms, first0 = t[1] .. ' ' .. t[2], nil, 1
";
const GIVEN_TIME: &str = "\
local now, padding_ms, time0, first0 = ARGV[1] + 0, ARGV[2] + 0, '', 3
";

/// The start of every script: the functions that sections call; the time as `now`, and in `time0` as the reply tells it; a given
/// time's `padding_ms`; and in `first0` the index of the first argument after these.
pub(crate) fn begin(given_time: bool) -> String {
    [BEGIN, if given_time { GIVEN_TIME } else { ITS_TIME }].concat()
}

/// Removes the fields of a key that have ended.
pub(crate) const SWEEP: &str = include_str!("lua/sweep.lua");

/// Leaves the group with what the server says of a command that it refused, from the error's code on.
const REFUSED: &str = "\
if type(done) == 'table' then if wrote then answer0 = '!' .. (match(done.err, '%u%u+ .*') or done.err) .. '\\n' end break end";
