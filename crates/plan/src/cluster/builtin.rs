//! The clusters that come with the program.

use super::Cluster;

/// What `--cluster` takes beside a file.
pub const NAMES: [&str; 5] = ["summit", "dgx-a100", "dgx-h100", "h200-node", "this-machine"];

/// A cluster by its name.
pub fn builtin(name: &str) -> Option<Cluster> {
    let text = match name {
        "summit" => include_str!("../../clusters/summit.toml"),
        "dgx-a100" => include_str!("../../clusters/dgx-a100.toml"),
        "dgx-h100" => include_str!("../../clusters/dgx-h100.toml"),
        "h200-node" => include_str!("../../clusters/h200-node.toml"),
        "this-machine" => include_str!("../../clusters/this-machine.toml"),
        _ => return None,
    };
    Some(Cluster::parse(text).expect("a test reads all of them"))
}
