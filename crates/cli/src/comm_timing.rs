//! What messages take on this machine, among threads of this process or among its GPUs: alpha and beta from
//! patterns of messages of several sizes, and any collective at its real size.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use espalier_comm::rendezvous::RendezvousConfig;
use espalier_comm::{Communicator, Failure, Reduce, nccl, threads};
use espalier_plan::cluster::measured::median;
use espalier_plan::cost::collective::{all_gather, point_to_point};
use espalier_plan::cost::{AllReduce, AlphaBeta, CollectivePattern, Cost};
use espalier_plan::spec::Precision;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::Error;

/// No collective is measured with more elements than this on a rank, nor with more than sixteen times that on
/// all of them: a longer one is taken to last as many times as long.
const MAX_ELEMENTS: usize = 1 << 22;
/// A collective is repeated for about so long, and a few times at least.
const SAMPLE: Duration = Duration::from_millis(20);
const REPEATS: (usize, usize) = (3, 50);
/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The side of the products that an all-reduce is overlapped with.
const SIDE: usize = 128;

/// Products of such a side in an interval of computing between two synchronizations, and how many intervals
/// are timed.
const PRODUCTS_PER_INTERVAL: usize = 4;
const INTERVALS: usize = 100;

/// Who sends messages to each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BenchRanks {
    /// Threads of this process, with a core each.
    Threads(usize),
    /// The first GPUs of this machine, by NCCL.
    Gpus(usize),
}

impl BenchRanks {
    /// How many they are.
    pub fn count(self) -> usize {
        match self {
            BenchRanks::Threads(ranks) | BenchRanks::Gpus(ranks) => ranks,
        }
    }
}

/// One of the things that ranks do together to be timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TimedTransfer {
    /// What layers need.
    Layers(CollectivePattern),
    /// So many elements to the next rank of a ring.
    Message(f64),
}

/// A pattern of messages that was measured at one size.
#[derive(Debug, Clone, Copy)]
pub struct PatternSample {
    pub pattern: &'static str,
    /// What each rank ends with, or sends.
    pub elements: f64,
    /// What it is made of.
    pub cost: Cost,
    /// The median.
    pub seconds: f64,
}

/// What was measured of each pattern of messages.
pub struct LinkSamples(pub Vec<PatternSample>);

impl LinkSamples {
    /// What several rounds of the same have in the middle, each pattern and size by itself.
    pub fn medians(rounds: &[LinkSamples]) -> LinkSamples {
        let middle = |i: usize| PatternSample {
            seconds: median(rounds.iter().map(|round| round.0[i].seconds)),
            ..rounds[0].0[i]
        };
        LinkSamples((0..rounds[0].0.len()).map(middle).collect())
    }

    /// Alpha and beta by all patterns together.
    pub fn fitted(&self) -> AlphaBeta {
        AlphaBeta::fit(&self.costs(|_| true))
    }

    /// By each by itself.
    pub fn by_pattern(&self) -> impl Iterator<Item = (&'static str, AlphaBeta)> {
        let mut names: Vec<&str> = self.0.iter().map(|sample| sample.pattern).collect();
        names.dedup();
        names.into_iter().map(|name| (name, AlphaBeta::fit(&self.costs(|pattern| pattern == name))))
    }

    /// Those of some patterns, by their names.
    pub fn costs(&self, of: impl Fn(&str) -> bool) -> Vec<(Cost, f64)> {
        self.0
            .iter()
            .filter(|sample| of(sample.pattern))
            .map(|sample| (sample.cost, sample.seconds))
            .collect()
    }
}

/// The name of messages from one rank to another.
pub const POINT_TO_POINT: &str = "point_to_point";

/// A name, what of so many elements is timed under it, and what that costs so many ranks.
type MessagePattern = (&'static str, fn(f64) -> TimedTransfer, fn(AllReduce, usize, f64) -> Cost);

const PATTERNS: [MessagePattern; 3] = [
    ("all_reduce", |elements| TimedTransfer::Layers(CollectivePattern::AllReduce(elements)), AllReduce::cost),
    (
        "all_gather",
        |elements| TimedTransfer::Layers(CollectivePattern::AllGather(elements)),
        |_, ranks, elements| all_gather(ranks, elements),
    ),
    (POINT_TO_POINT, TimedTransfer::Message, |_, _, elements| point_to_point(elements)),
];

/// Measures each pattern with messages of some sizes, in elements. All-reduces are reckoned to be made as
/// `all_reduce` says.
pub fn links(
    ranks: BenchRanks,
    all_reduce: AllReduce,
    precision: Precision,
    sizes: &[f64],
) -> Result<LinkSamples, Error> {
    let work: Vec<TimedTransfer> =
        PATTERNS.iter().flat_map(|(_, pattern, _)| sizes.iter().map(|&elements| pattern(elements))).collect();
    let mut times = time(ranks, precision, &work)?.into_iter();
    let mut samples = Vec::new();
    for (pattern, _, cost) in PATTERNS {
        for (&elements, seconds) in sizes.iter().zip(&mut times) {
            samples.push(PatternSample {
                pattern,
                elements,
                cost: cost(all_reduce, ranks.count(), elements),
                seconds,
            });
        }
    }
    Ok(LinkSamples(samples))
}

/// The median seconds of each, of the rank that it took longest.
pub fn time(ranks: BenchRanks, precision: Precision, work: &[TimedTransfer]) -> Result<Vec<f64>, Error> {
    let each = on_ranks(ranks, precision, |rank| {
        work.iter().map(|one| rank.seconds(*one)).collect::<Result<Vec<f64>, Error>>()
    })?;
    Ok((0..work.len()).map(|i| each.iter().map(|rank| rank[i]).fold(0.0, f64::max)).collect())
}

/// The fraction of a rank's computing that an all-reduce of so many elements takes away while it runs, from 0
/// up to, but without, 1.
pub fn occupies(ranks: BenchRanks, precision: Precision, elements: f64) -> Result<f64, Error> {
    let each = on_ranks(ranks, precision, |rank| rank.overlap_cost(elements))?;
    Ok((each.iter().sum::<f64>() / each.len() as f64).clamp(0.0, 0.99))
}

/// What a synchronization costs threads of which two share each core.
#[derive(Debug, Clone, Copy)]
pub struct OversubscriptionCost {
    /// Seconds that each of them works for it: half of what a small all-reduce of pairs adds to an interval of
    /// computing. While a pair wakes up another computes, so no core waits.
    pub sync_seconds: f64,
    /// Seconds for which cores have nothing to do where all synchronize: what an all-reduce of all adds
    /// beyond that.
    pub idle_seconds: f64,
}

/// None for GPUs, which have one rank each.
pub fn oversubscription(ranks: BenchRanks) -> Result<Option<OversubscriptionCost>, Error> {
    let BenchRanks::Threads(cores) = ranks else { return Ok(None) };
    let each = on_ranks(BenchRanks::Threads(2 * cores), Precision::F32, |rank| rank.oversubscription())?;
    let longest = |of: usize| each.iter().map(|added| added[of]).fold(0.0, f64::max);
    let [all, pairs] = [longest(0), longest(1)];
    Ok(Some(OversubscriptionCost { sync_seconds: pairs / 2.0, idle_seconds: (all - pairs).max(0.0) }))
}

/// Runs `work` on every rank.
fn on_ranks<R: Send>(
    ranks: BenchRanks,
    precision: Precision,
    work: impl Fn(&BenchRank<'_>) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let dtype = espalier_nn::dtype(precision);
    match ranks {
        BenchRanks::Threads(ranks) => Ok(threads::run(ranks, TIMEOUT, |comm| {
            work(&BenchRank { comm: &comm, device: &Device::cpu(1)?, dtype })
        })?),
        BenchRanks::Gpus(ranks) => {
            // Nobody else takes it in a moment; who does is named by the rendezvous.
            let port =
                TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).map(|at| at.port());
            let port = port.map_err(|why| espalier_comm::Error::Launch {
                what: format!("no port for the ranks: {why}"),
            })?;
            let on_gpu = |rank: usize| -> Result<R, Error> {
                let cuda = Cuda::open(rank)?;
                let rendezvous = RendezvousConfig {
                    rank,
                    size: ranks,
                    local_rank: rank,
                    host: "127.0.0.1".into(),
                    ports: vec![port],
                };
                let device = Device::Cuda(cuda.clone());
                let ran: Result<R, Failure<Error>> = nccl::run(&cuda, &rendezvous, TIMEOUT, |comm| {
                    work(&BenchRank { comm: &comm, device: &device, dtype })
                });
                Ok(ran?)
            };
            thread::scope(|scope| {
                let started: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || on_gpu(rank))).collect();
                started
                    .into_iter()
                    .map(|rank| rank.join().expect("a panic is caught where it happens"))
                    .collect()
            })
        }
    }
}

/// A rank that measures.
struct BenchRank<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    dtype: DType,
}

impl BenchRank<'_> {
    /// The median of some runs; one before them does not count, and says how many there will be.
    fn seconds(&self, work: TimedTransfer) -> Result<f64, Error> {
        let repeats = self.repeats(self.once(work)?)?;
        Ok(median((0..repeats).map(|_| self.once(work)).collect::<Result<Vec<f64>, Error>>()?))
    }

    /// How often something is repeated that took this rank so long; all ranks agree.
    fn repeats(&self, seconds: f64) -> Result<usize, Error> {
        let slowest = self.comm.all_reduce(vec![seconds], Reduce::Max)?[0];
        Ok(((SAMPLE.as_secs_f64() / slowest) as usize).clamp(REPEATS.0, REPEATS.1))
    }

    fn once(&self, work: TimedTransfer) -> Result<f64, Error> {
        match work {
            TimedTransfer::Layers(CollectivePattern::AllReduce(elements)) => {
                let (n, times) = self.capped(elements);
                let full = self.zeros(n)?;
                Ok(times * self.clock(|| self.comm.all_reduce(full, Reduce::Sum).map_err(Error::Comm))?)
            }
            TimedTransfer::Layers(CollectivePattern::AllGather(elements)) => {
                let (n, times) = self.capped(elements);
                let shard = n.div_ceil(self.comm.size());
                let (shard, full) = (self.zeros(shard)?, self.zeros(shard * self.comm.size())?);
                Ok(times * self.clock(|| self.comm.all_gather(shard, full).map_err(Error::Comm))?)
            }
            TimedTransfer::Layers(CollectivePattern::Halo(before, behind)) => {
                let rank = self.comm.rank();
                let (to_before, to_behind) = (rank.checked_sub(1), Some(rank + 1));
                self.send_and_receive(&[(to_before, to_behind, before), (to_behind, to_before, behind)])
            }
            TimedTransfer::Message(elements) => {
                let (rank, size) = (self.comm.rank(), self.comm.size());
                self.send_and_receive(&[(Some((rank + 1) % size), Some((rank + size - 1) % size), elements)])
            }
        }
    }

    /// Sends elements to one rank while as many come from another, for each of some (to, from, elements) at
    /// once. Those at the edge of the world have no neighbour there.
    fn send_and_receive(&self, all: &[(Option<usize>, Option<usize>, f64)]) -> Result<f64, Error> {
        let there = |rank: Option<usize>| rank.filter(|rank| *rank < self.comm.size());
        let (mut sends, mut receives, mut longest) = (Vec::new(), Vec::new(), 1.0);
        for (tag, (to, from, elements)) in (0..).zip(all) {
            let (n, times) = self.capped(*elements);
            if n == 0 {
                continue;
            }
            longest = times.max(longest);
            if let Some(to) = there(*to) {
                sends.push((self.zeros(n)?, to, tag));
            }
            if let Some(from) = there(*from) {
                receives.push((self.zeros(n)?, from, tag));
            }
        }
        let seconds = self.clock(|| {
            let sends = sends.into_iter().map(|(data, to, tag)| self.comm.start_send(data, to, tag));
            let sends = sends.collect::<espalier_comm::Result<Vec<_>>>()?;
            for (data, from, tag) in receives {
                self.comm.receive(data, from, tag)?;
            }
            Ok(sends.into_iter().try_for_each(|send| send.wait().map(drop))?)
        })?;
        Ok(longest * seconds)
    }

    /// How much longer products take beside an all-reduce of so many elements, as a fraction of the all-reduce's
    /// own time. The products last about twice as long as the all-reduce, so that it can hide.
    fn overlap_cost(&self, elements: f64) -> Result<f64, Error> {
        let all_reduce_seconds =
            self.seconds(TimedTransfer::Layers(CollectivePattern::AllReduce(elements)))?;
        let all_reduce_seconds = self.comm.all_reduce(vec![all_reduce_seconds], Reduce::Max)?[0];
        let (a, b) = (
            self.zeros(SIDE * SIDE)?.reshape(&[SIDE, SIDE]),
            self.zeros(SIDE * SIDE)?.reshape(&[SIDE, SIDE]),
        );
        let products = |times: usize| -> Result<(), Error> {
            (0..times).try_for_each(|_| matmul(&a, &b, None, Category::Activations).map(drop))?;
            Ok(self.device.synchronize()?)
        };
        products(1)?;
        let some = self.clock(|| products(20))? / 20.0;
        let some = self.comm.all_reduce(vec![some], Reduce::Max)?[0];
        let times = (2.0 * all_reduce_seconds / some).ceil() as usize;
        let (mut without, mut overlapped) = (Vec::new(), Vec::new());
        for _ in 0..self.repeats(2.0 * all_reduce_seconds)? {
            without.push(self.clock(|| products(times))?);
            let full = self.zeros(elements as usize)?;
            overlapped.push(self.clock(|| {
                let pending = self.comm.start_all_reduce(full, Reduce::Sum)?;
                products(times)?;
                pending.wait().map_err(Error::Comm)
            })?);
        }
        Ok((median(overlapped) - median(without)) / all_reduce_seconds)
    }

    /// What an all-reduce of a few elements after each interval of computing adds to an interval: of all
    /// ranks, and of pairs.
    fn oversubscription(&self) -> Result<[f64; 2], Error> {
        let square = || Ok::<_, Error>(self.zeros(SIDE * SIDE)?.reshape(&[SIDE, SIDE]));
        let (a, b) = (square()?, square()?);
        let pair =
            self.comm.split(Some(self.comm.rank() / 2), self.comm.rank())?.expect("a colour was given");
        let intervals = |group: Option<&Communicator>| {
            self.clock(|| {
                for _ in 0..INTERVALS {
                    (0..PRODUCTS_PER_INTERVAL)
                        .try_for_each(|_| matmul(&a, &b, None, Category::Activations).map(drop))?;
                    if let Some(group) = group {
                        group.all_reduce(vec![0.0], Reduce::Sum)?;
                    }
                }
                self.comm.barrier().map_err(Error::Comm)
            })
        };
        intervals(Some(self.comm))?;
        let [all, pairs, none] = [intervals(Some(self.comm))?, intervals(Some(&pair))?, intervals(None)?];
        Ok([all, pairs].map(|seconds| ((seconds - none) / INTERVALS as f64).max(0.0)))
    }

    /// So many elements, or fewer, and how many times as long the collective then is.
    fn capped(&self, elements: f64) -> (usize, f64) {
        let most = MAX_ELEMENTS.min(16 * MAX_ELEMENTS / self.comm.size()) as f64;
        if elements <= most { (elements as usize, 1.0) } else { (most as usize, elements / most) }
    }

    fn zeros(&self, n: usize) -> Result<Tensor, Error> {
        Ok(Tensor::zeros(self.device, &[n], self.dtype, Category::Communication)?)
    }

    /// Seconds from when all ranks are there.
    fn clock<R>(&self, work: impl FnOnce() -> Result<R, Error>) -> Result<f64, Error> {
        self.comm.barrier()?;
        let start = Instant::now();
        let output = work()?;
        let seconds = start.elapsed().as_secs_f64();
        drop(output);
        Ok(seconds)
    }
}
