//! `parallel = "auto"`: a word in the place of the section, which leaves the layout to the planner. Whoever runs it finds one and puts
//! it in; whoever reads it for another reason reads a run on one rank.

use toml::{Table, Value};

use super::{Error, RunFile, reader, table};
use crate::near::nearest;

const WORD: &str = "auto";

/// Takes the word out of a run file's table; whether it stood there.
pub(super) fn take(table: &mut Table) -> Result<bool, Error> {
    match table.get("parallel") {
        Some(Value::String(word)) if word == WORD => Ok(table.remove("parallel").is_some()),
        Some(got @ Value::String(word)) => Err(Error::Value {
            field: "parallel".into(),
            expected: "a section, `[parallel]`, or \"auto\"".into(),
            got: reader::show(got),
            hint: nearest(word, [WORD]).map(String::from),
        }),
        _ => Ok(false),
    }
}

impl RunFile {
    /// Whether a run file's text leaves its layout to the planner.
    pub fn leaves_layout(text: &str, overrides: &[String]) -> Result<bool, Error> {
        take(&mut table(text, overrides)?)
    }

    /// The run with the layout of another: its ranks, micro-batches, recomputation and form of state.
    pub fn laid_out_as(&self, other: &RunFile) -> Result<RunFile, Error> {
        let mut run = self.clone();
        run.parallel = other.parallel.clone();
        run.train.micro_batches = other.train.micro_batches;
        run.train.recompute = other.train.recompute;
        if let (Some(own), Some(other)) = (&mut run.prune, &other.prune) {
            own.state = other.state;
        }
        run.check()?;
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "parallel = \"auto\"\n[model]\nname = \"gpt\"\nlayers = 2\n[train]\nsteps = 1\nbatch = 8\n";

    #[test]
    fn who_does_not_lay_it_out_reads_one_rank() {
        assert!(RunFile::leaves_layout(TEXT, &[]).unwrap());
        let plain = TEXT.replace("parallel = \"auto\"\n", "");
        assert!(!RunFile::leaves_layout(&plain, &[]).unwrap());
        assert_eq!(RunFile::parse(TEXT, &[]).unwrap(), RunFile::parse(&plain, &[]).unwrap());
        let override_ = ["parallel=auto".to_owned()];
        assert!(RunFile::leaves_layout(&format!("{plain}[parallel]\ndata = 2\n"), &override_).unwrap());
    }

    #[test]
    fn another_word_gets_a_sentence() {
        let said = |word: &str| RunFile::parse(&TEXT.replace("auto", word), &[]).unwrap_err();
        insta::assert_snapshot!(said("atuo"), @r#"`parallel` must be a section, `[parallel]`, or "auto", got "atuo"; did you mean `auto`?"#);
        insta::assert_snapshot!(said("data"), @r#"`parallel` must be a section, `[parallel]`, or "auto", got "data""#);
    }

    /// The layout is taken over, and nothing else.
    #[test]
    fn a_run_is_laid_out_as_another() {
        let open = RunFile::parse(TEXT, &["seed=3".into()]).unwrap();
        let fields =
            ["parallel.data=2", "parallel.pipeline=2", "train.micro_batches=4", "train.recompute=block"];
        let other =
            RunFile::parse(&TEXT.replace("parallel = \"auto\"", ""), &fields.map(String::from)).unwrap();
        let laid_out = open.laid_out_as(&other).unwrap();
        assert_eq!((&laid_out.parallel, laid_out.seed), (&other.parallel, 3));
        assert_eq!(RunFile { seed: 0, ..laid_out }, other);
        let larger = RunFile::parse(&TEXT.replace("batch = 8", "batch = 6"), &[]).unwrap();
        assert!(larger.laid_out_as(&other).is_err(), "6 samples are not 2 x 4 micro-batches");
    }
}
