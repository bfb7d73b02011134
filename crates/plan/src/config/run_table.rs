//! A run file before it is read: what a person wrote and set, in which two things may be left open.
//! `parallel = "auto"` leaves the layout to the planner: whoever runs it finds one and puts it in, whoever
//! reads it for another reason reads a run on one rank. `model.name = "auto"` leaves the model to what the
//! run starts from, and so does `prune.method = "keep"` with the sparsity: until somebody has put it in there
//! is no run file.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::reader::{self, Section};
use super::{
    Error, ModelConfig, Override, Parallel, PipelineConfig, RunFile, Train, model, overrides, table,
};
use crate::edit_distance::nearest;
use crate::mesh::PerAxis;

/// Instead of `[parallel]`.
const WORD: &str = "auto";

/// A run file's fields as they are written, with what is set put in.
#[derive(Debug, Clone, PartialEq)]
pub struct RunTable {
    fields: Table,
    /// What was put in, which takes the place of some that are written.
    overrides: Vec<Override>,
}

impl From<Table> for RunTable {
    fn from(fields: Table) -> RunTable {
        RunTable { fields, overrides: Vec::new() }
    }
}

impl RunTable {
    /// The fields of a run file's text.
    pub fn parse(text: &str, overrides: &[Override]) -> Result<RunTable, Error> {
        Ok(RunTable { fields: table(text, overrides)?, overrides: overrides.to_vec() })
    }

    /// Those of a run that was read.
    pub fn of(run: &RunFile) -> Result<RunTable, Error> {
        let fields = Table::try_from(run).map_err(|_| super::no_unicode())?;
        Ok(fields.into())
    }

    /// With more overrides put in.
    pub fn with(mut self, overrides: &[Override]) -> Result<RunTable, Error> {
        for setting in overrides {
            setting.apply(&mut self.fields)?;
        }
        self.overrides.extend_from_slice(overrides);
        Ok(self)
    }

    /// As they are written.
    pub fn fields(&self) -> &Table {
        &self.fields
    }

    /// Whether a field is written, by its full path.
    pub fn has(&self, field: &str) -> bool {
        let mut keys = field.split('.');
        let first = keys.next().and_then(|key| self.fields.get(key));
        keys.fold(first, |at, key| at?.get(key)).is_some()
    }

    /// Without pruning.
    pub fn dense(mut self) -> RunTable {
        self.fields.remove("prune");
        self
    }

    /// The run, or one sentence on what is wrong with it.
    pub fn read(&self) -> Result<RunFile, Error> {
        self.read_for(None)
    }

    /// The same for a rank of as many as a launcher has `started`, where one has: `[parallel]` must fit their
    /// number.
    pub fn read_for(&self, started: Option<usize>) -> Result<RunFile, Error> {
        overrides::check_unset(&self.overrides)?;
        let mut fields = self.fields.clone();
        take_layout(&mut fields)?;
        let mut notes = PipelineConfig::drop_moot(&mut fields, &self.overrides);
        notes.extend(Train::drop_moot(&mut fields, &self.overrides));
        let run = RunFile { notes, ..RunFile::read(&fields, started)? };
        run.check()?;
        Ok(run)
    }

    /// The ranks of one replica that it asks for, along each axis: their product must divide the ranks
    /// whatever else it says.
    pub fn replica(&self) -> Result<PerAxis, Error> {
        let (mut fields, empty) = (self.fields.clone(), Table::new());
        PipelineConfig::drop_moot(&mut fields, &self.overrides);
        let mut parallel = Section::new("", &fields).section("parallel", &empty)?;
        Ok(PerAxis { data: 1, ..Parallel::read(&mut parallel, None)?.axis_sizes() })
    }

    /// Whether the layout is left to the planner.
    pub fn leaves_layout(&self) -> Result<bool, Error> {
        take_layout(&mut self.fields.clone())
    }

    /// Whether the model is left to what the run starts from.
    pub fn leaves_model(&self) -> bool {
        self.fields.get("model").and_then(|model| model.get("name")).is_some_and(model::is_open)
    }

    /// Puts a model in. Fields that are written beside the word stay, such as a shorter context. Text is read
    /// by `tokenizer`, unless another one is named.
    pub fn set_model(&mut self, model: &ModelConfig, tokenizer: Option<&Path>) -> Result<(), Error> {
        let unwritten = |why: toml::ser::Error| {
            Error::value("model", "of numbers that a run file can hold", why.to_string())
        };
        let mut model = Table::try_from(model).map_err(unwritten)?;
        if let Some(Value::Table(own)) = self.fields.remove("model") {
            model.extend(own.into_iter().filter(|(key, value)| key != "name" || !model::is_open(value)));
        }
        self.fields.insert("model".into(), Value::Table(model));
        if let (Some(Value::Table(data)), Some(tokenizer)) = (self.fields.get_mut("data"), tokenizer)
            && matches!(data.get("kind").and_then(Value::as_str), Some("text" | "jsonl"))
        {
            let path = tokenizer.to_str().ok_or_else(super::no_unicode)?;
            data.entry("tokenizer").or_insert_with(|| path.into());
        }
        Ok(())
    }

    /// Whether the sparsity is left to what the run starts from, whose zeros are kept.
    pub fn leaves_sparsity(&self) -> bool {
        let prune = self.fields.get("prune");
        let keeps = prune.and_then(|prune| prune.get("method")).and_then(Value::as_str) == Some("keep");
        keeps && !self.has("prune.sparsity")
    }

    /// Puts a sparsity in.
    pub fn set_sparsity(&mut self, sparsity: f64) {
        if let Some(Value::Table(prune)) = self.fields.get_mut("prune") {
            prune.insert("sparsity".into(), sparsity.into());
        }
    }

    /// The sparsity that is written.
    pub fn sparsity(&self) -> Option<f64> {
        self.fields.get("prune")?.get("sparsity")?.as_float()
    }

    /// A run of its model and its pruning alone: which weights are candidates follows from these. A sparsity
    /// that is left out is any.
    pub fn candidates(&self) -> Result<RunFile, Error> {
        let fields = self.fields.iter().filter(|(key, _)| ["model", "prune"].contains(&key.as_str()));
        let mut run =
            RunTable::from(fields.map(|(key, value)| (key.clone(), value.clone())).collect::<Table>());
        if run.leaves_sparsity() {
            run.set_sparsity(0.5);
        }
        run.read()
    }

    /// The model alone, whatever else is wrong with the run.
    pub fn model(&self) -> Result<ModelConfig, Error> {
        let empty = Table::new();
        ModelConfig::read(&mut Section::new("", &self.fields).section("model", &empty)?)
    }

    /// The tokenizer that is named.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.fields.get("data")?.get("tokenizer")?.as_str()?.into())
    }

    /// Replaces its pruning method: what says which weights are candidates stays, and
    /// the sparsity where both have one; the fields of the old method go.
    pub fn set_method(&mut self, method: &str) {
        let prune = self.fields.entry("prune").or_insert_with(|| Value::Table(Table::new()));
        let Value::Table(prune) = prune else { return };
        let old = prune.insert("method".into(), method.into());
        let old = old.as_ref().and_then(Value::as_str);
        if old != Some(method) {
            let patterns = [old, Some(method)].iter().any(|one| matches!(one, Some("2:4" | "keep")));
            prune.retain(|key, _| match key {
                "method" | "embeddings" | "biases" | "exclude" | "state" | "weights" | "kernels" => true,
                "sparsity" => !patterns,
                _ => false,
            });
        }
    }
}

/// Takes the word out of a run file's table; whether it stood there.
fn take_layout(table: &mut Table) -> Result<bool, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "parallel = \"auto\"\n[model]\nname = \"gpt\"\nlayers = 2\n[train]\nsteps = 1\nbatch = 8\n";
    const OTHER: &str = "[model]\nname = \"gpt\"\nlayers = 3\ncontext = 1024\nvocab = 300\n";

    fn open(text: &str, set: &[&str]) -> RunTable {
        RunTable::parse(text, &set.iter().map(|text| (*text).into()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn who_does_not_lay_it_out_reads_one_rank() {
        assert!(open(TEXT, &[]).leaves_layout().unwrap());
        let plain = TEXT.replace("parallel = \"auto\"\n", "");
        assert!(!open(&plain, &[]).leaves_layout().unwrap());
        assert_eq!(RunFile::parse(TEXT, &[]).unwrap(), RunFile::parse(&plain, &[]).unwrap());
        let sectioned = format!("{plain}[parallel]\ndata = 2\n");
        assert!(open(&sectioned, &["parallel=auto"]).leaves_layout().unwrap());
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
        let run = open(TEXT, &["seed=3"]).read().unwrap();
        let fields =
            ["parallel.data=2", "parallel.pipeline=2", "train.micro_batches=4", "train.recompute=block"];
        let other = open(&TEXT.replace("parallel = \"auto\"", ""), &fields).read().unwrap();
        let laid_out = run.laid_out_as(&other).unwrap();
        assert_eq!((&laid_out.parallel, laid_out.seed), (&other.parallel, 3));
        assert_eq!(RunFile { seed: 0, ..laid_out }, other);
        let larger = RunFile::parse(&TEXT.replace("batch = 8", "batch = 6"), &[]).unwrap();
        assert!(larger.laid_out_as(&other).is_err(), "6 samples are not 2 x 4 micro-batches");
    }

    #[test]
    fn the_model_is_anothers_but_for_what_is_written() {
        let text = "[model]\nname = \"auto\"\ncontext = 64\n[data]\nkind = \"text\"\npath = \"a.txt\"\n";
        let mut run = open(text, &["model.dropout=0.1"]);
        assert!(run.leaves_model());
        let tokenizer = Path::new("theirs/tokenizer.json");
        run.set_model(&open(OTHER, &[]).model().unwrap(), Some(tokenizer)).unwrap();
        let expected = "[model]\nlayers = 3\ncontext = 64\nvocab = 300\ndropout = 0.1\n\
                        [data]\nkind = \"text\"\npath = \"a.txt\"\ntokenizer = \"theirs/tokenizer.json\"\n";
        assert_eq!(run.read().unwrap(), RunFile::parse(expected, &[]).unwrap());
    }

    /// The word may be an override; a tokenizer that is written stays.
    #[test]
    fn what_is_written_stays() {
        let text =
            "[model]\nname = \"mlp\"\n[data]\nkind = \"text\"\npath = \"a\"\ntokenizer = \"own.json\"\n";
        assert!(!open(text, &[]).leaves_model());
        let mut run = open(text, &["model.name=auto", "seed=3"]);
        let other = format!("{OTHER}[data]\nkind = \"text\"\npath = \"b\"\ntokenizer = \"theirs.json\"\n");
        let other = open(&other, &[]);
        run.set_model(&other.model().unwrap(), other.tokenizer().as_deref()).unwrap();
        assert_eq!(run.tokenizer().as_deref(), Some(Path::new("own.json")));
        let run = run.read().unwrap();
        assert_eq!((run.model.vocab(), run.seed), (Some(300), 3));
    }

    #[test]
    fn without_a_model_it_is_refused_by_name() {
        insta::assert_snapshot!(RunFile::parse("model.name = \"auto\"", &[]).unwrap_err(), @r#"`model.name` is "auto", the model of the checkpoint to start from, and there is none: give one with `espalier train --from`"#);
    }

    #[test]
    fn a_sparsity_that_is_kept_comes_from_elsewhere() {
        let text = "[model]\nname = \"gpt\"\nvocab = 8\n[train]\nbatch = 8\n[prune]\nmethod = \"keep\"\nexclude = \"mlp\"";
        let mut run = open(text, &[]);
        assert!(run.leaves_sparsity() && run.sparsity().is_none());
        insta::assert_snapshot!(run.read().unwrap_err(), @r#"`prune.method` is "keep", which keeps the zeros of the checkpoint to start from, and there is none: give one with `espalier train --from`"#);
        assert_eq!(run.candidates().unwrap().prune.unwrap().exclude, ["mlp"]);
        run.set_sparsity(0.75);
        assert!(!run.leaves_sparsity());
        let prune = run.read().unwrap().prune.unwrap();
        assert_eq!((prune.method.name(), prune.sparsity, run.sparsity()), ("keep", 0.75, Some(0.75)));
        assert!(prune.method.at_start() && prune.method.needs_no_pass() && !prune.method.goes_on());
        assert!(!open(&text.replace("keep", "random"), &[]).leaves_sparsity());
    }

    #[test]
    fn another_method_takes_the_place_of_one() {
        let text = "seed = 3\n[prune]\nmethod = \"magnitude\"\nscope = \"layer\"\nat = 5\nsparsity = 0.7\nexclude = \"mlp\"";
        let prune = |text: &str, method: &str| {
            let mut run = open(text, &[]);
            run.set_method(method);
            let run = run.read().unwrap();
            assert_eq!(run.seed, 3);
            run.prune.unwrap()
        };
        let snip = prune(text, "snip");
        assert_eq!(
            (snip.method.name(), snip.sparsity, &snip.exclude[..]),
            ("snip", 0.7, &["mlp".to_owned()][..])
        );
        assert_eq!(prune(text, "2:4").sparsity, 0.5);
        assert_eq!(prune(text, "magnitude").method.at(), 5, "the same one keeps its fields");
        assert_eq!(prune("seed = 3\n[prune]\nmethod = \"2:4\"\nsparsity = 0.5", "random").sparsity, 0.9);
        assert_eq!(prune("seed = 3", "grasp").method.name(), "grasp");
    }
}
