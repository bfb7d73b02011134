//! `espalier plan`: published shares of peak, the contract's fields, run files that it writes, and mistakes.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::{
    TestDir, assert_contains, espalier, json_of, refused, refused_each, root, said, stdout, succeeded,
};

const GPT3: &str = "runs/gpt3-13b.toml --cluster summit";

/// Runs with words divided by spaces.
fn plan(arguments: &str) -> Output {
    espalier(&root(), &format!("plan {arguments}"))
}

fn figures(arguments: &str) -> Value {
    json_of(plan(&format!("{arguments} --json")))
}

fn dry_run(run_file: &Path) -> Value {
    json_of(espalier(&root(), &format!("train --dry-run --json {}", run_file.display())))
}

/// Singh & Bhatele 2023, table of GPT-3 13B: the search finds the stages itself.
#[test]
fn shares_of_peak_are_those_that_samo_published() {
    for (engine, stages, published) in
        [("axonn", 32, [43.3, 39.7, 32.2, 22.9]), ("samo", 8, [53.4, 48.8, 41.1, 31.0])]
    {
        let figures =
            figures(&format!("{GPT3} --gpus 256,512,1024,2048 --engine {engine} --layout micro_batch=1"));
        for (one, published) in figures["sweep"].as_array().unwrap().iter().zip(published) {
            let best = &one["candidates"][0];
            let share = best["percent_of_peak"].as_f64().unwrap();
            assert!(
                (share / published - 1.0).abs() < 0.15,
                "{engine} on {}: {share} for {published}",
                one["gpus"]
            );
            assert_eq!(best["layout"]["pipeline"], stages, "{engine} on {}", one["gpus"]);
        }
    }
}

#[test]
fn one_layout_that_is_fixed_has_all_fields_of_the_contract() {
    let fixed = "data=2,pipeline=4,tensor=8,micro_batch=1,recompute=block,schedule=1f1b,sequence=true,zero=1";
    let figures = figures(&format!("runs/gpt3-13b.toml --cluster dgx-h100 --gpus 64 --layout {fixed}"));
    assert_eq!((&figures["cluster"], &figures["gpus"]), (&"dgx-h100".into(), &64.into()));
    let [only] = &figures["candidates"].as_array().unwrap()[..] else { panic!("{figures}") };
    let layout = &only["layout"];
    assert_eq!([&layout["data"], &layout["pipeline"], &layout["tensor"]], [2, 4, 8]);
    assert_eq!((&layout["schedule"], &layout["recompute"]), (&"1f1b".into(), &"block".into()));
    assert_eq!((&layout["micro_batches"], &layout["state"]), (&1024.into(), &"compressed".into()));
    let seconds = only["step_seconds"].as_f64().unwrap();
    let parts = ["compute", "point_to_point", "bubble", "collective", "compress", "optimizer"];
    let sum: f64 = parts.iter().map(|part| only["breakdown"][part].as_f64().unwrap()).sum();
    assert!((sum / seconds - 1.0).abs() < 1e-6, "{sum} of {seconds}");
    let [hardware, model] =
        ["percent_of_peak", "model_percent_of_peak"].map(|key| only[key].as_f64().unwrap());
    assert!(hardware > model && (1.3..1.34).contains(&(hardware / model)), "{hardware} {model}");
    assert_eq!(only["fits"], true);
}

#[test]
fn compressed_state_needs_fewer_stages_and_is_faster() {
    let asked = format!(
        "{GPT3} --gpus 1024 --layout tensor=1,recompute=block,micro_batch=1,zero=0 --top 1 --compare dense,samo,espalier"
    );
    let figures = figures(&asked);
    let of = |kind: &str, key: &str| figures["compare"][kind][key].as_f64().unwrap();
    let stages = |kind: &str| figures["compare"][kind]["layout"]["pipeline"].as_u64().unwrap();
    assert!((of("dense", "speedup_over_dense") - 1.0).abs() < 1e-12);
    assert!(
        of("espalier", "speedup_over_dense") > 1.1 && of("samo", "speedup_over_dense") > 1.0,
        "{figures}"
    );
    assert!(stages("espalier") < stages("dense"), "{figures}");
}

#[test]
fn one_line_says_whether_it_fits() {
    let yes = plan("runs/gpt3-13b.toml --fits 80GB --gpus 1 --set train.batch=8");
    assert!(stdout(&yes).starts_with("gpt3-13b fits on one device of 80 GB: "), "{}", stdout(&yes));
    let dense = figures("runs/gpt3-13b.toml --fits 80GB --gpus 1 --set train.batch=8 --sparsity 0");
    assert_eq!(dense["fits"], false);
    assert!(dense["memory_bytes"].as_f64().unwrap() > 80e9);
}

#[test]
fn what_is_applied_is_what_train_takes() {
    let folder = TestDir::new();
    let file = folder.join("two.toml");
    succeeded(plan(&format!("runs/hello.toml --gpus 2 --apply {}", file.display())));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("[parallel]"), "{text}");
    let layout = &dry_run(&file)["layout"];
    let axes = ["data", "pipeline", "tensor"].map(|axis| layout[axis].as_u64().unwrap());
    assert_eq!(axes.iter().product::<u64>(), 2, "{layout}");
}

/// A dry run of what was planned for a cluster says what was planned for it, wherever it is made; a run on other
/// devices says nothing.
#[test]
fn an_applied_plan_is_predicted_by_its_own_cluster() {
    let folder = TestDir::new();
    let file = folder.join("planned.toml");
    let asked =
        format!("runs/hello.toml --cluster dgx-h100 --gpus 2 --layout data=2 --apply {}", file.display());
    let seconds = figures(&asked)["candidates"][0]["step_seconds"].as_f64().unwrap();
    let predicted = &dry_run(&file)["predicted"];
    assert_eq!(predicted["cluster"], "dgx-h100");
    assert!((predicted["step_ms"].as_f64().unwrap() / (1e3 * seconds) - 1.0).abs() < 1e-9, "{predicted}");
    // A file is found from anywhere.
    let own = folder.join("own.toml");
    fs::copy(root().join("clusters/summit.toml"), &own).unwrap();
    let asked =
        format!("runs/hello.toml --cluster {} --gpus 2 --force --apply {}", own.display(), file.display());
    succeeded(plan(&asked));
    assert_eq!(dry_run(&file)["predicted"]["cluster"], own.display().to_string());
}

/// 32 layers at 64k tokens: one sample fills an H100, so that blocks run again, no more of them than must.
#[test]
fn as_few_blocks_are_recomputed_as_must_and_context_parallelism_is_named() {
    let model = "--set model.name=gpt --set model.layers=32 --set model.width=2048 --set model.heads=16 --set model.context=65536";
    let asked = |gpus: usize, more: &str| {
        figures(&format!(
            "runs/hello.toml {model} --set train.batch={gpus} --set train.precision=bf16 --cluster dgx-h100 --gpus {gpus} \
             --layout pipeline=1,tensor=1{more} --top 1"
        ))
    };
    let found = asked(8, "");
    let best = &found["candidates"][0];
    let number = best["layout"]["recompute"].as_u64().unwrap_or_else(|| panic!("{best}"));
    assert!((1..32).contains(&number), "{best}");
    let said = found["not_built"].as_str().unwrap();
    assert!(said.starts_with("Context parallelism ") && said.contains(" 65536 tokens"), "{said}");
    let full = asked(8, ",recompute=block");
    assert!(best["step_seconds"].as_f64() < full["candidates"][0]["step_seconds"].as_f64(), "{full}");
    let fewer = asked(8, &format!(",recompute={}", number + 1));
    assert_eq!(fewer["candidates"][0]["layout"]["recompute"], number + 1);
}

/// All lines of SAMO's strong scaling in one command, and drawn.
#[test]
fn several_engines_are_compared_over_devices() {
    let folder = TestDir::new();
    let picture = folder.join("engines.svg");
    let asked = format!(
        "{GPT3} --sweep gpus=1024..1024 --engine sputnik,axonn,samo --layout micro_batch=1 --svg {}",
        picture.display()
    );
    let figures = figures(&asked);
    let engines = &figures["sweep"][0]["engines"];
    let share = |name: &str| engines[name]["percent_of_peak"].as_f64().unwrap();
    assert!(share("sputnik") < share("axonn") && share("axonn") < share("samo"), "{engines}");
    assert_eq!(engines["samo"]["accuracy"]["error"], 0.12);
    assert!(fs::read_to_string(&picture).unwrap().contains("Hardware FLOPs utilization"));
}

/// What has an error bar, what has none, and what memory is made of.
#[test]
fn predictions_say_how_far_they_may_be_off() {
    let asked = "runs/hello.toml --gpus 1 --layout micro_batch=4 --top 1 --explain-memory";
    let output = said(plan(asked), &["two cores that are not this machine's"]);
    let words = [" ± 19 %", "memory of a device", "activations", "total", "left"];
    assert_contains(&stdout(&output), &words);
    let several = plan("runs/hello.toml --cluster h200-node --gpus 2 --top 1");
    assert_contains(&stdout(&several), &[", not measured"]);
    // Nobody has reached as much of the peak: a range, down to what somebody has.
    let large = "runs/gpt3-13b.toml --cluster dgx-h100 --gpus 64 --layout tensor=1,pipeline=1,zero=1 --top 1";
    let best = &figures(large)["candidates"][0];
    let [fastest, slowest, share, most] = [
        &best["step_seconds"],
        &best["slowest_seconds"],
        &best["percent_of_peak"],
        &best["surpasses"]["percent_of_peak"],
    ]
    .map(|number| number.as_f64().unwrap_or_else(|| panic!("{best}")));
    assert!(share > most && (slowest / fastest - share / most).abs() < 1e-9, "{best}");
    assert_contains(
        &stdout(&plan(large)),
        &["which no published run on about as many such GPUs has surpassed"],
    );
}

#[test]
fn sweeps_over_devices_and_shares() {
    let folder = TestDir::new();
    let picture = folder.join("curve.svg");
    let asked = format!("{GPT3} --engine axonn --sweep gpus=256..1024 --svg {}", picture.display());
    let figures_of = figures(&asked);
    let times: Vec<f64> = figures_of["sweep"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["step_seconds"].as_f64().unwrap())
        .collect();
    assert!(times.len() == 3 && times.windows(2).all(|pair| pair[0] > pair[1]), "{times:?}");
    assert!(fs::read_to_string(&picture).unwrap().starts_with("<svg"));
    let shares =
        figures(&format!("{GPT3} --gpus 256 --engine samo --layout micro_batch=1 --sparsity 0.8..0.9"));
    let shares = shares["sweep"].as_array().unwrap();
    assert_eq!(shares.len(), 3);
    let stages: Vec<u64> = shares.iter().map(|one| one["layout"]["pipeline"].as_u64().unwrap()).collect();
    assert!(stages.windows(2).all(|pair| pair[0] >= pair[1]), "more pruning, no more stages: {stages:?}");
}

#[test]
fn mistakes_get_one_sentence() {
    let folder = TestDir::new();
    let file = |name: &str, from: &str, to: &str| {
        let text = fs::read_to_string(root().join("clusters/summit.toml")).unwrap();
        assert!(text.contains(from));
        fs::write(folder.join(name), text.replacen(from, to, 1)).unwrap();
    };
    file("zero.toml", "gb_per_s = 50.0", "gb_per_s = 0.0");
    file("few.toml", "[device]", "nodes = 2\n[device]");
    let halves = fs::read_to_string(root().join("clusters/summit.toml")).unwrap();
    let halves = &halves[halves.find("[device.fp16]").unwrap()..halves.find("[device.f32]").unwrap()];
    file("plain.toml", halves, "");
    file("missing.toml", "memory_gb = 16.0\n", "");
    let mistakes = r#"
        runs/hello.toml --cluster sumit => error: `--cluster` must be summit, dgx-a100, dgx-h100, h200-node, this-machine, or a file, got "sumit"
        runs/hello.toml --engine megatronn => error: `--engine` must be espalier, axonn, samo, sputnik, deepspeed-3d, megatron, megatron-core, fsdp, got "megatronn"; did you mean `megatron`?
        runs/hello.toml --gpus 0 => error: `--gpus` must be at least 1, got "0"
        runs/hello.toml --gpus 2 --layout dta=2 => error: `--layout dta` is not a field; did you mean `--layout data`?
        runs/hello.toml --fits lots => error: `--fits` must be a size, as in 80GB, got "lots"
        runs/hello.toml --sparsity 1.5 => error: `--sparsity` must be a number in [0, 1), or a range as in 0..0.95, got "1.5"
        runs/hello.toml --sweep 2..4 => error: `--sweep` must be a range of devices, as in gpus=64..2048, got "2..4"
        runs/hello.toml --cluster FOLDER/zero.toml => `node.link.gb_per_s` must be a number above 0, got 0
        runs/hello.toml --cluster FOLDER/missing.toml => missing field `memory_gb`
        runs/hello.toml --gpus 18446744073709551615 => error: `train.batch` is 16, which 18446744073709551615 devices cannot split evenly
        runs/alexnet.toml --gpus 1000000000000 => 1000000000000 devices cannot split evenly
        runs/hello.toml --gpus 17 --layout data=17 => error: `train.batch` is 16, which 17 devices cannot split evenly
        runs/hello.toml --gpus 4 --layout data=3 => error: `--layout data` leaves no layout: replicas must divide both 4 devices and the batch of 16
        runs/hello.toml --gpus 4 --layout pipeline=4,tensor=3 => error: `--layout tensor` leaves no layout: tensor-parallel ranks must divide 4 devices, and are searched on up to 2 nodes
        runs/hello.toml --gpus 4 --engine fsdp --layout pipeline=2 => error: `--layout pipeline` leaves no layout: engine fsdp has no pipeline
        runs/hello.toml --gpus 4 --layout micro_batch=7 => error: `--layout micro_batch` leaves no layout: a micro-batch must divide the samples of a replica, of a batch of 16
        runs/hello.toml --gpus 4 --layout spatial=2 => error: `--layout spatial` leaves no layout: tiles must divide 4 devices, and only images have any
        runs/hello.toml --gpus 4 --layout pipeline=8,data=3 => error: `--layout` leaves no layout of 4 devices for a batch of 16: its fields contradict each other
        runs/hello.toml --gpus 2 --layout sequence=true,tensor=1 => error: `--layout sequence` leaves no layout: tensor-parallel ranks of a model with attention split sequences
        runs/hello.toml --gpus 1 --layout zero=3 => error: `--layout zero` leaves no layout: engine espalier shards so over several replicas alone
        runs/hello.toml --layout recompute=99 => error: `--layout recompute` leaves no layout: engine espalier recomputes none, attention where there is any, or up to 4 blocks of the model gpt
        runs/hello.toml --gpus 2 --layout pipeline=1,chunks=2 => error: `--layout chunks` has no effect with pipeline=1
        runs/hello.toml --sparsity 0 --layout weights=compressed => error: `--layout weights` has no effect as compressed without pruning
        runs/hello.toml --gpus 16 --layout pipeline=8 => stages must divide 16 devices, and the model gpt has 5 blocks for them
        runs/hello.toml --gpus 14 --layout tensor=7 => 7
        runs/hello.toml --set device.cluster=sumit => error: `device.cluster` must be summit, dgx-a100,
        runs/hello.toml --gpus 2 --engine megatron,fsdp => error: `--engine` names several, which are compared over numbers of devices: add `--sweep gpus=A..B`
        runs/hello.toml --sweep gpus=1..2 --engine megatron,fsdp --apply two.toml => error: `--apply` is of one engine, but `--engine` names several
        runs/hello.toml --compare dense,sparse => error: `--compare` must be dense, samo, espalier, got "sparse"
        runs/hello.toml --gpus 24 --cluster FOLDER/few.toml => error: `nodes` is 2, and 24 devices are more than the 12 that these have
        runs/gpt3-13b.toml --gpus 2 --cluster FOLDER/plain.toml => error: `train.precision` is bf16, which V100 16 GB does not compute in
    "#;
    let folder = folder.display().to_string();
    refused_each(mistakes, |arguments| plan(&arguments.replace("FOLDER", &folder)));
}

#[test]
fn what_fits_nowhere_hears_what_would_do() {
    let output = plan(&format!("{GPT3} --gpus 4 --engine samo --set train.batch=16"));
    let stderr = refused(output, &["`model` does not fit on 4 devices of 15.0 GB"]);
    assert!(stderr.contains("8 devices would do") || stderr.contains("16 devices would do"), "{stderr}");
}
