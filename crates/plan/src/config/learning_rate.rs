//! `[learning_rate]`: how large a step is. The schedule decides which other fields there are.

use super::Error;
use super::fields;
use super::reader::{Choice, LARGEST, MOST, Section};
use crate::learning_rate::{LearningRate, Schedule};

/// `learning_rate.schedule` alone.
#[derive(Clone, Copy)]
enum Name {
    Constant,
    Linear,
    Cosine,
    Step,
}

impl Choice for Name {
    const ALL: &'static [(&'static str, Self)] = &[
        ("constant", Name::Constant),
        ("linear", Name::Linear),
        ("cosine", Name::Cosine),
        ("step", Name::Step),
    ];
}

impl LearningRate {
    pub(super) fn read(section: &mut Section, usual: f64) -> Result<LearningRate, Error> {
        let peak = section.number("peak", usual, "a number above 0", |x| x > 0.0)?;
        let warmup = section.whole("warmup", 0, 0, MOST)?;
        let from = section.number("warmup_from", 0.0, "a number of at least 0", |x| x >= 0.0)?;
        let warmup_from = section.has("warmup_from").then_some(from);
        if warmup_from.is_some() && warmup == 0 {
            let why = "with `learning_rate.warmup` = 0".into();
            return Err(Error::NoEffect { field: section.field("warmup_from"), why });
        }
        let scale_from_batch = section.optional_whole("scale_from_batch", 1, LARGEST)?;
        let name = section.choice("schedule", Name::Cosine)?;
        let schedule = match name {
            Name::Constant => Schedule::Constant,
            Name::Linear | Name::Cosine => {
                let expected = "a number from 0 to 1";
                let end_factor = section.number("end_factor", 0.1, expected, |x| (0.0..=1.0).contains(&x))?;
                let decay_steps = section.whole("decay_steps", 0, 0, MOST)?;
                match name {
                    Name::Linear => Schedule::Linear { end_factor, decay_steps },
                    _ => Schedule::Cosine { end_factor, decay_steps },
                }
            }
            Name::Step => Schedule::Step {
                step_every: section.whole("step_every", 0, 0, MOST)?,
                step_factor: section
                    .number("step_factor", 0.1, "a number above 0 and below 1", |x| x > 0.0 && x < 1.0)?,
            },
        };
        section.finish_variant("schedule", schedule.name(), fields::LEARNING_RATE)?;
        Ok(LearningRate { peak, warmup, warmup_from, scale_from_batch, schedule })
    }
}
