//! `config.json` to candle-transformers' `Config`, refusing what its Llama does not compute.

use anyhow::{Context, Result, bail, ensure};
use candle_transformers::models::llama::{Config, LlamaConfig};
use serde_json::Value;

/// Reads the text of a `config.json`.
pub fn parse(text: &str) -> Result<Config> {
    let mut json: Value = serde_json::from_str(text).context("not valid JSON")?;
    refuse_other_models(&json)?;
    normalise_rope(&mut json)?;
    let head_dim = json["head_dim"].as_u64();
    let config: LlamaConfig =
        serde_json::from_value(json).context("not the configuration of a Llama")?;
    let config = config.into_config(false);
    check(&config)?;
    let derived = config.hidden_size / config.num_attention_heads;
    if let Some(head_dim) = head_dim {
        ensure!(
            head_dim == derived as u64,
            "head_dim {head_dim} is not hidden_size / num_attention_heads = {derived}, which candle's Llama assumes"
        );
    }
    Ok(config)
}

/// Of any dimension: products of two of them and positions then fit what they are counted in.
const LARGEST_SIZE: usize = 1 << 30;

/// Of blocks: each takes memory however narrow it is.
const MOST_LAYERS: usize = 1 << 12;

/// Checks the sizes that everything else divides by.
pub fn check(config: &Config) -> Result<()> {
    let Config {
        hidden_size,
        num_attention_heads: num_heads,
        num_key_value_heads: num_kv_heads,
        ..
    } = *config;
    for (name, size, most) in [
        ("hidden_size", hidden_size, LARGEST_SIZE),
        ("intermediate_size", config.intermediate_size, LARGEST_SIZE),
        ("vocab_size", config.vocab_size, LARGEST_SIZE),
        ("num_hidden_layers", config.num_hidden_layers, MOST_LAYERS),
        ("num_attention_heads", num_heads, LARGEST_SIZE),
        (
            "max_position_embeddings",
            config.max_position_embeddings,
            LARGEST_SIZE,
        ),
    ] {
        ensure!(size <= most, "{name} must be at most {most}, got {size}");
    }
    ensure!(
        num_heads > 0 && hidden_size.is_multiple_of(2 * num_heads) && hidden_size > 0,
        "hidden_size {hidden_size} must be an even multiple of num_attention_heads {num_heads}"
    );
    ensure!(
        num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads),
        "num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}"
    );
    ensure!(
        config.vocab_size > 0 && config.max_position_embeddings > 0,
        "vocab_size and max_position_embeddings must be at least 1, got {} and {}",
        config.vocab_size,
        config.max_position_embeddings
    );
    Ok(())
}

/// Other architectures, and Llamas with parts that candle's does not have.
fn refuse_other_models(json: &Value) -> Result<()> {
    if let Some(model_type) = json["model_type"].as_str() {
        ensure!(
            model_type == "llama",
            "model_type is {model_type}, this example runs llama only"
        );
    }
    if let Some(act) = json["hidden_act"].as_str() {
        ensure!(act == "silu", "hidden_act is {act}, expected silu");
    }
    for bias in ["attention_bias", "mlp_bias"] {
        ensure!(
            json[bias] != Value::Bool(true),
            "{bias} is true, candle's Llama has no biases"
        );
    }
    if !json["quantization_config"].is_null() {
        bail!(
            "the weights are quantised (quantization_config); take the unquantised model or a GGUF file"
        );
    }
    Ok(())
}

/// Moves newer files' `rope_parameters` to where older ones have them, and leaves `rope_scaling` only
/// where it is the scaling of Llama 3.
fn normalise_rope(json: &mut Value) -> Result<()> {
    if let Some(parameters) = json.get("rope_parameters").cloned() {
        if !parameters["rope_theta"].is_null() {
            json["rope_theta"] = parameters["rope_theta"].clone();
        }
        json["rope_scaling"] = parameters;
    }
    let scaling = &json["rope_scaling"];
    let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str());
    match kind {
        Some("llama3") => Ok(()),
        None | Some("default") => {
            json["rope_scaling"] = Value::Null;
            Ok(())
        }
        Some(kind) => bail!("rope scaling {kind} is not known, expected llama3 or none"),
    }
}
