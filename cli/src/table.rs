//! Tables for people: no lines, three blanks between columns, nothing at the end of a line.

use tabled::{
    builder::Builder,
    settings::{Alignment, Color, Padding, Style, object::Columns},
};

use crate::human::plain;

/// A column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    /// Header.
    pub(crate) title: &'static str,
    /// True for numbers.
    pub(crate) right: bool,
    /// True if only `-o wide` shows it.
    pub(crate) wide: bool,
}

/// A column of text.
pub(crate) const fn text(title: &'static str) -> Column {
    Column { title, right: false, wide: false }
}

/// A column of numbers.
pub(crate) const fn number(title: &'static str) -> Column {
    Column { title, right: true, wide: false }
}

/// The same column, for `-o wide` only.
pub(crate) const fn wide(column: Column) -> Column {
    Column { wide: true, ..column }
}

/// How a cell looks where there is colour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Tone {
    /// As it is.
    #[default]
    Plain,
    /// Good.
    Good,
    /// To be looked at.
    Warn,
    /// Bad.
    Bad,
}

/// A cell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) text: String,
    pub(crate) tone: Tone,
}

impl Cell {
    /// Text, or `-` where there is none.
    pub(crate) fn some(text: impl AsRef<str>) -> Self {
        let text = text.as_ref();
        Self { text: if text.is_empty() { "-".to_owned() } else { plain(text) }, tone: Tone::Plain }
    }

    /// What is known, or `?`.
    pub(crate) fn known(value: Option<impl ToString>) -> Self {
        let text = value.map(|value| value.to_string()).filter(|text| !text.is_empty());
        Self { text: text.map_or_else(|| "?".to_owned(), |text| plain(&text)), tone: Tone::Plain }
    }

    /// The same cell in another tone.
    pub(crate) fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// The lines of a table, header first unless it is left out.
pub(crate) fn lines(columns: &[Column], rows: &[Vec<Cell>], is_wide: bool, header: bool, colour: bool) -> Vec<String> {
    let shown: Vec<_> = (0..columns.len()).filter(|&index| is_wide || !columns[index].wide).collect();
    let mut builder = Builder::default();
    if header {
        builder.push_record(shown.iter().map(|&index| columns[index].title));
    }
    for row in rows {
        builder.push_record(shown.iter().map(|&index| row.get(index).map_or("", |cell| cell.text.as_str())));
    }
    if builder.count_records() == 0 {
        return Vec::new();
    }
    let mut table = builder.build();
    table.with(Style::empty()).with(Padding::new(0, 3, 0, 0));
    for (at, &index) in shown.iter().enumerate() {
        if columns[index].right {
            table.modify(Columns::one(at), Alignment::right());
        }
        for (row, cells) in rows.iter().enumerate().filter(|_| colour) {
            let tint = match cells.get(index).map(|cell| cell.tone) {
                None | Some(Tone::Plain) => continue,
                Some(Tone::Good) => Color::FG_GREEN,
                Some(Tone::Warn) => Color::FG_YELLOW,
                Some(Tone::Bad) => Color::FG_RED,
            };
            table.modify((row + usize::from(header), at), tint);
        }
    }
    table.to_string().lines().map(|line| line.trim_end().to_owned()).collect()
}

/// The lines of a list of names and values.
pub(crate) fn pairs(pairs: &[(&str, Cell)], colour: bool) -> Vec<String> {
    let name = |name: &str| Cell { text: name.to_owned(), ..Cell::default() };
    let rows: Vec<_> = pairs.iter().map(|(key, value)| vec![name(key), value.clone()]).collect();
    lines(&[text(""), text("")], &rows, false, false, colour)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[text("NAME"), number("CORES"), text("CLAIM"), wide(text("MORE"))];

    fn rows() -> Vec<Vec<Cell>> {
        vec![
            vec![Cell::some("npu-0"), Cell::known(Some(20)), Cell::some("ml/train-0"), Cell::some("x")],
            vec![Cell::some("npu-10"), Cell::known(None::<u32>), Cell::some(""), Cell::some("y").tone(Tone::Bad)],
        ]
    }

    #[test]
    fn columns_are_three_blanks_apart_and_lines_end_where_text_does() {
        let expected = ["NAME     CORES   CLAIM", "npu-0       20   ml/train-0", "npu-10       ?   -"];
        assert_eq!(lines(COLUMNS, &rows(), false, true, false), expected);
    }

    #[test]
    fn wide_adds_columns_at_the_right_only() {
        let narrow = lines(COLUMNS, &rows(), false, true, false);
        let wide = lines(COLUMNS, &rows(), true, true, false);
        for (narrow, wide) in narrow.iter().zip(&wide) {
            assert!(wide.starts_with(narrow), "{wide:?}");
        }
        assert!(wide[0].ends_with("MORE"));
    }

    #[test]
    fn a_table_without_rows_is_its_header_and_without_header_nothing() {
        assert_eq!(lines(COLUMNS, &[], false, true, false), ["NAME   CORES   CLAIM"]);
        assert!(lines(COLUMNS, &[], false, false, false).is_empty());
    }

    #[test]
    fn colour_changes_no_column() {
        let coloured = lines(COLUMNS, &rows(), true, true, true);
        assert!(coloured[2].contains("\x1b[31my"));
        let bare: Vec<_> = coloured.iter().map(|line| line.replace("\x1b[31m", "").replace("\x1b[39m", "")).collect();
        let bare: Vec<_> = bare.iter().map(|line| line.trim_end()).collect();
        assert_eq!(bare, lines(COLUMNS, &rows(), true, true, false));
    }

    #[test]
    fn text_of_others_stays_in_its_cell() {
        let rows = vec![vec![Cell::some("a\nb"), Cell::known(Some(1)), Cell::some("\x1b[2J")]];
        assert_eq!(lines(COLUMNS, &rows, false, false, false), ["a b   1    [2J"]);
    }
}
