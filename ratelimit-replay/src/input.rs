//! Turns a file into requests: the bytes, their lines, and the requests in the lines.

mod access_log;
mod batches;
mod compressed;
mod csv;
mod entry;
mod envelope;
mod format;
mod found;
mod guess;
mod json_log;
mod jsonl;
mod lines;
mod log_format;
mod moment;
mod parser;
mod parts;
mod request;
mod source;
mod w3c;

pub use batches::{Batch, Batches};
pub(crate) use batches::{LineFormat, ReadLine};
pub use entry::{BadLine, InputEntry};
pub(crate) use entry::{NAMED_BAD_LINES, OTHERS, line_text};
pub(crate) use format::Detector;
pub use found::{LineTimeArg, LogOptions, Source, UnitArg};
pub(crate) use guess::guess;
pub use json_log::JsonFields;
pub(crate) use jsonl::reason;
pub(crate) use lines::Lines;
pub use log_format::LogFormat;
pub use parser::{FormatArg, OwnFormat};
pub(crate) use source::Text;
pub use source::{NamedInput, names_of};

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::lines::Line;
    use super::parser::Parser;
    use super::*;
    use proptest::prelude::*;

    /// Anything between noise and a line that is nearly right.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let near = prop::sample::select(
            &[
                "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET /a?b HTTP/1.1\" 200 1 \"-\" \"x",
                "{\"at_us\": 5, \"key\": \"k\", \"keys\": {\"ip\": null}, \"cost\": 3}",
                "5,\"k\"\"k\",3,peek",
                "<134>1 2024-07-18T11:07:07Z w n 7 id [a b=\"]\"] 192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET /",
                "{\"log\":\"x\\n\",\"time\":\"2024-07-18T11:07:07Z\"}",
                "#Fields: date time c-ip cs-method cs-uri-stem time-taken",
            ][..],
        );
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            (near, any::<prop::sample::Index>(), any::<u8>(), any::<bool>()).prop_map(
                |(line, at, byte, cut)| {
                    let mut line = line.as_bytes().to_vec();
                    let at = at.index(line.len());
                    line[at] = byte;
                    if cut {
                        line.truncate(at);
                    }
                    line
                }
            ),
        ]
    }

    /// A line of each system, read as what it is: 20 systems, and what ships their lines.
    #[test]
    fn each_format_is_known_by_its_first_line() {
        let all = include_str!("input/samples.txt");
        let mut names = std::collections::BTreeSet::new();
        for sample in all.split("\n== ").filter(|sample| !sample.trim().is_empty()) {
            let (head, lines) = sample.split_once('\n').expect("a head and lines");
            let words: Vec<_> = head.trim_start_matches("== ").split(" | ").collect();
            let [name, expected] = words[..] else { panic!("{head}") };
            let mut detector = Detector::new(FormatArg::Auto, None, Arc::default());
            let (mut parser, mut read) = (None::<Parser>, Vec::new());
            let mut input = Lines::new(Box::new(lines.trim_end().as_bytes()));
            while let Some(line) = input.next().expect("in memory") {
                let bytes = line.bytes.expect("not too long");
                // Of another stream.
                if bytes.ends_with(b"a part") {
                    continue;
                }
                if parser.is_none() {
                    let Some((found, bad)) = detector.look(line).expect(head) else { continue };
                    assert!(bad.is_empty(), "{head}: {bad:?}");
                    if parser.insert(found).has_header() {
                        continue;
                    }
                }
                read.extend(parser.as_mut().expect("found").parse(bytes).expect(head));
            }
            assert_eq!(parser.expect(head).name(), name);
            let [entry] = &read[..] else { panic!("{head}: {read:?}") };
            let value = |name| entry.caller.identifier(name).unwrap_or("-");
            let took = entry.duration_us.map_or("-".to_owned(), |us| us.to_string());
            let told = [value("ip"), value("user"), value("method"), value("path"), value("host")];
            let at = crate::text::time(entry.at);
            assert_eq!(format!("{at} {} {took}", told.join(" ")), expected, "{head}");
            names.insert(name.to_owned());
        }
        // Each that has a name, but for the traces.
        assert!(names.len() >= 20, "{names:?}");
    }

    #[test]
    fn a_format_is_read_as_its_server_has_it() {
        let line = "192.0.2.7 - bob [17/May/2015:10:05:03 +0000] \"GET /t/acme?b HTTP/1.1\" 200 203 \"-\" \"curl/8\" acme 0.250";
        let path = regex::Regex::new("^/t/([^/]+)").expect("an expression");
        for (format, tenant) in [
            (
                "$remote_addr - $remote_user [$time_local] \"$request\" $status $body_bytes_sent \"$http_referer\" \
                 \"$http_user_agent\" $http_x_tenant $request_time",
                "$http_x_tenant",
            ),
            (
                "log_format main '$remote_addr - ${remote_user} [$time_local] \"$request\" '\n  '$status $_ \"$_\" \
                 \"$_\" $http_x_tenant $request_time';",
                "$http_x_tenant",
            ),
            (
                "%h %l %u %t \"%r\" %>s %b \"%{Referer}i\" \"%{User-Agent}i\" %{X-Tenant}o %{s}T",
                "%{X-Tenant}o",
            ),
            (
                "LogFormat \"%a %l %u %t \\\"%m %U %H\\\" %>s %b \\\"%{Referer}i\\\" \\\"%{User-Agent}i\\\" %{X-Tenant}i %T\" x",
                "%{X-Tenant}i",
            ),
            (
                "%h %l %u [%{%d/%b/%Y:%T %z}t] \"%r\" %>s %b \"%{Referer}i\" \"%{User-Agent}i\" %{X-Tenant}i %{s}T",
                "%{X-Tenant}i",
            ),
            (
                "%h %l %u [%{end:%d/%b/%Y}t:%{%T}t %{%z}t] \"%r\" %>s %b \"%{Referer}i\" \"%{User-Agent}i\" %{X-Tenant}i %T",
                "%{X-Tenant}i",
            ),
            ("combined $http_x_tenant $request_time", "$http_x_tenant"),
            ("combined %{X-Tenant}i %T", "%{X-Tenant}i"),
            ("%h %^ %e [%x] \"%r\" %s %b \"%R\" \"%u\" %C %T", "%C"),
            ("%h %^ %e [%d:%t %^] \"%r\" %s %b \"%R\" \"%u\" %C %T", "%C"),
        ] {
            let mut tenant = vec![("tenant".to_owned(), Source::Field(tenant.to_owned()))];
            tenant.push(("of_path".to_owned(), Source::InPath(path.clone())));
            let line_time = Some(LineTimeArg::End);
            let options = LogOptions { identifiers: tenant, line_time, ..LogOptions::default() };
            let own = OwnFormat::Text(LogFormat::parse(format).expect(format));
            let parser = Parser::own(&own, line.as_bytes(), &Arc::new(options));
            let mut parser = parser.unwrap_or_else(|error| panic!("{format}: {error}"));
            let entry = parser.parse(line.as_bytes()).expect(format).expect("a request");
            let names = ["ip", "user", "method", "tenant", "of_path"];
            let told = names.map(|name| entry.caller.identifier(name).unwrap_or("-"));
            assert_eq!(told, ["192.0.2.7", "bob", "GET", "acme", "acme"], "{format}");
            assert_eq!(entry.duration_us, Some(250_000), "{format}");
            assert_eq!(crate::text::time(entry.at), "2015-05-17T10:05:02.750000Z", "{format}");
            // It may end early, but not before its request.
            for end in [line.len() - 3, line.find(" 203").expect("a size")] {
                assert!(parser.parse(&line.as_bytes()[..end]).is_ok(), "{format}");
            }
            assert!(parser.parse(&line.as_bytes()[..40]).is_err(), "{format}");
            // Nor may it have more fields.
            for more in ["0.1", "0.1 \"x\"", "\"x\" 0.1"] {
                let is_read = parser.parse(format!("{line} {more}").as_bytes()).is_ok();
                assert_eq!(is_read, format.contains("$_"), "{format}");
            }
        }
    }

    #[test]
    fn a_time_in_a_form_of_its_own_and_a_query_in_a_field_of_its_own_are_read() {
        for (format, line, at) in [
            ("%h %{sec}t %m %U%q", "192.0.2.7 1431857103 GET /a?b", "03Z"),
            ("%h %{usec}t %m %U%q", "192.0.2.7 1431857103250000 GET /a?b", "03.250000Z"),
            (
                "%h %{sec}t.%{usec_frac}t %m %U%q",
                "192.0.2.7 1431857103.000250 GET /a",
                "03.000250Z",
            ),
            (
                "%h %{%F %T}t.%{msec_frac}t %m %U%q",
                "192.0.2.7 2015-05-17 10:05:03.250 GET /a?b",
                "03.250000Z",
            ),
            (
                "%h [%{%d/%m/%y %H.%M.%S %z}t] %m %U%q",
                "192.0.2.7 [17/05/15 12.05.03 +0200] GET /a",
                "03Z",
            ),
            ("%h %{%s}t %m %U", "192.0.2.7 1431857103 GET /a", "03Z"),
            (
                "$remote_addr $time_iso8601 $request_method $uri$is_args$args",
                "192.0.2.7 2015-05-17T10:05:03+00:00 GET /a?b",
                "03Z",
            ),
            (
                "$remote_addr $time_iso8601 $request_method \"${uri}${is_args}${query_string}\"",
                "192.0.2.7 2015-05-17T10:05:03+00:00 GET \"/a?b=\"",
                "03Z",
            ),
        ] {
            let own = OwnFormat::Text(LogFormat::parse(format).expect(format));
            let options = Arc::new(LogOptions::default());
            let parser = Parser::own(&own, line.as_bytes(), &options);
            let mut parser = parser.unwrap_or_else(|error| panic!("{format}: {error}"));
            let entry = parser.parse(line.as_bytes()).expect(format).expect("a request");
            assert_eq!(crate::text::time(entry.at), format!("2015-05-17T10:05:{at}"), "{format}");
            assert_eq!(entry.caller.identifier("path"), Some("/a"), "{format}");
            let wrong = line.replace(['5', '0'], "x");
            assert!(parser.parse(wrong.as_bytes()).is_err(), "{format}");
        }
    }

    #[test]
    fn what_the_lines_of_an_access_log_leave_open_is_told_with_the_option() {
        let line =
            "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 5 \"-\" \"curl/8\"";
        let forwarded = ["--identifier ip=forwarded"];
        let two = ["--log-format"];
        for (end, due) in [
            ("", &[][..]),
            (" \"-\"", &[]),
            (" \"203.0.113.9\"", &forwarded),
            (" \"203.0.113.9, 2001:db8::1\"", &forwarded),
            (" \"unknown, 203.0.113.9\"", &forwarded),
            (" \"203.0.113.9, unknown\"", &[]),
            (" \"text/html\"", &[]),
            (" 0.250", &[]),
            (" 415 0.250", &[]),
            (" 0.250 0.248", &two),
            (" \"203.0.113.9\" 0.250 0.248", &["--identifier ip=forwarded", "--log-format"]),
        ] {
            let line = format!("{line}{end}");
            let options = Arc::new(LogOptions::default());
            let found = Parser::find(FormatArg::Auto, line.as_bytes(), &options);
            let mut parser = found.expect("no option").expect("an access log");
            assert!(parser.parse(line.as_bytes()).is_ok_and(|entry| entry.is_some()), "{line}");
            let hints = parser.hints();
            assert_eq!(hints.len(), due.len(), "{line}: {hints:?}");
            assert!(hints.iter().zip(due).all(|(hint, due)| hint.contains(due)), "{hints:?}");
        }
        // The option answers it; a client that no proxy has forwarded is the first field.
        let asked = ("ip".to_owned(), Source::Field("forwarded".to_owned()));
        let options = LogOptions { identifiers: vec![asked], ..LogOptions::default() };
        for (end, client, is_told) in [
            ("203.0.113.9, 10.0.0.1", "203.0.113.9", false),
            ("unknown, 203.0.113.9", "203.0.113.9", false),
            ("203.0.113.8, _hidden, 203.0.113.9, 10.0.0.1", "203.0.113.9", false),
            ("203.0.113.9, unknown", "192.0.2.7", true),
            ("-", "192.0.2.7", true),
        ] {
            let line = format!("{line} \"{end}\"");
            let found = Parser::find(FormatArg::Auto, line.as_bytes(), &Arc::new(options.clone()));
            let mut parser = found.expect("such a field").expect("an access log");
            let entry = parser.parse(line.as_bytes()).expect("right").expect("a request");
            assert_eq!(entry.caller.identifier("ip"), Some(client), "{end}");
            assert_eq!(entry.caller.bare.as_deref(), Some(client), "{end}");
            let hints = parser.hints();
            assert_eq!(hints.len(), usize::from(is_told), "{end}: {hints:?}");
            assert!(
                hints.iter().all(|hint| hint.starts_with("1 line tells no client")),
                "{hints:?}"
            );
        }
    }

    #[test]
    fn what_is_wrong_with_a_format_is_told() {
        for (format, says) in [
            ("$status", "does not name the client"),
            ("%h %r", "does not name the time"),
            ("$remote_addr$time_local", "nothing stands between $remote_addr and $time_local"),
            ("$remote_addr $ [$time_local]", "no name follows the $"),
            ("%h %t %", "a % stands at its end"),
            ("%h [%d:%t %^] %", "a % stands at its end"),
            ("%h [%d:%t+%^]", "a sign stands before the %^"),
            ("%{c}a %t", "does not name the client"),
        ] {
            let error = LogFormat::parse(format).expect_err(format);
            assert!(error.contains(says), "{format}: {error}");
        }
        for (fields, says) in [
            ("ip", "is no field such as"),
            ("ip=", "is no field such as"),
            ("ip=a", "names no time"),
            ("time=a", "names no client"),
            ("ip=a,time=b,duration=c:h", "\"h\" is no unit"),
            ("ip=a,time=b,tenant=c", "add --identifier tenant=c"),
        ] {
            let error = JsonFields::parse(fields).expect_err(fields);
            assert!(error.contains(says), "{fields}: {error}");
        }
        let options = LogOptions {
            identifiers: vec![("x".to_owned(), Source::Field("$http_x".to_owned()))],
            ..LogOptions::default()
        };
        let own = OwnFormat::Text(LogFormat::parse("$remote_addr [$time_local]").expect("right"));
        let error = Parser::own(&own, b"", &Arc::new(options)).err().expect("no such field");
        assert_eq!(error, "the format has no field \"$http_x\"; it has $remote_addr, $time_local");
    }

    proptest! {
        #[test]
        fn no_bytes_panic_a_parser(lines in prop::collection::vec(bytes(), 1..4)) {
            let options = Arc::new(LogOptions::default());
            for format in [FormatArg::Combined, FormatArg::Jsonl] {
                let mut parser = Parser::to_explain(format, &options).expect("no header");
                for line in &lines {
                    let _ = parser.parse(line);
                }
            }
            for format in [FormatArg::Auto, FormatArg::Csv] {
                let mut detector = Detector::new(format, None, Arc::clone(&options));
                for (number, line) in (1..).zip(&lines) {
                    let _ = detector.look(Line { number, bytes: Some(line) });
                }
                let _ = detector.give_up(false);
            }
            let mut csv = csv::Csv::under(b"at_us,key,cost,op").unwrap().expect("a header");
            for line in &lines {
                let _ = csv.parse(line);
            }
        }
    }
}
