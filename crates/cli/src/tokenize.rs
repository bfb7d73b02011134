//! `espalier tokenize`: text as token files, on all cores.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use espalier_data::{TextFiles, TokenFiles, TokenWidth, Tokenized, Tokenizer};
use espalier_train::Error;
use serde_json::json;

use crate::export::bytes;
use crate::output::{self, print_err, print_out};
use crate::progress::{count, skipped_files};
use crate::read_progress::ReadProgress;
use crate::setting::one_of;
use crate::signals::{INTERRUPTED, StopSignal};

#[derive(Args)]
#[command(
    after_help = "The tokenizer's end-of-text token, if it has one, follows each file. GPT-2 style byte-level BPE works in every build; other \
                  tokenizers need a build with `--features tokenizers`.

Examples:
  espalier tokenize book.txt --tokenizer gpt2/tokenizer.json -o book.bin
  espalier tokenize corpus more.txt --extensions md,txt \\
      --tokenizer SmolLM2-135M -o tokens --shards 1GB --json"
)]
pub struct TokenizeArguments {
    /// Text files or folders.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// A tokenizer.json, or a model folder that has one.
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Output file; with --shards, output folder. Must not exist.
    #[arg(short, long, value_name = "PATH")]
    out: PathBuf,
    /// In folders, only files with one of these extensions.
    #[arg(long, value_name = "EXT,...", value_delimiter = ',')]
    extensions: Vec<String>,
    /// Data type of token ids [default: u16 if the vocabulary fits, else u32].
    #[arg(long, value_name = "TYPE", value_parser = one_of(&WIDTHS))]
    dtype: Option<TokenWidth>,
    /// Write a folder of files of at most this size, as in 1GB or 300MB.
    #[arg(long, value_name = "SIZE")]
    shards: Option<String>,
    /// Number of threads; the result does not depend on it [default: one per core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    threads: Option<u64>,
    /// Print the result as one line of JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// How an id is stored.
const WIDTHS: [(&str, TokenWidth); 2] = [("u16", TokenWidth::U16), ("u32", TokenWidth::U32)];

pub fn tokenize(arguments: &TokenizeArguments) -> Result<ExitCode> {
    let stop = StopSignal::listen_with_message("interrupted")?;
    let tokenizer = Tokenizer::open(&arguments.tokenizer).map_err(Error::Data)?;
    let usual = if tokenizer.vocab() <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 };
    let width = arguments.dtype.unwrap_or(usual);
    let name = if width == TokenWidth::U16 { "u16" } else { "u32" };
    let shard_bytes = arguments.shards.as_deref().map(bytes).transpose()?.map(|size| size as u64);
    let threads = arguments.threads.unwrap_or(0) as usize;
    let to = TokenFiles { path: arguments.out.clone(), width, shard_bytes, threads };
    let (paths, extensions) = (arguments.paths.clone(), arguments.extensions.clone());
    let text = TextFiles { paths, extensions, tokenizer: None };
    let mut progress_bar = ReadProgress::new();
    stop.begun.store(true, Ordering::SeqCst);
    let progress = |read, all| {
        progress_bar.update(read, all);
        !stop.requested.load(Ordering::SeqCst)
    };
    let begun = Instant::now();
    let done = espalier_data::tokenize(&text, &tokenizer, &to, progress).map_err(Error::Data)?;
    let seconds = begun.elapsed().as_secs_f64();
    progress_bar.finish();
    let Some(done) = done else {
        print_err!("interrupted: nothing was written");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let Tokenized { tokens, text_bytes, documents, files, skipped } = done;
    if let Some(note) = skipped_files(&skipped) {
        print_err!("note: {note}");
    }
    print_out!(
        "{}: {} tokens of {:.1} MB of text in {documents} files, {:.2} bytes per token; {seconds:.1} s, {:.1} MB/s",
        arguments.out.display(),
        count(tokens as f64),
        text_bytes as f64 / 1e6,
        text_bytes as f64 / tokens as f64,
        text_bytes as f64 / 1e6 / seconds
    );
    print_out!(
        "in a run file: [data] kind = \"tokens\", path = {:?}, dtype = \"{name}\"; [model] vocab = {}",
        arguments.out.display().to_string(),
        tokenizer.vocab()
    );
    output::answer(arguments.json, || {
        json!({
            "files": files, "tokens": tokens, "dtype": name, "vocab": tokenizer.vocab(), "text_bytes": text_bytes,
            "documents": documents, "skipped": skipped.len(), "seconds": seconds,
        })
    })
}
