//! A trained model in use: what is left of its run where nothing is learnt any more, and what of it may be
//! overridden. A field that would change nothing is refused, since whoever sets it believes that it does.

use super::changes::{check_name, covers};
use super::{Error, Override, RunFile, RunTable, Train, fields, overridden};
use crate::data::HeldOut;
use crate::field::FieldUse;
use crate::intervals::RunLength;

/// What a trained model is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To be evaluated on what its run held out.
    HeldOut,
    /// To be evaluated on other data.
    OtherData,
    /// To write text.
    Text,
}

impl Purpose {
    /// Whether a field changes anything.
    fn reads(self, field: &str) -> bool {
        let least = match self {
            Purpose::Text => FieldUse::Always,
            Purpose::OtherData => FieldUse::Evaluation,
            Purpose::HeldOut => FieldUse::HeldOut,
        };
        // Of a section by itself something is, unless nothing of it is.
        match field.contains('.') {
            true => fields::hold(field, |row| row.used >= least),
            false => fields::named(field).any(|row| row.used >= least),
        }
    }

    /// Why it does not, as the end of a sentence.
    fn why_not(self, field: &str) -> &'static str {
        match self {
            Purpose::OtherData if covers("data", field) => {
                "with --data, which is what the model is evaluated on"
            }
            Purpose::Text if field == "data.tokenizer" => "in generation: use --tokenizer",
            Purpose::Text if field == "seed" => "in generation: use --seed",
            Purpose::Text if covers("sample", field) => "in generation: use the options for sampling",
            Purpose::Text => "in generation: nothing is trained, and no data are read",
            _ => "in evaluation: nothing is trained",
        }
    }
}

impl RunFile {
    /// An error where an override of a trained model's run has no effect, or would evaluate it on samples
    /// that it has learnt from.
    pub fn check_overrides(&self, overrides: &[Override], purpose: Purpose) -> Result<(), Error> {
        for field in overrides.iter().map(Override::field) {
            // One that is no field at all is named where the run is read.
            let name: String = field.split('.').take(2).collect::<Vec<_>>().join(".");
            let reads = purpose.reads(&field) && (field != "seed" || self.data.is_synthetic());
            if check_name(&name).is_ok() && !reads {
                return Err(Error::NoEffect { why: purpose.why_not(&field).into(), field });
            }
        }
        if purpose == Purpose::HeldOut {
            self.check_held_out(overrides)?;
        }
        Ok(())
    }

    /// Refuses to hold out more than the run did, or to make other samples than it did: the model has learnt
    /// from some of them.
    fn check_held_out(&self, overrides: &[Override]) -> Result<(), Error> {
        let run = self.in_use(overrides)?;
        let instead = "--data names other data to evaluate on";
        if matches!(
            (&self.data.held_out, &run.data.held_out),
            (HeldOut::Files { .. }, HeldOut::Fraction { .. })
        ) && run.data.source == self.data.source
        {
            let problem = format!("is removed, and the model was trained on all of `data.path` ({instead})");
            return Err(Error::conflict("data.validation_path", problem));
        }
        let (HeldOut::Fraction { validation: was }, HeldOut::Fraction { validation: is }) =
            (&self.data.held_out, &run.data.held_out)
        else {
            return Ok(());
        };
        if is > was {
            let problem = format!(
                "is {is}, and the run held out {was}: the model was trained on the rest of it ({instead})"
            );
            return Err(Error::conflict("data.validation", problem));
        }
        let are_synthetic = self.data.is_synthetic() && run.data.is_synthetic();
        if are_synthetic && (run.seed != self.seed || run.data.source != self.data.source) {
            let field = if run.seed != self.seed { "seed" } else { "data" };
            let problem = format!(
                "selects other samples than the run did: the model was trained on some of the new validation split ({instead})"
            );
            return Err(Error::conflict(field, problem));
        }
        Ok(())
    }

    /// The run as its model is used: on one rank of whatever device there is, with nothing pruned or learnt,
    /// in micro-batches as large as they were. `overrides` may ask for ranks and precision; a batch is as
    /// many micro-batches as are then in flight.
    pub fn in_use(&self, overrides: &[Override]) -> Result<RunFile, Error> {
        let standard = RunFile::parse("", &[])?;
        let micro_batch = self.batch().micro_batch;
        let mut used = RunFile {
            train: Train { length: RunLength::Steps(0), precision: self.train.precision, ..standard.train },
            optimizer: standard.optimizer,
            learning_rate: standard.learning_rate,
            checkpoint: standard.checkpoint,
            device: standard.device,
            prune: None,
            sample: None,
            ..self.single_rank()
        };
        let stages = RunTable::of(&used)?.with(overrides)?.replica()?.pipeline;
        let replicas = overridden(overrides, "parallel.data").and_then(|number| number.parse().ok());
        used.train.micro_batches = stages;
        used.train.batch = micro_batch.saturating_mul(stages).saturating_mul(replicas.unwrap_or(1));
        RunTable::of(&used)?.with(overrides)?.read()
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
        assert_eq!(
            (used.train.precision, used.train.length),
            (trained().train.precision, RunLength::Steps(0))
        );
        assert_eq!((used.prune, used.sample), (None, None));
    }

    #[test]
    fn what_has_no_effect_on_a_trained_model_is_refused() {
        let result = |text: &str, purpose| {
            trained().check_overrides(&[text.into()], purpose).map_err(|why| why.to_string())
        };
        for purpose in [Purpose::HeldOut, Purpose::OtherData, Purpose::Text] {
            for allowed in ["train.precision=f32", "parallel.tensor=2", "device.kind=cpu", "model.context=8"]
            {
                assert_eq!(result(allowed, purpose), Ok(()), "{allowed}");
            }
            for refused in [
                "train.steps=7",
                "optimizer.name=sgd",
                "prune.sparsity=0.5",
                "model.dropout=0.5",
                "parallel.zero=1",
            ] {
                let why = result(refused, purpose).unwrap_err();
                let field = refused.split('=').next().unwrap();
                assert!(why.starts_with(&format!("`{field}` has no effect in ")), "{why}");
            }
        }
        assert_eq!(result("train.eval_batch=4", Purpose::OtherData), Ok(()));
        insta::assert_snapshot!(result("train.batch=4", Purpose::Text).unwrap_err(), @"`train.batch` has no effect in generation: nothing is trained, and no data are read");
        insta::assert_snapshot!(result("seed=4", Purpose::Text).unwrap_err(), @"`seed` has no effect in generation: use --seed");
        insta::assert_snapshot!(result("data.validation=0.5", Purpose::OtherData).unwrap_err(), @"`data.validation` has no effect with --data, which is what the model is evaluated on");
        // A name that is none is for whoever reads the run.
        assert_eq!(
            result("train.stepz=7", Purpose::HeldOut),
            trained().in_use(&["train.stepz=7".into()]).map(|_| ()).map_err(|why| why.to_string())
        );
    }

    /// What was held out stays so: a smaller fraction of it is among it too.
    #[test]
    fn nothing_that_was_learnt_from_is_held_out() {
        let result = |text: &str| {
            trained().check_overrides(&[text.into()], Purpose::HeldOut).map_err(|why| why.to_string())
        };
        assert_eq!(result("data.validation=0.05"), Ok(()));
        insta::assert_snapshot!(result("data.validation=0.5").unwrap_err(), @"`data.validation` is 0.5, and the run held out 0.1: the model was trained on the rest of it (--data names other data to evaluate on)");
        assert!(
            result("data.count=20000")
                .unwrap_err()
                .starts_with("`data` selects other samples than the run did")
        );
        assert!(result("seed=5").unwrap_err().starts_with("`seed` selects other samples than the run did"));
    }

    /// What of the run would contradict them is not there any more.
    #[test]
    fn ranks_and_precision_are_for_whoever_uses_it() {
        let asked = ["parallel.data=2", "parallel.pipeline=2", "train.precision=f32"].map(Override::from);
        let used = trained().in_use(&asked).unwrap();
        assert_eq!((used.train.batch, used.train.micro_batches), (16, 2));
        assert_eq!(used.mesh().size(), 4);
    }
}
