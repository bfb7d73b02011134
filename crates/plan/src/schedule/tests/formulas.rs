//! Bubble, micro-batches in flight and weight versions against the formulas of the papers.
//!
//! p stages, m micro-batches, s the stage from 0, v chunks a rank; F and B the times of a forward and a backward.

use proptest::prelude::*;

use super::*;

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9 * a.abs().max(b.abs()).max(1.0)
}

/// The figures with a backward of twice a forward, and with both equal.
fn reports(name: ScheduleName, options: &ScheduleOptions) -> [(ScheduleReport, f64, f64); 2] {
    [(1.0, 2.0), (1.0, 1.0)].map(|(forward, backward)| {
        let options = ScheduleOptions { units: PassUnits { forward, backward }, ..*options };
        (ScheduleReport::of(name, &options).unwrap().2, forward, backward)
    })
}

/// Runs a check on every choice of a schedule.
fn each(name: ScheduleName, check: impl Fn(&ScheduleOptions, &ScheduleReport, f64, f64) -> bool) {
    let mut tried = 0;
    // The figures of a full pipeline are taken from lists of as many micro-batches as it has stages at most.
    let is_flushed = name.updates() == Updates::Flush || espalier_testing::long();
    let tried_here = grid().filter(|(p, m)| is_flushed || *m <= p + 1 || *m == 24);
    for options in tried_here.flat_map(|(p, m)| choices(name, p, m)) {
        for (report, forward, backward) in reports(name, &options) {
            tried += 1;
            assert!(check(&options, &report, forward, backward), "{name}: {options:?}\n{report:?}");
        }
    }
    assert!(tried > 40, "{tried} choices of {name}");
}

fn by_stage(stages: usize, f: impl Fn(usize) -> usize) -> Vec<usize> {
    (0..stages).map(f).collect()
}

/// (p - 1) / (m + p - 1), which is (p - 1) (F + B) on every rank.
fn has_the_flush_bubble(options: &ScheduleOptions, report: &ScheduleReport, f: f64, b: f64) -> bool {
    let (p, m) = (options.stages as f64, options.micro_batches as f64);
    close(report.bubble_ratio, (p - 1.0) / (m + p - 1.0))
        && report.idle.iter().all(|&idle| close(idle, (p - 1.0) * (f + b)))
}

#[test]
fn gpipe() {
    each(ScheduleName::Gpipe, |options, report, f, b| {
        has_the_flush_bubble(options, report, f, b)
            && report.in_flight == vec![options.micro_batches; options.stages]
            && report.weight_versions == vec![1; options.stages]
    });
}

#[test]
fn one_f_one_b() {
    each(ScheduleName::OneFOneB, |options, report, f, b| {
        let &ScheduleOptions { stages: p, micro_batches: m, .. } = options;
        has_the_flush_bubble(options, report, f, b)
            && report.in_flight == by_stage(p, |s| m.min(p - s))
            && report.held == report.in_flight
            && report.weight_versions == vec![1; p]
    });
}

#[test]
fn interleaved() {
    each(ScheduleName::Interleaved, |options, report, f, b| {
        let &ScheduleOptions { stages: p, micro_batches: m, .. } = options;
        let v = options.chunks.unwrap();
        let ideal = m as f64 * (f + b);
        let fraction = (p as f64 - 1.0) / (v * m) as f64;
        report.idle.iter().all(|&idle| close(idle / ideal, fraction))
            && report.in_flight == by_stage(p, |s| (2 * (p - 1 - s) + (v - 1) * p + 1).min(m * v))
            && report.weight_versions == vec![1; p]
    });
}

/// What a schedule without flush costs once is the flush of 1F1B.
fn fills_and_drains_once(options: &ScheduleOptions, report: &ScheduleReport, f: f64, b: f64) -> bool {
    let once = (options.stages - 1) as f64 * (f + b);
    let is_once = |&fill: &f64| close(fill, once);
    options.micro_batches < options.stages || report.fill_and_drain.as_ref().unwrap().iter().all(is_once)
}

#[test]
fn pipedream() {
    each(ScheduleName::PipeDream, |options, report, f, b| {
        let p = options.stages;
        fills_and_drains_once(options, report, f, b)
            && report.bubble_ratio == 0.0
            && report.in_flight == by_stage(p, |s| p - s)
            && report.weight_versions == by_stage(p, |s| p - s)
    });
}

#[test]
fn two_bw() {
    each(ScheduleName::TwoBw, |options, report, f, b| {
        let &ScheduleOptions { stages: p, micro_batches: m, .. } = options;
        fills_and_drains_once(options, report, f, b)
            && (m < p || report.bubble_ratio == 0.0)
            && report.in_flight == by_stage(p, |s| (p - s).min(2 * m))
            && report.weight_versions == vec![2; p]
    });
}

/// (p - 1) (F + B - W) idle, B and W being the halves, and the peak of 1F1B. It takes p micro-batches to fill the
/// drain with. It never takes longer than 1F1B.
#[test]
fn zb_h1() {
    each(ScheduleName::ZbH1, |options, report, f, b| {
        let &ScheduleOptions { stages: p, micro_batches: m, .. } = options;
        let idle = (p - 1) as f64 * f;
        let total = m as f64 * (f + b) + idle;
        let units = PassUnits { forward: f, backward: b };
        let unsplit = ScheduleOptions { units, ..*options };
        let (_, _, unsplit) = ScheduleReport::of(ScheduleName::OneFOneB, &unsplit).unwrap();
        (m < p || (close(report.bubble_ratio, idle / total) && report.idle.iter().all(|&i| close(i, idle))))
            && report.in_flight == by_stage(p, |s| m.min(p - s))
            && report.held.iter().all(|&held| held <= p)
            && report.held[0] == m.min(p)
            && report.time <= unsplit.time + 1e-9
            && report.weight_versions == vec![1; p]
    });
}

/// In slots of equal length: (D - 2f) / (2f N + D - 2f) where D divides N. With a backward of twice a forward, N = D
/// and two pipelines: (D - 2) / (3N/2 + D - 2).
#[test]
fn chimera() {
    each(ScheduleName::Chimera, |options, report, f, b| {
        let &ScheduleOptions { stages: d, micro_batches: n, .. } = options;
        let pipelines = options.pipelines.unwrap();
        let bubbles = (d - pipelines) as f64;
        let formula = bubbles / ((pipelines * n) as f64 + bubbles);
        let full_units = n % d == 0;
        let one_long_unit = n == d && pipelines == 2 && b == 2.0 * f;
        let between = |&in_flight: &usize| in_flight > d / 2 && in_flight <= d;
        (!full_units || f != b || close(report.bubble_ratio, formula))
            && (!one_long_unit || close(report.bubble_ratio, bubbles / (1.5 * d as f64 + bubbles)))
            && (!full_units || pipelines > 2 || report.in_flight.iter().all(between))
            && report.in_flight.iter().all(|&in_flight| in_flight <= d)
            && report.weight_versions == vec![1; d]
            && report.copies == pipelines
    });
}

/// Where a backward takes twice as long as a forward and 2D divides N, the bubble that Chimera has in slots
/// of equal length; and D micro-batches more in flight.
#[test]
fn chimera_doubling() {
    each(ScheduleName::ChimeraDoubling, |options, report, f, b| {
        let &ScheduleOptions { stages: d, micro_batches: n, .. } = options;
        let pipelines = options.pipelines.unwrap();
        let bubbles = (d - pipelines) as f64;
        let formula = bubbles / ((pipelines * n) as f64 + bubbles);
        let full_units = n % (2 * d) == 0;
        let (_, _, plain) = ScheduleReport::of(ScheduleName::Chimera, options).unwrap();
        let more: Vec<usize> = plain.in_flight.iter().map(|in_flight| in_flight + d).collect();
        (!full_units || b != 2.0 * f || close(report.bubble_ratio, formula))
            && (!full_units || report.in_flight == more)
            && report.in_flight.iter().all(|&in_flight| in_flight <= 2 * d)
            && (b != 2.0 * f || report.time <= plain.time)
            && report.weight_versions == vec![1; d]
            && report.copies == pipelines
    });
}

#[test]
fn axonn() {
    each(ScheduleName::Axonn, |options, report, f, b| {
        let p = options.stages;
        has_the_flush_bubble(options, report, f, b)
            && report.in_flight.iter().all(|&in_flight| in_flight <= p)
            && report.weight_versions == vec![1; p]
            && report.message_driven
    });
}

/// Message-driven and by 1F1B, on stages of different lengths.
fn uneven(lengths: &[f64], micro_batches: usize) -> (Timeline, Timeline) {
    let options = ScheduleOptions::new(lengths.len(), micro_batches);
    let time = |rank: usize, pass| if pass == Pass::Forward { lengths[rank] } else { 2.0 * lengths[rank] };
    let costs =
        ActionCosts(|rank, action: &Action| action.compute().map_or(0.0, |(pass, _)| time(rank, pass)));
    let driven = message_driven(&options, time).unwrap();
    driven.validate().unwrap();
    let fixed = ScheduleName::OneFOneB.schedule(&options).unwrap();
    (Timeline::walk(&driven, &costs).unwrap(), Timeline::walk(&fixed, &costs).unwrap())
}

/// What makes AxoNN's order worth having; it is no law.
#[test]
fn taking_what_has_arrived_helps_uneven_stages_more_often_than_it_hurts() {
    let (mut faster, mut slower) = (0, 0);
    for index in 0..81 {
        let lengths = [index / 27, index / 9 % 3, index / 3 % 3, index % 3].map(|n| f64::from(n + 1));
        let (driven, fixed) = uneven(&lengths, 8);
        faster += usize::from(driven.end < fixed.end);
        slower += usize::from(driven.end > fixed.end);
    }
    assert_eq!((faster, slower), (18, 1), "of 81");
    let (driven, fixed) = uneven(&[1.0, 3.0, 2.0], 4);
    assert_eq!((driven.end, fixed.end), (39.0, 42.0));
}

proptest! {
    #[test]
    fn message_driven_orders_are_valid_whatever_the_stages_take(
        lengths in prop::collection::vec(1u8..=8, 1..=8),
        micro_batches in 1usize..=24,
    ) {
        let lengths: Vec<f64> = lengths.into_iter().map(f64::from).collect();
        let (driven, _) = uneven(&lengths, micro_batches);
        prop_assert!(driven.in_flight.iter().all(|&in_flight| in_flight <= lengths.len()));
    }
}
