//! The script for any number of requests, in one call.
//!
//! Requests of the same limits for the same keys are a group. The script charges them in order, first come,
//! first served, each all or nothing: it reads the states of a group once, admits of each run of equal costs as
//! many as fit, and writes the states once. All requests of a call see the same time, so n charges of a cost
//! move a state as one charge of n times the cost does.
//!
//! The arguments are a given time, if it has one, with how many milliseconds keys live longer; and parts, one for each set of
//! limits with their numbers:
//!
//! ```text
//! [NOW PADDING_MS] (KIND SINGLE GROUPS (FIELD [CAPACITY NUMBER… CHARGE])… (RUNS (COUNT CHARGE…)…)…)…
//! ```
//!
//! KIND is the place of the limits' algorithms among those that the script knows, from 1. The first SINGLE groups of a part are one request each, at the CHARGE that stands with the limits. Each other
//! group of the GROUPS has runs of requests: how many, and what each of them charges the limits that cost
//! something. The keys of a group are the next ones of KEYS.
//!
//! The n-th check of a group has these variables: `seenN`, its state as read; `afterN`, what is used once the admitted requests
//! are charged; `putN`, the state to write, or nil; `keptN`, until when the key is kept, in milliseconds; and `ttlN`, for how
//! many milliseconds it has to live from now, 0 if it is kept for long enough. All other variables of a step are local to it.
//! The checks lie one in the other. For one charged check, with the sections in brackets:
//!
//! ```text
//! local seen1 = pcall0('HGET', keys0[key0 + 1], field1)
//! do
//!   local capacity, … = …
//!   (the numbers of the state, from seen1 or by [fresh]; leave the group with '?' unless [valid])
//!   local at = now
//!   [level]
//!   after1 = used
//!   (how many requests fit: admitted0, and after1 with them)
//!   if admitted0 > 0 then
//!     local after, expires = after1
//!     [move]
//!     (ttl1 and kept1, if the key is not kept until expires)
//!     put1 = (the numbers and kept1, packed)
//!   end
//! end
//! (HSET of put1; PEXPIRE if the key would live for less than ttl1, and at times sweep.lua)
//! ```
//!
//! Reading and setting a time to live in every decision would cost the server. So a state ends with the moment until which
//! its key lives, by the server's clock. A charge that ends earlier leaves the time to live alone; any other sets it a second
//! later than needed. States are packed, seven bytes per number, because parsing and formatting text costs as much as
//! deciding.
//!
//! The script reads a group's states when its turn comes. So requests that share a state, but not all limits, go in one
//! call and see each other's charges. A store's newest script decides all kinds of requests that the store has met, up to
//! 16, so the number of texts grows with the kinds and not with their sets.

use std::fmt::Write as _;

use super::{REFUSED, Role, SWEEP, Shape};
use crate::script::Script;

/// The most checks of a request: Lua allows 200 local variables.
pub(crate) const MOST_CHECKS: usize = 6;
/// The most kinds of requests that one script decides.
pub(crate) const MOST_KINDS: usize = 16;

/// For how many milliseconds a key is kept longer than a state matters, so that a busy key's time to live is not set anew at
/// each charge.
const SLACK_MS: u64 = 1_000;
/// By how much less the state says: a server expires keys by a time that it has read a little earlier.
const MARGIN_MS: u64 = 10;

/// Leaves the group without an answer other than `?`.
const UNKNOWN: &str = "break";

/// The script for groups of these kinds, each of which is the shapes of its checks, at the server's time or at a given one.
pub(crate) fn deciding(kinds: &[Vec<Shape>], given_time: bool) -> Script {
    let mut text = format!(
        "{}local keys0, args0 = KEYS, ARGV\n\
         local answers0, count0, place0, key0 = {{ time0 .. '\\n' }}, 1, first0, 0\n\
         while args0[place0] do\n\
         local kind0 = args0[place0]\n",
        super::begin(given_time),
    );
    let mut begin = "if";
    for (number, shapes) in (1..).zip(kinds) {
        let _ = writeln!(text, "{begin} kind0 == '{number}' then");
        KindScript::new(shapes, given_time).emit(&mut text);
        begin = "elseif";
    }
    text.push_str("end\nend\nreturn table.concat(answers0)\n");
    Script::from_text(&text)
}

/// What decides the groups of one kind.
struct KindScript {
    checks: Vec<ScriptCheck>,
    charged: Vec<ScriptCheck>,
    keys: usize,
    /// Whether a denied request is charged too; such a request shares no group.
    counts_attempts: bool,
    given_time: bool,
}

impl KindScript {
    fn new(shapes: &[Shape], given_time: bool) -> Self {
        let checks: Vec<_> =
            (1..).zip(shapes).map(|(n, shape)| ScriptCheck { n, shape: *shape }).collect();
        Self {
            charged: checks.iter().filter(|check| check.is_charged()).copied().collect(),
            keys: shapes.iter().map(|shape| shape.key).max().unwrap_or_default(),
            counts_attempts: shapes.iter().any(|shape| shape.role == Role::Attempt),
            checks,
            given_time,
        }
    }

    fn emit(&self, text: &mut String) {
        let Self { checks, charged, keys, .. } = self;
        text.push_str("local single0, groups0 = args0[place0 + 1] + 0, args0[place0 + 2] + 0\n");
        let mut offset = 3;
        for check in checks {
            check.head(text, &mut offset);
        }
        let stride = 1 + charged.len();
        let _ = writeln!(
            text,
            "place0 = place0 + {offset}\n\
             for group0 = 1, groups0 do\n\
             local answer0, first0, last0 = '?\\n', place0, place0 - 1\n\
             if group0 > single0 then first0 = place0 + 1; last0 = place0 + args0[place0] * {stride} end\n\
             place0 = last0 + 1\n\
             repeat"
        );
        for key in 1..=*keys {
            read(text, key, checks);
        }
        for check in checks.iter().filter(|check| !check.is_charged()) {
            let (seen, program) = (format!("seen{}", check.n), check.shape.program);
            text.push_str(&program.refusing(&seen, UNKNOWN));
        }
        let zeros = vec!["0"; charged.len()].join(", ");
        let of_each = |prefix| names(charged, prefix);
        let _ = writeln!(
            text,
            "local admitted0, done, wrote = 0\n\
             local {}, {}\n\
             local {}, {} = {zeros}, {zeros}",
            of_each("after"),
            of_each("put"),
            of_each("ttl"),
            of_each("kept")
        );
        for check in charged {
            check.level(text);
        }
        self.admit(text, stride);
        for check in charged.iter().rev() {
            check.step(text, self.given_time);
        }
        for key in 1..=*keys {
            self.keep(text, key);
        }
        for key in 1..=*keys {
            self.write(text, key);
        }
        // Pieces, which are joined once.
        text.push_str(
            "answer0 = admitted0 == 1 and '1\\n' or admitted0 == 0 and '0\\n' or admitted0 .. '\\n'\n\
             local next0 = count0 + 1\n",
        );
        for ScriptCheck { n, shape } in checks {
            let bytes = shape.program.packed_bytes();
            let _ = writeln!(
                text,
                "if seen{n} then answers0[next0 + 1], answers0[next0 + 2] = '{bytes}:', seen{n} \
                 next0 = next0 + 2 else answers0[next0 + 1] = '0:' next0 = next0 + 1 end"
            );
        }
        let _ = writeln!(
            text,
            "answers0[count0 + 1] = answer0\n\
             answer0, count0 = nil, next0\n\
             until true\n\
             key0 = key0 + {keys}\n\
             if answer0 then\n\
             answers0[count0 + 1] = answer0\n\
             count0 = count0 + 1\n\
             end\n\
             end"
        );
    }

    /// Emits how many requests of a group fit, and what is used after them.
    fn admit(&self, text: &mut String, stride: usize) {
        let charged = &self.charged;
        let all = |of: &dyn Fn(usize) -> String, with: &str| {
            charged.iter().map(|check| of(check.n)).collect::<Vec<_>>().join(with)
        };
        let fits = all(&|n| format!("after{n} + charge{n} <= capacity{n}"), " and ");
        let after = names(charged, "after");
        let sums = all(&|n| format!("after{n} + charge{n}"), ", ");
        let single = format!("if {fits} then admitted0, {after} = 1, {sums} end\n");
        if self.counts_attempts {
            text.push_str(&single);
            return;
        }
        let _ = writeln!(
            text,
            "if group0 <= single0 then\n\
             {single}\
             else\n\
             for run = first0, last0, {stride} do\n\
             local fit = args0[run] + 0"
        );
        for (argument, ScriptCheck { n, .. }) in (1..).zip(charged) {
            let _ = writeln!(
                text,
                "local charge{n} = args0[run + {argument}] + 0\n\
                 fit = math.min(fit, floor((capacity{n} - after{n}) / charge{n}))"
            );
        }
        let sums = all(&|n| format!("after{n} + fit * charge{n}"), ", ");
        let _ = writeln!(
            text,
            "if fit > 0 then admitted0, {after} = admitted0 + fit, {sums} end\n\
             end\n\
             end"
        );
    }

    /// The checks that are charged to a key, and whether any of them writes.
    fn writing(&self, key: usize) -> Option<(Vec<ScriptCheck>, String)> {
        let of_key = self.charged.iter().filter(|check| check.shape.key == key);
        let of_key: Vec<_> = of_key.copied().collect();
        let any = if self.counts_attempts {
            names(&of_key, "put").replace(',', " or")
        } else {
            "admitted0 > 0".to_owned()
        };
        (!of_key.is_empty()).then_some((of_key, any))
    }

    /// Emits how long a key has to live, as `due`: as long as the longest of its fields matters, and never shorter than before,
    /// since another field may need it. If that is longer than now, its `life` so far is known, and the user has to be allowed
    /// to extend it, before anything is written.
    fn keep(&self, text: &mut String, key: usize) {
        let Some((of_key, any)) = self.writing(key) else { return };
        let name = format!("keys0[key0 + {key}]");
        let ttls = names(&of_key, "ttl");
        let longest = if of_key.len() == 1 { ttls } else { format!("math.max({ttls})") };
        let _ = writeln!(
            text,
            "local life{key}, due{key}\n\
             if {any} then\n\
             due{key} = {longest}\n\
             if due{key} > 0 then\n\
             done = pcall0('PTTL', {name})\n\
             {REFUSED}\n\
             if done < due{key} then\n\
             life{key} = done\n\
             if may0 and not may0('PEXPIRE', {name}, '1') then\n\
             done = pcall0('PEXPIRE', {name}, '1')\n\
             {REFUSED}\n\
             end\n\
             end\n\
             end\n\
             end"
        );
    }

    /// Emits the write of a key's fields.
    fn write(&self, text: &mut String, key: usize) {
        let Some((of_key, any)) = self.writing(key) else { return };
        let name = format!("keys0[key0 + {key}]");
        let _ = writeln!(text, "if {any} then");
        // At a given time, nothing is known about the server's clock.
        let sweep = if self.given_time {
            String::new()
        } else {
            let known = format!("{name}, {}, life{key}, due{key}", of_key.len());
            format!("local key, fields, life_ms, ttl_ms = {known}\n{SWEEP}")
        };
        // Without attempts, all fields of the key are written or none.
        let at_once = if self.counts_attempts { 1 } else { of_key.len() };
        for fields in of_key.chunks(at_once) {
            let pairs: Vec<_> = fields.iter().map(|c| format!("field{0}, put{0}", c.n)).collect();
            let set = format!(
                "done = pcall0('HSET', {name}, {})\n{REFUSED}\nwrote = true",
                pairs.join(", ")
            );
            let _ = match fields {
                [check] if self.counts_attempts => {
                    writeln!(text, "if put{} then\n{set}\nend", check.n)
                }
                _ => writeln!(text, "{set}"),
            };
        }
        let _ = writeln!(
            text,
            "if life{key} then\n\
             done = pcall0('PEXPIRE', {name}, format('%d', due{key}))\n\
             {REFUSED}\n\
             {sweep}\
             end\n\
             end"
        );
    }
}

/// The variables of these checks, one after the other.
fn names(checks: &[ScriptCheck], prefix: &str) -> String {
    checks.iter().map(|check| format!("{prefix}{}", check.n)).collect::<Vec<_>>().join(", ")
}

/// A check of every group.
#[derive(Clone, Copy)]
struct ScriptCheck {
    n: usize,
    shape: Shape,
}

impl ScriptCheck {
    fn is_charged(&self) -> bool {
        self.shape.role != Role::Look
    }

    /// The names of the capacity and the parameters of a part's limit.
    fn given(&self) -> impl Iterator<Item = String> {
        let n = self.n;
        let parameters = 0..self.shape.program.parameters.len();
        let parameters = parameters.map(move |parameter| format!("given{n}_{parameter}"));
        [format!("capacity{n}")].into_iter().chain(parameters)
    }

    /// Emits the numbers of a part's limit.
    fn head(&self, text: &mut String, offset: &mut usize) {
        let n = self.n;
        let _ = writeln!(text, "local field{n} = args0[place0 + {offset}]");
        *offset += 1;
        if !self.is_charged() {
            return;
        }
        let names: Vec<_> = self.given().chain([format!("charge{n}")]).collect();
        let numbers: Vec<_> = (0..names.len())
            .map(|argument| format!("args0[place0 + {}] + 0", *offset + argument))
            .collect();
        *offset += names.len();
        let _ = writeln!(text, "local {} = {}", names.join(", "), numbers.join(", "));
    }

    /// Opens a block and emits the state and what is used of it. The block ends with [`step`](Self::step).
    fn level(&self, text: &mut String) {
        let Self { n, shape: Shape { program, .. } } = self;
        let given: Vec<_> = self.given().collect();
        let names = [&["capacity"], program.parameters].concat().join(", ");
        let _ = writeln!(text, "do\nlocal {names} = {}", given.join(", "));
        let (seen, kept) = (format!("seen{n}"), format!("kept{n}"));
        text.push_str(&program.parsing(&seen, &kept, UNKNOWN));
        let _ = writeln!(text, "local at = now\n{}after{n} = used", program.section("level"));
    }

    /// Emits the state to write, and ends the block.
    fn step(&self, text: &mut String, given_time: bool) {
        let Self { n, shape: Shape { program, role, .. } } = self;
        let (move_, written) = (program.section("move"), self.written(given_time));
        let _ = match role {
            Role::Attempt => writeln!(
                text,
                "local charge = charge{n}\n\
                 local after, expires = used + charge\n\
                 if after <= capacity then\n\
                 {move_}{written}\
                 else\n\
                 {fill}\
                 if after ~= used then\n\
                 local gone\n\
                 {move_}{carry}{written}\
                 end\n\
                 end\n\
                 end",
                fill = program.fill(),
                carry = program.section("carry"),
            ),
            _ => writeln!(
                text,
                "if admitted0 > 0 then\n\
                 local after, expires = after{n}\n\
                 {move_}{written}\
                 end\n\
                 end"
            ),
        };
    }

    /// The state as it is written, `putN`, and for how many milliseconds its key has to live from now, `ttlN`: 0 if the
    /// state says that the key is kept for long enough.
    fn written(&self, given_time: bool) -> String {
        let Self { n, shape: Shape { program, .. } } = self;
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
}

/// Emits the reads of a key's fields.
fn read(text: &mut String, key: usize, checks: &[ScriptCheck]) {
    let of_key: Vec<_> = checks.iter().filter(|check| check.shape.key == key).copied().collect();
    let (fields, names) = (names(&of_key, "field"), names(&of_key, "seen"));
    let _ = if of_key.len() == 1 {
        writeln!(
            text,
            "local {names} = pcall0('HGET', keys0[key0 + {key}], {fields})\n\
             if type({names}) == 'table' then break end"
        )
    } else {
        writeln!(
            text,
            "local all = pcall0('HMGET', keys0[key0 + {key}], {fields})\n\
             if all.err then break end\n\
             local {names} = unpack(all)"
        )
    };
}
