//! Integrated parallelism (Gholami et al. 2018): each layer by the parallelism that suits it, over the same ranks.
//!
//! What one layer gives lies on the ranks in some way, and the next may want it in another: that exchange costs messages too.
//! So the cheapest choice for each layer by itself need not be the cheapest for all of them. It is a shortest path: a layer is
//! a table of what it costs to come from one `Split` of its input to one of its output, layers behind one another add up,
//! ways that part and meet add up from the same split to the same split, and between any two layers there may be an exchange.
//!
//! A layer that multiplies is shared out by samples, by rows of the image, by its outputs (its input whole on every rank) or
//! by its inputs (each rank has some of its columns; what they make is summed). Two linear layers of the last two kinds, one
//! behind the other, are the pair of Shoeybi et al. 2019, which no rule here names. A weight that two layers share is shared
//! out the same way for both; its gradient is summed once, with the layer that it belongs to.

mod run;
mod table;

use std::collections::HashSet;

use serde::Serialize;

use super::collective::{all_gather, all_to_all};
use super::layer::Kept;
use super::{Cost, LayerSizes, Parallelism, Setting};
use crate::pruning::Pruning;
use crate::spec::{Join, Layer, Model, OnTiles, Shape, TensorRole};

pub use self::run::Group;
pub use self::table::{Split, Stop};
use self::table::{Step, Table, Way};

/// The cheapest mixture for a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Integrated {
    /// All messages of a step, exchanges included.
    pub cost: Cost,
    /// What all messages of the mixture take by alpha and beta.
    pub seconds: f64,
    /// Of that the exchanges between layers.
    pub exchanged: Cost,
    /// The layers that multiply, in the order of execution.
    pub layers: Vec<Choice>,
    /// All layers, in the order of execution; one with ways through it before what is inside it.
    #[serde(skip)]
    pub route: Vec<Stop>,
}

/// How a layer is shared out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// The prefix of its parameters, or the word for its kind.
    pub name: String,
    /// What is cut there: samples, outputs or images.
    pub by: Parallelism,
}

impl Integrated {
    /// The cheapest mixture for a model whose shapes fit; none where no mixture can be shared by so many ranks.
    pub fn of(model: &Model, pruning: Option<&Pruning>, at: &Setting) -> Option<Integrated> {
        Integrated::on(model, pruning, at, None)
    }

    /// The cheapest of those that a group of ranks can run.
    pub(crate) fn of_run(
        model: &Model,
        pruning: Option<&Pruning>,
        at: &Setting,
        group: &Group,
    ) -> Option<Integrated> {
        Integrated::on(model, pruning, at, Some(group))
    }

    fn on(
        model: &Model,
        pruning: Option<&Pruning>,
        at: &Setting,
        group: Option<&Group>,
    ) -> Option<Integrated> {
        let (kept, tied) = (Kept::new(model, pruning), tied(model));
        let ways: &[_] =
            if tied.is_empty() { &[None] } else { &[Some(Parallelism::Data), Some(Parallelism::Model)] };
        let found = ways.iter().filter_map(|by| {
            let ties = Ties { weights: &tied, by: *by };
            let walk = Walk { at, kept: &kept, ties, group, trained: false, steps: Vec::new() };
            walk.through(model)
        });
        found.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

impl Integrated {
    /// Which layers are by what: `features.0 to features.10 data-parallel, classifier.1 model-parallel`.
    pub fn sentence(&self) -> String {
        /// Of more changes than these the first are told.
        const MOST: usize = 6;
        let runs: Vec<&[Choice]> = self.layers.chunk_by(|a, b| a.by == b.by).collect();
        let named = |run: &&[Choice]| match run {
            [one] => format!("{} {}-parallel", one.name, one.by.name()),
            [first, .., last] => format!("{} to {} {}-parallel", first.name, last.name, first.by.name()),
            [] => unreachable!("a run of neighbours has one at least"),
        };
        let mut said: Vec<String> = runs.iter().take(MOST).map(named).collect();
        if runs.len() > MOST {
            said.push(format!("and {} more changes", runs.len() - MOST));
        }
        said.join(", ")
    }
}

/// Weights that another layer uses too.
fn tied(model: &Model) -> HashSet<&str> {
    let mut tied = HashSet::new();
    model.for_each(&mut |layer| tied.extend(layer.entry().tied_weight()));
    tied
}

/// How the layers that share a weight are shared out.
#[derive(Debug, Clone, Copy)]
struct Ties<'a> {
    weights: &'a HashSet<&'a str>,
    /// All of them alike; none where there are no such layers.
    by: Option<Parallelism>,
}

impl Ties<'_> {
    /// Whether they let a layer be shared out so.
    fn allow(&self, layer: &Layer, by: Parallelism) -> bool {
        let Some(all) = self.by else { return true };
        let is_tied = layer.entry().tied_weight().is_some()
            || layer.parameters().iter().any(|one| self.weights.contains(one.name.as_str()));
        !is_tied || by == all
    }
}

/// A walk through the layers of a model.
struct Walk<'a> {
    at: &'a Setting,
    kept: &'a Kept,
    ties: Ties<'a>,
    /// The ranks that are to run it, where they are known; otherwise all that the formulas know is possible.
    group: Option<&'a Group>,
    /// Whether a layer that was passed is trained: what comes behind it has a gradient.
    trained: bool,
    /// What was decided on all ways, so that a way is a number.
    steps: Vec<Step>,
}

impl Walk<'_> {
    /// The cheapest way through a model.
    fn through(mut self, model: &Model) -> Option<Integrated> {
        let at = self.at;
        let layers: Vec<&Layer> = model.blocks.iter().flat_map(|block| &block.layers).collect();
        let (table, shape) = self.series(&layers, model.input.shape());
        let has_head = model.head().is_some();
        let mut best: Option<Way> = None;
        for (from, to, way) in table.ways() {
            // Every rank reads of the data what it needs.
            if self.group.is_some_and(|group| from != group.begins()) {
                continue;
            }
            let Some(loss) = self.loss(to, shape, has_head) else { continue };
            let cost = way.cost + loss;
            if best.is_none_or(|best| at.seconds(cost) < at.seconds(best.cost)) {
                best = Some(Way { cost, ..way });
            }
        }
        let best = best?;
        let Told { layers, route, exchanged } = self.told(best.step);
        Some(Integrated { cost: best.cost, seconds: at.seconds(best.cost), exchanged, layers, route })
    }

    /// What it costs to take the loss from logits that lie so.
    fn loss(&self, split: Split, logits: Shape, has_head: bool) -> Option<Cost> {
        let at = self.at;
        match split {
            // In a run they are gathered, so that every rank has the loss of the batch.
            Split::Samples if self.group.is_some() => {
                Some(all_gather(at.ranks, at.of_batch(logits.elements() as f64)))
            }
            Split::Samples | Split::Whole => Some(Cost::FREE),
            Split::Columns if self.group.is_some() && !has_head => None,
            // The largest of each row and the sum of exponentials, over ranks.
            Split::Columns => {
                Some(at.sum(at.of_batch(logits.rows() as f64)) + at.sum(at.of_batch(logits.rows() as f64)))
            }
            Split::Rows => None,
        }
    }

    /// Layers behind one another, with an exchange before each; returns their table and the shape behind them.
    fn series(&mut self, layers: &[impl std::borrow::Borrow<Layer>], input: Shape) -> (Table, Shape) {
        let (mut table, mut shape) = (Table::NONE, input);
        let nothing = Way { cost: Cost::FREE, step: None };
        Split::ALL.into_iter().for_each(|split| table.offer(split, split, nothing, self.at));
        for layer in layers {
            let exchange = self.exchange(shape);
            let (own, output) = self.layer(layer.borrow(), shape);
            table = self.behind(&table, &exchange);
            table = self.behind(&table, &own);
            shape = output;
        }
        (table, shape)
    }

    /// The table of one layer, and the shape behind it.
    fn layer(&mut self, layer: &Layer, input: Shape) -> (Table, Shape) {
        if let Some(sides) = layer.entry().sides() {
            let trained = self.trained;
            let mut ends = Vec::new();
            let mut all: Option<Table> = None;
            let mut trains = trained;
            for side in &sides.all {
                self.trained = trained;
                let (table, shape) = self.series(side.layers, input);
                // Ways meet in one split, whatever each was in.
                let exchange = self.exchange(shape);
                let table = self.behind(&table, &exchange);
                all = Some(match all {
                    None => table,
                    Some(other) => self.beside(&other, &table),
                });
                trains |= self.trained;
                ends.push(shape);
            }
            self.trained = trains;
            let output = sides.meet(&ends).expect("shapes were checked");
            let inside = all.unwrap_or(Table::NONE);
            let mut table = Table::NONE;
            // Columns side by side are not those of what is put together.
            let cannot = |to| self.group.is_some() && sides.join == Join::Concat && to == Split::Columns;
            for (from, to, way) in inside.ways().filter(|(_, to, _)| !cannot(*to)).collect::<Vec<_>>() {
                let step = self.note(Step::Layer(Stop { from, to }, None));
                let way = self.then(Way { cost: Cost::FREE, step: Some(step) }, way);
                table.offer(from, to, way, self.at);
            }
            return (table, output);
        }
        let output = layer.output(input).expect("shapes were checked");
        let sizes = LayerSizes::new(layer, input, output, self.kept, self.trained);
        self.trained |= sizes.parameters > 0;
        let table = match sizes.columns {
            Some(_) => self.product(layer, &sizes),
            None => self.passed(layer, &sizes),
        };
        (table, output)
    }

    /// A layer that multiplies.
    fn product(&mut self, layer: &Layer, sizes: &LayerSizes) -> Table {
        let at = self.at;
        let columns = sizes.columns.expect("a product has columns");
        let whole = at.of_batch(sizes.output as f64);
        let by_inputs = (at.ranks <= columns.input).then(|| at.sum(whole));
        // Ids are no columns: a rank that has some rows of a table reads all of them.
        let reads = match layer.properties().tensor_role {
            TensorRole::Closes => Split::Whole,
            _ => Split::Columns,
        };
        let by_outputs = (at.ranks <= columns.output)
            .then(|| sizes.input_gradient(at).map_or(Cost::FREE, |sum| at.cost(sum)));
        let mut table = Table::NONE;
        let ways = [
            (Split::Samples, Split::Samples, Parallelism::Data, sizes.cost(Parallelism::Data, at)),
            (Split::Rows, Split::Rows, Parallelism::Domain, self.by_domain(sizes)),
            (Split::Whole, Split::Columns, Parallelism::Model, by_outputs),
            (reads, Split::Whole, Parallelism::Model, by_inputs),
        ];
        for (from, to, by, cost) in ways {
            let stop = Stop { from, to };
            let can = self.ties.allow(layer, by)
                && self.group.is_none_or(|group| group.multiplies(layer, &sizes.name, stop));
            if let Some(cost) = cost.filter(|_| can) {
                let choice = Choice { name: sizes.name.clone(), by };
                let step = Some(self.note(Step::Layer(stop, Some(choice))));
                table.offer(from, to, Way { cost, step }, at);
            }
        }
        table
    }

    /// What a layer costs on slabs. Ranks may lie on a grid that is not as thin: whether a tile can be is `tiles`' to say.
    fn by_domain(&self, sizes: &LayerSizes) -> Option<Cost> {
        let slabs = sizes.cost(Parallelism::Domain, self.at);
        let tiles = self.group.filter(|group| group.begins() == Split::Rows);
        slabs.or_else(|| tiles.map(|_| self.at.cost(sizes.weight_gradient())))
    }

    /// A layer that passes on how its input lies.
    fn passed(&mut self, layer: &Layer, sizes: &LayerSizes) -> Table {
        let at = self.at;
        let columns = (at.ranks <= layer.properties().channel_groups).then_some(Cost::FREE);
        let ends = match self.group {
            None => layer.properties().on_tiles == OnTiles::Mean(None),
            Some(_) => run::ends_tiles(layer),
        };
        let sum = ends.then(|| at.sum(at.of_batch(sizes.output as f64)));
        let mut table = Table::NONE;
        for (from, to, cost) in [
            (Split::Samples, Split::Samples, sizes.cost(Parallelism::Data, at)),
            (Split::Rows, Split::Rows, self.by_domain(sizes)),
            (Split::Rows, Split::Whole, sum),
            (Split::Columns, Split::Columns, columns),
            (Split::Whole, Split::Whole, sizes.cost(Parallelism::Model, at)),
        ] {
            let stop = Stop { from, to };
            let can = self.group.is_none_or(|group| group.passes(layer, stop));
            if let Some(cost) = cost.filter(|_| can) {
                let step = Some(self.note(Step::Layer(stop, None)));
                table.offer(from, to, Way { cost, step }, at);
            }
        }
        table
    }

    /// What it costs to move an activation of this shape from each split to each other, and its gradient back.
    fn exchange(&mut self, shape: Shape) -> Table {
        let (at, words) = (self.at, self.at.of_batch(shape.elements() as f64));
        let back = self.trained;
        let mut table = Table::NONE;
        for from in Split::ALL {
            for to in Split::ALL {
                let rows = [from, to].contains(&Split::Rows);
                let is_impossible = rows && !matches!(shape, Shape::Image { .. });
                if is_impossible || self.group.is_some_and(|group| !group.moves(from, to)) {
                    continue;
                }
                // A part of what a rank has is its own to take.
                let one_way = |from, to| match (from, to) {
                    (from, to) if from == to => Cost::FREE,
                    (Split::Whole, _) => Cost::FREE,
                    (_, Split::Whole) => all_gather(at.ranks, words),
                    _ => all_to_all(at.ranks, words),
                };
                let gradient = if back { one_way(to, from) } else { Cost::FREE };
                let cost = one_way(from, to) + gradient;
                let step = (cost != Cost::FREE).then(|| self.note(Step::Exchange(cost)));
                table.offer(from, to, Way { cost, step }, at);
            }
        }
        table
    }

    /// One behind the other.
    fn behind(&mut self, first: &Table, second: &Table) -> Table {
        let mut table = Table::NONE;
        for from in Split::ALL {
            for to in Split::ALL {
                let ways = Split::ALL
                    .into_iter()
                    .filter_map(|via| Some((first.get(from, via)?, second.get(via, to)?)));
                let seconds = |(a, b): &(Way, Way)| self.at.seconds(a.cost + b.cost);
                if let Some((a, b)) = ways.min_by(|a, b| seconds(a).total_cmp(&seconds(b))) {
                    let way = self.then(a, b);
                    table.offer(from, to, way, self.at);
                }
            }
        }
        table
    }

    /// Both, from the same split to the same.
    fn beside(&mut self, one: &Table, other: &Table) -> Table {
        let mut table = Table::NONE;
        for (from, to, way) in one.ways() {
            if let Some(other) = other.get(from, to) {
                let way = self.then(way, other);
                table.offer(from, to, way, self.at);
            }
        }
        table
    }

    fn then(&mut self, a: Way, b: Way) -> Way {
        let step = match (a.step, b.step) {
            (Some(a), Some(b)) => Some(self.note(Step::Then(a, b))),
            (one, None) | (None, one) => one,
        };
        Way { cost: a.cost + b.cost, step }
    }

    fn note(&mut self, step: Step) -> usize {
        self.steps.push(step);
        self.steps.len() - 1
    }

    /// What was decided on a way, in order, and what its exchanges cost.
    fn told(&self, last: Option<usize>) -> Told {
        let mut told = Told { layers: Vec::new(), route: Vec::new(), exchanged: Cost::FREE };
        let mut open: Vec<usize> = last.into_iter().collect();
        while let Some(step) = open.pop() {
            match &self.steps[step] {
                Step::Layer(stop, choice) => {
                    told.route.push(*stop);
                    told.layers.extend(choice.clone());
                }
                Step::Exchange(cost) => told.exchanged = told.exchanged + *cost,
                Step::Then(first, second) => open.extend([*second, *first]),
            }
        }
        told
    }
}

/// What was decided on a way.
struct Told {
    layers: Vec<Choice>,
    route: Vec<Stop>,
    exchanged: Cost,
}

#[cfg(test)]
mod tests;
