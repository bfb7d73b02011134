//! Byte pair encoding: the way from text to ids of GPT-2, Llama 3, Qwen and SmolLM, which spell words in bytes,
//! and of Llama 2, Mistral and Gemma, which spell them in characters.
//!
//! Normalize the text (`normalize`), split it into words (`pre_tokenize`), spell each in symbols, and merge the
//! pair of lowest rank until none is left (Sennrich et al. 2016). Ids are those of Hugging Face's
//! `encode(text, add_special_tokens=False)`.
//!
//! Why our own: what Hugging Face's crate brings to a first build takes longer than a third of all the rest
//! (ARCHITECTURE.md has the numbers), for what is a few small files here; and these are faster. The tests hold
//! them to its output.

use crate::{
    Error, SplitPattern,
    normalize::{SPACE, TextNormalizer, with_marks},
    word_hash::WordMap,
};
use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::BinaryHeap,
    path::{Path, PathBuf},
};

/// Words longer than this are not remembered, and no more words than that.
const REMEMBERED: (usize, usize) = (32, 1 << 20);
/// Up to so many symbols the pair of lowest rank is looked for in all of them; a heap finds it in more.
const SHORT: usize = 48;

/// Words and their ids, remembered from one text to the next.
pub(crate) type WordCache = WordMap<Box<str>, Box<[u32]>>;

#[derive(Debug)]
pub struct Bpe {
    pub(crate) path: PathBuf,
    /// The `tokenizer.json` that says the same, where it was read from other files.
    pub(crate) json: Option<String>,
    pub(crate) normalizer: TextNormalizer,
    pub(crate) split: WordSplit,
    pub(crate) alphabet: Alphabet,
    /// Two ids that stand side by side, the rank of their merge, and what they become.
    pub(crate) merges: WordMap<(u32, u32), (u32, u32)>,
    /// Words that are tokens whatever merges say; empty where merges decide.
    pub(crate) whole_words: WordMap<Box<[u8]>, u32>,
    /// Found in the text before it is split: first those that apply to raw text, then those that apply to what
    /// the normalizer makes of it, as it makes it. Longest first.
    pub(crate) added: [Vec<(String, u32)>; 2],
    /// Added tokens as they are written.
    pub(crate) added_tokens: Vec<(String, u32)>,
    /// What each id stands for.
    pub(crate) token_bytes: Vec<Vec<u8>>,
    /// Ids that mark something and are no text, ascending.
    pub(crate) special: Vec<u32>,
    /// What a single input has before and behind it.
    pub(crate) around: [Vec<u32>; 2],
}

/// What merging begins with.
#[derive(Debug)]
pub(crate) enum Alphabet {
    /// Bytes, by their ids.
    Bytes(Box<[Option<u32>; 256]>),
    /// Characters; one that is no token is spelled in bytes, or else is unknown.
    Characters {
        ids: WordMap<char, u32>,
        bytes: Option<Box<[Option<u32>; 256]>>,
        unknown: Option<u32>,
        /// Whether several unknown ones are one.
        fuses_unknown: bool,
    },
}

/// How a text is split into words that are merged one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WordSplit {
    /// By a pattern, or not at all, with a space before a text that has none.
    Pattern { pattern: Option<SplitPattern>, prefix_space: bool },
    /// At spaces, which are written as U+2581.
    Marks {
        /// Which texts get one before them that have none.
        prefix: MarkPrefix,
        /// Where words begin.
        words: MarkedWords,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkPrefix {
    Never,
    /// What begins the input.
    First,
    /// What begins the input or follows an added token.
    Always,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkedWords {
    /// At every space.
    Each,
    /// At the first of several spaces: no token goes on over one, so that merges are those of the full text.
    Runs,
    /// A text is one word.
    One,
}

/// What stands before a text that is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextStart {
    Input,
    /// Text that was encoded apart.
    Text,
    Added,
}

impl Bpe {
    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        self.token_bytes.len()
    }

    /// The id of an added token such as `<|endoftext|>`.
    pub fn added(&self, content: &str) -> Option<u32> {
        self.added_tokens.iter().find(|(c, _)| c == content).map(|&(_, id)| id)
    }

    /// Whether an id marks something and is no text.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Whether ids are the same where a text is cut before a space between two letters or digits of ASCII, and
    /// what follows is encoded as such.
    pub fn can_split(&self) -> bool {
        let splits = match self.split {
            WordSplit::Pattern { pattern, .. } => pattern.is_some(),
            WordSplit::Marks { words, .. } => words != MarkedWords::One,
        };
        splits && !self.added_tokens.iter().any(|(content, _)| content.contains(' '))
    }

    /// What an id stands for; nothing if it has no meaning.
    pub(crate) fn token_bytes(&self, id: u32) -> &[u8] {
        self.token_bytes.get(id as usize).map_or(&[], |token_bytes| token_bytes)
    }

    /// What stands before a single input.
    pub(crate) fn input_start(&self) -> Vec<u32> {
        self.around[0].clone()
    }

    /// The ids of a text with what stands before and behind a single input.
    pub(crate) fn encode_input(&self, text: &str) -> Result<Vec<u32>, Error> {
        let [before, behind] = &self.around;
        Ok([before, &self.encode(text)?, behind].into_iter().flatten().copied().collect())
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        self.encode_into(text, false, &mut WordCache::default(), &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text; `cache` remembers words from one text to the next. One that `continues`
    /// another was cut off before a space.
    pub(crate) fn encode_into(
        &self,
        text: &str,
        continues: bool,
        cache: &mut WordCache,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let [raw, normalized] = &self.added;
        let mut start = if continues { TextStart::Text } else { TextStart::Input };
        for segment in segments(text, raw) {
            match segment {
                TextSegment::Added(id) => ids.push(id),
                TextSegment::Text(text) => {
                    let text = self.normalizer.apply(text, start == TextStart::Text);
                    for segment in segments(&text, normalized) {
                        match segment {
                            TextSegment::Added(id) => ids.push(id),
                            TextSegment::Text(text) => self.plain(text, start, cache, ids)?,
                        }
                        start = TextStart::Added;
                    }
                }
            }
            start = TextStart::Added;
        }
        Ok(())
    }

    /// Text without added tokens.
    fn plain(
        &self,
        text: &str,
        start: TextStart,
        cache: &mut WordCache,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        match self.split {
            WordSplit::Pattern { pattern, prefix_space } => {
                let text = match prefix_space && !text.starts_with(' ') {
                    true => Cow::Owned(format!(" {text}")),
                    false => Cow::Borrowed(text),
                };
                match pattern {
                    None => self.merge(&text, ids),
                    Some(pattern) => {
                        pattern.words(&text).try_for_each(|word| self.encode_word(word, cache, ids))
                    }
                }
            }
            WordSplit::Marks { prefix, words } => {
                let wanted = match prefix {
                    MarkPrefix::Never => false,
                    MarkPrefix::First => start == TextStart::Input,
                    MarkPrefix::Always => start != TextStart::Text,
                };
                let text = with_marks(text, wanted && !text.starts_with([' ', SPACE]));
                match words {
                    MarkedWords::One => self.merge(&text, ids),
                    _ => marked_words(&text, words).try_for_each(|word| self.encode_word(word, cache, ids)),
                }
            }
        }
    }

    fn encode_word(&self, word: &str, cache: &mut WordCache, ids: &mut Vec<u32>) -> Result<(), Error> {
        if let Some(known) = cache.get(word) {
            ids.extend_from_slice(known);
            return Ok(());
        }
        let before = ids.len();
        self.merge(word, ids)?;
        if word.len() <= REMEMBERED.0 && cache.len() < REMEMBERED.1 {
            cache.insert(word.into(), ids[before..].into());
        }
        Ok(())
    }

    /// Appends the ids of a word: merges its symbols, lowest rank first and leftmost among equals.
    fn merge(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        if let Some(&id) = self.whole_words.get(word.as_bytes()) {
            ids.push(id);
            return Ok(());
        }
        let before = ids.len();
        self.spell(word, ids)?;
        if ids.len() - before > SHORT {
            let symbols = ids.split_off(before);
            ids.extend(self.merge_long(symbols));
        } else {
            self.merge_short(before, ids);
        }
        Ok(())
    }

    /// Appends the symbols that merging a word begins with.
    fn spell(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        let missing =
            |what: String| Error::NoToken { path: self.path.clone(), got: format!("{what} of {word}") };
        match &self.alphabet {
            Alphabet::Bytes(bytes) => {
                for byte in word.bytes() {
                    ids.push(bytes[usize::from(byte)].ok_or_else(|| missing(format!("byte {byte:#04x}")))?);
                }
            }
            Alphabet::Characters { ids: known, bytes, unknown, fuses_unknown } => {
                let mut behind_unknown = false;
                for c in word.chars() {
                    if let Some(&id) = known.get(&c) {
                        ids.push(id);
                        behind_unknown = false;
                        continue;
                    }
                    let (spelled, before) = (c.encode_utf8(&mut [0; 4]).to_owned(), ids.len());
                    let id = |byte: u8| bytes.as_ref().and_then(|bytes| bytes[usize::from(byte)]);
                    ids.extend(spelled.bytes().map_while(id));
                    if ids.len() - before == spelled.len() {
                        behind_unknown = false;
                        continue;
                    }
                    ids.truncate(before);
                    if !(*fuses_unknown && behind_unknown) {
                        ids.push(unknown.ok_or_else(|| missing(c.to_string()))?);
                    }
                    behind_unknown = true;
                }
            }
        }
        Ok(())
    }

    /// Merges what stands from an index on: few symbols, of which each pair is looked at in turn.
    fn merge_short(&self, start: usize, ids: &mut Vec<u32>) {
        const NONE: (u32, u32) = (u32::MAX, 0);
        let pair = |left: u32, right: u32| self.merges.get(&(left, right)).copied().unwrap_or(NONE);
        let mut pairs = [NONE; SHORT];
        let mut count = ids.len() - start;
        for i in 1..count {
            pairs[i - 1] = pair(ids[start + i - 1], ids[start + i]);
        }
        while count > 1 {
            let best = (0..count - 1).min_by_key(|&i| pairs[i].0).expect("a pair is left");
            if pairs[best].0 == u32::MAX {
                break;
            }
            ids[start + best] = pairs[best].1;
            ids.remove(start + best + 1);
            pairs.copy_within(best + 1..count - 1, best);
            count -= 1;
            if best > 0 {
                pairs[best - 1] = pair(ids[start + best - 1], ids[start + best]);
            }
            if best + 1 < count {
                pairs[best] = pair(ids[start + best], ids[start + best + 1]);
            }
        }
    }

    /// The same of any number: a heap holds the pairs that can merge, so that a word of a million bytes takes
    /// n log n steps.
    fn merge_long(&self, symbols: Vec<u32>) -> impl Iterator<Item = u32> + use<> {
        const NONE: usize = usize::MAX;
        let count = symbols.len();
        let mut ids: Vec<Option<u32>> = symbols.into_iter().map(Some).collect();
        let mut next: Vec<usize> = (1..=count).map(|i| if i < count { i } else { NONE }).collect();
        let mut previous: Vec<usize> = (0..count).map(|i| i.wrapping_sub(1)).collect();
        let pair = |ids: &[Option<u32>], left: usize, right: usize| {
            let pair = (*ids.get(left)?.as_ref()?, *ids.get(right)?.as_ref()?);
            self.merges.get(&pair).map(|&(rank, merged)| Reverse((rank, left, merged)))
        };
        let mut heap: BinaryHeap<_> = (0..count).filter_map(|i| pair(&ids, i, next[i])).collect();
        while let Some(Reverse(top)) = heap.pop() {
            let (_, left, merged) = top;
            let right = next[left];
            // The pair may have changed since it was pushed.
            if pair(&ids, left, right) != Some(Reverse(top)) {
                continue;
            }
            ids[left] = Some(merged);
            ids[right] = None;
            next[left] = next[right];
            if next[left] != NONE {
                previous[next[left]] = left;
            }
            heap.extend(pair(&ids, previous[left], left));
            heap.extend(pair(&ids, left, next[left]));
        }
        ids.into_iter().flatten()
    }
}

/// The words of a text whose spaces are U+2581.
fn marked_words(text: &str, words: MarkedWords) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        // A word has its space, or several, before it.
        let spaces = match words {
            MarkedWords::Each => {
                rest.find(|c| c != SPACE).map_or(SPACE.len_utf8(), |at| at.min(SPACE.len_utf8()))
            }
            _ => rest.find(|c| c != SPACE).unwrap_or(rest.len()),
        };
        let end = rest[spaces..].find(SPACE).map_or(rest.len(), |at| spaces + at);
        let (word, behind) = rest.split_at(end);
        rest = behind;
        Some(word)
    })
}

enum TextSegment<'a> {
    Text(&'a str),
    Added(u32),
}

/// Cuts a text at added tokens: leftmost first, longest among those.
fn segments<'a>(text: &'a str, added: &[(String, u32)]) -> Vec<TextSegment<'a>> {
    if added.is_empty() {
        return if text.is_empty() { Vec::new() } else { vec![TextSegment::Text(text)] };
    }
    let mut opens = [false; 256];
    added.iter().for_each(|(content, _)| opens[usize::from(content.as_bytes()[0])] = true);
    let (mut segments, mut start, mut at) = (Vec::new(), 0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        let found = || added.iter().find(|(content, _)| rest.starts_with(content.as_bytes()));
        if let Some((content, id)) = opens[usize::from(rest[0])].then(found).flatten() {
            if start < at {
                segments.push(TextSegment::Text(&text[start..at]));
            }
            segments.push(TextSegment::Added(*id));
            at += content.len();
            start = at;
        } else {
            at += 1;
        }
    }
    if start < at {
        segments.push(TextSegment::Text(&text[start..]));
    }
    segments
}

#[cfg(test)]
mod tests;
