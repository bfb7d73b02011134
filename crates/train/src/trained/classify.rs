//! What a trained model sees in pictures: what `espalier classify` says.

use std::path::PathBuf;

use espalier_data::{Dataset, ImageFolder};
use espalier_plan::Error as PlanError;
use espalier_plan::config::{Override, Purpose};
use espalier_plan::{DataFacts, Plan};
use espalier_tensor::Device;
use serde::Serialize;

use super::TrainedModel;
use crate::Result;
use crate::hub::ImageInput;
use crate::parallel::Ranks;

/// A picture, and what it may show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassifiedPicture {
    pub path: PathBuf,
    /// The likeliest first.
    pub classes: Vec<ClassProbability>,
}

/// A class, and how likely it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassProbability {
    /// The class's number, from 0.
    pub label: usize,
    /// Its name; its number where it has none.
    pub name: String,
    pub probability: f64,
}

impl TrainedModel {
    /// Pictures as the model reads them, and the plan by which one rank does.
    pub fn pictures(&self, paths: &[PathBuf], overrides: &[Override]) -> Result<(Plan, Dataset)> {
        self.run().check_overrides(overrides, Purpose::OtherData)?;
        let run = self.run().in_use(overrides)?;
        let (data, facts) = (run.data.clone(), self.facts());
        if facts.image.is_none() {
            let problem = format!("is \"{}\", a text model, which sees no pictures", run.model.name);
            return Err(PlanError::Conflict { field: "model.name".into(), problem }.into());
        }
        let (ImageInput { standard, .. }, frame) = self.image_input(&data)?;
        let pictures = ImageFolder::of_pictures(paths, frame).with_pixels(standard, &data.pixels)?;
        let [height, width, channels] = frame.shape;
        let plan = Plan::new(run, DataFacts { image: Some((height, width, channels)), ..facts })?;
        match plan.mesh.size() {
            1 => Ok((plan, Dataset::Folder(pictures))),
            ranks => {
                let problem = format!("lays the model out over {ranks} ranks, and one classifies");
                Err(PlanError::Conflict { field: "parallel".into(), problem }.into())
            }
        }
    }

    /// The `top` likeliest classes of each of the [pictures](TrainedModel::pictures).
    pub fn classify(
        &self,
        paths: &[PathBuf],
        plan: Plan,
        pictures: Dataset,
        device: &Device,
        top: usize,
    ) -> Result<Vec<ClassifiedPicture>> {
        let names = self.image_input(&plan.data)?.0.classes;
        let name = |label: usize| {
            let known = names.as_ref().and_then(|names| names.get(label));
            known.cloned().unwrap_or_else(|| label.to_string())
        };
        device.enter(|| {
            let rank = self.trainer(plan, pictures, device, Ranks::single())?;
            let classified = |(number, path): (usize, &PathBuf)| {
                let likeliest = softmax(&rank.logits(number)?).into_iter().take(top);
                let class = |(label, probability)| ClassProbability { label, name: name(label), probability };
                Ok(ClassifiedPicture { path: path.clone(), classes: likeliest.map(class).collect() })
            };
            paths.iter().enumerate().map(classified).collect()
        })
    }
}

/// All labels with their probabilities, the likeliest first; of equal ones the first.
fn softmax(logits: &[f32]) -> Vec<(usize, f64)> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials = logits.iter().map(|logit| f64::from(logit - most).exp());
    let sum: f64 = exponentials.clone().sum();
    let mut all: Vec<(usize, f64)> = exponentials.map(|x| x / sum).enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_sorted_and_add_up() {
        let all = softmax(&[1.0, 1001.0, 1000.0, 1001.0]);
        assert_eq!(all.iter().map(|one| one.0).collect::<Vec<_>>(), [1, 3, 2, 0]);
        let odds = 1.0 / (2.0 + (-1f64).exp());
        assert!((all[0].1 - odds).abs() < 1e-12 && (all[0].1 - all[1].1).abs() < 1e-12);
        assert!((all.iter().map(|one| one.1).sum::<f64>() - 1.0).abs() < 1e-12);
    }
}
