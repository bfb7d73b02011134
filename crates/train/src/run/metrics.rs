//! What a run writes down as it goes: lines of JSON that programs read, each true of the weights that are there.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::summary::{Rates, Validation};
use crate::trainer::StepReport;
use crate::{Error, Result};

/// metrics.jsonl: a line per logged step and per evaluation.
pub(super) struct Metrics {
    /// None on a rank that does not write.
    pub file: Option<File>,
    pub path: PathBuf,
}

impl Metrics {
    /// Opens it for a run that has done `step` steps; lines of steps that will be taken again are dropped.
    pub fn open(path: &Path, step: u64) -> Result<Metrics> {
        let fail = |why: std::io::Error| Error::file(path, why);
        if let Ok(old) = File::open(path) {
            let still_true = |line: &String| {
                let parsed: Option<serde_json::Value> = serde_json::from_str(line).ok();
                parsed.and_then(|v| v["step"].as_u64()).is_some_and(|s| s <= step)
            };
            let kept: Vec<String> =
                BufReader::new(old).lines().map_while(Result::ok).filter(still_true).collect();
            fs::write(path, kept.iter().map(|line| format!("{line}\n")).collect::<String>()).map_err(fail)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
        Ok(Metrics { file: Some(file), path: path.into() })
    }

    pub fn line(&mut self, value: serde_json::Value) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        writeln!(file, "{value}").map_err(|why| Error::file(&self.path, why))
    }

    pub fn step(&mut self, report: &StepReport, rates: Rates, time: f64) -> Result<()> {
        let mut line = json!({
            "step": report.step, "loss": report.loss, "lr": report.lr, "grad_norm": report.grad_norm,
            "accuracy": report.accuracy, "sparsity": report.sparsity, "time": time,
        });
        match rates.tokens_per_s {
            Some(tokens) => line["tokens_per_s"] = json!(tokens),
            None => line["images_per_s"] = json!(rates.samples_per_s),
        }
        if let Some(noise) = report.noise_scale {
            line["noise_scale"] = json!(noise);
        }
        if !report.taken {
            line["skipped"] = json!(true);
        }
        self.line(line)
    }

    /// `time` is when it was done: what lies between it and the step's own `time` was spent on evaluating.
    pub fn evaluation(&mut self, step: u64, validation: &Validation, time: f64) -> Result<()> {
        self.line(json!({ "step": step, "validation": validation, "time": time }))
    }
}
