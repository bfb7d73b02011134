//! What a run holds: bytes by category, predicted beside measured, and the density of each layer.

use std::collections::BTreeMap;

use espalier_report::{Bars, Heatmap, Panel, number};
use espalier_tensor::Category;
use espalier_train::LayerDensity;

use crate::progress::bytes;
use crate::records::RunRecord;

/// From so many blocks on, layers are shown as a table of shades.
const BLOCKS: usize = 3;

/// Bytes by category; none before the plan is there. `of` says of which run, where there are several.
pub fn memory(run: &RunRecord, of: &str) -> Option<Bars> {
    let mut bars = Bars::new(format!("Memory of the rank that needs most{of}"), &["predicted", "peak"]);
    let bar =
        |value: Option<f64>| value.map_or((f64::NAN, String::new()), |value| (value, bytes(value as usize)));
    for name in Category::ALL.map(Category::name) {
        let (predicted, measured) = match (&run.summary, &run.plan) {
            (Some(summary), _) => {
                // An older run has fewer categories.
                let Some(found) = summary.memory.get(name) else { continue };
                (found.predicted.map(|bytes| bytes as f64), found.measured.map(|bytes| bytes as f64))
            }
            (None, Some(plan)) => (plan.memory.get(name).copied().flatten().map(|bytes| bytes as f64), None),
            (None, None) => return None,
        };
        // A category that this run does not have would only be a row of zeros.
        if predicted.unwrap_or(0.0) > 0.0 || measured.unwrap_or(0.0) > 0.0 {
            bars.row(name, [bar(predicted), bar(measured)]);
        }
    }
    let most = run.summary.as_ref().and_then(|summary| summary.peak_bytes);
    if let Some(most) = most {
        bars.row("total (peak)", [bar(None), bar(Some(most as f64))]);
    }
    (!bars.rows.is_empty()).then_some(bars)
}

/// The density of each layer; none where nothing is pruned, or before the end of the run.
pub fn kept(run: &RunRecord, of: &str) -> Vec<Panel> {
    let Some(layers) = run.summary.as_ref().and_then(|summary| summary.kept_by_layer.as_ref()) else {
        return Vec::new();
    };
    let mut by_name: BTreeMap<(String, String), Vec<(usize, &LayerDensity)>> = BTreeMap::new();
    let mut unnumbered = Vec::new();
    for layer in layers {
        match numbered(&layer.name) {
            Some((before, number, after)) => {
                by_name.entry((before, after)).or_default().push((number, layer))
            }
            None => unnumbered.push(layer),
        }
    }
    // The same parameter of few blocks is as well a row for each.
    let is_table = |blocks: &Vec<(usize, &LayerDensity)>| blocks.len() >= BLOCKS;
    let (table, few): (Vec<_>, Vec<_>) = by_name.into_iter().partition(|(_, blocks)| is_table(blocks));
    unnumbered.extend(few.into_iter().flat_map(|(_, blocks)| blocks.into_iter().map(|(_, layer)| layer)));
    let order = |layer: &&LayerDensity| layers.iter().position(|other| other.name == layer.name);
    unnumbered.sort_by_key(order);
    let most = layers.iter().map(LayerDensity::density).fold(0.0, f64::max);
    let mut panels = Vec::new();
    if !table.is_empty() {
        let mut heatmap = Heatmap::new(format!("Density per block{of}"));
        let count =
            table.iter().flat_map(|(_, blocks)| blocks).map(|(number, _)| number + 1).max().unwrap_or(0);
        heatmap.columns = (0..count).map(|block| block.to_string()).collect();
        (heatmap.x_label, heatmap.range) = ("block".into(), (0.0, most));
        for ((before, after), blocks) in table {
            let mut cells = vec![None; count];
            for (number, layer) in blocks {
                cells[number] = Some((layer.density(), number::percent(layer.density())));
            }
            heatmap.row(format!("{before}*{after}"), cells);
        }
        panels.push(heatmap.into());
    }
    if !unnumbered.is_empty() {
        let mut bars = Bars::new(format!("Density per layer{of}"), &["density"]);
        bars.full = Some(most);
        for layer in unnumbered {
            let text = format!("{} of {}", number::percent(layer.density()), number::short(layer.of as f64));
            bars.row(&layer.name, [(layer.density(), text)]);
        }
        panels.push(bars.into());
    }
    panels
}

/// `transformer.h.`, 3, `.attn.c_attn.weight`: what stands around the first number in the name.
fn numbered(name: &str) -> Option<(String, usize, String)> {
    let parts: Vec<&str> = name.split('.').collect();
    let index = parts.iter().position(|part| part.parse::<usize>().is_ok())?;
    let number: usize = parts[index].parse().ok()?;
    let mut before: String = parts[..index].join(".");
    if !before.is_empty() {
        before.push('.');
    }
    let after: String = parts[index + 1..].iter().map(|part| format!(".{part}")).collect();
    // A number that is no block's would make a table without end.
    (number < 1000).then_some((before, number, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_known_by_the_number_in_a_name() {
        let parts =
            |name: &str| numbered(name).map(|(before, number, after)| format!("{before}|{number}|{after}"));
        assert_eq!(
            parts("transformer.h.3.attn.c_attn.weight").unwrap(),
            "transformer.h.|3|.attn.c_attn.weight"
        );
        assert_eq!(parts("layer1.0.conv1.weight").unwrap(), "layer1.|0|.conv1.weight");
        assert_eq!(parts("0.weight").unwrap(), "|0|.weight");
        assert_eq!(parts("fc.weight"), None);
        assert_eq!(parts("x.99999999999.y"), None);
    }
}
