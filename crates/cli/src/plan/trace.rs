//! A step of a layout in virtual time, as the file that a run's `--trace` writes: the same types, and the
//! same names for what ranks do. The bytes of messages, and buckets of gradients that travel beside the
//! passes, only a run has.

use anyhow::Result;
use espalier_plan::schedule::ActionSpan as Planned;
use espalier_plan::simulate::{Candidate, Simulation};
use espalier_plan::{Mesh, PerAxis};
use espalier_train::Error;
use espalier_train::run::trace::{TraceEvent, TraceFile};
use espalier_train::step::{TraceKind, TraceSpan};

use super::PlanRequest;
use crate::output::print_err;
use crate::output_file::OutputFile;

/// Writes it; rows have the numbers of the ranks that they would be.
pub fn write(request: &PlanRequest, candidate: &Candidate, output: &OutputFile) -> Result<()> {
    let job = Simulation::new(&request.plan, &request.cluster, request.engine);
    let timeline = job.timeline(candidate).map_err(Error::Plan)?;
    let mesh = Mesh::new(candidate.axis_sizes()).expect("a candidate has ranks on every axis");
    let rows = timeline.spans.iter().enumerate().map(|(stage, spans)| {
        let rank = mesh.rank(PerAxis { pipeline: stage, ..PerAxis::ZEROS });
        let visible = spans.iter().filter_map(shown).enumerate();
        (rank, visible.flat_map(|(number, span)| TraceEvent::of(rank, number, &span)).collect())
    });
    let text = serde_json::to_string(&TraceFile::of_ranks(rows.collect())).expect("a trace is plain data");
    output.finish(&text)?;
    let ranks = match candidate.pipeline {
        1 => "one rank".to_owned(),
        stages => format!("one rank for each of the {stages} pipeline stages"),
    };
    print_err!("{}: simulated timeline of one step of {candidate}, {ranks}", output.file().display());
    Ok(())
}

/// A planned action as a run would have traced it.
fn shown(planned: &Planned) -> Option<TraceSpan> {
    let &Planned { action, start, end, .. } = planned;
    Some(TraceSpan { kind: TraceKind::of(&action)?, start, end, bytes: 0 })
}
