//! What datasheets say of GPUs that people have, without sparsity: the peak that efficiencies are fractions of.

/// The rates of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Datasheet {
    /// Products of 16-bit numbers.
    pub bf16_tflops: f64,
    /// Products of 32-bit numbers, not rounded to TF32.
    pub f32_tflops: f64,
    /// Of its memory, read and written together.
    pub gb_per_s: f64,
}

/// Words that are all in a GPU's name, and its rates. The first that fits counts.
const GPUS: [(&[&str], [f64; 3]); 10] = [
    (&["H200", "NVL"], [835.0, 60.0, 4800.0]),
    (&["H200"], [989.0, 67.0, 4800.0]),
    (&["H100", "NVL"], [835.0, 60.0, 3900.0]),
    (&["H100", "PCIe"], [756.0, 51.0, 2000.0]),
    (&["H100"], [989.0, 67.0, 3350.0]),
    (&["A100", "80GB", "PCIe"], [312.0, 19.5, 1935.0]),
    (&["A100", "80GB"], [312.0, 19.5, 2039.0]),
    (&["A100"], [312.0, 19.5, 1555.0]),
    // Of 16-bit numbers it has f16 alone.
    (&["V100", "PCIE"], [112.0, 14.0, 900.0]),
    (&["V100"], [125.0, 15.7, 900.0]),
];

/// What is known of a GPU by its name.
fn entry(name: &str) -> Option<&'static (&'static [&'static str], [f64; 3])> {
    let words: Vec<&str> = name.split([' ', '-']).collect();
    GPUS.iter().find(|(all, _)| all.iter().all(|word| words.contains(word)))
}

/// The word that GPUs of a kind have in common, such as `A100`.
pub fn family(name: &str) -> Option<&'static str> {
    entry(name).map(|(words, _)| words[0])
}

/// The datasheet of a GPU by NVIDIA's name for it, such as `NVIDIA A100-SXM4-80GB`.
pub fn of(name: &str) -> Option<Datasheet> {
    let [bf16_tflops, f32_tflops, gb_per_s] = entry(name)?.1;
    Some(Datasheet { bf16_tflops, f32_tflops, gb_per_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_known_by_whole_words_of_their_names() {
        let memory = |name| of(name).map(|gpu| gpu.gb_per_s);
        assert_eq!(memory("NVIDIA H200"), Some(4800.0));
        assert_eq!(memory("NVIDIA H100 80GB HBM3"), Some(3350.0));
        assert_eq!(memory("NVIDIA H100 PCIe"), Some(2000.0));
        assert_eq!(memory("NVIDIA A100-SXM4-80GB"), Some(2039.0));
        assert_eq!(memory("NVIDIA A100-SXM4-40GB"), Some(1555.0));
        assert_eq!(of("Tesla V100-SXM2-16GB").unwrap().bf16_tflops, 125.0);
        assert_eq!([family("A100 80 GB SXM"), family("NVIDIA A100-SXM4-80GB")], [Some("A100"); 2]);
        // A GH200 is another GPU than an H200.
        assert_eq!(memory("NVIDIA GH200 480GB"), None);
        assert_eq!(memory("NVIDIA GeForce RTX 4090"), None);
    }
}
