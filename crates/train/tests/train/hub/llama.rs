//! The Llama family against transformers: tiny models of random weights that it made (`../oracle/hub.py`), one of
//! Llama with llama3 scaling and grouped keys, one of Qwen 2.5, of Qwen 3 and of Mistral; and a GPT-2 of another
//! inner width, epsilon and activation than the published ones. Logits, a step of AdamW and 200 greedy tokens are
//! its own, and what we write is what we read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use espalier_tensor::Device;
use espalier_train::hub::{ExportOptions, ExportPrecision};
use espalier_train::infer::{Sampler, Sampling};
use espalier_train::parallel::Ranks;
use espalier_train::trained::{TrainedModel, on_ranks};
use serde_json::json;

use super::reference::python;
use super::{
    AS_IT_IS, Numbers, furthest, hash, logits, newest, open, oracle, refusal, start_from, tensors, tokens,
};
use crate::fixture::Fixture;
use crate::support::settings;

const FAMILIES: [&str; 5] = ["llama", "qwen2", "qwen3", "mistral", "gpt2-other"];
const PROMPTS: [usize; 4] = [1, 2, 5, 11];

/// What `hub.py` has made of a family.
struct Reference {
    name: &'static str,
    folder: PathBuf,
    expected: Fixture,
}

impl Reference {
    fn all(made: &Path) -> Vec<Reference> {
        let of = |name: &'static str| Reference {
            name,
            folder: made.join(name),
            expected: Fixture::read(&fs::read(made.join(format!("{name}.safetensors"))).unwrap()),
        };
        FAMILIES.map(of).into()
    }

    fn ids(&self) -> Vec<u32> {
        tokens(&self.expected, "ids")
    }

    fn same_logits(&self, ours: &TrainedModel, precision: &str, theirs: &[f32], what: &str) {
        let ours = logits(ours, &format!("train.precision={precision}"), &self.ids()[..32]);
        let (off, most) = (furthest(&ours, theirs), if precision == "f32" { 1e-5 } else { 2e-2 });
        assert!(off < most, "{}, {what}: logits in {precision} are off by {off}", self.name);
    }

    /// What we generate behind its prompts, on a layout of ranks, is what it generates.
    fn same_tokens(&self, ours: &TrainedModel, theirs: &Fixture, layout: &str) {
        let plan = ours.plan(&settings(layout)).unwrap();
        for length in PROMPTS {
            let (prompt, expected) = (&self.ids()[..length], tokens(theirs, &format!("greedy/{length}")));
            assert_eq!(expected.len(), length + 200);
            let device = Device::cpu(2).unwrap();
            let generated = on_ranks(ours, &plan, &device, Duration::from_secs(60), None, |generator| {
                generator.generate(prompt, 200, &mut Sampler::new(Sampling::GREEDY), &mut |_| true)
            });
            assert_eq!(generated.unwrap().tokens, expected[length..], "{} on {layout}", self.name);
        }
    }

    /// A step of AdamW from its weights, in the run's folder.
    fn check_a_step(&self, run: &Path) -> TrainedModel {
        start_from(&self.folder, &self.ids(), run, "model.context=32 optimizer.eps=1e-4");
        let trained = open(run);
        let (plan, device) = (trained.plan(&[]).unwrap(), Device::cpu(1).unwrap());
        let weights = trained.params(&plan, &device, &Ranks::single()).unwrap();
        let mut seen = 0;
        for (name, weight) in weights.named() {
            let (ours, theirs) = (weight.to_f32(), &self.expected.f32[&format!("after/{name}")]);
            // Of learnt positions the run has its first.
            let off = furthest(&ours, &theirs[..ours.len()]);
            assert!(off < 1e-5, "{}: {name} is off by {off} after a step", self.name);
            seen += 1;
        }
        let theirs = self.expected.f32.keys().filter(|name| name.starts_with("after/")).count();
        assert_eq!(seen, theirs, "{}", self.name);
        trained
    }
}

#[test]
fn logits_and_200_tokens_are_those_of_transformers() {
    for (number, reference) in Reference::all(&oracle().join("hub")).into_iter().enumerate() {
        let (ours, theirs) = (open(&reference.folder), &reference.expected);
        reference.same_logits(&ours, "f32", &theirs.f32["logits"], "its model");
        reference.same_logits(&ours, "bf16", &theirs.f32["logits_bf16"], "its model");
        reference.same_tokens(&ours, theirs, "");
        let layouts = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.tensor=4"];
        // In the short form one for each family.
        let some = if espalier_testing::long() { 3 } else { 1 };
        for layout in layouts.into_iter().cycle().skip(number).take(some) {
            reference.same_tokens(&ours, theirs, layout);
        }
    }
}

#[test]
fn a_step_from_its_weights_is_that_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for reference in Reference::all(&oracle().join("hub")) {
        reference.check_a_step(&folder.path().join(reference.name));
    }
}

/// All tensors of a folder, in however many files.
fn all_tensors(folder: &Path) -> BTreeMap<String, Numbers> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.flat_map(|path| tensors(&path)).collect()
}

/// Every byte of every tensor, in one file and in shards, and of what is read of these again; and the same model.
#[test]
fn folders_survive_a_round_trip() {
    let out = tempfile::tempdir().unwrap();
    for reference in Reference::all(&oracle().join("hub")) {
        let theirs = all_tensors(&reference.folder);
        let ours = open(&reference.folder);
        for (form, shard_bytes) in [("one", usize::MAX), ("shards", 5_000)] {
            let at = out.path().join(format!("{}-{form}", reference.name));
            let written = ours.export(&at, &ExportOptions { dtype: None, shard_bytes }).unwrap();
            assert_eq!(written.files.len() > 1, form == "shards");
            assert!(written.has_config);
            assert!(all_tensors(&at) == theirs, "{} in {form}", reference.name);
            let again = open(&at);
            assert_eq!(hash(&again), hash(&ours), "{} in {form}", reference.name);
            let config: serde_json::Value =
                serde_json::from_slice(&fs::read(at.join("config.json")).unwrap()).unwrap();
            // Without a window Mistral is a Llama.
            let expected = match reference.name {
                "mistral" => "llama",
                "gpt2-other" => "gpt2",
                name => name,
            };
            assert_eq!(config["model_type"], expected);
            reference.same_logits(&again, "f32", &reference.expected.f32["logits"], form);
        }
    }
}

/// The folder of a family with another configuration.
fn with_config(name: &str, at: PathBuf, change: impl FnOnce(&mut serde_json::Value)) -> PathBuf {
    let from = oracle().join("hub").join(name);
    fs::create_dir_all(&at).unwrap();
    fs::copy(from.join("model.safetensors"), at.join("model.safetensors")).unwrap();
    let mut config = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(at.join("config.json"), config.to_string()).unwrap();
    at
}

/// Up to its window a model sees what it saw in training; beyond it, it does not.
#[test]
fn a_sliding_window_is_refused_where_it_matters() {
    let out = tempfile::tempdir().unwrap();
    let at = with_config("mistral", out.path().join("window"), |config| config["sliding_window"] = json!(64));
    let ours = open(&at);
    assert_eq!(ours.plan(&[]).unwrap().network.context(), Some(64));
    let whole = open(&oracle().join("hub/mistral"));
    let ids = [1, 7, 30, 2];
    assert_eq!(logits(&ours, "", &ids), logits(&whole, "", &ids));
    let error = ours.plan(&settings("model.context=65")).unwrap_err().to_string();
    assert_eq!(
        error,
        "`model.context` is 65, and the model sees 64 positions at most (`model.window`, a sliding window, which attention \
         here lacks): set it to 64 or less"
    );
    ours.export(&out.path().join("again"), &AS_IT_IS).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(out.path().join("again/config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], &config["sliding_window"]), (&json!("mistral"), &json!(64)));
}

#[test]
fn what_we_lack_is_one_sentence() {
    let out = tempfile::tempdir().unwrap();
    let message = |name: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let at = with_config("llama", out.path().join(name), change);
        refusal(&at).replace(&at.display().to_string(), "DIR")
    };
    assert_eq!(
        message("yarn", &|config| config["rope_parameters"]["rope_type"] = json!("yarn")),
        "DIR/config.json: `rope_parameters` is of type \"yarn\", a scaling of rotary positions that is missing here: \
         \"llama3\" and \"default\" are read"
    );
    assert_eq!(
        message("heads", &|config| config["num_key_value_heads"] = json!(3)),
        "DIR/config.json: `num_key_value_heads` is 3, which does not divide `num_attention_heads` = 4"
    );
    let small = with_config("llama", out.path().join("vocab"), |_| {});
    let vocab: serde_json::Map<_, _> = (0..41).map(|id| (format!("t{id}"), json!(id))).collect();
    let tokenizer = json!({
        "pre_tokenizer": { "type": "ByteLevel" },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    fs::write(small.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    assert!(
        refusal(&small)
            .ends_with("its tokenizer has 41 tokens, and the model 40: it is that of another model")
    );
}

/// The same made now, by whatever version of transformers is installed, and what that reads of what we write.
#[test]
fn the_transformers_that_is_here_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    if !python([at("made").as_path()]) {
        return;
    }
    for reference in Reference::all(&at("made")) {
        let ours = open(&reference.folder);
        reference.same_logits(&ours, "f32", &reference.expected.f32["logits"], "made now");
        let run = at(&format!("{}-run", reference.name));
        let stepped = reference.check_a_step(&run);
        let name = |form: &str| at(&format!("{}-{form}", reference.name));
        ours.export(&name("again"), &AS_IT_IS).unwrap();
        stepped.export(&name("shards"), &ExportOptions { dtype: None, shard_bytes: 9_000 }).unwrap();
        let narrow = ExportOptions { dtype: Some(ExportPrecision::Bf16), ..AS_IT_IS };
        stepped.export(&name("narrow"), &narrow).unwrap();
        let mut generated = vec![name("again"), name("shards"), name("narrow")];
        // The names of a checkpoint have no prefix: transformers adds it where there is no head of its own.
        let is_tied = ["qwen2", "gpt2-other"].contains(&reference.name);
        generated.extend(is_tied.then(|| newest(&run)));
        let made = at("made").join(format!("{}.safetensors", reference.name));
        let arguments =
            [Path::new("--read"), &made].into_iter().chain(generated.iter().map(PathBuf::as_path));
        assert!(python(arguments), "it was there a moment ago");
        let read_by_them = |exported: &Path| {
            Fixture::read(&fs::read(format!("{}.safetensors", exported.display())).unwrap())
        };
        let again = read_by_them(&name("again"));
        let off = furthest(&again.f32["logits"], &reference.expected.f32["logits"]);
        assert!(off < 1e-5, "{}: its own weights, through us: off by {off}", reference.name);
        for length in PROMPTS {
            let of = |fixture: &Fixture| tokens(fixture, &format!("greedy/{length}"));
            assert_eq!(of(&again), of(&reference.expected), "{}", reference.name);
        }
        for exported in generated.iter().filter(|path| **path != name("again") && **path != name("narrow")) {
            let read = read_by_them(exported);
            reference.same_logits(&stepped, "f32", &read.f32["logits"], &exported.display().to_string());
        }
        let read = read_by_them(&name("narrow"));
        assert_eq!(read.metadata["dtype"], "torch.bfloat16");
        reference.same_logits(&open(&name("narrow")), "bf16", &read.f32["logits"], "in half the bytes");
    }
}
