//! A tokenizer as llama.cpp keeps it: tokens with their types, merges or scores, the tokens that begin and end
//! a text, the chat template, and by which rule text is split, which must be one that it knows by name
//! (`tokenizer.ggml.pre`): its own converter finds it by the hash of some ids, here the rule itself is known.

use espalier_data::{SplitPattern, TokenAlphabet, TokenKind, TokenTable};
use serde_json::Value;

use super::format::{GgufPair, GgufValue};

/// What a model knows of text beside its tokenizer.
#[derive(Debug, Default)]
pub(super) struct TextRules {
    /// generation_config.json and config.json, which give the tokens that begin and end a text by number.
    pub(super) configs: Vec<Value>,
    /// chat_template.jinja.
    pub(super) chat_template: Option<String>,
}

impl TextRules {
    /// The pairs of a model that knows so many tokens, or why llama.cpp would read text otherwise. Without a
    /// tokenizer it takes and gives ids alone.
    pub(super) fn pairs(
        &self,
        tokenizer: Option<&TokenTable>,
        vocab: usize,
    ) -> Result<Vec<GgufPair>, String> {
        let text = |text: &str| GgufValue::Text(text.into());
        let Some(table) = tokenizer else {
            return Ok(vec![("tokenizer.ggml.model".into(), text("no_vocab"))]);
        };
        let mut pairs = Vec::new();
        let mut add = |key: &str, value| pairs.push((format!("tokenizer.ggml.{key}"), value));
        let is_byte_level = match table.alphabet {
            TokenAlphabet::Bytes { .. } => {
                add("model", text("gpt2"));
                add("pre", text(split(table)?));
                true
            }
            TokenAlphabet::Characters { space_prefix } => {
                add("model", text("llama"));
                add("pre", text("default"));
                add("add_space_prefix", GgufValue::Bool(space_prefix));
                false
            }
        };
        let by_number = |field: &str| self.configs.iter().find_map(|config| first_id(&config[field]));
        let mut begin = table.bos.or_else(|| by_number("bos_token_id"));
        let mut end = table.eos.or_else(|| by_number("eos_token_id"));
        if is_byte_level {
            // llama.cpp would take token 11 for the end. Where a text never ends, its end is a byte that no
            // text has.
            let zero = || table.tokens.iter().position(|token| token.text == "Ā").map(|id| id as u32);
            end = end.or_else(zero);
            begin = begin.or(end);
        }
        for (key, id) in [
            ("bos_token_id", begin),
            ("eos_token_id", end),
            ("unknown_token_id", table.unknown),
            ("padding_token_id", table.padding),
        ] {
            if let Some(id) = id {
                add(key, GgufValue::U32(id));
            }
        }
        add("add_bos_token", GgufValue::Bool(begin.is_some() && table.add_bos));
        if is_byte_level {
            // A token may hold a space where it is no byte's.
            let merge = |(a, b): &(String, String)| [a, b].map(|part| part.replace(' ', "Ġ")).join(" ");
            add("merges", GgufValue::Texts(table.merges.iter().map(merge).collect()));
        }
        let more = vocab.saturating_sub(table.tokens.len());
        let pad = |value: f32| std::iter::repeat_n(value, more);
        if !is_byte_level {
            let scores = table.tokens.iter().map(|token| token.score);
            add("scores", GgufValue::F32s(scores.chain(pad(0.0)).collect()));
        }
        let kinds = table.tokens.iter().map(|token| kind(token.kind, is_byte_level));
        let unused = std::iter::repeat_n(kind(TokenKind::Unused, is_byte_level), more);
        add("token_type", GgufValue::I32s(kinds.chain(unused).collect()));
        let tokens = table.tokens.iter().map(|token| token.text.clone());
        let unused = (table.tokens.len()..vocab).map(|id| format!("[PAD{id}]"));
        add("tokens", GgufValue::Texts(tokens.chain(unused).collect()));
        let template = self.chat_template.as_ref().or(table.chat_template.as_ref());
        if let Some(template) = template {
            pairs.push(("tokenizer.chat_template".into(), text(template)));
        }
        Ok(pairs)
    }
}

/// What llama.cpp calls the way in which text is split into words.
fn split(table: &TokenTable) -> Result<&'static str, String> {
    match table.alphabet {
        TokenAlphabet::Bytes { space_prefix: true, .. } => {
            Err("its tokenizer puts a space before a text, which llama.cpp's does not".into())
        }
        TokenAlphabet::Bytes { split: Some(split), .. } => Ok(match split {
            SplitPattern::Gpt2 => "gpt-2",
            SplitPattern::SmolLm => "smollm",
            SplitPattern::Llama3 => "llama-bpe",
            SplitPattern::Qwen2 => "qwen2",
        }),
        // Every byte is a token, however text is split.
        _ if table.merges.is_empty() => Ok("gpt-2"),
        _ => {
            Err("its tokenizer merges a text without splitting it into words, which llama.cpp's does not"
                .into())
        }
    }
}

/// The number of a token's type. Byte-level tokenizers know every text: what they call unknown marks
/// something.
fn kind(kind: TokenKind, is_byte_level: bool) -> i32 {
    match kind {
        TokenKind::Normal => 1,
        TokenKind::Unknown if !is_byte_level => 2,
        TokenKind::Control | TokenKind::Unknown => 3,
        TokenKind::UserDefined => 4,
        TokenKind::Unused => 5,
        TokenKind::Byte => 6,
    }
}

/// An id, or the first of several.
fn first_id(value: &Value) -> Option<u32> {
    let id = match value {
        Value::Array(ids) => ids.first()?,
        id => id,
    };
    id.as_u64().map(|id| id as u32)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use espalier_data::TokenEntry;
    use serde_json::json;

    use super::*;

    const GPT2: TokenAlphabet = TokenAlphabet::Bytes { split: Some(SplitPattern::Gpt2), space_prefix: false };

    fn table(alphabet: TokenAlphabet, tokens: &[(&str, TokenKind, f32)]) -> TokenTable {
        let entry =
            |&(text, kind, score): &(&str, TokenKind, f32)| TokenEntry { text: text.into(), kind, score };
        TokenTable {
            alphabet,
            tokens: tokens.iter().map(entry).collect(),
            merges: vec![("Ġ".into(), "a".into())],
            bos: None,
            eos: None,
            unknown: None,
            padding: None,
            add_bos: true,
            chat_template: Some("{{ messages }}".into()),
        }
    }

    const BYTES: [(&str, TokenKind, f32); 5] = [
        ("a", TokenKind::Normal, 0.0),
        ("Ġ", TokenKind::Normal, 0.0),
        ("Ġa", TokenKind::Normal, -1.0),
        ("<|end|>", TokenKind::Unknown, 0.0),
        ("<think>", TokenKind::UserDefined, 0.0),
    ];

    fn pairs(rules: &TextRules, table: &TokenTable, vocab: usize) -> BTreeMap<String, GgufValue> {
        let pairs = rules.pairs(Some(table), vocab).unwrap();
        let count = pairs.len();
        let by_key: BTreeMap<_, _> = pairs.into_iter().collect();
        assert_eq!(by_key.len(), count, "a key stands twice");
        by_key
    }

    fn text(text: &str) -> GgufValue {
        GgufValue::Text(text.into())
    }

    #[test]
    fn tokens_have_types_and_what_the_model_has_more_is_unused() {
        let mut table = table(GPT2, &BYTES);
        let pairs_of = |table: &TokenTable| pairs(&TextRules::default(), table, 6);
        // Nothing begins or ends a text.
        let none = pairs_of(&table);
        assert!(!none.contains_key("tokenizer.ggml.eos_token_id"));
        assert_eq!(none["tokenizer.ggml.add_bos_token"], GgufValue::Bool(false));
        table.eos = Some(3);
        let pairs = pairs_of(&table);
        let tokens = ["a", "Ġ", "Ġa", "<|end|>", "<think>", "[PAD5]"].map(str::to_owned);
        assert_eq!(pairs["tokenizer.ggml.tokens"], GgufValue::Texts(tokens.into()));
        assert_eq!(pairs["tokenizer.ggml.token_type"], GgufValue::I32s(vec![1, 1, 1, 3, 4, 5]));
        assert_eq!(pairs["tokenizer.ggml.merges"], GgufValue::Texts(vec!["Ġ a".into()]));
        assert_eq!(pairs["tokenizer.ggml.eos_token_id"], GgufValue::U32(3));
        // Some token must begin a text: llama.cpp would take one by itself.
        assert_eq!(pairs["tokenizer.ggml.bos_token_id"], GgufValue::U32(3));
        assert_eq!(pairs["tokenizer.chat_template"], text("{{ messages }}"));
        assert!(!pairs.contains_key("tokenizer.ggml.scores"));
    }

    #[test]
    fn what_stands_beside_the_weights_comes_first_or_last() {
        let rules = TextRules {
            configs: vec![json!({}), json!({"eos_token_id": [4, 3], "bos_token_id": 3})],
            chat_template: Some("{{ own }}".into()),
        };
        let found = pairs(&rules, &table(GPT2, &BYTES), 5);
        let ids = ["bos", "eos"].map(|key| &found[&format!("tokenizer.ggml.{key}_token_id")]);
        assert_eq!(ids, [&GgufValue::U32(3), &GgufValue::U32(4)]);
        assert_eq!(found["tokenizer.chat_template"], text("{{ own }}"));
        let named = TokenTable { eos: Some(0), ..table(GPT2, &BYTES) };
        assert_eq!(pairs(&rules, &named, 5)["tokenizer.ggml.eos_token_id"], GgufValue::U32(0));
        // A run on bytes: its text ends at a byte that it has not.
        let bytes = table(GPT2, &[("b", TokenKind::Normal, 0.0), ("Ā", TokenKind::Normal, 0.0)]);
        assert_eq!(pairs(&TextRules::default(), &bytes, 2)["tokenizer.ggml.eos_token_id"], GgufValue::U32(1));
    }

    /// Each rule that llama.cpp has a name for, and those that it has not.
    #[test]
    fn the_rule_by_which_text_is_split_is_named() {
        let alphabet = |split, space_prefix| TokenAlphabet::Bytes { split, space_prefix };
        for (pattern, name) in [
            (SplitPattern::Gpt2, "gpt-2"),
            (SplitPattern::SmolLm, "smollm"),
            (SplitPattern::Llama3, "llama-bpe"),
            (SplitPattern::Qwen2, "qwen2"),
        ] {
            let found = pairs(&TextRules::default(), &table(alphabet(Some(pattern), false), &BYTES), 5);
            assert_eq!(found["tokenizer.ggml.pre"], text(name));
        }
        let refused = |alphabet| TextRules::default().pairs(Some(&table(alphabet, &BYTES)), 5).unwrap_err();
        assert_eq!(
            refused(alphabet(None, false)),
            "its tokenizer merges a text without splitting it into words, which llama.cpp's does not"
        );
        assert_eq!(
            refused(alphabet(Some(SplitPattern::Gpt2), true)),
            "its tokenizer puts a space before a text, which llama.cpp's does not"
        );
        let single = TokenTable { merges: Vec::new(), ..table(alphabet(None, false), &BYTES) };
        assert_eq!(split(&single), Ok("gpt-2"));
    }

    /// Llama 2's kind: scores take the place of merges.
    #[test]
    fn a_tokenizer_of_sentencepiece_has_scores() {
        let tokens = [
            ("<unk>", TokenKind::Unknown, 0.0),
            ("<0x0A>", TokenKind::Byte, 0.0),
            ("▁a", TokenKind::Normal, -1.0),
        ];
        let alphabet = TokenAlphabet::Characters { space_prefix: true };
        let table = TokenTable { unknown: Some(0), ..table(alphabet, &tokens) };
        let pairs = pairs(&TextRules::default(), &table, 4);
        assert_eq!(pairs["tokenizer.ggml.model"], text("llama"));
        assert_eq!(pairs["tokenizer.ggml.token_type"], GgufValue::I32s(vec![2, 6, 1, 5]));
        assert_eq!(pairs["tokenizer.ggml.scores"], GgufValue::F32s(vec![0.0, 0.0, -1.0, 0.0]));
        assert_eq!(pairs["tokenizer.ggml.add_space_prefix"], GgufValue::Bool(true));
        assert_eq!(pairs["tokenizer.ggml.unknown_token_id"], GgufValue::U32(0));
        assert!(!pairs.contains_key("tokenizer.ggml.merges"));
    }

    #[test]
    fn a_model_without_a_tokenizer_takes_ids() {
        let none = TextRules::default().pairs(None, 9).unwrap();
        assert_eq!(none, [("tokenizer.ggml.model".to_owned(), text("no_vocab"))]);
    }
}
