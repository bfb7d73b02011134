//! Constants of a table, fitted to its rows.

use super::tables::Table;

impl Table {
    /// Logarithms of predicted over seen, of the rows that may be fitted to.
    fn residuals(&self) -> Vec<f64> {
        let rows = self.rows.iter().filter(|row| !row.held_out);
        rows.map(|row| (self.predict(row) / row.seconds).ln()).collect()
    }

    /// Levenberg's and Marquardt's way to the least squares, over the logarithms of the constants; those that
    /// are 0 have none, and stay.
    pub fn fit(&mut self) {
        let Table { cluster, engine, constants, .. } = self;
        constants.retain(|constant| *(constant.get)(cluster, engine) > 0.0);
        let square = |residuals: &[f64]| residuals.iter().map(|one| one * one).sum::<f64>();
        let mut residuals = self.residuals();
        let mut damping = 1e-2;
        for _ in 0..25 {
            let (count, old) = (self.constants.len(), self.values());
            let mut slopes = Vec::new();
            for i in 0..count {
                let mut moved = old.clone();
                moved[i] = (moved[i] * 1.02).min(self.constants[i].range[1] * 1.02);
                self.set(&moved);
                let width = (moved[i] / old[i]).ln();
                slopes.push(
                    self.residuals()
                        .iter()
                        .zip(&residuals)
                        .map(|(new, was)| (new - was) / width)
                        .collect::<Vec<f64>>(),
                );
            }
            let mut better = false;
            for _ in 0..6 {
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let mut normal: Vec<Vec<f64>> = (0..count)
                    .map(|i| {
                        let mut row: Vec<f64> = (0..count).map(|j| dot(&slopes[i], &slopes[j])).collect();
                        row[i] += damping;
                        row.push(-dot(&slopes[i], &residuals));
                        row
                    })
                    .collect();
                let way = solve(&mut normal);
                let new: Vec<f64> = (0..count)
                    .map(|i| {
                        let [least, most] = self.constants[i].range;
                        (old[i] * way[i].clamp(-0.7, 0.7).exp()).clamp(least, most)
                    })
                    .collect();
                self.set(&new);
                let found = self.residuals();
                if square(&found) < square(&residuals) * 0.9995 {
                    (residuals, damping, better) = (found, damping / 3.0, true);
                    break;
                }
                self.set(&old);
                damping *= 4.0;
            }
            if !better {
                break;
            }
        }
        let values = self.values();
        for (constant, value) in self.constants.iter().zip(values) {
            println!("{} = {value:.4}", constant.name);
        }
    }

    fn values(&mut self) -> Vec<f64> {
        let Table { cluster, engine, constants, .. } = self;
        constants.iter().map(|constant| *(constant.get)(cluster, engine)).collect()
    }

    fn set(&mut self, values: &[f64]) {
        let Table { cluster, engine, constants, .. } = self;
        constants.iter().zip(values).for_each(|(constant, value)| *(constant.get)(cluster, engine) = *value);
    }
}

/// Gauss's elimination; the last column is what the equations equal.
fn solve(rows: &mut [Vec<f64>]) -> Vec<f64> {
    let count = rows.len();
    for i in 0..count {
        let pivot = (i..count).max_by(|a, b| rows[*a][i].abs().total_cmp(&rows[*b][i].abs())).unwrap();
        rows.swap(i, pivot);
        for j in 0..count {
            if j != i && rows[i][i] != 0.0 {
                let factor = rows[j][i] / rows[i][i];
                for k in i..=count {
                    let part = factor * rows[i][k];
                    rows[j][k] -= part;
                }
            }
        }
    }
    (0..count).map(|i| if rows[i][i] == 0.0 { 0.0 } else { rows[i][count] / rows[i][i] }).collect()
}
