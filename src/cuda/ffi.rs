//! What crosses the border to the kernels; the twin of kernels/params.h, where each field is explained.

use std::ffi::{c_char, c_int, c_void};

use candle_core::cuda_backend::cudarc::driver::sys::CUstream;

pub(super) const ELEMENT_F16: i32 = 0;
pub(super) const ELEMENT_BF16: i32 = 1;

/// Lengths and windows stay below, so that sums of two of them fit 32 bits.
pub(super) const MAX_WINDOW: i32 = 1 << 30;
/// Scales from here on are positive factors that do not vanish in f32.
pub(super) const MIN_PLAIN_SCALE: f32 = 1e-30;
/// Rows of the backward's workspace are padded to a multiple of this.
pub(super) const ROW_PADDING: usize = 128;
/// Padded query rows for which dq has a counter of turns.
pub(super) const ROWS_PER_TURN: usize = 32;

/// In elements.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Strides {
    pub(super) batch: i64,
    pub(super) seq: i64,
    pub(super) head: i64,
}

/// One attention problem.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AttnProblem {
    pub(super) q: *const c_void,
    pub(super) k: *const c_void,
    pub(super) v: *const c_void,
    /// Null: off.
    pub(super) alibi_slopes: *const f32,
    pub(super) q_strides: Strides,
    pub(super) k_strides: Strides,
    pub(super) v_strides: Strides,
    pub(super) batch: i32,
    pub(super) seqlen_q: i32,
    pub(super) seqlen_k: i32,
    pub(super) num_heads: i32,
    pub(super) group_size: i32,
    pub(super) head_dim: i32,
    pub(super) window_left: i32,
    pub(super) window_right: i32,
    pub(super) softmax_scale: f32,
    /// 0: off.
    pub(super) softcap: f32,
    pub(super) tanh_scale: f32,
    pub(super) heads_together: i32,
    pub(super) element: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct FwdParams {
    pub(super) problem: AttnProblem,
    pub(super) out: *mut c_void,
    pub(super) lse: *mut f32,
    /// Null: each block knows its pieces of work from the start.
    pub(super) next_piece: *mut u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct BwdParams {
    pub(super) problem: AttnProblem,
    pub(super) out: *const c_void,
    pub(super) dout: *const c_void,
    pub(super) dout_strides: Strides,
    pub(super) lse: *const f32,
    pub(super) dq: *mut c_void,
    pub(super) dk: *mut c_void,
    pub(super) dv: *mut c_void,
    pub(super) lse_log2: *mut f32,
    pub(super) delta: *mut f32,
    pub(super) dq_acc: *mut f32,
    /// Null: one part.
    pub(super) dk_acc: *mut f32,
    pub(super) dv_acc: *mut f32,
    /// Null: dq in any order.
    pub(super) dq_turn: *mut i32,
    /// Null on sm_80 alone.
    pub(super) next_piece: *mut u32,
    pub(super) group_parts: i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct ConvertParams {
    pub(super) acc: *const f32,
    pub(super) out: *mut c_void,
    pub(super) parts: i32,
    pub(super) batch: i32,
    pub(super) seqlen: i32,
    pub(super) num_heads: i32,
    pub(super) head_dim: i32,
    pub(super) acc_cols: i32,
    pub(super) scale: f32,
    pub(super) element: i32,
}

/// Launches a kernel on a stream of the current context; returns a `cudaError_t`.
pub(super) type Launch<Params> = unsafe extern "C" fn(*const Params, CUstream) -> c_int;

/// A compiled kernel; the twin of `Kernel` in kernels/launch.cuh.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Kernel<Params> {
    pub(super) launch: Launch<Params>,
    /// Dynamic shared memory of a block.
    pub(super) shared_bytes: i32,
    pub(super) threads: i32,
    pub(super) blocks_per_sm: i32,
    pub(super) tile_m: i32,
    pub(super) tile_n: i32,
}

macro_rules! declare_forward {
    ($($file:literal, $symbol:ident, $head_dim:literal, $shared_kib:literal, $modes:ident;)*) => {
        unsafe extern "C" { $(pub(super) static $symbol: Kernel<FwdParams>;)* }
    };
}
macro_rules! declare_backward {
    ($($file:literal, $symbol:ident, $head_dim:literal, $shared_kib:literal, $modes:ident;)*) => {
        unsafe extern "C" { $(pub(super) static $symbol: Kernel<BwdParams>;)* }
    };
}
instances!(declare_forward, declare_backward);

unsafe extern "C" {
    pub(super) fn flash_bwd_delta(params: *const BwdParams, stream: CUstream) -> c_int;
    pub(super) fn flash_bwd_convert(params: *const ConvertParams, stream: CUstream) -> c_int;
    /// The text of a `cudaError_t`, static.
    pub(super) fn cudaGetErrorString(status: c_int) -> *const c_char;
    #[cfg(test)]
    pub(super) fn flash_layout(sizes: *mut usize);
}
