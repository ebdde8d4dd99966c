//! Strided tensors as rows, and the query rows that share a tile.

use std::ops::Range;

use candle_core::Result;

use super::Input;
use super::buffer::{Tile, padded};
use super::element::Element;
use super::matmul::Rhs;
use super::simd::Real;
use crate::params::AttnParams;

/// A `(batch, seqlen, num_heads, head_dim)` tensor with any strides.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, E> {
    data: &'a [E],
    strides: [usize; 4],
    head_dim: usize,
}

impl<'a, E: Element> View<'a, E> {
    pub(crate) fn new((storage, layout): Input<'a>) -> Result<Self> {
        let (_, _, _, head_dim) = layout.shape().dims4()?;
        let strides = layout.stride();
        Ok(Self {
            // An empty tensor may start at the very end of its storage.
            data: &storage.as_slice::<E>()?[layout.start_offset()..],
            strides: [strides[0], strides[1], strides[2], strides[3]],
            head_dim,
        })
    }

    /// Converts one row to the accumulation type.
    #[inline(always)]
    pub(crate) fn load(&self, batch: usize, position: usize, head: usize, out: &mut [E::Acc]) {
        let [batch_stride, seqlen_stride, head_stride, stride] = self.strides;
        let start = batch * batch_stride + position * seqlen_stride + head * head_stride;
        if stride == 1 {
            E::widen(&self.data[start..][..self.head_dim], out);
        } else {
            for (d, out) in out.iter_mut().enumerate() {
                *out = self.data[start + d * stride].to_acc();
            }
        }
    }

    /// The rows of `positions` of one head, followed by zeros up to whole vectors of the accumulation
    /// type: in place where they lie so, else copied into `staging`, whose padding holds zeros.
    #[inline(always)]
    pub(crate) fn rows<'b>(
        &self,
        batch: usize,
        positions: Range<usize>,
        head: usize,
        staging: &'b mut Tile<E>,
    ) -> Rhs<'b, E>
    where
        'a: 'b,
    {
        let [batch_stride, seqlen_stride, head_stride, stride] = self.strides;
        let start = batch * batch_stride + positions.start * seqlen_stride + head * head_stride;
        if stride == 1 && self.head_dim == padded::<E::Acc>(self.head_dim) {
            return Rhs {
                data: &self.data[start..],
                row_stride: seqlen_stride,
            };
        }
        for row in 0..positions.len() {
            let start = start + row * seqlen_stride;
            for (d, x) in staging.row_mut(row, self.head_dim).iter_mut().enumerate() {
                *x = self.data[start + d * stride];
            }
        }
        staging.rhs(0, 0)
    }

    /// Converts the rows of `positions` of one head, one below the other.
    #[inline(always)]
    pub(crate) fn load_tile(
        &self,
        batch: usize,
        positions: Range<usize>,
        head: usize,
        tile: &mut Tile<E::Acc>,
    ) {
        for (row, position) in positions.enumerate() {
            self.load(batch, position, head, tile.row_mut(row, self.head_dim));
        }
    }
}

/// The query rows of one tile: `positions` x `heads`, the heads of a position side by side.
///
/// All heads belong to the group of one key/value head, so the tile's rows share its keys; rows that
/// see the same keys are neighbours, so masks are ranges of rows.
#[derive(Clone, Debug)]
pub(crate) struct RowTile {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) positions: Range<usize>,
    pub(crate) heads: Range<usize>,
}

impl RowTile {
    pub(crate) fn rows(&self) -> usize {
        self.positions.len() * self.heads.len()
    }

    /// (position, head) of a row.
    pub(crate) fn row(&self, row: usize) -> (usize, usize) {
        (
            self.positions.start + row / self.heads.len(),
            self.heads.start + row % self.heads.len(),
        )
    }

    /// The rows of those of `positions` that are in the tile.
    pub(crate) fn rows_of_positions(&self, positions: Range<usize>) -> Range<usize> {
        let row = |position: usize| {
            (position.clamp(self.positions.start, self.positions.end) - self.positions.start)
                * self.heads.len()
        };
        row(positions.start)..row(positions.end)
    }

    /// The positions that the rows in `rows` belong to.
    pub(crate) fn positions_of_rows(&self, rows: Range<usize>) -> Range<usize> {
        let heads = self.heads.len();
        self.positions.start + rows.start / heads..self.positions.start + rows.end.div_ceil(heads)
    }
}

/// How the query rows are cut into tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTiling {
    seqlen_q: usize,
    num_kv_heads: usize,
    group_size: usize,
    /// Heads of a group in one tile; the last block of a group may hold fewer.
    heads: usize,
    pub(crate) head_blocks: usize,
    positions: usize,
    pub(crate) m_tiles: usize,
}

impl RowTiling {
    /// Tiles of at most `tile_m` rows, all heads of a group together where they fit.
    pub(crate) fn new(params: &AttnParams, tile_m: usize) -> Self {
        let group_size = params.group_size();
        let head_blocks = group_size.div_ceil(tile_m);
        let heads = group_size.div_ceil(head_blocks);
        let max_positions = tile_m / heads;
        let m_tiles = params.seqlen_q.div_ceil(max_positions);
        Self {
            seqlen_q: params.seqlen_q,
            num_kv_heads: params.num_kv_heads,
            group_size,
            heads,
            head_blocks,
            // Tiles of equal size: 100 positions are 50 and 50, not 64 and 36.
            positions: params.seqlen_q.div_ceil(m_tiles.max(1)),
            m_tiles,
        }
    }

    /// Rows in the largest tile.
    pub(crate) fn tile_m(&self) -> usize {
        self.positions * self.heads
    }

    pub(crate) fn tile(
        &self,
        batch: usize,
        kv_head: usize,
        head_block: usize,
        m_tile: usize,
    ) -> RowTile {
        let first_head = kv_head * self.group_size + head_block * self.heads;
        let last_head = (first_head + self.heads).min((kv_head + 1) * self.group_size);
        let first = m_tile * self.positions;
        RowTile {
            batch,
            kv_head,
            positions: first.min(self.seqlen_q)..(first + self.positions).min(self.seqlen_q),
            heads: first_head..last_head,
        }
    }

    /// The tile of an index below `batch * num_kv_heads * head_blocks * m_tiles`. The last query
    /// positions come first: in a causal problem they have the most keys.
    pub(crate) fn longest_first(&self, batch: usize, index: usize) -> RowTile {
        let (index, head_block) = (index / self.head_blocks, index % self.head_blocks);
        let kv_heads = batch * self.num_kv_heads;
        let (batch, kv_head) = self.batch_and_kv_head(index % kv_heads);
        self.tile(
            batch,
            kv_head,
            head_block,
            self.m_tiles - 1 - index / kv_heads,
        )
    }

    /// The m tiles that hold at least one of `positions`.
    pub(crate) fn m_tiles_of(&self, positions: Range<usize>) -> Range<usize> {
        if positions.is_empty() {
            return 0..0;
        }
        positions.start / self.positions..positions.end.div_ceil(self.positions)
    }

    /// (batch, kv_head) of an index below `batch * num_kv_heads`.
    pub(crate) fn batch_and_kv_head(&self, index: usize) -> (usize, usize) {
        (index / self.num_kv_heads, index % self.num_kv_heads)
    }
}

/// The numbers by which scores are scaled, in base 2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaling<T> {
    /// Factor on q before the product with k.
    pub(crate) q: T,
    /// With softcap: the factor on `tanh(q * q_factor · k)`.
    pub(crate) softcap: Option<T>,
    /// Factor on `dscoresᵀ · (q * q_factor)` that gives dk.
    pub(crate) dk: T,
    /// Factor on `dscores · k` that gives dq.
    pub(crate) dq: T,
}

impl<T: Real> Scaling<T> {
    /// Without softcap a product of scaled q and k is the score times log2(e); with it, the argument
    /// of tanh. The chain rule gives the factors of dk and dq.
    pub(crate) fn new(params: &AttnParams) -> Self {
        let scale = params.softmax_scale;
        let log2_e = std::f64::consts::LOG2_E;
        let (q, dk) = match params.softcap {
            None => (scale * log2_e, 1. / log2_e),
            Some(cap) => (scale / cap, cap),
        };
        Self {
            q: T::from_f64(q),
            softcap: params.softcap.map(|cap| T::from_f64(cap * log2_e)),
            dk: T::from_f64(dk),
            dq: T::from_f64(scale),
        }
    }
}

/// Alibi for the rows of a tile: `bias = -slope * |aligned key - key|`, in base 2.
pub(crate) struct Alibi<T> {
    /// The negative slope of each row, times log2(e).
    pub(crate) neg_slope: Vec<T>,
    /// The key that each row is aligned with, relative to the start of a key tile.
    pub(crate) aligned_key: Vec<T>,
}

impl<T: Real> Alibi<T> {
    pub(crate) fn new(tile_m: usize) -> Self {
        Self {
            neg_slope: vec![T::ZERO; padded::<T>(tile_m)],
            aligned_key: vec![T::ZERO; padded::<T>(tile_m)],
        }
    }

    /// Fills in, from `first_row` on, the slopes of a tile's rows and their keys as seen from key
    /// `first_key`.
    pub(crate) fn set(
        &mut self,
        params: &AttnParams,
        slopes: &[f32],
        tile: &RowTile,
        first_row: usize,
        first_key: usize,
    ) {
        for row in 0..tile.rows() {
            let (position, head) = tile.row(row);
            let slope = f64::from(slopes[tile.batch * params.num_heads + head]);
            self.neg_slope[first_row + row] = T::from_f64(-slope * std::f64::consts::LOG2_E);
            let aligned = (position + params.seqlen_k) as i64 - params.seqlen_q as i64;
            self.aligned_key[first_row + row] = T::from_f64((aligned - first_key as i64) as f64);
        }
    }
}
