//! `[sample]`: lines that a model writes in the course of its run. Without it there are none.

use super::reader::Section;
use super::{Error, RunFile, fields};
use crate::data::DatasetSource;
use crate::sample::SampleConfig;

impl SampleConfig {
    pub(super) fn read(section: &mut Section) -> Result<Option<SampleConfig>, Error> {
        if section.is_empty() {
            return Ok(None);
        }
        Ok(Some(section.read(fields::SAMPLE)?.all()))
    }

    /// What the other sections must be for a sample to be written.
    pub(super) fn check(&self, run: &RunFile) -> Result<(), Error> {
        if !run.model.takes_text() {
            let why = format!("with the model {}, which generates no text", run.model.name);
            return Err(Error::no_effect("sample", why));
        }
        if matches!(run.data.source, DatasetSource::Tokens { .. }) {
            let why = "with `data.kind` = \"tokens\": token files have no tokenizer";
            return Err(Error::no_effect("sample", why));
        }
        if self.every > 0 && run.train.eval_every == 0 {
            return Err(Error::no_effect("sample.every", "with `train.eval_every` = 0"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intervals::TrainIntervals;

    fn sentence(text: &str) -> String {
        RunFile::parse(text, &[]).unwrap_err().to_string()
    }

    #[test]
    fn samples_are_off_unless_asked_for() {
        let run = RunFile::parse("", &[]).unwrap();
        assert_eq!(run.sample, None);
        assert!(!run.to_toml().unwrap().contains("sample]"));
        let run = RunFile::parse("[sample]\nprompt = \"1+1=\"", &[]).unwrap();
        let sample = run.sample.clone().unwrap();
        assert_eq!((sample.tokens, sample.temperature, sample.every), (100, 0.8, 0));
        assert_eq!(RunFile::parse(&run.to_toml().unwrap(), &[]).unwrap(), run);
    }

    #[test]
    fn what_a_sample_needs_is_named() {
        insta::assert_snapshot!(sentence("[sample]\ntokens = 3"), @"`sample.prompt` is missing: the prompt");
        insta::assert_snapshot!(sentence("[sample]\nprompt = \"\""), @r#"`sample.prompt` must be the prompt, got """#);
        insta::assert_snapshot!(sentence("[sample]\nprompt = \"a\"\ntemperature = -1"), @"`sample.temperature` must be a number of at least 0, got -1");
        insta::assert_snapshot!(sentence("[sample]\nprompt = \"a\"\nevery = 2"), @"`sample.every` has no effect with `train.eval_every` = 0");
        let images = "[model]\nname = \"resnet8\"\n[data]\nkind = \"shapes\"\n";
        insta::assert_snapshot!(sentence(&format!("{images}[sample]\nprompt = \"a\"")), @"`sample` has no effect with the model resnet8, which generates no text");
        let tokens = "[model]\nvocab = 100\n[data]\nkind = \"tokens\"\npath = \"a\"\n";
        insta::assert_snapshot!(sentence(&format!("{tokens}[sample]\nprompt = \"a\"")), @r#"`sample` has no effect with `data.kind` = "tokens": token files have no tokenizer"#);
        // What shows a person how it goes must not stand in the way of how it goes.
        let sequence = "[parallel]\ntensor = 2\nsequence = true\n";
        RunFile::parse(&format!("{sequence}[sample]\nprompt = \"a\""), &[]).unwrap();
    }

    #[test]
    fn samples_come_at_the_end_and_behind_every_so_many_evaluations() {
        let of = |text: &str| {
            let run = RunFile::parse(text, &[]).unwrap();
            let (sample, intervals): (SampleConfig, TrainIntervals) =
                (run.sample.clone().unwrap(), run.intervals());
            (1..=40).filter(|step| sample.is_due(*step, *step == 35, &intervals)).collect::<Vec<u64>>()
        };
        assert_eq!(of("[sample]\nprompt = \"a\""), [35]);
        assert_eq!(of("[train]\neval_every = 5\n[sample]\nprompt = \"a\"\nevery = 2"), [10, 20, 30, 35, 40]);
    }
}
