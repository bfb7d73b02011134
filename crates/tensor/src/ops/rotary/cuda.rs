//! Rotations on a GPU.

use crate::cuda::{Args, Build, Cuda, KernelSource};
use crate::error::Result;
use crate::ops::attention::AttentionDims;
use crate::ops::lanes::{self, THREADS};
use crate::ops::position::Position;
use crate::tensor::Tensor;

pub(crate) static SOURCE: KernelSource =
    lanes::source("rotary.cu", include_str!("../rotary.cu"), Build::FLOATS);

pub(super) fn turn(
    cuda: &Cuda,
    x: &mut Tensor,
    table: &Tensor,
    first: Option<&Position>,
    z: &AttentionDims,
    sense: f32,
) -> Result<()> {
    let (rows, rotated) = (z.batch * z.t, z.heads + z.kv_heads);
    let threads = rows * rotated * (z.d / 2 / lanes::width(z.d / 2, x.dtype()));
    let kernel = cuda.kernel(&SOURCE, Build::of(x.dtype()), "rotary_turn")?;
    let args = Args::new().output(x).input(table).optional_input(first.map(Position::on_gpu)).size(rows);
    let args = args.i32(z.t as i32).i32(rotated as i32).i32((z.heads + 2 * z.kv_heads) as i32);
    let args = args.i32(z.d as i32).f32(sense);
    // SAFETY: x is [rows, heads + 2 kv_heads, d], of which the first `rotated` heads have a thread for every
    // group of pairs; the table has a row of d for each of the t positions behind the first, as was checked.
    unsafe { kernel.launch(lanes::blocks(threads, THREADS as usize), THREADS, 0, args) }
}
