//! GraSP's product with the Hessian against PyTorch's double backward in f64, where it is hardest: twenty
//! convolutions with batch norm (`../../oracle/make.py` says how it was made).

use espalier_train::prune::gradient::ScoringSamples;
use espalier_train::prune::hessian::Curvature;
use espalier_train::prune::is_kept;

use super::bench::Bench;
use crate::fixture::Fixture;
use crate::support::base;

/// With two points and the step that suits shallow networks (3e-4 of the weights' norm) the product is off by
/// 1.4e-2; a good program's rounding leaves 5e-5 with four.
#[test]
fn the_product_with_the_hessian_is_that_of_double_backward() {
    let fixture = Fixture::read(include_bytes!("../../oracle/flow.safetensors"));
    let folder = tempfile::tempdir().unwrap();
    fixture.write_images("pixels", "labels", folder.path());
    let (count, _) = &fixture.bytes["labels"];

    let block =
        "{type='conv', output=8, kernel=3, padding=1, bias=false}, {type='batch_norm'}, {type='relu'}, ";
    let layers = format!(
        "model.layers=[{}{{type='global_avg_pool'}}, {{type='linear', output=10}}]",
        block.repeat(20)
    );
    let run_file =
        "[model]\nname = \"custom\"\n[data]\nkind = \"idx\"\nvalidation = 0.0\n[prune]\nmethod = \"grasp\"";
    let base = base(run_file).set(layers).set(format!("data.path='{}'", folder.path().display()));
    let mut bench = Bench::new(&base.set(format!("train.batch={}", count[0])));
    for id in bench.candidates.clone() {
        let name = bench.params.name(id).to_owned();
        let (bits, scale) =
            (&fixture.words[&format!("positive/{name}")], fixture.f32[&format!("scale/{name}")][0]);
        let weight = |i: usize| if is_kept(bits, i) { scale } else { -scale };
        let values: Vec<f32> = (0..bench.params.param(id).len()).map(weight).collect();
        bench.set(id, &values);
    }

    let samples: Vec<(u64, usize)> = (0..count[0]).map(|i| (0, i)).collect();
    let network = bench.network(0);
    let temperature = fixture.metadata["temperature"].parse().unwrap();
    let scored =
        ScoringSamples { temperature, ..ScoringSamples::new(&samples, samples.len(), network.context) };
    let mut curvature = Curvature::new(network.params, network.candidates, scored).unwrap();
    let direction = curvature.gradient().unwrap();
    let product = curvature.hessian_product(&direction).unwrap();
    let (mut error, mut size) = (0.0, 0.0);
    for (id, ours) in network.candidates.iter().zip(product) {
        let truth = &fixture.f32[&format!("flow/{}", network.params.name(*id))];
        for (a, b) in ours.to_f32().iter().zip(truth) {
            error += f64::from(a - b).powi(2);
            size += f64::from(*b).powi(2);
        }
    }
    let off = (error / size).sqrt();
    println!("off by {off:.1e}");
    assert!(off < 1e-3, "off by {off:.1e}");
}
