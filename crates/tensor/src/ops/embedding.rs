//! Rows of a table by their number, and learned positions.
//!
//! ids: u32 `[b, t]`; table: `[v, c]`; x, dy: `[b, t, c]`; positions: `[context, c]`, first + t <= context.
//!
//! A table may be a shard of one whose other rows are elsewhere: then its first row has a number, and an id
//! that is not in it gives zeros and no gradient. Likewise x may begin at a later position.
//!
//! The gradient of a table adds up the rows of dy that share an id. They are first brought together by a counting
//! sort, so that each sum has one owner and a fixed order, without atomics.

pub(crate) mod cuda;

use crate::device::Device;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::Category;
use crate::ops::chunks::{self, CHUNK};
use crate::ops::elementwise::sum_into;
use crate::ops::position::Position;
use crate::ops::reduce::add_rows;
use crate::tensor::Tensor;
use crate::with_float;

/// Which rows of a table are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableRows {
    /// All: any other id is a mistake.
    All,
    /// Those from this one on; others are elsewhere.
    From(u32),
}

impl TableRows {
    fn first(self) -> u32 {
        match self {
            TableRows::All => 0,
            TableRows::From(first) => first,
        }
    }

    /// Where the row of an id is in the table; none where it is elsewhere.
    fn find(self, id: u32, vocab: usize) -> Option<usize> {
        match self {
            TableRows::All => Some(checked(id, vocab)),
            TableRows::From(first) => Some(id.checked_sub(first)? as usize).filter(|row| *row < vocab),
        }
    }
}

/// `y[b, t] = table[ids[b, t]]`. An id beyond the full table panics on the host and is a row of NaN on a GPU.
pub fn forward(ids: &Tensor, table: &Tensor, rows: TableRows) -> Result<Tensor> {
    let (vocab, c) = (table.rows(), table.width());
    let shape = [ids.shape(), &[c]].concat();
    let mut y = Tensor::empty(&table.device(), &shape, table.dtype(), Category::Transient)?;
    let cpu = match table.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            cuda::forward(&cuda, ids, table, rows, &mut y)?;
            return Ok(y);
        }
    };
    let ids = ids.slice::<u32>();
    with_float!(table.dtype(), T => {
        let table = table.slice::<T>();
        cpu.for_chunks(y.slice_mut::<T>(), chunks::rows(c) * c, |at, y| {
            for (y, &id) in y.chunks_exact_mut(c).zip(&ids[at.start / c..]) {
                match rows.find(id, vocab) {
                    Some(row) => y.copy_from_slice(&table[row * c..(row + 1) * c]),
                    None => y.fill(T::from_f32(0.0)),
                }
            }
        });
    });
    Ok(y)
}

/// dtable `[vocab, c]` in the type of dy: a row is the sum of the dy that have its id.
pub fn backward(ids: &Tensor, dy: &Tensor, vocab: usize, rows: TableRows) -> Result<Tensor> {
    let c = dy.width();
    assert_eq!(ids.len(), dy.rows(), "embedding: ids and dy");
    let cpu = match dy.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::backward(&cuda, ids, dy, vocab, rows),
    };
    let scratch = |len| Tensor::zeros(&dy.device(), &[len], DType::U32, Category::Workspace);
    let ids = ids.slice::<u32>();

    // Afterwards ends[i] is one past the end of row i in `order`, and the indices of one row ascend.
    let (mut ends, mut order) = (scratch(vocab + 1)?, scratch(ids.len())?);
    let (ends, order) = (ends.slice_mut::<u32>(), order.slice_mut::<u32>());
    for row in ids.iter().filter_map(|id| rows.find(*id, vocab)) {
        ends[row + 1] += 1;
    }
    for i in 0..vocab {
        ends[i + 1] += ends[i];
    }
    for (index, id) in ids.iter().enumerate() {
        let Some(row) = rows.find(*id, vocab) else { continue };
        let end = &mut ends[row];
        order[*end as usize] = index as u32;
        *end += 1;
    }
    let (ends, order) = (&*ends, &*order);

    let mut table = Tensor::empty(&dy.device(), &[vocab, c], dy.dtype(), Category::Workspace)?;
    with_float!(dy.dtype(), T => {
        let dy = dy.slice::<T>();
        let table = table.slice_mut::<T>();
        cpu.for_chunks(table, CHUNK, |_, table| table.fill(T::from_f32(0.0)));
        // A frequent id is split by columns. Most sums are short, so a thread takes some at a time.
        let present = table.chunks_mut(c.max(1)).enumerate().filter_map(|(id, row)| {
            let start = if id == 0 { 0 } else { ends[id - 1] };
            let occurrences = &order[start as usize..ends[id] as usize];
            (!occurrences.is_empty()).then_some((occurrences, row))
        });
        let mut sums: Vec<_> = present
            .flat_map(|(occurrences, row)| row.chunks_mut(SHARE).enumerate().map(move |(i, row)| (occurrences, i, row)))
            .collect();
        cpu.for_chunks(&mut sums, 8, |_, sums| {
            for (occurrences, i, row) in sums {
                add_rows(cpu.isa(), dy, c, *i * SHARE, occurrences.iter().map(|&index| index as usize), row);
            }
        });
    });
    Ok(table)
}

/// Columns of a row of the table that one task sums.
const SHARE: usize = 256;

/// `x[b, t] + table[first + t]`; overwrites x if nobody else holds it.
pub fn add_positions(x: Tensor, table: &Tensor, first: usize) -> Result<Tensor> {
    add_positions_behind(x, table, first, None)
}

/// The same in a sequence that is read in pieces: `first` counts from this position on.
pub fn add_positions_behind(
    x: Tensor,
    table: &Tensor,
    first: usize,
    behind: Option<&Position>,
) -> Result<Tensor> {
    let (t, c) = time_and_width(&x);
    let begin = first + behind.map_or(0, Position::at);
    assert!(
        table.width() == c && table.rows() >= begin + t,
        "positions: {:?} from {begin} on for {:?}",
        table.shape(),
        x.shape()
    );
    let cpu = match x.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => return cuda::add_positions(&cuda, x, table, t, first, behind),
    };
    let mut y = chunks::writable(x)?;
    with_float!(y.dtype(), T => with_float!(table.dtype(), U => {
        let table = table.slice::<U>();
        cpu.for_chunks(y.slice_mut::<T>(), chunks::rows(c) * c, |at, y| {
            for (i, y) in y.chunks_exact_mut(c).enumerate() {
                let position = begin + (at.start / c + i) % t;
                sum_into(cpu.isa(), &table[position * c..(position + 1) * c], y);
            }
        });
    }));
    Ok(y)
}

/// dtable `[context, c]` in the type of dy: the sum of dy over the batch; zero before `first` and beyond its t.
pub fn positions_backward(dy: &Tensor, context: usize, first: usize) -> Result<Tensor> {
    let (t, c) = time_and_width(dy);
    assert!(first + t <= context, "positions: {t} steps from {first} on in a context of {context}");
    let rows = dy.rows();
    let mut table = Tensor::empty(&dy.device(), &[context, c], dy.dtype(), Category::Workspace)?;
    let cpu = match dy.device() {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            cuda::positions_backward(&cuda, dy, &mut table, t, first)?;
            return Ok(table);
        }
    };
    with_float!(dy.dtype(), T => {
        let dy = dy.slice::<T>();
        cpu.for_chunks(table.slice_mut::<T>(), c.max(1), |at, row| {
            let places = match (at.start / c).checked_sub(first) {
                Some(step) if step < t => step..rows,
                _ => 0..0,
            };
            add_rows(cpu.isa(), dy, c, 0, places.step_by(t.max(1)), row);
        });
    });
    Ok(table)
}

/// The positions of tokens `first .. first + t` of each sequence, of those of all: u32 `[b, all]` to `[b, t]`.
pub fn positions_slice(positions: &Tensor, first: usize, t: usize) -> Result<Tensor> {
    let &[b, all] = positions.shape() else {
        panic!("positions: [b, t] was expected, got {:?}", positions.shape())
    };
    assert!(first + t <= all, "positions {first} to {} of {all}", first + t);
    if t == all {
        return Ok(positions.clone());
    }
    let mut slice = Tensor::empty(&positions.device(), &[b, t], DType::U32, Category::Transient)?;
    match positions.device() {
        Device::Cpu(_) => {
            let rows = positions.slice::<u32>().chunks_exact(all);
            for (row, slice) in rows.zip(slice.slice_mut::<u32>().chunks_exact_mut(t)) {
                slice.copy_from_slice(&row[first..first + t]);
            }
        }
        Device::Cuda(cuda) => cuda::positions_slice(&cuda, positions, &mut slice, all, first)?,
    }
    Ok(slice)
}

fn time_and_width(x: &Tensor) -> (usize, usize) {
    let &[_, t, c] = x.shape() else { panic!("positions: [b, t, c] was expected, got {:?}", x.shape()) };
    (t, c)
}

fn checked(id: u32, vocab: usize) -> usize {
    assert!((id as usize) < vocab, "embedding: id {id} in a table of {vocab} rows");
    id as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_like_host, devices, indices, integers, tensor, values};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn rows_are_found_and_their_gradients_gathered(
            b in 1usize..5, t in 1usize..60, c in 1usize..600, vocab in 1usize..90, spare in 0usize..4, seed: u64,
        ) {
            let ids = integers(seed, b * t, vocab);
            let table = values(seed, vocab * c, 1.0);
            let positions = values(seed ^ 1, (t + spare) * c, 1.0);
            let dy = values(seed ^ 2, b * t * c, 1.0);
            let mut y = vec![0.0; b * t * c];
            let mut shifted = y.clone();
            let (mut dtable, mut dplaces) = (vec![0.0; vocab * c], vec![0.0; (t + spare) * c]);
            for i in 0..b * t {
                for j in 0..c {
                    y[i * c + j] = f64::from(table[ids[i] as usize * c + j]);
                    shifted[i * c + j] = y[i * c + j] + f64::from(positions[i % t * c + j]);
                    dtable[ids[i] as usize * c + j] += f64::from(dy[i * c + j]);
                    dplaces[i % t * c + j] += f64::from(dy[i * c + j]);
                }
            }
            check(&[y, shifted, dtable, dplaces], |device, dtype| {
                let ids = indices(device, &[b, t], &ids);
                let y = forward(&ids, &tensor(device, dtype, &[vocab, c], &table), TableRows::All).unwrap();
                let positions = tensor(device, dtype, &[t + spare, c], &positions);
                let shifted = add_positions(y.clone(), &positions, 0).unwrap();
                let dy = tensor(device, dtype, &[b, t, c], &dy);
                let dtable = backward(&ids, &dy, vocab, TableRows::All).unwrap();
                vec![y, shifted, dtable, positions_backward(&dy, t + spare, 0).unwrap()]
            });
        }
    }

    /// Ids that are rare and one that is frequent, and positions of the other type.
    #[test]
    fn the_vocabulary_of_a_language_model() {
        let (b, t, c, vocab) = (2, 500, 96, 50_257);
        let ids: Vec<u32> = integers(1, b * t, vocab)
            .iter()
            .enumerate()
            .map(|(i, &id)| if i % 3 == 0 { 17 } else { id })
            .collect();
        let (table, positions) = (values(2, vocab * c, 1.0), values(3, 512 * c, 1.0));
        let dy = values(4, b * t * c, 1.0);
        check_like_host(|device, dtype| {
            let other = if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
            let ids = indices(device, &[b, t], &ids);
            let y = forward(&ids, &tensor(device, dtype, &[vocab, c], &table), TableRows::All).unwrap();
            let y = add_positions(y, &tensor(device, other, &[512, c], &positions), 0).unwrap();
            let dy = tensor(device, dtype, &[b, t, c], &dy);
            vec![
                y,
                backward(&ids, &dy, vocab, TableRows::All).unwrap(),
                positions_backward(&dy, 512, 0).unwrap(),
            ]
        });
    }

    #[test]
    fn positions_are_sliced() {
        for [device, ..] in devices() {
            let positions = indices(device, &[2, 5], &[0, 1, 2, 0, 1, 7, 8, 9, 10, 11]);
            let bytes: Vec<u8> = [2u32, 0, 9, 10].iter().flat_map(|x| x.to_ne_bytes()).collect();
            assert_eq!(positions_slice(&positions, 2, 2).unwrap().host_bytes(), bytes);
        }
    }

    /// Only the host checks an id in time to stop.
    #[test]
    #[should_panic(expected = "id 7 in a table of 7 rows")]
    fn an_id_beyond_the_table_is_named() {
        let device = &devices()[0][0];
        let _ = forward(
            &indices(device, &[1, 1], &[7]),
            &tensor(device, DType::F32, &[7, 1], &[0.0; 7]),
            TableRows::All,
        );
    }

    #[test]
    fn a_card_makes_nan_of_an_id_beyond_the_table_and_leaves_it_out_of_the_gradient() {
        for [device, ..] in devices().iter().filter(|devices| matches!(devices[0], Device::Cuda(_))) {
            let ids = indices(device, &[1, 3], &[7, 2, u32::MAX]);
            let y = forward(&ids, &tensor(device, DType::F32, &[7, 1], &[3.0; 7]), TableRows::All)
                .unwrap()
                .to_f32();
            assert!(y[0].is_nan() && y[1] == 3.0 && y[2].is_nan());
            let dtable =
                backward(&ids, &tensor(device, DType::F32, &[1, 3, 1], &[1.0; 3]), 7, TableRows::All)
                    .unwrap();
            assert_eq!(dtable.to_f32(), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        /// The shards of a table give terms of what the full table gives, and its gradient row by row; so do
        /// parts of a sequence.
        #[test]
        fn shards_of_a_table_and_of_a_sequence(
            b in 1usize..4, t in 2usize..20, c in 1usize..40, vocab in 2usize..60, at in 0.0f64..1.0, seed: u64,
        ) {
            let cut = 1 + (at * (vocab - 1) as f64) as usize;
            let (ids, table) = (integers(seed, b * t, vocab), values(seed, vocab * c, 1.0));
            let (dy, positions) = (values(seed ^ 1, b * t * c, 1.0), values(seed ^ 2, (t + 2) * c, 1.0));
            for [device, ..] in devices() {
                let (f32s, shape) = (DType::F32, [b, t, c]);
                let ids = indices(device, &[b, t], &ids);
                let dy = tensor(device, f32s, &shape, &dy);
                let [low, high] = [&table[..cut * c], &table[cut * c..]]
                    .map(|part| tensor(device, f32s, &[part.len() / c, c], part));
                let rows = [TableRows::From(0), TableRows::From(cut as u32)];
                let sum: Vec<f32> = [&low, &high].into_iter().zip(rows).fold(vec![0.0; b * t * c], |sum, (part, rows)| {
                    forward(&ids, part, rows).unwrap().to_f32().iter().zip(sum).map(|(a, b)| a + b).collect()
                });
                let full = tensor(device, f32s, &[vocab, c], &table);
                prop_assert_eq!(sum, forward(&ids, &full, TableRows::All).unwrap().to_f32());
                let parts = [cut, vocab - cut].into_iter().zip(rows).flat_map(|(vocab, rows)| backward(&ids, &dy, vocab, rows).unwrap().to_f32());
                prop_assert_eq!(parts.collect::<Vec<_>>(), backward(&ids, &dy, vocab, TableRows::All).unwrap().to_f32());
                // The sequence from position 2 on is the full one with a table that begins there.
                let positions_from = |from: usize| tensor(device, f32s, &[t + 2 - from, c], &positions[from * c..]);
                let late = add_positions(dy.clone(), &positions_from(0), 2).unwrap().to_f32();
                prop_assert_eq!(late, add_positions(dy.clone(), &positions_from(2), 0).unwrap().to_f32());
                let late = positions_backward(&dy, t + 2, 2).unwrap().to_f32();
                prop_assert!(late[..2 * c].iter().all(|x| *x == 0.0));
                prop_assert_eq!(&late[2 * c..], &positions_backward(&dy, t, 0).unwrap().to_f32()[..]);
            }
        }
    }
}
