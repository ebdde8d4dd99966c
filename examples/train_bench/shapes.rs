//! The models that are timed, and what a step of them costs.

use std::fmt;

use candle_transformers::models::llama::Config;
use clap::ValueEnum;

use crate::model::Attention;

/// Shapes of models whose training others have published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// GPT3-1.3B: 24 blocks of 2048, 16 heads of 128
    #[value(name = "gpt3-1.3b")]
    Gpt3Xl,
    /// GPT3-2.7B: 32 blocks of 2560, 32 heads of 80
    #[value(name = "gpt3-2.7b")]
    Gpt3Large,
    /// Llama-3.2-1B: 16 blocks of 2048, 32/8 heads of 64
    #[value(name = "llama-3.2-1b")]
    Llama32,
    /// Small enough to try the command on a CPU
    #[value(name = "tiny")]
    Tiny,
}

impl Shape {
    /// As a Llama for sequences of `seqlen`. The GPT3 shapes get SwiGLU in place of an MLP of four times the
    /// width, so wide that a block has as many weights (8/3 of the hidden size, rounded to a multiple of 128),
    /// and tie their embeddings as GPT does.
    pub fn config(self, seqlen: usize) -> Config {
        let sizes = match self {
            Self::Gpt3Xl => Sizes {
                layers: 24,
                hidden: 2048,
                ffn: 5504,
                heads: [16, 16],
                vocab: 50304,
            },
            Self::Gpt3Large => Sizes {
                layers: 32,
                hidden: 2560,
                ffn: 6912,
                heads: [32, 32],
                vocab: 50304,
            },
            Self::Llama32 => Sizes {
                layers: 16,
                hidden: 2048,
                ffn: 8192,
                heads: [32, 8],
                vocab: 128256,
            },
            Self::Tiny => Sizes {
                layers: 2,
                hidden: 64,
                ffn: 192,
                heads: [4, 2],
                vocab: 512,
            },
        };
        Config {
            hidden_size: sizes.hidden,
            intermediate_size: sizes.ffn,
            vocab_size: sizes.vocab,
            num_hidden_layers: sizes.layers,
            num_attention_heads: sizes.heads[0],
            num_key_value_heads: sizes.heads[1],
            use_flash_attn: false,
            rms_norm_eps: 1e-5,
            rope_theta: 500_000.,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: seqlen,
            tie_word_embeddings: true,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_possible_value() {
            Some(value) => f.pad(value.get_name()),
            None => Ok(()),
        }
    }
}

/// What is timed.
#[derive(Clone, Copy)]
pub struct Case {
    pub shape: Shape,
    pub attention: Attention,
    pub seqlen: usize,
}

struct Sizes {
    layers: usize,
    hidden: usize,
    ffn: usize,
    /// Query heads, key/value heads.
    heads: [usize; 2],
    vocab: usize,
}

/// What [`operations`] counts, for those who read the figures.
pub const OPERATIONS: &str = "\
TFLOP/s is (6 * weights + 12 * layers * hidden_size * context / 2) * tokens/s / 1e12: weights are those of all matrices,
the embedding once; attention is halved since it is causal; what is computed again in the backward does not count.";

/// Floating-point operations of forward and backward on `tokens` tokens in sequences of `seqlen`:
/// `6 * weights * tokens + 12 * layers * hidden_size * seqlen * tokens / 2`.
///
/// `weights` are those of all matrices, the embedding once since it is the output projection too. The second
/// term is the attention's two products and their four in the backward, halved since it is causal; what flash
/// attention computes again in the backward does not count.
pub fn operations(config: &Config, weights: usize, seqlen: usize, tokens: usize) -> f64 {
    let [layers, hidden] = [config.num_hidden_layers, config.hidden_size].map(|x| x as f64);
    (6. * weights as f64 + 6. * layers * hidden * seqlen as f64) * tokens as f64
}

/// How fast a step was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    pub tokens_per_second: f64,
    pub tflops: f64,
}

impl Rates {
    /// Of a step on `[micro_batches, batch, seqlen]` tokens that took `seconds`.
    pub fn of(config: &Config, weights: usize, sizes: [usize; 3], seconds: f64) -> Self {
        let tokens = sizes.iter().product();
        let [.., seqlen] = sizes;
        Self {
            tokens_per_second: tokens as f64 / seconds,
            tflops: operations(config, weights, seqlen, tokens) / seconds / 1e12,
        }
    }
}
