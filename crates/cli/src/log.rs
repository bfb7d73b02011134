//! `--log LEVEL`: what the libraries log by `tracing`, one line each, for whoever has to find out where a
//! run hangs. Off unless asked for; then nothing is even formatted.
//!
//! ```text
//!     0.041822 DEBUG rank 1: step 2: waits for all_reduce (sum) of 3 f64, 24 bytes, among ranks 0 and 1
//! ```

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;
use espalier_train::Error;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::output;

/// How much is logged.
#[derive(Args)]
#[command(next_help_heading = "Log")]
pub struct LogArguments {
    /// Log what each rank does to standard error: error, warn, info (milestones of the run), debug (each
    /// action and each wait, before it starts) or trace (also when it ends).
    #[arg(long = "log", value_name = "LEVEL", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"]))]
    level: Option<String>,
    /// Append the log to this file instead; ranks of a launcher write FILE.RANK.
    #[arg(long = "log-file", value_name = "FILE", requires = "level")]
    file: Option<PathBuf>,
}

impl LogArguments {
    /// Whether lines come between those for a person.
    pub fn is_on_standard_error(&self) -> bool {
        self.level.is_some() && self.file.is_none()
    }

    /// The options that ask for the same.
    pub fn options(&self) -> impl Iterator<Item = (&'static str, &OsStr)> {
        let level = self.level.iter().map(|level| ("--log", level.as_ref()));
        level.chain(self.file.iter().map(|file| ("--log-file", file.as_os_str())))
    }

    /// Listens from now on, where somebody wants that; `rank` is this process's among those of a launcher.
    pub fn start(&self, rank: Option<usize>) -> Result<()> {
        let Some(level) = &self.level else { return Ok(()) };
        let level: LevelFilter = level.parse().expect("a level that was checked");
        let file = self.file.as_ref().map(|path| {
            let mut path = path.clone().into_os_string();
            if let Some(rank) = rank {
                path.push(format!(".{rank}"));
            }
            let why = |why: io::Error| Error::of_io(&path, &why, format!("the log cannot be written: {why}"));
            // A run that is started again goes on in the same file.
            File::options().append(true).create(true).open(&path).map_err(why)
        });
        let file = file.transpose()?;
        // What is logged on no rank's thread is logged by the process, which is one.
        let line = LogLineFormat { begin: Instant::now(), rank };
        let fields = debug_fn(|writer, field, value| match field.name() {
            "message" | "number" => write!(writer, "{value:?}"),
            name => write!(writer, "{name}={value:?}"),
        });
        let format = tracing_subscriber::fmt()
            .with_max_level(level)
            .log_internal_errors(false)
            .fmt_fields(fields)
            .event_format(line);
        let file = file.map(Arc::new);
        format.with_writer(move || LossyWriter(file.clone())).init();
        Ok(())
    }
}

/// How a line is written.
struct LogLineFormat {
    begin: Instant,
    rank: Option<usize>,
}

impl<S, N> FormatEvent<S, N> for LogLineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = event.metadata().level().as_str();
        write!(writer, "{:12.6} {level:5} ", self.begin.elapsed().as_secs_f64())?;
        let mut named = false;
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            named |= span.name() == "rank";
            write!(writer, "{}", span.name())?;
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                write!(writer, " {fields}")?;
            }
            write!(writer, ": ")?;
        }
        if let Some(rank) = self.rank.filter(|_| !named) {
            write!(writer, "rank {rank}: ")?;
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// A file, or standard error, that loses what it cannot write: nobody has to listen.
struct LossyWriter(Option<Arc<File>>);

impl Write for LossyWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match &self.0 {
            // In one call, as the lines of several ranks share it.
            Some(file) => drop((&**file).write_all(line)),
            None => output::on_standard_error(String::from_utf8_lossy(line)),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
