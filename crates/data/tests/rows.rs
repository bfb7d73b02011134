//! Rows of JSON become documents: what is learnt of them, how they lie in sequences, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use espalier_data::{
    CutRows, DataSplit, Dataset, DocumentDataset, HostBatch, Inputs, ModelInput, RowSettings, TokenWidth,
    TokenWindows, Tokenizer,
};
use espalier_plan::data::LossTargets;
use serde_json::{Value, json};

/// Not counted.
const IGNORED: u32 = u32::MAX;

/// ChatML, as Qwen and SmolLM have it, with answers marked or not.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const MARKED: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}\
                      {% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}\
                      {% endif %}{{ '\n' }}{% endfor %}";
/// Like Qwen 3's: only the last answer keeps what was thought.
const FORGETFUL: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' and loop.last %}\
                         <think>\n\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}\
                         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A folder with a tokenizer of some style, a chat template and rows.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(style: &str, template: Option<&str>) -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        let styles = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/tokenizers");
        fs::copy(styles.join(style).with_extension("json"), folder.at("tokenizer.json")).unwrap();
        let mut config = json!({ "eos_token": "<|im_end|>" });
        template.into_iter().for_each(|template| config["chat_template"] = json!(template));
        fs::write(folder.at("tokenizer_config.json"), config.to_string()).unwrap();
        folder
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, rows: &[Value]) -> PathBuf {
        fs::write(self.at(name), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        self.at(name)
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::open(self.0.path()).unwrap()
    }

    fn open(&self, paths: &[PathBuf], how: How) -> espalier_data::Result<DocumentDataset> {
        let tokenizer = if how.bytes { Tokenizer::Bytes } else { self.tokenizer() };
        let settings = RowSettings { loss_on: how.loss_on, pack: how.pack };
        let windows = TokenWindows { seq: how.seq, validation: how.validation, seed: how.seed };
        DocumentDataset::rows(paths, None, tokenizer, settings, windows, &mut |_, _| ())
    }

    /// Why rows are refused.
    fn refused(&self, rows: &[Value]) -> String {
        self.open(&[self.write("bad.jsonl", rows)], How::default()).unwrap_err().to_string()
    }
}

#[derive(Clone, Copy)]
struct How {
    bytes: bool,
    loss_on: LossTargets,
    pack: bool,
    seq: usize,
    validation: f64,
    seed: u64,
}

impl Default for How {
    fn default() -> How {
        How { bytes: false, loss_on: LossTargets::Answers, pack: true, seq: 512, validation: 0.0, seed: 1 }
    }
}

/// All samples of a split.
fn all(data: &Dataset, split: DataSplit) -> HostBatch {
    let picks: Vec<(u64, usize)> = (0..data.len(split)).map(|index| (0, index)).collect();
    let batch = data.batch(split, &picks).unwrap();
    assert_eq!(
        batch.targets.iter().filter(|target| **target == IGNORED).count(),
        data.ignored(split, &picks)
    );
    batch
}

/// What is read of each document and what is to be learnt of it, as text; those of padding are left out.
fn documents(data: &Dataset, split: DataSplit) -> Vec<(String, String)> {
    let HostBatch { inputs: Inputs::Tokens { ids, .. }, targets, positions } = all(data, split) else {
        panic!()
    };
    let positions = positions.expect("packed");
    let starts: Vec<usize> = (0..ids.len()).filter(|at| positions[*at] == 0).chain([ids.len()]).collect();
    let text = |ids: Vec<u32>| String::from_utf8(data.tokenizer().unwrap().decode(&ids)).unwrap();
    let document = |pair: &[usize]| {
        let learnt = targets[pair[0]..pair[1]].iter().copied().filter(|target| *target != IGNORED);
        (text(ids[pair[0]..pair[1]].to_vec()), text(learnt.collect()))
    };
    starts.windows(2).map(document).filter(|(_, learnt)| !learnt.is_empty()).collect()
}

fn learnt(folder: &Folder, row: Value, how: How) -> String {
    let data = folder.open(&[folder.write("one.jsonl", &[row])], how).unwrap();
    documents(&Dataset::Documents(data), DataSplit::Train).remove(0).1
}

fn chat(texts: &[(&str, &str)]) -> Value {
    json!({ "messages": texts.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect::<Vec<_>>() })
}

#[test]
fn answers_alone_are_learnt() {
    let folder = Folder::new("qwen", Some(CHATML));
    let how = How::default();
    let all = How { loss_on: LossTargets::All, ..how };
    assert_eq!(learnt(&folder, json!({ "text": "The tree is pruned." }), how), " tree is pruned.<|im_end|>");
    let pair = json!({ "prompt": "The tree", "completion": " is pruned", "id": 3 });
    assert_eq!(learnt(&folder, pair.clone(), how), " is pruned<|im_end|>");
    assert_eq!(learnt(&folder, pair, all), " tree is pruned<|im_end|>");
    let talk = chat(&[
        ("system", "Be brief."),
        ("user", "A tree?"),
        ("assistant", "Naïve e\u{301}!"),
        ("user", "More"),
        ("assistant", "No"),
    ]);
    let answers = "Naïve é!<|im_end|>No<|im_end|>";
    assert_eq!(learnt(&folder, talk.clone(), how), answers);
    assert!(learnt(&folder, talk.clone(), all).starts_with("system\nBe brief.<|im_end|>\n<|im_start|>user"));
    let marked = Folder::new("qwen", Some(MARKED));
    assert_eq!(learnt(&marked, talk, how), answers);
    // An end that a text has already is not put behind it again.
    assert_eq!(learnt(&folder, json!({ "text": "x y<|im_end|>" }), how), " y<|im_end|>");
    // The last answer is certain, whatever the template does to those before.
    let forgetful = Folder::new("qwen", Some(FORGETFUL));
    let one = chat(&[("user", "A tree?"), ("assistant", "Yes")]);
    assert_eq!(learnt(&forgetful, one, how), "<think>\n\n</think>\n\nYes<|im_end|>");
}

/// Characters with spaces as U+2581, and a token at the beginning.
#[test]
fn prompts_of_sentencepiece_are_found_again() {
    let folder = Folder::new("mistral", None);
    fs::write(folder.at("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    let pair = json!({ "prompt": "The tree", "completion": " is pruned" });
    assert_eq!(learnt(&folder, pair, How::default()), " is pruned</s>");
    let data = folder.open(&[folder.at("one.jsonl")], How::default()).unwrap();
    let batch = Dataset::Documents(data).batch(DataSplit::Train, &[(0, 0)]).unwrap();
    let Inputs::Tokens { ids, .. } = batch.inputs else { panic!() };
    assert_eq!(ids[0], 1, "<s> begins an input");
}

/// Every document once, whole, behind no other; the others of a sequence do not change it. Which is held out does
/// not depend on the seed, the order of the others does.
#[test]
fn documents_lie_in_sequences() {
    let folder = Folder::new("qwen", None);
    let text = |i: usize| json!({ "text": format!("{i}: {}", "tree ".repeat(i % 9)) });
    let rows: Vec<Value> = (0..50).map(text).collect();
    let [a, b] = [folder.write("part-1.jsonl", &rows[..20]), folder.write("part-2.jsonl", &rows[20..])];
    let how = How { seq: 64, validation: 0.2, ..How::default() };
    let open = |paths: &[PathBuf], how| Dataset::Documents(folder.open(paths, how).unwrap());
    let data = open(&[a.clone(), b], how);
    let (train, held_out) = (documents(&data, DataSplit::Train), documents(&data, DataSplit::Validation));
    assert_eq!((train.len(), held_out.len()), (40, 10));
    assert!(data.len(DataSplit::Train) < 25);
    let mut numbers: Vec<usize> = train
        .iter()
        .chain(&held_out)
        .map(|(read, _)| read.split(':').next().unwrap().parse().unwrap())
        .collect();
    let shuffled = numbers.clone();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..50) && shuffled != numbers);
    let pattern = open(&[folder.at("part-*.jsonl")], how);
    assert_eq!(
        all(&pattern, DataSplit::Train),
        all(&data, DataSplit::Train),
        "a pattern stands for its files"
    );
    let other = open(&[folder.at("part-*.jsonl")], How { seed: 2, ..how });
    assert_eq!(all(&other, DataSplit::Validation), all(&data, DataSplit::Validation));
    assert_ne!(all(&other, DataSplit::Train), all(&data, DataSplit::Train));
    let alone = open(&[a], How { pack: false, ..how });
    assert_eq!(alone.len(DataSplit::Train), 16);
    assert!(!alone.has_positions() && data.has_positions());
    assert_eq!(all(&alone, DataSplit::Train).positions, None);
}

/// What is longer than a sequence loses its end; where no answer is left, the row goes.
#[test]
fn long_rows_are_cut_and_counted() {
    let folder = Folder::new("gpt2", None);
    let row = |prompt: usize| json!({ "prompt": "a".repeat(prompt), "completion": " b" });
    let file = folder.write("rows.jsonl", &[row(10), row(31), row(32), row(100)]);
    let data = folder.open(&[file], How { bytes: true, seq: 32, ..How::default() }).unwrap();
    assert_eq!(data.cut_rows(), CutRows { cut: 2, dropped: 1 });
    let learnt: Vec<String> = documents(&Dataset::Documents(data), DataSplit::Train)
        .into_iter()
        .map(|(_, learnt)| learnt)
        .collect();
    assert_eq!(learnt.len(), 3);
    assert!(learnt.contains(&" ".to_owned()));
}

#[test]
fn rows_are_evaluated_on() {
    let folder = Folder::new("qwen", Some(CHATML));
    let file = folder.write("held.jsonl", &[chat(&[("user", "A tree?"), ("assistant", "Yes")])]);
    let tokenizer = folder.tokenizer();
    let takes =
        ModelInput::Tokens { tokenizer: Some(&tokenizer), vocab: 500, seq: 64, width: TokenWidth::U16 };
    let data = Dataset::for_evaluation(&file, takes).unwrap();
    assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation)), (0, 1));
    assert_eq!(documents(&data, DataSplit::Validation)[0].1, "Yes<|im_end|>");
}

/// One sentence that names file and line.
#[test]
fn what_cannot_be_learnt_is_refused() {
    let folder = Folder::new("qwen", Some(CHATML));
    let good = json!({ "text": "ok" });
    let line = |row: Value, why: &str| {
        let got = folder.refused(&[good.clone(), row]);
        let begins = format!("line 2 of {} ", folder.at("bad.jsonl").display());
        assert!(got.starts_with(&begins) && got.contains(why) && !got.contains('\n'), "{got}");
    };
    line(json!({ "conversations": [] }), "has none of `text`, `prompt` with `completion`, and `messages`");
    line(json!({ "text": "a", "prompt": "b", "completion": "c" }), "has more than one of `text`");
    line(json!({ "prompt": "b" }), "has a `prompt` and no `completion`");
    line(json!({ "completion": "b" }), "has a `completion` and no `prompt`");
    line(json!({ "prompt": "b", "completion": "" }), "has no answer to learn: its `completion` is empty");
    line(json!({ "text": "" }), "has an empty `text`");
    line(
        json!({ "text": 3 }),
        "is not a JSON object of a row: invalid type: integer `3`, expected a string at column 9",
    );
    line(json!({ "messages": [] }), "`messages` is empty");
    line(json!({ "messages": "hi" }), "message 1 of `messages` has no `role`");
    line(json!({ "messages": [{ "content": "hi" }] }), "message 1 of `messages` has no `role`");
    line(chat(&[("user", "a")]), "has no answer to learn: no message has the role \"assistant\"");
    line(
        json!({ "prompt": "the tr", "completion": "ee" }),
        "has a `prompt` whose tokens change with its `completion`",
    );
    let raises = Folder::new("qwen", Some("{{ raise_exception('roles must alternate') }}"));
    let got = raises.refused(&[chat(&[("user", "a"), ("assistant", "b")])]);
    assert!(got.ends_with("cannot render a conversation: roles must alternate"), "{got}");
    let forgets = Folder::new("qwen", Some(FORGETFUL));
    let got =
        forgets.refused(&[chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])]);
    assert!(
        got.contains("answers that cannot be told apart") && got.contains("`data.loss_on` = \"all\""),
        "{got}"
    );
    let bare = Folder::new("qwen", None);
    let got = bare.refused(&[chat(&[("user", "a"), ("assistant", "b")])]);
    assert!(got.contains("the tokenizer has no chat template"), "{got}");
    fs::write(folder.at("bad.jsonl"), "{\"text\": \"ok\"}\n\n{\"text\": \n").unwrap();
    let got = folder.open(&[folder.at("bad.jsonl")], How::default()).unwrap_err().to_string();
    assert!(got.contains("line 3 of") && got.contains("EOF while parsing a value"), "{got}");
    let one = folder.write("one.jsonl", &[good]);
    let got = folder.open(&[one], How { validation: 0.5, ..How::default() }).unwrap_err().to_string();
    assert!(got.ends_with("expected at least 2 rows, got 1"), "{got}");
    let got = folder.open(&[folder.at("none-*.jsonl")], How::default()).unwrap_err().to_string();
    assert!(got.ends_with("holds nothing to train on: expected files named none-*.jsonl"), "{got}");
    fs::write(folder.at("empty.jsonl"), "\n\n").unwrap();
    let got = folder.open(&[folder.at("empty.jsonl")], How::default()).unwrap_err().to_string();
    assert!(got.ends_with("empty.jsonl holds nothing to train on: expected rows"), "{got}");
}

/// A gigabyte without a line end, which takes no room on the disk and none in memory.
#[test]
fn an_endless_line_is_refused() {
    let folder = Folder::new("gpt2", None);
    fs::write(folder.at("long.jsonl"), "{\"text\": \"ok\"}\n").unwrap();
    fs::File::options().write(true).open(folder.at("long.jsonl")).unwrap().set_len(1 << 30).unwrap();
    let got = folder.open(&[folder.at("long.jsonl")], How::default()).unwrap_err().to_string();
    assert!(got.ends_with("long.jsonl is longer than 67.1 MB: a row is one line"), "{got}");
    assert!(got.starts_with("line 2 of "), "{got}");
}
