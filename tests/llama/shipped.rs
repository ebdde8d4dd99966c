//! The model that the examples ship.

use std::fs;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::loss::cross_entropy;

use crate::checkpoint::Checkpoint;
use crate::data;
use crate::device::for_each_device_with;
use crate::greedy::{assert_continues, encode, place};
use crate::model::{Attention, KvCache, Llama};
use crate::tiny;

/// Of the shipped model.
const HEAD_DIM: usize = 32;

fn checkpoint(dtype: DType, device: &Device) -> Result<Checkpoint> {
    let folder = data::folder();
    let folder = folder.to_str().context("a path that is not UTF-8")?;
    Checkpoint::open(folder, dtype, device)
}

#[test]
fn the_shipped_model_knows_the_shipped_texts_through_either_attention() -> Result<()> {
    let checkpoint = checkpoint(DType::F32, &Device::Cpu)?;
    for text in data::texts() {
        let tokens = encode(&checkpoint, &fs::read_to_string(text)?)?;
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

/// In f32 each of these tokens is ahead of the next best by 0.7 of logits around 10, which no half type makes up.
#[test]
fn the_shipped_model_continues_with_the_same_tokens_on_every_device() -> Result<()> {
    let cases: [(&str, &[u32]); 2] = [
        (
            "I never can remember, said the Mock",
            &[199, 358, 693, 685, 693, 685, 693, 685, 693, 685],
        ),
        (
            "All the world's a stage, And all the",
            &[273, 2759, 295, 264, 199, 198],
        ),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for_each_device_with(dtype, HEAD_DIM, |device| {
            let checkpoint = checkpoint(dtype, device)?;
            let mut cases = cases.iter();
            cases.try_for_each(|(prompt, expected)| assert_continues(&checkpoint, prompt, expected))
        })?;
    }
    Ok(())
}

/// The logits of every position, `(seqlen, vocab_size)`; a cache takes the tokens up to each cut.
fn logits(
    checkpoint: &Checkpoint,
    attention: Attention,
    tokens: &[u32],
    cuts: &[usize],
) -> Result<Tensor> {
    let (config, weights) = (&checkpoint.config, checkpoint.weights.clone());
    let (dtype, device) = place(checkpoint);
    let model = Llama::new(weights, config, attention)?;
    let mut cache = KvCache::new(config, 1, tokens.len(), dtype, &device)?;
    let mut rows = vec![];
    let mut from = 0;
    for &to in cuts {
        let input = Tensor::new(&tokens[from..to], &device)?.unsqueeze(0)?;
        let hidden = model.hidden(&input, Some(&mut cache))?;
        rows.push(model.logits(&hidden)?.squeeze(0)?);
        from = to;
    }
    Ok(Tensor::cat(&rows, 0)?.to_dtype(dtype)?)
}

/// Against f32 with the same weights.
#[test]
fn prefill_in_any_chunks_and_decode_in_half_types_are_as_good_as_plain_attention() -> Result<()> {
    const SEQLEN: usize = 150;
    let text = fs::read_to_string(&data::texts()[0])?;
    let one_by_one: Vec<usize> = (1..=SEQLEN).collect();
    let decode: Vec<usize> = (140..=SEQLEN).collect();
    let cuts: [&[usize]; 5] = [
        &[SEQLEN],
        &[64, 128, SEQLEN],
        &[149, SEQLEN],
        &decode,
        &one_by_one,
    ];
    for dtype in tiny::HALF_TYPES {
        let on_cpu = checkpoint(dtype, &Device::Cpu)?;
        let tokens = encode(&on_cpu, &text)?;
        let tokens = &tokens[tokens.len() / 2..][..SEQLEN];
        let exact = Checkpoint {
            weights: tiny::converted(&on_cpu.weights, DType::F32, &Device::Cpu)?,
            ..on_cpu
        };
        let truth = logits(&exact, Attention::Plain, tokens, &[SEQLEN])?;
        for_each_device_with(dtype, HEAD_DIM, |device| {
            let checkpoint = checkpoint(dtype, device)?;
            let plain = logits(&checkpoint, Attention::Plain, tokens, &[SEQLEN])?;
            for cuts in cuts {
                let flash = logits(&checkpoint, Attention::Flash, tokens, cuts)?;
                let what = format!("logits in {dtype:?}, fed up to {cuts:?}");
                tiny::assert_as_good(&flash, &plain, &truth, 2., &what)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
