//! The planner against training times that others published. `cargo bench -p espalier-plan --bench published`
//! prints the tables.

#[path = "../benches/published/tables.rs"]
#[allow(dead_code, reason = "the program that prints them uses the rest")]
mod tables;

use tables::{Table, megatron, mosaic, samo};

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

/// Dense and pruned, in all eight cells.
#[test]
fn samo_on_summit() {
    for held_out in [false, true] {
        let errors = errors(&samo(), held_out);
        assert!(errors.iter().all(|error| *error < 0.15), "{errors:?}");
    }
}
