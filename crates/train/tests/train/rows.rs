//! Rows of JSON: the loss is the mean over the answers of the batch of all ranks and micro-batches, as
//! transformers has it, and what a token is worth does not depend on its neighbours in a sequence.

use std::fs;
use std::path::Path;

use espalier_data::{DataSplit, Dataset};
use espalier_plan::Plan;
use espalier_plan::config::RunTable;
use espalier_tensor::Device;
use espalier_testing::apart;
use espalier_train::hub;
use espalier_train::parallel::Ranks;
use espalier_train::trainer::Trainer;
use serde_json::{Value, json};

use crate::support::{self, Base, assert_goes_on, on_every_rank, rotary_llama, tiny_gpt};
use crate::tensor::all_same;

/// Questions and answers of many lengths.
fn rows(count: usize) -> String {
    let row = |i: usize| {
        let (asked, told) = ("to prune ".repeat(1 + i % 2), "a tree ".repeat(1 + i * 7 % 3));
        let prompt = &asked[..2 + i * 5 % (asked.len() - 2)];
        let completion = &told[..1 + i * 11 % (told.len() - 1)];
        json!({ "prompt": prompt, "completion": completion }).to_string() + "\n"
    };
    (0..count).map(row).collect()
}

/// A base that learns such rows, as bytes.
fn on_rows(base: Base, file: &Path, more: &str) -> Base {
    // What is left of other data has no effect, and would be refused.
    let base = base.set(format!("data.count= data.kind=jsonl data.path={}", file.display()));
    base.set("data.validation=0.2 train.eval_samples=0 model.context=24").set(more)
}

fn file(folder: &Path, count: usize) -> std::path::PathBuf {
    let file = folder.join("rows.jsonl");
    fs::write(&file, rows(count)).unwrap();
    file
}

/// Replicas, stages, shards of layers and micro-batches have answers of other lengths each, and take the steps
/// of one rank.
#[test]
fn every_layout_is_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path(), 60);
    for base in [tiny_gpt(""), rotary_llama("")] {
        let base = on_rows(base, &file, "train.batch=4");
        let layouts = [
            "train.micro_batches=2",
            "parallel.data=2",
            "parallel.data=2 parallel.zero=2 train.micro_batches=2",
            "parallel.pipeline=2 train.micro_batches=4",
            "parallel.pipeline=2 train.micro_batches=2 parallel.schedule=zb-h1 parallel.data=2",
            "parallel.tensor=2",
            "parallel.tensor=2 parallel.sequence=true",
            "train.recompute=block",
            "train.recompute=attention",
        ];
        all_same(&base, layouts, 4, 2e-5);
    }
}

/// All rows in one batch: in packed sequences and in one sequence each they have the same loss and gradient, in a
/// step and where they are held out.
#[test]
fn a_token_does_not_know_its_neighbours() {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path(), 40);
    for (name, base) in [("gpt", tiny_gpt("")), ("llama", rotary_llama(""))] {
        let shown = |pack: bool| {
            let base = on_rows(base.clone(), &file, &format!("data.pack={pack}")).steps(1);
            // As many sequences as there are.
            let all = base.trainer(1).dataset().len(DataSplit::Train);
            let shown = on_every_rank(&base.set(format!("train.batch={all}")), |mut trainer: Trainer| {
                let before = trainer.evaluate()?.expect("some rows are held out");
                let step = trainer.step()?;
                let after = trainer.evaluate()?.expect("some rows are held out");
                Ok((all, [before.loss, step.loss, step.grad_norm, after.loss], before.predictions))
            });
            shown.into_iter().next().unwrap()
        };
        let ((packed, in_packs, counted), (alone, by_themselves, of_rows)) = (shown(true), shown(false));
        assert!(packed < alone * 3 / 4, "{name}: {packed} sequences of {alone} rows");
        assert_eq!(counted, of_rows, "{name}");
        let far = apart(&in_packs, &by_themselves);
        assert!(far < 1e-5, "{name}: {far:e} apart\n{in_packs:?}\n{by_themselves:?}");
    }
}

/// A step from weights of transformers' has its loss and the norm of its gradient, packed or not.
#[test]
fn the_mean_is_that_of_transformers() {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle");
    let expected: Value = serde_json::from_slice(&fs::read(oracle.join("rows.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let rows = expected["rows"].as_array().unwrap();
    fs::write(at("rows.jsonl"), rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let letters = (b'a'..=b'z').map(|letter| char::from(letter).to_string()).chain(["Ġ".to_owned()]);
    let vocab: serde_json::Map<String, Value> =
        letters.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let tokenizer = json!({
        "added_tokens": [{ "id": 39, "content": "<|endoftext|>", "special": true }],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    fs::write(at("tokenizer.json"), tokenizer.to_string()).unwrap();
    for name in ["gpt2", "llama", "qwen3"] {
        let from = oracle.join("hub").join(name);
        let open = |pack: bool, batch: usize, micro_batches: usize| {
            let text = format!(
                "[model]\nname = \"auto\"\ncontext = 16\n[data]\nkind = \"jsonl\"\npath = \"{0}/*.jsonl\"\ntokenizer = \"{0}\"\n\
                 validation = 0\npack = {pack}\n[train]\nsteps = 1\nbatch = {batch}\nmicro_batches = {micro_batches}\n",
                folder.path().display(),
            );
            let mut table = RunTable::parse(&text, &[]).unwrap();
            let described = hub::model_of(&from, |broken| panic!("{broken}")).unwrap();
            table.set_model(&described.model, None).unwrap();
            let run_file = table.read().unwrap();
            let dataset = Dataset::open(&run_file).unwrap();
            (run_file, dataset)
        };
        for (pack, micro_batches) in [(true, 1), (false, 2), (false, 6)] {
            let all = open(pack, 1, 1).1.len(DataSplit::Train);
            assert!(if pack { all < 6 } else { all == 6 }, "{name}: {all} sequences");
            let (run_file, dataset) = open(pack, all, micro_batches);
            let plan = Plan::new(run_file, dataset.facts()).unwrap();
            let model = support::open(&from);
            let device = Device::cpu(1).unwrap();
            let mut trainer = model.trainer(plan, dataset, &device, Ranks::single()).unwrap();
            let step = trainer.step().unwrap();
            let theirs = ["loss", "grad_norm"].map(|number| expected[name][number].as_f64().unwrap());
            let far = apart(&theirs, &[step.loss, step.grad_norm]);
            assert!(
                far < 2e-5,
                "{name}, pack {pack}: {far:e} apart, {theirs:?} {} {}",
                step.loss,
                step.grad_norm
            );
        }
    }
}

/// A run that is stopped and resumed has the bits of one that was not; rows that changed are noticed.
#[test]
fn a_run_on_rows_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path(), 60);
    assert_goes_on(&on_rows(tiny_gpt(""), &file, ""), [3, 6]);
}
