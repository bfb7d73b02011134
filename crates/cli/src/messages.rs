//! What messages take on this machine, among threads of this process or among its cards: alpha and beta from patterns of messages of
//! several sizes, and any exchange at its real size.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use espalier_comm::rendezvous::Place;
use espalier_comm::{Communicator, Failure, Reduce, nccl, threads};
use espalier_plan::cluster::measured::median;
use espalier_plan::cost::collective::{all_gather, point_to_point};
use espalier_plan::cost::{AllReduce, Cost, Exchange, Link};
use espalier_plan::spec::Precision;
use espalier_tensor::cuda::Cuda;
use espalier_tensor::ops::matmul::matmul;
use espalier_tensor::{Category, DType, Device, Tensor};
use espalier_train::Error;

/// No exchange is measured with more words than this on a rank, nor with more than sixteen times that on all of them: a longer
/// one is taken to last as many times as long.
const MOST_WORDS: usize = 1 << 22;
/// An exchange is repeated for about so long, and a few times at least.
const SAMPLE: Duration = Duration::from_millis(20);
const REPEATS: (usize, usize) = (3, 50);
/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(60);
/// The side of the products that a sum over ranks is overlapped with.
const SIDE: usize = 128;

/// Products of such a side in a stretch of computing between two meetings, and how many stretches are timed.
const STRETCH: usize = 4;
const STRETCHES: usize = 100;

/// Who sends messages to each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ranks {
    /// Threads of this process, with a core each.
    Threads(usize),
    /// The first cards of this machine, by NCCL.
    Cards(usize),
}

impl Ranks {
    /// How many they are.
    pub fn count(self) -> usize {
        match self {
            Ranks::Threads(ranks) | Ranks::Cards(ranks) => ranks,
        }
    }
}

/// One of the things that ranks do together to be timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Timed {
    /// What layers need.
    Layers(Exchange),
    /// So many words to the next rank of a ring.
    Message(f64),
}

/// A pattern of messages that was seen at one size.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Its name.
    pub pattern: &'static str,
    /// What each rank ends with, or sends.
    pub words: f64,
    /// What it is made of.
    pub cost: Cost,
    /// The median.
    pub seconds: f64,
}

/// What was seen of each pattern of messages.
pub struct Links(pub Vec<Seen>);

impl Links {
    /// What several rounds of the same have in the middle, each pattern and size by itself.
    pub fn medians(rounds: &[Links]) -> Links {
        let middle = |i: usize| Seen {
            seconds: median(rounds.iter().map(|round| round.0[i].seconds)),
            ..rounds[0].0[i]
        };
        Links((0..rounds[0].0.len()).map(middle).collect())
    }

    /// Alpha and beta by all patterns together.
    pub fn fitted(&self) -> Link {
        Link::fit(&self.costs(|_| true))
    }

    /// By each by itself.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, Link)> {
        let mut names: Vec<&str> = self.0.iter().map(|seen| seen.pattern).collect();
        names.dedup();
        names.into_iter().map(|name| (name, Link::fit(&self.costs(|pattern| pattern == name))))
    }

    /// Those of some patterns, by their names.
    pub fn costs(&self, of: impl Fn(&str) -> bool) -> Vec<(Cost, f64)> {
        self.0.iter().filter(|seen| of(seen.pattern)).map(|seen| (seen.cost, seen.seconds)).collect()
    }
}

/// The name of messages from one rank to another.
pub const POINT_TO_POINT: &str = "point_to_point";

/// A name, what of so many words is timed under it, and what that costs so many ranks.
type Pattern = (&'static str, fn(f64) -> Timed, fn(AllReduce, usize, f64) -> Cost);

const PATTERNS: [Pattern; 3] = [
    ("all_reduce", |words| Timed::Layers(Exchange::AllReduce(words)), AllReduce::cost),
    (
        "all_gather",
        |words| Timed::Layers(Exchange::AllGather(words)),
        |_, ranks, words| all_gather(ranks, words),
    ),
    (POINT_TO_POINT, Timed::Message, |_, _, words| point_to_point(words)),
];

/// Measures each pattern with messages of some sizes, in words. Sums are reckoned to be made as `all_reduce` says.
pub fn links(
    ranks: Ranks,
    all_reduce: AllReduce,
    precision: Precision,
    sizes: &[f64],
) -> Result<Links, Error> {
    let work: Vec<Timed> =
        PATTERNS.iter().flat_map(|(_, pattern, _)| sizes.iter().map(|&words| pattern(words))).collect();
    let mut times = time(ranks, precision, &work)?.into_iter();
    let mut seen = Vec::new();
    for (pattern, _, cost) in PATTERNS {
        for (&words, seconds) in sizes.iter().zip(&mut times) {
            seen.push(Seen { pattern, words, cost: cost(all_reduce, ranks.count(), words), seconds });
        }
    }
    Ok(Links(seen))
}

/// The median seconds of each, of the rank that it took longest.
pub fn time(ranks: Ranks, precision: Precision, work: &[Timed]) -> Result<Vec<f64>, Error> {
    let each = on_ranks(ranks, precision, |rank| {
        work.iter().map(|one| rank.seconds(*one)).collect::<Result<Vec<f64>, Error>>()
    })?;
    Ok((0..work.len()).map(|i| each.iter().map(|rank| rank[i]).fold(0.0, f64::max)).collect())
}

/// The share of a rank's computing that a sum of so many words takes away while it runs, from 0 up to, but without, 1.
pub fn occupies(ranks: Ranks, precision: Precision, words: f64) -> Result<f64, Error> {
    let each = on_ranks(ranks, precision, |rank| rank.occupied(words))?;
    Ok((each.iter().sum::<f64>() / each.len() as f64).clamp(0.0, 0.99))
}

/// What it costs threads to meet where two take turns on each core.
#[derive(Debug, Clone, Copy)]
pub struct Turns {
    /// Seconds that each of them works for it: half of what a small sum of pairs adds to a stretch of computing. While a pair wakes up
    /// another computes, so no core waits.
    pub meet: f64,
    /// Seconds for which cores have nothing to do where all meet: what a sum of all adds beyond that.
    pub turn: f64,
}

/// None for cards, which have one rank each.
pub fn turns(ranks: Ranks) -> Result<Option<Turns>, Error> {
    let Ranks::Threads(cores) = ranks else { return Ok(None) };
    let each = on_ranks(Ranks::Threads(2 * cores), Precision::F32, |rank| rank.turns())?;
    let longest = |of: usize| each.iter().map(|added| added[of]).fold(0.0, f64::max);
    let [all, pairs] = [longest(0), longest(1)];
    Ok(Some(Turns { meet: pairs / 2.0, turn: (all - pairs).max(0.0) }))
}

/// Runs `work` on every rank.
fn on_ranks<R: Send>(
    ranks: Ranks,
    precision: Precision,
    work: impl Fn(&Rank<'_>) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let dtype = espalier_nn::dtype(precision);
    match ranks {
        Ranks::Threads(ranks) => Ok(threads::run(ranks, PATIENCE, |comm| {
            work(&Rank { comm: &comm, device: &Device::cpu(1)?, dtype })
        })?),
        Ranks::Cards(ranks) => {
            // Nobody else takes it in a moment; who does is named by the rendezvous.
            let port =
                TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).map(|at| at.port());
            let port = port.map_err(|why| espalier_comm::Error::Launch {
                what: format!("no port for the ranks: {why}"),
            })?;
            let on_card = |rank: usize| -> Result<R, Error> {
                let cuda = Cuda::open(rank)?;
                let place = Place {
                    rank,
                    size: ranks,
                    local_rank: rank,
                    host: "127.0.0.1".into(),
                    ports: vec![port],
                };
                let device = Device::Cuda(cuda.clone());
                let ran: Result<R, Failure<Error>> = nccl::run(&cuda, &place, PATIENCE, |comm| {
                    work(&Rank { comm: &comm, device: &device, dtype })
                });
                Ok(ran?)
            };
            thread::scope(|scope| {
                let started: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || on_card(rank))).collect();
                started
                    .into_iter()
                    .map(|rank| rank.join().expect("a panic is caught where it happens"))
                    .collect()
            })
        }
    }
}

/// A rank that measures.
struct Rank<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    dtype: DType,
}

impl Rank<'_> {
    /// The median of some runs; one before them does not count, and says how many there will be.
    fn seconds(&self, work: Timed) -> Result<f64, Error> {
        let repeats = self.repeats(self.once(work)?)?;
        Ok(median((0..repeats).map(|_| self.once(work)).collect::<Result<Vec<f64>, Error>>()?))
    }

    /// How often something is repeated that took this rank so long; all ranks agree.
    fn repeats(&self, seconds: f64) -> Result<usize, Error> {
        let slowest = self.comm.all_reduce(vec![seconds], Reduce::Max)?[0];
        Ok(((SAMPLE.as_secs_f64() / slowest) as usize).clamp(REPEATS.0, REPEATS.1))
    }

    fn once(&self, work: Timed) -> Result<f64, Error> {
        match work {
            Timed::Layers(Exchange::AllReduce(words)) => {
                let (n, times) = self.shortened(words);
                let whole = self.words(n)?;
                Ok(times * self.clock(|| self.comm.all_reduce(whole, Reduce::Sum).map_err(Error::Comm))?)
            }
            Timed::Layers(Exchange::AllGather(words)) => {
                let (n, times) = self.shortened(words);
                let part = n.div_ceil(self.comm.size());
                let (part, whole) = (self.words(part)?, self.words(part * self.comm.size())?);
                Ok(times * self.clock(|| self.comm.all_gather(part, whole).map_err(Error::Comm))?)
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
            Ok(sends.into_iter().try_for_each(|send| send.wait().map(drop))?)
        })?;
        Ok(longest * seconds)
    }

    /// How much longer products take beside a sum of so many words, as a share of the sum's own time. The products last about
    /// twice as long as the sum, so that it can hide.
    fn occupied(&self, words: f64) -> Result<f64, Error> {
        let sum = self.seconds(Timed::Layers(Exchange::AllReduce(words)))?;
        let sum = self.comm.all_reduce(vec![sum], Reduce::Max)?[0];
        let (a, b) = (
            self.words(SIDE * SIDE)?.reshape(&[SIDE, SIDE]),
            self.words(SIDE * SIDE)?.reshape(&[SIDE, SIDE]),
        );
        let products = |times: usize| -> Result<(), Error> {
            (0..times).try_for_each(|_| matmul(&a, &b, None, Category::Activations).map(drop))?;
            Ok(self.device.synchronize()?)
        };
        products(1)?;
        let some = self.clock(|| products(20))? / 20.0;
        let some = self.comm.all_reduce(vec![some], Reduce::Max)?[0];
        let times = (2.0 * sum / some).ceil() as usize;
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        for _ in 0..self.repeats(2.0 * sum)? {
            alone.push(self.clock(|| products(times))?);
            let whole = self.words(words as usize)?;
            beside.push(self.clock(|| {
                let going = self.comm.start_all_reduce(whole, Reduce::Sum)?;
                products(times)?;
                going.wait().map_err(Error::Comm)
            })?);
        }
        Ok((median(beside) - median(alone)) / sum)
    }

    /// What a sum of a few words after each stretch of computing adds to a stretch: of all ranks, and of pairs.
    fn turns(&self) -> Result<[f64; 2], Error> {
        let square = || Ok::<_, Error>(self.words(SIDE * SIDE)?.reshape(&[SIDE, SIDE]));
        let (a, b) = (square()?, square()?);
        let pair =
            self.comm.split(Some(self.comm.rank() / 2), self.comm.rank())?.expect("a colour was given");
        let stretches = |meeting: Option<&Communicator>| {
            self.clock(|| {
                for _ in 0..STRETCHES {
                    (0..STRETCH).try_for_each(|_| matmul(&a, &b, None, Category::Activations).map(drop))?;
                    if let Some(group) = meeting {
                        group.all_reduce(vec![0.0], Reduce::Sum)?;
                    }
                }
                self.comm.barrier().map_err(Error::Comm)
            })
        };
        stretches(Some(self.comm))?;
        let [all, pairs, none] = [stretches(Some(self.comm))?, stretches(Some(&pair))?, stretches(None)?];
        Ok([all, pairs].map(|met| ((met - none) / STRETCHES as f64).max(0.0)))
    }

    /// So many words, or fewer, and how many times as long the exchange then is.
    fn shortened(&self, words: f64) -> (usize, f64) {
        let most = MOST_WORDS.min(16 * MOST_WORDS / self.comm.size()) as f64;
        if words <= most { (words as usize, 1.0) } else { (most as usize, words / most) }
    }

    fn words(&self, n: usize) -> Result<Tensor, Error> {
        Ok(Tensor::zeros(self.device, &[n], self.dtype, Category::Communication)?)
    }

    /// Seconds from when all ranks are there.
    fn clock<R>(&self, work: impl FnOnce() -> Result<R, Error>) -> Result<f64, Error> {
        self.comm.barrier()?;
        let start = Instant::now();
        let made = work()?;
        let seconds = start.elapsed().as_secs_f64();
        drop(made);
        Ok(seconds)
    }
}
