//! What is timed.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use clap::ValueEnum;

#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_k: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub causal: bool,
    pub backward: bool,
}

impl Row {
    fn square(
        batch: usize,
        seqlen: usize,
        heads: [usize; 2],
        head_dim: usize,
        causal: bool,
    ) -> Self {
        Self {
            batch,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            num_heads: heads[0],
            num_kv_heads: heads[1],
            head_dim,
            causal,
            backward: seqlen <= 32768,
        }
    }

    fn decode(batch: usize, keys: usize) -> Self {
        Self {
            seqlen_q: 1,
            backward: false,
            ..Self::square(batch, keys, [32, 8], 128, false)
        }
    }

    /// Floating-point operations of the forward.
    pub fn operations(&self) -> f64 {
        let pairs = (self.batch * self.num_heads * self.seqlen_q) as f64 * self.seqlen_k as f64;
        let masked = if self.causal && self.seqlen_q > 1 {
            0.5
        } else {
            1.
        };
        4. * pairs * self.head_dim as f64 * masked
    }

    /// Whether its time is that of the call alone.
    pub fn is_tiny(&self) -> bool {
        self.seqlen_q.max(self.seqlen_k) <= 16
    }

    pub fn kv_bytes(&self) -> f64 {
        (2 * 2 * self.batch * self.num_kv_heads * self.seqlen_k * self.head_dim) as f64
    }
}

/// Sets of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Rows {
    Hd64,
    Hd128,
    Hd256,
    Gqa,
    Decode,
    Tiny,
}

/// The rows of the sets, those with `length` keys alone where it is given.
pub fn chosen(sets: &[Rows], length: Option<usize>) -> Result<Vec<Row>> {
    let all: Vec<Row> = sets.iter().flat_map(|&set| rows(set)).collect();
    let Some(length) = length else {
        return Ok(all);
    };
    let chosen: Vec<Row> = all
        .iter()
        .copied()
        .filter(|row| row.seqlen_k == length)
        .collect();
    let lengths: BTreeSet<usize> = all.iter().map(|row| row.seqlen_k).collect();
    ensure!(
        !chosen.is_empty(),
        "--length {length}: no row has that many keys, expected one of {lengths:?}"
    );
    Ok(chosen)
}

fn rows(set: Rows) -> Vec<Row> {
    let lengths = |head_dim: usize, lengths: &[usize]| {
        let heads = 2048 / head_dim;
        let both = [false, true].into_iter();
        both.flat_map(|causal| {
            lengths.iter().map(move |&length| {
                Row::square(16384 / length, length, [heads; 2], head_dim, causal)
            })
        })
        .collect()
    };
    match set {
        Rows::Hd64 => lengths(64, &[512, 1024, 2048, 4096, 8192, 16384]),
        Rows::Hd128 => lengths(128, &[512, 1024, 2048, 4096, 8192, 16384]),
        Rows::Hd256 => lengths(256, &[2048, 8192, 16384]),
        Rows::Gqa => vec![
            Row::square(4, 4096, [9, 3], 64, true),
            Row::square(4, 4096, [32, 8], 64, true),
            Row::square(8, 2048, [32, 8], 128, true),
            Row::square(2, 8192, [32, 8], 128, true),
            Row::square(2, 8192, [32, 1], 128, true),
            Row::square(2, 8192, [64, 8], 128, true),
            Row::square(1, 32768, [32, 8], 128, true),
            Row::square(1, 131072, [32, 8], 128, true),
        ],
        Rows::Decode => [
            (1, 1024),
            (1, 8192),
            (1, 65536),
            (16, 8192),
            (64, 8192),
            (128, 2048),
        ]
        .map(|(batch, keys)| Row::decode(batch, keys))
        .to_vec(),
        Rows::Tiny => vec![Row::square(1, 16, [8, 8], 64, true)],
    }
}
