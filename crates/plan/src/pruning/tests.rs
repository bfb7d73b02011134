//! What the section `[prune]` comes to.

use super::distribution::erdos_renyi_kernel;
use super::*;

/// GPT-2's 8 x 24 weight `[input, output]` has 24 rows of eight, of each of which 2.4 stay: two. All of
/// it together keeps 57.6.
#[test]
fn every_row_keeps_its_own_share() {
    let text = "[model]\nlayers = 1\nheads = 1\nwidth = 8\ncontext = 4\n[prune]\nmethod = \"magnitude\"\nsparsity = 0.7\nscope = ";
    let kept = |scope: &str| {
        let run_file = crate::RunFile::parse(&format!("{text}\"{scope}\""), &[]).unwrap();
        let facts = crate::plan::DataFacts { vocab: Some(20), ..Default::default() };
        let plan = crate::Plan::new(run_file, facts).unwrap();
        let parameters = plan.model.parameters();
        let id = parameters.iter().position(|p| p.name == "h.0.attn.c_attn.weight").unwrap();
        assert_eq!(parameters[id].output_rows(), (24, 8));
        plan.pruning.unwrap().kept_by_parameter(&parameters)[id]
    };
    assert_eq!((kept("row"), kept("layer")), (Some(24 * 2), Some(58)));
}

/// By hand: weights of 4 x 10 and 30 x 40 and a kernel of 8 x 4 x 3 x 3 have 14 / 40, 70 / 1200 and 18 / 288.
#[test]
fn small_layers_keep_more_and_none_more_than_all() {
    let shapes: [&[usize]; 3] = [&[4, 10], &[30, 40], &[8, 4, 3, 3]];
    let fractions = erdos_renyi_kernel(&shapes, 0.05);
    // 0.05 1528 = 76.4 in proportion 14 : 70 : 18.
    let factor = 76.4 / 102.0;
    for (fraction, raw) in fractions.iter().zip([14.0 / 40.0, 70.0 / 1200.0, 18.0 / 288.0]) {
        assert!((fraction - factor * raw).abs() < 1e-12, "{fractions:?}");
    }
    // 0.3 1528 = 458.4: a factor of 4.49 would give the first 1.57, so it keeps its 40, and 418.4 go to
    // 70 : 18.
    let fractions = erdos_renyi_kernel(&shapes, 0.3);
    let factor = 418.4 / 88.0;
    assert_eq!(fractions[0], 1.0);
    assert!(
        (fractions[1] - factor * 70.0 / 1200.0).abs() < 1e-12
            && (fractions[2] - factor * 18.0 / 288.0).abs() < 1e-12
    );
    assert_eq!(erdos_renyi_kernel(&shapes, 1.0), [1.0; 3]);
    let first = DynamicSparsity {
        every: 1,
        fraction: 0.3,
        until: 1.0,
        distribution: Distribution::Uniform,
        dense_first: true,
    };
    assert_eq!(first.fractions(&shapes, 0.1), [1.0, 0.1, 0.1]);
}

/// "The Journey Matters" (ICLR 2025): from a quarter to three quarters of the run is near the best.
#[test]
fn gradual_pruning_runs_from_a_quarter_to_three_quarters() {
    let span = |start, end| PruneSpan { start, end };
    assert_eq!(span(None, 0).of_run(900), (225, 675));
    assert_eq!(span(Some(0), 0).of_run(900), (0, 675), "a start of its own stays, 0 as well");
    assert_eq!(span(None, 300).of_run(900), (100, 300), "as a third of the end, so also where that is early");
    assert_eq!(span(Some(899), 0).of_run(900), (899, 900));
    for steps in 0..8 {
        let (start, end) = span(None, 0).of_run(steps);
        assert!(start < end, "a run of {steps} steps");
    }
}
