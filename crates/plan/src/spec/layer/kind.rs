//! How a run file writes a layer: its word, and its fields with their defaults, as data.
//!
//! A person writes what a layer makes; what it takes, its name and how it starts follow from where it stands
//! ([`LayerContext`]).

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::super::shape::{Shape, ShapeError};
use super::super::{Init, Input};
use super::{KINDS, LayerSpec};
use crate::field::{Field, FieldDefault, LARGEST, integer_or};
use crate::tiles::WindowPadding;

/// How far windows reach past an image: a number for all sides, or TensorFlow's "same".
pub(super) const PADDING: Field = integer_or("padding", FieldDefault::Integer(0), [0, LARGEST], &["same"]);

/// A kind of layer that a run file can name.
#[derive(Debug)]
pub struct LayerKind {
    /// The value of its `type` in a run file.
    pub word: &'static str,
    /// In the order in which they are written back.
    pub fields: &'static [Field],
    /// Whether it opens a block of the model, which lasts up to the next such layer.
    pub opens: bool,
    /// What it means for how the weights before it start.
    pub then: Downstream,
    /// The layer, from what is written and where it stands.
    pub complete: fn(&WrittenLayer, &LayerContext<'_>) -> Result<LayerSpec, ShapeError>,
}

impl LayerKind {
    /// The kind that a run file means by a word.
    pub fn find(word: &str) -> Option<&'static LayerKind> {
        KINDS.iter().copied().find(|kind| kind.word == word)
    }
}

/// What is known of how activations go on behind a weight: one that a non-linearity halves starts with twice
/// the variance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Downstream {
    Active,
    /// Another weight, or what mixes positions.
    Linear,
    /// A norm, a pool, a reshaping: what comes behind it counts.
    Passes,
    /// What its first list of layers begins with counts.
    Inside,
}

/// The value of a field.
#[derive(Debug, Clone, PartialEq)]
pub enum FieldValue {
    /// Left out, and something follows from that.
    None,
    /// A whole number.
    Integer(usize),
    /// true or false.
    Flag(bool),
    Number(f64),
    Word(&'static str),
    /// A list of layers.
    Layers(Vec<WrittenLayer>),
    /// A list of lists of layers.
    Lists(Vec<Vec<WrittenLayer>>),
}

impl FieldValue {
    /// What a field of a kind is that is left out; none where it must be written. `before` are the values of
    /// the fields before it.
    pub fn left_out(field: &Field, kind: &LayerKind, before: &[FieldValue]) -> Option<FieldValue> {
        Some(match field.otherwise {
            FieldDefault::Missing(_) => return None,
            FieldDefault::Nothing => FieldValue::None,
            FieldDefault::Like(other) => {
                let at = kind.fields.iter().position(|field| field.name == other);
                before[at.expect("a field of the same kind")].clone()
            }
            FieldDefault::Integer(number) => FieldValue::Integer(number),
            FieldDefault::Number(number) => FieldValue::Number(number),
            FieldDefault::Flag(flag) => FieldValue::Flag(flag),
            FieldDefault::Word(word) => FieldValue::Word(word),
            FieldDefault::Empty => FieldValue::Layers(Vec::new()),
        })
    }
}

/// A layer as it is written: without name and input size. Every field has a value.
#[derive(Debug, Clone)]
pub struct WrittenLayer {
    /// The kind that its `type` names.
    pub kind: &'static LayerKind,
    /// One for each field of the kind, in that order.
    pub values: Vec<FieldValue>,
}

impl PartialEq for WrittenLayer {
    fn eq(&self, other: &WrittenLayer) -> bool {
        self.kind.word == other.kind.word && self.values == other.values
    }
}

impl WrittenLayer {
    /// A layer by its word and some fields; the others have their defaults.
    ///
    /// # Panics
    /// Where there is no such kind, or a field without a default is left out.
    pub fn new(word: &str, given: &[(&str, FieldValue)]) -> WrittenLayer {
        let kind = LayerKind::find(word).unwrap_or_else(|| panic!("no layer is called {word}"));
        let mut values: Vec<FieldValue> = Vec::with_capacity(kind.fields.len());
        for field in kind.fields {
            let given = given.iter().find(|(name, _)| *name == field.name).map(|(_, value)| value.clone());
            let value = given.or_else(|| FieldValue::left_out(field, kind, &values));
            values.push(value.unwrap_or_else(|| panic!("a {word} needs `{}`", field.name)));
        }
        WrittenLayer { kind, values }
    }

    fn value(&self, name: &str) -> &FieldValue {
        let at = self.kind.fields.iter().position(|field| field.name == name);
        &self.values[at.unwrap_or_else(|| panic!("a {} has no field {name}", self.kind.word))]
    }

    /// The whole number of a field that has one, written or by default.
    pub fn integer(&self, name: &str) -> usize {
        self.size(name).unwrap_or_else(|| panic!("`{name}` has a value"))
    }

    /// A size, if it was written.
    pub fn size(&self, name: &str) -> Option<usize> {
        match self.value(name) {
            FieldValue::Integer(n) => Some(*n),
            FieldValue::None => None,
            other => panic!("`{name}` is a whole number, not {other:?}"),
        }
    }

    /// The padding of windows over an image, as `padding`, `kernel` and `stride` say; `"same"` depends on
    /// the image.
    pub(crate) fn padding(&self, image: Shape) -> WindowPadding {
        match (self.value("padding"), image) {
            (FieldValue::Word(_), Shape::Image { height, width, .. }) => {
                WindowPadding::same([height, width], self.integer("kernel"), self.integer("stride"))
            }
            // What is no image is refused where the layer's shape is asked for.
            (FieldValue::Word(_), _) => 0.into(),
            _ => self.integer("padding").into(),
        }
    }

    /// The flag of a field that has one, written or by default.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.value(name), FieldValue::Flag(true))
    }

    /// The number of a field that has one, written or by default.
    pub fn number(&self, name: &str) -> f64 {
        match self.value(name) {
            FieldValue::Number(x) => *x,
            other => panic!("`{name}` is a number, not {other:?}"),
        }
    }

    /// A number, if it was written.
    pub fn optional_number(&self, name: &str) -> Option<f64> {
        match self.value(name) {
            FieldValue::None => None,
            _ => Some(self.number(name)),
        }
    }

    /// The word of a field that takes one of several.
    pub fn word(&self, name: &str) -> &'static str {
        match self.value(name) {
            FieldValue::Word(word) => word,
            other => panic!("`{name}` is a word, not {other:?}"),
        }
    }

    /// A list of layers.
    pub fn layers(&self, name: &str) -> &[WrittenLayer] {
        match self.value(name) {
            FieldValue::Layers(layers) => layers,
            other => panic!("`{name}` is a list of layers, not {other:?}"),
        }
    }

    /// A list of lists of layers.
    pub fn lists(&self, name: &str) -> &[Vec<WrittenLayer>] {
        match self.value(name) {
            FieldValue::Lists(lists) => lists,
            other => panic!("`{name}` is a list of lists of layers, not {other:?}"),
        }
    }
}

impl Serialize for WrittenLayer {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("type", self.kind.word)?;
        for (field, value) in self.kind.fields.iter().zip(&self.values) {
            match value {
                FieldValue::None => {}
                FieldValue::Integer(n) => map.serialize_entry(field.name, n)?,
                FieldValue::Flag(flag) => map.serialize_entry(field.name, flag)?,
                FieldValue::Number(x) => map.serialize_entry(field.name, x)?,
                FieldValue::Word(word) => map.serialize_entry(field.name, word)?,
                FieldValue::Layers(layers) => map.serialize_entry(field.name, layers)?,
                FieldValue::Lists(lists) => map.serialize_entry(field.name, lists)?,
            }
        }
        map.end()
    }
}

/// Where a written layer stands.
#[derive(Debug)]
pub struct LayerContext<'a> {
    /// The prefix of its parameters: its position.
    pub name: String,
    /// The shape of a sample before it.
    pub shape: Shape,
    /// What the model takes.
    pub input: Input,
    /// What it tells apart.
    pub classes: usize,
    /// Whether a non-linearity comes next.
    pub then_active: bool,
    /// How messages call it: `layer 3`.
    pub path: &'a str,
}

impl LayerContext<'_> {
    /// A truncated normal over the fan-in, of variance 2/fan-in where a non-linearity comes next and 1/fan-in
    /// elsewhere.
    pub(crate) fn fan_in(&self, fan: usize) -> Init {
        let gain = if self.then_active { 2.0 } else { 1.0 };
        Init::fan_in(gain, fan)
    }

    /// The layers of one branch of a layer called `word`, whose parameters' names begin with `branch` and
    /// which messages call `label`.
    pub fn branch(
        &self,
        word: &str,
        layers: &[WrittenLayer],
        branch: &str,
        label: &str,
    ) -> Result<Vec<LayerSpec>, ShapeError> {
        let mut shape = self.shape;
        let mut all = Vec::with_capacity(layers.len());
        for (i, written) in layers.iter().enumerate() {
            let path = format!("{} ({word}), {label} {i}", self.path);
            let name = format!("{}.{branch}.{i}", self.name);
            let then_active = active(&layers[i + 1..], self.then_active);
            let LayerContext { input, classes, .. } = *self;
            let at = LayerContext { name, shape, input, classes, then_active, path: &path };
            let layer = (written.kind.complete)(written, &at)?;
            shape = layer.step(shape, &path, &mut |_, _, _| {})?;
            all.push(layer);
        }
        Ok(all)
    }
}

/// Whether the next layer that is not a norm, a pool or a reshaping is a non-linearity. `after` is the answer
/// at the end of the list.
pub fn active(rest: &[WrittenLayer], after: bool) -> bool {
    for (i, layer) in rest.iter().enumerate() {
        match layer.kind.then {
            Downstream::Active => return true,
            Downstream::Linear => return false,
            Downstream::Passes => {}
            Downstream::Inside => {
                let after = active(&rest[i + 1..], after);
                let first = layer.values.iter().find_map(|value| match value {
                    FieldValue::Layers(layers) => Some(layers.as_slice()),
                    FieldValue::Lists(lists) => lists.first().map(Vec::as_slice),
                    _ => None,
                });
                return active(first.unwrap_or_default(), after);
            }
        }
    }
    after
}
