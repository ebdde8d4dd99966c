//! The ops, the plain formulas in candle's differentiable operations, and operands of given sizes.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_flash_gqa::training;

use super::case::Case;
use crate::support::tensors::normal;

/// An op beside the formula that it computes, on operands and constants.
#[derive(Clone, Copy)]
pub struct Op {
    pub name: &'static str,
    pub fused: fn(&[Tensor], &[Tensor]) -> candle_core::Result<Tensor>,
    pub plain: fn(&[Tensor], &[Tensor]) -> candle_core::Result<Tensor>,
}

pub const EPS: f32 = 1e-5;

/// Of [`linear_to_heads`].
const HEAD_DIM: usize = 6;

pub const RMS_NORM: Op = Op {
    name: "rms_norm",
    fused: |x, _| training::rms_norm(&x[0], &x[1], EPS),
    plain: |x, _| candle_nn::ops::rms_norm_slow(&x[0], &x[1], EPS),
};

pub const ROPE: Op = Op {
    name: "rope",
    fused: |x, angles| training::rope(&x[0], &angles[0], &angles[1]),
    plain: |x, angles| {
        let (seqlen, half) = (x[0].dim(1)?, x[0].dim(D::Minus1)? / 2);
        let of_heads = |angles: &Tensor| {
            let angles = angles.narrow(D::Minus2, 0, seqlen)?;
            angles.unsqueeze(angles.rank() - 1)
        };
        let (cos, sin) = (of_heads(&angles[0])?, of_heads(&angles[1])?);
        let first = x[0].narrow(D::Minus1, 0, half)?;
        let second = x[0].narrow(D::Minus1, half, half)?;
        let turned = [
            (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?,
            (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?,
        ];
        Tensor::cat(&turned, D::Minus1)
    },
};

pub const SWIGLU: Op = Op {
    name: "swiglu",
    fused: |x, _| training::swiglu(&x[0], &x[1]),
    plain: |x, _| x[0].silu()? * &x[1],
};

pub const LINEAR: Op = Op {
    name: "linear",
    fused: |x, _| training::linear(&x[0], &x[1]),
    plain: |x, _| {
        let (size_out, size_in) = x[1].dims2()?;
        let mut dims = x[0].dims().to_vec();
        let last = dims.len() - 1;
        dims[last] = size_out;
        let rows = dims[..last].iter().product::<usize>();
        let out = x[0].reshape((rows, size_in))?.matmul(&x[1].t()?)?;
        out.reshape(dims)
    },
};

pub const LINEAR_TO_HEADS: Op = Op {
    name: "linear_to_heads",
    fused: |x, _| training::linear_to_heads(&x[0], &x[1], HEAD_DIM),
    plain: |x, _| {
        let out = (LINEAR.plain)(x, &[])?;
        let mut dims = x[0].dims().to_vec();
        dims.pop();
        dims.extend([x[1].dim(0)? / HEAD_DIM, HEAD_DIM]);
        out.reshape(dims)
    },
};

pub const LINEAR_FROM_HEADS: Op = Op {
    name: "linear_from_heads",
    fused: |x, _| training::linear_from_heads(&x[0], &x[1]),
    plain: |x, _| (LINEAR.plain)(&[x[0].flatten_from(D::Minus2)?, x[1].clone()], &[]),
};

pub const SWIGLU_LINEAR: Op = Op {
    name: "swiglu_linear",
    fused: |x, _| training::swiglu_linear(&x[0], &x[1], &x[2]),
    plain: |x, _| {
        let project = |weight: usize| (LINEAR.plain)(&[x[0].clone(), x[weight].clone()], &[]);
        project(1)?.silu()? * project(2)?
    },
};

pub const EMBEDDING: Op = Op {
    name: "embedding",
    fused: |x, ids| training::embedding(&x[0], &ids[0]),
    plain: |x, ids| {
        let mut dims = ids[0].dims().to_vec();
        dims.push(x[0].dim(1)?);
        let ids = ids[0].flatten_all()?;
        x[0].index_select(&ids, 0)?.reshape(dims)
    },
};

pub const CROSS_ENTROPY: Op = Op {
    name: "cross_entropy",
    fused: |x, targets| training::cross_entropy(&x[0], &targets[0]),
    plain: |x, targets| {
        let logits = match x[0].dtype() {
            DType::F64 => x[0].clone(),
            _ => x[0].to_dtype(DType::F32)?,
        };
        let rows = logits.reshape(((), x[0].dim(D::Minus1)?))?;
        candle_nn::loss::cross_entropy(&rows, &targets[0].flatten_all()?)
    },
};

/// RMSNorm of `dims`.
pub fn rms_norm(dims: &[usize], dtype: DType, device: &Device) -> Result<Case> {
    Ok(Case {
        op: RMS_NORM,
        operands: vec![
            normal(dims, 1., dtype, device, 1)?,
            normal(&dims[dims.len() - 1..], 1., dtype, device, 2)?,
        ],
        constants: vec![],
    })
}

/// Rotary positions of `dims`, with angles for a longer sequence, each batch its own or all the same.
pub fn rope(dims: [usize; 4], per_batch: bool, dtype: DType, device: &Device) -> Result<Case> {
    let mut angle_dims = vec![dims[1] + 3, dims[3] / 2];
    if per_batch {
        angle_dims.insert(0, dims[0]);
    }
    let angles = normal(&angle_dims, 2., DType::F64, &Device::Cpu, 2)?;
    let to_device = |angles: Tensor| angles.to_dtype(dtype)?.to_device(device);
    Ok(Case {
        op: ROPE,
        operands: vec![normal(&dims, 1., dtype, device, 1)?],
        constants: vec![to_device(angles.cos()?)?, to_device(angles.sin()?)?],
    })
}

/// SwiGLU of `dims`.
pub fn swiglu(dims: &[usize], dtype: DType, device: &Device) -> Result<Case> {
    Ok(Case {
        op: SWIGLU,
        operands: vec![
            normal(dims, 2., dtype, device, 1)?,
            normal(dims, 1., dtype, device, 2)?,
        ],
        constants: vec![],
    })
}

/// A matrix on `dims`.
pub fn linear(dims: &[usize], size_out: usize, dtype: DType, device: &Device) -> Result<Case> {
    let size_in = dims[dims.len() - 1];
    Ok(Case {
        op: LINEAR,
        operands: vec![
            normal(dims, 1., dtype, device, 1)?,
            normal(&[size_out, size_in], 0.2, dtype, device, 2)?,
        ],
        constants: vec![],
    })
}

/// A matrix on `dims` to heads.
pub fn linear_to_heads(
    dims: &[usize],
    heads: usize,
    dtype: DType,
    device: &Device,
) -> Result<Case> {
    Ok(Case {
        op: LINEAR_TO_HEADS,
        ..linear(dims, heads * HEAD_DIM, dtype, device)?
    })
}

/// A matrix on heads of `dims`.
pub fn linear_from_heads(
    dims: &[usize],
    size_out: usize,
    dtype: DType,
    device: &Device,
) -> Result<Case> {
    let size_in = dims[dims.len() - 2] * dims[dims.len() - 1];
    Ok(Case {
        op: LINEAR_FROM_HEADS,
        operands: vec![
            normal(dims, 1., dtype, device, 1)?,
            normal(&[size_out, size_in], 0.2, dtype, device, 2)?,
        ],
        constants: vec![],
    })
}

/// SwiGLU of two matrices on `dims`.
pub fn swiglu_linear(
    dims: &[usize],
    size_out: usize,
    dtype: DType,
    device: &Device,
) -> Result<Case> {
    let mut case = linear(dims, size_out, dtype, device)?;
    let up = normal(case.operands[1].dims(), 0.2, dtype, device, 3)?;
    case.operands.push(up);
    case.op = SWIGLU_LINEAR;
    Ok(case)
}

/// Rows of a table `(vocab_size, cols)` for ids of shape `dims`, some of which occur often and some never.
pub fn embedding(
    [vocab_size, cols]: [usize; 2],
    dims: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<Case> {
    let count = dims.iter().product::<usize>() as u32;
    let ids = (0..count).map(|i| (i * i + 7 * (i / 5)) % vocab_size as u32);
    let ids = Tensor::from_vec(ids.collect(), dims, &Device::Cpu)?;
    Ok(Case {
        op: EMBEDDING,
        operands: vec![normal(&[vocab_size, cols], 1., dtype, device, 1)?],
        constants: vec![ids.to_device(device)?],
    })
}

/// Cross entropy of logits of `dims`.
pub fn cross_entropy(dims: &[usize], dtype: DType, device: &Device) -> Result<Case> {
    let (rows, vocab_size) = (&dims[..dims.len() - 1], dims[dims.len() - 1] as u32);
    let count = rows.iter().product::<usize>() as u32;
    let targets = (0..count).map(|i| (i * i + 3) % vocab_size);
    let targets = Tensor::from_vec(targets.collect(), rows, &Device::Cpu)?;
    Ok(Case {
        op: CROSS_ENTROPY,
        operands: vec![normal(dims, 3., dtype, device, 1)?],
        constants: vec![targets.to_device(device)?],
    })
}

/// A small case of each op.
pub fn all(dtype: DType, device: &Device) -> Result<[Case; 9]> {
    Ok([
        rms_norm(&[2, 3, 8], dtype, device)?,
        rope([2, 3, 2, 8], false, dtype, device)?,
        swiglu(&[2, 3, 8], dtype, device)?,
        linear(&[2, 3, 8], 5, dtype, device)?,
        linear_to_heads(&[2, 3, 8], 2, dtype, device)?,
        linear_from_heads(&[2, 3, 2, 4], 5, dtype, device)?,
        swiglu_linear(&[2, 3, 8], 5, dtype, device)?,
        embedding([7, 8], &[2, 6], dtype, device)?,
        cross_entropy(&[2, 3, 9], dtype, device)?,
    ])
}
