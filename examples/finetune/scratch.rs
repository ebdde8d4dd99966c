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
    check_memory(&config).context("--scratch")?;
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

/// Parameters of the largest model that is made: 16 GiB in f32, and training takes four times that or more.
const MOST_PARAMETERS: u128 = 1 << 32;

/// Numbers of its rotary tables at most, 1 GiB in f32.
const MOST_ROTARY: usize = 1 << 28;

/// Refuses a model that no memory holds, where making it would end the process.
fn check_memory(config: &Config) -> Result<()> {
    let parameters = parameters(config);
    ensure!(
        parameters <= MOST_PARAMETERS,
        "a model of at most {MOST_PARAMETERS} parameters is made, got {parameters}; lower --vocab, --layers, --hidden or --ffn"
    );
    let (positions, head_dim) = (
        config.max_position_embeddings,
        config.hidden_size / config.num_attention_heads,
    );
    ensure!(
        positions * head_dim <= MOST_ROTARY,
        "positions times the size of a head must be at most {MOST_ROTARY}, got {positions} x {head_dim}; lower --positions"
    );
    Ok(())
}

/// Numbers in all weights, without making a list of them.
pub fn parameters(config: &Config) -> u128 {
    let [hidden, ffn, vocab, layers] = [
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.num_hidden_layers,
    ]
    .map(|size| size as u128);
    let kv = (config.hidden_size / config.num_attention_heads * config.num_key_value_heads) as u128;
    let of_layer = hidden * (2 * hidden + 2 * kv + 3 * ffn + 2);
    vocab * hidden + layers * of_layer + hidden
}

/// The usual byte-level BPE: any text has tokens, and decoding gives it back to the byte.
fn train_tokenizer(vocab_size: usize, texts: &[PathBuf]) -> Result<Tokenizer> {
    let alphabet = ByteLevel::alphabet();
    ensure!(
        vocab_size > alphabet.len(),
        "--vocab must be above {}, one token for each byte and {END_OF_TEXT}, got {vocab_size}",
        alphabet.len()
    );
    let mut bytes = 0;
    for text in texts {
        // The tokenizer's own error does not name it.
        let text =
            fs::read_to_string(text).with_context(|| format!("cannot read {}", text.display()))?;
        bytes += text.len();
    }
    // The trainer asks for all the memory of its vocabulary at once. No text makes more tokens: each is two neighbours
    // that become one.
    let most = alphabet.len() + 1 + bytes;
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size.min(most))
        .initial_alphabet(alphabet.into_iter().collect())
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .show_progress(false)
        .build();
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(byte_level))
        .with_decoder(Some(byte_level));
    let files = texts
        .iter()
        .map(|text| text.display().to_string())
        .collect();
    tokenizer
        .train_from_files(&mut TrainerWrapper::from(trainer), files)
        .map_err(|error| anyhow!("cannot train the tokenizer: {error}"))?;
    Ok(tokenizer)
}
