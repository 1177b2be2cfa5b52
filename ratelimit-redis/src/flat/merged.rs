//! Merged scripts: many requests in one call.
//!
//! Requests of the same limits for the same keys are a group. The script charges them in order, first come,
//! first served, each all or nothing: it reads the states of a group once, admits of each run of equal costs as
//! many as fit, and writes the states once. All requests of a call see the same time, so n charges of a cost
//! move a state as one charge of n times the cost does.
//!
//! The arguments are parts, one for each set of limits with their numbers:
//!
//! ```text
//! KIND SINGLE GROUPS (FIELD [CAPACITY NUMBER… CHARGE])… (RUNS (COUNT CHARGE…)…)…
//! ```
//!
//! KIND is the place of the limits' algorithms among those that the script knows, from 1. The first SINGLE groups of a part are one request each, at the CHARGE that stands with the limits. Each other
//! group of the GROUPS has runs of requests: how many, and what each of them charges the limits that cost
//! something. The keys of a group are the next ones of KEYS.
//!
//! The reply is one text: a line with the time, then for each group
//!
//! | text | meaning |
//! | --- | --- |
//! | `N` ⏎ LENGTH`:`STATE… | it admitted N requests; the states are those it read |
//! | `?` ⏎ | it did not understand a state or may not write one, and wrote nothing |
//! | `!` ERROR ⏎ | the server refused a command after one that wrote |
//!
//! The script reads a group's states when its turn comes. So requests that share a state, but not all limits, go in one
//! flight and see each other's charges. A store's newest script decides all kinds of requests that the store has met, up to
//! 16, so the number of texts grows with the kinds and not with their sets.

use std::fmt::Write as _;

use super::{BEGIN, ITS_TIME, REFUSAL, Role, Shape, extend, measure, set, written};
use crate::script::Script;

/// The most checks of a merged request: Lua allows 200 local variables.
pub(crate) const MOST_MERGED: usize = 6;
/// The most kinds of requests that one script decides.
pub(crate) const MOST_KINDS: usize = 16;

/// Leaves the group without an answer other than `?`.
const UNKNOWN: &str = "break";

/// The script for groups of these kinds: each is the shapes of its checks.
pub(crate) fn merged<'k>(kinds: impl Iterator<Item = &'k [Shape]>) -> Script {
    let mut text = format!("{BEGIN}{ITS_TIME}");
    text.push_str(
        "local keys0, args0 = KEYS, ARGV\n\
         local answers0, count0, place0, key0 = { t[1] .. ' ' .. t[2] .. '\\n' }, 1, 1, 0\n\
         while args0[place0] do\n\
         local kind0 = args0[place0]\n",
    );
    let mut begin = "if";
    for (number, shapes) in (1..).zip(kinds) {
        let _ = writeln!(text, "{begin} kind0 == '{number}' then");
        part(&mut text, shapes);
        begin = "elseif";
    }
    text.push_str("end\nend\nreturn table.concat(answers0)\n");
    Script::from_text(&text)
}

/// Emits what decides a part.
fn part(text: &mut String, shapes: &[Shape]) {
    let checks: Vec<_> = (1..).zip(shapes).map(|(n, shape)| Check { n, shape: *shape }).collect();
    let charged: Vec<_> = checks.iter().filter(|check| check.is_charged()).copied().collect();
    let keys = shapes.iter().map(|shape| shape.key).max().unwrap_or_default();
    let names = |prefix: &str| {
        charged.iter().map(|check| format!("{prefix}{}", check.n)).collect::<Vec<_>>().join(", ")
    };
    text.push_str("local single0, groups0 = args0[place0 + 1] + 0, args0[place0 + 2] + 0\n");
    let mut offset = 3;
    for check in &checks {
        check.head(text, &mut offset);
    }
    let _ = writeln!(text, "place0 = place0 + {offset}");
    text.push_str(
        "for group0 = 1, groups0 do\n\
         local answer0, first0, last0 = '?\\n', place0, place0 - 1\n",
    );
    let stride = 1 + charged.len();
    let _ = writeln!(
        text,
        "if group0 > single0 then first0 = place0 + 1; last0 = place0 + args0[place0] * {stride} end\n\
         place0 = last0 + 1\n\
         repeat"
    );
    for key in 1..=keys {
        read(text, key, &checks);
    }
    for check in checks.iter().filter(|check| !check.is_charged()) {
        text.push_str(&check.shape.program.refusing(&format!("seen{}", check.n), UNKNOWN));
    }
    let _ = writeln!(text, "local admitted0, done, wrote = 0");
    let _ = writeln!(text, "local {}, {}", names("after"), names("put"));
    let zeros = vec!["0"; charged.len()].join(", ");
    let _ = writeln!(text, "local {}, {} = {zeros}, {zeros}", names("ttl"), names("kept"));
    for check in &charged {
        check.level(text);
    }
    admit(text, &charged, stride);
    for check in charged.iter().rev() {
        check.step(text);
    }
    text.push_str("if admitted0 > 0 then\n");
    // Leaves the group with what the server refused.
    let refused = format!(
        "if type(done) == 'table' then if wrote then answer0 = '!' .. {REFUSAL} .. '\\n' end break end"
    );
    for key in 1..=keys {
        let of_key: Vec<_> = charged.iter().filter(|check| check.shape.key == key).collect();
        let fields: Vec<_> = of_key.iter().map(|check| format!("field{}", check.n)).collect();
        let pairs: Vec<_> =
            of_key.iter().zip(&fields).map(|(check, field)| (check.n, field.as_str())).collect();
        if pairs.is_empty() {
            continue;
        }
        let key = format!("keys0[key0 + {key}]");
        text.push_str("do\n");
        measure(text, &key, pairs.iter().map(|(n, _)| *n));
        set(text, &key, &pairs, &refused);
        extend(text, &key, &refused);
        text.push_str("end\n");
    }
    text.push_str("end\n");
    // Pieces, which are joined once.
    text.push_str(
        "answer0 = admitted0 == 1 and '1\\n' or admitted0 == 0 and '0\\n' or admitted0 .. '\\n'\n\
         local next0 = count0 + 1\n",
    );
    for Check { n, shape } in &checks {
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

/// A check of every group.
#[derive(Clone, Copy)]
struct Check {
    n: usize,
    shape: Shape,
}

impl Check {
    fn is_charged(&self) -> bool {
        self.shape.role != Role::Look
    }

    /// The names of the capacity and the parameters of a part's limit.
    fn given(&self) -> impl Iterator<Item = String> {
        let n = self.n;
        let parameters = 0..self.shape.program.parameters().len();
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
        let names = [&["capacity"], program.parameters()].concat().join(", ");
        let _ = writeln!(text, "do\nlocal {names} = {}", given.join(", "));
        text.push_str(&program.parsing(&format!("seen{n}"), &format!("kept{n}"), UNKNOWN));
        let _ = writeln!(text, "local at = now\n{}after{n} = used", program.section("level"));
    }

    /// Emits the state to write, and ends the block.
    fn step(&self, text: &mut String) {
        let Self { n, shape: Shape { program, .. } } = self;
        let _ = writeln!(
            text,
            "if admitted0 > 0 then\n\
             local after, expires = after{n}\n\
             {}{}\
             end\n\
             end",
            program.section("move"),
            written(program, *n, false)
        );
    }
}

/// Emits the reads of a key's fields.
fn read(text: &mut String, key: usize, checks: &[Check]) {
    let of_key: Vec<_> = checks.iter().filter(|check| check.shape.key == key).collect();
    let fields: Vec<_> = of_key.iter().map(|check| format!("field{}", check.n)).collect();
    let names: Vec<_> = of_key.iter().map(|check| format!("seen{}", check.n)).collect();
    let (fields, names) = (fields.join(", "), names.join(", "));
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

/// Emits how many requests of a group fit, and what is used after them.
fn admit(text: &mut String, charged: &[Check], stride: usize) {
    let all = |of: &dyn Fn(usize) -> String, with: &str| {
        charged.iter().map(|check| of(check.n)).collect::<Vec<_>>().join(with)
    };
    let fits = all(&|n| format!("after{n} + charge{n} <= capacity{n}"), " and ");
    let after = all(&|n| format!("after{n}"), ", ");
    let sums = all(&|n| format!("after{n} + charge{n}"), ", ");
    let _ = writeln!(
        text,
        "if group0 <= single0 then\n\
         if {fits} then admitted0, {after} = 1, {sums} end\n\
         else\n\
         for run = first0, last0, {stride} do\n\
         local fit = args0[run] + 0"
    );
    for (argument, Check { n, .. }) in (1..).zip(charged) {
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
