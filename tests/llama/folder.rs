//! Hugging Face folders, whole and broken.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow};
use candle_core::{DType, safetensors};
use candle_transformers::models::llama::Config;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::made_up::{assert_refused, logits, open, tokenizer, truncate};
use crate::tiny;

fn config_json() -> Json {
    let config = tiny::config();
    json!({
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": true,
        "vocab_size": config.vocab_size,
    })
}

/// A folder with the tiny model in two files.
fn folder() -> Result<TempDir> {
    let folder = TempDir::new()?;
    fs::write(folder.path().join("config.json"), config_json().to_string())?;
    tokenizer()?
        .save(folder.path().join("tokenizer.json"), false)
        .map_err(|error| anyhow!("{error}"))?;
    let mut files = [HashMap::new(), HashMap::new()];
    let mut weight_map = serde_json::Map::new();
    for (i, (name, weight)) in tiny::weights(&tiny::config(), DType::F32)?
        .into_iter()
        .enumerate()
    {
        weight_map.insert(name.clone(), json!(part(i % 2)));
        files[i % 2].insert(name, weight);
    }
    for (i, weights) in files.iter().enumerate() {
        safetensors::save(weights, folder.path().join(part(i)))?;
    }
    let index = json!({ "weight_map": weight_map });
    fs::write(
        folder.path().join("model.safetensors.index.json"),
        index.to_string(),
    )?;
    Ok(folder)
}

fn part(i: usize) -> String {
    format!("model-0000{}-of-00002.safetensors", i + 1)
}

#[test]
fn a_folder_in_several_files_is_the_model_it_was() -> Result<()> {
    let folder = folder()?;
    let checkpoint = open(folder.path())?;
    let ids = checkpoint
        .tokenizer
        .encode("the hen", false)
        .map_err(|error| anyhow!("{error}"))?;
    assert_eq!(ids.get_tokens(), ["the", "Ġ", "he", "n"]);
    assert!(checkpoint.stop_tokens().is_empty());
    let expected = logits(tiny::weights(&tiny::config(), DType::F32)?, &tiny::config())?;
    tiny::assert_close(
        &logits(checkpoint.weights, &checkpoint.config)?,
        &expected,
        0.,
        "logits",
    )
    .map_err(Into::into)
}

#[test]
fn both_spellings_of_rope_scaling_are_read() -> Result<()> {
    let scaling = json!({
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let scaled = Config {
        rope_scaling: Some(tiny::llama3_scaling()),
        ..tiny::config()
    };
    let expected = logits(tiny::weights(&scaled, DType::F32)?, &scaled)?;

    let mut older = config_json();
    older["rope_scaling"] = scaling.clone();
    let mut newer = config_json();
    newer["rope_parameters"] = scaling;
    newer["rope_parameters"]["rope_theta"] = json!(10_000.0);
    newer
        .as_object_mut()
        .expect("an object")
        .remove("rope_theta");
    for json in [older, newer] {
        let folder = folder()?;
        fs::write(folder.path().join("config.json"), json.to_string())?;
        let checkpoint = open(folder.path())?;
        let got = logits(checkpoint.weights, &checkpoint.config)?;
        tiny::assert_close(&got, &expected, 0., "logits")?;
    }
    Ok(())
}

/// Changes `config.json`.
fn set(folder: &Path, key: &str, value: Json) -> Result<()> {
    let file = folder.join("config.json");
    let mut json: Json = serde_json::from_str(&fs::read_to_string(&file)?)?;
    json[key] = value;
    Ok(fs::write(file, json.to_string())?)
}

#[test]
fn a_broken_folder_is_refused_in_one_line_that_says_why() -> Result<()> {
    type Break = fn(&Path) -> Result<()>;
    let cases: [(&str, Break); 17] = [
        ("cannot read", |path| {
            Ok(fs::remove_file(path.join("config.json"))?)
        }),
        ("not valid JSON", |path| truncate(&path.join("config.json"))),
        ("cannot read", |path| {
            Ok(fs::remove_file(path.join("tokenizer.json"))?)
        }),
        ("not a tokenizer", |path| {
            truncate(&path.join("tokenizer.json"))
        }),
        ("truncated or not safetensors; fetch it again", |path| {
            truncate(&path.join(part(0)))
        }),
        ("lists it; fetch it too", |path| {
            Ok(fs::remove_file(path.join(part(1)))?)
        }),
        ("neither model.safetensors nor", |path| {
            Ok(fs::remove_file(path.join("model.safetensors.index.json"))?)
        }),
        ("no weight_map", |path| {
            Ok(fs::write(path.join("model.safetensors.index.json"), "{}")?)
        }),
        ("is missing (expected shape", |path| {
            set(path, "num_hidden_layers", json!(4))
        }),
        ("the configuration asks for [81, 48]", |path| {
            set(path, "intermediate_size", json!(81))
        }),
        ("model_type is mistral", |path| {
            set(path, "model_type", json!("mistral"))
        }),
        ("hidden_act is gelu", |path| {
            set(path, "hidden_act", json!("gelu"))
        }),
        ("attention_bias is true", |path| {
            set(path, "attention_bias", json!(true))
        }),
        ("quantised", |path| {
            set(path, "quantization_config", json!({"bits": 4}))
        }),
        ("head_dim 16", |path| set(path, "head_dim", json!(16))),
        ("multiple of num_key_value_heads 4", |path| {
            set(path, "num_key_value_heads", json!(4))
        }),
        ("rope scaling yarn", |path| {
            set(path, "rope_scaling", json!({"rope_type": "yarn"}))
        }),
    ];
    for (expected, break_it) in cases {
        let folder = folder()?;
        break_it(folder.path())?;
        assert_refused(folder.path(), expected);
    }
    Ok(())
}

#[test]
fn a_tokenizer_of_another_model_is_refused() -> Result<()> {
    for (vocab_size, expected) in [
        (60, "the model only 60"),
        (100, "has only 64 tokens, the model 100"),
    ] {
        let folder = folder()?;
        set(folder.path(), "vocab_size", json!(vocab_size))?;
        let config = Config {
            vocab_size,
            ..tiny::config()
        };
        fs::remove_file(folder.path().join("model.safetensors.index.json"))?;
        let weights = tiny::weights(&config, DType::F32)?;
        safetensors::save(&weights, folder.path().join("model.safetensors"))?;
        assert_refused(folder.path(), expected);
    }
    Ok(())
}
