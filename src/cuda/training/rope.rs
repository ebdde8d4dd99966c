//! Rotary positions, and back.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result, Tensor, bail};

use super::ffi::{self, RopeParams};
use super::{Input, Operands, cuda_storage, element, strides_of, uninit};
use crate::training::rope::{Angles, Direction};

/// `x` turned, contiguous; its last dimension is, its others may have any strides.
pub(crate) fn forward(x: Input<'_>, angles: &Angles, direction: Direction) -> Result<CudaStorage> {
    let (device, dtype) = (x.0.device(), x.0.dtype());
    let stream = device.cuda_stream();
    let (batch, seqlen, num_heads, head_dim) = x.1.shape().dims4()?;
    // The kernel counts the numbers of a token in 32 bits.
    int("num_heads * head_dim", num_heads * head_dim)?;
    // SAFETY: the kernel writes all of it.
    let mut out = unsafe { uninit(device, x.1.shape().elem_count(), dtype)? };
    let guards = [&angles.cos, &angles.sin].map(Tensor::storage_and_layout);
    let [cos, sin] = &guards;
    let mut operands = Operands::new(&stream);
    let params = RopeParams {
        x: operands.read(x)?,
        cos: operands.read_tensor(cos)?,
        sin: operands.read_tensor(sin)?,
        out: operands.write(&mut out)?,
        x_strides: strides_of(x.1),
        cos_batch_stride: Angles::batch_stride(cos.1) as i64,
        sin_batch_stride: Angles::batch_stride(sin.1) as i64,
        batch: int("batch", batch)?,
        seqlen: int("seqlen", seqlen)?,
        num_heads: int("num_heads", num_heads)?,
        head_dim: int("head_dim", head_dim)?,
        direction: direction as i32 as f32,
        element: element(dtype)?,
    };
    // SAFETY: what the strides and sizes allow lies within x, since candle's layouts do; the angles are
    // contiguous, at least seqlen of them for each sequence or for all; out is contiguous.
    unsafe { operands.launch("flash_rope", ffi::flash_rope, params)? };
    Ok(out)
}

/// [`forward`] of a tensor.
pub(crate) fn turn(x: &Tensor, angles: &Angles, direction: Direction) -> Result<Tensor> {
    let (storage, layout) = x.storage_and_layout();
    let out = forward((cuda_storage(&storage)?, layout), angles, direction)?;
    Ok(super::tensor(out, x.shape()))
}

fn int(name: &str, x: usize) -> Result<i32> {
    match i32::try_from(x) {
        Ok(x) => Ok(x),
        Err(_) => bail!("rope: {name} must be below 2^31 on CUDA, got {x}"),
    }
}
