//! A tokenizer.json as llama.cpp keeps it: tokens with their types, merges or scores, the tokens that begin
//! and end a text, the chat template, and by which rule text is split, which must be one that it knows by
//! name (`tokenizer.ggml.pre`): its own converter finds it by the hash of some ids, here the rule is read.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::format::{GgufPair, GgufValue};

/// What a token is to llama.cpp.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// How text is split before merges, by regular expression, and what llama.cpp calls it.
const SPLITS: [(&str, &str); 2] = [
    (
        "llama-bpe",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// What a folder of Hugging Face's says of text, as far as it does.
#[derive(Debug, Default)]
pub(super) struct VocabularyFiles {
    /// tokenizer.json.
    pub(super) tokenizer: Value,
    /// tokenizer_config.json.
    pub(super) tokenizer_config: Value,
    /// config.json, or what generation_config.json says of the tokens that begin and end a text.
    pub(super) configs: Vec<Value>,
    /// chat_template.jinja.
    pub(super) chat_template: Option<String>,
}

impl VocabularyFiles {
    /// The pairs of a model that knows so many tokens, or why llama.cpp would read text otherwise.
    pub(super) fn pairs(&self, vocab: usize) -> Result<Vec<GgufPair>, String> {
        let model = &self.tokenizer["model"];
        if self.tokenizer.is_null() {
            // It takes and gives ids alone.
            return Ok(vec![("tokenizer.ggml.model".into(), GgufValue::Text("no_vocab".into()))]);
        }
        let known = model["vocab"].as_object().filter(|_| model["type"] == "BPE" || model["type"].is_null());
        let known = known.ok_or_else(|| {
            format!("its tokenizer is a {}, and those that are written are BPE", model["type"])
        })?;
        let merges = merges(&model["merges"])?;
        let is_byte_level = model["byte_fallback"] != true;
        let mut pairs = Vec::new();
        let mut add = |key: &str, value| pairs.push((format!("tokenizer.ggml.{key}"), value));
        let text = |text: &str| GgufValue::Text(text.into());
        let (tokens, types) = self.tokens(known, vocab, is_byte_level)?;
        if is_byte_level {
            add("model", text("gpt2"));
            add("pre", text(self.split(merges.is_empty())?));
        } else {
            add("model", text("llama"));
            add("pre", text("default"));
            add("add_space_prefix", GgufValue::Bool(self.begins_with_space()));
            add("scores", GgufValue::F32s(scores(&tokens, &merges)));
        }
        let id = |token: &str| tokens.iter().position(|known| known == token).map(|id| id as u32);
        let special = |field: &str| self.special(field, id);
        let (mut begin, mut end) = (special("bos"), special("eos"));
        if is_byte_level {
            // llama.cpp would take token 11 for the end. Where a text never ends, its end is a byte that no
            // text has.
            end = end.or_else(|| id("Ā"));
            begin = begin.or(end);
        }
        let ids = [
            ("bos_token_id", begin),
            ("eos_token_id", end),
            ("unknown_token_id", special("unk").or(model["unk_token"].as_str().and_then(id))),
            ("padding_token_id", special("pad")),
        ];
        for (key, id) in ids {
            if let Some(id) = id {
                add(key, GgufValue::U32(id));
            }
        }
        add("add_bos_token", GgufValue::Bool(begin.is_some() && self.begins_with_token()));
        add("add_eos_token", GgufValue::Bool(self.tokenizer_config["add_eos_token"] == true));
        if is_byte_level {
            add("merges", GgufValue::Texts(merges.iter().map(|[a, b]| format!("{a} {b}")).collect()));
        }
        add("token_type", GgufValue::I32s(types));
        add("tokens", GgufValue::Texts(tokens));
        if let Some(template) = self.template()? {
            pairs.push(("tokenizer.chat_template".into(), GgufValue::Text(template)));
        }
        Ok(pairs)
    }

    /// Every token by its id, and what it is. Ids that the model has and the tokenizer has not are unused.
    fn tokens(
        &self,
        known: &Map<String, Value>,
        vocab: usize,
        is_byte_level: bool,
    ) -> Result<(Vec<String>, Vec<i32>), String> {
        let mut tokens: Vec<String> = (0..vocab).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED; vocab];
        let unknown = self.tokenizer["model"]["unk_token"].as_str();
        let mut set = |id: &Value, token: &str, kind: i32| {
            let id = id
                .as_u64()
                .filter(|id| (*id as usize) < vocab)
                .ok_or_else(|| format!("its tokenizer has the id {id}, and the model {vocab} tokens"))?
                as usize;
            (tokens[id], types[id]) = (token.to_owned(), kind);
            Ok::<(), String>(())
        };
        for (token, id) in known {
            let is_byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            let kind = match token.as_str() {
                token if Some(token) == unknown && !is_byte_level => UNKNOWN,
                _ if is_byte && !is_byte_level => BYTE,
                _ => NORMAL,
            };
            set(id, token, kind)?;
        }
        for added in self.tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let content = added["content"].as_str().unwrap_or_default();
            let kind = match added["special"] == true {
                true if Some(content) == unknown && !is_byte_level => UNKNOWN,
                true => CONTROL,
                false => USER_DEFINED,
            };
            set(&added["id"], content, kind)?;
        }
        Ok((tokens, types))
    }

    /// What llama.cpp calls the way in which text is split into words.
    fn split(&self, has_no_merges: bool) -> Result<&'static str, String> {
        let normalizer = &self.tokenizer["normalizer"];
        // llama.cpp composes no characters, and Qwen's tokenizers ask for it: its own files lack it too.
        if !normalizer.is_null() && normalizer["type"] != "NFC" {
            let kind = &normalizer["type"];
            return Err(format!("its tokenizer normalises text ({kind}), which llama.cpp's does not"));
        }
        let rule = &self.tokenizer["pre_tokenizer"];
        let steps = match rule["type"] == "Sequence" {
            true => rule["pretokenizers"].as_array().cloned().unwrap_or_default(),
            false => vec![rule.clone()],
        };
        let unknown = || {
            format!(
                "its tokenizer splits text by a rule that llama.cpp has no name for here ({}): export a folder without --format, \
                 and try llama.cpp's convert_hf_to_gguf.py",
                steps.iter().map(|step| step["type"].to_string()).collect::<Vec<_>>().join(", ")
            )
        };
        let (last, before) = steps.split_last().ok_or_else(unknown)?;
        if last["type"] != "ByteLevel" || last["add_prefix_space"] == true {
            return Err(unknown());
        }
        let by_gpt2 = last["use_regex"] != false;
        let is_digits = |step: &Value| step["type"] == "Digits" && step["individual_digits"] == true;
        let pattern = |step: &Value| match step["type"] == "Split" && step["invert"] != true {
            true => step["pattern"]["Regex"].as_str().map(str::to_owned),
            false => None,
        };
        match before {
            // Without merges every byte is a token, however text is split.
            [] if by_gpt2 || has_no_merges => Ok("gpt-2"),
            [step] if by_gpt2 && is_digits(step) => Ok("smollm"),
            [step] if !by_gpt2 => {
                let pattern = pattern(step).ok_or_else(unknown)?;
                SPLITS.iter().find(|(_, split)| *split == pattern).map(|(name, _)| *name).ok_or_else(unknown)
            }
            _ => Err(unknown()),
        }
    }

    /// Whether a tokenizer of SentencePiece's kind puts a space before a text.
    fn begins_with_space(&self) -> bool {
        let prepends = |rule: &Value| {
            rule["type"] == "Prepend" || (rule["type"] == "Metaspace" && rule["prepend_scheme"] != "never")
        };
        let rules = [&self.tokenizer["normalizer"], &self.tokenizer["pre_tokenizer"]];
        rules.into_iter().any(|rule| {
            let steps = rule["normalizers"].as_array().or(rule["pretokenizers"].as_array());
            prepends(rule) || steps.into_iter().flatten().any(prepends)
        })
    }

    /// The id of the token that begins ("bos") or ends ("eos") a text, or stands for another thing: by its
    /// text, or else by its number, the first of several.
    fn special(&self, field: &str, id: impl Fn(&str) -> Option<u32>) -> Option<u32> {
        let named = &self.tokenizer_config[format!("{field}_token")];
        let named = named.as_str().or(named["content"].as_str()).and_then(id);
        named.or_else(|| {
            let field = format!("{field}_token_id");
            let first = |config: &Value| match &config[&field] {
                Value::Array(ids) => ids.first().and_then(Value::as_u64),
                id => id.as_u64(),
            };
            self.configs.iter().find_map(first).map(|id| id as u32)
        })
    }

    /// Whether a text begins with a token that says so: as tokenizer_config.json has it, or else the template
    /// of tokenizer.json.
    fn begins_with_token(&self) -> bool {
        if let Some(said) = self.tokenizer_config["add_bos_token"].as_bool() {
            return said;
        }
        let rule = &self.tokenizer["post_processor"];
        let begins = |rule: &Value| {
            rule["type"] == "TemplateProcessing" && !rule["single"][0]["SpecialToken"].is_null()
        };
        begins(rule) || rule["processors"].as_array().into_iter().flatten().any(begins)
    }

    /// How a conversation becomes a text; of several the one that is for all.
    fn template(&self) -> Result<Option<String>, String> {
        if self.chat_template.is_some() {
            return Ok(self.chat_template.clone());
        }
        let text = |value: &Value| value.as_str().map(str::to_owned);
        match &self.tokenizer_config["chat_template"] {
            Value::Array(all) => {
                let default = all.iter().find(|one| one["name"] == "default").or(all.first());
                Ok(default.and_then(|one| text(&one["template"])))
            }
            one => Ok(text(one)),
        }
    }
}

/// Pairs that are merged, the first first. A token may hold a space where it is no byte's.
fn merges(list: &Value) -> Result<Vec<[String; 2]>, String> {
    let one = |merge: &Value| {
        let parts: Option<Vec<&str>> = match merge {
            Value::Array(parts) => parts.iter().map(Value::as_str).collect(),
            line => line.as_str().map(|line| line.splitn(2, ' ').collect()),
        };
        let parts: Option<[&str; 2]> = parts.and_then(|parts| parts.try_into().ok());
        let [a, b] = parts.ok_or_else(|| format!("its tokenizer has the merge {merge}, which is no pair"))?;
        Ok([a, b].map(|part| part.replace(' ', "Ġ")))
    };
    list.as_array().into_iter().flatten().map(one).collect()
}

/// SentencePiece merges the neighbours whose token has the highest score: that of a token is how early it is
/// merged. What no merge makes is never compared, and comes last.
fn scores(tokens: &[String], merges: &[[String; 2]]) -> Vec<f32> {
    let mut ranks = BTreeMap::new();
    for (rank, [a, b]) in merges.iter().enumerate() {
        ranks.entry(format!("{a}{b}")).or_insert(rank);
    }
    let rank = |token| ranks.get(token).copied().unwrap_or(merges.len());
    tokens.iter().map(|token| -(rank(token) as f32)).collect()
}

#[cfg(test)]
mod tests;
