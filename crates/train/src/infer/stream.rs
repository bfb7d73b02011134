//! From tokens to text as they come: whole characters only, and nothing behind a stop sequence.
//!
//! A token of a byte-level tokenizer may end within a character, and a stop sequence may begin in one token
//! and end in another. So what could still become part of either is held back until it is known.

use espalier_data::Tokenizer;

/// Text in the course of being written.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Stop sequences, which are no part of the text.
    stops: &'a [String],
    /// Bytes that are not yet whole characters.
    bytes: Vec<u8>,
    /// All characters that are known.
    text: String,
    /// How much of the text was given out.
    given: usize,
    ended: bool,
}

impl<'a> TextStream<'a> {
    /// At the beginning of a text that ends before the first of these stop sequences.
    pub fn new(tokenizer: &'a Tokenizer, stops: &'a [String]) -> TextStream<'a> {
        TextStream { tokenizer, stops, bytes: Vec::new(), text: String::new(), given: 0, ended: false }
    }

    /// What a token lets be read that could not be before.
    pub fn push(&mut self, token: u32) -> &str {
        if !self.ended {
            self.bytes.extend(self.tokenizer.decode(&[token]));
            self.take_characters();
            self.find_stop();
        }
        let held_back = if self.ended { 0 } else { self.begun_stop() };
        self.give(self.text.len() - held_back)
    }

    /// Whether a stop sequence has ended it.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// What was held back, where nothing follows any more.
    pub fn finish(&mut self) -> &str {
        if !self.ended {
            self.text.push_str(&String::from_utf8_lossy(&std::mem::take(&mut self.bytes)));
            self.ended = true;
        }
        self.give(self.text.len())
    }

    /// All of it so far, what is held back included.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn give(&mut self, end: usize) -> &str {
        let start = self.given;
        self.given = end.max(start);
        &self.text[start..self.given]
    }

    /// Moves whole characters from the bytes to the text; bytes that are no part of any become the
    /// replacement character.
    fn take_characters(&mut self) {
        loop {
            match std::str::from_utf8(&self.bytes) {
                Ok(all) => {
                    self.text.push_str(all);
                    self.bytes.clear();
                    return;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    self.text.push_str(&String::from_utf8_lossy(&self.bytes[..valid]));
                    // Without a length, the rest may be the beginning of a character.
                    let Some(wrong) = error.error_len() else {
                        self.bytes.drain(..valid);
                        return;
                    };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    self.bytes.drain(..valid + wrong);
                }
            }
        }
    }

    /// Truncates the text before the first stop sequence.
    fn find_stop(&mut self) {
        let found = self.stops.iter().filter_map(|stop| self.text[self.given..].find(stop.as_str())).min();
        if let Some(at) = found {
            self.text.truncate(self.given + at);
            self.ended = true;
        }
    }

    /// Bytes at the end of the text with which a stop sequence may have begun.
    fn begun_stop(&self) -> usize {
        let rest = &self.text[self.given..];
        let begun = |stop: &String| {
            let lengths = (1..stop.len()).rev().filter(|length| stop.is_char_boundary(*length));
            lengths.into_iter().find(|length| rest.ends_with(&stop[..*length])).unwrap_or(0)
        };
        self.stops.iter().map(begun).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each byte of a text lets be read, and what the end does.
    fn streamed(bytes: &[u8], stops: &[&str]) -> (Vec<String>, String, String) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut stream = TextStream::new(&Tokenizer::Bytes, &stops);
        let outputs = bytes.iter().map(|byte| stream.push(u32::from(*byte)).to_owned()).collect();
        (outputs, stream.finish().to_owned(), stream.text().to_owned())
    }

    #[test]
    fn characters_are_given_out_whole() {
        let (outputs, rest, text) = streamed("aé€😀".as_bytes(), &[]);
        assert_eq!(outputs, ["a", "", "é", "", "", "€", "", "", "", "😀"]);
        assert_eq!((&*rest, &*text), ("", "aé€😀"));
    }

    #[test]
    fn bytes_that_are_no_character_are_replaced() {
        assert_eq!(streamed(b"a\xffb", &[]).2, "a\u{fffd}b");
        // The beginning of a character that never ends, in the middle and at the end.
        assert_eq!(streamed(b"\xe2\x82x", &[]).0, ["", "", "\u{fffd}x"]);
        let (_, rest, text) = streamed(b"a\xe2\x82", &[]);
        assert_eq!((&*rest, &*text), ("\u{fffd}", "a\u{fffd}"));
    }

    #[test]
    fn a_stop_sequence_is_not_shown_not_even_its_beginning() {
        let (outputs, rest, text) = streamed(b"one END two", &["END"]);
        assert_eq!(outputs.concat() + &rest, "one ");
        assert_eq!(text, "one ");
        // What only seemed to be one is given out when that is known.
        let (outputs, rest, _) = streamed(b"ENE\nEN", &["END"]);
        assert_eq!(outputs, ["", "", "EN", "E\n", "", ""]);
        assert_eq!(rest, "EN");
        // The first of several, also where another begins before it.
        assert_eq!(streamed(b"abcabd", &["abd", "ca"]).2, "ab");
    }

    #[test]
    fn nothing_comes_behind_the_end() {
        let stops = ["\n".to_owned()];
        let mut stream = TextStream::new(&Tokenizer::Bytes, &stops);
        assert_eq!(stream.push(u32::from(b'x')), "x");
        assert!(!stream.is_ended());
        assert_eq!(stream.push(u32::from(b'\n')), "");
        assert!(stream.is_ended());
        assert_eq!(stream.push(u32::from(b'y')), "");
        assert_eq!((stream.finish().to_owned(), stream.text()), (String::new(), "x"));
    }
}
