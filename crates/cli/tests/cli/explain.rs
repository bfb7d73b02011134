//! `espalier explain`: numbers worked out by hand, what pruning changes, measuring, mistakes, and the page
//! about it.

use std::fs;
use std::process::Output;

use serde_json::Value;

use crate::{
    assert_contains, espalier, espalier_command, json, json_of, refused_in_a_sentence, root, said, stdout,
};

/// Runs with words divided by spaces.
fn explain(arguments: &str) -> Output {
    let mut command = espalier_command(&root(), &format!("explain {arguments}"));
    // As wide as the page shows it.
    command.env("COLUMNS", "120").output().unwrap()
}

fn figures(arguments: &str) -> Value {
    json_of(explain(&format!("{arguments} --json")))
}

fn layer<'a>(figures: &'a Value, name: &str) -> &'a Value {
    let layers = figures["layers"].as_array().unwrap();
    layers.iter().find(|layer| layer["name"] == name).unwrap_or_else(|| panic!("no layer {name}"))
}

const VGG: &str = "runs/alexnet.toml --set model.name=vgg-16 --set train.batch=64";

/// By hand: eight ranks, so sums send 14/8 of their words and gathers 7/8.
#[test]
fn two_layers_by_hand() {
    let alexnet = figures("runs/alexnet.toml --ranks 8 --alpha 1e-6 --beta 1e-9");
    let linear = layer(&alexnet, "classifier.4");
    assert_eq!(linear["data"]["words"], 1.75 * (4096.0 * 4096.0 + 4096.0));
    assert_eq!(linear["model"]["words"], 128.0 * 4096.0 * (0.875 + 1.75));
    let seconds = linear["model"]["seconds"].as_f64().unwrap();
    assert!((seconds - (21.0 * 1e-6 + 1_376_256.0 * 1e-9)).abs() < 1e-12, "{seconds}");
    assert!(linear["domain"].is_null());

    let conv = &figures(&format!("{VGG} --ranks 8"))["layers"][1];
    assert_eq!(conv["name"], "features.2");
    let weights = 1.75 * (64.0 * 64.0 * 9.0 + 64.0);
    assert_eq!(conv["data"]["words"], weights);
    assert_eq!(conv["domain"]["words"], 2.0 * 64.0 * 224.0 * 64.0 + weights);
}

/// The mixture that a run file asks for stands beside the cheapest one, and in the picture of its layout.
#[test]
fn the_mixture_of_a_run_is_printed() {
    let run = "runs/integrated.toml";
    let by = "layers.0 to layers.6 data-parallel, layers.11 to layers.16 model-parallel";
    let output = said(explain(&format!("{run} --ranks 2 --json")), &[&format!("run file: {by}: ")]);
    assert_eq!(json(&output.stdout)["run"]["layers"][0]["by"], "data");
    assert!(figures("runs/alexnet.toml --ranks 2")["run"].is_null());
    let output = espalier(&root(), &format!("train {run} --dry-run"));
    assert_contains(&stdout(&output), &[&format!("per layer: {by}\n"), "activation all-to-all"]);
}

/// The result of Gholami et al.
#[test]
fn linear_layers_want_model_and_convolutions_data_or_domain() {
    for (run, batch) in [("runs/alexnet.toml", 128), (VGG, 64)] {
        for ranks in [8, batch] {
            let figures = figures(&format!("{run} --ranks {ranks}"));
            assert_eq!((&figures["ranks"], &figures["batch"]), (&ranks.into(), &batch.into()));
            for row in figures["layers"].as_array().unwrap() {
                match row["kind"].as_str().unwrap() {
                    "linear" => assert_eq!(row["cheapest"], "model", "{row}"),
                    "conv" => assert_eq!(row["cheapest"], "data", "{row}"),
                    _ => assert!(row["cheapest"].is_null(), "{row}"),
                }
            }
            let (mixed, total) = (&figures["integrated"], &figures["total"]);
            for pure in ["data", "model"] {
                let pure = total[pure]["seconds"].as_f64().unwrap_or(f64::INFINITY);
                assert!(mixed["seconds"].as_f64().unwrap() < pure, "{mixed} {total}");
            }
            assert_eq!(mixed["layers"].as_array().unwrap().last().unwrap()["by"], "model");
            assert_eq!(mixed["layers"][0]["by"], "data");
        }
    }
    // More ranks than samples.
    let few = figures("runs/alexnet.toml --set model.name=vgg-16 --ranks 8 --set train.batch=4");
    assert_eq!(layer(&few, "features.2")["cheapest"], "domain");
    assert!(layer(&few, "features.2")["data"].is_null());
}

#[test]
fn pruning_shortens_weight_gradient_all_reduces_only() {
    let [dense, pruned] =
        ["", " --sparsity 0.9"].map(|more| figures(&format!("runs/alexnet.toml --ranks 8{more}")));
    let written = "runs/alexnet.toml --ranks 8 --set prune.method=magnitude --set prune.sparsity=0.9";
    assert_eq!(figures(written)["layers"], pruned["layers"], "as the run file prunes");
    let (dense, pruned) = (layer(&dense, "classifier.4"), layer(&pruned, "classifier.4"));
    assert_eq!(dense["model"], pruned["model"]);
    let kept = (0.1 * 4096.0 * 4096.0_f64).round() + 4096.0;
    assert_eq!(pruned["data"]["words"], 1.75 * kept);
    let batch = |layer: &Value| layer["data_from_batch"].as_u64().unwrap();
    assert!(batch(pruned) < batch(dense) / 9, "{} {}", batch(pruned), batch(dense));
}

#[test]
fn a_transformer_has_no_rows() {
    let output = explain("runs/hello.toml --ranks 4");
    let text = stdout(&output);
    assert!(output.status.success() && output.stderr.is_empty(), "{text}");
    assert!(text.contains("h.0.mlp.c_fc") && !text.contains("domain"), "{text}");
    assert!(
        text.lines().last().unwrap().starts_with("best mixture: wte to tied_linear data-parallel: "),
        "{text}"
    );
}

/// Times are this machine's; that there are some, for what can be done and for nothing else, is the same on
/// all.
#[test]
fn measuring_fits_alpha_and_beta_and_times_every_layer() {
    let figures = figures("runs/shapes.toml --ranks 2 --measure");
    let measured = &figures["measured"];
    assert_eq!(figures["alpha"], measured["fitted"]["alpha"]);
    assert_eq!(figures["beta"], measured["fitted"]["beta"]);
    for pattern in ["all_reduce", "all_gather", "point_to_point"] {
        assert!(measured["by_pattern"][pattern]["beta"].as_f64().unwrap() >= 0.0);
    }
    assert!(figures["beta"].as_f64().unwrap() > 0.0, "{figures}");
    let layers = figures["layers"].as_array().unwrap();
    assert_eq!(measured["layers"].as_array().unwrap().len(), layers.len());
    for (layer, seen) in layers.iter().zip(measured["layers"].as_array().unwrap()) {
        assert_eq!(layer["name"], seen["name"]);
        for by in ["data", "model", "domain"] {
            let elements = layer[by]["words"].as_f64();
            assert_eq!(
                seen[by].as_f64().map(|seconds| seconds > 0.0),
                elements.map(|elements| elements > 0.0),
                "{seen} {by}"
            );
        }
    }
    let given = explain("runs/shapes.toml --ranks 2 --measure --alpha 1e-6 --beta 1e-9");
    let text = stdout(&given);
    assert_contains(&text, &["latency 1.00 us, 1.00 ns per element", "measured among 2 threads"]);
}

#[test]
fn what_cannot_be_asked_for() {
    let cases: [(&str, &[&str]); 8] = [
        ("runs/alexnet.toml --ranks 1", &["`--ranks`", "at least 2"]),
        ("runs/alexnet.toml", &["--ranks"]),
        ("runs/alexnet.toml --ranks 2 --alpha -1", &["`--alpha`", "-1"]),
        ("runs/alexnet.toml --ranks 2 --beta nan", &["`--beta`", "NaN"]),
        ("runs/alexnet.toml --ranks 2 --sparsity 1", &["`--sparsity`", "[0, 1)"]),
        ("runs/alexnet.toml --ranks 2 --all-reduce rign", &["`--all-reduce`", "halving", "rign"]),
        ("runs/alexnet.toml --ranks 2 --set model.nmae=x", &["model.nmae"]),
        ("runs/none.toml --ranks 2", &["none.toml"]),
    ];
    for (arguments, words) in cases {
        refused_in_a_sentence(explain(arguments), words);
    }
}

/// Every command on the page prints what the page says.
#[test]
fn the_documentation_shows_true_output() {
    let page = fs::read_to_string(root().join("docs/explain.md")).unwrap();
    let mut compared = 0;
    for block in page.split("```").skip(1).step_by(2) {
        let (command, expected) = block.trim_start().split_once('\n').unwrap();
        let arguments = command.strip_prefix("$ espalier explain ").expect("a command");
        assert_eq!(stdout(&explain(arguments)), expected, "{command}");
        compared += 1;
    }
    assert_eq!(compared, 2);
}
