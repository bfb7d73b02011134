//! Text out of a model: what is generated with a cache is what the model says of the full text, on every
//! layout of ranks, and what Hugging Face's GPT-2 generates with the same weights.

use std::path::Path;

use espalier_nn::layers::{BatchSlice, ForwardContext, Mode};
use espalier_nn::model::Model;
use espalier_nn::weights::Weights;
use espalier_plan::config::RunFile;
use espalier_plan::spec::RecomputeMode;
use espalier_plan::{DataFacts, Plan};
use espalier_tensor::ops::compress::apply;
use espalier_tensor::{Category, DType, Device, Mask, Tensor};
use espalier_testing::farthest;
use espalier_train::infer::{FinishReason, Generator, Sampler, Sampling, TextStream};
use espalier_train::parallel::Ranks;
use espalier_train::run::RunDir;
use espalier_train::stage::Stage;
use espalier_train::trained::TrainedModel;
use espalier_train::trained::on_ranks;

use crate::fixture::Fixture;
use crate::support::{Base, LIMIT, generating, open, rotary_llama, settings, tiny_cnn, tiny_gpt, tiny_llama};

const HOT: Sampling = Sampling { temperature: 1.3, top_k: 9, top_p: 0.95, seed: 5, ..Sampling::GREEDY };

/// Trains in a folder, and opens what came of it.
fn trained(base: &Base, folder: &Path) -> TrainedModel {
    base.run_in(folder);
    open(folder)
}

fn dense() -> Base {
    tiny_gpt("train.steps=8 model.context=24")
}

fn pruned() -> Base {
    dense().set("prune.method=magnitude prune.sparsity=0.9 prune.at=2")
}

/// Tokens generated behind a prompt, each from a pass over the full text without a cache.
fn without_cache(
    generator: &mut Generator<'_>,
    prompt: &[u32],
    most: usize,
    sampling: Sampling,
) -> espalier_train::Result<Vec<u32>> {
    let (mut all, mut sampler) = (prompt.to_vec(), Sampler::new(sampling));
    for _ in 0..most {
        generator.reset_cache();
        all.push(generator.read(&all, &mut |logits| sampler.choose(logits))?);
    }
    Ok(all.split_off(prompt.len()))
}

/// Dense and pruned, a prompt of one token and of several, on one rank and on several: the same tokens with a
/// cache and without, and on every layout those of one rank.
#[test]
fn tokens_are_those_of_reading_the_full_text_every_time() {
    let folder = tempfile::tempdir().unwrap();
    for (name, base) in [
        ("dense", dense()),
        ("pruned", pruned()),
        ("llama", tiny_llama("train.steps=8 model.context=24")),
        ("rotary", rotary_llama("train.steps=8 model.context=24")),
    ] {
        let trained = trained(&base, &folder.path().join(name));
        for (text, sampling) in [("12+7=", Sampling::GREEDY), ("5", Sampling::GREEDY), ("31-4", HOT)] {
            let prompt = trained.tokenizer().unwrap().encode(text).unwrap();
            let both = |generator: &mut Generator<'_>| {
                let written = generator.generate(&prompt, 15, &mut Sampler::new(sampling), &mut |_| true)?;
                assert_eq!((written.tokens.len(), written.end), (15, FinishReason::MaxTokens));
                let again = without_cache(generator, &prompt, 15, sampling)?;
                assert_eq!(written.tokens, again, "{name} {text}");
                Ok(written.tokens)
            };
            let single = generating(&trained, "", both);
            for set in [
                "parallel.pipeline=2",
                "parallel.tensor=2",
                "parallel.pipeline=2 parallel.tensor=2",
                "parallel.pipeline=2 parallel.schedule=interleaved parallel.chunks=2",
            ] {
                assert_eq!(generating(&trained, set, both), single, "{name} {text} {set}");
            }
        }
    }
}

/// The logits of every position, as the forward pass that trains makes them: in f32 to 1e-5; in bf16 to what
/// its roundings leave, which other orders of sums move.
#[test]
fn logits_are_those_of_the_forward_pass_that_trains() {
    let folder = tempfile::tempdir().unwrap();
    let trained = trained(&dense(), folder.path());
    let ids = trained.tokenizer().unwrap().encode("12+7=19\n31-4=27\n5+5").unwrap();
    for (precision, tolerance) in [("f32", 1e-5), ("bf16", 0.06)] {
        let set = [format!("train.precision={precision}").into()];
        let plan = trained.plan(&set).unwrap();
        let device = Device::cpu(2).unwrap();
        let weights = trained.params(&plan, &device, &Ranks::single()).unwrap();
        let model = Model::build(&plan.model, RecomputeMode::None);
        let (ranks, stage) = (Ranks::single(), Stage::new(&plan, &Ranks::single()).unwrap());
        let mut generator = Generator::new(&plan, &stage, &weights, &ranks, &device).unwrap();
        for end in 1..=ids.len() {
            let batch_slice = BatchSlice { samples: 1, ..BatchSlice::default() };
            let mut pass = ForwardContext::new(&weights, Mode::Evaluate, 0, batch_slice);
            let x = Tensor::from_slice(&device, &[1, end], &ids[..end], Category::Transient).unwrap();
            let x = model.forward(x, &mut pass).unwrap();
            let expected = model.read_logits(&model.last_logits(&x, &weights).unwrap()).unwrap();
            // The first three positions together, as a prompt; then one at a time.
            let read = if end <= 3 { 0..3 } else { end - 1..end };
            if (1..3).contains(&end) {
                continue;
            }
            let mut logits_read = Vec::new();
            let mut choose = |logits: &[f32]| {
                logits_read = logits.to_vec();
                0
            };
            generator.read(&ids[read], &mut choose).unwrap();
            let (_, off) = farthest(&logits_read, &expected);
            assert!(off <= tolerance, "{precision}, position {end}: off by {off}");
        }
        assert_eq!(generator.length(), ids.len());
    }
}

/// What was read stays in the cache: a text in several chunks is the text at once.
#[test]
fn a_text_may_be_read_in_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let trained = trained(&pruned(), folder.path());
    let ids = trained.tokenizer().unwrap().encode("12+7=19\n31-4=27\n5").unwrap();
    for set in ["", "parallel.pipeline=2", "parallel.tensor=2"] {
        generating(&trained, set, |generator| {
            let mut greedy = Sampler::new(Sampling::GREEDY);
            let mut choose = |logits: &[f32]| greedy.choose(logits);
            let at_once = generator.read(&ids, &mut choose)?;
            generator.reset_cache();
            generator.read(&ids[..7], &mut choose)?;
            generator.read(&ids[7..12], &mut choose)?;
            assert_eq!(generator.length(), 12);
            assert_eq!(generator.read(&ids[12..], &mut choose)?, at_once, "{set}");
            Ok(())
        });
    }
}

/// The context is the end, whatever was asked for; and whoever listens can end it before.
#[test]
fn a_text_ends_where_the_context_does_or_where_somebody_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let trained = trained(&dense(), folder.path());
    let prompt = trained.tokenizer().unwrap().encode("12+7=").unwrap();
    for set in ["", "parallel.pipeline=2"] {
        generating(&trained, set, |generator| {
            let mut sampler = Sampler::new(HOT);
            let written = generator.generate(&prompt, 1000, &mut sampler, &mut |_| true)?;
            // The last token follows the last position that can be read.
            assert_eq!((written.tokens.len(), written.end), (24 - 5 + 1, FinishReason::ContextFull));
            generator.reset_cache();
            let leads = generator.ranks().is_rank0();
            let mut left = 4;
            let mut should_continue = |_| {
                left -= 1;
                // One rank is enough.
                !leads || left > 0
            };
            let written = generator.generate(&prompt, 1000, &mut sampler, &mut should_continue)?;
            assert_eq!((written.tokens.len(), written.end), (4, FinishReason::Stopped));
            Ok(())
        });
    }
}

/// Bytes of keys and values: what the plan says, on every rank, in both precisions.
#[test]
fn the_cache_is_as_large_as_planned() {
    let folder = tempfile::tempdir().unwrap();
    for (name, base) in
        [("gpt", dense()), ("llama", tiny_llama("train.steps=1")), ("rotary", rotary_llama("train.steps=1"))]
    {
        let trained = trained(&base, &folder.path().join(name));
        for set in
            ["", "train.precision=bf16", "parallel.pipeline=2", "parallel.tensor=2 train.precision=bf16"]
        {
            let plan = trained.plan(&settings(set)).unwrap();
            generating(&trained, set, |generator| {
                generator.generate(&[1, 2, 3], 3, &mut Sampler::new(HOT), &mut |_| true)?;
                let (in_use, planned) = (
                    generator.device().ledger().current(Category::Cache),
                    plan.cache_bytes(generator.ranks().rank())?,
                );
                assert!(planned > 0 && in_use as u64 == planned, "{name} {set}: {in_use} and {planned}");
                assert_eq!(generator.device().ledger().current(Category::Activations), 0);
                Ok(())
            });
        }
    }
}

#[test]
fn the_same_seed_writes_the_same_text_in_bf16_too() {
    let folder = tempfile::tempdir().unwrap();
    let trained = trained(&dense(), folder.path());
    let write = |seed| {
        generating(&trained, "train.precision=bf16", |generator| {
            let mut sampler = Sampler::new(Sampling { seed, ..HOT });
            Ok(generator.generate(&[3, 1], 20, &mut sampler, &mut |_| true)?.tokens)
        })
    };
    assert_eq!(write(1), write(1));
    assert_ne!(write(1), write(2));
}

#[test]
fn what_cannot_write_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let images = trained(&tiny_cnn("train.steps=1"), &folder.path().join("images"));
    let refused = |trained: &TrainedModel, set: &str| {
        let plan = trained.plan(&settings(set)).unwrap();
        let device = Device::cpu(2).unwrap();
        on_ranks(trained, &plan, &device, LIMIT, None, |_| Ok(())).unwrap_err().to_string()
    };
    assert_eq!(refused(&images, ""), "`model.name` is \"custom\", an image model, which generates no text");
    let text = trained(&dense(), &folder.path().join("text"));
    assert_eq!(
        refused(&text, "parallel.tensor=2 parallel.sequence=true"),
        "`parallel.sequence` splits the positions of a sequence, and generation has one at a time"
    );
}

/// Greedy tokens of transformers' GPT2LMHeadModel with the weights of `../oracle/gpt.safetensors`, dense and
/// masked, up to the end of its context (`../oracle/generate.py`).
#[test]
fn tokens_are_those_of_hugging_faces_gpt_2() {
    let fixture = Fixture::read(include_bytes!("../oracle/gpt.safetensors"));
    let written: serde_json::Value = serde_json::from_str(include_str!("../oracle/generated.json")).unwrap();
    let text = "[model]\nname = \"gpt\"\nlayers = 2\nheads = 2\nwidth = 16\ncontext = 16";
    let facts = DataFacts { vocab: Some(24), image: None, classes: None };
    let plan = Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap();
    let device = Device::cpu(2).unwrap();
    let (ranks, stage) = (Ranks::single(), Stage::new(&plan, &Ranks::single()).unwrap());
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let mut compared = 0;
    for (case, texts) in written["texts"].as_object().unwrap() {
        let mut weights = Weights::initialise(&plan.model, &device, DType::F32, 0).unwrap();
        for id in weights.ids() {
            let name = weights.name(id).to_owned();
            let values = &fixture.f32[&format!("init/{name}")];
            let shape = weights.get(id).shape().to_vec();
            let weight = weights.get_mut(id);
            *weight = Tensor::from_f32(&device, &shape, DType::F32, values, Category::Weights).unwrap();
            if let Some(words) = fixture.words.get(&format!("mask/{name}")).filter(|_| case == "masked") {
                apply(weight, &Mask::new(&device, values.len(), words).unwrap()).unwrap();
            }
        }
        let mut generator = Generator::new(&plan, &stage, &weights, &ranks, &device).unwrap();
        for text in texts.as_array().unwrap() {
            let (prompt, tokens) = (ids(&text["prompt"]), ids(&text["tokens"]));
            generator.reset_cache();
            let mut greedy = Sampler::new(Sampling::GREEDY);
            let ours = generator.generate(&prompt, tokens.len(), &mut greedy, &mut |_| true).unwrap();
            assert_eq!(ours.tokens, tokens, "{case}, behind {prompt:?}");
            compared += tokens.len();
        }
    }
    assert!(compared > 50, "{compared} tokens were compared");
}

/// A run that generates samples: when it says, what its checkpoint would generate, and nothing else changes by
/// it, on one rank and several.
#[test]
fn a_run_shows_what_its_model_generates() {
    let layouts = [
        "",
        "parallel.pipeline=2 train.micro_batches=2",
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.sequence=true",
    ];
    for layout in layouts {
        let folder = tempfile::tempdir().unwrap();
        let quiet = tiny_gpt("train.steps=6 train.eval_every=2 model.context=24").set(layout);
        let asks = "sample.prompt=12+ sample.tokens=12 sample.every=2 sample.temperature=0.5";
        let talks = quiet.set(asks);
        let (with, observer) = talks.run_observed_at(&RunDir::at(folder.path()));
        let (with, without) = (with.unwrap(), quiet.run());
        assert_eq!((with.weights_hash, with.loss), (without.weights_hash, without.loss), "{layout}");
        let samples = observer.samples.iter().map(|(step, prompt, _)| (*step, prompt.as_str()));
        assert_eq!(samples.collect::<Vec<_>>(), [(4, "12+"), (6, "12+")], "{layout}");

        let trained = open(folder.path());
        let tokenizer = trained.tokenizer().unwrap();
        let sampling = Sampling { temperature: 0.5, top_k: 0, top_p: 1.0, seed: 4, ..Sampling::GREEDY };
        let text = generating(&trained, "", |generator| {
            let prompt = tokenizer.encode("12+").unwrap();
            let mut stream = TextStream::new(tokenizer, &[]);
            let mut should_continue = |token| {
                stream.push(token);
                true
            };
            generator.generate(&prompt, 12, &mut Sampler::new(sampling), &mut should_continue)?;
            stream.finish();
            Ok(stream.text().to_owned())
        });
        assert_eq!(observer.samples[1].2, text, "{layout}");
    }
}

/// Before the first step, not at the end of the run.
#[test]
fn a_prompt_that_is_too_long_for_the_model_is_refused_at_once() {
    let base = tiny_gpt(format!("train.steps=1 sample.prompt=\"{}\"", "1".repeat(13)));
    assert_eq!(
        base.run_observed().0.unwrap_err().to_string(),
        "`sample.prompt` has 13 tokens, more than `model.context` = 12: shorten it"
    );
}
