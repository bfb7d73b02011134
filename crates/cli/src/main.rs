//! `espalier`: the one binary. It reads arguments, talks to a person or a program, and calls the libraries.

#![forbid(unsafe_code)]
// They panic where nobody listens any more, and the run would end with that.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod auto_layout;
mod bench;
mod chat;
mod classify;
mod comm_timing;
mod compare;
mod completions;
mod data;
mod device;
mod doctor;
mod eval;
mod explain;
mod export;
mod generate;
mod generation;
mod layout_picture;
mod local_cluster;
mod log;
mod measure;
mod output;
mod output_file;
mod plan;
mod predicted;
mod prepared;
mod profile;
mod progress;
mod prune;
mod ranks;
mod read_progress;
mod records;
mod report;
mod restart;
mod run_file;
mod runs;
mod schedule;
mod setting;
mod signals;
mod spinner;
mod start;
mod study;
mod text_table;
mod time_to_result;
mod tokenize;
mod train;
mod verify;
mod watch;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use espalier_plan::config;
use espalier_train::{Error, is_failure};

use output::print_err;

/// Prunes neural networks and trains them in parallel.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true, max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model from a run file.
    Train(train::TrainArguments),
    /// Prune a checkpoint.
    Prune(prune::PruneArguments),
    /// Measure sharpness, Hessian eigenvalues and gradient noise scale at a
    /// checkpoint.
    Measure(measure::MeasureArguments),
    /// Generate text with a trained model.
    Generate(generate::GenerateArguments),
    /// Chat with a trained model.
    Chat(chat::ChatArguments),
    /// Name what a trained model sees in pictures.
    Classify(classify::ClassifyArguments),
    /// Evaluate a trained model on data.
    Eval(eval::EvalArguments),
    /// Export a checkpoint in Hugging Face format.
    Export(export::ExportArguments),
    /// Tokenize text into binary token files.
    Tokenize(tokenize::TokenizeArguments),
    /// Get a well-known data set: CIFAR-10, MNIST.
    Data(data::DataArguments),
    /// Verify the checksums of a run's checkpoints.
    Verify(verify::VerifyArguments),
    /// Draw a pipeline schedule: bubble, micro-batches in flight.
    Schedule(schedule::ScheduleArguments),
    /// Find the fastest parallel layout that fits on N GPUs, and explain it.
    Plan(Box<plan::PlanArguments>),
    /// Show each layer's communication cost under each parallelism.
    Explain(explain::ExplainArguments),
    /// Plot runs on an HTML page, or live in a browser.
    Report(report::ReportArguments),
    /// List the runs in a folder.
    Runs(runs::RunsArguments),
    /// Show how runs differ: settings and results.
    Compare(compare::CompareArguments),
    /// Measure steps to a target loss over batch sizes and sparsities.
    Study(study::StudyArguments),
    /// Check this machine: CPU, GPU, CUDA, NCCL, MPI, disk.
    Doctor(doctor::DoctorArguments),
    /// Benchmark this machine.
    Bench(bench::BenchArguments),
    /// Print a shell completion script.
    Completions(completions::CompletionsArguments),
}

fn main() -> ExitCode {
    let parsed = commands().try_get_matches();
    if parsed.as_ref().is_ok_and(asks_for_json) {
        output::keep_output_for_json();
    }
    let arguments = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    // A file that grows beyond the limit of this process is an error where it is written, like a full disk,
    // and no end.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::<AtomicBool>::default());
    let outcome = match arguments.command {
        Command::Train(arguments) => train::train(&arguments),
        Command::Prune(arguments) => prune::prune(&arguments),
        Command::Measure(arguments) => measure::measure(&arguments),
        Command::Generate(arguments) => generate::generate(&arguments),
        Command::Chat(arguments) => chat::chat(&arguments),
        Command::Classify(arguments) => classify::classify(&arguments),
        Command::Eval(arguments) => eval::eval(&arguments),
        Command::Export(arguments) => export::export(&arguments),
        Command::Tokenize(arguments) => tokenize::tokenize(&arguments),
        Command::Data(arguments) => data::data(&arguments),
        Command::Verify(arguments) => verify::verify(&arguments),
        Command::Schedule(arguments) => schedule::schedule(&arguments),
        Command::Plan(arguments) => plan::plan(&arguments),
        Command::Explain(arguments) => explain::explain(&arguments),
        Command::Report(arguments) => report::report(&arguments),
        Command::Runs(arguments) => runs::runs(&arguments),
        Command::Compare(arguments) => compare::compare(&arguments),
        Command::Study(arguments) => study::study(&arguments),
        Command::Doctor(arguments) => doctor::doctor(&arguments),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::Completions(arguments) => completions::completions(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => ExitCode::from(print_error(&error)),
    }
}

/// What the commands are for, in the order of the help.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Train and prune", &["train", "prune", "study"]),
    ("Use a model", &["generate", "chat", "classify", "eval", "export"]),
    ("Plan", &["plan", "explain", "schedule"]),
    ("Inspect runs", &["runs", "compare", "report", "verify", "measure"]),
    ("Machine and files", &["doctor", "bench", "tokenize", "data", "completions", "help"]),
];

/// All commands, listed in groups: one list of twenty is read by nobody.
fn commands() -> clap::Command {
    let mut all = Cli::command();
    all.build();
    let mut list = String::new();
    for (group, names) in GROUPS {
        list += &format!("\n{group}:\n");
        for command in names.iter().filter_map(|name| all.find_subcommand(name)) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            list += &format!("  {:<12} {}\n", command.get_name(), about.trim_end_matches('.'));
        }
    }
    let template = "{about-with-newline}\n{usage-heading} {usage}{after-help}\n\nOptions:\n{options}";
    Cli::command().help_template(template).after_help(list.trim().to_owned())
}

/// Whether the command, however deep, is asked for its line of JSON.
fn asks_for_json(matches: &ArgMatches) -> bool {
    matches!(matches.try_get_one("json"), Ok(Some(true)))
        || matches.subcommand().is_some_and(|(_, below)| asks_for_json(below))
}

/// Says what is wrong with the arguments, or prints the help that they ask for.
fn refuse(error: &clap::Error) -> ExitCode {
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if is_help || !error.use_stderr() {
        // Whoever closed the pipe has read enough.
        let _ = error.print();
    } else {
        print_err!("error: {}{}", one_sentence(&error.render().to_string()), field_meant(error));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// How a field of a run file is set, where an argument that there is not is called like one, here or in other
/// tools.
fn field_meant(error: &clap::Error) -> String {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
        return String::new();
    };
    let is_known = error.get(ContextKind::SuggestedArg).is_some();
    let field = match error.kind() {
        ErrorKind::UnknownArgument if !is_known => config::by_another_name(argument.trim_start_matches('-')),
        _ => None,
    };
    field.map_or(String::new(), |field| format!("; a field of the run file is set with --set {field}=VALUE"))
}

/// What clap says of an error in several paragraphs, without those that say it again for every error.
fn one_sentence(paragraphs: &str) -> String {
    let lines = paragraphs.lines().map(str::trim).filter(|line| !line.is_empty());
    let lines =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let mut sentence = String::new();
    for line in lines {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        match line.strip_prefix("tip: ") {
            // Nobody means an option as a value.
            Some(tip) if tip.starts_with("to pass ") => {}
            Some(tip) => sentence += &format!("; {tip}"),
            None if sentence.is_empty() => sentence += line,
            None => sentence += &format!(" {line}"),
        }
    }
    sentence
}

/// Says what went wrong; returns the exit code of it.
fn print_error(error: &anyhow::Error) -> u8 {
    print_err!("error: {}", sentence(error));
    exit_code(error)
}

/// The one sentence of an error, with what to do about it where a setting of the run file helps.
fn sentence(error: &anyhow::Error) -> String {
    let mut cause = error.downcast_ref::<Error>();
    while let Some(Error::RankFailed { error, .. } | Error::RanksLeft { error, .. }) = cause {
        cause = Some(error);
    }
    let advice = match cause {
        Some(Error::Tensor(espalier_tensor::Error::OutOfMemory { .. })) => {
            "; a smaller train.batch, more train.micro_batches, train.recompute = \"block\" or \
             train.precision = \"bf16\" need less"
        }
        _ => "",
    };
    let mut sentence = String::new();
    for cause in error.chain().map(ToString::to_string) {
        // Most errors of ours name their cause themselves.
        if sentence.is_empty() {
            sentence = cause;
        } else if !sentence.ends_with(&cause) {
            sentence += &format!(": {cause}");
        }
    }
    sentence + advice
}

/// 2: the user's input; 3: a rank, a device or the disk; 4: diverged; 1: our fault. (Interrupted and saved,
/// 130, is no error.)
fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<espalier_tensor::Error>() {
        return 3;
    }
    match error.downcast_ref::<Error>() {
        Some(Error::Data(espalier_data::Error::Write { .. })) => 3,
        Some(Error::Data(espalier_data::Error::Read { source, .. })) if is_failure(source) => 3,
        Some(Error::Plan(_) | Error::Data(_) | Error::Checkpoint { .. } | Error::File { .. }) => 2,
        Some(Error::TooLarge { .. }) => 2,
        // What the launcher says is input too.
        Some(Error::Comm(
            espalier_comm::Error::Variables { .. } | espalier_comm::Error::TooManyThreads { .. },
        )) => 2,
        Some(Error::Tensor(_) | Error::Comm(_) | Error::Disagree { .. }) => 3,
        Some(Error::RankFailed { .. } | Error::RankEnded { .. } | Error::RanksLeft { .. }) => 3,
        Some(Error::Disk { .. }) => 3,
        Some(Error::Diverged { .. } | Error::NotFinite { .. } | Error::Unmeasurable { .. }) => 4,
        Some(Error::BrokenWeights { .. }) => 4,
        None if error.is::<espalier_plan::schedule::ScheduleError>() => 2,
        None if error.is::<std::io::Error>() => 3,
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use espalier_comm::Failure;
    use espalier_tensor::memory::{Category, Ledger};

    use super::*;

    /// So many bytes that a device of this ledger does not have.
    fn refused(asked: usize, ledger: &Ledger) -> Error {
        let (category, used) = (Category::Activations, Box::new(ledger.usage()));
        Error::Tensor(espalier_tensor::Error::OutOfMemory { asked, category, used })
    }

    #[test]
    fn a_rank_that_fails_is_named_and_no_fault_of_the_user() {
        let failed = Error::RankFailed { rank: 3, error: Box::new(refused(4_000, &Ledger::default())) };
        let panicked = Error::RankEnded { rank: 1, how: "panicked", why: "out of luck".into() };
        let (failed, panicked) = (anyhow::Error::from(failed), anyhow::Error::from(panicked));
        assert_eq!((exit_code(&failed), exit_code(&panicked)), (3, 3));
        assert!(sentence(&failed).starts_with("rank 3 failed: out of memory"), "{}", sentence(&failed));
        assert!(sentence(&failed).contains("a smaller train.batch"), "{}", sentence(&failed));
        assert_eq!(sentence(&panicked), "rank 1 panicked: out of luck");
    }

    /// Whatever was the first to go wrong, on a GPU or among ranks, the rank that hangs is named behind it.
    #[test]
    fn a_rank_that_hangs_is_named_and_no_fault_of_the_user() {
        let first = Failure::Failed { rank: 3, error: refused(4_000, &Ledger::default()) };
        let hangs = |first, left| {
            let waited = Duration::from_secs(5);
            anyhow::Error::from(Error::from(Failure::LeftBehind { first: Box::new(first), left, waited }))
        };
        let error = hangs(first, vec![0, 2]);
        assert_eq!(exit_code(&error), 3);
        let text = sentence(&error);
        assert!(text.starts_with("rank 3 failed: out of memory"), "{text}");
        assert!(
            text.contains("; the run ends without ranks 0 and 2, not heard of for another 5.0 s;"),
            "{text}"
        );
        assert!(text.contains("a smaller train.batch"), "{text}");

        let mistake = Error::File { path: "data.bin".into(), why: "it is empty".into() };
        let error = hangs(Failure::Failed { rank: 1, error: mistake }, vec![0]);
        assert_eq!((exit_code(&error), &*sentence(&error)), (2, "data.bin: it is empty"));
    }

    #[test]
    fn an_error_that_names_its_cause_says_it_once() {
        let source = std::io::Error::other("the disk is gone");
        let error = espalier_data::Error::Read { path: "ids.bin".into(), source };
        let error = anyhow::Error::from(Error::Data(error)).context("rank 1");
        assert_eq!(sentence(&error), "rank 1: ids.bin cannot be read: the disk is gone");
    }

    /// A command that is in no group would be in no help.
    #[test]
    fn every_command_is_in_one_group() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let mut all = Cli::command();
        all.build();
        let mut named: Vec<&str> = all.get_subcommands().map(clap::Command::get_name).collect();
        grouped.sort_unstable();
        named.sort_unstable();
        assert_eq!(grouped, named);
    }

    /// `-o` is where something is written, whatever the command, and `--ranks` how many of them there are.
    #[test]
    fn options_of_a_name_mean_the_same() {
        fn check(command: &clap::Command) {
            for option in command.get_arguments() {
                let (name, long) = (command.get_name(), option.get_long().unwrap_or_default());
                let others = option.get_visible_aliases().unwrap_or_default();
                if option.get_short() == Some('o') || long == "out" {
                    assert!(long == "out" || others.contains(&"out"), "-o of {name}");
                    assert_eq!(option.get_short(), Some('o'), "--out of {name}");
                }
                if long == "json" {
                    assert_eq!(option.get_id(), "json", "{name}");
                }
            }
            command.get_subcommands().for_each(check);
        }
        let mut all = Cli::command();
        all.build();
        check(&all);
    }

    #[test]
    fn arguments_that_are_wrong_get_one_sentence() {
        let message = |arguments: &[&str]| {
            let error =
                Cli::try_parse_from(["espalier"].iter().chain(arguments)).err().expect("they are wrong");
            one_sentence(&error.render().to_string()) + &field_meant(&error)
        };
        assert_eq!(
            message(&["train", "run.toml", "--resum"]),
            "unexpected argument '--resum' found; a similar argument exists: '--resume'"
        );
        assert_eq!(
            message(&["train", "run.toml", "--batch-size=4"]),
            "unexpected argument '--batch-size' found; a field of the run file is set with --set train.batch=VALUE"
        );
        assert_eq!(message(&["train"]), "the following required arguments were not provided: <RUN_FILE>");
        assert_eq!(
            message(&["train", "run.toml", "--ranks", "many"]),
            "invalid value 'many' for '--ranks <N>': invalid digit found in string"
        );
    }

    #[test]
    fn a_full_device_says_what_fills_it_and_what_helps() {
        let ledger = Ledger::default();
        ledger.allocate(Category::Weights, 500_000_000);
        ledger.allocate(Category::Activations, 76_000_000_000);
        let error = anyhow::Error::from(refused(4_000_000_000, &ledger));
        assert_eq!(exit_code(&error), 3);
        assert_eq!(
            sentence(&error),
            "out of memory: the device refused 4.00 GB for activations, beside 76.50 GB (weights 500.0 MB, \
             activations 76.00 GB) in use; a smaller train.batch, more train.micro_batches, train.recompute = \
             \"block\" or train.precision = \"bf16\" need less"
        );
    }
}
