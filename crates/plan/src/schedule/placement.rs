//! Which rank holds which virtual stage, and which route each micro-batch takes.
//!
//! A model is split into virtual stages, numbered in the order of its forward. A pipeline is one copy of the
//! model: for every virtual stage, the rank that holds it. Most schedules have one pipeline with a virtual
//! stage on every rank; interleaving goes round the ranks several times; Chimera has several pipelines, and a
//! micro-batch goes through one of them. What a rank holds of one pipeline's virtual stage is called a chunk,
//! and a rank's chunks are numbered by pipeline, then virtual stage.

use super::ScheduleError;

/// Where every virtual stage is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// `[pipeline][virtual stage]`: its rank.
    pipelines: Vec<Vec<usize>>,
    /// `[micro-batch of a batch]`: its pipeline.
    routes: Vec<usize>,
    /// `[rank][chunk]`
    chunks: Vec<Vec<Chunk>>,
}

/// A virtual stage on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The copy of the model it belongs to.
    pub pipeline: usize,
    /// Counted in the order of the forward.
    pub virtual_stage: usize,
}

impl Placement {
    /// One pipeline that goes `rounds` times round the ranks: chunk c of rank r is virtual stage c * ranks + r.
    pub fn round_robin(ranks: usize, rounds: usize, micro_batches: usize) -> Placement {
        let pipeline = (0..ranks * rounds).map(|virtual_stage| virtual_stage % ranks).collect();
        Placement::new(ranks, vec![pipeline], vec![0; micro_batches]).expect("a placement of ours")
    }

    /// From the rank of every virtual stage of every pipeline, and the pipeline of every micro-batch of a batch.
    pub fn new(
        ranks: usize,
        pipelines: Vec<Vec<usize>>,
        routes: Vec<usize>,
    ) -> Result<Placement, ScheduleError> {
        let refuse = |problem: String| Err(ScheduleError::Placement { problem });
        let mut chunks = vec![Vec::new(); ranks];
        for (pipeline, virtual_stages) in pipelines.iter().enumerate() {
            if virtual_stages.len() != pipelines[0].len() {
                let (first, other) = (pipelines[0].len(), virtual_stages.len());
                return refuse(format!(
                    "pipeline {pipeline} has {other} stages and pipeline 0 has {first}, but both are the same model"
                ));
            }
            for (virtual_stage, &rank) in virtual_stages.iter().enumerate() {
                if rank >= ranks {
                    return refuse(format!(
                        "pipeline {pipeline} puts stage {virtual_stage} on rank {rank}, but there are {ranks} ranks"
                    ));
                }
                if chunks[rank].iter().any(|chunk: &Chunk| chunk.virtual_stage == virtual_stage) {
                    return refuse(format!("rank {rank} holds stage {virtual_stage} twice"));
                }
                chunks[rank].push(Chunk { pipeline, virtual_stage });
            }
        }
        if let Some(rank) = chunks.iter().position(|chunks| chunks.is_empty()) {
            return refuse(format!("rank {rank} holds no stage of the model"));
        }
        if let Some(micro_batch) = routes.iter().position(|&pipeline| pipeline >= pipelines.len()) {
            return refuse(format!(
                "micro-batch {micro_batch} goes through pipeline {}, but there are {}",
                routes[micro_batch],
                pipelines.len()
            ));
        }
        Ok(Placement { pipelines, routes, chunks })
    }

    /// The same virtual stages on the same ranks, for micro-batches that take other routes.
    pub(super) fn with_routes(&self, routes: Vec<usize>) -> Placement {
        Placement { routes, ..self.clone() }
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.chunks.len()
    }

    /// Virtual stages of the model.
    pub(crate) fn virtual_stages(&self) -> usize {
        self.pipelines[0].len()
    }

    /// Copies of the model.
    pub fn copies(&self) -> usize {
        self.pipelines.len()
    }

    /// The rank of every virtual stage of a copy.
    pub fn pipeline(&self, pipeline: usize) -> &[usize] {
        &self.pipelines[pipeline]
    }

    /// What a rank holds.
    pub fn chunks(&self, rank: usize) -> &[Chunk] {
        &self.chunks[rank]
    }

    /// The pipeline that a micro-batch goes through.
    pub(crate) fn route(&self, micro_batch: usize) -> usize {
        self.routes[micro_batch % self.routes.len()]
    }

    /// Micro-batches of a batch that go through a pipeline.
    pub fn routed(&self, pipeline: usize) -> impl Iterator<Item = usize> {
        (0..self.routes.len()).filter(move |&micro_batch| self.routes[micro_batch] == pipeline)
    }

    /// The ranks that hold a copy of a virtual stage: those that an all-reduce of its gradients joins.
    pub fn holders(&self, virtual_stage: usize) -> impl Iterator<Item = usize> {
        self.pipelines.iter().map(move |pipeline| pipeline[virtual_stage])
    }

    /// The chunks of a rank that a micro-batch goes through.
    pub(crate) fn chunks_for(&self, rank: usize, micro_batch: usize) -> impl Iterator<Item = usize> {
        let route = self.route(micro_batch);
        let chunks = self.chunks[rank].iter().enumerate();
        chunks.filter(move |(_, chunk)| chunk.pipeline == route).map(|(index, _)| index)
    }

    /// Where a rank holds a virtual stage of a pipeline, if it does.
    pub fn chunk_of(&self, rank: usize, chunk: Chunk) -> Option<usize> {
        self.chunks[rank].iter().position(|&held| held == chunk)
    }

    /// What runs before this in the forward.
    pub fn before(&self, chunk: Chunk) -> Option<Chunk> {
        chunk.virtual_stage.checked_sub(1).map(|virtual_stage| Chunk { virtual_stage, ..chunk })
    }

    /// What runs after this in the forward.
    pub fn after(&self, chunk: Chunk) -> Option<Chunk> {
        (chunk.virtual_stage + 1 < self.virtual_stages())
            .then(|| Chunk { virtual_stage: chunk.virtual_stage + 1, ..chunk })
    }

    /// The rank of a chunk.
    pub(crate) fn rank_of(&self, chunk: Chunk) -> usize {
        self.pipelines[chunk.pipeline][chunk.virtual_stage]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(ranks: usize, pipelines: &[&[usize]], routes: &[usize]) -> String {
        let pipelines = pipelines.iter().map(|ranks| ranks.to_vec()).collect();
        Placement::new(ranks, pipelines, routes.to_vec()).unwrap_err().to_string()
    }

    #[test]
    fn chunks_are_numbered_by_pipeline_then_virtual_stage() {
        let chunk = |pipeline, virtual_stage| Chunk { pipeline, virtual_stage };
        let twice = Placement::round_robin(3, 2, 6);
        assert_eq!(twice.chunks(1), [chunk(0, 1), chunk(0, 4)]);
        let bidirectional = Placement::new(2, vec![vec![0, 1], vec![1, 0]], vec![0, 1]).unwrap();
        assert_eq!(bidirectional.chunks(1), [chunk(0, 1), chunk(1, 0)]);
        assert_eq!(bidirectional.chunks_for(1, 3).collect::<Vec<_>>(), [1]);
        assert_eq!(bidirectional.holders(0).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn placements_that_cannot_be() {
        insta::assert_snapshot!(refused(2, &[&[0, 2]], &[0]), @"pipeline 0 puts stage 1 on rank 2, but there are 2 ranks");
        insta::assert_snapshot!(refused(2, &[&[0, 0]], &[0]), @"rank 1 holds no stage of the model");
        insta::assert_snapshot!(refused(2, &[&[0, 1], &[0, 1]], &[0]), @"rank 0 holds stage 0 twice");
        insta::assert_snapshot!(refused(2, &[&[0, 1], &[1]], &[0]), @"pipeline 1 has 1 stages and pipeline 0 has 2, but both are the same model");
        insta::assert_snapshot!(refused(2, &[&[0, 1]], &[0, 1]), @"micro-batch 1 goes through pipeline 1, but there are 1");
    }
}
