//! Cross entropy and its gradient.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Tensor};

use super::ffi::{self, CrossEntropyParams};
use super::{Input, Operands, cuda_storage, element, rows_and_cols, tensor, uninit};

/// The mean loss, and lse of each row.
pub(crate) fn forward(logits: Input<'_>, targets: &Tensor) -> Result<(CudaStorage, Tensor)> {
    let (device, dtype) = (logits.0.device(), logits.0.dtype());
    let stream = device.cuda_stream();
    let (rows, cols) = rows_and_cols(logits.1);
    // SAFETY: the first kernel writes all of lse and losses, the second loss.
    let (mut lse, mut losses, mut loss) = unsafe {
        (
            uninit(device, rows, DType::F32)?,
            uninit(device, rows, DType::F32)?,
            uninit(device, 1, DType::F32)?,
        )
    };
    let targets = targets.storage_and_layout();
    let mut operands = Operands::new(&stream);
    let params = CrossEntropyParams {
        logits: operands.read(logits)?,
        targets: operands.read_tensor(&targets)?,
        lse: operands.write(&mut lse)?,
        losses: operands.write(&mut losses)?,
        loss: operands.write(&mut loss)?,
        rows: rows as i64,
        cols: cols as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes; targets are compared with cols before they are used.
    unsafe {
        operands.launch(
            "flash_cross_entropy_fwd",
            ffi::flash_cross_entropy_fwd,
            params,
        )?
    };
    Ok((loss, tensor(lse, rows)))
}

pub(crate) fn backward(
    logits: &Tensor,
    targets: &Tensor,
    lse: &Tensor,
    dloss: &Tensor,
) -> Result<Tensor> {
    let guards = [logits, targets, lse, dloss].map(Tensor::storage_and_layout);
    let [logits_in, targets, lse, dloss] = &guards;
    let storage = cuda_storage(&logits_in.0)?;
    let (device, dtype) = (storage.device(), storage.dtype());
    let stream = device.cuda_stream();
    let (rows, cols) = rows_and_cols(logits_in.1);
    // SAFETY: the kernel writes all of it.
    let mut dlogits = unsafe { uninit(device, rows * cols, dtype)? };
    let mut operands = Operands::new(&stream);
    let params = CrossEntropyParams {
        logits: operands.read((storage, logits_in.1))?,
        targets: operands.read_tensor(targets)?,
        lse: operands.read_tensor::<f32>(lse)?.cast_mut(),
        dloss: operands.read_tensor(dloss)?,
        dlogits: operands.write(&mut dlogits)?,
        rows: rows as i64,
        cols: cols as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes; this kernel reads lse.
    unsafe {
        operands.launch(
            "flash_cross_entropy_bwd",
            ffi::flash_cross_entropy_bwd,
            params,
        )?
    };
    Ok(tensor(dlogits, logits.shape()))
}
