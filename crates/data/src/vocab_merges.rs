//! GPT-2's older files, `vocab.json` and `merges.txt`, as the `tokenizer.json` that gives the same ids: what
//! transformers makes of them when it converts its slow tokenizer (`GPT2Converter`).
//!
//! Tokens that mark something stand in files of their own: `added_tokens.json` and the `added_tokens_decoder`
//! of `tokenizer_config.json` have their ids, that file and `special_tokens_map.json` say which mark the
//! beginning, the end or padding. GPT-2's own is `<|endoftext|>`. Other tokenizers come in two files of these
//! names too (CLIP's, Qwen's), and split text otherwise: where `tokenizer_class` names one of them it is
//! refused.

use crate::{Error, byte_level::ByteLevelFile, error, regular_file::RECORDS, tokenizer_config::object};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

const VOCAB: &str = "vocab.json";
const MERGES: &str = "merges.txt";
/// The class whose split and spelling are done here, with or without "Fast" behind it.
const CLASS: &str = "GPT2Tokenizer";
/// What ends a text where no file says so.
const END: &str = "<|endoftext|>";

/// The two files of a folder, where it has both.
pub(crate) fn of_folder(folder: &Path) -> Option<[PathBuf; 2]> {
    let files = [VOCAB, MERGES].map(|name| folder.join(name));
    files.iter().all(|file| file.is_file()).then_some(files)
}

/// Whether a path names the first of the two files.
pub(crate) fn is_vocab(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == VOCAB)
}

/// A `tokenizer.json` that replaces the two files; `vocab` is the path of the first.
pub(crate) fn to_json(vocab: &Path) -> Result<String, Error> {
    let merges = vocab.with_file_name(MERGES);
    let object = |path: &Path| object(path, RECORDS);
    let text = error::read(&merges, "GPT-2's merges.txt, beside its vocab.json", RECORDS)?;
    let text = String::from_utf8(text)
        .map_err(|why| Error::tokenizer(&merges, "two tokens in each line, as UTF-8", why))?;
    let is_merge = |line: &&str| !line.is_empty() && !line.starts_with("#version");
    let merges: Vec<&str> = text.lines().filter(is_merge).collect();
    let expected = "tokens and their ids, as a JSON object";
    let tokens = object(vocab)?.ok_or_else(|| Error::tokenizer(vocab, expected, "no such file"))?;
    let beside = |name: &str| vocab.with_file_name(name);
    let (config_path, map_path) = (beside("tokenizer_config.json"), beside("special_tokens_map.json"));
    let config = object(&config_path)?.unwrap_or_default();
    let class = config.get("tokenizer_class").filter(|class| !class.is_null());
    if let Some(class) = class
        && class.as_str().map(|class| class.trim_end_matches("Fast")) != Some(CLASS)
    {
        let expected = format!("the `tokenizer_class` \"{CLASS}\" of {VOCAB} and {MERGES}");
        return Err(Error::tokenizer(&config_path, expected, class));
    }
    let prefix_space = match config.get("add_prefix_space") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(prefix)) => *prefix,
        Some(other) => {
            return Err(Error::tokenizer(&config_path, "`add_prefix_space` true or false", other));
        }
    };

    // By id, so that each stands there once.
    let mut added: BTreeMap<u64, Value> = BTreeMap::new();
    for (content, id) in object(&beside("added_tokens.json"))?.unwrap_or_default() {
        if let Some(id) = id.as_u64() {
            added.insert(id, marker(id, &content));
        }
    }
    if let Some(Value::Object(decoder)) = config.get("added_tokens_decoder") {
        for (id, token) in decoder {
            if let (Ok(id), true) = (id.parse(), token.is_object()) {
                let mut token = token.clone();
                token["id"] = json!(id);
                added.insert(id, token);
            }
        }
    }
    let map = object(&map_path)?.unwrap_or_default();
    for content in [&config, &map].into_iter().flat_map(named).chain([END.to_owned()]) {
        if let Some(id) = tokens.get(&content).and_then(Value::as_u64) {
            added.entry(id).or_insert_with(|| marker(id, &content));
        }
    }

    Ok(ByteLevelFile {
        added_tokens: added.into_values().collect(),
        prefix_space: [prefix_space, true],
        use_regex: true,
        affix: Some(""),
        vocab: tokens,
        merges,
    }
    .to_json())
}

/// The tokens that a file of settings names as beginning, end, padding and the like.
fn named(settings: &Map<String, Value>) -> Vec<String> {
    let content = |token: &Value| token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned);
    let single =
        settings.iter().filter(|(key, _)| key.ends_with("_token")).filter_map(|(_, token)| content(token));
    let more = settings.get("additional_special_tokens").and_then(Value::as_array);
    single.chain(more.into_iter().flatten().filter_map(content)).collect()
}

/// A token that marks something, wherever it stands.
fn marker(id: u64, content: &str) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;
    use std::fs;

    /// A folder as older models have it: the bytes of "a b" and one merge.
    fn folder(more: &[(&str, Value)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let vocab = json!({ "a": 0, "b": 1, "Ġ": 2, "Ġa": 3, "<|endoftext|>": 4 });
        fs::write(at(VOCAB), vocab.to_string()).unwrap();
        fs::write(at(MERGES), "#version: 0.2\nĠ a\n").unwrap();
        more.iter().for_each(|(name, value)| fs::write(at(name), value.to_string()).unwrap());
        folder
    }

    /// By its folder or by its first file; the token that ends a text is known, and a `tokenizer.json` comes
    /// of it that says the same.
    #[test]
    fn two_files_are_a_tokenizer() {
        let folder = folder(&[]);
        for path in [folder.path().to_owned(), folder.path().join(VOCAB)] {
            let tokenizer = Tokenizer::open(&path).unwrap();
            assert_eq!(tokenizer.encode("a ab<|endoftext|>").unwrap(), [0, 3, 1, 4]);
            assert_eq!((tokenizer.vocab(), tokenizer.end()), (5, Some(4)));
            let written = folder.path().join("again.json");
            fs::write(&written, tokenizer.to_json().unwrap()).unwrap();
            assert_eq!(Tokenizer::open(&written).unwrap().encode("a ab<|endoftext|>").unwrap(), [0, 3, 1, 4]);
        }
    }

    #[test]
    fn tokens_that_were_added_have_their_ids() {
        let decoder = json!({ "6": { "content": "<two>", "special": true } });
        let folder = folder(&[
            ("added_tokens.json", json!({ "<one>": 5 })),
            (
                "tokenizer_config.json",
                json!({
                    "tokenizer_class": "GPT2TokenizerFast",
                    "add_prefix_space": true,
                    "added_tokens_decoder": decoder,
                }),
            ),
        ]);
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(tokenizer.encode("a<one><two>b").unwrap(), [3, 5, 6, 2, 1]);
    }

    #[test]
    fn what_splits_text_otherwise_is_refused() {
        let refused = |name: &str, value: Value| {
            let folder = folder(&[(name, value)]);
            Tokenizer::open(folder.path()).unwrap_err().to_string()
        };
        let other = refused("tokenizer_config.json", json!({ "tokenizer_class": "CLIPTokenizer" }));
        assert!(
            other.contains("\"GPT2Tokenizer\" of vocab.json and merges.txt, got \"CLIPTokenizer\""),
            "{other}"
        );
        let prefix = refused("tokenizer_config.json", json!({ "add_prefix_space": "yes" }));
        assert!(prefix.contains("`add_prefix_space` true or false, got \"yes\""), "{prefix}");
        let vocab = refused(VOCAB, json!([1]));
        assert!(
            vocab.contains("vocab.json is not a tokenizer we can read: expected a JSON object"),
            "{vocab}"
        );
    }
}
