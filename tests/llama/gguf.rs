//! GGUF files, whole and broken.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use anyhow::{Result, anyhow};
use candle_core::DType;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use tempfile::TempDir;

use crate::made_up::{assert_refused, logits, merges, open, truncate, vocab};
use crate::tiny;

/// Writes the tiny model as GGUF: q and k with the two members of each rotary pair side by side.
fn write_gguf(file: &Path, changes: &[(&str, Value)]) -> Result<()> {
    let config = tiny::config();
    let text = |text: &str| Value::String(text.to_string());
    let texts = |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
    let merges = merges()
        .into_iter()
        .map(|(left, right)| format!("{left} {right}"))
        .collect();
    let mut metadata = HashMap::from([
        ("general.architecture", text("llama")),
        (
            "llama.block_count",
            Value::U32(config.num_hidden_layers as u32),
        ),
        (
            "llama.embedding_length",
            Value::U32(config.hidden_size as u32),
        ),
        (
            "llama.feed_forward_length",
            Value::U32(config.intermediate_size as u32),
        ),
        (
            "llama.attention.head_count",
            Value::U32(config.num_attention_heads as u32),
        ),
        (
            "llama.attention.head_count_kv",
            Value::U32(config.num_key_value_heads as u32),
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(config.rms_norm_eps as f32),
        ),
        ("llama.rope.freq_base", Value::F32(config.rope_theta)),
        ("llama.rope.dimension_count", Value::U32(8)),
        (
            "llama.context_length",
            Value::U32(config.max_position_embeddings as u32),
        ),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", texts(vocab())),
        ("tokenizer.ggml.merges", texts(merges)),
        ("tokenizer.ggml.eos_token_id", Value::U32(3)),
    ]);
    metadata.extend(changes.iter().cloned());

    let names = [
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers", "blk"),
    ];
    let mut tensors = vec![];
    for (name, mut weight) in tiny::weights(&config, DType::F32)? {
        for (projection, heads) in [("q_proj", 6), ("k_proj", 2)] {
            if name.contains(projection) {
                let (rows, size_in) = weight.dims2()?;
                weight = weight
                    .reshape((heads, 2, rows / heads / 2, size_in))?
                    .transpose(1, 2)?
                    .contiguous()?
                    .reshape((rows, size_in))?;
            }
        }
        let name = names
            .iter()
            .fold(name, |name, (hf, gguf)| name.replace(hf, gguf));
        tensors.push((name, QTensor::quantize(&weight, GgmlDType::F32)?));
    }
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    Ok(gguf_file::write(
        &mut File::create(file)?,
        &metadata,
        &tensors,
    )?)
}

#[test]
fn a_gguf_file_is_the_model_it_was() -> Result<()> {
    let folder = TempDir::new()?;
    let file = folder.path().join("tiny.gguf");
    write_gguf(&file, &[])?;
    let checkpoint = open(&file)?;
    let ids = checkpoint
        .tokenizer
        .encode("the hen27", false)
        .map_err(|error| anyhow!("{error}"))?;
    assert_eq!(ids.get_tokens(), ["the", "Ġ", "he", "n", "2", "7"]);
    assert_eq!(checkpoint.stop_tokens(), [3]);
    let expected = logits(tiny::weights(&tiny::config(), DType::F32)?, &tiny::config())?;
    let got = logits(checkpoint.weights, &checkpoint.config)?;
    Ok(tiny::assert_close(&got, &expected, 0., "logits")?)
}

#[test]
fn a_broken_gguf_file_is_refused_in_one_line_that_says_why() -> Result<()> {
    let folder = TempDir::new()?;
    let file = folder.path().join("tiny.gguf");
    let text = |text: &str| Value::String(text.to_string());
    let cases = [
        (
            "the architecture is qwen2",
            ("general.architecture", text("qwen2")),
        ),
        (
            "splits text by rule dbrx",
            ("tokenizer.ggml.pre", text("dbrx")),
        ),
        (
            "unsupported tokenizer model",
            ("tokenizer.ggml.model", text("llama")),
        ),
        (
            "rope.dimension_count is 4",
            ("llama.rope.dimension_count", Value::U32(4)),
        ),
        (
            "cannot find tensor info for blk.3",
            ("llama.block_count", Value::U32(4)),
        ),
    ];
    for (expected, change) in cases {
        write_gguf(&file, &[change])?;
        assert_refused(&file, expected);
    }

    write_gguf(&file, &[])?;
    truncate(&file)?;
    assert_refused(&file, "truncated: ");
    let bytes = fs::read(&file)?;
    fs::write(&file, &bytes[..200])?;
    assert_refused(&file, "truncated or not a GGUF file");
    fs::write(&file, "text")?;
    assert_refused(&file, "truncated or not a GGUF file");
    fs::remove_file(&file)?;
    assert_refused(&file, "does not exist");
    assert_refused(Path::new("hf:name"), "not of the form hf:ORG/NAME");
    Ok(())
}
