//! What stands behind options: `--set FIELD=VALUE`, as whoever types it means it, and words of which there are
//! few.

use std::convert::Infallible;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use espalier_plan::config::Override;

/// A setting. Paths in it are relative to where the command is run, as everything else on a command line is,
/// and not to the run file.
pub fn setting(text: &str) -> Result<Override, Infallible> {
    let setting = Override::from(text);
    Ok(match std::env::current_dir() {
        Ok(here) => setting.below(&here),
        // A folder that was removed under us: relative paths lead nowhere in any case.
        Err(_) => setting,
    })
}

/// One of these words, each with what it stands for.
pub fn one_of<T: Copy + Send + Sync>(
    words: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let stands_for = move |given: String| words.iter().find(|(word, _)| *word == given).map(|(_, it)| *it);
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word))
        .map(move |given| stands_for(given).expect("no other word is accepted"))
}
