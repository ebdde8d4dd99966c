//! The figures of one run, as text or JSON.

use std::io::{self, Write};

use candle_core::utils::get_num_threads;
use serde_json::{Value, json};

use crate::args::Args;
use crate::checkpoint::Checkpoint;
use crate::model::Attention;
use crate::prompt::Prompt;

/// Everything that `--json` prints.
pub struct Report {
    header: Value,
    pub prefills: Vec<Prefill>,
    pub logits: Option<Logits>,
    pub decode: Option<Decode>,
}

/// One attention's pass over the prompt.
pub struct Prefill {
    pub attention: Attention,
    pub tokens: usize,
    pub seconds: f64,
    /// Resident bytes before the pass and at most in it, where the system tells.
    pub memory_before: Option<u64>,
    pub memory_peak: Option<u64>,
}

/// The logits behind the prompt, one attention's against the other's.
pub struct Logits {
    pub largest: f32,
    pub largest_difference: f32,
}

/// The continuation.
pub struct Decode {
    pub attention: Attention,
    pub ids: Vec<u32>,
    pub text: String,
    pub seconds: f64,
}

impl Report {
    pub fn new(args: &Args, source: &str, checkpoint: &Checkpoint, prompt: &Prompt) -> Self {
        let config = &checkpoint.config;
        let parameters: usize = checkpoint
            .weights
            .values()
            .map(|weight| weight.elem_count())
            .sum();
        let header = json!({
            "model": source,
            "layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.hidden_size / config.num_attention_heads,
            "vocab_size": config.vocab_size,
            "parameters": parameters,
            "dtype": args.dtype().as_str(),
            "device": args.device.to_string(),
            "threads": get_num_threads(),
            "prompt": prompt.source,
            "prompt_tokens": prompt.tokens.len(),
            "chunk": args.chunk,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "seed": args.seed,
        });
        Self {
            header,
            prefills: vec![],
            logits: None,
            decode: None,
        }
    }

    pub fn write_header(&self, out: &mut impl Write) -> io::Result<()> {
        let of = |key: &str| match &self.header[key] {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        let parameters = self.header["parameters"].as_f64().unwrap_or_default() / 1e6;
        writeln!(out, "model    {}", of("model"))?;
        writeln!(
            out,
            "         {} layers, {} query and {} key/value heads of {}, {parameters:.1} M weights in {} on {}, {} threads",
            of("layers"),
            of("num_heads"),
            of("num_kv_heads"),
            of("head_dim"),
            of("dtype"),
            of("device"),
            of("threads"),
        )?;
        write!(
            out,
            "prompt   {} tokens of {}",
            of("prompt_tokens"),
            of("prompt")
        )?;
        match self.header["chunk"].as_u64() {
            Some(chunk) => writeln!(out, ", {chunk} at a time\n"),
            None => writeln!(out, "\n"),
        }
    }

    /// How the two attentions compare.
    pub fn write_comparison(&self, out: &mut impl Write) -> io::Result<()> {
        let ([flash, plain], Some(logits)) = (&self.prefills[..], &self.logits) else {
            return Ok(());
        };
        let times = plain.seconds / flash.seconds;
        write!(out, "         flash is {times:.1} times as fast")?;
        // Below that it is the allocator's habits that one would compare.
        const WORTH_COMPARING: u64 = 10_000_000;
        match (flash.memory_added(), plain.memory_added()) {
            (Some(flash), Some(plain)) if plain > WORTH_COMPARING => {
                write!(
                    out,
                    ", needs {:.0} % of the memory",
                    100. * flash as f64 / plain as f64
                )?;
            }
            _ => {}
        }
        writeln!(
            out,
            "; logits of up to {:.1} differ by at most {:.1e}",
            logits.largest, logits.largest_difference
        )
    }

    pub fn write_decode(&self, out: &mut impl Write) -> io::Result<()> {
        match &self.decode {
            Some(decode) if !decode.ids.is_empty() => writeln!(
                out,
                "\n\ndecode   {}  {} tokens in {:.2} s, {:.0} tokens/s",
                decode.attention,
                decode.ids.len(),
                decode.seconds,
                decode.tokens_per_second()
            ),
            _ => Ok(()),
        }
    }

    pub fn json(&self) -> Value {
        let mut json = self.header.clone();
        json["prefill"] = self.prefills.iter().map(Prefill::json).collect();
        json["largest_logit"] = json!(self.logits.as_ref().map(|logits| logits.largest));
        json["largest_logit_difference"] =
            json!(self.logits.as_ref().map(|logits| logits.largest_difference));
        json["decode"] = self.decode.as_ref().map(Decode::json).into();
        json
    }
}

impl Prefill {
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        write!(
            out,
            "prefill  {}  {:8.3} s {:8.0} tokens/s",
            self.attention,
            self.seconds,
            self.tokens_per_second()
        )?;
        match (self.memory_peak, self.memory_added()) {
            (Some(peak), Some(added)) => {
                writeln!(
                    out,
                    "   peak memory {:6.1} MB ({:+.1} MB)",
                    megabytes(peak),
                    megabytes(added)
                )
            }
            _ => writeln!(out, "   peak memory not known on this system"),
        }
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// What the pass itself needed at most.
    fn memory_added(&self) -> Option<u64> {
        Some(self.memory_peak?.saturating_sub(self.memory_before?))
    }

    fn json(&self) -> Value {
        json!({
            "attention": self.attention.to_string(),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second(),
            "memory_before_bytes": self.memory_before,
            "memory_peak_bytes": self.memory_peak,
        })
    }
}

impl Decode {
    fn tokens_per_second(&self) -> f64 {
        self.ids.len() as f64 / self.seconds
    }

    fn json(&self) -> Value {
        json!({
            "attention": self.attention.to_string(),
            "tokens": self.ids.len(),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second(),
            "ids": self.ids,
            "text": self.text,
        })
    }
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
