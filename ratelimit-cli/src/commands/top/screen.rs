//! [`Screen`]: the live table of `top --watch`. Keys and scans change it, and it draws itself at a
//! moment, so that tests need neither a terminal nor time.

use std::cmp::Ordering;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row as Cells, Table, Wrap};

use super::{COLUMNS, Row, shown_columns};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::text::{duration, plural, quote};

/// The positions of columns in [`COLUMNS`].
const CALLER: usize = 0;
const WAIT: usize = 4;
const RECORD: usize = 6;

/// How many lines of notes and of an error are shown.
const NOTE_LINES: u16 = 4;

/// What the user wants of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Quit,
    Interrupt,
}

/// What a scan found, in words.
#[derive(Default)]
pub(super) struct Scanned {
    pub(super) rows: Vec<Row>,
    pub(super) summary: String,
    pub(super) notes: Vec<String>,
    pub(super) error: Option<String>,
}

/// The live table.
pub(super) struct Screen {
    title: String,
    scanned: Scanned,
    /// When the last scan ended.
    at: Option<Instant>,
    /// Since when nothing moves.
    paused: Option<Instant>,
    sorted_by: usize,
    is_reversed: bool,
    filter: String,
    is_filter_open: bool,
    /// How many rows are above the first one that is shown.
    above: usize,
    /// How many rows have been shown.
    page: usize,
}

impl Screen {
    pub(super) fn new(title: String) -> Self {
        Self {
            title,
            scanned: Scanned::default(),
            at: None,
            paused: None,
            sorted_by: WAIT,
            is_reversed: false,
            filter: String::new(),
            is_filter_open: false,
            above: 0,
            page: 1,
        }
    }

    pub(super) const fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Shows what a scan has found. While the table is paused, it stays as it is.
    pub(super) fn update(&mut self, scanned: Scanned, now: Instant) {
        if !self.is_paused() {
            (self.scanned, self.at) = (scanned, Some(now));
            self.sort();
        }
    }

    /// Shows why a scan has found nothing, beside what the one before has found.
    pub(super) fn fail(&mut self, failure: &Failure) {
        if !self.is_paused() {
            self.scanned.error = Some(failure.to_string());
        }
    }

    /// Does what a key means.
    pub(super) fn press(&mut self, key: KeyEvent, now: Instant) -> Option<Command> {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(Command::Interrupt);
        }
        let page = self.page.max(1);
        match key.code {
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::Down => self.above = self.above.saturating_add(1),
            KeyCode::PageUp => self.above = self.above.saturating_sub(page),
            KeyCode::PageDown => self.above = self.above.saturating_add(page),
            KeyCode::Home => self.above = 0,
            KeyCode::End => self.above = usize::MAX,
            KeyCode::Esc => {
                self.filter.clear();
                self.is_filter_open = false;
            }
            KeyCode::Enter => self.is_filter_open = false,
            KeyCode::Backspace if self.is_filter_open => {
                self.filter.pop();
            }
            KeyCode::Char(c) if self.is_filter_open => self.filter.push(c),
            KeyCode::Char('/') => self.is_filter_open = true,
            KeyCode::Char('p' | ' ') => {
                self.paused = if self.is_paused() { None } else { Some(now) };
            }
            KeyCode::Char('s') => {
                let shown = self.shown_columns();
                let next = (1..=COLUMNS.len()).map(|step| (self.sorted_by + step) % COLUMNS.len());
                self.sorted_by = next.into_iter().find(|place| shown[*place]).unwrap_or(WAIT);
                self.is_reversed = false;
                self.sort();
            }
            KeyCode::Char('r') => {
                self.is_reversed = !self.is_reversed;
                self.sort();
            }
            KeyCode::Char('q') => return Some(Command::Quit),
            _ => {}
        }
        None
    }

    fn shown_columns(&self) -> [bool; COLUMNS.len()] {
        shown_columns(true, self.scanned.rows.iter().any(|row| !row.record.is_empty()))
    }

    /// Names go up and numbers down, unless reversed.
    fn sort(&mut self) {
        let (by, is_reversed) = (self.sorted_by, self.is_reversed);
        self.scanned.rows.sort_by(|a, b| {
            let order = compare(by, a, b);
            let ties = || (&a.caller, &a.limit).cmp(&(&b.caller, &b.limit));
            if is_reversed { order.reverse() } else { order }.then_with(ties)
        });
    }

    /// The rows that the filter leaves.
    fn rows(&self) -> Vec<&Row> {
        let filter = self.filter.to_lowercase();
        let fits = |row: &&Row| {
            [&row.caller, &row.limit, &row.record]
                .into_iter()
                .any(|text| text.to_lowercase().contains(&filter))
        };
        self.scanned.rows.iter().filter(fits).collect()
    }

    /// Draws the table as it is at this moment.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, now: Instant) {
        let now = self.paused.unwrap_or(now);
        let width = frame.area().width;
        let notes = self.scanned.notes.iter().map(|note| format!("note: {note}"));
        let notes = notes.collect::<Vec<_>>().join("\n");
        let status = self.status();
        let lines = |text: &str| {
            // A line that wraps between words may need one more.
            let of_line = |line: &str| match width_of(line).div_ceil(usize::from(width.max(1))) {
                0 | 1 => 1,
                several => several + 1,
            };
            u16::try_from(text.lines().map(of_line).sum::<usize>()).unwrap_or(u16::MAX)
        };
        let heights = [
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(3),
            Constraint::Length(lines(&notes).min(NOTE_LINES)),
            Constraint::Length(lines(&status).min(NOTE_LINES)),
            Constraint::Length(1),
        ];
        let [top, summary, table, below, bottom, help] =
            Layout::vertical(heights).areas(frame.area());
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let age = Line::from(self.age(now)).right_aligned();
        let of_age = u16::try_from(age.width()).unwrap_or(u16::MAX);
        let [left, right] =
            Layout::horizontal([Constraint::Fill(1), Constraint::Length(of_age)]).areas(top);
        frame.render_widget(Line::from(format!("ratelimit top  {}", self.title)).style(bold), left);
        frame.render_widget(age, right);
        frame.render_widget(Line::from(&*self.scanned.summary), summary);
        self.draw_table(frame, table, now);
        frame.render_widget(Paragraph::new(notes).wrap(Wrap { trim: true }), below);
        let is_error = self.scanned.error.is_some() && !self.is_filter_open;
        let style = if is_error { bold.fg(Color::Red) } else { bold };
        frame.render_widget(Paragraph::new(status).wrap(Wrap { trim: false }).style(style), bottom);
        let keys = "q quit  p pause  s sort  r reverse  / filter  ↑ ↓ PgUp PgDn Home End scroll";
        frame.render_widget(Line::from(keys).style(Style::new().add_modifier(Modifier::DIM)), help);
    }

    /// How old the table is.
    fn age(&self, now: Instant) -> String {
        let age = self.at.map(|at| now.saturating_duration_since(at).as_secs() * 1_000_000);
        let age = age.map(|us| if us == 0 { "now".to_owned() } else { duration(us) + " ago" });
        let age = age.map_or("first scan …".to_owned(), |age| format!("scanned {age}"));
        if self.is_paused() { format!("PAUSED  {age}") } else { age }
    }

    /// The filter, an error, or nothing.
    fn status(&self) -> String {
        let shown = || plural(self.rows().len() as u64, "row", "rows");
        match &self.scanned.error {
            _ if self.is_filter_open => {
                format!("filter: {}▏ ({}; Enter keeps it, Esc clears it)", self.filter, shown())
            }
            Some(error) => format!("error: {error}; the next scan tries again"),
            None if self.filter.is_empty() => String::new(),
            None => format!("{} with {}; Esc shows all", shown(), quote(&self.filter, 60)),
        }
    }

    fn draw_table(&mut self, frame: &mut Frame<'_>, area: Rect, now: Instant) {
        let shown = self.shown_columns();
        let (sorted_by, is_reversed) = (self.sorted_by, self.is_reversed);
        let page = usize::from(area.height.saturating_sub(1));
        let rows = self.rows();
        let above = self.above.min(rows.len().saturating_sub(page));
        let cells = rows.iter().skip(above).take(page).map(|row| row.cells(countdown(row, now)));
        let cells: Vec<_> = cells.collect();
        let header = COLUMNS.iter().enumerate().map(|(place, name)| {
            let is_up = (place == CALLER || is_name(place)) != is_reversed;
            let mark = if is_up { "▲" } else { "▼" };
            let mark = if place == sorted_by { mark } else { "" };
            format!("{}{mark}", name.trim_start_matches('#'))
        });
        let header: Vec<_> = header.collect();
        let widths = (0..COLUMNS.len()).filter(|place| shown[*place]).map(|place| {
            let cells = cells.iter().map(|cells| width_of(&cells[place]));
            // So that the columns stay in their places while a wait passes.
            let least = if place == WAIT { width_of("59 min 59 s") } else { 0 };
            let width = cells.chain([width_of(&header[place]), least]).max().unwrap_or(0);
            let width = u16::try_from(width).unwrap_or(u16::MAX);
            if place == CALLER { Constraint::Fill(1) } else { Constraint::Length(width) }
        });
        let widths: Vec<_> = widths.collect();
        let line = |cells: &[String]| {
            let shown = cells.iter().enumerate().filter(|(place, _)| shown[*place]);
            let cells = shown.map(|(place, cell)| {
                let text = Text::from(cell.clone());
                Cell::from(if is_name(place) { text } else { text.right_aligned() })
            });
            Cells::new(cells.collect::<Vec<_>>())
        };
        let style = Style::new().add_modifier(Modifier::REVERSED);
        let table = Table::new(cells.iter().map(|cells| line(cells)), widths);
        let table = table.header(line(&header).style(style)).column_spacing(2);
        frame.render_widget(table, area);
        (self.above, self.page) = (above, page);
    }
}

/// How many columns of a terminal a text takes.
fn width_of(text: &str) -> usize {
    Span::raw(text).width()
}

fn is_name(place: usize) -> bool {
    !COLUMNS[place].starts_with('#')
}

/// Compares two rows by a column: names go up, and numbers down.
fn compare(column: usize, a: &Row, b: &Row) -> Ordering {
    match column {
        CALLER => a.caller.cmp(&b.caller),
        1 => a.limit.cmp(&b.limit),
        2 => b.left.cmp(&a.left),
        3 => b.of.cmp(&a.of),
        WAIT => {
            // From one moment on, or two rows that were asked about one after the other swap.
            let end = |row: &Row| {
                row.wait_us.and_then(|us| row.at.checked_add(Duration::from_micros(us)))
            };
            match (end(a), end(b)) {
                (Some(a), Some(b)) => b.cmp(&a),
                (a, b) => a.is_some().cmp(&b.is_some()),
            }
        }
        RECORD => a.record.cmp(&b.record),
        _ => b.charged.cmp(&a.charged),
    }
}

/// What is left of a row's wait at this moment, rounded up to a second, and below one to a tenth.
fn countdown(row: &Row, now: Instant) -> String {
    let Some(wait_us) = row.wait_us else { return "never".to_owned() };
    let passed = now.saturating_duration_since(row.at).as_micros();
    let left = wait_us.saturating_sub(u64::try_from(passed).unwrap_or(u64::MAX));
    let step = if left > 1_000_000 { 1_000_000 } else { 100_000 };
    match left {
        0 => "now".to_owned(),
        left => duration(left.div_ceil(step).saturating_mul(step)),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn row(caller: &str, limit: &str, wait: Option<u64>, at: Instant) -> Row {
        Row {
            caller: caller.to_owned(),
            limit: limit.to_owned(),
            left: 0,
            of: 1_500,
            wait_us: wait.map(|ms| ms * 1_000),
            at,
            charged: None,
            record: String::new(),
        }
    }

    fn three(at: Instant) -> Scanned {
        let mut rows = vec![
            row("ip=192.0.2.7", "burst", Some(4_200), at),
            row("ip=192.0.2.9", "daily", Some(7_200_000), at),
            row("user=alice", "burst", None, at),
        ];
        rows[0].charged = Some(105);
        Scanned { rows, summary: "3 limited now".to_owned(), ..Scanned::default() }
    }

    /// The lines of a screen with room for so many.
    fn drawn(screen: &mut Screen, height: u16, now: Instant) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(80, height)).expect("in memory");
        terminal.draw(|frame| screen.draw(frame, now)).expect("in memory");
        let lines = terminal.backend().to_string();
        lines.lines().map(|line| line.trim_matches('"').trim_end().to_owned()).collect()
    }

    fn press(screen: &mut Screen, keys: &[KeyCode], now: Instant) -> Option<Command> {
        keys.iter().map(|key| screen.press((*key).into(), now)).last().flatten()
    }

    fn type_text(screen: &mut Screen, text: &str, now: Instant) {
        press(screen, &text.chars().map(KeyCode::Char).collect::<Vec<_>>(), now);
    }

    /// The first words of the rows.
    fn callers(lines: &[String]) -> Vec<&str> {
        let rows = lines.iter().filter(|line| line.starts_with("ip=") || line.starts_with("user="));
        rows.filter_map(|line| line.split_whitespace().next()).collect()
    }

    #[test]
    fn the_table_shows_the_longest_wait_first_and_counts_it_down() {
        let start = Instant::now();
        let mut screen = Screen::new("redis://h, every 2 s".to_owned());
        let before = drawn(&mut screen, 10, start);
        assert!(before[0].ends_with("first scan …"), "{before:#?}");
        screen.update(three(start), start);
        let lines = drawn(&mut screen, 10, start);
        let due = [
            "ratelimit top  redis://h, every 2 s                                  scanned now",
            "3 limited now",
            "caller                                   limit  left     of  retry in▼  charged/s",
            "user=alice                               burst     0  1,500      never          –",
            "ip=192.0.2.9                             daily     0  1,500        2 h          –",
            "ip=192.0.2.7                             burst     0  1,500        5 s       10.5",
        ];
        let trimmed = due.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        let shown =
            lines[..6].iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        assert_eq!(shown.collect::<Vec<_>>(), trimmed, "{lines:#?}");
        assert!(lines[9].starts_with("q quit  p pause  s sort"), "{lines:#?}");
        for (passed_ms, wait) in
            [(1_200, "3 s"), (3_200, "1 s"), (3_300, "900 ms"), (4_200, "now"), (90_000, "now")]
        {
            let lines = drawn(&mut screen, 10, start + Duration::from_millis(passed_ms));
            let shown = format!(" {wait}  ");
            assert!(lines[5].contains(&shown), "{passed_ms}: {lines:#?}");
        }
    }

    #[test]
    fn a_paused_table_stays_as_it_is_until_it_goes_on() {
        let start = Instant::now();
        let mut screen = Screen::new(String::new());
        screen.update(three(start), start);
        let second = start + Duration::from_secs(1);
        for key in ['p', ' '] {
            press(&mut screen, &[KeyCode::Char(key)], second);
            assert!(screen.is_paused());
            let lines = drawn(&mut screen, 10, second);
            assert!(lines[0].ends_with("PAUSED  scanned 1 s ago"), "{lines:#?}");
            screen.update(Scanned::default(), second);
            screen.fail(&Failure::Store("gone".to_owned()));
            assert_eq!(drawn(&mut screen, 10, start + Duration::from_secs(900)), lines);
            press(&mut screen, &[KeyCode::Char(key)], second);
            assert!(!screen.is_paused());
        }
        screen.update(Scanned::default(), second);
        assert!(callers(&drawn(&mut screen, 10, second)).is_empty());
    }

    #[test]
    fn rows_are_sorted_by_the_next_column_and_back() {
        let start = Instant::now();
        let mut screen = Screen::new(String::new());
        let mut scanned = three(start);
        for (row, left, of, record) in [(0, 3, 30, "blocked"), (1, 1, 10, ""), (2, 2, 20, "")] {
            let row = &mut scanned.rows[row];
            (row.left, row.of, row.record) = (left, of, record.to_owned());
        }
        screen.update(scanned, start);
        let [seven, nine, alice] = ["ip=192.0.2.7", "ip=192.0.2.9", "user=alice"];
        for (column, up) in [
            ("charged/s▼", [seven, nine, alice]),
            ("record▲", [nine, alice, seven]),
            ("caller▲", [seven, nine, alice]),
            ("limit▲", [seven, alice, nine]),
            ("left▼", [seven, alice, nine]),
            ("of▼", [seven, alice, nine]),
            ("retry in▼", [alice, nine, seven]),
        ] {
            press(&mut screen, &[KeyCode::Char('s')], start);
            let lines = drawn(&mut screen, 10, start);
            assert!(lines[2].contains(column), "{lines:#?}");
            assert_eq!(callers(&lines), up, "{column}");
        }
        press(&mut screen, &[KeyCode::Char('r')], start);
        let lines = drawn(&mut screen, 10, start);
        assert!(lines[2].contains("retry in▲"), "{lines:#?}");
        assert_eq!(callers(&lines), [seven, nine, alice]);
        // A new scan keeps the order.
        screen.update(three(start), start);
        assert_eq!(callers(&drawn(&mut screen, 10, start)), [seven, nine, alice]);
        // Without records there is no such column.
        press(&mut screen, &[KeyCode::Char('s'); 2], start);
        assert!(drawn(&mut screen, 10, start)[2].contains("caller▲"));
    }

    #[test]
    fn a_filter_leaves_the_rows_that_contain_its_text() {
        let start = Instant::now();
        let mut screen = Screen::new(String::new());
        screen.update(three(start), start);
        type_text(&mut screen, "/DAIp", start);
        assert!(!screen.is_paused());
        let lines = drawn(&mut screen, 10, start);
        assert!(callers(&lines).is_empty() && lines[8].starts_with("filter: DAIp▏ (0 rows"));
        press(&mut screen, &[KeyCode::Backspace], start);
        let lines = drawn(&mut screen, 10, start);
        assert_eq!(callers(&lines), ["ip=192.0.2.9"], "{lines:#?}");
        press(&mut screen, &[KeyCode::Enter], start);
        let lines = drawn(&mut screen, 10, start);
        assert!(lines[8].starts_with("1 row with \"DAI\"; Esc"), "{lines:#?}");
        // Letters are keys again.
        assert_eq!(press(&mut screen, &[KeyCode::Char('q')], start), Some(Command::Quit));
        press(&mut screen, &[KeyCode::Esc], start);
        assert_eq!(callers(&drawn(&mut screen, 10, start)).len(), 3);
    }

    #[test]
    fn the_rows_scroll_to_their_ends() {
        let start = Instant::now();
        let mut screen = Screen::new(String::new());
        let rows = (10..30).map(|n| row(&format!("ip={n}"), "burst", Some(60_000 - n), start));
        screen.update(Scanned { rows: rows.collect(), ..Scanned::default() }, start);
        // Ten lines have room for six rows.
        for (key, first) in [
            (KeyCode::Up, "ip=10"),
            (KeyCode::Down, "ip=11"),
            (KeyCode::PageDown, "ip=17"),
            (KeyCode::Down, "ip=18"),
            (KeyCode::End, "ip=24"),
            (KeyCode::Down, "ip=24"),
            (KeyCode::Up, "ip=23"),
            (KeyCode::PageUp, "ip=17"),
            (KeyCode::Home, "ip=10"),
        ] {
            press(&mut screen, &[key], start);
            let lines = drawn(&mut screen, 10, start);
            assert_eq!((callers(&lines).len(), callers(&lines)[0]), (6, first), "{key}");
        }
    }

    #[test]
    fn an_error_of_the_store_stands_beside_the_last_table_until_a_scan_succeeds() {
        let start = Instant::now();
        let mut screen = Screen::new(String::new());
        screen.update(three(start), start);
        screen.fail(&Failure::Store("--store redis://h: refused".to_owned()));
        let lines = drawn(&mut screen, 10, start);
        assert_eq!(callers(&lines).len(), 3);
        assert_eq!(lines[8], "error: --store redis://h: refused; the next scan tries again");
        let notes = vec!["some words ".repeat(10), "second".to_owned()];
        screen.update(Scanned { notes, ..three(start) }, start);
        let lines = drawn(&mut screen, 12, start).join("\n");
        assert!(!lines.contains("error") && lines.contains("note: some words"), "{lines}");
        assert!(lines.contains("note: second"), "{lines}");
    }

    #[test]
    fn a_small_terminal_and_control_c_are_no_trouble() {
        let start = Instant::now();
        let mut screen = Screen::new("x".repeat(300));
        screen.update(Scanned { error: Some("e".repeat(500)), ..three(start) }, start);
        for (width, height) in [(1, 1), (3, 2), (20, 5), (300, 3)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("in memory");
            terminal.draw(|frame| screen.draw(frame, start)).expect("in memory");
        }
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        screen.press(KeyCode::Char('/').into(), start);
        assert_eq!(screen.press(interrupt, start), Some(Command::Interrupt));
    }
}
