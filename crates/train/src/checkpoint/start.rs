//! What a run starts from, or a trained model is used with: the weights of any checkpoint, in the precision
//! that is asked for and with as many positions as the model has. Of a checkpoint with a longer context the
//! first positions are taken.

use std::collections::HashSet;

use espalier_plan::spec::{LayerSpec, ModelSpec};

use super::MODEL;
use super::open::Checkpoint;
use super::read::{LoadRequest, LoadTarget};
use crate::Result;

impl Checkpoint {
    /// Fills the weights of a model, or those of them that a rank holds.
    pub fn start(&self, request: LoadRequest<'_>, model: &ModelSpec) -> Result<()> {
        let positions = positions(model);
        let mut tensors = Vec::with_capacity(request.tensors.len());
        for (name, target) in request.tensors {
            let target = match self.shape(request.file, &name) {
                Some(there) if positions.contains(&name) => longer(target, there),
                _ => target,
            };
            tensors.push((name, target));
        }
        self.fill(&mut [LoadRequest { tensors, converts: true, ..request }])
    }

    /// An error where it does not hold the weights of a model.
    pub(crate) fn check_fits(&self, model: &ModelSpec) -> Result<()> {
        let positions = positions(model);
        for parameter in model.parameters() {
            let (name, here) = (&parameter.name, &parameter.shape);
            match self.shape(MODEL, name) {
                None => {
                    return Err(self.refuse(format!("{MODEL} has no tensor {name}, which this run needs")));
                }
                Some([rows, rest @ ..])
                    if positions.contains(name) && *rows > here[0] && *rest == here[1..] => {}
                Some(there) if there != *here => {
                    return Err(self.refuse(format!("{name} is {there:?} there, and {here:?} in this run")));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// The tables that have a row for each position.
pub(super) fn positions(model: &ModelSpec) -> HashSet<String> {
    let mut names = HashSet::new();
    model.for_each(&mut |layer| {
        if let LayerSpec::PositionEmbedding(table) = layer {
            names.insert(format!("{}.weight", table.name));
        }
    });
    names
}

/// Load targets for the first rows of a table of which more are there.
fn longer<'a>(target: LoadTarget<'a>, there: &[usize]) -> LoadTarget<'a> {
    let here = target.shard.full_shape();
    if there.len() != here.len() || there[0] <= here[0] {
        return target;
    }
    LoadTarget { shard: target.shard.clone().of_longer(0, there[0]), ..target }
}
