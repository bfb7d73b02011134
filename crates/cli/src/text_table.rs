//! Rows of words as columns of a terminal. What is wider than the terminal is turned: a block for each row,
//! with the names of its columns beside the values, so that no line is broken in the middle of a number.

/// How far the values of a turned row stand below its name.
const INDENT: usize = 4;
/// Between two columns, and between two values of a turned row.
const GAP: &str = "  ";

/// A table: the first row is its head, the first column has names.
pub struct TextTable<'a> {
    rows: &'a [Vec<String>],
    has_text_column: bool,
    has_total: bool,
}

impl<'a> TextTable<'a> {
    /// The first column stands at the left, the others at the right.
    pub fn new(rows: &'a [Vec<String>]) -> TextTable<'a> {
        TextTable { rows, has_text_column: false, has_total: false }
    }

    /// The last column is text, at the left.
    pub fn with_text_column(self) -> TextTable<'a> {
        TextTable { has_text_column: true, ..self }
    }

    /// The last row is the sum of the others, behind a line.
    pub fn with_total(self) -> TextTable<'a> {
        TextTable { has_total: true, ..self }
    }

    /// Lines of at most so many letters, each with its end.
    pub fn render(&self, width: usize) -> String {
        let widths = self.widths(self.rows);
        let all = widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1);
        let lines = if all <= width { self.in_columns(&widths) } else { self.transposed(width) };
        lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// The longest word of each column.
    fn widths(&self, rows: &[Vec<String>]) -> Vec<usize> {
        let count = rows.iter().map(Vec::len).max().unwrap_or(0);
        let longest =
            |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| length(cell)).max();
        (0..count).map(|column| longest(column).unwrap_or(0)).collect()
    }

    fn in_columns(&self, widths: &[usize]) -> Vec<String> {
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, &width))| {
                let is_left = column == 0 || (self.has_text_column && column + 1 == widths.len());
                if is_left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            cells.collect::<Vec<_>>().join(GAP)
        };
        let mut lines: Vec<String> = self.rows.iter().map(line).collect();
        if self.has_total && !lines.is_empty() {
            let rule = widths.iter().sum::<usize>() + GAP.len() * (widths.len() - 1);
            lines.insert(lines.len() - 1, "-".repeat(rule));
        }
        lines
    }

    fn transposed(&self, width: usize) -> Vec<String> {
        let Some((head, rows)) = self.rows.split_first() else { return Vec::new() };
        let widths = self.widths(rows);
        let mut lines = Vec::new();
        for row in rows {
            lines.extend(wrapped(&row[0], INDENT / 2, width));
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate().skip(1).filter(|(_, cell)| !cell.is_empty()) {
                let name = head.get(column).map_or("", String::as_str);
                let is_text = self.has_text_column && column + 1 == widths.len();
                // As wide in every block, so that values stand below each other.
                let value = if is_text { cell.clone() } else { format!("{cell:>0$}", widths[column]) };
                let value = format!("{name} {value}");
                let fits = length(&line) + GAP.len() + length(&value) + INDENT <= width;
                if !line.is_empty() && !fits {
                    lines.push(format!("{:INDENT$}{line}", ""));
                    line.clear();
                }
                if !line.is_empty() {
                    line += GAP;
                }
                line += &value;
            }
            let more = wrapped(&line, 2 * INDENT, width.saturating_sub(INDENT)).into_iter();
            lines.extend(more.map(|line| format!("{:INDENT$}{line}", "")));
        }
        lines
    }
}

/// A text in lines of at most `width` letters, broken between words; those behind the first stand in by
/// `indent`.
pub fn wrapped(text: &str, indent: usize, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut is_new = true;
    for word in text.split_inclusive(' ') {
        let line = lines.last_mut().expect("there is one");
        if !is_new && length(line) + length(word.trim_end()) > width {
            lines.push(format!("{:indent$}{word}", ""));
        } else {
            line.push_str(word);
        }
        is_new = false;
    }
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

fn length(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&[&str]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.iter().map(|cell| cell.to_string()).collect()).collect()
    }

    #[test]
    fn words_of_a_column_stand_below_each_other() {
        let rows = rows(&[&["run", "loss"], &["hello-2", "1.5"]]);
        assert_eq!(TextTable::new(&rows).render(80), "run      loss\nhello-2   1.5\n");
    }

    #[test]
    fn what_is_too_wide_is_turned() {
        let rows = rows(&[
            &["layout", "GB", "step", "where the time goes"],
            &["data 64 x pipeline 2", "14.81", "7.6 s", "compute 82 %, bubble 4 %"],
            &["data 8", "2.83", "18.0 s", "compute 81 %"],
        ]);
        let wide = TextTable::new(&rows).with_text_column().render(80);
        assert_eq!(wide.lines().count(), 3);
        assert!(wide.ends_with("data 8                 2.83  18.0 s  compute 81 %\n"), "{wide}");
        let narrow = TextTable::new(&rows).with_text_column().render(30);
        let expected = "data 64 x pipeline 2\n    GB 14.81  step  7.6 s\n    where the time goes\n            compute 82 %,\n            bubble 4 %\n\
                        data 8\n    GB  2.83  step 18.0 s\n    where the time goes\n            compute 81 %\n";
        assert_eq!(narrow, expected);
        assert!(narrow.lines().all(|line| length(line) <= 30), "{narrow}");
    }

    #[test]
    fn a_sum_stands_behind_a_line() {
        let rows = rows(&[&["layer", "ms"], &["a", "10"], &["all", "10"]]);
        assert_eq!(
            TextTable::new(&rows).with_total().render(80),
            "layer  ms\na      10\n---------\nall    10\n"
        );
    }

    #[test]
    fn a_text_is_broken_between_words() {
        assert_eq!(wrapped("one two three", 2, 7), ["one two", "  three"]);
        assert_eq!(wrapped("", 2, 7), [""]);
    }
}
