//! [`FormatArgs`]: the options that say how a log is read, as the tool has them and as the
//! playground takes them in a field.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory as _, Parser};

use crate::input::{
    FormatArg, JsonFields, LineTimeArg, LogFormat, LogOptions, OwnFormat, Source, UnitArg,
};
use crate::named::Named;
use crate::replay::Format;

/// How an input is read.
#[derive(Debug, Args)]
pub struct FormatArgs {
    /// The format of the input.
    #[arg(long, value_parser = named::<FormatArg>(), default_value = "auto")]
    format: FormatArg,

    /// The format of a log's lines, as the configuration of its server has it.
    ///
    /// As nginx writes it (`$remote_addr - $remote_user [$time_local] "$request" $status`), Apache
    /// (`%h %l %u %t "%r" %>s`) or goaccess (`%h %^[%d:%t %^] "%r" %s`). At its beginning,
    /// `combined` stands for the format of that name: `combined $request_time`.
    #[arg(long, value_name = "STRING", conflicts_with = "format", value_parser = LogFormat::parse)]
    log_format: Option<LogFormat>,

    /// Where the fields of a log are whose lines are JSON objects, such as
    /// `ip=request.client_ip,time=ts,duration=took:ms`.
    ///
    /// The fields are ip, forwarded (a list of addresses), user, time, request, method, path, host,
    /// agent and duration (`:s`, `:ms`, `:us` or `:ns`). `a|b` is the first of two that is there.
    #[arg(long, value_name = "LIST", conflicts_with_all = ["format", "log_format"], value_parser = JsonFields::parse)]
    fields: Option<JsonFields>,

    /// A further identifier of a log's requests, and where it stands: `tenant=$http_x_tenant`. May
    /// be repeated.
    ///
    /// A field by its name in the format (`$http_x_tenant`, `%{X-Tenant}i`, a path in JSON, a
    /// column of W3C; of an access log ip, user, time, request, status, size, referrer, agent,
    /// host, or forwarded, the addresses in quotes behind the agent), or `path~EXPRESSION`, whose
    /// first group is the identifier: `tenant=path~^/t/([^/]+)`. Of a list of addresses, the client
    /// is the first, or the first behind the last member that is no address.
    #[arg(long = "identifier", value_name = "NAME=FIELD", value_parser = identifier)]
    identifiers: Vec<(String, Source)>,

    /// The length of the network that an IPv6 address of a log is counted by, as in the HTTP layer.
    ///
    /// The keys of a trace stay as they are.
    #[arg(long, value_name = "BITS", default_value_t = 64, value_parser = clap::value_parser!(u8).range(1..=128))]
    ipv6_prefix: u8,

    /// What the time of a log's line is.
    ///
    /// Without, it is what the server of a named format writes; of an access log the end if its
    /// durations have decimals, as nginx writes them, and otherwise the arrival.
    #[arg(long, value_parser = named::<LineTimeArg>(), value_name = "TIME")]
    line_time: Option<LineTimeArg>,

    /// Accept a log of which many lines come more than five minutes late, and decide these late.
    #[arg(long)]
    unsorted: bool,

    /// The unit of the number at the end of an access log's lines, which is the duration of the
    /// request; or of the duration in Caddy's log, in W3C's or in `--fields`, if they tell none.
    ///
    /// Seconds with decimals, as `$request_time` of nginx and Caddy write them, need no unit.
    /// Concurrency limits are left out where the input has no durations.
    #[arg(long, value_parser = named::<UnitArg>(), value_name = "UNIT")]
    duration_unit: Option<UnitArg>,
}

impl FormatArgs {
    /// How the lines of the inputs are read.
    pub fn read(&self) -> Result<Format, String> {
        for (place, (name, _)) in self.identifiers.iter().enumerate() {
            if self.identifiers[..place].iter().any(|(known, _)| known == name) {
                return Err(format!("--identifier names {} twice", crate::text::quote(name, 40)));
            }
        }
        let text = self.log_format.clone().map(OwnFormat::Text);
        Ok(Format {
            named: self.format,
            own: text.or_else(|| self.fields.clone().map(OwnFormat::Json)),
            options: LogOptions {
                unit: self.duration_unit,
                line_time: self.line_time,
                ipv6_prefix: self.ipv6_prefix,
                identifiers: self.identifiers.clone(),
                ..LogOptions::default()
            },
            unsorted: self.unsorted,
        })
    }
}

/// The same options alone.
#[derive(Debug, Parser)]
#[command(
    no_binary_name = true,
    disable_help_flag = true,
    override_usage = "[--log-format <STRING> | --fields <LIST>] [--identifier <NAME=FIELD>]…",
    help_template = "{options}",
    max_term_width = 100
)]
struct Line {
    #[command(flatten)]
    format: FormatArgs,
}

/// The format that a line of options tells, in words as a shell has them: quotes hold words
/// together.
pub fn parse(line: &str) -> Result<Format, String> {
    let words = shlex::split(line).ok_or("a quote has no end; write another, or \\ before it")?;
    let line = Line::try_parse_from(words).map_err(|error| {
        let told = error.to_string();
        // The usage behind it is of a program, and a field has none.
        let told = told.split("\n\nUsage").next().unwrap_or_default();
        told.strip_prefix("error: ").unwrap_or(told).trim_end().replace("\n\n", "\n")
    })?;
    line.format.read()
}

/// What each of the options is for.
pub fn help() -> String {
    Line::command().render_long_help().to_string().trim_end().to_owned()
}

/// One of the values that have names.
fn named<T: Named + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let known = |value: &T| PossibleValue::new(value.name()).help(value.about());
    let names = PossibleValuesParser::new(T::ALL.iter().map(known));
    names.try_map(|name| T::ALL.iter().copied().find(|value| value.name() == name).ok_or("unknown"))
}

/// The name of an identifier, and where it stands.
fn identifier(text: &str) -> Result<(String, Source), String> {
    let (name, source) = text
        .split_once('=')
        .filter(|(name, source)| !name.is_empty() && !source.is_empty())
        .ok_or("it is no NAME=FIELD, such as tenant=$http_x_tenant")?;
    let source = match source.strip_prefix("path~") {
        Some(expression) => {
            let expression = regex::Regex::new(expression).map_err(|error| error.to_string())?;
            if expression.captures_len() < 2 {
                return Err(
                    "its expression has no group (…), which would be the identifier".to_owned()
                );
            }
            Source::InPath(expression)
        }
        None => Source::Field(source.to_owned()),
    };
    Ok((name.to_owned(), source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_options_is_read_as_a_shell_reads_it() {
        let format = parse(
            "--log-format '$remote_addr [$time_local] \"$request\"'\n --identifier tenant=path~'^/(t[0-9])' --unsorted",
        );
        let format = format.expect("options");
        assert!(matches!(format.own, Some(OwnFormat::Text(_))), "{format:?}");
        assert_eq!((format.options.identifiers.len(), format.unsorted), (1, true));
        assert_eq!(parse("  ").map(|format| format.named), Ok(FormatArg::Auto));
        for (line, says) in [
            ("--fields 'ip=a", "a quote has no end"),
            ("--fields ip=a", "'--fields <LIST>': it names no time, such as time=ts"),
            ("--fields ip=a,time=t --format csv", "cannot be used with"),
            ("--identifier tenant=path~^/t", "its expression has no group"),
            ("--identifier a=b --identifier a=c", "--identifier names \"a\" twice"),
            ("--format ngnix", "invalid value 'ngnix' for '--format <FORMAT>'"),
            ("--ipv6-prefix 129", "129 is not in 1..=128"),
            ("access.log", "unexpected argument 'access.log' found"),
            ("--help", "unexpected argument '--help' found"),
        ] {
            let told = parse(line).expect_err(line);
            assert!(told.contains(says), "{line}: {told}");
            for extra in ["Usage", "For more", "\n\n"] {
                assert!(!told.contains(extra), "{line}: {told}");
            }
        }
    }

    #[test]
    fn the_help_names_each_option_and_each_format() {
        let help = help();
        let formats = FormatArg::ALL.iter().map(|format| format.name());
        for name in
            ["--log-format", "--fields", "--identifier", "--unsorted"].into_iter().chain(formats)
        {
            assert!(help.contains(name), "{help}\nlacks {name}");
        }
        assert!(!help.contains("--help"), "{help}");
    }
}
