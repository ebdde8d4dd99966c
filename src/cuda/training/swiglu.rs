//! SwiGLU and its gradients.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result, Tensor};

use super::ffi::{self, SwigluParams};
use super::{Input, Operands, cuda_storage, element, tensor, uninit};

pub(crate) fn forward(gate: Input<'_>, up: Input<'_>) -> Result<CudaStorage> {
    let (device, dtype) = (gate.0.device(), gate.0.dtype());
    let stream = device.cuda_stream();
    let len = gate.1.shape().elem_count();
    // SAFETY: the kernel writes all of it.
    let mut out = unsafe { uninit(device, len, dtype)? };
    let mut operands = Operands::new(&stream);
    let params = SwigluParams {
        gate: operands.read(gate)?,
        up: operands.read(up)?,
        out: operands.write(&mut out)?,
        len: len as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of this size.
    unsafe { operands.launch("flash_swiglu_fwd", ffi::flash_swiglu_fwd, params)? };
    Ok(out)
}

/// dgate and dup.
pub(crate) fn backward(gate: &Tensor, up: &Tensor, dout: &Tensor) -> Result<[Tensor; 2]> {
    let guards = [gate, up, dout].map(Tensor::storage_and_layout);
    let [gate_in, up, dout] = &guards;
    let storage = cuda_storage(&gate_in.0)?;
    let (device, dtype) = (storage.device(), storage.dtype());
    let stream = device.cuda_stream();
    let len = gate.elem_count();
    // SAFETY: the kernel writes all of it.
    let mut both = unsafe { uninit(device, 2 * len, dtype)? };
    let mut operands = Operands::new(&stream);
    let params = SwigluParams {
        gate: operands.read((storage, gate_in.1))?,
        up: operands.read_tensor(up)?,
        dout: operands.read_tensor(dout)?,
        out: operands.write(&mut both)?,
        len: len as i64,
        element: element(dtype)?,
    };
    // SAFETY: contiguous tensors of this size, the output of twice.
    unsafe { operands.launch("flash_swiglu_bwd", ffi::flash_swiglu_bwd, params)? };
    let both = tensor(both, (2, len));
    Ok([
        both.get(0)?.reshape(gate.shape())?,
        both.get(1)?.reshape(gate.shape())?,
    ])
}
