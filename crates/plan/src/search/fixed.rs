//! What a person has decided of a layout before the search:
//! `data=32,pipeline=1,tensor=2,micro_batch=4,recompute=block`.

use crate::edit_distance::nearest;
use crate::error::Error;
use crate::schedule::ScheduleName;
use crate::spec::RecomputeMode;

/// Each field is free, or the one choice that is left.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SearchConstraints {
    /// Replicas.
    pub data: Option<usize>,
    /// Stages.
    pub pipeline: Option<usize>,
    /// Ranks of a tensor-parallel group.
    pub tensor: Option<usize>,
    /// Ranks with tiles of the same images: rows and columns.
    pub grid: Option<[usize; 2]>,
    /// Whether activations are cut along the sequence.
    pub sequence: Option<bool>,
    /// Samples that a rank runs at a time.
    pub micro_batch: Option<usize>,
    /// The order of a pipeline.
    pub schedule: Option<ScheduleName>,
    /// Virtual stages on a rank.
    pub chunks: Option<usize>,
    /// What is computed twice.
    pub recompute: Option<RecomputeMode>,
    /// What replicas shard.
    pub zero: Option<u8>,
    /// Whether state is that of kept weights alone.
    pub compressed: Option<bool>,
    /// Whether pruned weights rest as kept values too.
    pub compressed_weights: Option<bool>,
}

/// Sets a field free.
type Free = fn(&mut SearchConstraints);

/// What can be fixed.
const FIELDS: [(&str, Free); 12] = [
    ("data", |fixed| fixed.data = None),
    ("pipeline", |fixed| fixed.pipeline = None),
    ("sequence", |fixed| fixed.sequence = None),
    ("tensor", |fixed| fixed.tensor = None),
    ("spatial", |fixed| fixed.grid = None),
    ("micro_batch", |fixed| fixed.micro_batch = None),
    ("schedule", |fixed| fixed.schedule = None),
    ("chunks", |fixed| fixed.chunks = None),
    ("recompute", |fixed| fixed.recompute = None),
    ("zero", |fixed| fixed.zero = None),
    ("state", |fixed| fixed.compressed = None),
    ("weights", |fixed| fixed.compressed_weights = None),
];

impl SearchConstraints {
    /// Reads `field=value,field=value`.
    pub fn parse(text: &str) -> Result<SearchConstraints, Error> {
        let mut fixed = SearchConstraints::default();
        let mut named = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (field, value) = pair.split_once('=').ok_or_else(|| Error::Override {
                text: pair.into(),
                expected: "FIELD=VALUE, as in `data=32,pipeline=4,micro_batch=1`".into(),
            })?;
            let field = field.trim();
            fixed.set(field, value.trim())?;
            if named.contains(&field) {
                return Err(Error::conflict(format!("--layout {field}"), "is written twice"));
            }
            named.push(field);
        }
        Ok(fixed)
    }

    fn set(&mut self, field: &str, value: &str) -> Result<(), Error> {
        let wrong =
            |expected: &str| Error::value(format!("--layout {field}"), expected, format!("\"{value}\""));
        let integer = || {
            let number = value.parse::<usize>().ok().filter(|number| *number > 0);
            number.ok_or_else(|| wrong("a whole number of at least 1"))
        };
        match field {
            "data" => self.data = Some(integer()?),
            "pipeline" => self.pipeline = Some(integer()?),
            "tensor" => self.tensor = Some(integer()?),
            "micro_batch" => self.micro_batch = Some(integer()?),
            "chunks" => self.chunks = Some(integer()?).filter(|chunks| *chunks > 1),
            "spatial" => {
                let sides = value.split('x').map(|side| side.parse::<usize>().ok().filter(|side| *side > 0));
                self.grid = match sides.collect::<Option<Vec<usize>>>().as_deref() {
                    Some([rows]) => Some([*rows, 1]),
                    Some([rows, columns]) => Some([*rows, *columns]),
                    _ => return Err(wrong("a number of ranks, or rows x columns as in 2x2")),
                };
            }
            "sequence" => self.sequence = Some(value.parse().map_err(|_| wrong("true or false"))?),
            "schedule" => self.schedule = Some(value.parse().map_err(|_| wrong(&ScheduleName::list()))?),
            "recompute" => {
                let all = [RecomputeMode::None, RecomputeMode::Attention, RecomputeMode::Block];
                let found = all.into_iter().find(|kind| kind.to_string() == value);
                let blocks = || integer().ok().map(RecomputeMode::Blocks);
                let found = found.or_else(blocks);
                self.recompute =
                    Some(found.ok_or_else(|| wrong("none, attention, block or a number of blocks"))?);
            }
            "zero" => {
                self.zero =
                    Some(value.parse().ok().filter(|zero| *zero <= 3).ok_or_else(|| wrong("0, 1, 2 or 3"))?);
            }
            "state" | "weights" => {
                let compressed = match value {
                    "dense" => false,
                    "compressed" => true,
                    _ => return Err(wrong("dense or compressed")),
                };
                let form = if field == "state" { &mut self.compressed } else { &mut self.compressed_weights };
                *form = Some(compressed);
            }
            _ => {
                let hint =
                    nearest(field, FIELDS.map(|(name, _)| name)).map(|near| format!("--layout {near}"));
                return Err(Error::UnknownField { field: format!("--layout {field}"), hint });
            }
        }
        Ok(())
    }

    /// Whether a choice is left.
    pub(super) fn allows<T: PartialEq>(&self, chosen: Option<T>, choice: T) -> bool {
        chosen.is_none_or(|chosen| chosen == choice)
    }

    /// Of each field that is fixed its name, and the same without it.
    pub(super) fn without_each(&self) -> Vec<(&'static str, SearchConstraints)> {
        let without = |(name, free): (&'static str, Free)| {
            let mut freed = self.clone();
            free(&mut freed);
            (freed != *self).then_some((name, freed))
        };
        FIELDS.into_iter().filter_map(without).collect()
    }

    /// Whether all is free.
    pub fn is_empty(&self) -> bool {
        *self == SearchConstraints::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_read_and_mistakes_get_a_sentence() {
        let fixed = SearchConstraints::parse(
            "data=32, pipeline=1,tensor=2,micro_batch=4,recompute=block,schedule=1f1b",
        )
        .unwrap();
        assert_eq!(
            (fixed.data, fixed.micro_batch, fixed.recompute),
            (Some(32), Some(4), Some(RecomputeMode::Block))
        );
        assert_eq!(SearchConstraints::parse("spatial=2x4").unwrap().grid, Some([2, 4]));
        assert!(SearchConstraints::parse("").unwrap().is_empty());
        let said = |text| SearchConstraints::parse(text).unwrap_err().to_string();
        insta::assert_snapshot!(said("dta=3"), @"`--layout dta` is not a field; did you mean `--layout data`?");
        insta::assert_snapshot!(said("data=2,data=4"), @"`--layout data` is written twice");
        insta::assert_snapshot!(said("data=0"), @r#"`--layout data` must be a whole number of at least 1, got "0""#);
        insta::assert_snapshot!(said("data"), @"override `data` must be FIELD=VALUE, as in `data=32,pipeline=4,micro_batch=1`");
        insta::assert_snapshot!(said("recompute=all"), @r#"`--layout recompute` must be none, attention, block or a number of blocks, got "all""#);
    }
}
