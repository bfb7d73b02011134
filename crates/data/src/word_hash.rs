//! A hash for words and pairs of ids that a tokenizer looks up for every few bytes of a text: a
//! multiplication for eight bytes (as Firefox's `FxHash`), where the standard one takes several rounds to be
//! safe against whoever chooses the keys.

use std::hash::{BuildHasherDefault, Hasher};

/// For maps of words and of pairs of ids.
pub(crate) type WordMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<WordHasher>>;

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct WordHasher(u64);

impl WordHasher {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (eights, rest) = bytes.as_chunks();
        eights.iter().for_each(|eight| self.add(u64::from_le_bytes(*eight)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.add(u64::from_le_bytes(last) ^ (rest.len() as u64) << 56);
    }

    fn write_u8(&mut self, byte: u8) {
        self.add(byte.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.add(word.into());
    }

    fn finish(&self) -> u64 {
        // Tables take the low bits, in which a product knows little of the high ones.
        self.0 ^ self.0 >> 32
    }
}
