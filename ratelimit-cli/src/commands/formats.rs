//! `ratelimit formats`: the formats of logs that have names, and what an input would be read as.

use ratelimit_replay::decision_line::json_line;
use ratelimit_replay::failure::Failure;
use ratelimit_replay::input::FormatArg;
use ratelimit_replay::named::Named as _;
use ratelimit_replay::replay::Reading;
use ratelimit_replay::table::TextTable;
use ratelimit_replay::text::{duration, printable, time};
use serde_json::json;

use crate::args::FormatsArgs;
use crate::inputs;
use crate::interrupt::Interrupt;

/// How many requests are shown.
const SHOWN: usize = 3;

pub(super) fn run(args: &FormatsArgs) -> Result<u8, Failure> {
    if args.inputs.is_empty() {
        return list(args.json);
    }
    let how = Reading { silent: true, keeps_lines: true, ..Reading::default() };
    let format = args.format.read().map_err(Failure::input)?;
    let mut requests = inputs::requests("", &args.inputs, &format, &Interrupt::default(), how)?;
    let mut shown = Vec::new();
    while shown.len() < SHOWN
        && let Some(request) = requests.next_request()?
    {
        shown.push(request.entry);
    }
    let format = requests.format().ok_or_else(|| requests.unknown())?;
    if shown.is_empty() {
        return Err(Failure::input(format!(
            "{}: no line is a request as {format}; `ratelimit replay` says why",
            requests.names()
        )));
    }
    if args.json {
        let requests = shown.iter().map(|entry| {
            json!({
                "at_us": entry.at.as_us(), "duration_us": entry.duration_us, "agent": entry.agent_text(),
                "key": entry.caller.bare_of_trace(), "keys": entry.caller.named,
            })
        });
        let line = json!({ "format": format, "requests": requests.collect::<Vec<_>>() });
        return super::print(json_line(&line));
    }
    let rows = shown.iter().map(|entry| {
        let took = entry.duration_us.map(|us| format!(" took={}", duration(us)));
        let key = entry.caller.bare_of_trace().map(|key| format!("key={}", printable(key, 200)));
        let named = Some(entry.caller.named.display()).filter(|named| !named.is_empty());
        let caller = key.into_iter().chain(named).collect::<Vec<_>>().join(" ");
        vec![time(entry.at), caller + &took.unwrap_or_default()]
    });
    let table = TextTable::new(&["@arrival", "request"], rows);
    super::print(format!("{}: {format}\n{}", requests.names(), table.text()))
}

fn list(is_json: bool) -> Result<u8, Failure> {
    let formats = FormatArg::ALL.iter();
    if is_json {
        let lines = formats
            .map(|value| json_line(&json!({ "name": value.name(), "about": value.about() })));
        return super::print(lines.collect::<Vec<_>>().concat());
    }
    let rows = formats.map(|value| vec![value.name().to_owned(), value.about().to_owned()]);
    super::print(
        TextTable::new(&["name", "what"], rows).text() + include_str!("../help/formats.txt"),
    )
}
