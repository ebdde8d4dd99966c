//! A new model: a byte-level BPE vocabulary learnt from the text, and random weights.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use candle_transformers::models::llama::{Config, LlamaEosToks};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::checkpoint::{Checkpoint, config};
use crate::options::Options;
use crate::weights;

const END_OF_TEXT: &str = "<|endoftext|>";

/// Trains the tokenizer on the texts and draws the weights.
pub fn checkpoint(options: &Options, texts: &[PathBuf]) -> Result<Checkpoint> {
    let size = &options.size;
    let mut config = Config {
        hidden_size: size.hidden,
        intermediate_size: size.ffn,
        vocab_size: size.vocab,
        num_hidden_layers: size.layers,
        num_attention_heads: size.heads,
        num_key_value_heads: size.kv_heads,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: size.positions,
        tie_word_embeddings: true,
    };
    config::check(&config).context("--scratch")?;
    let tokenizer = train_tokenizer(size.vocab, texts)?;
    let end_of_text = tokenizer.token_to_id(END_OF_TEXT);
    config.vocab_size = tokenizer.get_vocab_size(true);
    config.bos_token_id = end_of_text;
    config.eos_token_id = end_of_text.map(LlamaEosToks::Single);
    let weights = weights::random(&config, options.seed)?;
    Ok(Checkpoint {
        config,
        tokenizer,
        weights,
    })
}

/// The usual byte-level BPE: any text has tokens, and decoding gives it back to the byte.
fn train_tokenizer(vocab_size: usize, texts: &[PathBuf]) -> Result<Tokenizer> {
    let alphabet = ByteLevel::alphabet();
    ensure!(
        vocab_size > alphabet.len(),
        "--vocab must be above {}, one token for each byte and {END_OF_TEXT}, got {vocab_size}",
        alphabet.len()
    );
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .initial_alphabet(alphabet.into_iter().collect())
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .show_progress(false)
        .build();
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(byte_level))
        .with_decoder(Some(byte_level));
    for text in texts {
        // The tokenizer's own error does not name it.
        fs::read_to_string(text).with_context(|| format!("cannot read {}", text.display()))?;
    }
    let files = texts
        .iter()
        .map(|text| text.display().to_string())
        .collect();
    tokenizer
        .train_from_files(&mut TrainerWrapper::from(trainer), files)
        .map_err(|error| anyhow!("cannot train the tokenizer: {error}"))?;
    Ok(tokenizer)
}
