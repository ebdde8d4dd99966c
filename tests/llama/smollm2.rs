//! Real weights: SmolLM2-135M-Instruct, quantised, from the file that `CANDLE_FLASH_GQA_SMOLLM2` names.

use std::env;

use anyhow::{Result, anyhow};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::llama;

use crate::checkpoint::Checkpoint;
use crate::generate::{Generation, feed};
use crate::model::{Attention, KvCache, Llama};
use crate::tiny;

const VARIABLE: &str = "CANDLE_FLASH_GQA_SMOLLM2";

const PARAGRAPH: &str = "The lighthouse stood at the end of a long stone pier. Every evening, when the \
    fishing boats came home, the keeper climbed the narrow stairs and lit the lamp. On clear nights its \
    beam could be seen from more than twenty miles away, and sailors used it to find the harbour.";

/// The model, or nothing where the file is not at hand, which is said aloud.
fn checkpoint() -> Result<Option<Checkpoint>> {
    let Ok(file) = env::var(VARIABLE) else {
        println!("skipped: {VARIABLE} is not set, scripts/fetch-model.sh says to what");
        return Ok(None);
    };
    Checkpoint::open(&file, DType::F32, &Device::Cpu).map(Some)
}

fn encode(checkpoint: &Checkpoint, text: &str) -> Result<Vec<u32>> {
    let encoding = checkpoint
        .tokenizer
        .encode(text, true)
        .map_err(|error| anyhow!("{error}"))?;
    Ok(encoding.get_ids().to_vec())
}

#[test]
fn smollm2_text_becomes_the_tokens_of_its_own_tokenizer() -> Result<()> {
    let Some(checkpoint) = checkpoint()? else {
        return Ok(());
    };
    let cases: [(&str, &[u32]); 4] = [
        ("Hello", &[19556]),
        ("Hello world 12345", &[19556, 905, 216, 33, 34, 35, 36, 37]),
        ("<|im_start|>user", &[1, 4093]),
        ("The capital of France is", &[504, 3575, 282, 4649, 314]),
    ];
    for (text, ids) in cases {
        assert_eq!(encode(&checkpoint, text)?, ids, "{text}");
    }
    for text in ["naïve café", "漢字 かな", "\ttabs\n\nand newlines  "] {
        let ids = encode(&checkpoint, text)?;
        let decoded = checkpoint
            .tokenizer
            .decode(&ids, false)
            .map_err(|error| anyhow!("{error}"))?;
        assert_eq!(decoded, text);
    }
    assert_eq!(checkpoint.stop_tokens(), [2, 0]);
    Ok(())
}

/// Mean negative log-likelihood of each token from the second on, given logits `(seqlen, vocab)`.
fn nll(logits: &Tensor, tokens: &[u32]) -> Result<f32> {
    let target = Tensor::new(&tokens[1..], &Device::Cpu)?;
    let logits = logits.narrow(0, 0, tokens.len() - 1)?;
    Ok(candle_nn::loss::cross_entropy(&logits, &target)?.to_scalar()?)
}

#[test]
fn smollm2_finds_a_paragraph_as_likely_as_candle_transformers_does() -> Result<()> {
    let Some(checkpoint) = checkpoint()? else {
        return Ok(());
    };
    let tokens = encode(&checkpoint, PARAGRAPH)?;

    // candle's Llama gives the last position's logits only, so it goes token by token.
    let vb = VarBuilder::from_tensors(checkpoint.weights.clone(), DType::F32, &Device::Cpu);
    let reference = llama::Llama::load(vb, &checkpoint.config)?;
    let mut cache = llama::Cache::new(true, DType::F32, &checkpoint.config, &Device::Cpu)?;
    let rows = tokens
        .iter()
        .enumerate()
        .map(|(position, &token)| {
            let input = Tensor::new(&[[token]], &Device::Cpu)?;
            reference.forward(&input, position, &mut cache)
        })
        .collect::<candle_core::Result<Vec<_>>>()?;
    let expected = Tensor::cat(&rows, 0)?;
    let expected_nll = nll(&expected, &tokens)?;
    assert!((expected_nll - 3.382).abs() < 0.005, "NLL {expected_nll}");

    let input = Tensor::new(&tokens[..], &Device::Cpu)?.unsqueeze(0)?;
    for attention in [Attention::Flash, Attention::Plain] {
        let model = Llama::new(checkpoint.weights.clone(), &checkpoint.config, attention)?;
        let logits = model.logits(&model.hidden(&input, None)?)?.i(0)?;
        // 30 layers of 8 roundings each, at a few units of f32's 6e-8.
        tiny::assert_close(&logits, &expected, 1e-4, "logits")?;
        let nll = nll(&logits, &tokens)?;
        assert!(
            (nll - expected_nll).abs() < 1e-4,
            "NLL {nll}, expected {expected_nll}"
        );
    }
    Ok(())
}

#[test]
fn smollm2_continues_with_the_known_tokens() -> Result<()> {
    let Some(checkpoint) = checkpoint()? else {
        return Ok(());
    };
    let cases: [(&str, &[u32]); 2] = [
        (
            "The capital of France is",
            &[7042, 30, 198, 198, 504, 2988, 314, 42],
        ),
        (
            "Once upon a time, there was a little girl who",
            &[
                5732, 288, 1238, 351, 874, 9173, 30, 2306, 761, 253, 2066, 9256,
            ],
        ),
    ];
    let model = Llama::new(
        checkpoint.weights.clone(),
        &checkpoint.config,
        Attention::Flash,
    )?;
    for (prompt, expected) in cases {
        let tokens = encode(&checkpoint, prompt)?;
        let capacity = tokens.len() + expected.len();
        let mut cache = KvCache::new(&checkpoint.config, 1, capacity, DType::F32, &Device::Cpu)?;
        let logits = feed(&model, &mut cache, &tokens, Some(3), &Device::Cpu, |_| ())?;
        let generation = Generation {
            model: &model,
            tokenizer: &checkpoint.tokenizer,
            sampler: LogitsProcessor::new(0, None, None),
            stops: checkpoint.stop_tokens(),
            max_tokens: expected.len(),
        };
        assert_eq!(
            generation.run(&mut cache, logits, |_| Ok(()))?,
            expected,
            "{prompt}"
        );
    }
    Ok(())
}
