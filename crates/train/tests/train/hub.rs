//! Other people's models: what transformers says of a tiny GPT-2 (`../oracle/hub.py`), and of tiny models of
//! the Llama family, read in every form
//! that its files come in, trained on, and written as a folder of Hugging Face's again.

mod exact;
mod gguf;
mod llama;
mod pruned;
mod reference;
mod refused;
mod strided;
mod tokens;
mod zeros;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use espalier_data::Dataset;
use espalier_nn::layers::{BatchSlice, ForwardContext, Mode};
use espalier_nn::model::Model;
use espalier_plan::Plan;
use espalier_plan::config::RunTable;
use espalier_plan::spec::RecomputeMode;
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, Device, Tensor, bf16, f16};
use espalier_train::RunSummary;
use espalier_train::checkpoint::Checkpoints;
use espalier_train::hub::{self, ExportOptions, ExportPrecision};
use espalier_train::parallel::Ranks;
use espalier_train::run::{Launch, Observer, RunDir, run};
use espalier_train::trained::TrainedModel;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::fixture::Fixture;
use crate::support::{base, names, open, prepare, settings, tiny_cnn, tiny_gpt};

/// Where it all stands, and what makes it.
fn oracle() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle")
}

/// What transformers saved.
fn gpt2() -> PathBuf {
    oracle().join("hub/gpt2")
}

/// What it says of it.
fn expected() -> Fixture {
    Fixture::read(include_bytes!("../oracle/hub/expected.safetensors"))
}

fn refusal(path: &Path) -> String {
    TrainedModel::open(path, |broken| panic!("{broken}")).unwrap_err().to_string()
}

/// The hash of all weights, in f32.
fn hash(trained: &TrainedModel) -> String {
    let plan = trained.plan(&settings("train.precision=f32")).unwrap();
    let device = Device::cpu(1).unwrap();
    trained.params(&plan, &device, &Ranks::single()).unwrap().hash().unwrap()
}

/// What a text model says of some tokens.
fn logits(trained: &TrainedModel, more: &str, ids: &[u32]) -> Vec<f32> {
    let (plan, device) = (trained.plan(&settings(more)).unwrap(), Device::cpu(2).unwrap());
    let weights = trained.params(&plan, &device, &Ranks::single()).unwrap();
    let ids = Tensor::from_slice(&device, &[1, ids.len()], ids, Category::Transient).unwrap();
    let batch_slice = BatchSlice { samples: 1, ..BatchSlice::default() };
    let mut pass = ForwardContext::new(&weights, Mode::Evaluate, 0, batch_slice);
    let x = Model::build(&plan.model, RecomputeMode::None).forward(ids, &mut pass).unwrap();
    let tables = ["lm_head.weight", "wte.weight", "embed_tokens.weight"];
    let table =
        tables.into_iter().find_map(|name| weights.find(name)).expect("a head, or what it is tied to");
    let table = weights.param(table).weight();
    matmul(&x, table.t(), None, Category::Workspace).unwrap().to_f32()
}

fn furthest(ours: &[f32], theirs: &[f32]) -> f32 {
    espalier_testing::farthest(ours, theirs).1
}

/// Tokens of a fixture.
fn tokens(fixture: &Fixture, name: &str) -> Vec<u32> {
    fixture.bytes[name].1.iter().map(|id| u32::from(*id)).collect()
}

/// Writes tokens as a file of them has them.
fn write_ids(path: &Path, ids: &[u32]) {
    fs::write(path, ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect::<Vec<u8>>()).unwrap();
}

fn ids() -> Vec<u32> {
    tokens(&expected(), "ids")
}

/// A run of one step that starts from the folder, with the model that it describes, on the tokens that
/// transformers saw.
fn start_from(from: &Path, ids: &[u32], out: &Path, more: &str) -> String {
    started(from, ids, out, more, &mut ()).unwrap().weights_hash.unwrap()
}

/// The same, with whatever comes of it.
fn started(
    from: &Path,
    ids: &[u32],
    out: &Path,
    more: &str,
    observer: &mut (dyn Observer + Send),
) -> espalier_train::Result<RunSummary> {
    let tokens = out.with_extension("bin");
    fs::create_dir_all(tokens.parent().unwrap()).unwrap();
    write_ids(&tokens, ids);
    let text = format!(
        r#"
        [model]
        name = "auto"
        [data]
        kind = "tokens"
        path = "{}"
        validation = 0
        [train]
        steps = 1
        batch = 1
        [optimizer]
        eps = 1e-6
        weight_decay = 0.1
        [learning_rate]
        peak = 0.01
        schedule = "constant"
        "#,
        tokens.display()
    );
    let described = hub::model_of(from, |broken| panic!("{broken}")).unwrap();
    let mut table = RunTable::parse(&text, &settings(more)).unwrap();
    table.set_model(&described.model, described.tokenizer.as_deref()).unwrap();
    if table.leaves_sparsity() {
        table.set_sparsity(open(from).zeros(table.candidates().unwrap())?);
    }
    let run_file = table.read().unwrap();
    let dataset = Dataset::open(&run_file).unwrap();
    let plan = Plan::new(run_file, dataset.facts()).unwrap();
    let run_dir = RunDir { from: Some(from.to_owned()), ..RunDir::at(out) };
    let outcome = run(plan, dataset, &Device::cpu(2).unwrap(), &run_dir, &Launch::default(), observer);
    Ok(outcome?.summary)
}

/// A tensor of a file: its type, shape and bytes.
type Numbers = (Dtype, Vec<usize>, Vec<u8>);

fn tensors(path: &Path) -> BTreeMap<String, Numbers> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let one = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(one).collect()
}

fn write(path: &Path, tensors: &BTreeMap<String, Numbers>) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    fs::write(path, safetensors::serialize(views, Some(format)).unwrap()).unwrap();
}

/// The fixture in another form.
fn folder_with(at: PathBuf, change: impl FnOnce(&mut BTreeMap<String, Numbers>)) -> PathBuf {
    let mut all = tensors(&gpt2().join("model.safetensors"));
    change(&mut all);
    fs::create_dir_all(&at).unwrap();
    fs::copy(gpt2().join("config.json"), at.join("config.json")).unwrap();
    write(&at.join("model.safetensors"), &all);
    at
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

/// What the configuration of a folder says.
fn config_of(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// A number in half the bytes.
type Narrow = fn(f32) -> [u8; 2];

fn halved(all: &mut BTreeMap<String, Numbers>, dtype: Dtype, narrow: Narrow) {
    for (of, _, bytes) in all.values_mut() {
        (*of, *bytes) = (dtype, floats(bytes).into_iter().flat_map(narrow).collect());
    }
}

#[test]
fn every_form_of_the_files_holds_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let hashed = hash(&open(&gpt2()));
    let plain = folder_with(at("plain"), |all| {
        *all = std::mem::take(all)
            .into_iter()
            .map(|(name, one)| (name.strip_prefix("transformer.").unwrap().to_owned(), one))
            .collect();
        // What older files have beside.
        let ones = (Dtype::U8, vec![1, 1, 16, 16], vec![1; 256]);
        all.insert("h.0.attn.bias".into(), ones);
        all.insert("h.0.attn.masked_bias".into(), (Dtype::F32, Vec::new(), vec![0; 4]));
        all.insert("lm_head.weight".into(), all["wte.weight"].clone());
    });
    assert_eq!(hash(&open(&plain)), hashed);
    // One file by itself says nothing of its model.
    let file = plain.join("model.safetensors");
    fs::remove_file(plain.join("config.json")).unwrap();
    assert!(refusal(&file).contains("no supported network"));

    let split = folder_with(at("cut"), |_| {});
    let mut all = tensors(&split.join("model.safetensors"));
    fs::remove_file(split.join("model.safetensors")).unwrap();
    let rest = all.split_off("transformer.h.1.attn.c_proj.weight");
    let mut map = serde_json::Map::new();
    for (file, tensors_of_file) in [("a.safetensors", &all), ("b.safetensors", &rest)] {
        write(&split.join(file), tensors_of_file);
        map.extend(tensors_of_file.keys().map(|name| (name.clone(), file.into())));
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(split.join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_eq!(hash(&open(&split)), hashed);

    let narrow: [(&str, Dtype, Narrow); 2] = [
        ("f16", Dtype::F16, |x| f16::from_f32(x).to_le_bytes()),
        ("bf16", Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes()),
    ];
    for (name, dtype, narrow) in narrow {
        let half = open(&folder_with(at(name), |all| halved(all, dtype, narrow)));
        let off = furthest(&logits(&half, "", &ids()[..16]), &expected().f32["logits"]);
        assert!((1e-6..0.1).contains(&off), "{name} is off by {off}");
    }
}

/// Exports into a folder, and reads it back.
fn exported(trained: &TrainedModel, folder: &Path, how: &ExportOptions) -> (TrainedModel, hub::ExportReport) {
    let exported = trained.export(folder, how).unwrap();
    (open(folder), exported)
}

const AS_IT_IS: ExportOptions = ExportOptions { dtype: None, shard_bytes: 5_000_000_000 };

/// As it is, `folders_survive_a_round_trip` has it.
#[test]
fn what_is_exported_in_another_precision_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let original = open(&gpt2());
    let (wide, _) =
        exported(&original, &at("f32"), &ExportOptions { dtype: Some(ExportPrecision::F32), ..AS_IT_IS });
    assert_eq!(hash(&wide), hash(&original));
    for (dtype, name) in [(ExportPrecision::Bf16, "bf16"), (ExportPrecision::F16, "f16")] {
        let (half, _) = exported(&original, &at(name), &ExportOptions { dtype: Some(dtype), ..AS_IT_IS });
        let off = furthest(&logits(&half, "train.precision=f32", &ids()[..16]), &expected().f32["logits"]);
        assert!((1e-6..0.1).contains(&off), "{name} is off by {off}");
    }
    let again = original.export(&at("f32"), &AS_IT_IS).unwrap_err().to_string();
    assert!(again.ends_with("f32: it is there already: choose another folder"), "{again}");
    assert_eq!(names(folder.path()), ["bf16", "f16", "f32"], "nothing else is left");
}

/// The newest checkpoint of a run folder.
fn newest(run: &Path) -> PathBuf {
    Checkpoints::of_run(run).list().unwrap().pop().unwrap()
}

/// Copies the files of a folder.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// Of one rank or of replicas, whatever else is beside; taken out of its run it is still known. Of ranks that
/// hold shards it is none, and says so by having no configuration.
#[test]
fn a_checkpoint_of_full_tensors_is_a_folder_of_hugging_faces() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, more) in
        [("one", ""), ("replicas", "parallel.data=2"), ("zero", "parallel.data=2 parallel.zero=1")]
    {
        let hashed = tiny_gpt("train.steps=1").set(more).run_in(&at(name)).weights_hash.unwrap();
        let (taken, theirs) = (at(&format!("{name}-taken")), at(&format!("{name}-theirs")));
        copy(&newest(&at(name)), &taken);
        assert_eq!(hash(&open(&taken)), hashed, "{name}");
        // As one who knows nothing of our manifest sees it.
        copy(&taken, &theirs);
        fs::remove_file(theirs.join("manifest.json")).unwrap();
        assert_eq!(hash(&open(&theirs)), hashed, "{name}");
        for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            assert!(taken.join(file).is_file(), "{file}");
        }
        let tokens = open(&theirs).tokenizer().unwrap().encode("1+1=2\n").unwrap();
        assert_eq!(tokens, open(&at(name)).tokenizer().unwrap().encode("1+1=2\n").unwrap());
    }
    let hashed = tiny_gpt("train.steps=1 parallel.tensor=2").run_in(&at("cut")).weights_hash.unwrap();
    assert!(!newest(&at("cut")).join("config.json").exists());
    assert!(newest(&at("cut")).join("tokenizer.json").exists());
    let (joined, written) = exported(&open(&at("cut")), &at("cut-hf"), &AS_IT_IS);
    assert_eq!((hash(&joined), written.has_config), (hashed, true));
    // A head of its own needs the names that save_pretrained gives.
    let hashed = tiny_gpt("train.steps=1 model.tied=false").run_in(&at("untied")).weights_hash.unwrap();
    assert!(!newest(&at("untied")).join("config.json").exists());
    let (untied, _) = exported(&open(&at("untied")), &at("untied-hf"), &AS_IT_IS);
    assert_eq!(hash(&untied), hashed);
    let theirs = tensors(&at("untied-hf").join("model.safetensors"));
    assert!(theirs.contains_key("lm_head.weight") && theirs.contains_key("transformer.wte.weight"));
    // What no class of transformers is still has its weights.
    tiny_gpt("train.steps=1 model.norm=rms").run_in(&at("rms"));
    let written = open(&at("rms")).export(&at("rms-hf"), &AS_IT_IS).unwrap();
    assert!(!written.has_config && !at("rms-hf").join("config.json").exists());
}

/// The tokenizer goes with the weights, from what a run starts from to its own checkpoints, though token
/// files do not need it.
#[test]
fn a_tokenizer_is_handed_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let from = folder_with(at("from"), |_| {});
    tiny_gpt("train.steps=1").run_in(&at("sums"));
    fs::copy(newest(&at("sums")).join("tokenizer.json"), from.join("tokenizer.json")).unwrap();
    fs::write(from.join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    let sampling = r#"{"do_sample": true, "temperature": 0.6, "top_k": 40, "eos_token_id": [3, 5]}"#;
    fs::write(from.join("generation_config.json"), sampling).unwrap();
    start_from(&from, &ids(), &at("run"), "");
    assert!(newest(&at("run")).join("tokenizer.json").is_file());
    assert_eq!(open(&at("run")).tokenizer().unwrap().encode("7").unwrap(), [7]);
    // So does how it is asked to write, to a checkpoint and to what is exported of it.
    open(&at("run")).export(&at("hf"), &AS_IT_IS).unwrap();
    for folder in [newest(&at("run")), at("hf")] {
        assert_eq!(
            fs::read_to_string(folder.join("chat_template.jinja")).unwrap(),
            "{{ messages[0].content }}"
        );
        let text = fs::read(folder.join("generation_config.json")).unwrap();
        let generation: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&generation["temperature"], &generation["top_k"]), (&0.6.into(), &40.into()));
        assert_eq!(generation["eos_token_id"], serde_json::json!([3, 5]));
    }
}

/// torchvision's names with what PyTorch counts beside; which network it is, its tensors say.
#[test]
fn state_dicts_of_torchvision_are_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let text = "[model]\nname = \"resnet-18\"\n[data]\nkind = \"shapes\"\ncount = 16\n[train]\nsteps = 0\nbatch = 4\n[optimizer]\nname = \"sgd\"";
    let hashed = base(text).run_in(&at("run")).weights_hash.unwrap();
    let mut all = tensors(&newest(&at("run")).join("model.safetensors"));
    all.insert("bn1.num_batches_tracked".into(), (Dtype::I64, Vec::new(), vec![0; 8]));
    write(&at("resnet18.safetensors"), &all);
    let trained = open(&at("resnet18.safetensors"));
    assert_eq!((trained.run().model.name.as_str(), trained.facts().classes), ("resnet-18", Some(10)));
    assert_eq!(hash(&trained), hashed);
}

/// How pixels were standardised stands beside the weights, so that other images are read as those were.
#[test]
fn images_are_evaluated_as_they_were_learnt_from() {
    let folder = tempfile::tempdir().unwrap();
    tiny_cnn("train.steps=1").run_in(folder.path());
    let (_, dataset, _) = prepare(&tiny_cnn(""), 1);
    let Dataset::Images(images) = &*dataset else { panic!("shapes are images") };
    let input = hub::image_input_of(&newest(folder.path())).unwrap();
    assert_eq!(input.standard.as_ref(), Some(images.standard()));
    assert_eq!(input.classes.unwrap()[..2], ["disc", "square"]);
}
