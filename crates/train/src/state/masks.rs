//! Which weights of a model are kept: a mask for each parameter that is pruned.

use espalier_nn::weights::ParameterId;
use espalier_tensor::Mask;

use crate::Result;

/// The masks of a model; without one a parameter is dense.
#[derive(Debug, Clone, Default)]
pub struct Masks {
    masks: Vec<Option<Mask>>,
    compressed: bool,
}

impl Masks {
    /// None yet, for so many parameters. `compressed` says whether gradients and state will hold kept weights alone.
    pub fn new(parameters: usize, compressed: bool) -> Masks {
        Masks { masks: vec![None; parameters], compressed }
    }

    /// Whether gradients and state of masked parameters hold kept weights alone.
    pub fn compress(&self) -> bool {
        self.compressed
    }

    /// Parameters of the model, masked or not.
    pub fn parameters(&self) -> usize {
        self.masks.len()
    }

    /// Whether nothing is pruned.
    pub fn is_empty(&self) -> bool {
        self.masks.iter().all(Option::is_none)
    }

    /// A parameter's mask; none while all of it is kept.
    pub fn get(&self, id: ParameterId) -> Option<&Mask> {
        self.masks[id.0].as_ref()
    }

    /// The mask by which a parameter's gradient and state are compressed.
    pub fn compressing(&self, id: ParameterId) -> Option<&Mask> {
        self.get(id).filter(|_| self.compressed)
    }

    /// Gives a parameter a mask, whose only owner this is: the old one goes before it is booked as one.
    pub fn set(&mut self, id: ParameterId, mask: Mask) -> &Mask {
        let place = &mut self.masks[id.0];
        *place = None;
        let mask = place.insert(mask);
        mask.book();
        mask
    }

    /// All masks.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Mask)> {
        self.masks.iter().enumerate().filter_map(|(i, mask)| Some((ParameterId(i), mask.as_ref()?)))
    }

    /// Bytes of all masks.
    pub fn bytes(&self) -> usize {
        self.iter().map(|(_, mask)| mask.bytes()).sum()
    }

    /// blake3 of all bits in the order of the parameters: ranks compare it to know that they prune alike.
    pub fn hash(&self) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        for (id, mask) in self.iter() {
            hasher.update(&(id.0 as u64).to_le_bytes());
            for word in mask.read_words()? {
                hasher.update(&word.to_le_bytes());
            }
        }
        Ok(hasher.finalize().to_hex().to_string())
    }
}
