//! `espalier measure`: what the loss around the weights of a checkpoint is like. It changes nothing.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_data::DataSplit;
use espalier_plan::config::{Override, RunTable};
use espalier_train::checkpoint::Checkpoint;
use espalier_train::measure::{
    Eigenvalue, GradientNoise, LossSamples, LossSurface, Neighbourhood, Probes, Sharpness, Spectrum,
    gradient_noise, largest_eigenvalue, sharpness, spectrum,
};
use espalier_train::parallel::Ranks;
use espalier_train::trainer::Trainer;
use espalier_train::{Error, memory_check};
use serde::Serialize;
use serde_json::{Value, json};

use crate::log::LogArguments;
use crate::output::{self, print_err, print_out};
use crate::prepared::{PreparedRun, prepare};
use crate::run_file::{conflict, in_file, read_run};
use crate::setting::setting;

/// Enough that the measures of a small network vary by a few percent, and few enough for seconds.
const USUAL_SAMPLES: usize = 1000;

#[derive(Args)]
#[command(
    after_help = "Without a flag for a measure, all but the spectrum are measured. docs/measure.md defines them.

Examples:
  espalier measure out/hello
  espalier measure out/hello/checkpoints/step-000300 --sharpness --epsilon 5e-4 --samples 0
  espalier measure out/hello --eigenvalue --spectrum --json"
)]
pub struct MeasureArguments {
    /// A checkpoint folder, or a run folder (its newest checkpoint).
    checkpoint: PathBuf,
    /// Data to measure on, in place of `data.path`.
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Number of training samples, spread evenly over the data; 0: all [default: 1000, or all if there are fewer].
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// Gradient noise scale: variance of per-sample gradients, and the critical batch size it predicts.
    #[arg(long, help_heading = "Measures")]
    noise: bool,
    /// Sharpness (Keskar et al.): the largest rise of the loss in a box around the weights.
    #[arg(long, help_heading = "Measures")]
    sharpness: bool,
    /// Size of that box: |change of w| <= E (|w| + 1).
    #[arg(long, value_name = "E", allow_negative_numbers = true, help_heading = "Measures")]
    epsilon: Option<f64>,
    /// Largest eigenvalue of the Hessian.
    #[arg(long, help_heading = "Measures")]
    eigenvalue: bool,
    /// Spectral density of the Hessian.
    #[arg(long, help_heading = "Measures")]
    spectrum: bool,
    /// Override a field of the run file, as in `--set device.kind=cpu`; `--set FIELD=` removes it. Paths are
    /// relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Print the measures as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

/// All that was measured.
#[derive(Serialize)]
struct MeasureReport {
    checkpoint: String,
    step: u64,
    samples: usize,
    of: usize,
    dimension: u64,
    sparsity: f64,
    loss: f64,
    gradient_norm: f64,
    noise: Option<Value>,
    sharpness: Option<Value>,
    eigenvalue: Option<Eigenvalue>,
    spectrum: Option<Value>,
}

pub fn measure(arguments: &MeasureArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let epsilon = arguments.epsilon()?;
    let on_damaged = |broken: &Error| print_err!("warning: {broken}; the one before it is measured");
    let checkpoint = Checkpoint::find(&arguments.checkpoint, &Ranks::single(), on_damaged)?;
    let run_file = checkpoint.run_file();
    let data = arguments.data.as_ref().map(std::path::absolute).transpose()?;
    let data = data.as_deref().map(Override::data_path);
    let overrides: Vec<Override> = data.into_iter().chain(arguments.overrides.iter().cloned()).collect();
    let run =
        RunTable::parse(&read_run(&run_file)?, &overrides).map_err(|error| in_file(&run_file, error))?;
    let prepared = prepare(&run, &run_file, None, Some(checkpoint.path()))?;
    let device = prepared.open_device()?;
    let PreparedRun { plan, dataset, .. } = prepared;
    let plan = plan.single_rank().map_err(Error::Plan)?;
    memory_check::check(&plan, &device, None)?;
    let of = dataset.len(DataSplit::Train);
    let samples = match arguments.samples {
        None => of.min(USUAL_SAMPLES),
        Some(0) => of,
        Some(samples) => samples,
    };
    let measured = device.enter(|| -> Result<MeasureReport> {
        let mut trainer = Trainer::new(plan, dataset, &device)?;
        trainer.start_from(&checkpoint)?;
        let surface = LossSurface::of(&trainer, LossSamples { samples: Some(samples), micro_batch: None })?;
        print_out!(
            "{}: {} weights ({:.1} % of the prunable ones pruned), loss over {samples} of {of} training samples",
            checkpoint.path().display(),
            surface.dimension()?,
            100.0 * trainer.sparsity()
        );
        let (loss, gradient) = surface.loss_and_gradient(&surface.center()?)?;
        let gradient_norm = surface.norm(&gradient)?;
        print_out!("loss                {loss:.4}, gradient norm {gradient_norm:.4}");
        Ok(MeasureReport {
            checkpoint: checkpoint.path().display().to_string(),
            step: checkpoint.progress().step,
            samples,
            of,
            dimension: surface.dimension()?,
            sparsity: trainer.sparsity(),
            loss,
            gradient_norm,
            // Whoever did not ask for it can do without where there are too few samples.
            noise: (arguments.noise || arguments.wants(false) && surface.micro_batches() > 1)
                .then(|| noise(&surface))
                .transpose()?,
            sharpness: arguments.wants(arguments.sharpness).then(|| rise(&surface, epsilon)).transpose()?,
            eigenvalue: arguments.wants(arguments.eigenvalue).then(|| largest(&surface)).transpose()?,
            spectrum: arguments.spectrum.then(|| distribution(&surface)).transpose()?,
        })
    })?;
    output::answer(arguments.json, || &measured)
}

impl MeasureArguments {
    /// Whether a measure is taken: it was asked for, or none was.
    fn wants(&self, asked: bool) -> bool {
        asked || !(self.noise || self.sharpness || self.eigenvalue || self.spectrum)
    }

    fn epsilon(&self) -> Result<f64> {
        let Some(epsilon) = self.epsilon else { return Ok(Neighbourhood::default().epsilon) };
        if !self.wants(self.sharpness) {
            return Err(conflict("--epsilon", "belongs to --sharpness, which was not asked for").into());
        }
        if !(epsilon > 0.0 && epsilon <= 1.0) {
            return Err(conflict("--epsilon", &format!("is {epsilon}, and must be in (0, 1]")).into());
        }
        Ok(epsilon)
    }
}

fn noise(surface: &LossSurface<'_>) -> Result<Value> {
    let found = gradient_noise(surface)?;
    let GradientNoise { signal, variance } = found;
    match found.critical_batch() {
        Some(batch) => print_out!(
            "critical batch      {batch:.0} (gradient noise scale; per-sample gradient variance {variance:.4})"
        ),
        None => print_out!(
            "critical batch      above {}: noise dominates the gradient (per-sample variance {variance:.4})",
            surface.samples()
        ),
    }
    Ok(json!({ "signal": signal, "variance": variance, "critical_batch": found.critical_batch() }))
}

fn rise(surface: &LossSurface<'_>, epsilon: f64) -> Result<Value> {
    let within = Neighbourhood { epsilon, ..Neighbourhood::default() };
    let Sharpness { value, loss, highest } = sharpness(surface, within)?;
    print_out!(
        "sharpness           {value:.3} %: the loss rises from {loss:.4} to {highest:.4} within epsilon = {epsilon}"
    );
    Ok(json!({ "value": value, "epsilon": epsilon, "highest": highest }))
}

fn largest(surface: &LossSurface<'_>) -> Result<Eigenvalue> {
    let found = largest_eigenvalue(surface)?;
    let bound = if found.settled { "" } else { "at least " };
    print_out!("largest eigenvalue  {bound}{:.4} ({} Hessian-vector products)", found.value, found.products);
    Ok(found)
}

fn distribution(surface: &LossSurface<'_>) -> Result<Value> {
    let probes = Probes::default();
    let found: Spectrum = spectrum(surface, probes)?;
    let (smallest, largest) = found.ends().unwrap_or_default();
    let (trace, negative) = (found.trace(), found.below(0.0));
    print_out!(
        "spectrum            from {smallest:.4} to {largest:.4}, trace {trace:.3}; {:.1} % of the eigenvalues are negative",
        100.0 * negative
    );
    // The bulk lies around 0, so what lies beyond a fraction of the largest says how it thins out.
    for fraction in [0.01, 0.1, 0.5] {
        let above = found.dimension as f64 * (1.0 - found.below(fraction * largest));
        print_out!(
            "                    about {above:.1} of {} lie above {:.4}",
            found.dimension,
            fraction * largest
        );
    }
    Ok(json!({
        "smallest": smallest, "largest": largest, "trace": trace, "negative": negative,
        "directions": probes.directions, "steps": probes.steps, "nodes": found.nodes,
    }))
}
