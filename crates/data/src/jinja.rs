//! Jinja as transformers runs chat templates: blocks trimmed, loop controls, Python's methods of strings, and
//! Python's spelling of what is not a string, in `tojson` and where a value is printed.
//!
//! `{% generation %}` marks what a model is to learn (transformers' `AssistantTracker`). Here it is a filter
//! block, so that white space around it is trimmed as around any block, and what is in it comes out between two
//! characters that no text has.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use crate::clock::CivilTime;

/// What stands before and behind an answer: noncharacters, which text in Unicode does not have.
pub(crate) const ANSWER: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// An environment with one template, `chat`. Without a time there is no `strftime_now`: what is trained on
/// must not change from day to day.
pub(crate) fn environment(source: &str, now: Option<CivilTime>) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out: &mut Output, _: &State, value: &Value| Ok(out.write_str(&printed(value))?));
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| printed(value));
    env.add_filter("espalier_generation", |body: String| format!("{}{body}{}", ANSWER[0], ANSWER[1]));
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    if let Some(now) = now {
        env.add_function("strftime_now", move |format: String| now.format(&format));
    }
    env.add_template_owned("chat", with_filter_blocks(source))?;
    Ok(env)
}

/// Whether a template marks what is to be learnt.
pub(crate) fn marks_answers(source: &str) -> bool {
    with_filter_blocks(source).contains("filter espalier_generation")
}

/// A template whose `{% generation %}` blocks are filter blocks.
fn with_filter_blocks(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let Some(end) = tag.find("%}").map(|at| at + 2) else { break };
        let (tag, behind) = tag.split_at(end);
        out.push_str(before);
        match tag[2..end - 2].trim_matches(['-', '+', ' ', '\t', '\r', '\n']) {
            "generation" => out.push_str(&tag.replacen("generation", "filter espalier_generation", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endfilter", 1)),
            _ => out.push_str(tag),
        }
        rest = behind;
    }
    out + rest
}

/// A value as Python's `str` has it.
fn printed(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            spelled(value, &Style { quote: repr, none: "None", booleans: ["False", "True"], indent: None }, 0)
        }
    }
}

/// Python's `json.dumps(value, ensure_ascii=False)`, perhaps with an indent.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<usize>>("indent")?;
    // The others are left as they are by default.
    let _ = (kwargs.get::<Option<bool>>("ensure_ascii")?, kwargs.get::<Option<bool>>("sort_keys")?);
    kwargs.assert_all_used()?;
    let style = Style { quote: json_string, none: "null", booleans: ["false", "true"], indent };
    Ok(Value::from_safe_string(spelled(value, &style, 0)))
}

/// How values that are no strings are written.
struct Style {
    quote: fn(&str) -> String,
    none: &'static str,
    booleans: [&'static str; 2],
    indent: Option<usize>,
}

fn spelled(value: &Value, style: &Style, depth: usize) -> String {
    let list = |open: char, close: char, items: Vec<String>| match style.indent {
        Some(indent) if !items.is_empty() => {
            let line = |depth: usize| format!("\n{}", " ".repeat(indent * depth));
            format!(
                "{open}{}{}{}{close}",
                line(depth + 1),
                items.join(&format!(",{}", line(depth + 1))),
                line(depth)
            )
        }
        _ => format!("{open}{}{close}", items.join(", ")),
    };
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => style.none.into(),
        ValueKind::Bool => style.booleans[usize::from(value.is_true())].into(),
        ValueKind::String => (style.quote)(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter().into_iter().flatten();
            list('[', ']', items.map(|item| spelled(&item, style, depth + 1)).collect())
        }
        ValueKind::Map => {
            let pair = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                let key = if key.as_str().is_some() {
                    spelled(&key, style, 0)
                } else {
                    (style.quote)(&key.to_string())
                };
                format!("{key}: {}", spelled(&item, style, depth + 1))
            };
            list('{', '}', value.try_iter().into_iter().flatten().map(pair).collect())
        }
        _ => value.to_string(),
    }
}

/// A string as Python's `repr` has it: in double quotes where it has single ones alone.
fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_ascii_control() => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

fn json_string(text: &str) -> String {
    // What serde escapes is what Python escapes, DEL included, which neither does.
    serde_json::to_string(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn render(source: &str, value: Value) -> String {
        let env = environment(source, None).unwrap();
        env.get_template("chat").unwrap().render(context! { x => value }).unwrap()
    }

    #[test]
    fn values_are_spelled_as_python_spells_them() {
        let value: Value =
            serde_json::from_str(r#"{"b": [1, 2.5, true, null], "a": "it's", "c": {}, "d": "ü\n\"<"}"#)
                .unwrap();
        assert_eq!(
            render("{{ x }}", value.clone()),
            r#"{'b': [1, 2.5, True, None], 'a': "it's", 'c': {}, 'd': 'ü\n"<'}"#
        );
        assert_eq!(
            render("{{ x | tojson }}", value.clone()),
            r#"{"b": [1, 2.5, true, null], "a": "it's", "c": {}, "d": "ü\n\"<"}"#
        );
        assert_eq!(render("{{ x.b | tojson(indent=2) }}", value), "[\n  1,\n  2.5,\n  true,\n  null\n]");
        assert_eq!(render("{{ x }}{{ y }}{{ none }}", Value::from(true)), "TrueNone");
    }

    #[test]
    fn blocks_of_answers_are_marked_and_trimmed() {
        let source = "a\n  {% generation %}\n{{ x }}\n{%- endgeneration %}\nb";
        assert_eq!(render(source, Value::from("y")), "a\n\u{fdd0}y\u{fdd1}b");
        assert!(marks_answers("{%- generation -%}x{%- endgeneration -%}"));
        assert!(!marks_answers("{% if add_generation_prompt %}generation{% endif %}"));
    }
}
