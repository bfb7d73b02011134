//! `[optimizer]`: the rule that turns a gradient into a step. The name decides which other fields there are.

use super::Error;
use super::fields;
use super::reader::Section;
use crate::optimizer::{MomentDtype, OptimizerSpec};

impl OptimizerSpec {
    pub(super) fn read(section: &mut Section) -> Result<OptimizerSpec, Error> {
        let optimizer: OptimizerSpec = section.read_variant(fields::OPTIMIZER, "adamw")?.all();
        if optimizer.weight_decay == 0.0 && !optimizer.exclude_from_decay {
            return Err(section.no_effect("exclude_from_decay", "with `optimizer.weight_decay` = 0"));
        }
        if optimizer.moments != MomentDtype::F32 && optimizer.moments() == 0 {
            return Err(section.no_effect("moments", "with `optimizer.name` = \"sgd\": it has no moments"));
        }
        Ok(optimizer)
    }
}
