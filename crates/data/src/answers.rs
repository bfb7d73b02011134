//! A row as tokens, and which of them are to be learnt: what a text says, what follows a prompt, or what a model
//! answers in a conversation.
//!
//! Which tokens of a conversation are answers is certain in two cases. Where the chat template marks them
//! (`{% generation %}`), they are the tokens of the marked bytes. Where it does not, the conversation up to an
//! answer is rendered with and without it: if both are beginnings of the full text, and their tokens are
//! beginnings of its tokens, the answer is what is between. Elsewhere a row is refused: to learn all of it
//! silently would teach the model to ask.

use std::ops::Range;

use crate::chat_template::{ChatTemplate, Conversation};
use crate::{Tokenizer, TokenizerConfig};

/// A document: its ids, and which of them are to be predicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LearntTokens {
    pub ids: Vec<u32>,
    /// Ids that count, in ascending ranges.
    pub counted: Vec<Range<usize>>,
}

/// What rows become tokens by.
#[derive(Debug)]
pub(crate) struct RowEncoder<'a> {
    pub tokenizer: &'a Tokenizer,
    pub template: Option<ChatTemplate>,
    /// What ends an answer and a text.
    pub end: Option<u32>,
    /// Whether all tokens are to be learnt, prompts too.
    pub learns_all: bool,
}

/// A row of a file.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct JsonRow {
    text: Option<String>,
    prompt: Option<String>,
    completion: Option<String>,
    messages: Option<minijinja::Value>,
    tools: Option<minijinja::Value>,
}

impl<'a> RowEncoder<'a> {
    pub fn new(tokenizer: &'a Tokenizer, learns_all: bool) -> Result<RowEncoder<'a>, crate::Error> {
        let folder = tokenizer.path().and_then(std::path::Path::parent);
        let config = folder.map(TokenizerConfig::of_folder).transpose()?.unwrap_or_default();
        let named = config.token("eos_token").and_then(|token| tokenizer.added(token));
        let template = match folder {
            Some(folder) => ChatTemplate::new(folder, &config, None)?,
            None => None,
        };
        Ok(RowEncoder { tokenizer, template, end: named.or_else(|| tokenizer.end()), learns_all })
    }

    /// The tokens of a row, or what is wrong with it.
    pub fn encode(&self, row: JsonRow) -> Result<LearntTokens, String> {
        let kinds =
            [row.text.is_some(), row.prompt.is_some() || row.completion.is_some(), row.messages.is_some()];
        match (kinds.iter().filter(|kind| **kind).count(), row) {
            (1, JsonRow { text: Some(text), .. }) => self.text(&text),
            (1, JsonRow { prompt: Some(prompt), completion: Some(completion), .. }) => {
                self.completion(&prompt, &completion)
            }
            (1, JsonRow { prompt: Some(_), .. }) => Err("has a `prompt` and no `completion`".into()),
            (1, JsonRow { completion: Some(_), .. }) => Err("has a `completion` and no `prompt`".into()),
            (1, JsonRow { messages: Some(messages), tools, .. }) => {
                self.conversation(&Conversation::new(messages, tools)?)
            }
            (0, _) => Err("has none of `text`, `prompt` with `completion`, and `messages`".into()),
            _ => Err("has more than one of `text`, `prompt` with `completion`, and `messages`".into()),
        }
    }

    fn text(&self, text: &str) -> Result<LearntTokens, String> {
        if text.is_empty() {
            return Err("has an empty `text`".into());
        }
        let mut ids = self.input(text)?;
        self.close(&mut ids);
        self.all_of(ids)
    }

    fn completion(&self, prompt: &str, completion: &str) -> Result<LearntTokens, String> {
        if completion.is_empty() {
            return Err("has no answer to learn: its `completion` is empty".into());
        }
        let mut ids = self.input(&format!("{prompt}{completion}"))?;
        let asked = self.input(prompt)?;
        if self.learns_all {
            self.close(&mut ids);
            return self.all_of(ids);
        }
        if ids.len() <= asked.len() || !ids.starts_with(&asked) {
            return Err("has a `prompt` whose tokens change with its `completion`: end the prompt where a word ends, \
                        and begin the completion with the space or line end that follows"
                .into());
        }
        self.close(&mut ids);
        let counted = std::iter::once(asked.len().max(1)..ids.len()).collect();
        Ok(LearntTokens { ids, counted })
    }

    fn conversation(&self, chat: &Conversation) -> Result<LearntTokens, String> {
        let template = self.template.as_ref().ok_or(
            "has `messages`, and the tokenizer has no chat template (chat_template.jinja, or tokenizer_config.json with one)",
        )?;
        let answers: Vec<usize> = (0..chat.len()).filter(|index| chat.is_answer(*index)).collect();
        if answers.is_empty() {
            return Err("has no answer to learn: no message has the role \"assistant\"".into());
        }
        let render =
            |chat: &Conversation, prompt: bool| template.render(chat, prompt).map_err(|why| why.to_string());
        let full = render(chat, false)?;
        if self.learns_all {
            return self.all_of(self.plain(&full.text)?);
        }
        if template.marks_answers() {
            return self.marked(&full.text, &full.answers);
        }
        let (ids, mut counted) = (self.plain(&full.text)?, Vec::new());
        let within = |text: &str| -> Result<usize, String> {
            let part = self.plain(text)?;
            let begins = full.text.starts_with(text) && ids.starts_with(&part);
            begins.then_some(part.len()).ok_or_else(|| {
                "has answers that cannot be told apart from what is asked: the chat template marks none \
                 (`{% generation %}`), and renders or splits a conversation otherwise once more of it follows; let rows \
                 end with their only answer, or learn all of them (`data.loss_on` = \"all\")"
                    .to_owned()
            })
        };
        for index in answers {
            let start = within(&render(&chat.first(index), true)?.text)?;
            let end = within(&render(&chat.first(index + 1), false)?.text)?;
            // What a template puts behind the token that ends an answer is never generated.
            let last = ids[start..end.max(start)].iter().rposition(|id| Some(*id) == self.end);
            let end = last.map_or(end, |last| start + last + 1);
            counted.push(start.max(1)..end);
        }
        counted.retain(|range: &Range<usize>| !range.is_empty());
        if counted.is_empty() {
            return Err("has no answer to learn: its answers are empty".into());
        }
        Ok(LearntTokens { ids, counted })
    }

    /// Tokens of a text of which these bytes are answers.
    fn marked(&self, text: &str, answers: &[Range<usize>]) -> Result<LearntTokens, String> {
        // A tokenizer that composes characters changes where bytes are; composed text it leaves as it is.
        let mut composed = String::with_capacity(text.len());
        let mut ranges = Vec::new();
        let mut at = 0;
        for answer in answers {
            composed.push_str(&self.tokenizer.composed(&text[at..answer.start]));
            let start = composed.len();
            composed.push_str(&self.tokenizer.composed(&text[answer.clone()]));
            ranges.push(start..composed.len());
            at = answer.end;
        }
        composed.push_str(&self.tokenizer.composed(&text[at..]));
        let ids = self.plain(&composed)?;
        let spelled = self.tokenizer.decode(&ids);
        // Some put a space before a text.
        let added = spelled.len().saturating_sub(composed.len());
        if added > 1 || spelled.get(added..) != Some(composed.as_bytes()) {
            return Err(
                "has tokens that do not spell its text, so that answers cannot be found in them".into()
            );
        }
        let (mut counted, mut begin) = (Vec::<Range<usize>>::new(), 0);
        for (index, id) in ids.iter().enumerate() {
            let end = begin + self.tokenizer.decode(&[*id]).len();
            let bytes = begin.saturating_sub(added)..end.saturating_sub(added);
            begin = end;
            let touched = ranges.iter().find(|range| range.start < bytes.end && bytes.start < range.end);
            match touched {
                Some(range) if range.start <= bytes.start && bytes.end <= range.end => {
                    match counted.last_mut() {
                        Some(last) if last.end == index => last.end += 1,
                        _ => counted.push(index.max(1)..index + 1),
                    }
                }
                Some(_) => {
                    return Err(
                        "has a token that is in part an answer and in part not: a chat template must \
                                separate them by a special token"
                            .into(),
                    );
                }
                None => {}
            }
        }
        counted.retain(|range| !range.is_empty());
        if counted.is_empty() {
            return Err("has no answer to learn: its `{% generation %}` blocks are empty".into());
        }
        Ok(LearntTokens { ids, counted })
    }

    fn all_of(&self, ids: Vec<u32>) -> Result<LearntTokens, String> {
        if ids.len() < 2 {
            return Err("has one token, and nothing to predict it from".into());
        }
        let counted = std::iter::once(1..ids.len()).collect();
        Ok(LearntTokens { ids, counted })
    }

    /// The ids of a text that begins an input; what would stand behind it is left to [`RowEncoder::close`].
    fn input(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = self.tokenizer.input_start();
        ids.extend(self.plain(text)?);
        Ok(ids)
    }

    fn plain(&self, text: &str) -> Result<Vec<u32>, String> {
        self.tokenizer.encode(text).map_err(|why| why.to_string())
    }

    fn close(&self, ids: &mut Vec<u32>) {
        ids.extend(self.end.filter(|end| ids.last() != Some(end)));
    }
}
