//! out and lse: fills `FwdParams` and calls one launcher.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use candle_core::cuda_backend::{CudaStorage, WrapErr};
use candle_core::{DType, Result, Tensor, bail};
use half::{bf16, f16};

use super::dispatch::{self, Gpu};
use super::ffi::FwdParams;
use super::{
    Element, Input, Rows, alloc, check, cuda_storage, for_dtype, optional_pointer, problem,
    slopes_pointer,
};
use crate::params::AttnParams;

/// (batch, head) pairs whose tiles are worked on side by side. Their K and V have to share L2, but with few
/// heads the longest tiles of the next ones come late and leave a tail. Measured on an H200 with the sm_80 kernels (causal,
/// 2 x 8192, head_dim 128): 340 TFLOP/s with 1, 347 with 2, 363 with 4, 366 with 8, 362 with all 64.
const HEADS_TOGETHER: usize = 8;
/// Bytes of K and V of such pairs, where more of them fit and blocks take the pieces of work one after the other:
/// about half of the L2 of an H200 (60 MB). Measured on an H200 (causal, TFLOP/s with 8 pairs, with 32 MB): head_dim 64,
/// 9/3 heads, 4 x 4096: 398, 479; head_dim 128, 16 x 1024: 396, 416; head_dim 256, 16 x 1024: 407, 455; 1 x 16384 the
/// same.
const BYTES_TOGETHER: usize = 32 << 20;

/// What a forward pass leaves behind.
pub(crate) struct ForwardOutput {
    /// `(batch, seqlen_q, num_heads, head_dim)`, contiguous.
    pub(crate) out: CudaStorage,
    /// `(batch, num_heads, seqlen_q)`, F32.
    pub(crate) lse: CudaSlice<f32>,
}

/// Computes out and lse.
pub(crate) fn forward(
    params: &AttnParams,
    q: Input<'_>,
    k: Input<'_>,
    v: Input<'_>,
) -> Result<ForwardOutput> {
    for_dtype!(q.0.dtype(), forward_typed, (params, q, k, v))
}

/// How many pairs are worked on side by side.
fn heads_together(params: &AttnParams, sm90: bool) -> usize {
    if !sm90 {
        return HEADS_TOGETHER;
    }
    let bytes = 2 * size_of::<bf16>() * params.seqlen_k.max(1) * params.head_dim;
    let fit = (BYTES_TOGETHER / bytes * params.group_size()).max(HEADS_TOGETHER);
    // Sections of one size: a small last one would leave a tail.
    let pairs = params.batch * params.num_heads;
    pairs.div_ceil(pairs.div_ceil(fit).max(1))
}

fn forward_typed<E: Element>(
    params: &AttnParams,
    q: Input<'_>,
    k: Input<'_>,
    v: Input<'_>,
) -> Result<ForwardOutput> {
    let device = q.0.device();
    let stream = device.cuda_stream();
    let gpu = Gpu::of(device)?;
    let Some(chosen) = dispatch::forward(&gpu, params) else {
        bail!(
            "flash_attn: no CUDA kernel for head_dim {}",
            params.head_dim
        );
    };
    let pairs = params.batch * params.num_heads;
    let problem = problem::<E>(params, heads_together(params, chosen.sm90).min(pairs))?;

    let rows = pairs * params.seqlen_q;
    // SAFETY: the kernel writes every row of both.
    let (mut out, mut lse) = unsafe {
        (
            alloc::<E>(device, rows * params.head_dim)?,
            alloc::<f32>(device, rows)?,
        )
    };
    // Where the pieces of work of a head differ in size, and some have to wait, a block takes its next one with the last
    // loads of this one.
    let m_tiles = params.seqlen_q.div_ceil(chosen.kernel.tile_m as usize);
    let is_full = params.mask.window_left().is_none() && params.mask.window_right().is_none();
    let mut next_piece: Option<CudaSlice<u32>> =
        if chosen.sm90 && !is_full && m_tiles > 1 && pairs * m_tiles > gpu.multiprocessors {
            Some(device.alloc_zeros(1)?)
        } else {
            None
        };
    if rows > 0 {
        let [q, k, v] = [
            Rows::<E>::new(q, chosen.sm90)?,
            Rows::new(k, chosen.sm90)?,
            Rows::new(v, chosen.sm90)?,
        ];
        let slopes = params
            .alibi_slopes_on_device()
            .map(Tensor::storage_and_layout);
        let (q_pointer, _q_read) = q.pointer(&stream)?;
        let (k_pointer, _k_read) = k.pointer(&stream)?;
        let (v_pointer, _v_read) = v.pointer(&stream)?;
        let (alibi_slopes, _slopes_read) = slopes_pointer!(&slopes, &stream);
        let (out_address, _out_write) = out.device_ptr_mut(&stream);
        let (lse_address, _lse_write) = lse.device_ptr_mut(&stream);
        let (next_piece, _next_piece_write) = optional_pointer(&mut next_piece, &stream);
        let arguments = FwdParams {
            problem: super::ffi::AttnProblem {
                q: q_pointer,
                k: k_pointer,
                v: v_pointer,
                alibi_slopes,
                q_strides: q.strides,
                k_strides: k.strides,
                v_strides: v.strides,
                ..problem
            },
            out: out_address as *mut _,
            lse: lse_address as *mut _,
            next_piece,
        };
        stream.context().bind_to_thread().w()?;
        // SAFETY: the context is current. The pointers are to live allocations of its device, whose guards are
        // held until after the launch, on the stream that they were made ready for; every index that the
        // strides and sizes allow lies within them, since candle's layouts do; out and lse have `rows` rows, and the
        // counter, where there is one, is zero.
        let status = unsafe { (chosen.kernel.launch)(&arguments, stream.cu_stream()) };
        check(status, chosen.name, params)?;
    }
    Ok(ForwardOutput {
        out: CudaStorage::wrap_cuda_slice(out, device.clone()),
        lse,
    })
}

/// lse as a tensor `(batch, num_heads, seqlen_q)`, for a backward that finds none.
pub(crate) fn lse(params: &AttnParams, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let guards = [q, k, v].map(Tensor::storage_and_layout);
    let [q, k, v] = &guards;
    let q = (cuda_storage(&q.0)?, q.1);
    let output = forward(
        params,
        q,
        (cuda_storage(&k.0)?, k.1),
        (cuda_storage(&v.0)?, v.1),
    )?;
    Ok(lse_tensor(params, output.lse, q.0))
}

/// What a forward left, as a tensor on the device of `q`.
pub(crate) fn lse_tensor(params: &AttnParams, lse: CudaSlice<f32>, q: &CudaStorage) -> Tensor {
    let shape = (params.batch, params.num_heads, params.seqlen_q);
    super::tensor(lse, q.device(), shape)
}
