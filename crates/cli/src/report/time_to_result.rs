//! The page of a time to a result that `espalier plan --save` wrote.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use espalier_plan::time_to_result::ResultTimes;
use serde_json::json;

use super::study::{open, refuse_others};
use super::{ReportArguments, ReportFormat};
use crate::output::{self, print_out};
use crate::run_file::conflict;
use crate::time_to_result;

/// Writes it.
pub fn report(arguments: &ReportArguments, folder: &Path, plan: &ResultTimes) -> Result<ExitCode> {
    refuse_others(arguments, "a plan")?;
    if arguments.serve.is_some() {
        return Err(conflict("--serve", "is for what goes on, and a plan does not").into());
    }
    let page = match (&arguments.out, &arguments.svg) {
        (Some(out), _) => Some(out.clone()),
        (None, Some(_)) => None,
        (None, None) => Some(folder.join("time-to-result.html")),
    };
    let [html, svg] = [open(ReportFormat::Page, &page)?, open(ReportFormat::Picture, &arguments.svg)?];
    print_out!("time to result of {} on {}: {} choices", plan.model, plan.cluster, plan.points.len());
    if let Some(output) = html {
        output.finish(&time_to_result::page(plan).html())?;
        print_out!("page: {}", output.file().display());
    }
    if let Some(output) = svg {
        output.finish(&time_to_result::figure(plan).svg())?;
        print_out!("picture: {}", output.file().display());
    }
    if arguments.json {
        output::json(
            &json!({ "plan": plan.model, "of": plan.points.len(), "page": page, "svg": arguments.svg }),
        );
    }
    Ok(ExitCode::SUCCESS)
}
