//! What crosses the border to the kernels of training; the twin of kernels/training/params.h, where each field
//! is explained.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::cudarc::driver::sys::CUstream;

use super::super::ffi::Strides;

/// Rows whose contributions to a gradient are summed by one block.
pub(super) const ROWS_TOGETHER: usize = 128;

/// Numbers of a gradient whose squares are summed by one block.
pub(super) const NUMBERS_TOGETHER: usize = 1 << 14;

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RmsNormParams {
    pub(super) x: *const c_void,
    pub(super) weight: *const c_void,
    pub(super) dout: *const c_void,
    pub(super) out: *mut c_void,
    pub(super) dweight: *mut c_void,
    pub(super) rstd: *mut f32,
    pub(super) partial: *mut f32,
    pub(super) rows: i64,
    pub(super) cols: i64,
    pub(super) eps: f32,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct RopeParams {
    pub(super) x: *const c_void,
    pub(super) cos: *const c_void,
    pub(super) sin: *const c_void,
    pub(super) out: *mut c_void,
    pub(super) x_strides: Strides,
    pub(super) cos_batch_stride: i64,
    pub(super) sin_batch_stride: i64,
    pub(super) batch: i32,
    pub(super) seqlen: i32,
    pub(super) num_heads: i32,
    pub(super) head_dim: i32,
    pub(super) direction: f32,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct SwigluParams {
    pub(super) gate: *const c_void,
    pub(super) up: *const c_void,
    pub(super) dout: *const c_void,
    pub(super) out: *mut c_void,
    pub(super) len: i64,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct CrossEntropyParams {
    pub(super) logits: *const c_void,
    pub(super) targets: *const u32,
    pub(super) lse: *mut f32,
    pub(super) losses: *mut f32,
    pub(super) loss: *mut f32,
    pub(super) dloss: *const f32,
    pub(super) dlogits: *mut c_void,
    pub(super) rows: i64,
    pub(super) cols: i64,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct EmbeddingParams {
    pub(super) weight: *const c_void,
    pub(super) ids: *const u32,
    pub(super) dout: *const c_void,
    pub(super) out: *mut c_void,
    pub(super) tokens: i64,
    pub(super) vocab_size: i64,
    pub(super) cols: i64,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AdamWParams {
    pub(super) grad: *const c_void,
    pub(super) rounded: *mut c_void,
    pub(super) master: *mut f32,
    pub(super) first_moment: *mut f32,
    pub(super) second_moment: *mut f32,
    pub(super) len: i64,
    pub(super) grad_scale: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) new1: f32,
    pub(super) new2: f32,
    pub(super) eps: f32,
    pub(super) kept: f32,
    pub(super) step_size: f32,
    pub(super) second_scale: f32,
    pub(super) grad_element: i32,
    pub(super) rounded_element: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AddGradParams {
    pub(super) grad: *const c_void,
    pub(super) sum: *mut f32,
    pub(super) len: i64,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct GradNormParams {
    pub(super) grad: *const c_void,
    pub(super) squares: *mut f32,
    pub(super) norm: *mut f32,
    pub(super) len: i64,
    pub(super) element: i32,
}

unsafe extern "C" {
    pub(super) fn flash_rms_norm_fwd(params: *const RmsNormParams, stream: CUstream) -> c_int;
    pub(super) fn flash_rms_norm_dx(params: *const RmsNormParams, stream: CUstream) -> c_int;
    pub(super) fn flash_rms_norm_dweight(params: *const RmsNormParams, stream: CUstream) -> c_int;
    pub(super) fn flash_rope(params: *const RopeParams, stream: CUstream) -> c_int;
    pub(super) fn flash_swiglu_fwd(params: *const SwigluParams, stream: CUstream) -> c_int;
    pub(super) fn flash_swiglu_bwd(params: *const SwigluParams, stream: CUstream) -> c_int;
    pub(super) fn flash_cross_entropy_fwd(
        params: *const CrossEntropyParams,
        stream: CUstream,
    ) -> c_int;
    pub(super) fn flash_cross_entropy_bwd(
        params: *const CrossEntropyParams,
        stream: CUstream,
    ) -> c_int;
    pub(super) fn flash_embedding_fwd(params: *const EmbeddingParams, stream: CUstream) -> c_int;
    pub(super) fn flash_embedding_bwd(params: *const EmbeddingParams, stream: CUstream) -> c_int;
    pub(super) fn flash_adamw(params: *const AdamWParams, stream: CUstream) -> c_int;
    pub(super) fn flash_add_grad(params: *const AddGradParams, stream: CUstream) -> c_int;
    pub(super) fn flash_grad_squares(params: *const GradNormParams, stream: CUstream) -> c_int;
    pub(super) fn flash_grad_norm(params: *const GradNormParams, stream: CUstream) -> c_int;
    #[cfg(test)]
    pub(super) fn flash_training_layout(sizes: *mut usize);
}
