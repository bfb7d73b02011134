//! The picture of a layout, for `--dry-run`: which ranks there are, what each holds of the model and of the
//! image, and what it sends in a step. Nothing of it is computed here.

use std::fmt::Write;
use std::ops::Range;

use anyhow::Result;
use espalier_plan::cost::Integrated;
use espalier_plan::data_parallel::DataParallelMode;
use espalier_plan::plan::RankPlan;
use espalier_plan::tiles::Region;
use espalier_plan::traffic::{MessageTotals, StepTraffic};
use espalier_plan::{Axis, PerAxis, Plan};
use espalier_train::Error;
use serde::Serialize;

use crate::output::{self, print_out};
use crate::progress::{bytes, count};
use crate::text_table::TextTable;

/// Of more ranks than this, the first ones are shown, and the last.
const SHOWN: usize = 16;

/// The ranks of a plan that has several.
#[derive(Serialize)]
pub struct LayoutPicture {
    /// Ranks along each axis.
    mesh: PerAxis,
    ranks: usize,
    /// How many of them hold and send the same: those that differ in their data coordinate alone.
    alike: usize,
    /// Those that are shown.
    rows: Vec<RankRow>,
    /// Which layers are by what, where each is split in its own way.
    #[serde(skip_serializing_if = "Option::is_none")]
    integrated: Option<String>,
    #[serde(skip)]
    sharing: DataParallelMode,
}

#[derive(Serialize)]
struct RankRow {
    rank: usize,
    place: PerAxis,
    blocks: Vec<Range<usize>>,
    /// Rows and columns of every image that are its own; absent where images are not cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    tile: Option<Region>,
    parameters: u64,
    /// Of all parameters of the model.
    share: f64,
    /// Predicted bytes.
    memory: u64,
    sends: StepTraffic,
}

impl LayoutPicture {
    /// None where there is one rank.
    pub fn of(plan: &Plan) -> Result<Option<LayoutPicture>> {
        let ranks = plan.mesh.size();
        if ranks == 1 {
            return Ok(None);
        }
        let row = |rank: usize| -> Result<RankRow> {
            let RankPlan { coordinates, blocks, tile, parameters, memory } =
                plan.rank(rank).map_err(Error::Plan)?;
            let fraction = parameters as f64 / plan.parameters as f64;
            let sends = plan.step_traffic(rank).map_err(Error::Plan)?;
            Ok(RankRow {
                rank,
                place: coordinates,
                blocks,
                tile,
                parameters,
                share: fraction,
                memory: memory.total(),
                sends,
            })
        };
        let first = if ranks > SHOWN { SHOWN - 1 } else { ranks };
        let shown = (0..first).chain((ranks > SHOWN).then_some(ranks - 1));
        let (mesh, alike) = (plan.mesh.axis_sizes(), plan.mesh.extent(Axis::Data));
        let integrated = plan.layout.mixture().map(Integrated::sentence);
        let rows = shown.map(row).collect::<Result<_>>()?;
        Ok(Some(LayoutPicture { mesh, ranks, alike, rows, integrated, sharing: plan.data_parallel }))
    }

    pub fn print(&self) {
        print_out!("\n{}", self.text(output::width()));
    }

    fn text(&self, width: usize) -> String {
        let used: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| self.mesh[*axis] > 1).collect();
        let on_axes = |numbers: PerAxis, between: &str| {
            let coords: Vec<String> = used.iter().map(|axis| format!("{axis} {}", numbers[*axis])).collect();
            coords.join(between)
        };
        let mut text = format!("layout: {} = {} ranks\n", on_axes(self.mesh, " x "), self.ranks);
        let has_tiles = self.rows.iter().any(|row| row.tile.is_some());
        let mut head = vec!["  rank", "mesh coords", "blocks", "parameters", "memory", "sent/step"];
        if has_tiles {
            head.insert(3, "tile");
        }
        let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
        for (i, row) in self.rows.iter().enumerate() {
            if i > 0 && row.rank != self.rows[i - 1].rank + 1 {
                let left = row.rank - self.rows[i - 1].rank - 1;
                rows.push(vec![format!("  ... {left} more")]);
            }
            let blocks: Vec<String> =
                row.blocks.iter().map(|blocks| format!("{}..{}", blocks.start, blocks.end)).collect();
            let mut cells = vec![format!("  {}", row.rank), on_axes(row.place, ", "), blocks.join(", ")];
            if has_tiles {
                cells.push(row.tile.as_ref().map_or(String::new(), |Region { rows, columns }| {
                    format!("{}..{} x {}..{}", rows.start, rows.end, columns.start, columns.end)
                }));
            }
            cells.push(format!("{} ({:.1} %)", count(row.parameters as f64), 100.0 * row.share));
            cells.extend([bytes(row.memory as usize), bytes(row.sends.total() as usize)]);
            rows.push(cells);
        }
        text += &TextTable::new(&rows).render(width);
        if self.alike > 1 {
            let all = if self.alike == 2 { "both".into() } else { format!("all {}", self.alike) };
            let _ = writeln!(text, "  (the same for {all} data-parallel replicas)");
        }
        if let Some(sentence) = &self.integrated {
            let _ = writeln!(text, "per layer: {sentence}");
        }
        let Some(most) = self.rows.iter().max_by_key(|row| (row.sends.total(), self.ranks - row.rank)) else {
            return text;
        };
        let _ = writeln!(text, "messages and bytes sent per step, busiest rank ({})", most.rank);
        for (name, MessageTotals { count, bytes: sent }) in most.sends.kinds(self.sharing) {
            if count > 0 {
                let _ = writeln!(text, "  {name:<38}{count:>6}{:>12}", bytes(sent as usize));
            }
        }
        text.truncate(text.trim_end().len());
        text
    }
}
