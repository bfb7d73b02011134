//! `espalier doctor`: its JSON and its table.

use std::path::Path;

use crate::{assert_contains, doctor, espalier, espalier_command, json, stderr, stdout, succeeded};

#[test]
fn doctor_says_what_it_found() {
    let found = doctor();
    assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
    assert!(found["cpu"]["cores"].as_u64().unwrap() > 0);
    assert!(found["cpu"]["avx512"].is_boolean() && found["cpu"]["amx_bf16"].is_boolean());
    let cuda = &found["cuda"];
    if cuda["found"] == true {
        assert!(cuda["name"].is_string() && cuda["memory"].as_u64().unwrap() > 0, "{cuda}");
        for field in ["compute_capability", "driver", "nvrtc", "cublaslt"] {
            assert!(cuda[field].is_string(), "{field}: {cuda}");
        }
    } else {
        let why = cuda["why"].as_str().unwrap();
        assert!(why.contains("install") || why.contains("check"), "it says what to do: {why}");
    }
    let cudnn = &cuda["cudnn"];
    match cudnn["found"].as_bool().unwrap() {
        true => assert!(cudnn["version"].as_str().unwrap().starts_with("9."), "{cudnn}"),
        false => {
            let why = cudnn["why"].as_str().unwrap();
            assert!(why.contains("install") || why.contains("check"), "it says what to do: {why}");
        }
    }
    let nccl = &found["nccl"];
    match nccl["found"].as_bool().unwrap() {
        true => assert!(nccl["version"].as_str().unwrap().starts_with("2."), "{nccl}"),
        false => assert!(nccl["why"].as_str().unwrap().contains("libnccl"), "{nccl}"),
    }
    assert!(found["mpi"]["built"] == cfg!(feature = "mpi") && found["mpi"]["found"].is_boolean());
    assert!(found["disk"]["free"].as_u64().unwrap() > 0);
}

/// Whatever cuDNN there is: a switch turns it off, and a file that is not there is named.
#[test]
fn cudnn_that_is_not_used_is_explained() {
    let why = |variable: &str, value: &str| {
        let mut command = espalier_command(Path::new("."), "doctor --json");
        let output = succeeded(command.env(variable, value).output().unwrap());
        let found = json(&output.stdout);
        let cudnn = &found["cuda"]["cudnn"];
        assert_eq!(cudnn["found"], false, "{cudnn}");
        let why = cudnn["why"].as_str().unwrap().to_owned();
        // The table breaks it into lines.
        let words = stderr(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&why), "{words}");
        why
    };
    assert!(why("ESPALIER_NO_CUDNN", "1").contains("ESPALIER_NO_CUDNN"));
    let named = why("ESPALIER_CUDNN", "/nowhere/libcudnn.so.9");
    assert!(named.contains("ESPALIER_CUDNN") && named.contains("/nowhere/"), "{named}");
}

#[test]
fn the_table_fits_where_it_is_read() {
    let output = succeeded(espalier(Path::new("."), "doctor"));
    assert!(output.stderr.is_empty(), "{output:?}");
    let wide = stdout(&output).lines().map(|line| line.chars().count()).max();
    assert!(wide <= Some(80), "{}", stdout(&output));
    let words = ["espalier", "cores", "CUDA driver", "NVRTC", "cuBLASLt", "cuDNN", "disk"];
    assert_contains(&stdout(&output), &words);
}
