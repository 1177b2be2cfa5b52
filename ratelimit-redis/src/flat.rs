//! Flat scripts, which serve almost all requests: the sections of a batch's twins one after the other,
//! without closures, tables or the driver. `lua/README.md` specifies what a section receives and what it
//! leaves.
//!
//! The n-th check has four variables in the script: `seenN`, its state as read; `putN`, the state to write, or nil;
//! `keptN`, until when the key is kept, in milliseconds; and `ttlN`, for how many milliseconds it has to live from now, 0 if
//! it is kept for long enough. All other variables of a step are local to it. The script for one charged check, with the
//! sections in brackets:
//!
//! ```text
//! local seen1 = call('HGET', KEYS[1], ARGV[1])
//! local put1, ttl1, kept1 = nil, 0, 0
//! do
//!   local charge, capacity, … = ARGV[2] + 0, ARGV[3] + 0, …
//!   (the numbers of the state, from seen1 or by [fresh]; return '?' unless [valid])
//!   local at = now
//!   [level]
//!   local after, expires = used + charge
//!   if after > capacity then return '-' … end
//!   [move]
//!   (ttl1 and kept1, if the key is not kept until expires)
//!   put1 = (the numbers and kept1, packed)
//! end
//! (HSET of put1; PEXPIRE if the key would live for less than ttl1)
//! return '+' … seen1
//! ```
//!
//! Reading and setting a time to live in every decision would cost the server. So a state ends with the moment until which
//! its key lives, by the server's clock. A charge that ends earlier leaves the time to live alone; any other sets it a second
//! later than needed. States are packed, seven bytes per number, because parsing and formatting text costs as much as
//! deciding.

use std::fmt::Write as _;

use crate::program::{Alone, FILL, Program};
use crate::script::Script;

mod merged;

pub(crate) use merged::{MOST_KINDS, MOST_MERGED, merged};

/// The most checks of a flat script: Lua allows 200 local variables, and 250 registers for an
/// expression.
pub(crate) const MOST_CHECKS: usize = 24;

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
/// Returns this if this program did not write the state.
const UNKNOWN: &str = "return '?'";
const GIVEN_TIME: &str = "local now, padding_ms = ARGV[1] + 0, ARGV[2] + 0\n";

/// The script that acquires checks of these shapes, at the server's time or at a given one.
pub(crate) fn acquire(shapes: &[Shape], given_time: bool) -> Script {
    if let [Shape { program, .. }] = shapes
        && let Some(alone) = program.alone
    {
        return acquire_alone(&alone, given_time);
    }
    let mut next_arg = if given_time { 3 } else { 1 };
    let mut arg = || {
        next_arg += 1;
        format!("ARGV[{}]", next_arg - 1)
    };
    let checks: Vec<_> =
        (1..).zip(shapes).map(|(n, shape)| Check::new(n, *shape, &mut arg)).collect();
    let time = if given_time { "''" } else { "t[1] .. ' ' .. t[2]" };
    let seen = checks.iter().map(|c| c.shape.program.answered(&format!("seen{}", c.n)));
    let answer = format!(".. {time} .. '\\n' .. {}", seen.collect::<Vec<_>>().join(" .. "));
    let writer = Writer {
        counts_attempts: shapes.iter().any(|shape| shape.role == Role::Attempt),
        given_time,
    };

    let mut text = String::from(BEGIN);
    text.push_str(if given_time { GIVEN_TIME } else { ITS_TIME });
    let keys = shapes.iter().map(|shape| shape.key).max().unwrap_or_default();
    for key in 1..=keys {
        read(&mut text, key, &checks);
    }
    if writer.counts_attempts {
        text.push_str("local denied = false\n");
    }
    let charged: Vec<_> = checks.iter().filter(|check| check.shape.role != Role::Look).collect();
    // Before the first write: the driver handles a value that no limit wrote, even in a check that costs
    // nothing.
    for check in checks.iter().filter(|check| check.shape.role == Role::Look) {
        text.push_str(&check.shape.program.refusing(&format!("seen{}", check.n), UNKNOWN));
    }
    for check in &charged {
        check.step(&mut text, &writer, &format!("return '-' {answer}"));
    }
    if writer.counts_attempts {
        for check in charged.iter().filter(|check| check.shape.role == Role::Charge) {
            let _ = writeln!(text, "if denied then put{0}, ttl{0} = nil, 0 end", check.n);
        }
    }
    text.push_str("local done, wrote\n");
    for key in 1..=keys {
        let of_key: Vec<_> =
            charged.iter().copied().filter(|check| check.shape.key == key).collect();
        if !of_key.is_empty() {
            writer.write(&mut text, key, &of_key);
        }
    }
    let sign = if writer.counts_attempts { "(denied and '-' or '+')" } else { "'+'" };
    let _ = writeln!(text, "return {sign} {answer}");
    Script::from_text(&text)
}

/// The script that acquires a single check of a state of variable length. The program contributes the
/// text ([`Alone`]); this function adds the time and the arguments as local variables.
fn acquire_alone(alone: &Alone, given_time: bool) -> Script {
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

/// Emits the reads of a key's fields.
fn read(text: &mut String, key: usize, checks: &[Check]) {
    let of_key: Vec<_> = checks.iter().filter(|check| check.shape.key == key).collect();
    let names: Vec<_> = of_key.iter().map(|check| format!("seen{}", check.n)).collect();
    let fields: Vec<_> = of_key.iter().map(|check| check.field.as_str()).collect();
    let (names, fields) = (names.join(", "), fields.join(", "));
    let _ = match of_key[..] {
        [_] => writeln!(text, "local {names} = call('HGET', KEYS[{key}], {fields})"),
        _ => writeln!(text, "local {names} = unpack(call('HMGET', KEYS[{key}], {fields}))"),
    };
}

/// What the server says of a command that it refused, from the error's code on.
const REFUSAL: &str = "(match(done.err, '%u%u+ .*') or done.err)";

/// Emits the writes.
struct Writer {
    counts_attempts: bool,
    given_time: bool,
}

impl Writer {
    /// Emits the write of a key's fields and its time to live: as long as the longest of them matters,
    /// and never shorter than before, since another field may need it. If the server refuses a command
    /// after one that wrote, the answer says so.
    fn write(&self, text: &mut String, key: usize, checks: &[&Check]) {
        let key = format!("KEYS[{key}]");
        let in_part = format!("redis.error_reply('RLPART ' .. {REFUSAL})");
        let refused =
            format!("if type(done) == 'table' then return wrote and {in_part} or done end");
        let of_each: Vec<_> = checks.iter().map(|check| (check.n, &*check.field)).collect();
        if !self.counts_attempts {
            measure(text, &key, checks.iter().map(|check| check.n));
            set(text, &key, &of_each, &refused);
            extend(text, &key, &refused);
            return;
        }
        let any: Vec<_> = checks.iter().map(|check| format!("put{}", check.n)).collect();
        let _ = writeln!(text, "if {} then", any.join(" or "));
        measure(text, &key, checks.iter().map(|check| check.n));
        for of_one in of_each.chunks(1) {
            let _ = writeln!(text, "if put{} then", of_one[0].0);
            set(text, &key, of_one, &refused);
            text.push_str("end\n");
        }
        extend(text, &key, &refused);
        text.push_str("end\n");
    }
}

/// For how many milliseconds a key is kept longer than a state matters, so that a busy key's time to live is not set anew at
/// each charge.
const SLACK_MS: u64 = 1_000;
/// By how much less the state says: a server expires keys by a time that it has read a little earlier.
const MARGIN_MS: u64 = 10;

/// Emits the state of a check as it is written, `putN`, and for how many milliseconds its key has to live from now, `ttlN`: 0
/// if the state says that the key is kept for long enough.
fn written(program: &Program, n: usize, given_time: bool) -> String {
    if given_time {
        // The key lives by the server's clock, about which a given time says nothing.
        let put = program.written("0");
        return format!("put{n}, ttl{n} = {put}, ceil((expires - now) / 1000) + padding_ms\n");
    }
    format!(
        "if kept{n} * 1000 < expires then\n\
         kept{n} = ceil(expires / 1000) + {SLACK_MS}\n\
         ttl{n} = kept{n} - floor(now / 1000)\n\
         kept{n} = kept{n} - {MARGIN_MS}\n\
         end\n\
         put{n} = {}\n",
        program.written(&format!("kept{n}"))
    )
}

/// Emits how long the key has to live for these checks, and whether that is longer than it will.
fn measure(text: &mut String, key: &str, checks: impl Iterator<Item = usize>) {
    let each: Vec<_> = checks.map(|n| format!("ttl{n}")).collect();
    let longest = match &each[..] {
        [one] => one.clone(),
        several => format!("math.max({})", several.join(", ")),
    };
    let _ = writeln!(text, "local ttl_ms = {longest}");
    let _ = writeln!(text, "local short = ttl_ms > 0 and call('PTTL', {key}) < ttl_ms");
}

/// Emits the write of these checks' fields. `refused` runs if the server refuses it.
fn set(text: &mut String, key: &str, checks: &[(usize, &str)], refused: &str) {
    let pairs: Vec<_> = checks.iter().map(|(n, field)| format!("{field}, put{n}")).collect();
    let _ = writeln!(
        text,
        "done = pcall0('HSET', {key}, {})\n\
         {refused}\n\
         wrote = true",
        pairs.join(", ")
    );
}

/// Emits the longer time to live. `refused` runs if the server refuses it.
fn extend(text: &mut String, key: &str, refused: &str) {
    let _ = writeln!(
        text,
        "if short then\n\
         done = pcall0('PEXPIRE', {key}, format('%d', ttl_ms))\n\
         {refused}\n\
         end"
    );
}

/// A check of a script, and the arguments of its numbers.
struct Check {
    n: usize,
    shape: Shape,
    field: String,
    /// The charge, the capacity and the parameters.
    numbers: Vec<String>,
}

impl Check {
    fn new(n: usize, shape: Shape, arg: &mut impl FnMut() -> String) -> Self {
        let field = arg();
        let numbers =
            if shape.role == Role::Look { 0 } else { 2 + shape.program.parameters().len() };
        Self { n, shape, field, numbers: (0..numbers).map(|_| arg()).collect() }
    }

    /// Emits the step from the state that was read to the one to write. `deny` ends the script.
    fn step(&self, text: &mut String, writer: &Writer, deny: &str) {
        let Self { n, shape: Shape { program, role, .. }, .. } = self;
        let numbers: Vec<_> = self.numbers.iter().map(|sent| format!("{sent} + 0")).collect();
        let _ = writeln!(text, "local put{n}, ttl{n}, kept{n} = nil, 0, 0\ndo");
        let names = [&["charge", "capacity"], program.parameters()].concat().join(", ");
        let _ = writeln!(text, "local {names} = {}", numbers.join(", "));
        text.push_str(&program.parsing(&format!("seen{n}"), &format!("kept{n}"), UNKNOWN));
        let _ = writeln!(text, "local at = now\n{}", program.section("level"));
        text.push_str("local after, expires = used + charge\n");
        // A charge that does not fit leaves the limit full.
        let fill = match program.section("fill") {
            none if none.is_empty() => FILL.to_owned(),
            fill => fill,
        };
        let written = written(program, *n, writer.given_time);
        let move_ = |carry: &str| format!("{}{carry}{written}", program.section("move"));
        let _ = match (role, writer.counts_attempts) {
            (Role::Attempt, _) => writeln!(
                text,
                "if after > capacity then\ndenied = true\n{held}{fill}\n\
                 if after ~= used then\nlocal gone\n{filled}end\n\
                 elseif after ~= used then\n{charged}end\nend",
                held = program.section("held"),
                filled = move_(&program.section("carry")),
                charged = move_(""),
            ),
            (_, true) => writeln!(
                text,
                "if after > capacity then\ndenied = true\nelse\n{}end\nend",
                move_("")
            ),
            (_, false) => {
                writeln!(text, "if after > capacity then {deny} end\n{}end", move_(""))
            }
        };
    }
}
