//! A run folder, read: what the run was asked to do, what it has done so far, and what it came to. Read again
//! while it goes on, only what is new is read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Result;
use espalier_data::regular_file::{self, RECORDS};
use espalier_report::number;
use espalier_train::prune::PruneReport;
use espalier_train::run::metric_record::{EvaluationRecord, MetricRecord, PruneRecord, StepRecord};
use espalier_train::run::trace::TraceFile;
use espalier_train::run::{FolderLock, StartPoint, missing_steps};
use espalier_train::{Error, RunSummary, Validation};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::settings;
use super::tail::Tail;

/// A run as far as its folder tells.
pub struct RunRecord {
    /// What pictures call it.
    pub name: String,
    pub folder: PathBuf,
    /// Whether a process is at work in it.
    pub is_running: bool,
    /// The resolved run file: every field with its value, as in `train.batch`.
    pub settings: BTreeMap<String, String>,
    /// Of plan.json, as soon as it is there.
    pub plan: Option<PlanJson>,
    pub steps: Vec<StepRecord>,
    pub evaluations: Vec<(u64, Validation)>,
    /// What was pruned before which step.
    pub prunings: Vec<(u64, PruneReport)>,
    /// What a run said that diverged.
    pub diverged: Option<String>,
    /// There when the run has ended.
    pub summary: Option<RunSummary>,
    pub trace: Option<TraceFile>,
    metrics: Tail,
    /// Lines of metrics.jsonl that say nothing that is known here.
    unread: usize,
}

/// What of plan.json is shown.
#[derive(Deserialize)]
pub struct PlanJson {
    run: Value,
    model: PlanJsonModel,
    pub parameters: u64,
    /// Predicted bytes by category.
    pub memory: BTreeMap<String, Option<u64>>,
}

#[derive(Deserialize)]
struct PlanJsonModel {
    name: String,
}

/// Lines of steps by which the time is reckoned that is left.
const RECENT: usize = 100;

impl RunRecord {
    /// Reads a folder that holds a run; it may have only begun.
    pub fn open(folder: &Path) -> Result<RunRecord> {
        let refused = |why: &str| Error::File { path: folder.into(), why: why.into() };
        if !folder.is_dir() {
            return Err(refused(if folder.exists() {
                "this is no folder"
            } else {
                "there is no such folder"
            })
            .into());
        }
        if !folder.join("run.toml").exists() {
            return Err(refused("there is no run here (no run.toml)").into());
        }
        let folder_name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = folder_name(folder).or_else(|| folder_name(&folder.canonicalize().ok()?));
        let mut run = RunRecord {
            name: name.unwrap_or_else(|| folder.display().to_string()),
            folder: folder.into(),
            is_running: false,
            settings: BTreeMap::new(),
            plan: None,
            steps: Vec::new(),
            evaluations: Vec::new(),
            prunings: Vec::new(),
            diverged: None,
            summary: None,
            trace: None,
            metrics: Tail::of(folder.join("metrics.jsonl")),
            unread: 0,
        };
        run.update();
        Ok(run)
    }

    /// Reads a timeline that stands elsewhere.
    pub fn read_trace(&mut self, path: &Path) -> Result<()> {
        let refused = |why: String| Error::File { path: path.into(), why };
        let text = regular_file::read(path, RECORDS)
            .map_err(|why| refused(format!("the timeline cannot be read: {why}")))?;
        let trace = serde_json::from_slice(&text)
            .map_err(|why| refused(format!("this is no timeline of a run: {why}")))?;
        self.trace = Some(trace);
        Ok(())
    }

    /// Reads what is new.
    pub fn update(&mut self) {
        // In this order: a run that ends meanwhile is seen to run once too often, and not to have ended
        // without its end.
        self.is_running = FolderLock::check_free(&self.folder).is_err();
        let new_lines = self.metrics.read_new();
        if new_lines.restarted {
            (self.steps, self.evaluations, self.prunings, self.diverged) = Default::default();
            self.unread = 0;
        }
        for line in new_lines.lines {
            self.add(&line);
        }
        if self.plan.is_none() || new_lines.restarted {
            self.plan = read_json(&self.folder.join("plan.json"));
            self.settings = self.plan.as_ref().map(|plan| settings::flat(&plan.run)).unwrap_or_default();
        }
        if self.trace.is_none() {
            self.trace = read_json(&self.folder.join("trace.json"));
        }
        self.summary = read_json(&self.folder.join("summary.json"));
    }

    fn add(&mut self, line: &[u8]) {
        match serde_json::from_slice(line) {
            Ok(MetricRecord::Step(step)) => self.steps.push(step),
            Ok(MetricRecord::Evaluation(EvaluationRecord { step, validation, .. })) => {
                self.evaluations.push((step, validation));
            }
            Ok(MetricRecord::Pruned(PruneRecord { step, pruned })) => self.prunings.push((step, pruned)),
            Ok(MetricRecord::Observed(_)) => {}
            Ok(MetricRecord::Diverged(line)) => self.diverged = Some(line.diverged),
            Err(_) => self.unread += 1,
        }
    }

    pub fn done(&self) -> u64 {
        let lines = self.steps.last().map_or(0, |step| step.step);
        self.summary.as_ref().map_or(lines, |summary| summary.steps.max(lines))
    }

    /// Steps that the run file asks for, where it says it in steps.
    pub fn planned_steps(&self) -> Option<u64> {
        self.settings.get("train.steps")?.parse().ok().filter(|steps| *steps > 0)
    }

    /// The last loss that is a number.
    pub fn loss(&self) -> Option<f64> {
        self.steps.iter().rev().find_map(|step| step.loss)
    }

    /// The last evaluation.
    pub fn validation(&self) -> Option<&Validation> {
        self.evaluations.last().map(|(_, validation)| validation)
    }

    /// Tokens or images a second, with what they are: at the median time of a step, as the summary of a run
    /// has it, and by the lines that there are where there is none yet.
    pub fn rate(&self) -> Option<(f64, &'static str)> {
        let of = |tokens: Option<f64>, images: Option<f64>| match (tokens, images) {
            (Some(tokens), _) => Some((tokens, "tokens/s")),
            (_, Some(images)) => Some((images, "images/s")),
            _ => None,
        };
        let ended = self.summary.as_ref().filter(|_| !self.is_running);
        if let Some(rate) = ended.and_then(|summary| of(summary.tokens_per_s, summary.images_per_s)) {
            return Some(rate);
        }
        let mut rates: Vec<_> =
            self.steps.iter().filter_map(|step| of(step.tokens_per_s, step.images_per_s)).collect();
        rates.sort_by(|a, b| a.0.total_cmp(&b.0));
        rates.get(rates.len() / 2).copied()
    }

    /// Seconds that a running run still takes, if its steps go on as the last ones did, with all that is done
    /// between them.
    pub fn seconds_left(&self) -> Option<f64> {
        let (last, planned_steps) = (self.steps.last()?, self.planned_steps()?);
        // A run that was resumed counts its seconds anew.
        let recent = self.steps.iter().rev().take(RECENT + 1);
        let first = recent.take_while(|step| step.time <= last.time).last()?;
        let each = (last.time - first.time) / last.step.saturating_sub(first.step) as f64;
        (self.is_running && planned_steps > last.step && each.is_finite())
            .then(|| each * (planned_steps - last.step) as f64)
    }

    /// The fraction of prunable weights that is pruned.
    pub fn sparsity(&self) -> f64 {
        self.steps.last().map_or(0.0, |step| step.sparsity)
    }

    /// The model, as soon as it is known.
    pub fn model(&self) -> Option<&str> {
        self.plan.as_ref().map(|plan| plan.model.name.as_str())
    }

    /// `running`, `finished`, `diverged`, or that it stopped before its end.
    pub fn state(&self) -> &'static str {
        match (self.is_running, self.planned_steps(), &self.summary) {
            (true, _, _) => "running",
            _ if self.diverged.is_some() => "diverged",
            (_, Some(planned_steps), _) if self.done() >= planned_steps => "finished",
            (_, None, Some(_)) => "finished",
            _ => "stopped",
        }
    }

    /// How far it has come.
    pub fn progress(&self) -> String {
        match self.planned_steps() {
            Some(planned_steps) if planned_steps != self.done() => {
                format!("{} of {planned_steps}", self.done())
            }
            _ => self.done().to_string(),
        }
    }

    /// For a person, in one line.
    pub fn sentence(&self) -> String {
        let mut text = format!("{}, {} steps", self.state(), self.progress());
        if let Some(loss) = self.loss() {
            text += &format!(", loss {}", number::short(loss));
        }
        if let Some(loss) = self.validation().and_then(|validation| validation.loss) {
            text += &format!(", validation loss {}", number::short(loss));
        }
        if let Some((rate, of)) = self.rate() {
            text += &format!(", {} {of}", number::short(rate));
        }
        text
    }

    /// What a person should know of what is shown.
    pub fn notes(&self) -> Vec<String> {
        let (mut notes, name) = (Vec::new(), &self.name);
        if self.plan.is_none() {
            notes.push(format!(
                "{name}: plan.json is missing or incomplete: no settings, no predicted memory"
            ));
        }
        if self.steps.is_empty() {
            notes.push(format!("{name}: no step is in metrics.jsonl yet"));
        }
        let skipped: Vec<u64> = self.steps.iter().filter(|step| step.skipped).map(|step| step.step).collect();
        if let [first, ..] = skipped[..] {
            let (count, were) = (skipped.len(), if skipped.len() == 1 { "step was" } else { "steps were" });
            notes.push(format!(
                "{name}: {count} {were} skipped, since a loss or gradient was not finite; the first is step {first}"
            ));
        }
        if let Some(why) = &self.diverged {
            notes.push(format!("{name}: {why}"));
        }
        let steps: Vec<u64> = self.steps.iter().map(|step| step.step).collect();
        let every = self.settings.get("train.log_every").and_then(|every| every.parse().ok());
        let start = StartPoint::read(&self.folder).ok().flatten();
        let began = start.map_or(0, |start| start.step());
        let missing = every.map_or(Vec::new(), |every| missing_steps(&steps, began, self.done(), every));
        if !steps.is_empty() && !missing.is_empty() {
            let ranges: Vec<String> = missing.iter().map(ToString::to_string).collect();
            notes.push(format!("{name}: metrics.jsonl has no line for {}", ranges.join(", ")));
        }
        if self.unread > 0 {
            let (count, are) = (self.unread, if self.unread == 1 { "line is" } else { "lines are" });
            notes.push(format!("{name}: {count} {are} ignored in metrics.jsonl: not written by a run"));
        }
        notes
    }

    pub fn json(&self) -> Value {
        let rate = |of: &str| self.rate().filter(|rate| rate.1 == of).map(|rate| rate.0);
        json!({
            "run": self.folder,
            "name": self.name,
            "state": self.state(),
            "model": self.model(),
            "steps": self.done(),
            "of": self.planned_steps(),
            "loss": self.loss(),
            "validation": self.validation().cloned().unwrap_or_default(),
            "tokens_per_s": rate("tokens/s"),
            "images_per_s": rate("images/s"),
            "sparsity": self.sparsity(),
            "notes": self.notes(),
        })
    }
}

/// Gives runs that would be called the same the names of their folders in full.
pub fn disambiguate(runs: &mut [RunRecord]) {
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for run in runs {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = run.folder.display().to_string();
        }
    }
}

/// What is in a file, if it is there, is one, and holds that. One that is still being written is read the
/// next time.
fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&regular_file::read(path, RECORDS).ok()?).ok()
}

/// Fields that are not the same in all runs, with the value of each run; null where it has none.
pub fn differing(runs: &[RunRecord]) -> BTreeMap<String, Vec<Option<String>>> {
    let known: Vec<&RunRecord> = runs.iter().filter(|run| !run.settings.is_empty()).collect();
    let fields: BTreeSet<&String> = known.iter().flat_map(|run| run.settings.keys()).collect();
    let differs = |field: &&String| {
        let first = known[0].settings.get(*field);
        known.iter().any(|run| run.settings.get(*field) != first)
    };
    let values = |field: &String| runs.iter().map(|run| run.settings.get(field).cloned()).collect();
    fields.into_iter().filter(differs).map(|field| (field.clone(), values(field))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By its last steps; one that was resumed counts its seconds anew, and one that has ended has none left.
    #[test]
    fn the_time_left_is_that_of_the_steps_to_come() {
        let folder = tempfile::tempdir().unwrap();
        let line = |step: u64, time: f64, rate: f64| {
            format!(
                "{{\"step\":{step},\"loss\":1.0,\"lr\":0.1,\"grad_norm\":null,\"accuracy\":null,\"sparsity\":0.0,\"time\":{time},\
                 \"tokens_per_s\":{rate}}}\n"
            )
        };
        std::fs::write(folder.path().join("run.toml"), "").unwrap();
        let lines =
            [line(1, 90.0, 50.0), line(2, 0.5, 10.0), line(3, 2.5, 30.0), line(4, 4.5, 20.0)].concat();
        std::fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
        let mut run = RunRecord::open(folder.path()).unwrap();
        run.settings.insert("train.steps".into(), "10".into());
        assert_eq!(run.seconds_left(), None, "nobody runs it");
        run.is_running = true;
        assert_eq!(run.seconds_left(), Some(12.0), "six steps of two seconds");
        assert_eq!(run.rate(), Some((30.0, "tokens/s")), "in the middle, not the last");
        run.settings.insert("train.steps".into(), "4".into());
        assert_eq!(run.seconds_left(), None);
    }
}
