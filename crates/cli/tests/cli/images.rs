//! Pictures in folders: trained on, evaluated on and named.

use std::fs;
use std::path::Path;

use crate::{TestDir, espalier, json_of, refused_at_last, stderr, succeeded, train_in};

const RUN: &str = r#"
    [model]
    name = "simple-cnn"
    [data]
    kind = "images"
    path = "pets"
    size = 16
    cache_path = "cache"
    [train]
    steps = 4
    batch = 4
    [device]
    kind = "cpu"
    threads = 2
"#;

fn picture(path: &Path, height: u32, width: u32, colour: [u8; 3]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), width, height);
    encoder.set_color(png::ColorType::Rgb);
    let pixels = colour.repeat((height * width) as usize);
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
}

fn pets() -> TestDir {
    let folder = TestDir::new();
    for i in 0..6 {
        picture(&folder.join(format!("pets/train/cat/{i}.png")), 20 + i, 30, [200, 9, 9]);
        picture(&folder.join(format!("pets/train/dog/{i}.png")), 20, 30 + i, [9, 200, 9]);
    }
    picture(&folder.join("pets/val/cat/1.png"), 50, 40, [180, 9, 9]);
    fs::write(folder.join("pets/train/dog/notes.txt"), "no picture").unwrap();
    folder
}

#[test]
fn a_folder_is_learnt_evaluated_and_its_pictures_are_named() {
    let folder = pets();
    let trained = succeeded(train_in(&folder, RUN, "--out run"));
    let expected = "note: 1 file is damaged and left out: ";
    let said = stderr(&trained);
    assert!(
        said.contains(expected) && said.contains("notes.txt (it is neither JPEG nor PNG nor WebP)"),
        "{said}"
    );
    let score = json_of(espalier(&folder, "eval run --data pets/val --json"));
    assert_eq!(score["samples"], 1);
    // ImageNet's layout means what is held out of it.
    assert_eq!(json_of(espalier(&folder, "eval run --data pets --json")), score);
    assert_eq!(json_of(espalier(&folder, "eval run --json")), score);
    fs::write(folder.join("pets/val/cat/2.png"), "no picture").unwrap();
    let output = succeeded(espalier(&folder, "eval run --data pets/val --json"));
    assert!(stderr(&output).contains(expected) && stderr(&output).contains("2.png ("), "{}", stderr(&output));
    assert_eq!(json_of(output), score);
    let strict = espalier(&folder, "eval run --data pets/val --set data.strict=true");
    assert!(stderr(&strict).contains("2.png is no intact picture"), "{}", stderr(&strict));
    let named = json_of(espalier(&folder, "classify run pets/val/cat/1.png --json"));
    let classes = named["images"][0]["classes"].as_array().unwrap();
    assert_eq!((classes.len(), &named["images"][0]["path"]), (2, &"pets/val/cat/1.png".into()));
    let sum: f64 = classes.iter().map(|class| class["probability"].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-9, "{named}");
    let likeliest = classes[0]["name"].as_str().unwrap();
    assert_eq!(likeliest, ["cat", "dog"][classes[0]["label"].as_u64().unwrap() as usize]);
    let said = succeeded(espalier(&folder, "classify run pets/val/cat/1.png --top 1"));
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.lines().count() == 1 && said.trim_end().ends_with(&format!("%  {likeliest}")), "{said}");
}

#[test]
fn what_is_no_picture_is_one_sentence() {
    let folder = pets();
    let refused = |arguments: &str, words: &str| refused_at_last(espalier(&folder, arguments), &[words]);
    fs::write(folder.join("run.toml"), RUN).unwrap();
    let strict = "notes.txt is no intact picture: it is neither JPEG nor PNG nor WebP";
    refused("train run.toml --out run --set data.strict=true", strict);
    succeeded(espalier(&folder, "train run.toml --out run --set train.steps=0"));
    refused("classify run pets/train/dog/notes.txt", "notes.txt is no intact picture");
    refused("classify run none.png", "none.png is not there: expected a picture");
    picture(&folder.join("pets/val/bird/1.png"), 9, 9, [0; 3]);
    let unknown = "val/bird is a class that the model does not learn: expected one of the 2";
    refused("eval run --data pets/val", unknown);
}
