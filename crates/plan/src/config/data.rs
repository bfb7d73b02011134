//! `[data]`: what is learnt from. The kind decides which other fields there are.

use super::Error;
use super::fields;
use super::reader::Section;
use crate::data::{DatasetSource, DatasetSpec};

impl DatasetSpec {
    /// Without a kind: what the model can learn from without any file.
    pub(super) fn read(section: &mut Section, text: bool) -> Result<DatasetSpec, Error> {
        let mut values = section.read_variant(fields::DATA, if text { "arithmetic" } else { "shapes" })?;
        if values.find::<Vec<String>>("validation_path").is_none_or(|paths| paths.is_empty()) {
            values.remove("validation_path");
            values.set_left_out("validation", 0.1);
        } else if section.has("validation") {
            let problem =
                "and `data.validation_path` exclude each other: hold out a fraction, or use other files";
            return Err(Error::Conflict { field: section.field("validation"), problem: problem.into() });
        }
        if values.get::<String>("kind") == "idx" {
            check_idx(section)?;
        }
        let mut data: DatasetSpec = values.all();
        if let DatasetSource::Text { extensions, .. } = &mut data.source {
            extensions.iter_mut().for_each(|one| *one = one.trim_start_matches('.').into());
        }
        Ok(data)
    }
}

/// A folder, or two files.
fn check_idx(section: &Section) -> Result<(), Error> {
    let missing = |key: &str, expected: &str| {
        Err(Error::Missing { field: section.field(key), expected: expected.into() })
    };
    match ["path", "images", "labels"].map(|key| section.has(key)) {
        [true, false, false] | [false, true, true] => Ok(()),
        [true, images, _] => {
            let problem = "and `data.path` exclude each other: name the folder or the two files".into();
            Err(Error::Conflict { field: section.field(if images { "images" } else { "labels" }), problem })
        }
        [false, true, false] => missing("labels", "the file of labels"),
        [false, false, true] => missing("images", "the file of images"),
        [false, false, false] => {
            missing("path", "the folder of MNIST's files (or `data.images` and `data.labels`)")
        }
    }
}
