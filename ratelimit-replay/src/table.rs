//! [`TextTable`]: rows under columns, as text for a terminal and as a part of the report.

use maud::{Markup, html};
use unicode_width::UnicodeWidthStr;

/// A table, if it has rows, what it comes to, and what the reader must know before trusting it.
pub fn list(table: &TextTable, summary: &str, notes: &[String]) -> String {
    let table = if table.rows.is_empty() { String::new() } else { table.text() + "\n" };
    let notes = notes.iter().map(|note| format!("\nnote: {note}\n"));
    table + summary + "\n" + &notes.collect::<String>()
}

/// Rows under columns. The first column names the row.
pub struct TextTable {
    columns: Vec<Column>,
    pub(crate) rows: Vec<Vec<String>>,
}

struct Column {
    name: String,
    /// `name`, which may be long, `time` or `number`.
    class: &'static str,
}

impl TextTable {
    /// A column whose name begins with `#` holds numbers, and one with `@` times.
    pub fn new(columns: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        let column = |text: &&str| {
            let (class, name) = match text.split_at_checked(1) {
                Some(("#", name)) => ("number", name),
                Some(("@", name)) => ("time", name),
                _ => ("name", *text),
            };
            Column { name: name.to_owned(), class }
        };
        let columns = columns.iter().map(column).collect();
        Self { columns, rows: rows.into_iter().collect() }
    }

    /// The table for a terminal. Names of columns that are all empty are left out.
    pub fn text(&self) -> String {
        let header: Vec<_> = self.columns.iter().map(|column| column.name.clone()).collect();
        let has_names = !header.concat().is_empty();
        let lines = || has_names.then_some(&header).into_iter().chain(&self.rows);
        let width = |place| {
            lines().filter_map(|line| line.get(place)).map(|cell: &String| cell.width()).max()
        };
        let widths: Vec<_> =
            (0..self.columns.len()).map(|place| width(place).unwrap_or(0)).collect();
        let mut text = String::new();
        for line in lines() {
            let mut shown = String::new();
            for ((cell, column), width) in line.iter().zip(&self.columns).zip(&widths) {
                let pad = " ".repeat(width - cell.width());
                let is_number = column.class == "number";
                shown.extend(if is_number { ["  ", &pad, cell] } else { ["  ", cell, &pad] });
            }
            text.push_str(shown.trim_end());
            text.push('\n');
        }
        text
    }

    /// The table for the report, which scrolls within a narrow page.
    pub(crate) fn html(&self, caption: &str) -> Markup {
        html! {
            // A region that scrolls takes the focus, so that the keyboard scrolls it.
            div.scroll tabindex="0" role="region" aria-label=(caption) {
                table {
                    caption { (caption) }
                    thead { tr {
                        @for column in &self.columns { th scope="col" class=(column.class) { (column.name) } }
                    } }
                    tbody { @for row in &self.rows { tr {
                        @for (nth, (cell, column)) in row.iter().zip(&self.columns).enumerate() {
                            @if nth == 0 {
                                th scope="row" class=(column.class) { (cell) }
                            } @else {
                                td class=(column.class) { (cell) }
                            }
                        }
                    } } }
                }
            }
        }
    }
}
