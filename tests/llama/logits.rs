//! Logits of prefill, chunked prefill and decode.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{self, Config};

use crate::generate::feed;
use crate::model::{Attention, KvCache, Llama};
use crate::tiny;

/// About 3 layers of 8 roundings each, at a few units of f32's 6e-8 each.
const F32_TOLERANCE: f64 = 1e-5;

const BOTH: [Attention; 2] = [Attention::Flash, Attention::Plain];

fn untied_with_llama3_scaling() -> Config {
    Config {
        tie_word_embeddings: false,
        rope_scaling: Some(tiny::llama3_scaling()),
        ..tiny::config()
    }
}

fn cache(config: &Config, capacity: usize) -> Result<KvCache> {
    Ok(KvCache::new(config, 1, capacity, DType::F32, &Device::Cpu)?)
}

/// What candle-transformers' Llama gives behind the first `prompt` tokens, then behind each later one.
fn expected_logits(config: &Config, tokens: &[u32], prompt: usize) -> Result<Vec<Tensor>> {
    let weights = tiny::weights(config, DType::F32)?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let model = llama::Llama::load(vb, config)?;
    let mut cache = llama::Cache::new(true, DType::F32, config, &Device::Cpu)?;
    let mut forward = |from: usize, to: usize| -> Result<Tensor> {
        let input = Tensor::new(&tokens[from..to], &Device::Cpu)?.unsqueeze(0)?;
        Ok(model.forward(&input, from, &mut cache)?.flatten_all()?)
    };
    let mut logits = vec![forward(0, prompt)?];
    for position in prompt..tokens.len() {
        logits.push(forward(position, position + 1)?);
    }
    Ok(logits)
}

#[test]
fn prefill_in_any_chunks_and_decode_match_candle_transformers() -> Result<()> {
    // (prompt, chunk): whole, chunks that divide the prompt and that do not, tokens one by one.
    let prompts = [
        (1, None),
        (39, None),
        (39, Some(4)),
        (39, Some(1)),
        (39, Some(38)),
        (256, Some(128)),
        (300, Some(128)),
        (300, None),
    ];
    for config in [tiny::config(), untied_with_llama3_scaling()] {
        for (prompt, chunk) in prompts {
            let tokens = tiny::tokens(&config, prompt + 3);
            let expected = expected_logits(&config, &tokens, prompt)?;
            for attention in BOTH {
                let weights = tiny::weights(&config, DType::F32)?;
                let model = Llama::new(weights, &config, attention)?;
                let mut cache = cache(&config, tokens.len())?;
                for (i, expected) in expected.iter().enumerate() {
                    let (new, chunk) = match i {
                        0 => (&tokens[..prompt], chunk),
                        _ => (&tokens[prompt + i - 1..prompt + i], None),
                    };
                    let got = feed(&model, &mut cache, new, chunk, &Device::Cpu, |_| ())?;
                    let what = format!("{attention}, prompt {prompt} in {chunk:?}, step {i}");
                    tiny::assert_close(&got, expected, F32_TOLERANCE, &what)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn two_tokens_at_once_match_one_after_the_other_in_every_row() -> Result<()> {
    let config = tiny::config();
    let tokens = tiny::tokens(&config, 35);
    let input =
        |range: std::ops::Range<usize>| Tensor::new(&tokens[range], &Device::Cpu)?.unsqueeze(0);
    for attention in BOTH {
        let model = Llama::new(tiny::weights(&config, DType::F32)?, &config, attention)?;
        let logits = |cuts: &[usize]| -> Result<Tensor> {
            let mut cache = cache(&config, tokens.len())?;
            let mut rows = vec![];
            let mut from = 0;
            for &to in cuts {
                let hidden = model.hidden(&input(from..to)?, Some(&mut cache))?;
                rows.push(model.logits(&hidden)?.squeeze(0)?);
                from = to;
            }
            Ok(Tensor::cat(&rows, 0)?)
        };
        let (once, twice) = (logits(&[33, 35])?, logits(&[33, 34, 35])?);
        tiny::assert_close(&once, &twice, F32_TOLERANCE, "logits")?;
        let argmax = |logits: &Tensor| logits.argmax(D::Minus1)?.to_vec1::<u32>();
        assert_eq!(argmax(&once)?, argmax(&twice)?);

        // Without a cache the rows are the same again.
        let hidden = model.hidden(&input(0..35)?, None)?;
        let whole = model.logits(&hidden)?.squeeze(0)?;
        tiny::assert_close(&whole, &twice, F32_TOLERANCE, "without a cache")?;
    }
    Ok(())
}

#[test]
fn each_sequence_of_a_batch_is_as_if_alone() -> Result<()> {
    let config = tiny::config();
    let model = Llama::new(
        tiny::weights(&config, DType::F32)?,
        &config,
        Attention::Flash,
    )?;
    let tokens = Tensor::from_vec(tiny::tokens(&config, 3 * 17), (3, 17), &Device::Cpu)?;
    let together = model.logits(&model.hidden(&tokens, None)?)?;
    for i in 0..3 {
        let alone = model.logits(&model.hidden(&tokens.narrow(0, i, 1)?, None)?)?;
        tiny::assert_close(&together.narrow(0, i, 1)?, &alone, F32_TOLERANCE, "logits")?;
    }
    Ok(())
}

#[test]
fn half_types_stay_close_to_f32() -> Result<()> {
    let config = tiny::config();
    let tokens = Tensor::new(tiny::tokens(&config, 40), &Device::Cpu)?.unsqueeze(0)?;
    let logits = |dtype, attention| -> Result<Tensor> {
        let model = Llama::new(tiny::weights(&config, dtype)?, &config, attention)?;
        Ok(model.logits(&model.hidden(&tokens, None)?)?)
    };
    let expected = logits(DType::F32, Attention::Plain)?;
    for attention in BOTH {
        // A few dozen roundings at the type's unit, 2^-11 and 2^-8.
        tiny::assert_close(&logits(DType::F16, attention)?, &expected, 1e-2, "f16")?;
        tiny::assert_close(&logits(DType::BF16, attention)?, &expected, 8e-2, "bf16")?;
    }
    Ok(())
}

#[test]
fn too_many_tokens_are_refused() -> Result<()> {
    let config = tiny::config();
    let model = Llama::new(
        tiny::weights(&config, DType::F32)?,
        &config,
        Attention::Flash,
    )?;
    let tokens = tiny::tokens(&config, 513);
    let refusal = |tokens: &[u32], capacity| -> Result<String> {
        let fed = feed(
            &model,
            &mut cache(&config, capacity)?,
            tokens,
            None,
            &Device::Cpu,
            |_| (),
        );
        Ok(fed
            .expect_err("more tokens than there is room for")
            .to_string())
    };
    assert!(refusal(&tokens[..9], 8)?.contains("room for 8 tokens, got 9"));
    assert!(refusal(&tokens, 513)?.contains("512 positions"));
    assert!(refusal(&[], 8)?.contains("at least one token"));
    Ok(())
}
