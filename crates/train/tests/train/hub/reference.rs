//! transformers as the reference: logits, a step of AdamW and greedy tokens of a model that it made, and the same
//! of what we export, read by its `from_pretrained`. Once of what is kept in `../oracle/hub`, and where
//! Python has transformers of what is made now.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use espalier_tensor::Device;
use espalier_testing::{Need, skipped};
use espalier_train::hub::{ExportOptions, ExportPrecision};
use espalier_train::infer::{Sampler, Sampling};
use espalier_train::parallel::Ranks;
use espalier_train::trained::TrainedModel;
use espalier_train::trained::on_ranks;

use super::{AS_IT_IS, furthest, logits, newest, open, oracle, start_from, tokens};
use crate::fixture::Fixture;

/// Prompts that tokens are generated behind.
const PROMPTS: [usize; 4] = [1, 2, 5, 11];

/// What `hub.py` has made in a folder.
struct Reference {
    folder: PathBuf,
    expected: Fixture,
}

impl Reference {
    fn of(folder: &Path) -> Reference {
        let expected = Fixture::read(&std::fs::read(folder.join("expected.safetensors")).unwrap());
        Reference { folder: folder.to_owned(), expected }
    }

    fn gpt2(&self) -> PathBuf {
        self.folder.join("gpt2")
    }

    fn ids(&self) -> Vec<u32> {
        tokens(&self.expected, "ids")
    }

    /// Our logits of its tokens are those that it says; `precision` is one of a run file.
    fn same_logits(&self, ours: &TrainedModel, precision: &str, theirs: &[f32], what: &str) {
        let ours = logits(ours, &format!("train.precision={precision}"), &self.ids()[..16]);
        let (off, most) = (furthest(&ours, theirs), if precision == "f32" { 1e-5 } else { 2e-2 });
        assert!(off < most, "{what}: logits in {precision} are off by {off}");
    }

    /// What we generate behind its prompts is what it generates.
    fn same_tokens(&self, ours: &TrainedModel, theirs: &Fixture, what: &str) {
        let plan = ours.plan(&[]).unwrap();
        for length in PROMPTS {
            let (prompt, expected) = (&self.ids()[..length], tokens(theirs, &format!("greedy/{length}")));
            let generated =
                on_ranks(ours, &plan, &Device::cpu(2).unwrap(), Duration::from_secs(60), None, |generator| {
                    generator
                        .generate(prompt, 16 - length, &mut Sampler::new(Sampling::GREEDY), &mut |_| true)
                });
            assert_eq!(generated.unwrap().tokens, expected[length..], "{what}: behind {prompt:?}");
        }
    }

    fn check_its_own_model(&self) {
        let (ours, theirs) = (open(&self.gpt2()), &self.expected);
        self.same_logits(&ours, "f32", &theirs.f32["logits"], "its model");
        self.same_logits(&ours, "bf16", &theirs.f32["logits_bf16"], "its model");
        self.same_tokens(&ours, theirs, "its model");
        // With fewer positions the first ones are the same.
        let short = logits(&ours, "model.context=5", &self.ids()[..5]);
        let off = furthest(&short, &theirs.f32["logits"][..5 * 40]);
        assert!(off < 1e-5, "off by {off} with a context of 5");
    }

    /// A step of AdamW from its weights; returns the run's folder.
    fn check_a_step(&self, run: &Path) -> TrainedModel {
        start_from(&self.gpt2(), &self.ids(), run, "");
        let trained = open(run);
        let (plan, device) = (trained.plan(&[]).unwrap(), Device::cpu(1).unwrap());
        let weights = trained.params(&plan, &device, &Ranks::single()).unwrap();
        for (name, weight) in weights.named() {
            let (mut ours, mut theirs) =
                (weight.to_f32(), self.expected.f32[&format!("after/{name}")].clone());
            if name.ends_with("attn.c_attn.bias") {
                // A bias of all keys moves every score of a query alike, which a softmax does not see: its
                // gradient is rounding, and AdamW makes steps of that.
                ours.drain(16..32);
                theirs.drain(16..32);
            }
            let off = furthest(&ours, &theirs);
            assert!(off < 1e-5, "{name} is off by {off} after a step");
        }
        trained
    }
}

#[test]
fn logits_and_tokens_are_those_of_transformers() {
    Reference::of(&oracle().join("hub")).check_its_own_model();
}

#[test]
fn a_step_from_its_weights_is_that_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    Reference::of(&oracle().join("hub")).check_a_step(&folder.path().join("run"));
}

/// Runs `hub.py`; false where there is no Python with what it needs.
pub(super) fn python<'a>(arguments: impl IntoIterator<Item = &'a Path>) -> bool {
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
    let made = at("made");
    if !python([made.as_path()]) {
        return;
    }
    let reference = Reference::of(&made);
    reference.check_its_own_model();
    let stepped = reference.check_a_step(&at("run"));

    let theirs = open(&reference.gpt2());
    theirs.export(&at("again"), &AS_IT_IS).unwrap();
    stepped.export(&at("shards"), &ExportOptions { dtype: None, shard_bytes: 9_000 }).unwrap();
    stepped.export(&at("narrow"), &ExportOptions { dtype: Some(ExportPrecision::Bf16), ..AS_IT_IS }).unwrap();
    let checkpoint = newest(&at("run"));
    let generated = [at("again"), at("shards"), at("narrow"), checkpoint.clone()];
    let arguments = [Path::new("--read"), &made].into_iter().chain(generated.iter().map(PathBuf::as_path));
    assert!(python(arguments), "it was there a moment ago");
    let read_by_them = |exported: &Path| {
        let file = format!("{}.safetensors", exported.display());
        Fixture::read(&std::fs::read(file).unwrap())
    };

    let again = read_by_them(&at("again"));
    // The same weights, by another of its kernels for attention.
    let off = furthest(&again.f32["logits"], &reference.expected.f32["logits"]);
    assert!(off < 1e-5, "its own weights, through us: off by {off}");
    for exported in [at("shards"), checkpoint] {
        let (read, name) = (read_by_them(&exported), exported.display().to_string());
        reference.same_logits(&stepped, "f32", &read.f32["logits"], &name);
        reference.same_tokens(&stepped, &read, &name);
        assert_ne!(read.f32["logits"], again.f32["logits"], "{name}: a step was taken");
    }
    let narrow = read_by_them(&at("narrow"));
    assert_eq!(narrow.metadata["dtype"], "torch.bfloat16");
    reference.same_logits(&open(&at("narrow")), "bf16", &narrow.f32["logits"], "in half the bytes");
}
