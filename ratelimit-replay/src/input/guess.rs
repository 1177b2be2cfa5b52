//! What a line of no known format seems to be: which words are the client, the time and the
//! request, and the option that would read it.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::Value;

use super::envelope::Envelope;
use super::found::LogOptions;
use super::json_log::JsonFields;
use super::log_format::LogFormat;
use super::moment::moment;
use super::parser::{OwnFormat, Parser};
use super::request::{method, path};
use crate::address::address;
use crate::text::quote;

/// The parts of a request that a guess looks for, each with its name in a format of nginx and in a
/// list of fields.
const PARTS: [(&str, &str, &str); 4] = [
    ("the client", "$remote_addr", "ip"),
    ("the time", "$time_iso8601", "time"),
    ("the request", "$request", "request"),
    ("the agent", "$http_user_agent", "agent"),
];

/// The earliest time that a guess takes for one, in the year 2001: a number of fewer digits may be
/// a duration.
const LEAST_US: u64 = 1_000_000_000_000_000;

/// What a line seems to say, and what to write so that it is read.
pub(crate) fn guess(line: &[u8]) -> String {
    // A moment in front may be the only one.
    let envelope = Envelope::find(line).filter(|envelope| *envelope != Envelope::Timestamp);
    let opened = envelope.and_then(|envelope| envelope.open(line));
    let inner = opened.unwrap_or(Cow::Borrowed(line));
    let text = String::from_utf8_lossy(&inner);
    let mut found = [const { None }; PARTS.len()];
    let mut others = Vec::new();
    let object = serde_json::from_str::<Value>(&text).ok().filter(Value::is_object);
    let is_object = object.is_some();
    let option = if let Some(object) = object {
        in_object(&object, &mut String::new(), &mut found);
        let fields = PARTS.iter().zip(&found).filter_map(|((.., name), found)| {
            found.as_ref().map(|(path, _)| format!("{name}={path}"))
        });
        let fields = fields.collect::<Vec<_>>().join(",");
        let reads =
            JsonFields::parse(&fields).is_ok_and(|fields| is_read(line, &OwnFormat::Json(fields)));
        reads.then(|| format!("--fields {fields}"))
    } else {
        let format = in_words(&text, &mut found, &mut others);
        let reads =
            LogFormat::parse(&format).is_ok_and(|format| is_read(line, &OwnFormat::Text(format)));
        reads.then(|| format!("--log-format '{format}'"))
    };
    let told = PARTS.iter().zip(&found).filter_map(|((what, ..), found)| {
        found.as_ref().map(|(_, value)| format!("{what} may be {}", quote(value, 40)))
    });
    let mut told: Vec<_> = told.collect();
    if !others.is_empty() {
        let others: Vec<_> = others.iter().map(|other| quote(other, 40)).collect();
        told[0] = format!("{}, or {}", told[0], others.join(" or "));
    }
    let lacks = PARTS[..2].iter().zip(&found).filter(|(_, found)| found.is_none());
    told.extend(lacks.map(|((what, ..), _)| format!("{what} is not to be seen")));
    let remedy = match option {
        Some(option) => format!("If that is right, try {option}"),
        None if is_object => {
            "Name the fields, such as --fields ip=client.ip,time=ts,path=url".to_owned()
        }
        None => {
            "Tell what stands where, such as --log-format '$remote_addr [$time_local] \"$request\"'"
                .to_owned()
        }
    };
    format!(
        "its format is not known. Its first line is {}; {}. {remedy}, or name one of the known formats with --format",
        quote(&String::from_utf8_lossy(line), 100),
        told.join(", "),
    )
}

/// Whether a line is a request in a format.
fn is_read(line: &[u8], format: &OwnFormat) -> bool {
    let options = Arc::new(LogOptions::default());
    Parser::own(format, line, &options).is_ok_and(|mut parser| parser.parse(line).is_ok())
}

/// Where a part was found, and what stands there.
type Found = [Option<(String, String)>; PARTS.len()];

/// Which part a text may be.
fn part(text: &str) -> Option<usize> {
    if address(text.split(',').next().unwrap_or(text)).is_some() {
        Some(0)
    } else if moment(text).is_some_and(|at| at.as_us() >= LEAST_US) {
        Some(1)
    } else if method(text.as_bytes()).is_some() && path(text.as_bytes()).is_some() {
        Some(2)
    } else {
        ["Mozilla/", "curl/", "Go-http-client/", "python-requests/"]
            .iter()
            .any(|agent| text.starts_with(agent))
            .then_some(3)
    }
}

/// Notes the parts in an object.
fn in_object(value: &Value, path: &mut String, found: &mut Found) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let length = path.len();
                path.push_str(if length > 0 { "." } else { "" });
                path.push_str(name);
                in_object(value, path, found);
                path.truncate(length);
            }
        }
        Value::String(_) | Value::Number(_) => {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            if let Some(part) = part(&text) {
                found[part].get_or_insert_with(|| (path.clone(), text));
            }
        }
        _ => {}
    }
}

/// Notes the parts among the words of a line, and the other words that may be its client. Returns
/// the line's format in the notation of nginx.
fn in_words(line: &str, found: &mut Found, others: &mut Vec<String>) -> String {
    let (mut format, mut rest) = (String::new(), line.trim());
    while !rest.is_empty() {
        let (open, close) = match rest.as_bytes()[0] {
            b'"' => ("\"", "\""),
            b'[' => ("[", "]"),
            _ => ("", ""),
        };
        let inner = &rest[open.len()..];
        let in_pair = (!close.is_empty()).then(|| inner.split_once(close)).flatten();
        let (word, behind) = in_pair.unwrap_or_else(|| {
            // A day and a time of day are two words.
            let ends = rest.match_indices(' ').map(|(at, _)| at).chain([rest.len()]);
            let mut ends = ends.take(3).map(|at| rest.split_at(at));
            let first = ends.next().unwrap_or((rest, ""));
            let longer = ends.find(|(words, _)| moment(words).is_some());
            longer.filter(|_| part(first.0).is_none()).unwrap_or(first)
        });
        let place = part(word);
        if place == Some(0) && found[0].is_some() && others.len() < 3 {
            others.push(word.to_owned());
        }
        let place = place.filter(|place| found[*place].is_none());
        let name = place.map_or("$_", |place| PARTS[place].1);
        if let Some(place) = place {
            found[place] = Some((name.to_owned(), word.to_owned()));
        }
        let (open, close) = if in_pair.is_some() { (open, close) } else { ("", "") };
        format.extend([open, name, close]);
        if let Some(behind) = behind.strip_prefix(' ') {
            format.push(' ');
            rest = behind.trim_start();
        } else {
            // What follows a bracket at once belongs to it.
            let end = behind.find(' ').unwrap_or(behind.len());
            format.push_str(&behind[..end]);
            rest = &behind[end..];
            if let Some(behind) = rest.strip_prefix(' ') {
                format.push(' ');
                rest = behind.trim_start();
            }
        }
    }
    format
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_no_known_format_is_taken_apart_and_the_option_that_reads_it_is_told() {
        for (line, says) in [
            (
                "2015-05-17 10:05:03 GET 192.0.2.7 \"GET /a HTTP/1.1\" ok",
                "try --log-format '$time_iso8601 $_ $remote_addr \"$request\" $_'",
            ),
            (
                "web [2015-05-17T10:05:03Z] 192.0.2.7:80 200 \"curl/8\"",
                "try --log-format '$_ [$time_iso8601] $remote_addr $_ \"$http_user_agent\"'",
            ),
            (
                r#"{"at":"2015-05-17T10:05:03Z","http":{"peer":"192.0.2.7"},"n":5}"#,
                "try --fields ip=http.peer,time=at",
            ),
            (
                "2015-05-17T10:05:03Z a.example 10.0.0.9 192.0.2.7 \"GET /a HTTP/1.1\" 200",
                "may be \"10.0.0.9\", or \"192.0.2.7\", the time may be \"2015-05-17T10:05:03Z\", the request may be",
            ),
            ("2015-05-17T10:05:03Z hello", "the client is not to be seen"),
            ("hello", "the time is not to be seen"),
            (r#"{"at":"192.0.2.7","took":500000000}"#, "the time is not to be seen"),
            ("{}", "such as --fields ip=client.ip,time=ts,path=url"),
            ("", "such as --log-format '$remote_addr [$time_local]"),
            ("[ \" ]", "such as --log-format"),
        ] {
            let guess = guess(line.as_bytes());
            assert!(guess.contains(says), "{line}\n→ {guess}\nlacks {says}");
        }
    }
}
