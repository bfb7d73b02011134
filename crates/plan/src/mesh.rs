//! Ranks on named axes. A mesh is a value: it says where a rank stands, and which ranks it shares a slice with.
//!
//! Ranks are numbered with `tensor` running fastest, then `spatial`, `data` and `pipeline`. Launchers put
//! neighbouring ranks on one machine, so that the axes that talk most (every layer, every convolution) stay
//! on its fast links, and those that talk least (once a step, one activation a stage) cross the network.
//!
//! A group of ranks is a slice: all ranks that agree on every axis but the ones named. Its members are in the
//! order of their ranks, and its number tells it apart from its siblings: the two together are the colour and
//! the key by which a communicator is split.

use std::fmt;
use std::ops::{Index, IndexMut};

use serde::Serialize;

use crate::split::GroupRank;

/// An axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Stages: consecutive layers of the model.
    Pipeline,
    /// Replicas: slices of the batch.
    Data,
    /// Tiles of the image.
    Spatial,
    /// Shards of a layer's weights.
    Tensor,
}

impl Axis {
    /// All of them, from the one along which ranks lie farthest apart to the one whose neighbours are next in
    /// number.
    pub const ALL: [Axis; 4] = [Axis::Pipeline, Axis::Data, Axis::Spatial, Axis::Tensor];

    /// The name in run files, tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Pipeline => "pipeline",
            Axis::Data => "data",
            Axis::Spatial => "spatial",
            Axis::Tensor => "tensor",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number for each axis: the extents of a mesh, or the coordinates of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct PerAxis {
    pub data: usize,
    pub pipeline: usize,
    pub tensor: usize,
    pub spatial: usize,
}

impl PerAxis {
    /// The extents of a mesh of one rank: no axis in use.
    pub const ONES: PerAxis = PerAxis { data: 1, pipeline: 1, tensor: 1, spatial: 1 };
    /// The coordinates of rank 0.
    pub const ZEROS: PerAxis = PerAxis { data: 0, pipeline: 0, tensor: 0, spatial: 0 };
}

impl Index<Axis> for PerAxis {
    type Output = usize;

    fn index(&self, axis: Axis) -> &usize {
        match axis {
            Axis::Pipeline => &self.pipeline,
            Axis::Data => &self.data,
            Axis::Spatial => &self.spatial,
            Axis::Tensor => &self.tensor,
        }
    }
}

impl IndexMut<Axis> for PerAxis {
    fn index_mut(&mut self, axis: Axis) -> &mut usize {
        match axis {
            Axis::Pipeline => &mut self.pipeline,
            Axis::Data => &mut self.data,
            Axis::Spatial => &mut self.spatial,
            Axis::Tensor => &mut self.tensor,
        }
    }
}

/// Ranks `0..size` on four axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Mesh {
    axis_sizes: PerAxis,
}

/// The ranks that one rank shares a slice of the mesh with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Which of the slices along these axes it is.
    pub number: usize,
    /// Its members, ascending.
    pub ranks: Vec<usize>,
    /// Where the rank that asked stands in `ranks`.
    pub index: usize,
}

/// Extents that make no mesh, or not the one that was started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis without ranks.
    #[error("the mesh axis `{axis}` must be at least 1, got 0; an axis that is not in use has 1")]
    Empty {
        /// The one of extent 0.
        axis: Axis,
    },
    /// A product beyond the largest number.
    #[error(
        "the mesh of {} has more ranks than can be counted; make an axis smaller",
        times(.axis_sizes)
    )]
    TooLarge {
        /// Ranks along each axis, as they were asked for.
        axis_sizes: PerAxis,
    },
    /// Another number of ranks than was started.
    #[error("the mesh of {} takes {}, but {got} were started; start {expected}{}",
        times(.axis_sizes), ranks(*.expected), .hint.map_or(String::new(), |(axis, n)| format!(", or set `{axis}` to {n}")))]
    Ranks {
        /// Ranks along each axis, as they were asked for.
        axis_sizes: PerAxis,
        /// Ranks that the axes want: their product.
        expected: usize,
        /// How many ranks there are.
        got: usize,
        /// An axis, and the extent of it that would fit.
        hint: Option<(Axis, usize)>,
    },
}

impl Mesh {
    /// A mesh of these extents, each at least 1.
    pub fn new(axis_sizes: PerAxis) -> Result<Mesh, MeshError> {
        if let Some(axis) = Axis::ALL.into_iter().find(|&axis| axis_sizes[axis] == 0) {
            return Err(MeshError::Empty { axis });
        }
        let product = Axis::ALL.into_iter().try_fold(1usize, |n, axis| n.checked_mul(axis_sizes[axis]));
        product.map(|_| Mesh { axis_sizes }).ok_or(MeshError::TooLarge { axis_sizes })
    }

    /// A mesh of these extents for this many ranks, and no other number.
    pub fn for_ranks(axis_sizes: PerAxis, ranks: usize) -> Result<Mesh, MeshError> {
        let mesh = Mesh::new(axis_sizes)?;
        let expected = mesh.size();
        if expected == ranks {
            return Ok(mesh);
        }
        // Replicas are what is easiest to have more or fewer of; then the others, in the order of the cost to
        // change.
        let hint = [Axis::Data, Axis::Pipeline, Axis::Spatial, Axis::Tensor].into_iter().find_map(|axis| {
            let others = expected / axis_sizes[axis];
            (ranks > 0 && ranks.is_multiple_of(others)).then_some((axis, ranks / others))
        });
        Err(MeshError::Ranks { axis_sizes, expected, got: ranks, hint })
    }

    /// How many ranks it has.
    pub fn size(&self) -> usize {
        Axis::ALL.into_iter().map(|axis| self.axis_sizes[axis]).product()
    }

    /// Ranks along an axis.
    pub fn extent(&self, axis: Axis) -> usize {
        self.axis_sizes[axis]
    }

    /// Ranks along each axis.
    pub fn axis_sizes(&self) -> PerAxis {
        self.axis_sizes
    }

    /// Where a rank stands.
    pub fn coordinates(&self, rank: usize) -> PerAxis {
        assert!(rank < self.size(), "rank {rank} of a mesh of {}", self.size());
        let (mut coordinates, mut rest) = (PerAxis::ZEROS, rank);
        for axis in Axis::ALL.into_iter().rev() {
            coordinates[axis] = rest % self.axis_sizes[axis];
            rest /= self.axis_sizes[axis];
        }
        coordinates
    }

    /// The rank at some coordinates: the last axis counts fastest.
    pub fn rank(&self, coordinates: PerAxis) -> usize {
        Axis::ALL.into_iter().fold(0, |rank, axis| {
            let (at, extent) = (coordinates[axis], self.axis_sizes[axis]);
            assert!(at < extent, "coordinate {at} on the axis `{axis}` of {extent} ranks");
            rank * extent + at
        })
    }

    /// The slice through a rank along the axes named: those that agree with it on all others.
    pub fn slice(&self, rank: usize, axes: &[Axis]) -> Slice {
        let coordinates = self.coordinates(rank);
        let (mut number, mut ranks, mut index) = (0, vec![0], 0);
        for axis in Axis::ALL {
            let (at, extent) = (coordinates[axis], self.axis_sizes[axis]);
            if axes.contains(&axis) {
                ranks = ranks.iter().flat_map(|r| (0..extent).map(move |i| r * extent + i)).collect();
                index = index * extent + at;
            } else {
                ranks.iter_mut().for_each(|r| *r = *r * extent + at);
                number = number * extent + at;
            }
        }
        Slice { number, ranks, index }
    }

    /// Where a rank stands in its slice along the axes named; who else is in it is not listed, since they may
    /// be millions.
    pub(crate) fn rank_along(&self, rank: usize, axes: &[Axis]) -> GroupRank {
        let coordinates = self.coordinates(rank);
        let named = Axis::ALL.into_iter().filter(|axis| axes.contains(axis));
        named.fold(GroupRank::SINGLE, |GroupRank { ranks, rank }, axis| {
            let extent = self.axis_sizes[axis];
            GroupRank { ranks: ranks * extent, rank: rank * extent + coordinates[axis] }
        })
    }

    /// All slices along the axes named, by their numbers: every rank is in exactly one.
    pub fn slices(&self, axes: &[Axis]) -> Vec<Vec<usize>> {
        let first = |rank: &usize| self.slice(*rank, axes).index == 0;
        // Firsts ascend with the numbers of their slices, since both count the other axes in the same order.
        (0..self.size()).filter(first).map(|rank| self.slice(rank, axes).ranks).collect()
    }
}

/// `data 2 x tensor 4`: the axes in use.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&times(&self.axis_sizes))
    }
}

fn times(axis_sizes: &PerAxis) -> String {
    let used = Axis::ALL.into_iter().filter(|&axis| axis_sizes[axis] != 1);
    let used: Vec<String> = used.map(|axis| format!("{axis} {}", axis_sizes[axis])).collect();
    if used.is_empty() { "one rank".to_owned() } else { used.join(" x ") }
}

fn ranks(n: usize) -> String {
    if n == 1 { "1 rank".to_owned() } else { format!("{n} ranks") }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn meshes() -> impl Strategy<Value = Mesh> {
        (1..5usize, 1..5usize, 1..5usize, 1..5usize).prop_map(|(data, pipeline, tensor, spatial)| {
            Mesh::new(PerAxis { data, pipeline, tensor, spatial }).unwrap()
        })
    }

    fn mesh_and_axes() -> impl Strategy<Value = (Mesh, Vec<Axis>)> {
        (meshes(), proptest::sample::subsequence(Axis::ALL.to_vec(), 0..=4).prop_shuffle())
    }

    proptest! {
        #[test]
        fn ranks_and_coordinates_are_the_same_thing(mesh in meshes()) {
            let mut seen = HashSet::new();
            for rank in 0..mesh.size() {
                let coordinates = mesh.coordinates(rank);
                prop_assert!(Axis::ALL.into_iter().all(|axis| coordinates[axis] < mesh.extent(axis)));
                prop_assert_eq!(mesh.rank(coordinates), rank);
                prop_assert!(seen.insert(coordinates));
            }
        }

        /// A slice against its definition, whatever the order in which its axes are named.
        #[test]
        fn a_slice_is_all_that_agree_elsewhere((mesh, axes) in mesh_and_axes()) {
            for rank in 0..mesh.size() {
                let here = mesh.coordinates(rank);
                let agrees = |other: &usize| {
                    let there = mesh.coordinates(*other);
                    Axis::ALL.into_iter().all(|axis| axes.contains(&axis) || here[axis] == there[axis])
                };
                let slice = mesh.slice(rank, &axes);
                prop_assert_eq!(&slice.ranks, &(0..mesh.size()).filter(agrees).collect::<Vec<_>>());
                prop_assert_eq!(slice.ranks[slice.index], rank);
                let index = GroupRank { ranks: slice.ranks.len(), rank: slice.index };
                prop_assert_eq!(mesh.rank_along(rank, &axes), index);
            }
        }

        /// The slices part the ranks, and a slice's number is where it stands among them.
        #[test]
        fn slices_part_the_ranks((mesh, axes) in mesh_and_axes()) {
            let slices = mesh.slices(&axes);
            let mut all: Vec<usize> = slices.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..mesh.size()).collect::<Vec<_>>());
            for (number, ranks) in slices.iter().enumerate() {
                prop_assert_eq!(ranks.len(), axes.iter().map(|&axis| mesh.extent(axis)).product::<usize>());
                for (index, &rank) in ranks.iter().enumerate() {
                    let expected = Slice { number, ranks: ranks.clone(), index };
                    prop_assert_eq!(mesh.slice(rank, &axes), expected);
                }
            }
        }

        /// Whatever extent is proposed, it fits.
        #[test]
        fn a_hint_leads_to_a_mesh(mesh in meshes(), ranks in 0..200usize) {
            match Mesh::for_ranks(mesh.axis_sizes(), ranks) {
                Ok(_) => prop_assert_eq!(mesh.size(), ranks),
                Err(MeshError::Ranks { mut axis_sizes, hint: Some((axis, extent)), .. }) => {
                    axis_sizes[axis] = extent;
                    prop_assert_eq!(Mesh::for_ranks(axis_sizes, ranks).unwrap().size(), ranks);
                }
                Err(MeshError::Ranks { axis_sizes, hint: None, .. }) => {
                    for axis in Axis::ALL {
                        prop_assert!(ranks == 0 || !ranks.is_multiple_of(mesh.size() / axis_sizes[axis]));
                    }
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// The order that the head of this file promises, by hand.
    #[test]
    fn tensor_runs_fastest_and_pipeline_slowest() {
        let mesh = Mesh::new(PerAxis { pipeline: 2, data: 2, spatial: 1, tensor: 2 }).unwrap();
        let at = |pipeline, data, tensor| mesh.rank(PerAxis { pipeline, data, tensor, spatial: 0 });
        assert_eq!([at(0, 0, 0), at(0, 0, 1), at(0, 1, 0), at(1, 0, 0), at(1, 1, 1)], [0, 1, 2, 4, 7]);
        assert_eq!(mesh.slices(&[Axis::Data]), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(mesh.slice(6, &[Axis::Tensor, Axis::Pipeline]).ranks, [2, 3, 6, 7]);
    }

    #[test]
    fn wrong_extents_get_a_sentence() {
        let of = |data, pipeline, tensor, spatial| PerAxis { data, pipeline, tensor, spatial };
        let say = |axis_sizes, ranks| Mesh::for_ranks(axis_sizes, ranks).unwrap_err();
        insta::assert_snapshot!(say(of(2, 0, 1, 1), 2), @"the mesh axis `pipeline` must be at least 1, got 0; an axis that is not in use has 1");
        insta::assert_snapshot!(say(of(usize::MAX, 1, 2, 1), 2), @"the mesh of data 18446744073709551615 x tensor 2 has more ranks than can be counted; make an axis smaller");
        insta::assert_snapshot!(say(of(2, 1, 2, 1), 8), @"the mesh of data 2 x tensor 2 takes 4 ranks, but 8 were started; start 4, or set `data` to 4");
        insta::assert_snapshot!(say(of(1, 1, 1, 1), 3), @"the mesh of one rank takes 1 rank, but 3 were started; start 1, or set `data` to 3");
        insta::assert_snapshot!(say(of(1, 2, 3, 1), 4), @"the mesh of pipeline 2 x tensor 3 takes 6 ranks, but 4 were started; start 6, or set `tensor` to 2");
        insta::assert_snapshot!(say(of(1, 4, 4, 1), 6), @"the mesh of pipeline 4 x tensor 4 takes 16 ranks, but 6 were started; start 16");
    }

    #[test]
    fn json_names_the_axes() {
        let mesh = Mesh::new(PerAxis { data: 2, pipeline: 3, ..PerAxis::ONES }).unwrap();
        assert_eq!(
            serde_json::to_string(&mesh).unwrap(),
            r#"{"data":2,"pipeline":3,"tensor":1,"spatial":1}"#
        );
        assert_eq!(mesh.to_string(), "pipeline 3 x data 2");
    }
}
