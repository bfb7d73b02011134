//! A trained model, opened to be used: evaluated, asked for text, written in another form. Nothing is learnt, so there is no
//! optimizer and no state.
//!
//! What the model is stands in the folder of its run, beside the checkpoint. Weights are read as those that a run starts from
//! (`--from`): by any layout of ranks, in either precision.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use espalier_plan::data::Source;
use espalier_plan::{DataFacts, Plan, RunFile};
use espalier_tensor::Device;
use serde::Deserialize;

use crate::checkpoint::{Checkpoint, Wanted};
use crate::context::dtype;
use crate::data::{Bpe, Dataset, Tokenizer};
use crate::parallel::Ranks;
use crate::parallel::pieces::Pieces;
use crate::stage::Stage;
use crate::trainer::Trainer;
use crate::weights::Weights;
use crate::{Error, Result};

/// A trained model: what it is, and where its weights are.
#[derive(Debug)]
pub struct Trained {
    checkpoint: Checkpoint,
    run: RunFile,
    facts: DataFacts,
    tokenizer: Option<Tokenizer>,
}

/// What of plan.json says what the data were, which need not be here any more.
#[derive(Deserialize)]
struct Resolved {
    facts: DataFacts,
}

impl Trained {
    /// Opens the checkpoint at `path`, or the newest whole one of the run folder there, and compares every hash; `report` hears
    /// of newer ones that are damaged. A process does so once, for all ranks that are its threads.
    pub fn open(path: &Path, report: impl FnMut(&Error)) -> Result<Trained> {
        let checkpoint = Checkpoint::find(path, &Ranks::alone(), report)?;
        let run_file = checkpoint.run_file();
        let text = fs::read_to_string(&run_file).map_err(|why| {
            checkpoint.refuse(format!("nothing says what model it is: {}: {why}", run_file.display()))
        })?;
        let run = RunFile::parse(&text, &[]).map_err(|why| Error::file(&run_file, why))?;
        let resolved = fs::read(run_file.with_file_name("plan.json")).ok();
        let resolved = resolved.and_then(|text| serde_json::from_slice::<Resolved>(&text).ok());
        let facts = match resolved {
            Some(Resolved { facts }) => facts,
            None => Dataset::facts_of(&run)?,
        };
        let tokenizer = match &run.data.source {
            Source::Text { tokenizer: Some(path), .. } => Some(Tokenizer::Bpe(Box::new(Bpe::open(path)?))),
            Source::Text { tokenizer: None, .. } => Some(Tokenizer::Bytes),
            Source::Arithmetic { .. } => Some(Tokenizer::Arithmetic),
            _ => None,
        };
        Ok(Trained { checkpoint, run, facts, tokenizer })
    }

    /// Where its weights are.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The run that trained it.
    pub fn run(&self) -> &RunFile {
        &self.run
    }

    /// What its data said.
    pub fn facts(&self) -> DataFacts {
        self.facts
    }

    /// What turns text into ids and back; none for images, and for token files, which do not say.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The model laid out for use: on one rank, unless `overrides` of the run file ask for more (`parallel.tensor=2`), and in
    /// the precision that it was trained in, unless they ask for another (`train.precision=f32`).
    pub fn plan(&self, overrides: &[String]) -> Result<Plan> {
        Ok(Plan::new(self.run.in_use(overrides)?, self.facts)?)
    }

    /// The weights that a rank of such a plan holds; [`Stage::new`] has the layers that read them.
    pub fn weights(&self, plan: &Plan, device: &Device, ranks: &Ranks) -> Result<Weights> {
        let (local, held) = (plan.layout.of(ranks.place()), Stage::held(plan, ranks)?);
        let dtype = dtype(plan.storage.precision);
        let mut weights = Weights::initialise_held(local, &held, device, dtype, plan.seed)?;
        let pieces = Pieces::of(&plan.layout, ranks);
        self.checkpoint.fill(&mut [Wanted { converts: true, ..weights.wanted(&pieces) }])?;
        Ok(weights)
    }

    /// A rank that can evaluate it on other data. All ranks of the plan must.
    pub fn trainer(
        &self,
        plan: Plan,
        dataset: impl Into<Arc<Dataset>>,
        device: &Device,
        ranks: Ranks,
    ) -> Result<Trainer> {
        let mut trainer = Trainer::among(plan, dataset, device, ranks)?;
        trainer.start_from(&self.checkpoint)?;
        Ok(trainer)
    }
}
