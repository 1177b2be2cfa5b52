//! [`Script`]: a text that the server runs, made from the `.lua` files of this crate and of an
//! algorithm.
//!
//! A template has marks such as `--[[level]]`, in whose places stands what a program has for them.
//! What lies between `--[[each]]` and `--[[end]]` stands once for each program, and in the place of
//! `--[[begin]]` the file of that name.

use crate::program::{Keeps, PACKED_BYTES, Program};

/// A text without comments, and its SHA-1 in hexadecimal, which `EVALSHA` takes.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) sha: String,
}

/// Whether a script first compares what a request assumes about records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Premises {
    None,
    First,
}

impl Script {
    /// The script of a template with these programs in it.
    pub(crate) fn new(template: &str, programs: &[&'static Program], premises: Premises) -> Self {
        let first = match premises {
            Premises::None => "",
            Premises::First => include_str!("lua/premises.lua"),
        };
        let template = template.replace("--[[premises]]", first);
        let text = without_comments(&with_each(&template, programs));
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        Self { text, sha }
    }
}

/// The letters by which a request names the programs of a script, in their order.
pub(crate) const LETTERS: &[u8; 26] = b"abcdefghijklmnopqrstuvwxyz";

/// The files that stand in scripts in the places of their names.
const PARTS: [(&str, &str); 3] = [
    ("--[[begin]]", include_str!("lua/begin.lua")),
    ("--[[keep]]", include_str!("lua/keep.lua")),
    ("--[[sweep]]", include_str!("lua/sweep.lua")),
];

fn with_parts(template: &str) -> String {
    PARTS.iter().fold(template.to_owned(), |text, (mark, part)| text.replace(mark, part))
}

/// A template with these programs in it.
fn with_each(template: &str, programs: &[&'static Program]) -> String {
    let template = with_parts(template);
    let mut pieces = template.split("--[[each]]");
    let mut all = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (each, after) = piece.split_once("--[[end]]").unwrap_or((piece, ""));
        let programs = programs.iter().enumerate();
        all.extend(programs.map(|(place, program)| of_program(each, program, place)));
        all.push_str(after);
    }
    all
}

/// A template with this program's texts in the places of its marks.
fn of_program(template: &str, program: &'static Program, place: usize) -> String {
    let mut pieces = template.split("--[[");
    let mut all = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (mark, rest) = piece.split_once("]]").unwrap_or((piece, ""));
        all.push_str(text_of(program, mark, place).trim_end());
        all.push_str(rest);
    }
    all
}

/// What a program has for a mark. Any that is not named here is a section of its source.
fn text_of(program: &'static Program, mark: &str, place: usize) -> String {
    let section = |name: &str| program.section(name);
    let has = |name: &str| !section(name).trim().is_empty();
    let list = |words: &mut dyn Iterator<Item = String>| words.collect::<Vec<_>>().join(", ");
    // Of a state of variable length, the parameters say how much fits.
    let capacity: &[_] = if program.is_of_numbers() { &["capacity"] } else { &[] };
    let parameters = capacity.iter().chain(program.parameters);
    let numbers = program.state.len() + 1;
    match mark {
        "if" => if place == 0 { "if" } else { "elseif" }.to_owned(),
        "letter" => LETTERS.get(place).map(u8::to_string).unwrap_or_default(),
        "place" => place.to_string(),
        "name" => program.name.to_owned(),
        "twin" if program.is_of_numbers() => {
            of_program(&with_parts(include_str!("lua/twin.lua")), program, place)
        }
        "twin" => of_program(&with_parts(include_str!("lua/entries.lua")), program, place),
        "units" => usize::from(program.is_of_numbers()).to_string(),
        "state" => program.state.join(", "),
        // As it is stored: the name, the numbers, and until when the key is kept.
        "bytes" => (program.name.len() + 1 + PACKED_BYTES * numbers).to_string(),
        "format" => {
            format!("<c{}{}", program.name.len() + 1, format!("I{PACKED_BYTES}").repeat(numbers))
        }
        "count" => parameters.count().to_string(),
        "parameters" => list(&mut parameters.map(|name| (*name).to_owned())),
        "arguments" => {
            list(&mut (0..parameters.count()).map(|n| format!("numbers0[limit0 + {n}] + 0")))
        }
        "most" if program.parameters.contains(&"most") => "most".to_owned(),
        "most" => "capacity".to_owned(),
        "valid" => {
            let own = Some(section(mark)).filter(|own| !own.is_empty());
            let all = program.state.iter().map(|name| format!("{name} < 2^53")).chain(own);
            all.collect::<Vec<_>>().join(" and ")
        }
        "reading" => match program.keeps {
            Keeps::Numbers => "'HGET', key0, field0",
            Keeps::SortedSet => "'ZCARD', key0",
            Keeps::List => "'LLEN', key0",
        }
        .to_owned(),
        "removing" => match program.keeps {
            Keeps::Numbers => "'HDEL', key0, field0",
            Keeps::SortedSet | Keeps::List => "'UNLINK', key0",
        }
        .to_owned(),
        "fill" if program.is_of_numbers() && !has(mark) => {
            "after = used > capacity and used or capacity".to_owned()
        }
        "give" if program.is_of_numbers() && !has(mark) => "charge = 0".to_owned(),
        "mark" | "terms" if !has(mark) => "nil".to_owned(),
        "terms" => format!("{{ {} }}", section(mark).trim()),
        "bounds_or_unknown" if has("bounds") => {
            section("bounds") + "if outside then unknown0 = true break end"
        }
        "bounds_or_error" if has("bounds") => {
            let raised = "error('RLWINDOW ' .. check0 .. ' ' .. format('%d', now), 0)";
            format!("{}if outside then {raised} end", section("bounds"))
        }
        "carries" => has("carry").to_string(),
        "fills" => has("fill").to_string(),
        // A lease is given back whole.
        "settles" if has("renew") => "l".to_owned(),
        "settles" if program.is_of_numbers() && has("give") && !has("mark") => "s".to_owned(),
        "settles" => "-".to_owned(),
        "keeps_terms" => has("terms").to_string(),
        _ => section(mark),
    }
}

/// The text without comments, blank lines and indentation, so the server stores less.
fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| match line.find("-- ") {
        Some(comment) => line[..comment].trim(),
        None => line.trim(),
    });
    let mut kept = String::with_capacity(text.len());
    for line in lines.filter(|line| !line.is_empty() && *line != "--") {
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}
