//! The rates of a cluster, refitted to runs: one factor on what products and passes over memory reach of
//! their peaks, by which the predicted steps become, on the mean of logarithms, those that were measured.
//! Launches, links and the peaks stay.

use super::{Candidate, Simulation};
use crate::cluster::{Cluster, Convolution};
use crate::engine::EngineProfile;
use crate::error::Error;
use crate::plan::Plan;

/// Rates are searched between this fraction and so many times what they were: beyond that, something else is
/// wrong.
const WIDEST: f64 = 1000.0;
/// Halvings of the range, in logarithms: the factor is then exact to a millionth.
const HALVINGS: usize = 24;

/// A run whose step was measured.
#[derive(Debug, Clone)]
pub struct MeasuredRun {
    pub plan: Plan,
    pub candidate: Candidate,
    /// Of a step.
    pub seconds: f64,
}

/// What came of refitting.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibrated {
    /// With the new rates.
    pub cluster: Cluster,
    /// New rates over old ones.
    pub factor: f64,
    /// Predicted seconds of each run's step with the old rates,
    pub before: Vec<f64>,
    /// and with the new ones.
    pub after: Vec<f64>,
}

impl Calibrated {
    /// Refits a cluster's rates to runs, of which there is at least one.
    pub fn new(cluster: &Cluster, runs: &[MeasuredRun]) -> Result<Calibrated, Error> {
        let before = predicted(cluster, runs)?;
        // How much longer the steps took than they would with rates of this factor, as a logarithm: it grows
        // with the factor.
        let late = |factor: f64| -> Result<f64, Error> {
            let seconds = predicted(&scaled(cluster, runs, factor), runs)?;
            let ratios = runs.iter().zip(&seconds).map(|(run, seconds)| (run.seconds / seconds).ln());
            Ok(ratios.sum::<f64>() / runs.len() as f64)
        };
        let (mut low, mut high) = (-WIDEST.ln(), WIDEST.ln());
        if late(high.exp())? < 0.0 || late(low.exp())? > 0.0 {
            let problem = format!(
                "finds no rates: these runs took {:.3} times the predicted time, which no factor up to {WIDEST} on the rates of matmul \
                 and memory explains; launch overhead and links are not refitted",
                late(1.0)?.exp()
            );
            return Err(Error::conflict("--calibrate", problem));
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if late(middle.exp())? < 0.0 { low = middle } else { high = middle }
        }
        let factor = ((low + high) / 2.0).exp();
        let cluster = scaled(cluster, runs, factor);
        let after = predicted(&cluster, runs)?;
        Ok(Calibrated { cluster, factor, before, after })
    }
}

/// Seconds of each run's step.
fn predicted(cluster: &Cluster, runs: &[MeasuredRun]) -> Result<Vec<f64>, Error> {
    let of = |run: &MeasuredRun| {
        let job = Simulation::new(&run.plan, cluster, EngineProfile::ESPALIER);
        job.estimate(&run.candidate).map(|estimate| estimate.step_seconds)
    };
    runs.iter().map(of).collect()
}

/// A cluster with other rates: of passes over memory, and of products of the precisions that the runs have.
fn scaled(cluster: &Cluster, runs: &[MeasuredRun], factor: f64) -> Cluster {
    let mut scaled = cluster.clone();
    let device = &mut scaled.device;
    let scale =
        |points: &mut [[f64; 2]]| points.iter_mut().for_each(|point| point[1] = digits(point[1] * factor));
    let mut precisions = Vec::new();
    for precision in runs.iter().map(|run| run.plan.storage.precision) {
        if !precisions.contains(&precision) {
            precisions.push(precision);
            let matrix = device.matrix_mut(precision);
            scale(&mut matrix.efficiency);
            // An efficiency is of a product, which has the factor.
            match &mut matrix.convolution {
                Convolution::Efficiency(_) => {}
                Convolution::Channels(points) => scale(points),
                Convolution::Passes(by_pass) => {
                    scale(&mut by_pass.channels);
                    for each in [&mut by_pass.weight_ns, &mut by_pass.pixel_ns, &mut by_pass.window_ns] {
                        *each = digits(*each / factor);
                    }
                }
            }
        }
    }
    scale(&mut device.memory.efficiency);
    scaled
}

/// Five digits: a person reads them, and a step is predicted as well as by all.
fn digits(number: f64) -> f64 {
    format!("{number:.4e}").parse().expect("a number that was just written")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::builtin;

    /// A small model, and its step at so many times what is predicted.
    fn run(cluster: &Cluster, precision: &str, times: f64) -> MeasuredRun {
        let text = format!(
            "[model]\nname = \"gpt\"\nlayers = 2\nheads = 4\nwidth = 256\ncontext = 128\n[train]\nsteps = 1\nbatch = 8\n\
             precision = \"{precision}\"\n[parallel]\ndata = 2\n"
        );
        let plan = Plan::of_text(&text);
        let candidate = Candidate::of(&plan).unwrap();
        assert_eq!((candidate.data, candidate.micro_batch, candidate.ranks()), (2, 4, 2));
        let seconds = Simulation::new(&plan, cluster, EngineProfile::ESPALIER)
            .estimate(&candidate)
            .unwrap()
            .step_seconds;
        MeasuredRun { plan, candidate, seconds: times * seconds }
    }

    #[test]
    fn a_run_takes_what_it_took() {
        let cluster = builtin("this-machine").unwrap();
        for times in [0.7, 1.0, 3.0] {
            let runs = [run(&cluster, "f32", times)];
            let found = Calibrated::new(&cluster, &runs).unwrap();
            assert!((found.after[0] / runs[0].seconds - 1.0).abs() < 1e-3, "{times}: {found:?}");
            assert!((found.before[0] * times / runs[0].seconds - 1.0).abs() < 1e-9);
            assert_eq!((found.factor < 0.999, found.factor > 1.001), (times > 1.0, times < 1.0), "{found:?}");
            let (new, old) = (&found.cluster.device, &cluster.device);
            let ratio = new.f32.efficiency[0][1] / old.f32.efficiency[0][1];
            assert!((ratio / found.factor - 1.0).abs() < 1e-3, "{ratio}");
            assert_eq!(new.bf16, old.bf16, "no run says anything of it");
            assert_eq!((&found.cluster.node, new.launch_us), (&cluster.node, old.launch_us));
        }
    }

    #[test]
    fn several_runs_meet_in_the_middle() {
        let cluster = builtin("this-machine").unwrap();
        let runs = [run(&cluster, "f32", 2.0), run(&cluster, "bf16", 0.8)];
        let found = Calibrated::new(&cluster, &runs).unwrap();
        let late = |i: usize| runs[i].seconds / found.after[i];
        assert!((late(0) * late(1) - 1.0).abs() < 1e-3, "{found:?}");
        assert_ne!(found.cluster.device.bf16, cluster.device.bf16);
    }

    #[test]
    fn a_step_shorter_than_its_messages_has_no_rates() {
        let cluster = builtin("this-machine").unwrap();
        let said = Calibrated::new(&cluster, &[run(&cluster, "f32", 1e-4)]).unwrap_err().to_string();
        assert!(said.starts_with("`--calibrate` finds no rates: "), "{said}");
    }
}
