//! What a run starts from, for run files that leave their model to it (`model.name = "auto"`).

use std::path::Path;

use anyhow::Result;
use espalier_plan::config::RunFile;
use espalier_train::{Error, hub};

use crate::run_file::{in_file, read_run};
use crate::say::say;

/// Where a run's weights come from, as far as that says which model it is.
pub struct Origin<'a> {
    /// `--from`
    pub checkpoint: Option<&'a Path>,
    /// The folder of a run that goes on.
    pub resumed: Option<&'a Path>,
}

impl Origin<'_> {
    /// The text of a run file with its model in it, and the overrides that are left for it.
    pub fn complete(&self, text: &str, path: &Path, overrides: &[String]) -> Result<(String, Vec<String>)> {
        let in_path = |error| in_file(path, error);
        if !RunFile::leaves_model(text, overrides).map_err(in_path)? {
            return Ok((text.to_owned(), overrides.to_vec()));
        }
        let (model, tokenizer) = match (self.resumed, self.checkpoint) {
            (Some(folder), _) => (read_run(&folder.join("run.toml"))?, None),
            (None, Some(from)) => {
                let report = |broken: &Error| say!("warning: {broken}; the one before it is used");
                let described = hub::model_of(from, report)?;
                // The run file may stand elsewhere.
                let tokenizer = described.tokenizer.map(std::path::absolute).transpose()?;
                (described.model, tokenizer)
            }
            // What is wrong is said when it is read.
            (None, None) => return Ok((text.to_owned(), overrides.to_vec())),
        };
        Ok(RunFile::with_model(text, overrides, &model, tokenizer.as_deref()).map_err(in_path)?)
    }
}
