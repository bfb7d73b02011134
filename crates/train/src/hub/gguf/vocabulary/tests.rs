use serde_json::json;

use super::*;

fn byte_level(pre_tokenizer: Value) -> Value {
    json!({
        "added_tokens": [{"id": 4, "content": "<|end|>", "special": true}, {"id": 5, "content": "<think>"}],
        "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "Ġa": 3}, "merges": ["Ġ a"]},
    })
}

fn gpt2() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false})
}

fn pairs(files: &VocabularyFiles, vocab: usize) -> BTreeMap<String, GgufValue> {
    let pairs = files.pairs(vocab).unwrap();
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
    let files = VocabularyFiles {
        tokenizer: byte_level(gpt2()),
        tokenizer_config: json!({"eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}),
        ..VocabularyFiles::default()
    };
    let pairs = pairs(&files, 7);
    let tokens = ["a", "b", "Ġ", "Ġa", "<|end|>", "<think>", "[PAD6]"].map(str::to_owned);
    assert_eq!(pairs["tokenizer.ggml.tokens"], GgufValue::Texts(tokens.into()));
    assert_eq!(pairs["tokenizer.ggml.token_type"], GgufValue::I32s(vec![1, 1, 1, 1, 3, 4, 5]));
    assert_eq!(pairs["tokenizer.ggml.merges"], GgufValue::Texts(vec!["Ġ a".into()]));
    assert_eq!(pairs["tokenizer.ggml.eos_token_id"], GgufValue::U32(4));
    // Some token must begin a text: llama.cpp would take one by itself.
    assert_eq!(pairs["tokenizer.ggml.bos_token_id"], GgufValue::U32(4));
    assert_eq!(pairs["tokenizer.ggml.add_bos_token"], GgufValue::Bool(false));
    assert_eq!(pairs["tokenizer.chat_template"], text("{{ messages }}"));
    assert!(!pairs.contains_key("tokenizer.ggml.scores"));
    let error = files.pairs(5).unwrap_err();
    assert_eq!(error, "its tokenizer has the id 5, and the model 5 tokens");
}

/// Each rule that llama.cpp has a name for, and one that it has not.
#[test]
fn the_rule_by_which_text_is_split_is_named() {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
    let digits = json!({"type": "Digits", "individual_digits": true});
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
    let both = |first: Value, last: &Value| json!({"type": "Sequence", "pretokenizers": [first, last]});
    let pre = |rule: Value, merges: bool| {
        let mut tokenizer = byte_level(rule);
        if !merges {
            tokenizer["model"]["merges"] = json!([]);
        }
        VocabularyFiles { tokenizer, ..VocabularyFiles::default() }.split(!merges)
    };
    assert_eq!(pre(gpt2(), true).unwrap(), "gpt-2");
    assert_eq!(pre(bytes.clone(), false).unwrap(), "gpt-2");
    assert_eq!(pre(both(digits.clone(), &gpt2()), true).unwrap(), "smollm");
    for (name, regex) in SPLITS {
        assert_eq!(pre(both(split(regex), &bytes), true).unwrap(), name);
    }
    let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true});
    for rule in [bytes.clone(), both(split("."), &bytes), both(digits, &bytes), prefixed, Value::Null] {
        let error = pre(rule.clone(), true).unwrap_err();
        assert!(error.contains("splits text by a rule that llama.cpp has no name for"), "{rule}: {error}");
    }
    let mut normalised = byte_level(gpt2());
    normalised["normalizer"] = json!({"type": "Lowercase"});
    let error = VocabularyFiles { tokenizer: normalised, ..VocabularyFiles::default() }.pairs(6).unwrap_err();
    assert_eq!(error, "its tokenizer normalises text (\"Lowercase\"), which llama.cpp's does not");
}

/// As tokenizer_config.json says, or else as the template of tokenizer.json does.
#[test]
fn a_text_begins_as_the_tokenizer_has_it() {
    let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|end|>"}}, {"Sequence": {"id": "A"}}]});
    let plain = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]});
    let sequence = json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]});
    let begins = |processor: &Value, config: Value| {
        let mut tokenizer = byte_level(gpt2());
        tokenizer["post_processor"] = processor.clone();
        let configs = vec![json!({"eos_token_id": [4, 5], "bos_token_id": 4})];
        let files =
            VocabularyFiles { tokenizer, tokenizer_config: config, configs, ..VocabularyFiles::default() };
        let pairs = pairs(&files, 6);
        assert_eq!(pairs["tokenizer.ggml.eos_token_id"], GgufValue::U32(4));
        pairs["tokenizer.ggml.add_bos_token"].clone()
    };
    assert_eq!(begins(&template, Value::Null), GgufValue::Bool(true));
    assert_eq!(begins(&sequence, Value::Null), GgufValue::Bool(true));
    assert_eq!(begins(&plain, Value::Null), GgufValue::Bool(false));
    assert_eq!(begins(&sequence, json!({"add_bos_token": false})), GgufValue::Bool(false));
    assert_eq!(begins(&plain, json!({"add_bos_token": true})), GgufValue::Bool(true));
}

/// Llama 2's kind: merges become scores.
#[test]
fn a_tokenizer_of_sentencepiece_has_scores() {
    let tokenizer = json!({
        "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace"}]},
        "model": {
            "type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
            "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "▁a": 5, "aa": 6, "▁aa": 7},
            "merges": [["▁", "a"], ["a", "a"], ["▁", "aa"], ["▁a", "a"]],
        },
    });
    let files = VocabularyFiles { tokenizer, ..VocabularyFiles::default() };
    let pairs = pairs(&files, 8);
    assert_eq!(pairs["tokenizer.ggml.model"], text("llama"));
    assert_eq!(pairs["tokenizer.ggml.token_type"], GgufValue::I32s(vec![2, 3, 6, 1, 1, 1, 1, 1]));
    let scores = vec![-4.0, -4.0, -4.0, -4.0, -4.0, 0.0, -1.0, -2.0];
    assert_eq!(pairs["tokenizer.ggml.scores"], GgufValue::F32s(scores));
    assert_eq!(pairs["tokenizer.ggml.add_space_prefix"], GgufValue::Bool(true));
    assert_eq!(pairs["tokenizer.ggml.unknown_token_id"], GgufValue::U32(0));
    assert!(!pairs.contains_key("tokenizer.ggml.merges"));
}

#[test]
fn a_model_without_a_tokenizer_takes_ids_and_another_kind_is_refused() {
    let none = VocabularyFiles::default().pairs(9).unwrap();
    assert_eq!(none, [("tokenizer.ggml.model".to_owned(), text("no_vocab"))]);
    let tokenizer = json!({"model": {"type": "Unigram", "vocab": []}});
    let error = VocabularyFiles { tokenizer, ..VocabularyFiles::default() }.pairs(9).unwrap_err();
    assert_eq!(error, "its tokenizer is a \"Unigram\", and those that are written are BPE");
}
