//! How the kernels of `attention.cu` and `attention_f32.cu` are launched.
//!
//! Both sources hold the same three kernels, built once per head size (`-DHEAD=..`), and a launch needs three
//! numbers of each: the rows a block owns, its threads, and its dynamic shared memory (more than 48 KiB has to be
//! allowed by `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` first). `attention.cu` exports the same numbers
//! as `attention_geometry: [3][3] i32`, so that a test on a device can compare them with these.
//!
//! | kernel | arguments | grid |
//! |---|---|---|
//! | `attention_forward` | qkv, y, logsumexp, seq: i32, heads: i32 | `forward.blocks(..)` |
//! | `attention_backward_query` | qkv, y, dy, logsumexp, rows, dqkv, seq, heads | `query.blocks(..)` |
//! | `attention_backward_key` | qkv, dy, rows, dqkv, seq, heads | `key.blocks(..)` |
//!
//! The f32 kernels carry `_f32` after these names. The backward runs query first, then key, on one stream:
//! the first writes `rows` (`workspace_bytes`), which the second reads. Nothing needs to be zeroed.

/// The numbers of one kernel's launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Rows of queries (or keys) that a block owns.
    pub rows: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: usize,
}

impl Launch {
    /// The one-dimensional grid.
    pub fn blocks(self, batch: usize, heads: usize, seq: usize) -> usize {
        seq.div_ceil(self.rows) * heads * batch
    }
}

/// The three kernels of one head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launches {
    pub forward: Launch,
    pub query: Launch,
    pub key: Launch,
}

/// The tensor-core kernels. `None` where no kernel is built for the head size.
///
/// Heads of 96 and 128 need 108 and 129 KiB for the key kernel: an A100 or a Hopper card has them, the smaller
/// cards of capability 8.6 and 8.9 (99 KiB) do not.
pub fn bf16(head: usize) -> Option<Launches> {
    if ![32, 64, 80, 96, 128].contains(&head) {
        return None;
    }
    // A row of a tile: swizzled where it is a power of two long, else padded by 16 bytes.
    let pitch = if head.is_power_of_two() { 2 * head } else { 2 * head + 16 };
    let (rows, tile) = (128, if head <= 64 { 64 } else { 32 });
    let stage = 2 * tile * pitch;
    let numbers = tile * 8;
    let key = if head <= 64 {
        Launch { rows, threads: 128, shared: 2 * rows * pitch + 2 * (stage + numbers) }
    } else {
        // Four pairs of warps, a ring of three stages, and two notes of 2 KiB for each pair.
        Launch { rows, threads: 256, shared: 2 * rows * pitch + 3 * (stage + numbers) + 4 * 2 * 2048 }
    };
    Some(Launches {
        forward: Launch { rows, threads: 128, shared: rows * pitch + 2 * stage },
        query: Launch { rows, threads: 128, shared: 2 * rows * pitch + 2 * stage },
        key,
    })
}

/// The plain kernels. `None` for heads wider than 128.
pub fn f32(head: usize) -> Option<Launches> {
    let tiles = |count: usize| Launch { rows: 32, threads: 256, shared: count * 32 * (head + 1) * 4 };
    (1..=128).contains(&head).then(|| Launches { forward: tiles(3), query: tiles(4), key: tiles(4) })
}

/// Bytes of `rows`, the f32 workspace `[batch, heads, seq, 2]` of the backward, for either element type.
pub fn workspace_bytes(batch: usize, heads: usize, seq: usize) -> usize {
    batch * heads * seq * 2 * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Protects the agreement with `attention.cu`: these are the numbers its modules export.
    #[test]
    fn geometry_is_that_of_the_kernels() {
        let shared = |head| bf16(head).map(|l| [l.forward.shared, l.query.shared, l.key.shared]);
        assert_eq!(shared(32), Some([24576, 32768, 33792]));
        assert_eq!(shared(64), Some([49152, 65536, 66560]));
        assert_eq!(shared(80), Some([45056, 67584, 96000]));
        assert_eq!(shared(96), Some([53248, 79872, 110336]));
        assert_eq!(shared(128), Some([65536, 98304, 131840]));
        assert_eq!(bf16(48), None);
        assert_eq!(
            bf16(128).map(|l| (l.forward.threads, l.query.threads, l.key.threads)),
            Some((128, 128, 256))
        );
    }

    /// Protects the last, partly filled block of a sequence.
    #[test]
    fn a_partial_block_is_launched() {
        let forward = bf16(64).expect("a built head size").forward;
        assert_eq!(forward.blocks(2, 3, 1), 6);
        assert_eq!(forward.blocks(2, 3, 128), 6);
        assert_eq!(forward.blocks(2, 3, 129), 12);
    }
}
