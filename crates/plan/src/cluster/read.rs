//! Reading a cluster file: one sentence for what is missing, unknown, or no rate.

use super::{Cluster, Convolution, Fabric, SkippedZeros};

/// What is wrong with a cluster file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// Not TOML, or without a field that it must have.
    #[error("line {line}: {message}")]
    Text {
        /// Counted from 1.
        line: usize,
        /// What the reader says.
        message: String,
    },
    /// A number that nothing can be computed from.
    #[error("`{field}` must be {expected}, got {got}")]
    Value {
        /// Its full path.
        field: String,
        /// What it takes.
        expected: &'static str,
        /// What was written.
        got: String,
    },
    /// Several devices, and nothing said of what joins them.
    #[error(
        "`node.link` is missing: {devices} devices of a node are connected by a link, which `espalier bench comm` measures"
    )]
    NoLink {
        /// How many there are.
        devices: usize,
    },
}

impl Cluster {
    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
        let cluster = Cluster::parse_unlinked(text)?;
        match (cluster.node.devices, &cluster.node.link) {
            (devices @ 2.., None) => Err(ClusterError::NoLink { devices }),
            _ => Ok(cluster),
        }
    }

    /// The same of a file that is not finished: what joins the devices may be missing.
    pub fn parse_unlinked(text: &str) -> Result<Cluster, ClusterError> {
        let cluster: Cluster = toml::from_str(text).map_err(|error| {
            let before = error.span().map_or("", |span| &text[..span.start.min(text.len())]);
            ClusterError::Text { line: before.matches('\n').count() + 1, message: error.message().to_owned() }
        })?;
        cluster.check()?;
        Ok(cluster)
    }

    /// As it is written.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("numbers and texts can be written")
    }

    /// That every rate is one.
    fn check(&self) -> Result<(), ClusterError> {
        let device = &self.device;
        self.price_per_gpu_hour.map_or(Ok(()), |price| at_least_zero("price_per_gpu_hour", price))?;
        self.watts_per_gpu.map_or(Ok(()), |watts| above_zero("watts_per_gpu", watts))?;
        above_zero("device.memory_gb", device.memory_gb)?;
        at_least_zero("device.reserved_gb", device.reserved_gb)?;
        if device.reserved_gb >= device.memory_gb {
            return Err(wrong("device.reserved_gb", "less than `device.memory_gb`", device.reserved_gb));
        }
        at_least_zero("device.launch_us", device.launch_us)?;
        let halves = [("bf16", device.bf16.as_ref()), ("fp16", device.fp16.as_ref())];
        let halves = halves.into_iter().filter_map(|(name, matrix)| Some((name, matrix?)));
        for (name, matrix) in halves.chain([("f32", &device.f32)]) {
            above_zero(&format!("device.{name}.peak_tflops"), matrix.peak_tflops)?;
            matrix.convolution.check(&format!("device.{name}.convolution"))?;
            matrix
                .attention
                .map_or(Ok(()), |share| above_zero(&format!("device.{name}.attention"), share))?;
            above_zero(&format!("device.{name}.zeros"), matrix.zeros)?;
            matrix.sparse.as_ref().map_or(Ok(()), |sparse| sparse.check(&format!("device.{name}.sparse")))?;
            check_fractions(&format!("device.{name}.efficiency"), &matrix.efficiency)?;
        }
        above_zero("device.memory.gb_per_s", device.memory.gb_per_s)?;
        above_zero("device.memory.bf16", device.memory.bf16)?;
        above_zero("device.memory.light", device.memory.light)?;
        above_zero("device.memory.batch_norm", device.memory.batch_norm)?;
        check_fractions("device.memory.efficiency", &device.memory.efficiency)?;
        if self.nodes == Some(0) {
            return Err(wrong("nodes", "at least 1", 0));
        }
        if self.node.devices == 0 {
            return Err(wrong("node.devices", "at least 1", 0));
        }
        self.node.link.iter().try_for_each(|link| link.check("node.link"))?;
        let link = self.node.link();
        let rails = (link.rails - 1) as f64;
        for (field, number) in
            [("contention", link.contention), ("straggle", link.straggle), ("rails", rails)]
        {
            if number > 0.0 {
                return Err(wrong(&format!("node.link.{field}"), "a field of `network`", number));
            }
        }
        self.network.iter().try_for_each(|network| network.check("network"))
    }
}

impl Convolution {
    fn check(&self, name: &str) -> Result<(), ClusterError> {
        match self {
            Convolution::Efficiency(efficiency) => above_zero(name, *efficiency),
            Convolution::Channels(points) => check_fractions(name, points),
            Convolution::Passes(by_pass) => {
                check_fractions(&format!("{name}.channels"), &by_pass.channels)?;
                at_least_zero(&format!("{name}.start_us"), by_pass.start_us)?;
                at_least_zero(&format!("{name}.weight_ns"), by_pass.weight_ns)?;
                at_least_zero(&format!("{name}.pixel_ns"), by_pass.pixel_ns)?;
                at_least_zero(&format!("{name}.window_ns"), by_pass.window_ns)
            }
        }
    }
}

impl SkippedZeros {
    fn check(&self, name: &str) -> Result<(), ClusterError> {
        check_fractions(&format!("{name}.linear"), &self.linear)?;
        check_fractions(&format!("{name}.convolution"), &self.convolution)?;
        above_zero(&format!("{name}.behind_pool"), self.behind_pool)
    }
}

impl Fabric {
    fn check(&self, name: &str) -> Result<(), ClusterError> {
        at_least_zero(&format!("{name}.alpha_us"), self.alpha_us)?;
        at_least_zero(&format!("{name}.meet_us"), self.meet_us)?;
        at_least_zero(&format!("{name}.turn_us"), self.turn_us)?;
        at_least_zero(&format!("{name}.halo_us"), self.halo_us)?;
        at_least_zero(&format!("{name}.contention"), self.contention)?;
        at_least_zero(&format!("{name}.straggle"), self.straggle)?;
        above_zero(&format!("{name}.gb_per_s"), self.gb_per_s)?;
        above_zero(&format!("{name}.rails"), self.rails as f64)?;
        above_zero(&format!("{name}.efficiency"), self.efficiency)?;
        if !(0.0..1.0).contains(&self.occupies) {
            return Err(wrong(&format!("{name}.occupies"), "a fraction in [0, 1)", self.occupies));
        }
        match self.shared_by {
            0 => Err(wrong(&format!("{name}.shared_by"), "at least 1", 0)),
            _ => Ok(()),
        }
    }
}

fn wrong(field: &str, expected: &'static str, got: impl ToString) -> ClusterError {
    ClusterError::Value { field: field.into(), expected, got: got.to_string() }
}

fn above_zero(field: &str, number: f64) -> Result<(), ClusterError> {
    let fits = number.is_finite() && number > 0.0;
    if fits { Ok(()) } else { Err(wrong(field, "a number above 0", number)) }
}

fn at_least_zero(field: &str, number: f64) -> Result<(), ClusterError> {
    let fits = number.is_finite() && number >= 0.0;
    if fits { Ok(()) } else { Err(wrong(field, "a number of at least 0", number)) }
}

/// Sizes that grow, each with a fraction that can be reached.
fn check_fractions(field: &str, points: &[[f64; 2]]) -> Result<(), ClusterError> {
    let expected = "a list of [size, fraction] with ascending sizes and fractions above 0";
    let grow = points.windows(2).all(|pair| pair[0][0] < pair[1][0]);
    let fit = |point: &[f64; 2]| point.iter().all(|number| number.is_finite() && *number > 0.0);
    if grow && !points.is_empty() && points.iter().all(fit) {
        Ok(())
    } else {
        Err(wrong(field, expected, format!("{points:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::builtin;
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for name in super::super::NAMES {
            let cluster = builtin(name).unwrap();
            assert_eq!(Cluster::parse(&cluster.to_toml()).unwrap(), cluster);
        }
    }

    #[test]
    fn wrong_numbers_get_a_sentence() {
        let text = builtin("summit").unwrap().to_toml();
        let said = |from: &str, to: &str| {
            assert!(text.contains(from), "{text}");
            Cluster::parse(&text.replacen(from, to, 1)).unwrap_err().to_string()
        };
        insta::assert_snapshot!(said("memory_gb = 16.0", "memory_gb = 0.0"), @"`device.memory_gb` must be a number above 0, got 0");
        insta::assert_snapshot!(said("devices = 6", "devices = 0"), @"`node.devices` must be at least 1, got 0");
        insta::assert_snapshot!(said("peak_tflops = 125.0", "peak_tflops = -125.0"), @"`device.fp16.peak_tflops` must be a number above 0, got -125");
        assert!(said("gb_per_s = 50.0\n", "").ends_with(": missing field `gb_per_s`"));
        assert!(
            said("devices = 6", "cards = 6")
                .ends_with(": unknown field `cards`, expected one of `devices`, `cores`, `link`")
        );
        assert!(said("efficiency = [", "efficiency = [[9.0, 1.0], ").contains("ascending sizes"));
        insta::assert_snapshot!(said("watts_per_gpu = 300.0", "price_per_gpu_hour = -1.0"), @"`price_per_gpu_hour` must be a number of at least 0, got -1");
        insta::assert_snapshot!(said("watts_per_gpu = 300.0", "watts_per_gpu = -1.0"), @"`watts_per_gpu` must be a number above 0, got -1");
        insta::assert_snapshot!(said("halo_us = 200.0", "halo_us = -1.0"), @"`node.link.halo_us` must be a number of at least 0, got -1");
        insta::assert_snapshot!(said("[device]", "nodes = 0\n[device]"), @"`nodes` must be at least 1, got 0");
        let of_network = said("halo_us = 200.0", "straggle = 0.1");
        insta::assert_snapshot!(of_network, @"`node.link.straggle` must be a field of `network`, got 0.1");
        for field in ["meet_us", "turn_us", "contention", "straggle"] {
            let said = said("gb_per_s = 50.0\n", &format!("gb_per_s = 50.0\n{field} = -1.0\n"));
            assert_eq!(said, format!("`node.link.{field}` must be a number of at least 0, got -1"));
        }
    }

    #[test]
    fn devices_are_joined_by_something_and_one_by_nothing() {
        let mut cluster = Cluster { network: None, ..builtin("summit").unwrap() };
        cluster.node.link = None;
        assert_eq!(Cluster::parse_unlinked(&cluster.to_toml()).unwrap(), cluster);
        insta::assert_snapshot!(Cluster::parse(&cluster.to_toml()).unwrap_err(), @"`node.link` is missing: 6 devices of a node are connected by a link, which `espalier bench comm` measures");
        cluster.node.devices = 1;
        assert_eq!(Cluster::parse(&cluster.to_toml()).unwrap(), cluster);
        assert_eq!(cluster.node.link(), &Fabric::NONE);
    }
}
