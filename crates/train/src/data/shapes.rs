//! Drawn shapes: a labelled set of colour images that needs no download, for first runs, tests and studies.
//!
//! Each image shows one of ten shapes somewhere, at some size, turned and stretched, in some colour, on a striped
//! gradient, under noise, with lines and dots strewn about that belong to no class. Since neither place nor colour nor
//! brightness tells the class, a linear model stays near chance, while a small convolutional network gets most of
//! them right and not all. Classes are equally frequent.
//!
//! Image i is a pure function of (seed, i), so a larger set begins with the smaller one.

use super::{Error, images::Raw};
use espalier_tensor::random;
use std::thread;

/// The classes, in the order of their labels.
pub const CLASSES: [&str; 10] =
    ["disc", "square", "triangle", "cross", "ring", "star", "crescent", "half disc", "bar", "frame"];

/// The middles of a pixel's thirds.
const THIRDS: [f64; 3] = [1.0 / 6.0, 0.5, 5.0 / 6.0];

const DISC: usize = 0;
const SQUARE: usize = 1;
const TRIANGLE: usize = 2;
const CROSS: usize = 3;
const RING: usize = 4;
const STAR: usize = 5;
const CRESCENT: usize = 6;
const HALF_DISC: usize = 7;
const BAR: usize = 8;
const FRAME: usize = 9;

/// Apart from every other use of a seed.
const PURPOSE: u64 = u64::from_be_bytes(*b"shapes  ");

/// Images to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shapes {
    /// How many.
    pub count: usize,
    /// Rows and columns: at least 16.
    pub size: usize,
    /// Another seed, other images.
    pub seed: u64,
}

impl Shapes {
    /// All images, drawn by all cores.
    pub(super) fn draw(&self) -> Result<Raw, Error> {
        let Shapes { count, size, seed } = *self;
        if size < 16 {
            return Err(Error::Setting {
                field: "size",
                expected: "at least 16 pixels",
                got: size.to_string(),
            });
        }
        if count == 0 {
            return Err(Error::Setting { field: "count", expected: "at least one image", got: "0".into() });
        }
        let (key, stride) = (random::key(seed, PURPOSE), size * size * 3);
        let mut pixels = vec![0; count * stride];
        let share = count.div_ceil(thread::available_parallelism().map_or(1, usize::from));
        thread::scope(|scope| {
            for (part, images) in pixels.chunks_mut(share * stride).enumerate() {
                let draw = move || {
                    for (i, image) in images.chunks_exact_mut(stride).enumerate() {
                        Scene::new(key, part * share + i).paint(size, image);
                    }
                };
                scope.spawn(draw);
            }
        });
        let labels = (0..count).map(|i| label(i) as u8).collect();
        let classes = CLASSES.len();
        Ok(Raw { path: "data.shapes".into(), pixels, labels, shape: [size, size, 3], classes })
    }
}

fn label(i: usize) -> usize {
    i % CLASSES.len()
}

type Colour = [f64; 3];

/// What one image shows. Lengths are fractions of the image's side.
struct Scene {
    class: usize,
    centre: [f64; 2],
    radius: f64,
    /// From the image's coordinates to the shape's, in which it fits the unit circle.
    turn: [[f64; 2]; 2],
    ink: Colour,
    paper: [Colour; 2],
    /// The gradient's direction.
    fall: [f64; 2],
    /// Waves per side along x and y, phase, height.
    stripes: [f64; 4],
    clutter: Vec<Stroke>,
    noise: f64,
    noise_key: u64,
}

/// A line with round ends; a dot where they meet.
struct Stroke {
    ends: [[f64; 2]; 2],
    radius: f64,
    ink: Colour,
    /// Over the shape or under it.
    above: bool,
}

impl Scene {
    fn new(key: u64, i: usize) -> Scene {
        let key = random::key(key, i as u64);
        let mut drawn = 0;
        let mut between = |low: f64, high: f64| {
            drawn += 1;
            low + (high - low) * random::uniform(key, drawn)
        };
        let mut colour = || [0; 3].map(|_| between(0.0, 1.0));
        let paper = [colour(), colour()];
        // An ink that stands out from the paper in at least one colour, where six tries find one.
        let stands_out =
            |ink: &Colour| (0..3).any(|c| paper.iter().all(|paper| (ink[c] - paper[c]).abs() > 0.3));
        let inks: [Colour; 6] = std::array::from_fn(|_| colour());
        let ink = *inks.iter().find(|ink| stands_out(ink)).unwrap_or(&inks[0]);

        let radius = between(0.17, 0.36);
        let centre = [0; 2].map(|_| between(radius, 1.0 - radius));
        let (sin, cos) = between(0.0, std::f64::consts::TAU).sin_cos();
        let [wide, high] = [0; 2].map(|_| radius * between(0.8, 1.0));
        let turn = [[cos / wide, sin / wide], [-sin / high, cos / high]];

        let (sin, cos) = between(0.0, std::f64::consts::TAU).sin_cos();
        let stripes = [between(-6.0, 6.0), between(-6.0, 6.0), between(0.0, 6.3), between(0.0, 0.15)];
        let clutter = (0..between(2.0, 6.0) as usize).map(|_| {
            let start = [0; 2].map(|_| between(0.0, 1.0));
            let dot = between(0.0, 1.0) < 0.4;
            let reach = if dot { 0.0 } else { 0.3 };
            let end = start.map(|s| s + between(-reach, reach));
            let radius = if dot { between(0.03, 0.07) } else { between(0.012, 0.03) };
            let ink = [0; 3].map(|_| between(0.0, 1.0));
            Stroke { ends: [start, end], radius, ink, above: between(0.0, 1.0) < 0.5 }
        });
        let clutter = clutter.collect();
        let noise = between(0.03, 0.15);
        let noise_key = random::key(key, 1);
        Scene {
            class: label(i),
            centre,
            radius,
            turn,
            ink,
            paper,
            fall: [cos, sin],
            stripes,
            clutter,
            noise,
            noise_key,
        }
    }

    /// image: [size, size, 3]
    fn paint(&self, size: usize, image: &mut [u8]) {
        let unit = 1.0 / size as f64;
        for (at, pixel) in image.chunks_exact_mut(3).enumerate() {
            let corner = [(at % size) as f64 * unit, (at / size) as f64 * unit];
            let middle = corner.map(|x| x + 0.5 * unit);
            let mut colour = self.background(middle);
            self.strew(false, middle, unit, &mut colour);
            let covered = if length(middle[0] - self.centre[0], middle[1] - self.centre[1])
                < self.radius + unit
            {
                // Edges are smoothed by looking at nine places of each pixel.
                let place = |n: usize| [corner[0] + THIRDS[n % 3] * unit, corner[1] + THIRDS[n / 3] * unit];
                (0..9).filter(|&n| self.covers(place(n))).count()
            } else {
                0
            };
            blend(&mut colour, &self.ink, covered as f64 / 9.0);
            self.strew(true, middle, unit, &mut colour);
            for (c, out) in pixel.iter_mut().enumerate() {
                let noisy = colour[c] + self.noise * noise(self.noise_key, 3 * at + c);
                *out = (noisy * 255.0).round().clamp(0.0, 255.0) as u8;
            }
        }
    }

    fn background(&self, [x, y]: [f64; 2]) -> Colour {
        let along = (x - 0.5) * self.fall[0] + (y - 0.5) * self.fall[1];
        let [per_x, per_y, phase, height] = self.stripes;
        let wave = height * (std::f64::consts::TAU * (per_x * x + per_y * y) + phase).sin();
        let mut colour = self.paper[0];
        blend(&mut colour, &self.paper[1], (along + 0.5).clamp(0.0, 1.0));
        colour.map(|c| c + wave)
    }

    fn strew(&self, above: bool, at: [f64; 2], unit: f64, colour: &mut Colour) {
        for stroke in self.clutter.iter().filter(|stroke| stroke.above == above) {
            let edge = (stroke.radius - stroke.distance(at)) / unit + 0.5;
            blend(colour, &stroke.ink, edge.clamp(0.0, 1.0));
        }
    }

    fn covers(&self, at: [f64; 2]) -> bool {
        let offset = [at[0] - self.centre[0], at[1] - self.centre[1]];
        let [x, y] = self.turn.map(|row| row[0] * offset[0] + row[1] * offset[1]);
        let r = length(x, y);
        r <= 1.0 && inside(self.class, x, y, r)
    }
}

impl Stroke {
    fn distance(&self, [x, y]: [f64; 2]) -> f64 {
        let [[x0, y0], [x1, y1]] = self.ends;
        let (dx, dy) = (x1 - x0, y1 - y0);
        let along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy).max(1e-12)).clamp(0.0, 1.0);
        length(x - x0 - along * dx, y - y0 - along * dy)
    }
}

fn blend(colour: &mut Colour, over: &Colour, share: f64) {
    colour.iter_mut().zip(over).for_each(|(c, o)| *c += share * (o - *c));
}

fn length(x: f64, y: f64) -> f64 {
    (x * x + y * y).sqrt()
}

/// Four bytes' sum: near enough to a normal number, and much cheaper where there is one for every value of an image.
fn noise(key: u64, at: usize) -> f64 {
    let sum: u32 = random::bits(key, at as u64).to_le_bytes().map(u32::from).iter().sum();
    (f64::from(sum) - 510.0) / 147.8
}

/// Whether a point of the unit circle, `r` from its middle, belongs to the shape.
fn inside(class: usize, x: f64, y: f64, r: f64) -> bool {
    let (wide, high) = (x.abs(), y.abs());
    match class {
        DISC => r < 0.85,
        SQUARE => wide.max(high) < 0.7,
        TRIANGLE => y > -0.5 && wide * 3f64.sqrt() < 1.0 - y,
        CROSS => wide.max(high) < 0.92 && wide.min(high) < 0.27,
        RING => (0.5..0.9).contains(&r),
        STAR => {
            // Folded into a tenth of the star, whose edge runs from a tip at distance 1 to a notch at 0.42.
            let fold = std::f64::consts::PI / 5.0;
            let angle = (y.atan2(x).rem_euclid(2.0 * fold) - fold).abs();
            let (notch, tip) = ([0.42, 0.0], [fold.cos(), fold.sin()]);
            let point = [r * angle.cos() - notch[0], r * angle.sin() - notch[1]];
            (tip[0] - notch[0]) * point[1] - (tip[1] - notch[1]) * point[0] > 0.0
        }
        CRESCENT => r < 0.92 && length(x - 0.45, y) > 0.7,
        HALF_DISC => length(x, y + 0.4) < 0.95 && y > -0.4,
        BAR => wide < 0.95 && high < 0.3,
        FRAME => (0.4..0.7).contains(&wide.max(high)),
        _ => unreachable!("there are ten classes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Images, Split};

    /// The same whatever the set's size and the number of cores; another seed draws others.
    #[test]
    fn an_image_depends_on_seed_and_number_alone() {
        let shapes = Shapes { count: 23, size: 24, seed: 3 };
        let (few, more) = (shapes.draw().unwrap(), Shapes { count: 40, ..shapes }.draw().unwrap());
        assert_eq!(few.pixels, more.pixels[..few.pixels.len()]);
        assert_eq!(few.labels[..12], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
        assert_ne!(few.pixels, Shapes { seed: 4, ..shapes }.draw().unwrap().pixels);
        assert_eq!(Images::shapes(&shapes, 0.2).unwrap().len(Split::Train), 18);
    }

    /// No shape is empty, fills its circle, or is another in disguise.
    #[test]
    fn shapes_are_distinct() {
        let grid = || (0..10_000).map(|n| [(n % 100) as f64 / 50.0 - 0.99, (n / 100) as f64 / 50.0 - 0.99]);
        let drawn =
            |class| grid().map(|[x, y]| x.hypot(y) <= 1.0 && inside(class, x, y, x.hypot(y))).collect();
        let masks: Vec<Vec<bool>> = (0..10).map(drawn).collect();
        for (a, mask) in masks.iter().enumerate() {
            let area = mask.iter().filter(|&&m| m).count();
            assert!((1000..6500).contains(&area), "{}: {area}", CLASSES[a]);
            for (b, other) in masks.iter().enumerate().skip(a + 1) {
                let differ = mask.iter().zip(other).filter(|(m, o)| m != o).count();
                assert!(differ > 500, "{} and {}: {differ}", CLASSES[a], CLASSES[b]);
            }
        }
    }

    /// Mean colour says nothing of the class: the images' brightness varies far more within classes than between them.
    #[test]
    fn brightness_does_not_tell_the_class() {
        let raw = Shapes { count: 2000, size: 16, seed: 1 }.draw().unwrap();
        let means: Vec<f64> = raw
            .pixels
            .chunks_exact(768)
            .map(|image| image.iter().map(|&p| f64::from(p)).sum::<f64>() / 768.0)
            .collect();
        let of = |class: usize| means.iter().skip(class).step_by(10).sum::<f64>() / 200.0;
        let all = means.iter().sum::<f64>() / 2000.0;
        let spread = (means.iter().map(|m| (m - all).powi(2)).sum::<f64>() / 2000.0).sqrt();
        assert!((0..10).all(|class| (of(class) - all).abs() < 0.3 * spread));
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        let error = |count, size| Shapes { count, size, seed: 0 }.draw().unwrap_err();
        assert!(matches!(error(0, 32), Error::Setting { field: "count", .. }));
        assert!(matches!(error(10, 8), Error::Setting { field: "size", .. }));
    }
}
