//! Wrong input gets one sentence that names the field or file, exit code 2, and leaves nothing behind.

use std::fs;
use std::path::Path;

use crate::{TINY, TestDir, assert_contains, ended, espalier, said, stderr, stdout, succeeded, train_in};

/// Runs, and checks the code, the sentence and that no run folder was made.
pub fn refused(folder: &Path, run_file: &str, arguments: &str, words: &[&str]) {
    let output = train_in(folder, run_file, arguments);
    assert!(output.stdout.is_empty(), "{}", stdout(&output));
    let text = crate::refused(output, &[]);
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "one sentence: {text}");
    assert!(text.trim_end().ends_with(errors[0]), "and nothing after it: {text}");
    assert_contains(errors[0], words);
    assert!(!folder.join("out").exists(), "nothing is left behind");
}

fn refused_setting(setting: &str, words: &[&str]) {
    let folder = TestDir::new();
    refused(&folder, TINY, &format!("--set {setting}"), words);
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
    let folder = TestDir::new();
    crate::refused(crate::command(&folder, "").output().unwrap(), &["run.toml"]);
    refused(&folder, &idx("no-such-folder"), "", &["no-such-folder"]);
    refused(&folder, &tokens("none.bin"), "", &["none.bin"]);
}

#[test]
fn a_run_file_that_is_not_toml() {
    let folder = TestDir::new();
    refused(&folder, "[model\nname = 3", "", &["run.toml", "line 1"]);
    refused(&folder, "[model\nname = 3", "--ranks 2", &["run.toml", "line 1"]);
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
    let folder = TestDir::new();
    let images = folder.join("train-images-idx3-ubyte");
    let labels = folder.join("train-labels-idx1-ubyte");
    write_idx(&labels, 0x801, &[20], 20);
    write_idx(&images, 0x777, &[20, 28, 28], 20 * 784);
    refused(&folder, &idx("."), "", &["train-images-idx3-ubyte", "magic"]);
    write_idx(&images, 0x803, &[20, 28, 28], 19 * 784);
    refused(&folder, &idx("."), "", &["train-images-idx3-ubyte", "expected 15696 bytes"]);
    write_idx(&images, 0x803, &[20, 28, 28], 20 * 784);
    write_idx(&labels, 0x801, &[19], 19);
    refused(&folder, &idx("."), "", &["19", "20"]);
}

#[test]
fn a_token_past_the_vocabulary() {
    let folder = TestDir::new();
    let ids: Vec<u8> =
        (0..200u16).map(|i| if i == 90 { 50 } else { i % 50 }).flat_map(u16::to_le_bytes).collect();
    fs::write(folder.join("ids.bin"), ids).unwrap();
    refused(&folder, &tokens("ids.bin"), "", &["50"]);
}

#[test]
fn a_checkpoint_of_another_model() {
    let folder = TestDir::trained();
    refused(
        &folder,
        TINY,
        "--out run --resume --set model.width=32 --allow model.width",
        &["step-000004", "weight"],
    );
}

/// Nothing is taken, drawn or started before it is known to fit: each of these ended in an abort, or in hours.
#[test]
fn runs_that_no_machine_can_hold() {
    refused_setting("model.width=4000000", &["optimizer", "this machine", "device.check_memory"]);
    refused_setting("data.count=1000000000000", &["data.arithmetic", "data.count"]);
    let folder = TestDir::new();
    let ranks = "--ranks 16777216 --set train.batch=16777216 --set model.width=1024";
    refused(&folder, TINY, ranks, &["this machine"]);
    let images = "[model]\nname = \"simple-cnn\"\n[data]\nkind = \"shapes\"\nsize = 4096\ncount = 2000000\n";
    refused(&folder, images, "", &["data.shapes", "data.count"]);
    let largest = "--set data.count=281474976710656";
    refused(&folder, images, largest, &["data.shapes", "data.count"]);
}

/// Even one that insists ends with a sentence, where memory is refused instead of promised.
#[test]
fn memory_that_is_refused_is_an_error() {
    let folder = TestDir::new();
    let insists = "--set device.check_memory=false --set model.width=16777216 --set model.vocab=16777216";
    ended(train_in(&folder, TINY, insists), 3, &["out of memory"]);
}

/// Asked what a run needs, a machine that does not have it says so and answers.
#[test]
fn a_dry_run_of_what_does_not_fit() {
    let folder = TestDir::new();
    let output = said(
        train_in(&folder, TINY, "--dry-run --json --set model.width=4000000"),
        &["note: the run needs at least"],
    );
    assert!(crate::json(&output.stdout)["memory"]["weights"]["predicted"].as_f64().unwrap() > 1e14);
}

/// A FIFO would be waited for, a device read without end.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_no_data() {
    let folder = TestDir::new();
    let fifo = folder.join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let text = |path: &str| {
        format!("[model]\nname = \"gpt\"\ncontext = 8\n[data]\nkind = \"text\"\npath = \"{path}\"\n")
    };
    let pair = |path: &str| {
        format!(
            "[model]\nname = \"simple-cnn\"\n[data]\nkind = \"idx\"\nimages = \"{path}\"\nlabels = \"{path}\"\n"
        )
    };
    let tokenizer = |path: &str| format!("{}tokenizer = \"{path}\"\n", text("run.toml"));
    for (path, word) in [("fifo", "a FIFO"), ("/dev/zero", "a device")] {
        for run_file in [text(path), tokens(path), pair(path), tokenizer(path)] {
            refused(&folder, &run_file, "", &[path, word, "regular file"]);
        }
    }
}

#[cfg(unix)]
#[test]
fn a_checkpoint_of_devices_or_of_files_elsewhere() {
    let folder = TestDir::new();
    succeeded(train_in(&folder, TINY, "--out first"));
    let checkpoint = folder.join("first/checkpoints/step-000004");
    let weights = checkpoint.join("model.safetensors");
    fs::rename(&weights, folder.join("model.safetensors")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&weights).status().unwrap().success());
    refused(&folder, TINY, "--from first", &["model.safetensors", "FIFO"]);
    let manifest = checkpoint.join("manifest.json");
    for elsewhere in ["../../../model.safetensors", "/etc/passwd"] {
        // As an older program wrote it, without a hash of itself.
        let mut text: serde_json::Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
        text.as_object_mut().unwrap().remove("blake3");
        let files = text["files"].as_object_mut().unwrap();
        let first = files.keys().next().unwrap().clone();
        let record = files.remove(&first).unwrap();
        files.insert(elsewhere.into(), record);
        fs::write(&manifest, text.to_string()).unwrap();
        refused(&folder, TINY, "--from first", &[elsewhere]);
    }
    fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &manifest).unwrap();
    refused(&folder, TINY, "--from first", &["manifest.json", "a device"]);
}

/// Wherever a person or a run folder names a file: each is refused before it is waited for, and one that is
/// too long before it is read. Whoever opens one of them does not end.
#[cfg(unix)]
#[test]
fn files_that_never_begin_or_end() {
    use std::os::unix::fs::symlink;
    let folder = TestDir::new();
    let at = |name: &str| folder.join(name);
    succeeded(train_in(&folder, TINY, "--out run"));
    assert!(std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
    fs::File::create(at("long")).unwrap().set_len(1 << 40).unwrap();
    fs::write(at("schedule.toml"), TINY.to_owned() + "[parallel]\npipeline = 2\nschedule_file = \"fifo\"\n")
        .unwrap();
    fs::create_dir(at("study")).unwrap();
    fs::create_dir(at("trials")).unwrap();
    symlink("/dev/zero", at("study/study.json")).unwrap();
    let study = "name = \"s\"\n[run.model]\nname = \"mlp\"\n[run.data]\nkind = \"shapes\"\ncount = 40\n[run.learning_rate]\nschedule = \"constant\"\n\
                 [cells]\nbatches = [8]\nsparsities = [0]\n[goal]\nloss = 2.4\n[search]\ntrials = 1\nsteps = 8\neval_every = 8\n\
                 [search.ranges]\nlearning_rate.peak = { log = [1e-3, 0.1] }\n";
    fs::write(at("study.toml"), study).unwrap();
    symlink(at("fifo"), at("trials/trials-a.jsonl")).unwrap();
    let message_of = |arguments: &str| {
        let output = espalier(&folder, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        let text = stderr(&output);
        text.lines().find(|line| line.starts_with("error: ")).expect("a sentence").to_owned()
    };
    let cases: [(&str, &str); 12] = [
        ("train fifo", "fifo: the run file cannot be read: it is a FIFO, not a regular file"),
        ("train /dev/zero --dry-run", "it is a device, not a regular file"),
        ("train long", "it has more than "),
        ("train schedule.toml --dry-run", "the schedule cannot be read: it is a FIFO"),
        ("explain fifo --ranks 2", "it is a FIFO"),
        ("plan run.toml --cluster fifo", "the cluster cannot be read: it is a FIFO"),
        ("plan run.toml --cluster /dev/zero", "it is a device"),
        ("schedule --file fifo", "the schedule cannot be read: it is a FIFO"),
        ("study fifo", "it is a FIFO"),
        ("study study.toml --out trials", "trials-a.jsonl"),
        ("report study", "there is no run here"),
        ("bench comm --out fifo", "it is a FIFO"),
    ];
    for (arguments, words) in cases {
        let sentence = message_of(arguments);
        assert!(sentence.contains(words), "{arguments:?}: {sentence}");
    }
    // A run folder whose files were replaced.
    for name in ["run.toml", "metrics.jsonl", ".lock"] {
        let path = at("run").join(name);
        let kept = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(at("fifo"), &path).unwrap();
        let sentence = message_of("train run.toml --out run --resume --set train.steps=6");
        assert!(sentence.contains(name) && sentence.contains("it is a FIFO"), "{name}: {sentence}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, kept).unwrap();
    }
}

/// Each of these once ended in an abort, or after minutes.
#[test]
fn more_than_one_process_can_do() {
    let folder = TestDir::new();
    let many = "--set parallel.data=40000 --set train.batch=40000 --set data.count=200000";
    let unchecked = "--set device.check_memory=false";
    refused(&folder, TINY, &format!("{many} {unchecked}"), &["40000 ranks", "as threads", "launcher"]);
    let run = |arguments: &str| espalier(&folder, arguments);
    let measured = run("explain run.toml --ranks 100000 --measure");
    crate::refused(measured, &["`--ranks` is 100000, but --measure starts a thread for each"]);
    crate::refused(run("bench generate --tokens 18446744073709551615"), &["--tokens"]);
    said(train_in(&folder, TINY, "--set device.threads=4096"), &["note: device.threads is 4096"]);
}

#[test]
fn a_sentence_is_said_once() {
    let folder = TestDir::new();
    let zip = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 99];
    fs::write(folder.join("train-images-idx3-ubyte"), zip).unwrap();
    fs::write(folder.join("train-labels-idx1-ubyte"), zip).unwrap();
    refused(&folder, &idx("."), "", &["train-images-idx3-ubyte cannot be read: "]);
    let text = stderr(&train_in(&folder, &idx("."), ""));
    let (_, why) = text.trim().split_once("cannot be read: ").unwrap();
    assert_eq!(text.matches(why).count(), 1, "{text}");
}

#[test]
fn a_trace_over_another_file() {
    let folder = TestDir::new();
    fs::write(folder.join("thesis.tex"), "years of work").unwrap();
    refused(&folder, TINY, "--trace thesis.tex", &["thesis.tex", "no trace"]);
    assert_eq!(fs::read_to_string(folder.join("thesis.tex")).unwrap(), "years of work");
    for _ in 0..2 {
        let output = train_in(&folder, TINY, "--trace trace.json");
        assert!(output.status.success(), "a trace may take the place of one: {}", stderr(&output));
    }
}

#[test]
fn tokens_that_share_an_id() {
    let folder = TestDir::new();
    let tokenizer = r#"{"pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": [{"id": 1, "content": "b"}],
        "model": {"vocab": {"a": 0, "b": 1, "c": 1}, "merges": []}}"#;
    fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    fs::write(folder.join("text"), "abcabcabc".repeat(20)).unwrap();
    let run_file = "[model]\nname = \"gpt\"\ncontext = 8\n[data]\nkind = \"text\"\npath = \"text\"\ntokenizer = \"tokenizer.json\"\n";
    refused(&folder, run_file, "", &["tokenizer.json", "\"b\" and \"c\"", "same id, 1"]);
    fs::write(folder.join("tokenizer.json"), tokenizer.replace("\"c\": 1", "\"c\": 2")).unwrap();
    let steps = "--set train.steps=1 --set train.batch=1 --set model.layers=1";
    let output = train_in(&folder, run_file, steps);
    assert!(output.status.success(), "one that is in the vocabulary may be added: {}", stderr(&output));
}

#[test]
fn a_launcher_of_no_ranks() {
    let folder = TestDir::with_run_file();
    let mut command = crate::command(&folder, "");
    crate::refused(
        command.env("OMPI_COMM_WORLD_SIZE", "0").env("OMPI_COMM_WORLD_RANK", "0").output().unwrap(),
        &["OMPI_COMM_WORLD_SIZE is 0"],
    );
}

/// Also without a pipeline a file for one can be used.
#[test]
fn one_stage_of_a_file_that_names_a_schedule() {
    let folder = TestDir::new();
    let stages = format!("{TINY}[parallel]\npipeline = 2\nschedule = \"gpipe\"\ncut = [1]\n");
    let output = succeeded(train_in(&folder, &stages, "--set parallel.pipeline=1"));
    let note = "note: `parallel.schedule`, `parallel.cut` of the run file are ignored";
    assert!(stderr(&output).contains(note), "{}", stderr(&output));
    let other = TestDir::new();
    let both = "--set parallel.pipeline=1 --set parallel.schedule=zb-h1";
    refused(&other, &stages, both, &["parallel.schedule", "no effect"]);
}

#[test]
fn files_of_a_folder_that_are_no_text_are_named() {
    let folder = TestDir::new();
    let texts = folder.join("texts");
    fs::create_dir(&texts).unwrap();
    fs::write(texts.join("a.txt"), "some text to learn from. ".repeat(40)).unwrap();
    for i in 0..7 {
        fs::write(texts.join(format!("picture-{i}.png")), b"\x89PNG\0").unwrap();
    }
    let run_file = TINY.replace("kind = \"arithmetic\"", "kind = \"text\"\npath = \"texts\"");
    let output = succeeded(train_in(&folder, &run_file.replace("count = 200", ""), "--dry-run"));
    let text = stderr(&output);
    assert_contains(
        &text,
        &["note: 7 files are not text and skipped: ", "picture-0.png", "picture-4.png and 2 more"],
    );
}
