//! `[parallel]`: axes, stages and their schedules, shared state, ranks that go apart.

use super::*;

#[test]
fn ranks_are_read_and_checked() {
    let run =
        parse("[train]\nbatch = 24\nmicro_batches = 2\nnoise_scale = true\n[parallel]\ndata = 3").unwrap();
    assert_eq!(
        (run.parallel.data, run.parallel.batch_norm, run.batch().micro_batch),
        (3, BatchNormSync::Local, 4)
    );
    assert!(parse("[train]\nnoise_scale = true\n[parallel]\ndata = 2").is_ok());
    insta::assert_snapshot!(sentence("[parallel]\ndata = 0"), @"`parallel.data` must be a whole number of at least 1, got 0");
    insta::assert_snapshot!(sentence("[train]\nbatch = 8\n[parallel]\ndata = 3"), @"`parallel.data` is 3, but `train.batch` = 8 cannot be split into 3 equal parts (3 ranks with `train.micro_batches` = 1)");
    insta::assert_snapshot!(sentence("[train]\nbatch = 8\nmicro_batches = 4\n[parallel]\ndata = 4"), @"`parallel.data` is 4, but `train.batch` = 8 cannot be split into 16 equal parts (4 ranks with `train.micro_batches` = 4)");
    insta::assert_snapshot!(sentence("[parallel]\nbatch_norm = \"synchronized\""), @r#"`parallel.batch_norm` must be "local" or "synchronised", got "synchronized"; did you mean `synchronised`?"#);
    insta::assert_snapshot!(sentence("[parallel]\ntimeout_s = 0"), @"`parallel.timeout_s` must be a whole number from 1 to 604800, got 0");
    insta::assert_snapshot!(sentence("ranks = 4"), @"`ranks` is not a field; did you mean `parallel.data`?");
}

#[test]
fn a_launcher_decides_how_many_ranks_there_are() {
    let among = |text: &str, started| {
        RunTable::parse(text, &[])
            .and_then(|run| run.read_for(started))
            .map(|run| run.parallel.data)
            .map_err(|e| e.to_string())
    };
    assert_eq!(among("", Some(4)), Ok(4));
    assert_eq!(among("[parallel]\ndata = 4", Some(4)), Ok(4));
    assert_eq!(among("[parallel]\ndata = 4", None), Ok(4));
    insta::assert_snapshot!(among("[parallel]\ndata = 2", Some(4)).unwrap_err(), @"`parallel`: the mesh of data 2 takes 2 ranks, but 4 were started; start 2, or set `data` to 4");
    insta::assert_snapshot!(among("[train]\nbatch = 8", Some(3)).unwrap_err(), @"`parallel.data` is 3, but `train.batch` = 8 cannot be split into 3 equal parts (3 ranks with `train.micro_batches` = 1)");
}

#[test]
fn pipelines_that_cannot_be() {
    let sentence = |fields: &str| {
        let text = format!("[train]\nbatch = 8\nmicro_batches = 4\n[parallel]\n{fields}");
        RunFile::parse(&text, &[]).unwrap_err().to_string()
    };
    insta::assert_snapshot!(sentence("schedule = \"gpipe\""), @"`parallel.schedule` has no effect with `parallel.pipeline` = 1: the model is on one rank");
    insta::assert_snapshot!(sentence("pipeline = 2\nschedule = \"1f1d\""), @r#"`parallel.schedule` must be one of 9 known words, got "1f1d"; did you mean `1f1b`?"#);
    insta::assert_snapshot!(sentence("pipeline = 2\nchunks = 2"), @"`parallel`: chunks have no effect on 1f1b: only interleaved has them");
    insta::assert_snapshot!(sentence("pipeline = 2\nschedule_file = \"mine.txt\"\nchunks = 3"), @"`parallel.chunks` has no effect with `parallel.schedule_file`, which places the stages itself");
    insta::assert_snapshot!(sentence("pipeline = 2\nschedule_file = \"mine.txt\"\npipelines = 2"), @"`parallel.pipelines` has no effect with `parallel.schedule_file`, which places the stages itself");
    insta::assert_snapshot!(sentence("pipeline = 3\nschedule = \"chimera\""), @"`parallel`: chimera needs an even number of stages, got 3");
    insta::assert_snapshot!(sentence("pipeline = 3\ncut = [2]"), @"`parallel.cut` cuts the model into 2 stages, but there are 3");
    insta::assert_snapshot!(sentence("pipeline = 3\ncut = [3, 2]"), @"`parallel.cut` must be a list of block numbers, ascending, such as [3, 6], got a list of 2");
    insta::assert_snapshot!(sentence("pipeline = 2\ndrain = 10"), @r#"`parallel.drain` has no effect with `parallel.schedule` = "1f1b", which flushes every step"#);
    insta::assert_snapshot!(sentence("pipeline = 2\nschedule = \"2bw\"\n[prune]\nmethod = \"gradual\""), @r#"`prune.method` prunes during training, but with "2bw" micro-batches are always in flight: prune before the first step, or use a schedule that flushes every step"#);
    // They prune before the first step, but move weights later.
    for (method, schedule) in [("set", "2bw"), ("rigl", "2bw"), ("set", "pipedream"), ("rigl", "pipedream")] {
        let fields = format!("pipeline = 2\nschedule = \"{schedule}\"\n[prune]\nmethod = \"{method}\"");
        assert!(sentence(&fields).starts_with("`prune.method` prunes during training"), "{fields}");
    }
    let clipped =
        RunFile::parse("[train]\nclip = 1.0\n[parallel]\npipeline = 2\nschedule = \"pipedream\"", &[]);
    insta::assert_snapshot!(clipped.unwrap_err(), @r#"`train.clip` is 1, but "pipedream" never has the gradient of the full model at one time: set it to 0"#);
}

#[test]
fn state_that_cannot_be_shared_and_ranks_that_cannot_go_apart() {
    let sentence = |fields: &str| {
        RunFile::parse(&format!("[train]\nbatch = 8\n[parallel]\n{fields}"), &[]).unwrap_err().to_string()
    };
    insta::assert_snapshot!(sentence("zero = true"), @"`parallel.zero` has no effect with `parallel.data` = 1: there is no other rank along the data axis");
    insta::assert_snapshot!(sentence("average_every = 4"), @"`parallel.average_every` has no effect with `parallel.data` = 1: there is no other rank along the data axis");
    insta::assert_snapshot!(sentence("data = 2\nzero = true\naverage_every = 4"), @"`parallel.zero` is 1, but with `parallel.average_every` = 4 each rank takes its own steps and needs its full state");
    insta::assert_snapshot!(sentence("data = 2\nzero = true\n[prune]\nmethod = \"magnitude\"\nstate = \"dense\""), @r#"`prune.state` is "dense", but `parallel.zero` shards compressed state only: remove it"#);
    insta::assert_snapshot!(sentence("data = 2\naverage_every = 4\nbatch_norm = \"synchronised\""), @r#"`parallel.batch_norm` is "synchronised", but with `parallel.average_every` = 4 each rank takes its own steps"#);
    insta::assert_snapshot!(sentence("data = 2\nzero = true\npipeline = 2\nschedule = \"2bw\""), @r#"`parallel.zero` is 1, but with `parallel.schedule` = "2bw" weights change while micro-batches are in flight: use a schedule that flushes every step"#);
    insta::assert_snapshot!(sentence("data = 2\naverage_every = 4\nspatial = 3"), @"`parallel.spatial` is 3, but with `parallel.average_every` = 4 each rank takes its own steps: a rank here would be a spatial group of 3 ranks");
    insta::assert_snapshot!(sentence("data = 2\naverage_every = 4\ntensor = 2"), @"`parallel.tensor` is 2, but with `parallel.average_every` = 4 each rank takes its own steps: a rank here would be a tensor-parallel group of 2 ranks");
    let low = "[train]\nprecision = \"bf16\"\nbatch = 8\n[optimizer]\nmaster = \"low-bits\"\n[parallel]\ndata = 2\naverage_every = 4";
    insta::assert_snapshot!(RunFile::parse(low, &[]).unwrap_err(), @r#"`optimizer.master` is "low-bits", but with `parallel.average_every` = 4 each rank takes its own steps and f32 master weights are averaged: set it to "f32""#);
    let noisy = RunFile::parse(
        "[train]\nnoise_scale = true\nbatch = 8\n[parallel]\ndata = 2\naverage_every = 4",
        &[],
    );
    insta::assert_snapshot!(noisy.unwrap_err(), @"`train.noise_scale` is true, but with `parallel.average_every` = 4 each rank takes its own steps and never has the gradient of the full batch");
    insta::assert_snapshot!(sentence("data = 2\nlocal_after = 3"), @"`parallel.local_after` has no effect with `parallel.average_every` = 1: gradients are reduced in every step");
    insta::assert_snapshot!(sentence("data = 2\nzero = 3\npipeline = 2\nschedule = \"pipedream\""), @r#"`parallel.zero` is 3, but with `parallel.schedule` = "pipedream" weights change while micro-batches are in flight: use a schedule that flushes every step"#);
    insta::assert_snapshot!(sentence("data = 2\nzero = 3\naverage_every = 4"), @"`parallel.zero` is 3, but with `parallel.average_every` = 4 each rank takes its own steps and needs its full state");
    insta::assert_snapshot!(sentence("data = 2\nzero = 4"), @"`parallel.zero` must be true, false, 0, 1, 2 or 3, got 4");
}

#[test]
fn a_run_on_many_ranks_has_one_on_one() {
    let text = "[train]\nbatch = 16\nmicro_batches = 2\n[prune]\nmethod = \"magnitude\"\nsparsity = 0.001\n\
                [parallel]\ndata = 4\npipeline = 2\nzero = true";
    let run = RunFile::parse(text, &[]).unwrap();
    let single = run.single_rank();
    assert_eq!(run.parallel.stages(), 2);
    assert_eq!(
        (single.parallel.data, single.parallel.stages(), single.batch().micro_batch),
        (1, 1, run.batch().micro_batch)
    );
    assert!(
        run.storage().compressed && single.storage().compressed,
        "state that is shared out is compressed"
    );
    assert_eq!(RunFile::parse(&single.to_toml().unwrap(), &[]).unwrap(), single);
}
