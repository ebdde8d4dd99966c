//! What is minimised.

use candle_core::{Result, Tensor};
use candle_flash_gqa::training::cross_entropy;

use crate::model::Llama;

/// Mean cross-entropy of the next token, F32; `input` and `target` are `(batch, seqlen)`, U32.
pub fn next_token_loss(model: &Llama, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    cross_entropy(&model.output(&model.hidden(input, None)?)?, target)
}
