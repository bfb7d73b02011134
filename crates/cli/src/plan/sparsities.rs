//! The best layout at each of some sparsities: what pruning buys on so many devices.

use anyhow::Result;
use serde_json::{Value, json};

use super::ranges::sparsities;
use super::record::record;
use super::{PlanRequest, resolved, table};
use crate::output;
use crate::run_file::conflict;
use crate::spinner::Spinner;

impl PlanRequest<'_> {
    /// The best layout at each of some sparsities.
    pub(super) fn sparsities(&self, range: &str) -> Result<Value> {
        let (from, to) = sparsities(range)?.into_inner();
        let of_one = [
            ("--trace", self.arguments.trace.is_some(), "shows one layout"),
            ("--apply", self.arguments.apply.is_some(), "writes one layout"),
            ("--svg", self.arguments.svg.is_some(), "plots a sweep over devices"),
        ];
        if let Some((option, _, does)) = of_one.into_iter().find(|(_, given, _)| *given) {
            let problem = format!("{does}, but `--sparsity` is a range");
            return Err(conflict(option, &problem).into());
        }
        let number = self.devices()?[0];
        let fractions: Vec<f64> =
            (0..).map(|i| from + 0.05 * f64::from(i)).take_while(|fraction| *fraction <= to + 1e-9).collect();
        let mut rows = Vec::new();
        let mut spinner = Spinner::new(fractions.len());
        for fraction in fractions {
            spinner.next(&format!("searching layouts at a sparsity of {fraction:.2}"));
            let plan = resolved(&self.run, self.arguments, Some(fraction))?;
            rows.push((fraction, self.search(&plan, number)?.ranked.into_iter().next()));
        }
        drop(spinner);
        output::on_standard_output(table::sparsities(&self.plan, &self.cluster, number, &rows));
        let sweep: Vec<Value> = rows
            .iter()
            .map(|(fraction, best)| {
                let mut value =
                    best.as_ref().map_or(json!({ "fits": false }), |best| record(best, &self.plan));
                value["sparsity"] = (*fraction).into();
                value
            })
            .collect();
        let mut value = self.head(number);
        value["sweep"] = sweep.into();
        Ok(value)
    }
}
