//! Reads the policy, and says where it is wrong.

use std::ops::Range;

use ratelimit_core::{AnyAlgorithm, Limit, Limits, Numbers};
use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, ValueDeserializer};

use crate::failure::Failure;
use crate::text::printable;

/// The most characters of a line that an error shows.
const SHOWN_CHARS: usize = 100;

/// The limits of a document of this name.
pub fn parse(name: &str, text: &str) -> Result<Limits<AnyAlgorithm>, Failure> {
    toml::from_str(text).map_err(|error| {
        Failure::input(format!("{name}: {}", Problem::from_toml(text, &error).describe()))
    })
}

/// The numbers that arguments give for some of these limits; `None` without any.
pub fn numbers(
    given: &[(String, String)],
    limits: &Limits<AnyAlgorithm>,
) -> Result<Option<Numbers>, Failure> {
    if given.is_empty() {
        return Ok(None);
    }
    let numbers = limits.parse_numbers(given.iter().map(|(limit, numbers)| (limit, numbers)));
    numbers.map(Some).map_err(|error| Failure::input(format!("--numbers: {error}")))
}

/// The document with these settings, such as `burst = 30`, of the limits of these names. All else
/// stays as it was written.
pub fn with_settings(text: &str, settings: &[(&str, String)]) -> String {
    let document = DeTable::parse(text).map(Spanned::into_inner).unwrap_or_default();
    let limits = document.get("limit").and_then(|limits| limits.get_ref().as_array());
    let mut text = text.to_owned();
    // From the end, so that the spans before it stay right.
    for limit in limits.into_iter().flatten().rev() {
        let Some(fields) = limit.get_ref().as_table() else { continue };
        let name = fields.get("name").and_then(|name| name.get_ref().as_str());
        let found = settings.iter().find(|(of, _)| Some(*of) == name);
        let Some((field, value)) = found.and_then(|(_, it)| it.split_once(" = ")) else { continue };
        let rate = fields.get("rate").map_or(0, |rate| rate.span().end);
        let break_ = if text[limit.span()].starts_with('[') { "\n" } else { ", " };
        match fields.get(field) {
            Some(old) => text.replace_range(old.span(), value),
            None => text.insert_str(rate, &format!("{break_}{field} = {value}")),
        }
    }
    text
}

/// What is wrong with a document, and where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The line and the column, from 1; `None` if the whole document is at fault.
    pub place: Option<(usize, usize)>,
    /// What is wrong, and the remedy.
    pub message: String,
    /// The line itself.
    line: String,
}

impl Problem {
    fn from_toml(text: &str, error: &toml::de::Error) -> Self {
        let at = error.span().map(|at| field_at_fault(text, error.message(), &at).unwrap_or(at));
        Self::at(text, at, error.message())
    }

    fn at(text: &str, span: Option<Range<usize>>, message: &str) -> Self {
        // A span of everything, such as that of a document without limits, is no place.
        let start = span.filter(|span| span.len() < text.len()).map(|span| span.start);
        let before = start.and_then(|start| text.get(..start));
        let place = before.map(|before| {
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            (before.matches('\n').count() + 1, column)
        });
        let line = place.and_then(|(line, _)| text.lines().nth(line - 1)).unwrap_or_default();
        Self { place, message: message.to_owned(), line: printable(line, SHOWN_CHARS) }
    }

    /// The problem, and below it the line that it is about.
    pub fn describe(&self) -> String {
        let Self { place, message, line: shown } = self;
        let Some((line, column)) = place else { return message.clone() };
        let (margin, under) = (" ".repeat(line.to_string().len()), " ".repeat(column - 1));
        let place = format!("line {line}, column {column}: {message}");
        format!("{place}\n  {line} | {shown}\n  {margin} | {under}^")
    }
}

/// The value of the field that an error is about. It may stand before the one that brought the
/// error up, such as a debt before the algorithm that has none. Its message then begins with the
/// field, behind the limit.
fn field_at_fault(text: &str, message: &str, at: &Range<usize>) -> Option<Range<usize>> {
    let of_limit = message.strip_prefix("limit ").and_then(|of_limit| of_limit.split_once(": "));
    let fault = of_limit.map_or(message, |(_, fault)| fault);
    let field = fault.split([' ', ':', '.']).next()?;
    let document = DeTable::parse(text).ok()?.into_inner();
    let limits = document.get("limit")?.get_ref().as_array()?;
    let tables = limits.iter().filter_map(|limit| limit.get_ref().as_table());
    let is_there = |table: &&DeTable<'_>| table.values().any(|value| value.span() == *at);
    Some(tables.into_iter().find(is_there)?.get(field)?.span())
}

/// What there is to say of a document.
#[derive(Default)]
pub struct Findings {
    /// The number of its limits.
    pub limits: usize,
    /// What is wrong with them.
    pub problems: Vec<Problem>,
    /// What may be meant, and is easily overlooked.
    pub notes: Vec<Problem>,
}

/// What is wrong with the limits of a document: of each the first mistake that keeps it from being
/// read, or what `check` refuses. And what `note` says of each, which is given those before it.
pub fn findings(
    text: &str,
    check: impl Fn(&Limit<AnyAlgorithm>) -> Vec<String>,
    note: impl Fn(&Limit<AnyAlgorithm>, &[Limit<AnyAlgorithm>]) -> Vec<String>,
) -> Findings {
    let document = match DeTable::parse(text) {
        Ok(document) => document.into_inner(),
        Err(error) => {
            let problems = vec![Problem::from_toml(text, &error)];
            return Findings { problems, ..Findings::default() };
        }
    };
    let (mut notes, mut earlier) = (Vec::new(), Vec::new());
    let limits = document.get("limit").and_then(|limits| limits.get_ref().as_array());
    let limits: Vec<_> = limits.into_iter().flatten().cloned().collect();
    let mut problems = Vec::new();
    for table in limits.iter().filter(|limit| limit.get_ref().is_table()) {
        match Limit::<AnyAlgorithm>::deserialize(ValueDeserializer::from(table.clone())) {
            Ok(limit) => {
                // The header [[limit]] is the place of the limit.
                let here = |what: String| Problem::at(text, Some(table.span()), &what);
                problems.extend(check(&limit).into_iter().map(here));
                notes.extend(note(&limit, &earlier).into_iter().map(here));
                earlier.push(limit);
            }
            Err(error) => problems.push(Problem::from_toml(text, &error)),
        }
    }
    // What is wrong with the document as a whole, such as two limits of one name.
    if let Err(error) = toml::from_str::<Limits<AnyAlgorithm>>(text) {
        let problem = Problem::from_toml(text, &error);
        let is_known = problems.iter().any(|known| known.place == problem.place);
        problems.extend(Some(problem).filter(|_| !is_known));
    }
    problems.sort();
    problems.dedup();
    Findings { limits: limits.len(), problems, notes }
}
