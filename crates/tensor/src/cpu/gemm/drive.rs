//! The loops. `b` is packed once, in chunks of columns, and shared by the threads; then each task takes a block of
//! rows and columns of `c`, packs its rows of `a` into its own cache, and calls the kernel tile by tile.
//!
//! Where `c` is small and `k` is long (the gradient of a convolution's weights), there are not enough blocks
//! for the threads: `k` is cut into chunks of a fixed length, whose sums are added in order.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::engine::{GemmKernel, PackedRows, fetch};
use super::finish::{TileOutput, finish};
use super::pack::PackSource;
use super::scratch::{self, GemmScratch};
use super::{GemmEpilogue, MatrixMut, MatrixRef};
use crate::cpu::activation::{ActivationFn, apply_in_place};
use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Float};

/// Bytes of `b` that are packed at once, unless 512 columns are more.
const SHARED_BYTES: usize = 16 << 20;
/// Bytes of packed `a` that a task keeps in the second-level cache.
const BLOCK_BYTES: usize = 1 << 20;
/// Columns of a task whose sums must wait for the next slab of depth.
const WAITING_COLS: usize = 512;
/// Products below this many multiplications stay on the calling thread.
const SMALL: usize = 1 << 19;
/// With so few columns, `a` is read where it lies if the kernel can: packing would not pay.
const IN_PLACE_COLS: usize = 128;
/// A `c` of so many bytes outgrows the second-level cache.
const STREAM_BYTES: usize = 2 << 20;
/// Length of a chunk where `k` is cut, and the largest `c` for which it is.
const CHUNK: usize = 4096;
const SMALL_OUT: usize = 1 << 16;

/// One product: operands, destination, and what to do on the way out.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmJob<'a, T, O> {
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: PackSource<T>,
    /// b by its columns, as panels of it are packed.
    b: PackSource<T>,
    out: TileOutput<O>,
    accumulate: bool,
    bias: Option<&'a [T]>,
    activation: Option<ActivationFn>,
    number: u64,
}

// SAFETY: operands are only read, and tasks write disjoint blocks of `out`.
unsafe impl<T: Sync, O: Send> Sync for GemmJob<'_, T, O> {}

impl<'a, T: Float, O: Float> GemmJob<'a, T, O> {
    /// Checks that everything lies inside its slice.
    pub fn new(
        isa: Isa,
        [m, n, k]: [usize; 3],
        a: MatrixRef<'a, T>,
        b: MatrixRef<'a, T>,
        c: MatrixMut<'a, O>,
        accumulate: bool,
        epilogue: GemmEpilogue<'a, T, O>,
    ) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        assert!(a.fits(m, k) && b.fits(k, n) && c.fits(m, n), "a product reaches beyond its operands");
        assert!(epilogue.bias.is_none_or(|bias| bias.len() == n), "a bias of another width");
        assert!(epilogue.pre.as_ref().is_none_or(|pre| pre.fits(m, n)), "pre-activations do not fit");
        let pre = epilogue.pre.map(|pre| (pre.data.as_mut_ptr(), pre.row_stride));
        GemmJob {
            isa,
            m,
            n,
            k,
            a: PackSource { at: a.data.as_ptr(), outer: a.row_stride, depth: a.col_stride },
            b: PackSource { at: b.data.as_ptr(), outer: b.col_stride, depth: b.row_stride },
            out: TileOutput { c: c.data.as_mut_ptr(), c_stride: c.row_stride, pre },
            accumulate,
            bias: epilogue.bias,
            activation: epilogue.activation,
            number: NUMBER.fetch_add(1, Relaxed),
        }
    }

    /// Whether there is nothing to do to a sum but to round it or to add it to `c`.
    fn plain(&self) -> bool {
        self.bias.is_none() && self.activation.is_none() && self.out.pre.is_none()
    }

    /// Hands finished sums of `rows` x `cols` at (i, j) on.
    fn finish(&self, (sums, i, j, rows, cols): (*mut f32, usize, usize, usize, usize), stride: usize) {
        let out = TileOutput {
            c: self.out.c.wrapping_add(i * self.out.c_stride + j),
            c_stride: self.out.c_stride,
            pre: self.out.pre.map(|(at, stride)| (at.wrapping_add(i * stride + j), stride)),
        };
        #[cfg(target_arch = "x86_64")]
        if self.isa.avx512().is_some() && O::DTYPE == DType::Bf16 && self.plain() && !self.accumulate {
            let stream = self.m * self.n * size_of::<O>() >= STREAM_BYTES;
            // SAFETY: the processor has the instructions; `O` is bf16.
            return unsafe { avx512::round(sums, stride, rows, cols, out.c.cast(), out.c_stride, stream) };
        }
        let bias = self.bias.map(|bias| &bias[j..j + cols]);
        finish(self.isa, sums, stride, rows, cols, out, self.accumulate, bias);
        if let Some(kind) = self.activation {
            for r in 0..rows {
                // SAFETY: this tile's rows of `c`, which no one else writes.
                let c = unsafe { std::slice::from_raw_parts_mut(out.c.add(r * out.c_stride), cols) };
                apply_in_place(self.isa, kind, c);
            }
        }
    }
}

/// Columns of `b` packed at once.
fn shared_cols<E: GemmKernel>(n: usize, k: usize) -> usize {
    let fit = SHARED_BYTES / (k.max(1) * size_of::<E::Cell>()) / E::COLS * E::COLS;
    fit.max(512).min(n.next_multiple_of(E::COLS))
}

/// Rows of a block of `a` that fits its cache.
fn block_rows<E: GemmKernel>(k: usize) -> usize {
    let depth = k.clamp(1, E::SLAB);
    (BLOCK_BYTES / (depth * size_of::<E::Cell>())).clamp(64, 1024)
}

/// Sums of a block that wait: how far apart its rows are, and how many there are in one of two buffers.
fn waiting_sums<E: GemmKernel>(k: usize, rows: usize, cols: usize) -> (usize, usize) {
    // Sums wait in a tile if one pass makes them, in a column of tiles within a slab, or else in a whole block.
    // 16 more than a power of two, so that rows do not all fall into the same set of the cache.
    let stride = if k <= E::SLAB { E::COLS } else { cols.next_multiple_of(E::COLS) + 16 };
    (stride, stride * if k <= E::DEPTH { E::rows(1) } else { rows.next_multiple_of(E::rows(1)) })
}

/// Bytes that [`block`] takes of a thread's scratch space.
fn block_bytes<E: GemmKernel>(k: usize, rows: usize, cols: usize) -> usize {
    let packed = rows.next_multiple_of(E::rows(1)) * k.min(E::SLAB).next_multiple_of(E::UNIT);
    packed * size_of::<E::Cell>() + 2 * waiting_sums::<E>(k, rows, cols).1 * size_of::<f32>()
}

/// Rows and columns of a block of [`serial`].
fn serial_block<E: GemmKernel>(m: usize, n: usize, k: usize) -> (usize, usize) {
    let rows = block_rows::<E>(k).next_multiple_of(E::rows(n)).min(m);
    (rows, if k > E::SLAB { WAITING_COLS } else { shared_cols::<E>(n, k) }.min(n))
}

/// Bytes that [`serial`] takes.
pub(super) fn serial_bytes<E: GemmKernel>(_: E, m: usize, n: usize, k: usize) -> usize {
    let panels = shared_cols::<E>(n, k) * k.next_multiple_of(E::UNIT) * size_of::<E::Cell>();
    let (rows, cols) = serial_block::<E>(m, n, k);
    panels + block_bytes::<E>(k, rows, cols)
}

/// Bytes that [`parallel`] takes at most: all threads that have a task are at work at once.
pub(super) fn parallel_bytes<E: GemmKernel>(engine: E, threads: usize, [m, n, k]: [usize; 3]) -> usize {
    if in_chunks(m, n, k) {
        let chunks = k.div_ceil(CHUNK);
        return m * n * chunks * size_of::<f32>() + chunks.min(threads) * serial_bytes(engine, m, n, CHUNK);
    }
    if on_one_thread(threads, m, n, k) {
        return serial_bytes(engine, m, n, k);
    }
    let shared = shared_cols::<E>(n, k);
    let tasks_of = |cols: usize| {
        let (rows, width) = task_size::<E>(threads, m, k, cols);
        let tasks = m.div_ceil(rows) * cols.div_ceil(width);
        tasks.min(threads) * block_bytes::<E>(k, rows.min(m), width.min(cols))
    };
    // The columns that are left over for the last chunk may be cut into other tasks.
    let rest = if n.is_multiple_of(shared) { 0 } else { tasks_of(n % shared) };
    shared * k.next_multiple_of(E::UNIT) * size_of::<E::Cell>() + tasks_of(shared.min(n)).max(rest)
}

/// Whether `k` is cut.
fn in_chunks(m: usize, n: usize, k: usize) -> bool {
    m * n <= SMALL_OUT && k >= 2 * CHUNK
}

fn on_one_thread(threads: usize, m: usize, n: usize, k: usize) -> bool {
    threads == 1 || m * n * k <= SMALL
}

/// The full product on this thread.
pub(super) fn serial<E: GemmKernel, T: Float, O: Float>(engine: E, job: &GemmJob<'_, T, O>) {
    let padded = job.k.next_multiple_of(E::UNIT);
    let shared_cols = shared_cols::<E>(job.n, job.k);
    let (rows, _) = serial_block::<E>(job.m, job.n, job.k);
    let rows = rows.max(1);
    scratch::with_shared(|space| {
        let panels: *mut E::Cell = space.alloc(shared_cols * padded);
        for j in (0..job.n).step_by(shared_cols) {
            let cols = j..job.n.min(j + shared_cols);
            // SAFETY: `panels` has room for all columns of the chunk; the operands hold what is read.
            unsafe { E::pack_b(job.b.from(j, 0), cols.len(), 0, job.k, padded, panels) };
            let width = if job.k > E::SLAB { WAITING_COLS } else { cols.len() };
            scratch::with(|scratch| {
                for i in (0..job.m).step_by(rows) {
                    for from in cols.clone().step_by(width) {
                        let tile_cols = from..cols.end.min(from + width);
                        let shared = panels.wrapping_add((tile_cols.start - j) * padded);
                        block(engine, job, shared, padded, i..job.m.min(i + rows), tile_cols, scratch);
                    }
                }
            });
        }
    });
}

/// The product over the threads of `cpu`.
pub(super) fn parallel<E: GemmKernel, T: Float, O: Float>(engine: E, cpu: &Cpu, job: &GemmJob<'_, T, O>) {
    if in_chunks(job.m, job.n, job.k) {
        return chunks_of_depth(engine, cpu, job);
    }
    if on_one_thread(cpu.threads(), job.m, job.n, job.k) {
        return serial(engine, job);
    }
    let padded = job.k.next_multiple_of(E::UNIT);
    let shared_cols = shared_cols::<E>(job.n, job.k);
    scratch::with_shared(|space| {
        let panels = SharedPtr(space.alloc::<E::Cell>(shared_cols * padded));
        for j in (0..job.n).step_by(shared_cols) {
            let cols = j..job.n.min(j + shared_cols);
            share_columns::<E, T, O>(cpu, job, &panels, padded, &cols);
            let (rows, width) = task_size::<E>(cpu.threads(), job.m, job.k, cols.len());
            let across = cols.len().div_ceil(width);
            // Neighbouring tasks share their rows of `a`; a thread takes neighbours, and packs them once.
            cpu.for_each(job.m.div_ceil(rows) * across, |task| {
                let (i, tile_cols) = (task / across * rows, j + task % across * width);
                let tile_cols = tile_cols..cols.end.min(tile_cols + width);
                let shared = panels.at().wrapping_add((tile_cols.start - j) * padded);
                scratch::with(|scratch| {
                    block(engine, job, shared, padded, i..job.m.min(i + rows), tile_cols, scratch)
                });
            });
        }
    });
}

/// Packs columns of `b`, in chunks of columns and depth.
fn share_columns<E: GemmKernel, T: Float, O: Float>(
    cpu: &Cpu,
    job: &GemmJob<'_, T, O>,
    panels: &SharedPtr<E::Cell>,
    padded: usize,
    cols: &Range<usize>,
) {
    const COLS: usize = 128;
    const DEPTH: usize = 512;
    let down = job.k.div_ceil(DEPTH);
    cpu.for_each(cols.len().div_ceil(COLS) * down, |task| {
        let (j, p) = (task / down * COLS, task % down * DEPTH);
        let (count, end) = ((cols.len() - j).min(COLS), job.k.min(p + DEPTH));
        // SAFETY: as in `serial`; tasks write disjoint ranges of the panels.
        unsafe {
            E::pack_b(job.b.from(cols.start + j, 0), count, p, end, padded, panels.at().add(j * padded))
        };
    });
}

/// Rows and columns of a task: as large as the cache allows, but several for each thread.
fn task_size<E: GemmKernel>(threads: usize, m: usize, k: usize, cols: usize) -> (usize, usize) {
    let tile_rows = E::rows(cols);
    let wanted = 4 * threads;
    let mut width = if k > E::SLAB { WAITING_COLS.min(cols) } else { cols };
    let mut rows = block_rows::<E>(k).min(m).next_multiple_of(tile_rows);
    let tasks = |rows: usize, width: usize| m.div_ceil(rows) * cols.div_ceil(width);
    while tasks(rows, width) < wanted && width >= 512 {
        width = (width / 2).next_multiple_of(E::COLS);
    }
    while tasks(rows, width) < wanted && rows >= 128 {
        rows = (rows / 2).next_multiple_of(tile_rows);
    }
    while tasks(rows, width) < wanted && width >= 4 * E::COLS {
        width = (width / 2).next_multiple_of(E::COLS);
    }
    (rows, width)
}

/// The product as a sum of products over chunks of `k`.
fn chunks_of_depth<E: GemmKernel, T: Float, O: Float>(engine: E, cpu: &Cpu, job: &GemmJob<'_, T, O>) {
    let (area, chunks) = (job.m * job.n, job.k.div_ceil(CHUNK));
    scratch::with_shared(|space| {
        let partial = SharedPtr(space.alloc::<f32>(area * chunks));
        cpu.for_each(chunks, |chunk| {
            let p = chunk * CHUNK;
            let partial_job = GemmJob {
                isa: job.isa,
                m: job.m,
                n: job.n,
                k: (job.k - p).min(CHUNK),
                a: job.a.from(0, p),
                b: job.b.from(0, p),
                out: TileOutput { c: partial.at().wrapping_add(chunk * area), c_stride: job.n, pre: None },
                accumulate: false,
                bias: None,
                activation: None,
                // Chunks differ in their operands: none may take another's packed rows for its own.
                number: job.number ^ ((chunk as u64 + 1) << 40),
            };
            serial(engine, &partial_job);
        });
        // SAFETY: all chunks are written, and the threads are done with them.
        let (sum, rest) =
            unsafe { std::slice::from_raw_parts_mut(partial.at(), area * chunks) }.split_at_mut(area);
        for addend in rest.chunks_exact(area) {
            sum.iter_mut().zip(addend).for_each(|(sum, x)| *sum += x);
        }
        job.finish((sum.as_mut_ptr(), 0, 0, job.m, job.n), job.n);
    });
}

/// Memory that several tasks write, each its own range.
struct SharedPtr<C>(*mut C);

// SAFETY: a task only touches the range that its number gives it.
unsafe impl<C> Sync for SharedPtr<C> {}

impl<C> SharedPtr<C> {
    fn at(&self) -> *mut C {
        self.0
    }
}

/// A block of `a` as the kernel will read it.
struct PackedBlock<C> {
    rows: PackedRows<C>,
    /// Elements from one row that begins a tile to the next, per row.
    outer: usize,
}

impl<C> PackedBlock<C> {
    /// Row `i`, which begins a tile, at depth `p`.
    fn at<E: GemmKernel>(&self, i: usize, p: usize) -> PackedRows<C> {
        let PackedRows { at, row, step, tile } = self.rows;
        PackedRows { at: at.wrapping_add(i * self.outer + p / E::UNIT * step), row, step, tile }
    }
}

/// Rows of `a` over one slab: where they lie if that is good enough, or else packed.
fn packed_block<E: GemmKernel, T: Float, O: Float>(
    job: &GemmJob<'_, T, O>,
    rows: &Range<usize>,
    slab: usize,
    depth: usize,
    cols: usize,
    scratch: &mut GemmScratch,
) -> PackedBlock<E::Cell> {
    let source = job.a.from(rows.start, slab);
    if cols <= IN_PLACE_COLS
        && let Some(placed) = E::in_place(source, rows.len(), depth)
    {
        return PackedBlock { rows: placed, outer: source.outer };
    }
    let padded = depth.next_multiple_of(E::UNIT);
    let at: *mut E::Cell = scratch.a.alloc(rows.len().next_multiple_of(E::rows(1)) * padded);
    let packed_id = Some((job.number, rows.start, slab));
    if scratch.packed_a != packed_id {
        // SAFETY: room for whole panels was just made; the operand holds these rows and depths.
        unsafe { E::pack_a(source, rows.len(), depth, padded, at) };
        scratch.packed_a = packed_id;
    }
    PackedBlock { rows: E::packed(at, padded), outer: padded }
}

/// One block of `c`. `panels` are the packed columns `cols`.
fn block<E: GemmKernel, T: Float, O: Float>(
    engine: E,
    job: &GemmJob<'_, T, O>,
    panels: *const E::Cell,
    padded: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: &mut GemmScratch,
) {
    let session = engine.begin();
    let (one_slab, one_pass) = (job.k <= E::SLAB, job.k <= E::DEPTH);
    let in_place = O::DTYPE == DType::F32 && job.plain();
    // A tile is finished after the next one has been started, so that the units for either have work: hence
    // two buffers.
    let (stride, buffer_len) = waiting_sums::<E>(job.k, rows.len(), cols.len());
    let sums: *mut f32 = scratch.sums.alloc(2 * buffer_len);
    let (mut second, mut unfinished) = (false, None);
    for slab in steps(0..job.k, E::SLAB) {
        let a = packed_block::<E, T, O>(job, &rows, slab.start, slab.len(), cols.len(), scratch);
        for j in cols.clone().step_by(E::COLS) {
            let width = (cols.end - j).min(E::COLS);
            let tile_rows = E::rows(width);
            let column = panels.wrapping_add((j - cols.start) * padded);
            second ^= !one_pass;
            for pass in steps(slab.clone(), E::DEPTH) {
                let (first, last) = (pass.start == 0, pass.end == job.k);
                let b = column.wrapping_add(E::depth_offset(pass.start, width));
                // What the next pass will read of `b` comes up from the third-level cache meanwhile.
                let next = match pass.end == slab.end {
                    true => column.wrapping_add(E::COLS * padded + E::depth_offset(slab.start, E::COLS)),
                    false => column.wrapping_add(E::depth_offset(pass.end, width)),
                };
                let bytes = pass.len() * E::COLS * size_of::<E::Cell>() / rows.len().div_ceil(tile_rows);
                for i in rows.clone().step_by(tile_rows) {
                    let height = (rows.end - i).min(tile_rows);
                    let a = a.at::<E>(i - rows.start, pass.start - slab.start);
                    fetch(next.cast::<u8>().wrapping_add((i - rows.start) / tile_rows * bytes), bytes);
                    // SAFETY: packed operands hold whole tiles; `sums` and `c` hold what a tile writes.
                    unsafe {
                        if in_place && (E::EXACT || (height.is_multiple_of(16) && width.is_multiple_of(16))) {
                            let at = job.out.c.cast::<f32>().add(i * job.out.c_stride + j);
                            let add = !first || job.accumulate;
                            E::tile(height, width, pass.len(), a, b, padded, at, job.out.c_stride, add);
                            continue;
                        }
                        second ^= one_pass;
                        let at = match (one_pass, one_slab) {
                            (true, _) => second as usize * buffer_len,
                            (_, true) => second as usize * buffer_len + (i - rows.start) * stride,
                            _ => (i - rows.start) * stride + (j - cols.start),
                        };
                        let at = sums.add(at);
                        E::tile(height, width, pass.len(), a, b, padded, at, stride, !first);
                        if last && let Some(before) = unfinished.replace((at, i, j, height, width)) {
                            job.finish(before, stride);
                        }
                    }
                }
            }
        }
    }
    if let Some(tile) = unfinished {
        job.finish(tile, stride);
    }
    #[cfg(target_arch = "x86_64")]
    avx512::fence();
    drop(session);
}

/// `range` in steps of at most `len`; an empty range is one empty step, so that a product of no depth writes
/// zeros.
fn steps(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let count = range.len().div_ceil(len).max(1);
    (0..count).map(move |i| range.start + i * len..range.end.min(range.start + (i + 1) * len))
}
