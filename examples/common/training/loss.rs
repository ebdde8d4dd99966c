//! What is minimised.

use candle_core::{Result, Tensor};
use candle_nn::loss;

use crate::model::Llama;
use crate::model::layers::widen;

/// Mean cross-entropy of the next token; `input` and `target` are `(batch, seqlen)`, U32.
pub fn next_token_loss(model: &Llama, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let logits = model.logits(&model.hidden(input, None)?)?;
    cross_entropy(&logits.flatten_to(1)?, &target.flatten_all()?)
}

/// Mean cross-entropy of `logits` `(tokens, vocab_size)` for `target` `(tokens)`, in F32 at least.
pub fn cross_entropy(logits: &Tensor, target: &Tensor) -> Result<Tensor> {
    loss::cross_entropy(&widen(logits)?, target)
}
