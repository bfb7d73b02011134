//! transformers as the reference: logits, a step of AdamW and greedy tokens of tiny models of random weights
//! that it made (`../oracle/hub.py`), and the same of what we export, read by its `from_pretrained`. Once of what
//! is kept in `../oracle/hub`, and where Python has transformers of what is made now.
//!
//! The models are a GPT-2, one of Llama with llama3 scaling and grouped keys, one of Qwen 2.5, of Qwen 3 and
//! of Mistral; and a GPT-2 of another inner width, epsilon and activation than the published ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use espalier_tensor::Device;
use espalier_testing::{Need, skipped};
use espalier_train::hub::{ExportOptions, ExportPrecision};
use espalier_train::infer::{Sampler, Sampling};
use espalier_train::parallel::Ranks;
use espalier_train::trained::TrainedModel;

use super::{
    AS_IT_IS, Numbers, config_of, furthest, hash, logits, newest, open, oracle, start_from, tensors, tokens,
};
use crate::fixture::Fixture;
use crate::support::generating;

const MODELS: [&str; 6] = ["gpt2", "llama", "qwen2", "qwen3", "mistral", "gpt2-other"];
/// Prompts that tokens are generated behind.
const PROMPTS: [usize; 4] = [1, 2, 5, 11];

/// What `hub.py` has made of a model.
struct Reference {
    name: &'static str,
    folder: PathBuf,
    file: PathBuf,
    expected: Fixture,
}

impl Reference {
    fn all(made: &Path) -> [Reference; 6] {
        MODELS.map(|name| {
            let file =
                made.join(if name == "gpt2" { "expected" } else { name }).with_extension("safetensors");
            Reference { name, folder: made.join(name), expected: fixture(&file), file }
        })
    }

    fn ids(&self) -> Vec<u32> {
        tokens(&self.expected, "ids")
    }

    /// Our logits of its tokens are those that it says; `precision` is one of a run file.
    fn same_logits(&self, ours: &TrainedModel, precision: &str, theirs: &[f32], what: &str) {
        // The last is there to be predicted.
        let ids = &self.ids()[..self.ids().len() - 1];
        let ours = logits(ours, &format!("train.precision={precision}"), ids);
        let (off, most) = (furthest(&ours, theirs), if precision == "f32" { 1e-5 } else { 2e-2 });
        assert!(off < most, "{}, {what}: logits in {precision} are off by {off}", self.name);
    }

    /// What we generate behind its prompts, on a layout of ranks, is what it generates.
    fn same_tokens(&self, ours: &TrainedModel, theirs: &Fixture, layout: &str) {
        // In the short form the shortest and the longest prompt on several ranks.
        let step = if espalier_testing::long() || layout.is_empty() { 1 } else { PROMPTS.len() - 1 };
        for length in PROMPTS.into_iter().step_by(step) {
            let (prompt, expected) = (&self.ids()[..length], tokens(theirs, &format!("greedy/{length}")));
            let more = if self.name == "gpt2" { 16 - length } else { 200 };
            assert_eq!(expected.len(), length + more);
            let generated = generating(ours, layout, |generator| {
                generator.generate(prompt, more, &mut Sampler::new(Sampling::GREEDY), &mut |_| true)
            });
            assert_eq!(generated.tokens, expected[length..], "{} on {layout}", self.name);
        }
    }

    /// A step of AdamW from its weights, in the run's folder.
    fn check_a_step(&self, run: &Path) -> TrainedModel {
        let is_first = self.name == "gpt2";
        let settings = if is_first { "" } else { "model.context=32 optimizer.eps=1e-4" };
        start_from(&self.folder, &self.ids(), run, settings);
        let trained = open(run);
        let (plan, device) = (trained.plan(&[]).unwrap(), Device::cpu(1).unwrap());
        let weights = trained.params(&plan, &device, &Ranks::single()).unwrap();
        let mut seen = 0;
        for (name, weight) in weights.named() {
            let mut ours = weight.to_f32();
            // Of learnt positions the run has its first.
            let mut theirs = self.expected.f32[&format!("after/{name}")][..ours.len()].to_vec();
            if is_first && name.ends_with("attn.c_attn.bias") {
                // A bias of all keys moves every score of a query alike, which a softmax does not see: its
                // gradient is rounding, and AdamW with a small epsilon makes steps of that.
                ours.drain(16..32);
                theirs.drain(16..32);
            }
            let off = furthest(&ours, &theirs);
            assert!(off < 1e-5, "{}: {name} is off by {off} after a step", self.name);
            seen += 1;
        }
        let theirs = self.expected.f32.keys().filter(|name| name.starts_with("after/")).count();
        assert_eq!(seen, theirs, "{}", self.name);
        trained
    }
}

fn fixture(file: &Path) -> Fixture {
    Fixture::read(&fs::read(file).unwrap())
}

#[test]
fn logits_and_tokens_are_those_of_transformers() {
    for (number, reference) in Reference::all(&oracle().join("hub")).into_iter().enumerate() {
        let (ours, theirs) = (open(&reference.folder), &reference.expected);
        reference.same_logits(&ours, "f32", &theirs.f32["logits"], "its model");
        reference.same_logits(&ours, "bf16", &theirs.f32["logits_bf16"], "its model");
        reference.same_tokens(&ours, theirs, "");
        // The first has two heads. In the short form one layout for each model.
        let layouts = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.tensor=4"];
        let some = if !espalier_testing::long() { 1 } else { 3 - usize::from(number == 0) };
        for layout in layouts.into_iter().cycle().skip(number).take(some) {
            reference.same_tokens(&ours, theirs, layout);
        }
        // With fewer positions the first ones are the same.
        let short = logits(&ours, "model.context=5", &reference.ids()[..5]);
        let off = furthest(&short, &theirs.f32["logits"][..5 * 40]);
        assert!(off < 1e-5, "{}: off by {off} with a context of 5", reference.name);
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

/// Every byte of every tensor with the names and shapes of save_pretrained, in one file and in shards, and of
/// what is read of these again; and the same model.
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
            // Without a window Mistral is a Llama.
            let expected = match reference.name {
                "mistral" => "llama",
                "gpt2-other" => "gpt2",
                name => name,
            };
            assert_eq!(config_of(&at)["model_type"], expected);
            reference.same_logits(&again, "f32", &reference.expected.f32["logits"], form);
        }
    }
}

/// Runs `hub.py`; false where there is no Python with what it needs.
fn python<'a>(arguments: impl IntoIterator<Item = &'a Path>) -> bool {
    let output = Command::new("python3").arg(oracle().join("hub.py")).args(arguments).output();
    let why = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => {
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            let why = message.trim().lines().last().unwrap_or("python3 said nothing").to_owned();
            assert!(why.starts_with("ModuleNotFoundError"), "{message}");
            why
        }
        Err(why) => why.to_string(),
    };
    skipped(Need::Transformers, why);
    false
}

/// The same made now, by whatever version is installed; and what that version reads of what we write: its own
/// weights again, the checkpoint of a run, and exports of it, in shards and in half the bytes.
#[test]
fn the_transformers_that_is_here_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    if !python([at("made").as_path()]) {
        return;
    }
    for reference in Reference::all(&at("made")) {
        let (ours, expected) = (open(&reference.folder), &reference.expected);
        reference.same_logits(&ours, "f32", &expected.f32["logits"], "made now");
        reference.same_logits(&ours, "bf16", &expected.f32["logits_bf16"], "made now");
        reference.same_tokens(&ours, expected, "");
        let run = at(&format!("{}-run", reference.name));
        let stepped = reference.check_a_step(&run);
        let name = |form: &str| at(&format!("{}-{form}", reference.name));
        ours.export(&name("again"), &AS_IT_IS).unwrap();
        stepped.export(&name("shards"), &ExportOptions { dtype: None, shard_bytes: 9_000 }).unwrap();
        let narrow = ExportOptions { dtype: Some(ExportPrecision::Bf16), ..AS_IT_IS };
        stepped.export(&name("narrow"), &narrow).unwrap();
        let mut generated = vec![name("again"), name("narrow"), name("shards")];
        // The names of a checkpoint have no prefix: transformers adds it where there is no head of its own.
        let is_tied = ["gpt2", "qwen2", "gpt2-other"].contains(&reference.name);
        generated.extend(is_tied.then(|| newest(&run)));
        let arguments = [Path::new("--read"), &reference.file].into_iter();
        assert!(python(arguments.chain(generated.iter().map(PathBuf::as_path))), "it was there a moment ago");
        let read_by_them =
            |exported: &Path| fixture(Path::new(&format!("{}.safetensors", exported.display())));

        let again = read_by_them(&name("again"));
        // The same weights, by another of its kernels for attention.
        let off = furthest(&again.f32["logits"], &expected.f32["logits"]);
        assert!(off < 1e-5, "{}: its own weights, through us: off by {off}", reference.name);
        for length in PROMPTS {
            let of = |fixture: &Fixture| tokens(fixture, &format!("greedy/{length}"));
            assert_eq!(of(&again), of(expected), "{}", reference.name);
        }
        for exported in &generated[2..] {
            let (read, name) = (read_by_them(exported), exported.display().to_string());
            reference.same_logits(&stepped, "f32", &read.f32["logits"], &name);
            assert_ne!(read.f32["logits"], again.f32["logits"], "{name}: a step was taken");
            if reference.name == "gpt2" {
                reference.same_tokens(&stepped, &read, "");
            }
        }
        let read = read_by_them(&name("narrow"));
        assert_eq!(read.metadata["dtype"], "torch.bfloat16");
        reference.same_logits(&open(&name("narrow")), "bf16", &read.f32["logits"], "in half the bytes");
    }
}
