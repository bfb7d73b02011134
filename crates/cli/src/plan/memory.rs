//! What the memory of a layout is made of, for a person.

use espalier_plan::cluster::Cluster;
use espalier_plan::simulate::Estimate;
use serde_json::Value;

use super::table::aligned;

/// A row for each category of the rank that needs most, in the order of their sizes, and what is left of a
/// device.
pub fn explained(best: &Estimate, cluster: &Cluster) -> String {
    let gb = |bytes: f64| format!("{:.2}", bytes / 1e9);
    let (total, room) = (best.memory.total() as f64, cluster.memory() as f64);
    let Ok(Value::Object(categories)) = serde_json::to_value(best.memory) else { return String::new() };
    let mut parts: Vec<(String, f64)> = categories
        .into_iter()
        .filter_map(|(name, bytes)| Some((name, bytes.as_f64().filter(|bytes| *bytes > 0.0)?)))
        .collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut rows = vec![["memory of a device", "GB", "of all"].map(String::from).to_vec()];
    rows.extend(
        parts
            .into_iter()
            .map(|(name, bytes)| vec![name, gb(bytes), format!("{:.1} %", 100.0 * bytes / total)]),
    );
    rows.push(vec!["total".into(), gb(total), String::new()]);
    rows.push(vec!["left".into(), gb(room - total), String::new()]);
    rows.push(vec!["reserved".into(), gb(cluster.device.reserved_gb * 1e9), String::new()]);
    aligned(&rows)
}
