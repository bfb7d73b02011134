//! A layout into a run file.

use crate::config::{PipelineConfig, RunFile, SpatialGrid};
use crate::error::Error;
use crate::pruning::{StateForm, WeightForm};
use crate::simulate::Candidate;

impl Candidate {
    /// A run file with this layout instead of its own.
    pub fn applied(&self, run: &RunFile) -> Result<RunFile, Error> {
        let batch = run.train.batch;
        let micro_batches = self.micro_batches(batch).ok_or_else(|| {
            Error::conflict(
                "train.batch",
                format!("is {batch}, which this layout cannot split evenly: {self}"),
            )
        })?;
        run.single_rank().with(|run| {
            (run.train.micro_batches, run.train.recompute) = (micro_batches, self.recompute);
            run.parallel.data = self.data;
            run.parallel.tensor = self.tensor;
            run.parallel.sequence = self.sequence;
            run.parallel.spatial = SpatialGrid(self.grid);
            run.parallel.zero = self.zero.into();
            run.parallel.pipeline =
                (self.pipeline > 1).then(|| PipelineConfig::new(self.pipeline, self.schedule, self.chunks));
            if let Some(prune) = &mut run.prune {
                prune.state = if self.compressed { StateForm::Compressed } else { StateForm::Dense };
                prune.weights =
                    if self.compressed_weights { WeightForm::Compressed } else { WeightForm::Dense };
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LayoutSearch, SearchConstraints, choices};
    use super::*;
    use crate::cluster::builtin;
    use crate::engine::EngineProfile;
    use crate::memory::MemoryPlan;
    use crate::plan::{DataFacts, Plan};
    use crate::simulate::Simulation;

    const GPT: &str =
        "[model]\nlayers = 6\nwidth = 64\nheads = 4\ncontext = 32\nvocab = 256\n[train]\nbatch = 16\n";
    const PRUNED: &str = "precision = \"bf16\"\n[prune]\nmethod = \"random\"\nsparsity = 0.9\n";
    const RESNET: &str = "[model]\nname = \"resnet8\"\n[data]\nkind = \"shapes\"\n[train]\nbatch = 16\n";
    const ALEXNET: &str = "[model]\nname = \"alexnet\"\n[data]\nkind = \"shapes\"\n[train]\nbatch = 16\n";

    /// What the search looks at is what a run would be: a plan takes every candidate that can be simulated,
    /// and predicts the bytes that the search reckoned with.
    #[test]
    fn every_candidate_makes_a_plan_of_the_same_bytes() {
        let facts = DataFacts { vocab: Some(256), image: Some((32, 32, 3)), classes: Some(10) };
        let cluster = builtin("dgx-h100").unwrap();
        let mut compared = 0;
        let compressed = format!("{GPT}{PRUNED}weights = \"compressed\"\n");
        for text in [GPT.to_owned(), format!("{GPT}{PRUNED}"), compressed, RESNET.into(), ALEXNET.into()] {
            let run = RunFile::parse(&text, &[]).unwrap();
            let single = Plan::new(run.single_rank(), facts).unwrap();
            let job = Simulation::new(&single, &cluster, EngineProfile::ESPALIER);
            let search =
                LayoutSearch { job: &job, devices: 4, fixed: &SearchConstraints::default(), rows: 1 };
            for candidate in choices::candidates(&search).unwrap().iter().step_by(7) {
                let Ok(searched) = job.memory(candidate) else { continue };
                let applied = candidate.applied(&run).unwrap_or_else(|error| panic!("{candidate}: {error}"));
                let plan = Plan::new(applied, facts).unwrap_or_else(|error| panic!("{candidate}: {error}"));
                let without_scratch = |memory: MemoryPlan| memory.total() - memory.workspace.unwrap_or(0);
                let ranks: Vec<u64> =
                    (0..4).map(|rank| without_scratch(plan.rank(rank).unwrap().memory)).collect();
                // Of the rank that has most with its scratch space, to the byte.
                let found = without_scratch(searched);
                assert!(ranks.contains(&found), "{}, {candidate}: {found} of {ranks:?}", plan.model.name);
                assert!(ranks.iter().all(|rank| *rank <= searched.total()), "{candidate}");
                compared += 1;
            }
        }
        assert!(compared > 100, "{compared}");
    }
}
