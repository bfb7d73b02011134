//! `espalier eval`: how well a trained model does on data.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use espalier_plan::config::{self, Override, RunTable};
use espalier_plan::spec::Input;
use espalier_train::trained::{EvalResult, EvalWindows};

use crate::log::LogArguments;
use crate::prepared::{PreparedRun, open_trained};
use crate::run_file::{conflict, in_file, replicas};
use crate::setting::setting;
use crate::{output, progress, ranks};

#[derive(Args)]
#[command(
    after_help = "Text is tokenized with the model's own tokenizer; *.bin is a file of token ids. Images are in MNIST or \
                  CIFAR-10 format: a folder, or one file of test images (t10k-images-idx3-ubyte, test_batch.bin); or \
                  a folder of pictures for each class, by the names of the classes.

Examples:
  espalier eval out/hello
  espalier eval out/hello/checkpoints/step-000300 --data book.txt --samples 64 --json
  espalier eval out/hello --data book.txt --layout tensor=2
  espalier eval out/hello --data book.txt --stride 32
  espalier eval gpt2 --data book.txt --set train.precision=bf16 --set model.context=256"
)]
pub struct EvalArguments {
    /// A checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face checkpoint.
    checkpoint: PathBuf,
    /// Data to evaluate on, all of it [default: the run's validation split].
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Number of samples, spread evenly over the data [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Strided perplexity: windows of the context's length that begin every N tokens, of which each predicts
    /// what the one before it did not [default: windows that do not overlap].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    stride: Option<u64>,
    /// Parallel layout over ranks of this process, as in `data=2,tensor=2` or `spatial=2x2` [default: one rank].
    #[arg(long, value_name = "AXIS=N,...", default_value = "", hide_default_value = true)]
    layout: String,
    /// Number of ranks, as threads of this process; sets data = N / (pipeline x tensor x spatial).
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Override a field of the run file, as in `--set train.precision=f32`; `--set FIELD=` removes it. Paths
    /// are relative to the current folder. May be repeated.
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = setting)]
    overrides: Vec<Override>,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArguments,
}

pub fn eval(arguments: &EvalArguments) -> Result<ExitCode> {
    arguments.log.start(None)?;
    let trained = open_trained(&arguments.checkpoint)?;
    let overrides = [laid_out(&arguments.layout, arguments.ranks)?, arguments.overrides.clone()].concat();
    let dataset = trained.eval_dataset(arguments.data.as_deref(), &overrides)?;
    if let Some(note) = progress::damaged(&dataset) {
        output::print_err!("note: {note}");
    }
    if arguments.data.is_none()
        && let Some(change) = trained.changed_data(&overrides)?
    {
        output::print_err!(
            "warning: the data files {change}: the model may have been trained on some of the validation split"
        );
    }
    let plan = trained.plan_for(&dataset, &overrides)?;
    if let Some(stride) = arguments.stride {
        check_stride(stride as usize, &plan.model.input)?;
    }
    let prepared = PreparedRun { plan, dataset, process_group: None };
    let device = prepared.open_device()?;
    let PreparedRun { plan, dataset, .. } = prepared;
    let windows = EvalWindows {
        samples: arguments.samples.map(|samples| samples as usize),
        stride: arguments.stride.map(|stride| stride as usize),
    };
    let score = trained.evaluate(plan, dataset, windows, &device, Some(ranks::abort))?;
    output::print_out!("{}", in_words(&score));
    output::answer(arguments.json, || &score)
}

/// Windows with gaps between them would leave tokens out.
fn check_stride(stride: usize, input: &Input) -> Result<()> {
    match input {
        Input::Image { .. } => Err(conflict("--stride", "is for text, which is read in windows").into()),
        Input::Tokens { seq, .. } if stride > *seq => {
            let problem =
                format!("is {stride}, and the context {seq}: tokens between windows would be left out");
            Err(conflict("--stride", &problem).into())
        }
        Input::Tokens { .. } => Ok(()),
    }
}

/// `data=2,spatial=2x2` as overrides of a run file.
fn laid_out(layout: &str, ranks: Option<usize>) -> Result<Vec<Override>> {
    let wrong = |text: &str| conflict("--layout", &format!("has {text:?}, which is not AXIS=N"));
    let field = |text: &str| -> Result<Override> {
        let (axis, size) = text.split_once('=').ok_or_else(|| wrong(text))?;
        let size = match size.trim().split_once('x') {
            Some((rows, columns)) => format!("[{rows}, {columns}]"),
            None => size.trim().to_owned(),
        };
        Ok(format!("parallel.{}={size}", axis.trim()).into())
    };
    let fields = layout.split(',').map(str::trim).filter(|text| !text.is_empty()).map(field);
    let mut fields = fields.collect::<Result<Vec<Override>>>()?;
    if let Some(ranks) = ranks {
        if ranks == 0 {
            return Err(conflict("--ranks", "is 0: it takes at least one rank").into());
        }
        if config::overridden(&fields, "parallel.data").is_some() {
            return Err(
                conflict("--ranks", "sets `data`, and so does --layout: leave one of them out").into()
            );
        }
        let path = Path::new("--layout");
        let run = RunTable::parse("", &fields).map_err(|error| in_file(path, error))?;
        fields.push(Override::replicas(replicas(&run, path, ranks)?));
    }
    Ok(fields)
}

fn in_words(score: &EvalResult) -> String {
    let more = [
        score.windowed_perplexity.map(|perplexity| format!("windowed perplexity {perplexity:.2}")),
        score.strided_perplexity.map(|perplexity| format!("strided perplexity {perplexity:.2}")),
        score.context.map(|context| match score.stride {
            Some(stride) => format!("context {context}, stride {stride}"),
            None => format!("context {context}"),
        }),
        score.bits_per_byte.map(|bits| format!("{bits:.3} bits per byte")),
        score.accuracy.map(|accuracy| format!("accuracy {:.2} %", 100.0 * accuracy)),
        score.tokens.map(|tokens| format!("{tokens} tokens")),
    ];
    let more: String = more.into_iter().flatten().map(|text| format!(", {text}")).collect();
    format!("loss {:.4}{more}, {} samples", score.loss, score.samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_fields_of_a_run_file() {
        let laid = |layout: &str, ranks| {
            laid_out(layout, ranks).unwrap().iter().map(Override::to_string).collect::<Vec<_>>()
        };
        assert_eq!(laid("", None), [""; 0]);
        assert_eq!(laid("data=2, spatial=2x3", None), ["parallel.data=2", "parallel.spatial=[2, 3]"]);
        assert_eq!(laid("tensor=2", Some(6)), ["parallel.tensor=2", "parallel.data=3"]);
        assert!(laid_out("tensor=2", Some(5)).unwrap_err().to_string().contains("must be a multiple of"));
        assert!(laid_out("data=2", Some(4)).unwrap_err().to_string().starts_with("`--ranks` sets `data`"));
        let error = laid_out("two", None).unwrap_err().to_string();
        assert_eq!(error, "`--layout` has \"two\", which is not AXIS=N");
    }
}
