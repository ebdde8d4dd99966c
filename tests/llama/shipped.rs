//! The model that the examples ship.

use std::fs;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device, Tensor};
use candle_nn::loss::cross_entropy;

use crate::checkpoint::Checkpoint;
use crate::data;
use crate::model::{Attention, Llama};
use crate::tiny;

#[test]
fn the_shipped_model_knows_the_shipped_texts_through_either_attention() -> Result<()> {
    let folder = data::folder();
    let folder = folder.to_str().context("a path that is not UTF-8")?;
    let checkpoint = Checkpoint::open(folder, DType::F32, &Device::Cpu)?;
    for text in data::texts() {
        let text = fs::read_to_string(text)?;
        let encoding = checkpoint
            .tokenizer
            .encode(text, true)
            .map_err(|error| anyhow!("{error}"))?;
        let tokens = encoding.get_ids();
        let tokens = &tokens[tokens.len() / 2..][..513];
        let input = Tensor::new(&tokens[..512], &Device::Cpu)?.unsqueeze(0)?;
        let target = Tensor::new(&tokens[1..], &Device::Cpu)?;
        let logits = |attention| -> Result<Tensor> {
            let model = Llama::new(checkpoint.weights.clone(), &checkpoint.config, attention)?;
            Ok(model.logits(&model.hidden(&input, None)?)?.squeeze(0)?)
        };
        let (flash, plain) = (logits(Attention::Flash)?, logits(Attention::Plain)?);
        tiny::assert_close(&flash, &plain, 1e-5, "logits")?;
        // Without training it would be ln(3072) = 8.
        let loss: f32 = cross_entropy(&flash, &target)?.to_scalar()?;
        assert!(loss < 4., "loss {loss}");
    }
    Ok(())
}
