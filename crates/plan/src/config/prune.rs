//! `[prune]`: which weights go, when, and what is kept of their state. Without the section nothing is pruned.

use super::reader::Section;
use super::{DeviceKind, Error, Precision, RunFile, fields};
use crate::pruning::{PruneMethod, PrunedKernels, Pruning, Scope, StateForm, TicketForm, WeightForm};

/// How far apart masks of weights may be for Early-Bird: four fifths of what is kept must have stayed the
/// same over the whole window. Random masks at 90 % are 0.9 apart. At 0.5, which there is the published 0.1
/// of all positions, a GPT-2 124M drew its ticket after a sixth of its run and ended at twice the perplexity
/// (log/2026-11-15-quality-124m-350m.md).
const WEIGHTS_TOLERANCE: f64 = 0.2;

impl Pruning {
    /// Weights that rest as kept values leave something out, and have state of kept values beside them.
    pub(super) fn check_weights(&self) -> Result<(), Error> {
        let field = String::from("prune.weights");
        match self.weights {
            WeightForm::Compressed if self.state == StateForm::Dense => {
                let problem = "is \"compressed\", but `prune.state` = \"dense\" keeps gradients and state of all weights: remove it";
                Err(Error::conflict(field, problem))
            }
            WeightForm::Compressed if self.sparsity == 0.0 => {
                Err(Error::no_effect(field, "with `prune.sparsity` = 0: nothing is pruned"))
            }
            _ => Ok(()),
        }
    }

    /// Sparse products are f32's on a processor, and make gradients of kept weights alone.
    pub(super) fn check_kernels(&self, run: &RunFile) -> Result<(), Error> {
        if self.kernels == PrunedKernels::Dense {
            return Ok(());
        }
        let field = String::from("prune.kernels");
        if run.train.precision != Precision::F32 {
            let why = "with `train.precision` = \"bf16\": dense kernels are faster there";
            return Err(Error::no_effect(field, why));
        }
        if run.device.kind == DeviceKind::Cuda {
            let why = "with `device.kind` = \"cuda\": dense kernels are faster there";
            return Err(Error::no_effect(field, why));
        }
        if !run.storage().compressed {
            let problem =
                "is \"sparse\", which computes gradients of kept weights only, but `prune.state` is dense";
            return Err(Error::conflict(field, problem));
        }
        Ok(())
    }

    /// ELSA weighs weights by the second moment of their gradients.
    pub(super) fn check_optimizer(&self, run: &RunFile) -> Result<(), Error> {
        if !matches!(self.method, PruneMethod::Elsa { .. }) || run.optimizer.moments() == 2 {
            return Ok(());
        }
        let problem = "is \"elsa\", which weighs weights by Adam's second moment: set `optimizer.name` to \"adamw\", \"adam\" or \
                       \"lamb\"";
        Err(Error::conflict("prune.method", problem))
    }

    pub(super) fn read(section: &mut Section) -> Result<Option<Pruning>, Error> {
        if section.is_empty() {
            return Ok(None);
        }
        let mut values = section.read_variant(fields::PRUNE, "")?;
        if let Some(form) = values.find("form") {
            let (scope, tolerance, l1) = match form {
                TicketForm::Weights => (Scope::Layer, WEIGHTS_TOLERANCE, 0.0),
                TicketForm::Channels => (Scope::Global, 0.1, 1e-4),
            };
            values.set_left_out("scope", scope);
            values.set_left_out("tolerance", tolerance);
            values.set_left_out("l1", l1);
            if form == TicketForm::Weights && values.get::<f64>("l1") != 0.0 {
                let why = "with `prune.form` = \"weights\": it is a penalty on batch-norm scales";
                return Err(section.no_effect("l1", why));
            }
            if form == TicketForm::Channels && values.get::<Scope>("scope") != Scope::Global {
                let why = "with `prune.form` = \"channels\", which have one global threshold";
                return Err(section.no_effect("scope", why));
            }
        }
        if values.get::<String>("method") == "keep" && !section.has("sparsity") {
            let problem = "is \"keep\", which keeps the zeros of the checkpoint to start from, and there is none: give one with \
                           `espalier train --from`";
            return Err(section.conflict("method", problem));
        }
        let prune: Pruning = values.all();
        if matches!(prune.method, PruneMethod::TwoOfFour { .. }) && prune.sparsity != 0.5 {
            return Err(
                section.no_effect("sparsity", "with `prune.method` = \"2:4\", which is 0.5 by definition")
            );
        }
        if prune.biases {
            let of = match prune.method {
                PruneMethod::TwoOfFour { .. } => Some("rows of weights, which biases are not"),
                PruneMethod::EarlyBird { form: TicketForm::Channels, .. } => {
                    Some("channels, which take their biases with them")
                }
                _ => None,
            };
            if let Some(of) = of {
                let problem =
                    format!("is true, but `prune.method` = \"{}\" prunes {of}", prune.method.name());
                return Err(section.conflict("biases", problem));
            }
        }
        if let PruneMethod::Gradual { initial, .. } = prune.method
            && initial > prune.sparsity
        {
            let problem = format!("is {initial}, above `prune.sparsity` = {}", prune.sparsity);
            return Err(section.conflict("initial", problem));
        }
        if let PruneMethod::Gradual { span, .. } | PruneMethod::Elsa { span, .. } = prune.method
            && let Some(start) = span.start
            && (1..=start).contains(&span.end)
        {
            let problem = format!("is {}, which is not after `prune.start` = {start}", span.end);
            return Err(section.conflict("end", problem));
        }
        Ok(Some(prune))
    }
}
