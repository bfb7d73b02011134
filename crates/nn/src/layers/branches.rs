//! Layers in a sequence, and branches that are joined: added up, multiplied, or concatenated.

use espalier_plan::spec::BranchJoin;
use espalier_tensor::ops::activation::{self, ActivationFn};
use espalier_tensor::ops::columns;
use espalier_tensor::ops::elementwise::mul;
use espalier_tensor::{Category, Tensor};

use super::{BackwardContext, ForwardContext, GradientParts, Layer, SyncBatchNorm, consecutive, sum};
use crate::Result;

/// Layers one after the other; an empty one passes its input on.
#[derive(Debug)]
pub(crate) struct Sequence(pub Vec<Box<dyn Layer>>);

impl Layer for Sequence {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        self.0.iter().try_fold(x, |x, layer| layer.forward(x, ctx))
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        self.backward_parts(dy.into(), ctx, needs_dx)?.map(GradientParts::join).transpose()
    }

    fn backward_parts(
        &self,
        dy: GradientParts,
        ctx: &mut BackwardContext<'_>,
        needs_dx: bool,
    ) -> Result<Option<GradientParts>> {
        let mut gradient = Some(dy);
        for (i, layer) in self.0.iter().enumerate().rev() {
            let dy = gradient.expect("only the first layer of a model has no input gradient");
            gradient = layer.backward_parts(dy, ctx, i > 0 || needs_dx)?;
        }
        Ok(gradient)
    }

    fn forward_plus(&self, x: Tensor, plus: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let Some((last, before)) = self.0.split_last() else { return sum(x, plus) };
        let x = before.iter().try_fold(x, |x, layer| layer.forward(x, ctx))?;
        last.forward_plus(x, plus, ctx)
    }

    fn backward_plus(&self, mut dy: Tensor, plus: Tensor, ctx: &mut BackwardContext<'_>) -> Result<Tensor> {
        let Some((first, behind)) = self.0.split_first() else { return sum(dy, plus) };
        for layer in behind.iter().rev() {
            dy = layer.backward(dy, ctx, true)?.expect("it was asked for");
        }
        first.backward_plus(dy, plus, ctx)
    }
}

/// `branch(x) + shortcut(x)`. Where the shortcut passes x on, the branch's last layer adds it, and the
/// branch's first layer adds the gradient of what has passed.
#[derive(Debug)]
pub(crate) struct Residual {
    pub branch: Sequence,
    pub shortcut: Sequence,
}

impl Layer for Residual {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        if self.shortcut.0.is_empty() {
            return self.branch.forward_plus(x.clone(), x, ctx);
        }
        let long = self.branch.forward(x.clone(), ctx)?;
        let short = self.shortcut.forward(x, ctx)?;
        sum(long, short)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        if self.shortcut.0.is_empty() && needs_dx {
            return self.branch.backward_plus(dy.clone(), dy, ctx).map(Some);
        }
        let short = self.shortcut.backward(dy.clone(), ctx, needs_dx)?;
        let long = self.branch.backward(dy, ctx, needs_dx)?;
        long.zip(short).map(|(long, short)| sum(long, short)).transpose()
    }
}

/// `relu(norm(before(x)) + shortcut(x))`: the end of a residual branch, the sum and ReLU in one pass over memory,
/// forward and back.
#[derive(Debug)]
pub(crate) struct ReluResidual {
    pub before: Sequence,
    /// Whose ReLU comes after the sum.
    pub norm: SyncBatchNorm,
    pub shortcut: Sequence,
}

impl Layer for ReluResidual {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let short = self.shortcut.forward(x.clone(), ctx)?;
        let long = self.before.forward(x, ctx)?;
        self.norm.forward_with(long, Some(short), ctx)
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        self.backward_parts(dy.into(), ctx, needs_dx)?.map(GradientParts::join).transpose()
    }

    fn backward_parts(
        &self,
        dy: GradientParts,
        ctx: &mut BackwardContext<'_>,
        needs_dx: bool,
    ) -> Result<Option<GradientParts>> {
        let (long, short) = self.norm.backward_with(dy, true, ctx)?;
        let short = short.expect("something was added");
        let long = self.before.backward(long, ctx, needs_dx)?;
        let short = self.shortcut.backward(short, ctx, needs_dx)?;
        Ok(long.zip(short).map(|(dy, plus)| GradientParts { dy, plus: Some(plus) }))
    }
}

/// Sequences of layers that read the same x and are joined.
#[derive(Debug)]
pub(crate) struct Branches {
    pub join: BranchJoin,
    pub all: Vec<Sequence>,
    /// The last dimension of what each gives.
    pub widths: Vec<usize>,
    /// Of a product: the smooth activation behind each, where there is one. What it makes is made again in
    /// the backward pass.
    pub gates: Vec<Option<ActivationFn>>,
}

impl Branches {
    fn concat(&self, outputs: &[Tensor]) -> Result<Tensor> {
        let shape = outputs[0].shape_with_width(self.widths.iter().sum());
        let mut y = Tensor::empty(&outputs[0].device(), &shape, outputs[0].dtype(), Category::Transient)?;
        for (output, at) in outputs.iter().zip(consecutive(&self.widths)) {
            columns::put(&mut y, at.start, output)?;
        }
        Ok(y)
    }

    /// The factors of a product, from what its branches gave.
    fn factors(&self, outputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let factor = |(output, gate): (&Tensor, &Option<ActivationFn>)| match gate {
            Some(kind) => Ok(activation::forward(*kind, output)?),
            None => Ok(output.clone()),
        };
        outputs.iter().zip(&self.gates).map(factor).collect()
    }

    /// The gradient of what branch `i` gives; of a product, `outputs` are what all of them gave, and
    /// `factors` that behind their activations.
    fn gradient_of(&self, i: usize, dy: &Tensor, outputs: &[Tensor], factors: &[Tensor]) -> Result<Tensor> {
        match self.join {
            BranchJoin::Sum => Ok(dy.clone()),
            BranchJoin::Concat => {
                let at = consecutive(&self.widths).nth(i).expect("as many columns as branches");
                Ok(columns::take(dy, at, Category::Transient)?)
            }
            BranchJoin::Product => {
                let others = (0..factors.len()).filter(|other| *other != i);
                let mut others = others.map(|other| &factors[other]);
                let dy =
                    others.try_fold(dy.clone(), |dy, factor| Ok::<_, crate::Error>(mul(&dy, factor)?))?;
                match self.gates[i] {
                    Some(kind) => Ok(activation::backward(kind, &outputs[i], dy)?),
                    None => Ok(dy),
                }
            }
        }
    }
}

/// Leaves what its branches leave, in their order, and then, where they are multiplied, what each gave before
/// its activation.
impl Layer for Branches {
    fn forward(&self, x: Tensor, ctx: &mut ForwardContext<'_>) -> Result<Tensor> {
        let mut outputs = Vec::with_capacity(self.all.len());
        for branch in &self.all {
            outputs.push(branch.forward(x.clone(), ctx)?);
        }
        drop(x);
        match self.join {
            BranchJoin::Concat => self.concat(&outputs),
            BranchJoin::Sum => {
                let mut outputs = outputs.into_iter();
                let first = outputs.next().expect("at least one branch");
                outputs.try_fold(first, sum)
            }
            BranchJoin::Product => {
                let factors = self.factors(&outputs)?;
                let (first, rest) = factors.split_first().expect("at least one branch");
                let y = rest
                    .iter()
                    .try_fold(first.clone(), |y, output| Ok::<_, crate::Error>(mul(&y, output)?))?;
                outputs.into_iter().for_each(|output| ctx.stash.push(output));
                Ok(y)
            }
        }
    }

    fn backward(&self, dy: Tensor, ctx: &mut BackwardContext<'_>, needs_dx: bool) -> Result<Option<Tensor>> {
        let mut outputs: Vec<Tensor> = match self.join {
            BranchJoin::Product => (0..self.all.len()).map(|_| ctx.stash.pop()).collect(),
            BranchJoin::Sum | BranchJoin::Concat => Vec::new(),
        };
        outputs.reverse();
        let factors = self.factors(&outputs)?;
        let mut dx: Option<Tensor> = None;
        for (i, branch) in self.all.iter().enumerate().rev() {
            let dy = self.gradient_of(i, &dy, &outputs, &factors)?;
            let branch_dx = branch.backward(dy, ctx, needs_dx)?;
            dx = match (dx, branch_dx) {
                (Some(dx), Some(branch_dx)) => Some(sum(dx, branch_dx)?),
                (dx, branch_dx) => dx.or(branch_dx),
            };
        }
        Ok(dx)
    }
}
