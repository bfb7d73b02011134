//! A timeline as people draw it: a row for every rank, a box for every pass.
//!
//! A box begins with the micro-batch and is filled up with what tells the passes apart without colour: `0>` a
//! forward, `0<<<` a backward of twice its time, `0=` a weight half. Dots are idle. A box of the shortest
//! pass is just wide enough for its label, so equal times are equally wide.

use super::{Pass, Schedule, Timeline};

/// A longer row is cut: nobody looks that far.
const COLUMNS_MOST: usize = 1000;

/// How a picture is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Characters alone, for files and pipes.
    Plain,
    /// With the escape codes of a terminal.
    Colour,
}

impl Timeline {
    /// The picture, a line for each rank and one that explains it.
    pub fn picture(&self, schedule: &Schedule, ink: Ink) -> String {
        let scale = ColumnScale::of(self, schedule);
        let columns = scale.column(self.end).min(COLUMNS_MOST);
        let last_rank = (schedule.stages() - 1).to_string().len();
        let mut picture = String::new();
        for rank in 0..schedule.stages() {
            let mut row = format!("rank {rank:>last_rank$} |");
            let mut column = 0;
            for (pass, label, from, to) in self.boxes(schedule, rank, &scale) {
                let (from, to) = (from.min(columns), to.min(columns));
                row.extend(std::iter::repeat_n('.', from - column));
                let text: String =
                    label.chars().chain(std::iter::repeat(fill(pass))).take(to - from).collect();
                row.push_str(&painted(&text, pass, ink));
                column = to;
            }
            row.extend(std::iter::repeat_n('.', columns - column));
            picture += &row;
            picture += if scale.column(self.end) > COLUMNS_MOST { "~\n" } else { "|\n" };
        }
        picture + &self.legend(schedule, &scale, ink)
    }

    fn boxes<'a>(
        &'a self,
        schedule: &'a Schedule,
        rank: usize,
        scale: &'a ColumnScale,
    ) -> impl Iterator<Item = (Pass, String, usize, usize)> + 'a {
        self.spans[rank].iter().filter_map(move |span| {
            let (pass, work) = span.action.compute()?;
            let mut label = work.micro_batch.to_string();
            if several_chunks(schedule) {
                label.push(letter(work.chunk));
            }
            Some((pass, label, scale.column(span.start), scale.column(span.end)))
        })
    }

    /// What the boxes mean, of the kinds that there are.
    fn legend(&self, schedule: &Schedule, scale: &ColumnScale, ink: Ink) -> String {
        let chunk = if several_chunks(schedule) { "a" } else { "" };
        let halves = schedule
            .ranks
            .iter()
            .flatten()
            .any(|action| matches!(action.compute(), Some((Pass::BackwardWeight, _))));
        let kinds = match halves {
            true => &[
                (Pass::Forward, "forward of micro-batch 0"),
                (Pass::BackwardInput, "its input gradients"),
                (Pass::BackwardWeight, "its weight gradients"),
            ][..],
            false => &[(Pass::Forward, "forward of micro-batch 0"), (Pass::Backward, "its backward")][..],
        };
        let entries = kinds.iter().map(|&(pass, meaning)| {
            format!("{} {meaning}", painted(&format!("0{chunk}{}", fill(pass)), pass, ink))
        });
        let mut entries: Vec<String> = entries.collect();
        if several_chunks(schedule) {
            let chunks = schedule.placement.virtual_stages().div_ceil(schedule.stages());
            entries.push(match chunks {
                2 => "a and b the rank's chunks".into(),
                _ => format!("a to {} the rank's chunks", letter(chunks - 1)),
            });
        }
        entries.push(". idle".into());
        if scale.column(self.end) > COLUMNS_MOST {
            entries.push("~ cut here".into());
        }
        entries.join(", ") + "\n"
    }
}

/// How long a column is.
struct ColumnScale {
    columns_per_unit: f64,
}

impl ColumnScale {
    fn of(timeline: &Timeline, schedule: &Schedule) -> ColumnScale {
        let passes = timeline.spans.iter().flatten().filter(|span| span.action.compute().is_some());
        let shortest = passes.map(|span| span.end - span.start).fold(f64::INFINITY, f64::min);
        let digits = (schedule.all_micro_batches() - 1).to_string().len();
        let width = digits + usize::from(several_chunks(schedule)) + 1;
        ColumnScale { columns_per_unit: width as f64 / shortest }
    }

    /// Rounded down, so that what is as long as the shortest pass is as wide; the little more is for times
    /// that are a rounding error short of a whole number.
    fn column(&self, time: f64) -> usize {
        (time * self.columns_per_unit + 1e-6) as usize
    }
}

/// Whether a micro-batch goes through several chunks of a rank, and a box has to say which.
fn several_chunks(schedule: &Schedule) -> bool {
    schedule.placement.virtual_stages() > schedule.stages()
}

fn letter(chunk: usize) -> char {
    char::from(b'a' + (chunk % 26) as u8)
}

fn fill(pass: Pass) -> char {
    match pass {
        Pass::Forward => '>',
        Pass::Backward | Pass::BackwardInput => '<',
        Pass::BackwardWeight => '=',
    }
}

fn painted(text: &str, pass: Pass, ink: Ink) -> String {
    // Black on blue, green and yellow.
    let colour = match pass {
        Pass::Forward => "30;44",
        Pass::Backward | Pass::BackwardInput => "30;42",
        Pass::BackwardWeight => "30;43",
    };
    match ink {
        Ink::Plain => text.into(),
        Ink::Colour => format!("\x1b[{colour}m{text}\x1b[0m"),
    }
}
