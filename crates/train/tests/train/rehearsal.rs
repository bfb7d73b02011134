//! A planned step against ranks that sleep for the planned time: the executor, its messages and the sink of
//! training are those of a run. So what is planned of order, waiting and hiding is compared with the clock;
//! `benches/planner.rs` has the long form.
//!
//! Others on the machine only ever make a step longer, so a layout gets more steps until it is as short as
//! planned, up to a limit.

use espalier_plan::cluster::Cluster;

use crate::paced::of_plan::{SLOW, compare, plan};

const GPT: &str = "[model]\nname = \"gpt\"\nlayers = 4\nwidth = 64\nheads = 16\ncontext = 32\n";
const CNN: &str = "[model]\nname = \"resnet8\"\n";
/// Steps of a round, and rounds at most.
const STEPS: usize = 2;
const ROUNDS: usize = 40;

/// Every axis by itself and two pairs. A step that sleeps cannot be shorter than it was planned, but for what
/// is planned wrongly; nor, left alone, much longer.
#[test]
fn steps_take_the_planned_time() {
    let cluster = Cluster::parse(SLOW).unwrap();
    let layouts = [
        (GPT, [4, 1, 1, 1]),
        (GPT, [1, 4, 1, 1]),
        (GPT, [1, 1, 4, 1]),
        (GPT, [2, 2, 1, 1]),
        (CNN, [1, 1, 1, 4]),
        (CNN, [1, 1, 2, 2]),
    ];
    for (model, layout) in layouts {
        let plan = plan(model, layout, 8, 4 / layout[0]).unwrap();
        let mut ratio = f64::INFINITY;
        for _ in 0..ROUNDS {
            let compared = compare(&plan, &cluster, STEPS).unwrap();
            ratio = ratio.min(compared.measured / compared.predicted);
            if ratio < 1.15 {
                break;
            }
        }
        assert!((0.9..1.3).contains(&ratio), "{layout:?}: a step took {ratio:.3} of what was planned");
    }
}
