//! `--profile`: where the GPU's time went, by family of kernels, and how near the products came to its matrix
//! rate.

use std::time::Instant;

use anyhow::Result;
use espalier_plan::spec::Precision;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, Device, Tensor};

use crate::output::{print_err, print_out};

/// Steps left out: kernels are compiled and products tried out in the first ones.
pub const WARM_UP: u64 = 3;

/// Prints the table for the steps after the warm-up.
pub fn report(device: &Device, steps: u64, precision: Precision, step_ms: Option<f64>) -> Result<()> {
    let Device::Cuda(cuda) = device else {
        print_err!("profile: only GPU kernels are profiled; on the CPU, use perf");
        return Ok(());
    };
    let (profile, data_wait) = (cuda.take_profile()?, cuda.take_data_wait());
    if profile.is_empty() {
        print_err!("profile: the run has no steps after its {WARM_UP} warm-up steps");
        return Ok(());
    }
    let rate = matrix_rate(cuda, precision)?;
    let steps = steps as f64;
    let total: f64 = profile.values().map(|one| one.seconds).sum();
    let mut rows: Vec<_> = profile.into_iter().collect();
    rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    print_out!("\n{:<16}{:>12}{:>12}{:>9}", "GPU time", "launches", "ms/step", "of total");
    for (family, one) in rows {
        let speed = if one.flops > 0.0 {
            let reached = one.flops / one.seconds;
            format!("  {:.0} TFLOP/s, {:.0} % of {:.0}", reached / 1e12, 100.0 * reached / rate, rate / 1e12)
        } else {
            String::new()
        };
        print_out!(
            "  {family:<14}{:>12.0}{:>12.3}{:>7.1} %{speed}",
            one.launches as f64 / steps,
            one.seconds * 1e3 / steps,
            100.0 * one.seconds / total,
        );
    }
    print_out!("  {:<14}{:>12}{:>12.3}", "total", "", total * 1e3 / steps);
    if let Some(step) = step_ms {
        print_out!("  {step:.3} ms/step measured, including a small overhead of profiling");
        let waited = data_wait * 1e3 / steps;
        let share = 100.0 * waited / step;
        print_out!("  {waited:.3} ms/step ({share:.1} %) the host had to wait for its batch of samples");
    }
    Ok(())
}

/// Flops a second of a large product in this precision, after the run has warmed the GPU.
fn matrix_rate(cuda: &Cuda, precision: Precision) -> Result<f64> {
    let (n, dtype, device) = (8192, espalier_nn::dtype(precision), Device::Cuda(cuda.clone()));
    // Zeros would cost less power than numbers do, and the GPU would run faster than it ever does.
    let noise: Vec<f32> = (0..n * n).map(|i| ((i * 2_654_435_761) % 2001) as f32 / 1000.0 - 1.0).collect();
    let (a, b) = (
        Tensor::from_f32(&device, &[n, n], dtype, &noise, Category::Workspace)?,
        Tensor::from_f32(&device, &[n, n], dtype, &noise, Category::Workspace)?,
    );
    let product = || matmul(&a, b.t(), None, Category::Workspace);
    for _ in 0..3 {
        product()?;
    }
    device.synchronize()?;
    let (begin, rounds) = (Instant::now(), 10);
    for _ in 0..rounds {
        product()?;
    }
    device.synchronize()?;
    Ok(2.0 * (n as f64).powi(3) * f64::from(rounds) / begin.elapsed().as_secs_f64())
}
