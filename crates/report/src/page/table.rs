//! A table of a page.

use crate::canvas::escape;

/// Rows under a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// From left to right.
    pub columns: Vec<Column>,
    /// A cell for each column.
    pub rows: Vec<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Its head.
    pub name: String,
    /// Whether it holds numbers, which are aligned at their end.
    pub is_number: bool,
}

impl Column {
    pub fn text(name: impl Into<String>) -> Column {
        Column { name: name.into(), is_number: false }
    }

    pub fn number(name: impl Into<String>) -> Column {
        Column { name: name.into(), is_number: true }
    }

    fn class(&self) -> &'static str {
        if self.is_number { " class=\"number\"" } else { "" }
    }
}

impl Table {
    /// A head alone.
    pub fn new(columns: Vec<Column>) -> Table {
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row; cells beyond the columns are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().take(self.columns.len()).collect());
    }

    pub(super) fn html(&self) -> String {
        let mut html = String::from("<div class=\"table\"><table>\n<thead><tr>");
        for column in &self.columns {
            html += &format!("<th scope=\"col\"{}>{}</th>", column.class(), escape(&column.name));
        }
        html += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            html += "<tr>";
            for (column, cell) in self.columns.iter().zip(row) {
                html += &format!("<td{}>{}</td>", column.class(), escape(cell));
            }
            html += "</tr>\n";
        }
        html + "</tbody>\n</table></div>\n"
    }
}
