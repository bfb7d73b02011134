//! People's own pictures: crops and flips are those of the sample, on any layout and after a resumption; what is
//! learnt is evaluated by the names of classes, and named.

use std::fs;
use std::path::Path;

use espalier_tensor::Device;
use espalier_train::hub;
use espalier_train::trained::EvalWindows;

use crate::support::{Base, assert_goes_on, assert_says, base, open, scored, tiny_cnn};

/// A PNG of one colour with a darker half.
fn picture(path: &Path, height: u32, width: u32, colour: [u8; 3]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), width, height);
    encoder.set_color(png::ColorType::Rgb);
    let pixel = |i: u32| if i % width < width / 2 { colour } else { colour.map(|value| value / 2) };
    let pixels: Vec<u8> = (0..height * width).flat_map(pixel).collect();
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
}

/// Red cats and green dogs of many sizes, and a run on them.
fn pets(folder: &Path) -> Base {
    for i in 0..12 {
        let shade = 150 + 8 * i as u8;
        picture(&folder.join(format!("pets/cat/{i}.png")), 20 + i, 40 - i, [shade, 20, 30]);
        picture(&folder.join(format!("pets/dog/{i}.png")), 40 - i, 20 + i, [20, shade, 30]);
    }
    let text = "seed = 3\n[model]\nname = \"simple-cnn\"\n[data]\nkind = \"images\"\npath = \"pets\"\nsize = 16\n\
                [train]\nsteps = 6\nbatch = 8\n[optimizer]\nname = \"adam\"\n[learning_rate]\npeak = 1e-3\nschedule = \"constant\"\n\
                [device]\nkind = \"cpu\"\nthreads = 2";
    let at = |field: &str, name: &str| format!("data.{field}={}", folder.join(name).display());
    base(text).set(at("path", "pets")).set(at("cache_path", "cache"))
}

/// Shapes, shifted and mirrored.
fn shifted() -> Base {
    tiny_cnn("data.padding=3 data.flip=true")
}

#[test]
fn crops_are_the_same_on_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    for base in [pets(folder.path()), shifted()] {
        let base = base.set("train.batch=8 train.micro_batches=2 train.eval_samples=2");
        let single = base.steps(5).run().loss.unwrap();
        for layout in ["parallel.data=2", "parallel.pipeline=2"] {
            let loss = base.set(layout).set("train.micro_batches=1").steps(5);
            let loss = if layout.contains("pipeline") { loss.set("train.micro_batches=2") } else { loss };
            let found = loss.run().loss.unwrap();
            assert!((found - single).abs() < 2e-5, "{layout}: {found}, alone {single}");
        }
    }
    // They are not the images themselves.
    let [plain, varied] = [tiny_cnn(""), shifted()].map(|base| base.steps(3).run().loss.unwrap());
    assert!((plain - varied).abs() > 1e-6, "{plain} and {varied}");
}

/// In the middle of an epoch, with the cache and without.
#[test]
fn a_resumed_run_sees_the_crops_that_it_would_have_seen() {
    let folder = tempfile::tempdir().unwrap();
    for base in [pets(folder.path()), shifted()] {
        assert_goes_on(&base, [4, 8]);
    }
    let base = pets(folder.path()).steps(3);
    let again = base.set("data.cache=none data.cache_path=");
    assert_eq!(again.run().weights_hash, base.run().weights_hash);
}

#[test]
fn what_was_learnt_is_evaluated_by_name_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let trained = pets(folder.path()).steps(60).run_in(&at("run"));
    assert_eq!(trained.validation.accuracy, Some(1.0));
    let trained = open(&at("run"));
    let input = hub::image_input_of(trained.checkpoint().path()).unwrap();
    assert_eq!(input.classes.unwrap(), ["cat", "dog"]);
    assert_eq!(input.frame.map(|frame| (frame.shape, frame.resize)), Some(([16, 16, 3], 19)));
    // Dogs alone keep their label.
    picture(&at("others/dog/big.png"), 90, 200, [10, 220, 40]);
    let evaluate = |path: &Path| scored(&trained, Some(path), "", EvalWindows::default());
    let score = evaluate(&at("others")).unwrap();
    assert_eq!((score.accuracy, score.samples), (Some(1.0), 1));
    picture(&at("others/bird/1.png"), 20, 20, [0; 3]);
    assert_says(
        evaluate(&at("others")).unwrap_err(),
        &["others/bird is a class that the model does not learn"],
    );
    let paths = [at("others/dog/big.png"), at("pets/cat/3.png")];
    let (plan, pictures) = trained.pictures(&paths, &[]).unwrap();
    let named = trained.classify(&paths, plan, pictures, &Device::cpu(1).unwrap(), 1).unwrap();
    let names: Vec<_> = named.iter().map(|one| (one.path.clone(), &*one.classes[0].name)).collect();
    assert_eq!(names, [(paths[0].clone(), "dog"), (paths[1].clone(), "cat")]);
    assert!(named.iter().all(|one| one.classes.len() == 1 && one.classes[0].probability > 0.5));
    fs::write(at("notes.txt"), "no picture").unwrap();
    let paths = [at("notes.txt")];
    let (plan, pictures) = trained.pictures(&paths, &[]).unwrap();
    let error =
        trained.classify(&paths, plan, pictures, &Device::cpu(1).unwrap(), 5).unwrap_err().to_string();
    assert!(
        error.ends_with("notes.txt is no intact picture: it is neither JPEG nor PNG nor WebP"),
        "{error}"
    );
}
