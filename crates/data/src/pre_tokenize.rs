//! GPT-2's split of a text into words, by hand where GPT-2 has a regular expression:
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! That is: an English ending; a run of letters, of digits or of other signs, each with the blank before it;
//! else white space, which leaves its last character to the word that follows.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// The words of a text, in order; together they are the text.
pub(crate) struct PreTokens<'a>(pub &'a str);

#[derive(PartialEq, Clone, Copy)]
enum CharClass {
    Space,
    Letter,
    Number,
    Other,
}

impl<'a> Iterator for PreTokens<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let text = self.0;
        let first = text.chars().next()?;
        let ending = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"].into_iter().find(|e| text.starts_with(e));
        let end = if let Some(ending) = ending { ending.len() } else { run(text, first) };
        let (word, rest) = text.split_at(end);
        self.0 = rest;
        Some(word)
    }
}

/// Where the run that starts the text ends.
fn run(text: &str, first: char) -> usize {
    let blank = usize::from(first == ' ');
    let rest = &text[blank..];
    let kind = rest.chars().next().map_or(CharClass::Space, kind_of);
    if kind != CharClass::Space {
        return blank + rest.find(|c| kind_of(c) != kind).unwrap_or(rest.len());
    }
    let Some(end) = text.find(|c| kind_of(c) != CharClass::Space) else { return text.len() };
    let last = text[..end].char_indices().next_back().map_or(0, |(at, _)| at);
    if last > 0 { last } else { end }
}

fn kind_of(c: char) -> CharClass {
    match c {
        'a'..='z' | 'A'..='Z' => CharClass::Letter,
        '0'..='9' => CharClass::Number,
        c if c.is_whitespace() => CharClass::Space,
        c if c.is_ascii() => CharClass::Other,
        // `char::is_alphabetic` would also take the vowel signs of Indic scripts, which \p{L} does not.
        c => match c.general_category_group() {
            GeneralCategoryGroup::Letter => CharClass::Letter,
            GeneralCategoryGroup::Number => CharClass::Number,
            _ => CharClass::Other,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_gpt2s() {
        let words = |text| PreTokens(text).collect::<Vec<_>>();
        assert_eq!(words("I'll don't they're"), ["I", "'ll", " don", "'t", " they", "'re"]);
        assert_eq!(words("'S 's''s"), ["'", "S", " '", "s", "''", "s"]);
        assert_eq!(words("a  b\n\n c \t"), ["a", " ", " b", "\n\n", " c", " \t"]);
        assert_eq!(words(" 12ab½ x=y;  "), [" 12", "ab", "½", " x", "=", "y", ";", "  "]);
        assert_eq!(words("हिन्दी\u{a0}Ⅷ"), ["ह", "ि", "न", "्", "द", "ी", "\u{a0}", "Ⅷ"]);
        assert_eq!(words(""), [""; 0]);
    }
}
