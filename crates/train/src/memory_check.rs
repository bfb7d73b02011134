//! Whether a run fits into the memory that is left, asked before any of it is taken: of the machine for all
//! ranks that share it, of a GPU for those on it.
//!
//! What is compared is what the run holds at least ([`espalier_plan::MemoryPlan::least`]), so that none is
//! refused that would have gone through; one that is just too large is still told by the allocation that
//! fails.

use espalier_data::Dataset;
use espalier_plan::optimizer::{MasterForm, MomentDtype};
use espalier_plan::spec::{Precision, RecomputeMode};
use espalier_plan::{MemoryPlan, Plan};
use espalier_tensor::cuda::Cuda;
use espalier_tensor::{Category, Device, machine};

use crate::parallel::launched::ProcessGroup;
use crate::{Error, Result};

/// Refuses a plan that needs more than is left for its ranks here, unless its run file says not to ask.
/// `process_group` says which of its ranks these are, where a launcher has started them.
pub fn check(plan: &Plan, device: &Device, process_group: Option<&ProcessGroup>) -> Result<()> {
    if !plan.device.check_memory {
        return Ok(());
    }
    let replicas = plan.batch.replicas as f64;
    let (memory, ranks, left, holder) = match device {
        Device::Cpu(_) => {
            // All ranks, or as large a fraction of them as this machine has.
            let here = process_group
                .map_or(1.0, |process_group| process_group.local_size() as f64 / process_group.size() as f64);
            (plan.replica_memory, replicas * here, machine::memory_left(), "this machine".to_owned())
        }
        Device::Cuda(cuda) => {
            let left = Some(cuda.memory_left()? as u64);
            let holder = format!("the GPU ({})", cuda.name());
            match process_group {
                Some(process_group) => {
                    // Those who share it may have taken theirs already: all of them are held against all that
                    // it has.
                    let ranks_per_device = process_group.ranks_per_device(Cuda::probe().gpus.len()) as f64;
                    let all = cuda.gpu().memory as u64;
                    let (ranks, left) = match fits(&plan.memory, ranks_per_device, all) {
                        Err(_) => (ranks_per_device, Some(all)),
                        Ok(()) => (1.0, left),
                    };
                    (plan.memory, ranks, left, holder)
                }
                None => (plan.replica_memory, replicas, left, holder),
            }
        }
    };
    match left {
        Some(left) => fits(&memory, ranks, left).map_err(|(needed, category, most)| Error::TooLarge {
            needed,
            left,
            holder,
            category,
            most,
            advice: advice(plan, category),
        }),
        None => Ok(()),
    }
}

/// Lets images stay on the GPU for the whole of a run where they take at most half of what the plan leaves of
/// it: the other half is for what is not predicted. The plan counts them from then on.
pub fn keep_data(
    plan: &mut Plan,
    dataset: &Dataset,
    device: &Device,
    process_group: Option<&ProcessGroup>,
) -> Result<()> {
    let (Device::Cuda(cuda), bytes) = (device, dataset.device_bytes()) else { return Ok(()) };
    let (memory, sharers) = match process_group {
        Some(group) => (&plan.memory, group.ranks_per_device(Cuda::probe().gpus.len()) as u64),
        None => (&plan.replica_memory, 1),
    };
    let replicas = if process_group.is_some() { sharers } else { plan.batch.replicas as u64 };
    if bytes > 0
        && may_stay(bytes, memory.total().saturating_mul(replicas), cuda.memory_left()? as u64, sharers)
    {
        dataset.keep_on(device)?;
        plan.memory.data = bytes;
    }
    Ok(())
}

/// Whether each of those who share a GPU may keep so many bytes there beside what all of them need.
fn may_stay(bytes: u64, needed: u64, left: u64, sharers: u64) -> bool {
    bytes.saturating_mul(2 * sharers) <= left.saturating_sub(needed)
}

/// Whether so many times this memory is left; else how much it is, and of which category most.
fn fits(memory: &MemoryPlan, times: f64, left: u64) -> Result<(), (u64, Category, u64)> {
    // A number of bytes need not be exact to be too large.
    let scaled = |bytes: u64| (bytes as f64 * times) as u64;
    if scaled(memory.least()) <= left {
        return Ok(());
    }
    let of_each = [
        (Category::Weights, memory.weights),
        (Category::Gradients, memory.gradients),
        (Category::Optimizer, memory.optimizer),
        (Category::Mask, memory.mask),
        (Category::Activations, memory.activations),
        (Category::Workspace, memory.workspace.unwrap_or(0)),
    ];
    let (category, most) = of_each.into_iter().max_by_key(|(_, bytes)| *bytes).expect("there are six");
    Err((scaled(memory.least()), category, scaled(most)))
}

/// What of a run could be set otherwise to need less of a category.
fn advice(plan: &Plan, category: Category) -> String {
    let half = (plan.storage.precision == Precision::F32).then_some("train.precision = \"bf16\"");
    let again = (plan.storage.recompute != RecomputeMode::Block).then_some("train.recompute = \"block\"");
    let low_bits = plan.storage.precision == Precision::Bf16
        && plan.optimization.optimizer.master != MasterForm::LowBits;
    let low_bits = low_bits.then_some("optimizer.master = \"low-bits\"");
    let optimizer = plan.optimization.optimizer;
    let moments = optimizer.moments == MomentDtype::F32 && optimizer.moments() > 0;
    let moments = moments.then_some("optimizer.moments = \"bf16\"");
    let pruned = plan.pruning.is_none().then_some("pruning before the first step");
    let stored_dense = plan.pruning.is_some() && !plan.storage.compressed_weights;
    let kept = stored_dense.then_some("prune.weights = \"compressed\"");
    let options: Vec<&str> = match category {
        Category::Activations => {
            let less = ["a smaller train.batch", "more train.micro_batches"];
            less.into_iter().chain(again).chain(half).collect()
        }
        Category::Gradients | Category::Optimizer => {
            ["a smaller model"].into_iter().chain(half).chain(low_bits).chain(moments).chain(pruned).collect()
        }
        _ => ["a smaller model", "fewer ranks on it"].into_iter().chain(half).chain(kept).collect(),
    };
    match options.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => unreachable!("there is always one"),
    }
}

#[cfg(test)]
mod tests {
    use espalier_plan::{DataFacts, RunFile};

    use super::*;

    fn plan(text: &str) -> Plan {
        let facts = DataFacts { vocab: Some(256), ..DataFacts::default() };
        Plan::new(RunFile::parse(text, &[]).unwrap(), facts).unwrap()
    }

    #[test]
    fn what_is_needed_at_least_is_compared_with_what_is_left() {
        let memory = plan("[train]\nbatch = 64").memory;
        assert!(fits(&memory, 2.0, 2 * memory.least()).is_ok());
        let refused = fits(&memory, 2.0, 2 * memory.least() - 1).unwrap_err();
        assert_eq!(refused, (2 * memory.least(), Category::Activations, 2 * memory.activations));
        let few = plan("[train]\nbatch = 1").memory;
        assert_eq!(fits(&few, 1.0, 0).unwrap_err().1, Category::Optimizer);
        assert!(memory.least() < memory.total(), "gradients come as activations go");
    }

    #[test]
    fn images_stay_where_they_leave_room_for_as_much_again() {
        assert!(may_stay(50, 100, 200, 1) && !may_stay(51, 100, 200, 1));
        assert!(may_stay(25, 100, 200, 2) && !may_stay(26, 100, 200, 2));
        assert!(!may_stay(1, 200, 100, 1) && !may_stay(u64::MAX, 0, u64::MAX - 1, 1));
        let mut memory = plan("").memory;
        let (least, total) = (memory.least(), memory.total());
        memory.data = 10;
        assert_eq!((memory.least(), memory.total()), (least + 10, total + 10));
    }

    /// Weights that are stored compressed are dense while their block runs.
    #[test]
    fn blocks_that_do_not_fit_while_they_run_are_named() {
        let one_block = "[model]\nlayers = 1\nwidth = 512\nheads = 4\ncontext = 8\n[train]\nbatch = 1\n\
            [prune]\nmethod = \"random\"\nsparsity = 0.99\nweights = \"compressed\"";
        let memory = plan(one_block).memory;
        assert!(fits(&memory, 1.0, memory.least()).is_ok());
        let (needed, category, most) = fits(&memory, 1.0, memory.least() - 1).unwrap_err();
        let expected = (memory.least(), Category::Workspace, memory.workspace);
        assert_eq!((needed, category, Some(most)), expected);
    }

    #[test]
    fn advice_does_not_name_what_is_set_already() {
        let set = plan("[train]\nprecision = \"bf16\"\nrecompute = \"block\"");
        assert_eq!(advice(&set, Category::Activations), "a smaller train.batch or more train.micro_batches");
        let more = advice(&plan(""), Category::Activations);
        assert!(more.contains("recompute") && more.contains("bf16"), "{more}");
        assert!(advice(&set, Category::Optimizer).contains("low-bits"));
        assert!(advice(&set, Category::Optimizer).contains("optimizer.moments"));
        let narrow = plan("[optimizer]\nmoments = \"bf16\"");
        assert!(!advice(&narrow, Category::Optimizer).contains("moments"));
    }

    /// No machine has it, and nothing was taken when it is said.
    #[test]
    fn a_run_that_no_machine_can_hold_is_refused_unless_it_insists() {
        let wide = "[model]\nwidth = 4000000\nheads = 1\nlayers = 1\n[device]\nkind = \"cpu\"\n";
        let device = Device::cpu(1).unwrap();
        let error = check(&plan(wide), &device, None).unwrap_err().to_string();
        assert!(error.contains("this machine") && error.contains("device.check_memory"), "{error}");
        check(&plan(&format!("{wide}check_memory = false")), &device, None).unwrap();
        assert_eq!(device.ledger().total_peak(), 0);
    }

    /// Threads of one process share its memory, stages of a replica have their shards of it.
    #[test]
    fn ranks_of_a_machine_are_added_up() {
        let stages =
            plan("[model]\nlayers = 2\n[parallel]\npipeline = 2\n[train]\nmicro_batches = 2\nbatch = 8");
        let dense = plan("[model]\nlayers = 2\n[train]\nmicro_batches = 2\nbatch = 8");
        // Both ends of the tied table have it.
        let table = 4 * 256 * 128;
        assert_eq!(stages.replica_memory.weights, dense.memory.weights + table);
        assert!(stages.replica_memory.weights < 2 * stages.memory.weights);
    }
}
