//! What is minimised.

use candle_core::{Result, Tensor};
use candle_flash_gqa::training::cross_entropy;

use crate::model::Llama;

/// Logits that are computed at a time. candle's kernels count in 32 bits: with 2^32 numbers some never end.
const MOST_LOGITS: usize = 1 << 31;

/// Mean cross-entropy of the next token, F32; `input` and `target` are `(batch, seqlen)`, U32.
pub fn next_token_loss(model: &Llama, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    loss_of(model, &model.hidden(input, None)?, target, MOST_LOGITS)
}

/// The loss from hidden states `(batch, seqlen, hidden_size)`, in as few pieces as at most `most` logits allow.
pub fn loss_of(model: &Llama, hidden: &Tensor, target: &Tensor, most: usize) -> Result<Tensor> {
    let rows = target.elem_count();
    let rows_at_once = (most / model.vocab_size()).max(1);
    if rows <= rows_at_once {
        return cross_entropy(&model.output(hidden)?, target);
    }
    let (hidden, target) = (hidden.flatten_to(1)?, target.flatten_all()?);
    let pieces = (0..rows).step_by(rows_at_once).map(|start| {
        let count = rows_at_once.min(rows - start);
        let logits = model.output(&hidden.narrow(0, start, count)?)?;
        let share = count as f64 / rows as f64;
        cross_entropy(&logits, &target.narrow(0, start, count)?)? * share
    });
    Tensor::stack(&pieces.collect::<Result<Vec<_>>>()?, 0)?.sum_all()
}
