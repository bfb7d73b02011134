//! What a run starts from, for run files that leave their model to it (`model.name = "auto"`), or which
//! weights are pruned (`prune.method = "keep"`).

use std::path::Path;

use anyhow::Result;
use espalier_plan::config::RunTable;
use espalier_train::hub;

use crate::prepared::{open_trained, passed_over};
use crate::run_file::{in_file, read_run};

/// Where a run's weights come from, as far as that says what the run is.
pub struct Origin<'a> {
    /// `--from`
    pub checkpoint: Option<&'a Path>,
    /// The folder of a run that goes on.
    pub resumed: Option<&'a Path>,
}

impl Origin<'_> {
    /// Puts the model into a run file, which stands at `path`, where it is left open, and the sparsity where
    /// it is that of the weights.
    pub fn complete(&self, run: &mut RunTable, path: &Path) -> Result<()> {
        let in_path = |error| in_file(path, error);
        let before = match self.resumed.filter(|_| run.leaves_model() || run.leaves_sparsity()) {
            Some(folder) => {
                Some(RunTable::parse(&read_run(&folder.join("run.toml"))?, &[]).map_err(in_path)?)
            }
            None => None,
        };
        if run.leaves_model() {
            let (model, tokenizer) = match (&before, self.checkpoint) {
                (Some(before), _) => (before.model().map_err(in_path)?, before.tokenizer()),
                (None, Some(from)) => {
                    let described = hub::model_of(from, passed_over)?;
                    // The run file may stand elsewhere.
                    let tokenizer = described.tokenizer.map(std::path::absolute).transpose()?;
                    (described.model, tokenizer)
                }
                // What is wrong is said when it is read.
                (None, None) => return Ok(()),
            };
            run.set_model(&model, tokenizer.as_deref()).map_err(in_path)?;
        }
        if run.leaves_sparsity() {
            let sparsity = match (&before, self.checkpoint) {
                (Some(before), _) => before.sparsity(),
                (None, Some(from)) => {
                    let candidates = run.candidates().map_err(in_path)?;
                    Some(open_trained(from)?.zeros(candidates)?)
                }
                (None, None) => None,
            };
            if let Some(sparsity) = sparsity {
                run.set_sparsity(sparsity);
            }
        }
        Ok(())
    }
}
