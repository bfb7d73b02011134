//! What to say of a run that fits nowhere: what it needs at least, and what would do.

use anyhow::Result;
use espalier_plan::search::{LayoutSearch, SearchResult};
use espalier_plan::simulate::Simulation;

use super::{PlanRequest, resolved, table};
use crate::run_file::conflict;

impl PlanRequest<'_> {
    /// The error where nothing fits: how many devices, or which sparsity, would do.
    pub(super) fn too_large(&self, devices: usize, found: &SearchResult) -> Result<anyhow::Error> {
        let mut problem = format!(
            "does not fit on {} of {:.1} GB",
            table::devices(devices),
            self.cluster.memory() as f64 / 1e9
        );
        if let Some(smallest) = &found.smallest {
            let gb = smallest.memory as f64 / 1e9;
            problem += &format!(": at least {gb:.1} GB are needed ({})", smallest.candidate);
        }
        let more = (1..=8)
            .map_while(|power| devices.checked_mul(1 << power))
            .find(|number| self.search(&self.plan, *number).is_ok_and(|found| !found.ranked.is_empty()));
        let mut remedies = Vec::new();
        remedies.extend(more.map(|number| format!("{number} devices would do")));
        remedies.extend(
            self.least_sparsity(devices)?.map(|sparsity| format!("a sparsity of {sparsity} would do")),
        );
        if !remedies.is_empty() {
            problem += &format!("; {}", remedies.join(", "));
        }
        let job = Simulation::new(&self.plan, &self.cluster, self.engine);
        let search = LayoutSearch { job: &job, devices, fixed: &self.fixed, rows: 1 };
        problem.extend(
            search.context_parallelism(found).map(|unbuilt| format!(". {}", unbuilt.trim_end_matches('.'))),
        );
        Ok(conflict("model", &problem).into())
    }

    /// The least sparsity, in steps of 0.1, with which it would fit: what fits with one fits with a higher one.
    fn least_sparsity(&self, devices: usize) -> Result<Option<f64>> {
        if !self.can_compress() {
            return Ok(None);
        }
        let known = self.plan.pruning.as_ref().map_or(0.0, |pruning| pruning.sparsity);
        let tried: Vec<f64> = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
            .into_iter()
            .filter(|one| *one > known)
            .collect();
        let (mut too_low, mut enough) = (0, tried.len());
        while too_low < enough {
            let middle = too_low.midpoint(enough);
            let plan = resolved(&self.run, self.arguments, Some(tried[middle]))?;
            match self.search(&plan, devices).is_ok_and(|found| !found.ranked.is_empty()) {
                true => enough = middle,
                false => too_low = middle + 1,
            }
        }
        Ok(tried.get(enough).copied())
    }
}
