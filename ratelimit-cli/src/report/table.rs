//! Tables that scroll within a narrow page.

use maud::{Markup, html};

/// What a column holds, and its name.
pub(super) enum Column {
    /// Names of limits and callers, which may be long.
    Name(&'static str),
    Time(&'static str),
    Number(&'static str),
}

impl Column {
    const fn name(&self) -> &'static str {
        match self {
            Self::Name(name) | Self::Time(name) | Self::Number(name) => name,
        }
    }

    const fn class(&self) -> &'static str {
        match self {
            Self::Name(_) => "name",
            Self::Time(_) => "time",
            Self::Number(_) => "number",
        }
    }
}

/// A table whose first column names the row.
pub(super) fn table(
    caption: &str,
    columns: &[Column],
    rows: impl Iterator<Item = Vec<String>>,
) -> Markup {
    html! {
        // A region that scrolls takes the focus, so that the keyboard scrolls it.
        div.scroll tabindex="0" role="region" aria-label=(caption) {
            table {
                caption { (caption) }
                thead { tr {
                    @for column in columns { th scope="col" class=(column.class()) { (column.name()) } }
                } }
                tbody { @for row in rows { tr {
                    @for (nth, (cell, column)) in row.iter().zip(columns).enumerate() {
                        @if nth == 0 {
                            th scope="row" class=(column.class()) { (cell) }
                        } @else {
                            td class=(column.class()) { (cell) }
                        }
                    }
                } } }
            }
        }
    }
}
