//! Checkpoints that tests save, pass on and look into.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use espalier_train::Result;
use espalier_train::checkpoint::{Checkpoint, Checkpoints, LoadRequest, LoadTarget};
use espalier_train::parallel::Ranks;
use tempfile::TempDir;

use super::{Base, on_every_rank, planned};

/// Opens the newest checkpoints of a folder for a run file's model.
pub fn checkpoints(base: &Base, folder: &Path) -> Checkpoints {
    let plan = planned(base);
    Checkpoints::new(folder, 1, &plan.model.name, plan.storage.precision.name())
}

/// A model on one rank after some steps, saved.
pub fn saved(base: &Base, steps: usize) -> TempDir {
    let (folder, mut trainer) = (tempfile::tempdir().unwrap(), base.trainer(2));
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
    trainer.save(&checkpoints(base, folder.path())).unwrap();
    folder
}

/// A checkpoint as it comes through layouts, each of which loads what the one before saved.
pub fn passed_on(from: &Path, layouts: impl IntoIterator<Item = Base>) -> TempDir {
    let mut last: Option<TempDir> = None;
    for layout in layouts {
        let to = tempfile::tempdir().unwrap();
        save_again(&layout, last.as_ref().map_or(from, TempDir::path), to.path());
        last = Some(to);
    }
    last.expect("a layout")
}

/// Names of what is in a folder, in order.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The files of a folder.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = |name: String| {
        let bytes = fs::read(folder.join(&name)).unwrap();
        (name, bytes)
    };
    names(folder).into_iter().map(file).collect()
}

/// What the only checkpoint of a folder holds.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    contents(&folder.join(names(folder).first().expect("a checkpoint")))
}

/// Loads the newest checkpoint of a folder as one layout, and saves it elsewhere.
pub fn save_again(base: &Base, from: &Path, to: &Path) {
    let [from, to] = [from, to].map(|folder| checkpoints(base, folder));
    on_every_rank(base, |mut trainer| {
        trainer.load(&from, |broken| panic!("{broken}"))?.expect("a checkpoint is there");
        trainer.save(&to)
    });
}

/// Reads the checkpoint of a step on one rank.
pub fn read_step(folder: &Path, step: u64) -> Result<Checkpoint> {
    Checkpoint::read(&folder.join(format!("step-{step:06}")), &Ranks::single())
}

/// Fills tensors with what a file of a checkpoint has of them.
pub fn fill(checkpoint: &Checkpoint, file: &str, tensors: Vec<(String, LoadTarget<'_>)>) -> Result<()> {
    checkpoint.fill(&mut [LoadRequest { file, tensors, elsewhere: 0, converts: false }])
}

/// Flips a bit of a file's last byte.
pub fn flip_a_bit(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}
