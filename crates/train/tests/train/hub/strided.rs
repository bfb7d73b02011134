//! Perplexity as others publish it: transformers over windows that overlap (`../oracle/strided.py`).

use std::fs;

use espalier_train::trained::{EvalResult, EvalWindows};
use serde_json::Value;

use super::{gpt2, open, oracle, write_ids};
use crate::support::scored;

#[test]
fn the_strided_perplexity_is_that_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = fs::read(oracle().join("hub/strided.json")).unwrap();
    let fixture: Value = serde_json::from_slice(&fixture).unwrap();
    let ids = fixture["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
    let path = folder.path().join("ids.bin");
    write_ids(&path, &ids.collect::<Vec<_>>());
    let trained = open(&gpt2());
    let score = |layout: &str, stride: Option<usize>| -> EvalResult {
        scored(&trained, Some(&path), layout, EvalWindows { stride, ..EvalWindows::default() }).unwrap()
    };
    let windowed = score("", None);
    assert_eq!(windowed.windowed_perplexity, windowed.perplexity);
    assert_eq!((windowed.strided_perplexity, windowed.stride, windowed.context), (None, None, Some(16)));
    for (stride, theirs) in fixture["strided"].as_object().unwrap() {
        let ours = score("", Some(stride.parse().unwrap()));
        let off = (ours.loss - theirs["loss"].as_f64().unwrap()).abs();
        assert!(off < 1e-6, "stride {stride}: off by {off}");
        assert_eq!(ours.tokens, theirs["tokens"].as_u64().map(|tokens| tokens as usize), "{stride}");
        assert_eq!(ours.strided_perplexity, ours.perplexity);
        assert_eq!((ours.windowed_perplexity, ours.stride), (None, stride.parse().ok()), "{stride}");
        // The guide's own loop weights windows by one token less than they predict, which leaves nothing of
        // those that predict one.
        let guide = theirs["guide"].as_f64().unwrap();
        let off = (ours.perplexity.unwrap() / guide - 1.0).abs();
        assert!(stride == "1" || off < 0.03, "{stride}: {guide} and {ours:?}");
        for layout in ["parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"] {
            let other = score(layout, Some(stride.parse().unwrap()));
            assert!((other.loss - ours.loss).abs() < 1e-5 && other.tokens == ours.tokens, "{layout}");
        }
    }
    assert_ne!(score("", Some(8)).loss, windowed.loss);
}
