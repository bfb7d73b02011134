//! `espalier generate` and `espalier chat`: text out of a checkpoint, as a person and a program meet it.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::faults::kill;
use crate::outputs::compare;
use crate::{
    TestDir, assert_contains, espalier, espalier_command, json, refused_in_a_sentence, said, stderr, stdout,
    succeeded, train_in,
};

fn generate(folder: &Path, arguments: &str) -> Output {
    espalier(folder, &format!("generate {arguments}"))
}

#[test]
fn a_model_generates_text_after_a_prompt() {
    let folder = TestDir::trained();
    let asked = "run 12+ --tokens 9 --seed 3";
    let output = succeeded(generate(&folder, asked));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let report = json(&generate(&folder, &format!("{asked} --json")).stdout);
    // The prompt, what was written, and a line's end; a program gets what was written alone.
    let written = report["text"].as_str().unwrap();
    assert_eq!(text.trim_end_matches('\n'), format!("12+{written}").trim_end_matches('\n'));
    let without_prompt = generate(&folder, &format!("{asked} --no-echo"));
    assert_eq!(stdout(&without_prompt).trim_end_matches('\n'), written.trim_end_matches('\n'));
    let mut from_input = espalier_command(&folder, "generate run --tokens 9 --seed 3");
    let mut child = from_input.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"12+\n").unwrap();
    assert_eq!(stdout(&child.wait_with_output().unwrap()), text, "a prompt from standard input");
    assert_eq!((&report["prompt_tokens"], &report["new_tokens"]), (&Value::from(3), &Value::from(9)));
    assert_eq!(report["tokens"].as_array().unwrap().len(), 9);
    assert_eq!((&report["format"], &report["end"]), (&Value::from("dense-f32"), &Value::from("length")));
    assert!(
        report["tokens_per_s"].as_f64().unwrap() > 0.0
            && report["prompt_tokens_per_s"].as_f64().unwrap() > 0.0
    );
    // Several: the first is the one of the seed, the second that of the next.
    let several = json(&generate(&folder, &format!("{asked} -n 2 --json")).stdout);
    let next = "run 12+ --max-new-tokens 9 --seed 4 --json";
    let next = json(&generate(&folder, next).stdout);
    assert_eq!(
        (&several["tokens"], &several["samples"][0]["tokens"]),
        (&report["tokens"], &report["tokens"])
    );
    assert_eq!(several["samples"][1]["tokens"], next["tokens"]);
    compare("espalier generate --json", &[report, several]);
    let short = "run 12+ --max-new-tokens 2 --device cpu --dtype bf16 --json";
    assert_eq!(json(&generate(&folder, short).stdout)["format"], "dense-bf16");
    assert!(stderr(&output).contains("9 new tokens"), "{}", stderr(&output));
}

/// The same seed, the same text; another, another. Without temperature no seed matters. On two stages and on
/// two tensor ranks the same.
#[test]
fn a_text_repeats() {
    let folder = TestDir::trained();
    let tokens = |more: &str| {
        let output = succeeded(generate(&folder, &format!("run 1 --tokens 14 --json {more}")));
        json(&output.stdout)["tokens"].clone()
    };
    let hot = |seed: u64, more: &str| tokens(&format!("--temperature 1.5 --seed {seed} {more}"));
    assert_eq!(hot(1, ""), hot(1, ""));
    assert_ne!(hot(1, ""), hot(2, ""));
    assert_eq!(hot(1, "--min-p 1"), tokens("--temperature 0"), "the likeliest alone");
    let distinct = |tokens: Value| {
        let mut tokens: Vec<u64> =
            tokens.as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.len()
    };
    let penalty = "--temperature 0 --repetition-penalty 50";
    assert!(distinct(tokens(penalty)) > distinct(tokens("--temperature 0")));
    assert_eq!(hot(1, "--set parallel.pipeline=2"), hot(1, ""));
    assert_eq!(hot(1, "--set parallel.tensor=2"), hot(1, ""));
    assert_eq!(tokens("--temperature 0 --seed 1"), tokens("--temperature 0 --seed 2"));
}

#[test]
fn a_word_and_the_context_end_a_text() {
    let folder = TestDir::trained();
    let report = |stop: &[&str]| {
        let mut command = espalier_command(&folder, "generate run 1 --json --temperature 2 --tokens 99");
        let output = succeeded(command.args(stop).output().unwrap());
        (json(&output.stdout), stderr(&output))
    };
    let (unstopped, text) = report(&[]);
    assert_eq!((&unstopped["end"], &unstopped["new_tokens"]), (&Value::from("context"), &Value::from(16)));
    assert!(text.contains("the context length of 16 tokens"), "{text}");
    let written = unstopped["text"].as_str().unwrap();
    let word = &written[4..6];
    let (cut, _) = report(&["--stop", word]);
    assert_eq!(cut["end"], "stop");
    assert_eq!(cut["text"], written[..written.find(word).unwrap()]);
}

/// One sentence each, and exit code 2.
#[test]
fn what_cannot_be_gone_on_from_is_named() {
    let folder = TestDir::trained();
    let empty = espalier_command(&folder, "generate run").arg("").output().unwrap();
    refused_in_a_sentence(empty, &["error: `PROMPT` is empty: a prompt of at least one token is needed\n"]);
    let refused = |arguments: &str, sentence: &str| {
        refused_in_a_sentence(generate(&folder, arguments), &[sentence]);
    };
    let long = "1".repeat(17);
    refused(&format!("run {long}"), "error: `PROMPT` has 17 tokens, more than the context length of 16\n");
    // A letter that sums do not have.
    refused("run hello", "error: ");
    refused(
        "run 1 --temperature -1",
        "error: invalid value '-1' for '--temperature <T>': expected a number of at least 0, such as 0.8\n",
    );
    refused(
        "run 1 --top-p 0",
        "error: invalid value '0' for '--top-p <P>': expected a probability above 0, up to 1, such as 0.9\n",
    );
    refused("nothing 1", "nothing");

    // A model that reads no text, and one whose tokens nobody can spell.
    let images = "[model]\nname = \"mlp\"\n[data]\nkind = \"shapes\"\ncount = 40\n[train]\nsteps = 1\nbatch = 4\n[device]\nkind = \"cpu\"";
    succeeded(train_in(&folder, images, "--out images"));
    refused("images 1", "it is an image model (mlp), which generates no text\n");
    fs::write(folder.join("ids.bin"), [7u8, 0, 3, 0].repeat(400)).unwrap();
    let tokens = "[model]\nname = \"gpt\"\nlayers = 1\nheads = 1\nwidth = 8\ncontext = 8\nvocab = 20\n[data]\nkind = \"tokens\"\n\
                  path = \"ids.bin\"\n[train]\nsteps = 1\nbatch = 4\n[device]\nkind = \"cpu\"";
    succeeded(train_in(&folder, tokens, "--out tokens"));
    refused("tokens 1", "which have no tokenizer: add --tokenizer FILE\n");
    // With one it writes.
    let letters = r#"{"pre_tokenizer": {"type": "ByteLevel"}, "model": {"vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}}"#;
    fs::write(folder.join("letters.json"), letters).unwrap();
    succeeded(generate(&folder, "tokens ab --tokenizer letters.json --temperature 0 --json"));
}

/// The first Ctrl-C ends a text where it is, with what was written.
#[test]
fn an_interrupted_text_ends_cleanly() {
    let folder = TestDir::trained();
    let mut command = espalier_command(&folder, "chat run --tokens 1000000");
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It answers, so it has begun, and waits for the next line.
    child.stdin.as_mut().unwrap().write_all(b"1+1=\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    kill("-INT", child.id());
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
}

/// Lines are answered until there are no more, or one says so; a conversation that outgrows the model goes on
/// without its beginning.
#[test]
fn a_conversation_goes_on_line_by_line() {
    let folder = TestDir::trained();
    let chat = |lines: &str, more: &str| {
        let mut command = espalier_command(&folder, &format!("chat run --tokens 3 {more}"));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = succeeded(child.wait_with_output().unwrap());
        (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
    };
    let (answers, notes) = chat("1+1=\n/quit\n2+2=\n", "");
    assert_eq!(answers.replace('\n', "").len() + answers.matches('\n').count(), answers.len());
    assert!(!answers.is_empty() && !notes.contains("longer"), "{notes}");
    // Five lines of five tokens and their answers do not fit 16.
    let (many, notes) = chat("1+1=\n2+2=\n3+3=\n4+4=\n5+5=\n", "");
    assert_contains(&notes, &["longer than the context length of 16 tokens: its beginning is dropped"]);
    assert!(many.len() > answers.len());
    assert!(many.starts_with(&answers), "the first answer is the same: {answers:?} {many:?}");
    // Ranks that read no line hear it from the first.
    assert_eq!(chat("1+1=\n2+2=\n3+3=\n4+4=\n5+5=\n", "--set parallel.pipeline=2").0, many);
    let (_, notes) = chat("hello\n", "");
    assert!(!notes.is_empty(), "a line that has no tokens is said");
}

/// What the bench prints follows from what it measured.
#[test]
fn how_fast_a_model_writes_is_measured() {
    let folder = TestDir::new();
    let small = "--device cpu --layers 2 --width 64 --heads 2 --vocab 100 --tokens 4";
    let output = said(espalier(&folder, &format!("bench generate --prompt 6 --json {small}")), &["tokens/s"]);
    let report = json(&output.stdout);
    let number = |field: &str| report[field].as_f64().unwrap();
    // Products of two layers and the head in bf16, and keys and values of eight positions.
    let weights = 2 * (12 * 64 * 64) + 100 * 64;
    assert_eq!(number("bytes_per_token"), f64::from(2 * weights) + f64::from(2 * 2 * 64 * 8 * 2));
    assert_eq!(number("cache_bytes"), f64::from(2 * 2 * 64 * 10 * 2));
    let share = number("bytes_per_token") * number("tokens_per_s") / number("bandwidth");
    assert!((number("share_of_bandwidth") / share - 1.0).abs() < 1e-9);
}
