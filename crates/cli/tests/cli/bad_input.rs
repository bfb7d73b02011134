//! Wrong input gets one sentence that names the field or file, exit code 2, and leaves nothing behind.

use std::fs;
use std::path::Path;

use crate::{TINY, said, train_in};

/// Runs, and checks the code, the sentence and that no run folder was made.
fn refused(folder: &Path, run_file: &str, arguments: &[&str], words: &[&str]) {
    let output = train_in(folder, run_file, arguments);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "one sentence: {text}");
    assert!(text.trim_end().ends_with(errors[0]), "and nothing after it: {text}");
    for word in words {
        assert!(errors[0].contains(word), "`{word}` is named: {text}");
    }
    assert!(!folder.join("out").exists(), "nothing is left behind");
}

fn refused_setting(setting: &str, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), TINY, &["--set", setting], words);
}

#[test]
fn settings_that_cannot_be() {
    refused_setting("train.bacth=4", &["train.bacth", "did you mean `train.batch`"]);
    refused_setting("train.micro_batches=3", &["train.micro_batches", "4"]);
    refused_setting("model.width=0", &["model.width"]);
    refused_setting("model.heads=3", &["model.heads"]);
    refused_setting("optimizer.name=adamm", &["optimizer.name", "adam"]);
    refused_setting("optimizer.momentum=0.9", &["optimizer.momentum", "no effect"]);
    refused_setting("train.steps=many", &["train.steps"]);
    refused_setting("learning_rate.peak=-1", &["learning_rate.peak"]);
    refused_setting("train.noise_scale=true", &["train.noise_scale"]);
    refused_setting("nonsense", &["nonsense"]);
}

#[test]
fn files_that_are_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let output = crate::command(folder.path(), &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("run.toml"), "{}", said(&output));
    refused(folder.path(), &idx("no-such-folder"), &[], &["no-such-folder"]);
    refused(folder.path(), &tokens("none.bin"), &[], &["none.bin"]);
}

#[test]
fn a_run_file_that_is_not_toml() {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), "[model\nname = 3", &[], &["line 1"]);
}

fn idx(path: &str) -> String {
    format!("[model]\nname = \"simple-cnn\"\n[data]\nkind = \"idx\"\npath = \"{path}\"\n")
}

fn tokens(path: &str) -> String {
    format!(
        "[model]\nname = \"gpt\"\ncontext = 8\nvocab = 50\n[data]\nkind = \"tokens\"\npath = \"{path}\"\n"
    )
}

/// An IDX file: magic number, sizes, bytes.
fn write_idx(path: &Path, magic: u32, sizes: &[u32], bytes: usize) {
    let mut file: Vec<u8> = [magic].iter().chain(sizes).flat_map(|n| n.to_be_bytes()).collect();
    file.resize(file.len() + bytes, 1);
    fs::write(path, file).unwrap();
}

#[test]
fn image_files_that_are_broken() {
    let folder = tempfile::tempdir().unwrap();
    let images = folder.path().join("train-images-idx3-ubyte");
    let labels = folder.path().join("train-labels-idx1-ubyte");
    write_idx(&labels, 0x801, &[20], 20);
    write_idx(&images, 0x777, &[20, 28, 28], 20 * 784);
    refused(folder.path(), &idx("."), &[], &["train-images-idx3-ubyte", "magic"]);
    write_idx(&images, 0x803, &[20, 28, 28], 19 * 784);
    refused(folder.path(), &idx("."), &[], &["train-images-idx3-ubyte", "expected 15696 bytes"]);
    write_idx(&images, 0x803, &[20, 28, 28], 20 * 784);
    write_idx(&labels, 0x801, &[19], 19);
    refused(folder.path(), &idx("."), &[], &["19", "20"]);
}

#[test]
fn a_token_past_the_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u8> =
        (0..200u16).map(|i| if i == 90 { 50 } else { i % 50 }).flat_map(u16::to_le_bytes).collect();
    fs::write(folder.path().join("ids.bin"), ids).unwrap();
    refused(folder.path(), &tokens("ids.bin"), &[], &["50"]);
}

#[test]
fn an_output_folder_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "in the way").unwrap();
    refused(folder.path(), TINY, &["--out", "file/run"], &["file/run"]);
    assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "in the way");
}

/// It is found out before the first step, not behind the last.
#[test]
fn a_trace_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    refused(folder.path(), TINY, &["--trace", "nowhere/trace.json"], &["nowhere/trace.json", "trace"]);
}

#[test]
fn a_checkpoint_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    assert!(train_in(folder.path(), TINY, &["--out", "run"]).status.success());
    refused(
        folder.path(),
        TINY,
        &["--out", "run", "--resume", "--set", "model.width=32", "--allow", "model.width"],
        &["step-000004", "weight"],
    );
}
