//! People's models in and out: `--from` a folder of Hugging Face's, `espalier eval`, `espalier export`.

use std::fs;
use std::path::{Path, PathBuf};

use espalier_plan::RunFile;

use crate::outputs::compare;
use crate::{
    TINY, TestDir, ended, espalier, json, json_of, refused, refused_at_last, stderr, succeeded, train_in,
};

/// A tiny GPT-2 as transformers saves it.
fn gpt2() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/oracle/hub/gpt2")
}

/// A run file that takes its model from what it starts from.
const AUTO: &str = r#"
    [model]
    name = "auto"
    context = 8
    [data]
    count = 200
    [train]
    steps = 2
    batch = 4
    eval_samples = 8
    [device]
    kind = "cpu"
    threads = 2
"#;

#[test]
fn a_model_of_hugging_faces_is_trained_on_and_goes_back() {
    let at = &TestDir::new();
    let from = gpt2().display().to_string();
    let summary = json_of(train_in(at, AUTO, &format!("--from {from} --out run --json")));
    // Two layers of width 16, 40 tokens and the 8 positions that are asked for.
    assert_eq!(summary["parameters"], 40 * 16 + 8 * 16 + 2 * (12 * 256 + 13 * 16) + 32);
    succeeded(train_in(at, AUTO, &format!("--from {from} --out dry --dry-run --json")));
    // It goes on without the folder, as the model that it is.
    let output = succeeded(train_in(at, AUTO, "--out run --resume --set train.steps=3 --json"));
    let hash = &json(&output.stdout)["weights_hash"];

    let written = json_of(espalier(at, "export run -o hf --shards 9kB --json"));
    assert!(written["files"].as_array().unwrap().len() > 1 && written["config"] == true, "{written}");
    let one = "export run -o gguf/run.gguf --format gguf --type f16 --json";
    let file = json_of(espalier(at, one));
    assert_eq!((&file["type"], &file["files"]), (&"f16".into(), &serde_json::json!(["run.gguf"])), "{file}");
    assert_eq!(fs::metadata(at.join("gguf/run.gguf")).unwrap().len(), file["bytes"].as_u64().unwrap());
    compare("espalier export --json", &[written, file]);
    let zero = "--from hf --set train.steps=0 --out again --json";
    assert_eq!(&json_of(train_in(at, AUTO, zero))["weights_hash"], hash);
}

/// The run file of docs/models.md, in small: steps that suit trained weights, and nothing to say again where
/// the run goes on.
#[test]
fn the_recipe_for_fine_tuning_is_whole() {
    let at = &TestDir::new();
    let page = include_str!("../../../../docs/models.md");
    let mut recipe = page.split("```").nth(1).unwrap().strip_prefix("toml\n").unwrap().to_owned();
    let small = [
        ("context = 256", "context = 8"),
        ("kind = \"text\"", "count = 200"),
        ("path = \"book.txt\"", ""),
        ("steps = 1000", "steps = 12"),
        ("warmup = 100", "warmup = 2"),
        ("batch = 8", "batch = 4"),
    ];
    for (written, smaller) in small {
        assert!(recipe.contains(written), "{written}");
        recipe = recipe.replace(written, smaller);
    }
    let from = gpt2().display().to_string();
    succeeded(train_in(at, &recipe, &format!("--from {from} -o tune --set train.steps=6")));
    let text = fs::read_to_string(at.join("tune/run.toml")).unwrap();
    let rate = RunFile::parse(&text, &[]).unwrap().learning_rate;
    assert!(rate.peak <= 1e-4 && rate.warmup > 0, "{rate:?}");
    let summary = json_of(train_in(at, &recipe, "-o tune --resume --json"));
    assert_eq!(summary["steps"], 12);
    assert!(summary["sparsity"].as_f64().unwrap() > 0.7, "{}", summary["sparsity"]);
}

/// What is not there is said to be not there, and nothing is asked of the network.
#[test]
fn a_folder_that_is_not_there_is_named() {
    let folder = TestDir::with_run_file();
    let commands: [&str; 8] = [
        "train run.toml --from gpt2",
        "train run.toml --from gpt2 --dry-run",
        "eval gpt2 --data run.toml",
        "generate gpt2 hello",
        "export gpt2 -o out",
        "measure gpt2",
        "verify gpt2",
        "runs gpt2",
    ];
    for command in commands {
        refused_at_last(espalier(&folder, command), &["error: gpt2: there is no such folder"]);
    }
}

#[test]
fn a_trained_model_is_judged_by_any_data_on_any_layout() {
    let at = &TestDir::new();
    let trained = json_of(train_in(at, TINY, "--out run --json"));
    fs::write(at.join("sums.txt"), "1+2=3\n".repeat(50)).unwrap();
    let eval = |more: &str| json_of(espalier(at, &format!("eval run --json {more}")));
    let own = eval("--samples 8");
    let difference = own["loss"].as_f64().unwrap() - trained["validation"]["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-6, "{own} and {}", trained["validation"]);
    let one = eval("--data sums.txt");
    let strided = eval("--data sums.txt --stride 4");
    assert_eq!((&strided["stride"], &strided["strided_perplexity"]), (&4.into(), &strided["perplexity"]));
    assert_eq!((&one["windowed_perplexity"], &one["context"]), (&one["perplexity"], &strided["context"]));
    compare("espalier eval --json", &[one.clone(), strided]);
    assert_eq!((&one["accuracy"], &one["samples"], &one["tokens"]), (&().into(), &19.into(), &299.into()));
    let two = eval("--data sums.txt --layout tensor=2 --set device.kind=cpu");
    assert!((one["loss"].as_f64().unwrap() - two["loss"].as_f64().unwrap()).abs() < 1e-5);
}

/// In one shot, of weights that another program wrote; then trained on, and back to them as a dense folder
/// with zeros.
#[test]
fn a_model_of_hugging_faces_is_pruned() {
    let at = &TestDir::new();
    let from = gpt2().display().to_string();
    let prune = format!("prune {from} --method magnitude --sparsity 0.75 -o thin --json");
    let data = "--set data.kind=arithmetic --set data.count=200 --set train.batch=4";
    let pruned = json_of(espalier(at, &format!("{prune} {data}")));
    assert_eq!((pruned["sparsity"].as_f64(), pruned["steps"].as_u64()), (Some(0.75), Some(0)));
    let run_file = fs::read_to_string(at.join("thin/run.toml")).unwrap();
    let resume = "--out thin --resume --json --set train.steps=2 --set device.kind=cpu";
    assert_eq!(json_of(train_in(at, &run_file, resume))["sparsity"], 0.75);
    succeeded(espalier(at, "export thin -o back"));
    // A folder has no masks: they are found in its zeros, also where the run goes on.
    let keep = "--set prune.method=keep --json --out kept --set device.kind=cpu";
    let kept = json_of(train_in(at, AUTO, &format!("{keep} --from back")));
    assert_eq!((kept["sparsity"].as_f64(), &kept["kept"]), (Some(0.75), &pruned["kept"]), "{kept}");
    let longer = json_of(train_in(at, AUTO, &format!("{keep} --resume --set train.steps=4")));
    assert_eq!((longer["sparsity"].as_f64(), longer["steps"].as_u64()), (Some(0.75), Some(4)), "{longer}");
    let dense = train_in(at, AUTO, &format!("--set prune.method=keep --from {from} --out none"));
    refused(dense, &["none of the prunable weights that the run starts from is zero"]);
    assert!(!at.join("none").exists());
    // The folder is one of theirs again, and pruned on from there it is where it was.
    let again = "prune back --method magnitude --sparsity 0.75 -o again --json";
    assert_eq!(json_of(espalier(at, &format!("{again} {data}")))["kept"], pruned["kept"]);
    // What it is trained on must be said.
    refused(
        espalier(at, &format!("prune {from} --method magnitude -o x")),
        &["`data.kind` is missing, and this model has no run file"],
    );
    assert!(!at.join("x").exists());
}

/// What a run began from may go: its checkpoints have the tokenizer, though it was in two files.
#[test]
fn a_run_outlives_the_folder_that_it_began_from() {
    let at = &TestDir::new();
    fs::create_dir(at.join("theirs")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(gpt2().join(file), at.join("theirs").join(file)).unwrap();
    }
    let vocab: Vec<String> =
        ('a'..='z').chain(['Ġ']).zip(0..).map(|(c, id)| format!("\"{c}\": {id}")).collect();
    fs::write(at.join("theirs/vocab.json"), format!("{{{}}}", vocab.join(", "))).unwrap();
    fs::write(at.join("theirs/merges.txt"), "#version: 0.2\n").unwrap();
    fs::write(at.join("words.txt"), "the cat and the dog ".repeat(40)).unwrap();
    let text = AUTO.replace("count = 200", "kind = \"text\"\n    path = \"words.txt\"");
    succeeded(train_in(at, &text, "--from theirs --out run"));
    let before = succeeded(espalier(at, "eval run --json"));
    fs::remove_dir_all(at.join("theirs")).unwrap();
    assert_eq!(json_of(espalier(at, "eval run --json")), json(&before.stdout));
    let output = succeeded(train_in(at, &text, "--out run --resume --set train.steps=3 --json"));
    assert_eq!(json(&output.stdout)["steps"], 3);
    // Text that was written anew is not what was held out.
    fs::write(at.join("words.txt"), "the dog and the cat ".repeat(40)).unwrap();
    let other = espalier(at, "eval run --json");
    assert!(stderr(&other).contains("warning: the data files have changed: "), "{}", stderr(&other));
}

/// A NaN among the weights is no empty text and no folder with a NaN: the run diverged, and the exit code
/// says so.
#[test]
fn weights_that_are_no_numbers_end_as_a_diverged_run_does() {
    let at = &TestDir::trained();
    fs::create_dir(at.join("broken")).unwrap();
    for entry in fs::read_dir(at.join("run/checkpoints/step-000004")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if name != "manifest.json" {
            fs::copy(&path, at.join("broken").join(name)).unwrap();
        }
    }
    let mut bytes = fs::read(at.join("broken/model.safetensors")).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(at.join("broken/model.safetensors"), bytes).unwrap();
    for arguments in ["generate broken 1+1=", "export broken -o hf"] {
        let output = espalier(at, arguments);
        assert!(output.stdout.is_empty() && !at.join("hf").exists());
        ended(output, 4, &["has a NaN or an infinity: what trained it diverged"]);
    }
}

/// Each gets one sentence, names what is wrong, and leaves nothing behind.
#[test]
fn what_cannot_be_done_is_said() {
    let at = &TestDir::trained();
    fs::write(at.join("words.txt"), "these are no sums\n".repeat(9)).unwrap();
    let from = gpt2().display().to_string();
    for (arguments, sentence) in [
        ("eval run --data words.txt", "the arithmetic vocabulary has no token for \"t\""),
        ("eval run --data gone.txt", "gone.txt is not there"),
        (&format!("eval {from} --data words.txt"), "words.txt is text: expected a file of token ids"),
        ("eval run --set data.validation=0.5", "`data.validation` is 0.5, and the run held out 0.1"),
        ("eval run --set train.steps=9", "`train.steps` has no effect in evaluation"),
        (
            "eval run --data words.txt --set data.count=9",
            "`data.count` has no effect with --data, which is what the model is evaluated on",
        ),
        ("generate run 1 --set train.clip=1", "`train.clip` has no effect in generation"),
        (&format!("eval {from}"), "its training data are unknown: give data to evaluate on with --data"),
        ("eval run --stride 99", "`--stride` is 99, and the context"),
        ("eval gone", "gone: there is no such folder (nothing is downloaded"),
        ("eval run --layout tnesor=2", "`parallel.tnesor` is not a field"),
        ("export run -o run", "run: it is there already"),
        ("export run -o hf --shards much", "`--shards` is \"much\", which is no size"),
        ("export run -o hf --type q8_0", "`--type` is for --format gguf"),
        ("export run -o run.gguf", "`--out` ends in .gguf, and would be a folder"),
        ("export run -o hf --format gguf --dtype f16", "`--dtype` is for folders"),
        ("export run -o hf --format gguf --shards 1GB", "`--shards` is for folders"),
        (&format!("export {from} -o hf --format gguf --type q4_0"), "q4_0 takes 32 at a time"),
        ("train auto.toml", "`model.name` is \"auto\", the model of the checkpoint to start from"),
    ] {
        fs::write(at.join("auto.toml"), AUTO).unwrap();
        refused(espalier(at, arguments), &[sentence]);
    }
    assert!(!at.join("hf").exists() && !at.join("out").exists());
}
