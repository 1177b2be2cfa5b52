//! [`Parser`]: reads the lines of one format, and [`FormatArg`], the formats that are known by
//! name.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::LazyLock;

use regex::bytes::Regex;

use super::access_log::AccessLog;
use super::csv::{self, Csv};
use super::entry::{BadLine, InputEntry, KeptTexts, kept_line};
use super::envelope::Envelope;
use super::found::{LineTimeArg, LogOptions, UnitArg};
use super::json_log::{JsonFields, JsonLog};
use super::jsonl;
use super::log_format::{FormattedLog, LogFormat};
use super::moment::Moments;
use super::w3c::{self, W3c};
use crate::address::address;
use crate::named::{Named as _, named};
use crate::text::plural;
use How::{Json, Text};

named! {
    /// A format, as the command line names it.
    pub enum FormatArg {
        /// Decided by the first line of a known format.
        "auto" => Auto,
        /// An access log in Common or Combined format, with or without a virtual host in front.
        "combined" => Combined,
        /// The ingress controller of nginx in Kubernetes.
        "ingress" => Ingress,
        /// Traefik, as text.
        "traefik" => Traefik,
        /// Traefik, as JSON.
        "traefik-json" => TraefikJson,
        /// Caddy.
        "caddy" => Caddy,
        /// Envoy's and Istio's default text.
        "envoy" => Envoy,
        /// Envoy, as JSON with the fields of Istio.
        "envoy-json" => EnvoyJson,
        /// HAProxy, HTTP.
        "haproxy" => Haproxy,
        /// Application load balancers of AWS.
        "alb" => Alb,
        /// Classic load balancers of AWS.
        "elb" => Elb,
        /// Server access logs of Amazon S3.
        "s3" => S3,
        /// Fields named by `#Fields:`, as of IIS and CloudFront.
        "w3c" => W3c,
        /// Squid's native format.
        "squid" => Squid,
        /// uWSGI's default.
        "uwsgi" => Uwsgi,
        /// HTTP requests of Cloudflare Logpush.
        "cloudflare" => Cloudflare,
        /// HTTP load balancers of Google Cloud.
        "gcp" => Gcp,
        /// A trace, one JSON object per line.
        "jsonl" => Jsonl,
        /// A trace as CSV with a header.
        "csv" => Csv,
    }
}

/// How the lines of a named format differ from others, and how they are read.
enum How {
    Text(&'static str),
    Json(&'static str),
}

/// The formats that have a description; of those that a line fits, the first is its format. In
/// strings as nginx has them, what begins with `$_` is left out.
const DESCRIBED: [(FormatArg, LineTimeArg, How); 17] = {
    use FormatArg as F;
    use LineTimeArg::{Arrival, End};
    [
        (
            F::Ingress,
            End,
            Text(
                "$remote_addr - $remote_user [$time_local] \"$request\" $status $_bytes \"$http_referer\" \
                 \"$http_user_agent\" $_bytes $request_time [$proxy_upstream_name] [$_] $upstream_addr $_ \
                 $_ $_ $req_id",
            ),
        ),
        (
            F::Traefik,
            Arrival,
            Text(
                "$remote_addr - $remote_user [$time_local] \"$request\" $status $_bytes \"$http_referer\" \
                 \"$http_user_agent\" $_number \"$router\" \"$server\" ${duration_ms}ms",
            ),
        ),
        (
            F::Envoy,
            Arrival,
            Text(
                "[$time_iso8601] \"$request\" $status $response_flags $_bytes $_bytes $duration_ms $_number \"$remote_addr\" \
                 \"$http_user_agent\" \"$request_id\" \"$host\" \"$upstream_host\"",
            ),
        ),
        // Istio's has more fields.
        (
            F::Envoy,
            Arrival,
            Text(
                "[$time_iso8601] \"$request\" $status $response_flags $_word $_word \"$_\" $_bytes $_bytes $duration_ms $_number \
                 \"$remote_addr\" \"$http_user_agent\" \"$request_id\" \"$host\" \"$upstream_host\" $_word $_word $_word \
                 $proxy_add_x_forwarded_for $_word $route",
            ),
        ),
        (
            F::Haproxy,
            Arrival,
            Text(
                "$remote_addr:$remote_port [$time_local] $frontend $backend/$server $_number/$_number/$_number/$_number/$duration_ms \
                 $status $_bytes $_word $_word $termination_state $_number/$_number/$_number/$_number/$_number \
                 $_number/$_number \"$request\"",
            ),
        ),
        // With captured headers.
        (
            F::Haproxy,
            Arrival,
            Text(
                "$remote_addr:$remote_port [$time_local] $frontend $backend/$server $_number/$_number/$_number/$_number/$duration_ms \
                 $status $_bytes $_word $_word $termination_state $_number/$_number/$_number/$_number/$_number \
                 $_number/$_number {$captured_headers} \"$request\"",
            ),
        ),
        (
            F::Alb,
            End,
            Text(
                "$type $time_iso8601 $elb $remote_addr $target $request_time $request_time $request_time $status $_status \
                 $_bytes $_bytes \"$request\" \"$http_user_agent\" $_word $ssl_protocol $target_group $_",
            ),
        ),
        (
            F::Elb,
            Arrival,
            Text(
                "$time_iso8601 $elb $remote_addr $target $request_time $request_time $request_time $status $_status $_bytes $_bytes \
                 \"$request\" \"$http_user_agent\" $_word $ssl_protocol",
            ),
        ),
        (
            F::S3,
            Arrival,
            Text(
                "$owner $bucket [$time_local] $remote_addr $remote_user $request_id $operation $key \"$request\" \
                 $status $_word $_bytes $_bytes $duration_ms $_number \"$http_referer\" \"$http_user_agent\" $_",
            ),
        ),
        (
            F::Squid,
            End,
            Text(
                "$msec $duration_ms $remote_addr $result/$status $_bytes $request_method $request_uri \
                 $remote_user $hierarchy $_",
            ),
        ),
        (
            F::Uwsgi,
            Arrival,
            Text(
                "[pid: $_] $remote_addr ($remote_user) {$_} [$time_local] $request_method $request_uri => \
                 generated $_bytes bytes in $duration_ms msecs $_(HTTP/$_ $status) $_",
            ),
        ),
        (
            F::Uwsgi,
            Arrival,
            Text(
                "[pid: $_] $remote_addr ($remote_user) {$_} [$time_local] $request_method $request_uri => \
                 generated $_bytes bytes in $duration_us micros $_(HTTP/$_ $status) $_",
            ),
        ),
        (
            F::Caddy,
            End,
            Json(
                "ip=request.client_ip|request.remote_ip|request.remote_addr,time=ts,user=user_id,\
                 method=request.method,path=request.uri,host=request.host,\
                 agent=request.headers.User-Agent,duration=duration",
            ),
        ),
        (
            F::TraefikJson,
            Arrival,
            Json(
                "ip=ClientHost,time=StartUTC|time,user=ClientUsername,method=RequestMethod,path=RequestPath,\
                 host=RequestHost,agent=request_User-Agent,duration=Duration:ns",
            ),
        ),
        (
            F::Cloudflare,
            Arrival,
            Json(
                "ip=ClientIP,time=EdgeStartTimestamp,method=ClientRequestMethod,\
                 path=ClientRequestURI|ClientRequestPath,host=ClientRequestHost,agent=ClientRequestUserAgent",
            ),
        ),
        (
            F::Gcp,
            Arrival,
            Json(
                "ip=httpRequest.remoteIp,time=timestamp,method=httpRequest.requestMethod,\
                 path=httpRequest.requestUrl,agent=httpRequest.userAgent,duration=httpRequest.latency",
            ),
        ),
        (
            F::EnvoyJson,
            Arrival,
            Json(
                "ip=x_forwarded_for|downstream_remote_address,time=start_time,method=method,path=path,\
                 host=authority,agent=user_agent,duration=duration:ms",
            ),
        ),
    ]
};

/// The same, ready to read; of a text, with the expression of a whole line. A test reads each.
static KNOWN: LazyLock<Vec<(FormatArg, OwnFormat, Option<Regex>)>> = LazyLock::new(|| {
    let known = |(format, line_time, how): &(FormatArg, LineTimeArg, How)| {
        Some(match how {
            Text(text) => {
                let own = LogFormat::parse(text).ok()?.of_server(*line_time);
                let own = own.with_bare_quotes(*format == FormatArg::Envoy);
                let whole = own.whole_line()?;
                (*format, OwnFormat::Text(own), Some(whole))
            }
            Json(fields) => {
                let mut own = JsonFields::parse(fields).ok()?.at(*line_time);
                if *format == FormatArg::Caddy {
                    // A request may have lines of errors and of proxies, too.
                    own = own.only("logger", "http.log.access");
                }
                (*format, OwnFormat::Json(own), None)
            }
        })
    };
    DESCRIBED.iter().filter_map(known).collect()
});

/// The parser of one format's lines.
pub(crate) struct Parser {
    reader: Reader,
    /// What ships the lines, if something does.
    envelope: Option<Envelope>,
    format: FormatArg,
    moments: Moments,
    texts: KeptTexts,
    options: Arc<LogOptions>,
}

pub(super) enum Reader {
    AccessLog(AccessLog),
    Formatted(FormattedLog),
    Json(JsonLog),
    W3c(W3c),
    Jsonl,
    Csv(Csv),
}

/// A format that the user describes.
#[derive(Clone, Debug)]
pub enum OwnFormat {
    /// Lines of text.
    Text(LogFormat),
    /// A JSON object per line.
    Json(JsonFields),
}

/// Whether a client is an address, or the network of one.
fn is_counted(client: &str) -> bool {
    client.split('/').next().and_then(address).is_some()
}

impl OwnFormat {
    fn reader(&self, options: &LogOptions) -> Result<Reader, BadLine> {
        Ok(match self {
            Self::Text(format) => Reader::Formatted(format.reader(options)?),
            Self::Json(fields) => Reader::Json(fields.reader(options)),
        })
    }
}

impl Parser {
    pub(super) fn new(
        reader: Reader,
        format: FormatArg,
        envelope: Option<Envelope>,
        options: &Arc<LogOptions>,
    ) -> Self {
        let options = Arc::clone(options);
        let (moments, texts) = (Moments::default(), KeptTexts::default());
        Self { reader, envelope, format, moments, texts, options }
    }

    /// The parser of a format that the user describes, whose lines are shipped like this one.
    pub(super) fn own(
        format: &OwnFormat,
        line: &[u8],
        options: &Arc<LogOptions>,
    ) -> Result<Self, BadLine> {
        let parser =
            |envelope| Ok(Self::new(format.reader(options)?, FormatArg::Auto, envelope, options));
        let envelope = Envelope::find(line);
        // The moment in front may be that of the format.
        if envelope == Some(Envelope::Timestamp) {
            let mut plain = parser(None)?;
            if let Ok(Some(entry)) = plain.parse(line)
                && entry.caller.identifier("ip").is_none_or(is_counted)
            {
                return Ok(plain);
            }
        }
        parser(envelope)
    }

    /// The parser of the format of a line, among those asked for: the first in which it is a
    /// request. `None` if there is none.
    pub(super) fn find(
        asked: FormatArg,
        line: &[u8],
        options: &Arc<LogOptions>,
    ) -> Result<Option<Self>, BadLine> {
        let envelope = Envelope::find(line);
        if envelope == Some(Envelope::Timestamp)
            && let Some(found) = Self::find_in(asked, line, None, options)?
        {
            return Ok(Some(found));
        }
        Self::find_in(asked, line, envelope, options)
    }

    fn find_in(
        asked: FormatArg,
        line: &[u8],
        envelope: Option<Envelope>,
        options: &Arc<LogOptions>,
    ) -> Result<Option<Self>, BadLine> {
        let opened = envelope.and_then(|envelope| envelope.open(line));
        let inner = opened.unwrap_or(Cow::Borrowed(line));
        let is_asked = |format: FormatArg| asked == FormatArg::Auto || asked == format;
        // Whether a line is in a format depends neither on the identifiers that the user wants nor
        // on the unit of its durations, which are not too long in the least one.
        let (identifiers, unit) = (Vec::new(), Some(UnitArg::Ns));
        let plain = Arc::new(LogOptions { unit, identifiers, ..(**options).clone() });
        let found = |format, reader: &dyn Fn(&LogOptions) -> Result<Reader, BadLine>| {
            let mut parser = Self::new(reader(&plain)?, format, envelope, &plain);
            if !matches!(parser.parse(line), Ok(Some(_))) {
                return Ok(None);
            }
            Ok(Some(Self::new(reader(options)?, format, envelope, options)))
        };
        let is_json = inner.starts_with(b"{");
        for (format, own, whole) in &*KNOWN {
            let may_be = match (own, whole) {
                // Another format may have the same beginning.
                (OwnFormat::Text(_), Some(whole)) => whole.is_match(&inner),
                (OwnFormat::Text(_), None) => false,
                (OwnFormat::Json(_), _) => is_json,
            };
            if is_asked(*format)
                && may_be
                && let Some(found) = found(*format, &|options| own.reader(options))?
            {
                return Ok(Some(found));
            }
        }
        if is_asked(FormatArg::W3c)
            && let Some(reader) = W3c::under(&inner, options)?
        {
            return Ok(Some(Self::new(Reader::W3c(reader), FormatArg::W3c, envelope, options)));
        }
        if !is_asked(FormatArg::Combined) {
            return Ok(None);
        }
        found(FormatArg::Combined, &|options| AccessLog::new(options).map(Reader::AccessLog))
    }

    /// The parser that names the faults of lines in a format; `None` if the format has none without
    /// a header.
    pub(super) fn to_explain(format: FormatArg, options: &Arc<LogOptions>) -> Option<Self> {
        let reader = match format {
            FormatArg::Jsonl => Reader::Jsonl,
            FormatArg::Auto | FormatArg::Combined => {
                Reader::AccessLog(AccessLog::new(&LogOptions::default()).ok()?)
            }
            _ => return None,
        };
        Some(Self::new(reader, format, None, options))
    }

    /// Parses a line. `None` if it is a directive, and no request.
    pub(crate) fn parse(&mut self, line: &[u8]) -> Result<Option<InputEntry>, BadLine> {
        let mut entry = self.entry(line)?;
        if let Some(entry) = entry.as_mut().filter(|_| self.options.keeps_lines) {
            entry.line = Some(self.texts.keep(kept_line(line)));
        }
        Ok(entry)
    }

    fn entry(&mut self, line: &[u8]) -> Result<Option<InputEntry>, BadLine> {
        let opened = self.envelope.and_then(|envelope| envelope.open(line));
        let inner = opened.as_deref().unwrap_or(line);
        let (mut found, line_time) = match &mut self.reader {
            Reader::Jsonl => return jsonl::parse(inner).map(Some),
            Reader::Csv(csv) => return csv.parse(inner).map(Some),
            Reader::W3c(log) if w3c::is_directive(inner) => {
                return log.directive(inner).map(|()| None);
            }
            Reader::W3c(log) => (log.find(inner)?, LineTimeArg::End),
            Reader::Json(log) => match log.find(inner)? {
                Some(found) => {
                    if self.format != FormatArg::Auto {
                        found.check_client(false)?;
                    }
                    let is_caddy = self.format == FormatArg::Caddy;
                    if is_caddy && self.options.unit.is_none() && found.is_in_whole_seconds {
                        return Err("the duration is a whole number, and Caddy writes seconds with decimals unless it is told \
                                    otherwise; tell the unit by --duration-unit ms or ns".to_owned());
                    }
                    (found, log.line_time())
                }
                None => return Ok(None),
            },
            Reader::Formatted(log) => {
                let mut found = log.find(inner)?;
                // Each word fits somewhere; an address stands in its own place.
                let is_own = self.format == FormatArg::Auto;
                found.check_client(is_own)?;
                if !is_own {
                    found.check_user()?;
                }
                if self.format == FormatArg::Haproxy {
                    found.decode_request();
                }
                (found, log.line_time)
            }
            Reader::AccessLog(log) => {
                let found = log.find(inner, &self.options)?;
                // nginx writes seconds with decimals, when the request has ended.
                let is_nginx = found.has_decimals;
                (found, if is_nginx { LineTimeArg::End } else { LineTimeArg::Arrival })
            }
        };
        let agent = found.agent.take().filter(|_| self.options.keeps_lines);
        let is_too_long = found.too_long.is_some();
        let entry = found.entry(&mut self.moments, &self.options, line_time);
        let mut entry = entry.map_err(|bad| {
            if is_too_long { format!("{bad}; {}", self.another_unit()) } else { bad }
        })?;
        entry.agent = agent.map(|agent| self.texts.keep(agent.as_bytes()));
        Ok(Some(entry))
    }

    /// What to do where the unit of durations is not the one that the format has.
    const fn another_unit(&self) -> &'static str {
        match (&self.reader, self.format) {
            (Reader::AccessLog(_) | Reader::W3c(_), _)
            | (Reader::Json(_), FormatArg::Auto | FormatArg::Caddy) => {
                "if it has another unit, tell it by --duration-unit"
            }
            (Reader::Formatted(_), FormatArg::Auto) => {
                "name the field that is the duration, such as $request_time, in seconds, or %D, in microseconds"
            }
            _ => "if the log is in another format, tell it by --log-format or --fields",
        }
    }

    /// Heeds a directive that stands above its lines.
    pub(super) fn directive(&mut self, line: &[u8]) -> Result<(), BadLine> {
        match &mut self.reader {
            Reader::W3c(log) => log.directive(line),
            _ => Ok(()),
        }
    }

    /// What its lines leave open, and the option that tells it.
    pub(crate) fn hints(&self) -> Vec<String> {
        let Reader::AccessLog(log) = &self.reader else { return Vec::new() };
        let names_client = self.options.identifiers.iter().any(|(name, _)| name == "ip");
        let forwarded = (log.has_forwarded && !names_client).then_some(
            "addresses stand in quotes behind the agent, as $http_x_forwarded_for writes them, and the client is the first \
             field; if that is a proxy, count by the client with --identifier ip=forwarded",
        );
        let unforwarded = (log.unforwarded > 0).then(|| {
            let lines = plural(log.unforwarded, "line tells", "lines tell");
            format!("{lines} no client in the forwarded addresses (such as - or unknown), and the first field counts there")
        });
        let list = if log.has_forwarded { " \"$http_x_forwarded_for\"" } else { "" };
        let two = log.has_two_durations.then(|| {
            format!(
                "the lines end with two numbers that may be durations, and the last one counts as how long the request took; \
                 if it is the other, write --log-format 'combined{list} $request_time $upstream_response_time'"
            )
        });
        forwarded.map(str::to_owned).into_iter().chain(unforwarded).chain(two).collect()
    }

    /// Why a line above the first request is none.
    pub(super) fn explain(&mut self, line: &[u8]) -> Option<BadLine> {
        match &self.reader {
            Reader::Csv(_) => Some(csv::no_header(line)),
            Reader::W3c(_) => Some("comes before a line that begins with #Fields:".to_owned()),
            _ => self.parse(line).err(),
        }
    }

    /// Whether its lines are requests to a server, and not a trace.
    pub(crate) const fn is_log(&self) -> bool {
        !matches!(self.reader, Reader::Jsonl | Reader::Csv(_))
    }

    /// Whether a number at the end of the lines may be a duration, and has no unit.
    pub(crate) const fn lacks_unit(&self) -> bool {
        matches!(&self.reader, Reader::AccessLog(log) if log.lacks_unit)
    }

    /// Whether the line that told the format is a header, and no request.
    pub(crate) const fn has_header(&self) -> bool {
        matches!(self.reader, Reader::W3c(_) | Reader::Csv(_))
    }

    /// The format's name, for the summary.
    pub(crate) fn name(&self) -> String {
        let name = match (&self.reader, self.format) {
            (Reader::Jsonl, _) => "JSONL trace",
            (Reader::Csv(_), _) => "CSV trace",
            (Reader::AccessLog(log), _) if log.has_hosts => "access log with virtual hosts",
            (Reader::AccessLog(log), _) if log.has_lists => {
                "access log, the first of several addresses"
            }
            (Reader::AccessLog(_), _) => "access log",
            (_, FormatArg::Auto) => "log in its own format",
            (_, format) => return self.shipped(&format!("{} log", format.name())),
        };
        self.shipped(name)
    }

    fn shipped(&self, name: &str) -> String {
        let by = self.envelope.map_or(String::new(), |envelope| format!(" in {}", envelope.name()));
        format!("{name}{by}")
    }
}
