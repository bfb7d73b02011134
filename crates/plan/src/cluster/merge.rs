//! Putting what was measured into a cluster file that is there: sections that were measured anew are
//! replaced, and all else stays as it was written, comments included.

use serde::Serialize;

use super::{Cluster, ClusterError, DeviceSpec, Fabric, Node};

/// Sections of a cluster file.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ClusterSection {
    /// `[device]` and what is below it.
    Device {
        /// What was measured.
        device: Box<DeviceSpec>,
    },
    /// `[node.link]`.
    Link {
        /// What was measured, below `node`.
        node: IntraNodeLink,
    },
}

/// The link within a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IntraNodeLink {
    /// What was measured.
    pub link: Fabric,
}

impl ClusterSection {
    /// How fast a device is.
    pub fn device(device: DeviceSpec) -> ClusterSection {
        ClusterSection::Device { device: Box::new(device) }
    }

    /// What joins the devices of a node.
    pub fn link(link: Fabric) -> ClusterSection {
        ClusterSection::Link { node: IntraNodeLink { link } }
    }

    /// The name of its section.
    fn section(&self) -> &'static str {
        match self {
            ClusterSection::Device { .. } => "device",
            ClusterSection::Link { .. } => "node.link",
        }
    }

    fn put_into(&self, cluster: &mut Cluster) {
        match self {
            ClusterSection::Device { device } => cluster.device = DeviceSpec::clone(device),
            ClusterSection::Link { node } => cluster.node.link = Some(node.link),
        }
    }

    /// Its sections as they are written below a comment that says where they come from.
    fn text(&self, comment: &str) -> String {
        let text = toml::to_string(self).expect("numbers and texts can be written");
        // `[node]` itself is not ours.
        let text = text.strip_prefix("[node]\n").unwrap_or(&text).trim_start();
        format!("# {comment}\n{}\n", text.trim_end())
    }
}

/// The text of a file with some sections measured anew. `comment` is one line, which the next measurement
/// replaces too.
pub fn insert(text: &str, new_section: &ClusterSection, comment: &str) -> Result<String, ClusterError> {
    let mut expected = Cluster::parse_unlinked(text)?;
    new_section.put_into(&mut expected);
    let merged = replaced(text, new_section.section(), &new_section.text(comment));
    match Cluster::parse_unlinked(&merged) {
        Ok(found) if found == expected => Ok(merged),
        // Written in a way that has no sections, such as `device.name = ".."`.
        _ => Ok(expected.to_toml()),
    }
}

/// A new file for a node of a device.
pub fn begin(name: &str, note: &str, device: DeviceSpec, node: &Node, comment: &str) -> String {
    let head = |name: &str, text: &str| format!("{name} = {}\n", toml::Value::from(text));
    let device = ClusterSection::device(device).text(comment);
    let node = toml::to_string(node).expect("a number can be written");
    format!("{}{}\n{device}\n[node]\n{node}", head("name", name), head("note", note))
}

/// A text with `new` instead of a section and those below it, or behind all others.
fn replaced(text: &str, section: &str, new: &str) -> String {
    let is_ours = |header: &str| header == section || header.starts_with(&format!("{section}."));
    let chunks = chunks(text);
    let index = chunks.iter().position(|(header, _)| header.as_deref().is_some_and(is_ours));
    let mut merged: Vec<&str> = Vec::new();
    for (i, (header, chunk)) in chunks.iter().enumerate() {
        if index == Some(i) {
            merged.push(new);
        }
        if !header.as_deref().is_some_and(is_ours) {
            merged.push(chunk);
        }
    }
    if index.is_none() {
        merged.push(new);
    }
    let merged: Vec<&str> = merged.into_iter().map(|chunk| chunk.trim_matches('\n')).collect();
    merged.join("\n\n") + "\n"
}

/// What stands before the first header, and each section with its header's name. Comments right above a
/// header are its own.
fn chunks(text: &str) -> Vec<(Option<String>, String)> {
    let mut chunks = vec![(None, String::new())];
    let mut above = String::new();
    for line in text.lines() {
        let header = line.trim().strip_prefix('[').and_then(|line| line.split(']').next());
        match header {
            Some(header) => chunks.push((Some(header.trim().to_owned()), format!("{above}{line}\n"))),
            None if line.starts_with('#') => {
                above += &format!("{line}\n");
                continue;
            }
            None => {
                let last = chunks.last_mut().expect("one to begin with");
                last.1 += &format!("{above}{line}\n");
            }
        }
        above.clear();
    }
    chunks.last_mut().expect("one to begin with").1 += &above;
    chunks
}

#[cfg(test)]
mod tests {
    use super::super::builtin;
    use super::*;

    fn summit() -> Cluster {
        builtin("summit").unwrap()
    }

    #[test]
    fn what_is_not_measured_stays_as_it_was_written() {
        let text = "# Mine.\nname = \"mine\"\n\n# old\n[device]\nname = \"x\"\nmemory_gb = 1.0 # little\nlaunch_us = 1.0\n\
            [device.bf16]\npeak_tflops = 1.0\nefficiency = [[1.0, 1.0]]\n[device.f32]\npeak_tflops = 1.0\nefficiency = [[1.0, 1.0]]\n\
            [device.memory]\ngb_per_s = 1.0\nefficiency = [[1.0, 1.0]]\n\n[node] # of mine\ndevices = 2\n\n# guessed\n[node.link]\n\
            alpha_us = 1.0\ngb_per_s = 1.0\n";
        let device = summit().device;
        let merged = insert(text, &ClusterSection::device(device.clone()), "new").unwrap();
        assert!(
            merged.starts_with("# Mine.\nname = \"mine\"\n\n# new\n[device]\nname = \"V100 16 GB\"\n"),
            "{merged}"
        );
        assert!(merged.ends_with("\n\n[node] # of mine\ndevices = 2\n\n# guessed\n[node.link]\nalpha_us = 1.0\ngb_per_s = 1.0\n"), "{merged}");
        assert!(!merged.contains("little") && !merged.contains("# old"), "{merged}");
        assert_eq!(Cluster::parse(&merged).unwrap().device, device);

        let link = summit().node.link.unwrap();
        let merged = insert(&merged, &ClusterSection::link(link), "measured").unwrap();
        assert!(
            merged.contains("# new\n[device]\n") && merged.contains("# measured\n[node.link]\nalpha_us"),
            "{merged}"
        );
        assert_eq!(Cluster::parse(&merged).unwrap().node.link, Some(link));
        assert_eq!(
            insert(&merged, &ClusterSection::link(link), "measured").unwrap(),
            merged,
            "once more changes nothing"
        );
    }

    #[test]
    fn a_new_file_gets_its_link_later() {
        let text = begin(
            "here",
            "said \"so\"",
            summit().device,
            &Node { devices: 6, cores: false, link: None },
            "by hand",
        );
        Cluster::parse(&text).unwrap_err();
        let text = insert(&text, &ClusterSection::link(summit().node.link.unwrap()), "by hand").unwrap();
        let (name, note) = ("here".into(), "said \"so\"".into());
        let expected = Cluster { name, note, watts_per_gpu: None, network: None, ..summit() };
        assert_eq!(Cluster::parse(&text).unwrap(), expected);
    }

    #[test]
    fn a_file_without_sections_is_written_anew() {
        let text = toml::to_string(&summit()).unwrap();
        let inline =
            text.split("[node]").next().unwrap().to_owned() + "[network]\nalpha_us = 1.0\ngb_per_s = 1.0\n";
        let inline =
            format!("node = {{ devices = 6, link = {{ alpha_us = 1.0, gb_per_s = 2.0 }} }}\n{inline}");
        let link = Fabric { alpha_us: 9.0, ..summit().node.link.unwrap() };
        let merged = insert(&inline, &ClusterSection::link(link), "measured").unwrap();
        assert_eq!(
            Cluster::parse(&merged).unwrap().node,
            Node { devices: 6, cores: false, link: Some(link) }
        );
    }

    #[test]
    fn what_is_no_cluster_file_is_refused() {
        insert("[model]\nname = \"gpt\"\n", &ClusterSection::link(Fabric::NONE), "").unwrap_err();
    }
}
