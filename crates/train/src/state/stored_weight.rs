//! How a weight is stored: the form that it has while no block that uses it runs.
//!
//! Kernels read dense weights, but each only while its block runs. Between, a pruned one may be its kept
//! values behind the mask, which are all that the optimizer changes; and one that is pruned before anything
//! else is done with it may not exist at all: its first values are a function of seed, name and position, made
//! whenever they are asked for.

use espalier_nn::weights::{fresh, fresh_kept};
use espalier_plan::{Shard, spec};
use espalier_tensor::ops::compress::{Compressed, compress, expand_into};
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Error, Mask, Tensor};

/// The form in which a weight is stored.
#[derive(Debug)]
pub(super) enum StoredForm {
    /// On another stage.
    Elsewhere,
    /// Not initialised yet.
    Initial(Box<InitialWeight>),
    /// As kernels read it, zero where it is pruned.
    Dense(Tensor),
    /// The values that its mask keeps, in order.
    Compressed(Tensor),
}

impl StoredForm {
    pub fn name(&self) -> &'static str {
        match self {
            StoredForm::Elsewhere => "on another stage",
            StoredForm::Initial(_) => "not initialised yet",
            StoredForm::Dense(_) => "dense",
            StoredForm::Compressed(_) => "compressed",
        }
    }

    fn tensor_mut(&mut self) -> Option<&mut Tensor> {
        match self {
            StoredForm::Dense(tensor) | StoredForm::Compressed(tensor) => Some(tensor),
            StoredForm::Elsewhere | StoredForm::Initial(_) => None,
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
    pub fn init(&self, category: Category) -> Result<Tensor, Error> {
        fresh(&self.parameter, &self.shard, &self.device, self.dtype, self.seed, category)
    }

    pub(crate) fn init_kept(&self, mask: &Mask, category: Category) -> Result<Tensor, Error> {
        fresh_kept(&self.parameter, &self.shard, mask, self.dtype, self.seed, category)
    }
}

/// A weight as it is stored, with what says which of it is kept.
#[derive(Debug)]
pub(super) struct StoredWeight {
    pub form: StoredForm,
    /// Which weights are kept; none while all are.
    pub mask: Option<Mask>,
    /// Where it is multiplied without its zeros: where the others are.
    pub sparse: Option<SparseWeight>,
    /// That of the dense weight.
    pub shape: Vec<usize>,
}

impl StoredWeight {
    pub fn new(form: StoredForm, shape: Vec<usize>) -> StoredWeight {
        StoredWeight { form, mask: None, sparse: None, shape }
    }

    pub fn is_here(&self) -> bool {
        !matches!(self.form, StoredForm::Elsewhere)
    }

    /// Its memory: dense, or kept values; none where it is not initialised, or elsewhere.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.form {
            StoredForm::Dense(tensor) | StoredForm::Compressed(tensor) => Some(tensor),
            StoredForm::Elsewhere | StoredForm::Initial(_) => None,
        }
    }

    /// Where it is, and in which type. It must be here.
    pub fn device_and_dtype(&self) -> (Device, DType) {
        match &self.form {
            StoredForm::Dense(tensor) | StoredForm::Compressed(tensor) => (tensor.device(), tensor.dtype()),
            StoredForm::Initial(initial) => (initial.device.clone(), initial.dtype),
            StoredForm::Elsewhere => panic!("a parameter of another stage"),
        }
    }

    /// Its kept values, where it is stored as these.
    pub fn compressed(&self) -> Option<Compressed<'_>> {
        match (&self.form, &self.mask) {
            (StoredForm::Compressed(kept), Some(mask)) => Some(Compressed { kept, mask, shape: &self.shape }),
            _ => None,
        }
    }

    /// All of it, dense; what is made for that is of this category. It must be here.
    pub fn dense(&self, category: Category) -> Result<Tensor, Error> {
        match (&self.form, self.compressed()) {
            (StoredForm::Dense(tensor), _) => Ok(tensor.clone()),
            (StoredForm::Initial(initial), _) => initial.init(category),
            (_, Some(compressed)) => compressed.expand(category),
            _ => panic!("a parameter of another stage"),
        }
    }

    /// A copy with memory of its own, under the same mask.
    pub fn duplicate(&self, category: Category) -> Result<StoredWeight, Error> {
        let form = match &self.form {
            StoredForm::Elsewhere => StoredForm::Elsewhere,
            StoredForm::Initial(initial) => StoredForm::Initial(initial.clone()),
            StoredForm::Dense(tensor) => StoredForm::Dense(tensor.duplicate(category)?),
            StoredForm::Compressed(kept) => StoredForm::Compressed(kept.duplicate(category)?),
        };
        let (mask, sparse, shape) = (self.mask.clone(), self.sparse.clone(), self.shape.clone());
        Ok(StoredWeight { form, mask, sparse, shape })
    }

    /// The form that it has under a new mask, where that is another: kept values if `compresses`, unless all
    /// are kept. What a dense one has where nothing is kept is left as it is.
    fn form_under(&self, new: &Mask, compresses: bool) -> Result<Option<StoredForm>, Error> {
        // Workspace until it replaces the old one.
        let category = Category::Workspace;
        let keeps_all = new.kept() == new.len();
        Ok(match &self.form {
            StoredForm::Elsewhere => None,
            StoredForm::Dense(_) if !compresses || keeps_all => None,
            StoredForm::Dense(weight) => Some(StoredForm::Compressed(compress(weight, new, category)?)),
            StoredForm::Initial(initial) if !compresses || keeps_all => {
                Some(StoredForm::Dense(initial.init(category)?))
            }
            StoredForm::Initial(initial) => Some(StoredForm::Compressed(initial.init_kept(new, category)?)),
            StoredForm::Compressed(_) if keeps_all => Some(StoredForm::Dense(self.dense(category)?)),
            StoredForm::Compressed(_) => {
                Some(StoredForm::Compressed(compress(&self.dense(category)?, new, category)?))
            }
        })
    }

    /// Puts it under a mask, whose only owner this is.
    pub fn set_mask(&mut self, mask: Mask, compresses: bool) -> Result<&Mask, Error> {
        let form = self.form_under(&mask, compresses)?;
        // The old mask and its pattern go before the new ones are counted, and so does the old weight.
        (self.mask, self.sparse) = (None, None);
        if let Some(form) = form {
            self.replace(form);
        }
        let mask = self.mask.insert(mask);
        mask.tag_memory();
        Ok(mask)
    }

    /// Gives it a new form, which is counted as a weight when the old one is gone.
    pub fn replace(&mut self, form: StoredForm) {
        self.form = StoredForm::Elsewhere;
        self.form = form;
        if let Some(tensor) = self.form.tensor_mut() {
            tensor.tag_memory(Category::Weights);
        }
    }

    /// Gives it other values, all of them dense; under a mask it stays compressed.
    pub fn write(&mut self, dense: Tensor) -> Result<(), Error> {
        let form = match self.compressed() {
            Some(Compressed { mask, .. }) => {
                StoredForm::Compressed(compress(&dense, mask, Category::Workspace)?)
            }
            None => StoredForm::Dense(dense),
        };
        self.replace(form);
        Ok(())
    }

    /// Allocates memory for values that are about to be read, where there is none yet.
    pub(crate) fn allocate(&mut self) -> Result<(), Error> {
        if let StoredForm::Initial(initial) = &self.form {
            let empty = Tensor::zeros(&initial.device, &self.shape, initial.dtype, Category::Weights)?;
            self.form = StoredForm::Dense(empty);
        }
        Ok(())
    }

    /// Writes new values of what its mask keeps to their positions in a dense weight.
    pub(crate) fn set_kept(&mut self, values: &Tensor) -> Result<(), Error> {
        match (&mut self.form, &self.mask) {
            (StoredForm::Dense(weight), Some(mask)) => expand_into(values, mask, weight),
            (other, _) => panic!("kept values of a weight that is {}", other.name()),
        }
    }
}
