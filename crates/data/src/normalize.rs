//! What a tokenizer does to a text before it is split: composed characters (Qwen), or SentencePiece's spaces,
//! which become U+2581, often with one before the text (Llama 2, Mistral, Gemma).

use std::borrow::Cow;

use serde_json::Value;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// What SentencePiece writes for a space.
pub(crate) const SPACE: char = '\u{2581}';

/// The normalizers that are known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextNormalizer {
    None,
    /// Unicode's normal form C.
    Composed,
    /// Spaces become U+2581.
    Spaces {
        /// Whether one is put before a text that is not empty.
        prepend: bool,
    },
}

impl TextNormalizer {
    /// The one that a `tokenizer.json` names; none where it is another.
    pub(crate) fn of_json(json: &Value) -> Option<TextNormalizer> {
        let is_replace = |one: &Value| {
            one["type"] == "Replace" && one["pattern"]["String"] == " " && one["content"] == "\u{2581}"
        };
        match json["type"].as_str() {
            None if json.is_null() => Some(TextNormalizer::None),
            Some("NFC") => Some(TextNormalizer::Composed),
            Some("Replace") if is_replace(json) => Some(TextNormalizer::Spaces { prepend: false }),
            Some("Sequence") => match json["normalizers"].as_array()?.as_slice() {
                [] => Some(TextNormalizer::None),
                [one] => TextNormalizer::of_json(one),
                [first, second]
                    if first["type"] == "Prepend" && first["prepend"] == "\u{2581}" && is_replace(second) =>
                {
                    Some(TextNormalizer::Spaces { prepend: true })
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// The text that is split. One that `continues` another has nothing put before it.
    pub(crate) fn apply(self, text: &str, continues: bool) -> Cow<'_, str> {
        match self {
            TextNormalizer::None => text.into(),
            TextNormalizer::Composed if text.is_ascii() => text.into(),
            TextNormalizer::Composed => match is_nfc_quick(text.chars()) {
                IsNormalized::Yes => text.into(),
                IsNormalized::No | IsNormalized::Maybe => text.nfc().collect::<String>().into(),
            },
            TextNormalizer::Spaces { prepend } if prepend && !continues && !text.is_empty() => {
                with_marks(text, true)
            }
            TextNormalizer::Spaces { .. } => with_marks(text, false),
        }
    }
}

/// A text with U+2581 for each space, and perhaps one before it.
pub(crate) fn with_marks(text: &str, prepend: bool) -> Cow<'_, str> {
    if !prepend && !text.contains(' ') {
        return text.into();
    }
    let mut marked = String::with_capacity(text.len() + text.len() / 2 + SPACE.len_utf8());
    if prepend {
        marked.push(SPACE);
    }
    for (i, piece) in text.split(' ').enumerate() {
        if i > 0 {
            marked.push(SPACE);
        }
        marked.push_str(piece);
    }
    marked.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_known_is_applied() {
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let prepend = json!({ "type": "Prepend", "prepend": "▁" });
        let of = |json: Value| TextNormalizer::of_json(&json);
        assert_eq!(of(json!({ "type": "NFC" })).unwrap().apply("e\u{301} x", false), "é x");
        let llama2 = of(json!({ "type": "Sequence", "normalizers": [prepend, replace.clone()] })).unwrap();
        assert_eq!(llama2.apply(" a  b", false), "▁▁a▁▁b");
        assert_eq!((llama2.apply(" a", true), llama2.apply("", false)), ("▁a".into(), "".into()));
        assert_eq!(of(replace).unwrap().apply("a b", false), "a▁b");
        assert_eq!(of(json!(null)), Some(TextNormalizer::None));
        assert_eq!(of(json!({ "type": "Lowercase" })), None);
    }
}
