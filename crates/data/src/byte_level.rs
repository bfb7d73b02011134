//! A `tokenizer.json` of byte-level byte pair encoding, written: for tokenizers that have no such file.

use serde_json::{Map, Value, json};

/// What differs between such files; all else is as Hugging Face's library writes it.
pub(crate) struct ByteLevelFile<'a> {
    pub added_tokens: Vec<Value>,
    /// Whether a space is put before a text: when it is split, and when it is decoded.
    pub prefix_space: [bool; 2],
    /// Whether a text is split by GPT-2's expression.
    pub use_regex: bool,
    /// What stands for no prefix or suffix of a word.
    pub affix: Option<&'static str>,
    pub vocab: Map<String, Value>,
    pub merges: Vec<&'a str>,
}

impl ByteLevelFile<'_> {
    pub(crate) fn to_json(&self) -> String {
        let ByteLevelFile { added_tokens, prefix_space, use_regex, affix, vocab, merges } = self;
        let [pre_tokenizer, decoder] = prefix_space.map(|prefix| {
            json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": use_regex })
        });
        let file = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added_tokens,
            "normalizer": null,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": null,
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": affix,
                "end_of_word_suffix": affix,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocab,
                "merges": merges,
            },
        });
        serde_json::to_string_pretty(&file).expect("plain data")
    }
}
