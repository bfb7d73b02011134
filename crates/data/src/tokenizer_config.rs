//! What stands beside a tokenizer: `tokenizer_config.json`, `special_tokens_map.json` and
//! `chat_template.jinja`. They name the tokens that begin and end a text, and how a conversation becomes one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::{Error, error, regular_file::SETTINGS};

/// The names of these files.
const CONFIG: &str = "tokenizer_config.json";
const TOKEN_MAP: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";

/// What these files say.
#[derive(Debug, Clone, Default)]
pub struct TokenizerConfig {
    /// `bos_token`, `eos_token` and the like, as they are written.
    pub special_tokens: BTreeMap<String, String>,
    /// Chat templates by name; the only one of a model is `default`.
    pub templates: BTreeMap<String, String>,
    /// Whether an input begins with `bos_token`, where the file says so.
    pub add_bos_token: Option<bool>,
}

impl TokenizerConfig {
    /// Of the folder of a tokenizer; empty where it has none of these files.
    pub fn of_folder(folder: &Path) -> Result<TokenizerConfig, Error> {
        let config = object(&folder.join(CONFIG), SETTINGS)?.unwrap_or_default();
        let mut special_tokens = BTreeMap::new();
        let map = object(&folder.join(TOKEN_MAP), SETTINGS)?.unwrap_or_default();
        for (key, token) in map.iter().chain(&config) {
            let content = token.as_str().or_else(|| token["content"].as_str());
            if let (true, Some(content)) = (key.ends_with("_token"), content) {
                special_tokens.insert(key.clone(), content.to_owned());
            }
        }
        let mut templates = BTreeMap::new();
        match config.get("chat_template") {
            Some(Value::String(template)) => drop(templates.insert("default".into(), template.clone())),
            Some(Value::Array(named)) => {
                for one in named {
                    if let (Some(name), Some(template)) = (one["name"].as_str(), one["template"].as_str()) {
                        templates.insert(name.into(), template.into());
                    }
                }
            }
            _ => {}
        }
        let file = folder.join(TEMPLATE);
        if file.is_file() {
            let text = error::read(&file, "a chat template", SETTINGS)?;
            let position = |why: std::string::FromUtf8Error| why.utf8_error().valid_up_to();
            let text = String::from_utf8(text)
                .map_err(|why| Error::NotText { path: file.clone(), position: position(why) })?;
            templates.insert("default".into(), text);
        }
        let add_bos_token = config.get("add_bos_token").and_then(Value::as_bool);
        Ok(TokenizerConfig { special_tokens, templates, add_bos_token })
    }

    /// The file of a folder that has its chat template, where it has one.
    pub(crate) fn template_file(folder: &Path) -> Option<PathBuf> {
        let (own, config) = (folder.join(TEMPLATE), folder.join(CONFIG));
        let has_one = || {
            let found = object(&config, SETTINGS).ok().flatten();
            found.is_some_and(|config| config.contains_key("chat_template"))
        };
        if own.is_file() { Some(own) } else { has_one().then_some(config) }
    }

    /// A token that the files name, such as `eos_token`.
    pub fn token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).map(String::as_str)
    }
}

/// The object of a JSON file of at most so many bytes; none where there is no such file.
pub(crate) fn object(path: &Path, limit: u64) -> Result<Option<Map<String, Value>>, Error> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = error::read(path, "a file of a Hugging Face tokenizer", limit)?;
    serde_json::from_slice(&text).map(Some).map_err(|why| Error::tokenizer(path, "a JSON object", why))
}
