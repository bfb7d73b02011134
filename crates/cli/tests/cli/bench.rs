//! `espalier bench sparse`: what it prints, what it draws, and what it refuses.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::{json, outputs, said};

fn bench(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command.current_dir(folder).args(["bench", "sparse"]).args(arguments).output().unwrap()
}

/// On any machine.
const CPU: [&str; 2] = ["--device", "cpu"];

#[test]
fn both_products_are_measured_drawn_and_told() {
    let folder = tempfile::tempdir().unwrap();
    for (precision, sizes, ascending) in [("f32", "64", &[64][..]), ("bf16", "64,32,64", &[32, 64])] {
        let small = ["--sizes", sizes, "--batch", "48", "--sparsity", "0.8"];
        let options = ["--precision", precision, "--out", "new/figure.svg", "--json"];
        let output = bench(folder.path(), &[&CPU[..], &small, &options].concat());
        assert!(output.status.success(), "{}", said(&output));
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
            let share = number("kept") / number("size").powi(2);
            assert!((0.1..0.3).contains(&share), "a fifth is kept: {row}");
        }
        let sweeps = found["sweeps"].as_array().unwrap();
        let swept: Vec<u64> = sweeps.iter().rev().map(|sweep| sweep["size"].as_u64().unwrap()).collect();
        assert_eq!(swept, ascending);
        assert!(sweeps.iter().all(|sweep| sweep["points"].as_array().unwrap().len() == 10), "{found}");
        for words in found["words"].as_array().unwrap() {
            assert!(said(&output).contains(words.as_str().unwrap()), "{words} is said: {}", said(&output));
        }
        assert!(
            said(&output).contains("80 % zeros") && said(&output).contains("64 x 64"),
            "{}",
            said(&output)
        );
        let figure = fs::read_to_string(folder.path().join("new/figure.svg")).unwrap();
        assert!(figure.starts_with("<svg") && figure.ends_with("</svg>\n"));
        assert_eq!(figure.matches("<polyline").count(), 2 + ascending.len(), "two products, and the sweeps");
        let files: Vec<_> = fs::read_dir(folder.path().join("new")).unwrap().collect();
        assert_eq!(files.len(), 1, "nothing else is left: {files:?}");
    }
}

#[test]
fn input_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str], words: &[&str]| {
        let output = bench(folder.path(), &[&CPU[..], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        let text = said(&output);
        assert_eq!(text.lines().filter(|line| line.starts_with("error:")).count(), 1, "one sentence: {text}");
        for word in words {
            assert!(text.contains(word), "`{word}` is named: {text}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
    };
    for share in ["1", "1.5", "-0.1", "NaN", "most"] {
        refused(&[&format!("--sparsity={share}")], &["--sparsity", share, "from 0 up to, but without, 1"]);
    }
    refused(&["--precision", "f16"], &["--precision", "f16", "bf16"]);
    refused(&["--batch", "0"], &["--batch", "0"]);
    refused(&["--sizes", "64,many"], &["--sizes", "many"]);
    refused(&["--sizes", "0"], &["--sizes", "0"]);
    refused(&["--out", "."], &["--out", "folder"]);
}

#[test]
fn a_device_that_is_not_one() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(folder.path(), &["--device", "abacus"]);
    assert_eq!(output.status.code(), Some(2));
    for word in ["--device", "abacus", "auto", "cpu", "cuda"] {
        assert!(said(&output).contains(word), "{}", said(&output));
    }
    fs::write(folder.path().join("file"), "in the way").unwrap();
    let output = bench(folder.path(), &[&CPU[..], &["--out", "file/figure.svg"]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("file/figure.svg"), "{}", said(&output));
    assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "in the way");
}

/// With a card each column has numbers or a reason; without one the machine is at fault, and nothing is left behind.
#[test]
fn a_card_is_measured_or_missed() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(folder.path(), &["--device", "cuda", "--sizes", "64,128", "--batch", "64", "--json"]);
    if crate::doctor()["cuda"]["found"] == true {
        assert!(output.status.success(), "{}", said(&output));
        let found = json(&output.stdout);
        let last = found["rows"].as_array().unwrap().last().unwrap();
        for (column, reason) in [("sparse_ms", "sparse"), ("two_four_ms", "two_four")] {
            let why = &found["missing"][reason];
            assert!(last[column].is_number() != why.is_string(), "{column} or why not: {found}");
        }
        assert!(folder.path().join("out/bench-sparse.svg").exists());
    } else {
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains("CUDA cannot be used"), "{}", said(&output));
        assert!(!folder.path().join("out/bench-sparse.svg.part").exists());
    }
}
