//! What a person sees of a run: a bar on a terminal, plain lines elsewhere, on standard error; and the
//! closing tables, which are the answer to the command.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use espalier_data::{CutRows, DamagedPicture, DataSplit, Dataset};
use espalier_plan::data_parallel::{DataParallelMode, ZeroStage};
use espalier_plan::{PerAxis, Plan, Scoring};
use espalier_tensor::memory::ByteSize;
use espalier_tensor::{Category, Device};
use espalier_train::prune::{Observation, PruneReport};
use espalier_train::run::Observer;
use espalier_train::trainer::{Evaluation, StepReport};
use espalier_train::{CategoryBytes, LayerDensity, RunSummary, StatePeak, Throughput, TrainedData};
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{self, print_err, print_out};
use crate::{predicted, profile};

/// Of a long list of files so many are named.
const NAMED: usize = 5;

/// Shows a run as it goes.
pub struct ProgressPrinter {
    bar: Option<ProgressBar>,
    steps: u64,
    last_line: Option<Instant>,
    steps_seen: u64,
    profiled: Option<Device>,
    begun: Arc<AtomicBool>,
    /// What the bar says, as the line that is left of it.
    last: Option<String>,
}

impl ProgressPrinter {
    /// A bar where standard error is a terminal, lines otherwise.
    pub fn new() -> ProgressPrinter {
        let mut progress = ProgressPrinter::lines();
        progress.bar = bar("{bar:20} {pos}/{len} {wide_msg}");
        progress
    }

    /// Lines wherever standard error goes, for what takes no steps.
    pub fn lines() -> ProgressPrinter {
        ProgressPrinter {
            bar: None,
            steps: 0,
            last_line: None,
            steps_seen: 0,
            profiled: None,
            begun: Arc::default(),
            last: None,
        }
    }

    /// Sets a flag when the first step is about to be taken.
    pub fn flag_begin(&mut self, begun: Arc<AtomicBool>) {
        self.begun = begun;
    }

    /// Takes the times of a device's work, once the first steps are over.
    pub fn profile(&mut self, device: &Device) {
        self.profiled = Some(device.clone());
    }

    /// Steps that were taken while this looked on.
    pub fn steps_seen(&self) -> u64 {
        self.steps_seen
    }

    /// Takes the bar away; what it last said stays, as a line.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            clear(&bar);
            if let Some(line) = self.last.take() {
                print_err!("{line}");
            }
        }
    }
}

/// Also where the run has failed.
impl Drop for ProgressPrinter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            clear(bar);
        }
    }
}

/// A bar where standard error is a terminal. It takes one line: of what does not fit into that, the end is
/// left out.
pub fn bar(template: &str) -> Option<ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template(template).expect("a fixed template");
        let bar = ProgressBar::no_length().with_style(style);
        output::set_bar(Some(bar.clone()));
        bar
    })
}

/// Takes a bar off the terminal.
pub fn clear(bar: &ProgressBar) {
    output::set_bar(None);
    bar.finish_and_clear();
}

/// `4 min 10 s`: the time that is left, where one can be guessed.
fn left(seconds: f64) -> String {
    let rounded = seconds.round();
    match rounded {
        rounded if !rounded.is_finite() || rounded < 1.0 => String::new(),
        rounded if rounded < 100.0 => format!("{rounded:.0} s left  "),
        rounded if rounded < 6000.0 => format!("{:.0} min left  ", (rounded / 60.0).ceil()),
        rounded => format!("{:.1} h left  ", rounded / 3600.0),
    }
}

impl Observer for ProgressPrinter {
    fn started(&mut self, done: u64, steps: u64) {
        self.steps = steps;
        if let Some(bar) = &self.bar {
            bar.set_length(steps);
            bar.set_position(done);
        }
        if done > 0 {
            print_err!("resumed after step {done}");
        }
    }

    fn step(&mut self, report: &StepReport, rates: Throughput, memory: usize) {
        self.steps_seen += 1;
        if let Some(Device::Cuda(cuda)) =
            self.profiled.as_ref().filter(|_| self.steps_seen == profile::WARM_UP)
        {
            cuda.start_profile();
        }
        let speed = match rates.tokens_per_s {
            Some(tokens) => format!("{} tokens/s", count(tokens)),
            None => format!("{} images/s", count(rates.samples_per_s)),
        };
        // There is no speed yet where the first step pruned.
        let speed = if rates.step_ms.is_finite() { speed } else { "-".into() };
        let text = format!("loss {:.4}  lr {:.2e}  {speed}  {}", report.loss, report.lr, bytes(memory));
        if let Some(bar) = &self.bar {
            let to_do = self.steps.saturating_sub(report.step) as f64;
            bar.set_position(report.step);
            // What matters most comes first: the end may have no room.
            bar.set_message(format!(
                "{speed}  {}loss {:.4}  lr {:.2e}  {}",
                left(to_do * rates.step_ms / 1e3),
                report.loss,
                report.lr,
                bytes(memory)
            ));
            self.last = Some(format!("step {:>6}/{}  {text}", report.step, self.steps));
            return;
        }
        // Lines come at the start, the end, and every few seconds: enough for a log, not a flood.
        let due = self.last_line.is_none_or(|at| at.elapsed() > Duration::from_secs(5));
        if due || report.step == self.steps {
            self.last_line = Some(Instant::now());
            print_err!("step {:>6}/{}  {text}", report.step, self.steps);
        }
    }

    fn evaluated(&mut self, step: u64, evaluation: Evaluation) {
        print_err!(
            "step {step:>6}: validation loss {:.4}, accuracy {:.1} %",
            evaluation.loss,
            evaluation.accuracy * 100.0
        );
    }

    fn sampled(&mut self, step: u64, prompt: &str, text: &str) {
        print_err!("step {step:>6}: sample, prompt {prompt:?}:\n{}", indented(&format!("{prompt}{text}")));
    }

    fn observed(&mut self, step: u64, observation: &Observation) {
        print_err!("before step {step}: {}", observation.note);
    }

    fn pruned(&mut self, step: u64, pruned: &PruneReport) {
        let (kept, all) = (pruned.kept, pruned.of);
        let note = if pruned.note.is_empty() { String::new() } else { format!("; {}", pruned.note) };
        let sparse = match pruned.sparse {
            0 => String::new(),
            n => format!(", {n} linear layers with sparse kernels"),
        };
        print_err!(
            "before step {step}: kept {} of {} weights ({:.2} % sparsity), mask stored as {}{sparse}; memory {}, was {}{note}",
            count(kept as f64),
            count(all as f64),
            100.0 * (1.0 - kept as f64 / all as f64),
            pruned.form,
            bytes(pruned.bytes[1]),
            bytes(pruned.bytes[0]),
        );
    }

    fn saved(&mut self, path: &Path) {
        print_err!("saved {}", path.display());
    }

    fn begins(&mut self) {
        self.begun.store(true, Ordering::SeqCst);
    }

    fn note(&mut self, text: &str) {
        print_err!("note: {text}");
    }

    fn warning(&mut self, text: &str) {
        print_err!("warning: {text}");
    }
}

/// One paragraph before the first step; `transport` joins the ranks, where they are processes.
pub fn describe(plan: &Plan, dataset: &Dataset, device: &str, transport: Option<&str>) -> String {
    let batch = &plan.batch;
    format!(
        "{}: {} parameters, {}, on {device}; {} training and {} validation samples; batch {}{} in {} micro-batch{}",
        plan.model.name,
        count(plan.parameters as f64),
        plan.storage.precision.name(),
        dataset.len(DataSplit::Train),
        dataset.len(DataSplit::Validation),
        batch.samples,
        ranks(plan, transport),
        batch.micro_batches,
        if batch.micro_batches == 1 { "" } else { "es" },
    )
}

/// Says what should be known before the first step.
pub fn notes(plan: &Plan, dataset: &Dataset) {
    for note in
        plan.notes.iter().cloned().chain(skipped(dataset)).chain(damaged(dataset)).chain(packed(dataset))
    {
        print_err!("note: {note}");
    }
}

/// Which files of a folder of text are not learnt from.
fn skipped(dataset: &Dataset) -> Option<String> {
    let Dataset::Tokens(tokens) = dataset else { return None };
    skipped_files(tokens.skipped())
}

/// Which files of a folder of pictures are none.
pub fn damaged(dataset: &Dataset) -> Option<String> {
    let Dataset::Folder(folder) = dataset else { return None };
    let name = |one: &DamagedPicture| format!("{} ({})", one.path.display(), one.why);
    counted("damaged and left out", folder.damaged().iter().map(name))
}

/// How rows became sequences, and which of them are longer than one.
fn packed(dataset: &Dataset) -> Vec<String> {
    let Dataset::Documents(documents) = dataset else { return Vec::new() };
    let ((rows, sequences), CutRows { cut, dropped }) = (documents.counts(), documents.cut_rows());
    let mut notes = vec![format!("{rows} rows in {sequences} sequences")];
    if cut > 0 {
        notes.push(format!(
            "{cut} rows are longer than the context and were cut off; {dropped} of them had no answer left and are skipped"
        ));
    }
    notes
}

/// The same of these files.
pub fn skipped_files(files: &[PathBuf]) -> Option<String> {
    counted("not text and skipped", files.iter().map(|path| path.display().to_string()))
}

/// How many files are so, with the names of the first; none where there is no such file.
fn counted(are_so: &str, files: impl ExactSizeIterator<Item = String>) -> Option<String> {
    let count = files.len();
    let names = files.take(NAMED).collect::<Vec<_>>().join(", ");
    let others = match count.saturating_sub(NAMED) {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    let are = if count == 1 { "file is" } else { "files are" };
    (count > 0).then(|| format!("{count} {are} {are_so}: {names}{others}"))
}

/// Over which ranks a batch goes.
fn ranks(plan: &Plan, transport: Option<&str>) -> String {
    let joined = transport.map_or(String::new(), |transport| format!(" ({transport})"));
    let PerAxis { data, tensor, spatial, .. } = plan.mesh.axis_sizes();
    let zero = match plan.data_parallel {
        DataParallelMode::Sharded(ZeroStage::State) => " with ZeRO-1",
        DataParallelMode::Sharded(ZeroStage::Gradients) => " with ZeRO-2",
        DataParallelMode::Sharded(ZeroStage::Weights) => " with ZeRO-3",
        DataParallelMode::Replicated | DataParallelMode::Local { .. } => "",
    };
    let mut axes = Vec::new();
    if let Some(order) = plan.pipeline.name() {
        axes.push(format!("{} pipeline stages ({order})", plan.pipeline.stages));
    }
    if spatial > 1 {
        axes.push(format!("{spatial} spatial-parallel ranks"));
    }
    if tensor > 1 {
        axes.push(format!("{tensor} tensor-parallel ranks"));
    }
    match (data, axes.is_empty()) {
        (1, true) => String::new(),
        (ranks, true) => format!(" over {ranks} data-parallel ranks{zero}{joined}, each"),
        (1, false) => format!(" over {}{joined}, each", axes.join(" x ")),
        (replicas, false) => {
            format!(" over {replicas} data-parallel replicas{zero} x {}{joined}, each", axes.join(" x "))
        }
    }
}

/// That the candidates are scored some at a time, where they are.
pub fn scoring(scoring: &Scoring) -> Option<String> {
    (scoring.passes > 1).then(|| {
        format!(
            "scores of all weights do not fit in memory: {} passes over the samples, each run 3 times, with a peak of {}",
            scoring.passes,
            bytes(scoring.bytes as usize),
        )
    })
}

/// Lines that stand apart from those of the run.
fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

/// The closing tables.
pub fn summarise(summary: &RunSummary) {
    print_out!("\n{:<15}{:>12}{:>12}", "memory", "predicted", "peak");
    for name in Category::ALL.map(Category::name) {
        let CategoryBytes { predicted, measured } = summary.memory[name];
        // A category that this run does not have would only be a row of zeros.
        if predicted.unwrap_or(0) > 0 || measured.unwrap_or(0) > 0 {
            let show = |value: Option<usize>| value.map_or("-".into(), bytes);
            print_out!("  {name:<13}{:>12}{:>12}", show(predicted.map(|b| b as usize)), show(measured));
        }
    }
    if let Some(peak) = summary.peak_bytes {
        print_out!("  {:<13}{:>12}{:>12}", "total (peak)", "", bytes(peak));
    }
    if let Some(peak) = summary.host_peak_bytes {
        print_out!("  {:<13}{:>12}{:>12}", "host (peak)", "", bytes(peak));
    }
    state(summary);
    layers(summary);
    let predicted = predicted::sentence(summary);
    let (Some(seconds), Some(step_ms)) = (summary.seconds, summary.step_ms) else {
        if let Some(predicted) = predicted {
            print_out!("\n{predicted}");
        }
        return;
    };
    let speed = match (summary.tokens_per_s, summary.images_per_s) {
        (Some(tokens), _) => format!(", {} tokens/s", count(tokens)),
        (_, Some(images)) => format!(", {} images/s", count(images)),
        _ => String::new(),
    };
    print_out!("\n{} steps in {seconds:.1} s; median {step_ms:.1} ms/step{speed}", summary.steps);
    if let Some(predicted) = predicted {
        print_out!("{predicted}");
    }
    if let Some(data) = &summary.trained_on {
        print_out!("{}", trained_on(data));
    }
    let validation = &summary.validation;
    if let Some(loss) = validation.loss {
        let score = match (validation.perplexity, validation.accuracy) {
            (Some(perplexity), _) => format!("perplexity {perplexity:.2}"),
            (_, Some(accuracy)) => format!("accuracy {:.2} %", accuracy * 100.0),
            _ => String::new(),
        };
        let best = validation.best_loss.map_or(String::new(), |best| format!(" (best {best:.4})"));
        print_out!("validation loss {loss:.4}, {score}{best}");
    }
    if let Some(run) = &summary.run {
        print_out!("run folder {run}");
    }
}

/// What a run has learnt from, without which its loss says little.
fn trained_on(data: &TrainedData) -> String {
    let (amount, unique, of) = match data.tokens.zip(data.unique_tokens) {
        Some((tokens, unique)) => (tokens, unique, "tokens"),
        None => (data.samples, data.unique_samples, "samples"),
    };
    let kept = match data.per_kept_parameter == data.per_parameter {
        true => String::new(),
        false => format!(", {:.3} per kept one", data.per_kept_parameter),
    };
    let (amount, unique) = (count(amount as f64), count(unique as f64));
    let (epochs, each) = (data.epochs, data.per_parameter);
    format!("trained on {amount} {of} ({unique} unique, {epochs:.2} epochs): {each:.3} per parameter{kept}")
}

/// What the model itself takes before and after pruning: measured where there was a run.
pub fn state_peak(peak: &StatePeak) -> String {
    let StatePeak { before, after, pruned_after, may_prune_earlier, scoring } = peak;
    let shown = |of: &CategoryBytes| bytes(of.measured.unwrap_or(of.predicted.unwrap_or(0) as usize));
    let latest = if *may_prune_earlier { " at the latest" } else { "" };
    let mut text = match pruned_after {
        Some(0) => format!("training state: {} from the first step", shown(after)),
        Some(step) => {
            format!("training state: {} until step {step}{latest}, {} after", shown(before), shown(after))
        }
        None => format!("training state: {} until it has pruned, {} after", shown(before), shown(after)),
    };
    let predicted = [before, after].map(|one| one.predicted.unwrap_or(0) as usize);
    let differs =
        |(of, predicted): (&CategoryBytes, usize)| of.measured.is_some_and(|bytes| bytes != predicted);
    if [before, after].into_iter().zip(predicted).any(differs) {
        text += &match pruned_after {
            Some(0) => format!(" ({} predicted)", bytes(predicted[1])),
            _ => format!(" ({} and {} predicted)", bytes(predicted[0]), bytes(predicted[1])),
        };
    }
    if let Some(scoring) = scoring {
        text += &format!("; {} while scoring", bytes(*scoring as usize));
    }
    text
}

/// Bytes of state for each weight that pruning may touch, beside what others need.
fn state(summary: &RunSummary) {
    if summary.sparsity == 0.0 {
        let StatePeak { after: CategoryBytes { predicted, measured }, .. } = summary.state_peak;
        if let Some(all) = measured.or(predicted.map(|bytes| bytes as usize)) {
            print_out!("\ntraining state: {}, dense", bytes(all));
        }
        return;
    }
    print_out!("\n{}", state_peak(&summary.state_peak));
    let each = &summary.state_bytes;
    print_out!(
        "  {:.3} bytes per prunable weight at {:.1} % sparsity\n  \
         (weight {:.3}, gradient {:.3}, optimizer {:.3}, mask {:.3})",
        each.total(),
        100.0 * summary.sparsity,
        each.weights,
        each.gradients,
        each.optimizer,
        each.mask,
    );
    // SAMO counts for mixed precision with Adam, its f32 gradients included.
    if summary.precision == "bf16" {
        let samo = 24.0 * (1.0 - summary.sparsity) + 2.0;
        print_out!("  with Adam: dense 16 (20 with f32 gradients), SAMO {samo:.3}");
    }
}

/// The density of each layer; of many layers those with the least and the most.
fn layers(summary: &RunSummary) {
    let Some(layers) = summary.kept_by_layer.as_ref().filter(|_| summary.sparsity > 0.0) else { return };
    let line = |layer: &LayerDensity| {
        let LayerDensity { name, kept, of } = layer;
        print_out!("  {:>6.2} %  {name} ({kept} of {of})", 100.0 * layer.density());
    };
    const ENDS: usize = 4;
    if layers.len() <= 4 * ENDS {
        print_out!("\ndensity per layer");
        return layers.iter().for_each(line);
    }
    let mut sorted: Vec<&LayerDensity> = layers.iter().collect();
    sorted.sort_by(|a, b| a.density().total_cmp(&b.density()));
    let (least, most) = (sorted[0].density(), sorted[sorted.len() - 1].density());
    if most - least < 0.001 {
        print_out!("\ndensity per layer: {:.2} % in all {}", 100.0 * least, layers.len());
        return;
    }
    print_out!("\ndensity per layer, lowest and highest of {} (all with --json)", layers.len());
    sorted[..ENDS].iter().for_each(|layer| line(layer));
    print_out!("       ...");
    sorted[sorted.len() - ENDS..].iter().for_each(|layer| line(layer));
}

pub fn bytes(n: usize) -> String {
    ByteSize(n).to_string()
}

pub fn count(n: f64) -> String {
    match n {
        n if n >= 1e9 => format!("{:.2} B", n / 1e9),
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e4 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}
