//! Byte-level pair encoding: GPT-2's way from text to ids, and its descendants'.
//!
//! Split the text into words (`split`), spell each word in bytes, and merge the pair of lowest rank until
//! none is left (Sennrich et al. 2016). Ids are those of Hugging Face's
//! `encode(text, add_special_tokens=False)`.
//!
//! Why our own: the `tokenizers` crate (0.23, no default features, `fancy-regex`) takes 67 s to build on two
//! cores under this workspace's profile, where serde, serde_json, thiserror and rayon alone take 11 s; the
//! first command a newcomer types would wait a minute longer for what is three small files here. The tests
//! hold them to its output.

use crate::{Error, pre_tokenize::PreTokens};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    path::{Path, PathBuf},
};

/// Words longer than this are not remembered, and no more words than that.
const REMEMBERED: (usize, usize) = (32, 1 << 20);

#[derive(Debug)]
pub struct Bpe {
    pub(crate) path: PathBuf,
    /// The `tokenizer.json` that says the same, where it was read from other files.
    pub(crate) json: Option<String>,
    /// The id of each single byte.
    pub(crate) bytes: [Option<u32>; 256],
    /// Two ids that stand side by side, the rank of their merge, and what they become.
    pub(crate) merges: HashMap<(u32, u32), (u32, u32)>,
    /// Found in the text before it is split: first those that apply to raw text, then the others. Longest first.
    pub(crate) added: [Vec<(String, u32)>; 2],
    /// What each id stands for.
    pub(crate) token_bytes: Vec<Vec<u8>>,
    /// Ids that mark something and are no text, ascending.
    pub(crate) special: Vec<u32>,
    pub(crate) prefix_space: bool,
    pub(crate) split: bool,
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
        self.added.iter().flatten().find(|(c, _)| c == content).map(|&(_, id)| id)
    }

    /// Whether an id marks something and is no text.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Whether ids are the same where a text is cut before a space between two letters or digits of ASCII.
    pub fn can_split(&self) -> bool {
        self.split && !self.added.iter().flatten().any(|(content, _)| content.contains(' '))
    }

    /// What an id stands for; nothing if it has no meaning.
    pub(crate) fn token_bytes(&self, id: u32) -> &[u8] {
        self.token_bytes.get(id as usize).map_or(&[], |token_bytes| token_bytes)
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut HashMap::new(), &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text; `seen` remembers words from one text to the next.
    pub(crate) fn encode_into(
        &self,
        text: &str,
        cache: &mut HashMap<String, Vec<u32>>,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let [raw, normalized] = &self.added;
        let segments = segments(text, raw).into_iter().flat_map(|segment| match segment {
            TextSegment::Text(text) => segments(text, normalized),
            added => vec![added],
        });
        for segment in segments {
            match segment {
                TextSegment::Added(id) => ids.push(id),
                TextSegment::Text(text) if self.prefix_space && !text.starts_with(' ') => {
                    self.plain(&format!(" {text}"), cache, ids)?;
                }
                TextSegment::Text(text) => self.plain(text, cache, ids)?,
            }
        }
        Ok(())
    }

    /// Text without added tokens.
    fn plain(
        &self,
        text: &str,
        cache: &mut HashMap<String, Vec<u32>>,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if !self.split {
            ids.append(&mut self.merge(text)?);
            return Ok(());
        }
        for word in PreTokens(text) {
            if let Some(known) = cache.get(word) {
                ids.extend_from_slice(known);
                continue;
            }
            let merged = self.merge(word)?;
            ids.extend_from_slice(&merged);
            if word.len() <= REMEMBERED.0 && cache.len() < REMEMBERED.1 {
                cache.insert(word.to_owned(), merged);
            }
        }
        Ok(())
    }

    /// Merges the bytes of a word, lowest rank first and leftmost among equals. A heap holds the pairs that
    /// can merge, so that a word of a million bytes takes n log n steps.
    fn merge(&self, word: &str) -> Result<Vec<u32>, Error> {
        const NONE: usize = usize::MAX;
        let id = |byte: u8| {
            let missing =
                || Error::NoToken { path: self.path.clone(), got: format!("byte {byte:#04x} of {word}") };
            self.bytes[usize::from(byte)].ok_or_else(missing)
        };
        let mut ids: Vec<Option<u32>> = word.bytes().map(|b| id(b).map(Some)).collect::<Result<_, _>>()?;
        let count = ids.len();
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
        Ok(ids.into_iter().flatten().collect())
    }
}

enum TextSegment<'a> {
    Text(&'a str),
    Added(u32),
}

/// Cuts a text at added tokens: leftmost first, longest among those.
fn segments<'a>(text: &'a str, added: &[(String, u32)]) -> Vec<TextSegment<'a>> {
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
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    /// The merges of a tokenizer that Hugging Face's trainer learnt from a novel.
    const MERGES: &str = "Ġ t|h e|Ġ a|i n|Ġ s|Ġt he|Ġ w|Ġ o|r e|h a|n d|Ġ b|e r|in g|Ġ m|h i|e d|Ġ f|o u|Ġ c|i t|l e|\
        Ġa nd|Ġo f|a r|s t|l l|o n|e n|Ġt o|o r|Ġ in|Ġ d|Ġ p|a n|Ġ l|Ġ n|a t|Ġ hi|e s|o w|ha t|Ġ he|o m|Ġ ha|u t|a s|Ġ I|\
        Ġ g|Ġb e|l y|Ġt h|Ġt hat|i s|Ġ e|l d|Ġo n|g h|o t|Ġhi s|Ġ it|s e|Ġ u|e e|â Ģ|âĢ Ķ|Ġs t|c k|i d|' s|v e|v er";

    /// Odd texts, and their ids by Hugging Face's tokenizers 0.23.3.
    const ODD: [(&str, &[u32]); 6] = [
        (
            "The whale's in there, and they're the others'",
            &[
                52, 258, 263, 266, 278, 326, 288, 262, 265, 12, 279, 262, 89, 7, 265, 262, 264, 84, 258, 82,
                83, 7,
            ],
        ),
        (
            "  two  spaces\n\n\tand tabs \n",
            &[221, 257, 87, 79, 221, 261, 80, 65, 67, 296, 199, 199, 198, 65, 267, 257, 65, 66, 83, 221, 199],
        ),
        (
            "<|endoftext|>the<|endoftext|><|endoftext",
            &[0, 84, 258, 0, 28, 92, 69, 267, 79, 70, 84, 69, 88, 84],
        ),
        (
            "na\u{ef}ve caf\u{e9} \u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940} \u{4e2d}\u{6587} \u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{bd}\u{2167}",
            &[
                78, 65, 128, 108, 327, 276, 65, 70, 128, 103, 221, 157, 98, 118, 157, 98, 124, 157, 98, 102,
                157, 99, 236, 157, 98, 100, 157, 99, 223, 221, 161, 117, 256, 163, 245, 230, 221, 173, 254,
                240, 103, 321, 236, 173, 254, 240, 103, 321, 236, 173, 254, 240, 101, 221, 127, 122, 159,
                228, 101,
            ],
        ),
        (
            "thethethethereallyeeeeeee=====",
            &[84, 258, 84, 258, 84, 258, 84, 258, 265, 65, 283, 89, 320, 320, 320, 69, 29, 29, 29, 29, 29],
        ),
        (
            "\x00\x7f\u{a0}\u{2028}'S 'tis I'LL we'll",
            &[189, 222, 127, 255, 321, 102, 7, 51, 221, 7, 84, 310, 304, 7, 44, 44, 263, 69, 7, 283],
        ),
    ];

    /// The trainer's file: first the special token, then the bytes in the order of their characters, then the
    /// merges.
    fn trained(prefix_space: bool) -> Bpe {
        let mut bytes = crate::tokenizer_json::alphabet().map(String::from).to_vec();
        bytes.sort_unstable();
        let merges: Vec<_> = MERGES.split('|').collect();
        let merged = merges.iter().map(|merge| merge.replace(' ', ""));
        let vocab: HashMap<String, u32> = bytes.into_iter().chain(merged).zip(1..).collect();
        let file = json!({
            "added_tokens": [{"id": 0, "content": "<|endoftext|>", "normalized": false}],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": prefix_space, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "vocab": vocab, "merges": merges},
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, file.to_string()).unwrap();
        Bpe::open(&path).unwrap()
    }

    #[test]
    fn ids_are_hugging_faces() {
        let bpe = trained(false);
        assert_eq!((bpe.vocab(), bpe.added("<|endoftext|>"), bpe.added("the")), (329, Some(0), None));
        for (text, ids) in ODD {
            assert_eq!(bpe.encode(text).unwrap(), ids, "{text}");
            let back: Vec<u8> = ids.iter().flat_map(|&id| bpe.token_bytes(id)).copied().collect();
            assert_eq!(back, text.as_bytes());
        }
        let ids = [0, 262, 0, 221, 28, 92, 69, 267, 79, 70, 84, 69, 88, 84];
        assert_eq!(trained(true).encode(ODD[2].0).unwrap(), ids);
    }

    /// A word without end takes n log n steps: at n squared this test would not come back.
    #[test]
    fn long_words_are_merged_in_time() {
        let ids = trained(false).encode(&"e".repeat(1_000_001)).unwrap();
        assert_eq!((ids.len(), ids[0], ids[500_000]), (500_001, 320, 69));
    }

    #[test]
    fn a_byte_without_a_token_is_refused() {
        let mut bpe = trained(false);
        bpe.bytes[usize::from(b'q')] = None;
        let message = bpe.encode("a queue").unwrap_err().to_string();
        assert!(message.ends_with("has no token for \"byte 0x71 of  queue\""), "{message}");
    }
}
