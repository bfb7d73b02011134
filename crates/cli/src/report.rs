//! `espalier report`: what runs or a study came to, or have come to so far, and what a plan says, as pictures.
//! It reads their folders and changes nothing in them but the page that it writes.

mod curves;
mod page;
mod pipeline;
mod series;
mod state;
mod study;
mod tensorboard;
mod time_to_result;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_report::{Figure, serve};
use espalier_study::folder;
use serde_json::json;

use crate::output::{self, print_err, print_out};
use crate::output_file::{OutputFile, may_replace};
use crate::records::{self, RunRecord};
use crate::watch::watch;

#[derive(Args)]
#[command(
    after_help = "One run: curves, memory, density per layer, pipeline. Several runs: their curves in one plot, and how their settings differ.
Several studies: steps to the result, a panel for each.
Default output: RUN/report.html for one run, ./report.html for several, STUDY/study.html for a study, PLAN/time-to-result.html for a plan.

Examples:
  espalier report out/hello
  espalier report out/hello out/hello-2 -o compared.html
  espalier report out/hello --svg hello.svg --json
  espalier report out/hello --csv hello.csv --tensorboard events
  espalier report out/hello --serve
  espalier report out/hello --serve 0.0.0.0:8700
  espalier report out/w3-small --svg steps-to-result.svg
  espalier report out/w1 out/w2 out/w3 out/w4 --svg workloads.svg
  espalier report out/w3-plan"
)]
pub struct ReportArguments {
    /// Run folders, or study folders, or a folder of `espalier plan --save`.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Output HTML page.
    #[arg(short, long, value_name = "FILE.html", help_heading = "Files")]
    out: Option<PathBuf>,
    /// Write the curves as SVG. With --svg, --csv or --tensorboard, an HTML page is written only if -o is given.
    #[arg(long, value_name = "FILE.svg", help_heading = "Files")]
    svg: Option<PathBuf>,
    /// Write the metrics as CSV.
    #[arg(long, value_name = "FILE.csv", help_heading = "Files")]
    csv: Option<PathBuf>,
    /// Write the metrics as TensorBoard event files, one folder per run.
    #[arg(long, value_name = "DIR", help_heading = "Files")]
    tensorboard: Option<PathBuf>,
    /// Timeline of the run (`train --trace`) [default: trace.json in the run folder].
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    trace: Option<PathBuf>,
    /// Serve the page over HTTP with live updates [default address: 127.0.0.1:8700].
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = serve::ADDRESS,
          conflicts_with_all = ["out", "svg", "csv", "tensorboard", "json"])]
    serve: Option<String>,
    /// Print the results of the runs as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

pub fn report(arguments: &ReportArguments) -> Result<ExitCode> {
    if arguments.runs.len() > 1 && arguments.runs.iter().all(|folder| folder::is_study(folder)) {
        return study::compare(arguments);
    }
    if let Some(folder) = arguments.runs.iter().find(|folder| folder::is_study(folder)) {
        return study::report(arguments, folder);
    }
    for folder in &arguments.runs {
        if let Some(plan) = crate::time_to_result::read(folder)? {
            return time_to_result::report(arguments, folder, &plan);
        }
    }
    let mut runs = arguments.runs.iter().map(|run| RunRecord::open(run)).collect::<Result<Vec<_>>>()?;
    if let Some(trace) = &arguments.trace {
        let [run] = &mut runs[..] else {
            let problem = "is the timeline of one run, and there are several";
            return Err(crate::run_file::conflict("--trace", problem).into());
        };
        run.read_trace(trace)?;
    }
    records::disambiguate(&mut runs);
    if let Some(address) = &arguments.serve {
        let names = runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ");
        return watch(address, &names, move || {
            runs.iter_mut().for_each(RunRecord::update);
            page::of(&runs)
        });
    }
    let outputs = match &runs[..] {
        [run] => ReportFiles::open(arguments, run.folder.join("report.html"))?,
        _ => ReportFiles::open(arguments, "report.html".into())?,
    };
    for run in &runs {
        print_out!("{}: {}", run.name, run.sentence());
        run.notes().iter().for_each(|note| print_err!("note: {note}"));
    }
    outputs.write(|form| Ok(form.text(&runs)))?;
    if let Some(folder) = &arguments.tensorboard {
        for run in &runs {
            tensorboard::write(run, folder)?;
        }
        print_out!("event files: {}", folder.display());
    }
    output::answer(arguments.json, || {
        json!({
            "runs": runs.iter().map(RunRecord::json).collect::<Vec<_>>(),
            "differ": records::differing(&runs),
            "page": outputs.page,
            "svg": arguments.svg,
            "csv": arguments.csv,
            "tensorboard": arguments.tensorboard,
        })
    })
}

/// The files that a report writes; all can be written before any is.
struct ReportFiles {
    /// The page, unless another file alone is asked for.
    page: Option<PathBuf>,
    files: Vec<(ReportFormat, OutputFile)>,
}

impl ReportFiles {
    /// Those that are asked for; a page that nobody has named is called as usual.
    fn open(arguments: &ReportArguments, usual: PathBuf) -> Result<ReportFiles> {
        let ReportArguments { out, svg, csv, tensorboard, .. } = arguments;
        let is_other = svg.is_some() || csv.is_some() || tensorboard.is_some();
        let page = out.clone().or((!is_other).then_some(usual));
        let mut files = Vec::new();
        for (form, file) in
            [(ReportFormat::Page, &page), (ReportFormat::Picture, svg), (ReportFormat::Table, csv)]
        {
            let Some(file) = file else { continue };
            form.may_replace(file)?;
            files.push((form, OutputFile::open(file, form.flag())?));
        }
        Ok(ReportFiles { page, files })
    }

    fn write(&self, mut text: impl FnMut(ReportFormat) -> Result<String>) -> Result<()> {
        for (form, output) in &self.files {
            output.finish(&text(*form)?)?;
            print_out!("{}: {}", form.name(), output.file().display());
        }
        Ok(())
    }
}

/// What runs can be written as.
#[derive(Clone, Copy)]
enum ReportFormat {
    Page,
    Picture,
    Table,
}

impl ReportFormat {
    fn name(self) -> &'static str {
        match self {
            ReportFormat::Page => "page",
            ReportFormat::Picture => "picture",
            ReportFormat::Table => "table",
        }
    }

    /// What names its file.
    fn flag(self) -> &'static str {
        match self {
            ReportFormat::Page => "-o",
            ReportFormat::Picture => "--svg",
            ReportFormat::Table => "--csv",
        }
    }

    fn text(self, runs: &[RunRecord]) -> String {
        match self {
            ReportFormat::Page => page::of(runs).html(),
            ReportFormat::Picture => curves::figure(runs).svg(),
            ReportFormat::Table => series::csv(runs),
        }
    }

    /// Refuses to write over a file that does not begin like this one.
    fn may_replace(self, file: &Path) -> Result<()> {
        let is_ours = |head: &[u8]| match self {
            ReportFormat::Page => starts(head, "<!doctype html"),
            ReportFormat::Picture => Figure::is_figure(head),
            ReportFormat::Table => starts(head, "run,step,"),
        };
        may_replace(file, &format!("{} of a report", self.name()), is_ours, "remove it")
    }
}

fn starts(head: &[u8], with: &str) -> bool {
    head.get(..with.len()).is_some_and(|head| head.eq_ignore_ascii_case(with.as_bytes()))
}
