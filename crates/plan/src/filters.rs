//! Filters of convolutions, the only tensors of four dimensions, lie in memory as
//! `[output, kernel, kernel, input]`, which is how tensor cores read them. PyTorch has them as
//! `[output, input, kernel, kernel]`: so they are in files of full tensors, which other programs read, and so they
//! are numbered where initial values follow from numbers, and where weights are hashed.

use std::borrow::Cow;

/// PyTorch's dimensions by their numbers in memory.
pub const PYTORCH_DIMS: [usize; 4] = [0, 3, 1, 2];

/// Whether PyTorch has them in another order: with one input, or one position, both are the same.
pub fn are_permuted(shape: &[usize]) -> bool {
    matches!(*shape, [_, height, width, input] if height * width > 1 && input > 1)
}

/// The shape that PyTorch has, of that in memory.
pub fn shape_in_pytorch(shape: &[usize]) -> Vec<usize> {
    match *shape {
        [output, height, width, input] => vec![output, input, height, width],
        _ => shape.to_vec(),
    }
}

/// The shape in memory, of that which PyTorch has.
pub fn shape_in_memory(shape: &[usize]) -> Vec<usize> {
    match *shape {
        [output, input, height, width] => vec![output, height, width, input],
        _ => shape.to_vec(),
    }
}

/// The number that PyTorch gives to the i-th element in memory of a tensor of this shape.
pub fn index_in_pytorch(shape: &[usize], i: usize) -> usize {
    let &[_, height, width, input] = shape else { return i };
    let (taps, filter) = (height * width, height * width * input);
    i / filter * filter + i % input * taps + i % filter / input
}

/// The bytes of a tensor of this shape in PyTorch's order, each number so many.
pub fn to_pytorch<'a>(bytes: Cow<'a, [u8]>, shape: &[usize], each: usize) -> Cow<'a, [u8]> {
    match *shape {
        [_, height, width, input] if are_permuted(shape) => {
            transpose(&bytes, height * width, input, each).into()
        }
        _ => bytes,
    }
}

/// What undoes [`to_pytorch`]; the shape is that in memory.
pub fn to_memory(bytes: Vec<u8>, shape: &[usize], each: usize) -> Vec<u8> {
    match *shape {
        [_, height, width, input] if are_permuted(shape) => transpose(&bytes, input, height * width, each),
        _ => bytes,
    }
}

/// Transposes matrices that follow each other, of numbers of so many bytes.
fn transpose(bytes: &[u8], rows: usize, columns: usize, each: usize) -> Vec<u8> {
    match each {
        1 => transpose_of::<1>(bytes, rows, columns),
        2 => transpose_of::<2>(bytes, rows, columns),
        4 => transpose_of::<4>(bytes, rows, columns),
        8 => transpose_of::<8>(bytes, rows, columns),
        _ => unreachable!("numbers of {each} bytes"),
    }
}

fn transpose_of<const EACH: usize>(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let numbers = bytes.as_chunks::<EACH>().0;
    let mut moved = Vec::with_capacity(numbers.len());
    for matrix in numbers.chunks_exact(rows * columns) {
        for column in 0..columns {
            for row in 0..rows {
                moved.push(matrix[row * columns + column]);
            }
        }
    }
    moved.into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shard;

    /// One filter, two positions of its kernel, three inputs: tens are inputs, ones positions.
    #[test]
    fn bytes_change_their_order_and_come_back() {
        let (memory, shape) = ([0, 10, 20, 1, 11, 21], [1, 1, 2, 3]);
        let moved = to_pytorch(memory[..].into(), &shape, 1);
        assert_eq!(moved[..], [0, 1, 10, 11, 20, 21]);
        assert_eq!(to_memory(moved.into_owned(), &shape, 1), memory);
        assert_eq!(to_pytorch(memory[..].into(), &[3, 2], 1)[..], memory);
        // Three filters, numbers of two bytes.
        let shape = [3, 2, 2, 5];
        let memory: Vec<u8> = (0..60u16).flat_map(u16::to_le_bytes).collect();
        let moved = to_pytorch(memory[..].into(), &shape, 2);
        let numbers: Vec<u16> = moved.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect();
        let expected = |number: usize| (0..60).find(|i| index_in_pytorch(&shape, *i) == number).unwrap();
        assert!(numbers.iter().enumerate().all(|(at, number)| usize::from(*number) == expected(at)));
        assert_eq!(to_memory(moved.into_owned(), &shape, 2), memory);
    }

    #[test]
    fn both_orders_name_the_same_elements() {
        // One filter, two positions of its kernel, three inputs.
        let in_pytorch = |shape: &[usize], n| (0..n).map(|i| index_in_pytorch(shape, i)).collect::<Vec<_>>();
        assert_eq!(in_pytorch(&[2, 1, 2, 3], 12), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(in_pytorch(&[4, 3], 12), (0..12).collect::<Vec<_>>());
        assert_eq!(shape_in_pytorch(&[5, 3, 4, 2]), [5, 2, 3, 4]);
        assert_eq!(shape_in_memory(&[5, 2, 3, 4]), [5, 3, 4, 2]);
        assert_eq!(shape_in_pytorch(&[5, 7]), [5, 7]);
        let permuted = [[4, 3, 3, 2], [4, 1, 1, 2], [4, 3, 3, 1]].map(|shape| are_permuted(&shape));
        assert_eq!(permuted, [true, false, false]);
    }

    /// The elements of a shard are the same, numbered either way.
    #[test]
    fn a_shard_is_permuted_as_its_tensor() {
        let shape = [4, 2, 3, 5];
        let shard = Shard::full(&shape).narrow(0, &[1..3]).narrow(3, &[0..1, 3..5]);
        let permuted = shard.permuted(PYTORCH_DIMS);
        assert_eq!((permuted.full_shape(), permuted.shape()), (&[4, 5, 2, 3][..], vec![2, 3, 2, 3]));
        let mut numbers: Vec<usize> =
            (0..shard.len()).map(|i| index_in_pytorch(&shape, shard.in_full(i))).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..shard.len()).map(|i| permuted.in_full(i)).collect::<Vec<_>>());
    }
}
