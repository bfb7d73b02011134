//! What messages take on this machine, where ranks are threads of one process: alpha and beta from messages of two sizes, and
//! the exchanges of every layer at their real sizes.

use std::time::{Duration, Instant};

use anyhow::Result;
use espalier_comm::{Communicator, Reduce, threads};
use espalier_plan::cost::collective::{all_gather, point_to_point};
use espalier_plan::cost::explanation::Row;
use espalier_plan::cost::{Cost, Exchange, Explanation, Link, Parallelism, Setting};
use espalier_plan::spec::Precision;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::Error;
use serde_json::{Map, Value, json};

/// Words of a short message and of a long one.
const SIZES: [f64; 2] = [1024.0, 1_048_576.0];
/// No exchange is measured with more words than this on a rank, nor with more than sixteen times that on all of them: a longer
/// one is taken to last as many times as long.
const MOST_WORDS: usize = 1 << 22;
/// An exchange is repeated for about so long, and a few times at least.
const SAMPLE: Duration = Duration::from_millis(20);
const REPEATS: (usize, usize) = (3, 50);
/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(60);

/// What alpha and beta are by each pattern of messages.
pub struct Links {
    seen: Vec<(&'static str, [(Cost, f64); 2])>,
}

impl Links {
    /// By all patterns together.
    pub fn fitted(&self) -> Link {
        let all: Vec<_> = self.seen.iter().flat_map(|(_, seen)| *seen).collect();
        Link::fit(&all)
    }

    /// By each by itself.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, Link)> {
        self.seen.iter().map(|(name, seen)| (*name, Link::fit(seen)))
    }
}

/// What was measured.
pub struct Measured {
    /// Of the machine.
    pub links: Links,
    /// Of every layer.
    pub layers: Vec<Seconds>,
}

/// Seconds by each parallelism, in the order of [`Parallelism::ALL`]; none where it is impossible.
pub struct Seconds([Option<f64>; 3]);

impl Seconds {
    fn new(by: impl FnMut(Parallelism) -> Option<f64>) -> Seconds {
        Seconds(Parallelism::ALL.map(by))
    }

    /// By one of them.
    pub fn of(&self, by: Parallelism) -> Option<f64> {
        self.0[by as usize]
    }

    /// The one that took least.
    pub fn cheapest(&self) -> Option<Parallelism> {
        let all = Parallelism::ALL.into_iter().filter_map(|by| Some((by, self.of(by)?)));
        all.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(by, _)| by)
    }

    fn json(&self) -> Value {
        Parallelism::ALL
            .into_iter()
            .map(|by| (by.name().into(), self.of(by).into()))
            .collect::<Map<_, _>>()
            .into()
    }
}

impl Measured {
    /// Of all layers by one parallelism, where they all can.
    pub fn total(&self) -> Seconds {
        Seconds::new(|by| self.layers.iter().map(|layer| layer.of(by)).sum())
    }

    /// As `--json` prints it.
    pub fn json(&self, explanation: &Explanation) -> Value {
        let link = |link: Link| json!({ "alpha": link.alpha, "beta": link.beta });
        let named = explanation.layers.iter().zip(&self.layers).map(|(row, layer)| {
            let mut value = layer.json();
            value["name"] = row.sizes.name.clone().into();
            value
        });
        let patterns: Map<_, _> = self.links.each().map(|(name, each)| (name.into(), link(each))).collect();
        json!({
            "fitted": link(self.links.fitted()),
            "by_pattern": patterns,
            "layers": named.collect::<Vec<_>>(),
            "total": self.total().json(),
        })
    }
}

/// One of the things that ranks do together to be timed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Timed {
    Layers(Exchange),
    /// To the next rank of a ring.
    Message(f64),
}

/// A name, and what of so many words is timed under it.
type Pattern = (&'static str, fn(f64) -> Timed);

/// Measures messages of two sizes among as many threads as there are ranks.
pub fn links(at: &Setting, precision: Precision) -> Result<Links> {
    let patterns: [Pattern; 3] = [
        ("all_reduce", |words| Timed::Layers(Exchange::AllReduce(words))),
        ("all_gather", |words| Timed::Layers(Exchange::AllGather(words))),
        ("point_to_point", Timed::Message),
    ];
    let work: Vec<Timed> = patterns.iter().flat_map(|(_, pattern)| SIZES.map(pattern)).collect();
    let times = time(at.ranks, precision, &work)?;
    let costs = [
        |at: &Setting, words| at.cost(Exchange::AllReduce(words)),
        |at: &Setting, words| all_gather(at.ranks, words),
        |_: &Setting, words| point_to_point(words),
    ];
    let seen = patterns.iter().zip(costs).enumerate().map(|(i, ((name, _), cost))| {
        let seen = |size: usize| (cost(at, SIZES[size]), times[2 * i + size]);
        (*name, [seen(0), seen(1)])
    });
    Ok(Links { seen: seen.collect() })
}

/// Measures the exchanges of all layers.
pub fn layers(links: Links, explanation: &Explanation, precision: Precision) -> Result<Measured> {
    let at = &explanation.setting;
    let of = |row: &Row, by| row.sizes.exchanges(by, at).unwrap_or_default();
    // Layers of a transformer are all alike: each exchange is measured once.
    let mut work: Vec<Timed> = Vec::new();
    for exchange in explanation.layers.iter().flat_map(|row| Parallelism::ALL.map(|by| of(row, by))).flatten()
    {
        let timed = Timed::Layers(exchange);
        if at.cost(exchange) != Cost::FREE && !work.contains(&timed) {
            work.push(timed);
        }
    }
    let times = time(at.ranks, precision, &work)?;
    let seconds = |exchange: Exchange| {
        work.iter().position(|timed| *timed == Timed::Layers(exchange)).map_or(0.0, |i| times[i])
    };
    let of = |row: &Row, by| Some(row.sizes.exchanges(by, at)?.into_iter().map(seconds).sum());
    let layers = explanation.layers.iter().map(|row| Seconds::new(|by| of(row, by)));
    Ok(Measured { links, layers: layers.collect() })
}

/// The median seconds of each, of the rank that it took longest.
fn time(ranks: usize, precision: Precision, work: &[Timed]) -> Result<Vec<f64>> {
    let dtype = match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
    };
    let each = threads::run(ranks, PATIENCE, |comm| {
        let device = Device::cpu(1).map_err(Error::Tensor)?;
        work.iter().map(|one| Bench { comm: &comm, device: &device, dtype }.seconds(*one)).collect()
    });
    let each: Vec<Vec<f64>> = each.map_err(Error::from)?;
    Ok((0..work.len()).map(|i| each.iter().map(|rank| rank[i]).fold(0.0, f64::max)).collect())
}

/// A rank that measures.
struct Bench<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    dtype: DType,
}

impl Bench<'_> {
    /// The median of some runs; one before them does not count, and says how many there will be.
    fn seconds(&self, work: Timed) -> Result<f64, Error> {
        let first = self.once(work)?;
        // All ranks must agree.
        let slowest = self.comm.all_reduce(vec![first], Reduce::Max).map_err(Error::Comm)?[0];
        let repeats = ((SAMPLE.as_secs_f64() / slowest) as usize).clamp(REPEATS.0, REPEATS.1);
        let mut times = (0..repeats).map(|_| self.once(work)).collect::<Result<Vec<f64>, Error>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[repeats / 2])
    }

    fn once(&self, work: Timed) -> Result<f64, Error> {
        match work {
            Timed::Layers(Exchange::AllReduce(words)) => {
                let (n, times) = self.shortened(words);
                let whole = self.words(n)?;
                Ok(times * self.clock(|| self.comm.all_reduce(whole, Reduce::Sum).map(drop))?)
            }
            Timed::Layers(Exchange::AllGather(words)) => {
                let (n, times) = self.shortened(words);
                let part = n.div_ceil(self.comm.size());
                let (part, whole) = (self.words(part)?, self.words(part * self.comm.size())?);
                Ok(times * self.clock(|| self.comm.all_gather(part, whole).map(drop))?)
            }
            Timed::Layers(Exchange::Halo(before, behind)) => {
                let rank = self.comm.rank();
                let (to_before, to_behind) = (rank.checked_sub(1), Some(rank + 1));
                self.messages(&[(to_before, to_behind, before), (to_behind, to_before, behind)])
            }
            Timed::Message(words) => {
                let (rank, size) = (self.comm.rank(), self.comm.size());
                self.messages(&[(Some((rank + 1) % size), Some((rank + size - 1) % size), words)])
            }
        }
    }

    /// Sends words to one rank while as many come from another, for each of some (to, from, words) at once. Those at the
    /// edge of the world have no neighbour there.
    fn messages(&self, all: &[(Option<usize>, Option<usize>, f64)]) -> Result<f64, Error> {
        let there = |rank: Option<usize>| rank.filter(|rank| *rank < self.comm.size());
        let (mut sends, mut receives, mut longest) = (Vec::new(), Vec::new(), 1.0);
        for (tag, (to, from, words)) in (0..).zip(all) {
            let (n, times) = self.shortened(*words);
            if n == 0 {
                continue;
            }
            longest = times.max(longest);
            if let Some(to) = there(*to) {
                sends.push((self.words(n)?, to, tag));
            }
            if let Some(from) = there(*from) {
                receives.push((self.words(n)?, from, tag));
            }
        }
        let seconds = self.clock(|| {
            let sends = sends.into_iter().map(|(data, to, tag)| self.comm.start_send(data, to, tag));
            let sends = sends.collect::<espalier_comm::Result<Vec<_>>>()?;
            for (data, from, tag) in receives {
                self.comm.receive(data, from, tag)?;
            }
            sends.into_iter().try_for_each(|send| send.wait().map(drop))
        })?;
        Ok(longest * seconds)
    }

    /// So many words, or fewer, and how many times as long the exchange then is.
    fn shortened(&self, words: f64) -> (usize, f64) {
        let most = MOST_WORDS.min(16 * MOST_WORDS / self.comm.size()) as f64;
        if words <= most { (words as usize, 1.0) } else { (most as usize, words / most) }
    }

    fn words(&self, n: usize) -> Result<Tensor, Error> {
        Tensor::zeros(self.device, &[n], self.dtype, Category::Communication).map_err(Error::Tensor)
    }

    /// Seconds from when all ranks are there.
    fn clock(&self, work: impl FnOnce() -> espalier_comm::Result<()>) -> Result<f64, Error> {
        self.comm.barrier().map_err(Error::Comm)?;
        let start = Instant::now();
        work().map_err(Error::Comm)?;
        Ok(start.elapsed().as_secs_f64())
    }
}
