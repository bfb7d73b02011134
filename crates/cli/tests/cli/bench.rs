//! `espalier bench`: what it prints, draws and writes, and what it refuses.

use std::fs;
use std::path::Path;
use std::process::Output;

use espalier_plan::cluster::Cluster;

use crate::{TestDir, assert_contains, espalier, json, json_of, outputs, refused, stderr, succeeded};

fn bench(folder: &Path, arguments: &str) -> Output {
    run(folder, "sparse", arguments)
}

fn run(folder: &Path, question: &str, arguments: &str) -> Output {
    espalier(folder, &format!("bench {question} {arguments}"))
}

/// On any machine.
const CPU: &str = "--device cpu";

#[test]
fn both_products_are_measured_drawn_and_told() {
    let folder = TestDir::new();
    for (precision, sizes, ascending) in [("f32", "64", &[64][..]), ("bf16", "64,32,64", &[32, 64])] {
        let small = format!("--sizes {sizes} --batch 48 --sparsity 0.8");
        let options = format!("--precision {precision} --svg new/figure.svg --json");
        let output = succeeded(bench(&folder, &format!("{CPU} {small} {options}")));
        let found = json(&output.stdout);
        assert_eq!(found["precision"], precision);
        outputs::compare("espalier bench sparse --json", std::slice::from_ref(&found));
        assert_eq!((&found["device"], &found["batch"]), (&"cpu".into(), &48.into()));
        let rows = found["rows"].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| row["size"].as_u64().unwrap()).collect::<Vec<_>>(), ascending);
        for row in rows {
            let number = |field: &str| row[field].as_f64().unwrap();
            assert!(number("dense_ms") > 0.0 && number("sparse_ms") > 0.0, "{row}");
            let ratio = number("sparse_ms") / number("dense_ms");
            assert!((number("ratio") - ratio).abs() < 1e-9 * ratio, "{row}");
            let density = number("kept") / number("size").powi(2);
            assert!((0.1..0.3).contains(&density), "a fifth is kept: {row}");
        }
        let sweeps = found["sweeps"].as_array().unwrap();
        let swept: Vec<u64> = sweeps.iter().rev().map(|sweep| sweep["size"].as_u64().unwrap()).collect();
        assert_eq!(swept, ascending);
        assert!(sweeps.iter().all(|sweep| sweep["points"].as_array().unwrap().len() == 10), "{found}");
        for words in found["words"].as_array().unwrap() {
            assert!(
                stderr(&output).contains(words.as_str().unwrap()),
                "{words} is said: {}",
                stderr(&output)
            );
        }
        assert_contains(&stderr(&output), &["80 % sparsity", "64 x 64"]);
        let figure = fs::read_to_string(folder.join("new/figure.svg")).unwrap();
        assert!(figure.starts_with("<svg") && figure.ends_with("</svg>\n"));
        assert_eq!(
            figure.matches("<g data-name=").count(),
            2 + ascending.len(),
            "two products, and the sweeps"
        );
        let files: Vec<_> = fs::read_dir(folder.join("new")).unwrap().collect();
        assert_eq!(files.len(), 1, "nothing else is left: {files:?}");
    }
}

#[test]
fn input_that_cannot_be() {
    let folder = TestDir::new();
    let refused = |arguments: &str, words: &[&str]| {
        let text = refused(bench(&folder, &format!("{CPU} {arguments}")), &[]);
        assert_eq!(text.lines().filter(|line| line.starts_with("error:")).count(), 1, "one sentence: {text}");
        assert_contains(&text, words);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left behind");
    };
    for share in ["1", "1.5", "-0.1", "NaN", "most"] {
        refused(&format!("--sparsity={share}"), &["--sparsity", share, "a fraction in [0, 1)"]);
    }
    refused("--precision f16", &["--precision", "f16", "bf16"]);
    refused("--batch 0", &["--batch", "0"]);
    refused("--sizes 64,many", &["--sizes", "many"]);
    refused("--sizes 0", &["--sizes", "0"]);
    refused("--svg .", &["--svg", "folder"]);
}

#[test]
fn a_device_that_is_not_one() {
    let folder = TestDir::new();
    refused(bench(&folder, "--device abacus"), &["--device", "abacus", "auto", "cpu", "cuda"]);
    fs::write(folder.join("file"), "in the way").unwrap();
    refused(bench(&folder, &format!("{CPU} --out file/figure.svg")), &["file/figure.svg"]);
    assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "in the way");
}

/// With a GPU each column has numbers or a reason; without one the machine is at fault, and nothing is left
/// behind.
#[test]
fn a_gpu_is_measured_or_missed() {
    let folder = TestDir::new();
    let output = bench(&folder, "--device cuda --sizes 64,128 --batch 64 --json");
    if crate::doctor()["cuda"]["found"] == true {
        assert!(output.status.success(), "{}", stderr(&output));
        let found = json(&output.stdout);
        let last = found["rows"].as_array().unwrap().last().unwrap();
        for (column, reason) in [("sparse_ms", "sparse"), ("two_four_ms", "two_four")] {
            let why = &found["missing"][reason];
            assert!(last[column].is_number() != why.is_string(), "{column} or why not: {found}");
        }
        assert!(folder.join("out/bench-sparse.svg").exists());
    } else {
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        assert!(stderr(&output).contains("CUDA cannot be used"), "{}", stderr(&output));
        assert!(!folder.join("out/bench-sparse.svg.part").exists());
    }
}

/// `bench compute` and `bench comm`, with sizes that take a moment.
fn quick(folder: &Path, question: &str, arguments: &str) -> Output {
    run(folder, question, &format!("--quick {CPU} {arguments}"))
}

#[test]
fn a_cluster_file_is_measured_in_two_parts() {
    let folder = TestDir::new();
    let file = folder.join("cluster.toml");
    let found = json_of(quick(&folder, "compute", "--json"));
    outputs::compare("espalier bench compute --json", std::slice::from_ref(&found));
    assert_eq!(found["file"], "cluster.toml");
    assert!(found["rows"].as_array().unwrap().iter().all(|row| row["seconds"].as_f64().unwrap() > 0.0));
    let first = fs::read_to_string(&file).unwrap();
    let cluster = Cluster::parse_unlinked(&first).unwrap();
    assert_eq!((cluster.name.as_str(), cluster.node.link), ("cluster", None));
    assert_eq!(serde_json::to_value(&cluster.device).unwrap(), found["device"]);

    // A person's own words stay.
    fs::write(&file, first.replace("[node]", "# mine\n[node]")).unwrap();
    let found = json_of(quick(&folder, "comm", "--json"));
    outputs::compare("espalier bench comm --json", std::slice::from_ref(&found));
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("# mine\n[node]"), "{text}");
    let linked = Cluster::parse(&text).unwrap();
    assert_eq!(linked.device, cluster.device, "the other part is kept");
    let link = linked.node.link.unwrap();
    assert!(link.gb_per_s > 0.0 && link.alpha_us >= 0.0, "{link:?}");

    let output = quick(&folder, "compute", "");
    assert!(output.status.success() && !output.stdout.is_empty(), "{}", stderr(&output));
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(Cluster::parse(&text).unwrap().node, linked.node, "and so is this one");
    assert_eq!(text.matches("espalier bench compute`").count(), 1, "{text}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn files_that_cannot_be_a_cluster_s() {
    let folder = TestDir::new();
    let run_file = "[model]\nname = \"gpt\"\n";
    fs::write(folder.join("run.toml"), run_file).unwrap();
    let spoiled = |question: &str, arguments: &str, words: &[&str]| {
        let text = refused(quick(&folder, question, arguments), words);
        assert_eq!(text.lines().filter(|line| line.starts_with("error:")).count(), 1, "one sentence: {text}");
        assert_eq!(fs::read_to_string(folder.join("run.toml")).unwrap(), run_file, "left alone");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
    };
    for question in ["compute", "comm"] {
        spoiled(question, "-o run.toml", &["run.toml", "no cluster file"]);
        spoiled(question, "-o run.toml/below", &["run.toml/below"]);
        spoiled(question, "-o .", &["--out", "folder"]);
        refused(run(&folder, question, "--device abacus"), &["abacus", "cuda"]);
    }
    spoiled("comm", "-o none.toml", &["none.toml", "espalier bench compute --out none.toml"]);
}
