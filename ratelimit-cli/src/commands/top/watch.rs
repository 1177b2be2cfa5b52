//! `ratelimit top --watch`: scans again and again, shown in a live table or as lists.

use std::cell::Cell;
use std::env;
use std::io::{self, IsTerminal as _, Write as _};
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use futures_util::stream::{self, Stream, StreamExt as _};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratelimit_core::Timestamp;

use super::charges::Charges;
use super::scan::{ScanResult, Subject, scan};
use super::screen::{Command, Scanned, Screen};
use super::{Row, notes, output, summary};
use crate::commands::print;
use crate::commands::record::now;
use crate::store::{self, Remote, in_each_mode};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::text::{duration, time};

/// How often the tool looks at the keyboard and for an interrupt, and draws the screen.
const TICK: Duration = Duration::from_millis(50);

pub(super) fn run(subject: &Subject<'_>, pause: Duration) -> Result<u8, Failure> {
    let is_dumb = env::var_os("TERM").is_some_and(|name| name == "dumb");
    let is_live = !subject.args.scan.json && !is_dumb && io::stdout().is_terminal();
    store::block_on(async {
        let is_paused = Cell::new(false);
        let scans = pin!(scans(subject, pause, &is_paused));
        if is_live {
            live(subject, pause, scans, &is_paused).await
        } else {
            lists(subject, pause, scans).await
        }
    })
}

/// What lasts from one scan to the next.
struct Lasting {
    remote: Option<Remote>,
    charges: Charges,
    due: Instant,
}

/// One scan after the other, with a pause in between. Ends at an interrupt.
fn scans<'s>(
    subject: &'s Subject<'_>,
    pause: Duration,
    is_paused: &'s Cell<bool>,
) -> impl Stream<Item = Result<ScanResult, Failure>> + 's {
    let first = Lasting { remote: None, charges: Charges::default(), due: Instant::now() };
    stream::unfold(first, move |mut lasting| async move {
        while is_paused.get() || Instant::now() < lasting.due {
            if subject.interrupt.is_raised() {
                return None;
            }
            tokio::time::sleep(TICK).await;
        }
        let found = lasting.scan(subject).await;
        lasting.due = Instant::now() + pause;
        (!subject.interrupt.is_raised()).then_some((found, lasting))
    })
}

impl Lasting {
    async fn scan(&mut self, subject: &Subject<'_>) -> Result<ScanResult, Failure> {
        let store = match &mut self.remote {
            Some(store) => store,
            none => {
                let prefix = &subject.args.scan.prefix;
                none.insert(store::connect(subject.redis, prefix, None, subject.limits).await?)
            }
        };
        let mut found = in_each_mode!(store, store => scan(subject, store).await)?;
        self.charges.follow(subject, &mut found);
        Ok(found)
    }
}

/// Prints a list per scan until an interrupt, or until the reader closes the output.
async fn lists(
    subject: &Subject<'_>,
    pause: Duration,
    mut scans: Pin<&mut impl Stream<Item = Result<ScanResult, Failure>>>,
) -> Result<u8, Failure> {
    let is_json = subject.args.scan.json;
    let mut gap = "";
    while let Some(found) = scans.next().await {
        let found = match found {
            Err(failure @ Failure::Store(_)) if is_json => {
                ScanResult { failed: Some(failure), ..ScanResult::default() }
            }
            Err(failure @ Failure::Store(_)) => {
                report(&failure, pause);
                continue;
            }
            found => found?,
        };
        if is_json {
            print(output(subject, &found))?;
        } else {
            let seconds = now().as_us() / 1_000_000 * 1_000_000;
            let moment = time(Timestamp::saturating_from_us(seconds));
            print(format!("{gap}{moment}\n{}", output(subject, &found)))?;
            gap = "\n";
        }
        // In JSON, the totals tell it.
        if let Some(failure) = found.failed.as_ref().filter(|_| !is_json) {
            report(failure, pause);
        }
    }
    Err(Failure::Interrupted)
}

/// Says what went wrong. With standard error closed, the message has nowhere to go.
fn report(failure: &Failure, pause: Duration) {
    let again = in_words(pause);
    let _ = writeln!(io::stderr(), "error: {failure}; the next scan begins in {again}");
}

fn in_words(pause: Duration) -> String {
    duration(u64::try_from(pause.as_micros()).unwrap_or(u64::MAX))
}

/// The terminal in its raw mode, which ends with it. A panic ends it before its message.
struct RawTerminal(DefaultTerminal);

impl Drop for RawTerminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows a table until the user quits it.
async fn live(
    subject: &Subject<'_>,
    pause: Duration,
    mut scans: Pin<&mut impl Stream<Item = Result<ScanResult, Failure>>>,
    is_paused: &Cell<bool>,
) -> Result<u8, Failure> {
    let failed = |error: io::Error| Failure::input(format!("the terminal: {error}"));
    let mut terminal = RawTerminal(ratatui::try_init().map_err(failed)?);
    let title = format!("{}, every {}", subject.redis.url, in_words(pause));
    let mut screen = Screen::new(title);
    loop {
        while event::poll(Duration::ZERO).map_err(failed)? {
            let Event::Key(key) = event::read().map_err(failed)? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            match screen.press(key, Instant::now()) {
                Some(Command::Quit) => return Ok(0),
                Some(Command::Interrupt) => return Err(Failure::Interrupted),
                None => {}
            }
        }
        is_paused.set(screen.is_paused());
        terminal.0.draw(|frame| screen.draw(frame, Instant::now())).map_err(failed)?;
        match tokio::time::timeout(TICK, scans.next()).await {
            Err(_) => {}
            Ok(None) => return Err(Failure::Interrupted),
            Ok(Some(Ok(found))) => screen.update(scanned(subject, &found), Instant::now()),
            Ok(Some(Err(failure @ Failure::Store(_)))) => screen.fail(&failure),
            Ok(Some(Err(failure))) => return Err(failure),
        }
    }
}

fn scanned(subject: &Subject<'_>, found: &ScanResult) -> Scanned {
    Scanned {
        rows: found.limited.iter().map(|limited| Row::new(subject, found, limited)).collect(),
        summary: summary(found),
        notes: notes(subject, found),
        error: found.failed.as_ref().map(Failure::to_string),
    }
}
