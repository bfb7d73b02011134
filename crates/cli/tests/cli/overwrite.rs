//! What a command writes at its end: files that are not ours stay as they are unless that is asked for, and
//! nothing is written in place.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::{TINY, TestDir, espalier, refused, refused_at_last, succeeded};

#[test]
fn files_of_others_are_not_written_over() {
    let at = &TestDir::with_run_file();
    let plan = "plan run.toml --cluster this-machine";
    let commands = [
        (format!("{plan} --gpus 2 --apply"), "two.toml", "run file of `espalier plan --apply`"),
        (format!("{plan} --gpus 2 --trace"), "trace.json", "trace"),
        (format!("{plan} --sweep gpus=1..2 --svg"), "curve.svg", "figure of this program"),
    ];
    let icon = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 8 8\"><circle r=\"3\"/></svg>\n";
    for (command, name, what) in commands {
        let (command, file) = (format!("{command} {name}"), at.join(name));
        fs::write(&file, icon).unwrap();
        let expected = format!("error: {name}: a file is here that is no {what}: choose another name, or ");
        // A benchmark may have warned before.
        refused_at_last(espalier(at, &command), &[&expected]);
        assert_eq!(fs::read_to_string(&file).unwrap(), icon, "{command}");

        let before = fs::metadata(&file).unwrap().ino();
        succeeded(espalier(at, &format!("{command} --force")));
        assert_ne!(fs::metadata(&file).unwrap().ino(), before, "{command}: it was put in its place at once");
        // What is ours is written anew without a word.
        succeeded(espalier(at, &command));
    }
    let left: Vec<_> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 4, "nothing half-written is left: {left:?}");
}

/// By whatever name, and although it could be one that was written here.
#[test]
fn the_run_file_itself_is_not_written_over() {
    let at = &TestDir::new();
    let text = format!("# gpt by `espalier plan`: by hand since\n{TINY}");
    fs::write(at.join("run.toml"), &text).unwrap();
    std::os::unix::fs::symlink("run.toml", at.join("link.toml")).unwrap();
    for name in ["run.toml", "./run.toml", "link.toml"] {
        let plan = format!("plan run.toml --cluster this-machine --gpus 2 --apply {name}");
        refused(espalier(at, &plan), &["it is the run file that is planned for"]);
        assert_eq!(fs::read_to_string(at.join("run.toml")).unwrap(), text);
    }
}
