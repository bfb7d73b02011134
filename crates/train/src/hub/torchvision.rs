//! State dicts of torchvision's networks: they bear no configuration, but their names and shapes are those of one network alone.

use std::collections::BTreeMap;

use espalier_plan::spec::Model;
use espalier_plan::spec::presets::{Form, ImageSize, ResNet, Vgg, alexnet, resnet, vgg};

/// Sides of images that networks are tried with: the size of a linear layer behind a flatten follows from them.
const SIDES: [(Form, usize); 3] = [(Form::ImageNet, 224), (Form::Small, 32), (Form::Small, 64)];

/// The `[model]` of a run file whose network has exactly these tensors, and the images it was tried with.
pub(super) fn recognise(shapes: &BTreeMap<&str, &[usize]>) -> Result<(String, ImageSize), String> {
    let unknown = || {
        "its tensors are those of no network that is built here: a GPT-2 has a config.json, and ResNets, VGGs and AlexNet of \
         torchvision are known by their tensors"
            .to_owned()
    };
    let last = ["fc.weight", "classifier.6.weight", "classifier.weight"];
    let classes = last.into_iter().find_map(|name| shapes.get(name)?.first().copied());
    let colours =
        ["conv1.weight", "features.0.weight"].into_iter().find_map(|name| shapes.get(name)?.get(1).copied());
    let (Some(classes), Some(colours)) = (classes, colours) else { return Err(unknown()) };
    for (form, side) in SIDES {
        let image = (side, side, colours);
        let found = networks(image, classes, form).into_iter().find(|(_, model)| has_all(shapes, model));
        if let Some((fields, _)) = found {
            let form = if form == Form::ImageNet { "imagenet" } else { "32x32" };
            let text = format!("[model]\n{fields}\nclasses = {classes}\nform = \"{form}\"\n");
            return Ok((text, image));
        }
    }
    Err(unknown())
}

/// Every network of a form, and what a run file says of it.
fn networks(image: ImageSize, classes: usize, form: Form) -> Vec<(String, Model)> {
    let named = |name: &str| format!("name = \"{name}\"");
    let resnets = ResNet::ALL.map(|net| (named(net.name()), resnet(net, image, classes, form)));
    let vggs = Vgg::ALL.into_iter().flat_map(|net| {
        [false, true].map(|norm| {
            (format!("{}\nbatch_norm = {norm}", named(net.name())), vgg(net, image, classes, form, norm))
        })
    });
    let alexnet = (named("alexnet"), alexnet(image, classes, form));
    resnets.into_iter().chain(vggs).chain([alexnet]).collect()
}

/// Whether these are the parameters and statistics of a model, and nothing else.
fn has_all(shapes: &BTreeMap<&str, &[usize]>, model: &Model) -> bool {
    let (parameters, buffers) = (model.parameters(), model.buffers());
    parameters.len() + buffers.len() == shapes.len()
        && parameters.iter().all(|one| shapes.get(&*one.name) == Some(&&one.shape[..]))
        && buffers.iter().all(|one| shapes.contains_key(&*one.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes_of(model: &Model) -> BTreeMap<String, Vec<usize>> {
        let parameters = model.parameters().into_iter().map(|one| (one.name, one.shape));
        parameters.chain(model.buffers().into_iter().map(|one| (one.name, Vec::new()))).collect()
    }

    fn recognised(shapes: &BTreeMap<String, Vec<usize>>) -> Result<String, String> {
        recognise(&shapes.iter().map(|(name, shape)| (&**name, &**shape)).collect()).map(|(text, _)| text)
    }

    #[test]
    fn every_network_is_told_from_the_others() {
        for (form, side) in [(Form::ImageNet, 224), (Form::Small, 32)] {
            for (fields, model) in networks((side, side, 3), 10, form) {
                let text = recognised(&shapes_of(&model)).unwrap();
                assert!(text.contains(&format!("{fields}\nclasses = 10\n")), "{text} of {fields}");
            }
        }
    }

    #[test]
    fn what_lacks_a_tensor_is_nothing_that_is_known() {
        let mut shapes = shapes_of(&resnet(ResNet::R18, (224, 224, 3), 1000, Form::ImageNet));
        shapes.remove("layer3.0.conv2.weight");
        assert!(recognised(&shapes).unwrap_err().contains("no network that is built here"));
        assert!(recognised(&BTreeMap::new()).is_err());
    }
}
