//! How a weight is stored: the form that it has while no block that uses it runs.
//!
//! Kernels read dense weights, but each only while its block runs. Between, a pruned one may be its kept
//! values behind the mask, which are all that the optimizer changes; of these, or of all values of one that has
//! no mask, the ranks of a group may have a shard each; and one that is pruned before anything else is done
//! with it may not exist at all: its first values are a function of seed, name and position, made whenever they
//! are asked for.

use espalier_comm::Communicator;
use espalier_nn::weights::{ParameterId, fresh, fresh_kept};
use espalier_plan::{GroupRank, Shard, spec};
use espalier_tensor::ops::compress::{Compressed, compress, expand, expand_into};
use espalier_tensor::ops::flat;
use espalier_tensor::ops::sparse::SparseWeight;
use espalier_tensor::{Category, DType, Device, Error, Mask, Tensor};

use crate::shard_gather::{VectorShard, join};

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
    /// This rank's shard of these, or of all values where there is no mask: [`StoredWeight::sharding`].
    Sharded(Tensor),
}

/// The ranks that have shards of a weight.
#[derive(Debug, Clone)]
pub(super) struct WeightSharding {
    pub group: Communicator,
    /// Which of them this one is.
    pub member: GroupRank,
}

impl WeightSharding {
    /// This rank's shard of a weight's values.
    fn shard_of(&self, values: &Tensor) -> Result<Tensor, Error> {
        flat::take(values, self.member.split(values.len()), Category::Workspace)
    }
}

impl StoredForm {
    pub fn name(&self) -> &'static str {
        match self {
            StoredForm::Elsewhere => "on another stage",
            StoredForm::Initial(_) => "not initialised yet",
            StoredForm::Dense(_) => "dense",
            StoredForm::Compressed(_) => "compressed",
            StoredForm::Sharded(_) => "a shard",
        }
    }

    pub fn tensor_mut(&mut self) -> Option<&mut Tensor> {
        match self {
            StoredForm::Dense(tensor) | StoredForm::Compressed(tensor) | StoredForm::Sharded(tensor) => {
                Some(tensor)
            }
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
    /// Who has the other shards, where it is stored as one.
    pub sharding: Option<WeightSharding>,
}

impl StoredWeight {
    pub fn new(form: StoredForm, shape: Vec<usize>) -> StoredWeight {
        StoredWeight { form, mask: None, sparse: None, shape, sharding: None }
    }

    /// The same, of which ranks have a shard each. What is dense yet must be workspace, and becomes a shard.
    pub fn sharded(self, sharding: Option<WeightSharding>) -> Result<StoredWeight, Error> {
        let mut stored = StoredWeight { sharding, ..self };
        if let (StoredForm::Dense(dense), Some(sharding)) = (&stored.form, &stored.sharding) {
            let shard = sharding.shard_of(dense)?;
            stored.replace(StoredForm::Sharded(shard));
        }
        Ok(stored)
    }

    pub fn is_here(&self) -> bool {
        !matches!(self.form, StoredForm::Elsewhere)
    }

    /// Its memory: dense, or kept values; none where it is not initialised, or elsewhere.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.form {
            StoredForm::Dense(tensor) | StoredForm::Compressed(tensor) | StoredForm::Sharded(tensor) => {
                Some(tensor)
            }
            StoredForm::Elsewhere | StoredForm::Initial(_) => None,
        }
    }

    /// Where it is, and in which type. It must be here.
    pub fn device_and_dtype(&self) -> (Device, DType) {
        match &self.form {
            StoredForm::Dense(tensor) | StoredForm::Compressed(tensor) | StoredForm::Sharded(tensor) => {
                (tensor.device(), tensor.dtype())
            }
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

    /// Numbers of the weight that are kept, on all ranks that have shards of it.
    pub fn values_len(&self) -> usize {
        self.mask.as_ref().map_or(self.shape.iter().product(), Mask::kept)
    }

    /// What of it is to be gathered, where ranks have shards of it.
    pub fn to_gather(&self, id: ParameterId) -> Option<(VectorShard<'_>, &WeightSharding)> {
        match (&self.form, &self.sharding) {
            (StoredForm::Sharded(local), Some(sharding)) => {
                Some((VectorShard { id, length: self.values_len(), local }, sharding))
            }
            _ => None,
        }
    }

    /// Its values, from the shards of all ranks: all of these must ask. None where it is not in shards.
    pub fn gathered(&self) -> espalier_nn::Result<Option<Tensor>> {
        let Some((VectorShard { length, local, .. }, sharding)) = self.to_gather(ParameterId(0)) else {
            return Ok(None);
        };
        join(local, length, &sharding.group).map(Some)
    }

    /// All of it, dense; what is made for that is of this category. It must be here, and where ranks have
    /// shards of it all of them must ask.
    pub fn dense(&self, category: Category) -> espalier_nn::Result<Tensor> {
        match self.gathered()? {
            None => Ok(self.expanded(category)?),
            Some(values) => Ok(self.dense_of(values, category)?),
        }
    }

    /// The same from its values.
    pub fn dense_of(&self, mut values: Tensor, category: Category) -> Result<Tensor, Error> {
        match &self.mask {
            Some(mask) => expand(&values, mask, &self.shape, category),
            None => {
                values.tag_memory(category);
                Ok(values.reshape(&self.shape))
            }
        }
    }

    /// All of it, dense, where it is not in shards.
    pub fn expanded(&self, category: Category) -> Result<Tensor, Error> {
        match (&self.form, self.compressed()) {
            (StoredForm::Dense(tensor), _) => Ok(tensor.clone()),
            (StoredForm::Initial(initial), _) => initial.init(category),
            (_, Some(compressed)) => compressed.expand(category),
            (other, _) => panic!("a parameter that is {}", other.name()),
        }
    }

    /// A copy with memory of its own, under the same mask.
    pub fn duplicate(&self, category: Category) -> Result<StoredWeight, Error> {
        let form = match &self.form {
            StoredForm::Elsewhere => StoredForm::Elsewhere,
            StoredForm::Initial(initial) => StoredForm::Initial(initial.clone()),
            StoredForm::Dense(tensor) => StoredForm::Dense(tensor.duplicate(category)?),
            StoredForm::Compressed(kept) => StoredForm::Compressed(kept.duplicate(category)?),
            StoredForm::Sharded(shard) => StoredForm::Sharded(shard.duplicate(category)?),
        };
        let (mask, sparse, shape) = (self.mask.clone(), self.sparse.clone(), self.shape.clone());
        Ok(StoredWeight { form, mask, sparse, shape, sharding: self.sharding.clone() })
    }

    /// The form that it has under a new mask, where that is another: kept values if `compresses`, unless all
    /// are kept. What a dense one has where nothing is kept is left as it is.
    fn form_under(&self, new: &Mask, compresses: bool) -> espalier_nn::Result<Option<StoredForm>> {
        // Workspace until it replaces the old one.
        let category = Category::Workspace;
        let keeps_all = new.kept() == new.len();
        if let Some(sharding) = self.sharding.as_ref().filter(|_| self.is_here()) {
            let kept = match &self.form {
                StoredForm::Initial(initial) => initial.init_kept(new, category)?,
                _ => compress(&self.dense(category)?, new, category)?,
            };
            return Ok(Some(StoredForm::Sharded(sharding.shard_of(&kept)?)));
        }
        Ok(match &self.form {
            StoredForm::Elsewhere => None,
            StoredForm::Dense(_) if !compresses || keeps_all => None,
            StoredForm::Dense(weight) => Some(StoredForm::Compressed(compress(weight, new, category)?)),
            StoredForm::Initial(initial) if !compresses || keeps_all => {
                Some(StoredForm::Dense(initial.init(category)?))
            }
            StoredForm::Initial(initial) => Some(StoredForm::Compressed(initial.init_kept(new, category)?)),
            StoredForm::Compressed(_) if keeps_all => Some(StoredForm::Dense(self.expanded(category)?)),
            StoredForm::Compressed(_) => {
                Some(StoredForm::Compressed(compress(&self.expanded(category)?, new, category)?))
            }
            StoredForm::Sharded(_) => unreachable!("it has ranks that share it"),
        })
    }

    /// Puts it under a mask, whose only owner this is.
    pub fn set_mask(&mut self, mask: Mask, compresses: bool) -> espalier_nn::Result<&Mask> {
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

    /// Gives it other values, all of them dense; under a mask it stays compressed, and in shards it stays so.
    pub fn write(&mut self, dense: Tensor) -> Result<(), Error> {
        let form = match self.compressed() {
            None if self.sharding.is_some() => {
                let values = match &self.mask {
                    Some(mask) => compress(&dense, mask, Category::Workspace)?,
                    None => dense,
                };
                return self.set_values(&values);
            }
            Some(Compressed { mask, .. }) => {
                StoredForm::Compressed(compress(&dense, mask, Category::Workspace)?)
            }
            None => StoredForm::Dense(dense),
        };
        self.replace(form);
        Ok(())
    }

    /// Gives it other values, all of them, where ranks have shards of it: takes this rank's.
    pub fn set_values(&mut self, values: &Tensor) -> Result<(), Error> {
        let sharding = self.sharding.as_ref().expect("ranks that have shards of it");
        let shard = sharding.shard_of(values)?;
        self.replace(StoredForm::Sharded(shard));
        Ok(())
    }

    /// Allocates memory for values that are about to be read, where there is none yet.
    pub(crate) fn allocate(&mut self) -> Result<(), Error> {
        if let StoredForm::Initial(initial) = &self.form {
            let zeros =
                |shape: &[usize]| Tensor::zeros(&initial.device, shape, initial.dtype, Category::Weights);
            self.form = match &self.sharding {
                None => StoredForm::Dense(zeros(&self.shape)?),
                Some(sharding) => {
                    StoredForm::Sharded(zeros(&[sharding.member.split(self.values_len()).len()])?)
                }
            };
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
