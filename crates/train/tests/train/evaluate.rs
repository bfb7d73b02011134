//! What a validation loss is measured on: files of their own, and samples from all over them.

use std::fs;
use std::path::Path;

use espalier_data::{DataSplit, Dataset, Inputs};
use espalier_plan::Plan;
use espalier_plan::config::RunFile;
use espalier_tensor::Device;
use espalier_train::trainer::Trainer;

use crate::support::settings;

const TEXT: &str = r#"
    seed = 4
    [model]
    layers = 1
    heads = 2
    width = 16
    context = 8
    [data]
    kind = "text"
    path = "train.txt"
    [train]
    batch = 4
"#;

fn run_file(folder: &Path, overrides: &str) -> Result<RunFile, String> {
    let mut run = RunFile::parse(TEXT, &settings(overrides)).map_err(|error| error.to_string())?;
    run.resolve_paths(folder);
    Ok(run)
}

fn validation_loss(folder: &Path, overrides: &str) -> f64 {
    let run = run_file(folder, overrides).unwrap();
    let dataset = Dataset::open(&run).unwrap();
    let plan = Plan::new(run, dataset.facts()).unwrap();
    let mut trainer = Trainer::new(plan, dataset, &Device::cpu(1).unwrap()).unwrap();
    trainer.evaluate().unwrap().expect("something is held out").loss
}

/// Two samples of two files one after the other are one of each, not the first two of the first.
#[test]
fn eval_samples_come_from_all_over_what_is_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, text) in [("train.txt", "abc"), ("a.txt", "hello world and "), ("b.txt", "0123456789!?<>+-")] {
        fs::write(folder.join(name), text.repeat(100)).unwrap();
    }
    let both = validation_loss(folder, "data.validation_path=[\"a.txt\", \"b.txt\"] train.eval_samples=2");
    let of =
        |file: &str| validation_loss(folder, &format!("data.validation_path={file} train.eval_samples=1"));
    let (a, b) = (of("a.txt"), of("b.txt"));
    assert!((a - b).abs() > 1e-3, "the files differ to the model: {a} and {b}");
    assert!((both - (a + b) / 2.0).abs() < 1e-6, "{both} is not the mean of {a} and {b}");
}

/// With files of their own all of `path` is learnt from, and none of it is measured on.
#[test]
fn files_are_held_out_instead_of_a_fraction() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ids = |range: std::ops::Range<u16>| range.flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    fs::create_dir(folder.join("more")).unwrap();
    for (name, bytes) in [("train.bin", ids(0..100)), ("more/1.bin", ids(200..250)), ("short.bin", ids(0..8))]
    {
        fs::write(folder.join(name), bytes).unwrap();
    }
    let open = |overrides: &str| {
        let tokens = "data.kind=tokens data.path=train.bin model.vocab=250";
        let run = run_file(folder, &format!("{tokens} {overrides}"))?;
        Dataset::open(&run).map_err(|error| error.to_string())
    };
    let data = open("data.validation_path=more").unwrap();
    assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation)), (11, 6));
    assert_eq!(
        data.batch(DataSplit::Validation, &[(0, 5)]).unwrap().targets,
        [241, 242, 243, 244, 245, 246, 247, 248]
    );
    assert_eq!(open("data.validation=0").unwrap().len(DataSplit::Train), 11);
    // What would be no measure is an error, in one sentence.
    let sentence =
        |overrides: &str| open(overrides).unwrap_err().replace(&format!("{}/", folder.display()), "");
    for (path, expected) in [
        (
            "train.bin",
            "data.validation_path is wrong: expected files that `data.path` does not train on, got train.bin",
        ),
        ("short.bin", "short.bin is too short for the validation windows: expected at least 9 tokens, got 8"),
        ("none.bin", "none.bin is not there: expected a token file of little-endian ids"),
        (
            "more data.validation=0.1",
            "`data.validation` and `data.validation_path` exclude each other: hold out a fraction, or use other files",
        ),
    ] {
        assert_eq!(sentence(&format!("data.validation_path={path}")), expected);
    }
}

/// Extensions choose among the files of folders, also where what is held out is one file.
#[test]
fn text_of_folders_is_held_out_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("in")).unwrap();
    for (name, text) in [("in/a.md", "abcdefghi"), ("in/b.rs", "123456789"), ("out.txt", "jklmnopqrs")] {
        fs::write(folder.join(name), text.repeat(4)).unwrap();
    }
    let open = |path: &str| {
        let overrides = format!("data.path=in data.extensions=[\"md\"] data.validation_path={path}");
        Dataset::open(&run_file(folder, &overrides)?).map_err(|error| error.to_string())
    };
    let data = open("out.txt").unwrap();
    assert_eq!(data.batch(DataSplit::Validation, &[(0, 0)]).unwrap().targets, b"klmnopqr".map(u32::from));
    assert!(open("in").unwrap_err().contains("does not train on"));
}

/// Images of files of their own, in either format: none of them is learnt from, and what is learnt from says
/// how they are standardised.
#[test]
fn images_of_other_files_are_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let idx = |sizes: &[u8], bytes: &[u8]| {
        let head = [0, 0, 8, sizes.len() as u8].into_iter().chain(sizes.iter().flat_map(|n| [0, 0, 0, *n]));
        head.chain(bytes.iter().copied()).collect::<Vec<u8>>()
    };
    let mnist = |name: &str, sizes: [u8; 3], pixels: &[u8], labels: &[u8]| {
        fs::write(at(&format!("{name}-images-idx3-ubyte")), idx(&sizes, pixels)).unwrap();
        fs::write(at(&format!("{name}-labels-idx1-ubyte")), idx(&sizes[..1], labels)).unwrap();
    };
    mnist("train", [3, 1, 2], &[10, 30, 10, 30, 10, 30], &[0, 1, 2]);
    mnist("t10k", [2, 1, 2], &[20, 20, 40, 0], &[2, 1]);
    mnist("wide", [1, 1, 3], &[1, 2, 3], &[0]);
    mnist("more", [1, 1, 2], &[1, 2], &[3]);
    let cifar = |label: u8, count: usize| [vec![label], vec![7; 3072]].concat().repeat(count);
    fs::create_dir(at("cifar")).unwrap();
    (1..=5).for_each(|i| fs::write(at(&format!("cifar/data_batch_{i}.bin")), cifar(1, 3)).unwrap());
    fs::write(at("cifar/test_batch.bin"), cifar(4, 2)).unwrap();
    let open = |kind: &str, path: &str, validation: &str| {
        let text = format!(
            "[model]\nname = \"mlp\"\n[data]\nkind = \"{kind}\"\npath = \"{path}\"\nvalidation_path = {validation}\n[train]\nbatch = 1"
        );
        let mut run = RunFile::parse(&text, &[]).map_err(|error| error.to_string())?;
        run.resolve_paths(folder.path());
        let data = Dataset::open(&run).map_err(|error| error.to_string())?;
        Ok::<_, String>((data, Dataset::files(&run.data).unwrap().len()))
    };
    let (data, files) = open("idx", ".", "\"t10k-images-idx3-ubyte\"").unwrap();
    assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation), files), (3, 2, 4));
    let held_out = data.batch(DataSplit::Validation, &[(0, 0), (0, 1)]).unwrap();
    assert_eq!(held_out.targets, [2, 1]);
    let Inputs::Images(images) = held_out.inputs else { panic!("images") };
    // Of what is learnt from the mean is 20 and the deviation 10.
    assert_eq!(images.to_f32(), [0.0, 0.0, 2.0, -2.0]);
    assert_eq!(data.batch(DataSplit::Train, &[(0, 0), (0, 1), (0, 2)]).unwrap().targets, [0, 1, 2]);
    let (data, files) = open("cifar10", "cifar", "\"cifar/test_batch.bin\"").unwrap();
    assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation), files), (15, 2, 6));
    assert_eq!(data.label(DataSplit::Validation, 1), Some(4));

    let sentence = |path: &str| {
        open("idx", ".", path).unwrap_err().replace(&format!("{}/", folder.path().display()), "")
    };
    assert_eq!(
        sentence("\"train-images-idx3-ubyte\""),
        "data.validation_path is wrong: expected files that `data.path` does not train on, got train-images-idx3-ubyte"
    );
    assert_eq!(
        sentence("[\"t10k-images-idx3-ubyte\", \"wide-images-idx3-ubyte\"]"),
        "wide-images-idx3-ubyte has images of 1 x 3 pixels and 1 channels: expected 1 x 2 and 1, as the training images"
    );
    assert_eq!(
        sentence("\"more-images-idx3-ubyte\""),
        "more-images-idx3-ubyte has a wrong label at sample 0: expected one below 3, got 3"
    );
    assert!(
        sentence("\"none\"")
            .starts_with("none is not there: expected images in MNIST's or CIFAR-10's format")
    );
}
