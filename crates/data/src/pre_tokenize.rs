//! How a text is split into words before they are merged, by hand where tokenizers have a regular expression.
//!
//! ```text
//! GPT-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! SmolLM   \p{N} alone, and what is between by GPT-2's
//! Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
//!          \s*[\r\n]+|\s+(?!\S)|\s+
//! Qwen     the same with \p{N} instead of \p{N}{1,3}
//! ```
//!
//! GPT-2's is: an English ending; a run of letters, of digits or of other signs, each with the blank before
//! it; else white space, which leaves its last character to the word that follows. In Llama 3's any sign may
//! stand before letters, digits have none before them, lines end a run of signs, and white space ends with its
//! last line.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// The split of a family of tokenizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitPattern {
    Gpt2,
    SmolLm,
    Llama3,
    /// Also Qwen 3's.
    Qwen2,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl SplitPattern {
    /// The split that a regular expression of a `tokenizer.json` is.
    pub(crate) fn of_regex(regex: &str) -> Option<SplitPattern> {
        match regex {
            GPT2 => Some(SplitPattern::Gpt2),
            LLAMA3 => Some(SplitPattern::Llama3),
            QWEN2 => Some(SplitPattern::Qwen2),
            _ => None,
        }
    }

    /// The words of a text, in order; together they are the text.
    pub(crate) fn words(self, text: &str) -> PreTokens<'_> {
        PreTokens { rest: text, pattern: self, before_number: 0 }
    }
}

/// The words of a text that are still to come.
pub(crate) struct PreTokens<'a> {
    rest: &'a str,
    pattern: SplitPattern,
    /// Bytes of the rest before its next number, where that has been looked for.
    before_number: usize,
}

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
        let text = self.rest;
        let first = text.chars().next()?;
        let end = match self.pattern {
            SplitPattern::Gpt2 => gpt2(text, first),
            SplitPattern::SmolLm if is_number(first) => first.len_utf8(),
            SplitPattern::SmolLm => {
                if self.before_number == 0 {
                    self.before_number = text.find(is_number).unwrap_or(text.len());
                }
                // The split of what is between digits does not see these.
                let end = gpt2(&text[..self.before_number], first);
                self.before_number -= end;
                end
            }
            SplitPattern::Llama3 => llama3(text, first, 3),
            SplitPattern::Qwen2 => llama3(text, first, 1),
        };
        let (word, rest) = text.split_at(end);
        self.rest = rest;
        Some(word)
    }
}

/// Where the first word ends by GPT-2's split.
fn gpt2(text: &str, first: char) -> usize {
    if first == '\''
        && let Some(ending) =
            ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"].into_iter().find(|e| text.starts_with(e))
    {
        return ending.len();
    }
    let blank = usize::from(first == ' ');
    let rest = &text[blank..];
    match rest.chars().next().map_or(CharClass::Space, class_of) {
        CharClass::Space => white_space(text),
        class => blank + run(rest, class),
    }
}

/// Where the first word ends by Llama 3's split, which takes so many digits at once.
fn llama3(text: &str, first: char, digits: usize) -> usize {
    if first == '\''
        && let Some(ending) = english_ending(text)
    {
        return ending;
    }
    let class = class_of(first);
    match class {
        CharClass::Letter => return run(text, class),
        CharClass::Number => {
            let taken = text.chars().take(digits).take_while(|c| is_number(*c));
            return taken.map(char::len_utf8).sum();
        }
        CharClass::Space | CharClass::Other => {}
    }
    let behind = &text[first.len_utf8()..];
    let next = behind.chars().next().map(class_of);
    if next == Some(CharClass::Letter) && !is_line_end(first) {
        return first.len_utf8() + run(behind, CharClass::Letter);
    }
    let signs = match (class, next) {
        (CharClass::Other, _) => Some(text),
        _ if first == ' ' && next == Some(CharClass::Other) => Some(behind),
        _ => None,
    };
    if let Some(signs) = signs {
        let end = text.len() - signs.len() + run(signs, CharClass::Other);
        return end + text[end..].find(|c| !is_line_end(c)).unwrap_or(text.len() - end);
    }
    let spaces = &text[..run(text, CharClass::Space)];
    spaces.rfind(is_line_end).map_or_else(|| white_space(text), |last| last + 1)
}

/// An English ending in upper or lower case, after its apostrophe; a long s is an s.
fn english_ending(text: &str) -> Option<usize> {
    let mut chars = text.chars().skip(1);
    let (first, second) = (chars.next()?, chars.next());
    match (first.to_ascii_lowercase(), second.map(|c| c.to_ascii_lowercase())) {
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(3),
        ('s' | 't' | 'm' | 'd', _) => Some(2),
        ('ſ', _) => Some(1 + first.len_utf8()),
        _ => None,
    }
}

/// Where white space that begins a text ends, which leaves its last character to what follows.
fn white_space(text: &str) -> usize {
    let end = run(text, CharClass::Space);
    if end == text.len() {
        return end;
    }
    let last = text[..end].char_indices().next_back().map_or(0, |(at, _)| at);
    if last > 0 { last } else { end }
}

/// Where the run of one class that begins a text ends.
fn run(text: &str, class: CharClass) -> usize {
    text.find(|c| class_of(c) != class).unwrap_or(text.len())
}

fn is_number(c: char) -> bool {
    class_of(c) == CharClass::Number
}

fn is_line_end(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

fn class_of(c: char) -> CharClass {
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
        let words = |text| SplitPattern::Gpt2.words(text).collect::<Vec<_>>();
        assert_eq!(words("I'll don't they're"), ["I", "'ll", " don", "'t", " they", "'re"]);
        assert_eq!(words("'S 's''s"), ["'", "S", " '", "s", "''", "s"]);
        assert_eq!(words("a  b\n\n c \t"), ["a", " ", " b", "\n\n", " c", " \t"]);
        assert_eq!(words(" 12ab½ x=y;  "), [" 12", "ab", "½", " x", "=", "y", ";", "  "]);
        assert_eq!(words("हिन्दी\u{a0}Ⅷ"), ["ह", "ि", "न", "्", "द", "ी", "\u{a0}", "Ⅷ"]);
        assert_eq!(words(""), [""; 0]);
    }

    /// Digits one by one, and white space before one does not leave its last character to it.
    #[test]
    fn words_are_smollms() {
        let words = |text| SplitPattern::SmolLm.words(text).collect::<Vec<_>>();
        assert_eq!(words("a  12 b½"), ["a", "  ", "1", "2", " b", "½"]);
        assert_eq!(words("it's 3's"), ["it", "'s", " ", "3", "'s"]);
    }

    #[test]
    fn words_are_llama3s() {
        let words = |text| SplitPattern::Llama3.words(text).collect::<Vec<_>>();
        assert_eq!(
            words("I'LL don't x'ſy they'r"),
            ["I", "'LL", " don", "'t", " x", "'ſ", "y", " they", "'r"]
        );
        assert_eq!(words("1234567 12"), ["123", "456", "7", " ", "12"]);
        assert_eq!(words("f(x) = \"a\";\n\n\tb"), ["f", "(x", ")", " =", " \"", "a", "\";\n\n", "\tb"]);
        assert_eq!(words("a \n \n  b  \n"), ["a", " \n \n", " ", " b", "  \n"]);
        assert_eq!(words("\r\na\u{a0}b \t"), ["\r\n", "a", "\u{a0}b", " \t"]);
        let one_digit: Vec<_> = SplitPattern::Qwen2.words("12 é3").collect();
        assert_eq!(one_digit, ["1", "2", " é", "3"]);
    }

    /// Two that begin with the same words are told apart by their full text.
    #[test]
    fn regular_expressions_are_known() {
        for (regex, pattern) in
            [(GPT2, SplitPattern::Gpt2), (LLAMA3, SplitPattern::Llama3), (QWEN2, SplitPattern::Qwen2)]
        {
            assert_eq!(SplitPattern::of_regex(regex), Some(pattern));
        }
        assert_eq!(SplitPattern::of_regex(&LLAMA3[1..]), None);
    }
}
