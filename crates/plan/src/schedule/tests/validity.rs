//! Every list can be run; and a list that has been tampered with cannot.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

#[test]
fn every_schedule_is_valid_for_one_batch_and_for_three() {
    let mut tried = 0;
    for (name, options) in everything() {
        for batches in [1, 3] {
            let schedule = name.schedule(&ScheduleOptions { batches, ..options }).unwrap();
            schedule
                .validate()
                .unwrap_or_else(|error| panic!("{name}, {options:?}, {batches} batches: {error}"));
            let forwards =
                schedule.ranks.iter().flatten().filter(|a| matches!(a, Action::Forward(_))).count();
            let chunks = options.chunks.unwrap_or(1);
            assert_eq!(forwards, options.stages * options.micro_batches * batches * chunks);
            tried += 1;
        }
    }
    assert!(tried > if espalier_testing::long() { 2500 } else { 1500 }, "{tried}");
}

/// Nothing in a list is there for nothing, and the check sees all of it.
#[test]
fn a_list_without_any_one_of_its_actions_is_not_valid() {
    for name in ScheduleName::ALL {
        for (stages, micro_batches, batches) in [(4, 8, 1), (4, 4, 2), (2, 2, 3)] {
            let schedule = name
                .schedule(&ScheduleOptions { batches, ..ScheduleOptions::new(stages, micro_batches) })
                .unwrap();
            for rank in 0..stages {
                for position in 0..schedule.ranks[rank].len() {
                    let mut broken = schedule.clone();
                    let gone = broken.ranks[rank].remove(position);
                    let gone = schedule.token(rank, &gone);
                    assert!(broken.validate().is_err(), "{name} without {gone} on rank {rank} at {position}");
                }
            }
        }
    }
}

#[test]
fn a_list_with_any_one_of_its_actions_twice_is_not_valid() {
    for name in ScheduleName::ALL {
        let schedule = name.schedule(&ScheduleOptions { batches: 2, ..ScheduleOptions::new(4, 4) }).unwrap();
        for rank in 0..4 {
            for position in 0..schedule.ranks[rank].len() {
                let mut broken = schedule.clone();
                let action = broken.ranks[rank][position];
                broken.ranks[rank].insert(position, action);
                let twice = schedule.token(rank, &action);
                assert!(broken.validate().is_err(), "{name} with {twice} twice on rank {rank}");
            }
        }
    }
}

/// The definitions, rather than the lists: which version each pass uses.
#[test]
fn passes_use_the_versions_that_the_papers_define() {
    for (p, m) in grid() {
        let options = ScheduleOptions { batches: 4, ..ScheduleOptions::new(p, m) };
        for name in [ScheduleName::OneFOneB, ScheduleName::TwoBw, ScheduleName::PipeDream] {
            let version = |s: usize, k: usize| match name {
                ScheduleName::OneFOneB => k / m,
                ScheduleName::TwoBw => (k / m).saturating_sub(1),
                _ => (k + 1).saturating_sub(p - s),
            };
            let schedule = name.schedule(&options).unwrap();
            for (stage, list) in schedule.ranks.iter().enumerate() {
                for (_, work) in list.iter().filter_map(Action::compute) {
                    assert_eq!(
                        work.version,
                        version(stage, work.micro_batch),
                        "{name}, {p} stages, {m}: {work:?}"
                    );
                }
            }
        }
    }
}

/// A sum in floating point depends on its order: all schedules add up a chunk's gradients as one device does.
#[test]
fn gradients_are_added_in_the_order_of_the_micro_batches() {
    for (name, options) in everything() {
        let schedule = name.schedule(&options).unwrap();
        for (rank, list) in schedule.ranks.iter().enumerate() {
            for (index, chunk) in schedule.placement.chunks(rank).iter().enumerate() {
                let weights = |a: &Action| matches!(a, Action::Backward(_) | Action::BackwardWeight(_));
                let works = list.iter().filter(|a| weights(a)).filter_map(|a| Some(a.compute()?.1));
                let order: Vec<usize> = works.filter(|w| w.chunk == index).map(|w| w.micro_batch).collect();
                let expected: Vec<usize> = schedule.placement.routed(chunk.pipeline).collect();
                assert_eq!(order, expected, "{name}: {options:?}");
            }
        }
    }
}

#[test]
fn tags_are_the_same_at_both_ends_and_nowhere_else() {
    for (name, options) in everything().filter(|(_, options)| options.micro_batches <= 8) {
        let schedule = name.schedule(&ScheduleOptions { batches: 2, ..options }).unwrap();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (rank, list) in schedule.ranks.iter().enumerate() {
            for action in list {
                let tag = schedule.tag(rank, action);
                match *action {
                    Action::Send(StageMessage { peer, .. })
                    | Action::SendControl(ControlMessage { peer, .. }) => {
                        sent.push((rank, peer, tag.unwrap()));
                    }
                    Action::Receive(StageMessage { peer, .. })
                    | Action::RecvControl(ControlMessage { peer, .. }) => {
                        received.push((peer, rank, tag.unwrap()));
                    }
                    _ => assert_eq!(tag, None),
                }
            }
        }
        sent.sort_unstable();
        received.sort_unstable();
        assert_eq!(sent, received);
        assert!(sent.windows(2).all(|pair| pair[0] < pair[1]), "{name}: a tag twice between two ranks");
    }
}

#[test]
fn options_that_cannot_be() {
    let refused =
        |name: ScheduleName, options: ScheduleOptions| name.schedule(&options).unwrap_err().to_string();
    let plain = ScheduleOptions::new(4, 8);
    insta::assert_snapshot!("1fb1".parse::<ScheduleName>().unwrap_err(), @"`1fb1` is not a schedule: there are gpipe, 1f1b, interleaved, pipedream, 2bw, chimera, chimera-doubling, zb-h1, axonn; did you mean `1f1b`?");
    insta::assert_snapshot!(refused(ScheduleName::Gpipe, ScheduleOptions::new(0, 8)), @"gpipe needs at least 1 stage, got 0");
    insta::assert_snapshot!(refused(ScheduleName::Gpipe, ScheduleOptions::new(4, 0)), @"gpipe needs at least 1 micro-batch, got 0");
    insta::assert_snapshot!(refused(ScheduleName::Axonn, ScheduleOptions { batches: 0, ..plain }), @"axonn needs at least 1 batch, got 0");
    insta::assert_snapshot!(refused(ScheduleName::Chimera, ScheduleOptions::new(3, 8)), @"chimera needs an even number of stages, got 3");
    insta::assert_snapshot!(refused(ScheduleName::ChimeraDoubling, ScheduleOptions::new(3, 8)), @"chimera-doubling needs an even number of stages, got 3");
    insta::assert_snapshot!(refused(ScheduleName::Chimera, ScheduleOptions { pipelines: Some(3), ..plain }), @"chimera needs an even number of pipelines, as many down as up, got 3");
    insta::assert_snapshot!(refused(ScheduleName::Chimera, ScheduleOptions { pipelines: Some(8), ..plain }), @"chimera needs a number of pipelines that divides the 4 stages, got 8");
    insta::assert_snapshot!(refused(ScheduleName::Interleaved, ScheduleOptions::new(4, 6)), @"interleaved needs micro-batches in a multiple of the 4 stages, got 6");
    insta::assert_snapshot!(refused(ScheduleName::Interleaved, ScheduleOptions { chunks: Some(1), ..plain }), @"interleaved needs at least 2 chunks a rank (with 1 it is 1f1b), got 1");
    insta::assert_snapshot!(refused(ScheduleName::OneFOneB, ScheduleOptions { chunks: Some(2), ..plain }), @"chunks have no effect on 1f1b: only interleaved has them");
    insta::assert_snapshot!(refused(ScheduleName::OneFOneB, ScheduleOptions { pipelines: Some(2), ..plain }), @"pipelines have no effect on 1f1b: only chimera has them");
    let units = PassUnits { forward: 0.0, backward: f64::NAN };
    insta::assert_snapshot!(refused(ScheduleName::ZbH1, ScheduleOptions { units, ..plain }), @"a forward takes between 0.001 and 1000000 units, got 0");
    insta::assert_snapshot!(refused(ScheduleName::ZbH1, ScheduleOptions { units: PassUnits { forward: 1.0, ..units }, ..plain }), @"a backward takes between 0.001 and 1000000 units, got NaN");
    insta::assert_snapshot!(refused(ScheduleName::Gpipe, ScheduleOptions::new(usize::MAX, usize::MAX)), @"a schedule of 340282366920938463426481119284349108225 forwards is too long: the most is 1048576");
}

/// Whether in time, too, nothing starts before what it needs has ended: said apart from the check of the lists.
fn in_time(schedule: &Schedule) -> Result<(), String> {
    let timeline = walk(schedule, 1.0, 2.0);
    let mut ends: HashMap<(bool, usize, usize), f64> = HashMap::new();
    let mut starts = Vec::new();
    for (rank, spans) in timeline.spans.iter().enumerate() {
        for span in spans {
            let Some((pass, work)) = span.action.compute() else { continue };
            let virtual_stage = schedule.placement.chunks(rank)[work.chunk].virtual_stage;
            if pass != Pass::BackwardWeight {
                ends.insert((pass == Pass::Forward, work.micro_batch, virtual_stage), span.end);
            }
            starts.push((pass, work.micro_batch, virtual_stage, span.start));
        }
    }
    for (pass, k, virtual_stage, start) in starts {
        let after = |forward, virtual_stage| match ends.get(&(forward, k, virtual_stage)) {
            Some(&end) if end <= start => Ok(()),
            end => Err(format!(
                "{pass:?} {k} of virtual stage {virtual_stage} at {start}, but what it needs ends at {end:?}"
            )),
        };
        match pass {
            Pass::Forward if virtual_stage > 0 => after(true, virtual_stage - 1)?,
            Pass::Forward => {}
            Pass::BackwardWeight => after(false, virtual_stage)?,
            Pass::Backward | Pass::BackwardInput => {
                after(true, virtual_stage)?;
                if virtual_stage + 1 < schedule.placement.virtual_stages() {
                    after(false, virtual_stage + 1)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn nothing_starts_before_what_it_needs() {
    for (name, options) in everything() {
        let schedule = name.schedule(&ScheduleOptions { batches: 2, ..options }).unwrap();
        in_time(&schedule).unwrap_or_else(|problem| panic!("{name}, {options:?}: {problem}"));
    }
}

/// The virtual stages that a rank all-reduces in a batch, in order, each with the passes that follow it.
fn all_reduces(schedule: &Schedule, rank: usize) -> Vec<(usize, usize)> {
    let list = &schedule.ranks[rank];
    let found = list.iter().enumerate().filter_map(|(position, action)| match action {
        Action::AllReduce { chunk } => {
            let left = list[position..].iter().filter(|action| action.compute().is_some()).count();
            Some((schedule.placement.chunks(rank)[*chunk].virtual_stage, left))
        }
        _ => None,
    });
    found.collect()
}

/// Ranks that have both stages reach their all-reduces in one order, whatever is left of a batch behind full
/// units; where all pipelines have as many micro-batches, the stage that is complete first is all-reduced
/// while each rank still computes the other.
#[test]
fn chimera_all_reduces_eagerly_and_in_one_order() {
    for name in [ScheduleName::Chimera, ScheduleName::ChimeraDoubling] {
        for (stages, micro_batches) in
            [(2, 1), (2, 2), (2, 5), (4, 4), (4, 6), (4, 7), (8, 8), (8, 16), (8, 19)]
        {
            let schedule = name.schedule(&ScheduleOptions::new(stages, micro_batches)).unwrap();
            schedule.validate().unwrap();
            for rank in 0..stages / 2 {
                let (one, other) = (all_reduces(&schedule, rank), all_reduces(&schedule, stages - 1 - rank));
                let case = format!("{name}, {stages} x {micro_batches}, rank {rank}");
                let virtual_stages =
                    |sums: &[(usize, usize)]| sums.iter().map(|(stage, _)| *stage).collect::<Vec<_>>();
                assert_eq!(virtual_stages(&one), virtual_stages(&other), "{case}");
                if micro_batches % 2 == 0 {
                    assert!(one[0].1 > 0 && other[0].1 > 0, "{case}");
                    assert_eq!((one[1].1, other[1].1), (0, 0), "{case}");
                }
            }
        }
    }
}

/// An all-reduce that passes follow takes no time of its rank, unless it is not over when the step waits for it.
#[test]
fn all_reduces_that_passes_follow_are_hidden_in_time() {
    let schedule = ScheduleName::Chimera.schedule(&ScheduleOptions::new(2, 2)).unwrap();
    let end = |sum: f64| {
        let costs = ActionCosts(|_, action: &Action| match (action.compute(), action) {
            (Some((Pass::Forward, _)), _) => 1.0,
            (Some(_), _) => 2.0,
            (None, Action::AllReduce { .. }) => sum,
            _ => 0.0,
        });
        Timeline::walk(&schedule, &costs).unwrap().end
    };
    // Two forwards, two backwards, and the second all-reduce: the first runs beside the second backward, of
    // two units.
    assert_eq!([end(0.0), end(1.0), end(2.0), end(5.0)], [6.0, 7.0, 8.0, 14.0]);
}

proptest! {
    /// Actions in another order are refused, or still do things in time.
    #[test]
    fn two_actions_swapped(index in 0usize..8, rank in 0usize..4, a in 0usize..60, distance in 1usize..6) {
        let mut schedule = ScheduleName::ALL[index].schedule(&ScheduleOptions::new(4, 4)).unwrap();
        let length = schedule.ranks[rank].len();
        schedule.ranks[rank].swap(a % length, (a + distance) % length);
        if schedule.validate().is_ok() {
            prop_assert_eq!(in_time(&schedule), Ok(()));
        }
    }

    /// Ideal time is only the simplest case: no choice of costs makes a valid list stop, and a journey only
    /// delays.
    #[test]
    fn any_costs_can_be_walked(
        index in 0usize..8,
        stages in 1usize..=8,
        micro_batches in 1usize..=24,
        passes in prop::collection::vec(0.1f64..9.0, 8),
        journey in 0.0f64..5.0,
    ) {
        let Some(options) = choices(ScheduleName::ALL[index], stages, micro_batches).pop() else { return Ok(()) };
        let schedule = ScheduleName::ALL[index].schedule(&options).unwrap();
        let near = Timeline::walk(&schedule, &Costly { passes: &passes, journey: 0.0 }).unwrap();
        let far = Timeline::walk(&schedule, &Costly { passes: &passes, journey }).unwrap();
        prop_assert!(far.end >= near.end - 1e-9);
        for rank in 0..stages {
            let busy: f64 = schedule.ranks[rank].iter().map(|a| Costly { passes: &passes, journey }.busy(rank, a)).sum();
            prop_assert!((far.end - far.idle[rank] - busy).abs() < 1e-6);
            prop_assert!(far.spans[rank].windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}

/// Passes that take a time of their rank, and messages that travel.
struct Costly<'a> {
    passes: &'a [f64],
    journey: f64,
}

impl Costs for Costly<'_> {
    fn busy(&self, rank: usize, action: &Action) -> f64 {
        action.compute().map_or(0.0, |_| self.passes[rank])
    }

    fn journey(&self, _from: usize, _send: &Action) -> f64 {
        self.journey
    }
}
