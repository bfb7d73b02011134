//! The planner against training times that others published. `cargo bench -p espalier-plan --bench published`
//! prints the tables.

#[path = "../benches/published/tables.rs"]
#[allow(dead_code, reason = "the program that prints them uses the rest")]
mod tables;

use espalier_plan::simulate::Accuracy;
use tables::{Table, megatron, mosaic, samo, spatial};

/// Errors of the rows that constants were fitted without, or with.
fn errors(table: &Table, held_out: bool) -> Vec<f64> {
    let rows = table.rows.iter().filter(|row| row.held_out == held_out);
    rows.map(|row| (table.predict(row) / row.seconds - 1.0).abs()).collect()
}

fn mean(errors: &[f64]) -> f64 {
    errors.iter().sum::<f64>() / errors.len() as f64
}

/// Half of the models were kept out of the fit.
#[test]
fn fully_sharded_runs_on_h100() {
    let (fitted, held_out) = (errors(&mosaic(), false), errors(&mosaic(), true));
    assert!(mean(&fitted) < 0.04, "{fitted:?}");
    assert!(mean(&held_out) < 0.05, "{held_out:?}");
}

/// Tensor, pipeline and data parallelism, with and without recomputation and sequence parallelism.
#[test]
fn megatron_on_a100() {
    for held_out in [false, true] {
        let errors = errors(&megatron(), held_out);
        assert!(errors.iter().all(|error| *error < 0.1), "{errors:?}");
    }
}

/// AxoNN, SAMO and Sputnik in all twelve cells; DeepSpeed-3D, whose layouts are not published, a little
/// further off.
#[test]
fn samo_on_summit() {
    let table = samo();
    for row in &table.rows {
        let (error, most) = (
            (table.predict(row) / row.seconds - 1.0).abs(),
            if row.name.starts_with("deepspeed") { 0.2 } else { 0.1 },
        );
        assert!(error < most, "{}: {error}", row.name);
    }
}

/// Halos cost as much on small images as was measured.
#[test]
fn tiles_of_a_convolution_on_v100() {
    for (side, gpus, [seen, said]) in spatial() {
        assert!((said / seen - 1.0).abs() < 0.15, "{side} on {gpus}: {seen} {said}");
    }
}

/// Nine of ten rows that constants were not fitted to are within the error bar of their engine.
#[test]
fn error_bars_are_what_held_out_rows_show() {
    for (table, (engines, bar)) in [mosaic(), megatron(), samo()].iter().zip(Accuracy::PUBLISHED) {
        let errors = errors(table, true);
        let within = errors.iter().filter(|error| **error <= bar.error).count();
        assert!(10 * within >= 9 * errors.len(), "{engines:?}: {errors:?}");
        // And not much wider than they have to be.
        let most = errors.iter().filter(|error| **error <= bar.error).fold(0.0, |a: f64, b| a.max(*b));
        assert!(most > 0.6 * bar.error, "{engines:?}: {most}");
    }
}
