//! `espalier plan --study`, `--steps-to-result` and `--tokens`: a study's steps times a plan's, from end to end.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::report::report;
use crate::study::{ended_study, repeated_study};
use crate::{
    TestDir, assert_contains, espalier, json_of, outputs, refused, refused_each, root, stderr, stdout,
    succeeded,
};

fn plan(folder: &Path, arguments: &str) -> Output {
    espalier(folder, &format!("plan {arguments}"))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} of {value}"))
}

fn points(answer: &Value) -> &Vec<Value> {
    answer["time_to_result"].as_array().unwrap()
}

/// The study's own run on this machine's cores: K* of the fit times the step of the search, the fastest first; a
/// picture, a folder, and its page.
#[test]
fn a_study_is_planned_from_its_steps_to_a_page() {
    let folder = TestDir::new();
    ended_study(&folder);
    let asked = "--study out/tiny --gpus 1,2 --batches 8..32 --svg time.svg --save plan --json";
    let answer = json_of(plan(&folder, asked));
    let all = points(&answer);
    assert_eq!(all.len(), 2 * 3 * 2, "GPUs, batches, sparsities: {all:?}");
    let mut last = 0.0;
    for point in all {
        let (steps, hours) = (number(point, "steps"), number(point, "hours"));
        assert!((hours / (steps * number(point, "step_seconds") / 3600.0) - 1.0).abs() < 1e-9, "{point}");
        assert!(hours >= last, "the fastest first");
        last = hours;
        let fit = answer["curves"].as_array().unwrap();
        let curve = fit.iter().find(|curve| curve["sparsity"] == point["sparsity"]).unwrap();
        let k_star = number(curve, "c1") / number(point, "batch") + number(curve, "c2");
        assert_eq!((steps, number(point, "k_star")), (k_star.ceil(), k_star.ceil()), "{point}");
        assert!(point["steps_interval"].is_null(), "two cells, and no other seeds: {point}");
        assert_eq!((point["cost"].is_null(), point["kwh"].is_null()), (true, true));
        assert!(point["layout"]["micro_batch"].is_u64() && point["extrapolated"] == false, "{point}");
        // On cores all of them work, however many ranks there are.
        assert!((number(point, "gpu_hours") / hours - 2.0).abs() < 1e-9, "{point}");
    }
    assert!(all.contains(&answer["best"]), "{answer}");
    assert!(answer["why"].as_str().unwrap().starts_with("Best: "), "{answer}");
    assert!(
        answer["pareto"].as_array().unwrap().len() == 2 && answer["scaling"].as_array().unwrap().len() == 2
    );
    assert_eq!(number(&answer["pruning"][0], "sparsity"), 0.5);
    assert_eq!(answer["curves"][0]["interval_from"], Value::Null);
    assert!(fs::read_to_string(folder.join("time.svg")).unwrap().starts_with("<svg"));
    let told = stdout(&succeeded(report(&folder, "plan").output().unwrap()));
    assert!(told.contains("12 choices"), "{told}");
    let page = fs::read_to_string(folder.join("plan/time-to-result.html")).unwrap();
    assert_contains(&page, &["Time to result: mlp", "Best: ", "50 % pruned", "<svg"]);
    refused(report(&folder, "plan --csv x.csv").output().unwrap(), &["is for runs, not for a plan"]);
    // Another file of that name stays.
    fs::write(folder.join("plan/time-to-result.json"), "notes").unwrap();
    refused(report(&folder, "plan").output().unwrap(), &["time-to-result.json: is no time to a result"]);
    refused(plan(&folder, "--study out/tiny --gpus 1 --save plan"), &["a file is here that is no plan"]);
}

/// By hand, in words: c1 and c2 say where a larger batch stops helping, prices what it costs.
#[test]
fn steps_that_are_given_are_planned_at_a_price() {
    let asked = "runs/hello.toml --cluster dgx-h100 --steps-to-result 64000,500 --steps-to-result 128000,500,0.9 \
                 --batches 64,256 --gpus 1,2,4 --price-per-gpu-hour 2";
    let told = stdout(&succeeded(plan(&root(), asked)));
    assert_contains(
        &told,
        &[
            "dense: K* = 64k/B + 500; no interval, for lack of cells and of other seeds; critical batch 128",
            "90 % pruned: K* = 128k/B + 500",
            "Best: ",
            "90 % pruned: does not pay",
            "and none fewer than 500: the critical batch is 128.",
        ],
    );
    let answer = json_of(plan(&root(), &format!("{asked} --json")));
    assert_eq!(points(&answer).len(), 12);
    for point in points(&answer) {
        let gpu_hours = number(point, "gpu_hours");
        assert!((gpu_hours / number(point, "hours") / number(point, "gpus") - 1.0).abs() < 1e-9, "{point}");
        assert!((number(point, "cost") / gpu_hours - 2.0).abs() < 1e-9, "{point}");
    }
    outputs::compare("espalier plan --study --json", std::slice::from_ref(&answer));
    assert_eq!(number(&answer["curves"][0], "critical_batch"), 128.0);
    assert_eq!(answer["pruning"][0]["pays_on"], json!([]));
}

/// 64 tokens a sample: steps follow from the run's own batch, and every GPU count has that batch.
#[test]
fn tokens_are_steps_of_the_batch() {
    let answer = json_of(plan(&root(), "runs/hello.toml --cluster dgx-h100 --tokens 1.6M --gpus 1,2 --json"));
    let all = points(&answer);
    assert_eq!(all.len(), 2);
    assert!(all.iter().all(|point| number(point, "steps") == 1.6e6 / (16.0 * 64.0) + 0.5), "{all:?}");
    assert!(answer["curves"][0]["critical_batch"].is_null());
}

#[test]
fn a_study_that_is_not_finished_is_used_and_said() {
    let folder = TestDir::new();
    ended_study(&folder);
    // More trials were asked for than have ended; and a cell more, of which nothing is known.
    let path = folder.join("out/tiny/study.json");
    let mut file: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let text =
        file["study"].as_str().unwrap().replace("sparsities = [0, 0.5]", "sparsities = [0, 0.5, 0.75]");
    file["study"] = text.into();
    file.as_object_mut().unwrap().remove("blake3");
    fs::write(&path, file.to_string()).unwrap();
    let output = succeeded(plan(&folder, "--study out/tiny --gpus 1 --batches 8"));
    assert_contains(
        &stderr(&output),
        &[
            "note: the study is not finished; steps may still become fewer at batch 8 at sparsity 0.75, batch 32 at \
             sparsity 0.75",
            "note: sparsity 0.75 has K* at fewer than two batch sizes, and is left out",
        ],
    );
    for file in fs::read_dir(folder.join("out/tiny")).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "jsonl") {
            fs::remove_file(file).unwrap();
        }
    }
    let words = ["`--study` has no K* yet at two batch sizes of one sparsity (0 of 24 trials are finished)"];
    refused(plan(&folder, "--study out/tiny"), &words);
}

/// Of best trials with other seeds, two of a cell's three.
#[test]
fn repeats_that_missed_the_goal_are_said() {
    let folder = TestDir::new();
    repeated_study(&folder);
    let path = folder.join("out/tiny/trials-0001.jsonl");
    let lines = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Lines that people wrote have no checksum.
    lines.iter_mut().for_each(|line| drop(line.as_object_mut().unwrap().remove("blake3")));
    let is_repeat = |line: &&mut Value| line["trial"].as_u64().is_some_and(|trial| trial >= 1 << 31);
    let of_cell = |line: &&mut Value| line["batch"] == 8 && line["sparsity"] == 0.0;
    for line in lines.iter_mut().filter(is_repeat).filter(of_cell).take(2) {
        line["status"] = "incomplete".into();
    }
    let repeats: Vec<_> = lines.iter_mut().filter(is_repeat).collect();
    let missed = repeats.iter().filter(|line| line["status"] != "complete").count();
    let notes = [
        format!("note: {missed} of {} repeats of best trials did not reach the goal", repeats.len()),
        "note: half of the repeats or more did not reach the goal at batch 8 at sparsity 0".into(),
    ];
    assert!(repeats.len() == 12 && missed >= 2, "{missed} of {}", repeats.len());
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&path, text).unwrap();
    let output = succeeded(plan(&folder, "--study out/tiny --gpus 1 --batches 8"));
    assert_contains(&stderr(&output), &notes.each_ref().map(String::as_str));
}

/// A batch of 4, 4 stages and 4 heads are 64 ranks.
#[test]
fn more_gpus_than_a_network_can_be_split_over_are_said() {
    let asked = "runs/hello.toml --cluster dgx-h100 --steps-to-result 64000,500 --batches 4 --gpus 64,128";
    let output = succeeded(plan(&root(), asked));
    let least = "data 4 x pipeline 4 x tensor 8";
    let why = "`parallel.tensor` is 8, but an attention has 4 heads";
    assert_contains(&stderr(&output), &["note: nothing runs on 128 GPUs: `parallel`: no layout", least, why]);
    assert_contains(&stdout(&output), &["64 GPUs"]);
}

#[test]
fn mistakes_get_one_sentence() {
    let folder = TestDir::new();
    ended_study(&folder);
    let gap = folder.join("gap");
    fs::create_dir(&gap).unwrap();
    let text = fs::read_to_string(root().join("studies/gap.toml")).unwrap();
    let file = json!({ "schema": 1, "study": text, "beside": root().join("studies") });
    fs::write(gap.join("study.json"), file.to_string()).unwrap();
    let mistakes = r#"
        --study FOLDER => study.json: is not there: this is no folder of a study
        --study FOLDER/gap => `--study` is gap, of another kind than steps-to-result: it has no K*
        runs/hello.toml --study FOLDER/out/tiny => `--study` is of another network: `model.name` was "mlp" and is "gpt"; steps that were measured elsewhere can be given as --steps-to-result
        --study FOLDER/out/tiny --sparsity 0.9 => `--sparsity` must be one that the study has: 0, 0.5, got "0.9"
        --study FOLDER/out/tiny --tokens 300B => cannot be used with '--tokens <N>'
        --study FOLDER/out/tiny --fits 80GB => `--fits` is for one batch and one sparsity
        --study FOLDER/out/tiny --gpus 4 --batches 7 --layout data=4 => `--layout data` leaves no layout: replicas must divide both 4 devices and the batch of 7
        --study FOLDER/out/tiny --batches 8,0 => `--batches` must be numbers as in 256,512, or a range as in 64..4096, got "8,0"
        runs/hello.toml --steps-to-result 5,-1 => `--steps-to-result` must be two numbers of at least 0, not both 0: steps are c1/B + c2, got "5,-1"
        runs/hello.toml --steps-to-result 5,1 --steps-to-result 6,1 => `--steps-to-result` has two curves for a sparsity of 0
        runs/alexnet.toml --tokens 1B => `--tokens` counts tokens, and this run learns from images
        runs/hello.toml --tokens many => `--tokens` must be a number, as in 300B, got "many"
        runs/hello.toml --batches 8 => `--batches` is for a time to result: add --study
        runs/hello.toml --tokens 1B --price-per-gpu-hour=-1 => `--price-per-gpu-hour` must be a number of at least 0, got "-1"
        runs/hello.toml --svg x.svg => `--svg` plots a sweep or a time to result
    "#;
    let folder = folder.display().to_string();
    refused_each(mistakes, |arguments| plan(&root(), &arguments.replace("FOLDER", &folder)));
}
