//! What runs of a study came to, a line of JSON each in a file that is only added to. A study that is started
//! again finds there what it need not run again.

use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use espalier_data::regular_file::{self, RECORDS};
use espalier_train::{Error, checksum};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What an outcome is found by: texts that together say all that decides it.
pub type OutcomeKey = [String; 3];

/// A file of outcomes.
#[derive(Debug)]
pub struct Outcomes<T> {
    path: PathBuf,
    lines: Vec<OutcomeLine<T>>,
}

/// One of them, with what it is the outcome of.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct OutcomeLine<T> {
    /// A hash of all that decides it.
    of: String,
    #[serde(flatten)]
    outcome: T,
}

impl<T: Serialize + DeserializeOwned + Clone> Outcomes<T> {
    /// Those in a folder, which is made. A last line that a power cut has torn is dropped; any other that
    /// cannot be read is an error.
    pub fn open(folder: &Path) -> Result<Outcomes<T>, Error> {
        fs::create_dir_all(folder).map_err(|why| Error::unwritten(folder, why))?;
        let (outcomes, torn) = Outcomes::load(folder)?;
        if let Some(complete) = torn {
            fs::write(&outcomes.path, complete).map_err(|why| Error::unwritten(&outcomes.path, why))?;
        }
        Ok(outcomes)
    }

    /// Those in a folder that others write to, as far as lines are complete; nothing is changed.
    pub fn read(folder: &Path) -> Result<Outcomes<T>, Error> {
        Ok(Outcomes::load(folder)?.0)
    }

    /// What a file holds, and its complete lines where there is more than these.
    fn load(folder: &Path) -> Result<(Outcomes<T>, Option<String>), Error> {
        let path = folder.join("outcomes.jsonl");
        let problem = |why: String| Error::File { path: path.clone(), why };
        let text = match regular_file::read_text(&path, RECORDS) {
            Ok(text) => text,
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(why) => return Err(Error::unread(path, why)),
        };
        let complete = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let mut lines = Vec::new();
        for (number, line) in complete.lines().enumerate() {
            let wrong = |why: &dyn Display| problem(format!("line {} is no outcome: {why}", number + 1));
            let object = checksum::check_json(line).map_err(|why| wrong(&why))?;
            lines.push(serde_json::from_str(&object).map_err(|why| wrong(&why))?);
        }
        let torn = (complete.len() < text.len()).then(|| complete.to_owned());
        Ok((Outcomes { path, lines }, torn))
    }

    /// All of them, in the order in which they were written.
    pub fn outcomes(&self) -> impl Iterator<Item = &T> {
        self.lines.iter().map(|line| &line.outcome)
    }

    /// Those of these keys that are known by now to whoever reads in a folder, in the order of the keys.
    pub(crate) fn known<'a>(
        folder: &Path,
        keys: impl IntoIterator<Item = &'a OutcomeKey>,
    ) -> Result<Vec<T>, Error> {
        let outcomes = Outcomes::read(folder)?;
        Ok(keys.into_iter().filter_map(|key| outcomes.get(key).cloned()).collect())
    }

    /// The outcome of what these texts say, where it is known.
    pub fn get(&self, texts: &[impl AsRef<str>]) -> Option<&T> {
        let of = hash(texts);
        self.lines.iter().find(|line| line.of == of).map(|line| &line.outcome)
    }

    /// The outcome of what these texts say, from before or made now and kept.
    pub(crate) fn get_or(
        &mut self,
        texts: &[impl AsRef<str>],
        make: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        if let Some(known) = self.get(texts) {
            return Ok(known.clone());
        }
        let outcome = make()?;
        let line = OutcomeLine { of: hash(texts), outcome };
        let text = serde_json::to_string(&line).expect("an outcome is plain data");
        let text = checksum::add_to_json(&text) + "\n";
        let written = OpenOptions::new().create(true).append(true).open(&self.path);
        let written =
            written.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_data()));
        written.map_err(|why| Error::Disk { path: self.path.clone(), why: why.to_string() })?;
        self.lines.push(line.clone());
        Ok(line.outcome)
    }
}

/// A hash of texts, each with its length: "a" and "b" are not "ab" and "".
fn hash(texts: &[impl AsRef<str>]) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in texts.iter().map(AsRef::as_ref) {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct TestOutcome {
        value: f64,
    }

    fn get(folder: &Path, texts: &[&str], value: f64) -> TestOutcome {
        Outcomes::open(folder).unwrap().get_or(texts, || Ok(TestOutcome { value })).unwrap()
    }

    #[test]
    fn what_was_made_is_not_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("below/it");
        assert_eq!(get(&at, &["a", "b"], 1.0).value, 1.0);
        assert_eq!(get(&at, &["a", "b"], 2.0).value, 1.0);
        assert_eq!(get(&at, &["ab", ""], 3.0).value, 3.0, "other texts");
        // A power cut in the middle of a line.
        let path = at.join("outcomes.jsonl");
        let mut torn = fs::read(&path).unwrap();
        torn.truncate(torn.len() - 5);
        fs::write(&path, &torn).unwrap();
        // Reading does not mend it.
        let read = Outcomes::<TestOutcome>::read(&at).unwrap();
        assert_eq!(read.outcomes().collect::<Vec<_>>(), [&TestOutcome { value: 1.0 }]);
        assert_eq!((read.get(&["a", "b"]), read.get(&["ab", ""])), (Some(&TestOutcome { value: 1.0 }), None));
        assert_eq!(fs::read(&path).unwrap(), torn);
        assert_eq!(get(&at, &["a", "b"], 4.0).value, 1.0);
        assert_eq!(get(&at, &["ab", ""], 5.0).value, 5.0);
        // A digit that a disk has changed; and a line of an older program, which has no checksum.
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("1.0", "7.0", 1)).unwrap();
        let message = Outcomes::<TestOutcome>::open(&at).unwrap_err().to_string();
        assert!(message.ends_with("line 1 is no outcome: its checksum is that of another line"), "{message}");
        let (of, _) = text.split_once(",\"blake3\"").unwrap();
        fs::write(&path, format!("{of}}}\n")).unwrap();
        assert_eq!(get(&at, &["a", "b"], 6.0).value, 1.0);
        fs::write(&path, "nonsense\n").unwrap();
        let message = Outcomes::<TestOutcome>::open(&at).unwrap_err().to_string();
        assert!(message.contains("line 1 is no outcome"), "{message}");
    }
}
