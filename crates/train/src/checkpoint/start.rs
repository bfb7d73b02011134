//! What a run starts from, or a trained model is used with: the weights of any checkpoint, in the precision that is asked for and
//! with as many positions as the model has. Of a checkpoint with a longer context the first positions are taken.

use std::collections::HashSet;

use espalier_plan::spec::{Layer, Model};

use super::MODEL;
use super::open::Checkpoint;
use super::read::{Room, Wanted};
use crate::Result;

impl Checkpoint {
    /// Fills the weights of a model, or those of them that a rank holds.
    pub fn start(&self, wanted: Wanted<'_>, model: &Model) -> Result<()> {
        let positions = positions(model);
        let mut tensors = Vec::with_capacity(wanted.tensors.len());
        for (name, room) in wanted.tensors {
            let room = match self.shape(wanted.file, &name) {
                Some(there) if positions.contains(&name) => longer(room, there),
                _ => room,
            };
            tensors.push((name, room));
        }
        self.fill(&mut [Wanted { tensors, converts: true, ..wanted }])
    }

    /// An error where it does not hold the weights of a model.
    pub fn check_fits(&self, model: &Model) -> Result<()> {
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
pub(super) fn positions(model: &Model) -> HashSet<String> {
    let mut names = HashSet::new();
    model.for_each(&mut |layer| {
        if let Layer::PositionEmbedding(table) = layer {
            names.insert(format!("{}.weight", table.name));
        }
    });
    names
}

/// Room for the first rows of a table of which more are there.
fn longer<'a>(room: Room<'a>, there: &[usize]) -> Room<'a> {
    let shard = room.shard().into_owned();
    let here = shard.full_shape();
    if there.len() != here.len() || there[0] <= here[0] {
        return room;
    }
    let shard = shard.of_longer(0, there[0]);
    match room {
        Room::Tensor(tensor) | Room::Shard(tensor, _) => Room::Shard(tensor, shard),
        Room::Compressed(tensor, mask, _) => Room::Compressed(tensor, mask, shard),
    }
}
