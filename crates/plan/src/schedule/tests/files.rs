//! Schedules as text: what is written can be read, what a person leaves out is filled in, and what is wrong
//! is said.

use proptest::prelude::*;

use super::*;

fn refused(text: &str) -> String {
    let outcome = Schedule::parse(text).and_then(|schedule| schedule.validate());
    outcome.unwrap_err().to_string()
}

fn read(text: &str) -> Schedule {
    let schedule = Schedule::parse(text).unwrap();
    schedule.validate().unwrap();
    schedule
}

#[test]
fn what_is_written_is_read_back() {
    let is_tried = |m: usize| m <= 4 || m == 12 || m < 12 && espalier_testing::long();
    for (name, options) in everything().filter(|(_, options)| is_tried(options.micro_batches)) {
        for batches in [1, 3] {
            let schedule = name.schedule(&ScheduleOptions { batches, ..options }).unwrap();
            assert_eq!(Schedule::parse(&schedule.to_string()).unwrap(), schedule, "{schedule}");
        }
    }
}

/// The lines of `--json`, as a file.
#[test]
fn the_order_alone_is_a_schedule() {
    let flushed =
        [ScheduleName::Gpipe, ScheduleName::OneFOneB, ScheduleName::Interleaved, ScheduleName::ZbH1];
    for (name, options) in everything().filter(|(name, _)| flushed.contains(name)) {
        let schedule = name.schedule(&ScheduleOptions { batches: 2, ..options }).unwrap();
        let order: String = (0..options.stages).map(|rank| schedule.order(rank) + "\n").collect();
        let again = Schedule::parse(&format!("name {name}\nbatches 2\n{order}"));
        assert_eq!(again.unwrap(), schedule);
    }
}

#[test]
fn every_action_has_its_word() {
    let options = ScheduleOptions { batches: 3, ..ScheduleOptions::new(2, 2) };
    insta::assert_snapshot!(ScheduleName::TwoBw.schedule(&options).unwrap(), @"
    name 2bw
    micro-batches 2
    batches 3
    updates double-buffered
    pipeline 0 1
    F0 a0>1 F1 a1>1 g0<1 B0 F2 a2>1 g1<1 B1 reduce keep0 step F3@0 a3>1 g2<1 B2@0 F4 a4>1 g3<1 B3@0 drop0 reduce keep1 step F5@1 a5>1 g4<1 B4@1 g5<1 B5@1 drop1 reduce keep2 step
    a0<0 F0 B0 g0>0 a1<0 F1 B1 g1>0 reduce keep0 step a2<0 F2@0 B2@0 g2>0 a3<0 F3@0 B3@0 g3>0 drop0 reduce keep1 step a4<0 F4@1 B4@1 g4>0 a5<0 F5@1 B5@1 g5>0 drop1 reduce keep2 step
    ");
    insta::assert_snapshot!(ScheduleName::PipeDream.schedule(&ScheduleOptions::new(3, 4)).unwrap(), @"
    name pipedream
    micro-batches 4
    batches 1
    updates every-micro-batch
    pipeline 0 1 2
    F0 a0>1 F1 a1>1 F2 a2>1 g0<1 B0 reduce keep0 step F3 a3>1 g1<1 B1@0 reduce keep1 step g2<1 B2@0 drop0 reduce step g3<1 B3@1 drop1 reduce step
    a0<0 F0 a0>2 a1<0 F1 a1>2 g0<2 B0 g0>0 reduce keep0 step a2<0 F2 a2>2 g1<2 B1@0 g1>0 drop0 reduce keep1 step a3<0 F3 a3>2 g2<2 B2@1 g2>0 drop1 reduce keep2 step g3<2 B3@2 g3>0 drop2 reduce step
    a0<1 F0 B0 g0>1 reduce step a1<1 F1 B1 g1>1 reduce step a2<1 F2 B2 g2>1 reduce step a3<1 F3 B3 g3>1 reduce step
    ");
    insta::assert_snapshot!(ScheduleName::Interleaved.schedule(&ScheduleOptions::new(2, 2)).unwrap(), @"
    name interleaved
    micro-batches 2
    batches 1
    updates flush
    pipeline 0 1 0 1
    F0.0 a0.0>1 F1.0 a1.0>1 a0.1<1 F0.1 a0.1>1 a1.1<1 F1.1 a1.1>1 g0.1<1 B0.1 g0.1>1 g1.1<1 B1.1 g1.1>1 g0.0<1 B0.0 g1.0<1 B1.0 reduce.0 reduce.1 step
    a0.0<0 F0.0 a0.0>0 a1.0<0 F1.0 a1.0>0 a0.1<0 F0.1 B0.1 g0.1>0 a1.1<0 F1.1 B1.1 g1.1>0 g0.0<0 B0.0 g0.0>0 g1.0<0 B1.0 g1.0>0 reduce.0 reduce.1 step
    ");
    insta::assert_snapshot!(ScheduleName::Chimera.schedule(&ScheduleOptions::new(2, 2)).unwrap(), @"
    name chimera
    micro-batches 2
    batches 1
    updates flush
    pipeline 0 1 runs 0
    pipeline 1 0 runs 1
    F0 a0>1 a1<1 F1 B1 g1>1 reduce.1 g0<1 B0 reduce.0 step
    F1 a1>0 a0<0 F0 B0 g0>0 reduce.0 g1<0 B1 reduce.1 step
    ");
    insta::assert_snapshot!(ScheduleName::ZbH1.schedule(&ScheduleOptions::new(2, 2)).unwrap(), @"
    name zb-h1
    micro-batches 2
    batches 1
    updates flush
    pipeline 0 1
    F0 a0>1 F1 a1>1 g0<1 B0 W0 g1<1 B1 W1 reduce step
    a0<0 F0 B0 g0>0 a1<0 F1 B1 g1>0 W0 W1 reduce step
    ");
}

/// A placement that none of ours has: the model goes down the ranks and comes back (ZB-V's), so that the
/// first rank holds both ends.
#[test]
fn a_schedule_of_ones_own() {
    let schedule = read(
        "# down and up again
         name there-and-back
         pipeline 0 1 1 0
         F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0 # both ends
         F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0",
    );
    assert_eq!((schedule.name.as_str(), schedule.micro_batches), ("there-and-back", 2));
    let timeline = walk(&schedule, 1.0, 2.0);
    assert_eq!(timeline.in_flight, [3, 4]);
    // A chunk takes half of a rank's forward and backward.
    assert_eq!(timeline.end, 8.0);
}

#[test]
fn lists_that_deadlock_or_break_the_rules() {
    insta::assert_snapshot!(refused("F0 F1 B1 B0\nF0 B0 F1 B1"), @"rank 0, action 5 (`g1<1`): the peer sends another message first");
    insta::assert_snapshot!(refused("F0 B0 F1 B1\nF0 F1 B0 B1"), @"deadlock: rank 0 waits at `g0<1`, rank 1 waits at `a1<0`");
    insta::assert_snapshot!(refused("F0 B0 F1 B1\nF1 B1 F0 B0"), @"rank 1, action 1 (`a1<0`): the peer sends another message first");
    insta::assert_snapshot!(refused("F0 F1 B0\nF0 B0 F1 B1"), @"rank 0, action 8 (`step`): it is for micro-batches [0, 1], but chunk 0 has the gradients of [0]");
    insta::assert_snapshot!(refused("B0 F0"), @"rank 0, action 1 (`B0`): its forward has not run");
    insta::assert_snapshot!(refused("F0 F0 B0"), @"rank 0, action 2 (`F0`): it has run already");
    insta::assert_snapshot!(refused("F0 W0 B0"), @"rank 0, action 2 (`W0`): its input half has not run");
    insta::assert_snapshot!(refused("F0 B0 step"), @"rank 0, action 3 (`step`): the gradients of chunk 0 were not reduced");
    insta::assert_snapshot!(refused("F0 reduce B0 step"), @"rank 0, action 3 (`B0`): its gradients come after their all-reduce");
    insta::assert_snapshot!(refused("F0 F1 B0 reduce step B1 reduce step"), @"rank 0, action 5 (`step`): it is for micro-batches [0, 1], but chunk 0 has the gradients of [0]");
    insta::assert_snapshot!(refused("updates free\nF0 F1 B0 reduce step B1 reduce step"), @"rank 0, action 6 (`B1`): its forward used version 0, this uses 1");
    insta::assert_snapshot!(refused("updates free\nF0 F1 B0 reduce step B1@0 reduce step"), @"rank 0, action 6 (`B1`): version 0 of the weights is not there");
    insta::assert_snapshot!(refused("updates free\nF0 F1 B0 keep0 reduce step drop0 B1@0 reduce step"), @"rank 0, action 7 (`drop0`): a micro-batch in flight still needs it");
    insta::assert_snapshot!(refused("updates every-micro-batch\nF0 F1 B0 B1 reduce step"), @"rank 0, action 6 (`step`): it is for one micro-batch, but chunk 0 has the gradients of [0, 1]");
    insta::assert_snapshot!(refused("updates double-buffered\nF0 B0 reduce step"), @"rank 0 at its end: kept versions should be [0], but are []");
    insta::assert_snapshot!(refused("F0 F1 B0 B1\nF0 a0>0 F1 B0 B1"), @"rank 0, action 3 (`B0`): the gradient of its output has not arrived");
    insta::assert_snapshot!(refused("F0 a0>1 g0<1 B0\na0<0 F0 B0 g0>0 g0>0"), @"rank 1, action 5 (`g0>0`): it was sent already");
    insta::assert_snapshot!(refused("F0 a0>1 a0>1 g0<1 B0\na0<0 F0 B0 g0>0"), @"rank 0, action 3 (`a0>1`): it was sent already");
    insta::assert_snapshot!(refused("F0 a0>1 B0\na0<0 F0 B0 g0>0"), @"rank 0, action 3 (`B0`): the gradient of its output has not arrived");
    insta::assert_snapshot!(refused("F0 a0>2 g0<1 B0\na0<0 F0 B0 g0>0"), @"rank 0, action 2 (`a0>2`): stage 1 is on rank 1");
    insta::assert_snapshot!(refused("micro-batches 1\nF0 B0 F1 B1"), @"rank 0, action 5 (`F1`): the last micro-batch is 0");
    insta::assert_snapshot!(refused("pipeline 0 1 runs 0\npipeline 1 0 runs 1\nF0 B0 F1.0 B1\nF0 B0 F1 B1"), @"rank 0, action 5 (`F1.0`): the micro-batch goes through pipeline 1");
}

/// The executor takes messages as they come only where that says what to run.
#[test]
fn lists_that_arrivals_cannot_drive() {
    insta::assert_snapshot!(refused("message-driven\nF0 F1 B0 W0 B1 W1\nF0 B0 W0 F1 B1 W1"), @"message-driven ranks need full backward passes, but of rank 0 `B0` is half of one");
    insta::assert_snapshot!(refused("message-driven\npipeline 0 1 1 0\nF0.0 F0.1 B0.1 B0.0\nF0.0 F0.1 B0.1 B0.0"), @"message-driven ranks need one pipeline with a stage on each rank, in order, but the pipeline is 0 1 1 0");
    insta::assert_snapshot!(refused("message-driven\npipeline 0 1 runs 0\npipeline 1 0 runs 1\nF0 F1 B1 B0\nF1 F0 B0 B1"), @"message-driven ranks need one pipeline with a stage on each rank, in order, but there are 2 pipelines");
    insta::assert_snapshot!(refused("message-driven\npipeline 1 0\nF0 B0\nF0 B0"), @"message-driven ranks need one pipeline with a stage on each rank, in order, but the pipeline is 1 0");
    read("message-driven\nF0 F1 B0 B1\nF0 B0 F1 B1");
}

#[test]
fn files_that_cannot_be_read() {
    insta::assert_snapshot!(refused(""), @"line 1: there is no line of actions, such as `F0 F1 B0 B1`");
    insta::assert_snapshot!(refused("F0 B0\n\nF0 b0"), @"line 3: `b0` is no action and no setting; actions are F0, B0, W0, a0>1, a0<1, g0>1, g0<1, reduce, step, keep0 and drop0");
    insta::assert_snapshot!(refused("microbatches 4\nF0 B0"), @"line 1: `microbatches` is no action and no setting; did you mean `micro-batches`?");
    insta::assert_snapshot!(refused("F0 B+0"), @"line 1: `B+0` is no action and no setting; actions are F0, B0, W0, a0>1, a0<1, g0>1, g0<1, reduce, step, keep0 and drop0");
    insta::assert_snapshot!(refused("batches 0\nF0 B0"), @"line 1: `0` is not a number above 0");
    insta::assert_snapshot!(refused("name a\nname b\nF0 B0"), @"line 2: `name` is given twice");
    insta::assert_snapshot!(refused("name a b\nF0 B0"), @"line 1: `name` takes one value");
    insta::assert_snapshot!(refused("updates flsh\nF0 B0"), @"line 1: `updates` is one of flush, every-micro-batch, double-buffered, free, not `flsh`; did you mean `flush`?");
    insta::assert_snapshot!(refused("batches 2\nF0 B0"), @"line 1: the lines have 1 micro-batches, which 2 batches cannot split evenly");
    insta::assert_snapshot!(refused("F0.0 F0 B0.1 B0.0"), @"line 1: `F0` must say in which chunk, as in `F0.0`");
    insta::assert_snapshot!(refused("pipeline 0\nF0.1 B0.1"), @"line 2: `F0.1`: rank 0 has no such chunk");
    insta::assert_snapshot!(refused("pipeline\nF0 B0"), @"line 1: a pipeline is written `pipeline 0 1 2 runs 0 1`: the rank of every stage, and with several pipelines, the micro-batches of a batch that it runs");
    insta::assert_snapshot!(refused("pipeline 0 runs 3\nF0 B0"), @"pipeline 0 runs micro-batch 3, but a batch has 1");
    insta::assert_snapshot!(refused("pipeline 0 1\npipeline 1 0\nF0 B0\nF0 B0"), @"pipeline 0 does not list the micro-batches that it runs");
    insta::assert_snapshot!(refused("pipeline 0 1 runs 0\npipeline 1 0 runs 0\nF0 B0\nF0 B0"), @"micro-batch 0 is run by two pipelines");
    insta::assert_snapshot!(refused("micro-batches 2\npipeline 0 1 runs 0\nF0 B0\nF0 B0"), @"no pipeline runs micro-batch 1");
    insta::assert_snapshot!(refused("F99999999999 B0"), @"a schedule of 100000000000 forwards is too long: the most is 1048576");
    insta::assert_snapshot!(refused("F0.99999999 B0.0"), @"a schedule of 100000000 forwards is too long: the most is 1048576");
    insta::assert_snapshot!(refused("F99999999999999999999 B0"), @"line 1: `F99999999999999999999` is no action and no setting; actions are F0, B0, W0, a0>1, a0<1, g0>1, g0<1, reduce, step, keep0 and drop0");
}

const ACTIONS: [&str; 24] = [
    "F0", "F1", "F2.1", "F1@1", "B0", "B1", "B0.1", "B9", "W0", "W1", "a0>1", "a0<0", "a1>0", "a1.1>1",
    "g0>0", "g0<1", "g1<1", "g1.0>1", "reduce", "reduce.1", "reduce.7", "step", "keep0", "drop0",
];
const LINES: [&str; 12] = [
    "\n",
    "\n",
    "\nname",
    "\nbatches 2",
    "\nmicro-batches 2",
    "\nupdates free",
    "\nupdates double-buffered",
    "\npipeline 0 1",
    "\npipeline 1 0",
    "runs 0",
    "\nmessage-driven",
    "#",
];

proptest! {
    /// Whatever a file says, the answer is a schedule or a sentence; and what passes the check can be walked.
    #[test]
    fn no_file_is_too_strange(words in prop::collection::vec(prop::sample::select([&ACTIONS[..], &LINES].concat()), 0..40)) {
        if let Ok(schedule) = Schedule::parse(&words.join(" ")) {
            if schedule.validate().is_ok() {
                walk(&schedule, 1.0, 2.0);
            }
            prop_assert_eq!(Schedule::parse(&schedule.to_string()).unwrap().to_string(), schedule.to_string());
        }
    }
}
