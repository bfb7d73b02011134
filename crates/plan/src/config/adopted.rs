//! `model.name = "auto"`: the model is that of what a run starts from. Whoever knows it puts its `[model]` in; until then there is
//! no run file.

use std::path::Path;

use toml::{Table, Value};

use super::{Error, RunFile, table};

/// In the place of a model's name.
const WORD: &str = "auto";

/// What a run file with the word means, where nobody has put a model in.
pub(super) fn refused() -> Error {
    let problem = "is \"auto\", the model of what a run starts from, and nothing says what that is: \
                   `espalier train --from` takes a checkpoint or a folder of Hugging Face's";
    Error::Conflict { field: "model.name".into(), problem: problem.into() }
}

/// Whether a name is the word.
pub(super) fn is_word(name: &Value) -> bool {
    name.as_str() == Some(WORD)
}

impl RunFile {
    /// Whether a run file's text leaves its model to what the run starts from.
    pub fn leaves_model(text: &str, overrides: &[String]) -> Result<bool, Error> {
        let table = table(text, overrides)?;
        Ok(table.get("model").and_then(|model| model.get("name")).is_some_and(is_word))
    }

    /// The text of such a file with the `[model]` of another, and the overrides that are left for it. Fields that it has itself
    /// stay, such as a shorter context. Text is read by `tokenizer`, or else by that of the other file, unless it names one.
    pub fn with_model(
        text: &str,
        overrides: &[String],
        other: &str,
        tokenizer: Option<&Path>,
    ) -> Result<(String, Vec<String>), Error> {
        let (mut table, mut other) = (table(text, overrides)?, super::table(other, &[])?);
        let mut model = match other.remove("model") {
            Some(Value::Table(model)) => model,
            _ => Table::new(),
        };
        if let Some(Value::Table(own)) = table.remove("model") {
            model.extend(own.into_iter().filter(|(key, value)| key != "name" || !is_word(value)));
        }
        table.insert("model".into(), Value::Table(model));
        let own = tokenizer.map(|path| Value::String(path.to_string_lossy().into_owned()));
        let tokenizer = own.or_else(|| other.get("data")?.get("tokenizer").cloned());
        if let (Some(Value::Table(data)), Some(tokenizer)) = (table.get_mut("data"), tokenizer)
            && data.get("kind").and_then(Value::as_str) == Some("text")
        {
            data.entry("tokenizer").or_insert(tokenizer);
        }
        let says_it =
            |text: &&String| text.split('=').next().is_some_and(|field| field.trim() == "model.name");
        Ok((table.to_string(), overrides.iter().filter(|text| !says_it(text)).cloned().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: &str = "[model]\nname = \"gpt\"\nlayers = 3\ncontext = 1024\nvocab = 300\n";

    #[test]
    fn the_model_is_anothers_but_for_what_is_written() {
        let text = "[model]\nname = \"auto\"\ncontext = 64\n[data]\nkind = \"text\"\npath = \"a.txt\"\n";
        assert!(RunFile::leaves_model(text, &[]).unwrap());
        let tokenizer = Path::new("theirs/tokenizer.json");
        let set = ["model.dropout=0.1".to_owned()];
        let (text, left) = RunFile::with_model(text, &set, OTHER, Some(tokenizer)).unwrap();
        let expected = "[model]\nlayers = 3\ncontext = 64\nvocab = 300\ndropout = 0.1\n\
                        [data]\nkind = \"text\"\npath = \"a.txt\"\ntokenizer = \"theirs/tokenizer.json\"\n";
        assert_eq!(RunFile::parse(&text, &left).unwrap(), RunFile::parse(expected, &[]).unwrap());
    }

    /// The word may be an override, which must not come again; a tokenizer that is written stays.
    #[test]
    fn the_word_is_said_once() {
        let text =
            "[model]\nname = \"mlp\"\n[data]\nkind = \"text\"\npath = \"a\"\ntokenizer = \"own.json\"\n";
        let set = ["model.name=auto".to_owned(), "seed=3".to_owned()];
        assert!(RunFile::leaves_model(text, &set).unwrap() && !RunFile::leaves_model(text, &[]).unwrap());
        let other = format!("{OTHER}[data]\nkind = \"text\"\npath = \"b\"\ntokenizer = \"theirs.json\"\n");
        let (text, left) = RunFile::with_model(text, &set, &other, None).unwrap();
        assert_eq!(left, ["seed=3"]);
        assert!(text.contains("own.json") && !text.contains("theirs.json"), "{text}");
        assert_eq!(RunFile::parse(&text, &left).unwrap().model.vocab(), Some(300));
    }

    #[test]
    fn without_a_model_it_is_refused_by_name() {
        insta::assert_snapshot!(RunFile::parse("model.name = \"auto\"", &[]).unwrap_err(), @r#"`model.name` is "auto", the model of what a run starts from, and nothing says what that is: `espalier train --from` takes a checkpoint or a folder of Hugging Face's"#);
    }
}
