//! Choices by hand, and steps of a curve times those of a search.

use super::*;
use crate::cluster::builtin;
use crate::engine::EngineProfile;
use crate::plan::Plan;
use crate::search::{LayoutSearch, SearchConstraints};
use crate::simulate::Simulation;

fn point(gpus: usize, sparsity: f64, hours: f64) -> ResultChoice {
    ResultChoice {
        gpus,
        batch: 64,
        sparsity,
        steps: 100,
        k_star: 100,
        steps_interval: None,
        extrapolated: false,
        step_seconds: 36.0 * hours,
        measured: true,
        hours,
        hours_interval: None,
        gpu_hours: gpus as f64 * hours,
        cost: None,
        kwh: None,
        described: String::new(),
        candidate: None,
    }
}

fn result(points: Vec<ResultChoice>) -> ResultTimes {
    let curves = vec![ConvergenceCurve::given(0.0, 1e4, 10.0), ConvergenceCurve::given(0.9, 3e4, 10.0)];
    let [model, cluster, device, engine] = ["m", "c", "d", "e"].map(String::from);
    let mut result = ResultTimes { model, cluster, device, engine, curves, points, notes: Vec::new() };
    result.sort();
    result
}

fn gpus(points: &[&ResultChoice]) -> Vec<usize> {
    points.iter().map(|point| point.gpus).collect()
}

#[test]
fn a_choice_that_is_slower_and_dearer_than_another_is_on_no_curve() {
    let result = result(vec![
        point(1, 0.0, 10.0),
        point(2, 0.0, 5.5),
        point(4, 0.0, 6.0),
        point(8, 0.0, 4.0),
        point(8, 0.0, 3.0),
        point(2, 0.9, 4.0),
    ]);
    assert_eq!(gpus(&result.pareto(Some(0.0))), [8, 2, 1], "4 GPUs are slower than 2");
    assert_eq!(gpus(&result.pareto(None)), [8, 2], "pruned, 2 GPUs take fewer GPU-hours than one");
    assert_eq!(gpus(&result.by_gpus(Some(0.0))), [1, 2, 4, 8]);
    assert_eq!(result.by_gpus(Some(0.0))[3].hours, 3.0);
}

#[test]
fn more_gpus_pay_until_a_doubling_saves_too_little() {
    let dense = [(1, 10.0), (2, 5.0), (4, 3.0), (8, 2.4), (16, 1.0)];
    let dense: Vec<_> = dense.into_iter().map(|(gpus, hours)| point(gpus, 0.0, hours)).collect();
    let result = result(dense);
    let limit = result.scaling_limit(None).unwrap();
    assert_eq!(limit.point.gpus, 4, "what lies behind a doubling that does not pay is not seen");
    assert!((limit.next_speedup().unwrap() - 1.25).abs() < 1e-12);
    // From 1 to 8 are three doublings: 2.2 times as fast is 1.3 each.
    let sparse = |hours| super::ResultTimes {
        points: vec![point(1, 0.0, hours), point(8, 0.0, 1.0)],
        ..result.clone()
    };
    let last = |result: ResultTimes| result.scaling_limit(None).map(|limit| limit.point.gpus);
    assert_eq!((last(sparse(2.15)), last(sparse(2.25))), (Some(1), Some(8)));
    assert_eq!(last(ResultTimes { points: Vec::new(), ..result }), None);
}

#[test]
fn pruning_pays_where_it_is_faster_or_alone_fits() {
    let mut both = result(vec![
        point(2, 0.0, 4.0),
        point(4, 0.0, 3.0),
        point(1, 0.9, 9.0),
        point(2, 0.9, 5.0),
        point(4, 0.9, 2.0),
    ]);
    let gain = &both.pruning_gains()[0];
    assert_eq!((gain.sparsity, &gain.only_pruned), (0.9, &vec![1]));
    assert_eq!(gain.speedups, [(2, 0.8), (4, 1.5)]);
    assert_eq!(gain.pays_on(), [1, 4]);
    both.curves.remove(0);
    assert_eq!(both.pruning_gains(), [], "nothing to compare with");
}

/// K* times the step of the fastest layout; hours of all GPUs, their price and their power.
#[test]
fn hours_are_steps_of_a_curve_times_those_of_a_search() {
    let text = "[model]\nlayers = 2\nwidth = 64\nheads = 2\ncontext = 64\nvocab = 256\n[train]\nbatch = 64\n";
    let plan = Plan::of_text(text);
    let mut cluster = builtin("dgx-h100").unwrap();
    (cluster.price_per_gpu_hour, cluster.watts_per_gpu) = (Some(2.5), Some(700.0));
    let fixed = SearchConstraints::default();
    let curve = ConvergenceCurve {
        repeats: Some(RepeatCurves {
            seeds: 3,
            median: [9600.0, 100.0],
            least: [6400.0, 50.0],
            most: [12_800.0, 150.0],
        }),
        ..ConvergenceCurve::given(0.0, 6400.0, 99.5)
    };
    let found = |devices: usize, cluster: &Cluster| {
        let job = Simulation::new(&plan, cluster, EngineProfile::ESPALIER);
        let found = LayoutSearch { job: &job, devices, fixed: &fixed, rows: 1 }.run().unwrap();
        ResultChoice::new(&curve, 64, devices, &found.ranked[0], cluster)
    };
    let four = found(4, &cluster);
    assert_eq!((four.steps, four.k_star, four.steps_interval), (250, 200, Some([150, 350])));
    assert!((four.hours * 3600.0 / (250.0 * four.step_seconds) - 1.0).abs() < 1e-12, "{four:?}");
    let [low, high] = four.hours_interval.unwrap();
    assert!((low / four.hours - 0.6).abs() < 1e-12 && (high / four.hours - 1.4).abs() < 1e-12);
    assert_eq!(four.gpu_hours, 4.0 * four.hours);
    assert_eq!((four.cost, four.kwh), (Some(2.5 * four.gpu_hours), Some(1e-3 * 700.0 * four.gpu_hours)));
    // One rank on a machine of cores has all of them.
    let cores = Cluster { price_per_gpu_hour: None, ..builtin("this-machine").unwrap() };
    let one = found(1, &cores);
    assert_eq!((one.gpu_hours, one.cost), (cores.node.devices as f64 * one.hours, None));
}
