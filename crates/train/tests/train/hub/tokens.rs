//! Which tokens a model knows: those of a tokenizer in two files, as older folders have it, and what is said
//! where there is none. And whether its head is the table of its tokens.

use std::fs;
use std::path::Path;

use espalier_plan::RunFile;
use espalier_train::hub::{self, ModelDescription};
use espalier_train::trained::{EvalResult, EvalWindows, TrainedModel};
use serde_json::json;

use super::{folder_with, ids, newest, open, start_from, write_ids};
use crate::support::{assert_says, scored};

/// GPT-2's two files for a model of 40 tokens: letters, a space, and one word.
pub(super) fn add_tokenizer(folder: &Path) {
    let letters =
        ('a'..='z').map(String::from).chain(["Ġ", "th", "the", "Ġthe", "<|endoftext|>"].map(String::from));
    let vocab: serde_json::Map<String, serde_json::Value> =
        letters.zip(0..).map(|(token, id): (String, u32)| (token, id.into())).collect();
    fs::write(folder.join("vocab.json"), json!(vocab).to_string()).unwrap();
    fs::write(folder.join("merges.txt"), "#version: 0.2\nt h\nth e\nĠ the\n").unwrap();
}

fn score(trained: &TrainedModel, path: &Path) -> EvalResult {
    scored(trained, Some(path), "", EvalWindows::default()).unwrap()
}

/// Text is read by it where the model is evaluated and where it is trained on, and checkpoints have it in one
/// file.
#[test]
fn a_tokenizer_in_two_files_is_read_and_handed_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = folder_with(at("from"), |_| {});
    add_tokenizer(&from);
    fs::write(at("text.txt"), "the cat and the dog in the house of the king").unwrap();
    let trained = open(&from);
    let text = trained.tokenizer().unwrap().encode("the cat and the dog in the house of the king").unwrap();
    assert_eq!(text[..4], [28, 26, 2, 0]);
    // The token that ends a text stands behind it; a window of 16 is not filled by the last.
    let text: Vec<u32> = text.into_iter().chain([30]).collect();
    let bytes =
        |width: usize| text.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect::<Vec<u8>>();
    fs::write(at("narrow.bin"), bytes(2)).unwrap();
    fs::write(at("wide.bin"), bytes(4)).unwrap();
    let of_text = score(&trained, &at("text.txt"));
    assert_eq!(of_text.tokens, Some(text.len() - 1));
    for name in ["narrow.bin", "wide.bin"] {
        assert_eq!(score(&trained, &at(name)).loss, of_text.loss, "{name}");
    }
    start_from(&from, &ids(), &at("run"), "");
    assert!(newest(&at("run")).join("tokenizer.json").is_file());
    let handed_on = open(&at("run"));
    assert_eq!(handed_on.tokenizer().unwrap().encode("the cat").unwrap(), text[..5]);
    let ModelDescription { tokenizer, .. } = hub::model_of(&from, |_| {}).unwrap();
    assert_eq!(tokenizer, Some(from.join("vocab.json")));
}

/// Bytes of a text would be ids of most models, and nobody would hear of it.
#[test]
fn text_for_a_model_without_a_tokenizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = folder_with(at("from"), |_| {});
    fs::write(at("text.txt"), "short").unwrap();
    assert_says(
        open(&from).eval_dataset(Some(&at("text.txt")), &[]).unwrap_err(),
        &["text.txt is text: expected a file of token ids, since the model comes without a tokenizer"],
    );
    fs::write(at("long.txt"), "a longer text ".repeat(99)).unwrap();
    let train = |tokenizer: &str| {
        let text = format!(
            "[model]\nname = \"gpt\"\nlayers = 2\nheads = 2\nwidth = 16\ncontext = 16\nvocab = 300\n\
             [data]\nkind = \"text\"\npath = \"{}\"\n{tokenizer}",
            at("long.txt").display()
        );
        let run = RunFile::parse(&text, &[]).unwrap();
        let dataset = espalier_data::Dataset::open(&run).unwrap();
        let plan = espalier_plan::Plan::new(run, dataset.facts()).unwrap();
        let checkpoint = hub::find(&from, &espalier_train::parallel::Ranks::single(), |_| {}).unwrap();
        hub::check_tokens(&checkpoint, &plan).map_err(|why| why.to_string())
    };
    let bytes = train("").unwrap_err();
    assert!(
        bytes.starts_with("`data.tokenizer` is missing, and ")
            && bytes.ends_with("text would be read as bytes by a model of 300 tokens"),
        "{bytes}"
    );
    add_tokenizer(&from);
    let bytes = train("").unwrap_err();
    assert!(bytes.ends_with("from has a tokenizer; use it"), "{bytes}");
    assert_eq!(train(&format!("tokenizer = \"{}\"", from.display())), Ok(()));
}

/// A head of its own is used, though the configuration says that it is the table of tokens: as transformers 5
/// does. One that is all zeros finds every token equally likely.
#[test]
fn a_head_that_is_no_copy_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_ids(&at("ids.bin"), &ids());
    let copied = folder_with(at("copied"), |all| {
        all.insert("lm_head.weight".into(), all["transformer.wte.weight"].clone());
    });
    let separate = folder_with(at("own"), |all| {
        let mut head = all["transformer.wte.weight"].clone();
        head.2.fill(0);
        all.insert("lm_head.weight".into(), head);
    });
    let (tied, untied) = (score(&open(&copied), &at("ids.bin")), score(&open(&separate), &at("ids.bin")));
    assert!((untied.loss - 40f64.ln()).abs() < 1e-6, "{}", untied.loss);
    assert!((tied.loss - untied.loss).abs() > 1e-3, "{} and {}", tied.loss, untied.loss);
    let is_tied = |folder: &Path| hub::model_of(folder, |_| {}).unwrap().model.gpt(40).unwrap().tied;
    assert!(is_tied(&copied) && !is_tied(&separate));
}
