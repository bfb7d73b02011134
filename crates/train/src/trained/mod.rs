//! A trained model, opened to be used: evaluated, asked for text, written in another form. Nothing is learnt,
//! so there is no optimizer and no state.
//!
//! What the model is stands in the folder of its run, beside the checkpoint; of a folder of Hugging Face's,
//! or a checkpoint that was taken out of its run, `hub` says it. Weights are read as those that a run starts
//! from (`--from`): by any layout of ranks, in either precision.

mod classify;
mod eval;
mod ranks;

use std::path::Path;
use std::sync::Arc;

use espalier_data::regular_file::{self, SETTINGS};
use espalier_data::{Dataset, Fingerprint, ModelInput, PictureFrame, TokenWidth, Tokenizer};
use espalier_plan::config::{Override, Purpose};
use espalier_plan::data::{DatasetSource, DatasetSpec, TokenType};
use espalier_plan::spec::Input;
use espalier_plan::{DataFacts, Plan, RunFile};
use espalier_tensor::Device;
use espalier_tensor::mask::ones;
use serde::Deserialize;

use crate::checkpoint::{Checkpoint, first_not_finite, weights_load_request};
use crate::hub::{
    self, ExportOptions, ExportReport, GgufReport, GgufType, ImageInput, ModelDescription, TOKENIZER,
};
use crate::parallel::Ranks;
use crate::prune::keep;
use crate::resolved::{DATA_FILE, read_resolved};
use crate::state::ParamStore;
use crate::trainer::Trainer;
use crate::{Error, Result};

pub use classify::{ClassProbability, ClassifiedPicture};
pub use eval::{EvalResult, EvalWindows};
pub use ranks::on_ranks;

/// A trained model: what it is, and where its weights are.
#[derive(Debug)]
pub struct TrainedModel {
    checkpoint: Checkpoint,
    run: RunFile,
    /// Whether the run is one that trained it, and its data are those that it learnt from.
    is_of_run: bool,
    facts: DataFacts,
    tokenizer: Option<Tokenizer>,
}

/// What of plan.json says what the data were, which need not be here any more.
#[derive(Deserialize)]
struct ResolvedFacts {
    facts: DataFacts,
}

impl TrainedModel {
    /// Opens the checkpoint at `path`, or the newest intact one of the run folder there, and compares every
    /// hash; `report` hears of newer ones that are damaged. Or opens a folder of Hugging Face's, or a file of
    /// weights. A process does so once, for all ranks that are its threads.
    pub fn open(path: &Path, report: impl FnMut(&Error)) -> Result<TrainedModel> {
        let checkpoint = hub::find(path, &Ranks::single(), report)?;
        let run_file = checkpoint.run_file();
        let trained = match read_resolved(&run_file)? {
            Some(text) if !hub::is_foreign(path) => TrainedModel::of_run(checkpoint, &text, &run_file)?,
            _ => {
                let described = hub::describe(&checkpoint)?;
                TrainedModel::described(checkpoint, described)?
            }
        };
        let (known, vocab) = (trained.tokenizer.as_ref().map(Tokenizer::vocab), trained.facts.vocab);
        match known.zip(trained.run.model.vocab().or(vocab)) {
            Some((known, vocab)) if known > vocab => Err(trained.checkpoint.refuse(format!(
                "its tokenizer has {known} tokens, and the model {vocab}: it is that of another model"
            ))),
            _ => Ok(trained),
        }
    }

    /// A checkpoint in the folder of its run.
    fn of_run(checkpoint: Checkpoint, text: &str, run_file: &Path) -> Result<TrainedModel> {
        let run = RunFile::parse(text, &[]).map_err(|why| Error::file(run_file, why))?;
        let resolved = regular_file::read(&run_file.with_file_name("plan.json"), SETTINGS).ok();
        let resolved = resolved.and_then(|text| serde_json::from_slice::<ResolvedFacts>(&text).ok());
        let facts = match resolved {
            Some(ResolvedFacts { facts }) => facts,
            None => Dataset::facts_of(&run)?,
        };
        let beside = checkpoint.path().join(TOKENIZER);
        let tokenizer = match &run.data.source {
            DatasetSource::Text { tokenizer: None, .. } | DatasetSource::Jsonl { tokenizer: None, .. } => {
                Some(Tokenizer::Bytes)
            }
            DatasetSource::Arithmetic { .. } => Some(Tokenizer::Arithmetic),
            DatasetSource::Text { tokenizer: Some(path), .. }
            | DatasetSource::Jsonl { tokenizer: Some(path), .. }
                if path.exists() || !beside.is_file() =>
            {
                Some(Tokenizer::open(path)?)
            }
            _ if beside.is_file() => Some(Tokenizer::open(&beside)?),
            _ => None,
        };
        Ok(TrainedModel { checkpoint, run, is_of_run: true, facts, tokenizer })
    }

    /// Weights that nothing is known of but what stands beside them.
    fn described(checkpoint: Checkpoint, described: ModelDescription) -> Result<TrainedModel> {
        let run = RunFile::of_model(described.model)?;
        let classes = described.image.and_then(|_| run.model.classes());
        let facts = DataFacts { vocab: run.model.vocab(), image: described.image, classes };
        let tokenizer = described.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
        Ok(TrainedModel { checkpoint, run, is_of_run: false, facts, tokenizer })
    }

    /// Where its weights are.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The run that trained it, or one that its model could have come from.
    pub fn run(&self) -> &RunFile {
        &self.run
    }

    /// What it learnt from, where that is known.
    pub fn data(&self) -> Option<&DatasetSpec> {
        self.is_of_run.then_some(&self.run.data)
    }

    /// What its data said.
    pub fn facts(&self) -> DataFacts {
        self.facts
    }

    /// What turns text into ids and back; none for images, and where token files are all that it learnt from.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The model laid out for use: on one rank, unless `overrides` of the run file ask for more
    /// (`parallel.tensor=2`), and in the precision that it was trained in, unless they ask for another
    /// (`train.precision=f32`).
    pub fn plan(&self, overrides: &[Override]) -> Result<Plan> {
        Ok(Plan::new(self.run.in_use(overrides)?, self.facts)?)
    }

    /// The same for images of another size than it learnt from, where its layers take them.
    pub fn plan_for(&self, dataset: &Dataset, overrides: &[Override]) -> Result<Plan> {
        let facts = dataset.facts();
        let plan = Plan::new(self.run.in_use(overrides)?, DataFacts { image: facts.image, ..self.facts })?;
        match facts.classes.filter(|classes| *classes > plan.model.classes) {
            Some(classes) => Err(self
                .checkpoint
                .refuse(format!("it has {} classes, and the data have {classes}", plan.model.classes))),
            None => Ok(plan),
        }
    }

    /// The weights that a rank of such a plan holds, all finite; [`Stage::new`](crate::stage::Stage::new) has
    /// the layers that read them.
    pub fn params(&self, plan: &Plan, device: &Device, ranks: &Ranks) -> Result<ParamStore> {
        let (local, params) = (plan.layout.of(ranks.coords()), plan.params(ranks.rank())?);
        let dtype = espalier_nn::dtype(plan.storage.precision);
        let mut params = ParamStore::new(&params, local, device, dtype, plan.seed, false)?;
        self.checkpoint.start(weights_load_request(&mut params)?, &plan.model)?;
        match first_not_finite(&params)? {
            Some(name) => Err(self.checkpoint.not_finite(&name)),
            None => Ok(params),
        }
    }

    /// The fraction of zeros among the weights that may be pruned in a run that starts from it, of whose
    /// model and pruning [`RunTable::candidates`](espalier_plan::config::RunTable::candidates) speaks.
    pub fn zeros(&self, run: RunFile) -> Result<f64> {
        let plan = Plan::new(run, self.facts)?;
        let Some(pruning) = &plan.pruning else { return Ok(0.0) };
        let (mut zeros, mut all) = (0, 0);
        for one in plan.model.parameters().iter().filter(|one| pruning.covers(one)) {
            let elements = one.elements() as usize;
            let bits = self.checkpoint.nonzero_bits(&one.name, elements)?;
            zeros += (elements - ones(&bits).count()) as u64;
            all += elements as u64;
        }
        keep::check_zeros(zeros, all, zeros as f64 / all.max(1) as f64)?;
        Ok(zeros as f64 / all as f64)
    }

    /// Writes it into a new folder, as other people's tools read it.
    pub fn export(&self, folder: &Path, how: &ExportOptions) -> Result<ExportReport> {
        let (plan, checkpoint) = (self.plan(&[])?, &self.checkpoint);
        hub::export(&hub::ExportedModel { checkpoint, plan: &plan, tokenizer: self.tokenizer() }, folder, how)
    }

    /// Writes it as one file of llama.cpp's, in a type or in that which is stored.
    pub fn export_gguf(&self, file: &Path, dtype: Option<GgufType>) -> Result<GgufReport> {
        let (plan, checkpoint) = (self.plan(&[])?, &self.checkpoint);
        let source = hub::ExportedModel { checkpoint, plan: &plan, tokenizer: self.tokenizer() };
        hub::export_gguf(&source, file, dtype)
    }

    /// A rank that can evaluate it on other data. All ranks of the plan must.
    pub fn trainer(
        &self,
        plan: Plan,
        dataset: impl Into<Arc<Dataset>>,
        device: &Device,
        ranks: Ranks,
    ) -> Result<Trainer> {
        let mut trainer = Trainer::distributed(plan, dataset, device, ranks)?;
        trainer.start_from(&self.checkpoint)?;
        Ok(trainer)
    }

    /// All of a file or folder, to evaluate it on as `overrides` lay it out; without a path, what its run
    /// held out. An override that has no effect on that is an error.
    pub fn eval_dataset(&self, path: Option<&Path>, overrides: &[Override]) -> Result<Dataset> {
        let purpose = if path.is_none() { Purpose::HeldOut } else { Purpose::OtherData };
        self.run.check_overrides(overrides, purpose)?;
        let Some(path) = path else {
            if !self.is_of_run {
                let why = "its training data are unknown: give data to evaluate on with --data";
                return Err(self.checkpoint.refuse(why));
            }
            return Ok(Dataset::open(&self.eval_run(overrides)?)?);
        };
        let run = self.run.in_use(overrides)?;
        let data = run.data.clone();
        let model = Plan::new(run, self.facts)?.model;
        let input = match model.input {
            Input::Image { .. } => {
                let (ImageInput { standard, classes, .. }, frame) = self.image_input(&data)?;
                let count = model.classes;
                let strict = matches!(&data.source, DatasetSource::Images { folder } if folder.strict);
                ModelInput::Images { standard, pixels: data.pixels, frame, classes, count, strict }
            }
            Input::Tokens { seq, vocab } => {
                let width = match self.run.data.source {
                    DatasetSource::Tokens { dtype: TokenType::U32, .. } if self.is_of_run => TokenWidth::U32,
                    DatasetSource::Tokens { dtype: TokenType::U16, .. } if self.is_of_run => TokenWidth::U16,
                    _ if vocab > 1 << 16 => TokenWidth::U32,
                    _ => TokenWidth::U16,
                };
                ModelInput::Tokens { tokenizer: self.tokenizer(), vocab, seq, width }
            }
        };
        Ok(Dataset::for_evaluation(path, input)?)
    }

    /// How it reads images, and what it sees of a picture of any size: what its run says, or else what stands
    /// beside its weights, or what is usual for images of its size.
    fn image_input(&self, data: &DatasetSpec) -> Result<(ImageInput, PictureFrame)> {
        let input = hub::image_input_of(self.checkpoint.path())?;
        let (height, width, channels) = self.facts.image.unwrap_or((224, 224, 3));
        let frame = match (&data.source, input.frame) {
            (DatasetSource::Images { folder }, _) if self.is_of_run => {
                PictureFrame::new([folder.size, folder.size, 3], folder.resize)
            }
            (_, Some(frame)) => frame,
            (_, None) => PictureFrame::usual([height, width, channels]),
        };
        Ok((input, frame))
    }

    /// Its run, to be evaluated on what it held out; text is read by the checkpoint's own tokenizer where
    /// that of the run is gone.
    fn eval_run(&self, overrides: &[Override]) -> Result<RunFile> {
        let mut run = self.run.in_use(overrides)?;
        hub::find_tokenizer(&mut run.data, self.checkpoint.path());
        Ok(run)
    }

    /// What its run's data files hold now that they did not hold then, as the end of a sentence: some of what
    /// would be held out may have been learnt from.
    pub fn changed_data(&self, overrides: &[Override]) -> Result<Option<String>> {
        let was = regular_file::read(&self.checkpoint.run_file().with_file_name(DATA_FILE), SETTINGS).ok();
        let Some(was) = was.and_then(|text| serde_json::from_slice::<Fingerprint>(&text).ok()) else {
            return Ok(None);
        };
        let is = Fingerprint::of(&self.eval_run(overrides)?.data)?;
        Ok(is.and_then(|is| is.change_since(&was)))
    }
}
