//! A study's folder as somebody finds it who did not start the study: `study.json` says what it is a study
//! of, files of results how far it has come, and both make its page. Nothing in the folder is changed by
//! looking at it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use espalier_data::regular_file::{self, SETTINGS};
use espalier_plan::config::{self, Override, RunFile};
use espalier_report::{Figure, Page, number};
use espalier_train::{Error, checksum};
use serde::{Deserialize, Serialize};

use crate::branch::{self, BranchStudy};
use crate::file::Study;
use crate::gap::{self, GapStudy};
use crate::kind::StudyKind;
use crate::outcomes::{OutcomeKey, Outcomes};
use crate::page;
use crate::results::Results;
use crate::smoothness::{self, SmoothnessStudy, SparsityCurve};
use crate::summary::{CellSummary, StudySummary};

/// What says that a folder is a study's.
pub(crate) const STUDY_JSON: &str = "study.json";

/// The form of that file.
const SCHEMA: u32 = 1;

/// What `study.json` holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StudyJson {
    schema: u32,
    /// The study file with all overrides put in.
    study: String,
    /// The folder that its paths are relative to.
    beside: PathBuf,
    /// Of all the others, as JSON; none in a file of an older program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

impl StudyJson {
    fn checksum(&self) -> String {
        let StudyJson { schema, study, beside, .. } = self;
        checksum::digits(&serde_json::json!([schema, study, beside]).to_string())
    }
}

/// A study in its folder.
#[derive(Debug)]
pub struct StudyFolder {
    folder: PathBuf,
    beside: PathBuf,
    study: OpenStudy,
    /// When it was read first, and how far it had come by then.
    first_read: Option<(Instant, usize)>,
}

#[derive(Debug)]
enum OpenStudy {
    Steps(Box<Study>, Box<Results>),
    Gap(GapStudy),
    Branches(BranchStudy, Vec<(u64, OutcomeKey)>),
    Smoothness(SmoothnessStudy),
}

/// Whether a folder is one of a study.
pub fn is_study(folder: &Path) -> bool {
    folder.join(STUDY_JSON).is_file()
}

/// Writes down what a folder is a study of. The file is complete or what it was before, so that it can be read
/// meanwhile.
pub fn write_study_json(
    folder: &Path,
    text: &str,
    overrides: &[Override],
    beside: &Path,
) -> Result<(), Error> {
    let study = config::table(text, overrides)?.to_string();
    let mut study_json = StudyJson { schema: SCHEMA, study, beside: beside.into(), blake3: None };
    study_json.blake3 = Some(study_json.checksum());
    let text = serde_json::to_string_pretty(&study_json).expect("a note is plain data") + "\n";
    let path = folder.join(STUDY_JSON);
    let is_written = || regular_file::read_text(&path, SETTINGS).is_ok_and(|known| known == text);
    if !is_written() {
        // Several processes may share the folder.
        let temporary = folder.join(format!("{STUDY_JSON}.{}.part", std::process::id()));
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&temporary, &text))
            .and_then(|()| fs::rename(&temporary, &path));
        if let Err(why) = written
            && !is_written()
        {
            return Err(Error::Disk { path: path.clone(), why: format!("cannot be written: {why}") });
        }
    }
    remove_temporaries(folder);
    Ok(())
}

/// Removes what processes left that were killed while they wrote `study.json`. One that is still writing finds
/// its file gone, and a `study.json` of the same text.
fn remove_temporaries(folder: &Path) {
    let is_temporary = |name: &str| name.starts_with(STUDY_JSON) && name.ends_with(".part");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_temporary) {
            fs::remove_file(entry.path()).ok();
        }
    }
}

impl StudyFolder {
    /// Opens a folder, of which nothing but `study.json` need be there yet.
    pub fn open(folder: &Path) -> Result<StudyFolder, Error> {
        let path = folder.join(STUDY_JSON);
        let unusable = |why: String| Error::File { path: path.clone(), why };
        let text = regular_file::read_text(&path, SETTINGS).map_err(|why| match why.kind() {
            ErrorKind::NotFound => unusable("is not there: this is no folder of a study".into()),
            _ => Error::unread(&path, why),
        })?;
        let study_json: StudyJson = serde_json::from_str(&text)
            .map_err(|why| unusable(format!("does not say what study this is: {why}")))?;
        if study_json.schema != SCHEMA {
            return Err(unusable(format!(
                "it has form {}, and this program reads {SCHEMA}",
                study_json.schema
            )));
        }
        if study_json.blake3.as_ref().is_some_and(|sum| *sum != study_json.checksum()) {
            return Err(unusable(
                "is damaged: its checksum is that of another study; the study rewrites it when it is resumed"
                    .into(),
            ));
        }
        let text = &study_json.study;
        let study = match StudyKind::of(text, &[])? {
            StudyKind::StepsToResult => {
                let study = Study::parse(text, &[])?;
                let results = Results::open(folder, &study)?;
                OpenStudy::Steps(Box::new(study), Box::new(results))
            }
            StudyKind::GeneralisationGap => OpenStudy::Gap(GapStudy::parse(text, &[])?),
            StudyKind::CriticalBatch => {
                let study = BranchStudy::parse(text, &[])?;
                let points = branch::BranchOrigin::open(&study, &study_json.beside)?.points(&study);
                OpenStudy::Branches(study, points)
            }
            StudyKind::Smoothness => OpenStudy::Smoothness(SmoothnessStudy::parse(text, &[])?),
        };
        Ok(StudyFolder { folder: folder.into(), beside: study_json.beside, study, first_read: None })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        match &self.study {
            OpenStudy::Steps(study, _) => &study.name,
            OpenStudy::Gap(gap) => &gap.name,
            OpenStudy::Branches(branching, _) => &branching.name,
            OpenStudy::Smoothness(smoothness) => &smoothness.name,
        }
    }

    /// A study of steps-to-result as far as it has come by now, and the run file of its trials, with the paths
    /// that it means; none of another kind.
    pub fn steps_to_result(&mut self) -> Result<Option<(RunFile, StudySummary)>, Error> {
        let OpenStudy::Steps(study, results) = &mut self.study else { return Ok(None) };
        results.refresh()?;
        let mut run = study.common_run()?;
        run.resolve_paths(&self.beside);
        Ok(Some((run, StudySummary::of(study, results, Vec::new()))))
    }

    /// It as it has come by now, to stand beside others; an error where it is of another kind.
    fn compared(&mut self) -> Result<(&Study, StudySummary), Error> {
        let name = self.name().to_owned();
        let OpenStudy::Steps(study, results) = &mut self.study else {
            let problem = format!("has {name} among several: only studies of steps to a result are compared");
            return Err(espalier_plan::Error::conflict("RUN", problem).into());
        };
        results.refresh()?;
        Ok((study, StudySummary::of(study, results, Vec::new())))
    }

    /// A page of several studies of steps to a result,
    pub fn compare(studies: &mut [StudyFolder]) -> Result<Page, Error> {
        Ok(page::compare(&StudyFolder::all_compared(studies)?))
    }

    /// and its picture alone.
    pub fn compared_figure(studies: &mut [StudyFolder]) -> Result<Figure, Error> {
        Ok(page::compared(&StudyFolder::all_compared(studies)?))
    }

    fn all_compared(studies: &mut [StudyFolder]) -> Result<Vec<(&Study, StudySummary)>, Error> {
        studies.iter_mut().map(StudyFolder::compared).collect()
    }

    /// How far it has come by now: what has ended, of all that there is to do, and what of.
    pub fn progress(&mut self) -> Result<(usize, usize, &'static str), Error> {
        let (folder, beside) = (&self.folder, &self.beside);
        Ok(match &mut self.study {
            OpenStudy::Steps(study, results) => {
                results.refresh()?;
                let StudySummary { finished, trials, .. } = StudySummary::of(study, results, Vec::new());
                (finished, trials, "trials")
            }
            OpenStudy::Gap(gap) => (gap::known(gap, folder, beside)?.len(), gap.runs(), "runs"),
            OpenStudy::Branches(_, points) => (branch::known(points, folder)?.len(), points.len(), "points"),
            OpenStudy::Smoothness(study) => {
                (smoothness::known(study, folder, beside)?.len(), study.sparsities.len(), "sparsities")
            }
        })
    }

    /// Its page as it is by now; with how long it may take yet, where it has come further since the first
    /// reading.
    pub fn page(&mut self) -> Result<Page, Error> {
        let (done, all) = self.settled()?;
        let &mut (since, before) = self.first_read.get_or_insert_with(|| (Instant::now(), done));
        let mut page = self.page_of_now()?;
        let (ended, remaining) = (done.saturating_sub(before), all.saturating_sub(done));
        if let Some(left) = time_left(since.elapsed(), ended, remaining) {
            page.note_first(left);
        }
        Ok(page)
    }

    /// How far it has come, by what takes its time: of a search the trials of cells that are over, since those of
    /// a cell end together.
    fn settled(&mut self) -> Result<(usize, usize), Error> {
        let (done, all, _) = self.progress()?;
        let OpenStudy::Steps(study, results) = &self.study else { return Ok((done, all)) };
        let cells = StudySummary::of(study, results, Vec::new()).cells;
        let over = cells.iter().filter(|cell| cell.running == 0);
        Ok((over.map(CellSummary::finished).sum(), all))
    }

    fn page_of_now(&mut self) -> Result<Page, Error> {
        let (folder, beside) = (&self.folder, &self.beside);
        Ok(match &mut self.study {
            OpenStudy::Steps(study, results) => {
                results.refresh()?;
                let curves = curves(folder, study)?;
                page::page(study, results, &summary(study, results, &curves), &curves)
            }
            OpenStudy::Gap(gap) => gap::page(gap, &gap::known(gap, folder, beside)?),
            OpenStudy::Branches(branching, points) => {
                branch::page(branching, &branch::known(points, folder)?)
            }
            OpenStudy::Smoothness(study) => {
                smoothness::page(study, &smoothness::known(study, folder, beside)?)
            }
        })
    }

    /// The first picture of that page.
    pub fn figure(&mut self) -> Result<Figure, Error> {
        let (folder, beside) = (&self.folder, &self.beside);
        Ok(match &mut self.study {
            OpenStudy::Steps(study, results) => {
                results.refresh()?;
                page::steps_to_result(study, &StudySummary::of(study, results, Vec::new()))
            }
            OpenStudy::Gap(gap) => gap::figure(gap, &gap::known(gap, folder, beside)?),
            OpenStudy::Branches(_, points) => branch::figure(&branch::known(points, folder)?),
            OpenStudy::Smoothness(study) => smoothness::figure(&smoothness::known(study, folder, beside)?),
        })
    }
}

/// What is left takes about as long as what has ended since the first reading; early ends make it a guess.
fn time_left(elapsed: Duration, ended: usize, remaining: usize) -> Option<String> {
    if ended == 0 || remaining == 0 {
        return None;
    }
    let seconds = elapsed.as_secs_f64() * remaining as f64 / ended as f64;
    Some(format!("About {} left, if the rest takes as long as what has ended.", number::seconds(seconds)))
}

fn summary(study: &Study, results: &Results, curves: &[SparsityCurve]) -> StudySummary {
    let measured = curves.iter().map(|curve| curve.trace.measured(curve.sparsity)).collect();
    StudySummary::of(study, results, measured)
}

/// Smoothness along the best trials, where it was measured, by sparsity; of several the last.
fn curves(folder: &Path, study: &Study) -> Result<Vec<SparsityCurve>, Error> {
    if study.smoothness.is_none() {
        return Ok(Vec::new());
    }
    let all = Outcomes::<SparsityCurve>::read(folder)?;
    let last = |sparsity: f64| all.outcomes().filter(|curve| curve.sparsity == sparsity).last().cloned();
    Ok(study.sparsities().into_iter().filter_map(last).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use crate::trial::{TrialRecord, TrialStatus};

    /// As the study writes it.
    const TEXT: &str = synthetic::TEXT;

    fn record(steps: u64) -> TrialRecord {
        let fields = vec![("learning_rate.peak".into(), 0.01), ("optimizer.momentum".into(), 0.9)];
        let complete = synthetic::record(16, 0.0, 1, TrialStatus::Complete, steps);
        TrialRecord { best: Some(0.1), fields, ..complete }
    }

    #[test]
    fn what_killed_processes_left_is_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join("study.json.7.part");
        for _ in ["written anew", "there already"] {
            fs::write(&left, "half").unwrap();
            write_study_json(folder.path(), TEXT, &[], Path::new(".")).unwrap();
            assert!(!left.exists());
            assert!(StudyFolder::open(folder.path()).is_ok());
        }
    }

    #[test]
    fn the_time_that_is_left_is_known_once_something_has_ended() {
        let after = |ended, remaining| time_left(Duration::from_secs(30), ended, remaining);
        assert_eq!((after(0, 5), after(5, 0)), (None, None));
        let message = after(3, 6).unwrap();
        assert_eq!(message, "About 60 s left, if the rest takes as long as what has ended.");
    }

    #[test]
    fn a_study_is_shown_from_its_folder_as_it_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("out");
        assert!(!is_study(&at));
        let overrides = ["search.trials=2".into()];
        write_study_json(&at, TEXT, &overrides, Path::new("/beside")).unwrap();
        write_study_json(&at, TEXT, &overrides, Path::new("/beside")).unwrap();
        assert!(is_study(&at));
        let (path, text) = (at.join(STUDY_JSON), fs::read_to_string(at.join(STUDY_JSON)).unwrap());
        // A digit that a disk has changed; and a file of an older program, which has no checksum.
        fs::write(&path, text.replacen("trials = 2", "trials = 3", 1)).unwrap();
        let message = StudyFolder::open(&at).unwrap_err().to_string();
        assert!(message.contains("study.json: is damaged: its checksum"), "{message}");
        let mut old: serde_json::Value = serde_json::from_str(&text).unwrap();
        old.as_object_mut().unwrap().remove("blake3").unwrap();
        fs::write(&path, old.to_string()).unwrap();
        StudyFolder::open(&at).unwrap();
        fs::write(&path, text).unwrap();
        let mut shown = StudyFolder::open(&at).unwrap();
        assert_eq!(shown.name(), "synthetic");
        assert_eq!(shown.progress().unwrap(), (0, 8, "trials"));
        assert!(shown.page().unwrap().html().contains("0 of 8 trials"));
        // Somebody else writes.
        let study = Study::parse(TEXT, &overrides).unwrap();
        Results::open(&at, &study).unwrap().append(&[record(4321)]).unwrap();
        assert_eq!(shown.progress().unwrap(), (1, 8, "trials"));
        let page = shown.page().unwrap().html();
        assert!(page.contains("1 of 8 trials") && page.contains("4321"), "{page}");
        assert!(!page.contains(" left, if the rest"), "no cell is over: {page}");
        let cut = TrialRecord { trial: record(4321).trial + 1, status: TrialStatus::Cut, ..record(4321) };
        Results::open(&at, &study).unwrap().append(&[cut]).unwrap();
        let page = shown.page().unwrap().html();
        assert!(page.contains("2 of 8 trials") && page.contains(" left, if the rest"), "{page}");
        assert!(shown.figure().unwrap().svg().starts_with("<svg"));
        let names: Vec<_> = fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "a note and two files of results, and no more: {names:?}");
    }

    #[test]
    fn what_is_no_note_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let message = |at: &Path| StudyFolder::open(at).unwrap_err().to_string();
        assert!(
            message(at).ends_with("study.json: is not there: this is no folder of a study"),
            "{}",
            message(at)
        );
        for (text, words) in [
            ("{}", "does not say what study this is: missing field `schema`"),
            (r#"{"schema":9,"study":"","beside":"/"}"#, "it has form 9, and this program reads 1"),
            (r#"{"schema":1,"study":"name = 3","beside":"/"}"#, "`name` must be"),
        ] {
            fs::write(at.join(STUDY_JSON), text).unwrap();
            assert!(message(at).contains(words), "{}", message(at));
        }
    }
    /// Whatever their kind, and whatever data they need.
    #[test]
    fn the_studies_that_come_with_the_program_are_studies() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../studies");
        let mut searches = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let read = match StudyKind::of(&text, &[]).unwrap() {
                StudyKind::StepsToResult => Study::parse(&text, &[]).map(|study| {
                    searches.push((study.name.clone(), study.cells.len() as u32 * study.search.trials));
                    study.name
                }),
                StudyKind::GeneralisationGap => GapStudy::parse(&text, &[]).map(|study| study.name),
                StudyKind::CriticalBatch => BranchStudy::parse(&text, &[]).map(|study| study.name),
                StudyKind::Smoothness => SmoothnessStudy::parse(&text, &[]).map(|study| study.name),
            };
            assert_eq!(read.unwrap_or_else(|why| panic!("{name}: {why}")), name);
        }
        for full in ["w1", "w2", "w3", "w4"] {
            assert!(searches.contains(&(full.into(), 14 * 4 * 100)), "{searches:?}");
        }
    }
}
