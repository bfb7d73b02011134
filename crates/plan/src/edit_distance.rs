//! The word that was probably meant.

/// The end of a sentence about a word that is not known.
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
