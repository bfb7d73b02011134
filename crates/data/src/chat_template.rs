//! Conversations as text, by the chat template of a tokenizer: what transformers' `apply_chat_template` gives,
//! and which of its bytes are answers.

use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::{Environment, Value};

use crate::clock::CivilTime;
use crate::jinja::{self, ANSWER};
use crate::{Error, Tokenizer, TokenizerConfig};

/// The templates of a tokenizer.
#[derive(Debug)]
pub struct ChatTemplate {
    /// The folder that it was read from.
    path: PathBuf,
    default: Environment<'static>,
    /// For conversations with tools.
    with_tools: Option<Environment<'static>>,
    special_tokens: Vec<(String, String)>,
    marks_answers: bool,
}

/// A conversation, as a row of a file has it.
#[derive(Debug, Clone)]
pub struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    pub text: String,
    /// The bytes of it that `{% generation %}` blocks made.
    pub answers: Vec<Range<usize>>,
}

impl Conversation {
    /// Messages, each an object with `role` and `content`, and perhaps tools; or what was expected of them.
    pub fn new(messages: Value, tools: Option<Value>) -> Result<Conversation, String> {
        let is_message = |message: &Value| message.get_attr("role").is_ok_and(|role| role.as_str().is_some());
        let list: Vec<Value> = messages.try_iter().map_err(|_| "`messages` is not a list")?.collect();
        match list.iter().position(|message| !is_message(message)) {
            _ if list.is_empty() => Err("`messages` is empty".into()),
            Some(at) => Err(format!("message {} of `messages` has no `role`", at + 1)),
            None => Ok(Conversation { messages: list, tools: tools.filter(|tools| !tools.is_none()) }),
        }
    }

    /// One of plain texts: a role and what it says.
    pub fn of_texts<'a>(texts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Conversation {
        let message = |(role, content): (&str, &str)| {
            Value::from_iter([("role", Value::from(role)), ("content", Value::from(content))])
        };
        Conversation { messages: texts.into_iter().map(message).collect(), tools: None }
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether a message is the model's.
    pub fn is_answer(&self, index: usize) -> bool {
        self.messages[index].get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
    }

    /// Its first messages.
    pub fn first(&self, count: usize) -> Conversation {
        Conversation { messages: self.messages[..count].to_vec(), tools: self.tools.clone() }
    }
}

impl ChatTemplate {
    /// That of a tokenizer's folder; none where it has none. `now` is what templates print as today, which
    /// those that ask for it cannot do without.
    pub fn of_tokenizer(
        tokenizer: &Tokenizer,
        now: Option<CivilTime>,
    ) -> Result<Option<ChatTemplate>, Error> {
        match tokenizer.path().and_then(Path::parent) {
            Some(folder) => ChatTemplate::new(folder, &TokenizerConfig::of_folder(folder)?, now),
            None => Ok(None),
        }
    }

    /// That of a configuration, which an error says was read from `path`.
    pub fn new(
        path: &Path,
        config: &TokenizerConfig,
        now: Option<CivilTime>,
    ) -> Result<Option<ChatTemplate>, Error> {
        let environment = |source: &String| {
            jinja::environment(source, now)
                .map_err(|why| Error::ChatTemplate { path: path.into(), why: one_line(&why) })
        };
        if config.templates.is_empty() {
            return Ok(None);
        }
        let Some(source) = config.templates.get("default") else {
            let names = config.templates.keys().cloned().collect::<Vec<_>>().join(", ");
            let why = format!("none of its templates ({names}) is named default");
            return Err(Error::ChatTemplate { path: path.into(), why });
        };
        let with_tools = config.templates.get("tool_use");
        Ok(Some(ChatTemplate {
            path: path.into(),
            default: environment(source)?,
            with_tools: with_tools.map(environment).transpose()?,
            special_tokens: config.special_tokens.clone().into_iter().collect(),
            marks_answers: jinja::marks_answers(source)
                && with_tools.is_none_or(|source| jinja::marks_answers(source)),
        }))
    }

    /// Whether it marks what the model is to learn, by `{% generation %}`.
    pub fn marks_answers(&self) -> bool {
        self.marks_answers
    }

    /// A conversation as text, perhaps with the beginning of an answer behind it; or why it has none.
    pub fn render(&self, chat: &Conversation, add_generation_prompt: bool) -> Result<RenderedChat, Error> {
        let refuse = |why: String| Error::ChatTemplate { path: self.path.clone(), why };
        let environment = match (&chat.tools, &self.with_tools) {
            (Some(_), Some(with_tools)) => with_tools,
            _ => &self.default,
        };
        let mut variables: Vec<(&str, Value)> = self
            .special_tokens
            .iter()
            .map(|(name, token)| (name.as_str(), Value::from(token.as_str())))
            .collect();
        variables.extend([
            ("messages", Value::from(chat.messages.clone())),
            ("tools", chat.tools.clone().unwrap_or(Value::from(()))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ]);
        let template = environment.get_template("chat").map_err(|why| refuse(one_line(&why)))?;
        let marked = template.render(Value::from_iter(variables)).map_err(|why| refuse(one_line(&why)))?;
        let (mut text, mut answers, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
        for c in marked.chars() {
            match (c == ANSWER[0], c == ANSWER[1], start) {
                (true, _, None) => start = Some(text.len()),
                (_, true, Some(start_of_answer)) => {
                    answers.push(start_of_answer..text.len());
                    start = None;
                }
                (false, false, _) => text.push(c),
                _ => {
                    return Err(refuse(
                        "a message has a character that marks answers (U+FDD0, U+FDD1)".into(),
                    ));
                }
            }
        }
        Ok(RenderedChat { text, answers })
    }
}

/// What an error of a template says, in one line: what it raised, or what is wrong with it and where.
fn one_line(why: &minijinja::Error) -> String {
    let detail = why.detail().unwrap_or_default();
    let text = match why.kind() {
        minijinja::ErrorKind::InvalidOperation if !detail.is_empty() => detail.to_owned(),
        minijinja::ErrorKind::UnknownFunction if detail.contains("strftime_now") => {
            "it prints today's date, with which the same run would learn other tokens tomorrow".to_owned()
        }
        kind => format!("{kind}: {detail} (line {})", why.line().unwrap_or(1)),
    };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
