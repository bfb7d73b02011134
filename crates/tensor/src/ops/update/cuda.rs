//! Optimizer steps on a card: one launch for a whole list of tensors.
//!
//! What the kernels work on is described by arrays that go to the card with each step, in one upload: norms, the
//! targets, the list of blocks, and the first block of each tensor.

use std::marker::PhantomData;

use super::{Moments, SquaredNorms, Target};
use crate::cuda::lanes::{self, THREADS, TILE};
use crate::cuda::{Args, Build, Cuda, Source};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::tensor::Tensor;

pub(crate) static SOURCE: Source = lanes::source("update.cu", include_str!("../update.cu"), &[Build::PLAIN]);

/// Flags of a target.
const NARROW_GRADIENT: u32 = 1;
const ADAPT: u32 = 2;

/// Which step is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    Sgd,
    Momentum,
    Adam,
    Lars,
    Lamb,
}

impl Rule {
    fn kernel(self) -> &'static str {
        match self {
            Rule::Sgd => "update_sgd",
            Rule::Momentum => "update_momentum",
            Rule::Adam => "update_adam",
            Rule::Lars => "update_lars",
            Rule::Lamb => "update_lamb",
        }
    }

    fn states(self) -> usize {
        match self {
            Rule::Sgd => 0,
            Rule::Momentum | Rule::Lars => 1,
            Rule::Adam | Rule::Lamb => 2,
        }
    }

    /// Whether a layer's norms enter the step.
    fn adapts(self) -> bool {
        matches!(self, Rule::Lars | Rule::Lamb)
    }
}

/// A step's numbers, the same for all its tensors; those that a rule does not name are ignored.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Settings {
    pub(super) lr: f32,
    pub(super) gradient_scale: f32,
    pub(super) momentum: f32,
    pub(super) eps: f32,
    pub(super) trust: f32,
    pub(super) nesterov: bool,
    pub(super) decoupled: bool,
    pub(super) moments: Option<Moments>,
}

impl Settings {
    /// In the order of the kernels' struct.
    fn fields(&self) -> [u32; 11] {
        let Settings { lr, gradient_scale, momentum, eps, trust, nesterov, decoupled, moments } = *self;
        let (beta1, beta2, unbias1, unbias2) =
            moments.map_or((0.0, 0.0, 0.0, 0.0), |m| (m.beta1, m.beta2, m.unbias1, m.unbias2));
        let floats = [lr, gradient_scale, momentum, beta1, beta2, eps, unbias1, unbias2, trust];
        let mut fields = [0; 11];
        for (field, float) in fields.iter_mut().zip(floats) {
            *field = float.to_bits();
        }
        fields[9..].copy_from_slice(&[nesterov.into(), decoupled.into()]);
        fields
    }
}

/// A tensor as the kernels see it: addresses on the card, or 0 for what is not there.
#[derive(Debug)]
pub(super) struct Described<'a> {
    weight: u64,
    master: u64,
    gradient: u64,
    /// m and v.
    states: [u64; 2],
    length: usize,
    decay: f32,
    flags: u32,
    /// How many states there are, and whether all but the gradient may be written to.
    held: usize,
    writable: bool,
    card: &'a Cuda,
    tensors: PhantomData<&'a mut Tensor>,
}

/// Words of 8 bytes that a target takes on the card.
const WORDS: usize = 7;

impl<'a> Described<'a> {
    /// A target with its states, this being the only owner of all that a step writes to.
    pub(super) fn to_write<const S: usize>(
        target: Target<'a>,
        states: [&'a mut Tensor; S],
        decay: f32,
        adapt: bool,
    ) -> Described<'a> {
        let Target { weight, master, gradient } = target;
        let (weight, master) = (only(weight), master.map(only));
        let states = states.map(only);
        Described { writable: true, ..Described::new(weight, master, gradient, &states, decay, adapt) }
    }

    /// A target with its states, to be measured.
    pub(super) fn to_read(target: &'a Target<'_>, states: &[&'a Tensor], decay: f32) -> Described<'a> {
        Described::new(target.weight, target.master.as_deref(), target.gradient, states, decay, true)
    }

    fn new(
        weight: &'a Tensor,
        master: Option<&'a Tensor>,
        gradient: &'a Tensor,
        states: &[&'a Tensor],
        decay: f32,
        adapt: bool,
    ) -> Described<'a> {
        let exact = master.unwrap_or(weight);
        assert!(
            states.iter().chain([&gradient, &exact]).all(|other| other.len() == weight.len()),
            "update: lengths differ from the weight's {}",
            weight.len()
        );
        assert!(
            states.iter().chain([&exact]).all(|tensor| tensor.dtype() == DType::F32),
            "update: the exact weight and the states are f32"
        );
        assert!(
            master.is_none() || weight.dtype() == DType::Bf16,
            "update: a master copy of {:?}",
            weight.dtype()
        );
        let address = |tensor: &Tensor| {
            assert!(
                tensor.cuda_buffer().cuda().is(gradient.cuda_buffer().cuda()),
                "update: a target on two cards"
            );
            tensor.cuda_buffer().address()
        };
        Described {
            weight: address(weight),
            master: master.map_or(0, address),
            states: [0, 1].map(|i| states.get(i).map_or(0, |state| address(state))),
            decay,
            flags: if adapt { ADAPT } else { 0 },
            held: states.len(),
            ..Described::gradient(gradient)
        }
        .with_flags_of(gradient)
    }

    /// A gradient alone, to be measured.
    fn gradient(gradient: &'a Tensor) -> Described<'a> {
        Described {
            weight: 0,
            master: 0,
            gradient: gradient.cuda_buffer().address(),
            states: [0; 2],
            length: gradient.len(),
            decay: 0.0,
            flags: 0,
            held: 0,
            writable: false,
            card: gradient.cuda_buffer().cuda(),
            tensors: PhantomData,
        }
        .with_flags_of(gradient)
    }

    fn with_flags_of(mut self, gradient: &Tensor) -> Described<'a> {
        self.flags |= match gradient.dtype() {
            DType::F32 => 0,
            DType::Bf16 => NARROW_GRADIENT,
            DType::U32 => panic!("update: indices as a gradient"),
        };
        self
    }

    /// As the kernels' struct lies in memory.
    fn words(&self) -> [u64; WORDS] {
        let Described { weight, master, gradient, states: [m, v], length, .. } = *self;
        [weight, master, gradient, m, v, length as u64, pair(self.decay.to_bits(), self.flags)]
    }
}

/// A tensor that is about to be written to.
fn only(tensor: &mut Tensor) -> &Tensor {
    tensor.cuda_buffer_mut();
    tensor
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Where a step with a trust ratio has its norms from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ratios<'a> {
    /// From the host, one for each target.
    Given(&'a [SquaredNorms]),
    /// Measured on the card, on the way.
    Measured,
}

/// A step over all targets, which are on this card.
pub(super) fn step(
    cuda: &Cuda,
    rule: Rule,
    all: &[Described<'_>],
    settings: Settings,
    ratios: Ratios<'_>,
) -> Result<()> {
    assert!(all.iter().all(|one| one.writable && one.held == rule.states()), "update: states of {rule:?}");
    let given = match ratios {
        Ratios::Given(norms) => norms,
        Ratios::Measured => &[],
    };
    let table = Table::new(cuda, all, given)?;
    let mut args = table.args(settings);
    if rule.adapts() {
        match ratios {
            Ratios::Given(norms) => assert_eq!(norms.len(), all.len(), "update: norms and targets"),
            Ratios::Measured => table.measure(cuda, norms_of(rule), settings, table.norms())?,
        }
        args = args.pointer(table.norms());
    }
    let kernel = cuda.kernel(&SOURCE, Build::PLAIN, rule.kernel())?;
    // SAFETY: the table describes tensors borrowed for this call, with the states that the rule names; the list
    // has an entry for each block, and there are norms for each tensor.
    unsafe { kernel.launch(lanes::blocks(table.blocks, 1), THREADS, 0, args) }
}

/// The squared norms that a rule takes, of each target; the host waits for them, once.
pub(super) fn norms(
    cuda: &Cuda,
    rule: Rule,
    all: &[Described<'_>],
    settings: Settings,
) -> Result<Vec<SquaredNorms>> {
    assert!(rule != Rule::Lamb || all.iter().all(|one| one.held == rule.states()), "update: states of LAMB");
    read_norms(cuda, norms_of(rule), all, settings)
}

/// The squared norm of each tensor; the host waits for them, once.
pub(crate) fn squared_norms(cuda: &Cuda, tensors: &[&Tensor]) -> Result<Vec<f64>> {
    let all: Vec<Described<'_>> = tensors.iter().map(|tensor| Described::gradient(tensor)).collect();
    let norms = read_norms(cuda, Kind::Gradient, &all, Settings::default())?;
    Ok(norms.iter().map(|norms| norms.direction).collect())
}

fn read_norms(
    cuda: &Cuda,
    kind: Kind,
    all: &[Described<'_>],
    settings: Settings,
) -> Result<Vec<SquaredNorms>> {
    let table = Table::new(cuda, all, &[])?;
    let norms = lanes::doubles(&table.words.device(), 2 * all.len())?;
    table.measure(cuda, kind, settings, norms.cuda_buffer().address())?;
    let mut numbers = vec![0.0f64; 2 * all.len()];
    norms.cuda_buffer().download(bytemuck::cast_slice_mut(&mut numbers))?;
    let both = |pair: &[f64; 2]| SquaredNorms { weight: pair[0], direction: pair[1] };
    Ok(numbers.as_chunks::<2>().0.iter().map(both).collect())
}

/// What is measured; the kernel's numbers.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Gradient = 0,
    Lars = 1,
    Lamb = 2,
}

fn norms_of(rule: Rule) -> Kind {
    match rule {
        Rule::Lars => Kind::Lars,
        Rule::Lamb => Kind::Lamb,
        Rule::Sgd | Rule::Momentum | Rule::Adam => Kind::Gradient,
    }
}

/// The arrays that describe a list of tensors, on the card: norms (double2), targets, blocks, first blocks.
#[derive(Debug)]
struct Table {
    words: Tensor,
    tensors: usize,
    blocks: usize,
}

impl Table {
    fn new(cuda: &Cuda, all: &[Described<'_>], norms: &[SquaredNorms]) -> Result<Table> {
        assert!(all.iter().all(|one| one.card.is(cuda)), "update: targets on two cards");
        let tensors = all.len();
        let blocks: usize = all.iter().map(|one| one.length.div_ceil(TILE)).sum();
        let mut words = Vec::with_capacity((2 + WORDS + 1) * tensors + blocks + 1);
        for i in 0..tensors {
            let SquaredNorms { weight, direction } = norms.get(i).copied().unwrap_or_default();
            words.extend([weight.to_bits(), direction.to_bits()]);
        }
        words.extend(all.iter().flat_map(Described::words));
        let mut firsts = vec![0];
        for (i, one) in all.iter().enumerate() {
            let chunks = lanes::blocks(one.length, TILE);
            words.extend((0..chunks).map(|chunk| pair(i as u32, chunk)));
            firsts.push(firsts[i] + chunks);
        }
        words.extend(firsts.chunks(2).map(|two| pair(two[0], two.get(1).copied().unwrap_or_default())));
        let (device, shape) = (Device::Cuda(cuda.clone()), [words.len(), 2]);
        let halves: &[u32] = bytemuck::cast_slice(&words);
        Ok(Table {
            words: Tensor::from_slice(&device, &shape, halves, Category::Workspace)?,
            tensors,
            blocks,
        })
    }

    fn norms(&self) -> u64 {
        self.words.cuda_buffer().address()
    }

    fn targets(&self) -> u64 {
        self.norms() + 16 * self.tensors as u64
    }

    fn list(&self) -> u64 {
        self.targets() + (8 * WORDS * self.tensors) as u64
    }

    fn firsts(&self) -> u64 {
        self.list() + 8 * self.blocks as u64
    }

    /// What all kernels take first.
    fn args(&self, settings: Settings) -> Args<'_> {
        Args::new().pointer(self.targets()).pointer(self.list()).fields(&settings.fields())
    }

    /// Leaves two doubles for each tensor at `to`, which has room for them.
    fn measure(&self, cuda: &Cuda, kind: Kind, settings: Settings, to: u64) -> Result<()> {
        let kernel = |name| cuda.kernel(&SOURCE, Build::PLAIN, name);
        let mut partial = lanes::doubles(&self.words.device(), 2 * self.blocks)?;
        let args = self.args(settings).i32(kind as i32).output(&mut partial);
        // SAFETY: the table's maker borrows the tensors and has looked for the states that `kind` needs; each
        // block has room for its two doubles.
        unsafe { kernel("update_norms")?.launch(lanes::blocks(self.blocks, 1), THREADS, 0, args)? };
        let args = Args::new().input(&partial).pointer(self.firsts()).pointer(to);
        // SAFETY: the first blocks are within `partial`, and `to` has room for two doubles a tensor.
        unsafe { kernel("update_norms_total")?.launch(lanes::blocks(self.tensors, 1), THREADS, 0, args) }
    }
}
