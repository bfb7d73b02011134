//! A field of a file that people write, as data: its name, what it takes, what it is where it is left out,
//! and what it is for. A section of a run file is a list of these (`config/fields`), and so is a kind of
//! layer; one reader reads them all ([`Section::read`](crate::config::reader::Section::read)).

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

/// The largest size of a dimension; larger ones are slips of the finger, and products of these stay in range.
pub const LARGEST: usize = 1 << 24;

/// The largest count of samples, steps and the like.
pub const MOST: usize = 1 << 48;

/// Which numbers fit, in words and as a rule.
pub type NumberRule = (&'static str, fn(f64) -> bool);

/// Any number above 0.
pub const POSITIVE: NumberRule = ("a number above 0", |x| x > 0.0);
/// Any number that is not negative.
pub const NOT_NEGATIVE: NumberRule = ("a number of at least 0", |x| x >= 0.0);
/// A fraction of something that is neither nothing nor all of it.
pub(crate) const INSIDE: NumberRule = ("a number in (0, 1)", |x| x > 0.0 && x < 1.0);
/// A fraction of something that may be nothing.
pub(crate) const BELOW_ONE: NumberRule = ("a number in [0, 1)", |x| (0.0..1.0).contains(&x));

#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its key.
    pub name: &'static str,
    pub(crate) takes: FieldType,
    pub(crate) otherwise: FieldDefault,
    /// Whether it is there, by the word that decides which fields its section has.
    pub(crate) with: fn(&str) -> bool,
    /// Whether the weights after a step do not depend on it, in exact arithmetic.
    pub(crate) is_free: bool,
    pub(crate) used: FieldUse,
    /// Whether it names files.
    pub(crate) is_path: bool,
    /// Whether it is meant where somebody gives its section itself a value.
    pub(crate) is_usual: bool,
}

/// What a field may be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FieldType {
    /// A whole number between two bounds, both allowed.
    Integer(usize, usize),
    /// The same, or one of some words.
    IntegerOr(usize, usize, &'static [&'static str]),
    Number(NumberRule),
    /// One or several of these.
    Numbers(NumberRule),
    Flag,
    /// One of some words.
    Word(&'static [&'static str]),
    /// A text that is not empty; in words what it is.
    Text(&'static str),
    /// One or several of these.
    Texts(&'static str),
    /// A list of layers.
    Layers,
    /// A list of at least so many lists of layers.
    Lists(usize),
    /// Whatever the section's own code makes of it.
    Any,
}

/// What a field is where it is left out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FieldDefault {
    Nothing,
    Integer(usize),
    Number(f64),
    Flag(bool),
    Word(&'static str),
    /// What another field is, which stands before it.
    Like(&'static str),
    Empty,
    /// It must be written; what is missing, in words.
    Missing(&'static str),
}

impl FieldDefault {
    /// As it would be written; none where nothing would.
    pub(crate) fn value(self) -> Option<Value> {
        Some(match self {
            FieldDefault::Nothing | FieldDefault::Like(_) | FieldDefault::Missing(_) => return None,
            FieldDefault::Integer(number) => Value::Integer(number as i64),
            FieldDefault::Number(number) => Value::Float(number),
            FieldDefault::Flag(flag) => Value::Boolean(flag),
            FieldDefault::Word(word) => Value::String(word.into()),
            FieldDefault::Empty => Value::Array(Vec::new()),
        })
    }

    /// What another field is, where it is that; `before` are those that stand before it.
    pub(crate) fn like(self, before: &Table) -> Option<&Value> {
        match self {
            FieldDefault::Like(other) => before.get(other),
            _ => None,
        }
    }
}

/// Where a trained model is in use: who reads a field then. Each reads what those before it read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FieldUse {
    /// Nobody: it is for training.
    Never,
    /// Whoever judges it by what its run held out.
    HeldOut,
    /// Whoever judges it by any data.
    Evaluation,
    /// Everybody: it says how the model computes.
    Always,
}

/// A whole number between two bounds, both allowed.
pub const fn integer(name: &'static str, otherwise: usize, least: usize, most: usize) -> Field {
    Field::new(name, FieldType::Integer(least, most), FieldDefault::Integer(otherwise))
}

/// The same, or one of some words.
pub(crate) const fn integer_or(
    name: &'static str,
    otherwise: FieldDefault,
    [least, most]: [usize; 2],
    words: &'static [&'static str],
) -> Field {
    Field::new(name, FieldType::IntegerOr(least, most, words), otherwise)
}

/// A whole number without a default.
pub const fn optional_integer(name: &'static str, least: usize, most: usize) -> Field {
    Field::new(name, FieldType::Integer(least, most), FieldDefault::Nothing)
}

/// A size of at least 1 that must be written.
pub const fn size(name: &'static str) -> Field {
    optional_integer(name, 1, LARGEST).or_missing("a whole number of at least 1")
}

/// A size of at least 1; left out, another field that stands before it.
pub(crate) const fn size_like(name: &'static str, other: &'static str) -> Field {
    Field::new(name, FieldType::Integer(1, LARGEST), FieldDefault::Like(other))
}

/// A finite number that fits.
pub const fn number(name: &'static str, otherwise: f64, fits: NumberRule) -> Field {
    Field::new(name, FieldType::Number(fits), FieldDefault::Number(otherwise))
}

/// The same without a default.
pub const fn optional_number(name: &'static str, fits: NumberRule) -> Field {
    Field::new(name, FieldType::Number(fits), FieldDefault::Nothing)
}

/// Some such numbers, of which one alone is a list of one; without a default.
pub const fn numbers(name: &'static str, fits: NumberRule) -> Field {
    Field::new(name, FieldType::Numbers(fits), FieldDefault::Nothing)
}

/// true or false.
pub const fn flag(name: &'static str, otherwise: bool) -> Field {
    Field::new(name, FieldType::Flag, FieldDefault::Flag(otherwise))
}

/// One of some words; without a default where none of them is it.
pub const fn word(name: &'static str, otherwise: &'static str, words: &'static [&'static str]) -> Field {
    let otherwise = if otherwise.is_empty() { FieldDefault::Nothing } else { FieldDefault::Word(otherwise) };
    Field::new(name, FieldType::Word(words), otherwise)
}

/// A text that is not empty, without a default; `expected` says what it is.
pub const fn text(name: &'static str, expected: &'static str) -> Field {
    Field::new(name, FieldType::Text(expected), FieldDefault::Nothing)
}

/// A list of texts, of which one alone is a list of one; an empty one where it is left out.
pub const fn texts(name: &'static str, expected: &'static str) -> Field {
    Field::new(name, FieldType::Texts(expected), FieldDefault::Empty)
}

/// A list of layers, which may be left out; [`Field::or_missing`] asks for one at least.
pub const fn layers(name: &'static str) -> Field {
    Field::new(name, FieldType::Layers, FieldDefault::Nothing)
}

/// A list of at least two lists of layers.
pub(crate) const fn two_lists(name: &'static str) -> Field {
    Field::new(name, FieldType::Lists(2), FieldDefault::Missing("a list of at least 2 lists of layers"))
}

/// What the section's own code reads.
pub const fn any(name: &'static str) -> Field {
    Field::new(name, FieldType::Any, FieldDefault::Nothing)
}

impl Field {
    const fn new(name: &'static str, takes: FieldType, otherwise: FieldDefault) -> Field {
        let (is_free, used, is_path, is_usual) = (false, FieldUse::Never, false, false);
        Field { name, takes, otherwise, with: |_| true, is_free, used, is_path, is_usual }
    }

    /// It must be written.
    pub const fn required(mut self) -> Field {
        self.otherwise = match self.takes {
            FieldType::Text(expected) | FieldType::Texts(expected) => FieldDefault::Missing(expected),
            _ => panic!("a text says what is missing"),
        };
        self
    }

    /// It must be written; `expected` says what is missing.
    pub const fn or_missing(mut self, expected: &'static str) -> Field {
        self.otherwise = FieldDefault::Missing(expected);
        self
    }

    /// It is there with some words of the field that decides about its section.
    pub const fn with(mut self, with: fn(&str) -> bool) -> Field {
        self.with = with;
        self
    }

    /// The weights after a step do not depend on it.
    pub(crate) const fn free(mut self) -> Field {
        self.is_free = true;
        self
    }

    /// A trained model computes by it.
    pub(crate) const fn always(mut self) -> Field {
        self.used = FieldUse::Always;
        self
    }

    /// A trained model is evaluated on it.
    pub(crate) const fn for_evaluation(mut self) -> Field {
        self.used = FieldUse::Evaluation;
        self
    }

    /// A trained model is evaluated on it where that is the data its run held out.
    pub(crate) const fn held_out(mut self) -> Field {
        self.used = FieldUse::HeldOut;
        self
    }

    /// It names files.
    pub(crate) const fn path(mut self) -> Field {
        self.is_path = true;
        self
    }

    /// It is what a value of the section itself most likely means.
    pub(crate) const fn usual(mut self) -> Field {
        self.is_usual = true;
        self
    }
}

/// The fields of a section that were read, each with a value, or without one where it may be left out.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldValues(pub(crate) Table);

impl FieldValues {
    /// The value of a field.
    ///
    /// # Panics
    /// Where it is of another type than the field takes.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> T {
        self.find(key).unwrap_or_else(|| panic!("`{key}` has a value"))
    }

    /// The value of a field that may be left out.
    ///
    /// # Panics
    /// Where it is of another type than the field takes.
    pub fn find<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let value = self.0.get(key)?.clone();
        Some(value.try_into().unwrap_or_else(|why| panic!("`{key}` is not what its field takes: {why}")))
    }

    /// All of them.
    ///
    /// # Panics
    /// Where one is of another type than its field takes.
    pub fn all<T: DeserializeOwned>(self) -> T {
        self.0.try_into().unwrap_or_else(|why| panic!("a section is not what its fields take: {why}"))
    }

    /// Gives a field a value, whether it has one or not.
    pub fn set(&mut self, key: &str, value: impl Serialize) {
        self.0.insert(key.into(), Value::try_from(value).expect("plain data"));
    }

    /// Gives a field that was left out a value.
    pub(crate) fn set_left_out(&mut self, key: &str, value: impl Serialize) {
        if !self.0.contains_key(key) {
            self.set(key, value);
        }
    }

    /// Takes a field out.
    pub fn remove(&mut self, key: &str) {
        self.0.remove(key);
    }
}
