//! What a step implies, added once for all schedules: waiting for the all-reduces of its gradients, and agreeing
//! whether it is taken. Lines of text say `step` for all of it.
//!
//! Where a flush ends a batch, all ranks agree in one all-reduce. Where none does, nobody may wait for a rank
//! that is behind it in time, so stages send each other what they found. The verdict on an update takes the
//! route of its gradients, from each stage to the one before; a stage of PipeDream, whose new weights are
//! needed at once, takes it for what it is. Of 2BW, whose new weights nobody needs for a batch, the first
//! stage sends all others the decision, and they defer the update until then. The last stage sends the totals
//! of a batch to the first; at the end of a list nothing is in flight, and all settle what the first has
//! counted in one all-reduce, a maximum.

use super::{Action, ControlKind, ControlMessage, Placement, Updates};

/// Puts what steps imply into lists that have none of it.
pub(super) fn fill_in(
    placement: &Placement,
    updates: Updates,
    micro_batches: usize,
    lists: Vec<Vec<Action>>,
) -> Vec<Vec<Action>> {
    let each = match updates {
        Updates::EveryMicroBatch => micro_batches,
        Updates::DoubleBuffered => 1,
        Updates::Flush | Updates::Free => 0,
    };
    let pipeline = placement.pipeline(0);
    let in_a_row = placement.copies() == 1 && pipeline.len() == placement.ranks();
    let list = |(rank, list): (usize, Vec<Action>)| match pipeline.iter().position(|of| *of == rank) {
        Some(stage) if each > 0 && in_a_row => {
            let decided = updates == Updates::DoubleBuffered;
            AsyncStage { pipeline, stage, each, decided }.with_control(list)
        }
        _ => {
            let mut actions = Vec::with_capacity(list.len());
            for action in list {
                actions.extend(agreed(action));
                actions.push(action);
            }
            actions
        }
    };
    lists.into_iter().enumerate().map(list).collect()
}

/// What comes before a step whatever the schedule.
fn agreed(action: Action) -> &'static [Action] {
    if action == Action::Step { &[Action::WaitReduce, Action::Agree] } else { &[] }
}

/// A stage that does not wait for those behind it.
struct AsyncStage<'a> {
    /// The rank of each.
    pipeline: &'a [usize],
    /// Its index among them.
    stage: usize,
    /// Updates in a batch.
    each: usize,
    /// Whether the first stage decides on updates, and the others defer them until then.
    decided: bool,
}

impl AsyncStage<'_> {
    fn with_control(&self, list: Vec<Action>) -> Vec<Action> {
        let (mut actions, mut steps, mut undecided) = (Vec::with_capacity(list.len()), 0, false);
        for action in list {
            let uses_newest = match action {
                Action::Stash { .. } | Action::Step => true,
                _ => action.compute().is_some_and(|(_, work)| work.version == steps),
            };
            if uses_newest && std::mem::take(&mut undecided) {
                actions.extend(self.commit(steps - 1));
            }
            actions.extend(agreed(action));
            if action == Action::Step {
                actions.extend(self.verdict(steps));
            }
            actions.push(action);
            if action == Action::Step {
                steps += 1;
                undecided = self.decided && self.stage > 0;
                if steps % self.each == 0 {
                    actions.extend(self.totals(steps - 1));
                }
            }
        }
        if let Some(last) = steps.checked_sub(1) {
            actions.extend(if undecided { self.commit(last) } else { Vec::new() });
            actions.push(Action::Settle);
        }
        actions
    }

    /// Receives from the stage behind, and sends to the one before; the first one of 2BW decides.
    fn verdict(&self, update: usize) -> Vec<Action> {
        let behind = (self.stage + 1 < self.pipeline.len()).then(|| self.stage + 1);
        let before = self.stage.checked_sub(1);
        let received = behind.map(|stage| self.receive(ControlKind::Verdict, update, stage));
        let sent = before.map(|stage| self.send(ControlKind::Verdict, update, stage));
        let others = if self.decided && self.stage == 0 { 1..self.pipeline.len() } else { 0..0 };
        let decision = others.map(|stage| self.send(ControlKind::Decision, update, stage));
        received.into_iter().chain(sent).chain(decision).collect()
    }

    fn commit(&self, update: usize) -> Vec<Action> {
        vec![self.receive(ControlKind::Decision, update, 0), Action::Commit]
    }

    fn totals(&self, update: usize) -> Option<Action> {
        let last = self.pipeline.len() - 1;
        match self.stage {
            _ if last == 0 => None,
            0 => Some(self.receive(ControlKind::Totals, update, last)),
            stage => (stage == last).then(|| self.send(ControlKind::Totals, update, 0)),
        }
    }

    fn send(&self, topic: ControlKind, update: usize, stage: usize) -> Action {
        Action::SendControl(ControlMessage { topic, update, peer: self.pipeline[stage] })
    }

    fn receive(&self, topic: ControlKind, update: usize, stage: usize) -> Action {
        Action::RecvControl(ControlMessage { topic, update, peer: self.pipeline[stage] })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ScheduleName, ScheduleOptions};
    use super::*;

    /// The control messages that a rank sends and receives, and where it steps.
    fn control_actions(name: ScheduleName, rank: usize) -> String {
        let schedule = name.schedule(&ScheduleOptions { batches: 2, ..ScheduleOptions::new(3, 2) }).unwrap();
        let word = |action: &Action| match action {
            Action::SendControl(ControlMessage { topic, update, peer }) => {
                Some(format!("{topic:?}{update}>{peer}"))
            }
            Action::RecvControl(ControlMessage { topic, update, peer }) => {
                Some(format!("{topic:?}{update}<{peer}"))
            }
            Action::Step | Action::Commit | Action::Settle => Some(format!("{action:?}")),
            Action::Forward(work) => Some(format!("F{}", work.micro_batch)),
            _ => None,
        };
        schedule.ranks[rank].iter().filter_map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn verdicts_go_to_the_stage_before_and_decisions_to_all() {
        insta::assert_snapshot!(control_actions(ScheduleName::TwoBw, 0), @"F0 F1 F2 F3 Verdict0<1 Decision0>1 Decision0>2 Step Totals0<2 Verdict1<1 Decision1>1 Decision1>2 Step Totals1<2 Settle");
        insta::assert_snapshot!(control_actions(ScheduleName::TwoBw, 2), @"F0 F1 Verdict0>1 Step Totals0>0 F2 F3 Decision0<0 Commit Verdict1>1 Step Totals1>0 Decision1<0 Commit Settle");
        insta::assert_snapshot!(control_actions(ScheduleName::PipeDream, 1), @"F0 F1 Verdict0<2 Verdict0>0 Step F2 Verdict1<2 Verdict1>0 Step F3 Verdict2<2 Verdict2>0 Step Verdict3<2 Verdict3>0 Step Settle");
    }
}
