//! Integrated parallelism (Gholami et al. 2018): each layer by the parallelism that suits it, over the same ranks.
//!
//! What one layer gives is split over the ranks in some way, and the next may want it in another: moving it
//! costs messages too. So the cheapest choice for each layer by itself need not be the cheapest for all of
//! them. It is a shortest path: a layer is a table of what it costs to come from one `ActivationSplit` of its
//! input to one of its output, layers behind one another add up, branches add up from the same split to the
//! same split, and between any two layers an activation may be moved.
//!
//! A layer that multiplies is split by samples, by rows of the image, by its outputs (its input replicated on
//! every rank) or by its inputs (each rank has some of its features; what they make is all-reduced). Two
//! linear layers of the last two kinds, one behind the other, are the pair of Shoeybi et al. 2019, which no
//! rule here names. A weight that two layers share is split the same way for both; its gradient is
//! all-reduced once, with the layer that it belongs to.

mod run;
mod table;

use std::collections::HashSet;

use serde::Serialize;

use super::collective::{all_gather, all_to_all};
use super::layer::KeptElements;
use super::{Cost, LayerSizes, Parallelism, Setting};
use crate::pruning::Pruning;
use crate::spec::{BranchJoin, LayerSpec, ModelSpec, Shape, TensorRole, TileRole};

pub use self::run::IntegratedGroup;
use self::table::ActivationSplit::{Features, Replicated, Rows, Samples};
pub use self::table::{ActivationSplit, LayerSplit};
use self::table::{CostedRoute, RouteStep, RouteTable};

/// The cheapest mixture for a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Integrated {
    /// All messages of a step, moves between layers included.
    pub cost: Cost,
    /// What all messages of the mixture take by alpha and beta.
    pub seconds: f64,
    /// Of that the moves between layers.
    pub exchanged: Cost,
    /// The layers that multiply, in the order of execution.
    pub layers: Vec<LayerChoice>,
    /// All layers, in the order of execution; one with branches before what is inside it.
    #[serde(skip)]
    pub route: Vec<LayerSplit>,
}

/// How a layer is split.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerChoice {
    /// The prefix of its parameters, or the word for its kind.
    pub name: String,
    /// What is split there: samples, outputs or images.
    pub by: Parallelism,
}

impl Integrated {
    /// The cheapest mixture for a model whose shapes fit; none where no mixture can be split over so many ranks.
    pub fn of(model: &ModelSpec, pruning: Option<&Pruning>, at: &Setting) -> Option<Integrated> {
        Integrated::on(model, pruning, at, None)
    }

    /// The same on a group of ranks, where there is one: of those mixtures that it can run.
    pub(crate) fn on(
        model: &ModelSpec,
        pruning: Option<&Pruning>,
        at: &Setting,
        group: Option<&IntegratedGroup>,
    ) -> Option<Integrated> {
        let (kept, tied) = (KeptElements::new(model, pruning), tied(model));
        let choices: &[_] =
            if tied.is_empty() { &[None] } else { &[Some(Parallelism::Data), Some(Parallelism::Model)] };
        let found = choices.iter().filter_map(|by| {
            let ties = TieConstraint { weights: &tied, by: *by };
            let walk = CostWalk { at, kept: &kept, ties, group, trained: false, steps: Vec::new() };
            walk.through(model)
        });
        found.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// Which layers are by what: `features.0 to features.10 data-parallel, classifier.1 model-parallel`.
    pub fn sentence(&self) -> String {
        /// Of more changes than these the first are named.
        const MOST: usize = 6;
        let runs: Vec<&[LayerChoice]> = self.layers.chunk_by(|a, b| a.by == b.by).collect();
        let named = |run: &&[LayerChoice]| match run {
            [one] => format!("{} {}-parallel", one.name, one.by.name()),
            [first, .., last] => format!("{} to {} {}-parallel", first.name, last.name, first.by.name()),
            [] => unreachable!("a run of neighbours has one at least"),
        };
        let mut text: Vec<String> = runs.iter().take(MOST).map(named).collect();
        if runs.len() > MOST {
            text.push(format!("and {} more changes", runs.len() - MOST));
        }
        text.join(", ")
    }
}

/// Weights that another layer uses too.
fn tied(model: &ModelSpec) -> HashSet<&str> {
    let mut tied = HashSet::new();
    model.for_each(&mut |layer| tied.extend(layer.description().tied_weight()));
    tied
}

/// How the layers that share a weight are split.
#[derive(Debug, Clone, Copy)]
struct TieConstraint<'a> {
    weights: &'a HashSet<&'a str>,
    /// All of them alike; none where there are no such layers.
    by: Option<Parallelism>,
}

impl TieConstraint<'_> {
    /// Whether they let a layer be split so.
    fn allow(&self, layer: &LayerSpec, by: Parallelism) -> bool {
        let Some(all) = self.by else { return true };
        let is_tied = layer.description().tied_weight().is_some()
            || layer.parameters().iter().any(|one| self.weights.contains(one.name.as_str()));
        !is_tied || by == all
    }
}

/// A walk through the layers of a model.
struct CostWalk<'a> {
    at: &'a Setting,
    kept: &'a KeptElements,
    ties: TieConstraint<'a>,
    /// The ranks that are to run it, where they are known; otherwise all that the formulas know is possible.
    group: Option<&'a IntegratedGroup>,
    /// Whether a layer that was passed is trained: what comes behind it has a gradient.
    trained: bool,
    /// What was decided on all routes, so that a route is a number.
    steps: Vec<RouteStep>,
}

impl CostWalk<'_> {
    /// The cheapest route through a model.
    fn through(mut self, model: &ModelSpec) -> Option<Integrated> {
        let at = self.at;
        let layers: Vec<&LayerSpec> = model.blocks.iter().flat_map(|block| &block.layers).collect();
        let (table, shape) = self.series(&layers, model.input.shape());
        let has_head = model.head().is_some();
        let mut best: Option<CostedRoute> = None;
        for (from, to, found) in table.routes() {
            // Every rank reads of the data what it needs.
            if self.group.is_some_and(|group| from != group.begins()) {
                continue;
            }
            let Some(loss) = self.loss(to, shape, has_head) else { continue };
            let cost = found.cost + loss;
            if best.is_none_or(|best| at.seconds(cost) < at.seconds(best.cost)) {
                best = Some(CostedRoute { cost, ..found });
            }
        }
        let best = best?;
        let ChosenRoute { layers, route, exchanged } = self.chosen(best.step);
        Some(Integrated { cost: best.cost, seconds: at.seconds(best.cost), exchanged, layers, route })
    }

    /// What it costs to take the loss from logits that are split so.
    fn loss(&self, split: ActivationSplit, logits: Shape, has_head: bool) -> Option<Cost> {
        let at = self.at;
        match split {
            // In a run they are gathered, so that every rank has the loss of the batch.
            Samples if self.group.is_some() => {
                Some(all_gather(at.ranks, at.of_batch(logits.elements() as f64)))
            }
            Samples | Replicated => Some(Cost::FREE),
            Features if self.group.is_some() && !has_head => None,
            // The largest of each row and the sum of exponentials, over ranks.
            Features => Some(
                at.all_reduced(at.of_batch(logits.rows() as f64))
                    + at.all_reduced(at.of_batch(logits.rows() as f64)),
            ),
            Rows => None,
        }
    }

    /// Layers behind one another, with a move before each; returns their table and the shape behind them.
    fn series(
        &mut self,
        layers: &[impl std::borrow::Borrow<LayerSpec>],
        input: Shape,
    ) -> (RouteTable, Shape) {
        let (mut table, mut shape) = (RouteTable::NONE, input);
        let nothing = CostedRoute { cost: Cost::FREE, step: None };
        ActivationSplit::ALL.into_iter().for_each(|split| table.offer(split, split, nothing, self.at));
        for layer in layers {
            let moves = self.redistribute(shape);
            let (costs, output) = self.layer(layer.borrow(), shape);
            table = self.behind(&table, &moves);
            table = self.behind(&table, &costs);
            shape = output;
        }
        (table, shape)
    }

    /// The table of one layer, and the shape behind it.
    fn layer(&mut self, layer: &LayerSpec, input: Shape) -> (RouteTable, Shape) {
        if let Some(branches) = layer.description().branches() {
            let trained = self.trained;
            let mut ends = Vec::new();
            let mut all: Option<RouteTable> = None;
            let mut trains = trained;
            for branch in &branches.all {
                self.trained = trained;
                let (table, shape) = self.series(branch.layers, input);
                // Branches end in one split, whatever each was in.
                let moves = self.redistribute(shape);
                let table = self.behind(&table, &moves);
                all = Some(match all {
                    None => table,
                    Some(other) => self.beside(&other, &table),
                });
                trains |= self.trained;
                ends.push(shape);
            }
            self.trained = trains;
            let output = branches.joined(&ends).expect("shapes were checked");
            let inside = all.unwrap_or(RouteTable::NONE);
            let mut table = RouteTable::NONE;
            // The features of branches are not those of their concatenation.
            let cannot = |to| self.group.is_some() && branches.join == BranchJoin::Concat && to == Features;
            for (from, to, found) in inside.routes().filter(|(_, to, _)| !cannot(*to)).collect::<Vec<_>>() {
                let step = self.note(RouteStep::Layer(LayerSplit { from, to }, None));
                let found = self.then(CostedRoute { cost: Cost::FREE, step: Some(step) }, found);
                table.offer(from, to, found, self.at);
            }
            return (table, output);
        }
        let output = layer.output(input).expect("shapes were checked");
        let sizes = LayerSizes::new(layer, input, output, self.kept, self.trained);
        self.trained |= sizes.parameters > 0;
        let table = match sizes.features {
            Some(_) => self.product(layer, &sizes),
            None => self.elementwise(layer, &sizes),
        };
        (table, output)
    }

    /// A layer that multiplies.
    fn product(&mut self, layer: &LayerSpec, sizes: &LayerSizes) -> RouteTable {
        let at = self.at;
        let features = sizes.features.expect("a product has columns");
        let output = at.of_batch(sizes.output as f64);
        let by_inputs = (at.ranks <= features.input).then(|| at.all_reduced(output));
        // Ids are no features: a rank that has some rows of a table reads all of them.
        let reads = match layer.properties().tensor_role {
            TensorRole::RowParallel => Replicated,
            _ => Features,
        };
        let by_outputs = (at.ranks <= features.output)
            .then(|| sizes.input_gradient(at).map_or(Cost::FREE, |sum| at.cost(sum)));
        let mut table = RouteTable::NONE;
        let options = [
            (Samples, Samples, Parallelism::Data, sizes.cost(Parallelism::Data, at)),
            (Rows, Rows, Parallelism::Domain, self.by_domain(sizes)),
            (Replicated, Features, Parallelism::Model, by_outputs),
            (reads, Replicated, Parallelism::Model, by_inputs),
        ];
        for (from, to, by, cost) in options {
            let stop = LayerSplit { from, to };
            let can = self.ties.allow(layer, by)
                && self.group.is_none_or(|group| group.multiplies(layer, &sizes.name, stop));
            if let Some(cost) = cost.filter(|_| can) {
                let choice = LayerChoice { name: sizes.name.clone(), by };
                let step = Some(self.note(RouteStep::Layer(stop, Some(choice))));
                table.offer(from, to, CostedRoute { cost, step }, at);
            }
        }
        table
    }

    /// What a layer costs on slabs. Ranks may lie on a grid that is not as thin: whether a tile can be is
    /// `tiles`' to say.
    fn by_domain(&self, sizes: &LayerSizes) -> Option<Cost> {
        let slabs = sizes.cost(Parallelism::Domain, self.at);
        let tiles = self.group.filter(|group| group.begins() == Rows);
        slabs.or_else(|| tiles.map(|_| self.at.cost(sizes.weight_gradient())))
    }

    /// A layer whose output is split as its input is.
    fn elementwise(&mut self, layer: &LayerSpec, sizes: &LayerSizes) -> RouteTable {
        let at = self.at;
        let features = (at.ranks <= layer.properties().channel_groups).then_some(Cost::FREE);
        let ends = match self.group {
            None => layer.properties().tile_role == TileRole::Mean(None),
            Some(_) => run::ends_tiles(layer),
        };
        let sum = ends.then(|| at.all_reduced(at.of_batch(sizes.output as f64)));
        let mut table = RouteTable::NONE;
        for (from, to, cost) in [
            (Samples, Samples, sizes.cost(Parallelism::Data, at)),
            (Rows, Rows, self.by_domain(sizes)),
            (Rows, Replicated, sum),
            (Features, Features, features),
            (Replicated, Replicated, sizes.cost(Parallelism::Model, at)),
        ] {
            let stop = LayerSplit { from, to };
            let can = self.group.is_none_or(|group| group.passes(layer, stop));
            if let Some(cost) = cost.filter(|_| can) {
                let step = Some(self.note(RouteStep::Layer(stop, None)));
                table.offer(from, to, CostedRoute { cost, step }, at);
            }
        }
        table
    }

    /// What it costs to move an activation of this shape from each split to each other, and its gradient back.
    fn redistribute(&mut self, shape: Shape) -> RouteTable {
        let (at, words) = (self.at, self.at.of_batch(shape.elements() as f64));
        let back = self.trained;
        let mut table = RouteTable::NONE;
        for from in ActivationSplit::ALL {
            for to in ActivationSplit::ALL {
                let rows = [from, to].contains(&Rows);
                let is_impossible = rows && !matches!(shape, Shape::Image { .. });
                if is_impossible || self.group.is_some_and(|group| !group.moves(from, to)) {
                    continue;
                }
                // A slice of what a rank has costs nothing.
                let cost_of = |from, to| match (from, to) {
                    (from, to) if from == to => Cost::FREE,
                    (Replicated, _) => Cost::FREE,
                    (_, Replicated) => all_gather(at.ranks, words),
                    _ => all_to_all(at.ranks, words),
                };
                let gradient = if back { cost_of(to, from) } else { Cost::FREE };
                let cost = cost_of(from, to) + gradient;
                let step = (cost != Cost::FREE).then(|| self.note(RouteStep::Move(cost)));
                table.offer(from, to, CostedRoute { cost, step }, at);
            }
        }
        table
    }

    /// One behind the other.
    fn behind(&mut self, first: &RouteTable, second: &RouteTable) -> RouteTable {
        let mut table = RouteTable::NONE;
        for from in ActivationSplit::ALL {
            for to in ActivationSplit::ALL {
                let pairs = ActivationSplit::ALL
                    .into_iter()
                    .filter_map(|via| Some((first.get(from, via)?, second.get(via, to)?)));
                let seconds = |(a, b): &(CostedRoute, CostedRoute)| self.at.seconds(a.cost + b.cost);
                if let Some((a, b)) = pairs.min_by(|a, b| seconds(a).total_cmp(&seconds(b))) {
                    let found = self.then(a, b);
                    table.offer(from, to, found, self.at);
                }
            }
        }
        table
    }

    /// Both, from the same split to the same.
    fn beside(&mut self, one: &RouteTable, other: &RouteTable) -> RouteTable {
        let mut table = RouteTable::NONE;
        for (from, to, found) in one.routes() {
            if let Some(other) = other.get(from, to) {
                let found = self.then(found, other);
                table.offer(from, to, found, self.at);
            }
        }
        table
    }

    fn then(&mut self, a: CostedRoute, b: CostedRoute) -> CostedRoute {
        let step = match (a.step, b.step) {
            (Some(a), Some(b)) => Some(self.note(RouteStep::Then(a, b))),
            (one, None) | (None, one) => one,
        };
        CostedRoute { cost: a.cost + b.cost, step }
    }

    fn note(&mut self, step: RouteStep) -> usize {
        self.steps.push(step);
        self.steps.len() - 1
    }

    /// What was decided on a route, in order, and what its moves cost.
    fn chosen(&self, last: Option<usize>) -> ChosenRoute {
        let mut chosen = ChosenRoute { layers: Vec::new(), route: Vec::new(), exchanged: Cost::FREE };
        let mut open: Vec<usize> = last.into_iter().collect();
        while let Some(step) = open.pop() {
            match &self.steps[step] {
                RouteStep::Layer(stop, choice) => {
                    chosen.route.push(*stop);
                    chosen.layers.extend(choice.clone());
                }
                RouteStep::Move(cost) => chosen.exchanged = chosen.exchanged + *cost,
                RouteStep::Then(first, second) => open.extend([*second, *first]),
            }
        }
        chosen
    }
}

/// What was decided on a route.
struct ChosenRoute {
    layers: Vec<LayerChoice>,
    route: Vec<LayerSplit>,
    exchanged: Cost,
}

#[cfg(test)]
mod tests;
