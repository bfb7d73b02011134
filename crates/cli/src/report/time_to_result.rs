//! The page of a time to a result that `espalier plan --save` wrote.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use espalier_plan::time_to_result::ResultTimes;
use serde_json::json;

use super::study::refuse_others;
use super::{ReportArguments, ReportFiles, ReportFormat};
use crate::output::{self, print_out};
use crate::run_file::conflict;
use crate::time_to_result;

/// Writes it.
pub fn report(arguments: &ReportArguments, folder: &Path, plan: &ResultTimes) -> Result<ExitCode> {
    refuse_others(arguments, "a plan")?;
    if arguments.serve.is_some() {
        return Err(conflict("--serve", "is for what goes on, and a plan does not").into());
    }
    let outputs = ReportFiles::open(arguments, folder.join("time-to-result.html"))?;
    print_out!("time to result of {} on {}: {} choices", plan.model, plan.cluster, plan.points.len());
    outputs.write(|form| {
        Ok(match form {
            ReportFormat::Page => time_to_result::page(plan).html(),
            _ => time_to_result::figure(plan).svg(),
        })
    })?;
    output::answer(arguments.json, || {
        let (page, svg) = (&outputs.page, &arguments.svg);
        json!({ "plan": plan.model, "of": plan.points.len(), "page": page, "svg": svg })
    })
}
