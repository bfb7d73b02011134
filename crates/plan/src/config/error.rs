//! What can be wrong with a run file, each in one sentence that names the field.

use crate::spec::ShapeError;

/// A mistake in a run file, an override, or between them and the data.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The text is not TOML.
    #[error("line {line}: not TOML: {message}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What the TOML reader says.
        message: String,
    },
    /// An override that is not `a.b=c`, or whose path leads nowhere.
    #[error("override `{text}` must be {expected}")]
    Override {
        /// As given.
        text: String,
        /// What it should look like.
        expected: String,
    },
    /// A field that does not exist.
    #[error("`{field}` is not a field{}", did_you_mean(.hint))]
    UnknownField {
        /// Its full path.
        field: String,
        /// The field that was probably meant.
        hint: Option<String>,
    },
    /// A value of the wrong type, or an impossible one.
    #[error("`{field}` must be {expected}, got {got}{}", did_you_mean(.hint))]
    Value {
        /// Full path of the field.
        field: String,
        /// What it takes.
        expected: String,
        /// What was written.
        got: String,
        /// The value that was probably meant.
        hint: Option<String>,
    },
    /// A field that must be written.
    #[error("`{field}` is missing: {expected}")]
    Missing {
        /// Full path of the field.
        field: String,
        /// What it takes.
        expected: String,
    },
    /// A setting that would change nothing.
    #[error("`{field}` has no effect {why}")]
    NoEffect {
        /// Full path of the field.
        field: String,
        /// `with optimizer.name = "adam"`
        why: String,
    },
    /// A pipeline that no schedule fits, or other ranks than were started.
    #[error("`parallel`: {0}")]
    Ranks(String),
    /// Two settings, or a setting and the data, that contradict each other.
    #[error("`{field}` {problem}")]
    Conflict {
        /// Full path of the field that should change.
        field: String,
        /// `is 100, but the data has 256 tokens`
        problem: String,
    },
    /// A model whose layers do not fit together.
    #[error("`model`: {0}")]
    Shape(#[from] ShapeError),
}

pub(crate) fn did_you_mean(hint: &Option<String>) -> String {
    hint.as_ref().map_or(String::new(), |hint| format!("; did you mean `{hint}`?"))
}

/// The candidate nearest to `word`, if it is near: at most a third of its letters wrong.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |s: &str| s.to_lowercase().replace('-', "_").chars().collect::<Vec<_>>();
    let word = plain(word);
    candidates
        .into_iter()
        .map(|candidate| (distance(&word, &plain(candidate)), candidate))
        .filter(|&(distance, candidate)| distance <= (candidate.len().max(word.len()) / 3).max(1))
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Edit distance: insertions, deletions, substitutions, and swaps of neighbours, each 1.
fn distance(a: &[char], b: &[char]) -> usize {
    // Three rows of the usual table: the one before last is for swaps.
    let mut before = vec![0; b.len() + 1];
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replace = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replace.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let names = ["sgd", "momentum", "adam", "adamw"];
        assert_eq!(nearest("adma", names), Some("adam"));
        assert_eq!(nearest("AdamW", names), Some("adamw"));
        assert_eq!(nearest("momentun", names), Some("momentum"));
        assert_eq!(nearest("rmsprop", names), None);
        assert_eq!(nearest("x", names), None);
    }
}
