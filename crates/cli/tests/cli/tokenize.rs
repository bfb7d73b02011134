//! `espalier tokenize`: text as token files that runs read.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::outputs::compare;
use crate::{TestDir, ended, espalier, json, json_of, refused_in_a_sentence, stderr, succeeded, train_in};

fn tokenize(folder: &Path, arguments: &str) -> Output {
    espalier(folder, &format!("tokenize {arguments}"))
}

/// A tokenizer that Python made, of a style in `data/tests/oracle/tokenizer_styles.py`.
fn copy_tokenizer(style: &str, to: &Path) {
    let styles = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/oracle/tokenizers");
    fs::copy(styles.join(style).with_extension("json"), to).unwrap();
}

/// A folder of text: more than a part of it in one file, some in others, and what is no text.
fn texts(at: &Path) {
    copy_tokenizer("gpt2", &at.join("tokenizer.json"));
    fs::create_dir(at.join("texts")).unwrap();
    let line = |i: usize| format!("Tree {i} is pruned and trained along the wall; {} branches\n", i * i % 97);
    fs::write(at.join("texts/large.txt"), (0..25_000).map(line).collect::<String>()).unwrap();
    fs::write(at.join("texts/small.md"), "naïve café").unwrap();
    fs::write(at.join("texts/picture.png"), b"\x89\0").unwrap();
}

#[test]
fn token_files_are_trained_on_and_the_same_on_any_number_of_threads() {
    let at = &TestDir::new();
    texts(at);
    let run = |more: &str| {
        let output = succeeded(tokenize(at, &format!("texts --tokenizer tokenizer.json --json {more}")));
        (json(&output.stdout), stderr(&output))
    };
    let (one, said_of_one) = run("-o one.bin --threads 1");
    compare("espalier tokenize --json", std::slice::from_ref(&one));
    assert_eq!((&one["dtype"], &one["vocab"], &one["documents"]), (&"u16".into(), &400.into(), &2.into()));
    assert!(said_of_one.contains("note: 1 file is not text and skipped: texts/picture.png"), "{said_of_one}");
    let (many, _) = run("-o many --threads 3 --shards 200kB");
    let bytes = fs::read(at.join("one.bin")).unwrap();
    assert_eq!(bytes.len() as u64, 2 * one["tokens"].as_u64().unwrap());
    let files = many["files"].as_array().unwrap();
    assert!(files.len() > 2, "{many}");
    let shards: Vec<u8> =
        files.iter().flat_map(|file| fs::read(at.join(file.as_str().unwrap())).unwrap()).collect();
    assert_eq!(shards, bytes);
    // The folder of a model stands for its tokenizer; wider ids are the same ones.
    succeeded(tokenize(at, "texts --tokenizer . --dtype u32 -o wide.bin --extensions md"));
    let wide = fs::read(at.join("wide.bin")).unwrap();
    let end = &bytes[bytes.len() - wide.len() / 2..];
    assert!(wide.chunks(4).zip(end.chunks(2)).all(|(four, two)| four[..2] == *two && four[2..] == [0, 0]));

    let text = "[model]\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 16\nvocab = 400\n[data]\nkind = \"tokens\"\npath = \"many\"\n\
                [train]\nsteps = 2\nbatch = 4\neval_samples = 4\n[device]\nkind = \"cpu\"";
    let of_files = succeeded(train_in(at, text, "--out files --json"));
    let text = text.replace("\"tokens\"", "\"text\"\ntokenizer = \"tokenizer.json\"");
    let text = text.replace("\"many\"", "\"texts\"").replace("vocab = 400\n", "");
    assert_eq!(json(&of_files.stdout)["loss"], json_of(train_in(at, &text, "--out text --json"))["loss"]);
}

/// Each gets one sentence and leaves nothing behind.
#[test]
fn what_cannot_be_tokenized_is_said() {
    let at = &TestDir::new();
    texts(at);
    copy_tokenizer("bert", &at.join("bert.json"));
    fs::write(at.join("latin.txt"), b"caf\xe9").unwrap();
    fs::write(at.join("empty.txt"), b"").unwrap();
    fs::write(at.join("broken.json"), b"{").unwrap();
    let mut vocab: serde_json::Map<_, _> = (0..70_000).map(|id| (format!("t{id}"), id.into())).collect();
    vocab.insert("a".into(), 70_000.into());
    let wide = serde_json::json!({ "pre_tokenizer": { "type": "ByteLevel" }, "model": { "vocab": vocab, "merges": [] } });
    fs::write(at.join("wide.json"), wide.to_string()).unwrap();
    let before = fs::read_dir(at).unwrap().count();
    let cases = [
        ("gone.txt", "tokenizer", "", "gone.txt is not there: expected a file or folder of text"),
        ("latin.txt", "tokenizer", "", "latin.txt is not UTF-8 at byte 3, which a tokenizer needs"),
        ("empty.txt", "tokenizer", "", "empty.txt holds nothing to train on: expected text"),
        ("texts", "gone", "", "gone.json is not there: expected a Hugging Face tokenizer.json"),
        ("texts", "broken", "", "broken.json is not a tokenizer we can read"),
        (
            "texts",
            "wide",
            "--dtype u16",
            "data.dtype is wrong: expected u32, which holds more than 65536 tokens, got u16 for 70001 tokens",
        ),
        ("texts", "tokenizer", "--shards some", "`--shards` is \"some\", which is no size"),
        (
            "texts",
            "tokenizer",
            "--extensions py",
            "texts holds nothing to train on: expected text files ending in py",
        ),
        ("texts", "tokenizer", "--threads 0", "invalid value '0' for '--threads <N>'"),
    ];
    for (text, tokenizer, more, sentence) in cases {
        let arguments = format!("{text} --tokenizer {tokenizer}.json -o out.bin {more}");
        refused_in_a_sentence(tokenize(at, &arguments), &[sentence]);
    }
    let there = tokenize(at, "texts --tokenizer tokenizer.json -o latin.txt");
    refused_in_a_sentence(there, &["latin.txt is there already: choose another name"]);
    // The disk's mistake is not the person's.
    ended(tokenize(at, "texts --tokenizer tokenizer.json -o gone/out.bin"), 3, &[]);
    assert_eq!(fs::read_dir(at).unwrap().count(), before);

    // What the light build cannot read says which one can.
    let output = tokenize(at, "texts/small.md --tokenizer bert.json -o bert.bin");
    if cfg!(feature = "tokenizers") {
        assert!(output.status.success(), "{}", stderr(&output));
    } else {
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(
            stderr(&output).ends_with("a program built with `--features tokenizers` reads all kinds\n"),
            "{}",
            stderr(&output)
        );
    }
}
