//! All axes at once: every layout of up to eight ranks, or some chosen at random, trains as one rank does,
//! dense and with nine weights of ten gone.

use espalier_tensor::random::{key, uniform};

use crate::support::{Base, dense_and_pruned, tiny_cnn, tiny_gpt};
use crate::tensor::all_same;

/// The most ranks.
const MOST: usize = 8;

/// All ways to write up to eight ranks as the sizes of four axes.
fn axis_sizes() -> impl Iterator<Item = [usize; 4]> {
    let up_to = |most: usize| 1..=most;
    up_to(MOST).flat_map(move |a| {
        up_to(MOST / a).flat_map(move |b| {
            up_to(MOST / (a * b)).flat_map(move |c| up_to(MOST / (a * b * c)).map(move |d| [a, b, c, d]))
        })
    })
}

/// All of some layouts where tests may be long, otherwise a few of them, others each time that the list grows.
fn some<T>(all: Vec<T>, count: usize) -> Vec<T> {
    if espalier_testing::long() {
        return all;
    }
    let (stream, size) = (key(7, all.len() as u64), all.len());
    let mut numbered: Vec<(f64, T)> =
        all.into_iter().enumerate().map(|(i, one)| (uniform(stream, i as u64), one)).collect();
    numbered.sort_by(|a, b| a.0.total_cmp(&b.0));
    numbered.into_iter().take(count.min(size)).map(|(_, one)| one).collect()
}

fn steps() -> usize {
    if espalier_testing::long() { 50 } else { 3 }
}

/// Runs layouts against one rank, dense and pruned.
fn all_are_one(base: &Base, layouts: Vec<String>) {
    for base in dense_and_pruned(base) {
        all_same(&base, &layouts, steps(), 1e-5);
    }
}

/// Two axes, with as many micro-batches as a batch of 24 has.
fn replicas_and_tensor(data: usize, tensor: usize) -> String {
    let micro_batches = if 24 % (data * 4) == 0 { 4 } else { 24 / data };
    format!("parallel.data={data} parallel.tensor={tensor} train.micro_batches={micro_batches}")
}

/// Sizes that most of the extents do not divide: 5 heads, 11 positions, 3 layers.
#[test]
fn a_gpt_on_every_lattice_is_one_run() {
    let base = tiny_gpt("train.batch=24 train.eval_samples=11 model.dropout=0.1 model.context=11");
    let base = base.set("model.heads=5 model.width=20 model.layers=3 train.clip=0.5");
    let base = base.set("optimizer.name=sgd learning_rate.peak=0.1 learning_rate.decay_steps=100");
    let layouts = axis_sizes().filter(|[data, pipeline, tensor, sequence]| {
        24 % data == 0 && *pipeline <= 5 && *tensor <= 5 && *sequence <= 1 + usize::from(*tensor > 1)
    });
    let layout = |[data, pipeline, tensor, sequence]: [usize; 4]| {
        let schedule = ["1f1b", "gpipe", "zb-h1", "axonn"][(data + tensor) % 4];
        let mut fields = replicas_and_tensor(data, tensor);
        if sequence > 1 {
            fields += " parallel.sequence=true";
        }
        if data > 1 && tensor != 3 {
            fields += &format!(" parallel.zero={}", 1 + (pipeline + tensor) % 3);
        }
        if pipeline > 1 {
            fields += &format!(" parallel.pipeline={pipeline} parallel.schedule={schedule}");
        }
        fields
    };
    all_are_one(&base, some(layouts.map(layout).collect(), 8));
}

/// Images of 19 x 19 over slabs and tiles, convolutions by channels, stages and replicas.
#[test]
fn an_image_net_on_every_lattice_is_one_run() {
    let base = tiny_cnn("train.batch=24 train.eval_samples=11 data.size=19 model.layers.1.type=gelu");
    let base = base.set("model.layers.2.type=gelu model.layers.4.branch.1.type=gelu learning_rate.peak=0.01");
    let layouts = axis_sizes().filter(|[data, pipeline, tensor, spatial]| {
        24 % data == 0 && *pipeline <= 3 && *tensor <= 4 && *spatial <= 4
    });
    let layout = |[data, pipeline, tensor, spatial]: [usize; 4]| {
        let grid = if spatial == 4 && tensor == 1 { "[2,2]".into() } else { spatial.to_string() };
        let mut fields = replicas_and_tensor(data, tensor) + &format!(" parallel.spatial={grid}");
        if data > 1 && pipeline > 1 {
            fields += &format!(" parallel.zero={}", 2 + tensor % 2);
        }
        if pipeline > 1 {
            fields += &format!(" parallel.pipeline={pipeline}");
        }
        fields
    };
    all_are_one(&base, some(layouts.map(layout).collect(), 8));
}
