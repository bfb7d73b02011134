//! A weight at rest: in the form that it has while no block that uses it runs.
//!
//! Kernels read dense weights, but each only while its block runs. Between, a pruned one may be its kept
//! values behind the mask, which are all that the optimizer changes; and one that is pruned before anything
//! else is done with it may not exist at all: its first values are a function of seed, name and place, made
//! whenever they are asked for.

use espalier_nn::weights::{fresh, fresh_kept};
use espalier_plan::{Shard, spec};
use espalier_tensor::ops::compress::{Compressed, compress, expand_into};
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Error, Mask, Tensor};

/// The form of a weight at rest.
#[derive(Debug)]
pub(super) enum ParamWeight {
    /// Another stage's.
    Elsewhere,
    /// Not drawn yet.
    Initial(Box<InitialWeight>),
    /// As kernels read it, zero where it is pruned.
    Dense(Tensor),
    /// The values that its mask keeps, in order.
    Compressed(Tensor),
}

impl ParamWeight {
    pub fn name(&self) -> &'static str {
        match self {
            ParamWeight::Elsewhere => "on another stage",
            ParamWeight::Initial(_) => "not drawn yet",
            ParamWeight::Dense(_) => "dense",
            ParamWeight::Compressed(_) => "compressed",
        }
    }

    fn tensor_mut(&mut self) -> Option<&mut Tensor> {
        match self {
            ParamWeight::Dense(tensor) | ParamWeight::Compressed(tensor) => Some(tensor),
            ParamWeight::Elsewhere | ParamWeight::Initial(_) => None,
        }
    }
}

/// What the first values of a weight follow from.
#[derive(Debug, Clone)]
pub(super) struct InitialWeight {
    pub parameter: spec::Parameter,
    pub shard: Shard,
    pub device: Device,
    pub dtype: DType,
    pub seed: u64,
}

impl InitialWeight {
    pub fn draw(&self, category: Category) -> Result<Tensor, Error> {
        fresh(&self.parameter, &self.shard, &self.device, self.dtype, self.seed, category)
    }

    pub(crate) fn draw_kept(&self, mask: &Mask, category: Category) -> Result<Tensor, Error> {
        fresh_kept(&self.parameter, &self.shard, mask, self.dtype, self.seed, category)
    }
}

/// A weight at rest, with what says which of it is kept.
#[derive(Debug)]
pub(super) struct StoredWeight {
    pub stored: ParamWeight,
    /// Which weights are kept; none while all are.
    pub mask: Option<Mask>,
    /// Where it is multiplied without its zeros: where the others are.
    pub sparse: Option<SparseWeight>,
    /// That of the dense weight.
    pub shape: Vec<usize>,
}

impl StoredWeight {
    pub fn new(stored: ParamWeight, shape: Vec<usize>) -> StoredWeight {
        StoredWeight { stored, mask: None, sparse: None, shape }
    }

    pub fn is_here(&self) -> bool {
        !matches!(self.stored, ParamWeight::Elsewhere)
    }

    /// Its memory: dense, or kept values; none where it is not drawn, or elsewhere.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.stored {
            ParamWeight::Dense(tensor) | ParamWeight::Compressed(tensor) => Some(tensor),
            ParamWeight::Elsewhere | ParamWeight::Initial(_) => None,
        }
    }

    /// Where it rests, and in which type. It must be here.
    pub fn place(&self) -> (Device, DType) {
        match &self.stored {
            ParamWeight::Dense(tensor) | ParamWeight::Compressed(tensor) => (tensor.device(), tensor.dtype()),
            ParamWeight::Initial(initial) => (initial.device.clone(), initial.dtype),
            ParamWeight::Elsewhere => panic!("a parameter of another stage"),
        }
    }

    /// Its kept values, where it rests as these.
    pub fn compressed(&self) -> Option<Compressed<'_>> {
        match (&self.stored, &self.mask) {
            (ParamWeight::Compressed(kept), Some(mask)) => {
                Some(Compressed { kept, mask, shape: &self.shape })
            }
            _ => None,
        }
    }

    /// All of it, dense; what is made for that is of this category. It must be here.
    pub fn dense(&self, category: Category) -> Result<Tensor, Error> {
        match (&self.stored, self.compressed()) {
            (ParamWeight::Dense(tensor), _) => Ok(tensor.clone()),
            (ParamWeight::Initial(initial), _) => initial.draw(category),
            (_, Some(compressed)) => compressed.expand(category),
            _ => panic!("a parameter of another stage"),
        }
    }

    /// A copy with memory of its own, under the same mask.
    pub fn duplicate(&self, category: Category) -> Result<StoredWeight, Error> {
        let stored = match &self.stored {
            ParamWeight::Elsewhere => ParamWeight::Elsewhere,
            ParamWeight::Initial(initial) => ParamWeight::Initial(initial.clone()),
            ParamWeight::Dense(tensor) => ParamWeight::Dense(tensor.duplicate(category)?),
            ParamWeight::Compressed(kept) => ParamWeight::Compressed(kept.duplicate(category)?),
        };
        let (mask, sparse, shape) = (self.mask.clone(), self.sparse.clone(), self.shape.clone());
        Ok(StoredWeight { stored, mask, sparse, shape })
    }

    /// The form that it has under a new mask, where that is another: kept values if `compresses`, unless all
    /// are kept. What a dense one has where nothing is kept is left as it is.
    fn under(&self, new: &Mask, compresses: bool) -> Result<Option<ParamWeight>, Error> {
        // Workspace until it stands in the place of the old one.
        let category = Category::Workspace;
        let keeps_all = new.kept() == new.len();
        Ok(match &self.stored {
            ParamWeight::Elsewhere => None,
            ParamWeight::Dense(_) if !compresses || keeps_all => None,
            ParamWeight::Dense(weight) => Some(ParamWeight::Compressed(compress(weight, new, category)?)),
            ParamWeight::Initial(initial) if !compresses || keeps_all => {
                Some(ParamWeight::Dense(initial.draw(category)?))
            }
            ParamWeight::Initial(initial) => Some(ParamWeight::Compressed(initial.draw_kept(new, category)?)),
            ParamWeight::Compressed(_) if keeps_all => Some(ParamWeight::Dense(self.dense(category)?)),
            ParamWeight::Compressed(_) => {
                Some(ParamWeight::Compressed(compress(&self.dense(category)?, new, category)?))
            }
        })
    }

    /// Puts it under a mask, whose only owner this is.
    pub fn set_mask(&mut self, mask: Mask, compresses: bool) -> Result<&Mask, Error> {
        let stored = self.under(&mask, compresses)?;
        // The old mask and its pattern go before the new ones are booked, and so does the old weight.
        (self.mask, self.sparse) = (None, None);
        if let Some(stored) = stored {
            self.replace(stored);
        }
        let mask = self.mask.insert(mask);
        mask.tag_memory();
        Ok(mask)
    }

    /// Gives it a new form, which is booked as a weight when the old one is gone.
    pub fn replace(&mut self, stored: ParamWeight) {
        self.stored = ParamWeight::Elsewhere;
        self.stored = stored;
        if let Some(tensor) = self.stored.tensor_mut() {
            tensor.tag_memory(Category::Weights);
        }
    }

    /// Gives it other values, all of them dense; under a mask it rests as before.
    pub fn write(&mut self, dense: Tensor) -> Result<(), Error> {
        let stored = match self.compressed() {
            Some(Compressed { mask, .. }) => {
                ParamWeight::Compressed(compress(&dense, mask, Category::Workspace)?)
            }
            None => ParamWeight::Dense(dense),
        };
        self.replace(stored);
        Ok(())
    }

    /// Makes room for values that are about to be read, where there is none yet.
    pub(crate) fn make_room(&mut self) -> Result<(), Error> {
        if let ParamWeight::Initial(initial) = &self.stored {
            let room = Tensor::zeros(&initial.device, &self.shape, initial.dtype, Category::Weights)?;
            self.stored = ParamWeight::Dense(room);
        }
        Ok(())
    }

    /// Writes new values of what its mask keeps to their places in a dense weight.
    pub(crate) fn set_kept(&mut self, values: &Tensor) -> Result<(), Error> {
        match (&mut self.stored, &self.mask) {
            (ParamWeight::Dense(weight), Some(mask)) => expand_into(values, mask, weight),
            (other, _) => panic!("kept values of a weight that is {}", other.name()),
        }
    }
}
