//! A layout into a run file.

use crate::config::RunFile;
use crate::error::Error;
use crate::simulate::Candidate;

impl Candidate {
    /// A run file with this layout in the place of its own.
    pub fn applied(&self, run: &RunFile) -> Result<RunFile, Error> {
        let batch = run.train.batch;
        let micro_batches = self.micro_batches(batch).ok_or_else(|| Error::Conflict {
            field: "train.batch".into(),
            problem: format!("is {batch}, which this layout cannot share out: {self}"),
        })?;
        let mut fields = vec![
            format!("parallel.data={}", self.data),
            format!("parallel.tensor={}", self.tensor),
            format!("train.micro_batches={micro_batches}"),
            format!("train.recompute={}", self.recompute.name()),
        ];
        if self.sequence {
            fields.push("parallel.sequence=true".into());
        }
        if self.spatial() > 1 {
            fields.push(format!("parallel.spatial=[{}, {}]", self.grid[0], self.grid[1]));
        }
        if self.zero > 0 {
            fields.push(format!("parallel.zero={}", self.zero));
        }
        if self.pipeline > 1 {
            fields.push(format!("parallel.pipeline={}", self.pipeline));
            fields.push(format!("parallel.schedule={}", self.schedule));
            fields.extend(self.chunks.map(|chunks| format!("parallel.chunks={chunks}")));
        }
        if run.prune.is_some() {
            fields.push(format!("prune.state={}", self.state()));
        }
        RunFile::parse(&run.alone().to_toml()?, &fields)
    }
}
