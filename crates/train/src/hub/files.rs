//! Which files hold the weights of a model that another program wrote: `model.safetensors`, the files that an
//! index names, or one file of any name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use espalier_data::regular_file::{self, RECORDS};
use serde::Deserialize;

use super::CONFIG;
use crate::checkpoint::{MANIFEST, MODEL};

/// Which file holds which tensor, where there are several.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Files that unpickling would read: whatever they say is run as a program.
const PICKLED: [&str; 4] = ["bin", "pt", "pth", "ckpt"];

/// The files of some weights.
#[derive(Debug)]
pub(super) struct WeightFiles {
    pub(super) folder: PathBuf,
    pub(super) names: Vec<String>,
    /// The file of each tensor, where an index says so.
    pub(super) index: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether this is somebody else's: a file, or a folder with weights or a configuration, and no manifest of ours.
pub fn is_foreign(path: &Path) -> bool {
    let has = |name: &str| path.join(name).exists();
    let is_weights = path.is_file() && (extension(path) == "safetensors" || is_pickled(path));
    is_weights || (!has(MANIFEST) && [MODEL, INDEX, CONFIG].into_iter().any(has))
}

pub(super) fn find(path: &Path) -> Result<WeightFiles, String> {
    if path.is_file() {
        if is_pickled(path) {
            return Err(pickled(&path.file_name().unwrap_or_default().to_string_lossy()));
        }
        let name = path.file_name().and_then(|name| name.to_str()).ok_or("its name is not text")?;
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        return Ok(WeightFiles { folder: folder.into(), names: vec![name.into()], index: None });
    }
    let folder = path.to_owned();
    if path.join(MODEL).exists() {
        return Ok(WeightFiles { folder, names: vec![MODEL.into()], index: None });
    }
    match regular_file::read(&path.join(INDEX), RECORDS) {
        Ok(text) => {
            let Index { weight_map } = serde_json::from_slice(&text)
                .map_err(|why| format!("{INDEX} is not an index of weights: {why}"))?;
            let names: BTreeSet<&String> = weight_map.values().collect();
            if let Some(missing) = names.iter().find(|name| !path.join(name).exists()) {
                return Err(format!("{INDEX} names {missing}, which is not there"));
            }
            let names = names.into_iter().cloned().collect();
            Ok(WeightFiles { folder, names, index: Some(weight_map) })
        }
        Err(_) => {
            let files = fs::read_dir(path).map_err(|why| why.to_string())?;
            let found = files.flatten().map(|file| file.path()).find(|path| is_pickled(path));
            Err(match found {
                Some(file) => pickled(&file.file_name().unwrap_or_default().to_string_lossy()),
                None => format!("it has no {MODEL} and no {INDEX}"),
            })
        }
    }
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

fn is_pickled(path: &Path) -> bool {
    PICKLED.contains(&extension(path))
}

fn pickled(name: &str) -> String {
    format!(
        "{name} is a pickle, which is a program and not read here: save the weights as {MODEL}, with \
         `save_pretrained(..)` or `safetensors.torch.save_file(model.state_dict(), ..)`"
    )
}
