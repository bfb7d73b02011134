//! What a run starts from, for run files that leave their model to it (`model.name = "auto"`).

use std::path::Path;

use anyhow::Result;
use espalier_plan::config::RunTable;
use espalier_train::{Error, hub};

use crate::output::print_err;
use crate::run_file::{in_file, read_run};

/// Where a run's weights come from, as far as that says which model it is.
pub struct Origin<'a> {
    /// `--from`
    pub checkpoint: Option<&'a Path>,
    /// The folder of a run that goes on.
    pub resumed: Option<&'a Path>,
}

impl Origin<'_> {
    /// Puts the model into a run file, which stands at `path`, where it is left open.
    pub fn complete(&self, run: &mut RunTable, path: &Path) -> Result<()> {
        if !run.leaves_model() {
            return Ok(());
        }
        let in_path = |error| in_file(path, error);
        let (model, tokenizer) = match (self.resumed, self.checkpoint) {
            (Some(folder), _) => {
                let before = RunTable::parse(&read_run(&folder.join("run.toml"))?, &[]).map_err(in_path)?;
                (before.model().map_err(in_path)?, before.tokenizer())
            }
            (None, Some(from)) => {
                let report = |broken: &Error| print_err!("warning: {broken}; the one before it is used");
                let described = hub::model_of(from, report)?;
                // The run file may stand elsewhere.
                let tokenizer = described.tokenizer.map(std::path::absolute).transpose()?;
                (described.model, tokenizer)
            }
            // What is wrong is said when it is read.
            (None, None) => return Ok(()),
        };
        Ok(run.set_model(&model, tokenizer.as_deref()).map_err(in_path)?)
    }
}
