//! `espalier bench`: what it prints and writes, and what it refuses.

use std::fs;
use std::path::Path;
use std::process::Output;

use espalier_plan::cluster::Cluster;

use crate::{TestDir, doctor, ended, espalier, json_of, outputs, refused, stderr, succeeded};

/// `bench compute` and `bench comm`, with sizes that take a moment.
fn quick(folder: &Path, question: &str, arguments: &str) -> Output {
    espalier(folder, &format!("bench {question} --quick --device cpu {arguments}"))
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

/// Without a GPU the machine is at fault, and nothing is left behind.
#[test]
fn a_gpu_is_measured_or_missed() {
    let folder = TestDir::new();
    let output = espalier(&folder, "bench compute --quick --device cuda");
    if doctor()["cuda"]["found"] == true {
        succeeded(output);
    } else {
        ended(output, 3, &["CUDA cannot be used"]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");
    }
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
        refused(espalier(&folder, &format!("bench {question} --device abacus")), &["abacus", "cuda"]);
    }
    spoiled("comm", "-o none.toml", &["none.toml", "espalier bench compute --out none.toml"]);
}
