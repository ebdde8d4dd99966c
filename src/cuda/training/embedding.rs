//! Rows of a table, and the table's gradient.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result, Tensor};

use super::ffi::{self, EmbeddingParams};
use super::{Input, Operands, cuda_storage, element, rows_and_cols, tensor, uninit};

pub(crate) fn forward(weight: Input<'_>, ids: &Tensor) -> Result<CudaStorage> {
    let (device, dtype) = (weight.0.device(), weight.0.dtype());
    let stream = device.cuda_stream();
    let (vocab_size, cols) = rows_and_cols(weight.1);
    let tokens = ids.elem_count();
    // SAFETY: the kernel writes all of it.
    let mut out = unsafe { uninit(device, tokens * cols, dtype)? };
    let ids = ids.storage_and_layout();
    let mut operands = Operands::new(&stream);
    let params = EmbeddingParams {
        weight: operands.read(weight)?,
        ids: operands.read_tensor(&ids)?,
        out: operands.write(&mut out)?,
        tokens: tokens as i64,
        vocab_size: vocab_size as i64,
        cols: cols as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes; ids are compared with vocab_size before they are used.
    unsafe { operands.launch("flash_embedding_fwd", ffi::flash_embedding_fwd, params)? };
    Ok(out)
}

/// The gradient of `weight` from `dout` `(.., cols)`.
pub(crate) fn backward(weight: &Tensor, ids: &Tensor, dout: &Tensor) -> Result<Tensor> {
    let guards = [ids, dout].map(Tensor::storage_and_layout);
    let [ids_in, dout] = &guards;
    let storage = cuda_storage(&dout.0)?;
    let (device, dtype) = (storage.device(), storage.dtype());
    let stream = device.cuda_stream();
    let (vocab_size, cols) = weight.dims2()?;
    // SAFETY: the kernel writes all of it.
    let mut dweight = unsafe { uninit(device, vocab_size * cols, dtype)? };
    let mut operands = Operands::new(&stream);
    let params = EmbeddingParams {
        ids: operands.read_tensor(ids_in)?,
        dout: operands.read((storage, dout.1))?,
        out: operands.write(&mut dweight)?,
        tokens: ids.elem_count() as i64,
        vocab_size: vocab_size as i64,
        cols: cols as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes.
    unsafe { operands.launch("flash_embedding_bwd", ffi::flash_embedding_bwd, params)? };
    Ok(tensor(dweight, weight.shape()))
}
