//! The KV cache of a model that generates text: the keys and values of every position, so that no
//! position goes through the model twice.

use crate::error::Error;
use crate::plan::Plan;
use crate::spec::Input;

impl Plan {
    /// Bytes of the keys and values that a rank keeps: of each attention layer of its stages, for every
    /// position of the model's context, whether it comes to be read or not. Nothing for models of images.
    pub fn cache_bytes(&self, rank: usize) -> Result<u64, Error> {
        let Input::Tokens { seq, .. } = self.model.input else { return Ok(0) };
        let coords = self.mesh.coordinates(rank);
        let (placement, local) = (self.schedule(1)?.placement, self.layout.of(coords));
        // Of several copies of the model the first writes.
        let chunks = placement.chunks(coords.pipeline).iter().filter(|chunk| chunk.pipeline == 0);
        let blocks = chunks.flat_map(|chunk| self.stage_blocks[chunk.virtual_stage].clone());
        let mut features = 0;
        for block in blocks {
            local.model.blocks[block].for_each(&mut |layer| features += layer.properties().cached);
        }
        Ok(features as u64 * seq as u64 * self.storage.precision.size())
    }
}

#[cfg(test)]
mod tests {
    use crate::{DataFacts, Plan, RunFile};

    fn bytes(run: &str, rank: usize) -> u64 {
        let facts = DataFacts { vocab: Some(50), image: None, classes: None };
        Plan::new(RunFile::parse(run, &[]).unwrap(), facts).unwrap().cache_bytes(rank).unwrap()
    }

    /// By hand: layers x keys and values x features x positions x bytes of each.
    #[test]
    fn every_position_of_every_layer_is_counted() {
        let model = "[model]\nname = \"gpt\"\nlayers = 5\nheads = 4\nwidth = 32\ncontext = 24\n";
        let one_rank = 5 * 2 * 32 * 24 * 4;
        assert_eq!(bytes(model, 0), one_rank);
        let half = format!("{model}[train]\nprecision = \"bf16\"\n");
        assert_eq!(bytes(&half, 0), one_rank / 2);
        let tensor = format!("{model}[parallel]\ntensor = 2\n");
        assert_eq!((bytes(&tensor, 0), bytes(&tensor, 1)), (one_rank / 2, one_rank / 2));
        let stages = format!("{model}[train]\nmicro_batches = 2\nbatch = 4\n[parallel]\npipeline = 2\n");
        assert_eq!(bytes(&stages, 0) + bytes(&stages, 1), one_rank);
        assert!(bytes(&stages, 0) > 0 && bytes(&stages, 1) > 0);
    }
}
