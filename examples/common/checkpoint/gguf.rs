//! A GGUF file: configuration, tokenizer and (usually quantised) weights in one.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::{Config, LlamaEosToks};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use super::{Checkpoint, config, first_line};

/// GGUF name and Hugging Face name of each weight of a block.
const BLOCK_NAMES: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Reads the whole file, dequantised to `dtype`.
pub fn load(path: &Path, dtype: DType, device: &Device) -> Result<Checkpoint> {
    read(path, dtype, device).with_context(|| path.display().to_string())
}

fn read(path: &Path, dtype: DType, device: &Device) -> Result<Checkpoint> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut content = Content::read(&mut reader).map_err(|error| {
        let error = first_line(error);
        anyhow!("truncated or not a GGUF file ({error}); fetch it again, or give the folder of a safetensors model")
    })?;
    check_length(&content, reader.seek(std::io::SeekFrom::End(0))?)?;
    let config = read_config(&content)?;
    let weights = read_weights(&content, &mut reader, &config, dtype, device)?;
    let tokenizer = read_tokenizer(&mut content)?;
    Ok(Checkpoint {
        config,
        tokenizer,
        weights,
    })
}

/// Compares the file with the end of its last tensor.
fn check_length(content: &Content, file_bytes: u64) -> Result<()> {
    let end_of_tensors = content.tensor_infos.values().map(|info| {
        let blocks = info.shape.elem_count() / info.ggml_dtype.block_size();
        info.offset
            .saturating_add((blocks * info.ggml_dtype.type_size()) as u64)
    });
    let expected = content
        .tensor_data_offset
        .saturating_add(end_of_tensors.max().unwrap_or(0));
    ensure!(
        file_bytes >= expected,
        "truncated: {file_bytes} bytes of {expected}; fetch it again"
    );
    Ok(())
}

fn read_config(content: &Content) -> Result<Config> {
    let architecture = metadata(content, "general.architecture")?.to_string()?;
    ensure!(
        architecture == "llama",
        "the architecture is {architecture}, this example runs llama only"
    );
    if content.tensor_infos.contains_key("rope_freqs.weight") {
        bail!(
            "it carries its own rope frequencies (Llama 3.1 and later); take the model's Hugging Face folder instead"
        );
    }
    let size = |key: &str| -> Result<usize> {
        let value = metadata(content, &format!("llama.{key}"))?;
        Ok(value.to_u64()? as usize)
    };
    let number =
        |key: &str| -> Result<f32> { Ok(metadata(content, &format!("llama.{key}"))?.to_f32()?) };

    let num_attention_heads = size("attention.head_count")?;
    let embedding = content.tensor_infos.get("token_embd.weight");
    let config = Config {
        hidden_size: size("embedding_length")?,
        intermediate_size: size("feed_forward_length")?,
        vocab_size: match embedding {
            Some(info) => info.shape.dims()[0],
            None => bail!("weight token_embd.weight is missing; fetch the file again"),
        },
        num_hidden_layers: size("block_count")?,
        num_attention_heads,
        num_key_value_heads: size("attention.head_count_kv").unwrap_or(num_attention_heads),
        use_flash_attn: false,
        rms_norm_eps: f64::from(number("attention.layer_norm_rms_epsilon")?),
        rope_theta: number("rope.freq_base").unwrap_or(10_000.),
        bos_token_id: token_id(content, "bos"),
        eos_token_id: end_tokens(content),
        rope_scaling: None,
        max_position_embeddings: size("context_length")?,
        tie_word_embeddings: !content.tensor_infos.contains_key("output.weight"),
    };
    config::check(&config)?;
    let head_dim = config.hidden_size / config.num_attention_heads;
    for key in ["attention.key_length", "rope.dimension_count"] {
        ensure!(
            size(key).unwrap_or(head_dim) == head_dim,
            "llama.{key} is {}, expected the head_dim {head_dim}",
            size(key)?
        );
    }
    Ok(config)
}

fn read_weights(
    content: &Content,
    reader: &mut BufReader<File>,
    config: &Config,
    dtype: DType,
    device: &Device,
) -> Result<HashMap<String, Tensor>> {
    let mut names = vec![
        (
            "token_embd.weight".to_string(),
            "model.embed_tokens.weight".to_string(),
        ),
        (
            "output_norm.weight".to_string(),
            "model.norm.weight".to_string(),
        ),
    ];
    if !config.tie_word_embeddings {
        names.push(("output.weight".to_string(), "lm_head.weight".to_string()));
    }
    for layer in 0..config.num_hidden_layers {
        names.extend(BLOCK_NAMES.map(|(gguf, hf)| {
            (
                format!("blk.{layer}.{gguf}.weight"),
                format!("model.layers.{layer}.{hf}.weight"),
            )
        }));
    }
    names
        .into_iter()
        .map(|(gguf, hf)| {
            let weight = content.tensor(reader, &gguf, device)?.dequantize(device)?;
            let weight = if gguf.ends_with("attn_q.weight") {
                halves_apart(&weight, config.num_attention_heads)?
            } else if gguf.ends_with("attn_k.weight") {
                halves_apart(&weight, config.num_key_value_heads)?
            } else {
                weight
            };
            Ok((hf, weight.to_dtype(dtype)?))
        })
        .collect()
}

/// Restores the order of the rows of q and k: GGUF has the two members of a rotary pair next to each
/// other (row `2j + s` of a head), candle's Llama half a head apart (row `s * head_dim / 2 + j`).
fn halves_apart(weight: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let (rows, size_in) = weight.dims2()?;
    weight
        .reshape((heads, rows / heads / 2, 2, size_in))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape((rows, size_in))
}

/// Builds the tokenizer, with the splitting of text that `tokenizer.ggml.pre` names. candle takes
/// names that it does not know for GPT-2 with a space put before the text, so they are set right here.
fn read_tokenizer(content: &mut Content) -> Result<Tokenizer> {
    let pre = content.metadata.get("tokenizer.ggml.pre");
    let pre = pre.map_or(Ok("gpt-2"), |pre| pre.to_string().map(String::as_str))?;
    let byte_level = ByteLevel::new(false, true, true);
    let split = match pre {
        "smollm" => Some(Sequence::new(vec![Digits::new(true).into(), byte_level.into()]).into()),
        "gpt-2" | "default" => Some(byte_level.into()),
        "qwen2" | "llama3" => None,
        "llama-bpe" => {
            let name = Value::String("llama3".to_string());
            content
                .metadata
                .insert("tokenizer.ggml.pre".to_string(), name);
            None
        }
        other => bail!(
            "the tokenizer splits text by rule {other}, which is not known here; take the model's Hugging Face folder instead"
        ),
    };
    let mut tokenizer = Tokenizer::from_gguf(content).map_err(|error| {
        let error = first_line(error);
        anyhow!("the tokenizer inside cannot be read ({error}); take the model's Hugging Face folder instead")
    })?;
    if let Some(split) = split {
        tokenizer.with_pre_tokenizer(Some::<tokenizers::PreTokenizerWrapper>(split));
    }
    Ok(tokenizer)
}

/// The tokens that end a text: `eos`, and `<|endoftext|>` where chat models have another `eos`.
fn end_tokens(content: &Content) -> Option<LlamaEosToks> {
    let tokens = content
        .metadata
        .get("tokenizer.ggml.tokens")?
        .to_vec()
        .ok()?;
    let end_of_text = tokens.iter().position(|token| {
        token
            .to_string()
            .is_ok_and(|token| token == "<|endoftext|>")
    });
    let ends = token_id(content, "eos")
        .into_iter()
        .chain(end_of_text.map(|id| id as u32));
    Some(LlamaEosToks::Multiple(ends.collect()))
}

fn token_id(content: &Content, name: &str) -> Option<u32> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    content.metadata.get(&key)?.to_u32().ok()
}

fn metadata<'a>(content: &'a Content, key: &str) -> Result<&'a Value> {
    content.metadata.get(key).with_context(|| {
        format!("no {key} in the file's metadata; it is not a language model or is damaged")
    })
}
