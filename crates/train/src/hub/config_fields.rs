//! Fields of a config.json. One of another type than it should be is no default: nobody knows what was meant.

use serde_json::Value;

/// A size.
pub(super) fn positive_integer(config: &Value, field: &str) -> Result<usize, String> {
    let value = config[field].as_u64().filter(|number| *number > 0).map(|number| number as usize);
    value.ok_or_else(|| format!("`{field}` must be a whole number above 0, got {}", config[field]))
}

/// A field that is true or false, where it is there.
pub(super) fn flag(config: &Value, field: &str) -> Result<Option<bool>, String> {
    optional(config, field, "true or false", Value::as_bool)
}

/// A number, where it is there.
pub(super) fn number(config: &Value, field: &str) -> Result<Option<f64>, String> {
    optional(config, field, "a number", Value::as_f64)
}

/// A text, where it is there.
pub(super) fn text<'a>(config: &'a Value, field: &str) -> Result<Option<&'a str>, String> {
    optional(config, field, "a text", Value::as_str)
}

fn optional<'a, T>(
    config: &'a Value,
    field: &str,
    what: &str,
    read: impl Fn(&'a Value) -> Option<T>,
) -> Result<Option<T>, String> {
    match &config[field] {
        Value::Null => Ok(None),
        value => read(value).map(Some).ok_or_else(|| format!("`{field}` must be {what}, got {value}")),
    }
}
