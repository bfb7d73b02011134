//! `[data]`: what is learnt from. The kind decides which other fields there are.

use super::Error;
use super::fields;
use super::reader::{FieldValues, Section};
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
            return Err(section.conflict("validation", problem));
        }
        match &*values.get::<String>("kind") {
            "idx" => check_idx(section)?,
            "images" => complete_pictures(section, &mut values)?,
            _ => {}
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
            let problem = "and `data.path` exclude each other: name the folder or the two files";
            Err(section.conflict(if images { "images" } else { "labels" }, problem))
        }
        [false, true, false] => missing("labels", "the file of labels"),
        [false, false, true] => missing("images", "the file of images"),
        [false, false, false] => {
            missing("path", "the folder of MNIST's files (or `data.images` and `data.labels`)")
        }
    }
}

/// What follows from the size that the model sees, as recipes for ImageNet have it: 256 for 224.
fn complete_pictures(section: &Section, values: &mut FieldValues) -> Result<(), Error> {
    let size = values.get::<usize>("size");
    values.set_left_out("resize", (size * 256).div_ceil(224));
    let resize = values.get::<usize>("resize");
    if resize < size {
        let problem = format!("is {resize}, and `data.size` {size}: a crop is not larger than the picture");
        return Err(section.conflict("resize", problem));
    }
    values.set_left_out("max_side", 2 * resize);
    let side = values.get::<usize>("max_side");
    if side < resize {
        let problem =
            format!("is {side}, and `data.resize` {resize}: pictures would be shrunk, then enlarged");
        return Err(section.conflict("max_side", problem));
    }
    let is_resized = values.get::<String>("crop") == "resized";
    for (key, usual) in [("scale", [0.08, 1.0]), ("ratio", [3.0 / 4.0, 4.0 / 3.0])] {
        if section.has(key) && !is_resized {
            return Err(section.no_effect(key, "with `data.crop` = \"random\" or \"center\""));
        }
        if is_resized {
            values.set_left_out(key, usual);
            match values.get::<Vec<f64>>(key)[..] {
                [least, most] if least <= most => {}
                _ => return Err(section.conflict(key, "takes two numbers, the least and the largest")),
            }
        }
    }
    if section.has("cache_path") && values.get::<String>("cache") == "none" {
        return Err(section.no_effect("cache_path", "with `data.cache` = \"none\""));
    }
    Ok(())
}
