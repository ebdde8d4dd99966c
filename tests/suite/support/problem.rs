//! `Problem`: the numbers that describe one call, with builders for its options.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_flash_gqa::AttnOptions;

/// The shape of the alibi slopes, whose values [`Problem::slope`] has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Alibi {
    /// `(num_heads)`.
    PerHead,
    /// `(batch, num_heads)`.
    PerItem,
}

/// Shapes and options of one attention call.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_k: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub softmax_scale: Option<f32>,
    pub causal: bool,
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    pub softcap: Option<f32>,
    pub alibi: Option<Alibi>,
    pub deterministic: bool,
}

impl Problem {
    /// Full attention: `[seqlen_q, seqlen_k]`, `[num_heads, num_kv_heads]`.
    pub fn new(batch: usize, seqlens: [usize; 2], heads: [usize; 2], head_dim: usize) -> Self {
        Self {
            batch,
            seqlen_q: seqlens[0],
            seqlen_k: seqlens[1],
            num_heads: heads[0],
            num_kv_heads: heads[1],
            head_dim,
            softmax_scale: None,
            causal: false,
            window_left: None,
            window_right: None,
            softcap: None,
            alibi: None,
            deterministic: false,
        }
    }

    pub fn causal(self) -> Self {
        self.with_causal(true)
    }

    /// Asks for the same bits of dq on every run.
    pub fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        (self.window_left, self.window_right) = (left, right);
        self
    }

    pub fn scale(mut self, softmax_scale: f32) -> Self {
        self.softmax_scale = Some(softmax_scale);
        self
    }

    pub fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Slopes that differ from head to head.
    pub fn alibi(mut self) -> Self {
        self.alibi = Some(Alibi::PerHead);
        self
    }

    /// Slopes that differ from head to head and from item to item.
    pub fn alibi_of_batch(mut self) -> Self {
        self.alibi = Some(Alibi::PerItem);
        self
    }

    /// The slope of a head, some of them negative.
    pub fn slope(&self, batch: usize, head: usize) -> Option<f32> {
        let number = match self.alibi? {
            Alibi::PerHead => head,
            Alibi::PerItem => batch * self.num_heads + head,
        };
        Some(0.5 / (number + 1) as f32 - 0.05)
    }

    fn slopes(&self, device: &Device) -> Result<Option<Tensor>> {
        let items = match self.alibi {
            None => return Ok(None),
            Some(Alibi::PerHead) => 1,
            Some(Alibi::PerItem) => self.batch,
        };
        let count = items * self.num_heads;
        let slopes = (0..count).filter_map(|i| self.slope(i / self.num_heads, i % self.num_heads));
        // Behind numbers that are not theirs, as the slopes of one part of a model's heads are.
        const BEFORE: usize = 3;
        let storage: Vec<f32> = [f32::NAN; BEFORE].into_iter().chain(slopes).collect();
        let slopes = Tensor::from_vec(storage, BEFORE + count, device)?
            .narrow(0, BEFORE, count)?
            .reshape((items, self.num_heads))?;
        Ok(Some(match self.alibi {
            Some(Alibi::PerHead) => slopes.squeeze(0)?,
            _ => slopes,
        }))
    }

    pub fn options(&self, device: &Device) -> Result<AttnOptions> {
        Ok(AttnOptions {
            softmax_scale: self.softmax_scale,
            causal: self.causal,
            window_left: self.window_left,
            window_right: self.window_right,
            softcap: self.softcap,
            alibi_slopes: self.slopes(device)?,
            deterministic: self.deterministic,
        })
    }

    pub fn q_dims(&self) -> [usize; 4] {
        [self.batch, self.seqlen_q, self.num_heads, self.head_dim]
    }

    pub fn kv_dims(&self) -> [usize; 4] {
        [self.batch, self.seqlen_k, self.num_kv_heads, self.head_dim]
    }

    /// How far key `j` lies to the right of the key that row `i` is aligned with.
    pub fn offset(&self, i: usize, j: usize) -> i64 {
        j as i64 - (i as i64 + self.seqlen_k as i64 - self.seqlen_q as i64)
    }

    /// Whether row `i` sees key `j`.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        let offset = self.offset(i, j);
        let right_of = |limit: usize| i128::from(offset) > limit as i128;
        let left_of = |limit: usize| i128::from(offset) < -(limit as i128);
        !(self.causal && offset > 0
            || self.window_right.is_some_and(right_of)
            || self.window_left.is_some_and(left_of))
    }

    /// The keys that row `i` sees.
    pub fn visible(&self, i: usize) -> Vec<usize> {
        (0..self.seqlen_k).filter(|&j| self.sees(i, j)).collect()
    }
}
