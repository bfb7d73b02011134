//! `espalier schedule`: a pipeline schedule as a picture, as figures, or as lines that can be read back.
//!
//! Standard output has what was asked for: the picture and the figures, or the lines of `--actions`, beside
//! which the picture goes to standard error.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::schedule::{
    Ink, PassUnits, Schedule, ScheduleName, ScheduleOptions, ScheduleReport, Timeline,
};
use espalier_train::Error;

use crate::output;

#[derive(Args)]
#[command(
    after_help = "Schedules: gpipe, 1f1b, interleaved, pipedream, 2bw, chimera, chimera-doubling, zb-h1, axonn;\ndocs/schedules.md explains them.

Examples:
  espalier schedule 1f1b --stages 4 --micro-batches 8
  espalier schedule chimera --stages 8 --micro-batches 8 --pipelines 4 --backward 1
  espalier schedule zb-h1 --stages 4 --micro-batches 8 --actions > mine.txt
  espalier schedule --file mine.txt"
)]
pub struct ScheduleArguments {
    /// Schedule name.
    #[arg(required_unless_present = "file")]
    name: Option<String>,
    /// Number of pipeline stages.
    #[arg(long, value_name = "P", required_unless_present = "file")]
    stages: Option<usize>,
    /// Micro-batches per batch.
    #[arg(long, value_name = "M", required_unless_present = "file")]
    micro_batches: Option<usize>,
    /// Time of one micro-batch's forward pass on one stage.
    #[arg(long, value_name = "UNITS", allow_negative_numbers = true, default_value_t = PassUnits::default().forward)]
    forward: f64,
    /// Time of its backward pass; zb-h1 splits it into input and weight gradients, half each.
    #[arg(long, value_name = "UNITS", allow_negative_numbers = true, default_value_t = PassUnits::default().backward)]
    backward: f64,
    /// Model chunks per rank (virtual stages), for interleaved [default: 2].
    #[arg(long, value_name = "V")]
    chunks: Option<usize>,
    /// Number of pipelines, half in each direction, for chimera [default: 2].
    #[arg(long, value_name = "N")]
    pipelines: Option<usize>,
    /// Number of consecutive batches [default: 1].
    #[arg(long, value_name = "N")]
    batches: Option<usize>,
    /// Read, check and draw a custom schedule.
    #[arg(long, conflicts_with_all = ["name", "stages", "micro_batches", "chunks", "pipelines", "batches"])]
    file: Option<PathBuf>,
    /// Print every action of every rank, including messages and optimizer steps, in the format of --file.
    #[arg(long)]
    actions: bool,
    /// Print bubble, idle time and actions as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

pub fn schedule(arguments: &ScheduleArguments) -> Result<ExitCode> {
    let units = PassUnits { forward: arguments.forward, backward: arguments.backward };
    let (schedule, timeline, report) = match &arguments.file {
        Some(path) => read(path, units)?,
        None => {
            let name: ScheduleName = arguments.name.as_deref().expect("asked for without a file").parse()?;
            let options = ScheduleOptions {
                stages: arguments.stages.expect("asked for without a file"),
                micro_batches: arguments.micro_batches.expect("asked for without a file"),
                batches: arguments.batches.unwrap_or(1),
                chunks: arguments.chunks,
                pipelines: arguments.pipelines,
                units,
            };
            ScheduleReport::of(name, &options)?
        }
    };
    let on_terminal =
        if arguments.actions { io::stderr().is_terminal() } else { output::answers_on_terminal() };
    let colour = on_terminal && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    let ink = if colour { Ink::Colour } else { Ink::Plain };
    let drawn = format!("{}\n{}", timeline.picture(&schedule, ink), figures(&report));
    if !arguments.actions {
        output::on_standard_output(&drawn);
    } else {
        output::on_standard_error(&drawn);
        match io::stdout().write_all(schedule.to_string().as_bytes()) {
            // Whoever reads has seen enough, as `head` does.
            Err(why) if why.kind() == io::ErrorKind::BrokenPipe => {}
            outcome => outcome.context("the actions cannot be written to standard output")?,
        }
    }
    output::answer(arguments.json, || &report)
}

/// A schedule from a file, once it is known that it can be run.
fn read(path: &Path, units: PassUnits) -> Result<(Schedule, Timeline, ScheduleReport)> {
    let unread = |why| Error::of_io(path, &why, format!("the schedule cannot be read: {why}"));
    let text = regular_file::read_text(path, SETTINGS).map_err(unread)?;
    let checked = || {
        let schedule = Schedule::parse(&text)?;
        schedule.validate()?;
        let (timeline, report) = ScheduleReport::new(&schedule, units)?;
        Ok::<_, espalier_plan::schedule::ScheduleError>((schedule, timeline, report))
    };
    checked().with_context(|| path.display().to_string())
}

/// What the picture comes to.
fn figures(report: &ScheduleReport) -> String {
    let mut text = String::new();
    let mut line =
        |name: &str, value: String| writeln!(text, "{name:<17}{value}").expect("a string takes it");
    let percent = format!("{:.1} %", 100.0 * report.bubble_ratio);
    let idle = |idle: &[f64]| series(idle.iter().map(|&idle| units(idle)));
    let of_all = format!("idle {} of {} units", idle(&report.idle), units(report.time));
    match &report.fill_and_drain {
        None => line("bubble", format!("{percent} ({of_all})")),
        Some(once) => {
            line("bubble", format!("{percent} once the pipeline is full ({of_all})"));
            // The first two batches of 2bw use the same weights: where a batch waits for those before, they
            // do not.
            let fewer: Vec<f64> = once.iter().map(|once| -once).collect();
            match fewer.iter().all(|fewer| *fewer > 0.0) {
                false => line("fill and drain", format!("idle {} units, once per run", idle(once))),
                true => line("fill and drain", format!("idle {} units less, once per run", idle(&fewer))),
            }
        }
    }
    line("in flight", series(report.in_flight.iter()));
    if report.held != report.in_flight {
        line("held", format!("{} (until weight gradients are computed)", series(report.held.iter())));
    }
    line("weight versions", series(report.weight_versions.iter()));
    if report.copies > 1 {
        line("model copies", report.copies.to_string());
    }
    if report.message_driven {
        line(
            "message-driven",
            "a rank runs whatever has arrived; this is the order with ideal timing".into(),
        );
    }
    text
}

/// One value where all ranks have the same, and all of them otherwise.
fn series(values: impl Iterator<Item = impl ToString>) -> String {
    let mut values: Vec<String> = values.map(|value| value.to_string()).collect();
    if values.iter().all(|value| *value == values[0]) {
        values.truncate(1);
    }
    values.join(" ")
}

/// Not more digits than one reads.
fn units(value: f64) -> String {
    ((value * 1000.0).round() / 1000.0).to_string()
}
