//! Folders of pictures as data sets.

use super::*;
use crate::{Dataset, Fingerprint};
use espalier_plan::RunFile;
use std::fs;

/// A PNG of one colour, with a darker right half.
fn png(height: usize, width: usize, colour: [u8; 3]) -> Vec<u8> {
    let pixel = |i: usize| if i % width < width / 2 { colour } else { colour.map(|value| value / 2) };
    encoded(height, width, png::ColorType::Rgb, (0..height * width).flat_map(pixel).collect())
}

fn encoded(height: usize, width: usize, colours: png::ColorType, pixels: Vec<u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(colours);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&pixels).unwrap();
    writer.finish().unwrap();
    bytes
}

/// Folders with files, of which some are no pictures.
struct Folders(tempfile::TempDir);

impl Folders {
    fn new(files: &[(&str, Vec<u8>)]) -> Folders {
        let folders = Folders(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, bytes)| folders.write(name, bytes));
        folders
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.0.path().join("data").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn run(&self, more: &str) -> RunFile {
        let folder = self.0.path().display();
        let cache =
            if more.contains("cache") { String::new() } else { format!("cache_path = \"{folder}/cache\"\n") };
        let text = format!(
            "seed = 5\n[model]\nname = \"simple-cnn\"\n[data]\nkind = \"images\"\npath = \"{folder}/data\"\nsize = 16\n{cache}{more}\n\
             [train]\nsteps = 1\nbatch = 1"
        );
        RunFile::parse(&text, &[]).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    fn open(&self, more: &str) -> Result<ImageFolder, Error> {
        match Dataset::open(&self.run(more))? {
            Dataset::Folder(folder) => Ok(folder),
            _ => panic!("pictures are a folder"),
        }
    }

    fn refused(&self, more: &str) -> String {
        let error = self.open(more).unwrap_err().to_string();
        error.replace(&format!("{}/data", self.0.path().display()), "DIR")
    }
}

fn shades(count: usize, name: &str, colour: [u8; 3]) -> Vec<(String, Vec<u8>)> {
    (0..count).map(|i| (format!("{name}/{i:03}.png"), png(20 + 3 * i, 40 - 2 * i, colour))).collect()
}

/// Cats are red and dogs green, five of each.
fn pets() -> Folders {
    let files: Vec<_> = [shades(5, "cat", [200, 10, 0]), shades(5, "dog", [10, 200, 0])].concat();
    let files: Vec<_> = files.iter().map(|(name, bytes)| (&**name, bytes.clone())).collect();
    Folders::new(&files)
}

#[test]
fn classes_are_folders_in_the_order_of_their_names() {
    let folders = pets();
    folders.write("cat/more/deep.png", &png(9, 9, [30, 2, 3]));
    folders.write("cat/.hidden", b"not looked at");
    folders.write(".git/config", b"no class");
    folders.write("readme.txt", b"beside the classes");
    let data = folders.open("validation = 0.2").unwrap();
    assert_eq!(data.classes(), ["cat", "dog"]);
    assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation)), (9, 2));
    let expected = DataFacts { vocab: None, image: Some((16, 16, 3)), classes: Some(2) };
    assert_eq!((data.facts(), Dataset::facts_of(&folders.run("")).unwrap()), (expected, expected));
    // The label is the colour's.
    for split in [DataSplit::Train, DataSplit::Validation] {
        for i in 0..data.len(split) {
            let bytes = data.bytes(split, &[(0, i)]).unwrap();
            let is_dog = bytes[1] > bytes[0];
            assert_eq!(data.label(split, i), u32::from(is_dog), "{:?}", &bytes[..3]);
        }
    }
}

/// ImageNet's layout: `val` is held out and need not have all classes; another folder by name.
#[test]
fn a_folder_of_its_own_is_held_out() {
    let folders = Folders::new(&[
        ("train/cat/1.png", png(20, 20, [9, 9, 9])),
        ("train/dog/1.png", png(20, 20, [9, 9, 9])),
        ("val/dog/1.png", png(30, 20, [9, 9, 9])),
        ("val/dog/2.png", png(20, 30, [9, 9, 9])),
        ("other/cat/1.png", png(20, 30, [9, 9, 9])),
    ]);
    let data = folders.open("").unwrap();
    assert_eq!((data.len(DataSplit::Train), data.len(DataSplit::Validation)), (2, 2));
    assert_eq!((data.label(DataSplit::Validation, 0), data.label(DataSplit::Train, 0)), (1, 0));
    let other = format!("validation_path = \"{}/data/other\"", folders.0.path().display());
    assert_eq!(folders.open(&other).unwrap().label(DataSplit::Validation, 0), 0);
    assert_eq!(
        folders.refused("validation = 0.3"),
        "data.validation is wrong: expected nothing where a folder is held out, got 0.3, although DIR/val is there"
    );
    folders.write("val/bird/1.png", &png(9, 9, [0; 3]));
    assert_eq!(
        folders.refused(""),
        "DIR/val/bird is a class that the model does not learn: expected one of the 2 classes of the training set"
    );
}

#[test]
fn folders_that_are_no_classes_are_refused() {
    let empty = Folders::new(&[("cat/1.png", png(9, 9, [0; 3])), ("dog/.keep", vec![])]);
    let expected = "DIR/dog holds no pictures: expected at least one in the folder of each class";
    assert_eq!(empty.refused(""), expected);
    let plain = Folders::new(&[("1.png", png(9, 9, [0; 3]))]);
    assert_eq!(plain.refused(""), "DIR holds no classes: expected a folder of pictures for each class");
    let one = Folders::new(&[("cat/1.png", png(9, 9, [0; 3]))]);
    assert_eq!(one.refused(""), "DIR holds one class, \"cat\": expected at least two folders of pictures");
    let none = Folders::new(&[]);
    let expected = "DIR is not there: expected a folder with a folder of pictures for each class";
    assert_eq!(none.refused(""), expected);
}

/// Left out and named, or an error.
#[test]
fn damaged_files_are_named_and_counted() {
    let folders = pets();
    folders.write("cat/cut.png", &png(30, 30, [9; 3])[..60]);
    folders.write("dog/notes.txt", b"a file that is no picture");
    let damaged = |data: &ImageFolder| {
        let name = |one: &DamagedPicture| one.path.file_name().unwrap().to_string_lossy().into_owned();
        data.damaged().iter().map(name).collect::<Vec<_>>()
    };
    // Found when they are decoded, and again in the cache.
    for _ in 0..2 {
        let data = folders.open("").unwrap();
        assert_eq!(damaged(&data), ["cut.png", "notes.txt"]);
        assert_eq!(data.damaged()[1].why, "it is neither JPEG nor PNG nor WebP");
        assert_eq!(data.len(DataSplit::Train) + data.len(DataSplit::Validation), 10);
    }
    let strict = folders.refused("strict = true");
    assert!(strict.starts_with("DIR/cat/cut.png is no intact picture: "), "{strict}");
    assert!(strict.ends_with(" (and one more file is damaged)"), "{strict}");
    let data = folders.open("cache = \"none\"").unwrap();
    assert_eq!(damaged(&data), ["cut.png", "notes.txt"]);
    assert_eq!(data.len(DataSplit::Train) + data.len(DataSplit::Validation), 10);
    // Without a cache, and where a damaged picture is an error, nobody looks before it is wanted.
    let data = folders.open("cache = \"none\"\nvalidation = 0.0\nstrict = true").unwrap();
    let all: Vec<_> = (0..12).map(|i| (0, i)).collect();
    let error = data.bytes(DataSplit::Train, &all).unwrap_err().to_string();
    assert!(error.contains("is no intact picture"), "{error}");
    // To be evaluated on.
    let folder = folders.0.path().join("data");
    let evaluated = |strict| {
        let frame = PictureFrame::new([16, 16, 3], 16);
        ImageFolder::for_evaluation(&folder, frame, None, 2, strict)
    };
    let data = evaluated(false).unwrap();
    assert_eq!(
        (damaged(&data), data.len(DataSplit::Validation)),
        (vec!["cut.png".into(), "notes.txt".into()], 10)
    );
    assert!(evaluated(true).unwrap_err().to_string().ends_with(" (and one more file is damaged)"));
}

/// A second opening decodes nothing; a file that changed is decoded again; without a cache it is the same.
#[test]
fn decoded_pictures_are_kept() {
    let folders = pets();
    let run = folders.run("max_side = 30\nresize = 20\nvalidation = 0.0");
    let open = |calls: &mut Vec<(u64, u64)>| match Dataset::open_with_progress(&run, &mut |done, all| {
        calls.push((done, all))
    })
    .unwrap()
    {
        Dataset::Folder(folder) => folder,
        _ => panic!("pictures are a folder"),
    };
    let picks: Vec<_> = (0..10).map(|i| (3, i)).collect();
    let bytes = |data: &ImageFolder| data.bytes(DataSplit::Train, &picks).unwrap();
    let mut calls = Vec::new();
    let first = bytes(&open(&mut calls));
    assert!(calls.last().is_some_and(|(done, all)| done == all), "{calls:?}");
    calls.clear();
    assert!(bytes(&open(&mut calls)) == first);
    assert_eq!(calls, []);
    let direct = folders.open("cache = \"none\"\nmax_side = 30\nresize = 20\nvalidation = 0.0").unwrap();
    assert!(bytes(&direct) == first);
    folders.write("cat/000.png", &png(25, 25, [7, 7, 7]));
    assert!(bytes(&open(&mut calls)) != first);
    assert!(!calls.is_empty());
    // One that was cut off is not believed.
    for file in fs::read_dir(folders.0.path().join("cache")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "pixels") {
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        }
    }
    calls.clear();
    open(&mut calls);
    assert!(!calls.is_empty());
    let blocked = folders.0.path().join("blocked");
    fs::write(&blocked, "a file").unwrap();
    let error = folders.refused(&format!("cache_path = \"{}\"", blocked.display()));
    assert!(error.contains("`data.cache_path` names another folder"), "{error}");
}

/// By seed, epoch and sample: in any order, on any number of threads, alone or in a batch.
#[test]
fn crops_are_those_of_the_sample() {
    let folders = pets();
    for crop in ["resized", "random"] {
        let data = folders.open(&format!("crop = \"{crop}\"\nresize = 24")).unwrap();
        let all: Vec<_> = (0..9).map(|i| (7, i)).collect();
        let together = data.bytes(DataSplit::Train, &all).unwrap();
        let threads = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let apart: Vec<u8> = threads.install(|| {
            let mut apart: Vec<_> =
                all.iter().rev().map(|pick| data.bytes(DataSplit::Train, &[*pick]).unwrap()).collect();
            apart.reverse();
            apart.concat()
        });
        assert!(together == apart, "{crop}");
        let later: Vec<_> = (0..9).map(|i| (8, i)).collect();
        assert!(together != data.bytes(DataSplit::Train, &later).unwrap(), "{crop}");
    }
    // The middle is always the same, and half of the pictures are mirrored.
    let still = folders.open("crop = \"center\"\nflip = false").unwrap();
    let [a, b] = [0, 1].map(|epoch| still.bytes(DataSplit::Train, &[(epoch, 2)]).unwrap());
    assert!(a == b);
    let flipped = folders.open("crop = \"center\"").unwrap();
    let is_mirrored = |epoch: u64| {
        let bytes = flipped.bytes(DataSplit::Train, &[(epoch, 2)]).unwrap();
        bytes[0].max(bytes[1]) < bytes[15 * 3].max(bytes[15 * 3 + 1])
    };
    let mirrored = (0..100).filter(|epoch| is_mirrored(*epoch)).count();
    assert!((30..70).contains(&mirrored), "{mirrored}");
}

/// As torchvision's `Resize` and `CenterCrop` have it, by hand: 40 x 20 becomes 32 x 16 and loses 8 rows on
/// both sides.
#[test]
fn validation_sees_the_middle() {
    let mut picture = image_rows(40, 20);
    let folders =
        Folders::new(&[("a/1.png", std::mem::take(&mut picture)), ("b/1.png", png(40, 20, [0; 3]))]);
    let data = folders.open("resize = 16\nvalidation = 0.0").unwrap();
    let how = data.frame().middle(40, 20);
    assert_eq!((how.size, how.window), ([32, 16], PixelBox { top: 8, left: 0, height: 16, width: 16 }));
    // Odd differences: 5 / 2 is 2, 7 / 2 is 4, as Python rounds.
    let frame = PictureFrame { shape: [16, 16, 3], resize: 16 };
    assert_eq!(frame.middle(21, 16).window.top, 2);
    assert_eq!(frame.middle(23, 16).window.top, 4);
    assert_eq!(PictureFrame::usual([224, 224, 3]).resize, 256);
    assert_eq!(PictureFrame::usual([32, 32, 3]).resize, 32);
    let center = folders.open("resize = 16\nvalidation = 0.0\ncrop = \"center\"\nflip = false").unwrap();
    let bytes = center.bytes(DataSplit::Train, &[(0, 0)]).unwrap();
    let rows: Vec<u8> = bytes.chunks(16 * 3).map(|row| row[0]).collect();
    assert!(rows.is_sorted() && rows[0].abs_diff(10 * 5) <= 8 && rows[15].abs_diff(30 * 5) <= 8, "{rows:?}");
}

/// Row y has the value 5 y.
fn image_rows(height: usize, width: usize) -> Vec<u8> {
    let pixels = (0..height * width).map(|i| (i / width * 5) as u8).collect();
    encoded(height, width, png::ColorType::Grayscale, pixels)
}

#[test]
fn a_changed_folder_is_noticed() {
    let folders = pets();
    let fingerprint = || Fingerprint::of(&folders.run("").data).unwrap().unwrap();
    let was = fingerprint();
    assert_eq!(fingerprint().change_since(&was), None);
    folders.write("cat/000.png", &png(20, 40, [201, 10, 0]));
    assert!(fingerprint().change_since(&was).unwrap().contains("holds something else"));
    assert_eq!(Dataset::files(&folders.run("").data).unwrap().len(), 10);
}
