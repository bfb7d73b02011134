//! State dicts of torchvision's networks: they bear no configuration, but their names and shapes are those of
//! one network alone.

use std::collections::BTreeMap;

use espalier_plan::config::{self, Family, FormChoice};
use espalier_plan::spec::ModelSpec;
use espalier_plan::spec::presets::{ImageSize, ResNet, StemForm, Vgg, alexnet, resnet, vgg};

use super::architecture::{Architecture, ForeignFiles, ForeignModel};

/// Sides of images that networks are tried with: the size of a linear layer behind a flatten follows from them.
const SIDES: [(StemForm, usize); 3] =
    [(StemForm::ImageNet, 224), (StemForm::Small, 32), (StemForm::Small, 64)];

/// Networks of torchvision, whose names are ours.
pub(super) struct Torchvision;

impl Architecture for Torchvision {
    fn model_type(&self) -> Option<&'static str> {
        None
    }

    /// The one that has exactly these tensors, and the images it was tried with.
    fn read(&self, files: &ForeignFiles<'_>) -> Result<ForeignModel, String> {
        let shapes = &files.shapes;
        let unknown = || {
            "its tensors match no supported network: a GPT-2 has a config.json, and ResNets, VGGs and AlexNet of \
             torchvision are known by their tensors"
                .to_owned()
        };
        let last = ["fc.weight", "classifier.6.weight", "classifier.weight"];
        let classes = last.into_iter().find_map(|name| shapes.get(name)?.first().copied());
        let first = ["conv1.weight", "features.0.weight"];
        let colours = first.into_iter().find_map(|name| shapes.get(name)?.last().copied());
        let (Some(classes), Some(colours)) = (classes, colours) else { return Err(unknown()) };
        let tried = SIDES.into_iter().flat_map(|(form, side)| {
            let image = (side, side, colours);
            networks(image, classes, form).into_iter().map(move |(model, built)| (model, built, image))
        });
        let mut found = tried.filter(|(_, built, _)| has_all(shapes, built));
        found.next().map(|(model, _, image)| ForeignModel { model, image: Some(image) }).ok_or_else(unknown)
    }

    fn our_name(&self, theirs: &str) -> Option<String> {
        (!theirs.ends_with(".num_batches_tracked")).then(|| theirs.to_owned())
    }
}

/// Every network of a form, as a run file names it and as it is built.
fn networks(image: ImageSize, number: usize, form: StemForm) -> Vec<(config::ModelConfig, ModelSpec)> {
    let named = |name: &str, family| config::ModelConfig { name: name.into(), family };
    let (classes, choice) = (Some(number), FormChoice::from(form));
    let resnets = ResNet::ALL.map(|net| {
        (named(net.name(), Family::ResNet { net, classes, form: choice }), resnet(net, image, number, form))
    });
    let vggs = Vgg::ALL.into_iter().flat_map(|net| {
        [false, true].map(|batch_norm| {
            let family = Family::Vgg { net, classes, form: choice, batch_norm };
            (named(net.name(), family), vgg(net, image, number, form, batch_norm))
        })
    });
    let alexnet = (named("alexnet", Family::AlexNet { classes, form: choice }), alexnet(image, number, form));
    resnets.into_iter().chain(vggs).chain([alexnet]).collect()
}

/// Whether these are the parameters and statistics of a model, and nothing else.
fn has_all(shapes: &BTreeMap<&str, &[usize]>, model: &ModelSpec) -> bool {
    let (parameters, buffers) = (model.parameters(), model.buffers());
    parameters.len() + buffers.len() == shapes.len()
        && parameters.iter().all(|one| shapes.get(&*one.name) == Some(&&one.shape[..]))
        && buffers.iter().all(|one| shapes.contains_key(&*one.name))
}

#[cfg(test)]
mod tests {
    use espalier_plan::filters::shape_in_pytorch;
    use serde_json::Value;

    use super::*;

    fn shapes_of(model: &ModelSpec) -> BTreeMap<String, Vec<usize>> {
        let parameters = model.parameters().into_iter().map(|one| (one.name, one.shape));
        parameters.chain(model.buffers().into_iter().map(|one| (one.name, Vec::new()))).collect()
    }

    fn recognised(shapes: &BTreeMap<String, Vec<usize>>) -> Result<config::ModelConfig, String> {
        let shapes = shapes.iter().map(|(name, shape)| (&**name, &**shape)).collect();
        Ok(Torchvision.read(&ForeignFiles { config: &Value::Null, shapes })?.model)
    }

    #[test]
    fn every_network_is_told_from_the_others() {
        for (form, side) in [(StemForm::ImageNet, 224), (StemForm::Small, 32)] {
            for (written, model) in networks((side, side, 3), 10, form) {
                assert_eq!(recognised(&shapes_of(&model)), Ok(written));
            }
        }
    }

    /// Names and shapes of all tensors, and the number of parameters, as torchvision itself has them
    /// (`tests/oracle/torchvision_shapes.py`).
    #[test]
    fn networks_are_torchvisions() {
        let theirs: BTreeMap<String, (u64, usize, String)> =
            serde_json::from_str(include_str!("../../tests/oracle/torchvision_shapes.json")).unwrap();
        let ours = networks((224, 224, 3), 1000, StemForm::ImageNet);
        assert_eq!((ours.len(), theirs.len()), (16, 16));
        for (_, model) in ours {
            let parameters = model.parameters().into_iter().map(|one| (one.name, one.shape));
            let all = parameters.chain(model.buffers().into_iter().map(|one| (one.name, one.shape)));
            let line = |(name, shape): (String, Vec<usize>)| {
                let shape = shape_in_pytorch(&shape);
                name + &shape.iter().map(|size| format!(" {size}")).collect::<String>() + "\n"
            };
            let mut lines: Vec<String> = all.map(line).collect();
            lines.sort();
            let fnv = lines.concat().bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
            let found = (model.parameter_count(), lines.len(), format!("{fnv:016x}"));
            assert_eq!(found, theirs[&model.name], "{}", model.name);
        }
    }

    #[test]
    fn what_lacks_a_tensor_is_nothing_that_is_known() {
        let mut shapes = shapes_of(&resnet(ResNet::R18, (224, 224, 3), 1000, StemForm::ImageNet));
        shapes.remove("layer3.0.conv2.weight");
        assert!(recognised(&shapes).unwrap_err().contains("no supported network"));
        assert!(recognised(&BTreeMap::new()).is_err());
    }
}
