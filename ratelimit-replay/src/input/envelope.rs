//! [`Envelope`]: what a system that ships logs writes around each line of a server.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::bytes::Regex;
use serde::Deserialize;

/// What stands around the line of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Envelope {
    /// Docker's driver `json-file`: `{"log":"…\n","stream":"stdout","time":"…"}`.
    DockerJson,
    /// Journald's JSON: `{"MESSAGE":"…", …}`.
    JournalJson,
    /// Kubernetes' container runtime interface: `2016-10-06T00:17:09.66Z stdout F …`.
    Cri,
    /// Syslog as RFC 5424 has it: `<134>1 2015-05-17T10:05:03Z web1 nginx 7 - - …`.
    Syslog5424,
    /// Syslog as RFC 3164 has it, and journald: `May 17 10:05:03 web1 nginx[7]: …`.
    Syslog,
    /// Docker compose: `web-1  | …`.
    Compose,
    /// A moment, as of `docker logs -t` and `kubectl logs --timestamps`.
    Timestamp,
}

const ALL: [Envelope; 7] = [
    Envelope::DockerJson,
    Envelope::JournalJson,
    Envelope::Cri,
    Envelope::Syslog5424,
    Envelope::Syslog,
    Envelope::Compose,
    Envelope::Timestamp,
];

/// The line in an object.
#[derive(Deserialize)]
struct Shipped<'l> {
    #[serde(borrow)]
    log: Option<Cow<'l, str>>,
    #[serde(borrow, rename = "MESSAGE")]
    message: Option<Message<'l>>,
}

/// A message of journald's, which is an array of bytes if it has others than printable ones.
#[derive(Deserialize)]
#[serde(untagged)]
enum Message<'l> {
    Text(#[serde(borrow)] Cow<'l, str>),
    Bytes(Vec<u8>),
}

impl Envelope {
    /// The envelope of a line, if it has one.
    pub(super) fn find(line: &[u8]) -> Option<Self> {
        ALL.into_iter().find(|envelope| envelope.open(line).is_some())
    }

    /// What stands within. `None` if the line has no such envelope.
    pub(super) fn open(self, line: &[u8]) -> Option<Cow<'_, [u8]>> {
        let prefix = match self {
            Self::DockerJson | Self::JournalJson => {
                if !line.starts_with(b"{") {
                    return None;
                }
                let shipped: Shipped<'_> = serde_json::from_slice(line).ok()?;
                let is_docker = self == Self::DockerJson;
                let inner =
                    if is_docker { shipped.log.map(Message::Text) } else { shipped.message };
                return Some(match inner? {
                    Message::Text(Cow::Borrowed(text)) => Cow::Borrowed(text.trim_end().as_bytes()),
                    Message::Text(text) => Cow::Owned(text.trim_end().as_bytes().to_vec()),
                    Message::Bytes(bytes) => Cow::Owned(bytes.trim_ascii_end().to_vec()),
                });
            }
            Self::Cri => &CRI,
            Self::Syslog5424 => &SYSLOG_5424,
            Self::Syslog => &SYSLOG,
            Self::Compose => &COMPOSE,
            Self::Timestamp => &TIMESTAMP,
        };
        Some(Cow::Borrowed(&line[prefix.as_ref()?.find(line)?.end()..]))
    }

    /// Its name, for people.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::DockerJson => "Docker's json-file",
            Self::JournalJson => "journald's JSON",
            Self::Cri => "Kubernetes CRI",
            Self::Syslog5424 => "syslog (RFC 5424)",
            Self::Syslog => "syslog",
            Self::Compose => "docker compose",
            Self::Timestamp => "lines with a moment in front",
        }
    }
}

/// A prefix of lines; `None` cannot be, since a test reads each.
type Prefix = LazyLock<Option<Regex>>;

static CRI: Prefix =
    LazyLock::new(|| Regex::new(r"^\d{4}-\d\d-\d\dT\S+ (?:stdout|stderr) [FP] ").ok());
static SYSLOG_5424: Prefix = LazyLock::new(|| {
    let structured = r#"(?:-|(?:\[(?:[^\]"\\]|\\.|"(?:[^"\\]|\\.)*")*\])+)"#;
    let bom = r"(?:\xef\xbb\xbf)?";
    Regex::new(&format!(r"(?-u)^<\d{{1,3}}>1 \S+ \S+ \S+ \S+ \S+ {structured} {bom}")).ok()
});
static SYSLOG: Prefix = LazyLock::new(|| {
    let time = r"(?:[A-Z][a-z]{2} [ \d]\d (?:\d{4} )?\d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+)";
    // nginx may leave out its host.
    let no_host = r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d";
    let tag = r"[^\s:\[]+(?:\[\d*\])?: ";
    Regex::new(&format!(r"(?-u)^(?:<\d{{1,3}}>)?(?:{time} \S+|{no_host}) {tag}")).ok()
});
static COMPOSE: Prefix = LazyLock::new(|| Regex::new(r"(?-u)^[A-Za-z0-9][\w.-]* +\| ").ok());
static TIMESTAMP: Prefix = LazyLock::new(|| {
    let zone = r"(?:Z|[+-]\d\d:?\d\d)";
    Regex::new(&format!(r"(?-u)^\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?{zone} ")).ok()
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ships_a_line_is_told_by_what_stands_before_it() {
        let line = "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 5";
        let quoted = line.replace('"', "\\\"");
        for (envelope, before, after) in [
            (Envelope::DockerJson, "{\"log\":\"", "\\n\",\"stream\":\"stdout\",\"time\":\"x\"}"),
            (Envelope::JournalJson, "{\"_PID\":\"7\",\"MESSAGE\":\"", "\"}"),
            (Envelope::Cri, "2016-10-06T00:17:09.669794202Z stdout F ", ""),
            (Envelope::Cri, "2016-10-06T00:17:09.669794202+02:00 stderr P ", ""),
            (Envelope::Syslog, "Jul 18 11:07:07 web1 nginx[1]: ", ""),
            (Envelope::Syslog, "<134>Jul  8 11:07:07 web1 nginx: ", ""),
            (Envelope::Syslog, "<190>Jul  8 11:07:07 nginx: ", ""),
            (Envelope::Syslog, "2024-07-18T11:07:07.12+00:00 web1 docker/web[17]: ", ""),
            (Envelope::Syslog5424, "<134>1 2024-07-18T11:07:07Z web1 nginx 7 - - ", ""),
            (
                Envelope::Syslog5424,
                "<134>1 2024-07-18T11:07:07Z w n 7 id [a b=\"]\"][c d=\"e\"] ",
                "",
            ),
            (Envelope::Compose, "web-1  | ", ""),
            (Envelope::Timestamp, "2016-10-06T00:17:09.669794202Z ", ""),
        ] {
            let is_json = before.starts_with('{');
            let shipped = format!("{before}{}{after}", if is_json { &quoted } else { line });
            assert_eq!(Envelope::find(shipped.as_bytes()), Some(envelope), "{shipped}");
            let inner = envelope.open(shipped.as_bytes()).expect("an envelope");
            assert_eq!(inner, line.as_bytes(), "{shipped}");
        }
        let bytes = line.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(",");
        let shipped = format!("{{\"MESSAGE\":[{bytes},10],\"_PID\":\"7\"}}");
        assert_eq!(Envelope::find(shipped.as_bytes()), Some(Envelope::JournalJson));
        let inner = Envelope::JournalJson.open(shipped.as_bytes()).expect("an envelope");
        assert_eq!(inner, line.as_bytes());
        for bare in [line, "{\"at_us\": 5}", "a | b", "", "example.org | x"] {
            let is_compose = bare.contains(" | ");
            assert_eq!(Envelope::find(bare.as_bytes()).is_some(), is_compose, "{bare}");
        }
        assert!(ALL.iter().all(|envelope| !envelope.name().is_empty()));
    }
}
