//! A trained model in use: what is left of its run where nothing is learnt any more.

use super::{Error, RunFile, Train, overridden};
use crate::timetable::Length;

impl RunFile {
    /// The run as its model is used: on one rank of whatever device there is, with nothing pruned or learnt, in micro-batches as
    /// large as they were. `overrides` may ask for ranks and precision; a batch is as many micro-batches as then are under way.
    pub fn in_use(&self, overrides: &[String]) -> Result<RunFile, Error> {
        let standard = RunFile::parse("", &[])?;
        let micro_batch = self.batch().micro_batch;
        let train = Train {
            length: Length::Steps(0),
            batch: micro_batch,
            precision: self.train.precision,
            ..standard.train
        };
        let (optimizer, learning_rate) = (standard.optimizer, standard.learning_rate);
        let (checkpoint, device) = (standard.checkpoint, standard.device);
        let alone = RunFile {
            train,
            optimizer,
            learning_rate,
            checkpoint,
            device,
            prune: None,
            sample: None,
            ..self.alone()
        };
        let text = alone.to_toml()?;
        let stages = RunFile::replica(&text, overrides)?.pipeline;
        let replicas = overridden(overrides, "parallel.data").and_then(|number| number.parse::<usize>().ok());
        let batch = micro_batch.saturating_mul(stages).saturating_mul(replicas.unwrap_or(1));
        let own = [format!("train.micro_batches={stages}"), format!("train.batch={batch}")];
        RunFile::parse(&text, &[&own[..], overrides].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained() -> RunFile {
        let text = r#"
            [train]
            batch = 24
            micro_batches = 2
            precision = "bf16"
            eval_every = 5
            noise_scale = true
            [optimizer]
            master = "low-bits"
            [prune]
            method = "magnitude"
            sparsity = 0.9
            [parallel]
            data = 3
            [sample]
            prompt = "1+"
            every = 2
        "#;
        RunFile::parse(text, &[]).unwrap()
    }

    #[test]
    fn what_is_about_training_is_gone() {
        let used = trained().in_use(&[]).unwrap();
        assert_eq!((used.model.clone(), used.data.clone()), (trained().model, trained().data));
        assert_eq!((used.train.batch, used.train.micro_batches, used.parallel.data), (4, 1, 1));
        assert_eq!((used.train.precision, used.train.length), (trained().train.precision, Length::Steps(0)));
        assert_eq!((used.prune, used.sample), (None, None));
    }

    /// What of the run would contradict them is not there any more.
    #[test]
    fn ranks_and_precision_are_for_whoever_uses_it() {
        let asked = ["parallel.data=2", "parallel.pipeline=2", "train.precision=f32"].map(String::from);
        let used = trained().in_use(&asked).unwrap();
        assert_eq!((used.train.batch, used.train.micro_batches), (16, 2));
        assert_eq!(used.mesh().size(), 4);
    }
}
