//! Rotary positions.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use super::check;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Turns each pair of numbers of a head by an angle of its position.
///
/// Element `j` of the first half of a head and element `j` of the second are a pair `(a, b)`, which becomes
/// `(a cos - b sin, b cos + a sin)`, as in `candle_nn::rotary_emb::rope`, on this crate's layout.
///
/// # Arguments
///
/// * `x`: `(batch, seqlen, num_heads, head_dim)`, with an even `head_dim`. Rows are read in place, whatever the
///   strides of the other dimensions.
/// * `cos`, `sin`: `(seqlen or more, head_dim / 2)`, or `(batch, seqlen or more, head_dim / 2)` where sequences
///   differ in their positions. Constants: they receive no gradient.
///
/// # Returns
///
/// Shape and dtype of `x`, contiguous; differentiable in `x`.
///
/// # Errors
///
/// A rank that is not 4, an odd `head_dim` or 0, angles of other shapes, dtypes or devices that differ, a device
/// or dtype without kernels.
///
/// # References
///
/// J. Su et al., "RoFormer", 2021, arXiv 2104.09864, section 3.4.2, with the pairs of GPT-NeoX.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let &[batch, seqlen, _, head_dim] = x.dims() else {
        bail!(
            "rope: x must have 4 dimensions (batch, seqlen, num_heads, head_dim), got shape {:?}",
            x.dims()
        );
    };
    if head_dim == 0 || head_dim % 2 != 0 {
        bail!("rope: head_dim must be even and at least 2, got {head_dim}");
    }
    for (name, angles) in [("cos", cos), ("sin", sin)] {
        let fits = match *angles.dims() {
            [positions, pairs] => positions >= seqlen && pairs == head_dim / 2,
            [sequences, positions, pairs] => {
                sequences == batch && positions >= seqlen && pairs == head_dim / 2
            }
            _ => false,
        };
        if !fits {
            bail!(
                "rope: {name} must be (seqlen or more, head_dim / 2) with or without a batch before, for x {:?}, got {:?}",
                x.dims(),
                angles.dims()
            );
        }
    }
    check::alike("rope", ("x", x), &[("cos", cos), ("sin", sin)])?;
    check::has_kernel("rope", x)?;
    let angles = Angles {
        cos: cos.detach().contiguous()?,
        sin: sin.detach().contiguous()?,
    };
    contiguous_rows(x)?.apply_op1(Rope { angles })
}

/// `x` itself where the numbers of a head are neighbours.
fn contiguous_rows(x: &Tensor) -> Result<Tensor> {
    match x.stride() {
        [.., 1] => Ok(x.clone()),
        _ => x.contiguous(),
    }
}

/// Contiguous, of the shapes that [`rope`] admits.
pub(crate) struct Angles {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl Angles {
    /// From the angles of one sequence to those of the next.
    pub(crate) fn batch_stride(layout: &Layout) -> usize {
        match layout.stride() {
            [batch, _, _] => *batch,
            _ => 0,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Forward = 1,
    Back = -1,
}

struct Rope {
    angles: Angles,
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = cpu::training::rope::forward((x, layout), &self.angles, Direction::Forward)?;
        Ok((out, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let out = cuda::training::rope::forward((x, layout), &self.angles, Direction::Forward)?;
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, dout: &Tensor) -> Result<Option<Tensor>> {
        let dout = &contiguous_rows(dout)?;
        let dx = on_device!(x.device(), rope::turn(dout, &self.angles, Direction::Back))?;
        Ok(Some(dx))
    }
}
