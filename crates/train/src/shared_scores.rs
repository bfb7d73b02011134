//! What networks were scored by before their first step, kept for other runs that begin alike.
//!
//! SNIP passes over the whole training set, which takes longer than many a trial of a study. Runs of the same
//! seed begin with the same weights and meet the same samples, whatever their batch, sparsity and learning
//! rate: one of them makes the tensors that weights are scored by, and the others read them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use espalier_tensor::{Category, DType, Device, Tensor};

use crate::Result;

/// The most bytes of host memory that are kept; runs beyond that score by themselves.
const MOST_BYTES: usize = 1 << 30;

/// Of several runs, by what tells them apart where they begin.
#[derive(Debug, Default)]
pub struct SharedScores(Mutex<HashMap<String, Arc<Vec<HostTensor>>>>);

/// A shape, and numbers.
type HostTensor = (Vec<usize>, Vec<f32>);

/// Those of one beginning.
#[derive(Debug, Clone)]
pub struct ScoresOfRun {
    /// With those of others.
    pub shared: Arc<SharedScores>,
    /// What the run begins with.
    pub run: String,
}

impl SharedScores {
    /// Runs that have been scored.
    pub fn len(&self) -> usize {
        self.0.lock().expect("no panic while locked").len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ScoresOfRun {
    /// A tensor of f32 for each candidate: those of an earlier run that began alike, or what `make` makes.
    pub(crate) fn get_or_make(
        &self,
        device: &Device,
        make: impl FnOnce() -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let all = || self.shared.0.lock().expect("no panic while locked");
        let known = all().get(&self.run).cloned();
        if let Some(known) = known {
            let tensor = |(shape, values): &HostTensor| {
                Tensor::from_f32(device, shape, DType::F32, values, Category::Scoring)
            };
            return Ok(known.iter().map(tensor).collect::<Result<_, _>>()?);
        }
        let made = make()?;
        let bytes =
            |tensors: &[HostTensor]| 4 * tensors.iter().map(|(_, values)| values.len()).sum::<usize>();
        let read =
            |tensor: &Tensor| -> Result<HostTensor> { Ok((tensor.shape().to_vec(), tensor.read_f32()?)) };
        let scores = made.iter().map(read).collect::<Result<Vec<_>>>()?;
        let mut all = all();
        if all.values().map(|other| bytes(other)).sum::<usize>() + bytes(&scores) <= MOST_BYTES {
            all.insert(self.run.clone(), Arc::new(scores));
        }
        Ok(made)
    }
}
