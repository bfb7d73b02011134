//! The groups of ranks that layers communicate in.

use espalier_comm::Communicator;
use espalier_plan::mesh::{Axis, Mesh, PerAxis};

use crate::Result;

/// A rank's groups along the axes of the mesh.
#[derive(Debug, Clone)]
pub struct AxisGroups {
    world: Communicator,
    data: Communicator,
    stages: Communicator,
    spatial: Communicator,
    tensor: Communicator,
    /// All that have tiles or samples of the batch's images.
    pixels: Communicator,
}

impl AxisGroups {
    /// Those of a rank of a mesh; all ranks of the world must form them.
    pub fn form(world: &Communicator, mesh: &Mesh) -> Result<AxisGroups> {
        let along = |axes: &[Axis]| AxisGroups::slice(world, mesh, axes);
        Ok(AxisGroups {
            data: along(&[Axis::Data])?,
            stages: along(&[Axis::Pipeline])?,
            spatial: along(&[Axis::Spatial])?,
            tensor: along(&[Axis::Tensor])?,
            pixels: along(&[Axis::Data, Axis::Spatial])?,
            world: world.clone(),
        })
    }

    /// The ranks of a mesh that differ from this one along some axes alone, in their order; all ranks of the
    /// world must call it.
    pub fn slice(world: &Communicator, mesh: &Mesh, axes: &[Axis]) -> Result<Communicator> {
        let slice = mesh.slice(world.rank(), axes);
        Ok(world.split(Some(slice.number), slice.index)?.expect("a colour was given"))
    }

    /// Those of the only rank of its world.
    pub fn single_rank() -> AxisGroups {
        let mesh = Mesh::new(PerAxis::ONES).expect("a mesh of one rank");
        AxisGroups::form(&Communicator::single_rank(), &mesh)
            .expect("a rank that is alone splits as it likes")
    }

    /// Those along an axis, in their order on it.
    pub fn along(&self, axis: Axis) -> &Communicator {
        match axis {
            Axis::Data => &self.data,
            Axis::Pipeline => &self.stages,
            Axis::Tensor => &self.tensor,
            Axis::Spatial => &self.spatial,
        }
    }

    /// Those along the axes over which a layer of the plan sums.
    pub fn over(&self, axes: &[Axis]) -> &Communicator {
        match axes {
            [axis] => self.along(*axis),
            [Axis::Data, Axis::Spatial] => &self.pixels,
            // Where tensor ranks split samples there are neither stages nor tiles.
            [Axis::Data, Axis::Tensor] => &self.world,
            other => unreachable!("no layer sums over {other:?}"),
        }
    }
}
