//! Fields of a config.json. One of another type than it should be is no default: nobody knows what was meant.

use serde_json::Value;

/// A size.
pub(super) fn positive_integer(config: &Value, field: &str) -> Result<usize, String> {
    let value = config[field].as_u64().filter(|number| *number > 0).map(|number| number as usize);
    value.ok_or_else(|| format!("`{field}` must be a whole number above 0, got {}", config[field]))
}

/// A field that is true or false, where it is there.
pub(super) fn flag(config: &Value, field: &str) -> Result<Option<bool>, String> {
    match &config[field] {
        Value::Null => Ok(None),
        Value::Bool(value) => Ok(Some(*value)),
        other => Err(format!("`{field}` must be true or false, got {other}")),
    }
}

/// A number, where it is there.
pub(super) fn number(config: &Value, field: &str) -> Result<Option<f64>, String> {
    match &config[field] {
        Value::Null => Ok(None),
        Value::Number(value) => Ok(value.as_f64()),
        other => Err(format!("`{field}` must be a number, got {other}")),
    }
}

/// A text, where it is there.
pub(super) fn text<'a>(config: &'a Value, field: &str) -> Result<Option<&'a str>, String> {
    match &config[field] {
        Value::Null => Ok(None),
        Value::String(value) => Ok(Some(value)),
        other => Err(format!("`{field}` must be a text, got {other}")),
    }
}
