//! Rows of words as columns of a terminal.

/// Each column as wide as its widest word; the first is of names, the others stand at their right.
pub fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|word| word.chars().count()).max();
    let widths: Vec<usize> = (0..count).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let words = row.iter().zip(&widths).enumerate().map(|(column, (word, width))| match column {
            0 => format!("{word:<width$}"),
            _ => format!("{word:>width$}"),
        });
        words.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_column_stand_below_each_other() {
        let rows = [["run", "loss"], ["hello-2", "1.5"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), "run      loss\nhello-2   1.5");
        assert_eq!(columns(&[]), "");
    }
}
