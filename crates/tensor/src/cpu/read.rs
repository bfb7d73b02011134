//! Reading memory and doing next to nothing with it: what the speed of an operation that waits for memory is
//! compared with.

use super::Cpu;
use crate::simd;

/// Numbers of a task.
const CHUNK: usize = 1 << 20;
/// Streams of a chunk that are read at once: a stream by itself does not reach the memory's bandwidth.
const STREAMS: usize = 8;
const LANES: usize = 16;

impl Cpu {
    /// Reads all of `numbers` once, over all threads; their sum, so that nobody can leave the reading out.
    pub fn read(&self, numbers: &[f32]) -> f32 {
        self.map_chunks(numbers.len(), CHUNK, |at| read(self.isa(), &numbers[at])).into_iter().sum()
    }
}

simd! {
    fn read(numbers: &[f32]) -> f32 {
        let segment = numbers.len() / STREAMS;
        let streams: [&[f32]; STREAMS] = std::array::from_fn(|s| &numbers[s * segment..(s + 1) * segment]);
        let mut sums = [0f32; LANES];
        for at in (0..segment - segment % LANES).step_by(LANES) {
            for stream in streams {
                sums.iter_mut().zip(&stream[at..at + LANES]).for_each(|(sum, x)| *sum += x);
            }
        }
        let rests = streams.into_iter().map(|stream| &stream[segment - segment % LANES..]);
        let rests: f32 = rests.chain([&numbers[STREAMS * segment..]]).flatten().sum();
        sums.into_iter().sum::<f32>() + rests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_once() {
        let cpu = Cpu::new(2).unwrap();
        for length in [0, 1, 7, 8, 127, 128, 129, 1000, CHUNK + 1003] {
            // Small whole numbers, whose sums are exact.
            let numbers: Vec<f32> = (0..length).map(|i| (i % 5) as f32).collect();
            let expected: usize = (0..length).map(|i| i % 5).sum();
            assert_eq!(cpu.read(&numbers), expected as f32, "{length} numbers");
        }
    }
}
